"""The TPU kernels of SSD frontiers, in the interpreter with NaN in all fresh memory, and lowered for a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.kernels import ssd_pallas_tpu_frontiers as kernels
from diffjax.kernels.dispatch import interpreted_kernels
from diffjax.kernels.ssd_stream import Stream

from . import naive

pytestmark = pytest.mark.xdist_group("ssd_pallas_tpu_frontiers")

CHUNK = 128
# Relative to the largest entry: values, gradients.
BARS = {"float32": (2e-6, 5e-6), "bfloat16": (1e-2, 2.5e-2)}
CASES = {
    # name: (dtype, sizes of `naive.problem`)
    "blocks of 32": ("float32", {"heads": 5, "length": 256, "batch": 2}),
    "bfloat16, two tiles of heads": ("bfloat16", {"heads": 12, "channels": 64, "state": 64, "block_size": 16}),
    "blocks share strips": ("float32", {"heads": 3, "block_size": 2, "length": 128, "reset_rate": 0.1}),
    "a block is a chunk, wide heads": ("float32", {"heads": 2, "block_size": 128, "channels": 128, "state": 128}),
    "chunks of 256, blocks of 128": ("float32", {"heads": 2, "chunk": 256, "block_size": 128, "reset_rate": 0.0}),
}


def inputs(dtype, **sizes):
    """float64 numbers that `dtype`, or float32 for sums, steps and states, holds: own, Cm, reach, clean, states; dy."""
    problem = naive.problem(np.random.default_rng(3), **({"batch": 1, "channels": 32} | sizes))
    rounded = lambda array, dtype: np.asarray(jnp.asarray(array, dtype).astype(jnp.float32), np.float64)
    wide, single = (functools.partial(rounded, dtype=kind) for kind in (dtype, "float32"))
    stream = lambda s: Stream(wide(s.x), single(s.dt), single(s.cum), s.count, wide(s.Bm))
    args = (stream(problem["own"]), wide(problem["Cm"]), single(problem["reach"]), stream(problem["clean"]))
    return (*args, single(problem["states"])), wide(problem["dy"])


@functools.cache
def truth(chunk, block_size):
    """y and the gradients by `naive`."""

    def function(args, dy):
        y, pull = jax.vjp(lambda *args: naive.frontiers(*args, chunk=chunk, block_size=block_size), *args)
        return y, pull(dy)

    return jax.jit(function)


@functools.cache
def kernel(chunk, block_size):
    """The same by the kernels."""
    static = {"chunk": chunk, "block_size": block_size}

    def function(args, dy):
        return kernels.frontiers_forward(*args, **static), kernels.frontiers_backward(*args, dy, **static)

    return jax.jit(function)


def both(args, dy, dtype, **static):
    """What the kernels find and what is right, as {name: array}."""
    own, Cm, reach, clean, states = args
    wide, single = (lambda array: jnp.asarray(array, dtype)), (lambda array: jnp.asarray(array, jnp.float32))
    cast = lambda s: Stream(wide(s.x), single(s.dt), single(s.cum), jnp.asarray(s.count), wide(s.Bm))
    with interpreted_kernels():
        found = kernel(**static)((cast(own), wide(Cm), single(reach), cast(clean), single(states)), wide(dy))
    with jax.enable_x64(True):
        right = truth(**static)(jax.tree.map(jnp.asarray, args), jnp.asarray(dy))
    return named(*found), named(*right)


def named(y, gradients):
    d_own, d_Cm, d_reach, d_clean, d_states = gradients
    streams = {
        f"{which} {name}": getattr(stream, name)
        for which, stream in (("own", d_own), ("clean", d_clean))
        for name in ("x", "dt", "cum", "Bm")
    }
    return {"y": y, "Cm": d_Cm, "reach": d_reach, "states": d_states} | streams


def check(found, right, value_bar, gradient_bar):
    for name, expected in right.items():
        array, expected = np.asarray(found[name], np.float64), np.asarray(expected)
        assert array.shape == expected.shape, name
        error = np.abs(array - expected).max()  # NaN where the kernel has NaN
        bar = value_bar if name == "y" else gradient_bar
        assert error <= bar * np.abs(expected).max() + np.finfo(np.float32).tiny, name


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_formulas(name, monkeypatch):
    dtype, sizes = CASES[name]
    if "two tiles" in name:
        monkeypatch.setattr("diffjax.kernels.pallas_tpu.TILES", {})
    args, dy = inputs(dtype, **sizes)
    static = {"chunk": sizes.get("chunk", CHUNK), "block_size": sizes.get("block_size", 32)}
    found, right = both(args, dy, dtype, **static)
    check(found, right, *BARS[dtype])
    for name in ("y", "Cm", "own x", "own Bm", "clean x", "clean Bm"):
        assert found[name].dtype == dtype, name
    assert not found["states"][:, -1].any()


def sums(slope, count, size):
    """[B, T, 1]: `slope` times the number of tokens since `count` rose, or since the last multiple of `size`."""
    since = np.ones(count.shape)
    for t in range(1, count.shape[1]):
        goes_on = (t % size > 0) & (count[:, t] == count[:, t - 1])
        since[:, t] += np.where(goes_on, since[:, t - 1], 0)
    return (slope * since)[..., None]


@pytest.mark.parametrize("decay", [0.0, -16.0, -200.0])
def test_extreme_decays_are_finite_and_right(decay):
    sizes = CASES["blocks of 32"][1]
    (own, Cm, reach, clean, states), dy = inputs("float32", **sizes)
    assert clean.count.any()
    cum = np.broadcast_to(sums(decay, clean.count, CHUNK), reach.shape)
    cum_own = np.broadcast_to(sums(decay, 0 * own.count, 32), reach.shape)
    ends = cum[:, 31::32].repeat(32, axis=1)
    before = np.where((np.arange(reach.shape[1]) % CHUNK < 32)[:, None], 0, np.roll(ends, 32, axis=1))
    own, clean = own._replace(cum=cum_own, x=1e3 * own.x), clean._replace(cum=cum, x=1e3 * clean.x)
    found, right = both((own, Cm, before + cum_own, clean, states), dy, "float32", chunk=CHUNK, block_size=32)
    check(found, right, 2e-6, 5e-6)


def test_a_rise_of_the_sums_is_cut_at_zero():
    """Sums of decays may round upward; no decay grows above 1 for it."""
    (own, Cm, reach, clean, states), dy = inputs("float32", **CASES["blocks of 32"][1])
    rising = np.broadcast_to(np.arange(reach.shape[1])[None, :, None] * 2.0, reach.shape)

    def at(sums):
        args = (own._replace(cum=sums), Cm, sums, clean._replace(cum=sums), states)
        return both(args, dy, "float32", chunk=CHUNK, block_size=32)[0]

    for one, other in zip(jax.tree.leaves(at(rising)), jax.tree.leaves(at(0 * rising)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("entries", [1, 2, 5])
def test_states_beyond_the_frontiers_get_no_gradient(entries):
    """Own tokens may fill more or fewer chunks than there are states for."""
    shape = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)
    x, dt, Bm = shape("float32", 1, CHUNK, 2, 32), shape("float32", 1, CHUNK, 2), shape("float32", 1, CHUNK, 1, 16)
    stream = Stream(x, dt, dt, shape("int32", 1, CHUNK), Bm)
    states = shape("float32", 1, entries, 2, 32, 16)
    backward = functools.partial(kernels.frontiers_backward, chunk=CHUNK, block_size=32)
    gradients = jax.eval_shape(backward, stream, Bm, dt, stream, states, x)
    assert gradients[-1].shape == states.shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_lower_for_a_tpu(direction, dtype):
    stream, states = naive.abstract(dtype, chunk=CHUNK)
    x, dt, Bm = stream.x, stream.dt, stream.Bm
    args = (stream, Bm, dt, stream, states) + ((x,) if direction == "backward" else ())
    function = functools.partial(getattr(kernels, f"frontiers_{direction}"), chunk=CHUNK, block_size=32)
    module = jax.export.export(jax.jit(function), platforms=["tpu"])(*args).mlir_module()
    assert "tpu_custom_call" in module
    assert f"ssd_frontiers_{direction}" in module
