"""The TPU kernels of the SSD scan and blocks: interpreted with NaN in all fresh memory, and lowered for a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.kernels import ssd_pallas_tpu as kernels
from diffjax.kernels.dispatch import interpreted_kernels
from diffjax.kernels.pallas_tpu import Call, heads_per_step
from diffjax.kernels.ssd_stream import Stream

from . import naive

pytestmark = pytest.mark.xdist_group("ssd_pallas_tpu")

CHUNK = 128
GRADIENTS = ("x", "dt", "cum", "Bm", "Cm", "initial")
# Relative to the largest entry: values, gradients.
BARS = {"float32": (2e-6, 5e-6), "bfloat16": (1e-2, 2.5e-2)}
CASES = {
    # name: (operation, reverse, stream of `naive.problem`, dtype, sizes)
    "scan": ("scan", False, "clean", "float32", {"heads": 9, "length": 384}),  # two tiles of heads
    "scan bfloat16": ("scan", False, "clean", "bfloat16", {"heads": 4, "channels": 64, "state": 64, "batch": 1}),
    "scan in reverse": ("scan", True, "reversed", "float32", {"heads": 3, "state": 64, "batch": 1}),
    "scan of wide heads": ("scan", False, "clean", "float32", {"heads": 2, "channels": 128, "state": 128, "batch": 1}),
    "chunks of 256": ("scan", False, "clean", "float32", {"heads": 2, "chunk": 256, "batch": 1}),
    "blocks": ("blocks", False, "blocks", "float32", {"heads": 5, "batch": 1}),
    "blocks in reverse": ("blocks", True, "blocks_reversed", "bfloat16", {"heads": 5, "channels": 64, "block_size": 8}),
}


def rounded(array, dtype):
    """float64 numbers that `dtype` holds."""
    return np.asarray(jnp.asarray(array, dtype).astype(jnp.float32), np.float64)


def inputs(which, dtype, **sizes):
    """Numbers that kernel and truth share: differentiable inputs, counts, cotangents of y and of the states."""
    problem = naive.problem(np.random.default_rng(0), **sizes)
    stream = problem[which]
    wide = (stream.x, stream.Bm, problem["Cm"], problem["dy"])
    x, Bm, Cm, dy = (rounded(array, dtype) for array in wide)
    dt, cum, initial, d_states = (
        rounded(array, "float32") for array in (stream.dt, stream.cum, problem["initial"], problem["d_states"])
    )
    return (x, dt, cum, Bm, Cm, initial), stream.count, dy, d_states


@functools.cache
def naive_both(operation, chunk, reverse):
    """(inputs, counts, cotangents) -> (values, gradients) of `naive`."""

    def function(count, x, dt, cum, Bm, Cm, initial):
        stream = Stream(x, dt, cum, count, Bm)
        if operation == "scan":
            return naive.scan(stream, Cm, initial, chunk=chunk, reverse=reverse)
        return (naive.blocks(stream, Cm, chunk=chunk, reverse=reverse),)

    @jax.jit
    def both(args, count, cotangents):
        values, pull = jax.vjp(functools.partial(function, count), *args)
        return values, pull(cotangents)

    return both


@functools.cache
def kernel_both(operation, chunk, reverse):
    """The same by the kernels, of a stream."""
    static = {"chunk": chunk, "reverse": reverse}

    @jax.jit
    def both(stream, Cm, initial, dy, d_states):
        if operation == "blocks":
            d_stream, d_Cm = kernels.blocks_backward(stream, Cm, dy, **static)
            return (kernels.blocks_forward(stream, Cm, **static),), (d_stream, d_Cm)
        y, states = kernels.scan_forward(stream, Cm, initial, **static)
        return (y, states), kernels.scan_backward(stream, Cm, states, dy, d_states, **static)

    return both


def truth(operation, args, count, dy, d_states, chunk=CHUNK, reverse=False):
    """Values and gradients of `naive`, in float64."""
    with jax.enable_x64(True):
        args = jax.tree.map(jnp.asarray, args)
        cotangents = tuple(jnp.asarray(array) for array in (dy, d_states)[: 2 if operation == "scan" else 1])
        return jax.tree.map(np.asarray, naive_both(operation, chunk, reverse)(args, jnp.asarray(count), cotangents))


def kernel(operation, args, count, dy, d_states, dtype, chunk=CHUNK, reverse=False):
    """Values and gradients of the kernels, interpreted."""
    wide = lambda array: jnp.asarray(array, dtype)
    single = lambda array: jnp.asarray(array, jnp.float32)
    x, dt, cum, Bm, Cm, initial = args
    stream = Stream(wide(x), single(dt), single(cum), jnp.asarray(count), wide(Bm))
    with interpreted_kernels():
        both = kernel_both(operation, chunk, reverse)
        values, (d_stream, *others) = both(stream, wide(Cm), single(initial), wide(dy), single(d_states))
    assert d_stream.count is None
    assert [array.dtype for array in (values[0], d_stream.x, d_stream.Bm, others[0])] == [jnp.dtype(dtype)] * 4
    return values, (d_stream.x, d_stream.dt, d_stream.cum, d_stream.Bm, *others)


def error(found, expected, scale=None):
    """The largest difference, relative to the largest entry or to `scale`; NaN where the kernel has NaN."""
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / (scale or np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_formulas(name):
    operation, reverse, which, dtype, sizes = CASES[name]
    numbers = inputs(which, dtype, **({"channels": 32, "state": 16} | sizes))
    static = {"chunk": sizes.get("chunk", CHUNK), "reverse": reverse}
    values, gradients = kernel(operation, *numbers, dtype, **static)
    expected_values, expected_gradients = truth(operation, *numbers, **static)
    value_bar, gradient_bar = BARS[dtype]
    for what, found, expected in zip(("y", "states"), values, expected_values, strict=False):
        assert error(found, expected) <= value_bar, what
    for what, found, expected in zip(GRADIENTS, gradients, expected_gradients, strict=False):
        assert error(found, expected) <= gradient_bar, what


@pytest.mark.parametrize("decay", [0.0, -16.0, -200.0])
def test_extreme_decays_are_finite_and_right(decay):
    (x, dt, cum, Bm, Cm, initial), count, dy, d_states = inputs("clean", "float32", heads=2, batch=1)
    since = np.arange(x.shape[1]) % CHUNK + 1.0
    starts = np.flatnonzero(np.diff(count[0], prepend=0) > 0)
    for start in starts:  # sums start anew at a reset
        end = start + CHUNK - start % CHUNK
        since[start:end] = np.arange(1.0, end - start + 1)
    cum = np.broadcast_to((decay * since)[None, :, None], cum.shape)
    numbers = (1e3 * x, dt, cum, Bm, Cm, initial), count, dy, d_states
    assert len(starts)
    values, gradients = kernel("scan", *numbers, "float32")
    expected_values, expected_gradients = truth("scan", *numbers)
    # In the sums of R a token's own entry cancels; with fast decays little else is there, and rounding is of its size.
    scale = np.abs((dy * expected_values[0]).sum(-1)).max()
    scales = (None, None, None, None, scale, None, None, scale)
    names = ("y", "states", *GRADIENTS)
    assert names[4] == "cum" and names[7] == "initial"
    found = (*values, *gradients)
    for name, one, right, scale in zip(names, found, (*expected_values, *expected_gradients), scales, strict=True):
        assert error(one, right, scale) <= 5e-6, name


def test_a_rise_of_the_sums_is_cut_at_zero():
    """Sums of decays may round upward; no decay grows above 1 for it."""
    (x, dt, cum, Bm, Cm, initial), count, dy, d_states = inputs("clean", "float32", heads=2, batch=1, reset_rate=0.0)
    rising = np.broadcast_to(np.arange(x.shape[1])[None, :, None] % CHUNK * 2.0, cum.shape)
    flat = kernel("scan", (x, dt, 0 * cum, Bm, Cm, initial), count, dy, d_states, "float32")
    found = kernel("scan", (x, dt, rising, Bm, Cm, initial), count, dy, d_states, "float32")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(flat), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("operation", ["scan", "blocks"])
def test_kernels_lower_for_a_tpu(operation, direction, dtype):
    stream, states = naive.abstract(dtype, chunk=CHUNK)
    x, Bm = stream.x, stream.Bm
    initial = jax.ShapeDtypeStruct((states.shape[0], *states.shape[2:]), states.dtype)
    args = {
        "scan forward": (stream, Bm, initial),
        "scan backward": (stream, Bm, states, x, states),
        "blocks forward": (stream, Bm),
        "blocks backward": (stream, Bm, x),
    }[f"{operation} {direction}"]
    function = getattr(kernels, f"{operation}_{direction}")
    lowered = jax.export.export(jax.jit(lambda *args: function(*args, chunk=CHUNK, reverse=True)), platforms=["tpu"])
    module = lowered(*args).mlir_module()
    assert "tpu_custom_call" in module
    assert f"ssd_{operation}_{direction}" in module


LEGAL = {
    "shape": (16, 1024, 80, 32), "groups": 1, "state": 64, "chunk": 128, "block_size": 32, "dtype": jnp.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize("operation", ["scan", "blocks", "frontiers"])
def test_shipped_shapes_are_taken(operation):
    assert kernels.refusal(operation, **LEGAL) is None
    assert kernels.refusal(operation, **LEGAL | {"shape": (8, 2048, 24, 64), "state": 128}) is None
    assert kernels.refusal(operation, **LEGAL | {"dtype": "float32", "block_size": 128}) is None


@pytest.mark.parametrize(
    ("operation", "change", "rule", "nearest"),
    [
        ("scan", {"groups": 2}, "one group", "use 1"),
        ("scan", {"dtype": jnp.float64}, "float32 or bfloat16", "use float32"),
        ("scan", {"shape": (1, 256, 4, 8)}, "head dim of at least 16", "use 16"),
        ("scan", {"shape": (1, 256, 4, 36)}, "multiple of 8", "use 40"),
        ("scan", {"state": 12}, "state of at least 16", "use 16"),
        ("scan", {"chunk": 64}, "multiple of 128", "use 128"),
        ("scan", {"chunk": 200}, "multiple of 128", "use 256"),
        ("scan", {"block_size": 48}, "divides the chunk", "use 128"),
        ("blocks", {"block_size": 48}, "power of two", "use 64"),
        ("frontiers", {"block_size": 3}, "power of two", "use 4"),
        ("scan", {"shape": (16, 2**16, 80, 32)}, "fewer than 2**31", "use at most 12 rows"),
        ("scan", {"shape": (1, 860_160, 80, 32)}, "fewer than 2**31", "tokens"),
        ("scan", {"chunk": 2048, "shape": (1, 2048, 80, 32)}, "MiB of VMEM", "use 128"),
    ],
)
def test_refusals_name_the_rule_and_the_nearest_legal_value(operation, change, rule, nearest):
    sentence = kernels.refusal(operation, **LEGAL | change)
    assert rule in sentence and nearest in sentence


def test_heads_are_padded_as_little_as_tiles_of_eight_allow():
    assert [heads_per_step(heads, 40) for heads in (1, 5, 12, 20, 24, 64, 80)] == [8, 8, 16, 24, 24, 32, 40]
    call = Call.sized(2, 256, 5, 32, 64, CHUNK, "bfloat16")
    assert (call.tile, call.groups) == (8, 1)
