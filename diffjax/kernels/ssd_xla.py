"""SSD in chunks of matrix products, for every platform: the six functions of `ssd_stream`.

Inside, arrays are head-major, [B, C, g, r, Q, P] with r heads for each of g groups, so that every product is a batch of
plain ones and Bm, Cm are never repeated over heads. D is the decay of pairs, M = (Cm . Bm) D what a chunk's own tokens
are multiplied with. The backward pass computes both again. Its gradient of the exponents is the difference of row and
column sums of one matrix R: the shorter dy.y - du.u rounds its two parts apart and then cancels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from diffjax.kernels.precision import einsum
from diffjax.kernels.ssd_stream import Stream
from diffjax.kernels.tokens import by_chunk, pad_tokens

SMALLEST_CHUNK, LARGEST_CHUNK = 16, 64


def chunk_size(block_size: int) -> int:
    """Tokens per chunk: a multiple or a divisor of the block, so that edges are chunk starts or lie in one chunk."""
    if block_size < SMALLEST_CHUNK:
        return block_size * -(-SMALLEST_CHUNK // block_size)
    divisors = [q for q in range(SMALLEST_CHUNK, LARGEST_CHUNK + 1) if block_size % q == 0]
    return divisors[-1] if divisors else block_size


def scan_forward(stream: Stream, Cm, initial, *, chunk: int, reverse: bool):
    s, Cm = _chunks(stream, chunk), _by_group(Cm, chunk)
    kept, weight = _to_end(s, reverse)
    added = einsum("bcgrqp,bcgqn->bcgrpn", _times(s.u, weight), s.Bm)

    def pass_on(state, update):
        kept, added = update
        return kept[..., None, None] * state + added, state

    start = initial.reshape(added.shape[0], *added.shape[2:]).astype(added.dtype)
    last, before = jax.lax.scan(pass_on, start, (_time_first(kept), _time_first(added)), reverse=reverse)
    before = jnp.moveaxis(before, 0, 1)
    M = _scores(Cm, s.Bm) * _decay(s.cum, s.cum, _mask(s, s, _order(chunk, reverse)))
    y = _apply(M, s.u) + _reading(s.cum, s.count)[..., None] * _read(Cm, before)
    before = jnp.flip(before, axis=1) if reverse else before
    states = jnp.concatenate([before, last[:, None]], axis=1)
    return _tokens(y, stream.x), states.reshape(*states.shape[:2], *initial.shape[1:])


def scan_backward(stream: Stream, Cm, states, dy, d_states, *, chunk: int, reverse: bool):
    s, shape = _chunks(stream, chunk), Cm.shape
    Cm, dy = _by_group(Cm, chunk), _heads(dy, s)
    by_group = lambda array: array.reshape(*array.shape[:2], *s.x.shape[2:4], *array.shape[3:])
    order = lambda array: jnp.flip(array, axis=1) if reverse else array
    states, d_states = by_group(states), by_group(d_states)
    before, d_before = order(states[:, :-1]), order(d_states[:, :-1])
    kept, weight = _to_end(s, reverse)

    # The cotangent Z of the state after each chunk runs from the last chunk to the first.
    reading = _reading(s.cum, s.count)
    dy_read = _times(dy, reading)
    taken = einsum("bcgrqp,bcgqn->bcgrpn", dy_read, Cm) + d_before

    def pass_back(Z, update):
        kept, taken = update
        return kept[..., None, None] * Z + taken, Z

    d_initial, Z = jax.lax.scan(
        pass_back, d_states[:, -1], (_time_first(kept), _time_first(taken)), reverse=not reverse
    )
    Z = jnp.moveaxis(Z, 0, 1)

    inside = _within_backward(Cm, s, s, dy, _mask(s, s, _order(chunk, reverse)))
    Z_Bm, state_Cm = _read(s.Bm, Z), _read(Cm, before)
    d_u = inside.u + weight[..., None] * Z_Bm
    d_Cm = inside.Cm + einsum("bcgrqp,bcgrpn->bcgqn", dy_read, before)
    d_Bm = inside.Bm + einsum("bcgrqp,bcgrpn->bcgqn", _times(s.u, weight), Z)
    fell = weight * jnp.sum(s.u * Z_Bm, axis=-1)  # what the fall of a token's input to the chunk's end contributes
    d_cum = inside.rows - inside.columns + reading * jnp.sum(dy * state_Cm, axis=-1) - fell
    end = 0 if reverse else -1
    d_cum = d_cum.at[..., end].add(jnp.sum(fell, axis=-1) + kept * jnp.sum(Z * before, axis=(-2, -1)))
    d_stream = _stream_gradient(stream, s, d_u, d_cum, d_Bm)
    return d_stream, _shared(d_Cm, shape, Cm.dtype), d_initial.reshape(d_initial.shape[0], -1, *states.shape[-2:])


def blocks_forward(stream: Stream, Cm, *, chunk: int, reverse: bool):
    s, Cm = _chunks(stream, chunk), _by_group(Cm, chunk)
    M = _scores(Cm, s.Bm) * _decay(s.cum, s.cum, _mask(s, s, _order(chunk, reverse)))
    return _tokens(_apply(M, s.u), stream.x)


def blocks_backward(stream: Stream, Cm, dy, *, chunk: int, reverse: bool):
    s = _chunks(stream, chunk)
    inside = _within_backward(_by_group(Cm, chunk), s, s, _heads(dy, s), _mask(s, s, _order(chunk, reverse)))
    d_stream = _stream_gradient(stream, s, inside.u, inside.rows - inside.columns, inside.Bm)
    return d_stream, _shared(inside.Cm, Cm.shape, Cm.dtype)


def frontiers_forward(own: Stream, Cm, reach, clean: Stream | None, states, *, chunk: int, block_size: int):
    o, c, Cm = _chunks(own, chunk), _chunks(clean, chunk), _by_group(Cm, chunk)
    reach, before = _heads(reach, o), _states(states, o)
    earlier, same = _frontier_masks(o, c, chunk, block_size)
    M_own = _scores(Cm, o.Bm) * _decay(o.cum, o.cum, same)
    y = _apply(M_own, o.u) + _reading(reach, o.count)[..., None] * _read(Cm, before)
    if clean is not None:
        y = y + _apply(_scores(Cm, c.Bm) * _decay(reach, c.cum, earlier), c.u)
    return _tokens(y, own.x)


def frontiers_backward(own: Stream, Cm, reach, clean: Stream | None, states, dy, *, chunk: int, block_size: int):
    o, c, shape = _chunks(own, chunk), _chunks(clean, chunk), Cm.shape
    Cm, reach_, dy, before = _by_group(Cm, chunk), _heads(reach, o), _heads(dy, o), _states(states, o)
    earlier, same = _frontier_masks(o, c, chunk, block_size)
    inside = _within_backward(Cm, o, o, dy, same)
    reading = _reading(reach_, o.count)
    dy_read = _times(dy, reading)
    d_Cm = inside.Cm + einsum("bcgrqp,bcgrpn->bcgqn", dy_read, before)
    d_reach = reading * jnp.sum(dy * _read(Cm, before), axis=-1)
    d_clean = None
    if clean is not None:
        outside = _within_backward(Cm, o._replace(cum=reach_), c, dy, earlier)
        d_Cm, d_reach = d_Cm + outside.Cm, d_reach + outside.rows
        d_clean = _stream_gradient(clean, c, outside.u, -outside.columns, outside.Bm)
    d_before = einsum("bcgrqp,bcgqn->bcgrpn", dy_read, Cm)
    d_states = pad_tokens(d_before.reshape(*d_before.shape[:2], *states.shape[2:]), states.shape[1])
    d_own = _stream_gradient(own, o, inside.u, inside.rows - inside.columns, inside.Bm)
    return d_own, _shared(d_Cm, shape, Cm.dtype), _tokens(d_reach, reach), d_clean, d_states


class _Chunks(NamedTuple):
    """A stream by chunks and heads: x, u = dt x [B, C, g, r, Q, P]; dt, cum [B, C, g, r, Q]; count [B, C, Q] or None
    (one segment); Bm [B, C, g, Q, N]."""

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
    x, dt, cum = (_head_major(array, chunk, groups) for array in (stream.x, stream.dt, stream.cum))
    count = None if stream.count is None else by_chunk(stream.count, chunk)
    return _Chunks(x, dt, cum, count, _by_group(stream.Bm, chunk), _times(x, dt))


def _head_major(array: Array, chunk: int, groups: int) -> Array:
    """[B, T, H, ...] -> [B, C, g, r, Q, ...]"""
    array = jnp.swapaxes(by_chunk(array, chunk), 2, 3)
    return array.reshape(*array.shape[:2], groups, -1, *array.shape[3:])


def _heads(array: Array, s: _Chunks) -> Array:
    return _head_major(array, s.x.shape[4], s.x.shape[2])


def _tokens(array: Array, like: Array) -> Array:
    """[B, C, g, r, Q, ...] -> [B, T, H, ...], the shape and dtype of `like`."""
    return jnp.moveaxis(array, 4, 2).reshape(like.shape).astype(like.dtype)


def _by_group(array: Array, chunk: int) -> Array:
    """[B, T, g, N] -> [B, C, g, Q, N]"""
    return jnp.swapaxes(by_chunk(array, chunk), 2, 3)


def _shared(array: Array, shape, dtype) -> Array:
    """[B, C, g, Q, N] -> [B, T, g, N]"""
    return jnp.swapaxes(array, 2, 3).reshape(shape).astype(dtype)


def _times(array: Array, weight: Array) -> Array:
    """[..., P] times [...], in the dtype of `array`."""
    return (array * weight[..., None]).astype(array.dtype)


def _states(states: Array, s: _Chunks) -> Array:
    """The states at the chunk starts by groups, [B, C, g, r, P, N]."""
    chunks = s.x.shape[1]
    return states[:, :chunks].reshape(states.shape[0], chunks, *s.x.shape[2:4], *states.shape[3:])


def _time_first(array: Array) -> Array:
    return jnp.moveaxis(array, 1, 0)


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
    exponent = jnp.minimum(cum_i[..., :, None] - cum_j[..., None, :], 0)
    return jnp.exp(jnp.where(mask, exponent, -jnp.inf))


def _to_end(s: _Chunks, reverse: bool) -> tuple[Array, Array]:
    """What a state keeps over the chunk [B, C, g, r], and what a token's input keeps to its end [B, C, g, r, Q]."""
    end = slice(0, 1) if reverse else slice(-1, None)
    exponent = jnp.minimum(s.cum[..., end] - s.cum, 0)
    kept = jnp.exp(s.cum[..., end][..., 0])
    if s.count is None:
        return kept, jnp.exp(exponent)
    last = s.count[:, :, end]
    kept = jnp.where((last[:, :, 0] == 0)[..., None, None], kept, 0)
    return kept, jnp.exp(jnp.where((s.count == last)[:, :, None, None], exponent, -jnp.inf))


