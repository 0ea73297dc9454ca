"""T5, attention's part: every backend equals a dense softmax under a predicate mask that is tested key by key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.kernels.attention import OwnBlock, block_attention

HEADS, KV_HEADS, CHANNELS = 4, 2, 6
pytestmark = pytest.mark.xdist_group("attention")


class Row:
    """Documents of a row: block sizes G, segments [K] and valid tokens, and the masks of the model by definition."""

    def __init__(self, size, segments, pads=()):
        self.size, self.segments = size, np.repeat(segments, size)
        self.length = len(self.segments)
        self.valid = np.ones(self.length, bool)
        self.valid[list(pads)] = False

    def clean_mask(self, prefix):
        """[L, L]: the same document, a valid key, and block order or token order."""
        mask = np.zeros((self.length, self.length), bool)
        for q, k in np.ndindex(mask.shape):
            before = q // self.size >= k // self.size if prefix == "bidirectional" else q >= k
            same = self.segments[q] == self.segments[k]
            mask[q, k] = self.valid[q] and self.valid[k] and same and before
        return mask

    def frontier_mask(self, index, keys):
        """[F G, keys]: clean keys of earlier blocks of the document of block index[f]."""
        mask = np.zeros((len(index) * self.size, keys), bool)
        for q, k in np.ndindex(mask.shape):
            block = index[q // self.size]
            same = self.segments[k] == self.segments[block * self.size]
            mask[q, k] = self.valid[k] and same and k // self.size < block
        return mask


def intervals(mask):
    """lo, hi [S] of a mask whose rows are runs of keys."""
    lo, hi = np.zeros(len(mask), np.int32), np.zeros(len(mask), np.int32)
    for q, row in enumerate(mask):
        if row.any():
            keys = np.flatnonzero(row)
            assert len(keys) == keys[-1] - keys[0] + 1
            lo[q], hi[q] = keys[0], keys[-1] + 1
    return lo, hi


def dense(q, k, v, mask, own=None):
    """One softmax over [keys, own keys] per query; 0 for a query without keys. mask [B, S, T] bool."""
    k, v = (jnp.repeat(a, HEADS // KV_HEADS, axis=2) for a in (k, v))
    scores = jnp.einsum("bshp,bthp->bhst", q, k) / np.sqrt(CHANNELS)
    values = v
    allow = jnp.asarray(mask)
    if own is not None:
        own_k, own_v, own_valid = own
        batch, frontiers, size = own_valid.shape

        def flat(a):
            return jnp.repeat(a.reshape(batch, frontiers * size, KV_HEADS, -1), HEADS // KV_HEADS, axis=2)

        scores = jnp.concatenate([scores, jnp.einsum("bshp,bthp->bhst", q, flat(own_k)) / np.sqrt(CHANNELS)], -1)
        values = jnp.concatenate([values, flat(own_v)], 1)
        block = np.arange(frontiers * size) // size
        same = (block[:, None] == block[None]) & own_valid.reshape(batch, 1, -1)
        allow = jnp.concatenate([allow, same], -1)
    allow = allow[:, None]
    weights = jnp.exp(jnp.where(allow, scores - scores.max(-1, keepdims=True), -jnp.inf))
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("bhst,bthp->bshp", weights, values)


def arrays(rng, batch, queries, keys, frontiers=None, size=None):
    q = rng.standard_normal((batch, queries, HEADS, CHANNELS)) * 2
    k, v = rng.standard_normal((2, batch, keys, KV_HEADS, CHANNELS))
    if frontiers is None:
        return q, k, v
    own_k, own_v = rng.standard_normal((2, batch, frontiers, size, KV_HEADS, CHANNELS))
    return q, k, v, own_k, own_v


def compare(args, mask, own_valid=None, structure=None, size=1):
    """Values and gradients against the dense form, in float64; the plain backend where rows are short."""
    with jax.enable_x64(True):
        lo, hi = map(np.stack, zip(*map(intervals, mask), strict=True))
        cotangent = np.random.default_rng(9).standard_normal(args[0].shape)

        @functools.partial(jax.jit, static_argnums=0)
        def run(form, args):
            def attend(q, k, v, *own):
                if form == "dense":
                    return dense(q, k, v, mask, (*own, own_valid) if own else None)
                block = OwnBlock(*own, jnp.asarray(own_valid)) if own else None
                return block_attention(q, k, v, lo, hi, own=block, structure=structure, block_size=size, backend=form)

            value, pullback = jax.vjp(attend, *args)
            return value, pullback(cotangent)

        expected = jax.tree.leaves(run("dense", args))
        for backend in ("xla", "reference") if args[0].shape[1] < 20 else ("xla",):
            for one, other in zip(jax.tree.leaves(run(backend, args)), expected, strict=True):
                assert one.shape == other.shape and np.isfinite(one).all()
                if other.size:
                    assert np.abs(one - other).max() <= 1e-10 * max(1.0, np.abs(other).max()), backend
        return np.asarray(expected[0])


ROWS = {
    "G1": (Row(1, [1] * 11), Row(1, [1] * 4 + [2] * 7)),
    "G3-packed": (Row(3, [1, 1, 2, 2, 2], pads=(5,)), Row(3, [1, 2, 3, 3, 0], pads=(2, 11, 12, 13, 14))),
    "G8": (Row(8, [1, 1, 1, 1]), Row(8, [1, 2, 2, 0], pads=range(21, 32))),
    "one-block": (Row(7, [1]), Row(7, [1], pads=(5, 6))),
    "empty-row": (Row(4, [0, 0], pads=range(8)), Row(4, [1, 1])),
    "long": (Row(8, [1] * 20 + [2] * 25), Row(8, [1] * 45)),
}
rows = pytest.mark.parametrize("name", ROWS)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [(name, "bidirectional") for name in ROWS] + [(name, "causal") for name in ("G3-packed", "empty-row", "long")],
)
def test_T5_clean_stream(name, prefix):
    documents = ROWS[name]
    length = documents[0].length
    mask = np.array([row.clean_mask(prefix) for row in documents])
    args = arrays(np.random.default_rng(length), 2, length, length)
    value = compare(args, mask, structure="clean", size=documents[0].size)
    assert (value[~mask.any(-1)] == 0).all()


@rows
def test_T5_every_block_a_frontier(name):
    """F = K against the first K - 1 blocks, own keys partly pads."""
    documents = ROWS[name]
    size, length = documents[0].size, documents[0].length
    blocks, keys = length // size, length - size
    mask = np.array([row.frontier_mask(range(blocks), keys) for row in documents])
    own_valid = np.array([row.valid.reshape(blocks, size) for row in documents])
    args = arrays(np.random.default_rng(length), 2, length, keys, blocks, size)
    compare(args, mask, own_valid, structure="frontiers", size=size)


@rows
def test_T5_some_frontiers_in_any_order(name):
    """F = 3, repeats allowed, no promise about their order."""
    documents = ROWS[name]
    size, length = documents[0].size, documents[0].length
    blocks = length // size
    rng = np.random.default_rng(length)
    index = rng.integers(0, blocks, (2, 3))
    mask = np.array([row.frontier_mask(i, length) for row, i in zip(documents, index, strict=True)])
    own_valid = np.array([row.valid.reshape(blocks, size)[i] for row, i in zip(documents, index, strict=True)])
    compare(arrays(rng, 2, 3 * size, length, 3, size), mask, own_valid, size=size)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("keys", [0, 5])
def test_T5_no_key_at_all_is_zero_with_finite_gradients(backend, keys):
    """In bfloat16: an empty prefix with an all-pad own block, and an empty prefix alone."""
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(a, jnp.bfloat16) for a in arrays(rng, 1, 8, keys, 2, 4))
    nothing = jnp.zeros((1, 8), jnp.int32)

    @jax.jit
    def run(*args):
        def attend(q, k, v, *own):
            block = OwnBlock(*own, jnp.zeros((1, 2, 4), bool))
            alone = block_attention(q, k, v, nothing, nothing, backend=backend)
            return block_attention(q, k, v, nothing, nothing, own=block, block_size=4, backend=backend), alone

        value, pullback = jax.vjp(attend, *args)
        return value, pullback(jax.tree.map(jnp.ones_like, value))

    value, gradient = run(*args)
    assert all(v.dtype == jnp.bfloat16 and (np.asarray(v, np.float32) == 0).all() for v in value)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradient)
