"""SSD in Pallas for TPU: the frontiers of `ssd_stream`, one chunk of a tile of heads per grid step.

Layout as in `ssd_pallas_tpu`: time on lanes, pairs of tokens as [j, i] with the token read, j, first. The strips of
`ssd_pallas_tpu_strips` are blocks, as documents start at block edges: `near` and `far` are for clean tokens.

Backward, with M = (Cm . Bm) times decay, rounded once, and u = dt x or dt near x, also rounded once:

    du_j   = sum_i M_ji dy_i              v_i = sum_j M_ji u_j        X_ji = (u_j . dy_i) times decay
    dcum'_i, dreach_i = dy_i . v_i        dcum_j -= u_j . du_j        the sums of one matrix R_ji = M_ji (u_j . dy_i)
    dCm_i  = sum_jh X_ji Bm_j             dBm_j = sum_ih X_ji Cm_i    (sums of heads before the product)

for clean and own tokens apart. v is computed anew: the stored y and the unrounded x would not give sums of one matrix.
A token's reading of itself does not decay; it stays out of M, so that strong decays leave no rest of two equal sums.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from diffjax.kernels.pallas_tpu import TOKENS, Call, column, stack_states, unstack_states
from diffjax.kernels.precision import dot
from diffjax.kernels.ssd_pallas_tpu_strips import Strips, strip_scratch
from diffjax.kernels.ssd_stream import Stream
from diffjax.kernels.tokens import pad_tokens

FIRST, LAST = (0, 0), (1, 1)  # products over the first axes of both matrices, over the last axes of both
GRADIENTS = ("channels", "heads", "heads", "partial")  # of x, dt, cum, Bm
# Inputs, outputs, scratch in names of `Call.block` and `Call.temporary`; `strip_scratch` adds to the scratch.
FORWARD = (
    (*TOKENS, "tokens", *TOKENS, "tokens", "heads", "lanes", "states"),
    ("channels",),
    ("pairs", "pairs", "heads", "products", "u", "M"),
)
BACKWARD = (
    (*TOKENS, "lanes", *TOKENS, "lanes", "heads", "tokens", "lanes", "states", "channels"),
    (*GRADIENTS, *GRADIENTS, "heads", "partial", "states"),
    ("pairs", "pairs", "heads", "heads", "channels", "products"),
)


def vmem(call: Call, block_size: int) -> int:
    """Bytes of VMEM that the larger of the two kernels holds."""
    strips = strip_scratch(call.chunk, block_size)
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
        (*temporaries, *strip_scratch(chunk, block_size)),
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
        (*temporaries, *strip_scratch(chunk, block_size, every=False)),
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
    scores, scores_own, reading, state_Cm, u, M, weight, *far = scratch
    strips = Strips.of(call, block_size, cum, cum_own, reach, weight, far)
    own_strip = slice(0, strips.height)
    of_clean = _of_clean(strips, count_own[...], count[...])
    for k, strip in enumerate(strips.cut(dot(Bm[...], Cm[...]))):  # [j, i]
        scores[k * strips.height : (k + 1) * strips.height] = jnp.where(of_clean[k], strip, 0)
    scores_own[own_strip] = jnp.where(_of_own(strips, block_size), strips.folded(dot(Bm_own[...], Cm[...])), 0)
    weight[...] *= dt[...]
    reading[...] = _reading(reach[...], count_own[...])
    of_state = dot(state[...].astype(call.dtype), Cm[...])
    for h in range(call.tile):
        rows = call.rows_of(h)
        state_Cm[rows] = reading[h : h + 1] * of_state[rows]

    def prepare(slot, row, rows):
        u_own, u_read = x_own[rows].astype(jnp.float32) * dt_own[row], x[rows].astype(jnp.float32) * weight[row]
        u[slot] = jnp.concatenate([u_own, u_read], axis=1).astype(call.dtype)
        M_h = strips.spread(strips.own(row) * scores_own[own_strip]) + strips.times_far(row, scores)
        M[slot] = jnp.concatenate(M_h, axis=0).astype(call.dtype)

    def finish(slot, row, rows):
        y[rows] = (dot(u[slot], M[slot]) + state_Cm[rows]).astype(call.dtype)

    call.for_heads(prepare, finish, looped=bool(far))


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
    total = lambda array: jnp.sum(array, axis=0, keepdims=True)
    itself = total(jnp.where(of_itself, all_own, 0))
    strips = Strips.of(call, block_size, cum, cum_own, reach, near, far)
    own_strip = slice(0, strips.height)
    scores_own[own_strip] = strips.folded(jnp.where(of_own, all_own, 0))
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
        own = strips.own(row)
        d_scores += strips.times_either(row, own, dot(u, dy_h, FIRST))
        M = strips.spread(own * scores_own[own_strip]) + strips.times_far(row, scores)
        M = jnp.concatenate(M, axis=0).astype(call.dtype)
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


def _of_clean(strips: Strips, count_own: Array, count: Array) -> list[Array]:
    """For each strip, whether token i reads the clean j of it: [1 or height, Q]."""
    count_own, count = count_own.astype(jnp.float32), count.astype(jnp.float32)
    if strips.far:  # a strip is a block, of one document
        of_j = [count[:, start : start + 1] for start in range(0, strips.chunk, strips.height)]
    else:
        of_j = strips.cut(column(count))
    return [later & (one == count_own) for later, one in zip(strips.later, of_j, strict=True)]


def _of_own(strips: Strips, block_size: int) -> Array:
    """Whether token i reads the own j of its strip: [height, Q]."""
    j, i = (jax.lax.broadcasted_iota(jnp.int32, (strips.height, strips.chunk), axis) for axis in (0, 1))
    i, shift = i & (strips.height - 1), block_size.bit_length() - 1
    return (j <= i) & ((j >> shift) == (i >> shift))


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
