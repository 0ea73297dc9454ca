"""The GPU kernels of SSD: interpreted, they equal formulas and token loop in float64; they lower for GPUs not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from diffjax.kernels import ssd_block, ssd_frontier, ssd_scan
from diffjax.kernels import ssd_pallas_triton as kernels
from diffjax.kernels.dispatch import SAVED, interpreted_kernels
from diffjax.kernels.ssd import final_state, states_at
from diffjax.kernels.ssd_stream import Stream

from . import naive

pytestmark = pytest.mark.xdist_group("ssd_pallas_triton")

CHUNK = 64
# Relative to the largest entry: values, gradients.
BARS = {"float32": (2e-6, 5e-6), "bfloat16": (1e-2, 2.5e-2)}
CASES = {
    # name: (operation, stream of `naive.problem`, dtype, heads of a program, sizes)
    "scan": ("scan", "clean", "float32", 4, {"heads": 5, "state": 64}),  # the last program has one head
    "scan bfloat16": ("scan", "clean", "bfloat16", 1, {"channels": 64, "state": 128}),  # states in slices
    "scan in reverse": ("scan", "reversed", "float32", 2, {"channels": 128, "state": 16}),
    "chunks of 32": ("scan", "clean", "float32", 2, {"chunk": 32, "length": 96}),
    "chunks of 16": ("scan", "clean", "bfloat16", 2, {"chunk": 16, "length": 64, "block_size": 4}),
    "blocks": ("blocks", "blocks", "float32", 2, {"block_size": 8, "heads": 3}),
    "blocks in reverse": ("blocks", "blocks_reversed", "bfloat16", 2, {"channels": 64, "state": 64}),
    "frontiers": ("frontiers", "own", "float32", 2, {"block_size": 16, "heads": 3, "state": 64}),
    "frontiers bfloat16": ("frontiers", "own", "bfloat16", 1, {"channels": 64, "state": 128}),
    "frontiers of one token": ("frontiers", "own", "float32", 2, {"block_size": 1, "reset_rate": 0.05}),
}


def rounded(array, dtype):
    """float64 numbers that `dtype` holds; whole numbers as they are."""
    array = np.asarray(array)
    return array if array.dtype == np.int32 else np.asarray(jnp.asarray(array, dtype).astype(jnp.float32), np.float64)


def inputs(operation, which, dtype, **sizes):
    """(inputs, cotangents) that kernel and truth share, as the forward function takes and gives them."""
    sizes = {"batch": 1, "length": 2 * CHUNK, "heads": 2, "channels": 32, "chunk": CHUNK, "block_size": 32} | sizes
    problem = naive.problem(np.random.default_rng(0), **sizes)
    wide = lambda array: rounded(array, dtype)
    single = lambda array: rounded(array, "float32")
    stream = lambda s: Stream(wide(s.x), single(s.dt), single(s.cum), s.count, wide(s.Bm))
    args = (stream(problem[which]), wide(problem["Cm"]))
    if operation == "scan":
        return (*args, single(problem["initial"])), (wide(problem["dy"]), single(problem["d_states"]))
    if operation == "frontiers":
        args = (*args, single(problem["reach"]), stream(problem["clean"]), single(problem["states"]))
    return args, (wide(problem["dy"]),)


def cast(args, dtype):
    """Inputs in the dtypes a backend gets."""
    wide, single = (lambda array: jnp.asarray(array, dtype)), (lambda array: jnp.asarray(array, jnp.float32))
    stream = lambda s: Stream(wide(s.x), single(s.dt), single(s.cum), jnp.asarray(s.count), wide(s.Bm))
    kinds = (wide, wide, single, stream, single) if len(args) == 5 else (wide, wide, single)
    return tuple(stream(arg) if isinstance(arg, Stream) else kind(arg) for kind, arg in zip(kinds, args, strict=False))


def named(values, gradients):
    """{name: array} of values and gradients, without those of counts."""
    gradients = [g._replace(count=None) if isinstance(g, Stream) else g for g in gradients]
    values = dict(zip(("y", "states"), values, strict=False))
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return values | {"gradient" + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@functools.cache
def kernel_both(operation, tile, static):
    """(inputs, cotangents) -> values and gradients of the kernels, for programs of at most `tile` heads."""
    static = dict(static)

    def both(args, cotangents):
        values = getattr(kernels, f"{operation}_forward")(*args, **static)
        values = values if operation == "scan" else (values,)
        saved = (*args[:2], values[1]) if operation == "scan" else args
        return named(values, getattr(kernels, f"{operation}_backward")(*saved, *cotangents, **static))

    return jax.jit(both)


@functools.cache
def truth_both(operation, static):
    """The same of the formulas."""

    def both(args, cotangents):
        def values(*args):
            found = getattr(naive, operation)(*args, **dict(static))
            return found if operation == "scan" else (found,)

        found, pull = jax.vjp(values, *args)
        return named(found, pull(cotangents))

    return jax.jit(both)


def kernel(operation, args, cotangents, dtype, tile=kernels.HEADS, **static):
    """Values and gradients of the kernels, interpreted."""
    dy, *d_states = cotangents
    cotangents = (jnp.asarray(dy, dtype), *(jnp.asarray(array, jnp.float32) for array in d_states))
    with interpreted_kernels():
        return kernel_both(operation, tile, tuple(static.items()))(cast(args, dtype), cotangents)


def truth(operation, args, cotangents, **static):
    """Values and gradients of the formulas, in float64."""
    with jax.enable_x64(True):
        args, cotangents = jax.tree.map(jnp.asarray, (args, cotangents))
        return jax.tree.map(np.asarray, truth_both(operation, tuple(static.items()))(args, cotangents))


def check(found, right, dtype, scales=()):
    """Every array within the bars of `dtype`, relative to its largest entry or to `scales[name]`."""
    assert found.keys() == right.keys()
    value_bar, gradient_bar = BARS[dtype]
    for name, expected in right.items():
        array = np.asarray(found[name], np.float64)
        assert array.shape == expected.shape, name
        scale = dict(scales).get(name, np.abs(expected).max()) + np.finfo(np.float32).tiny
        bar = value_bar if name in ("y", "states", "edges", "last", "frontiers", "reverse") else gradient_bar
        assert np.abs(array - expected).max() <= bar * scale, name  # not so where the kernel has NaN


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_formulas(name, monkeypatch):
    operation, which, dtype, tile, sizes = CASES[name]
    monkeypatch.setattr(kernels, "ENOUGH_PROGRAMS", 1)
    monkeypatch.setattr(kernels, "HEADS", tile)
    args, cotangents = inputs(operation, which, dtype, **sizes)
    order = {"reverse": "reverse" in name}
    order = {"block_size": sizes.get("block_size", 32)} if operation == "frontiers" else order
    static = {"chunk": sizes.get("chunk", CHUNK)} | order
    found = kernel(operation, args, cotangents, dtype, tile, **static)
    check(found, truth(operation, args, cotangents, **static), dtype)
    assert {found[name].dtype for name in ("y", "gradient[0].x", "gradient[0].Bm", "gradient[1]")} == {jnp.dtype(dtype)}


def sums(slope, count, size=CHUNK):
    """[B, T, 1]: `slope` times the number of tokens since `count` rose, or since the last multiple of `size`."""
    since = np.ones(count.shape)
    for t in range(1, count.shape[1]):
        goes_on = (t % size > 0) & (count[:, t] == count[:, t - 1])
        since[:, t] += np.where(goes_on, since[:, t - 1], 0)
    return (slope * since)[..., None]


@pytest.mark.parametrize("decay", [0.0, -1e-6, -16.0, -200.0])
def test_extreme_decays_are_finite_and_right(decay):
    (stream, Cm, initial), (dy, d_states) = inputs("scan", "clean", "float32")
    assert stream.count.any()
    cum = np.broadcast_to(sums(decay, stream.count), stream.cum.shape)
    args = (stream._replace(x=1e3 * stream.x, cum=rounded(cum, "float32")), Cm, initial)
    right = truth("scan", args, (dy, d_states), chunk=CHUNK, reverse=False)
    found = kernel("scan", args, (dy, d_states), "float32", chunk=CHUNK, reverse=False)
    # In the sums of R a token's own entry cancels; with fast decays little else is there, and rounding is of its size.
    scale = np.abs((dy * right["y"]).sum(-1)).max()
    check(found, right, "float32", {"gradient[0].cum": scale, "gradient[2]": scale})


@pytest.mark.parametrize("decay", [0.0, -16.0, -200.0])
def test_extreme_decays_of_frontiers_are_finite_and_right(decay):
    (own, Cm, reach, clean, states), dy = inputs("frontiers", "own", "float32")
    assert clean.count.any()
    cum = np.broadcast_to(sums(decay, clean.count), reach.shape)
    cum_own = np.broadcast_to(sums(decay, 0 * own.count, 32), reach.shape)
    ends = cum[:, 31::32].repeat(32, axis=1)
    before = np.where((np.arange(reach.shape[1]) % CHUNK < 32)[:, None], 0, np.roll(ends, 32, axis=1))
    own, clean = own._replace(cum=cum_own, x=1e3 * own.x), clean._replace(cum=cum, x=1e3 * clean.x)
    args, static = (own, Cm, before + cum_own, clean, states), {"chunk": CHUNK, "block_size": 32}
    right = truth("frontiers", args, dy, **static)
    scale = np.abs((dy[0] * right["y"]).sum(-1)).max()
    scales = {f"gradient{place}": scale for place in ("[0].cum", "[2]", "[3].cum")}
    check(kernel("frontiers", args, dy, "float32", **static), right, "float32", scales)


def test_a_rise_of_the_sums_is_cut_at_zero():
    """Sums of decays may round upward; no decay grows above 1 for it."""
    (stream, Cm, initial), cotangents = inputs("scan", "clean", "float32", reset_rate=0.0)
    rising = np.broadcast_to(np.arange(stream.x.shape[1])[None, :, None] % CHUNK * 2.0, stream.cum.shape)
    static = {"chunk": CHUNK, "reverse": False}
    flat, found = (
        kernel("scan", (stream._replace(cum=cum), Cm, initial), cotangents, "float32", **static)
        for cum in (0 * rising, rising)
    )
    for name, right in flat.items():
        np.testing.assert_array_equal(found[name], right, name)


# A whole call: (tokens, block size, dtype); no length is a multiple of the chunk.
CALLS = [
    (70, 1, "float32"),
    (101, 4, "bfloat16"),
    (130, 32, "float32"),
    (150, 64, "bfloat16"),
    (300, 128, "float32"),
    (300, 256, "bfloat16"),
]
HEADS, HEAD_DIM, STATE = 2, 32, 16
NAMES = ("x", "dt", "A", "Bm", "Cm", "initial", "fx", "fdt", "fB", "fC")


def everything(arrays, reset, size, backend):
    """The clean scan, its states, one frontier for each whole block, and those blocks in reverse."""
    x, dt, A, Bm, Cm, initial, *own = (arrays[name] for name in NAMES)
    y, boundary = ssd_scan(x, dt, A, Bm, Cm, block_size=size, initial_state=initial, reset=reset, backend=backend)
    fx, fdt, fB, fC = own
    frontiers = ssd_frontier(fx, fdt, A, fB, fC, boundary=boundary, backend=backend)
    back = ssd_block(fx, fdt, A, fB, fC, reverse=True, backend=backend)
    return {
        "y": y, "edges": states_at(boundary), "last": final_state(boundary), "frontiers": frontiers, "reverse": back
    }  # fmt: skip


def problem(tokens, size, dtype):
    """float64 arrays that `dtype`, or float32 for steps, decays and the state, holds; resets at blocks' starts."""
    rng = np.random.default_rng(tokens)
    blocks = tokens // size

    def stream(*shape):
        vectors = [rng.standard_normal((1, *shape, *tail)) for tail in ((HEADS, HEAD_DIM), (1, STATE), (1, STATE))]
        x, Bm, Cm = (rounded(array, dtype) for array in vectors)
        return x, rounded(rng.uniform(0.01, 0.3, (1, *shape, HEADS)), "float32"), Bm, Cm

    x, dt, Bm, Cm = stream(tokens)
    A, initial = -rng.uniform(0.1, 2.0, HEADS), rng.standard_normal((1, HEADS, HEAD_DIM, STATE))
    arrays = (x, dt, rounded(A, "float32"), Bm, Cm, rounded(initial, "float32"))
    fx, fdt, fB, fC = stream(blocks, size)
    reset = rng.random((1, blocks + 1)) < 0.2
    reset[:, blocks // 2 : blocks // 2 + 2] = blocks > 2  # twice in a row
    return dict(zip(NAMES, (*arrays, fx, fdt, fB, fC), strict=True)), reset


def both(arrays, cotangents, reset, size, backend):
    def function(arrays, cotangents):
        values, pull = jax.vjp(lambda arrays: everything(arrays, reset, size, backend), arrays)
        return values | {f"gradient of {name}": g for name, g in pull(cotangents)[0].items()}

    return jax.jit(function)(arrays, cotangents)


@pytest.mark.parametrize(("tokens", "size", "dtype"), CALLS)
def test_calls_equal_the_token_loop(tokens, size, dtype):
    """Resets in chunks, an initial state, cotangents of every state; lengths and blocks of any size."""
    arrays, reset = problem(tokens, size, dtype)
    with jax.enable_x64(True):
        shapes = jax.eval_shape(lambda: everything(arrays, reset, size, "reference"))
        rng = np.random.default_rng(1)
        states = ("edges", "last")
        cotangents = {
            name: rounded(rng.standard_normal(one.shape), "float32" if name in states else dtype)
            for name, one in shapes.items()
        }
        right = jax.tree.map(np.asarray, both(arrays, cotangents, reset, size, "reference"))
    wide = {"x", "Bm", "Cm", "fx", "fB", "fC", "y", "frontiers", "reverse"}
    low = lambda tree: {name: jnp.asarray(a, dtype if name in wide else "float32") for name, a in tree.items()}
    with interpreted_kernels():
        found = both(low(arrays), low(cotangents), reset, size, "pallas_triton")
    check(found, right, dtype)


def test_rows_of_pads_leave_every_state_to_the_bit():
    """dt = 0: the state passes unchanged, whatever x, Bm and Cm are, and no gradient is NaN."""
    arrays, _ = problem(100, 4, "bfloat16")
    arrays = {name: jnp.asarray(a, "float32" if name in ("A", "initial") else "bfloat16") for name, a in arrays.items()}
    arrays |= {name: jnp.zeros(arrays[name].shape) for name in ("dt", "fdt")}
    reset = np.zeros((1, 26), bool)
    with interpreted_kernels():
        shapes = jax.eval_shape(lambda: everything(arrays, reset, 4, "pallas_triton"))
        found = both(
            arrays, jax.tree.map(lambda one: jnp.ones(one.shape, one.dtype), shapes), reset, 4, "pallas_triton"
        )
    np.testing.assert_array_equal(found["last"], arrays["initial"])
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in found.values())
    assert not found["reverse"].any()


