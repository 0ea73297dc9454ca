"""Whole runs on a tiny corpus: killed, stopped and resumed in real processes; loaded, evaluated and sampled from."""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from diffjax.config import config_hash, load_config, to_dict
from diffjax.errors import UserError
from diffjax.run import evaluate, load_run, sample, train
from diffjax.training.checkpoint import Checkpoints
from tests.training.toy import losses, records

pytestmark = pytest.mark.xdist_group("run")  # one worker, so that module fixtures are made once

CONFIG = """
run: {{dir: {folder}/run, seed: 0}}
model: {{pattern: A, layers: 2, width: 32, block_size: 4, heads: 2, kv_heads: 2, head_dim: 16, mlp_width: 64}}
data: {{source: text, path: {folder}/text.txt, corpus: {folder}/corpus, documents: blank_line, held_out: 0.1,
       sequence_length: 32, tokenizer: {{vocab_size: 320}}}}
optimizer: {{learning_rate: 1.0e-2, warmup_steps: 2}}
training: {{steps: 8, batch_size: 8, log_every: 1, checkpoint_every: 4, evaluate_every: 8, ema: 0.5}}
evaluation: {{rows: 8, batch_size: 8}}
sampling: {{blocks: 2}}
"""

# The command line, with a signal to itself when it reads the rows of a step. Ends by saying what it compiled anew.
SIGNALLED = """
import atexit, os, sys
from jax import monitoring
from diffjax.data.loader import TrainLoader
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
atexit.register(lambda: print("cache misses", events.count("cache_misses"), "hits", events.count("cache_hits")))
step, number = int(sys.argv[1]), int(sys.argv[2])
real = TrainLoader.rows
def rows(self, asked, numbers):
    if asked == step:
        os.kill(os.getpid(), number)
    return real(self, asked, numbers)
TrainLoader.rows = rows
from diffjax.cli import main
sys.exit(main(sys.argv[3:]))
"""

# The command line, with SIGTERM to itself when the corpus is about to be written.
STOPPED_EARLY = """
import os, signal, sys
import diffjax.data.prepare as module
real = module._write_corpus
def write(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return real(*arguments)
module._write_corpus = write
from diffjax.cli import main
sys.exit(main(sys.argv[1:]))
"""

# The command line on a storage that takes every array and never answers.
STUCK = """
import sys, time
from diffjax.training import checkpoint
from orbax.checkpoint._src.serialization import serialization
async def never(*arguments, **keywords):
    time.sleep(3600)
serialization.async_serialize_from_host = never
checkpoint.SAVE_TIMEOUT_S = 1
from diffjax.cli import main
sys.exit(main())
"""

# A stand-in for Weights & Biases that writes down which run it is asked for.
FAKE_WANDB = """
import json, os
def init(**keywords):
    with open(os.environ["WANDB_ASKED"], "a") as file:
        file.write(json.dumps({key: keywords[key] for key in ("id", "resume")}) + chr(10))
    return Run()
class Run:
    id = "chosen by the tracker"
    def log(self, values, step): pass
    def finish(self): pass
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    draws = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    texts = [" ".join(draws.choices(words, k=draws.randrange(5, 40))) + "." for _ in range(300)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder))
    return folder


def start(home, *arguments, step=-1, number=0, script=SIGNALLED, **variables):
    """Run the command line in a process of its own: (exit code, output)."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "XDG_CACHE_HOME": str(home / "cache"),
        **variables,
    }
    signalled = [str(step), str(int(number))] if script is SIGNALLED else []
    command = [sys.executable, "-c", script, *signalled, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, cwd=Path(__file__).parents[1]
    )
    return done.returncode, done.stdout + done.stderr


def leaves(run_dir, step):
    """Path -> digest of every leaf of a checkpoint, and where it stands in the data."""
    store = Checkpoints(run_dir / "checkpoints")
    assert step in store.complete_steps()
    meta = store.read_meta(step)
    return {path: leaf["digest"] for path, leaf in meta["leaves"].items()}, meta["tokens_seen"]


@pytest.fixture(scope="module")
def finished(home):
    code, output = start(home, "train", home / "tiny.yaml")
    assert code == 0, output
    return home / "run", output


