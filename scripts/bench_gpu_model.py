"""The whole model on one GPU, for bench_gpu.py: a training step, and the latency of decoding."""

from pathlib import Path

import jax
import jax.numpy as jnp
from bench_training import MASK_ID, prepare_case
from kernel_cases import Sizes
from kernel_figures import Cost, attention_cost, three

from diffjax import Denoiser, load_config
from diffjax.config import Config
from diffjax.kernels import dispatch

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml")
HYBRID = [  # 300M parameters
    "model.pattern=AMMMMM", "model.layers=12", "model.width=1024", "model.block_size=32", "model.prefix=bidirectional",
    "model.heads=8", "model.kv_heads=8", "model.head_dim=128", "model.mlp_width=2816", "model.dtype=bfloat16",
    "model.remat=none", "model.init_std=0.02", "model.mamba.heads=64", "model.mamba.head_dim=32",
    "model.mamba.state=64", "data.tokenizer.vocab_size=32768", "data.sequence_length=2048", "training.batch_size=8",
    "objective.autoregressive=0",
]  # fmt: skip
TINY = [
    "model.prefix=bidirectional", "objective.autoregressive=0", "model.layers=2", "model.pattern=AM",
    "data.sequence_length=64", "training.batch_size=2", "data.tokenizer.vocab_size=128",
]  # fmt: skip


def training_step(overrides: list[str], interleave, ceiling: Cost) -> dict:
    """Whole steps, all frontiers of each row at once: noise, gradients, guard, AdamW."""
    dispatch.forget()
    config, case = load_config(CONFIG, overrides), prepare_case(CONFIG, overrides)

    def step():
        case["state"], metrics = case["step"](case["state"], case["batch"])
        return case["state"], metrics

    seconds = interleave({"step": step})["step"].median
    flop = step_flop(config)
    return {
        "parameters": case["parameters"], "rows": config.training.batch_size, "length": config.data.sequence_length,
        "ms": three(1e3 * seconds), "tokens_per_s": round(case["tokens"] / seconds),
        "TFLOP_a_step": three(flop / 1e12), "TFLOP/s": three(flop / seconds / 1e12),
        "MFU_of_measured_product": three(flop / seconds / ceiling.flop),
        "temporaries_GiB": three(case["step"].memory_analysis().temp_size_in_bytes / 2**30),
        "compile_s": three(case["compile_seconds"]), "kernels": dispatch.decisions,
    }  # fmt: skip


def step_flop(config: Config) -> float:
    """FLOP of the model's mathematics in a step, nothing recomputed: every layer weight for clean and frontier tokens,
    the head for frontiers, visible pairs of attention, and two scans as recurrences (4 N P a token and head). Backward
    costs twice the forward pass."""
    c, m, rows, length = config.model, config.model.mamba, config.training.batch_size, config.data.sequence_length
    params = Denoiser(c, config.data.tokenizer.vocab_size).abstract_params()
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    tokens, frontier_tokens = rows * (2 * length - c.block_size), rows * length
    pattern = (c.pattern * c.layers)[: c.layers]
    sizes = Sizes(rows, length, c.block_size, c.heads, c.head_dim, c.kv_heads)
    pairs = sum(attention_cost(operation, sizes, 2, "forward").flop for operation in ("blocks", "frontiers"))
    scans = 2 * 4 * m.state * m.head_dim * m.heads * tokens
    forward = 2 * size(params["layers"]) * tokens + 2 * size(params["head"]) * frontier_tokens
    return 3 * (forward + pattern.count("A") * pairs + pattern.count("M") * scans)


def latency(overrides: list[str], lengths: list[int], interleave, ceiling: Cost) -> dict:
    """One row, one frontier: a denoise call and a commit (absorb of one block) behind contexts of several lengths, in a
    context with room for the longest. Its entries are random: only time is asked for."""
    dispatch.forget()
    config = load_config(CONFIG, overrides)
    denoiser = Denoiser(config.model, config.data.tokenizer.vocab_size, config.kernels)
    dtype, size = jnp.dtype(config.model.dtype), denoiser.block_size
    params = as_served(jax.jit(denoiser.init)(jax.random.key(0)), dtype)
    block = jnp.full((1, size), MASK_ID, jnp.int32)
    context = filled(denoiser.empty_context(1, max(lengths) + size))
    behind = lambda n, context: context.replace(length=jnp.full((1,), n, jnp.int32))
    denoise = jax.jit(lambda params, n, context: denoiser.denoise(params, block, behind(n, context)))
    absorb = lambda params, n, context: denoiser.absorb(params, block, behind(n, context))
    commit = jax.jit(absorb, donate_argnames="context")

    def commit_behind(n):
        nonlocal context
        context = commit(params, n, context)
        return context

    thunks = {f"denoise {n}": lambda n=n: denoise(params, n, context) for n in lengths}
    thunks |= {f"commit {n}": lambda n=n: commit_behind(n) for n in lengths}
    timed = interleave(thunks)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    key_bytes = 2 * config.model.kv_heads * config.model.head_dim * dtype.itemsize
    key_bytes *= (config.model.pattern * config.model.layers)[: config.model.layers].count("A")
    return {
        "block": size, "weights_MB": round(weights / 1e6),
        "ms": {name: three(1e3 * time.median) for name, time in timed.items()},
        "floor_ms_of_bytes": {n: three(1e3 * (weights + n * key_bytes) / ceiling.bytes) for n in lengths},
        "kernels": dispatch.decisions,
    }  # fmt: skip


def as_served(params, dtype):
    """Matrices in the compute dtype."""
    cast = lambda path, leaf: leaf.astype(dtype) if path[-1].key in ("kernel", "table") else leaf
    return jax.tree_util.tree_map_with_path(cast, params)


@jax.jit
def filled(context):
    """The context with small random entries."""
    noise = lambda leaf: 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)
    return context.replace(layers=jax.tree.map(lambda leaf: noise(leaf).astype(leaf.dtype), context.layers))
