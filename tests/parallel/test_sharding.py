"""Data, FSDP and tensor parallelism: the whole compiled train step against one device, on 8 virtual devices; what its
collectives carry, what each device holds, and what cannot be split."""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from diffjax.config import Config, MambaConfig, MeshConfig, ModelConfig
from diffjax.data.batch import Batch
from diffjax.diffusion.corruption import draw
from diffjax.diffusion.objectives import block_diffusion
from diffjax.errors import UserError
from diffjax.models import placement
from diffjax.models.denoiser import Denoiser
from diffjax.parallel import mesh as mesh_lib
from diffjax.parallel.collectives import Collective, collectives
from diffjax.training.step import compile_step, donated_share, lay_out, make_init, make_train_step
from tests.models.cases import randomise
from tests.training.toy import make_config

pytestmark = pytest.mark.xdist_group("sharding")  # one worker, so that references are made once

# Every size of the model is a power of two and no number of a row's tokens or blocks is, which tells parameters from
# activations in a compiled program.
ROWS, LENGTH, BLOCK, VOCAB, MASK = 8, 40, 4, 64, 4
MESHES = {
    "fsdp 8": {"fsdp": 8},
    "data 2 x tensor 4": {"data": 2, "tensor": 4},
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def make_mesh(name):
    sizes = {"data": 1, **MESHES.get(name, {})}
    return mesh_lib.make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])


def model_config(pattern, prefix="bidirectional", **changes):
    sizes = {"width": 32, "block_size": BLOCK, "heads": 4, "kv_heads": 4, "head_dim": 8, "mlp_width": 64}
    mamba = MambaConfig(heads=4, head_dim=8, state=8)
    sizes |= {"pattern": pattern, "layers": max(2, len(pattern)), "prefix": prefix, "mamba": mamba}
    return ModelConfig(**(sizes | changes))


def train_config(prefix, seed=0) -> Config:
    """Adam's epsilon keeps the rounding of vanishing gradients from becoming whole steps; nothing is clipped."""
    return make_config(
        run__seed=seed, data__sequence_length=LENGTH, training__batch_size=ROWS, model__prefix=prefix,
        objective__autoregressive=0.5 if prefix == "causal" else 0.0,
        optimizer__warmup_steps=0, optimizer__epsilon=1e-3, optimizer__clip_norm=1e9,
    )  # fmt: skip


def read_rows(step, numbers) -> Batch:
    """Rows of two documents and pads, a pure function of (step, row)."""

    def one(row):
        rng = np.random.default_rng([step, row])
        first, blocks = rng.integers(1, 6), np.arange(LENGTH // BLOCK)
        segments = np.where(blocks < first, 1, 2) * (blocks < rng.integers(7, 11))
        valid = np.repeat(segments > 0, BLOCK)
        tokens = np.where(valid, rng.integers(5, VOCAB, LENGTH), 0)
        return tokens.astype(np.int32), segments.astype(np.int32), valid, valid & (rng.random(LENGTH) < 0.9)

    return Batch(*map(np.stack, zip(*map(one, numbers), strict=True)), np.asarray(numbers, np.int32))


class Outcome(NamedTuple):
    """Two train steps: the losses, gradient norms and next-token losses, the first step's gradient (Adam's first moment
    after it, divided by 1 - beta1), the parameters after both; the program and the share of the state it donates."""

    numbers: dict
    gradient: dict
    params: dict
    program: str
    donated: float


@functools.cache
def outcome(pattern, prefix, mesh="one device", seed=0) -> Outcome:
    config, mesh = train_config(prefix, seed), make_mesh(mesh)
    denoiser = Denoiser(model_config(pattern, prefix), VOCAB)
    abstract, places, _ = lay_out(config, denoiser, mesh)
    objective = block_diffusion(denoiser, config.objective, MASK, config.data.tail)
    noise = lambda step, batch: draw(config.objective, config.run.seed, step, batch, ROWS)
    rows = mesh_lib.batch_sharding(mesh)
    with jax.set_mesh(mesh):
        step = make_train_step(config, objective, noise, mesh, places["params"], denoiser.logical_axes())
        batches = [mesh_lib.global_batch(functools.partial(read_rows, number), ROWS, rows) for number in range(2)]
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batches[0])
        compiled = compile_step(step, abstract, places, shapes, mesh)
        start = lambda params: make_init(config, lambda key: params, denoiser.logical_axes())(None)
        state = jax.jit(start, out_shardings=places)(randomise(abstract["params"], seed=1))
        numbers: dict = {"loss": [], "grad_norm": [], "next_token": []}
        moments = []
        for batch in batches:
            state, metrics = compiled(state, batch)
            numbers["loss"].append(float(metrics["loss"]))
            numbers["grad_norm"].append(float(metrics["grad_norm"]))
            numbers["next_token"].append(float(metrics["sums"].get("next_token_ce", (0.0, 0.0))[0]))
            moments.append(jax.tree.map(np.asarray, state["opt"][0].mu))
    gradient = jax.tree.map(lambda moment: moment / (1 - config.optimizer.beta1), moments[0])
    after = jax.tree.map(np.asarray, state["params"])
    return Outcome(numbers, gradient, after, compiled.as_text(), donated_share(compiled, abstract, places))


