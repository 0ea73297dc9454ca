"""Interval attention on TPUs: splash attention (jax.experimental.pallas.ops.tpu) under the masks `structure` promises.

Splash visits tiles by a mask that is known when the program is traced, and compares segment ids inside them. Block and
token order are the mask; documents, pads and own valid keys are ids, made here from the intervals. Frontiers read keys
of two kinds, the clean stream and their own, one behind the other. Everything is padded to whole lanes of 128.

What the mask cannot promise (decoding, a few frontiers) is refused.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from diffjax.kernels.attention_mask import shares_block
from diffjax.kernels.dispatch import SAVED, interpreting
from diffjax.kernels.pallas_tpu import LANES
from diffjax.kernels.tokens import pad_tokens

SMALLEST_HEAD_DIM = 64
MOST_TOKENS = 2**19  # of segment ids
TILES = (512, 256, 128)  # queries and keys of a tile
NO_QUERY, NO_KEY = -2, -1  # ids of pads: no key has the first, no query the second


def refusal(*, q_shape, k_shape, own_shape, structure, block_size, dtype) -> str | None:
    """Why splash attention cannot run this call, or None."""
    if structure is None:
        return "needs a mask known in advance: structure 'blocks', 'causal' or 'frontiers', not None"
    if (structure == "frontiers") != (own_shape is not None):
        return "takes own keys with structure 'frontiers', and only there"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16, not {dtype}; the nearest is float32"
    if q_shape[-1] % SMALLEST_HEAD_DIM:
        nearest = max(1, round(q_shape[-1] / SMALLEST_HEAD_DIM)) * SMALLEST_HEAD_DIM
        return (
            f"takes a head_dim that is a multiple of {SMALLEST_HEAD_DIM}, not {q_shape[-1]}; the nearest is {nearest}"
        )
    tokens = _padded(k_shape[1]) + (_padded(q_shape[1]) if own_shape else 0)
    if max(tokens, _padded(q_shape[1])) > MOST_TOKENS:
        return f"takes up to {MOST_TOKENS} keys of a row, not {tokens}; use a shorter sequence or a context axis"
    if 0 in q_shape:
        return f"takes at least one query, not {list(q_shape)}"
    return None


def attend(q, k, v, lo, hi, own, *, structure, block_size: int) -> Array:
    """As `diffjax.kernels.attention.block_attention`, with a `structure`."""
    batch, queries, heads, head_dim = q.shape
    size, length, clean_keys = block_size, _padded(queries), _padded(k.shape[1])
    k, v = pad_tokens(k, clean_keys), pad_tokens(v, clean_keys)
    some = hi > lo
    if structure == "frontiers":
        # An empty interval opens a document: an id of its own that no clean key has, while clean keys of its block
        # carry their first token, as in the intervals of the frontiers behind it.
        own_k, own_v, valid = (array.reshape(batch, queries, *array.shape[3:]) for array in own)
        token = jnp.arange(queries, dtype=jnp.int32)
        query_id = jnp.where(some, lo, clean_keys + token // size)
        key_id = jnp.where(some, lo, token // size * size)[:, : k.shape[1]]
        key_id = pad_tokens(key_id, clean_keys, NO_KEY)
        own_id = pad_tokens(jnp.where(valid, query_id, NO_KEY), length, NO_KEY)
        k, v = (jnp.concatenate([clean, pad_tokens(own, length)], axis=1) for clean, own in ((k, own_k), (v, own_v)))
        key_id = jnp.concatenate([key_id, own_id], axis=1)
        mask = FrontierMask(length, clean_keys, size)
        has_key = some | jnp.repeat(own.valid.any(axis=2), size, axis=1)
    else:
        query_id = jnp.where(some, lo, NO_QUERY)
        key_id = pad_tokens(jnp.where(some, lo, NO_KEY), clean_keys, NO_KEY)
        mask = CleanMask(length, size if structure == "blocks" else 1)
        has_key = some
    query_id = pad_tokens(query_id, length, NO_QUERY)
    q = pad_tokens(q * jnp.asarray(head_dim**-0.5, q.dtype), length)
    y = _splash(mask, q, k, v, query_id, key_id)[:, :queries]
    return jnp.where(has_key[..., None, None], y, 0)  # a row without keys is a mean of values, and finite


class _Mask(splash_mask._ComputableMask):
    """A mask that kernels compute; equal by its kind and sizes, so that tiles are sorted out once for each."""

    def __init__(self, shape: tuple[int, int], function):
        super().__init__(shape=shape, mask_function=function)

    def __eq__(self, other):
        return type(self) is type(other) and self._key == other._key

    def __hash__(self):
        return hash((type(self), self._key))


class CleanMask(_Mask):
    """Query token s reads token t of an earlier block of `size` tokens, or of its own block."""

    def __init__(self, length: int, size: int):
        self._key = (length, size)
        super().__init__((length, length), lambda query, key: key // size <= query // size)


class FrontierMask(_Mask):
    """Of keys [clean, own], a frontier reads the clean keys of earlier blocks and those of its own."""

    def __init__(self, length: int, clean_keys: int, size: int):
        self._key = (length, clean_keys, size)

        def function(query, key):
            # Booleans meet by & and | alone: a `where` on them interprets, and does not compile.
            clean = key < clean_keys
            return (clean & (key // size < query // size)) | (~clean & shares_block(query, key - clean_keys, size))

        super().__init__((length, clean_keys + length), function)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _splash(mask: _Mask, q, k, v, query_id, key_id) -> Array:
    """q [B, S, Hq, P], scaled; k, v [B, T, Hkv, P]; query_id [B, S], key_id [B, T] -> [B, S, Hq, P]"""
    return _splash_forward(mask, q, k, v, query_id, key_id)[0]


def _splash_forward(mask, q, k, v, query_id, key_id):
    kernel = _kernel(mask, q.shape[2])
    segments = splash.SegmentIds(query_id, key_id)
    head_major = [jnp.moveaxis(array, 2, 1) for array in (q, k, v)]
    with _precision(q.dtype):
        attend = jax.vmap(lambda q, k, v, segments: kernel(q, k, v, segments))
        y, pullback = jax.vjp(lambda *arrays: attend(*arrays, segments), *head_major)
    return jnp.moveaxis(y, 1, 2), pullback


def _splash_backward(mask, pullback, dy):
    del mask
    with _precision(dy.dtype):
        gradients = pullback(jnp.moveaxis(dy, 2, 1))
    return *(jnp.moveaxis(gradient, 1, 2) for gradient in gradients), None, None


_splash.defvjp(_splash_forward, _splash_backward)


def _precision(dtype):
    """Splash leaves precision to the default in force. One bfloat16 pass would not do for float32 operands, and is the
    only one for bfloat16 operands."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def _kernel(mask: _Mask, heads: int):
    """Built inside the trace: the tile lists are constants of the program, not arguments of it."""
    tile_of = lambda length: next(tile for tile in TILES if length % tile == 0)
    queries, keys = (tile_of(length) for length in mask.shape)
    tiles = splash.BlockSizes(
        block_q=queries, block_kv=keys, block_q_dkv=queries, block_kv_dkv=keys, block_q_dq=queries, block_kv_dq=keys
    )
    return splash.make_splash_mha(
        splash_mask.MultiHeadMask([mask] * heads),
        block_sizes=tiles,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
        interpret=interpreting(),
    )


def _padded(length: int) -> int:
    """Whole tiles: of the largest kind that pads by an eighth at most."""
    fits = lambda tile: 8 * (-length % tile) <= length
    tile = next((tile for tile in TILES if fits(tile)), LANES)
    return max(1, -(-length // tile)) * tile
