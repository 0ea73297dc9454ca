"""What the kernel benchmarks say about an operation: its errors, its cost by formula, and its time."""

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from kernel_cases import Case, Sizes, cast, interpreted_unless_native, rounded

from diffjax.errors import UnsupportedKernel
from diffjax.kernels.dispatch import local_platform

# Largest relative errors allowed: (values, gradients).
BARS = {"float64": (1e-10, 1e-10), "float32": (2e-6, 5e-6), "bfloat16": (2.5e-2, 2.5e-2)}
DIRECTIONS = ("forward", "with gradients")


class Program(NamedTuple):
    """A compiled function and what it is called with."""

    compiled: Callable
    arguments: tuple

    def __call__(self):
        return self.compiled(*self.arguments)

    @property
    def temporaries(self) -> int:
        """Bytes it takes beside arguments and results."""
        return self.compiled.memory_analysis().temp_size_in_bytes


def programs(function: Callable, inputs: list[Array], given=None) -> dict[str, Program]:
    """For each of DIRECTIONS: `function(*inputs)`, and its results with the gradients of all inputs. The cotangents are
    `given`, or random."""
    given = cotangents(function, inputs) if given is None else given
    compiled = lambda function, *arguments: Program(jax.jit(function).lower(*arguments).compile(), arguments)
    return {
        "forward": compiled(function, *inputs),
        "with gradients": compiled(value_and_pullback(function), inputs, given),
    }


