"""Interval attention on GPUs: a Pallas Triton kernel that visits only the tiles of keys its queries read.

A program takes a tile of queries of one head, loads their intervals as vectors, and walks the key tiles from the least
`lo` to the greatest `hi`, then the tiles that hold its queries' own blocks, in one softmax. The log-sum-exp is saved in
float32. The backward pass is two kernels: one walks keys and gives dq, one walks the queries that may read a tile of
keys, of all query heads of the key head, and gives dk and dv; own keys take the second kernel again.

Where there are too few programs for the GPU (a decoding frontier against a long context), each tile's keys are divided
among several programs, which a softmax over their log-sum-exps merges; rows divide their own lengths.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from diffjax.kernels.attention_mask import reads, shares_block
from diffjax.kernels.dispatch import LARGEST_OPERAND, SAVED, interpreting
from diffjax.kernels.precision import dot
from diffjax.kernels.tokens import pad_tokens

FORWARD_QUERIES, BACKWARD_QUERIES, KEYS = 128, 64, 64  # most queries, and keys, of a tile
SMALLEST_TILE = 16  # of a product in Triton
HEAD_DIMS = (16, 32, 64, 128)
ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
KEY_TILES_OF_SPLIT = 4  # fewer are not worth a program of their own


def refusal(*, q_shape, k_shape, own_shape, structure, block_size, dtype) -> str | None:
    """Why the kernels cannot run this call, or None; any block size and any intervals are taken."""
    del structure, block_size
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"takes float32, bfloat16 and float16, not {dtype}"
    if q_shape[-1] not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda size: (abs(size - q_shape[-1]), -size))
        return f"takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {q_shape[-1]}; the nearest is {nearest}"
    for name, shape in (("queries", q_shape), ("keys", k_shape), ("own keys", own_shape or ())):
        if (size := math.prod(shape)) >= LARGEST_OPERAND:
            return f"takes fewer than 2^31 elements of {name}, not {size}; use fewer rows at a time"
    if 0 in q_shape:
        return f"takes at least one query, not {list(q_shape)}"
    return None


def attend(q, k, v, lo, hi, own, *, structure, block_size: int) -> Array:
    """As `diffjax.kernels.attention.block_attention`; the intervals say what `structure` promises."""
    del structure, block_size
    if k.shape[1] == 0:  # no interval holds a key; the kernels walk at least one
        k = v = jnp.zeros((k.shape[0], 1, *k.shape[2:]), k.dtype)
    return _attend(q, k, v, lo, jnp.minimum(hi, k.shape[1]), own)  # a tile may reach past the last key


@jax.custom_vjp
def _attend(q, k, v, lo, hi, own) -> Array:
    return _forward(q, k, v, lo, hi, own)[0]


def _forward(q, k, v, lo, hi, own):
    batch, queries, heads, head_dim = q.shape
    tiling = _Tiling.of(q, k, own, FORWARD_QUERIES)
    programs = batch * heads * tiling.query_tiles
    splits = max(1, min(-(-ENOUGH_PROGRAMS // programs), tiling.key_tiles // KEY_TILES_OF_SPLIT))
    grid = (tiling.query_tiles * splits, heads, batch)
    out_spec = lambda *tail: pl.BlockSpec(
        (None, None, tiling.queries, None, *tail), lambda i, h, b: (i % splits, b, i // splits, h, *(0 for _ in tail))
    )
    rows = (splits, batch, tiling.query_tiles * tiling.queries, heads)
    y, log_total = _call(
        functools.partial(_forward_kernel, tiling, splits),
        "interval_attention_forward",
        grid,
        *tiling.query_operands(q, k, v, lo, hi, own, splits),
        out_specs=[out_spec(head_dim), out_spec()],
        out_shape=[
            jax.ShapeDtypeStruct((*rows, head_dim), q.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ],
    )
    y, log_total = y[:, :, :queries], log_total[:, :, :queries]
    if splits == 1:
        y, log_total = y[0], log_total[0]
    else:
        parts, log_total = log_total, jax.nn.logsumexp(log_total, axis=0)
        y = jnp.sum(jnp.exp(parts - log_total)[..., None] * y, axis=0).astype(q.dtype)
    y, log_total = checkpoint_name(y, SAVED), checkpoint_name(log_total, SAVED)
    return y, (q, k, v, lo, hi, own, y, log_total)


def _backward(saved, dy):
    q, k, v, lo, hi, own, y, log_total = saved
    batch, queries, heads, head_dim = q.shape
    tiling = _Tiling.of(q, k, own, BACKWARD_QUERIES)
    pull = jnp.sum(dy.astype(jnp.float32) * y, axis=-1)  # [B, S, H], the sum over keys of weight * d_weight
    arrays, specs = tiling.query_operands(q, k, v, lo, hi, own)
    per_query, per_row = tiling.query_spec(head_dim), tiling.query_spec()
    dq = _call(
        functools.partial(_query_gradient_kernel, tiling),
        "interval_attention_query_gradient",
        (tiling.query_tiles, heads, batch),
        [*arrays, *(tiling.pad_queries(array) for array in (dy, log_total, pull))],
        [*specs, per_query, per_row, per_row],
        out_specs=per_query,
        out_shape=jax.ShapeDtypeStruct(arrays[0].shape, q.dtype),
    )[:, :queries]
    gradient_of = functools.partial(_key_gradients, tiling, q, lo, hi, dy, log_total, pull)
    d_k, d_v = gradient_of(k, v, None, tiling.readers(lo, hi))
    d_own = None
    if own is not None:
        own_k, own_v, valid = (array.reshape(batch, queries, *array.shape[3:]) for array in own)
        d_own = gradient_of(own_k, own_v, valid, tiling.own_readers(batch))
        d_own = type(own)(*(d.reshape(own.k.shape) for d in d_own), None)
    return dq, d_k, d_v, None, None, d_own


_attend.defvjp(_forward, _backward)


def _key_gradients(tiling: "_Tiling", q, lo, hi, dy, log_total, pull, k, v, valid, readers) -> tuple[Array, Array]:
    """dk, dv like k, v [B, T, Hkv, P], which are own keys if `valid` [B, T] is given. readers: as from `readers`."""
    batch, keys, key_heads, head_dim = k.shape
    by_key_head = lambda array: array.reshape(*array.shape[:2], key_heads, -1, *array.shape[3:])
    padded = [tiling.pad_queries(array) for array in (*map(by_key_head, (q, dy, log_total, pull)), lo, hi)]
    all_queries = lambda array: pl.BlockSpec(
        (None, array.shape[1], None, *array.shape[3:]), lambda j, h, b: (b, 0, h, *(0 for _ in array.shape[3:]))
    )
    per_key = pl.BlockSpec((None, tiling.keys, None, head_dim), lambda j, h, b: (b, j, h, 0))
    whole = lambda array: pl.BlockSpec((None, array.shape[1]), lambda j, h, b: (b, 0))
    arrays = [*padded, *map(tiling.pad_keys, (k, v)), *readers]
    specs = [*map(all_queries, padded[:4]), *map(whole, padded[4:]), per_key, per_key, *map(whole, readers)]
    if valid is not None:
        arrays.append(tiling.pad_keys(valid.astype(jnp.int32)))
        specs.append(pl.BlockSpec((None, tiling.keys), lambda j, h, b: (b, j)))
    shape = arrays[6].shape
    d_keys = _call(
        functools.partial(_key_gradient_kernel, tiling, q.shape[2] // key_heads, valid is not None),
        "interval_attention_key_gradient" if valid is None else "interval_attention_own_key_gradient",
        (shape[1] // tiling.keys, key_heads, batch),
        arrays,
        specs,
        out_specs=[per_key, per_key],
        out_shape=[jax.ShapeDtypeStruct(shape, k.dtype), jax.ShapeDtypeStruct(shape, v.dtype)],
    )
    return tuple(d[:, :keys] for d in d_keys)


class _Tiling(NamedTuple):
    """Tiles of `queries` queries and `keys` keys, and how many there are; own blocks of `size` tokens (0: none)."""

    queries: int
    query_tiles: int
    keys: int
    key_tiles: int
    size: int
    own_tiles: int

    @classmethod
    def of(cls, q, k, own, most_queries: int) -> "_Tiling":
        tile = lambda length, most: max(SMALLEST_TILE, min(most, pl.next_power_of_2(length)))
        queries, keys = tile(q.shape[1], most_queries), tile(k.shape[1], KEYS)
        size = 0 if own is None else own.valid.shape[2]
        own_tiles = 0 if own is None else pl.cdiv(q.shape[1], keys)
        return cls(queries, pl.cdiv(q.shape[1], queries), keys, pl.cdiv(k.shape[1], keys), size, own_tiles)

    def pad_queries(self, array) -> Array:
        return _whole_tiles(array, self.queries)

    def pad_keys(self, array) -> Array:
        return _whole_tiles(array, self.keys)

    def one_tile(self, array) -> Array:
        """Keys for kernels that move their last tile back to be whole (no copy of a long context): a tile at least."""
        return array if array.shape[1] >= self.keys else self.pad_keys(array)

    def query_spec(self, *tail: int, splits: int = 1) -> pl.BlockSpec:
        """Of [B, S, H, ...], a program's own tile and head."""
        index = lambda i, h, b: (b, i // splits, h, *(0 for _ in tail))
        return pl.BlockSpec((None, self.queries, None, *tail), index)

    def query_operands(self, q, k, v, lo, hi, own, splits: int = 1) -> tuple[list[Array], list[pl.BlockSpec]]:
        """What a program for a tile of queries reads: q, k, v, lo, hi and, if there are own keys, own k, v, valid."""
        per_key_head = q.shape[2] // k.shape[2]
        of_keys = lambda array: pl.BlockSpec(
            (None, array.shape[1], None, array.shape[3]), lambda i, h, b: (b, 0, h // per_key_head, 0)
        )
        interval = pl.BlockSpec((None, self.queries), lambda i, h, b: (b, i // splits))
        k, v = self.one_tile(k), self.one_tile(v)
        arrays = [self.pad_queries(q), k, v, self.pad_queries(lo), self.pad_queries(hi)]
        specs = [self.query_spec(q.shape[3], splits=splits), of_keys(k), of_keys(v), interval, interval]
        if own is not None:
            flat = lambda array: self.one_tile(array.reshape(len(q), q.shape[1], *array.shape[3:]))
            own_k, own_v, valid = flat(own.k), flat(own.v), flat(own.valid.astype(jnp.int32))
            arrays += [own_k, own_v, valid]
            specs += [of_keys(own_k), of_keys(own_v), pl.BlockSpec((None, valid.shape[1]), lambda i, h, b: (b, 0))]
        return arrays, specs

    def key_bounds(self, lo, hi) -> tuple[Array, Array]:
        """The first key tile that queries with these intervals read, and the first behind the last."""
        end = self.key_tiles * self.keys
        some = hi > lo
        lo, hi = jnp.min(jnp.where(some, lo, end), axis=-1), jnp.max(jnp.where(some, hi, 0), axis=-1)
        return lax.div(jnp.maximum(lo, 0), self.keys), lax.div(jnp.minimum(hi, end) + (self.keys - 1), self.keys)

    def own_bounds(self, query_tile) -> tuple[Array, Array]:
        """The tiles of own keys that hold the blocks of a tile of queries."""
        first = lax.div(query_tile * self.queries, self.size) * self.size
        last = (lax.div(query_tile * self.queries + (self.queries - 1), self.size) + 1) * self.size
        return lax.div(first, self.keys), jnp.minimum(lax.div(last + (self.keys - 1), self.keys), self.own_tiles)

    def readers(self, lo, hi) -> tuple[Array, Array]:
        """For each tile of keys the first tile of queries that may read it and the first behind: [B, tiles], twice."""
        tiles = lambda array: self.pad_queries(array).reshape(len(array), self.query_tiles, self.queries)
        first_key, last_key = self.key_bounds(tiles(lo), tiles(hi))  # [B, query tiles]
        key_tile, query_tile = jnp.arange(self.key_tiles)[:, None], jnp.arange(self.query_tiles)
        overlap = reads(first_key[:, None], last_key[:, None], key_tile)  # fused into the two reductions
        first = jnp.min(jnp.where(overlap, query_tile, self.query_tiles), axis=-1)
        last = jnp.max(jnp.where(overlap, query_tile + 1, 0), axis=-1)
        return first.astype(jnp.int32), last.astype(jnp.int32)

    def own_readers(self, batch: int) -> tuple[Array, Array]:
        """The same for tiles of own keys."""
        start = np.arange(self.own_tiles) * self.keys
        first = start // self.size * self.size // self.queries
        last = -(-((start + self.keys - 1) // self.size + 1) * self.size // self.queries)
        rows = lambda tiles: jnp.broadcast_to(jnp.asarray(tiles, jnp.int32), (batch, self.own_tiles))
        return rows(first), rows(np.minimum(last, self.query_tiles))


def _forward_kernel(tiling: _Tiling, splits: int, q_ref, k_ref, v_ref, lo_ref, hi_ref, *refs):
    *own_refs, y_ref, log_total_ref = refs
    query_tile, split = lax.div(pl.program_id(0), splits), lax.rem(pl.program_id(0), splits)
    q = q_ref[...]
    scale = q.shape[1] ** -0.5

    def add(keys_ref, values_ref, tile, allowed, softmax):
        peak, total, values = softmax
        scores = jnp.where(allowed, dot(q, keys_ref[tile, :], (1, 1)) * scale, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights, decay = jnp.exp(scores - new_peak[:, None]), jnp.exp(peak - new_peak)
        values = values * decay[:, None] + dot(weights.astype(q.dtype), values_ref[tile, :])
        return new_peak, total * decay + jnp.sum(weights, axis=1), values

    empty = (
        jnp.full((tiling.queries,), jnp.finfo(jnp.float32).min, jnp.float32),  # finite without any key
        jnp.zeros((tiling.queries,), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    walk = functools.partial(_walk_keys, tiling, query_tile, k_ref, v_ref, lo_ref, hi_ref, own_refs, split, splits)
    peak, total, values = walk(add, empty)
    total = jnp.where(total > 0, total, 1)
    y_ref[...] = (values / total[:, None]).astype(y_ref.dtype)
    log_total_ref[...] = peak + jnp.log(total)


def _query_gradient_kernel(tiling: _Tiling, q_ref, k_ref, v_ref, lo_ref, hi_ref, *refs):
    *own_refs, dy_ref, log_total_ref, pull_ref, dq_ref = refs
    q, dy, log_total, pull = q_ref[...], dy_ref[...], log_total_ref[...][:, None], pull_ref[...][:, None]
    scale = q.shape[1] ** -0.5

    def add(keys_ref, values_ref, tile, allowed, dq):
        k = keys_ref[tile, :]
        scores = jnp.where(allowed, dot(q, k, (1, 1)) * scale, -jnp.inf)
        d_score = jnp.exp(scores - log_total) * (dot(dy, values_ref[tile, :], (1, 1)) - pull) * scale
        return dq + dot(d_score.astype(q.dtype), k)

    dq = _walk_keys(
        tiling, pl.program_id(0), k_ref, v_ref, lo_ref, hi_ref, own_refs, 0, 1, add, jnp.zeros(q.shape, jnp.float32)
    )
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _walk_keys(tiling: _Tiling, query_tile, k_ref, v_ref, lo_ref, hi_ref, own_refs, split, splits: int, add, carry):
    """`add` over the tiles of keys of one split of a tile of queries; the first split takes the own keys."""
    offsets = lax.broadcasted_iota(jnp.int32, (tiling.queries, tiling.keys), 1)

    def walk(bounds, keys_ref, values_ref, allowed, carry):
        def step(number, carry):
            start = jnp.minimum(number * tiling.keys, keys_ref.shape[0] - tiling.keys)
            tile = pl.ds(start, tiling.keys)
            position = start + offsets
            new = position >= number * tiling.keys  # not in the tile before, where the last one is moved back
            return add(keys_ref, values_ref, tile, allowed(tile, position) & new, carry)

        return lax.fori_loop(*bounds, step, carry)

    lo, hi = lo_ref[...], hi_ref[...]
    first, last = tiling.key_bounds(lo, hi)
    if splits > 1:
        share = lax.div(jnp.maximum(last - first, 0) + (splits - 1), splits)
        first, last = first + split * share, jnp.minimum(last, first + (split + 1) * share)
    in_interval = lambda tile, position: reads(lo[:, None], hi[:, None], position)
    carry = walk((first, last), k_ref, v_ref, in_interval, carry)
    if own_refs:
        own_k_ref, own_v_ref, valid_ref = own_refs
        query = query_tile * tiling.queries + lax.broadcasted_iota(jnp.int32, (tiling.queries, tiling.keys), 0)
        in_own = lambda tile, position: shares_block(query, position, tiling.size) & (valid_ref[tile] > 0)[None, :]
        first, last = tiling.own_bounds(query_tile)
        if splits > 1:
            last = jnp.where(split == 0, last, first)
        carry = walk((first, last), own_k_ref, own_v_ref, in_own, carry)
    return carry


def _key_gradient_kernel(tiling: _Tiling, per_key_head: int, own: bool, *refs):
    q_ref, dy_ref, log_total_ref, pull_ref, lo_ref, hi_ref, k_ref, v_ref, first_ref, last_ref, *refs = refs
    *valid_refs, d_k_ref, d_v_ref = refs
    key_tile = pl.program_id(0)
    k, v = k_ref[...], v_ref[...]
    scale = k.shape[1] ** -0.5
    key = key_tile * tiling.keys + lax.broadcasted_iota(jnp.int32, (tiling.keys, tiling.queries), 0)
    offsets = lax.broadcasted_iota(jnp.int32, (tiling.keys, tiling.queries), 1)
    valid = valid_refs[0][...][:, None] > 0 if own else None
    first = first_ref[key_tile]

    def add(step, d_keys):
        """One tile of queries of one of the query heads; scores are [keys, queries]."""
        number, head = first + lax.div(step, per_key_head), lax.rem(step, per_key_head)
        tile = pl.ds(number * tiling.queries, tiling.queries)
        q, dy = q_ref[tile, head, :], dy_ref[tile, head, :]
        if own:
            allowed = shares_block(number * tiling.queries + offsets, key, tiling.size) & valid
        else:
            allowed = reads(lo_ref[tile][None, :], hi_ref[tile][None, :], key)
        scores = jnp.where(allowed, dot(k, q, (1, 1)) * scale, -jnp.inf)
        weight = jnp.exp(scores - log_total_ref[tile, head][None, :])
        d_v = d_keys[1] + dot(weight.astype(dy.dtype), dy)
        d_score = weight * (dot(v, dy, (1, 1)) - pull_ref[tile, head][None, :]) * scale
        return d_keys[0] + dot(d_score.astype(q.dtype), q), d_v

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = lax.fori_loop(0, (last_ref[key_tile] - first) * per_key_head, add, (zeros, zeros))
    d_k_ref[...] = d_k.astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


def _whole_tiles(array, tile: int) -> Array:
    """[B, T, ...] to whole tiles: a kernel has no bounds checks of its own."""
    return pad_tokens(array, pl.cdiv(array.shape[1], tile) * tile)


def _call(kernel, name: str, grid, arrays, specs, *, out_specs, out_shape):
    head_dim = arrays[0].shape[-1]
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=4 if head_dim <= 64 else 8, num_stages=2),
        interpret=interpreting(),
    )(*arrays)
