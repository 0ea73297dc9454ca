"""SSD in Pallas for TPU: the scan and the blocks of `ssd_stream`, one chunk of a tile of heads per grid step.

Time is on lanes, and pairs of tokens lie as [j, i] with the token read, j, first: the decay of i is then a row that
broadcasts for free. Scores Bm . Cm are computed once for all heads of a step; products with the state are stacked over
heads. A scan carries its state in VMEM from chunk to chunk. Forward, decays come in `ssd_pallas_tpu_strips`.
"""

import functools

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from diffjax.kernels.dispatch import LARGEST_OPERAND
from diffjax.kernels.pallas_tpu import (
    LANES,
    TOKENS,
    VMEM_LIMIT,
    Call,
    stack_states,
    to_end,
    unstack_states,
    visible,
)
from diffjax.kernels.precision import dot
from diffjax.kernels.ssd_pallas_tpu_backward import backward_kernel
from diffjax.kernels.ssd_pallas_tpu_frontiers import frontiers_backward, frontiers_forward
from diffjax.kernels.ssd_pallas_tpu_frontiers import vmem as frontiers_vmem
from diffjax.kernels.ssd_pallas_tpu_strips import Strips, strip_scratch
from diffjax.kernels.ssd_stream import Stream

__all__ = [
    "blocks_backward",
    "blocks_forward",
    "chunk_size",
    "frontiers_backward",
    "frontiers_forward",
    "refusal",
    "scan_backward",
    "scan_forward",
]

IN_ORDER, ANY_ORDER = ("parallel", "parallel", "arbitrary"), ("parallel", "parallel", "parallel")
GRADIENTS = ("channels", "heads", "heads", "partial", "partial")  # of x, dt, cum, Bm, Cm
STRIP = 32  # tokens of a strip, forward: with 64 schedules are up to half longer
# By whether a state is carried: inputs, outputs and scratch, in names of `Call.block` and `Call.temporary`.
FORWARD = {
    True: (
        (*TOKENS, "tokens", "lanes", "state"),
        ("channels", "states"),
        ("heads", "heads", "kept", "products", "state", "pairs", "pairs", "u", "M"),
    ),
    False: ((*TOKENS, "tokens", "lanes"), ("channels",), ("pairs", "pairs", "u", "M")),
}
BACKWARD = {
    True: (
        (*TOKENS, "lanes", "tokens", "lanes", "channels", "states", "states", "last state"),
        (*GRADIENTS, "state"),
        ("heads", "heads", "heads", "kept", "kept", "channels", "channels", "products", "products", "state"),
    ),
    False: ((*TOKENS, "lanes", "lanes", "channels"), GRADIENTS, ()),
}


def chunk_size(operation: str, block_size: int, head_dim: int, state: int) -> int:
    """Tokens per chunk: one tile of lanes."""
    return LANES