def loss(x, dt, A, Bm, Cm):
    """Every kernel once: scan, frontiers, reversed blocks."""
    blocks = lambda array: array.reshape(len(array), -1, 32, *array.shape[2:])
    own = [blocks(array) for array in (x, dt, Bm, Cm)]
    y, boundary = ssd_scan(x, dt, A, Bm, Cm, block_size=32, chunk=CHUNK)
    frontiers = ssd_frontier(*own[:2], A, *own[2:], boundary=boundary)
    back = ssd_block(*own[:2], A, *own[2:], reverse=True, chunk=CHUNK)
    return sum(part.astype(jnp.float32).sum() for part in (y, frontiers, back))


def lowered(platform, dtype, heads, head_dim, state):
    """The text of the exported value and gradient of `loss`, under rematerialisation that keeps what kernels save."""
    vector = jax.ShapeDtypeStruct((2, 1024, 1, state), dtype)
    x = jax.ShapeDtypeStruct((2, 1024, heads, head_dim), dtype)
    dt, A = jax.ShapeDtypeStruct((2, 1024, heads), jnp.float32), jax.ShapeDtypeStruct((heads,), jnp.float32)
    kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(SAVED))
    function = jax.jit(jax.value_and_grad(kept, argnums=(0, 1, 2, 3, 4)))
    check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    return export.export(function, platforms=[platform], disabled_checks=[check])(
        x, dt, A, vector, vector
    ).mlir_module()


