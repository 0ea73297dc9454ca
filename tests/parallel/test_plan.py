"""The dry run: published figures, exit codes, every config on small CPU topologies, estimates beside the real step."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from diffjax import cli
from diffjax.config import load_config
from diffjax.errors import UserError
from diffjax.models.denoiser import Denoiser
from diffjax.parallel import plan as plan_lib
from diffjax.parallel.chips import ENVIRONMENT
from diffjax.parallel.memory import context_bytes
from diffjax.parallel.plan import plan
from diffjax.parallel.plan_text import WIDTH, text

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = [
    "model.pattern=AM", "model.layers=2", "model.width=32", "model.heads=2", "model.kv_heads=2", "model.head_dim=16",
    "model.mlp_width=64", "model.mamba.heads=2", "model.mamba.head_dim=16", "model.mamba.state=8", "model.block_size=4",
    "data.sequence_length=32", "data.tokenizer.vocab_size=64", "training.batch_size=8", "mesh.data=1", "mesh.fsdp=-1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ENVIRONMENT:  # the verb sets them; the tests after this one get theirs back
        monkeypatch.setenv(name, ENVIRONMENT[name])


def small(*overrides):
    return load_config(CONFIGS / "quickstart.yaml", [*SMALL, *overrides])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_says_what_it_is_meant_for_and_plans(path, capsys):
    config = load_config(path)
    assert config.mesh.topology is not None
    devices = 4 if path.stem.startswith("seed") else 2
    assert cli.main(["plan", str(path), "--topology", f"cpu:{devices}", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["devices"] == devices and answer["fits"] is True and answer["have"] is None
    assert plan(config).exit_code == 0  # on what it is meant for, by estimate


@pytest.mark.parametrize(
    ("name", "parameters", "per_token", "fixed", "compute_dtype", "long", "paper"),
    [
        ("attention", 3_033_152_000, 286_720, 0, 0, 75_161_927_680, 5_712_117_760),
        ("hybrid", 3_359_858_720, 51_200, 15_444_224, 7_907_584, 13_437_217_024, 6_138_927_104),
        ("mamba", 3_430_881_920, 0, 18_801_664, 9_626_624, 18_801_664, 6_231_711_744),
    ],
)
def test_published_figures(name, parameters, per_token, fixed, compute_dtype, long, paper):
    """arXiv 2609.11998: sizes of contexts in section 3 and table 6, FLOPs in section 5.4."""
    found = plan(load_config(CONFIGS / f"seed_3b_{name}.yaml"), lengths=(262_144,))
    assert found.parameters == sum(found.parameters_by_group.values()) == parameters
    assert (found.context_bytes_per_token, found.context_bytes_fixed) == (per_token, fixed)
    assert found.context_bytes_fixed_compute_dtype == compute_dtype
    assert found.context_bytes == {262_144: long}
    assert found.flops_per_token_paper == paper
    assert found.have == int(15.75 * 2**30) and found.margin == found.have - found.memory.need


def test_context_bytes_are_those_of_a_real_context():
    config = small()
    denoiser = Denoiser(config.model, vocab_size=64)
    context = denoiser.empty_context(1, 12)
    assert context_bytes(denoiser, 12) == sum(leaf.nbytes for leaf in jax.tree.leaves(context.layers))


def test_state_bytes_are_those_of_the_real_state():
    """A device's parameters and moments, made for real on 4 devices."""
    from diffjax.parallel.mesh import init_sharded, make_mesh
    from diffjax.training.step import lay_out, make_init

    config = small("training.ema=0.9", "mesh.tensor=2")
    found = plan(config, "cpu:4")
    denoiser = Denoiser(config.model, vocab_size=found.vocab_size)
    layout = lay_out(config, denoiser, make_mesh(config.mesh, jax.devices()[:4]))
    axes = denoiser.logical_axes()
    state = init_sharded(make_init(config, denoiser.init, axes), layout.placement, jax.random.key(0))
    held = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert found.mesh == {"data": 1, "fsdp": 2, "context": 1, "tensor": 2}
    assert found.state_bytes["parameters"] == held(state["params"]) == found.state_bytes["average"]
    assert found.state_bytes["optimizer"] == held(state["opt"])
    assert found.state_bytes["parameters"] < 0.5 * 4 * found.parameters


