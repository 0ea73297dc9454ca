"""FLOPs against XLA's own count of small unrolled models, pairs against a count one by one, and published numbers."""

import dataclasses
from pathlib import Path

import jax
import pytest

from diffjax.config import Config, KernelsConfig, MambaConfig, ModelConfig, load_config
from diffjax.data.batch import abstract_batch
from diffjax.diffusion.corruption import draw
from diffjax.diffusion.objectives import block_diffusion
from diffjax.models import flops
from diffjax.models.denoiser import Denoiser

CONFIGS = Path(__file__).parents[2] / "configs"
VOCAB, MASK = 256, 4
BASE = ModelConfig(
    width=128, block_size=16, heads=4, kv_heads=2, head_dim=32, mlp_width=192,
    mamba=MambaConfig(heads=4, head_dim=32, state=32),
)  # fmt: skip


def make_config(length=64, frontiers="all", autoregressive=0.0, **model) -> Config:
    config = Config(model=dataclasses.replace(BASE, **model), kernels=KernelsConfig("xla", "reference"))
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, sequence_length=length),
        objective=dataclasses.replace(config.objective, frontiers=frontiers, autoregressive=autoregressive),
    )


def counted_by_xla(config: Config, rows: int, backward: bool) -> float:
    """FLOPs of the loss, or of the loss with its gradient, before the compiler removes what it finds unused."""
    denoiser = Denoiser(config.model, VOCAB, config.kernels)
    objective = block_diffusion(denoiser, config.objective, MASK, config.data.tail)

    def loss(params, batch):
        return objective(params, batch, draw(config.objective, 0, 0, batch, rows))[0]

    batch = abstract_batch(rows, config.data.sequence_length, config.model.block_size)
    function = jax.grad(loss) if backward else loss
    return jax.jit(function).lower(denoiser.abstract_params(), batch).cost_analysis()["flops"]


def all_pairs(length, block_size, frontiers, clean_blocks, causal):
    """What the reference form of attention computes: every query against every key, masked afterwards."""
    clean = clean_blocks * block_size
    queries = (length // block_size if frontiers == "all" else frontiers) * block_size
    return clean * clean + queries * (clean + block_size)


if __name__ == "__main__":
    for pattern in ("A", "M", "AM"):
        for extra in ({}, {"prefix": "causal"}, {"prefix": "causal", "autoregressive": 1.0}, {"frontiers": 1}):
            config = make_config(pattern=pattern, layers=len(pattern), **extra)
            mine = flops.forward_flops(config, VOCAB, all_pairs)
            f, b = (counted_by_xla(config, 1, backward) for backward in (False, True))
            print(pattern, extra, mine, f / mine.total, b / mine.total / 3)
