"""Numbers of a run: strict JSON lines, cut on resume, and trackers that cannot hurt the run."""

import io
import json
import math
import sys
import types
import warnings

import pytest

from diffjax.training.tracking import Progress, Trackers, cut_records, duration, read_metric

from .toy import make_config, records


def test_one_strict_json_object_a_record(tmp_path):
    trackers = Trackers(make_config(tmp_path), tmp_path, "id")
    trackers.log(0, {"train/loss": 2.5, "train/rejected": 1})
    trackers.log(1, {"train/loss": math.nan, "limit": math.inf})
    got = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").open()]  # flushed
    trackers.close()
    assert [(r["step"], r["name"], r["value"]) for r in got] == [
        (0, "train/loss", 2.5),
        (0, "train/rejected", 1),
        (1, "train/loss", "NaN"),
        (1, "limit", "Infinity"),
    ]
    assert all(set(r) == {"step", "name", "value", "time"} for r in got)
    loss = read_metric(tmp_path, "train/loss")
    assert loss[0] == (0, 2.5) and math.isnan(loss[1][1])


def test_resume_cuts_what_is_run_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": s, "name": "x", "value": s}) + "\n" for s in (0, 1, 2, 3)]
    path.write_bytes("".join(lines).encode() + b'{"step": 3, "na')
    cut_records(path, 2)
    assert [r["step"] for r in records(path)] == [0, 1]
    old = (tmp_path / "metrics.old.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in old[:2]] == [2, 3] and old[2] == '{"step": 3, "na'
    before = path.read_bytes()
    cut_records(path, 2)
    assert path.read_bytes() == before
    cut_records(tmp_path / "nothing.jsonl", 0)
    path.write_bytes(before + b'{"step": 0}\n\xff\xfe partial')  # no record, no text
    cut_records(path, 2)
    assert path.read_bytes() == before


class FakeRun:
    def __init__(self, fails):
        self.logged, self.fails, self.finished = [], fails, False

    def log(self, values, step):
        if self.fails:
            raise OSError("no network")
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def fake_wandb(monkeypatch, run, asked):
    module = types.ModuleType("wandb")
    module.init = lambda **keywords: asked.update(keywords) or run
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_wandb_gets_the_runs_own_id(tmp_path, monkeypatch):
    run, asked = FakeRun(False), {}
    fake_wandb(monkeypatch, run, asked)
    config = make_config(tmp_path, tracking__wandb=True, tracking__mode="offline")
    trackers = Trackers(config, tmp_path, "my-id")
    trackers.log(3, {"train/loss": 1.0})
    trackers.close()
    assert run.logged == [(3, {"train/loss": 1.0})] and run.finished
    assert (asked["id"], asked["mode"], asked["resume"]) == ("my-id", "offline", "allow")


def test_a_failing_tracker_warns_once_and_the_others_go_on(tmp_path, monkeypatch):
    fake_wandb(monkeypatch, FakeRun(True), {})
    trackers = Trackers(make_config(tmp_path, tracking__wandb=True), tmp_path, "id")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            trackers.log(step, {"train/loss": 1.0})
        trackers.close()
    assert [str(w.message) for w in caught] == ["wandb failed and is left out from here on: no network"]
    assert len(records(tmp_path / "metrics.jsonl")) == 3


def test_a_tracker_that_cannot_start_does_not_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    with pytest.warns(RuntimeWarning, match="wandb failed"):
        Trackers(make_config(tmp_path, tracking__wandb=True), tmp_path, "id").log(0, {"a": 1.0})
    assert len(records(tmp_path / "metrics.jsonl")) == 1


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    trackers = Trackers(make_config(tmp_path, tracking__wandb=True), tmp_path, "id")
    trackers.log(0, {"a": 1.0})
    trackers.close()
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    progress.step(1, 1.0, 1.0, logged=True)
    progress.say("hello")
    progress.close()
    assert list(tmp_path.iterdir()) == [] and stream.getvalue() == ""


def test_plain_lines_off_a_terminal():
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    progress.held_out(0, 7.5)
    progress.step(1, 3.25, 1234.0, logged=True)
    progress.step(2, 3.0, 1234.0, logged=False)
    progress.close()
    first, second = stream.getvalue().splitlines()
    assert first == "step 0/10  held-out NELBO <= 7.5000 nats/token"
    assert second.startswith("step 1/10  loss 3.250  held-out NELBO <= 7.500  1,234 tokens/s  ETA ")


def test_live_line_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(10, 2, stream=stream)
    progress.step(3, 3.25, 1234.0, logged=False)
    progress.say("[bold]as it stands[/bold]")
    progress.close()
    assert "[bold]as it stands[/bold]" in stream.getvalue()


def test_duration():
    assert [duration(s) for s in (5, 65.4, 3661)] == ["0:05", "1:05", "1:01:01"]
