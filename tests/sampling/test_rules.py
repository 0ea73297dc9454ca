"""Rules and their helpers against plain loops, worked examples and the invariants I1, I2, I3, I5, I8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.sampling.proposals import Proposal
from diffjax.sampling.rules import TOKEN, View, guard, quota, rank, scores, threshold, topk

pytestmark = pytest.mark.xdist_group("sampling_rules")

B, G = 16, 32


def naive_rank(score, eligible):
    """Eligible positions by falling score, equal scores from the left."""
    return sorted((g for g in range(len(score)) if eligible[g]), key=lambda g: (-score[g], g))


def naive_quota(score, eligible, step, n0, steps):
    base, extra = divmod(n0, steps)
    count = base + (1 if step < extra else 0)
    return set(naive_rank(score, eligible)[: max(1, count)])


def naive_threshold(score, eligible, tau):
    sure = {g for g in range(len(score)) if eligible[g] and score[g] >= tau}
    return sure or set(naive_rank(score, eligible)[:1])


def random_case(rng):
    """Scores with many ties; some rows without any eligible position."""
    confidence = rng.integers(0, 6, (B, G)).astype(np.float32) / 5
    masked = rng.random((B, G)) < rng.random((B, 1))
    given = ~masked & (rng.random((B, G)) < 0.3)
    eligible = masked & (rng.random((B, G)) < 0.8)
    eligible[0] = False
    n0 = eligible.sum(-1) + rng.integers(0, 5, B)
    view = View(rng.integers(5, 9, (B, G)), masked, eligible, given, rng.integers(0, 6, B), n0, np.ones(B, bool))
    with np.errstate(divide="ignore"):
        proposal = Proposal(jnp.full((B, G), 7), jnp.log(confidence), jnp.ones((B, G), bool))
    return proposal, View(*map(jnp.asarray, view)), np.array(jnp.exp(proposal.logp))


KEYS = jax.random.split(jax.random.key(0), B)
STEPS = {rule: jax.jit(rule.step) for rule in (quota("prob"), quota("random"), threshold())}


def decide(rule, proposal, view, **knobs):
    return STEPS[rule](KEYS, proposal, view, rule.init_aux(KEYS, view, knobs), knobs)


def chosen(mask):
    return [set(np.flatnonzero(row)) for row in np.asarray(mask)]


@pytest.mark.parametrize("trial", range(50))
def test_a_rules_equal_plain_loops(trial):
    rng = np.random.default_rng(trial)
    proposal, view, confidence = random_case(rng)
    eligible, n0, step = map(np.asarray, (view.eligible, view.n0, view.step))
    steps = rng.integers(1, 9, B).astype(np.int32)
    tau = rng.choice([0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0], B).astype(np.float32)

    got = chosen(decide(quota("prob"), proposal, view, steps=jnp.asarray(steps)).commit)
    assert got == [naive_quota(confidence[b], eligible[b], step[b], n0[b], steps[b]) for b in range(B)]
    got = chosen(decide(threshold(), proposal, view, threshold=jnp.asarray(tau)).commit)
    assert got == [naive_threshold(confidence[b], eligible[b], tau[b]) for b in range(B)]
    uniform = np.asarray(scores("random", KEYS, proposal))
    got = chosen(decide(quota("random"), proposal, view, steps=jnp.asarray(steps)).commit)
    assert got == [naive_quota(uniform[b], eligible[b], step[b], n0[b], steps[b]) for b in range(B)]

    order = np.asarray(rank(jnp.asarray(confidence), view.eligible))
    for b in range(B):
        assert [int(order[b, g]) for g in naive_rank(confidence[b], eligible[b])] == list(range(eligible[b].sum()))
    k = rng.integers(0, G + 5, B)
    assert chosen(topk(jnp.asarray(confidence), view.eligible, jnp.asarray(k))) == [
        set(naive_rank(confidence[b], eligible[b])[: k[b]]) for b in range(B)
    ]
    some = jnp.asarray(rng.random((B, G)) < 0.03) & view.eligible
    assert chosen(guard(some, jnp.asarray(confidence), view.eligible)) == [
        set(np.flatnonzero(some[b])) or set(naive_rank(confidence[b], eligible[b])[:1]) for b in range(B)
    ]


@pytest.mark.parametrize(
    "rule, knobs",
    [(quota("prob"), {"steps": 3}), (quota("random"), {"steps": 3}), (threshold(), {"threshold": 0.7})],
    ids=["quota-prob", "quota-random", "threshold"],
)
def test_invariants_I1_I2_I3_and_settled(rule, knobs):
    for trial in range(10):
        proposal, view, _ = random_case(np.random.default_rng(100 + trial))
        decision = decide(rule, proposal, view, **{name: jnp.asarray(value) for name, value in knobs.items()})
        assert rule.monotone and rule.guarded
        assert not np.any(decision.commit & ~view.eligible), "I1"
        assert not np.any(decision.remask) and not np.any(decision.overwrite), "I2"
        assert np.array_equal(np.any(decision.commit, -1), np.any(view.eligible, -1)), "I3"
        assert np.array_equal(decision.settled, ~np.any(view.eligible & ~decision.commit, -1))
        assert np.array_equal(decision.token, proposal.token)


def test_limits_I8():
    """threshold -> inf is one position per step, threshold 0 is all at once; neither reads the key."""
    proposal, view, _ = random_case(np.random.default_rng(5))
    one = decide(quota("prob"), proposal, view._replace(n0=jnp.ones(B, jnp.int32)), steps=jnp.asarray(1)).commit
    assert np.array_equal(decide(threshold(), proposal, view, threshold=jnp.asarray(np.inf)).commit, one)
    assert np.array_equal(decide(threshold(), proposal, view, threshold=jnp.asarray(0.0)).commit, view.eligible)


@pytest.mark.parametrize(
    "n0, steps, counts", [(7, 4, [2, 2, 2, 1]), (3, 4, [1, 1, 1]), (32, 16, [2] * 16), (4, 1, [4]), (3, 128, [1, 1, 1])]
)
def test_quota_schedule(n0, steps, counts):
    """The worked examples of the schedule, from the first step until the block is full."""
    masked = np.arange(G) < n0
    got = []
    for step in range(len(counts)):
        row = jnp.asarray(masked)[None]
        view = View(row * 0, row, row, ~row, jnp.array([step]), jnp.array([n0]), jnp.array([True]))
        proposal = Proposal(row * 7, jnp.linspace(-1, 0, G)[None], row)
        commit = np.asarray(quota("prob").step(KEYS[:1], proposal, view, (), {"steps": steps}).commit)[0]
        got.append(int(commit.sum()))
        masked &= ~commit
    assert got == counts and not masked.any()


def test_scores():
    proposal = Proposal(jnp.zeros((B, G), int), jnp.log(jnp.full((B, G), 0.25)), jnp.ones((B, G), bool))
    assert np.allclose(scores("prob", KEYS, proposal), 0.25)
    uniform = np.asarray(scores("random", KEYS, proposal))
    assert uniform.min() >= 0 and uniform.max() < 1 and len(np.unique(uniform)) > B * G - 5
    token_noise = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, TOKEN), (G, 64)))(KEYS)
    assert np.isin(uniform, token_noise).mean() < 0.1, "positions and tokens are drawn from streams of their own"
    part = Proposal(*(leaf[3:5] for leaf in proposal[:3]))
    assert np.array_equal(uniform[3:5], scores("random", KEYS[3:5], part)), "I5"
