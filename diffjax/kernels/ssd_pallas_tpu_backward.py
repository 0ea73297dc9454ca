"""The backward pass of the SSD kernels for TPU: one chunk of a tile of heads, chunks from the last to the first.

With D the decay of pairs, M = (Cm . Bm) D, X = (u . dy) D, R = X (Cm . Bm), f_i and w_j the decays from the chunk's
start and to its end, S the state at its start and Z the cotangent of the state after it, carried in VMEM:

    du_j   = sum_i M_ij dy_i + w_j Z Bm_j                  fell_j = w_j u_j . (Z Bm_j)
    dCm_i  = sum_jh X_ij Bm_j + sum_h f_i S^T dy_i
    dBm_j  = sum_ih X_ij Cm_i + sum_h w_j Z^T u_j
    dcum_i = sum_j R_ij - sum_k R_ki + f_i dy_i . (S Cm_i) - fell_i,   at the chunk's end + sum_j fell_j + kept <Z, S>
    Z     <- kept Z + sum_i f_i dy_i (x) Cm_i + the cotangent of S

Both sums of R are of one matrix, rounded once. The shorter dy . y - du . u rounds its two parts apart, then cancels.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from diffjax.kernels.pallas_tpu import PACKED_SUBLANES, Call, decay, last_token, to_end, visible
from diffjax.kernels.precision import dot

FIRST, LAST = (0, 0), (1, 1)  # products over the first axes of both matrices, over the last axes of both


def backward_kernel(call: Call, reverse: bool, carried: bool, x, dt, cum, count, *refs):
    """x, dy, d_x [h P, Q]; dt, cum, d_dt, d_cum [h, Q]; count [1, Q]; Bm, Cm [Q, N] and, as lanes and as gradients,
    [N, Q]; states [h P, N]. Rows kept in scratch are spread over sublanes as they are loaded."""
    if not carried:
        Bm_lanes, Cm_lanes, dy, d_x, d_dt, d_cum, d_Bm, d_Cm = refs
    else:
        Bm_lanes, Cm, Cm_lanes, dy, S, d_S, d_last, d_x, d_dt, d_cum, d_Bm, d_Cm, d_initial, *scratch = refs
        reading, weight, fell, kept, Z_S, u_to_end, dy_read, Z_Bm, S_Cm, Z = scratch
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            Z[...] = d_last[...]

        reading[...], weight[...], kept_column = to_end(cum[...], count[...], reverse)
        kept[...] = jnp.broadcast_to(kept_column, kept.shape)
        Z_Bm[...] = dot(Z[...].astype(call.dtype), Bm_lanes[...])
        S_Cm[...] = dot(S[...].astype(call.dtype), Cm_lanes[...])

    seen = visible(count[...], reverse)  # [j, i]
    scores = jnp.where(seen, dot(Bm_lanes[...], Cm_lanes[...], FIRST), 0)
    columns = jnp.transpose(cum[...])  # [Q, h]
    ones = jnp.ones((PACKED_SUBLANES, call.chunk), call.dtype)
    d_scores = jnp.zeros_like(scores)
    for h in range(call.tile):
        rows, row = call.rows_of(h), slice(h, h + 1)
        D = decay(cum[row] - columns[:, row])
        x_h, dy_h = x[rows].astype(jnp.float32), dy[rows]
        u = x_h * dt[row]
        X = dot(u.astype(call.dtype), dy_h, FIRST) * D
        d_scores += X
        R = (X * scores).astype(call.dtype)
        d_cum_h = jnp.sum(R.astype(jnp.float32), axis=0, keepdims=True) - dot(ones, R, LAST)[:1]
        d_u = dot(dy_h, (scores * D).astype(call.dtype), LAST)
        if carried:
            u_weighted, dy_reading = u * weight[row], dy_h.astype(jnp.float32) * reading[row]
            u_to_end[rows], dy_read[rows] = u_weighted.astype(call.dtype), dy_reading.astype(call.dtype)
            d_u += weight[row] * Z_Bm[rows]
            fell[row] = jnp.sum(u_weighted * Z_Bm[rows], axis=0, keepdims=True)
            Z_S[row] = jnp.sum(Z[rows] * S[rows], axis=0, keepdims=True)
            d_cum_h += jnp.sum(dy_reading * S_Cm[rows], axis=0, keepdims=True) - fell[row]
        d_cum[row] = d_cum_h
        d_dt[row] = jnp.sum(d_u * x_h, axis=0, keepdims=True)
        d_x[rows] = (d_u * dt[row]).astype(call.dtype)

    d_scores = jnp.where(seen, d_scores, 0).astype(call.dtype)
    d_Bm[...] = dot(Cm_lanes[...], d_scores, LAST)
    d_Cm[...] = dot(Bm_lanes[...], d_scores)
    if carried:
        at_end = jnp.sum(fell[...], axis=1, keepdims=True) + jnp.sum(kept[...] * Z_S[...], axis=1, keepdims=True)
        d_cum[...] += jnp.where(last_token(call.chunk, reverse), at_end, 0)
        d_Bm[...] += dot(Z[...].astype(call.dtype), u_to_end[...], FIRST)
        d_Cm[...] += dot(S[...].astype(call.dtype), dy_read[...], FIRST)
        for h in range(call.tile):
            rows = call.rows_of(h)
            Z[rows] = kept[h : h + 1] * Z[rows] + dot(dy_read[rows], Cm[...]) + d_S[rows]

        @pl.when(step == call.chunks - 1)
        def _():
            d_initial[...] = Z[...]
