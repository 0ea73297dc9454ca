"""The guard's table: what is accepted, what is not, and what a rejected step leaves behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import GuardConfig
from diffjax.training.guard import ACCEPTED, EMPTY, NOT_FINITE, SPIKE, init_guard, judge

CONFIG = GuardConfig(spike_window=8, spike_sigma=6.0, max_consecutive=16)


@pytest.fixture(scope="module")
def step():
    return jax.jit(lambda state, loss, norm, weight: judge(CONFIG, state, loss, norm, weight))


def run(step, events, steps=50, state=None):
    """Reasons by step; events: step -> (loss, norm, weight)."""
    state = init_guard(CONFIG) if state is None else state
    reasons, states, limits = [], [], []
    for s in range(steps):
        normal = (3.0, 1.0 + 0.05 * np.sin(s), 100.0)
        verdict, state = step(state, *map(jnp.float32, events.get(s, normal)))
        reasons.append(int(verdict.reason))
        limits.append(float(verdict.limit))
        states.append(jax.tree.map(np.asarray, state))
    return reasons, states, limits


def test_exactly_the_injected_steps_are_rejected(step):
    nan = (np.nan, np.nan, 100.0)
    events = {0: nan, 20: (3.0, np.inf, 100.0), 30: nan, 31: nan, 32: nan, 40: (3.0, 1e4, 100.0), 45: (0.0, 0.0, 0.0)}
    reasons, states, _ = run(step, events)
    want = [ACCEPTED] * 50
    for s, reason in {0: 1, 20: 1, 30: 1, 31: 1, 32: 1, 40: 2, 45: 3}.items():
        want[s] = reason
    assert reasons == want and (NOT_FINITE, SPIKE, EMPTY) == (1, 2, 3)
    for s in events:
        if s:
            np.testing.assert_array_equal(states[s].norms, states[s - 1].norms)
    assert [int(states[s].consecutive) for s in (29, 30, 31, 32, 33, 40, 41, 45)] == [0, 1, 2, 3, 0, 1, 0, 0]
    assert int(states[-1].rejected) == 7 and int(states[-1].accepted) == 43


def test_limit_is_infinite_until_the_ring_is_full_and_then_the_formula(step):
    _, states, limits = run(step, {}, 20)
    assert limits[:8] == [np.inf] * 8
    ring = 1.0 + 0.05 * np.sin(np.arange(4, 12))
    assert limits[12] == pytest.approx(ring.mean() + 6 * max(ring.std(), 0.1 * ring.mean()), rel=1e-5)
    assert sorted(states[11].norms) == pytest.approx(sorted(ring), rel=1e-6)


def test_an_update_that_is_not_finite_is_rejected():
    for norm, reason in ((1.0, ACCEPTED), (np.inf, NOT_FINITE), (np.nan, NOT_FINITE)):
        verdict, _ = judge(CONFIG, init_guard(CONFIG), *map(jnp.float32, (3.0, 1.0, 100.0, norm)))
        assert int(verdict.reason) == reason


def test_a_wide_ring_uses_its_standard_deviation(step):
    norms = [1.0, 3.0] * 4
    _, _, limits = run(step, {s: (3.0, norm, 9.0) for s, norm in enumerate(norms)}, 9)
    assert limits[8] == pytest.approx(2.0 + 6 * 1.0, rel=1e-5)


def test_early_spikes_and_the_switch(step):
    assert run(step, {3: (3.0, 1e4, 100.0)}, 5)[0] == [ACCEPTED] * 5
    off = GuardConfig(spike_window=8, spike_sigma=None)
    full = init_guard(off)._replace(accepted=jnp.int32(100), norms=jnp.ones(8))
    verdict, _ = judge(off, full, jnp.float32(1), jnp.float32(1e9), jnp.float32(1))
    assert int(verdict.reason) == ACCEPTED
    verdict, _ = judge(CONFIG, full, jnp.float32(1), jnp.float32(1e9), jnp.float32(1))
    assert int(verdict.reason) == SPIKE


def test_an_empty_batch_is_not_a_failure_and_ends_no_series(step):
    state = init_guard(CONFIG)._replace(consecutive=jnp.int32(5))
    _, states, _ = run(step, {0: (0.0, 0.0, 0.0)}, 1, state)
    assert int(states[0].consecutive) == 5
