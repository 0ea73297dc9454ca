"""Traces of given steps: where they lie, when the devices are waited for, and runs that begin or end inside."""

import jax
import pytest

from diffjax.training.profile import Profile


@pytest.fixture
def profiler(monkeypatch):
    """Stands in for JAX's profiler and notes what is asked of it; `waits` are the states that were waited for."""
    calls, waits = [], []

    def stop():
        calls.append("stop")
        (folder / "trace").write_bytes(b"x" * 2**20)

    def start(path):
        nonlocal folder
        folder = path
        folder.mkdir()
        calls.append("start")

    folder = None
    monkeypatch.setattr("jax.profiler.start_trace", start)
    monkeypatch.setattr("jax.profiler.stop_trace", stop)
    monkeypatch.setattr("jax.block_until_ready", waits.append)
    return calls, waits


def walk(profile, steps, calls):
    """The loop's calls; the state before step s is s. Returns the steps that were traced."""
    traced = []
    for step in steps:
        profile.before(step, step)
        if calls.count("start") > calls.count("stop"):
            traced.append(step)
        profile.after(step, step + 1)
    profile.close(steps[-1])
    return traced


@pytest.mark.parametrize(
    "asked, steps, traced, waits",
    [
        ((2, 4), range(8), [2, 3, 4], [2, 5]),
        ((3, 3), range(8), [3], [3, 4]),
        ((2, 5), range(4, 8), [4, 5], [4, 6]),  # resumed inside
        ((2, 4), range(5, 8), [], []),  # resumed behind
        ((9, 12), range(8), [], []),
        ((6, 9), range(8), [6, 7], [6]),  # the run ends inside
        (None, range(8), [], []),
    ],
)
def test_traced_steps(profiler, tmp_path, asked, steps, traced, waits):
    calls, waited = profiler
    said = []
    assert walk(Profile(asked, tmp_path, said.append), steps, calls) == traced
    assert waited == waits
    assert calls == ["start", "stop"] * bool(traced)
    folder = tmp_path / "profile"
    assert said == [f"steps {traced[0]} to {traced[-1]} are traced in {folder} (1.0 MiB)" for _ in traced[:1]]


def test_one_process_traces(profiler, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert walk(Profile((2, 4), tmp_path, print), range(8), profiler[0]) == []


def test_a_true_trace_holds_the_steps_program(tmp_path):
    step = jax.jit(lambda x: x + 1)
    profile, x = Profile((1, 2), tmp_path, print), jax.numpy.zeros(3)
    for number in range(4):
        profile.before(number, x)
        x = step(x)
        profile.after(number, x)
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert b"PjitFunction" in trace.read_bytes()
