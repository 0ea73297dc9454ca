"""What an SSD backend is: the stream of tokens it reads, and the six functions it offers.

Letters: B rows, T = C Q tokens in C chunks of Q, H heads, P head dim, g groups, N state. With a_t = dt_t A the decay of
token t and u_t = dt_t x_t its input, inside a chunk with state S at its start:

    scan       y_i = sum_{j<=i, count_j=count_i} exp(cum_i - cum_j) (Cm_i . Bm_j) u_j  +  [count_i=0] exp(cum_i) S Cm_i
               S'  = [count_Q=0] exp(cum_Q) S + sum_{j: count_j=count_Q} exp(cum_Q - cum_j) u_j (x) Bm_j
    blocks     y_i = sum_{j<=i, count_j=count_i} exp(cum_i - cum_j) (Cm_i . Bm_j) u_j, no state at all
    frontiers  frontier of block b (primes: its own tensors), against its chunk's clean tokens and the chunk's state:
               y_i = sum_{blk(j)<b, count_j=count'_i} exp(reach_i - cum_j) (Cm_i . Bm_j) u_j
                     + sum_{j in b, j<=i} exp(cum'_i - cum'_j) (Cm_i . Bm'_j) u'_j  +  [count'_i=0] exp(reach_i) S Cm_i

With reverse=True chunks run right to left, j >= i takes the place of j <= i, and `cum` comes summed from the right; a
scan's states are then in the order of processing. Every exponent is <= 0 up to rounding: a backend cuts it at 0 and
masks it before exp (masking afterwards overflows and turns gradients to NaN). A backend module offers

    scan_forward(stream, Cm, initial, *, chunk, reverse)                -> y [B,T,H,P], states [B,C+1,H,P,N]
    scan_backward(stream, Cm, states, dy, d_states, *, chunk, reverse)  -> d_stream, d_Cm, d_initial
    blocks_forward(stream, Cm, *, chunk, reverse)                       -> y
    blocks_backward(stream, Cm, dy, *, chunk, reverse)                  -> d_stream, d_Cm
    frontiers_forward(own, Cm, reach, clean, states, *, chunk, block_size)       -> y
    frontiers_backward(own, Cm, reach, clean, states, dy, *, chunk, block_size)
                                                                        -> d_own, d_Cm, d_reach, d_clean, d_states

with initial [B,H,P,N] and states [B,C+1,H,P,N] in one dtype (chunk starts, then after the last token; frontiers read
the first C), `own` and `clean` streams of one length, own.count the count at each block's first token. The XLA form
also takes no `clean`, where every block is a chunk. Beside them a backend says what it prefers and what it cannot do:

    chunk_size(operation, block_size, head_dim, state) -> tokens per chunk
    refusal(operation, *, shape, groups, state, chunk, block_size, dtype) -> a sentence, or None (none for the XLA form)

Gradients have the shape and dtype of what they belong to; `cum` and `dt` are independent inputs here, and `count` has
none: None.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from diffjax.kernels.precision import einsum
from diffjax.kernels.tokens import by_chunk, pad_tokens


class Stream(NamedTuple):
    """Tokens in whole chunks. At pads dt = 0 and x = 0, so that they change no state.

    x      [B, T, H, P]  compute dtype
    dt     [B, T, H]     at least float32
    cum    [B, T, H]     like dt: inclusive sum of decays since the chunk's start or the last reset in it
    count  [B, T] int32  resets in the chunk up to and including the token; None (XLA form only): there are none
    Bm     [B, T, g, N]  compute dtype
    """

    x: Array
    dt: Array
    cum: Array
    count: Array | None
    Bm: Array


def make_stream(
    x: Array,
    dt: Array,
    A: Array,
    Bm: Array,
    starts: Array | None,
    chunk: int,
    *,
    segment: int | None = None,
    reverse: bool = False,
) -> Stream:
    """A stream of T tokens, padded to whole chunks.

    starts [B, T] bool: tokens that begin a document, or None; `segment`: sums of decays also start anew every so many
    tokens (a divisor or a multiple of the chunk), which then count as resets.
    """
    batch, length = dt.shape[:2]
    pad = -length % chunk
    x, dt, Bm = (pad_tokens(array, length + pad) for array in (x, dt, Bm))
    count = None
    if starts is not None:
        count = jnp.cumsum(by_chunk(pad_tokens(starts.astype(jnp.int32), length + pad), chunk), axis=2)
    elif segment is not None and segment < chunk:
        count = jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32) // segment, (batch, (length + pad) // chunk, chunk))
    cum = _sums(by_chunk(dt * A, chunk), count, reverse).reshape(dt.shape)
    return Stream(x, dt, cum, None if count is None else count.reshape(batch, length + pad), Bm)


def _sums(a: Array, count: Array | None, reverse: bool) -> Array:
    """Inclusive sums of a [B, C, Q, H] over each chunk, new at every reset: one document's rounding never reaches the
    next. A product with a triangular mask, so that the gradient is a direct sum too (a total minus a prefix would lose
    small suffixes)."""
    order = np.arange(a.shape[2])
    read = order[:, None] <= order if reverse else order[:, None] >= order
    if count is None:
        return einsum("qk,bckh->bcqh", jnp.asarray(read, a.dtype), a)
    read = read & (count[..., :, None] == count[..., None, :])
    return einsum("bcqk,bckh->bcqh", read.astype(a.dtype), a)
