"""T5: the scan, its block edges and its frontiers, held to a token loop in numpy, gradients too, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.kernels.ssd import final_state, ssd_block, ssd_frontier, ssd_scan, states_at
from tests import reference

BATCH, HEADS, CHANNELS, STATE = 2, 4, 3, 5
NAMES = ("x", "dt", "A", "B", "C", "initial", "fx", "fdt", "fB", "fC")
pytestmark = pytest.mark.xdist_group("ssd")

# (tokens, block size, chunk, groups): lengths 0, 1 and around a chunk, odd blocks, blocks above and below the chunk.
SHAPES = [
    (0, 1, None, 1),
    (1, 1, None, 2),
    (15, 1, 16, 1),
    (33, 3, 12, 1),
    (48, 4, 16, 2),
    (48, 4, 96, 2),
    (80, 16, 32, 2),
    (64, 32, 16, 1),
    (96, 8, None, 4),
]


def double(function):
    """Run a test in float64."""

    @functools.wraps(function)
    def test(*args, **kwargs):
        with jax.enable_x64(True):
            function(*args, **kwargs)

    return test


def stream(rng, shape, groups):
    """x, dt, B, C of a stream whose leading axes are `shape`."""
    return (
        rng.standard_normal((*shape, HEADS, CHANNELS)),
        rng.uniform(0.01, 1.0, (*shape, HEADS)),
        rng.standard_normal((*shape, groups, STATE)),
        rng.standard_normal((*shape, groups, STATE)),
    )


@functools.cache
def problem(tokens, size, groups):
    """Everything the kernels take, in float64: a stream, one frontier per block edge, resets anywhere."""
    rng = np.random.default_rng(tokens + size)
    blocks = tokens // size
    x, dt, B, C = stream(rng, (BATCH, tokens), groups)
    fx, fdt, fB, fC = stream(rng, (BATCH, blocks + 1, size), groups)
    reset = rng.random((BATCH, blocks + 1)) < 0.3
    reset[0, blocks // 2 : blocks // 2 + 2] = True  # twice in a row
    reset[1, 0] = True  # at block 0: the initial state is not seen
    reset[0, 0] = False
    A = -rng.uniform(0.1, 2.0, HEADS)
    initial = rng.standard_normal((BATCH, HEADS, CHANNELS, STATE))
    return dict(zip(NAMES, (x, dt, A, B, C, initial, fx, fdt, fB, fC), strict=True)), reset


def loop(arrays, reset, size):
    """y, the states at every block edge, the last state and the frontiers' y, token by token."""
    x, dt, A, B, C, initial, fx, fdt, fB, fC = arrays.values()
    blocks = x.shape[1] // size
    y, edges, last, fy = [], [], [], []
    for b in range(BATCH):
        state = initial[b]
        for k in range(blocks + 1):
            last_state = state
            state = state * 0 if reset[b, k] else state
            edges.append(state)
            fy.append(reference.recurrence(fx[b, k], fdt[b, k], A, fB[b, k], fC[b, k], state)[0])
            if k < blocks:
                here = (b, slice(k * size, (k + 1) * size))
                block, states = reference.recurrence(x[here], dt[here], A, B[here], C[here], state)
                y.append(block)
                state = states[-1]
        last.append(last_state)
    edges, fy = (np.array(a).reshape(BATCH, blocks + 1, *a[0].shape) for a in (edges, fy))
    return np.array(y).reshape(x.shape), edges, np.array(last), fy


def everything(arrays, reset, size, chunk, backend):
    """The same four results from the kernels."""
    x, dt, A, B, C, initial, fx, fdt, fB, fC = (arrays[name] for name in NAMES)
    y, boundary = ssd_scan(
        x, dt, A, B, C, block_size=size, initial_state=initial, reset=reset, chunk=chunk, backend=backend
    )
    fy = ssd_frontier(fx, fdt, A, fB, fC, boundary=boundary, backend=backend)
    return y, states_at(boundary), final_state(boundary), fy


@functools.partial(jax.jit, static_argnames=("size", "chunk", "backend"))
def gradients(arrays, cotangents, reset, size, chunk, backend):
    value, pullback = jax.vjp(lambda arrays: everything(arrays, reset, size, chunk, backend), arrays)
    return value, pullback(cotangents)[0]


