"""Interval attention in tiles of queries: never a [S, T] array, memory linear in length.

Prefix and own keys share one softmax. Where the structure bounds the keys of a tile, the tile reads only those. The
backward pass computes the scores again from the saved log-sum-exp (arXiv 2205.14135, Algorithm 4): storing them would
cost more than the product does.

Inside, arrays are head-major: queries [B, H, F, r, G, P] with r query heads for each key head H and F frontiers of G
queries (F = 1, G = S without own keys), keys [B, H, T, P], so that every product is a batch of plain ones.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from diffjax.kernels.dispatch import SAVED
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
    q = q.reshape(batch, queries, key_heads, -1, head_dim)
    k, v = jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1)
    if tiles <= 1:
        limit = _key_limit(structure, queries, keys, block_size)
        return _tile(q, k[:, :, :limit], v[:, :, :limit], lo, hi, own).reshape(batch, queries, heads, head_dim)

    pad = tiles * tile - queries

    def split(array, width):  # [B, S, ...] -> [tiles, B, width, ...]
        array = jnp.pad(array, [(0, 0), (0, tiles * width - array.shape[1])] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(batch, tiles, width, *array.shape[2:]), 1, 0)

    per_tile = (
        split(q, tile),
        split(lo, tile),
        split(hi, tile),
        jax.tree.map(lambda array: split(array, tile // size), own),
    )
    outputs = []
    per_span = -(-tiles // SPANS) if structure else tiles
    for first in range(0, tiles, per_span):
        last = min(first + per_span, tiles)
        limit = _key_limit(structure, last * tile, keys, block_size)
        span_k, span_v = k[:, :, :limit], v[:, :, :limit]
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


@jax.custom_vjp
def _tile(q, k, v, lo, hi, own) -> Array:
    """Queries [B, S, H, r, P] against keys [B, H, T, P] and their own blocks, in one softmax: [B, S, H, r, P]."""
    return _forward(q, k, v, lo, hi, own)[0]


def _forward(q, k, v, lo, hi, own):
    dtype = accumulation_dtype(q.dtype)
    key_sets = _key_sets(k, v, lo, hi, own)
    q_ = _head_major(q, own)
    scores = [_scores(q_, keys) for keys in key_sets]
    peaks = [jnp.max(score, axis=-1, initial=jnp.finfo(dtype).min) for score in scores]  # finite without any key
    peak = functools.reduce(jnp.maximum, peaks)
    weights = [jnp.exp(score - peak[..., None]) for score in scores]
    total = sum(jnp.sum(weight, axis=-1) for weight in weights)
    total = jnp.where(total > 0, total, 1)
    y = sum(
        einsum(f"bhfrgt,{keys.axes}->bhfrgp", weight.astype(keys.v.dtype), keys.v)
        for weight, keys in zip(weights, key_sets, strict=True)
    )
    y = checkpoint_name(_token_major((y / total[..., None]).astype(q.dtype), q.shape), SAVED)
    return y, (q, k, v, lo, hi, own, y, checkpoint_name(peak + jnp.log(total), SAVED))


def _backward(saved, dy):
    q, k, v, lo, hi, own, y, log_total = saved
    pull = _head_major(jnp.sum(dy.astype(log_total.dtype) * y, axis=-1), own)  # sum over keys of weight * d_weight
    q_, dy = _head_major(q, own), _head_major(dy, own)
    dq, d_keys = 0, []
    for keys in _key_sets(k, v, lo, hi, own):
        transposed = keys.axes.replace("tp", "pt")  # the small operand is what gets transposed, never the weights
        weight = jnp.exp(_scores(q_, keys) - log_total[..., None])
        d_v = einsum(f"bhfrgp,bhfrgt->{transposed}", dy, weight.astype(dy.dtype))
        d_weight = einsum(f"bhfrgp,{keys.axes}->bhfrgt", dy, keys.v)
        d_score = (weight * (d_weight - pull[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
        d_k = einsum(f"bhfrgp,bhfrgt->{transposed}", q_, d_score)
        dq += einsum(f"bhfrgt,{keys.axes}->bhfrgp", d_score, keys.k)
        d_keys += [jnp.swapaxes(d_k, -1, -2).astype(k.dtype), jnp.swapaxes(d_v, -1, -2).astype(v.dtype)]
    d_own = None if own is None else type(own)(*(jnp.transpose(d, (0, 2, 3, 1, 4)) for d in d_keys[2:]), None)
    return _token_major(dq, q.shape).astype(q.dtype), *d_keys[:2], None, None, d_own


_tile.defvjp(_forward, _backward)


class _Keys(NamedTuple):
    """Keys that queries may read, of all frontiers together ("bhtp") or of each ("bhftp"); allowed broadcasts to
    the scores [B, H, F, r, G, T]."""

    k: Array
    v: Array
    allowed: Array
    axes: str


def _key_sets(k, v, lo, hi, own) -> list[_Keys]:
    """The prefix and, if there are any, the frontiers' own keys."""
    position = jnp.arange(k.shape[2])
    allowed = (lo[..., None] <= position) & (position < hi[..., None])  # [B, S, T]
    key_sets = [_Keys(k, v, _by_frontier(allowed, own)[:, None, :, None], "bhtp")]
    if own is not None:
        own_k, own_v = (jnp.transpose(array, (0, 3, 1, 2, 4)) for array in (own.k, own.v))  # [B, H, F, G, P]
        key_sets.append(_Keys(own_k, own_v, own.valid[:, None, :, None, None], "bhftp"))
    return key_sets


def _scores(q, keys: _Keys) -> Array:
    scores = einsum(f"bhfrgp,{keys.axes}->bhfrgt", q, keys.k) * q.shape[-1] ** -0.5
    return jnp.where(keys.allowed, scores, -jnp.inf)


def _by_frontier(array, own) -> Array:
    """[B, S, ...] -> [B, F, G, ...]"""
    frontiers = 1 if own is None else own.valid.shape[1]
    return array.reshape(len(array), frontiers, array.shape[1] // frontiers, *array.shape[2:])


def _head_major(array, own) -> Array:
    """[B, S, H, r, ...] -> [B, H, F, r, G, ...]"""
    return jnp.moveaxis(_by_frontier(array, own), (3, 1, 4, 2), (1, 2, 3, 4))


def _token_major(array, shape) -> Array:
    """[B, H, F, r, G, P] -> [B, S, H, r, P], the `shape`."""
    return jnp.moveaxis(array, (1, 2, 3, 4), (3, 1, 4, 2)).reshape(shape)