def difference(actual, expected) -> float:
    """The largest difference of two trees, each array's relative to its largest number."""
    sizes = jax.tree.map(lambda want: np.abs(want).max(), expected)
    return max(
        float(np.abs(got - want).max() / size) if size else float(np.abs(got).max())
        for got, want, size in zip(*map(jax.tree.leaves, (actual, expected, sizes)), strict=True)
    )


def differences(one: Outcome, other: Outcome) -> tuple[float, float, float]:
    """Of losses and norms, gradients and parameters."""
    return tuple(difference(getattr(one, name), getattr(other, name)) for name in ("numbers", "gradient", "params"))


CASES = [
    ("A", "bidirectional", "fsdp 8"),
    ("A", "causal", "data 2 x tensor 4"),
    ("A", "bidirectional", "data 2 x fsdp 2 x tensor 2"),
    ("M", "bidirectional", "fsdp 8"),
    ("M", "bidirectional", "data 2 x tensor 4"),
    ("M", "causal", "data 2 x fsdp 2 x tensor 2"),
    ("AMMMMM", "causal", "fsdp 8"),
    ("AMMMMM", "bidirectional", "data 2 x fsdp 2 x tensor 2"),
]
QUICK = ("M", "causal", "data 2 x fsdp 2 x tensor 2")
CASES = [case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("pattern", "prefix", "mesh"), CASES)
def test_the_train_step_is_that_of_one_device(pattern, prefix, mesh):
    one, split = outcome(pattern, prefix), outcome(pattern, prefix, mesh)
    assert max(differences(split, one)) <= 1e-5
    assert split.donated >= 0.95


@pytest.mark.slow
def test_the_comparison_sees_other_noise():
    """And what it compares is not zero."""
    one, other = outcome("A", "bidirectional"), outcome("A", "bidirectional", seed=1)
    assert min(differences(other, one)) > 1e-3
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(one.gradient))


# What crosses between devices


def carries_rows(one: Collective) -> bool:
    """Whether it moves activations of tokens (not their ids or masks)."""
    floats = [array for array in (*one.operands, *one.results) if array.dtype[0] in "bf"]
    return any(math.prod(array.shape) & (math.prod(array.shape) - 1) for array in floats)


@pytest.mark.parametrize(
    ("pattern", "prefix", "mesh"), [case for case in CASES if "M" in getattr(case, "values", case)[0]]
)
def test_no_activations_are_gathered(pattern, prefix, mesh):
    """All-gathers carry parameters and token ids. Rows of activations move only where the embedding exchanges parts
    of the width for rows, and where the padded vocabulary is cut."""
    found = collectives(outcome(pattern, prefix, mesh).program)
    assert any(one.kind == "all-reduce" and carries_rows(one) for one in found) == ("tensor" in mesh)
    moved = [one for one in found if one.kind != "all-reduce" and carries_rows(one)]
    assert {(one.kind, "embed" in one.op_name, "logits" in one.op_name) for one in moved} <= {
        ("all-to-all", True, False),
        ("collective-permute", False, True),
    }
    gathered = [one for one in found if one.kind == "all-gather" and one.times != 1]
    assert bool(gathered) == ("fsdp" in mesh)  # parameters, in every layer