def cotangents(function: Callable, inputs: list[Array]) -> tuple[Array, ...]:
    """Random, of the shapes and dtypes of the function's results."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(function, *inputs)
    return tuple(jnp.asarray(rng.standard_normal(shape.shape), shape.dtype) for shape in shapes)


def value_and_pullback(function: Callable) -> Callable:
    """(inputs, cotangents) -> (results, gradients)."""

    def run(inputs, given):
        out, pull = jax.vjp(function, *inputs)
        return out, pull(given)

    return run


def reason(error: Exception) -> str:
    """Of a refusal ("kernels: ... cannot run ... of [shape]: why") the why; of anything else its first line."""
    text = str(error).strip()
    if isinstance(error, UnsupportedKernel):
        return "refused: " + text.split(": ", 2)[-1]
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"


# Errors


class Truth(NamedTuple):
    """The token loop, or dense attention, in float64, for inputs and cotangents that `dtype` holds exactly."""

    case: Case
    dtype: str
    cotangents: tuple[Array, ...]
    values: tuple[np.ndarray, ...]
    gradients: tuple[np.ndarray, ...]


def truth_of(case: Case) -> Callable[[str], Truth]:
    """dtype -> Truth, by one compiled program. On a TPU, which has no float64, the CPU computes it."""
    device = jax.devices("cpu" if local_platform() == "tpu" else None)[0]
    function = case.function("reference")
    run = jax.jit(value_and_pullback(function))

    def truth(dtype: str) -> Truth:
        with jax.enable_x64(True), jax.default_device(device):
            exact = rounded(case, dtype)
            given = cotangents(function, cast(exact, dtype))
            wide = tuple(array.astype(jnp.float64) for array in given)
            values, gradients = jax.tree.map(np.asarray, run(cast(exact, jnp.float64), wide))
            return Truth(exact, dtype, tuple(map(np.asarray, given)), values, gradients)

    return truth


def errors_of(truth: Truth, backend: str) -> dict[str, float]:
    """The largest relative error of the values ("values") and of each gradient (by the input's name)."""
    function = value_and_pullback(truth.case.function(backend))
    with jax.enable_x64(truth.dtype == "float64"), interpreted_unless_native(backend):
        values, gradients = jax.jit(function)(cast(truth.case, truth.dtype), tuple(map(jnp.asarray, truth.cotangents)))
    pairs = zip(truth.case.floats, gradients, truth.gradients, strict=True)
    largest = max(relative_error(got, true) for got, true in zip(values, truth.values, strict=True))
    return {"values": largest} | {name: relative_error(got, true) for name, got, true in pairs}


def relative_error(got, truth) -> float:
    """Largest difference, relative to the truth's largest entry; infinite where either is not finite.

    Raises:
      ValueError: the shapes differ.
    """
    got, truth = np.asarray(got, np.float64), np.asarray(truth, np.float64)
    if got.shape != truth.shape:
        raise ValueError(f"a result has the shape {got.shape}, the truth {truth.shape}")
    if not (np.isfinite(got).all() and np.isfinite(truth).all()):
        return math.inf
    if got.size == 0:
        return 0.0
    return float(np.abs(got - truth).max() / max(np.abs(truth).max(), 1e-300))


def over_bars(errors: dict[str, float], dtype: str) -> list[str]:
    """Those of `errors_of` that are larger than allowed."""
    values, gradients = BARS[dtype]
    return [name for name, error in errors.items() if not error <= (values if name == "values" else gradients)]


# Costs


class Cost(NamedTuple):
    flop: float
    bytes: float


def ssd_cost(sizes: Sizes, tokens: int, chunk: int, itemsize: int, direction: str) -> Cost:
    """Of a scan over `tokens` tokens a row, frontiers' tokens among them: the formulas of `diffjax.kernels.ssd`, all
    heads sharing one score matrix. Gradients include the forward pass."""
    B, _, _, H, P, N = sizes
    flop = 2 * chunk * (N / H + P) + 4 * N * P
    size = 2 * itemsize * P + 8 + 2 * itemsize * N / H + 4 * N * P / chunk
    if direction == "with gradients":
        flop += 4 * chunk * P + 6 * chunk * N / H + 10 * N * P
        size += 3 * itemsize * P + 16 + 4 * N * P / chunk + (4 * itemsize + 8) * N / H
    return Cost(B * tokens * H * flop, B * tokens * H * size)


def visible_pairs(operation: str, sizes: Sizes) -> int:
    """Query and key pairs that a head of one row attends to, for rows of one document."""
    T, K, block = sizes.L - sizes.G, sizes.L // sizes.G, sizes.G**2
    return {
        "causal": T * (T + 1) // 2,
        "blocks": block * K * (K - 1) // 2,  # K - 1 blocks, each reads itself and those before it
        "frontiers": block * K * (K + 1) // 2,  # the same of K blocks
        "one frontier": block * K,  # the last block
    }[operation]


def attention_cost(operation: str, sizes: Sizes, itemsize: int, direction: str) -> Cost:
    """FLOP: two products of every visible pair, five more backward. Bytes: queries, results, keys and values once each;
    backward reads them and their cotangents, and writes gradients. Gradients include the forward pass."""
    B, L, G, H, P, key_heads = sizes
    queries = {"frontiers": L, "one frontier": G}.get(operation, L - G)
    keys = L - G + (queries if "frontier" in operation else 0)
    once = B * P * itemsize * 2 * (queries * H + keys * key_heads)
    product = 2 * B * H * P * visible_pairs(operation, sizes)
    return Cost(7 * product, 3 * once) if direction == "with gradients" else Cost(2 * product, once)


# Times


class Timed(NamedTuple):
    """Seconds of one call, over turns."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        median, low, high = (f"{three(1e3 * seconds):g}" for seconds in self)
        return f"{median} ms ({low}-{high})"


def interleave(thunks: dict[str, Callable[[], object]], turns: int, at_least: float) -> dict[str, Timed]:
    """Every turn runs all thunks, each as often as fills `at_least` seconds. Two calls before the turns and one before
    each clock are not counted: another program's threads may still be spinning. A thunk returns arrays to wait for, or
    the seconds that another process measured."""
    calls, seconds = {}, {name: [] for name in thunks}
    for name, thunk in thunks.items():
        spent = min(_timed(thunk, 1) for _ in range(2))
        calls[name] = max(1, round(at_least / max(spent, 1e-6)))
    for _ in range(turns):
        for name, thunk in thunks.items():
            seconds[name].append(_timed(thunk, calls[name]))
    return {name: Timed(statistics.median(times), min(times), max(times)) for name, times in seconds.items()}


def _timed(thunk: Callable, calls: int) -> float:
    """Of one call. On a CPU each call waits for the one before, as PyTorch's do there; elsewhere they queue."""
    one_by_one = local_platform() == "cpu"
    if isinstance(first := thunk(), float):
        return first
    jax.block_until_ready(first)
    began = time.perf_counter()
    for _ in range(calls):
        out = thunk()
        if one_by_one:
            jax.block_until_ready(out)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / calls


def three(value: float) -> float:
    """Three significant digits, for printing."""
    return float(f"{value:.3g}")
