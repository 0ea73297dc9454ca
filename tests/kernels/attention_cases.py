"""Attention by its definition: masks of the model written key by key, and values and gradients of a dense softmax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.kernels.attention import OwnBlock, block_attention


class Row:
    """Documents of a row: block sizes G, segments [K] and valid tokens, and the masks of the model by definition."""

    def __init__(self, size, segments, pads=()):
        self.size, self.segments = size, np.repeat(segments, size)
        self.length = len(self.segments)
        self.valid = np.ones(self.length, bool)
        self.valid[list(pads)] = False

    def clean_mask(self, prefix):
        """[L, L]: the same document, valid query and key, and block order or token order."""
        q, k = np.ogrid[: self.length, : self.length]
        before = q // self.size >= k // self.size if prefix == "bidirectional" else q >= k
        return self.valid[q] & self.valid[k] & (self.segments[q] == self.segments[k]) & before

    def frontier_mask(self, index, keys):
        """[F G, keys]: clean keys of earlier blocks of the document of block index[f]."""
        block, k = np.repeat(index, self.size)[:, None], np.arange(keys)
        return self.valid[k] & (self.segments[k] == self.segments[block * self.size]) & (k // self.size < block)


ROWS = {
    "G1": (Row(1, [1] * 11), Row(1, [1] * 4 + [2] * 7)),
    "G3-packed": (Row(3, [1, 1, 2, 2, 2], pads=(5,)), Row(3, [1, 2, 3, 3, 0], pads=(2, 11, 12, 13, 14))),
    "G4-empty-row": (Row(4, [0, 0], pads=range(8)), Row(4, [1, 1])),
    "G8": (Row(8, [1, 1, 1, 1]), Row(8, [1, 2, 2, 0], pads=range(21, 32))),
    "G32": (Row(32, [1, 1, 2]), Row(32, [1, 2, 2], pads=(30, 31, 95))),
    "one-block": (Row(7, [1]), Row(7, [1], pads=(5, 6))),
    "long": (Row(8, [1] * 20 + [2] * 25), Row(8, [1] * 45)),
}


class Case(NamedTuple):
    """Masks [B, S, T] and own valid [B, F, G] (or None) of one call, and what it promises."""

    mask: np.ndarray
    own_valid: np.ndarray | None
    structure: str | None
    size: int


def clean_case(name, prefix) -> Case:
    mask = np.array([row.clean_mask(prefix) for row in ROWS[name]])
    return Case(mask, None, "causal" if prefix == "causal" else "blocks", ROWS[name][0].size)


def all_frontiers_case(name) -> Case:
    """F = K against the first K - 1 blocks, own keys partly pads."""
    size, length = ROWS[name][0].size, ROWS[name][0].length
    blocks, keys = length // size, length - size
    mask = np.array([row.frontier_mask(range(blocks), keys) for row in ROWS[name]])
    return Case(mask, np.array([row.valid.reshape(blocks, size) for row in ROWS[name]]), "frontiers", size)


def some_frontiers_case(name) -> Case:
    """F = 3, repeats allowed, no promise about their order."""
    size, length = ROWS[name][0].size, ROWS[name][0].length
    index = np.random.default_rng(length).integers(0, length // size, (2, 3))
    pairs = list(zip(ROWS[name], index, strict=True))
    mask = np.array([row.frontier_mask(i, length) for row, i in pairs])
    return Case(mask, np.array([row.valid.reshape(-1, size)[i] for row, i in pairs]), None, size)


def decoding_case(keys, lengths, size) -> Case:
    """One frontier for each row, against contexts of which `lengths` tokens are filled."""
    mask = np.arange(keys) < np.asarray(lengths)[:, None, None]
    return Case(np.repeat(mask, size, axis=1), np.ones((len(lengths), 1, size), bool), None, size)


def intervals(mask):
    """lo, hi [B, S] of masks whose rows are runs of keys."""
    keys = mask.shape[-1]
    position = np.arange(keys)
    hi = np.where(mask, position + 1, 0).max(-1, initial=0)
    lo = np.minimum(np.where(mask, position, keys).min(-1, initial=keys), hi)
    assert (hi - lo == mask.sum(-1)).all()
    return lo.astype(np.int32), hi.astype(np.int32)


def arrays(case: Case, dtype, heads, key_heads, head_dim, seed=0):
    """q, k, v, own k and v if the case has own keys, and a cotangent of the output."""
    rng = np.random.default_rng(seed)
    batch, queries, keys = case.mask.shape
    normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
    args = [2 * normal(batch, queries, heads, head_dim), *(normal(batch, keys, key_heads, head_dim) for _ in "kv")]
    if case.own_valid is not None:
        args += [normal(*case.own_valid.shape, key_heads, head_dim) for _ in "kv"]
    return args, normal(batch, queries, heads, head_dim)


def dense(case: Case, args, cotangent):
    """Value and gradients of one softmax over [keys, own keys], in numpy float64; 0 for a query without keys."""
    q, k, v, *own = (np.asarray(array, np.float64) for array in args)
    keys, allow = k.shape[1], case.mask
    if own:
        batch, frontiers, size = case.own_valid.shape
        k, v = (
            np.concatenate([clean, mine.reshape(batch, -1, *mine.shape[3:])], axis=1)
            for clean, mine in zip((k, v), own, strict=True)
        )
        block = np.arange(frontiers * size) // size
        same = (block[:, None] == block) & case.own_valid.reshape(batch, 1, -1)
        allow = np.concatenate([allow, same], axis=-1)
    repeats, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    each = lambda array: np.repeat(array, repeats, axis=2)
    total = lambda array: array.reshape(*array.shape[:2], -1, repeats, array.shape[3]).sum(3)
    scores = np.where(allow[:, None], np.einsum("bshp,bthp->bhst", q, each(k)) * scale, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300))
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    ct = np.asarray(cotangent, np.float64)
    d_weights = np.einsum("bshp,bthp->bhst", ct, each(v))
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    d_k = total(np.einsum("bhst,bshp->bthp", d_scores, q))
    d_v = total(np.einsum("bhst,bshp->bthp", weights, ct))
    value, dq = np.einsum("bhst,bthp->bshp", weights, each(v)), np.einsum("bhst,bthp->bshp", d_scores, each(k))
    split = [part for d in (d_k, d_v) for part in (d[:, :keys], d[:, keys:])]
    mine = [d.reshape(array.shape) for d, array in zip((split[1], split[3]), own, strict=True)] if own else []
    return [value, dq, split[0], split[2], *mine]


def attend(case: Case, args, cotangent, backend):
    """Value and gradients by `block_attention`."""
    lo, hi = intervals(case.mask)
    own_valid = None if case.own_valid is None else jnp.asarray(case.own_valid)

    def call(q, k, v, *own):
        block = OwnBlock(*own, own_valid) if own else None
        promise = {"structure": case.structure, "block_size": case.size}
        return block_attention(q, k, v, jnp.asarray(lo), jnp.asarray(hi), own=block, backend=backend, **promise)

    @jax.jit
    def run(args, cotangent):
        value, pullback = jax.vjp(call, *args)
        return [value, *pullback(cotangent)]

    return run(args, cotangent)


def check(case: Case, backend, *, dtype, heads=4, key_heads=2, head_dim=6, value_bar, gradient_bar):
    """Differences relative to the largest entry are within the bars; rows without keys are exactly 0."""
    args, cotangent = arrays(case, dtype, heads, key_heads, head_dim)
    expected = dense(case, args, cotangent)
    got = [np.asarray(array, np.float64) for array in attend(case, args, cotangent, backend)]
    for name, one, other in zip(("y", "dq", "dk", "dv", "d own k", "d own v"), got, expected, strict=False):
        assert one.shape == other.shape and np.isfinite(one).all(), (backend, name)
        bar = value_bar if name == "y" else gradient_bar
        scale = max(1.0, np.abs(other).max(initial=0))
        assert np.abs(one - other).max(initial=0) <= bar * scale, (backend, name)
    empty = ~case.mask.any(-1)
    if case.own_valid is not None:
        empty &= ~np.repeat(case.own_valid.any(-1), case.size, axis=1)
    assert (got[0][empty] == 0).all()
