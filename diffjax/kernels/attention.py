"""Attention in which every query reads one interval of keys, and a frontier also reads its own block.

All masks of the model have this form: with `a` the first token of the query's document, clean tokens read [a, end of
their block) or [a, self], and a frontier of block b reads [a, first token of b) and its own valid tokens. No [L, L] or
[L, 2L] mask is ever given.
"""

from typing import Literal, NamedTuple

from jax import Array

from diffjax.kernels import attention_reference, attention_xla
from diffjax.kernels.dispatch import choose

BACKENDS = {"reference": attention_reference, "xla": attention_xla}


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
    structure: Literal["clean", "frontiers"] | None = None,
    block_size: int = 1,
    backend: str = "auto",
) -> Array:
    """softmax(q k^T / sqrt(P)) v over the keys in [lo, hi) and, with `own`, over the query's own frontier.

    Args:
      q: [B, S, Hq, P]; k, v: [B, T, Hkv, P], query head h reads key head h // (Hq / Hkv).
      lo, hi: [B, S] int32, the key interval of each query; empty if hi <= lo.
      own: the frontiers' own keys; then S = F * G and query s belongs to frontier s // G.
      structure: a promise that lets a backend skip keys. "clean": query s reads no key behind its own block of
        block_size tokens. "frontiers": frontier f is block f, and reads no key of block f or later.

    Returns:
      [B, S, Hq, P] in q.dtype; 0 with finite gradients where a query has no key. Scores and softmax are at least
      float32.
    """
    return choose("attention", backend, BACKENDS).attend(q, k, v, lo, hi, own, structure, block_size)
