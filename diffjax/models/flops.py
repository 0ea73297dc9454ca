"""FLOPs by counting: what the model's products need, two per multiply-add, whatever program computes them.

Counted are the projections, the short convolutions, attention over the pairs that may attend, the state-space
recurrence in chunks, the MLP and the head. Not counted: the embedding's lookup, norms, gates, softmax, rotations. XLA's
own count (`cost_analysis`) knows scanned bodies once and Pallas kernels not at all, so it is no substitute.
"""

from collections.abc import Callable
from dataclasses import dataclass

from diffjax.config import Config, MambaConfig, ModelConfig
from diffjax.kernels import ssd_xla

BACKWARD = 2  # a product's gradients are two products of its size


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass over one row, both streams together."""

    projections: int  # of the mixers, in and out, and their short convolutions
    attention: int  # scores and sums of values over attended pairs
    ssd: int
    mlp: int
    head: int

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.ssd + self.mlp + self.head

    def recomputed(self, remat: str) -> int:
        """What the backward pass of a rematerialisation policy computes a second time. `block` runs every layer again;
        `dots` keeps what the matrices, attention and the scan gave, and recomputes only what is not counted here."""
        return self.total - self.head if remat == "block" else 0


def attended_pairs(length: int, block_size: int, frontiers: int | str, clean_blocks: int, causal: bool) -> float:
    """Pairs (query, key) of one head in one row: those of the clean stream and those of the frontiers.

    The row is one document. Frontiers stand at `frontiers` blocks drawn evenly, so the number is an expectation; with
    "all" there is one for each block and it is exact.
    """
    blocks, size, clean = length // block_size, block_size, clean_blocks * block_size
    of_clean = clean * (clean + 1) / 2 if causal else clean * (clean + size) / 2
    count = blocks if frontiers == "all" else frontiers
    return of_clean + count * size * size * (blocks + 1) / 2


def forward_flops(config: Config, vocab_size: int, pairs: Callable[..., float] = attended_pairs) -> ForwardFlops:
    """FLOPs of the forward pass of the training objective over one row of data.sequence_length tokens.

    The clean stream reads all blocks but the last, which is no context, and the last too where its next-token head is
    trained. `pairs` counts the pairs of attention, as `attended_pairs` does.
    """
    model, objective, length = config.model, config.objective, config.data.sequence_length
    size, causal, next_token = model.block_size, model.prefix == "causal", objective.autoregressive > 0
    blocks = length // size
    frontiers = blocks if objective.frontiers == "all" else objective.frontiers
    clean_blocks = blocks if next_token else blocks - 1
    clean, frontier = clean_blocks * size, frontiers * size

    kinds = layer_kinds(model)
    attention_layers, mamba_layers = kinds.count("A"), kinds.count("M")
    attended = pairs(length, size, objective.frontiers, clean_blocks, causal)
    mamba_clean, mamba_frontier, ssd_clean, ssd_frontier = mamba_token_flops(model)
    return ForwardFlops(
        projections=(
            attention_layers * attention_projection_flops(model) * (clean + frontier)
            + mamba_layers * (mamba_clean * clean + mamba_frontier * frontier)
        ),
        attention=round(attention_layers * attended * 4 * model.heads * model.head_dim),
        ssd=mamba_layers * (ssd_clean * clean + ssd_frontier * frontier),
        mlp=model.layers * mlp_token_flops(model) * (clean + frontier),
        head=2 * model.width * vocab_size * (frontier + (clean if next_token else 0)),
    )


def flops_per_token(config: Config, vocab_size: int) -> float:
    """FLOPs of training, forward and backward, for each token of a row: what model FLOPs utilisation counts."""
    return (1 + BACKWARD) * forward_flops(config, vocab_size).total / config.data.sequence_length


def hardware_flops_per_token(config: Config, vocab_size: int, remat: str) -> float:
    """`flops_per_token` and what rematerialisation by the policy `remat` computes again."""
    forward = forward_flops(config, vocab_size)
    return ((1 + BACKWARD) * forward.total + forward.recomputed(remat)) / config.data.sequence_length


def layer_kinds(model: ModelConfig) -> str:
    """The mixer of every layer, A or M: the pattern, repeated and cut."""
    return (model.pattern * model.layers)[: model.layers]


def attention_projection_flops(model: ModelConfig) -> int:
    """Query, key, value and output products of one attention layer for one token."""
    return 4 * model.width * (model.heads + model.kv_heads) * model.head_dim


def mlp_token_flops(model: ModelConfig) -> int:
    """Gate, up and down products of one layer for one token."""
    return 6 * model.width * model.mlp_width


def mamba_token_flops(model: ModelConfig) -> tuple[int, int, int, int]:
    """One Mamba layer for one token: projections of the clean stream and of a frontier, SSD of the same two.

    A clean token of a causal prefix takes the forward direction alone. SSD (arXiv 2405.21060, section 6) per token and
    head, with m heads sharing their scores: among n tokens 2 n (N / m + P), reading a state 2 N P, adding to it 2 N P.
    A clean token meets its chunk, reads and writes the state; a frontier's token meets its block and reads; a token of
    the reverse direction meets its block and starts from nothing.
    """
    m, size = model.mamba, model.block_size
    chunk = ssd_xla.chunk_size("scan", size, m.head_dim, m.state)
    among = lambda tokens: 2 * tokens * (m.groups * m.state + m.heads * m.head_dim)
    state = 2 * m.heads * m.head_dim * m.state
    once = direction_projection_flops(model.width, m)
    clean, frontier = once, once
    ssd_clean, ssd_frontier = among(chunk) + 2 * state, among(size) + state
    if m.directions != "forward":
        frontier, ssd_frontier = frontier + once, ssd_frontier + among(size)
        if model.prefix == "bidirectional":
            clean, ssd_clean = clean + once, ssd_clean + among(size)
    return clean, frontier, ssd_clean, ssd_frontier


def direction_projection_flops(width: int, m: MambaConfig) -> int:
    """z, x, B, C, dt and output products of one direction for one token, and its short convolutions."""
    inner, shared = m.heads * m.head_dim, 2 * m.groups * m.state
    return 2 * width * (2 * inner + shared + m.heads) + 2 * inner * width + 2 * m.conv * (inner + shared)


def flops_per_token_paper(model: ModelConfig, vocab_size: int, context: int) -> int:
    """Forward FLOPs of one token after `context` tokens by the arithmetic of arXiv 2609.11998, section 5.4.

    It charges every query with all keys, both directions of Mamba with one product of the state, and no chunks.
    """
    m = model.mamba
    inner = m.heads * m.head_dim
    directions = 1 if m.directions == "forward" else 2
    mixers = {
        "A": attention_projection_flops(model) + 4 * context * model.heads * model.head_dim,
        "M": directions * (direction_projection_flops(model.width, m) + 2 * inner * m.state),
    }
    layers = sum(mixers[kind] + mlp_token_flops(model) for kind in layer_kinds(model))
    return layers + 2 * model.width * vocab_size
