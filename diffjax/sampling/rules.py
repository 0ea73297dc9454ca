"""Commit rules: which positions of a window take their proposed token now. Pure functions on [B,W] arrays.

A rule is a `step` composed from score and selection helpers, plus what it declares about itself; add one by writing the
step, its factory and its line in `RULES`. Rows never look at each other, and no rule branches on data in Python.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

TOKEN, POSITION, REVOKE, TIMES = range(4)
"""Streams of random numbers within one step: folded into the step's key, so that no two draws share noise."""


class View(NamedTuple):
    """What a rule sees of the window."""

    tokens: jax.Array  # [B,W] int32
    masked: jax.Array  # [B,W] bool, not yet decided (stored, never derived from the mask id)
    eligible: jax.Array  # [B,W] bool: masked, not given, inside the row's limit, not right of its first stop token
    given: jax.Array  # [B,W] bool, prompt and other frozen tokens
    step: jax.Array  # [B] int32, steps this row has done inside this block
    n0: jax.Array  # [B] int32, eligible positions at block entry
    live: jax.Array  # [B] bool


class Decision(NamedTuple):
    """What a rule does to the window in one step. What falls on given, ineligible or idle positions is dropped."""

    commit: jax.Array  # [B,W] bool, masked -> token
    remask: jax.Array  # [B,W] bool, decided -> masked
    overwrite: jax.Array  # [B,W] bool, decided -> token
    token: jax.Array  # [B,W] int32, usually the proposal's
    aux: object  # the rule's own state, leading axis B
    settled: jax.Array  # [B] bool, the rule has finished this block (the driver decides it for monotone rules)


@dataclass(frozen=True, eq=False)
class Rule:
    """A sampling rule; static, compared by identity.

    init_aux(key, view, knobs) -> aux: its state at block entry, () for none; key [B] belongs to the block.
    step(key, proposal, view, aux, knobs) -> Decision; key [B] belongs to the row's step, fold a stream into it.
    needs: what it asks of the proposal beyond token and logp (see `proposals.propose`).
    monotone: it never remasks or overwrites. guarded: every live row with an eligible position commits at least one.
    knobs: dict of traced scalars or [B] arrays; changing one never recompiles.
    """

    init_aux: Callable
    step: Callable
    needs: frozenset = frozenset()
    monotone: bool = True
    guarded: bool = True


class Registered(NamedTuple):
    """A rule by name: how to build it and which keys of the sampling config it reads."""

    build: Callable[..., Rule]
    knobs: Mapping[str, Callable[[int], float]]  # traced knob -> its default, given the block size
    options: Mapping[str, str] = MappingProxyType({})  # static choice -> its default


# ---- helpers: s = score [B,W] float (higher = earlier), e = eligible [B,W] bool; ties go to the lowest position


def per_row(knob):
    """A scalar or [B] knob as [1,1] or [B,1], ready to meet a [B,W] array."""
    return jnp.reshape(knob, (-1, 1))


def rank(score, eligible):
    """Place of each position when eligible ones are ordered by falling score: [B,W] int32, 0 is first."""
    order = jnp.argsort(jnp.where(eligible, -score, jnp.inf), axis=-1, stable=True)
    return jnp.argsort(order, axis=-1, stable=True)


def topk(score, eligible, k):
    """The k best eligible positions, or all where fewer; k: scalar or [B], traced. [B,W] bool."""
    return eligible & (rank(score, eligible) < per_row(k))


def guard(selected, score, eligible):
    """`selected`, or the single best eligible position in a row that would select none. [B,W] bool."""
    return jnp.where(jnp.any(selected, axis=-1, keepdims=True), selected, topk(score, eligible, 1))


SCORES = ("prob", "random")


def scores(kind, key, proposal):
    """Order of commitment [B,W] float32: "prob" is the proposed token's clean probability, "random" is U(0,1)."""
    if kind == "random":
        W = proposal.token.shape[1]
        position_key = jax.vmap(jax.random.fold_in, (0, None))(key, POSITION)
        return jax.vmap(lambda row_key: jax.random.uniform(row_key, (W,), jnp.float32))(position_key)
    return jnp.exp(proposal.logp)


def stateless(key, view, knobs):
    """`init_aux` of a rule that remembers nothing between steps."""
    return ()


def commit_only(commit, proposal, view, aux=()) -> Decision:
    """The decision of a monotone rule: commit these positions, revoke nothing."""
    none = jnp.zeros_like(commit)
    return Decision(commit, none, none, proposal.token, aux, ~jnp.any(view.eligible & ~commit, axis=-1))


# ---- rules


@lru_cache
def quota(score="prob") -> Rule:
    """A fixed number of positions per step: n0 // steps, one more in the first n0 mod steps (LLaDA, arXiv 2502.09992).

    score "prob" is low-confidence remasking, "random" random remasking. Ordering by the drawn token's probability
    biases the joint law at temperature > 0, even with one position per step; "random" with one per step is exact.
    """

    def step(key, proposal, view, aux, knobs):
        steps = jnp.asarray(knobs["steps"], jnp.int32)
        due = view.n0 // steps + (view.step < view.n0 % steps)
        order = scores(score, key, proposal)
        return commit_only(guard(topk(order, view.eligible, due), order, view.eligible), proposal, view)

    return Rule(stateless, step)


@lru_cache
def threshold() -> Rule:
    """All positions whose token has probability >= threshold, at least the best one (Fast-dLLM, arXiv 2505.22618)."""

    def step(key, proposal, view, aux, knobs):
        confidence = scores("prob", key, proposal)
        sure = view.eligible & (confidence >= per_row(knobs["threshold"]))
        return commit_only(guard(sure, confidence, view.eligible), proposal, view)

    return Rule(stateless, step)


RULES = {
    "quota": Registered(quota, {"steps": lambda block_size: block_size}, {"score": "prob"}),
    "threshold": Registered(threshold, {"threshold": lambda block_size: 0.9}),
}
