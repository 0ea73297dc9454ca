"""Every backend of the scan through its public functions, Pallas kernels interpreted: K1, K9, K11, K13, K14, K15."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from diffjax.kernels import dispatch, final_state, ssd_block, ssd_frontier, ssd_scan, states_at
from diffjax.kernels.ssd import BACKENDS
from diffjax.kernels.ssd_stream import make_stream
from diffjax.kernels.tokens import by_chunk

KERNELS = [name for name in BACKENDS if name.startswith("pallas")]
NAMES = ("x", "dt", "A", "Bm", "Cm", "initial", "x'", "dt'", "Bm'", "Cm'")
every_kernel = pytest.mark.parametrize("backend", KERNELS)
every_form = pytest.mark.parametrize("backend", ["xla", *KERNELS])
pytestmark = pytest.mark.xdist_group("ssd_backends")


def interpreted(backend):
    return dispatch.interpreted_kernels() if backend in KERNELS else contextlib.nullcontext()


def problem(length, size, *, batch=1, heads=2, channels=32, state=16, groups=1):
    """float64 inputs by NAMES, a rest behind the last edge, and resets: at the first block, and twice in a row."""
    rng = np.random.default_rng(length + size)
    blocks = length // size
    normal, uniform = rng.standard_normal, rng.uniform
    A, initial = -uniform(0.5, 4.0, heads), normal((batch, heads, channels, state))
    streams = []
    for lead in ((batch, length), (batch, blocks, size)):
        streams.append((normal((*lead, heads, channels)), uniform(0.01, 0.3, (*lead, heads))))
        streams[-1] += tuple(normal((*lead, groups, state)) for _ in range(2))
    (x, dt, Bm, Cm), own = streams
    reset = np.zeros((batch, blocks + 1), bool)
    reset[:, blocks // 2 : blocks // 2 + 2] = True
    reset[-1, 0] = batch > 1
    return dict(zip(NAMES, (x, dt, A, Bm, Cm, initial, *own), strict=True)), reset


def dual_stream(backend, size, reset, x, dt, A, Bm, Cm, initial, *own):
    """What a layer's two streams make: y, states at all edges, the last state, frontiers' y, reverse blocks."""
    y, boundary = ssd_scan(x, dt, A, Bm, Cm, block_size=size, initial_state=initial, reset=reset, backend=backend)
    own_x, own_dt, own_Bm, own_Cm = own
    frontiers = ssd_frontier(own_x, own_dt, A, own_Bm, own_Cm, boundary=boundary, backend=backend)
    reverse = ssd_block(own_x, own_dt, A, own_Bm, own_Cm, reverse=True, backend=backend)
    return y, states_at(boundary), final_state(boundary), frontiers, reverse


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_gradients(backend, size, reset, arrays, cotangents):
    out, pull = jax.vjp(functools.partial(dual_stream, backend, size, reset), *arrays)
    return out, pull(cotangents)


@functools.cache
def truth(length, size, sizes):
    """Values and gradients of the token loop in float64."""
    arrays, reset = problem(length, size, **dict(sizes))
    with jax.enable_x64(True):
        inputs = tuple(map(jnp.asarray, arrays.values()))
        shapes = jax.eval_shape(functools.partial(dual_stream, "reference", size, reset), *inputs)
        rng = np.random.default_rng(0)
        cotangents = tuple(jnp.asarray(rng.standard_normal(shape.shape)) for shape in shapes)
        results = with_gradients("reference", size, reset, inputs, cotangents)
        return jax.tree.map(np.asarray, (cotangents, *results))


def compare(backend, dtype, length, size, values_bar, gradients_bar, **sizes):
    arrays, reset = problem(length, size, **sizes)
    cotangents, values, gradients = truth(length, size, tuple(sizes.items()))
    with interpreted(backend), jax.enable_x64(dtype == "float64"):
        cast = functools.partial(jax.tree.map, lambda array: jnp.asarray(array, dtype))
        found = with_gradients(backend, size, reset, cast(tuple(arrays.values())), cast(cotangents))
    kinds = [("y", "edges", "last", "frontiers", "reverse"), NAMES]
    for names, bar, some, true in zip(kinds, (values_bar, gradients_bar), found, (values, gradients), strict=True):
        for name, one, other in zip(names, some, true, strict=True):
            difference = np.abs(np.asarray(one, np.float64) - other).max()
            assert difference <= bar * np.abs(other).max(), (name, difference)


@pytest.mark.parametrize(
    ("length", "size", "sizes"),
    [
        (70, 1, {}),
        (50, 3, {"groups": 2, "channels": 5, "state": 7}),
        (600, 256, {"channels": 64, "state": 64}),
        (530, 250, {"heads": 4, "groups": 2, "channels": 128, "state": 16}),
        (300, 128, {"batch": 2, "state": 128}),
    ],
)
def test_K1_xla_equals_the_token_loop_in_float64(length, size, sizes):
    compare("xla", "float64", length, size, 1e-10, 1e-10, **sizes)


@every_kernel
@pytest.mark.parametrize(
    ("length", "size", "sizes"),
    [(150, 1, {}), (300, 32, {"batch": 2}), (600, 256, {"channels": 64, "state": 64})],
)
def test_K1_kernels_equal_the_token_loop(backend, length, size, sizes):
    compare(backend, "float32", length, size, 2e-6, 5e-6, **sizes)


def decay_gradients(backend, dtype):
    """da of the backend, of float64, and by the shortcut dy.y - du.u of rounded y and du: [B, T, H] each."""
    length, heads, channels, state = 1024, 4, 64, 64
    rng = np.random.default_rng(0)
    through = lambda array: np.asarray(jnp.asarray(array, dtype).astype(jnp.float32), np.float64)
    normal = lambda *shape: through(rng.standard_normal(shape))
    x, dy = (normal(1, length, heads, channels) for _ in range(2))
    Bm, Cm = (normal(1, length, 1, state) for _ in range(2))
    dt = rng.uniform(1e-3, 0.1, (1, length, heads)).astype(np.float32).astype(np.float64)
    A = -np.array([1.0, 4.0, 9.0, 16.0])

    def run(module, dtype, wide, x, dt, Bm, Cm, dy):
        chunk = module.chunk_size("scan", 32, channels, state)
        x, Bm, Cm, dy = (array.astype(dtype) for array in (x, Bm, Cm, dy))
        stream = make_stream(x, dt.astype(wide), jnp.asarray(A, wide), Bm, None, chunk)
        stream = stream._replace(count=jnp.zeros((1, length), jnp.int32))
        initial = jnp.zeros((1, heads, channels, state), wide)
        how = {"chunk": chunk, "reverse": False}
        y, states = module.scan_forward(stream, Cm, initial, **how)
        d_stream = module.scan_backward(stream, Cm, states, dy, jnp.zeros_like(states), **how)[0]
        from_the_right = lambda array: jnp.flip(jnp.cumsum(jnp.flip(by_chunk(array, chunk), 2), axis=2), 2)
        return from_the_right(d_stream.cum).reshape(dt.shape), y, d_stream.x / stream.dt[..., None]

    with jax.enable_x64(True):
        of_float64 = jax.jit(functools.partial(run, BACKENDS["xla"], jnp.float64, jnp.float64))(x, dt, Bm, Cm, dy)
        true, y, du = map(np.asarray, of_float64)
    d_cum = np.stack([dy * through(y), -through(du) * through(x * dt[..., None])]).sum((0, -1))
    with interpreted(backend):
        of_backend = jax.jit(functools.partial(run, BACKENDS[backend], dtype, jnp.float32))
        found = of_backend(*(array.astype(np.float32) for array in (x, dt, Bm, Cm, dy)))[0]
    shortcut = np.flip(np.cumsum(np.flip(d_cum, 1), 1), 1)  # sums of decays over the whole stream
    return np.asarray(found, np.float64), true, shortcut


@every_form
def test_K9_decays_keep_their_gradient_in_bfloat16(backend):
    found, true, shortcut = decay_gradients(backend, jnp.bfloat16)
    rms = lambda array: np.sqrt(np.mean(np.square(array)))
    assert rms(found - true) <= 4e-3 * rms(true)
    assert rms(shortcut - true) > 4e-3 * rms(true)  # so that the bar means something


@every_form
def test_K11_shards_of_rows_and_heads_equal_one_device(backend):
    """On 2 x 2 devices; the gradients of Bm and Cm, which all heads read, are summed once."""
    arrays, reset = problem(64, 32, batch=2, heads=4)
    inputs = tuple(jnp.asarray(array, jnp.float32) for array in arrays.values())
    shapes = jax.eval_shape(functools.partial(dual_stream, "xla", 32, reset), *inputs)
    cotangents = tuple(jnp.ones(shape.shape, jnp.float32) for shape in shapes)
    one = with_gradients("xla", 32, reset, inputs, cotangents)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with interpreted(backend), jax.set_mesh(mesh):
        call = jax.jit(lambda *args: with_gradients.__wrapped__(backend, 32, reset, *args))
        split = call(inputs, cotangents)
        assert backend == "xla" or "psum" in str(jax.make_jaxpr(call)(inputs, cotangents))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(split), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-5 * np.abs(np.asarray(a)).max()


def scan_shapes(tokens, heads, channels, state, dtype=jnp.bfloat16):
    array = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct((1, tokens, *sizes), dtype)
    dt, shared = array(heads, dtype=jnp.float32), array(1, state)
    return array(heads, channels), dt, jax.ShapeDtypeStruct((heads,), jnp.float32), shared, shared


@every_kernel
def test_K13_offsets_of_the_largest_operand_fit_32_bits(backend):
    """A toy of the kernels' index arithmetic, in wrapping 32-bit numbers over strides: the last element of the largest
    stream a kernel takes has its true offset, that of the first one it refuses has not."""
    heads, channels, state = 80, 32, 64
    module = BACKENDS[backend]
    chunk = module.chunk_size("scan", 32, channels, state)

    def offsets(tokens):
        shape = (1, tokens, heads, channels)
        strides = np.cumprod([1, *shape[:0:-1]], dtype=np.int64)[::-1]
        last = np.array(shape) - 1
        with np.errstate(over="ignore"):
            wrapped = np.sum((last.astype(np.int32) * strides.astype(np.int32)).astype(np.int32), dtype=np.int32)
        return int(wrapped), int(np.sum(last * strides))

    call = {"groups": 1, "state": state, "chunk": chunk, "block_size": 32, "dtype": jnp.bfloat16}
    refusal = lambda tokens: module.refusal("scan", shape=(1, tokens, heads, channels), **call)
    first = -(-(2**31) // (heads * channels) // chunk) * chunk  # whole chunks with 2**31 elements or more
    while first * heads * channels < 2**31:
        first += chunk
    assert refusal(first) is not None and "2**31" in refusal(first)
    wrapped, true = offsets(first + 1)
    assert wrapped != true
    legal = first
    while refusal(legal) is not None:
        legal -= chunk
    wrapped, true = offsets(legal)
    assert wrapped == true and legal > first // 4  # states and partial sums may be larger than x


@every_kernel
def test_K13_larger_operands_go_to_the_xla_form_with_a_warning(backend, caplog):
    """On shapes alone: auto falls back and says so, the name of a kernel is an error."""
    platform = {kernel: platform for platform, kernel in dispatch.KERNELS.items()}[backend]
    kind = {"tpu": "TPU v5 lite", "cuda": "NVIDIA H100 80GB HBM3"}[platform]
    platform = "gpu" if platform == "cuda" else platform
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    shapes = scan_shapes(860_160, 80, 32, 64)
    scan = functools.partial(ssd_scan, block_size=32)
    with jax.sharding.use_abstract_mesh(mesh):
        y, boundary = jax.eval_shape(scan, *shapes)
        with pytest.raises(ValueError, match=r"2\*\*31"):
            jax.eval_shape(functools.partial(scan, backend=backend), *shapes)
    assert y.shape == shapes[0].shape and y.size > 2**31
    assert any(record.levelname == "WARNING" and "2**31" in record.message for record in caplog.records)


def test_K14_one_program_serves_all_resets_and_frontiers():
    arrays, _ = problem(96, 16)
    inputs = tuple(jnp.asarray(array, jnp.float32) for array in arrays.values())

    @jax.jit
    def run(inputs, reset, index):
        x, dt, A, Bm, Cm, initial, *own = inputs
        boundary = ssd_scan(x, dt, A, Bm, Cm, block_size=16, initial_state=initial, reset=reset)[1]
        own = [array[:, :2] for array in own]
        return ssd_frontier(*own[:2], A, *own[2:], boundary=boundary, frontier_index=index)

    cases = [([0] * 7, [0, 1]), ([1] * 7, [3, 2]), ([0, 0, 1, 0, 0, 0, 1], [5, 6])]
    cases = [(jnp.asarray([reset], bool), jnp.asarray([index], jnp.int32)) for reset, index in cases]
    with jax.transfer_guard("disallow"):
        results = [run(inputs, *case) for case in cases]
    assert run._cache_size() == 1
    assert not np.array_equal(results[0], results[1])


def test_K15_gradients_of_sixteen_bidirectional_layers_stay_finite_in_bfloat16():
    """The gradient's norm is that of float32 within 5 percent."""
    layers, length, size, heads, channels, state = 16, 64, 16, 2, 16, 16
    width = heads * channels
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape) / np.sqrt(shape[-2])
    weights = {
        name: (normal(layers, width, out), normal(layers, width, out))
        for name, out in (("x", width), ("dt", heads), ("Bm", state), ("Cm", state), ("out", width))
    }
    A = -np.array([1.0, 8.0])

    def loss(weights, tokens, dtype):
        def direction(h, side, w, reverse):
            project = lambda name, *tail: (h @ w[name][side]).reshape(*h.shape[:2], *tail)
            x, Bm, Cm = project("x", heads, channels), project("Bm", 1, state), project("Cm", 1, state)
            dt = jax.nn.softplus(project("dt", heads).astype(jnp.float32) - 2)
            if not reverse:
                y = ssd_scan(x, dt, A, Bm, Cm, block_size=size, backend="xla")[0]
            else:
                fold = lambda array: array.reshape(1, -1, size, *array.shape[2:])
                y = ssd_block(*map(fold, (x, dt)), A, *map(fold, (Bm, Cm)), reverse=True, backend="xla")
            return y.reshape(h.shape) @ w["out"][side]

        def layer(h, w):
            normed = (h / jnp.sqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + 1e-6)).astype(dtype)
            w = jax.tree.map(lambda leaf: leaf.astype(dtype), w)
            added = direction(normed, 0, w, False) + direction(normed, 1, w, True)
            return h + added.astype(jnp.float32), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, tokens, weights)[0]))

    def norm(dtype):
        cast = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), weights)
        tokens = jnp.asarray(np.random.default_rng(1).standard_normal((1, length, width)), jnp.float32)
        gradient = jax.jit(jax.grad(functools.partial(loss, dtype=dtype)))(cast, tokens)
        return np.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(gradient)))

    low, full = norm(jnp.bfloat16), norm(jnp.float32)
    assert np.isfinite(low) and abs(low - full) <= 0.05 * full


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Cm": (1, 60, 1, 16)}, r"ssd_scan: Cm has shape \[1, 60, 1, 16\], but the others ask for \[1, 64, 1, 16\]"),
        ({"dt": (1, 64, 1)}, r"ssd_scan: dt has shape \[1, 64, 1\]"),
        ({"A": (1,)}, r"ssd_scan: A has shape \[1\], but the others ask for \[2\]"),
        ({"Bm": (1, 64, 3, 16), "Cm": (1, 64, 3, 16)}, "2 heads cannot be divided among the 3 groups"),
        ({"initial_state": (2, 32, 16)}, "initial_state has shape"),
        ({"reset": (1, 4)}, r"reset has shape \[1, 4\], but the others ask for \[1, 5\]"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(change, message):
    shapes = {"x": (1, 64, 2, 32), "dt": (1, 64, 2), "A": (2,), "Bm": (1, 64, 1, 16), "Cm": (1, 64, 1, 16)} | change
    with pytest.raises(ValueError, match=message):
        ssd_scan(**{name: jnp.zeros(shape) for name, shape in shapes.items()}, block_size=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Cm": "bfloat16"}, "Cm is bfloat16, but must be float32 beside x of float32"),
        ({"dt": "bfloat16"}, "dt is bfloat16, but must be float32"),
        ({"x": "int32"}, "x is int32, but must be a float"),
    ],
)
def test_dtypes_that_do_not_belong_together_are_refused(change, message):
    shapes = {"x": (1, 64, 2, 32), "dt": (1, 64, 2), "A": (2,), "Bm": (1, 64, 1, 16), "Cm": (1, 64, 1, 16)}
    arrays = {name: jnp.zeros(shape, change.get(name)) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        ssd_scan(**arrays, block_size=16)
