"""Rows split over the mesh axis `context`: what shards exchange, and that nothing else changes (8 virtual devices)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from diffjax.config import KernelsConfig, MambaConfig, MeshConfig, ModelConfig, ObjectiveConfig
from diffjax.config_rules import check_context
from diffjax.data.batch import Batch
from diffjax.diffusion.corruption import draw
from diffjax.diffusion.objectives import block_diffusion
from diffjax.errors import UserError
from diffjax.kernels import dispatch
from diffjax.models import context_shards
from diffjax.models.denoiser import Denoiser
from diffjax.parallel import mesh as mesh_lib
from diffjax.parallel.collectives import collectives
from diffjax.training.step import compile_step, make_init, make_train_step, state_shardings
from tests.models.cases import randomise
from tests.training.toy import make_config

VOCAB, MASK, LENGTH, BLOCK = 64, 4, 32, 4
MESHES = {
    "context 2": {"context": 2},
    "context 4 x data 2": {"context": 4, "data": 2},
    "context 2 x fsdp 2 x tensor 2": {"context": 2, "fsdp": 2, "tensor": 2},
}
LAYERS = {"A": 2, "M": 2, "AMMMMM": 6}
# Documents that end inside a shard, at the edge of one and after several; pads; a row of one document.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 3, 3], [1] * 8, [1, 1, 2, 2, 2, 2, 2, 0], [1, 2, 3, 4, 5, 6, 7, 8]], np.int32)


def model_config(pattern, prefix, dtype="float64", **changes):
    sizes = {"width": 32, "block_size": BLOCK, "heads": 2, "kv_heads": 2, "head_dim": 16, "mlp_width": 32}
    mamba = MambaConfig(heads=2, head_dim=16, state=8)
    sizes |= {"pattern": pattern, "layers": LAYERS[pattern], "prefix": prefix, "dtype": dtype, "mamba": mamba}
    sizes["init_std"] = 0.1
    return ModelConfig(**(sizes | changes))


def make_mesh(sizes):
    return mesh_lib.make_mesh(MeshConfig(**{"data": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])


def text(seed=0):
    """Four rows of `SEGMENTS`, some of whose tokens are pads."""
    rng = np.random.default_rng(seed)
    valid = np.ones((4, LENGTH), bool)
    valid[0, 10:12] = valid[2, 26:] = False
    tokens = np.where(valid, rng.integers(5, VOCAB, valid.shape), 0).astype(np.int32)
    return Batch(tokens, SEGMENTS, valid, valid & (rng.random(valid.shape) < 0.9), np.arange(4, dtype=np.int32))


@functools.cache
def outcome(pattern, prefix, frontiers, mesh="one device", dtype="float64", initial=False):
    """(loss, gradients, next-token loss or None) of the objective on a mesh; one set of weights, text and noise.

    The weights are random in every leaf, or the model's `initial` ones.
    """
    sizes = MESHES.get(mesh, {})
    autoregressive = 0.5 if prefix == "causal" else 0.0
    objective_config = ObjectiveConfig(frontiers=frontiers, autoregressive=autoregressive)
    first = Denoiser(model_config(pattern, prefix, "float32"), VOCAB).init(jax.random.key(1)) if initial else None
    with jax.enable_x64(dtype == "float64"), jax.set_mesh(make_mesh(sizes)) as _:
        denoiser = Denoiser(model_config(pattern, prefix, dtype), VOCAB)
        objective = block_diffusion(denoiser, objective_config, MASK, "mask_fill")
        placement = mesh_lib.shardings(denoiser.abstract_params(), denoiser.logical_axes(), make_mesh(sizes))
        params = jax.device_put(first or randomise(denoiser.abstract_params(), seed=1), placement)
        batch = jax.device_put(text(), mesh_lib.batch_sharding(make_mesh(sizes)))

        def loss(params):
            numerator, weight, metrics = objective(params, batch, draw(objective_config, 0, 0, batch, 4))
            return numerator / weight, metrics.get("next_token_ce")

        (value, next_token), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return jax.tree.map(np.asarray, (value, gradients, next_token))


def assert_close(actual, expected, tolerance):
    """Every array to `tolerance` of its largest number."""
    for path, got, want in zip(
        mesh_lib.paths(expected), jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        scale = np.abs(want).max()
        assert scale > 0, path
        np.testing.assert_allclose(got, want, atol=tolerance * scale, rtol=0, err_msg=path)


# What one shard sends of its tokens, against a loop over all tokens


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-6)])
def test_the_entering_states_are_those_of_a_loop_over_tokens(dtype, tolerance):
    """Documents start inside shards, at their edges, twice in one shard or not at all; decays from none to total."""
    rng = np.random.default_rng(0)
    batch, blocks, size, heads, groups, head_dim, state, shards = 3, 8, 5, 4, 2, 3, 6, 4
    length = blocks * size
    x = rng.standard_normal((batch, length, heads, head_dim))
    Bm = rng.standard_normal((batch, length, groups, state))
    A = -np.array([1e-6, 0.3, 20.0, 1e4])
    dt = rng.uniform(0, 1, (batch, length, heads)) * (rng.random((batch, length, 1)) < 0.9)
    reset = np.zeros((batch, blocks), bool)
    reset[0, [0, 3, 4]] = reset[1, [0, 2, 6, 7]] = reset[2, 0] = True

    expected, running = [], np.zeros((batch, heads, head_dim, state))
    for t in range(length):
        if t % size == 0:
            if t % (length // shards) == 0:
                expected.append(running.copy())
            running[reset[:, t // size]] = 0
        spread = np.repeat(Bm[:, t], heads // groups, axis=1)
        running = np.exp(dt[:, t] * A)[..., None, None] * running
        running += (dt[:, t, :, None] * x[:, t])[..., None] * spread[:, :, None]

    with jax.enable_x64(dtype == "float64"):
        cut = lambda array: np.split(array.astype(bool if array.dtype == bool else dtype), shards, axis=1)
        parts = [
            context_shards.summary(x, dt, A.astype(dtype), Bm, reset)
            for x, dt, Bm, reset in zip(*map(cut, (x, dt, Bm, reset)), strict=True)
        ]
        decays, states = (jnp.stack(arrays) for arrays in zip(*parts, strict=True))
        cuts = jnp.stack([part.any(axis=1) for part in cut(reset)])
        actual = [np.asarray(context_shards.combine(decays, cuts, states, shard)) for shard in range(shards)]
    assert actual[0].dtype == dtype and not actual[0].any()
    for got, want in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max(), rtol=0)
    assert np.abs(expected[2][2]).max() > 1  # a state that came through a whole shard


def test_states_that_no_shard_may_read_do_not_reach_it():
    """A state to the right, or of a document that ended, may be anything."""
    states = jnp.full((3, 1, 1, 2, 2), jnp.nan).at[1].set(1.0)
    entering = context_shards.combine(jnp.zeros((3, 1, 1)), jnp.zeros((3, 1), bool), states.at[0].set(2.0), 2)
    np.testing.assert_array_equal(entering, jnp.full((1, 1, 2, 2), 3.0))
    cuts = jnp.array([[False], [True], [False]])
    entering = context_shards.combine(jnp.zeros((3, 1, 1)), cuts, states.at[0].set(2.0), 2)
    np.testing.assert_array_equal(entering, jnp.ones((1, 1, 2, 2)))


@pytest.mark.parametrize("width", [0, 2, 5, 9])
def test_a_tail_comes_from_as_many_shards_as_it_needs(width):
    tokens = np.arange(1.0, 17).reshape(2, 8, 1)
    with jax.set_mesh(make_mesh({"context": 4})):
        tail = jax.shard_map(
            lambda own: context_shards.left_tail(own, width),
            in_specs=PartitionSpec(None, "context"),
            out_specs=PartitionSpec(None, "context"),
            axis_names={"context"},
            check_vma=False,
        )
        tails = np.asarray(jax.jit(tail)(tokens)).reshape(2, 4, width)
    padded = np.pad(tokens[..., 0], [(0, 0), (width, 0)])
    for shard in range(4):
        np.testing.assert_array_equal(tails[:, shard], padded[:, 2 * shard : 2 * shard + width])


# The whole model


CASES = [
    (pattern, prefix, frontiers, mesh)
    for number, (pattern, prefix, frontiers) in enumerate(
        (pattern, prefix, frontiers)
        for pattern in LAYERS
        for prefix in ("bidirectional", "causal")
        for frontiers in ("all", 1)
    )
    for mesh in [list(MESHES)[number % 3]]
] + [("M", "causal", "all", "context 4 x data 2"), ("M", "bidirectional", 1, "context 2 x fsdp 2 x tensor 2")]


QUICK = ("M", "causal", "all", "context 2"), ("M", "bidirectional", 1, "context 2 x fsdp 2 x tensor 2")
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in dict.fromkeys(CASES)]


@pytest.mark.parametrize(("pattern", "prefix", "frontiers", "mesh"), CASES)
def test_loss_and_gradients_are_those_of_one_device(pattern, prefix, frontiers, mesh):
    assert_close(outcome(pattern, prefix, frontiers, mesh), outcome(pattern, prefix, frontiers), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "prefix"), [("A", "bidirectional"), ("M", "causal"), ("AMMMMM", "causal")])
def test_loss_and_gradients_in_float32(pattern, prefix):
    """At the model's own initial weights; random ones everywhere make six layers round to 6e-5."""
    run = functools.partial(outcome, pattern, prefix, "all", dtype="float32", initial=True)
    assert_close(run("context 4 x data 2"), run(), 1e-5)


