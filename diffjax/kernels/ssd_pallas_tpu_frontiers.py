"""SSD in Pallas for TPU: the frontiers of `ssd_stream`, one chunk of a tile of heads per grid step.

Layout as in `ssd_pallas_tpu`: time on lanes, pairs of tokens as [j, i] with the token read, j, first. The chunk is cut
into strips of tokens j, a block each; documents start at block edges. With `end` the clean sum at the last token of the
strip of j, the decay of a clean token has two factors of at most 1, because only later blocks read it:

    exp(reach_i - cum_j) = far_i near_j        far_i = exp(reach_i - end)        near_j = exp(end - cum_j)

`near` goes into the token's input, and `far` is one row for a strip. Own tokens are read from their own strip only, so
one tile as high as a strip holds all their decays exp(cum'_i - cum'_j): its row k is for the k-th token of the block of
i. So blocks of G tokens need Q (G + Q / G) exponentials for a head instead of Q Q. Blocks of fewer than 8 tokens, the
rows of a register, share strips of 8; there far_i = exp(reach_i - cum_j) has a row for each j, and near_j = 1.

Backward, with M = (Cm . Bm) times decay, rounded once, and u = dt x or dt near x, also rounded once:

    du_j   = sum_i M_ji dy_i              v_i = sum_j M_ji u_j        X_ji = (u_j . dy_i) times decay
    dcum'_i, dreach_i = dy_i . v_i        dcum_j -= u_j . du_j        the sums of one matrix R_ji = M_ji (u_j . dy_i)
    dCm_i  = sum_jh X_ji Bm_j             dBm_j = sum_ih X_ji Cm_i    (sums of heads before the product)

for clean and own tokens apart. v is computed anew: the stored y and the unrounded x would not give sums of one matrix.
A token's reading of itself does not decay; it stays out of M, so that strong decays leave no rest of two equal sums.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from diffjax.kernels.pallas_tpu import (
    LANES,
    SUBLANES,
    TOKENS,
    Call,
    column,
    stack_states,
    unstack_states,
)
from diffjax.kernels.precision import dot
from diffjax.kernels.ssd_stream import Stream
from diffjax.kernels.tokens import pad_tokens

FIRST, LAST = (0, 0), (1, 1)  # products over the first axes of both matrices, over the last axes of both
GRADIENTS = ("channels", "heads", "heads", "partial")  # of x, dt, cum, Bm
# Inputs, outputs, scratch in names of `Call.block` and `Call.temporary`; `_scratch` adds what depends on the strips.
FORWARD = (*TOKENS, "tokens", *TOKENS, "tokens", "heads", "lanes", "states"), ("channels",), ("pairs", "pairs", "heads")
BACKWARD = (
    (*TOKENS, "lanes", *TOKENS, "lanes", "heads", "tokens", "lanes", "states", "channels"),
    (*GRADIENTS, *GRADIENTS, "heads", "partial", "states"),
    ("pairs", "pairs", "heads", "heads", "channels", "products"),
)


def vmem(call: Call, block_size: int) -> int:
    """Bytes of VMEM that the larger of the two kernels holds."""
    strips = _scratch(call.chunk, block_size)
    return max(call.vmem((*inputs, *outputs), (*held, *strips)) for inputs, outputs, held in (FORWARD, BACKWARD))


def frontiers_forward(
    own: Stream, Cm: Array, reach: Array, clean: Stream, states: Array, *, chunk: int, block_size: int
):
    call = Call.of(own, chunk)
    inputs, outputs, temporaries = FORWARD
    run = call.pallas_call(
        functools.partial(_forward_kernel, call, block_size),
        "ssd_frontiers_forward",
        inputs,
        outputs,
        (*temporaries, *_scratch(chunk, block_size)),
        semantics=("parallel", "parallel", "parallel"),
        steps=call.chunks,
        memory=lambda step: step,
        entry=lambda step: step,
        flops=4 * chunk * (call.N // call.tile + call.P) + 2 * call.N * call.P,
    )
    streams = (*call.tokens(own), own.Bm[:, :, 0], *call.tokens(clean), clean.Bm[:, :, 0])
    (y,) = run(*streams, call.rows(reach), _on_lanes(Cm), stack_states(states, call.tile))
    return call.per_token(y)


def frontiers_backward(
    own: Stream, Cm: Array, reach: Array, clean: Stream, states: Array, dy: Array, *, chunk: int, block_size: int
):
    call = Call.of(own, chunk)
    inputs, outputs, temporaries = BACKWARD
    last = call.chunks - 1
    # One step more than chunks: it stores the zero gradient of the state after the last chunk, and touches no token.
    run = call.pallas_call(
        functools.partial(_backward_kernel, call, block_size),
        "ssd_frontiers_backward",
        inputs,
        outputs,
        (*temporaries, *_scratch(chunk, block_size)),
        semantics=("parallel", "parallel", "arbitrary"),
        steps=call.chunks + 1,
        memory=lambda step: jnp.minimum(step, last),
        entry=lambda step: step,
        flops=12 * chunk * (call.N // call.tile + call.P) + 6 * call.N * call.P,
    )
    streams = (*call.tokens(own), _on_lanes(own.Bm), *call.tokens(clean), _on_lanes(clean.Bm))
    before = stack_states(pad_tokens(states, call.chunks + 1), call.tile)
    results = run(*streams, call.rows(reach), Cm[:, :, 0], _on_lanes(Cm), before, call.channels(dy))
    d_own, d_clean = (call.stream_gradient(*some) for some in ((own, *results[:4]), (clean, *results[4:8])))
    d_reach, d_Cm, d_states = results[8:]
    d_states = pad_tokens(unstack_states(d_states, call.heads, call.P), states.shape[1])
    return d_own, call.shared(d_Cm), call.per_head(d_reach).astype(reach.dtype), d_clean, d_states


def _on_lanes(array: Array) -> Array:
    """[B, T, 1, N] -> [B, N, T]"""
    return jnp.swapaxes(array[:, :, 0], 1, 2)


def _forward_kernel(call: Call, block_size: int, *refs):
    """x, y [h P, Q]; dt, cum, reach [h, Q]; counts [1, Q]; Bm [Q, N]; Cm [N, Q]; states [h P, N]. Rows kept in scratch
    are spread over sublanes as they are loaded."""
    x_own, dt_own, cum_own, count_own, Bm_own, x, dt, cum, count, Bm, reach, Cm, state, y, *scratch = refs
    scores, scores_own, reading, weight, *far = scratch
    of_clean, of_own, of_itself = _masks(call, block_size, count_own[...], count[...])
    scores[...] = jnp.where(of_clean, dot(Bm[...], Cm[...]), 0)  # [j, i]
    scores_own[...] = jnp.where(of_own | of_itself, dot(Bm_own[...], Cm[...]), 0)
    strips = _Strips.of(call, block_size, cum, cum_own, reach, weight, far)
    weight[...] *= dt[...]
    reading[...] = _reading(reach[...], count_own[...])
    read = strips.read
    for h in range(call.tile):
        rows, row = call.rows_of(h), slice(h, h + 1)
        u = [x_own[rows].astype(jnp.float32) * dt_own[row], x[rows, :read].astype(jnp.float32) * weight[row, :read]]
        M = strips.times_own(strips.own(h), scores_own) + strips.times_far(h, scores)
        y_h = dot(jnp.concatenate(u, axis=1).astype(call.dtype), jnp.concatenate(M, axis=0).astype(call.dtype))
        y_h += reading[row] * dot(state[rows].astype(call.dtype), Cm[...])
        y[rows] = y_h.astype(call.dtype)


def _backward_kernel(call: Call, block_size: int, *refs):
    d_states = refs[25]  # the last output
    step = pl.program_id(2)

    @pl.when(step == call.chunks)
    def _():
        d_states[...] = jnp.zeros_like(d_states)

    @pl.when(step < call.chunks)
    def _():
        _backward_chunk(call, block_size, *refs)


def _backward_chunk(call: Call, block_size: int, *refs):
    """As forward; Bm [N, Q]; Cm [Q, N] and [N, Q]; gradients of Bm and Cm [N, Q]."""
    x_own, dt_own, cum_own, count_own, Bm_own, x, dt, cum, count, Bm, reach, Cm, Cm_lanes, state, dy, *rest = refs
    d_x_own, d_dt_own, d_cum_own, d_Bm_own, d_x, d_dt, d_cum, d_Bm, d_reach, d_Cm, d_state, *scratch = rest
    scores, scores_own, reading, weight, dy_read, state_Cm, near, *far = scratch
    of_clean, of_own, of_itself = _masks(call, block_size, count_own[...], count[...])
    scores[...] = jnp.where(of_clean, dot(Bm[...], Cm_lanes[...], FIRST), 0)  # [j, i]
    all_own = dot(Bm_own[...], Cm_lanes[...], FIRST)
    scores_own[...] = jnp.where(of_own, all_own, 0)
    total = lambda array: jnp.sum(array, axis=0, keepdims=True)
    itself = total(jnp.where(of_itself, all_own, 0))
    strips = _Strips.of(call, block_size, cum, cum_own, reach, near, far)
    weight[...] = near[...] * dt[...]
    reading[...] = _reading(reach[...], count_own[...])
    state_Cm[...] = dot(state[...].astype(call.dtype), Cm_lanes[...])
    Q, read = call.chunk, strips.read
    if read < Q:
        for gradient in (d_x, d_dt, d_cum):
            gradient[:, read:] = jnp.zeros((gradient.shape[0], Q - read), gradient.dtype)
    d_scores = jnp.zeros((Q, Q), jnp.float32)
    for h in range(call.tile):
        rows, row = call.rows_of(h), slice(h, h + 1)
        dy_h, x_h, x_own_h = dy[rows], x[rows, :read].astype(jnp.float32), x_own[rows].astype(jnp.float32)
        u = jnp.concatenate([x_own_h * dt_own[row], x_h * weight[row, :read]], axis=1).astype(call.dtype)
        own = strips.own(h)
        d_scores += strips.times_either(h, own, dot(u, dy_h, FIRST))
        M = jnp.concatenate(strips.times_own(own, scores_own) + strips.times_far(h, scores), axis=0).astype(call.dtype)
        d_u = dot(dy_h, M, LAST)
        dy_f32, of_j = dy_h.astype(jnp.float32), total(u.astype(jnp.float32) * d_u)
        of_i, of_i_own = total(dy_f32 * dot(u[:, Q:], M[Q:])), total(dy_f32 * dot(u[:, :Q], M[:Q]))
        dy_reading = dy_f32 * reading[row]
        dy_read[rows] = dy_reading.astype(call.dtype)
        d_reach[row] = of_i + total(dy_reading * state_Cm[rows])
        d_cum_own[row], d_cum[row, :read] = of_i_own - of_j[:, :Q], -of_j[:, Q:]
        d_u_own = d_u[:, :Q] + itself * dy_f32
        d_dt_own[row], d_dt[row, :read] = total(d_u_own * x_own_h), total(d_u[:, Q:] * x_h)
        d_x_own[rows] = (d_u_own * dt_own[row]).astype(call.dtype)
        d_x[rows, :read] = (d_u[:, Q:] * weight[row, :read]).astype(call.dtype)

    d_dt[...] *= near[...]
    d_scores_own = jnp.where(of_own | of_itself, d_scores, 0).astype(call.dtype)
    d_scores = jnp.where(of_clean, d_scores, 0).astype(call.dtype)
    d_Bm[...] = dot(Cm_lanes[...], d_scores, LAST)
    d_Bm_own[...] = dot(Cm_lanes[...], d_scores_own, LAST)
    d_Cm[...] = dot(Bm[...], d_scores) + dot(Bm_own[...], d_scores_own)
    d_Cm[...] += dot(state[...].astype(call.dtype), dy_read[...], FIRST)
    d_state[...] = dot(dy_read[...], Cm[...])


def _masks(call: Call, block_size: int, count_own: Array, count: Array) -> tuple[Array, Array, Array]:
    """Of pairs [j, i]: whether i reads the clean j; the own j, being after it; the own j, being it."""
    shift = block_size.bit_length() - 1
    j, i = (jax.lax.broadcasted_iota(jnp.int32, (call.chunk, call.chunk), axis) for axis in (0, 1))
    same_document = column(count.astype(jnp.float32)) == count_own.astype(jnp.float32)
    same_block = (j >> shift) == (i >> shift)
    return ((j >> shift) < (i >> shift)) & same_document, same_block & (j < i), j == i


def _reading(reach: Array, count_own: Array) -> Array:
    """How much of the chunk's state each token reads, [h, Q]."""
    return jnp.exp(jnp.minimum(reach, jnp.where(count_own == 0, 0.0, -jnp.inf)))


