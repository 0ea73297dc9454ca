"""SSD in chunks of matrix products, for every platform.

Inside a chunk, count_i is the number of document starts up to and including token i, and c_i the sum of the decays a of
the tokens j <= i of the same document. With S the state at the chunk's start:

    y_i = sum_{j<=i, count_j=count_i} exp(c_i - c_j) (Cm_i . Bm_j) u_j  +  [count_i = 0] exp(c_i) S Cm_i
    S'  = [count_Q = 0] exp(c_Q) S  +  sum_{j: count_j=count_Q} exp(c_Q - c_j) u_j (x) Bm_j

Exponents are masked before exp and never positive: masking afterwards overflows and turns gradients to NaN. Heads are
carried as [g, r], r heads for each of g groups.
"""

import jax
import jax.numpy as jnp
from jax import Array

from diffjax.kernels.precision import einsum
from diffjax.kernels.ssd_reference import scan_blocks

SMALLEST_CHUNK, LARGEST_CHUNK = 16, 64


def chunk_size(block_size: int) -> int:
    """Tokens per chunk: a multiple or a divisor of the block, so that edges are chunk starts or lie in one chunk."""
    if block_size < SMALLEST_CHUNK:
        return block_size * -(-SMALLEST_CHUNK // block_size)
    divisors = [q for q in range(SMALLEST_CHUNK, LARGEST_CHUNK + 1) if block_size % q == 0]
    return divisors[-1] if divisors else block_size


def scan(x, dt, A, Bm, Cm, block_size: int, initial_state, reset, chunk: int | None):
    """As `diffjax.kernels.ssd.ssd_scan`."""
    from diffjax.kernels.ssd import Boundary

    batch, length, heads, head_dim = x.shape
    groups, per_group, state = Bm.shape[2], heads // Bm.shape[2], Bm.shape[3]
    chunk = chunk or chunk_size(block_size)
    if chunk % block_size and block_size % chunk:
        raise ValueError(f"chunk {chunk} must be a multiple or a divisor of block_size {block_size}")
    chunks = -(-length // chunk)

    def split(array):  # [B, T, ...] -> [B, C, Q, ...]; pads have x = 0 and dt = 0, so they change no state
        pads = [(0, 0)] * array.ndim
        pads[1] = (0, chunks * chunk - length)
        return jnp.pad(array, pads).reshape(batch, chunks, chunk, *array.shape[2:])

    whole = length // block_size
    starts = jnp.repeat(reset, block_size, axis=1) & (jnp.arange((whole + 1) * block_size) % block_size == 0)
    count = jnp.cumsum(split(starts[:, :length].astype(jnp.int32)), axis=2)  # [B, C, Q]
    u = split((x * dt[..., None]).astype(x.dtype)).reshape(batch, chunks, chunk, groups, per_group, head_dim)
    cum = _sums_since_reset(split(dt * A), count)  # [B, C, Q, H]
    cum_grouped = cum.reshape(batch, chunks, chunk, groups, per_group)
    Bm, Cm = split(Bm), split(Cm)

    to_end = _decay(cum_grouped[:, :, -1:] - cum_grouped, (count == count[:, :, -1:])[..., None, None])
    added = einsum("bcqgrp,bcqgn->bcgrpn", u * to_end[..., None].astype(u.dtype), Bm)
    kept = jnp.where((count[:, :, -1] == 0)[..., None, None], jnp.exp(cum_grouped[:, :, -1]), 0)  # [B, C, g, r]

    def pass_on(state, chunk_update):
        kept, added = chunk_update
        return kept[..., None, None] * state + added, state

    initial = initial_state.reshape(batch, groups, per_group, head_dim, state).astype(added.dtype)
    last, before = jax.lax.scan(pass_on, initial, (jnp.moveaxis(kept, 1, 0), jnp.moveaxis(added, 1, 0)))
    before = jnp.moveaxis(before, 0, 1)  # [B, C, g, r, P, N]

    y = _within(u, cum_grouped, count, Bm, Cm, reverse=False)
    y = y + _from_state(before, cum_grouped, Cm, (count == 0)[..., None, None])
    y = y.reshape(batch, chunks * chunk, heads, head_dim)[:, :length].astype(x.dtype)
    states = jnp.concatenate([before, last[:, None]], axis=1).reshape(batch, chunks + 1, heads, head_dim, state)
    if block_size % chunk == 0:
        return y, Boundary(states, reset, block_size=block_size, chunk=chunk)
    u = u.reshape(batch, chunks, chunk, heads, head_dim)
    return y, Boundary(states, reset, u, cum, count, Bm, block_size=block_size, chunk=chunk)


def block(x, dt, A, Bm, Cm, seed, reverse: bool):
    """As `diffjax.kernels.ssd.ssd_block`; blocks longer than a chunk are scanned in chunks."""
    batch, frontiers, length, heads, head_dim = x.shape
    if chunk_size(length) < length:
        return scan_blocks(scan, x, dt, A, Bm, Cm, seed, reverse)
    groups = Bm.shape[3]
    grouped = lambda array, axis: array.reshape(*array.shape[:axis], groups, -1, *array.shape[axis + 1 :])
    u = grouped((x * dt[..., None]).astype(x.dtype), 3)
    cum = grouped(jax.lax.cumsum(dt * A, axis=2, reverse=reverse), 3)  # [B, F, G, g, r]
    y = _within(u, cum, None, Bm, Cm, reverse)
    if seed is not None:
        y = y + _from_state(grouped(seed, 2), cum, Cm, True)
    return y.reshape(x.shape).astype(x.dtype)


def all_edges(boundary) -> Array:
    """States at the left edges of blocks 0..n when several blocks share a chunk: [B, n+1, H, P, N], before resets.

    The edge at the start of a chunk is the stored state; the others advance it by the chunk's earlier tokens.
    """
    edges, per_chunk = boundary.reset.shape[1], boundary.chunk // boundary.block_size
    every_edge = lambda array: jnp.repeat(array, per_chunk, axis=1)
    tokens = jnp.tile(jnp.arange(per_chunk) * boundary.block_size, boundary.u.shape[1])
    stream = [every_edge(array) for array in (boundary.u, boundary.cum, boundary.count, boundary.Bm)]
    states = _advance(every_edge(boundary.states[:, :-1]), *stream, jnp.broadcast_to(tokens, stream[0].shape[:2]))
    return jnp.concatenate([states, boundary.states[:, -1:]], axis=1)[:, :edges]


def edges_at(boundary, token: Array) -> Array:
    """States just before tokens `token` [B, F] of the stream, which lie inside chunks: [B, F, H, P, N]."""
    take = lambda array, index: jnp.take_along_axis(
        array, index.reshape(*index.shape, *(1,) * (array.ndim - 2)), axis=1
    )
    chunk = token // boundary.chunk
    states = take(boundary.states, chunk)
    chunks = boundary.u.shape[1]
    if chunks == 0:
        return states
    arrays = (boundary.u, boundary.cum, boundary.count, boundary.Bm)
    stream = [take(array, jnp.minimum(chunk, chunks - 1)) for array in arrays]
    return _advance(states, *stream, token % boundary.chunk)


def _advance(states, u, cum, count, Bm, tokens) -> Array:
    """Advance chunk-start states [B, F, H, P, N] by the first `tokens` [B, F] of their chunks [B, F, Q, ...]."""
    groups = Bm.shape[3]
    last = jnp.maximum(tokens - 1, 0)[..., None]
    cum_last = jnp.take_along_axis(cum, last[..., None], axis=2)  # [B, F, 1, H]
    count_last = jnp.take_along_axis(count, last, axis=2)  # [B, F, 1]
    read = (jnp.arange(u.shape[2]) < tokens[..., None]) & (count == count_last)  # [B, F, Q]
    weight = _decay(cum_last - cum, read[..., None])  # [B, F, Q, H]
    weighted = (u * weight[..., None].astype(u.dtype)).reshape(*u.shape[:3], groups, u.shape[3] // groups, u.shape[-1])
    added = einsum("bfqgrp,bfqgn->bfgrpn", weighted, Bm).reshape(states.shape)
    kept = jnp.where(count_last == 0, jnp.exp(cum_last[:, :, 0]), 0)[..., None, None]
    return jnp.where((tokens == 0)[..., None, None, None], states, kept * states + added)


def _sums_since_reset(a, count) -> Array:
    """Inclusive sums of a [B, C, Q, H], new at every reset: one document's rounding never reaches the next."""
    order = jnp.arange(a.shape[2])
    read = (order[:, None] >= order) & (count[..., :, None] == count[..., None, :])
    return einsum("bcqk,bckh->bcqh", read.astype(a.dtype), a)


def _within(u, cum, count, Bm, Cm, reverse: bool) -> Array:
    """The part of y that comes from the chunk's own tokens: [B, C, Q, g, r, P]."""
    size = u.shape[2]
    order = jnp.arange(size)
    mask = order[:, None] <= order if reverse else order[:, None] >= order  # [Q, Q]
    if count is not None:
        mask = mask & (count[..., :, None] == count[..., None, :])
        mask = mask[:, :, None, None]
    cum = jnp.moveaxis(cum, 2, -1)  # [B, C, g, r, Q]
    decay = _decay(cum[..., :, None] - cum[..., None, :], mask)
    scores = einsum("bcqgn,bckgn->bcgqk", Cm, Bm)
    return einsum("bcgrqk,bckgrp->bcqgrp", (scores[:, :, :, None] * decay).astype(u.dtype), u)


def _from_state(state, cum, Cm, mask) -> Array:
    """The part of y that comes from the state at the chunk's start [B, C, g, r, P, N]: [B, C, Q, g, r, P]."""
    return _decay(cum, mask)[..., None] * einsum("bcqgn,bcgrpn->bcqgrp", Cm, state)


def _decay(exponent, mask) -> Array:
    """exp of a sum of decays, 0 where masked. A difference of rounded sums may rise above 0: it is cut there, with
    the gradient of the uncut difference."""
    exponent = exponent - jax.lax.stop_gradient(jnp.maximum(exponent, 0))
    return jnp.exp(jnp.where(mask, exponent, -jnp.inf))
