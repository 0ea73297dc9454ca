"""The config: YAML 1.2 scalars, the wording of every message, cross-field rules, round trip, resume classes."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from diffjax.config import Config, config_hash, dump_yaml, load_config, resume_diff, to_dict
from diffjax.config_loading import edit_distance, flatten, leaf_fields
from diffjax.config_rules import _RANGES, validate
from diffjax.errors import UserError

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Messages show paths as they were given, so tests give them relative to an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()


def write(text, name="configs/a.yaml"):
    Path(name).write_text(text)
    return name


def message(path, *overrides):
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def load(text="run: {seed: 0}", *overrides):
    return load_config(write(text), overrides)


# The wording


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "run:\n  seed: 1\noptimizer:\n  learning_rat: 1",
            "configs/a.yaml:4: unknown key 'optimizer.learning_rat'; nearest: 'optimizer.learning_rate'",
        ),
        (
            "training:\n  layers: 2",
            "configs/a.yaml:2: 'layers' is not a key of 'training'; it belongs to 'model' (write model.layers)",
        ),
        ("run:\n  seed: 1\n\n  seed: 1", "configs/a.yaml:4: 'run.seed' is given twice (first on line 2)"),
        ("run: {seed: 1}\nmodel: {}\nrun: {seed: 2}", "configs/a.yaml:3: 'run' is given twice (first on line 1)"),
        (
            "optimizer:\n  learning_rate: fast",
            "configs/a.yaml:2: optimizer.learning_rate: expected a number, got the text 'fast'",
        ),
        ("optimzer: {}", "configs/a.yaml:1: unknown key 'optimzer'; nearest: 'optimizer'"),
        (
            "learning_rate: 1",
            "configs/a.yaml:1: 'learning_rate' is not a key of the top level; it belongs to 'optimizer' "
            "(write optimizer.learning_rate)",
        ),
        (
            "data: {vocab_size: 9}",
            "configs/a.yaml:1: 'vocab_size' is not a key of 'data'; it belongs to 'data.tokenizer' "
            "(write data.tokenizer.vocab_size)",
        ),
        (
            "training: {seed: 9}",
            "configs/a.yaml:1: 'seed' is not a key of 'training'; it belongs to 'run', 'evaluation' or 'sampling' "
            "(write run.seed, evaluation.seed or sampling.seed)",
        ),
        (
            "model: {mamba: {head_din: 1}}",
            "configs/a.yaml:1: unknown key 'model.mamba.head_din'; nearest: 'model.mamba.head_dim'",
        ),
        (
            "optimizer: {beta3: 1}",
            "configs/a.yaml:1: unknown key 'optimizer.beta3'; nearest: 'optimizer.beta1', 'optimizer.beta2'",
        ),
        (
            "optimizer: {learning_rate_multipliers: {mamab: 2.0}}",
            "configs/a.yaml:1: unknown key 'optimizer.learning_rate_multipliers.mamab'; nearest: "
            "'optimizer.learning_rate_multipliers.mamba'",
        ),
        (
            "kernels: {nothing_like_it: 1}",
            "configs/a.yaml:1: unknown key 'kernels.nothing_like_it'; the keys of 'kernels' are: ssd, attention, "
            "cross_entropy_chunk",
        ),
        (
            "run.seed: 3",
            "configs/a.yaml:1: unknown key 'run.seed'; in a file write sections as YAML mappings, not with dots",
        ),
        ("training: {steps: 1.5}", "configs/a.yaml:1: training.steps: expected an integer, got 1.5"),
        ("training: {steps: 1e3}", "configs/a.yaml:1: training.steps: expected an integer, got 1e3"),
        ("training: {steps: true}", "configs/a.yaml:1: training.steps: expected an integer, got true"),
        ("training: {steps: '5'}", "configs/a.yaml:1: training.steps: expected an integer, got the text '5'"),
        ("training: {steps: null}", "configs/a.yaml:1: training.steps: expected an integer, got null"),
        ("training: {steps: }", "configs/a.yaml:1: training.steps: expected an integer, got null"),
        ("training: {steps: [1, 2]}", "configs/a.yaml:1: training.steps: expected an integer, got a list of 2"),
        ("training: {steps: {a: 2}}", "configs/a.yaml:1: training.steps: expected an integer, got a section of keys"),
        ("model: {qk_norm: no}", "configs/a.yaml:1: model.qk_norm: expected true or false, got the text 'no'"),
        ("model: {qk_norm: 1}", "configs/a.yaml:1: model.qk_norm: expected true or false, got 1"),
        ("optimizer: {learning_rate: true}", "configs/a.yaml:1: optimizer.learning_rate: expected a number, got true"),
        (
            "optimizer: {learning_rate: .nan}",
            "configs/a.yaml:1: optimizer.learning_rate: expected a finite number, got .nan",
        ),
        (
            "optimizer: {learning_rate: -.inf}",
            "configs/a.yaml:1: optimizer.learning_rate: expected a finite number, got -.inf",
        ),
        (
            "optimizer: {learning_rate: 1e999}",
            "configs/a.yaml:1: optimizer.learning_rate: expected a finite number, got 1e999",
        ),
        (
            "model: {dtype: float16}",
            "configs/a.yaml:1: model.dtype: expected one of 'float32', 'bfloat16', 'float64', got the text 'float16'",
        ),
        (
            "objective: {frontiers: most}",
            "configs/a.yaml:1: objective.frontiers: expected an integer or 'all', got the text 'most'",
        ),
        (
            "guard: {spike_sigma: off}",
            "configs/a.yaml:1: guard.spike_sigma: expected a number or null, got the text 'off'",
        ),
        ("run: {id: 007}", "configs/a.yaml:1: run.id: expected text or null, got 007"),
        ("run: {dir: 7}", "configs/a.yaml:1: run.dir: expected text, got 7; write it in quotes: '7'"),
        (
            "objective: {mask_rate: [0.1]}",
            "configs/a.yaml:1: objective.mask_rate: expected a list [a number, a number], got a list of 1",
        ),
        (
            "objective: {mask_rate: 0.1}",
            "configs/a.yaml:1: objective.mask_rate: expected a list [a number, a number], got 0.1",
        ),
        (
            "objective:\n  mask_rate: [0.1, high]",
            "configs/a.yaml:2: objective.mask_rate[1]: expected a number, got the text 'high'",
        ),
        ("run: 3", "configs/a.yaml:1: run: expected a section of keys, got 3"),
        ("run:", "configs/a.yaml:1: run: expected a section of keys, got null"),
        ("[run]: 3", "configs/a.yaml:1: a key must be a plain word, got a list of 1"),
        ("- run", "configs/a.yaml: expected sections such as 'run:' and 'model:' at the top level, got a list of 1"),
        (
            "hello",
            "configs/a.yaml: expected sections such as 'run:' and 'model:' at the top level, got the text 'hello'",
        ),
        ("", "configs/a.yaml: is empty; a config holds sections such as 'run:' and 'model:'"),
        ("# a comment\n", "configs/a.yaml: is empty; a config holds sections such as 'run:' and 'model:'"),
    ],
)
def test_wording_of_file_errors(text, said):
    assert message(write(text)) == said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["training.steps=10", "training.steps=20"],
            "command line: 'training.steps' is given twice: 'training.steps=10' and 'training.steps=20'",
        ),
        (["training.step=1"], "command line: unknown key 'training.step'; nearest: 'training.steps'"),
        (["optimzer.learning_rate=1"], "command line: unknown key 'optimzer'; nearest: 'optimizer'"),
        (
            ["blocks=1"],
            "command line: 'blocks' is not a key of the top level; it belongs to 'sampling' (write sampling.blocks)",
        ),
        (["training.steps"], "command line: 'training.steps' is not of the form section.key=value"),
        (["=3"], "command line: '=3' is not of the form section.key=value"),
        (["model=3"], "command line: 'model' is a section; name one of its keys, such as model.pattern=..."),
        (
            ["training.steps.x=3"],
            "command line: unknown key 'training.steps.x'; 'training.steps' holds a value and has no keys",
        ),
        (["base=b.yaml"], "command line: 'base' can be given in a file only"),
        (["training.steps="], "command line: training.steps: expected an integer, got null"),
        (["training.steps=ten"], "command line: training.steps: expected an integer, got the text 'ten'"),
        (
            ["objective.mask_rate=[0.1"],
            "command line: objective.mask_rate: expected a list [a number, a number], got the text '[0.1'",
        ),
        (
            ["model.prefix=causa"],
            "command line: model.prefix: expected one of 'bidirectional', 'causal', got the text 'causa'",
        ),
    ],
)
def test_wording_of_override_errors(overrides, said):
    assert message(write("run: {seed: 0}"), *overrides) == said


def test_every_mistake_is_reported_at_once_in_order():
    write("run: {sed: 1}", "configs/b.yaml")
    text = "base: b.yaml\nmodel:\n  layers: x\n  widht: 3\n"
    assert message(write(text), "training.steps=y").splitlines() == [
        "configs/b.yaml:1: unknown key 'run.sed'; nearest: 'run.seed'",
        "configs/a.yaml:3: model.layers: expected an integer, got the text 'x'",
        "configs/a.yaml:4: unknown key 'model.widht'; nearest: 'model.width'",
        "command line: training.steps: expected an integer, got the text 'y'",
    ]


def test_unreadable_files():
    assert message("configs/none.yaml") == "configs/none.yaml: no such file"
    assert message("configs") == "configs: is a folder, not a YAML file"
    Path("runs").mkdir()
    Path("runs/config.yaml").write_text("run: {seed: 0}")
    assert message("runs") == "runs: is a folder, not a YAML file; did you mean runs/config.yaml?"
    Path("configs/a.yaml").write_bytes(b"run:\n  dir: caf\xe9\n")
    assert message("configs/a.yaml") == "configs/a.yaml:2: is not UTF-8 text (byte 0xe9)"
    assert message(write("run: {dir: 'x\x00'}")).startswith("configs/a.yaml:1: not valid YAML: ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {seed: 1", 1),
        ("run:\n\tseed: 1", 2),
        ("run:\n  seed: 1\n bad: 2", 3),
        ("run: &a {seed: *b}", 1),
        ("run: {seed: 1}\n---\nrun: {seed: 2}", 2),
        ("run: 'x", 1),
    ],
)
def test_broken_yaml_is_one_line_with_its_place(text, line):
    said = message(write(text))
    assert re.match(rf"configs/a\.yaml:{line}: not valid YAML: \w", said)
    assert "\n" not in said


# Files that build on files


def test_later_wins_base_then_file_then_command_line():
    Path("sub").mkdir()
    write("run: {seed: 1}\ntraining: {steps: 101, batch_size: 101}", "sub/c.yaml")
    write("base: sub/c.yaml\ntraining: {steps: 102}\nmodel: {mamba: {state: 8}}", "b.yaml")
    config = load("base: ../b.yaml\ntraining: {log_every: 3}", "run.seed=9")
    assert (config.run.seed, config.training.steps, config.training.batch_size) == (9, 102, 101)
    assert (config.model.mamba.state, config.model.mamba.conv, config.training.log_every) == (8, 4, 3)
    assert config.training.microbatches == Config().training.microbatches


def test_base_loops_are_named():
    write("run: {seed: 1}\n\nbase: a.yaml", "configs/b.yaml")
    write("run: {seed: 1}\n\nbase: b.yaml", "configs/a.yaml")
    loop = "base: loop configs/a.yaml -> configs/b.yaml -> configs/a.yaml"
    assert message("configs/a.yaml") == f"configs/a.yaml:3: {loop}"
    assert message(write("base: a.yaml", "configs/c.yaml")) == f"configs/a.yaml:3: {loop}"
    assert message(write("base: d.yaml", "configs/d.yaml")).endswith("loop configs/d.yaml -> configs/d.yaml")


def test_bad_bases_name_the_line_that_asks_for_them():
    assert message(write("base: none.yaml")) == "configs/a.yaml:1: base: configs/none.yaml: no such file"
    assert message(write("base: 3")) == "configs/a.yaml:1: base: expected text, got 3; write it in quotes: '3'"
    write("", "configs/b.yaml")
    assert message(write("base: b.yaml")).startswith("configs/a.yaml:1: base: configs/b.yaml: is empty")


# YAML 1.2 scalars, where PyYAML reads YAML 1.1


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("optimizer.learning_rate", "1e3", 1000.0),
        ("optimizer.learning_rate", "3", 3.0),
        ("optimizer.learning_rate", "'1e-3'", 1e-3),
        ("optimizer.learning_rate", ".5", 0.5),
        ("optimizer.learning_rate", "5.", 5.0),
        ("optimizer.learning_rate", "+1.5E+2", 150.0),
        ("run.seed", "010", 10),
        ("run.seed", "0o10", 8),
        ("run.seed", "0x1F", 31),
        ("run.seed", "+7", 7),
        ("run.dir", "no", "no"),
        ("run.dir", "on", "on"),
        ("run.dir", "1:30", "1:30"),
        ("run.dir", "2024-01-01", "2024-01-01"),
        ("run.dir", "1_000", "1_000"),
        ("run.dir", "'7'", "7"),
        ("run.dir", "!!str 7", "7"),
        ("run.id", "~", None),
        ("run.id", "Null", None),
        ("run.id", "", None),
        ("run.id", "'null'", "null"),
        ("tracking.wandb", "True", True),
        ("objective.mask_rate", "[1e-1, 1]", (0.1, 1.0)),
        ("objective.frontiers", "3", 3),
        ("objective.frontiers", "all", "all"),
        ("guard.spike_sigma", "null", None),
        ("guard.spike_sigma", "4", 4.0),
    ],
)
def test_scalars(key, text, value):
    section, name = key.split(".")
    from_file = getattr(getattr(load(f"{section}: {{{name}: {text}}}"), section), name)
    from_override = getattr(getattr(load("run: {}", f"{key}={text}"), section), name) if "!!" not in text else value
    assert from_file == value and type(from_file) is type(value)
    assert from_override == value and type(from_override) is type(value)


@pytest.mark.parametrize("text", ["7", "1e3", "true", "a: b", "#1", "C:\\x", "[x", "a=b", " x", "é"])
def test_text_on_the_command_line_needs_no_quotes(text):
    assert load("run: {}", f"run.dir={text}").run.dir == text


def test_alias_to_itself_ends():
    assert "expected a number" in message(write("objective: {mask_rate: &a [*a, 1]}"))


# Cross-field rules


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "data.sequence_length=1000 model.block_size=16",
            "data.sequence_length=1000 is not a multiple of model.block_size=16; nearest: 992, 1008",
        ),
        ("data.sequence_length=10", "data.sequence_length=10 is not a multiple of model.block_size=16; nearest: 16"),
        ("model.heads=3 model.kv_heads=2", "model.heads=3 is not a multiple of model.kv_heads=2; nearest: 2, 4"),
        ("model.head_dim=33", "model.head_dim=33 is odd, but RoPE turns pairs; nearest: 32, 34"),
        ("model.mamba.groups=3", "model.mamba.heads=4 is not a multiple of model.mamba.groups=3; nearest: 3, 6"),
        (
            "model.pattern=AXM",
            "model.pattern=AXM must be made of the letters A (attention) and M (Mamba), such as AMMMMM",
        ),
        (
            "model.pattern=''",
            'model.pattern="" must be made of the letters A (attention) and M (Mamba), such as AMMMMM',
        ),
        (
            "model.layers=0 model.block_size=0",
            "model.layers=0 must be at least 1\nmodel.block_size=0 must be at least 1",
        ),
        (
            "training.microbatches=3 mesh.data=2",
            "training.batch_size=16 is not a multiple of training.microbatches * mesh.data * mesh.fsdp = 6; "
            "nearest: 12, 18",
        ),
        (
            "training.batch_size=9 mesh.fsdp=2",
            "training.batch_size=9 is not a multiple of training.microbatches * mesh.fsdp = 2; nearest: 8, 10",
        ),
        ("mesh.fsdp=-1", "mesh.data and mesh.fsdp are both -1; one axis at most can fill"),
        ("mesh.fsdp=0", "mesh.fsdp=0 must be at least 1, or -1 to fill"),
        ("mesh.context=0", "mesh.context=0 must be at least 1, or -1 to fill"),
        ("mesh.context=-1", "mesh.data and mesh.context are both -1; one axis at most can fill"),
        (
            "mesh.context=3",
            "data.sequence_length=256 is not a multiple of mesh.context=3 * model.block_size=16 = 48: shards hold "
            "whole blocks; nearest: 240, 288",
        ),
        (
            "mesh.topology=v5litepod",
            "mesh.topology=v5litepod must be a platform and a shape, such as v5e:16x16 or cpu:8",
        ),
        (
            "objective.mask_rate=[0.9,0.1]",
            "objective.mask_rate=[0.9, 0.1] must be [low, high] with 0 <= low <= high <= 1 and high at least 0.001",
        ),
        (
            "objective.mask_rate=[0.0001,1]",
            "objective.mask_rate[0]=0.0001 is below 0.001, but objective.weighting=elbo weighs by 1/rate; "
            "raise it to 0.001 or set objective.weighting=uniform",
        ),
        (
            "objective.min_one_mask=true",
            "objective.min_one_mask=true makes objective.weighting=elbo no bound; "
            "set min_one_mask=false or weighting=uniform",
        ),
        (
            "objective.autoregressive=0.5",
            "objective.autoregressive=0.5 needs model.prefix=causal, not bidirectional; "
            "set it, or set objective.autoregressive=0",
        ),
        (
            "objective.frontiers=17",
            "objective.frontiers=17 must be all or in 1 .. 16, the blocks in a row "
            "(data.sequence_length=256 / model.block_size=16)",
        ),
        (
            "objective.frontiers=0",
            "objective.frontiers=0 must be all or in 1 .. 16, the blocks in a row "
            "(data.sequence_length=256 / model.block_size=16)",
        ),
        ("training.log_every=0", "training.log_every=0 must be at least 1"),
        ("training.evaluate_every=0", "training.evaluate_every=0 must be at least 1"),
        ("training.checkpoint_every=-1", "training.checkpoint_every=-1 must be at least 1"),
        ("training.watchdog_s=0", "training.watchdog_s=0 must be at least 1"),
        ("training.compile_cache=''", 'training.compile_cache="" must be auto, off or a folder'),
        (
            "training.profile_steps=[4,3]",
            "training.profile_steps=[4, 3] must be [first, last], the steps to trace, with 0 <= first <= last",
        ),
        (
            "training.profile_steps=[-1,3]",
            "training.profile_steps=[-1, 3] must be [first, last], the steps to trace, with 0 <= first <= last",
        ),
        ("training.ema=1", "training.ema=1.0 must be at least 0 and below 1"),
        ("data.tokenizer.vocab_size=7", "data.tokenizer.vocab_size=7 must be at least 8"),
        ("data.held_out=1", "data.held_out=1.0 must be above 0 and below 1"),
        ("data.source=text", "data.source=text needs data.path: the file or folder to read"),
        (
            "data.path=my.txt",
            "data.path=my.txt is not read by data.source=python_stdlib; set data.source to text, jsonl or parquet",
        ),
        ("sampling.top_p=0", "sampling.top_p=0.0 must be above 0 and at most 1"),
        ("sampling.temperature=-1", "sampling.temperature=-1.0 must be at least 0"),
        (
            "optimizer.learning_rate_multipliers.head=-1",
            "optimizer.learning_rate_multipliers.head=-1.0 must be at least 0",
        ),
        ("run.seed=-1", "run.seed=-1 must be in 0 .. 4294967295"),
        ("sampling.blocks=2147483648", "sampling.blocks=2147483648 must be below 2147483648"),
        (
            "objective.mask_rate=[0,1e-12] objective.weighting=uniform",
            "objective.mask_rate=[0.0, 1e-12] must be [low, high] with 0 <= low <= high <= 1 and high at least 0.001",
        ),
        ("run.dir=''", 'run.dir="" must name a folder'),
        (
            "optimizer.warmup_steps=150",
            "optimizer.warmup_steps = 150 must be below training.steps=150; shorten it or set optimizer.schedule_steps",
        ),
        (
            "optimizer.schedule=wsd optimizer.decay_steps=90 optimizer.schedule_steps=100",
            "optimizer.warmup_steps + optimizer.decay_steps = 110 must be below optimizer.schedule_steps=100; "
            "shorten it or set optimizer.schedule_steps",
        ),
        (
            "optimizer.schedule=wsd",
            "optimizer.schedule=wsd needs optimizer.decay_steps: over how many last steps the rate falls",
        ),
        (
            "evaluation.estimator=oracle",
            "evaluation.estimator=oracle scores every mask of a block and needs model.block_size at most 8, not 16; "
            "set evaluation.estimator=count",
        ),
        ("guard.spike_sigma=0", "guard.spike_sigma=0.0 must be above 0"),
        ("checkpoint.init_what=state", "checkpoint.init_what=state needs checkpoint.init_from: the run to start from"),
        (
            "distributed.coordinator=10.0.0.1",
            "distributed.coordinator=10.0.0.1 must be the host and port of process 0, such as 10.0.0.1:12321",
        ),
        (
            "distributed.coordinator=10.0.0.1:70000",
            "distributed.coordinator=10.0.0.1:70000 must be the host and port of process 0, such as 10.0.0.1:12321",
        ),
        ("distributed.heartbeat_timeout_s=0", "distributed.heartbeat_timeout_s=0 must be at least 1"),
        (
            "distributed.coordinator=a:1 distributed.process_id=0",
            "distributed.coordinator and distributed.process_id given without distributed.num_processes; "
            "give all three or none",
        ),
        (
            "distributed.mode=explicit distributed.process_id=0",
            "distributed.mode=explicit needs distributed.coordinator and distributed.num_processes",
        ),
        (
            "distributed.mode=slurm distributed.process_id=0",
            "distributed.process_id not read by distributed.mode=slurm; "
            "set distributed.mode=explicit or leave them out",
        ),
        (
            "distributed.coordinator=[::1]:80 distributed.num_processes=2 distributed.process_id=2",
            "distributed.process_id=2 must be below distributed.num_processes=2: processes are numbered from 0",
        ),
    ],
)
def test_rules(overrides, said):
    assert message(write("run: {seed: 0}"), *overrides.split(" ")) == said


def test_a_nul_character_is_refused():
    assert message(write('run: {dir: "a\\0b"}')) == r"run.dir='a\x00b' holds a NUL character"


@pytest.mark.parametrize(
    "overrides",
    [
        "model.block_size=1 objective.mask_rate=[1,1]",  # autoregressive
        "model.block_size=256 objective.frontiers=1",  # full-sequence masked diffusion
        "objective.weighting=uniform objective.min_one_mask=true objective.mask_rate=[0,1]",
        "model.prefix=causal objective.autoregressive=0.5",
        "optimizer.schedule=constant training.steps=5",
        "optimizer.schedule_steps=150 training.steps=5",
        "mesh.data=1 mesh.fsdp=-1 mesh.topology=v5e:16x16",
        "model.pattern=M model.dtype=float64",
        "data.source=text data.path=x",
        "data.source=jsonl data.corpus=corpora/prepared",
        "training.profile_steps=[3,3] training.compile_cache=off",
    ],
)
def test_what_the_rules_allow(overrides):
    load("run: {seed: 0}", *overrides.split(" "))


# The shipped files


def test_configs_are_found():
    assert {"quickstart", "seed_3b_attention", "seed_3b_mamba", "seed_3b_hybrid"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_file_loads_and_comes_back_from_its_own_yaml(path):
    config = load_config(path)
    assert load_config(write(dump_yaml(config))) == config
    assert path.read_text().startswith("# ") and "diffjax train" in path.read_text().split("\nrun:")[0]


def mutations():
    """Each key of each shipped file with one of its letters changed."""
    for path in CONFIGS:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            for key in re.finditer(r"(?:^|(?<=[{ ,]))\w+(?=:( |$))", line.split("#")[0]):
                at = key.start() + number % len(key.group())
                changed = line[:at] + ("z" if line[at] != "z" else "y") + line[at + 1 :]
                yield path, number, key.group(), "\n".join([*lines[:number], changed, *lines[number + 1 :]])


def test_one_wrong_letter_in_any_key_is_found_and_put_right():
    for path in CONFIGS:
        Path("configs", path.name).write_text(path.read_text())
    checked = set()
    for path, number, key, text in mutations():
        first = message(write(text, f"configs/{path.name}")).splitlines()[0]
        Path("configs", path.name).write_text(path.read_text())
        expected = rf"configs/{path.name}:{number + 1}: unknown key '[\w.]+'; nearest: .*'([\w.]+\.)?{key}'"
        assert re.match(expected, first)
        checked.add((path.stem, key))
    assert ("quickstart", "vocab_size") in checked and ("seed_3b_hybrid", "base") in checked and len(checked) > 80


# Writing, hashing, resuming


def test_round_trip_of_awkward_values():
    config = Config()
    texts = ["no", "on", "1e3", "1e-3", "007", "null", "~", "true", "0o7", "a: b", "# x", "é", "x" * 300, "- a", "1:30"]
    for text in [*texts, "two words " * 40 + "end", "tab\there", "line\nbreak", " edge "]:
        changed = dataclasses.replace(config, run=dataclasses.replace(config.run, id=text))
        assert load_config(write(dump_yaml(changed))) == changed
    for number in [1e-3, 1e16, 1e-300, 3.0, 0.1 + 0.2]:
        changed = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=number))
        assert load_config(write(dump_yaml(changed))) == changed


def test_to_dict_is_plain_json():
    tree = to_dict(Config())
    assert json.loads(json.dumps(tree)) == tree
    assert tree["model"]["mamba"]["conv"] == 4 and tree["objective"]["mask_rate"] == [1e-3, 1.0]


def test_hash_changes_with_every_key_and_only_then():
    base = Config()
    assert config_hash(base) == config_hash(Config()) and re.fullmatch("[0-9a-f]{64}", config_hash(base))
    assert config_hash(base) != config_hash(dataclasses.replace(base, run=dataclasses.replace(base.run, seed=1)))
    assert config_hash(load("optimizer: {learning_rate: 1}")) == config_hash(load("optimizer: {learning_rate: 1.0}"))


def test_configs_cannot_be_changed_and_are_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().run.seed = 1
    assert len({Config(), Config()}) == 1


def test_every_field_says_what_a_resume_may_do_with_it():
    leaves = leaf_fields(Config)
    assert leaves.keys() == flatten(to_dict(Config())).keys()
    missing = [name for name, field in leaves.items() if field.metadata.get("resume") not in ("free", "warn", "refuse")]
    assert missing == []


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        *((key, "free") for key in ["training.log_every", "tracking.wandb", "checkpoint.keep_last", "mesh.fsdp"]),
        *((key, "free") for key in ["training.microbatches", "model.remat", "data.corpus", "data.path", "run.dir"]),
        *((key, "free") for key in ["distributed.mode", "distributed.process_id", "distributed.init_timeout_s"]),
        *((key, "warn") for key in ["optimizer.learning_rate", "optimizer.schedule", "training.steps"]),
        *((key, "warn") for key in ["optimizer.weight_decay", "optimizer.clip_norm", "guard.spike_sigma"]),
        *((key, "refuse") for key in ["model.pattern", "model.prefix", "model.block_size", "data.sequence_length"]),
        *((key, "refuse") for key in ["data.tokenizer.vocab_size", "objective.mask_rate", "run.seed", "data.packing"]),
        *((key, "refuse") for key in ["training.batch_size", "model.dtype", "data.source"]),
    ],
)
def test_resume_classes(key, kind):
    assert leaf_fields(Config)[key].metadata["resume"] == kind


def test_resume_diff():
    old = json.loads(json.dumps(to_dict(load())))
    assert resume_diff(old, load()) == ([], [], [])
    new = load("run: {}", "training.log_every=5", "optimizer.learning_rate=0.5", "model.block_size=32")
    assert resume_diff(old, new) == (
        [("training.log_every", 10, 5)],
        [("optimizer.learning_rate", 1e-3, 0.5)],
        [("model.block_size", 16, 32)],
    )


def test_resume_diff_of_a_config_from_another_version():
    old = to_dict(Config())
    del old["model"]["qk_norm"], old["guard"]
    old["optimizer"]["nesterov"] = True
    assert resume_diff(old, Config()) == ([], [("optimizer.nesterov", True, None)], [])
    changed = dataclasses.replace(Config(), model=dataclasses.replace(Config().model, qk_norm=True))
    assert resume_diff(old, changed)[2] == [("model.qk_norm", False, True)]


def test_every_number_has_a_range():
    ranged = {name for _, _, names in _RANGES for name in names.split()}
    numbers = {
        name for name, field in leaf_fields(Config).items() if field.type in (int, float, int | None, float | None)
    }
    assert numbers - ranged == set()
    assert ranged <= leaf_fields(Config).keys()


def test_defaults_obey_the_rules():
    validate(Config())


def test_edit_distance_against_the_textbook_recursion():
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    words = ["", "a", "steps", "step", "spets", "conv", "heads"]
    assert all(edit_distance(a, b) == slow(a, b) for a in words for b in words)
