"""SSD in chunks of matrix products, for every platform: the six functions of `ssd_stream`.

Arrays stay in the order of tokens, [B, C, Q, g, r, P] with r heads for each of g groups: products with a state then
take them as they lie, and Bm, Cm are never repeated over heads. Pairs of a chunk's tokens are [B, C, g, r, Q, Q]. D is
the decay of pairs, M = (Cm . Bm) D what a chunk's own tokens are multiplied with. The backward pass computes both
again. Its gradient of the exponents is the difference of row and column sums of one matrix R: the shorter dy.y - du.u
rounds its two parts apart and then cancels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from diffjax.kernels.precision import einsum
from diffjax.kernels.ssd_stream import Stream
from diffjax.kernels.tokens import by_chunk, pad_tokens

SMALLEST_CHUNK, LARGEST_CHUNK = 16, 128  # what `chunk_size` aims at, at the least and at the most


def chunk_size(operation: str, block_size: int, head_dim: int, state: int) -> int:
    """Tokens per chunk: a divisor of the block or 2^r blocks, so that edges are chunk starts or lie in one chunk.

    Of these the one nearest to the square root of P N: a chunk's pairs, Q^2 numbers a head, then weigh as much as its
    state, P N (`scripts/bench_kernels.py` compares chunks). Blocks on their own share no chunk, unless they are tiny.
    """
    most = {"scan": LARGEST_CHUNK, "blocks": SMALLEST_CHUNK, "seeded blocks": block_size}[operation]
    aim = min(max(head_dim * state, SMALLEST_CHUNK**2), LARGEST_CHUNK**2)
    chunks = [q for q in range(1, block_size + 1) if block_size % q == 0]
    while chunks[-1] < most:
        chunks.append(2 * chunks[-1])
    return min(chunks, key=lambda q: (max(q * q / aim, aim / (q * q)), q))


def scan_forward(stream: Stream, Cm, initial, *, chunk: int, reverse: bool):
    s, Cm = _chunks(stream, chunk), by_chunk(Cm, chunk)
    kept, weight = _to_end(s, reverse)
    edges = _pass_on(initial, kept, _outer(_times(s.u, weight), s.Bm), reverse)
    M = _scores(Cm, s.Bm) * _decay(s.cum, s.cum, _mask(s, s, _order(chunk, reverse)))
    y = _apply(M, s.u) + _reading(s.cum, s.count)[..., None] * _read(Cm, _before(edges, s, reverse))
    return _tokens(y, stream.x), _in_order(edges, reverse)


def scan_backward(stream: Stream, Cm, states, dy, d_states, *, chunk: int, reverse: bool):
    s, shape = _chunks(stream, chunk), Cm.shape
    Cm, dy = by_chunk(Cm, chunk), _by_group(dy, s)
    kept, weight = _to_end(s, reverse)
    before = _before(_in_order(states, reverse), s, reverse)

    # The cotangent Z of the state after each chunk runs from the last chunk to the first.
    reading = _reading(s.cum, s.count)
    dy_read = _times(dy, reading)
    taken = _outer(dy_read, Cm) + _before(_in_order(d_states, reverse), s, reverse)
    d_edges = _pass_on(d_states[:, -1], kept, taken, not reverse)
    Z = _before(d_edges, s, not reverse)

    inside = _within_backward(Cm, s, s, dy, _mask(s, s, _order(chunk, reverse)))
    Z_Bm, state_Cm = _read(s.Bm, Z), _read(Cm, before)
    d_u = inside.u + weight[..., None] * Z_Bm
    d_Cm = inside.Cm + _read_back(dy_read, before)
    d_Bm = inside.Bm + _read_back(_times(s.u, weight), Z)
    fell = weight * _row_products(Z_Bm, s.u)  # what the fall of a token's input to the chunk's end contributes
    d_cum = inside.rows - inside.columns + reading * _row_products(state_Cm, dy) - fell
    last = 0 if reverse else -1
    d_cum = d_cum.at[:, :, last].add(jnp.sum(fell, axis=2) + kept * jnp.sum(Z * before, axis=(-2, -1)))
    d_initial = _in_order(d_edges, reverse)[:, 0]
    return _stream_gradient(stream, s, d_u, d_cum, d_Bm), d_Cm.reshape(shape).astype(Cm.dtype), d_initial


def blocks_forward(stream: Stream, Cm, *, chunk: int, reverse: bool):
    s = _chunks(stream, chunk)
    M = _scores(by_chunk(Cm, chunk), s.Bm) * _decay(s.cum, s.cum, _mask(s, s, _order(chunk, reverse)))
    return _tokens(_apply(M, s.u), stream.x)


def blocks_backward(stream: Stream, Cm, dy, *, chunk: int, reverse: bool):
    s = _chunks(stream, chunk)
    inside = _within_backward(by_chunk(Cm, chunk), s, s, _by_group(dy, s), _mask(s, s, _order(chunk, reverse)))
    d_stream = _stream_gradient(stream, s, inside.u, inside.rows - inside.columns, inside.Bm)
    return d_stream, _tokens(inside.Cm, Cm)


def frontiers_forward(own: Stream, Cm, reach, clean: Stream | None, states, *, chunk: int, block_size: int):
    o, c, Cm = _chunks(own, chunk), _chunks(clean, chunk), by_chunk(Cm, chunk)
    reach, before = _by_group(reach, o), _before(states, o, False)
    earlier, same = _frontier_masks(o, c, chunk, block_size)
    M_own = _scores(Cm, o.Bm) * _decay(o.cum, o.cum, same)
    y = _apply(M_own, o.u) + _reading(reach, o.count)[..., None] * _read(Cm, before)
    if clean is not None:
        y = y + _apply(_scores(Cm, c.Bm) * _decay(reach, c.cum, earlier), c.u)
    return _tokens(y, own.x)


def frontiers_backward(own: Stream, Cm, reach, clean: Stream | None, states, dy, *, chunk: int, block_size: int):
    o, c, shape = _chunks(own, chunk), _chunks(clean, chunk), Cm.shape
    Cm, reach_, dy, before = by_chunk(Cm, chunk), _by_group(reach, o), _by_group(dy, o), _before(states, o, False)
    earlier, same = _frontier_masks(o, c, chunk, block_size)
    inside = _within_backward(Cm, o, o, dy, same)
    reading = _reading(reach_, o.count)
    dy_read = _times(dy, reading)
    d_Cm = inside.Cm + _read_back(dy_read, before)
    d_reach = reading * _row_products(_read(Cm, before), dy)
    d_clean = None
    if clean is not None:
        outside = _within_backward(Cm, o._replace(cum=reach_), c, dy, earlier)
        d_Cm, d_reach = d_Cm + outside.Cm, d_reach + outside.rows
        d_clean = _stream_gradient(clean, c, outside.u, -outside.columns, outside.Bm)
    d_before = _outer(dy_read, Cm)
    d_states = pad_tokens(d_before.reshape(*d_before.shape[:2], *states.shape[2:]), states.shape[1])
    d_own = _stream_gradient(own, o, inside.u, inside.rows - inside.columns, inside.Bm)
    return d_own, d_Cm.reshape(shape).astype(Cm.dtype), _tokens(d_reach, reach), d_clean, d_states


class _Chunks(NamedTuple):
    """A stream by chunks and groups: x, u = dt x [B, C, Q, g, r, P]; dt, cum [B, C, Q, g, r]; count [B, C, Q] or None
    (one segment); Bm [B, C, Q, g, N]."""

    x: Array
    dt: Array
    cum: Array
    count: Array | None
    Bm: Array
    u: Array


def _chunks(stream: Stream | None, chunk: int) -> _Chunks | None:
    if stream is None:
        return None
    groups = stream.Bm.shape[2]
    by_group = lambda array: array.reshape(*array.shape[:3], groups, -1, *array.shape[4:])
    x, dt, cum = (by_group(by_chunk(array, chunk)) for array in (stream.x, stream.dt, stream.cum))
    count = None if stream.count is None else by_chunk(stream.count, chunk)
    return _Chunks(x, dt, cum, count, by_chunk(stream.Bm, chunk), _times(x, dt))


def _by_group(array: Array, s: _Chunks) -> Array:
    """[B, T, H, ...] -> [B, C, Q, g, r, ...], as `s` has them."""
    return array.reshape(*s.dt.shape, *array.shape[3:])


def _tokens(array: Array, like: Array) -> Array:
    """[B, C, Q, ...] -> [B, T, ...], the shape and dtype of `like`."""
    return array.reshape(like.shape).astype(like.dtype)


def _times(array: Array, weight: Array) -> Array:
    """[..., P] times [...], in the dtype of `array`."""
    return (array * weight[..., None]).astype(array.dtype)


def _pass_on(entering: Array, kept: Array, added: Array, reverse: bool) -> Array:
    """The states at the edges of chunks, in the order of tokens, [B, C+1, H, P, N]: `entering` [B, H, P, N] first
    (with reverse: last), every other one kept [B, C, g, r] times the one before it plus added [B, C, g, r, P, N]."""
    batch, chunks = added.shape[:2]
    kept, added = kept.reshape(batch, chunks, -1), added.reshape(batch, chunks, *entering.shape[1:])
    entering = entering.astype(added.dtype)
    edges = jnp.concatenate([added, entering[:, None]] if reverse else [entering[:, None], added], axis=1)
    at = lambda array, i: jax.lax.dynamic_index_in_dim(array, i, axis=1, keepdims=False)

    def step(i, carry):  # in place
        state, edges = carry
        i = chunks - 1 - i if reverse else i
        after = i if reverse else i + 1
        state = at(kept, i)[..., None, None] * state + at(edges, after)
        return state, jax.lax.dynamic_update_index_in_dim(edges, state, after, axis=1)

    return jax.lax.fori_loop(0, chunks, step, (entering, edges))[1]


def _before(edges: Array, s: _Chunks, reverse: bool) -> Array:
    """The states with which the scan comes to the chunks, of those at their edges: [B, C, g, r, P, N]."""
    chunks, heads = s.dt.shape[1], s.dt.shape[3:]
    edges = edges[:, 1:] if reverse else edges[:, :chunks]
    return edges.reshape(*edges.shape[:2], *heads, *edges.shape[3:])


def _in_order(states: Array, reverse: bool) -> Array:
    """From the order of tokens to that of processing, or back."""
    return jnp.flip(states, axis=1) if reverse else states


def _order(size: int, reverse: bool) -> np.ndarray:
    """[Q, Q]: token j is not after token i, in the direction of the scan."""
    order = np.arange(size)
    return order[:, None] <= order if reverse else order[:, None] >= order


def _mask(s: _Chunks, other: _Chunks, order) -> Array:
    """Which tokens j of `other` token i of `s` reads, to be broadcast over [B, C, g, r, Q, Q]."""
    if s.count is None:
        return jnp.asarray(order)
    return (order & (s.count[..., :, None] == other.count[..., None, :]))[:, :, None, None]


def _frontier_masks(own: _Chunks, clean: _Chunks | None, chunk: int, block_size: int) -> tuple[Array | None, Array]:
    """Clean tokens of earlier blocks of the same document; own tokens of the same block, up to itself."""
    block = np.arange(chunk) // block_size
    earlier = None if clean is None else _mask(own, clean, block[:, None] > block)
    return earlier, jnp.asarray(_order(chunk, False) & (block[:, None] == block))


def _decay(cum_i: Array, cum_j: Array, mask: Array) -> Array:
    """exp(cum_i - cum_j) where mask, else 0: [B, C, g, r, Q, Q]. A difference of rounded sums may rise above 0."""
    cum_i, cum_j = jnp.moveaxis(cum_i, 2, -1), jnp.moveaxis(cum_j, 2, -1)
    exponent = jnp.minimum(cum_i[..., :, None] - cum_j[..., None, :], 0)
    return jnp.exp(jnp.where(mask, exponent, -jnp.inf))


def _to_end(s: _Chunks, reverse: bool) -> tuple[Array, Array]:
    """What a state keeps over the chunk [B, C, g, r], and what a token's input keeps to its end [B, C, Q, g, r]."""
    end = slice(0, 1) if reverse else slice(-1, None)
    exponent = jnp.minimum(s.cum[:, :, end] - s.cum, 0)
    kept = jnp.exp(s.cum[:, :, end][:, :, 0])
    if s.count is None:
        return kept, jnp.exp(exponent)
    last = s.count[:, :, end]
    kept = jnp.where((last[:, :, 0] == 0)[..., None, None], kept, 0)
    return kept, jnp.exp(jnp.where((s.count == last)[..., None, None], exponent, -jnp.inf))


