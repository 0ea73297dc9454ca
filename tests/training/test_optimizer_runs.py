"""Whole runs with each optimizer: stopped and resumed, refused with another, branched off a stable run."""

import dataclasses

import jax
import numpy as np
import pytest

from diffjax.errors import Preempted, UserError
from diffjax.training import adafactor
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.loop import fit

from .test_loop import host, stop_at
from .toy import assert_same, by_step, losses, make_config, make_job

pytestmark = pytest.mark.xdist_group("optimizer_runs")


@pytest.fixture(autouse=True)
def small_factors(monkeypatch):
    monkeypatch.setattr(adafactor, "FACTORED_FROM", 8)


@pytest.mark.parametrize("name, stored", [("muon", "inner_states/muon/inner_state/0/mu/up/kernel"),
                                          ("adafactor", "0/rows/up/kernel")])  # fmt: skip
def test_four_and_four_steps_are_eight(tmp_path, capfd, name, stored):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    want = host(fit(make_job(make_config(straight, optimizer__name=name))).state)
    assert f"optimizer: {name}" in capfd.readouterr().out
    job = make_job(make_config(stopped, optimizer__name=name))
    with pytest.raises(Preempted):
        fit(dataclasses.replace(job, read_rows=stop_at(4)))
    checkpoints = Checkpoints(stopped / "checkpoints")
    leaves = checkpoints.newest_meta()["leaves"]
    checkpoints.close()
    opt = {path for path in leaves if path.startswith("opt/")}
    assert f"opt/{stored}" in opt
    assert len(opt) == len(jax.tree.leaves(want["opt"]))  # what a rule does not keep is no leaf of the checkpoint
    assert_same(host(fit(job).state), want)
    assert losses(stopped) == losses(straight)
    assert by_step(stopped, "train/learning_rate") == by_step(straight, "train/learning_rate")
    for other in {"adamw", "muon", "adafactor"} - {name}:
        with pytest.raises(UserError, match=f"optimizer.name: {name} -> {other}"):
            fit(make_job(make_config(stopped, optimizer__name=other, training__steps=9)))
    with pytest.raises(UserError, match=f"optimizer.name: {name} -> adamw"):
        start = dict(checkpoint__init_from=str(stopped), checkpoint__init_what="state")
        fit(make_job(make_config(tmp_path / "branch", training__steps=9, **start)))
    fresh = fit(make_job(make_config(tmp_path / "new", training__steps=3, checkpoint__init_from=str(stopped))))
    assert int(fresh.state["opt"][0].count) == 3  # from weights alone any optimizer starts anew


def test_decay_branches_of_one_stable_run(tmp_path):
    """Two branches from step 8 of a constant run: its weights, its rate until they decay, over 2 and over 4 steps."""
    stable = make_config(tmp_path / "stable", optimizer__schedule="constant", training__steps=12)
    fit(make_job(stable))
    rates = by_step(tmp_path / "stable", "train/learning_rate")
    start = dict(checkpoint__init_from=f"{tmp_path / 'stable'}@8", checkpoint__init_what="state")
    for decay, shape, falls in ((2, "linear", [1.0, 0.5]), (4, "1-sqrt", [1.0, 0.5, 1 - 2**-0.5, 1 - 0.75**0.5])):
        folder = tmp_path / f"decay_{decay}"
        wsd = dict(schedule="wsd", schedule_steps=12, decay_steps=decay, decay_shape=shape, final_ratio=0.0)
        config = make_config(
            folder, training__steps=12, **start, **{f"optimizer__{key}": value for key, value in wsd.items()}
        )
        outcome = fit(make_job(config))
        assert int(outcome.state["step"]) == 12 and int(outcome.state["opt"][0].count) == 12
        branch, trained = by_step(folder, "train/learning_rate"), losses(folder)
        assert sorted(branch) == [8, 9, 10, 11]
        for step in range(8, 12 - decay + 1):
            assert branch[step] == rates[step]
        np.testing.assert_allclose([branch[12 - decay + i] for i in range(decay)], [1e-2 * f for f in falls], rtol=1e-5)
        assert trained[8] == losses(tmp_path / "stable")[8]
        tokens = by_step(folder, "train/tokens_seen"), by_step(tmp_path / "stable", "train/tokens_seen")
        assert tokens[0][11] == tokens[1][11]