def close(actual, expected, tolerance=1e-10):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    if expected.size:
        assert np.abs(actual - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def close_gradients(gradient, function, point, cotangents):
    """Each argument's gradient along a random direction = the derivative of the numpy function along it."""
    rng = np.random.default_rng(7)
    for name, array in point.items():
        direction = {other: np.zeros_like(value) for other, value in point.items()}
        direction[name] = rng.standard_normal(array.shape)

        def total(p):
            return sum((c * v).sum() for c, v in zip(cotangents, function(p), strict=True))

        expected = reference.derivative(total, point, direction)
        terms = np.asarray(gradient[name]) * direction[name]
        assert abs(terms.sum() - expected) <= 1e-10 * max(1.0, np.abs(terms).sum()), name


@pytest.mark.parametrize(("tokens", "size", "chunk", "groups"), SHAPES)
@double
def test_T5_scan_edges_and_frontiers(tokens, size, chunk, groups):
    """Values and gradients, also through every state, of the fast form against the token loop."""
    arrays, reset = problem(tokens, size, groups)
    expected = loop(arrays, reset, size)
    rng = np.random.default_rng(1)
    cotangents = tuple(rng.standard_normal(value.shape) for value in expected)
    value, gradient = gradients(arrays, cotangents, reset, size, chunk, "xla")
    for one, other in zip(value, expected, strict=True):
        close(one, other)
    close_gradients(gradient, lambda point: loop(point, reset, size), arrays, cotangents)


@double
def test_T5_plain_backend():
    arrays, reset = problem(33, 3, 1)
    expected = loop(arrays, reset, 3)
    cotangents = tuple(np.ones_like(value) for value in expected)
    value, gradient = gradients(arrays, cotangents, reset, 3, None, "reference")
    for one, other in zip(value, expected, strict=True):
        close(one, other)
    close_gradients(gradient, lambda point: loop(point, reset, 3), arrays, cotangents)


@double
def test_T5_chunk_that_does_not_fit_the_blocks_is_refused():
    arrays, reset = problem(48, 4, 2)
    with pytest.raises(ValueError, match="chunk"):
        everything(arrays, reset, 4, 6, "xla")


@double
def test_T5_states_and_frontiers_at_chosen_blocks():
    """frontier_index in any order, with repeats, equals the edges of the token loop."""
    arrays, reset = problem(33, 3, 1)
    x, dt, A, B, C, initial, fx, fdt, fB, fC = arrays.values()
    _, edges, _, _ = loop(arrays, reset, 3)
    index = np.array([[11, 0, 4, 4], [5, 6, 1, 10]], np.int32)
    rows = np.arange(BATCH)[:, None]
    chosen = [a[rows, index] for a in (fx, fdt, fB, fC)]

    @jax.jit
    def run(index):
        _, boundary = ssd_scan(
            x, dt, A, B, C, block_size=3, initial_state=initial, reset=reset, chunk=12, backend="xla"
        )
        fx, fdt, fB, fC = chosen
        y = ssd_frontier(fx, fdt, A, fB, fC, boundary=boundary, frontier_index=index, backend="xla")
        return states_at(boundary, index), y

    states, y = run(index)
    close(states, edges[rows, index])
    for b, f in np.ndindex(index.shape):
        fx, fdt, fB, fC = (a[b, f] for a in chosen)
        close(y[b, f], reference.recurrence(fx, fdt, A, fB, fC, edges[b, index[b, f]])[0])


@double
def test_T5_states_have_whole_gradients_where_tokens_decay_nothing():
    """dt = 0 on some tokens, and A = 0 for some heads: exponents tie at 0. Truth: the token loop's gradients."""
    arrays, _ = problem(48, 4, 2)
    x, dt, A, B, C, *_ = arrays.values()
    dt, A = dt.copy(), A.copy()
    dt[:, 5:9], A[1] = 0.0, 0.0
    weight = np.random.default_rng(0).standard_normal((BATCH, 3, HEADS, CHANNELS, STATE))
    index = np.array([[1, 2, 11], [3, 7, 5]], np.int32)

    def gradients(backend, chunk):
        def total(x, dt, A, B):
            boundary = ssd_scan(x, dt, A, B, C, block_size=4, chunk=chunk, backend=backend)[1]
            return (states_at(boundary, index) * weight).sum()

        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(x, dt, A, B)

    for got, want in zip(gradients("xla", 16), gradients("reference", None), strict=True):
        close(got, want)


def blocks_by_loop(point):
    """Each block alone: from its seed, from zero, and both of them right to left."""
    x, dt, A, B, C, seed = point.values()
    results = []
    for reverse in (False, True):
        turn = slice(None, None, -1 if reverse else 1)
        for start in (seed, np.zeros_like(seed)):
            y = [
                reference.recurrence(x[i][turn], dt[i][turn], A, B[i][turn], C[i][turn], start[i])[0][turn]
                for i in np.ndindex(x.shape[:2])
            ]
            results.append(np.array(y).reshape(x.shape))
    return results


@pytest.mark.parametrize(("size", "backend"), [(1, "xla"), (3, "xla"), (70, "xla"), (3, "reference")])
@double
def test_T5_blocks_from_a_seed_and_in_reverse(size, backend):
    rng = np.random.default_rng(size)
    x, dt, B, C = stream(rng, (BATCH, 2, size), 2)
    A, seed = -rng.uniform(0.1, 2.0, HEADS), rng.standard_normal((BATCH, 2, HEADS, CHANNELS, STATE))
    point = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "seed": seed}
    expected = blocks_by_loop(point)
    cotangents = [rng.standard_normal(x.shape) for _ in expected]

    @jax.jit
    def run(point, cotangents):
        def kernels(point):
            arrays = [point[name] for name in ("x", "dt", "A", "B", "C")]
            return [
                ssd_block(*arrays, seed=start, reverse=reverse, backend=backend)
                for reverse in (False, True)
                for start in (point["seed"], None)
            ]

        value, pullback = jax.vjp(kernels, point)
        return value, pullback(cotangents)[0]

    value, gradient = run(point, cotangents)
    for one, other in zip(value, expected, strict=True):
        close(one, other)
    close_gradients(gradient, blocks_by_loop, point, cotangents)