def _reading(cum: Array, count: Array | None) -> Array:
    """How much of the chunk's state each token reads: [B, C, Q, g, r]."""
    return jnp.exp(cum) if count is None else jnp.exp(jnp.where((count == 0)[..., None, None], cum, -jnp.inf))


def _scores(Cm: Array, Bm: Array) -> Array:
    """[B, C, g, 1, Q, Q], shared by the heads of a group."""
    return einsum("bcqgn,bckgn->bcgqk", Cm, Bm)[:, :, :, None]


def _apply(M: Array, u: Array) -> Array:
    return einsum("bcgrqk,bckgrp->bcqgrp", M.astype(u.dtype), u)


def _outer(u: Array, rows: Array) -> Array:
    """Sum over a chunk of u (x) rows [B, C, Q, g, N]: [B, C, g, r, P, N]."""
    return einsum("bcqgrp,bcqgn->bcgrpn", u, rows)


def _read(rows: Array, state: Array) -> Array:
    """Rows [B, C, Q, g, N] against states [B, C, g, r, P, N]: [B, C, Q, g, r, P]."""
    return einsum("bcqgn,bcgrpn->bcqgrp", rows, state)


def _read_back(u: Array, state: Array) -> Array:
    """The same with the other side of the states: [B, C, Q, g, N], summed over the heads of a group."""
    return einsum("bcqgrp,bcgrpn->bcqgn", u, state)