@pytest.mark.parametrize(
    ("kind", "dtype", "heads", "head_dim", "state"),
    [
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 80, 32, 64),
        ("NVIDIA H200", jnp.bfloat16, 24, 64, 128),
        ("NVIDIA H200", jnp.float32, 80, 32, 64),
        ("NVIDIA H100 80GB HBM3", jnp.float32, 24, 64, 128),
    ],
)
def test_K12_lowers_for_gpus_that_are_not_here(kind, dtype, heads, head_dim, state):
    """The mesh alone chooses the kernels: two forward and two backward for the scan, one each for frontiers and blocks,
    none twice."""
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        module = lowered("cuda", dtype, heads, head_dim, state)
    assert module.count("xla.gpu.triton") == 8
    for name in ("scan_states", "scan_cotangents", *(f"{op}_{way}" for op in ("scan", "blocks", "frontiers")
                                                     for way in ("forward", "backward"))):  # fmt: skip
        assert f"ssd_{name}" in module, name


def test_K12_without_a_mesh_the_platform_decides():
    assert "xla.gpu.triton" in lowered("cuda", jnp.bfloat16, 4, 32, 64)
    assert "xla.gpu.triton" not in lowered("cpu", jnp.bfloat16, 4, 32, 64)


@pytest.mark.parametrize(
    ("block_size", "chunk"), [(1, 64), (4, 64), (32, 64), (64, 64), (256, 64), (48, 16), (96, 32), (160, 32), (3, 64)]
)
def test_chunks_hold_whole_blocks_or_divide_one(block_size, chunk):
    assert kernels.chunk_size("scan", block_size, 32, 64) == chunk
    legal = kernels.refusal("scan", **LEGAL | {"block_size": block_size, "chunk": chunk}) is None
    assert legal == (block_size != 3)