@double
def test_T5_all_resets_make_a_scan_of_blocks():
    arrays, reset = problem(48, 4, 2)
    x, dt, A, B, C = (arrays[name] for name in NAMES[:5])

    @jax.jit
    def both():
        y, _ = ssd_scan(x, dt, A, B, C, block_size=4, reset=np.ones_like(reset), chunk=16, backend="xla")

        def fold(a):
            return a.reshape(BATCH, 12, 4, *a.shape[2:])

        return y, ssd_block(fold(x), fold(dt), A, fold(B), fold(C), backend="xla").reshape(x.shape)

    close(*both())


@double
def test_T10_nothing_crosses_a_reset():
    """The gradient of the tokens before a reset from everything after it is exactly 0, and no bit moves."""
    arrays, _ = problem(48, 4, 2)
    x, dt, A, B, C, initial = (arrays[name] for name in NAMES[:6])
    reset = np.zeros((BATCH, 13), bool)
    reset[:, 7] = True  # inside a chunk of 16

    @jax.jit
    def after(x, dt, B, initial):
        y, boundary = ssd_scan(
            x, dt, A, B, C, block_size=4, initial_state=initial, reset=reset, chunk=16, backend="xla"
        )
        return y[:, 28:], states_at(boundary)[:, 7:]

    value, pullback = jax.vjp(after, x, dt, B, initial)
    cotangent = jax.tree.map(lambda v: jnp.asarray(np.random.default_rng(0).standard_normal(v.shape)), value)
    for gradient in pullback(cotangent)[:3]:
        assert (np.asarray(gradient)[:, :28] == 0).all() and (np.asarray(gradient)[:, 28:] != 0).any()
    assert (np.asarray(pullback(cotangent)[3]) == 0).all()
    moved = after(*(a + (np.arange(48) < 28).reshape(1, 48, *[1] * (a.ndim - 2)) for a in (x, dt, B)), initial + 1)
    assert all(np.array_equal(a, b) for a, b in zip(value, moved, strict=True))