@pytest.mark.multiprocess
def test_a_whole_run(home, finished):
    run_dir, output = finished
    names = {path.name for path in run_dir.iterdir()}
    want = {"config.yaml", "metrics.jsonl", "checkpoints", "samples", "summary.json", "tokenizer.model"}
    assert want <= names
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["step"] == 8
    assert summary["last_nelbo_nats_per_token"] < summary["first_nelbo_nats_per_token"]
    assert summary["unigram_nats_per_token"] == pytest.approx(2.7, abs=0.5)
    for number in ("unigram", "first_nelbo", "last_nelbo"):
        assert f"{summary[number + '_nats_per_token']:.4f}" in output
    assert f"diffjax sample {run_dir}" in output
    assert f"diffjax train {home / 'tiny.yaml'} training.steps=16" in output
    assert load_config(run_dir / "config.yaml").run.id == summary["run_id"]
    assert (run_dir / "samples" / "step_000008.txt").read_text().count("--------") == 2


@pytest.mark.multiprocess
def test_the_summary_of_a_run(home, finished):
    run_dir, _ = finished
    summary = json.loads((run_dir / "summary.json").read_text())
    config = load_config(run_dir / "config.yaml")
    assert (summary["ended"], summary["config"]) == ("finished", to_dict(config))
    assert summary["config_hash"] == config_hash(config)
    assert summary["command"] == f"diffjax train {home / 'tiny.yaml'}"
    assert summary["versions"]["jax"] == jax.__version__ and summary["versions"]["python"] in sys.version
    hardware = {"host": os.uname().nodename, "platform": "cpu", "device": "cpu", "devices": 1, "processes": 1}
    assert hardware.items() <= summary["hardware"].items() and summary["hardware"]["mesh"]["data"] == 1
    assert [name for name, why in summary["kernels"].items() if name.startswith("attention") and why.startswith("xla")]
    assert summary["peak_memory_bytes"] > 2**20 and summary["peak_device_bytes"] is None
    assert summary["parameters"] == sum(x.size for x in jax.tree.leaves(load_run(run_dir).params))
    numbers = {r["step"]: r["value"] for r in records(run_dir / "metrics.jsonl") if "eval/nelbo" in r["name"]}
    assert summary["best_nelbo_nats_per_token"] == min(numbers.values()) == numbers[summary["best_nelbo_step"]]
    assert summary["last_loss"] == losses(run_dir)[7] and summary["tokens_per_second"] > 0
    assert summary["tokens_seen"] == leaves(run_dir, 8)[1]


@pytest.mark.multiprocess
def test_a_second_process_compiles_nothing(home, finished):
    _, output = finished
    assert int(re.search(r"cache misses (\d+)", output)[1]) > 10
    code, output = start(home, "train", home / "tiny.yaml", f"run.dir={home / 'again'}")
    assert code == 0 and re.search(r"cache misses 0 hits \d\d", output), output
    assert leaves(home / "again", 8) == leaves(finished[0], 8)  # and it computes the same


@pytest.mark.multiprocess
def test_a_run_that_the_guard_stops_says_so(home):
    run_dir = home / "stuck"
    wild = ["optimizer.learning_rate=1e38", "guard.max_consecutive=2", f"run.dir={run_dir}"]
    code, output = start(home, "train", home / "tiny.yaml", *wild)
    assert code == 4 and "2 steps in a row were rejected" in output, output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["ended"] == "guard stop"
    assert summary["step"] == Checkpoints(run_dir / "checkpoints").complete_steps()[-1]