def _reading(cum: Array, count: Array | None) -> Array:
    """How much of the chunk's state each token reads: [B, C, g, r, Q]."""
    return jnp.exp(cum) if count is None else jnp.exp(jnp.where((count == 0)[:, :, None, None], cum, -jnp.inf))


def _scores(Cm: Array, Bm: Array) -> Array:
    """[B, C, g, 1, Q, Q], shared by the heads of a group."""
    return einsum("bcgqn,bcgkn->bcgqk", Cm, Bm)[:, :, :, None]


def _apply(M: Array, u: Array) -> Array:
    return einsum("bcgrqk,bcgrkp->bcgrqp", M.astype(u.dtype), u)


def _read(rows: Array, state: Array) -> Array:
    """Rows [B, C, g, Q, N] against states [B, C, g, r, P, N]: [B, C, g, r, Q, P]."""
    return einsum("bcgqn,bcgrpn->bcgrqp", rows, state)


class _Inside(NamedTuple):
    """Gradients of y = (Cm . Bm) D u: of u and Bm (the read tokens), of Cm; row and column sums of R."""

    u: Array
    Bm: Array
    Cm: Array
    rows: Array
    columns: Array


def _within_backward(Cm: Array, own: _Chunks, other: _Chunks, dy: Array, mask: Array) -> _Inside:
    scores, D = _scores(Cm, other.Bm), _decay(own.cum, other.cum, mask)
    X = einsum("bcgrqp,bcgrkp->bcgrqk", dy, other.u) * D
    R = X * scores
    d_scores = jnp.sum(X, axis=3).astype(Cm.dtype)
    return _Inside(
        u=einsum("bcgrqk,bcgrqp->bcgrkp", (scores * D).astype(dy.dtype), dy),
        Bm=einsum("bcgqk,bcgqn->bcgkn", d_scores, Cm),
        Cm=einsum("bcgqk,bcgkn->bcgqn", d_scores, other.Bm),
        rows=jnp.sum(R, axis=-1),
        columns=jnp.sum(R, axis=-2),
    )


def _stream_gradient(stream: Stream, s: _Chunks, d_u: Array, d_cum: Array, d_Bm: Array) -> Stream:
    return Stream(
        x=_tokens(s.dt[..., None] * d_u, stream.x),
        dt=_tokens(jnp.sum(d_u * s.x, axis=-1), stream.dt),
        cum=_tokens(d_cum, stream.cum),
        count=None,
        Bm=_shared(d_Bm, stream.Bm.shape, stream.Bm.dtype),
    )
