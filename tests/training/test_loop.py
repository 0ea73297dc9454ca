"""The loop on a toy model: exact resume, being stopped, giving up, and what a run folder holds."""

import dataclasses
import errno
import os
import resource
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.errors import GuardStop, Preempted, UserError
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.loop import fit

from .toy import ToyDenoiser, assert_same, by_step, losses, make_config, make_job, make_objective, read_rows, records

pytestmark = pytest.mark.xdist_group("loop")  # one worker, so that module fixtures are made once


def stop_at(step, number=signal.SIGTERM):
    """A job's row reader that signals this very process when it reads the rows of `step` for the first time."""
    sent = []

    def read(asked, numbers):
        if asked == step and not sent:
            sent.append(asked)
            os.kill(os.getpid(), number)
        return read_rows(asked, numbers)

    return read


def evaluate(params, should_stop):
    return {"eval/nelbo_nats_per_token": float(jnp.sum(params["norm"]["scale"])), "bound": "<=", "mc_se": 0.25}


def host(state):
    return jax.tree.map(np.asarray, state)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Eight steps without a stop: (folder, final state)."""
    folder = tmp_path_factory.mktemp("straight")
    outcome = fit(make_job(make_config(folder, training__ema=0.9), evaluate=evaluate))
    assert outcome.step == 8
    return folder, host(outcome.state), outcome.tokens_seen


def test_metrics_of_a_run(straight):
    folder, _, tokens = straight
    rows = records(folder / "metrics.jsonl")
    assert sorted(losses(folder)) == list(range(8))
    held_out = [r for r in rows if r["name"] == "eval/nelbo_nats_per_token"]
    assert [r["step"] for r in held_out] == [0, 4, 8]
    assert {r["name"] for r in rows if r["step"] == 8} == {"eval/nelbo_nats_per_token", "eval/mc_se"}
    assert [r["value"] for r in rows if r["name"] == "train/tokens_seen"][-1] == tokens
    assert tokens == sum(int(read_rows(s, np.arange(8)).valid.sum()) for s in range(8))
    rates = [r["value"] for r in rows if r["name"] == "train/learning_rate"]
    np.testing.assert_allclose(rates[:3], [5e-3, 1e-2, 1e-2], rtol=1e-5)
    meta = Checkpoints(folder / "checkpoints").newest_meta()
    assert (meta["step"], meta["tokens_seen"], meta["tokenizer"]) == (8, tokens, "toy")
    assert meta["config"]["run"]["id"] == meta["run_id"] == "test"
    assert Checkpoints(folder / "checkpoints").complete_steps() == [4, 8]


@pytest.mark.parametrize("stop, kept", [(2, 3), (4, 6)])
def test_stopped_and_resumed_is_bit_equal(straight, tmp_path, stop, kept):
    folder, want, tokens = straight
    job = make_job(make_config(tmp_path, training__ema=0.9), evaluate=evaluate)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="SIGTERM: stopped at step"):
        fit(dataclasses.replace(job, read_rows=stop_at(stop)))
    assert signal.getsignal(signal.SIGTERM) is before
    assert Checkpoints(tmp_path / "checkpoints").complete_steps()[-1] <= kept < 8
    outcome = fit(job)
    assert_same(host(outcome.state), want)
    assert losses(tmp_path) == losses(folder) and outcome.tokens_seen == tokens
    other = make_job(make_config(tmp_path / "other", training__ema=0.9, run__seed=1), evaluate=evaluate)
    assert stop == 2 or losses(folder) != _losses_of(other, tmp_path / "other")


def _losses_of(job, folder):
    folder.mkdir()
    fit(job)
    return losses(folder)


def test_resume_on_another_mesh(straight, tmp_path):
    """Restored state, rows and noise are bit-equal; losses agree to 1e-5, since sums round differently."""
    folder, _, _ = straight
    config = make_config(tmp_path, training__ema=0.9)
    with pytest.raises(Preempted):
        fit(make_job(config, read_rows=stop_at(4)))
    sizes = dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    fit(make_job(make_config(tmp_path, training__ema=0.9, training__microbatches=2, **sizes), jax.devices()))
    got, want = losses(tmp_path), losses(folder)
    np.testing.assert_allclose([got[s] for s in range(8)], [want[s] for s in range(8)], rtol=1e-5)
    assert by_step(tmp_path, "train/masked_tokens") == by_step(folder, "train/masked_tokens")


def test_a_signal_inside_an_evaluation_cuts_it(tmp_path):
    calls = []

    def cut(params, should_stop):
        calls.append(should_stop())
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert should_stop()
            return None
        return evaluate(params, should_stop)

    job = make_job(make_config(tmp_path), evaluate=cut)
    with pytest.raises(Preempted, match="Ctrl-C: stopped at step 4 of 8"):
        fit(job)
    names = [(r["step"], r["name"]) for r in records(tmp_path / "metrics.jsonl") if r["name"].startswith("eval/")]
    assert {step for step, _ in names} == {0}
    fit(job)
    steps = [r["step"] for r in records(tmp_path / "metrics.jsonl") if r["name"] == "eval/nelbo_nats_per_token"]
    assert steps == [0, 4, 8]


def test_finished_run_says_so_and_a_longer_one_goes_on(straight, tmp_path, capsys):
    config = make_config(tmp_path, optimizer__schedule_steps=8)
    fit(make_job(config))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    outcome = fit(make_job(config))
    assert (outcome.step, outcome.state) == (8, None)
    assert "already at step 8 of 8" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    longer = make_config(tmp_path, optimizer__schedule_steps=8, training__steps=10)
    assert fit(make_job(longer)).step == 10
    assert "changed since the checkpoint: training.steps: 8 -> 10" in capsys.readouterr().out
    assert sorted(losses(tmp_path)) == list(range(10))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model__block_size": 8}, "model.block_size: 4 -> 8"),
        ({"run__seed": 3}, "run.seed: 0 -> 3"),
        ({"training__batch_size": 16}, "training.batch_size: 8 -> 16"),
    ],
)
def test_another_config_is_refused(straight, change, message):
    folder, _, _ = straight
    with pytest.raises(UserError) as error:
        fit(make_job(make_config(folder, training__ema=0.9, training__steps=9, **change)))
    assert message in str(error.value) and "checkpoint.init_from=" in str(error.value)


def test_another_corpus_is_refused(straight):
    folder, _, _ = straight
    job = make_job(make_config(folder, training__ema=0.9, training__steps=9))
    with pytest.raises(UserError, match="corpus: toy -> 9b1c; a resumed run must see the same rows"):
        fit(dataclasses.replace(job, identities={"corpus": "9b1c", "tokenizer": "toy"}))


def test_weights_of_another_run(straight, tmp_path):
    """A new optimizer at step 0 around the averaged weights; another block size is fine, another prefix mode or tail is
    not (T9)."""
    folder, want, _ = straight
    start = dict(checkpoint__init_from=str(folder), training__batch_size=16)
    config = make_config(tmp_path / "a", **start, model__block_size=8, optimizer__learning_rate=1e-30)
    (tmp_path / "a").mkdir()
    job = make_job(config, denoiser=ToyDenoiser(8), objective=make_objective(config, ToyDenoiser(8)))
    rows = read_rows(0, np.arange(1))
    wide = lambda batch: batch._replace(segments=batch.segments[:, ::2])
    job = dataclasses.replace(
        job,
        read_rows=lambda step, numbers: wide(read_rows(step, numbers)),
        batch=wide(jax.tree.map(lambda x: np.zeros((16, *x.shape[1:]), x.dtype), rows)),
    )
    outcome = fit(job)
    np.testing.assert_allclose(outcome.state["params"]["up"]["kernel"], want["ema"]["up"]["kernel"], rtol=1e-6)
    assert int(outcome.state["opt"][0].count) == 8
    with pytest.raises(UserError, match=r"model.prefix: bidirectional -> causal"):
        fit(make_job(make_config(tmp_path / "b", **start, model__prefix="causal")))
    with pytest.raises(UserError, match=r"data.tail: mask_fill -> truncate"):
        fit(make_job(make_config(tmp_path / "b", **start, data__tail="truncate")))
    with pytest.raises(UserError, match="has no complete checkpoint of step 5"):
        fit(make_job(make_config(tmp_path / "c", **{**start, "checkpoint__init_from": f"{folder}@5"})))
    with pytest.raises(UserError, match="tokenizer differs"):
        fit(make_job(make_config(tmp_path / "d", **start), identities={"corpus": "toy", "tokenizer": "other"}))


def test_whole_state_of_another_run(straight, tmp_path):
    folder, want, _ = straight
    config = make_config(
        tmp_path, training__ema=0.9, checkpoint__init_from=f"{folder}@4", checkpoint__init_what="state"
    )
    outcome = fit(make_job(config))
    assert_same(host(outcome.state), want)
    assert sorted(losses(tmp_path)) == [4, 5, 6, 7]


def test_damaged_newest_checkpoint_falls_back_and_ends_equal(straight, tmp_path):
    folder, _, _ = straight
    job = make_job(make_config(tmp_path, training__ema=0.9))
    fit(job)
    for file in (tmp_path / "checkpoints" / "8" / "state").rglob("*"):
        if file.parent.name == "d":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    (tmp_path / "checkpoints" / "40").mkdir()
    longer = make_config(tmp_path, training__ema=0.9, training__steps=9, optimizer__schedule_steps=8)
    outcome = fit(make_job(longer))
    assert outcome.step == 9
    got = losses(tmp_path)
    assert {s: got[s] for s in range(8)} == losses(folder)


def test_the_guard_gives_up_with_a_record_of_every_reject(tmp_path):
    real = make_objective(make_config())

    def objective(params, batch, noise):
        numerator, weight, metrics = real(params, batch, noise)
        return numerator + jnp.where(batch.row[0] >= 0, jnp.nan, 0.0) * params["norm"]["scale"].sum(), weight, metrics

    config = make_config(tmp_path, training__steps=50, guard__max_consecutive=3, training__evaluate_every=50)
    with pytest.raises(GuardStop, match=r"3 steps in a row were rejected.*not finite.*norm/scale"):
        fit(make_job(config, objective=objective))
    rejects = records(tmp_path / "rejects.jsonl")
    assert [r["step"] for r in rejects[:3]] == [0, 1, 2]
    assert rejects[1]["reason"] == "not finite" and rejects[1]["loss"] == "NaN" and rejects[1]["rows"] == [8, 15]
    assert rejects[1]["leaf"] == "norm/scale"
    store = Checkpoints(tmp_path / "checkpoints")
    assert store.complete_steps()[-1] == 4  # the step in flight when the third reject was read is part of it
    outcome = fit(make_job(make_config(tmp_path, training__steps=8, training__evaluate_every=50)))  # and it goes on
    assert outcome.step == 8 and int(outcome.state["guard"].consecutive) == 0
    assert int(outcome.state["guard"].rejected) == 4


def test_reading_errors_surface_at_their_step(tmp_path):
    def read(step, numbers):
        if step == 5:
            raise OSError("shard 3 is gone")
        return read_rows(step, numbers)

    with pytest.raises(OSError, match="shard 3 is gone"):
        fit(make_job(make_config(tmp_path), read_rows=read))
    assert Checkpoints(tmp_path / "checkpoints").complete_steps() == [4]


def test_metrics_of_the_machine_and_of_the_wait_for_data(tmp_path, monkeypatch):
    """The wait stands at the step that waited."""

    def read(step, numbers):
        time.sleep(0.5 if step == 5 else 0)
        return read_rows(step, numbers)

    class Device:
        def memory_stats(self):
            return {"bytes_in_use": 3, "peak_bytes_in_use": 4}

    job = make_job(make_config(tmp_path), read_rows=read)
    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    fit(job)
    waited = by_step(tmp_path, "train/data_seconds")
    assert sorted(waited) == list(range(8)) and max(waited, key=waited.get) == 5 and waited[5] >= 0.5
    assert set(by_step(tmp_path, "memory/device_bytes").values()) == {3}
    assert set(by_step(tmp_path, "memory/device_peak_bytes").values()) == {4}
    assert min(by_step(tmp_path, "memory/host_bytes").values()) > 2**20


def test_profiled_steps(tmp_path, capsys):
    fit(make_job(make_config(tmp_path, training__profile_steps=(2, 3))))
    assert f"steps 2 to 3 are traced in {tmp_path / 'profile'}" in capsys.readouterr().out
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


def test_a_failed_save_stops_the_run_at_the_next_step(tmp_path, monkeypatch):
    """The save of step 4 fails while step 4 is under way; the run does not wait for the save of step 8 to tell."""
    saving, steps = [], []
    real_save = Checkpoints.save

    async def write(*args, **keywords):
        raise OSError(errno.ENOSPC, "x")

    def save(store, step, *args, **keywords):
        if step == 4:
            monkeypatch.setattr("orbax.checkpoint._src.serialization.serialization.async_serialize_from_host", write)
        saving.append(store)
        return real_save(store, step, *args, **keywords)

    def read(step, numbers):
        steps.append(step)
        while step == 4 and saving[-1]._manager.is_saving_in_progress():
            time.sleep(0.01)
        return read_rows(step, numbers)

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(UserError, match="checkpoints/4 could not be written, the last good one is of step 2: No space"):
        fit(make_job(make_config(tmp_path, training__checkpoint_every=2), read_rows=read))
    assert max(steps) == 4
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "checkpoints").complete_steps() == [2]
    assert fit(make_job(make_config(tmp_path, training__checkpoint_every=2))).step == 8


def test_a_save_that_runs_into_a_limit_of_the_system(tmp_path):
    """A true refusal: no file may grow beyond a limit that the metrics keep and a checkpoint does not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def read(step, numbers):
        if step == 3:
            while not (tmp_path / "checkpoints" / "2").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
        return read_rows(step, numbers)

    config = make_config(tmp_path, training__checkpoint_every=2, training__log_every=8)
    try:
        with pytest.raises(UserError, match=r"checkpoints/4 could not be written, .* of step 2: File too large"):
            fit(make_job(config, read_rows=read))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert fit(make_job(config)).step == 8