def _row_products(a: Array, b: Array) -> Array:
    """a . b over the last axis, in the dtype of a. Written as products: XLA's CPU reduction of `a * b`, with what made
    a and b drawn into it, takes several times as long."""
    return einsum("bcqgrp,bcqgrp->bcqgr", a, b)


class _Inside(NamedTuple):
    """Gradients of y = (Cm . Bm) D u: of u, Bm (the read tokens) and Cm; row and column sums of R, [B, C, Q, g, r]."""

    u: Array
    Bm: Array
    Cm: Array
    rows: Array
    columns: Array


def _within_backward(Cm: Array, own: _Chunks, other: _Chunks, dy: Array, mask: Array) -> _Inside:
    scores, D = _scores(Cm, other.Bm), _decay(own.cum, other.cum, mask)
    X = einsum("bcqgrp,bckgrp->bcgrqk", dy, other.u) * D
    R = jax.lax.optimization_barrier(X * scores)  # else XLA computes it in each of its two sums, slowly (CPU)
    d_scores = jnp.sum(X, axis=3).astype(Cm.dtype)
    return _Inside(
        u=einsum("bcgrqk,bcqgrp->bckgrp", (scores * D).astype(dy.dtype), dy),
        Bm=einsum("bcgqk,bcqgn->bckgn", d_scores, Cm),
        Cm=einsum("bcgqk,bckgn->bcqgn", d_scores, other.Bm),
        rows=jnp.moveaxis(jnp.sum(R, axis=-1), -1, 2),
        columns=jnp.moveaxis(jnp.sum(R, axis=-2), -1, 2),
    )


def _stream_gradient(stream: Stream, s: _Chunks, d_u: Array, d_cum: Array, d_Bm: Array) -> Stream:
    return Stream(
        x=_tokens(s.dt[..., None] * d_u, stream.x),
        dt=_tokens(_row_products(d_u, s.x), stream.dt),
        cum=_tokens(d_cum, stream.cum),
        count=None,
        Bm=_tokens(d_Bm, stream.Bm),
    )
