"""Two real processes of two CPU devices each: the same curve as one process; stopped, killed and resumed together."""

import json
import os
import random
import signal

import numpy as np
import pytest

from diffjax.training.checkpoint import Checkpoints
from tests.parallel.pairs import Process, ranks, running, train
from tests.training.toy import by_step

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("pairs")]  # one worker: fixtures are made once

CONFIG = """
run: {{dir: {folder}/unnamed, seed: 0}}
model: {{pattern: A, layers: 2, width: 32, block_size: 4, heads: 2, kv_heads: 2, head_dim: 16, mlp_width: 64}}
data: {{source: text, path: {folder}/text.txt, corpus: {folder}/corpus, documents: blank_line, held_out: 0.2,
       sequence_length: 32, tokenizer: {{vocab_size: 320}}}}
optimizer: {{learning_rate: 1.0e-2, warmup_steps: 2}}
training: {{steps: 8, batch_size: 8, log_every: 1, checkpoint_every: 100, evaluate_every: 4, ema: 0.5}}
mesh: {{data: 2, fsdp: 2}}
evaluation: {{rows: 40, batch_size: 4}}
sampling: {{blocks: 2}}
"""
BITS = ("train/row_bits", "train/mask_bits", "train/rate_bits", "train/masked_tokens", "train/tokens_seen")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    draws = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    texts = [" ".join(draws.choices(words, k=draws.randrange(5, 40))) + "." for _ in range(300)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder))
    return folder


def last_exit(run_dir):
    return json.loads((run_dir / "last_exit.json").read_text())


@pytest.fixture(scope="module")
def straight(home):
    """Eight steps of two processes without a stop."""
    run_dir = home / "straight"
    results = train(home, "straight", 2, f"run.dir={run_dir}")
    assert [code for code, _ in results] == [0, 0], results
    return run_dir, results


def test_two_processes_train_like_one(home, straight):
    run_dir, ((_, first), (_, second)) = straight
    alone = home / "alone"
    ((code, output),) = train(home, "alone", 1, f"run.dir={alone}")
    assert code == 0, output
    for name in ("train/loss", "train/grad_norm", "eval/nelbo_nats_per_token"):
        got, want = by_step(run_dir, name), by_step(alone, name)
        assert got.keys() == want.keys() and len(got) > 2
        np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-5, err_msg=name)
    for name in BITS:
        assert by_step(run_dir, name) == by_step(alone, name)
    assert len(set(by_step(run_dir, "train/mask_bits").values())) == 8  # a fingerprint that can differ

    assert "as process 0 of 2 (mode explicit, timeout 10 s)\njoined: 0 (" in first
    assert "step 8/8" in first and "step 8/8" not in second
    spoken = [line for line in second.splitlines() if not line.startswith("[Gloo]")]
    assert spoken and all(line.startswith("[rank 1/2] ") for line in spoken)
    assert "one process: no coordinator is configured" in output
    assert last_exit(run_dir) == {"attempt": 1, "code": 0, "step": 8}
    assert len(list((run_dir / "samples").iterdir())) == 1


def test_stopped_and_resumed_with_two_one_and_two_processes(home, straight):
    """SIGTERM to one of two inside a slow evaluation, to one alone, to the other of two between steps; then the end."""
    run_dir = home / "stopped"
    place = f"run.dir={run_dir}"
    results = train(home, "in_evaluation", 2, place, hooks={
        "slow_evaluation": [1, 0.5], "signal": {"rank": 1, "at": ["evaluation", 1], "number": signal.SIGTERM}
    })  # fmt: skip
    assert [code for code, _ in results] == [75, 75], results
    assert all("SIGTERM: stopped at step 4 of 8; the state is saved" in output for _, output in results)
    assert list(by_step(run_dir, "eval/nelbo_nats_per_token")) == [0]  # the evaluation that was cut is not logged
    assert last_exit(run_dir) == {"attempt": 1, "code": 75, "step": 4}
    assert Checkpoints(run_dir / "checkpoints").complete_steps() == [4]

    hooks = {"signal": {"rank": 0, "at": ["rows", 4], "number": signal.SIGTERM}}
    ((code, output),) = train(home, "alone_again", 1, place, hooks=hooks)
    assert code == 75 and f"starting at step 4 of 8 from {run_dir}/checkpoints/4" in output, output  # digests compared
    assert last_exit(run_dir) == {"attempt": 2, "code": 75, "step": 5}

    hooks = {"slow_rows": 0.7, "signal": {"rank": 0, "at": ["rows", 5], "number": signal.SIGTERM}}
    results = train(home, "between_steps", 2, place, hooks=hooks)
    assert [code for code, _ in results] == [75, 75], results
    step = last_exit(run_dir)["step"]
    assert 5 < step < 8 and last_exit(run_dir) == {"attempt": 3, "code": 75, "step": step}
    assert all(f"stopped at step {step} of 8; the state is saved" in output for _, output in results)
    assert Checkpoints(run_dir / "checkpoints").complete_steps()[-1] == step

    results = train(home, "to_the_end", 2, place)
    assert [code for code, _ in results] == [0, 0], results
    assert f"starting at step {step} of 8" in results[0][1]
    for name in BITS:
        assert by_step(run_dir, name) == by_step(straight[0], name)
    got, want = by_step(run_dir, "train/loss"), by_step(straight[0], "train/loss")
    assert [got[s] for s in range(4)] == [want[s] for s in range(4)]  # the same layout: the same bits
    np.testing.assert_allclose([got[s] for s in range(8)], [want[s] for s in range(8)], rtol=1e-5)
    stored = [meta["tokens_seen"] for meta in map(Checkpoints(run_dir / "checkpoints").read_meta, (step, 8))]
    assert stored[0] == by_step(run_dir, "train/tokens_seen")[step - 1]


