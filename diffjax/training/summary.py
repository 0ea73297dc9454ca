"""summary.json: what a run was, where it ran, how it ended and its best and last numbers."""

import math
import os
import platform
from pathlib import Path

import jax
from jax.sharding import Mesh

from diffjax.config import Config, config_hash, to_dict
from diffjax.kernels import dispatch
from diffjax.training.memory import memory_metrics, peak_host_bytes
from diffjax.training.start import package_versions
from diffjax.training.tracking import plain, read_metric

NELBO = "eval/nelbo_nats_per_token"
UNIGRAM = "eval/unigram_nats_per_token"


def summarise(
    config: Config,
    mesh: Mesh,
    *,
    ended: str,
    step: int,
    tokens_seen: int,
    parameters: int,
    seconds: float,
    command: str | None,
) -> dict:
    """The summary of a run that has ended, its numbers read from its metrics.jsonl.

    ended    finished, preempted or guard stop
    seconds  of this start alone; tokens_seen and the metrics are those of all starts
    """
    run_dir = Path(config.run.dir)
    held_out, unigram = read_metric(run_dir, NELBO), read_metric(run_dir, UNIGRAM)
    losses, speeds = read_metric(run_dir, "train/loss"), read_metric(run_dir, "train/tokens_per_second")
    best_step, best = min(held_out, key=lambda record: (math.isnan(record[1]), record[1]), default=(None, None))
    return {
        "run_id": config.run.id,
        "ended": ended,
        "step": step,
        "command": command,
        "parameters": parameters,
        "tokens_seen": tokens_seen,
        "seconds": round(seconds, 1),
        "tokens_per_second": _last(speeds),
        "last_loss": _last(losses),
        "unigram_nats_per_token": _last(unigram),
        "first_nelbo_nats_per_token": plain(held_out[0][1]) if held_out else None,
        "last_nelbo_nats_per_token": _last(held_out),
        "best_nelbo_nats_per_token": plain(best),
        "best_nelbo_step": best_step,
        "peak_memory_bytes": peak_host_bytes(),
        "peak_device_bytes": memory_metrics().get("memory/device_peak_bytes"),
        "kernels": dict(dispatch.decisions),
        "hardware": _hardware(mesh),
        "versions": {**package_versions(), "python": platform.python_version()},
        "config_hash": config_hash(config),
        "config": to_dict(config),
    }


def _last(records: list[tuple[int, float]]) -> float | str | None:
    return plain(records[-1][1]) if records else None


def _hardware(mesh: Mesh) -> dict:
    device = mesh.devices.flat[0]
    return {
        "host": os.uname().nodename,
        "platform": device.platform,
        "device": device.device_kind,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
    }
