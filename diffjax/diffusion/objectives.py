"""The training objective: a loss as a sum and its divisor, so that microbatches and hosts add up and divide once."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from diffjax.config import ObjectiveConfig
from diffjax.data.batch import Batch
from diffjax.diffusion.corruption import Noise, corrupt

Metrics = dict[str, tuple[Array, Array]]
Objective = Callable[[dict, Batch, Noise], tuple[Array, Array, Metrics]]


def cross_entropy(logits: Array, targets: Array) -> Array:
    """-log softmax(logits)[target] in nats: [..., V] and [...] int32 -> [...], in at least float32.

    A gather, not a one-hot product: forward and backward at [4096, 2048] take 35 ms on two CPU cores against 65.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target_logit


def chunked_cross_entropy(
    logits_of: Callable[[Array], Array], hidden: Array, targets: Array, chunk: int | None = None
) -> Array:
    """`cross_entropy(logits_of(hidden), targets)`, the logits of at most `chunk` tokens of each row at a time.

    hidden [B, ..., D] and targets [B, ...] int32 -> [B, ...] in at least float32; `chunk` None takes all at once. The
    backward pass makes each chunk's logits again: the head costs a third more, and no [tokens, V] array exists.

    The number of chunks n is the smallest that divides a row's tokens and keeps to `chunk`. Chunk i holds every n-th
    token from token i on, so that each device keeps the part of the row it has.
    """
    batch, tokens = targets.shape[0], math.prod(targets.shape[1:])
    count = -(-tokens // (chunk or max(tokens, 1)))
    if count <= 1:
        return cross_entropy(logits_of(hidden), targets)
    count = next(n for n in range(count, tokens + 1) if tokens % n == 0)

    def by_chunk(array):
        return jnp.moveaxis(array.reshape(batch, tokens // count, count, *array.shape[targets.ndim :]), 2, 0)

    entropy_of = jax.checkpoint(lambda part: cross_entropy(logits_of(part[0]), part[1]), prevent_cse=False)
    entropies = jax.lax.map(entropy_of, (by_chunk(hidden), by_chunk(targets)))
    return jnp.moveaxis(entropies, 0, 2).reshape(targets.shape)


def is_bound(objective: ObjectiveConfig) -> bool:
    """Whether the expected diffusion loss bounds -log p from above: weight 1/t over the whole range of rates.

    The range starts at 1e-3, the lowest the config takes, since 1/t would let single tokens rule the gradient.
    """
    low, high = objective.mask_rate
    return objective.weighting == "elbo" and low <= 1e-3 and high == 1.0


def block_diffusion(
    denoiser, objective: ObjectiveConfig, mask_id: int, tail: str, chunk: int | None = None
) -> Objective:
    """The block-diffusion loss of `denoiser`: (params, batch, noise) -> (numerator, denominator, metrics).

    `denoiser` offers train_hidden and logits; `chunk` bounds the logits that exist at a time (`chunked_cross_entropy`).

    numerator    sum over masked tokens of weight * cross-entropy (nats, softmax over all V ids, the mask among them),
                 plus `autoregressive` * the next-token cross-entropies of the clean stream
    denominator  scored tokens of the rows, masked or not
    metrics      name -> (sum, weight); after adding over microbatches and hosts a value is sum / max(weight, 1),
                 so a count carries weight 0

    All are float32 scalars (float64 for a float64 model). Add numerators and denominators, then divide once by
    max(denominator, 1): a batch without a masked token has loss 0 and gradients of exactly 0.
    """

    def loss(params, batch: Batch, noise: Noise) -> tuple[Array, Array, Metrics]:
        inputs, targets, weight, valid = corrupt(batch, noise, mask_id, tail)
        hidden, clean_hidden, _ = denoiser.train_hidden(
            params,
            batch.tokens,
            inputs,
            noise.frontier_index,
            segments=batch.segments,
            clean_valid=batch.valid,
            frontier_valid=valid,
            clean_head=objective.autoregressive > 0.0,
        )
        cross_entropy_of = functools.partial(
            chunked_cross_entropy, functools.partial(denoiser.logits, params), chunk=chunk
        )
        entropy = cross_entropy_of(hidden, targets)
        diffusion = (weight * entropy).sum()
        scored = (batch.valid & batch.scored).sum(dtype=entropy.dtype)
        masked = noise.masked.sum(dtype=entropy.dtype)
        empty = (noise.weight > 0.0) & ~noise.masked.any(-1)
        count = jnp.zeros_like(scored)
        metrics = {
            "masked_ce": (jnp.where(noise.masked, entropy, 0.0).sum(), masked),
            "masked_tokens": (masked, count),
            "scored_tokens": (scored, count),
            "empty_frontiers": (empty.sum(dtype=entropy.dtype), count),
        }
        if is_bound(objective):
            metrics["nelbo_nats_per_token"] = (diffusion, scored)

        numerator = diffusion
        if clean_hidden is not None:
            next_token, predicted = next_token_cross_entropy(cross_entropy_of, clean_hidden, batch)
            numerator += objective.autoregressive * next_token
            metrics["diffusion_loss"] = (diffusion, scored)
            metrics["next_token_ce"] = (next_token, predicted)
        metrics["loss"] = (numerator, scored)
        return numerator, scored, jax.lax.stop_gradient(metrics)

    return loss


def next_token_cross_entropy(cross_entropy_of: Callable, hidden: Array, batch: Batch) -> tuple[Array, Array]:
    """Sum and number of the next-token cross-entropies of the clean stream, hidden [B, L, D] of which j predicts j + 1.

    A token counts if it is scored and its left neighbour is of the same document.
    """
    blocks = batch.segments.shape[1]
    block_size = batch.tokens.shape[1] // blocks
    document = jnp.repeat(batch.segments, block_size, axis=1)
    counted = (batch.valid & batch.scored)[:, 1:] & batch.valid[:, :-1] & (document[:, 1:] == document[:, :-1])
    counted = jnp.pad(counted, ((0, 0), (0, 1)))  # the last token predicts nothing
    entropy = cross_entropy_of(hidden, jnp.roll(batch.tokens, -1, axis=1))
    return jnp.where(counted, entropy, 0.0).sum(), counted.sum(dtype=entropy.dtype)