@pytest.mark.multiprocess
def test_a_save_that_never_ends_does_not_keep_the_process(home, finished):
    arguments = ("train", "--json", home / "tiny.yaml", f"run.dir={home / 'hung'}")
    code, output = start(home, *arguments, script=STUCK, GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    told = f"{home / 'hung' / 'checkpoints' / '4'} could not be written, there is none before it: it took more than 1 s"
    assert code == 2 and told in output and "Traceback" not in output, output
    assert '"exit_code": 2}' in output


@pytest.mark.multiprocess
@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_stopped_while_preparing(home, tmp_path, verb):
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=home))
    places = [f"run.dir={tmp_path / 'run'}", f"data.corpus={tmp_path / 'corpus'}"]
    code, output = start(home, verb, tmp_path / "tiny.yaml", *places, script=STOPPED_EARLY)
    assert code == 75 and "SIGTERM: stopped" in output and "Traceback" not in output, output
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"tiny.yaml", "tokenizers", "tokenised", ".lock"}  # what the next start goes on from
    code, output = start(home, "prepare", tmp_path / "tiny.yaml", *places)
    assert code == 0 and (tmp_path / "corpus" / "manifest.json").is_file(), output


@pytest.mark.multiprocess
def test_a_refusal_while_compiling_leaves_no_folder_and_changes_no_file(home, finished, tmp_path):
    refused = "kernels.attention=pallas_tpu"
    for place in (tmp_path / "new", tmp_path / "made"):
        with pytest.raises(UserError, match="pallas_tpu"):
            train(load_config(home / "tiny.yaml", [refused, f"run.dir={place}"]))
        (tmp_path / "made").mkdir(exist_ok=True)  # by the user
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    run_dir, _ = finished
    files = [path for path in run_dir.iterdir() if path.is_file() and path.name not in (".lock", "last_exit.json")]
    before = [path.read_bytes() for path in files]
    with pytest.raises(UserError, match="pallas_tpu"):
        train(load_config(home / "tiny.yaml", [refused, "training.steps=9"]))
    assert [path.read_bytes() for path in files] == before


@pytest.mark.multiprocess
def test_killed_and_resumed_is_bit_equal(home, finished):
    """kill -9 at step 6, while the checkpoint of step 4 may still be on its way to the disk."""
    run_dir = home / "killed"
    arguments = ("train", home / "tiny.yaml", f"run.dir={run_dir}")
    code, output = start(home, *arguments, step=6, number=signal.SIGKILL)
    assert code == -signal.SIGKILL, output
    code, output = start(home, *arguments)
    assert code == 0, output
    assert leaves(run_dir, 8) == leaves(finished[0], 8)
    assert losses(run_dir) == losses(finished[0]) and sorted(losses(run_dir)) == list(range(8))
    assert leaves(run_dir, 8) != leaves(finished[0], 4)


@pytest.mark.multiprocess
def test_stopped_and_resumed_is_bit_equal(home, finished):
    run_dir = home / "stopped"
    (home / "fake").mkdir()
    (home / "fake" / "wandb.py").write_text(FAKE_WANDB)
    paths = f"{home / 'fake'}:{os.environ.get('PYTHONPATH', '')}"
    fake = {"PYTHONPATH": paths, "WANDB_ASKED": str(home / "asked.jsonl")}
    arguments = ("train", home / "tiny.yaml", f"run.dir={run_dir}", "tracking.wandb=true")
    code, output = start(home, *arguments, step=4, number=signal.SIGTERM, **fake)
    assert code == 75 and "SIGTERM: stopped at step 5 of 8" in output, output
    assert f"diffjax train {home / 'tiny.yaml'} run.dir={run_dir}" in output
    first = json.loads((run_dir / "summary.json").read_text())
    assert (first["ended"], first["step"], first["tokens_seen"]) == ("preempted", 5, leaves(run_dir, 5)[1])
    (run_dir / "config.yaml").unlink()  # the checkpoint knows the id as well
    code, output = start(home, *arguments, **fake)
    assert code == 0 and "starting at step 5 of 8" in output, output
    assert leaves(run_dir, 8) == leaves(finished[0], 8)
    assert losses(run_dir) == losses(finished[0])
    assert records(home / "asked.jsonl") == [{"id": first["run_id"], "resume": "allow"}] * 2  # never the tracker's own
    last = json.loads((run_dir / "summary.json").read_text())
    assert (last["ended"], last["step"], last["run_id"]) == ("finished", 8, first["run_id"])


