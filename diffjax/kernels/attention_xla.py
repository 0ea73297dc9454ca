"""Interval attention in tiles of queries: never a [S, T] array, memory linear in length.

Prefix and own keys share one softmax. Where the structure bounds the keys of a tile, the tile reads only those.
"""

import jax
import jax.numpy as jnp
from jax import Array

from diffjax.kernels.precision import accumulation_dtype, einsum

TILE = 256  # queries whose scores are alive at once
SPANS = 8  # runs of queries that each have their own static key limit


def attend(q, k, v, lo, hi, own, structure, block_size: int) -> Array:
    """As `diffjax.kernels.attention.block_attention`."""
    batch, queries, heads, head_dim = q.shape
    keys, key_heads = k.shape[1:3]
    size = own.valid.shape[2] if own is not None else 1
    tile = size * max(1, TILE // size)
    tiles = -(-queries // tile)
    if tiles <= 1:
        limit = _key_limit(structure, queries, keys, block_size)
        q = q.reshape(batch, queries, key_heads, -1, head_dim)
        return _tile(q, k[:, :limit], v[:, :limit], lo, hi, own).reshape(batch, queries, heads, head_dim)

    pad = tiles * tile - queries

    def split(array, width):  # [B, S, ...] -> [tiles, B, width, ...]
        array = jnp.pad(array, [(0, 0), (0, tiles * width - array.shape[1])] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(batch, tiles, width, *array.shape[2:]), 1, 0)

    per_tile = (
        split(q.reshape(batch, queries, key_heads, -1, head_dim), tile),
        split(lo, tile),
        split(hi, tile),
        jax.tree.map(lambda array: split(array, tile // size), own),
    )
    outputs = []
    per_span = -(-tiles // SPANS) if structure else tiles
    for first in range(0, tiles, per_span):
        last = min(first + per_span, tiles)
        limit = _key_limit(structure, last * tile, keys, block_size)
        span_k, span_v = k[:, :limit], v[:, :limit]
        attend_tile = lambda tile, span_k=span_k, span_v=span_v: _tile(tile[0], span_k, span_v, *tile[1:])
        outputs.append(jax.lax.map(attend_tile, jax.tree.map(lambda array: array[first:last], per_tile)))  # noqa: B023
    y = jnp.moveaxis(jnp.concatenate(outputs), 0, 1).reshape(batch, queries + pad, heads, head_dim)
    return y[:, :queries]


def _key_limit(structure, end: int, keys: int, block_size: int) -> int:
    """Keys that queries before `end` may read, by the promise of `structure`."""
    if structure == "clean":
        return min(keys, -(-end // block_size) * block_size)
    if structure == "frontiers":
        return min(keys, (end - 1) // block_size * block_size)
    return keys


@jax.checkpoint
def _tile(q, k, v, lo, hi, own) -> Array:
    """Queries [B, S, Hkv, r, P] against keys [B, T, Hkv, P] and their own blocks, in one softmax.

    Scores are computed again in the backward pass: storing them would cost more than the product does.
    """
    batch, queries, key_heads, _, head_dim = q.shape
    dtype = accumulation_dtype(q.dtype)
    scale = head_dim**-0.5
    position = jnp.arange(k.shape[1])
    allowed = (lo[..., None] <= position) & (position < hi[..., None])  # [B, S, T]
    scores = einsum("bshrp,bthp->bhrst", q, k) * scale
    scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, initial=jnp.finfo(dtype).min)  # finite, so that a query without keys stays finite
    if own is not None:
        q_own = q.reshape(batch, -1, own.valid.shape[2], *q.shape[2:])
        own_scores = einsum("bfihrp,bfjhp->bhrfij", q_own, own.k) * scale
        own_scores = jnp.where(own.valid[:, None, None, :, None], own_scores, -jnp.inf)
        peak = jnp.maximum(peak, jnp.max(own_scores, axis=-1).reshape(peak.shape))
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.exp(scores - peak[..., None])
    total = jnp.sum(weights, axis=-1)
    y = einsum("bhrst,bthp->bshrp", weights.astype(v.dtype), v)
    if own is not None:
        own_weights = jnp.exp(own_scores - peak.reshape(own_scores.shape[:-1])[..., None])
        total = total + jnp.sum(own_weights, axis=-1).reshape(total.shape)
        y = y + einsum("bhrfij,bfjhp->bfihrp", own_weights.astype(v.dtype), own.v).reshape(y.shape)
    total = jnp.moveaxis(total, -1, 1)[..., None]  # [B, S, Hkv, r, 1]
    return (y / jnp.where(total > 0, total, 1)).astype(q.dtype)
