"""Model FLOPs utilisation: in the metrics where the peak of the devices is known, nowhere else."""

import dataclasses

import jax
import pytest

from diffjax.parallel import chips
from diffjax.training.loop import fit

from .toy import by_step, make_config, make_job

ROW_FLOPS, PEAK = 3e6, 1e12


def train(folder, row_flops):
    config = make_config(folder, training__steps=4, training__log_every=2, mesh__data=2, training__checkpoint_every=4)
    fit(make_job(config, jax.devices()[:2], row_flops=row_flops))
    return config


def test_mfu_of_chips_with_a_known_peak(tmp_path, monkeypatch):
    kind = jax.devices()[0].device_kind
    fake = dataclasses.replace(chips.CHIPS["v5e"], device_kinds=(kind,), peak=PEAK)
    monkeypatch.setitem(chips.CHIPS, "fake", fake)
    config = train(tmp_path, ROW_FLOPS)
    utilisation, seconds = by_step(tmp_path, "train/mfu"), by_step(tmp_path, "train/step_seconds")
    assert list(utilisation) == list(seconds) != []
    for step, value in utilisation.items():
        done = config.training.batch_size * ROW_FLOPS
        assert value == pytest.approx(done / seconds[step] / (2 * PEAK), rel=1e-6)


@pytest.mark.parametrize("known_peak", [False, True])
def test_mfu_is_never_invented(tmp_path, monkeypatch, known_peak):
    if known_peak:  # but not what a row costs
        kind = jax.devices()[0].device_kind
        fake = dataclasses.replace(chips.CHIPS["v5e"], device_kinds=(kind,), peak=PEAK)
        monkeypatch.setitem(chips.CHIPS, "fake", fake)
    train(tmp_path, None if known_peak else ROW_FLOPS)
    assert by_step(tmp_path, "train/step_seconds") and not by_step(tmp_path, "train/mfu")