def _decay(exponent: Array) -> Array:
    """Cut at 0: what rounding lifts above it, and what pairs give that do not read each other (their scores are 0)."""
    return jnp.exp(jnp.minimum(exponent, 0))


def _scratch(chunk: int, block_size: int) -> tuple[str, ...]:
    """Of `_Strips`: `near`, then `far` of every strip but the last, which no later block reads; at least of one."""
    return ("heads",) * (1 if block_size < SUBLANES else max(chunk // block_size, 2))


class _Strips(NamedTuple):
    """The decays of a step's heads, a strip of tokens j at a time. `times_*` multiply a tile of pairs of one head with
    them: lists of strips [height, Q]."""

    chunk: int
    height: int
    read: int  # tokens of the strips that later blocks read
    later: list[Array]  # for each strip, whether i is of a later block than j: [1 or height, Q]
    far: list  # refs [h, Q]; none where blocks share strips
    columns: Array | None  # there: cum as [Q, h]
    cum_own: Array
    reach: Array

    @classmethod
    def of(cls, call: Call, block_size: int, cum, cum_own, reach, near, far: list) -> "_Strips":
        """Fills `near` and `far`; all are refs [h, Q]."""
        chunk, height, shift = call.chunk, max(block_size, SUBLANES), block_size.bit_length() - 1
        shape = (1 if far else height, chunk)
        j, i = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        later = [((j + start) >> shift) < (i >> shift) for start in range(0, chunk, height)]
        if not far:
            near[...] = jnp.ones_like(near)
            return cls(chunk, height, chunk, later, far, jnp.transpose(cum[...]), cum_own, reach)
        ends = cum[...]
        strip_of_j = jax.lax.broadcasted_iota(jnp.int32, ends.shape, 1) >> shift
        for k, rows in enumerate(far):
            end = cum[:, (k + 1) * height - 1 : (k + 1) * height]
            rows[...] = _decay(reach[...] - end)
            ends = jnp.where(strip_of_j == k, end, ends)
        near[...] = _decay(ends - cum[...])
        return cls(chunk, height, len(far) * height, later, far, None, cum_own, reach)

    def cut(self, pairs: Array) -> list[Array]:
        return [pairs[start : start + self.height] for start in range(0, pairs.shape[0], self.height)]

    def far_of(self, head: int, strip: int) -> Array:
        row = slice(head, head + 1)
        if self.far:
            return self.far[strip][row]
        return _decay(self.reach[row] - self.columns[strip * self.height : (strip + 1) * self.height, row])

    def own(self, head: int) -> Array:
        """[height, Q]: the decays of own tokens, row k for the k-th token of the strip of i."""
        row, rows = slice(head, head + 1), min(self.height, LANES)
        k, i = (jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), axis) for axis in (0, 1))
        lane = (i & -rows) + k

        def tile(first: int, at: int) -> Array:
            start = at - at % max(self.height, LANES) + first  # rows of a strip higher than LANES read other lanes
            read = jnp.broadcast_to(self.cum_own[row, start : start + LANES], (rows, LANES))
            read = jnp.take_along_axis(read, lane, axis=1, mode="promise_in_bounds")
            return _decay(self.cum_own[row, at : at + LANES] - read)

        tiles = [[tile(first, at) for at in range(0, self.chunk, LANES)] for first in range(0, self.height, rows)]
        return jnp.concatenate([jnp.concatenate(line, axis=1) for line in tiles], axis=0)

    def times_far(self, head: int, pairs: Array) -> list[Array]:
        return [strip * self.far_of(head, k) for k, strip in enumerate(self.cut(pairs[: self.read]))]

    def times_own(self, own: Array, pairs: Array) -> list[Array]:
        return [strip * own for strip in self.cut(pairs[...])]

    def times_either(self, head: int, own: Array, pairs: Array) -> Array:
        """pairs [Q + read, Q], with own j, then with clean j, as one [Q, Q]: clean where i is of a later block."""
        strips = self.cut(pairs[: self.chunk])
        for k, clean in enumerate(self.cut(pairs[self.chunk :])):
            later = self.later[k]
            strips[k] = jnp.where(later, clean, strips[k]) * jnp.where(later, self.far_of(head, k), own)
        first_unread = self.read // self.height
        return jnp.concatenate(strips[:first_unread] + [strip * own for strip in strips[first_unread:]], axis=0)
