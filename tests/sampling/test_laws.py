"""The law of the sampler on small exact joints: enumerated by loops, held against known numbers and the driver."""

import itertools
import math
from functools import lru_cache

import jax
import numpy as np
import pytest
from scipy.stats import chisquare

from diffjax.sampling import driver
from diffjax.sampling.rules import quota, threshold
from tests.sampling.nets import EOS, FIRST, FORBID, MASK, Posterior, flags

pytestmark = pytest.mark.xdist_group("sampling_laws")

XOR = Posterior([[0.5, 0], [0, 0.5]])
INDEPENDENT = Posterior(np.outer([0.9, 0.1], [0.6, 0.4]))
N = np.arange(27)
TABLE = Posterior((1 + (7 * N**2 + 3 * N) % 11).reshape(3, 3, 3))


def law(net, orders):
    """Exact law of a sampler of the block [symbols]*G float64.

    orders(masked, drawn, p) -> list of (probability, positions to commit), given the masked positions, the symbol drawn
    at each and p [G, symbols]: all randomness that is not the token draw.
    """
    out = np.zeros(net.table.shape)

    def walk(visible, weight):
        masked = [g for g, v in enumerate(visible) if v is None]
        if not masked:
            out[visible] += weight
            return
        p = net.marginal(visible)
        for drawn in itertools.product(range(net.symbols), repeat=len(masked)):
            chance = weight * math.prod(p[g, s] for g, s in zip(masked, drawn, strict=True))
            if chance > 0:
                tokens = dict(zip(masked, drawn, strict=True))
                for part, commit in orders(masked, tokens, p):
                    walk(tuple(tokens[g] if g in commit else v for g, v in enumerate(visible)), chance * part)

    walk((None,) * net.block_size, 1.0)
    return out


def at_once(masked, drawn, p):
    return [(1.0, masked)]


def one_random(masked, drawn, p):
    return [(1 / len(masked), [g]) for g in masked]


def one_by_prob(masked, drawn, p):
    return [(1.0, [max(masked, key=lambda g: (round(p[g, drawn[g]], 9), -g))])]


def above(tau):
    return lambda masked, drawn, p: [
        (1.0, [g for g in masked if p[g, drawn[g]] >= tau] or one_by_prob(masked, drawn, p)[0][1])
    ]


def distance(net, sampled):
    return np.abs(net.table - sampled).sum() / 2


def sample(net, rule, knobs, n=20_000, seed=0):
    """Counts [symbols]*G of n rows of one driver call at temperature 1."""
    G, V = net.block_size, net.vocab_size
    knobs = {"temperature": 1.0, "top_p": 1.0, **knobs}
    state = driver.start(net, None, rule, [[]] * n, [G] * n, knobs, mask_id=MASK, seed=seed)
    state = driver.advance(net, rule, None, state, flags(V, (*FORBID, EOS)), flags(V, []), False, mask_id=MASK)
    tokens = jax.device_get(state.tokens)[:n, :G] - FIRST
    assert (jax.device_get(state.finish)[:n] == driver.LENGTH).all() and tokens.min() >= 0
    counts = np.zeros(net.table.shape, int)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


@lru_cache
def without_ties(net):
    """A net close by: in the driver's float32, equal probabilities of different positions would round apart."""
    return Posterior(net.table * (1 + 0.01 * np.random.default_rng(0).random(net.table.shape)))


CASES = {
    "b at once": (XOR, quota("random"), {"steps": 1}, at_once, 0.5),
    "b quota random": (XOR, quota("random"), {"steps": 2}, one_random, 0.0),
    "b threshold .5": (XOR, threshold(), {"threshold": 0.5}, above(0.5), 0.5),
    "b threshold .6": (XOR, threshold(), {"threshold": 0.6}, above(0.6), 0.0),
    "c quota prob": (INDEPENDENT, quota("prob"), {"steps": 2}, one_by_prob, None),
    "c quota random": (INDEPENDENT, quota("random"), {"steps": 2}, one_random, 0.0),
    "d at once": (TABLE, quota("prob"), {"steps": 1}, at_once, 0.285467),
    "d quota random": (TABLE, quota("random"), {"steps": 3}, one_random, 0.0),
    "d quota prob": (TABLE, quota("prob"), {"steps": 3}, one_by_prob, 0.256868),
}


@pytest.mark.parametrize("case", CASES)
def test_law(case):
    """Golden tests b, c, d: the enumerated law is at the known distance, and the driver's samples follow that law."""
    net, rule, knobs, orders, total_variation = CASES[case]
    want = law(net, orders)
    assert abs(want.sum() - 1) < 1e-12
    if total_variation is None:
        assert abs(want[0].sum() - 0.99) < 1e-12
    else:
        assert abs(distance(net, want) - total_variation) < 1e-6
    net = without_ties(net)
    want = law(net, orders)
    counts = sample(net, rule, knobs)
    assert counts[want == 0].sum() == 0
    assert chisquare(counts[want > 0], want[want > 0] * counts.sum()).pvalue > 1e-3