LEGAL = {
    "shape": (16, 1024, 80, 32), "groups": 1, "state": 64, "chunk": 64, "block_size": 32, "dtype": jnp.bfloat16,
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
        ("scan", {"shape": (1, 256, 4, 8)}, "head dim of 16, 32, 64, 128, not 8", "use 16"),
        ("scan", {"shape": (1, 256, 4, 96)}, "head dim", "use 128"),
        ("scan", {"state": 12}, "state of 16, 32, 64, 128, 256, not 12", "use 16"),
        ("scan", {"chunk": 128}, "chunk of 16, 32, 64, not 128", "use 64"),
        ("scan", {"chunk": 8, "block_size": 8}, "chunk of 16, 32, 64", "use 16"),
        ("scan", {"shape": (1, 256, 4, 128), "state": 128, "dtype": "float32"}, "at most 64 in float32", "use 64"),
        ("scan", {"block_size": 48}, "divides the chunk", "use 64"),
        ("blocks", {"block_size": 48}, "divides the chunk", "use 64"),
        ("frontiers", {"block_size": 3}, "divides the chunk", "use 64"),
        ("scan", {"shape": (16, 2**16, 80, 32)}, "fewer than 2**31", "use at most 12 rows"),
        ("scan", {"shape": (1, 860_160, 80, 32)}, "fewer than 2**31", "tokens"),
    ],
)
def test_refusals_name_the_rule_and_the_nearest_legal_value(operation, change, rule, nearest):
    sentence = kernels.refusal(operation, **LEGAL | change)
    assert rule in sentence and nearest in sentence
