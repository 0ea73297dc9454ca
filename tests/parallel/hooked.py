"""The command line with hooks: fingerprints of rows and noise among the metrics, slow parts, signals to itself.

Run as `python -m tests.parallel.hooked HOOKS VERB ...`, HOOKS a JSON object: rank (of this process), and as wanted
slow_rows (seconds for each step), slow_evaluation [number of the evaluation, seconds for each batch], and
signal {"rank", "at": ["rows", step] or ["evaluation", number], "number"}; number 0 raises an OSError instead.
"""

import itertools
import json
import os
import sys
import time

import jax.numpy as jnp

from diffjax import run
from diffjax.data.loader import TrainLoader

hooks = json.loads(sys.argv[1])


def signal_at(*place):
    wanted = hooks.get("signal")
    if wanted and wanted["rank"] == hooks["rank"] and wanted["at"] == list(place):
        if not wanted["number"]:
            raise OSError("this disk is gone")
        os.kill(os.getpid(), wanted["number"])


real_rows = TrainLoader.rows


def rows(self, step, numbers):
    signal_at("rows", step)
    time.sleep(hooks.get("slow_rows", 0))
    return real_rows(self, step, numbers)


real_batches, evaluations = run.held_out_batches, itertools.count()


def batches(corpus, size, count):
    number = next(evaluations) if count != 2 else -1  # the two rows of the samples' prompts
    for index, batch in enumerate(real_batches(corpus, size, count)):
        if index == 1:
            signal_at("evaluation", number)
        wanted, seconds = hooks.get("slow_evaluation", (None, 0))
        time.sleep(seconds if number == wanted else 0)
        yield batch


real_objective = run.block_diffusion


def fingerprint(values, rows):
    """A sum of small integers that any order of adding gives exactly, and that changes with a value or its place."""
    place = rows.reshape(-1, *[1] * (values.ndim - 1)) * 4099 + jnp.arange(values[0].size).reshape(1, *values.shape[1:])
    return ((values.astype(jnp.int32) + 1) * (place % 1021 + 7) % 4093).sum().astype(jnp.float32)


def objective(*arguments):
    loss = real_objective(*arguments)

    def with_fingerprints(params, batch, noise):
        numerator, denominator, metrics = loss(params, batch, noise)
        for name, values in {
            "row_bits": batch.tokens,
            "mask_bits": noise.masked,
            "rate_bits": jnp.floor(noise.rate * 2**20),
        }.items():
            metrics[name] = (fingerprint(values, batch.row), jnp.float32(0))
        return numerator, denominator, metrics

    return with_fingerprints


if __name__ == "__main__":
    TrainLoader.rows, run.held_out_batches, run.block_diffusion = rows, batches, objective
    from diffjax.cli import main

    sys.exit(main(sys.argv[2:]))
