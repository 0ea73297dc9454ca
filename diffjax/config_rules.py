"""What a config may say: the range of each value, and keys that must agree. Needs no device and reads no file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from diffjax.config_loading import flatten, to_dict
from diffjax.errors import UserError

if TYPE_CHECKING:  # the tree checks itself by these rules, so it imports them
    from diffjax.config import (
        Config,
        DataConfig,
        DistributedConfig,
        MeshConfig,
        ModelConfig,
        ObjectiveConfig,
        OptimizerConfig,
        TrainingConfig,
    )

# What a single value may be: (test, rule in words, keys). A null is not tested.
_RANGES = (
    (
        lambda value: value >= 1,
        "must be at least 1",
        "model.layers model.width model.block_size model.heads model.kv_heads model.head_dim model.mlp_width "
        "model.mamba.heads model.mamba.head_dim model.mamba.state model.mamba.conv model.mamba.groups "
        "kernels.cross_entropy_chunk "
        "data.sequence_length training.steps training.batch_size training.microbatches training.log_every "
        "training.evaluate_every training.checkpoint_every optimizer.schedule_steps guard.spike_window "
        "guard.max_consecutive checkpoint.keep_last checkpoint.keep_every evaluation.rows evaluation.batch_size "
        "evaluation.samples evaluation.replicates sampling.steps sampling.blocks data.tokenizer.sample_bytes "
        "training.watchdog_s distributed.num_processes distributed.init_timeout_s distributed.heartbeat_timeout_s "
        "distributed.shutdown_timeout_s",
    ),
    (
        lambda value: value >= 0,
        "must be at least 0",
        "optimizer.warmup_steps optimizer.decay_steps optimizer.weight_decay objective.autoregressive "
        "optimizer.learning_rate_multipliers.attention optimizer.learning_rate_multipliers.mamba "
        "optimizer.learning_rate_multipliers.mlp optimizer.learning_rate_multipliers.embedding "
        "optimizer.learning_rate_multipliers.head optimizer.learning_rate_multipliers.norm "
        "sampling.temperature mesh.max_replicated_bytes distributed.process_id",
    ),
    (
        lambda value: value > 0,
        "must be above 0",
        "model.norm_eps model.rope_theta model.init_std optimizer.learning_rate optimizer.epsilon optimizer.clip_norm "
        "guard.spike_sigma",
    ),
    (lambda value: 0 <= value < 1, "must be at least 0 and below 1", "optimizer.beta1 optimizer.beta2 training.ema"),
    (lambda value: 0 < value < 1, "must be above 0 and below 1", "data.held_out"),
    (lambda value: 0 < value <= 1, "must be above 0 and at most 1", "sampling.top_p"),
    (lambda value: 0 <= value <= 1, "must be in 0 .. 1", "optimizer.final_ratio sampling.threshold"),
    (lambda value: 0 <= value < 2**32, "must be in 0 .. 4294967295", "run.seed evaluation.seed sampling.seed"),
    (lambda value: value >= 8, "must be at least 8", "data.tokenizer.vocab_size"),
    (
        lambda value: value == -1 or value >= 1,
        "must be at least 1, or -1 to fill",
        "mesh.data mesh.fsdp mesh.tensor mesh.context",
    ),
    (lambda value: value.strip() != "", "must name a folder", "run.dir"),
    (lambda value: value.strip() != "", "must be auto, off or a folder", "training.compile_cache"),
    (
        lambda value: 0 <= value[0] <= value[1],
        "must be [first, last], the steps to trace, with 0 <= first <= last",
        "training.profile_steps",
    ),
    (
        lambda value: value != "" and set(value) <= {"A", "M"},
        "must be made of the letters A (attention) and M (Mamba), such as AMMMMM",
        "model.pattern",
    ),
    (
        lambda value: 0 <= value[0] <= value[1] <= 1 and value[1] >= 1e-3,
        "must be [low, high] with 0 <= low <= high <= 1 and high at least 0.001",
        "objective.mask_rate",
    ),
    (
        lambda value: re.fullmatch(r"[a-z0-9]+:[0-9]+(x[0-9]+)*", value),
        "must be a platform and a shape, such as v5e:16x16 or cpu:8",
        "mesh.topology",
    ),
    (
        lambda value: (
            re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):[0-9]{1,5}", value)
            and 0 < int(value.rpartition(":")[2]) < 2**16
        ),
        "must be the host and port of process 0, such as 10.0.0.1:12321",
        "distributed.coordinator",
    ),
)


def validate(config: Config) -> None:
    """Check what types cannot say.

    Raises UserError with one line for each broken rule; a line names the keys, their values and the fix.
    """
    values = flatten(to_dict(config))
    problems = [
        f"{name}={_shown(values[name])} {rule}"
        for test, rule, names in _RANGES
        for name in names.split()
        if values[name] is not None and not test(values[name])
    ]
    problems += [
        f"{name}={value!r} holds a NUL character"
        for name, value in values.items()
        if isinstance(value, str) and "\0" in value
    ]
    problems += [
        f"{name}={value} must be below {2**31}"
        for name, value in values.items()
        if type(value) is int and value >= 2**31 and not name.endswith(("seed", "bytes"))
    ]
    problems = problems or list(_clashes(config))
    if problems:
        raise UserError("\n".join(problems))


def _clashes(config: Config) -> Iterator[str]:
    """One message for each pair of keys that contradict each other; single values are known to be in range."""
    yield from _shape_clashes(config.model, config.data)
    yield from _objective_clashes(config.objective, config.model, config.data)
    yield from _schedule_clashes(config.optimizer, config.training)
    yield from _mesh_clashes(config.mesh, config.training)
    yield from _context_clashes(config, config.mesh.context)
    yield from _distributed_clashes(config.distributed)
    if config.data.source != "python_stdlib" and not (config.data.path or config.data.corpus):
        yield f"data.source={config.data.source} needs data.path: the file or folder to read"
    if config.data.source == "python_stdlib" and config.data.path:
        yield (
            f"data.path={config.data.path} is not read by data.source=python_stdlib; "
            "set data.source to text, jsonl or parquet"
        )
    if config.evaluation.estimator == "oracle" and config.model.block_size > 8:
        yield (
            "evaluation.estimator=oracle scores every mask of a block and needs model.block_size at most 8, "
            f"not {config.model.block_size}; set evaluation.estimator=count"
        )
    if config.checkpoint.init_what == "state" and not config.checkpoint.init_from:
        yield "checkpoint.init_what=state needs checkpoint.init_from: the run to start from"


def _shape_clashes(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    mamba = model.mamba
    for name, value, divisor_name, divisor in (
        ("data.sequence_length", data.sequence_length, "model.block_size", model.block_size),
        ("model.heads", model.heads, "model.kv_heads", model.kv_heads),
        ("model.mamba.heads", mamba.heads, "model.mamba.groups", mamba.groups),
    ):
        if value % divisor:
            yield f"{name}={value} is not a multiple of {divisor_name}={divisor}; {_nearest_multiples(value, divisor)}"
    if model.head_dim % 2:
        yield f"model.head_dim={model.head_dim} is odd, but RoPE turns pairs; {_nearest_multiples(model.head_dim, 2)}"


def _objective_clashes(objective: ObjectiveConfig, model: ModelConfig, data: DataConfig) -> Iterator[str]:
    low = objective.mask_rate[0]
    if objective.weighting == "elbo" and low < 1e-3:
        yield (
            f"objective.mask_rate[0]={low} is below 0.001, but objective.weighting=elbo weighs by 1/rate; "
            "raise it to 0.001 or set objective.weighting=uniform"
        )
    if objective.weighting == "elbo" and objective.min_one_mask:
        yield (
            "objective.min_one_mask=true makes objective.weighting=elbo no bound; "
            "set min_one_mask=false or weighting=uniform"
        )
    if objective.autoregressive > 0 and model.prefix != "causal":
        yield (
            f"objective.autoregressive={objective.autoregressive} needs model.prefix=causal, not {model.prefix}; "
            "set it, or set objective.autoregressive=0"
        )
    blocks = data.sequence_length // model.block_size
    if objective.frontiers != "all" and blocks and not 1 <= objective.frontiers <= blocks:
        yield (
            f"objective.frontiers={objective.frontiers} must be all or in 1 .. {blocks}, the blocks in a row "
            f"(data.sequence_length={data.sequence_length} / model.block_size={model.block_size})"
        )


def _schedule_clashes(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    if optimizer.schedule in ("constant", "rsqrt"):
        return
    ramps = {"optimizer.warmup_steps": optimizer.warmup_steps}
    if optimizer.schedule == "wsd":
        ramps["optimizer.decay_steps"] = optimizer.decay_steps
        if not optimizer.decay_steps:
            yield "optimizer.schedule=wsd needs optimizer.decay_steps: over how many last steps the rate falls"
    horizon = ("training.steps", training.steps)
    if optimizer.schedule_steps is not None:
        horizon = ("optimizer.schedule_steps", optimizer.schedule_steps)
    if sum(ramps.values()) >= horizon[1]:
        yield (
            f"{' + '.join(ramps)} = {sum(ramps.values())} must be below {horizon[0]}={horizon[1]}; "
            "shorten it or set optimizer.schedule_steps"
        )


def _mesh_clashes(mesh: MeshConfig, training: TrainingConfig) -> Iterator[str]:
    filling = [f"mesh.{axis}" for axis in ("data", "fsdp", "context", "tensor") if getattr(mesh, axis) == -1]
    if len(filling) > 1:
        yield f"{' and '.join(filling)} are both -1; one axis at most can fill"
    factors = {"training.microbatches": training.microbatches, "mesh.data": mesh.data, "mesh.fsdp": mesh.fsdp}
    factors = {name: size for name, size in factors.items() if size != -1}
    product = math.prod(factors.values())
    if training.batch_size % product:
        yield (
            f"training.batch_size={training.batch_size} is not a multiple of {' * '.join(factors)} = {product}; "
            f"{_nearest_multiples(training.batch_size, product)}"
        )


def check_context(config: Config, shards: int) -> None:
    """Refuse a mesh whose context axis of `shards` devices cannot split a row into whole blocks (UserError)."""
    for problem in _context_clashes(config, shards):
        raise UserError(problem)


def _context_clashes(config: Config, shards: int) -> Iterator[str]:
    length, size = config.data.sequence_length, config.model.block_size
    if shards > 1 and length % size == 0 and length % (shards * size):
        yield (
            f"data.sequence_length={length} is not a multiple of mesh.context={shards} * model.block_size={size} = "
            f"{shards * size}: shards hold whole blocks; {_nearest_multiples(length, shards * size)}"
        )


def _distributed_clashes(distributed: DistributedConfig) -> Iterator[str]:
    keys = ("coordinator", "num_processes", "process_id")
    given = [f"distributed.{key}" for key in keys if getattr(distributed, key) is not None]
    missing = [f"distributed.{key}" for key in keys if getattr(distributed, key) is None]
    if distributed.mode == "explicit" and missing:
        yield f"distributed.mode=explicit needs {' and '.join(missing)}"
    elif distributed.mode == "auto" and given and missing:
        yield f"{' and '.join(given)} given without {' and '.join(missing)}; give all three or none"
    elif distributed.mode not in ("auto", "explicit") and given:
        yield (
            f"{' and '.join(given)} not read by distributed.mode={distributed.mode}; "
            "set distributed.mode=explicit or leave them out"
        )
    if not missing and distributed.process_id >= distributed.num_processes:
        yield (
            f"distributed.process_id={distributed.process_id} must be below "
            f"distributed.num_processes={distributed.num_processes}: processes are numbered from 0"
        )


def _nearest_multiples(value: int, step: int) -> str:
    below = value // step * step
    return "nearest: " + ", ".join(str(multiple) for multiple in (below, below + step) if multiple)


def _shown(value) -> str:
    return json.dumps(value) if value == "" or isinstance(value, bool | list) else str(value)