def refusal(
    operation: str, *, shape: tuple[int, ...], groups: int, state: int, chunk: int, block_size: int, dtype
) -> str | None:
    """Why the kernels cannot take a call of `operation` ("scan", "blocks" or "frontiers") on x of `shape` [B, T, H, P]:
    a sentence with the rule and the nearest legal value, or None."""
    batch, length, heads, head_dim = shape
    if groups != 1:
        return f"takes one group of heads sharing Bm and Cm, not {groups}: use 1"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 or bfloat16, not {jnp.dtype(dtype).name}: use float32"
    for what, size in (("head dim", head_dim), ("state", state)):
        if size < 16 or size % 8:
            return f"needs a {what} of at least 16 and a multiple of 8, not {size}: use {max(16, -(-size // 8) * 8)}"
    if chunk < LANES or chunk % LANES:
        return f"needs a chunk that is a multiple of {LANES}, not {chunk}: use {max(1, -(-chunk // LANES)) * LANES}"
    if operation == "scan":
        if chunk % block_size and block_size % chunk:
            return f"needs a block size that divides the chunk or is a multiple of it, not {block_size}: use {chunk}"
    elif block_size & (block_size - 1):
        return f"needs a block size that is a power of two, not {block_size}: use {1 << (block_size - 1).bit_length()}"
    length = -(-length // chunk) * chunk
    call = Call.sized(batch, length, heads, head_dim, state, chunk, dtype)
    largest = max(call.elements(name) for name in ("channels", "states", "partial"))
    if largest >= LARGEST_OPERAND:
        rows = batch * (LARGEST_OPERAND - 1) // largest
        tokens = length * (LARGEST_OPERAND - 1) // largest // chunk * chunk
        nearest = f"{rows} rows" if rows else f"{tokens} tokens"
        return f"takes operands of fewer than 2**31 elements, not of {largest}: use at most {nearest} a call"
    strips = strip_scratch(chunk, STRIP)
    needed = max(
        call.vmem((*inputs, *outputs), (*held, *strips)) for inputs, outputs, held in (FORWARD[True], BACKWARD[True])
    )
    if operation == "frontiers":
        needed = max(needed, frontiers_vmem(call, block_size))
    if needed > VMEM_LIMIT:
        return f"may use {VMEM_LIMIT >> 20} MiB of VMEM, and a chunk of {chunk} needs {needed >> 20}: use {LANES}"
    return None


def scan_forward(stream: Stream, Cm: Array, initial: Array, *, chunk: int, reverse: bool):
    call, tokens, shared = _prepare(stream, Cm, chunk)
    run = _forward(call, reverse, carried=True)
    y, states = run(*tokens, shared[0], shared[3], stack_states(initial, call.tile))
    return call.per_token(y), unstack_states(states, call.heads, call.P)


def blocks_forward(stream: Stream, Cm: Array, *, chunk: int, reverse: bool):
    call, tokens, shared = _prepare(stream, Cm, chunk)
    (y,) = _forward(call, reverse, carried=False)(*tokens, shared[0], shared[3])
    return call.per_token(y)


def scan_backward(stream: Stream, Cm: Array, states: Array, dy: Array, d_states: Array, *, chunk: int, reverse: bool):
    call, tokens, shared = _prepare(stream, Cm, chunk)
    states, d_states = stack_states(states, call.tile), stack_states(d_states, call.tile)
    run = _backward(call, reverse, carried=True)
    *gradients, d_Cm, d_initial = run(*tokens, *shared[1:], call.channels(dy), states, d_states, d_states)
    d_stream = call.stream_gradient(stream, *gradients)
    return d_stream, call.shared(d_Cm), unstack_states(d_initial, call.heads, call.P)


def blocks_backward(stream: Stream, Cm: Array, dy: Array, *, chunk: int, reverse: bool):
    call, tokens, shared = _prepare(stream, Cm, chunk)
    *gradients, d_Cm = _backward(call, reverse, carried=False)(*tokens, shared[1], shared[3], call.channels(dy))
    return call.stream_gradient(stream, *gradients), call.shared(d_Cm)


def _prepare(stream: Stream, Cm: Array, chunk: int):
    """The call's sizes, x, dt, cum and count, and Bm and Cm, each as [B, T, N] and [B, N, T]."""
    call = Call.of(stream, chunk)
    Bm, Cm = stream.Bm[:, :, 0], Cm[:, :, 0]
    return call, call.tokens(stream), (Bm, jnp.swapaxes(Bm, 1, 2), Cm, jnp.swapaxes(Cm, 1, 2))


def _forward(call: Call, reverse: bool, carried: bool):
    inputs, outputs, temporaries = FORWARD[carried]
    last = call.chunks - 1
    # A scan has one step more than chunks: it stores the state after the last chunk, and touches no token.
    at_end = lambda step: jnp.minimum(step, last) if carried else step
    return call.pallas_call(
        functools.partial(_forward_kernel, call, reverse, carried),
        "ssd_scan_forward" if carried else "ssd_blocks_forward",
        inputs,
        outputs,
        (*temporaries, *strip_scratch(call.chunk, STRIP)),
        semantics=IN_ORDER if carried else ANY_ORDER,
        steps=call.chunks + carried,
        memory=lambda step: last - at_end(step) if reverse else at_end(step),
        entry=lambda step: step,
        flops=2 * call.chunk * (call.N // call.tile + call.P) + 4 * call.N * call.P * carried,
    )


def _backward(call: Call, reverse: bool, carried: bool):
    inputs, outputs, temporaries = BACKWARD[carried]
    last = call.chunks - 1
    return call.pallas_call(
        functools.partial(backward_kernel, call, reverse, carried),
        "ssd_scan_backward" if carried else "ssd_blocks_backward",
        inputs,
        outputs,
        temporaries,
        semantics=IN_ORDER if carried else ANY_ORDER,
        steps=call.chunks,
        memory=lambda step: step if reverse else last - step,
        entry=lambda step: last - step,
        flops=4 * call.chunk * call.P + 6 * call.chunk * call.N // call.tile + 10 * call.N * call.P * carried,
    )


def _forward_kernel(call: Call, reverse: bool, carried: bool, x, dt, cum, count, Bm, Cm, *refs):
    """x, y [h P, Q]; dt, cum [h, Q]; count [1, Q]; Bm [Q, N]; Cm [N, Q]; states [h P, N]."""
    if not carried:
        y, *scratch = refs
        return _forward_chunk(call, reverse, x, dt, cum, count, Bm, Cm, y, (), *scratch)
    initial, y, states, reading, weight, kept, state_Cm, state, *scratch = refs
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        state[...] = initial[...]

    @pl.when(step < call.chunks)
    def _():
        carried = states, reading, weight, kept, state_Cm, state
        _forward_chunk(call, reverse, x, dt, cum, count, Bm, Cm, y, carried, *scratch)

    @pl.when(step == call.chunks)
    def _():
        states[...] = state[...]


def _forward_chunk(call: Call, reverse: bool, x, dt, cum, count, Bm, Cm, y, carried, *scratch):
    """Rows kept in scratch are spread over sublanes as they are loaded. What the state gives to y and takes from u are
    products of all heads, before and after the loop over heads: in it they would wait in registers."""
    scores, scores_own, u, M, weight, *far = scratch
    strips = Strips.of(call, STRIP, cum, cum, cum, weight, far, reverse)
    own_strip = slice(0, strips.height)
    all_scores = jnp.where(visible(count[...], reverse), dot(Bm[...], Cm[...]), 0)  # [j, i]
    scores_own[own_strip] = strips.folded(all_scores)
    scores[...] = jnp.where(strips.same, 0, all_scores)
    weight[...] *= dt[...]
    if carried:
        states, reading, to_the_end, kept, state_Cm, state = carried
        reading[...], end_weight, kept_column = to_end(cum[...], count[...], reverse)
        to_the_end[...], kept[...] = end_weight * dt[...], jnp.broadcast_to(kept_column, kept.shape)
        of_state = dot(state[...].astype(call.dtype), Cm[...])
        for h in range(call.tile):
            rows = call.rows_of(h)
            state_Cm[rows] = reading[h : h + 1] * of_state[rows]

    def prepare(slot, row, rows):
        x_h = x[rows].astype(jnp.float32)
        u[slot] = jnp.concatenate([x_h * dt[row], x_h * weight[row]], axis=1).astype(call.dtype)
        M_h = strips.spread(strips.own(row) * scores_own[own_strip]) + strips.times_far(row, scores)
        M[slot] = jnp.concatenate(M_h, axis=0).astype(call.dtype)

    def finish(slot, row, rows):
        y_h = dot(u[slot], M[slot])
        if carried:
            y_h += state_Cm[rows]
            states[rows] = state[rows]
        y[rows] = y_h.astype(call.dtype)

    call.for_heads(prepare, finish)
    if carried:
        heads = range(call.tile)
        u_at_end = [x[call.rows_of(h)].astype(jnp.float32) * to_the_end[h : h + 1] for h in heads]
        gained = dot(jnp.concatenate(u_at_end, axis=0).astype(call.dtype), Bm[...])
        for h in heads:
            rows = call.rows_of(h)
            state[rows] = kept[h : h + 1] * state[rows] + gained[rows]
