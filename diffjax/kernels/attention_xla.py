"""Interval attention in tiles of queries and pieces of keys: never an [S, T] array, memory linear in length.

A tile of queries visits the pieces of keys between its least `lo` and its greatest `hi` and merges them by the running
maximum and sum of a softmax that starts with the queries' own blocks. The bounds are data: keys behind a causal edge,
of other documents, or in a context that no row has filled so far cost nothing. The backward pass computes the scores
again from the saved log-sum-exp (arXiv 2205.14135, Algorithm 4) in the same loops, which it writes out, as a loop of
unknown length has no derivative of its own. A decoding frontier is one tile of few queries and visits long pieces.

Inside a tile, arrays are head-major: queries [B, H, F, r, G, P] with r query heads for each key head H and F frontiers
of G queries (F = 1, G = tile without own keys), keys [B, H, T, P], so that every product is a batch of plain ones. Keys
turn piece by piece: a long context that is hardly filled is hardly touched.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from diffjax.kernels.attention_mask import reads
from diffjax.kernels.dispatch import SAVED
from diffjax.kernels.precision import accumulation_dtype, einsum
from diffjax.kernels.tokens import pad_tokens

TILE = 256  # queries whose scores are alive at once
PIECE, LONG_PIECE = 256, 1024  # keys of a step of the loop, for a full tile of queries and for a few queries


def refusal(**call) -> None:
    """Every call is taken."""


def attend(q, k, v, lo, hi, own, *, structure, block_size: int) -> Array:
    """As `diffjax.kernels.attention.block_attention`; the intervals say what `structure` promises."""
    del structure, block_size
    batch, queries, heads, head_dim = q.shape
    q = q.reshape(batch, queries, k.shape[2], -1, head_dim)
    return _attend(q, k, v, lo, hi, own).reshape(batch, queries, heads, head_dim)


@jax.custom_vjp
def _attend(q, k, v, lo, hi, own) -> Array:
    """Queries [B, S, H, r, P] against keys [B, T, H, P] and their own blocks, in one softmax: [B, S, H, r, P]."""
    return _forward(q, k, v, lo, hi, own)[0]


def _forward(q, k, v, lo, hi, own):
    tiling = _Tiling.of(q, k, own)
    tiles = tiling.split((q, lo, hi)), tiling.split_own(own), tiling.bounds(lo, hi)
    y, log_total = tiling.join(jax.lax.map(lambda tile: _forward_tile(tiling, k, v, *tile), tiles), q.shape[1])
    y, log_total = checkpoint_name(y, SAVED), checkpoint_name(log_total, SAVED)
    return y, (q, k, v, lo, hi, own, y, log_total)


def _backward(saved, dy):
    q, k, v, lo, hi, own, y, log_total = saved
    tiling = _Tiling.of(q, k, own)
    pull = jnp.sum(dy.astype(log_total.dtype) * y, axis=-1)  # sum over keys of weight * d_weight
    tiles = tiling.split((q, lo, hi, dy, log_total, pull)), tiling.split_own(own), tiling.bounds(lo, hi)
    zeros = [jnp.zeros(array.shape, log_total.dtype) for array in (k, v)]
    (d_k, d_v), (dq, d_own) = jax.lax.scan(functools.partial(_backward_tile, tiling, k, v), zeros, tiles)
    if own is not None:
        d_own = type(own)(*tiling.join(d_own, own.k.shape[1]), None)
    return tiling.join(dq, q.shape[1]), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, d_own


_attend.defvjp(_forward, _backward)


class _Tiling(NamedTuple):
    """How queries are cut into `tiles` of `tile` queries, frontiers of `size` whole, and keys into pieces."""

    tiles: int
    tile: int
    size: int
    keys: int
    piece: int

    @classmethod
    def of(cls, q, k, own) -> "_Tiling":
        queries, keys = q.shape[1], k.shape[1]
        size = 1 if own is None else own.valid.shape[2]
        tile = max(1, min(queries, size * max(1, TILE // size)))
        return cls(-(-queries // tile), tile, size, keys, min(PIECE if tile > TILE // 4 else LONG_PIECE, keys))

    def split(self, arrays, width: int | None = None):
        """Each [B, S, ...] -> [tiles, B, width, ...]"""
        width = width or self.tile

        def split(array):
            array = pad_tokens(array, self.tiles * width)
            return jnp.moveaxis(array.reshape(len(array), self.tiles, width, *array.shape[2:]), 1, 0)

        return jax.tree.map(split, arrays)

    def split_own(self, own):
        return self.split(own, self.tile // self.size)

    def join(self, arrays, length: int):
        """Each [tiles, B, width, ...] -> [B, length, ...]"""
        whole = lambda array: jnp.moveaxis(array, 0, 1).reshape(array.shape[1], -1, *array.shape[3:])
        return jax.tree.map(lambda array: whole(array)[:, :length], arrays)

    def bounds(self, lo, hi) -> tuple[Array, Array]:
        """The first piece that any query of each tile reads, and the first behind the last: [tiles], [tiles]."""
        piece = max(self.piece, 1)
        lo, hi = self.split((jnp.where(hi > lo, lo, self.keys), jnp.where(hi > lo, hi, 0)))
        lo = jnp.clip(jnp.min(lo, axis=(1, 2)), 0)
        hi = jnp.clip(jnp.max(hi, axis=(1, 2), initial=0), 0, self.keys)
        return lo // piece, -(-hi // piece)

    def walk(self, bounds, add, carry):
        """`add` for every piece within the bounds of a tile; a single piece needs no loop."""
        if self.keys > self.piece:
            return jax.lax.fori_loop(*bounds, add, carry)
        return add(0, carry) if self.keys else carry


class _Keys(NamedTuple):
    """Keys that queries may read, of all frontiers together ("bhtp") or of each ("bhftp"); allowed broadcasts to
    the scores [B, H, F, r, G, T]."""

    k: Array
    v: Array
    allowed: Array
    axes: str

    def scores(self, q) -> Array:
        scores = einsum(f"bhfrgp,{self.axes}->bhfrgt", q, self.k) * q.shape[-1] ** -0.5
        return jnp.where(self.allowed, scores, -jnp.inf)


def _piece(tiling: _Tiling, k, v, number, lo, hi, own) -> tuple[_Keys, Array]:
    """The keys of one piece, and where they start. The last piece is moved back to be whole and leaves out what the
    one before it holds."""
    start = jnp.minimum(number * tiling.piece, tiling.keys - tiling.piece)
    k, v = (jnp.moveaxis(jax.lax.dynamic_slice_in_dim(array, start, tiling.piece, axis=1), 2, 1) for array in (k, v))
    position = start + jnp.arange(tiling.piece)
    allowed = reads(lo[..., None], hi[..., None], position) & (position >= number * tiling.piece)  # [B, S, T]
    return _Keys(k, v, _by_frontier(allowed, own)[:, None, :, None], "bhtp"), start


def _own_keys(own) -> _Keys:
    k, v = (jnp.transpose(array, (0, 3, 1, 2, 4)) for array in (own.k, own.v))  # [B, H, F, G, P]
    return _Keys(k, v, own.valid[:, None, :, None, None], "bhftp")


class _Softmax(NamedTuple):
    """A softmax over the keys seen so far: greatest score, sum of weights [B, H, F, r, G], weighted values [.., P]."""

    peak: Array
    total: Array
    values: Array

    @classmethod
    def empty(cls, q) -> "_Softmax":
        dtype = accumulation_dtype(q.dtype)
        lowest = jnp.full(q.shape[:-1], jnp.finfo(dtype).min, dtype)  # finite without any key
        return cls(lowest, jnp.zeros_like(lowest), jnp.zeros(q.shape, dtype))

    def with_keys(self, q, keys: _Keys) -> "_Softmax":
        scores = keys.scores(q)
        peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
        weights, decay = jnp.exp(scores - peak[..., None]), jnp.exp(self.peak - peak)
        values = einsum(f"bhfrgt,{keys.axes}->bhfrgp", weights.astype(keys.v.dtype), keys.v)
        return _Softmax(peak, self.total * decay + jnp.sum(weights, axis=-1), self.values * decay[..., None] + values)


def _forward_tile(tiling: _Tiling, k, v, queries, own, bounds):
    q, lo, hi = queries
    q_ = _head_major(q, own)
    softmax = _Softmax.empty(q_)
    if own is not None:
        softmax = softmax.with_keys(q_, _own_keys(own))
    add = lambda number, softmax: softmax.with_keys(q_, _piece(tiling, k, v, number, lo, hi, own)[0])
    softmax = tiling.walk(bounds, add, softmax)
    total = jnp.where(softmax.total > 0, softmax.total, 1)
    y = _token_major((softmax.values / total[..., None]).astype(q.dtype), q.shape)
    return y, _token_major(softmax.peak + jnp.log(total), q.shape[:-1])


def _backward_tile(tiling: _Tiling, k, v, d_keys, tile):
    (q, lo, hi, dy, log_total, pull), own, bounds = tile
    q_, dy, log_total, pull = (_head_major(array, own) for array in (q, dy, log_total, pull))

    def gradients(keys: _Keys):
        """Of q, k and v by these keys."""
        transposed = keys.axes.replace("tp", "pt")  # the small operand is what gets transposed, never the weights
        weight = jnp.exp(keys.scores(q_) - log_total[..., None])
        d_v = einsum(f"bhfrgp,bhfrgt->{transposed}", dy, weight.astype(dy.dtype))
        d_weight = einsum(f"bhfrgp,{keys.axes}->bhfrgt", dy, keys.v)
        d_score = (weight * (d_weight - pull[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
        d_k = einsum(f"bhfrgp,bhfrgt->{transposed}", q_, d_score)
        return einsum(f"bhfrgt,{keys.axes}->bhfrgp", d_score, keys.k), *(jnp.swapaxes(d, -1, -2) for d in (d_k, d_v))

    def add(number, carry):
        keys, start = _piece(tiling, k, v, number, lo, hi, own)
        dq, *d_pieces = gradients(keys)
        put = lambda whole, piece: jax.lax.dynamic_update_slice_in_dim(
            whole,
            jax.lax.dynamic_slice_in_dim(whole, start, tiling.piece, axis=1) + jnp.moveaxis(piece, 1, 2),
            start,
            axis=1,
        )
        return carry[0] + dq, [put(*pair) for pair in zip(carry[1], d_pieces, strict=True)]

    dq, d_own = jnp.zeros(q_.shape, log_total.dtype), None
    if own is not None:
        dq, *d_own = gradients(_own_keys(own))
        d_own = [jnp.transpose(d, (0, 2, 3, 1, 4)).astype(own.k.dtype) for d in d_own]
    dq, d_keys = tiling.walk(bounds, add, (dq, d_keys))
    return d_keys, (_token_major(dq.astype(q.dtype), q.shape), d_own)


def _by_frontier(array, own) -> Array:
    """[B, S, ...] -> [B, F, G, ...]"""
    frontiers = 1 if own is None else own.valid.shape[1]
    return array.reshape(len(array), frontiers, array.shape[1] // frontiers, *array.shape[2:])


def _head_major(array, own) -> Array:
    """[B, S, H, r, ...] -> [B, H, F, r, G, ...]"""
    return jnp.moveaxis(_by_frontier(array, own), (3, 1, 4, 2), (1, 2, 3, 4))


def _token_major(array, shape) -> Array:
    """[B, H, F, r, G, ...] -> [B, S, H, r, ...], the `shape`."""
    return jnp.moveaxis(array, (1, 2, 3, 4), (3, 1, 4, 2)).reshape(shape)
