"""The config: every key a run can have, its type, its default, and what changing it means for a resumed run.

Read by all modules, imports none of them. Defaults live here and nowhere else.
"""

from dataclasses import dataclass, field
from typing import Literal


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
    dtype: Literal["float32", "bfloat16", "float64"] = refuse("float32")
    remat: Literal["none", "block", "dots"] = free("none")
    mamba: MambaConfig = refuse(MambaConfig)


@dataclass(frozen=True, slots=True)
class KernelsConfig:
    ssd: Literal["auto", "reference", "xla"] = free("auto")
    attention: Literal["auto", "reference", "xla"] = free("auto")


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


@dataclass(frozen=True, slots=True)
class DataConfig:
    source: Literal["python_stdlib", "text", "jsonl", "parquet"] = refuse("python_stdlib")
    path: str | None = refuse(None)
    corpus: str | None = refuse(None)
    text_field: str = refuse("text")
    held_out: float = refuse(0.02)
    sequence_length: int = refuse(256)
    packing: Literal["document", "concat"] = refuse("document")
    tail: Literal["mask_fill", "truncate", "eos_fill"] = refuse("mask_fill")
    tokenizer: TokenizerConfig = refuse(TokenizerConfig)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    name: Literal["adamw"] = refuse("adamw")
    learning_rate: float = warn(1e-3)
    schedule: Literal["cosine", "wsd", "constant"] = warn("cosine")
    schedule_steps: int | None = warn(None)
    warmup_steps: int = warn(20)
    decay_steps: int = warn(0)
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


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    rows: int | None = free(None)
    batch_size: int = free(16)
    samples: int = free(1)
    replicates: int = free(2)
    seed: int = free(0)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    rule: Literal["threshold", "quota"] = free("threshold")
    threshold: float = free(0.9)
    steps: int | None = free(None)
    score: Literal["prob", "random"] = free("prob")
    temperature: float = free(0.0)
    top_p: float = free(1.0)
    blocks: int = free(8)
    seed: int = free(0)


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    wandb: bool = free(False)
    project: str = free("diffjax")


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
    evaluation: EvaluationConfig = free(EvaluationConfig)
    sampling: SamplingConfig = free(SamplingConfig)
    tracking: TrackingConfig = free(TrackingConfig)