def test_errors_of_one_end_all(home):
    """A config that differs, and a corpus that cannot be made: both processes say so and exit 2."""
    results = train(home, "differs", 2, f"run.dir={home}/differs", own=([], ["training.batch_size=16"]))
    assert [code for code, _ in results] == [2, 2], results
    for _, output in results:
        assert "rank 1: training.batch_size=16, but 8 on rank 0. All processes" in output and "Traceback" not in output
    assert not (home / "differs").exists()

    nowhere = [f"run.dir={home}/empty", f"data.path={home}/none.txt", f"data.corpus={home}/none"]
    results = train(home, "no_text", 2, *nowhere)
    assert [code for code, _ in results] == [2, 2], results
    assert all("none.txt" in output and "Traceback" not in output for _, output in results)
    assert last_exit(home / "empty") == {"attempt": 1, "code": 2, "step": None}


def test_a_killed_process_ends_the_other(home):
    """Killed between steps, where no collective notices: the other is ended, and its last line says who had joined."""

    def start(victim, rank, place):
        hooks = json.dumps({"rank": rank, "slow_rows": 60})
        arguments = [hooks, "train", home / "tiny.yaml", *place, f"run.dir={home}/killed_{victim}"]
        log = home / f"killed_{victim}.{rank}.log"
        return Process(log, "tests.parallel.hooked", arguments, 2, home / "compile_cache")

    pairs = [[start(victim, rank, place) for rank, place in enumerate(ranks(2))] for victim in (0, 1)]
    with running(*pairs[0], *pairs[1]):
        for victim, pair in enumerate(pairs):
            pair[0].wait_for("step 0/8", 100)
            pair[victim].popen.send_signal(signal.SIGKILL)
        for victim, pair in enumerate(pairs):
            other, host = pair[1 - victim], os.uname().nodename
            assert other.wait(60) not in (0, 75), other.output
            assert other.last_line.startswith(f"[rank {1 - victim}/2] ended without a report"), other.output
            assert other.last_line.endswith(f"joined: 0 ({host}), 1 ({host})"), other.output


def test_a_failing_process_ends_the_other(home):
    """One raises between two steps, alone, with a save on its way: its own code is 1, and the other does not hang."""
    hooks = {"signal": {"rank": 1, "at": ["rows", 3], "number": 0}}
    place = [f"run.dir={home}/failed", "training.checkpoint_every=3"]
    (first, _), (second, output) = train(home, "failed", 2, *place, hooks=hooks, seconds=100)
    assert second == 1 and "OSError: this disk is gone" in output and first not in (0, 75)
    assert "[rank 1/2] left with exit code 1 before the others; joined: 0 (" in output


def test_a_coordinator_that_is_not_there(home):
    _, place = ranks(2)
    lonely = Process(
        home / "lonely.log", "diffjax",
        ["train", home / "tiny.yaml", *place[:-3], "distributed.init_timeout_s=1"], 2, home / "compile_cache",
    )  # fmt: skip
    with running(lonely):
        assert lonely.wait(60) == 2
    address = place[0].partition("=")[2]
    assert f"[rank 1/2] coordinator {address} not reachable within 1 s" in lonely.output
