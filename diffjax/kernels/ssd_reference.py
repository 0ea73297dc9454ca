"""SSD as its recurrence, token by token: slow, plain, and the truth the other backends are held to."""

import jax
import jax.numpy as jnp
from jax import Array

from diffjax.kernels.precision import accumulation_dtype
from diffjax.kernels.ssd_boundary import Boundary


def scan(x, dt, A, Bm, Cm, block_size: int, initial_state, reset) -> tuple[Array, Boundary]:
    """As `diffjax.kernels.ssd.ssd_scan`; keeps the state at every block edge."""
    length, whole = x.shape[1], x.shape[1] // block_size
    starts = jnp.repeat(reset, block_size, axis=1) & (jnp.arange((whole + 1) * block_size) % block_size == 0)
    y, states = _recurrence(x, dt, A, Bm, Cm, initial_state, starts[:, :length])
    states = jnp.concatenate([initial_state[:, None].astype(states.dtype), states], axis=1)  # [B, T+1, H, P, N]
    edges = [min(edge, length) for edge in range(0, length + block_size, block_size)]
    if length % block_size == 0:
        edges = edges[: whole + 1]
    return y, Boundary(states[:, jnp.array(edges)], reset, block_size=block_size, chunk=block_size)


def block(x, dt, A, Bm, Cm, seed, reverse: bool) -> Array:
    """As `diffjax.kernels.ssd.ssd_block`: blocks are rows, and reverse is flip, scan, flip."""
    batch, frontiers, length = x.shape[:3]
    rows = lambda array: array.reshape(batch * frontiers, *array.shape[2:])
    flip = lambda array: jnp.flip(array, axis=1) if reverse else array
    if seed is None:
        seed = jnp.zeros((batch, frontiers, *x.shape[3:], Bm.shape[-1]), dt.dtype)
    no_reset = jnp.zeros((batch * frontiers, 2), bool)
    streams = [flip(rows(array)) for array in (x, dt, Bm, Cm)]
    y, _ = scan(*streams[:2], A, *streams[2:], length, rows(seed), no_reset)
    return flip(y).reshape(x.shape)


def _recurrence(x, dt, A, Bm, Cm, state, starts) -> tuple[Array, Array]:
    """y [B, T, H, P] and the state after every token [B, T, H, P, N]; `starts` [B, T] zeroes the state before it."""
    dtype = accumulation_dtype(x.dtype)
    per_group = x.shape[2] // Bm.shape[2]

    def step(state, token):
        x_t, dt_t, B_t, C_t, start = token  # [B, H, P], [B, H], [B, g, N], [B, g, N], [B]
        B_t, C_t = (jnp.repeat(z, per_group, axis=1).astype(dtype) for z in (B_t, C_t))  # [B, H, N]
        state = jnp.where(start[:, None, None, None], 0, state)
        state = jnp.exp(dt_t * A)[..., None, None] * state + (dt_t[..., None] * x_t)[..., None] * B_t[:, :, None]
        return state, (jnp.sum(state * C_t[:, :, None], axis=-1), state)

    by_token = [jnp.moveaxis(array, 1, 0) for array in (x.astype(dtype), dt.astype(dtype), Bm, Cm, starts)]
    _, (y, states) = jax.lax.scan(step, state.astype(dtype), by_token)
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), jnp.moveaxis(states, 0, 1)