def test_what_a_run_cannot_start_from_is_told_before_anything_is_compiled(straight, tmp_path, monkeypatch):
    folder, _, _ = straight

    class Wider(ToyDenoiser):
        def init(self, key):
            return {**super().init(key), "norm": {"scale": jnp.ones((9,))}}

    def compiles(*args):
        raise AssertionError("compiled")

    monkeypatch.setattr("diffjax.training.loop.compile_step", compiles)

    def start(message, init_from=str(folder), **changes):
        config = make_config(tmp_path, checkpoint__init_from=init_from, training__ema=0.9, **changes)
        denoiser = Wider() if "scale" in message else ToyDenoiser()
        with pytest.raises(UserError, match=message):
            fit(make_job(config, denoiser=denoiser))

    start("nowhere/checkpoints: no such folder", str(tmp_path / "nowhere"))
    start("expected RUN or RUN@STEP", f"{folder}@last")
    start("has no complete checkpoint of step 5", f"{folder}@5")
    start("model.prefix: bidirectional -> causal", model__prefix="causal")
    start("run.seed: 0 -> 1", run__seed=1, checkpoint__init_what="state")
    start(r"norm/scale: checkpoint \[16\], config \[9\]")
    with pytest.raises(AssertionError, match="compiled"):  # what it can start from
        fit(make_job(make_config(tmp_path, checkpoint__init_from=f"{folder}@4", training__ema=0.9)))


def test_a_batch_that_does_not_split_is_refused(tmp_path):
    config = make_config(tmp_path, training__batch_size=12, mesh__data=-1)
    with pytest.raises(UserError, match=r"training.batch_size=12 is not a multiple of .* = 1 \* 8 \* 1 = 8"):
        fit(make_job(config, jax.devices()))