@pytest.mark.slow
def test_logits_are_not_gathered():
    """The softmax over a split vocabulary sends a maximum, a sum and the target's logit for each token."""
    tokens = ROWS // 2 * LENGTH
    found = [one for one in collectives(outcome("A", "causal", "data 2 x tensor 4").program) if one.times == 1]
    sizes = [math.prod(array.shape) for one in found if "logits" not in one.op_name for array in one.results]
    assert sizes.count(tokens) >= 3
    assert not [size for size in sizes if size >= tokens * VOCAB // 4 and size % LENGTH == 0 and size != tokens * 32]


# What each device holds


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}])
def test_every_device_holds_its_share_and_init_makes_no_more(sizes):
    """Parameters and optimizer state on each device at most 1.1 / 8 of the whole, counted from its buffers; while init
    runs, temporaries and output stay under two shares."""
    config = train_config("bidirectional")
    wide = model_config("AM", width=128, head_dim=32, mlp_width=512, mamba=MambaConfig(heads=8, head_dim=32, state=8))
    mesh = mesh_lib.make_mesh(MeshConfig(data=1, **sizes))
    denoiser = Denoiser(wide, VOCAB)
    _, places, _ = lay_out(config, denoiser, mesh)
    init = make_init(config, denoiser.init, denoiser.logical_axes())
    with jax.set_mesh(mesh):
        compiled = jax.jit(init, out_shardings=places).lower(jax.random.key(0)).compile()
        state = compiled(jax.random.key(0))
    leaves = jax.tree.leaves({"params": state["params"], "opt": state["opt"]})
    whole = sum(leaf.nbytes for leaf in leaves)
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert max(held.values()) <= 1.1 / 8 * whole
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2 * max(held.values())


# What cannot be split, and what constrains nothing


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"kv_heads": 2}, {"tensor": 4}, r"mixer/key/kernel \[2,32,2,8\]: dim 2 'kv_heads'=2 .*=4; nearest 4$"),
        (
            {"mamba": MambaConfig(heads=6, head_dim=8, state=8)}, {"tensor": 4},
            r"mixer/forward/A_log \[2,6\]: dim 1 'ssm_heads'=6 does not divide by mesh axis 'tensor'=4; nearest 4, 8$",
        ),
        ({"mlp_width": 66}, {"tensor": 4}, r"mlp/down/kernel \[2,66,32\]: dim 1 'mlp'=66 .* nearest 64, 68$"),
        ({"width": 36}, {"fsdp": 8}, r"embed/table \[128,36\]: dim 1 'embed'=36 .* 'fsdp'=8; nearest 32, 40$"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_split_are_named(changes, sizes, message):
    pattern = "M" if "mamba" in changes else "A"
    mesh = mesh_lib.make_mesh(MeshConfig(**{"data": 8 // math.prod(sizes.values()), **sizes}))
    with pytest.raises(UserError, match=message):
        lay_out(train_config("bidirectional"), Denoiser(model_config(pattern, **changes), VOCAB), mesh)


def test_constraints_take_names_strictly_and_leave_out_what_cannot_be_split():
    x = jnp.zeros((8, 40, 32))

    def spec(*names, x=x):
        text = jax.jit(lambda x: placement.constrain(x, *names)).lower(x).as_text()
        return re.findall(r"sharding_constraint .*?<@mesh, \[(.*?)\]>", text)

    assert placement.constrain(x, "batch", "length", "embed") is x  # no mesh
    with jax.set_mesh(make_mesh("data 2 x fsdp 2 x tensor 2")):
        assert spec("batch", "length", "embed") == ['{"data", "fsdp"}, {"context"}, {}']
        assert spec("batch", "length", "mlp") == ['{"data", "fsdp"}, {"context"}, {"tensor"}']
        assert spec("batch", "length", "embed", x=x[:2]) == ['{"data"}, {"context"}, {}']
        with pytest.raises(ValueError, match="'lenght' has no rule; nearest 'length'"):
            placement.constrain(x, "batch", "lenght", "embed")
        with pytest.raises(ValueError, match=r"3 dimensions got 2 names"):
            placement.constrain(x, "batch", "length")
    with jax.set_mesh(mesh_lib.make_mesh(MeshConfig(data=2, context=4))):
        inside = jax.shard_map(
            lambda x: placement.constrain(x, "batch", "length", "embed"),
            in_specs=PartitionSpec(None, "context"), out_specs=PartitionSpec(None, "context"), axis_names={"context"},
        )  # fmt: skip
        np.testing.assert_array_equal(jax.jit(inside)(x + 1), x + 1)
