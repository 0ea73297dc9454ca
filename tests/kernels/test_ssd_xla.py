"""K1, K6: the six functions of the XLA form equal their formulas, values and every gradient, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.kernels import ssd_xla
from tests.kernels import naive

CHUNK, SIZE = 32, 16
pytestmark = pytest.mark.xdist_group("ssd")


def close(actual, expected):
    leaves = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for one, other in zip(*leaves, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= 1e-12 * max(1.0, np.abs(other).max())


def problem(groups):
    rng = np.random.default_rng(groups)
    p = naive.problem(rng, block_size=SIZE, chunk=CHUNK, length=96, groups=groups, channels=5, state=3)
    return jax.tree.map(jnp.asarray, p)


def pullback(function, *args, counts):
    """The value and the pullback of a naive function; integer counts take no part in it."""
    float_args = [arg._replace(count=None) if hasattr(arg, "count") else arg for arg in args]
    counts = iter(counts)
    counts = [next(counts) if hasattr(arg, "count") else None for arg in args]
    restore = lambda arg, count: arg if count is None else arg._replace(count=count)
    call = lambda *args: function(*(restore(arg, count) for arg, count in zip(args, counts, strict=True)))
    return jax.vjp(call, *float_args)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_K1_scan(groups, reverse):
    with jax.enable_x64(True):
        p, how = problem(groups), {"chunk": CHUNK, "reverse": reverse}
        stream = p["reversed" if reverse else "clean"]
        expected, pull = pullback(
            functools.partial(naive.scan, **how), stream, p["Cm"], p["initial"], counts=[stream.count]
        )
        y, states = ssd_xla.scan_forward(stream, p["Cm"], p["initial"], **how)
        close((y, states), expected)
        gradients = ssd_xla.scan_backward(stream, p["Cm"], states, p["dy"], p["d_states"], **how)
        close(gradients, pull((p["dy"], p["d_states"])))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_K6_blocks(groups, reverse):
    with jax.enable_x64(True):
        p, how = problem(groups), {"chunk": CHUNK, "reverse": reverse}
        stream = p["blocks_reversed" if reverse else "blocks"]
        expected, pull = pullback(functools.partial(naive.blocks, **how), stream, p["Cm"], counts=[stream.count])
        close(ssd_xla.blocks_forward(stream, p["Cm"], **how), expected)
        close(ssd_xla.blocks_backward(stream, p["Cm"], p["dy"], **how), pull(p["dy"]))


@pytest.mark.parametrize("groups", [1, 2])
def test_K4_frontiers_in_a_chunk(groups):
    with jax.enable_x64(True):
        p, how = problem(groups), {"chunk": CHUNK, "block_size": SIZE}
        args = p["own"], p["Cm"], p["reach"], p["clean"], p["states"]
        counts = [p["own"].count, p["clean"].count]
        expected, pull = pullback(functools.partial(naive.frontiers, **how), *args, counts=counts)
        close(ssd_xla.frontiers_forward(*args, **how), expected)
        close(ssd_xla.frontiers_backward(*args, p["dy"], **how), pull(p["dy"]))


@pytest.mark.parametrize(
    ("operation", "block_size", "head_dim", "state", "chunk"),
    [
        ("scan", 16, 32, 16, 16),
        ("scan", 16, 64, 64, 64),
        ("scan", 32, 32, 64, 32),
        ("scan", 256, 64, 64, 64),
        ("scan", 1, 4, 4, 16),
        ("scan", 48, 64, 64, 48),
        ("scan", 251, 64, 64, 251),  # a prime
        ("scan", 16, 256, 256, 128),
        ("blocks", 16, 64, 64, 16),  # a larger chunk would hold pairs of two blocks
        ("blocks", 2, 64, 64, 16),
        ("seeded blocks", 2, 64, 64, 2),
        ("seeded blocks", 256, 64, 64, 64),
    ],
)
def test_chunks_weigh_as_much_as_states(operation, block_size, head_dim, state, chunk):
    assert ssd_xla.chunk_size(operation, block_size, head_dim, state) == chunk