def test_compiled_plan_is_the_step_that_trains(capsys):
    """Memory and traffic of the compiled step, and a table that a terminal of 100 columns holds."""
    config = small()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, pattern="A", layers=1, remat="block"))
    found = plan(config, "cpu:4", compiled=True)
    memory = found.memory
    assert memory.compiled and memory.need == sum(memory.parts.values()) and memory.compile_seconds > 0
    state = sum(size for name, size in found.state_bytes.items() if name != "batch")
    assert -memory.parts["aliased"] == pytest.approx(state, rel=0.05)  # the state is updated in place
    assert memory.parts["arguments"] == pytest.approx(state + found.state_bytes["batch"], rel=0.05)
    gathered = {traffic.kind: traffic for traffic in found.collectives}
    assert gathered["all-gather"].bytes > 0 and gathered["all-reduce"].bytes > 0
    assert [one.compiled for one in found.remat] == [False, True, False]
    assert "attention" in " ".join(found.kernels)
    report = text(found)
    assert max(map(len, report.splitlines())) <= WIDTH
    assert "compiled in" in report and "all-gather" in report


def test_policies_are_ordered_by_memory_and_flops():
    found = {one.remat: one for one in plan(load_config(CONFIGS / "seed_3b_hybrid.yaml")).remat}
    assert found["block"].need < found["dots"].need < found["none"].need
    assert found["block"].flops_per_token > found["dots"].flops_per_token == found["none"].flops_per_token
    assert found["block"].fits and not found["none"].fits


def test_what_does_not_fit_exits_3_with_need_and_have(capsys):
    path = str(CONFIGS / "seed_3b_attention.yaml")
    assert cli.main(["plan", path, "model.remat=none"]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does NOT fit: needs ") and "has 15.75" in last
    assert cli.main(["plan", path, "model.remat=none", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is False and answer["margin"] < 0 and answer["exit_code"] == 3


def test_an_estimate_that_barely_fits_says_so(capsys):
    path = str(CONFIGS / "seed_3b_hybrid.yaml")
    for rows, doubtful in ((4096, False), (5376, True)):
        assert cli.main(["plan", path, f"training.batch_size={rows}"]) == 0
        assert ("may need 30% more" in capsys.readouterr().out.splitlines()[-1]) is doubtful


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5litepod-16"], "topology 'v5litepod-16' is not known"),
        (["mesh.topology=null"], "name the devices"),
        (["--topology", "cpu:3"], "is not a multiple of training.microbatches * data * fsdp"),
        (["--topology", "h100:8", "--compile"], "has no compiler for h100:8"),
        (["mesh.data=5", "--topology", "cpu:4"], "5"),
    ],
)
def test_wrong_input_exits_2(arguments, message, capsys):
    assert cli.main(["plan", str(CONFIGS / "quickstart.yaml"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_compiling_for_a_tpu_without_the_extra_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setattr(plan_lib, "find_spec", lambda name: None)
    path = str(CONFIGS / "seed_3b_mamba.yaml")
    assert cli.main(["plan", path, "--compile"]) == 2
    assert "pip install 'diffjax[tpu-plan]'" in capsys.readouterr().err


def test_more_cpu_devices_than_jax_started_with():
    config = small()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, batch_size=64))
    jax.devices()  # JAX has started
    with pytest.raises(UserError, match=f"needs 64 devices, and JAX has started with {len(jax.devices())};"):
        plan(dataclasses.replace(config, model=dataclasses.replace(config.model, width=64)), "cpu:64", compiled=True)


@pytest.mark.parametrize(
    ("message", "need"),
    [
        ("Ran out of memory in memory space hbm. Used 18.68G of 15.75G hbm.", 18.68 * 2**30),
        ("the total memory required for HLO temporaries (354.90G) exceeds available HBM (15.75G).", 354.9 * 2**30),
        ("Used 900.50M of 800M hbm", 900.5 * 2**20),
        ("something else", None),
    ],
)
def test_what_the_compiler_says_it_would_need(message, need):
    found = plan_lib._needed(message)
    assert found == (None if need is None else pytest.approx(need))


def test_a_program_too_large_is_reported_not_raised(monkeypatch):
    def too_large(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 18.68G of 15.75G hbm. Exceeded by 2.93G.")

    monkeypatch.setattr(plan_lib, "compile_step", too_large)
    found = plan(small(), "cpu:4", compiled=True)
    assert not found.fits and found.exit_code == 3 and found.collectives is None
    v5e = dataclasses.replace(found, topology="v5e:2x2", have=int(15.75 * 2**30))
    assert text(v5e).splitlines()[-1] == "does NOT fit: needs 18.68 GiB, has 15.75 (compiled)"