@pytest.mark.multiprocess
def test_a_run_in_use_is_refused(finished, home):
    run_dir, _ = finished
    with open(run_dir / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is in use by another training process"):
            train(load_config(home / "tiny.yaml", ["training.steps=9"]))


@pytest.mark.multiprocess
def test_a_finished_run_says_so_and_another_config_is_refused(home, finished, capsys):
    run_dir, _ = finished
    before = (run_dir / "metrics.jsonl").read_bytes()
    result = train(load_config(home / "tiny.yaml"))
    assert (result.step, result.exit_code) == (8, 0)
    assert "already at step 8 of 8" in capsys.readouterr().out
    summary = (run_dir / "summary.json").read_text()
    assert result.summary == json.loads(summary)
    (run_dir / "summary.json").write_text(summary[:9])
    assert train(load_config(home / "tiny.yaml")).summary == {}  # damaged: the run itself is whole
    (run_dir / "summary.json").write_text(summary)
    with pytest.raises(UserError, match=r"belongs to another run: model\.width: 32 -> 64"):
        train(load_config(home / "tiny.yaml", ["model.width=64", "training.steps=9"]))
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.multiprocess
def test_other_text_is_refused_and_a_refusal_changes_no_file(home, finished, tmp_path):
    run_dir, _ = finished
    before = {name: (run_dir / name).read_bytes() for name in ("tokenizer.model", "config.yaml", "metrics.jsonl")}
    text = (home / "text.txt").read_text(encoding="utf-8")
    (tmp_path / "other.txt").write_text(text.replace("alpha", "omega"), encoding="utf-8")
    moved = [f"data.path={tmp_path / 'other.txt'}", f"data.corpus={tmp_path / 'corpus'}", "training.steps=9"]
    with pytest.raises(UserError, match=r"belongs to another run: corpus: .*tokenizer: "):
        train(load_config(home / "tiny.yaml", moved))
    assert before == {name: (run_dir / name).read_bytes() for name in before}


@pytest.mark.multiprocess
def test_evaluate_prepares_nothing_in_the_place_of_a_missing_corpus(finished):
    run_dir, _ = finished
    run = load_run(run_dir)
    gone = run_dir.parent / "gone"
    with pytest.raises(UserError, match=r"gone: the corpus that .* was trained on is not there"):
        evaluate(dataclasses.replace(run, meta={**run.meta, "corpus_folder": str(gone)}))
    assert not gone.exists()


@pytest.mark.parametrize("where", ["file", "file/inside", "x" * 300])
def test_a_place_that_can_hold_no_run_is_refused(home, finished, tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run.dir=.* cannot be a run folder"):
        train(load_config(home / "tiny.yaml", [f"run.dir={tmp_path / where}"]))


@pytest.mark.multiprocess
def test_loaded_evaluated_and_sampled(finished):
    run_dir, _ = finished
    for key, old, new in (("model.prefix", "bidirectional", "causal"), ("model.block_size", 4, 8),
                          ("data.tail", "mask_fill", "eos_fill")):  # fmt: skip
        with pytest.raises(UserError, match=f"its weights mean something else: {key}: {old} -> {new}"):  # T9
            load_run(run_dir, [f"{key}={new}"])
    run = load_run(run_dir)
    assert run.step == 8 and run.denoiser.vocab_size == run.tokenizer.vocab_size
    store = Checkpoints(run_dir / "checkpoints")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), run.params)
    state = store.restore({"ema": like, "params": like}).state
    np.testing.assert_array_equal(run.params["embed"]["table"], state["ema"]["embed"]["table"])
    assert not np.array_equal(state["params"]["embed"]["table"], state["ema"]["embed"]["table"])

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        record = evaluate(run)
    last = [r["value"] for r in records(run_dir / "metrics.jsonl") if r["name"] == "eval/nelbo_nats_per_token"][-1]
    assert record["eval/nelbo_nats_per_token"] == pytest.approx(last, rel=1e-5)
    assert f"NELBO <= {last:.3f}"[:-1] in output.getvalue() and "bits/byte" in output.getvalue()

    (generation,) = sample(run, ["alpha be"], blocks=2)
    again, _ = sample(run, ["alpha be", "gamma"], blocks=2)
    assert generation.text == again.text and 0 < len(generation.tokens) <= 8


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        load_run(tmp_path)
