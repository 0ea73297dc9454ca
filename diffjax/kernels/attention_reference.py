"""Interval attention with one dense score matrix over prefix and own keys: plain, and the truth for the others."""

import jax.numpy as jnp
from jax import Array

from diffjax.kernels.attention_mask import reads, shares_block
from diffjax.kernels.precision import accumulation_dtype


def refusal(**call) -> None:
    """Every call is taken."""


def attend(q, k, v, lo, hi, own, *, structure, block_size: int) -> Array:
    """As `diffjax.kernels.attention.block_attention`; `structure` saves nothing here."""
    del structure, block_size
    dtype = accumulation_dtype(q.dtype)
    batch, queries = q.shape[:2]
    per_key_head = q.shape[2] // k.shape[2]
    position = jnp.arange(k.shape[1])
    allowed = reads(lo[..., None], hi[..., None], position)  # [B, S, T]
    if own is not None:
        frontiers, size = own.valid.shape[1:]
        keys = lambda array: array.reshape(batch, frontiers * size, *array.shape[3:])
        same = shares_block(jnp.arange(queries)[:, None], jnp.arange(frontiers * size), size)
        allowed = jnp.concatenate([allowed, same & keys(own.valid)[:, None]], axis=-1)
        k, v = jnp.concatenate([k, keys(own.k)], axis=1), jnp.concatenate([v, keys(own.v)], axis=1)
    k, v = (jnp.repeat(array, per_key_head, axis=2).astype(dtype) for array in (k, v))
    scores = jnp.einsum("bshp,bthp->bhst", q.astype(dtype), k, precision="highest") * q.shape[-1] ** -0.5
    scores = jnp.where(allowed[:, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(dtype).min)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("bhst,bthp->bshp", weights, v, precision="highest").astype(q.dtype)
