"""A denoiser too small to matter, a loader made of numbers, and configs for them: what the training tests train."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from diffjax import config as config_lib
from diffjax.config import Config
from diffjax.data.batch import Batch
from diffjax.diffusion.corruption import draw
from diffjax.diffusion.objectives import block_diffusion
from diffjax.parallel.mesh import make_mesh
from diffjax.training.loop import Job

VOCAB, WIDTH, LENGTH, BLOCK, MASK = 64, 16, 32, 4, 4


def make_config(run_dir="unused", **overrides) -> Config:
    """A small valid config; overrides as `section__key=value`."""
    base = {
        "run__dir": str(run_dir),
        "run__id": "test",
        "model__block_size": BLOCK,
        "data__sequence_length": LENGTH,
        "optimizer__learning_rate": 1e-2,
        "optimizer__warmup_steps": 2,
        "training__steps": 8,
        "training__batch_size": 8,
        "training__log_every": 1,
        "training__checkpoint_every": 4,
        "training__evaluate_every": 4,
        "mesh__data": 1,
        **overrides,
    }
    sections: dict = {}
    for name, value in base.items():
        section, key = name.split("__")
        sections.setdefault(section, {})[key] = value
    config = Config()
    for section, values in sections.items():
        changed = dataclasses.replace(getattr(config, section), **values)
        config = dataclasses.replace(config, **{section: changed})
    config_lib.validate(config)
    return config


@dataclasses.dataclass(frozen=True)
class ToyDenoiser:
    """Reads a frontier token by token, with the mean of its row's clean tokens as context."""

    block_size: int = BLOCK

    def init(self, key):
        one, two, three = jax.random.split(key, 3)
        return {
            "embed": {"table": jax.random.normal(one, (VOCAB, WIDTH))},
            "norm": {"scale": jnp.ones((WIDTH,))},
            "up": {"kernel": jax.random.normal(two, (WIDTH, 32)) / 4},
            "head": {"kernel": jax.random.normal(three, (32, VOCAB)) / 6},
        }

    def logical_axes(self):
        return {
            "embed": {"table": ("vocab", "embed")},
            "norm": {"scale": (None,)},
            "up": {"kernel": ("embed", "mlp")},
            "head": {"kernel": (None, "vocab")},
        }

    def train_hidden(self, params, clean, frontiers, frontier_index, *, clean_valid, clean_head, **_):
        table = params["embed"]["table"] * params["norm"]["scale"][None]
        weight = clean_valid.astype(table.dtype)[..., None]
        context = (table[clean] * weight).sum(1) / jnp.maximum(weight.sum(1), 1.0)
        hidden = jnp.tanh((table[frontiers] + context[:, None, None]) @ params["up"]["kernel"])
        return hidden, None, {}

    def logits(self, params, hidden):
        return hidden @ params["head"]["kernel"]


def read_rows(step: int, numbers: np.ndarray) -> Batch:
    """Ragged rows, a pure function of (step, row)."""

    def one(row):
        draws = np.random.default_rng([step, row])
        length = int(draws.integers(2, LENGTH + 1))
        position = np.arange(LENGTH)
        valid = position < length
        segments = (np.arange(LENGTH // BLOCK) * BLOCK < length).astype(np.int32)
        tokens = np.where(valid, 5 + draws.zipf(1.5, LENGTH) % (VOCAB - 5), 0).astype(np.int32)
        return tokens, segments, valid, valid & (position > 0), np.int32(row)

    return Batch(*map(np.stack, zip(*map(one, numbers), strict=True)))


def abstract_batch(size: int) -> Batch:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), read_rows(0, np.arange(1)))


def make_objective(config: Config, denoiser=None):
    return block_diffusion(denoiser or ToyDenoiser(), config.objective, MASK, config.data.tail)


def make_draw(config: Config):
    return lambda step, batch: draw(config.objective, config.run.seed, step, batch, config.training.batch_size)


def make_job(config: Config, devices=None, **changes) -> Job:
    devices = jax.devices()[:1] if devices is None else devices
    job = Job(
        config=config,
        mesh=make_mesh(config.mesh, devices),
        denoiser=ToyDenoiser(),
        objective=make_objective(config),
        draw_noise=make_draw(config),
        read_rows=read_rows,
        batch=abstract_batch(config.training.batch_size),
        identities={"corpus": "toy", "tokenizer": "toy"},
    )
    return dataclasses.replace(job, **changes)


def by_step(run_dir, name: str) -> dict[int, float]:
    return {r["step"]: r["value"] for r in records(run_dir / "metrics.jsonl") if r["name"] == name}


def losses(run_dir) -> dict[int, float]:
    return by_step(run_dir, "train/loss")


def records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same(one, two):
    """Equal bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for (path, left), right in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=jax.tree_util.keystr(path))
