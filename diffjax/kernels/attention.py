"""Attention in which every query reads one interval of keys, and a frontier also reads its own block.

All masks of the model have this form (`attention_mask`). No [L, L] or [L, 2L] mask is ever given.

A backend is two functions: `attend`, differentiable, with the arguments of `block_attention`, and `refusal`.
"""

import functools
import math
from typing import Literal, NamedTuple

from jax import Array

from diffjax.kernels import attention_pallas_tpu, attention_pallas_triton, attention_reference, attention_xla
from diffjax.kernels.dispatch import Split, choose, run

BACKENDS = {
    "reference": attention_reference,
    "xla": attention_xla,
    "pallas_tpu": attention_pallas_tpu,
    "pallas_triton": attention_pallas_triton,
}


STRUCTURES = ("blocks", "causal", "frontiers", None)


class OwnBlock(NamedTuple):
    """Keys and values of the frontiers themselves: k, v [B, F, G, Hkv, P], valid [B, F, G] bool."""

    k: Array
    v: Array
    valid: Array


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    lo: Array,
    hi: Array,
    *,
    own: OwnBlock | None = None,
    structure: Literal["blocks", "causal", "frontiers"] | None = None,
    block_size: int = 1,
    backend: str = "auto",
) -> Array:
    """softmax(q k^T / sqrt(P)) v over the keys in [lo, hi) and, with `own`, over the query's own frontier.

    Args:
      q: [B, S, Hq, P]; k, v: [B, T, Hkv, P], query head h reads key head h // (Hq / Hkv).
      lo, hi: [B, S] int32, the key interval of each query; empty if hi <= lo.
      own: the frontiers' own keys; then S = F * G and query s belongs to frontier s // G.
      structure: a promise about the intervals of rows of documents, each known by its first token, its pads at its
        end. "blocks": query s is token s of the clean stream (S = T); token t of the same document is in its interval
        if neither is a pad, whose interval is empty, and t's block of block_size tokens is no later than that of s.
        "causal": the same with t <= s. "frontiers": frontier f is block f, and its interval holds the keys of the
        earlier blocks of its document; it is empty, whatever lo, where block f opens one.
      backend: auto, or one of `BACKENDS`.

    Returns:
      [B, S, Hq, P] in q.dtype; 0 with finite gradients where a query has no key. Scores and softmax are at least
      float32.

    Raises:
      ValueError: shapes do not belong together, or the backend named cannot run this call.
    """
    _check(q, k, v, lo, hi, own, structure)
    if q.size == 0:
        return q
    call = {
        "q_shape": q.shape,
        "k_shape": k.shape,
        "own_shape": None if own is None else own.k.shape,
        "structure": structure,
        "block_size": block_size,
        "dtype": q.dtype,
    }
    refusals = {name: functools.partial(module.refusal, **call) for name, module in BACKENDS.items()}
    shape = f"{q.dtype} [B S H P] {list(q.shape)}, T {k.shape[1]}, key heads {k.shape[2]}, "
    shape += "no own keys" if own is None else f"own blocks of {own.k.shape[2]}"
    choice = choose("attention", backend, refusals, f"{shape}, structure {structure}")
    own_split = None if own is None else OwnBlock(Split(0, 3), Split(0, 3), Split(0))
    splits = (Split(0, 2), Split(0, 2), Split(0, 2), Split(0), Split(0), own_split), Split(0, 2)
    return run(choice, BACKENDS, "attend", splits, q, k, v, lo, hi, own, structure=structure, block_size=block_size)


def _check(q, k, v, lo, hi, own: OwnBlock | None, structure: str | None) -> None:
    """Shapes that broadcast, or reach past an array's end inside a kernel, would give wrong numbers in silence."""
    batch, queries, heads, head_dim = q.shape
    keys, key_heads = k.shape[1:3]
    shapes = {"k": (k, (batch, keys, key_heads, head_dim)), "v": (v, (batch, keys, key_heads, head_dim))}
    shapes |= {"lo": (lo, (batch, queries)), "hi": (hi, (batch, queries))}
    if own is not None:
        frontiers = (batch, *own.k.shape[1:3])
        shapes |= {f"own.{name}": (getattr(own, name), (*frontiers, key_heads, head_dim)) for name in ("k", "v")}
        shapes["own.valid"] = (own.valid, frontiers)
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise ValueError(f"block_attention: {name} is {list(array.shape)}, but the others ask for {list(shape)}")
    if own is not None and math.prod(own.k.shape[1:3]) != queries:
        raise ValueError(f"block_attention: {queries} queries are not the {list(own.k.shape[1:3])} tokens of `own`")
    if heads % key_heads:
        raise ValueError(f"block_attention: {heads} query heads cannot share {key_heads} key heads")
    if structure not in STRUCTURES:
        raise ValueError(f"block_attention: structure must be one of {STRUCTURES}, not {structure!r}")
