"""Proposals: exact argmax, nucleus, the drawn law, forbidden ids at every noise, clean log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from diffjax.sampling import proposals
from diffjax.sampling.proposals import gumbel, nucleus, propose

pytestmark = pytest.mark.xdist_group("sampling_proposals")

V = 12
FORBIDDEN = np.isin(np.arange(V), [0, 1, 4])
run = jax.jit(propose, static_argnames="needs")


def keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def random_logits(shape, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale


def clean_log_probs(logits):
    logits = np.where(FORBIDDEN, -np.inf, logits.astype(np.float64))
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_fields_are_of_the_clean_law():
    logits = random_logits((4, 5, V))
    want = clean_log_probs(logits)
    needs = frozenset({"top", "margin", "entropy", "full_logp"})
    got = run(keys(4), logits, FORBIDDEN, 2.0, 0.5, needs)
    assert np.allclose(got.full_logp[..., ~FORBIDDEN], want[..., ~FORBIDDEN], atol=1e-5)
    assert np.all(np.isneginf(got.full_logp[..., FORBIDDEN]))
    assert np.allclose(got.logp, np.take_along_axis(want, np.asarray(got.token)[..., None], -1)[..., 0], atol=1e-5)
    best = np.sort(np.exp(want), -1)
    assert np.allclose(got.top, best[..., -1], atol=1e-6)
    assert np.allclose(got.margin, best[..., -1] - best[..., -2], atol=1e-6)
    p = np.exp(want[..., ~FORBIDDEN])
    assert np.allclose(got.entropy, -(p * np.log(p)).sum(-1), atol=1e-5)
    assert np.all(got.sound)
    plain = run(keys(4), logits, FORBIDDEN, 2.0, 0.5)
    assert plain.top is None and plain.full_logp is None and np.array_equal(plain.token, got.token)


def test_temperature_zero_is_argmax_and_ignores_key_and_top_p():
    logits = np.round(random_logits((4, 5, V)))  # ties
    want = np.where(FORBIDDEN, -np.inf, logits).argmax(-1)
    for seed, top_p in [(0, 1.0), (1, 0.1)]:
        assert np.array_equal(run(keys(4, seed), logits, FORBIDDEN, 0.0, top_p).token, want)
    # a row at temperature 0 beside sampled rows
    got = run(keys(4), logits, FORBIDDEN, jnp.array([0.0, 1, 5, 0]), jnp.array([0.1, 1, 1, 0.1])).token
    assert np.array_equal(np.asarray(got)[[0, 3]], want[[0, 3]])
    huge = logits * 1e36  # far beyond exp
    assert np.array_equal(run(keys(4), huge, FORBIDDEN, 0.0, 1.0).token, want)
    assert np.array_equal(run(keys(4), huge, FORBIDDEN, 1e-30, 0.9).token, want)


@pytest.mark.parametrize("top_p, count", [(0.7, 2), (0.5, 1), (0.49, 1), (0.81, 3), (0.96, 4), (1e-9, 1)])
def test_nucleus_is_inclusive(top_p, count):
    """The worked example: p = (.5, .3, .15, .05) keeps {0, 1} at .7, the token that crosses among them."""
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))[np.argsort(order)]
        cut = np.asarray(nucleus(jnp.asarray(logits), top_p))
        assert set(np.flatnonzero(np.isfinite(cut))) == set(order[:count])
    ties = np.asarray(nucleus(jnp.zeros(4), 0.5))
    assert list(np.isfinite(ties)) == [True, True, False, False]


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8)])
def test_drawn_law(temperature, top_p):
    """Chi-square of 200,000 tokens against softmax(l / T) cut to its nucleus, computed by a loop in float64."""
    n, logits = 200, random_logits((V,), seed=3, scale=1.0)
    tempered = np.where(FORBIDDEN, 0.0, np.exp(logits.astype(np.float64) / temperature))
    p = tempered / tempered.sum()
    if top_p < 1:
        kept, mass = [], 0.0
        for token in np.argsort(-p, kind="stable"):
            kept.append(token)
            mass += p[token]
            if mass >= top_p:
                break
        p = np.where(np.isin(np.arange(V), kept), p, 0.0) / mass
    got = np.asarray(run(keys(n, seed=9), np.broadcast_to(logits, (n, 1000, V)), FORBIDDEN, temperature, top_p).token)
    counts = np.bincount(got.ravel(), minlength=V)
    assert counts[p == 0].sum() == 0
    assert chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue > 1e-3


def test_m_noise_endpoints_never_emit_a_forbidden_id(monkeypatch):
    """The largest noise the generator can make on every forbidden id, the smallest elsewhere, and the reverse."""
    edge = jnp.asarray([np.finfo(np.float32).tiny, 1 - 2.0**-24], jnp.float32)
    low, high = np.asarray(-jnp.log(-jnp.log(edge)))
    assert np.isfinite([low, high]).all()
    logits = random_logits((2, 3, V), scale=20)
    logits[..., FORBIDDEN] = 1e4
    forced = []
    monkeypatch.setattr(proposals, "gumbel", lambda key, shape: jnp.broadcast_to(forced[-1], shape))

    @jax.jit
    def tokens(noise, temperature, top_p):
        forced.append(noise)
        return propose(keys(2), jnp.asarray(logits), jnp.asarray(FORBIDDEN), temperature, top_p).token

    for on_forbidden, elsewhere in [(high, low), (low, high), (high, high), (low, low)]:
        noise = jnp.where(FORBIDDEN, on_forbidden, elsewhere)
        for temperature in (0.0, 1.0, 1e6):
            for top_p in (1.0, 0.3):
                assert not np.any(FORBIDDEN[np.asarray(tokens(noise, temperature, top_p))])


def test_noise_is_finite():
    noise = np.asarray(gumbel(jax.random.key(0), (2_000_000,)))
    assert np.isfinite(noise).all() and abs(noise.mean() - 0.5772) < 0.005


def test_unsound_positions_are_reported():
    logits = random_logits((4, 5, V))
    logits[1, 2, 7] = np.nan
    logits[2, 0, ~FORBIDDEN] = -np.inf
    logits[3, 1, 8] = np.inf
    sound = np.ones((4, 5), bool)
    sound[1, 2] = sound[2, 0] = sound[3, 1] = False
    assert np.array_equal(run(keys(4), logits, FORBIDDEN, 1.0, 1.0).sound, sound)


def test_rows_do_not_depend_on_each_other():
    """I5, also for ids forbidden per row and for bfloat16 logits, whose noise stays float32."""
    logits = jnp.asarray(random_logits((4, 5, V)), jnp.bfloat16)
    forbid = np.random.default_rng(1).random((4, V)) < 0.3
    batch = run(keys(4), logits, forbid, 1.0, 0.9).token
    for row in range(4):
        alone = run(keys(4)[row : row + 1], logits[row : row + 1], forbid[row : row + 1], 1.0, 0.9).token
        assert np.array_equal(batch[row], alone[0])
    assert not np.any(np.take_along_axis(forbid, np.asarray(batch), 1))
