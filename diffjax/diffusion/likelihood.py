"""Estimators of the NELBO: the upper bound, in nats, that a masked diffusion over each block puts on -log p(text).

For a block with n scored tokens, M a set of hidden ones and CE_j(M) the cross-entropy of token j when M is hidden, the
mask id being left out of the softmax (arXiv 2503.09573; the equality of the forms: arXiv 2406.03736):

    NELBO_b = int_0^1 (1/t) E_M[sum_{j in M} CE_j] dt                            `time` (t from LOWEST_RATE on)
            = sum_{k = 1..n} E_{|M| = k}[(1/k) sum_{j in M} CE_j]                `count`
            = sum_M (k-1)! (n-k)! / n! sum_{j in M} CE_j                         `oracle`, exact
            = E_order[sum_i -log p(x_order(i) | x_order(<i), earlier blocks)]    `chain`

An estimator chooses queries, knowing nothing of the model; `block_nats` asks a denoiser and sums. Draws depend on
(seed, replicate, row in the split, block, sample) alone: neither on the batch nor on a training step.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from diffjax.data.batch import Batch
from diffjax.diffusion.corruption import (
    EVALUATION_MASK,
    EVALUATION_RATE,
    narrow,
    read_frontiers,
    stream_key,
    take_blocks,
    to_blocks,
    uniform,
)
from diffjax.diffusion.objectives import chunked_cross_entropy
from diffjax.diffusion.schedules import elbo_weight

LARGEST_ORACLE_BLOCK = 8
LOWEST_RATE = 1e-3  # `time` integrates over t in [1e-3, 1], as training does


class Queries(NamedTuple):
    """Which frontiers to score: sample i of block b is query i K + b, and all Q = samples * K share one clean pass.

    frontier_index  [B, Q] int32 block that query q denoises; None: Q = K, one sample, query b is block b
    masked          [B, Q, G] bool    what the query hides
    weight          [B, Q, G] float   factor of each token's cross-entropy in the estimate of its block's NELBO
    """

    frontier_index: Array | None
    masked: Array
    weight: Array


def block_nats(
    denoiser, params, batch: Batch, queries: Queries, mask_id: int, tail: str, chunk: int | None = None
) -> Array:
    """The estimate of every block's NELBO in nats: [B, K]. Rows do not meet: each depends on its own tokens alone.

    `denoiser` is anything with `train_hidden(params, clean, frontiers, frontier_index, segments=, clean_valid=,
    frontier_valid=) -> ([B, Q, G, D], ...)` and `logits(params, [..., D]) -> [..., V]`; `chunk` bounds the logits that
    exist at a time (`chunked_cross_entropy`). The mask id is taken out of the softmax: it is never text.
    """
    inputs, targets, valid = read_frontiers(batch, queries.frontier_index, queries.masked, mask_id, tail)
    hidden, *_ = denoiser.train_hidden(
        params,
        batch.tokens,
        inputs,
        queries.frontier_index,
        segments=batch.segments,
        clean_valid=batch.valid,
        frontier_valid=valid,
    )

    def logits_of_text(hidden):
        logits = denoiser.logits(params, hidden)
        return jnp.where(jnp.arange(logits.shape[-1]) == mask_id, -jnp.inf, logits)

    entropy = chunked_cross_entropy(logits_of_text, hidden, targets, chunk)
    nats = jnp.where(queries.masked, queries.weight * entropy, 0.0).sum(-1)
    return nats.reshape(nats.shape[0], -1, batch.segments.shape[1]).sum(1)


def count_queries(batch: Batch, seed: Array | int, replicate: Array | int, samples: int) -> Queries:
    """Draw how many tokens to hide, k ~ U{1..n}, then which; weight n/k. The default: the least variance per call.

    Counts are stratified over the samples and blocks of a row: sample i of block b has
    k = 1 + floor(n frac(u + (i K + b) / (samples K))) with one u per row and replicate; every k is equally likely.
    """
    index, scored, quantile, position = _draws(batch, seed, replicate, samples)
    tokens = scored.sum(-1)
    masked_tokens = 1 + jnp.minimum(tokens - 1, (tokens * quantile).astype(jnp.int32))
    masked = scored & (ranks(position, scored) < masked_tokens[..., None])
    weight = tokens / (jnp.maximum(masked_tokens, 1) * samples)
    return Queries(index, masked, _spread(weight, masked))


def time_queries(batch: Batch, seed: Array | int, replicate: Array | int, samples: int) -> Queries:
    """Draw a rate t ~ U[LOWEST_RATE, 1), hide each scored token with probability t; weight 1/t, as in training."""
    index, scored, quantile, position = _draws(batch, seed, replicate, samples)
    rate = LOWEST_RATE + (1.0 - LOWEST_RATE) * quantile
    masked = scored & (position < rate[..., None])
    return Queries(index, masked, _spread(elbo_weight(rate) / samples, masked))


def chain_queries(batch: Batch, seed: Array | int, replicate: Array | int, samples: int) -> Queries:
    """Random orders: reveal a block's tokens one by one, G queries a sample. An exact -log p of each order drawn."""
    _, scored, _, position = _draws(batch, seed, replicate, samples)
    order = ranks(position, scored)
    return order_queries(batch, order.reshape(order.shape[0], samples, -1, order.shape[-1]))


