"""What a clean stream leaves behind, and the state at any block edge in it."""

import flax.struct
import jax.numpy as jnp
from jax import Array

from diffjax.kernels.precision import einsum
from diffjax.kernels.ssd_stream import Stream
from diffjax.kernels.tokens import by_chunk


@flax.struct.dataclass
class Boundary:
    """What a clean stream leaves behind for frontiers: the state at every block edge, stored or recoverable.

    states  [B, C+1, H, P, N]  at the starts of the C chunks, and after the last token
    reset   [B, n+1] bool      block k starts a document, so that the state at its left edge is 0
    stream  Stream or None     the tokens, from which a chunk's state is advanced to an edge inside the chunk; None
                               where every block edge is a chunk start
    """

    states: Array
    reset: Array
    stream: Stream | None = None
    block_size: int = flax.struct.field(pytree_node=False, default=1)
    chunk: int = flax.struct.field(pytree_node=False, default=1)


def states_at(boundary: Boundary, index: Array | None = None) -> Array:
    """The states at the left edges of blocks `index` [B, F] int32, or of all blocks 0..n.

    Returns [B, F, H, P, N] in at least float32: 0 where the block starts a document. One product over the tokens of one
    chunk for each edge that is no chunk start: 2 Q N P FLOP a head, 4 N P bytes written.
    """
    if index is None:
        states = _all_edges(boundary) if boundary.stream is not None else _every_chunk_per_block(boundary)
        reset = boundary.reset
    else:
        token = index * boundary.block_size
        if boundary.stream is not None:
            states = _edges_at(boundary, token)
        else:
            states = jnp.take_along_axis(boundary.states, _expand(token // boundary.chunk, 5), axis=1)
        reset = jnp.take_along_axis(boundary.reset, index, axis=1)
    return jnp.where(_expand(reset, 5), 0, states)


def final_state(boundary: Boundary) -> Array:
    """The state after the stream's last token, [B, H, P, N]: what the next call takes as `initial_state`."""
    return boundary.states[:, -1]


def _every_chunk_per_block(boundary: Boundary) -> Array:
    return boundary.states[:, :: boundary.block_size // boundary.chunk][:, : boundary.reset.shape[1]]


def _all_edges(boundary: Boundary) -> Array:
    """The stored state where an edge is a chunk's start; the others advance it by the chunk's earlier tokens."""
    edges, per_chunk = boundary.reset.shape[1], boundary.chunk // boundary.block_size
    every_edge = lambda array: None if array is None else jnp.repeat(by_chunk(array, boundary.chunk), per_chunk, axis=1)
    stream = Stream(*(every_edge(array) for array in boundary.stream))
    chunks = boundary.states.shape[1] - 1
    tokens = jnp.tile(jnp.arange(per_chunk) * boundary.block_size, chunks)
    before = jnp.repeat(boundary.states[:, :-1], per_chunk, axis=1)
    states = _advance(before, stream, jnp.broadcast_to(tokens, before.shape[:2]))
    return jnp.concatenate([states, boundary.states[:, -1:]], axis=1)[:, :edges]


def _edges_at(boundary: Boundary, token: Array) -> Array:
    """States just before tokens `token` [B, F], which lie inside chunks; an edge behind the last chunk is its end."""
    last = boundary.states.shape[1] - 2
    chunk = token // boundary.chunk
    take = lambda array, index: jnp.take_along_axis(array, _expand(index, array.ndim), axis=1)
    of_chunk = lambda array: None if array is None else take(by_chunk(array, boundary.chunk), jnp.minimum(chunk, last))
    stream = Stream(*(of_chunk(array) for array in boundary.stream))
    return _advance(take(boundary.states, chunk), stream, token % boundary.chunk)


def _advance(states: Array, stream: Stream, tokens: Array) -> Array:
    """Advance chunk-start states [B, F, H, P, N] by the first `tokens` [B, F] of their chunks, each a `stream` row."""
    x, dt, cum, count, Bm = stream
    groups = Bm.shape[3]
    last = jnp.maximum(tokens - 1, 0)[..., None]
    read = jnp.arange(x.shape[2]) < tokens[..., None]  # [B, F, Q]
    cum_last = jnp.take_along_axis(cum, last[..., None], axis=2)  # [B, F, 1, H]
    kept = jnp.exp(cum_last[:, :, 0])
    if count is not None:
        count_last = jnp.take_along_axis(count, last, axis=2)  # [B, F, 1]
        read = read & (count == count_last)
        kept = jnp.where(count_last == 0, kept, 0)
    exponent = cum_last - cum  # above 0 by rounding alone; jnp.minimum would halve the gradient where it is 0
    exponent = jnp.where(exponent > 0, 0, exponent)
    weight = jnp.exp(jnp.where(read[..., None], exponent, -jnp.inf))  # [B, F, Q, H]
    weighted = ((weight * dt)[..., None] * x).astype(x.dtype)
    weighted = weighted.reshape(*x.shape[:3], groups, x.shape[3] // groups, x.shape[4])
    added = einsum("bfqgrp,bfqgn->bfgrpn", weighted, Bm).reshape(states.shape)
    return jnp.where(_expand(tokens == 0, 5), states, kept[..., None, None] * states + added)


def _expand(array: Array, ndim: int) -> Array:
    return array.reshape(array.shape + (1,) * (ndim - array.ndim))