@pytest.mark.parametrize(
    ("dtype", "backend"), [(jnp.float32, "xla"), (jnp.bfloat16, "xla"), (jnp.float32, "reference")]
)
def test_T11_dt_zero_leaves_states_to_the_bit(dtype, backend):
    """Pads change no state whatever stands in them, also in the middle of a stream."""
    rng = np.random.default_rng(2)
    x, dt, B, C = (a.astype(np.float32) for a in stream(rng, (BATCH, 32), 1))
    initial = rng.standard_normal((BATCH, HEADS, CHANNELS, STATE)).astype(np.float32)
    pads = (np.arange(32) >= 8) & (np.arange(32) < 24)
    dt = np.where(pads[:, None], 0, dt).astype(np.float32)
    A = -np.array([0.5, 1, 2, 16], np.float32)

    @jax.jit
    def run(x, dt, B):
        x, B, C_ = (jnp.asarray(a, dtype) for a in (x, B, C))
        _, boundary = ssd_scan(x, dt, A, B, C_, block_size=4, initial_state=initial, chunk=8, backend=backend)
        return states_at(boundary), final_state(boundary)

    edges, last = run(x, dt, B)
    assert edges.dtype == jnp.float32
    for k in range(2, 7):
        assert np.array_equal(edges[:, k], edges[:, 2])
    garbage = np.where(pads[:, None], 1e3, 0).astype(np.float32)
    again = run(x + garbage[..., None], dt, B + garbage[..., None])
    assert np.array_equal(again[0], edges) and np.array_equal(again[1], last)
    edges, last = run(x, dt * 0, B)
    assert all(np.array_equal(edges[:, k], initial) for k in range(9)) and np.array_equal(last, initial)


@jax.jit
def scan_and_reverse_gradient(x, dt, A, B, C):
    def fold(a):
        return a.reshape(BATCH, 2, 32, *a.shape[2:])

    def total(x, dt, A, B, C):
        x = 1e3 * x
        y, boundary = ssd_scan(x, dt, A, B, C, block_size=4, chunk=32, backend="xla")
        z = ssd_block(fold(x), fold(dt), A, fold(B), fold(C), reverse=True, backend="xla")
        parts = (y, z, states_at(boundary), final_state(boundary))
        return sum(part.astype(jnp.float32).sum() for part in parts) * 1e-3

    return jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4))(x, dt, A, B, C)


@pytest.mark.parametrize("decay", [0.0, -16.0, -200.0, -1e-6])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_T5_extreme_decays_have_finite_gradients(decay, dtype):
    """A step of `decay` per token (0: pads), entries of x of 1e3, scan and reverse block."""
    x, _, B, C = (jnp.asarray(a, dtype) for a in stream(np.random.default_rng(3), (BATCH, 64), 1))
    A = np.full(HEADS, decay if decay else -1.0, np.float32)
    dt = np.full((BATCH, 64, HEADS), 1.0 if decay else 0.0, np.float32)
    value, gradient = scan_and_reverse_gradient(x, dt, A, B, C)
    assert np.isfinite(value)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradient)
    assert (np.asarray(gradient[4], np.float32) != 0).any() or decay == 0


def test_T5_a_decay_of_minus_200_keeps_only_the_own_token():
    rng = np.random.default_rng(4)
    x, dt, B, C = (a.astype(np.float32) for a in stream(rng, (BATCH, 32), 2))
    A = np.full(HEADS, -200, np.float32)
    y, _ = jax.jit(lambda: ssd_scan(x, np.ones_like(dt), A, B, C, block_size=2, chunk=16, backend="xla"))()
    own = np.repeat((B * C).sum(-1), 2, axis=2)[..., None] * x
    close(y, own, 2e-6)


def test_T5_float32_bars():
    """Relative to the largest entry: 2e-6 for values, 5e-6 for gradients."""
    arrays, reset = problem(48, 4, 2)
    expected = loop(arrays, reset, 4)
    cotangents = tuple(np.random.default_rng(6).standard_normal(v.shape) for v in expected)
    with jax.enable_x64(True):
        _, exact = gradients(arrays, cotangents, reset, 4, 16, "xla")  # held to the loop by the tests above

    def low(tree):
        return jax.tree.map(lambda a: np.asarray(a, np.float32), tree)

    value, gradient = gradients(low(arrays), low(cotangents), reset, 4, 16, "xla")
    for one, other in zip(value, expected, strict=True):
        assert one.dtype == np.float32
        assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()
    for name, other in exact.items():
        other = np.asarray(other)
        assert np.abs(gradient[name] - other).max() <= 5e-6 * np.abs(other).max(), name