def order_queries(batch: Batch, order: Array) -> Queries:
    """The chains of given orders: order [B, samples, K, G] int32 numbers the scored tokens of a block 0 .. n-1."""
    rows, samples, blocks, size = order.shape
    scored = to_blocks(batch.valid & batch.scored, blocks)[:, None, None]
    step = jnp.arange(size)[:, None, None]
    masked = (scored & (order[:, :, None] >= step)).reshape(rows, -1, size)
    weight = (scored & (order[:, :, None] == step)).reshape(rows, -1, size) / samples
    return Queries(_tiled_index(rows, blocks, samples * size), masked, weight.astype(jnp.float32))


def oracle_queries(batch: Batch) -> Queries:
    """All 2^G - 1 masked sets of each block: the NELBO itself, without sampling. Block size at most 8 (ValueError)."""
    rows, blocks = batch.segments.shape
    scored = to_blocks(batch.valid & batch.scored, blocks)
    size = scored.shape[-1]
    if size > LARGEST_ORACLE_BLOCK:
        raise ValueError(f"the oracle enumerates 2^block_size masks; block_size {size} is above {LARGEST_ORACLE_BLOCK}")
    subsets = (np.arange(1, 2**size)[:, None] >> np.arange(size)) % 2 == 1
    # weights[n, k] = (k-1)! (n-k)! / n!, 0 where there is no such set.
    weights = np.zeros((size + 1, size + 1))
    for n in range(1, size + 1):
        for k in range(1, n + 1):
            weights[n, k] = math.factorial(k - 1) * math.factorial(n - k) / math.factorial(n)

    masked = subsets[:, None] & scored[:, None]  # [B, subsets, K, G]
    inside = ~(subsets[:, None] & ~scored[:, None]).any(-1)
    weight = jnp.where(inside, jnp.asarray(weights)[scored.sum(-1)[:, None], subsets.sum(-1)[:, None]], 0.0)
    masked = masked.reshape(rows, -1, size)
    return Queries(_tiled_index(rows, blocks, len(subsets)), masked, _spread(weight.reshape(rows, -1), masked))


ESTIMATORS = {"count": count_queries, "time": time_queries, "chain": chain_queries}


def estimate_queries(estimator: str, batch: Batch, seed: Array | int, replicate: Array | int, samples: int) -> Queries:
    """The queries of an estimator by name: count, time, chain (`samples` a block) or oracle (draws nothing)."""
    return oracle_queries(batch) if estimator == "oracle" else ESTIMATORS[estimator](batch, seed, replicate, samples)


def ranks(values: Array, scored: Array) -> Array:
    """Rank of each scored value among the scored values of its block, 0 the smallest; unscored ones come after them."""
    order = jnp.argsort(jnp.where(scored, values, jnp.inf), axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def _draws(batch: Batch, seed: Array | int, replicate: Array | int, samples: int):
    """What all estimators draw from, Q = samples * K.

    Returns frontier_index [B, Q] or None, scored [B, Q, G], stratified quantiles [B, Q], uniforms [B, Q, G].
    """
    rows, blocks = batch.segments.shape
    scored = to_blocks(batch.valid & batch.scored, blocks)
    index = _tiled_index(rows, blocks, samples)
    shift = uniform(narrow(stream_key(seed, EVALUATION_RATE, replicate), batch.row))
    quantile = (shift[:, None] + jnp.arange(samples * blocks, dtype=jnp.float32) / (samples * blocks)) % 1.0

    sample = jnp.arange(samples, dtype=jnp.int32)[:, None]
    block = jnp.arange(blocks, dtype=jnp.int32)
    keys = narrow(stream_key(seed, EVALUATION_MASK, replicate), batch.row)
    keys = narrow(keys, jnp.broadcast_to(block, (rows, samples, blocks)))
    keys = narrow(keys, jnp.broadcast_to(sample, (rows, samples, blocks)))
    position = uniform(keys.reshape(rows, -1), (scored.shape[-1],))
    return index, take_blocks(scored, index), quantile, position


def _tiled_index(rows: int, blocks: int, samples: int) -> Array | None:
    """[B, samples K]: 0 .. K-1 again and again; None for one sample, which is every block once in order."""
    return None if samples == 1 else jnp.tile(jnp.arange(blocks, dtype=jnp.int32), (rows, samples))


def _spread(weight: Array, masked: Array) -> Array:
    """One weight a query [B, Q] -> one a masked token [B, Q, G]."""
    return jnp.where(masked, weight[..., None], 0.0)