@pytest.mark.slow
def test_a_train_step_gives_the_parameters_of_one_device():
    """Batch and microbatches split over tokens too, the step compiled with their shardings."""

    def updated(sizes):
        config = make_config(
            training__batch_size=4, training__microbatches=2,
            optimizer__warmup_steps=0,
        )  # fmt: skip
        mesh = make_mesh(sizes)
        with jax.enable_x64(True), jax.set_mesh(mesh):
            denoiser = Denoiser(model_config("M", "bidirectional"), VOCAB)
            axes = denoiser.logical_axes()
            abstract = jax.eval_shape(make_init(config, denoiser.init, axes), jax.random.key(0))
            placement = mesh_lib.shardings(abstract["params"], axes, mesh)
            whole = state_shardings(config, abstract, placement, mesh)
            objective = block_diffusion(denoiser, config.objective, MASK, "mask_fill")
            step = make_train_step(config, objective, lambda s, b: draw(config.objective, 0, s, b, 4), mesh, placement)
            rows = mesh_lib.batch_sharding(mesh)
            batch = mesh_lib.global_batch(lambda numbers: Batch(*(array[numbers] for array in text())), 4, rows)
            shape = {shard.data.shape for shard in batch.tokens.addressable_shards}
            assert shape == {(4 // sizes.get("fsdp", 1), LENGTH // sizes.get("context", 1))}
            abstract_batch = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)
            compiled = compile_step(step, abstract, whole, abstract_batch, mesh)
            params = jax.device_put(randomise(abstract["params"], seed=1), placement)
            fresh = make_init(config, lambda key: params, axes)
            state, metrics = compiled(jax.jit(fresh, out_shardings=whole)(jax.random.key(0)), batch)
            moved = jax.tree.map(lambda new, old: np.asarray(new) - old, state["params"], randomise(params, seed=1))
            return np.asarray(metrics["loss"]), np.asarray(metrics["grad_norm"]), moved

    assert_close(updated({"context": 2, "fsdp": 2, "tensor": 2}), updated({}), 1e-7)  # Adam divides by small roots


@functools.cache
def logits(mesh="context 4 x data 2", tokens=None, patch=None):
    """Of all frontiers of AMMMMM's A and M in turn, [4, K, G, V], for changed `tokens` or a broken exchange."""
    with jax.enable_x64(True), jax.set_mesh(make_mesh(MESHES.get(mesh, {}))):
        denoiser = Denoiser(model_config("AMMMMM", "bidirectional", layers=2), VOCAB)
        params = randomise(denoiser.abstract_params(), seed=1)
        noisy = np.random.default_rng(3).integers(4, VOCAB, (4, LENGTH // BLOCK, BLOCK), np.int32)
        function = jax.jit(lambda *args: denoiser.train_logits(*args[:3], None, SEGMENTS, text().valid))
        changed = [text().tokens if rows is None else np.array(rows, np.int32) for rows in (tokens or (None,))]
        return [np.asarray(function(params, rows, noisy)) for rows in changed]


def test_no_token_behind_a_block_moves_a_bit_of_its_logits_on_any_shard():
    block = 3  # the last of its shard
    later = text().tokens.copy()
    later[:, block * BLOCK :] = (later[:, block * BLOCK :] + 17) % VOCAB
    before, after = logits(tokens=(None, tuple(map(tuple, later.tolist()))))
    assert np.array_equal(before[:, : block + 1], after[:, : block + 1])
    assert (np.abs(before - after)[1].max(axis=(1, 2))[block + 1 :] > 1e-6).all()  # row 1 is one document


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("entering_state", lambda x, dt, A, Bm, reset: jnp.zeros((*x.shape[:1], *x.shape[2:], Bm.shape[-1]))),
        ("left_tail", lambda array, width: jnp.zeros_like(array[:, :width])),
        ("gather_tokens", lambda array: jnp.tile(array, (1, context_shards.count(), 1, 1))),
    ],
)
def test_every_exchange_is_needed(monkeypatch, name, broken):
    """Without one of them shards behind the first are wrong, so that the equalities above mean something."""
    (right,) = logits("one device")
    monkeypatch.setattr(context_shards, name, broken)
    (wrong,) = logits("context 4 x data 2", patch=name)
    difference = np.abs(wrong - right)[1].max(axis=(1, 2))
    own = LENGTH // BLOCK // 4
    assert difference[:own].max() < 1e-10 and difference[own:].max() > 1e-3


@pytest.mark.parametrize("pattern", ["M", pytest.param("A", marks=pytest.mark.slow)])
def test_only_states_and_a_few_inputs_cross_between_shards(pattern):
    """Read from the compiled program: a Mamba layer gathers one state a shard and passes W-1 inputs on, forward and
    backward; an attention layer gathers keys and values, which shows that a gather of tokens would be seen."""
    config = model_config(pattern, "bidirectional", "float32", layers=1)
    rows, shards, length = 2, 4, 256
    with jax.set_mesh(make_mesh({"context": shards, "data": 2})):
        denoiser = Denoiser(config, VOCAB)
        struct = jax.ShapeDtypeStruct
        batch = mesh_lib.batch_sharding(make_mesh({"context": shards, "data": 2}))
        clean = struct((2 * rows, length), jnp.int32, sharding=batch.tokens)
        frontiers = struct((2 * rows, length // BLOCK, BLOCK), jnp.int32, sharding=batch.tokens)
        loss = lambda *args: denoiser.train_logits(*args).sum()
        text = jax.jit(jax.grad(loss)).lower(denoiser.abstract_params(), clean, frontiers).compile().as_text()
    crossing = [one for one in collectives(text) if one.kind != "all-reduce"]
    elements: dict[str, set[int]] = {}
    for one in crossing:
        elements.setdefault(one.kind, set()).update(math.prod(array.shape) for array in one.operands + one.results)
    state, heads = rows * 2 * 16 * 8, rows * 2
    tail_x, tail_BC = rows * 3 * 2 * 16, rows * 3 * 2 * 8
    keys = rows * length * 2 * 16
    if pattern == "A":
        assert keys in elements["all-gather"]
        return
    assert elements["collective-permute"] <= {tail_x, tail_BC}
    for kind in set(elements) - {"collective-permute"}:
        assert elements[kind] <= {n * shards for n in (state, heads, rows)} | {state, heads, rows}, kind
    assert state * shards in elements["all-gather"]
    assert state * shards < rows * length // shards * config.width  # the smallest activation of a shard


def test_kernels_run_inside_the_region_on_the_other_axes():
    """Interpreted Triton kernels on 2 shards x 2 parts of the heads, against the XLA form."""
    config = model_config("M", "bidirectional", "float32", layers=1, block_size=32,
                          mamba=MambaConfig(heads=4, head_dim=32, state=16))  # fmt: skip
    rng = np.random.default_rng(0)
    clean = rng.integers(5, VOCAB, (2, 256), np.int32)
    noisy = rng.integers(4, VOCAB, (2, 8, 32), np.int32)

    def gradients(backend, sizes):
        denoiser = Denoiser(config, VOCAB, KernelsConfig(ssd=backend))
        params = randomise(denoiser.abstract_params(), seed=1)
        weight = np.random.default_rng(1).standard_normal((2, 8, 32, VOCAB)).astype(np.float32)
        with jax.set_mesh(make_mesh(sizes)), dispatch.interpreted_kernels():
            loss = lambda params: (denoiser.train_logits(params, clean, noisy) * weight).sum()
            return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(params))

    assert_close(gradients("pallas_triton", {"context": 2, "tensor": 2}), gradients("xla", {}), 5e-5)


# What cannot be split


def test_rows_that_do_not_split_into_whole_blocks():
    with pytest.raises(UserError, match=r"sequence_length=32 is not a multiple of mesh.context=3 \* .*nearest: 24, 36"):
        check_context(make_config(), 3)
    check_context(make_config(), 8)
    denoiser = Denoiser(model_config("M", "causal", "float32"), VOCAB)
    with (
        jax.set_mesh(make_mesh({"context": 4})),
        pytest.raises(ValueError, match="6 blocks of a row do not split evenly"),
    ):
        jax.eval_shape(
            denoiser.train_logits, denoiser.abstract_params(), np.zeros((1, 24), int), np.zeros((1, 6, 4), int)
        )
