"""The config: every key a run can have, its type, its default, and what changing it means for a resumed run.

Read by all modules, imports none of them but the loader of dataclass trees and the rules that a config must meet.
Defaults live here and nowhere else.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from diffjax.config_loading import dump_yaml, flatten, leaf_fields, load, to_dict
from diffjax.config_rules import validate

__all__ = ["Config", "config_hash", "dump_yaml", "load_config", "resume_diff", "to_dict"]


def free(default):
    """A key that may change between the starts of a run without a word."""
    return _key(default, "free")


def warn(default):
    """A key whose change on resume is printed, old -> new, and then honoured."""
    return _key(default, "warn")


def refuse(default):
    """A key that a resumed run may not change: it would no longer be the same run."""
    return _key(default, "refuse")


def _key(default, resume):
    if isinstance(default, type):
        return field(default_factory=default, metadata={"resume": resume})
    return field(default=default, metadata={"resume": resume})


@dataclass(frozen=True, slots=True)
class RunConfig:
    dir: str = free("runs/default")
    id: str | None = free(None)
    seed: int = refuse(0)


@dataclass(frozen=True, slots=True)
class MambaConfig:
    heads: int = refuse(4)
    head_dim: int = refuse(32)
    state: int = refuse(64)
    conv: int = refuse(4)
    groups: int = refuse(1)
    directions: Literal["separate", "shared", "forward"] = refuse("separate")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    pattern: str = refuse("AMMMMM")
    layers: int = refuse(6)
    width: int = refuse(128)
    block_size: int = refuse(16)
    prefix: Literal["bidirectional", "causal"] = refuse("bidirectional")
    heads: int = refuse(2)
    kv_heads: int = refuse(2)
    head_dim: int = refuse(64)
    qk_norm: bool = refuse(False)
    norm_eps: float = refuse(1e-5)
    rope_theta: float = refuse(1e4)
    mlp_width: int = refuse(384)
    tie_embeddings: bool = refuse(False)
    init_std: float = refuse(0.02)  # of embeddings and projections; narrow models learn sooner from width**-0.5
    dtype: Literal["float32", "bfloat16", "float64"] = refuse("float32")
    remat: Literal["none", "block", "dots"] = free("none")
    mamba: MambaConfig = refuse(MambaConfig)


@dataclass(frozen=True, slots=True)
class KernelsConfig:
    ssd: Literal["auto", "reference", "xla", "pallas_tpu", "pallas_triton"] = free("auto")
    attention: Literal["auto", "reference", "xla", "pallas_tpu", "pallas_triton"] = free("auto")
    cross_entropy_chunk: int | None = free(None)  # tokens of a row whose logits exist at one time; null: all


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    frontiers: int | Literal["all"] = refuse("all")
    weighting: Literal["elbo", "uniform"] = refuse("elbo")
    mask_rate: tuple[float, float] = refuse((1e-3, 1.0))
    stratified: bool = refuse(True)
    min_one_mask: bool = refuse(False)
    autoregressive: float = refuse(0.0)


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    kind: Literal["sentencepiece"] = refuse("sentencepiece")
    path: str | None = refuse(None)
    vocab_size: int = refuse(2048)
    sample_bytes: int = refuse(10_000_000)


@dataclass(frozen=True, slots=True)
class DataConfig:
    source: Literal["python_stdlib", "text", "jsonl", "parquet"] = refuse("python_stdlib")
    path: str | None = free(None)  # both may move: a resume compares the corpus itself
    corpus: str | None = free(None)
    text_field: str = refuse("text")
    documents: Literal["file", "blank_line"] = refuse("file")
    held_out: float = refuse(0.08)
    sequence_length: int = refuse(256)
    packing: Literal["document", "concat"] = refuse("document")
    tail: Literal["mask_fill", "truncate", "eos_fill"] = refuse("mask_fill")
    tokenizer: TokenizerConfig = refuse(TokenizerConfig)


@dataclass(frozen=True, slots=True)
class MultipliersConfig:
    attention: float = warn(1.0)  # mixers, with the norms inside them
    mamba: float = warn(1.0)
    mlp: float = warn(1.0)
    embedding: float = warn(1.0)
    head: float = warn(1.0)
    norm: float = warn(1.0)  # before mixers, MLPs and head


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    name: Literal["adamw", "muon", "adafactor"] = refuse("adamw")
    learning_rate: float = warn(1e-3)
    learning_rate_multipliers: MultipliersConfig = warn(MultipliersConfig)
    schedule: Literal["cosine", "wsd", "rsqrt", "constant"] = warn("cosine")
    schedule_steps: int | None = warn(None)
    warmup_steps: int = warn(20)
    decay_steps: int = warn(0)
    decay_shape: Literal["linear", "1-sqrt"] = warn("linear")
    final_ratio: float = warn(0.1)
    beta1: float = warn(0.9)
    beta2: float = warn(0.95)
    epsilon: float = warn(1e-8)
    weight_decay: float = warn(0.1)
    clip_norm: float = warn(1.0)


@dataclass(frozen=True, slots=True)
class GuardConfig:
    spike_window: int = warn(128)
    spike_sigma: float | None = warn(6.0)
    max_consecutive: int = warn(16)


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    steps: int = warn(150)
    batch_size: int = refuse(16)
    microbatches: int = free(1)
    log_every: int = free(10)
    evaluate_every: int = free(50)
    checkpoint_every: int = free(50)
    ema: float = refuse(0.0)
    profile_steps: tuple[int, int] | None = free(None)  # first and last step of a trace
    watchdog_s: int = free(1800)
    compile_cache: str = free("auto")  # or off, or a folder; see diffjax/compile_cache.py


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    keep_last: int = free(3)
    keep_every: int | None = free(None)
    allow_cast: bool = free(False)
    init_from: str | None = free(None)
    init_what: Literal["weights", "state"] = free("weights")


@dataclass(frozen=True, slots=True)
class MeshConfig:
    data: int = free(-1)
    fsdp: int = free(1)
    tensor: int = free(1)
    context: int = free(1)
    topology: str | None = free(None)
    max_replicated_bytes: int = free(64 * 2**20)


@dataclass(frozen=True, slots=True)
class DistributedConfig:
    mode: Literal["auto", "explicit", "slurm", "kubernetes", "tpu", "none"] = free("auto")
    coordinator: str | None = free(None)  # host:port of process 0
    num_processes: int | None = free(None)
    process_id: int | None = free(None)
    init_timeout_s: int = free(300)
    heartbeat_timeout_s: int = free(100)
    shutdown_timeout_s: int = free(300)


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    rows: int | None = free(None)
    batch_size: int = free(16)
    estimator: Literal["count", "time", "chain", "oracle"] = free("count")
    samples: int = free(1)
    replicates: int = free(2)
    seed: int = free(0)
    seed_val_loss: bool = free(False)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    rule: Literal["threshold", "quota"] = free("threshold")
    threshold: float | None = free(None)  # null: the rule's own default; a knob the rule does not read is refused
    steps: int | None = free(None)  # per block
    score: Literal["prob", "random"] | None = free(None)
    temperature: float = free(0.0)
    top_p: float = free(1.0)
    blocks: int = free(8)  # that hold generated tokens, the one the prompt ends in among them
    seed: int = free(0)


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    wandb: bool = free(False)
    project: str = free("diffjax")
    mode: Literal["online", "offline"] = free("online")


@dataclass(frozen=True, slots=True)
class Config:
    run: RunConfig = free(RunConfig)
    model: ModelConfig = refuse(ModelConfig)
    kernels: KernelsConfig = free(KernelsConfig)
    objective: ObjectiveConfig = refuse(ObjectiveConfig)
    data: DataConfig = refuse(DataConfig)
    optimizer: OptimizerConfig = warn(OptimizerConfig)
    guard: GuardConfig = warn(GuardConfig)
    training: TrainingConfig = warn(TrainingConfig)
    checkpoint: CheckpointConfig = free(CheckpointConfig)
    mesh: MeshConfig = free(MeshConfig)
    distributed: DistributedConfig = free(DistributedConfig)
    evaluation: EvaluationConfig = free(EvaluationConfig)
    sampling: SamplingConfig = free(SamplingConfig)
    tracking: TrackingConfig = free(TrackingConfig)


def load_config(path, overrides=()) -> Config:
    """Read a YAML file (and the files it names as `base`), apply overrides `section.key=value`, and check the whole.

    Raises UserError with every mistake on a line of its own: unknown or repeated keys, wrong types, values that clash.
    """
    config = load(Config, path, overrides)
    validate(config)
    return config


def config_hash(config: Config) -> str:
    """sha256 of the config's canonical JSON, in hexadecimal: equal for equal configs on every host."""
    canonical = json.dumps(to_dict(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


Change = tuple[str, object, object]


def resume_diff(old: dict, new: Config) -> tuple[list[Change], list[Change], list[Change]]:
    """What differs between a run's stored config (`to_dict` form) and the one that continues it.

    Returns (free, warned, refused), each a list of (dotted key, old value, new value). A key that the stored config
    lacks, because it is younger, counts as its default; one no longer known is warned about, with the new value None.
    """
    was, now, default = flatten(old), flatten(to_dict(new)), flatten(to_dict(Config()))
    classes: dict[str, list[Change]] = {"free": [], "warn": [], "refuse": []}
    for name, leaf in leaf_fields(Config).items():
        before = was.get(name, default[name])
        if before != now[name]:
            classes[leaf.metadata["resume"]].append((name, before, now[name]))
    classes["warn"] += [(name, value, None) for name, value in was.items() if name not in now]
    return classes["free"], classes["warn"], classes["refuse"]
