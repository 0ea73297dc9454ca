"""Noise: which blocks of a row are frontiers, at which rate each is masked, and which of its tokens that hides.

Everything is a pure function of (seed, stream, step, row in the global batch, block in the row). Device mesh, host
count, microbatching and the other rows of a batch change nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from diffjax.config import ObjectiveConfig
from diffjax.data.batch import Batch
from diffjax.diffusion.schedules import loss_weight

# Streams of random numbers. A number, once used, keeps its meaning: changing it changes every run.
FRONTIER, RATE, MASK, DROPOUT, EVALUATION_RATE, EVALUATION_MASK = range(6)


class Noise(NamedTuple):
    """What a step draws before it sees the model: F slots a row; one without a frontier has weight 0 and no mask.

    frontier_index  [B, F] int32   block of the row that slot f denoises; None: F = K and slot f is block f
    rate            [B, F] float32 t, the probability with which a scored token of the block was masked
    masked          [B, F, G] bool the tokens that are hidden and have a loss
    weight          [B, F] float32 weight of a masked token's cross-entropy: (blocks / frontiers of the row) * w(t)
    """

    frontier_index: Array | None
    rate: Array
    masked: Array
    weight: Array


def stream_key(seed: Array | int, stream: int, *numbers: Array | int) -> Array:
    """The key of `stream` under `seed`, narrowed by each of `numbers` in turn (step, row, block)."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def narrow(keys: Array, numbers: Array) -> Array:
    """Keys narrowed by numbers [B, ...]: result[i, ...] = fold_in(keys[i], numbers[i, ...]); keys: [] or [B]."""
    keys = jnp.broadcast_to(keys.reshape(keys.shape + (1,) * (numbers.ndim - keys.ndim)), numbers.shape)
    return jax.vmap(jax.random.fold_in)(keys.reshape(-1), numbers.reshape(-1)).reshape(numbers.shape)


def uniform(keys: Array, shape: tuple[int, ...] = ()) -> Array:
    """One independent U[0, 1) draw of `shape` for every key: keys [...] -> float32 [..., *shape]."""
    draws = jax.vmap(lambda key: jax.random.uniform(key, shape, jnp.float32))(keys.reshape(-1))
    return draws.reshape(*keys.shape, *shape)


def to_blocks(tokens: Array, blocks: int) -> Array:
    """[B, L] -> [B, K, G]."""
    return tokens.reshape(tokens.shape[0], blocks, -1)


def take_blocks(array: Array, frontier_index: Array | None) -> Array:
    """Blocks [B, K, G] of each row in the order of its frontiers [B, F] -> [B, F, G]; None keeps all in order."""
    return array if frontier_index is None else jnp.take_along_axis(array, frontier_index[..., None], axis=1)


def select_frontiers(scorable: Array, slots: int, offset: Array) -> tuple[Array, Array]:
    """Spread the frontiers of each row evenly over its scorable blocks.

    A row with K_b scorable blocks [B, K] has F_b = min(slots, K_b) frontiers; frontier f is number
    (f K_b + offset) // F_b of them. They are distinct and ascending; over offsets [B] uniform on 0 .. K_b-1 each block
    is drawn with probability exactly F_b / K_b.
    Returns (frontier_index [B, F] int32, live [B, F] bool); slots f >= F_b are not live.
    """
    available = scorable.sum(-1, dtype=jnp.int32)[:, None]
    frontiers = jnp.minimum(available, slots)
    slot = jnp.arange(slots, dtype=jnp.int32)
    number = (slot * available + offset[:, None]) // jnp.maximum(frontiers, 1)
    # The block that holds scorable block `number` has exactly the blocks before it with a count of at most `number`.
    counted = jnp.cumsum(scorable, axis=-1, dtype=jnp.int32)
    index = (counted[:, None, :] <= number[..., None]).sum(-1, dtype=jnp.int32)
    return jnp.minimum(index, scorable.shape[-1] - 1), slot < frontiers


def draw(objective: ObjectiveConfig, seed: Array | int, step: Array | int, batch: Batch, rows_per_step: int) -> Noise:
    """The noise of one step for the rows of `batch`, any subset of the step's `rows_per_step` rows.

    With `stratified` the rates of a step are a shifted grid: slot f of row e has q = frac(u + (f R + e) / (F R)),
    u shared by the step, R = rows_per_step. Each is uniform on its own, a row's frontiers lie 1/F apart and the rows
    fill the gaps. `batch.row` numbers rows inside the step: 0 .. rows_per_step - 1.
    """
    blocks = batch.segments.shape[1]
    scored = to_blocks(batch.valid & batch.scored, blocks)
    scorable = scored.any(-1)
    slots = blocks if objective.frontiers == "all" else min(objective.frontiers, blocks)

    if slots == blocks:
        frontier_index, live, share = None, scorable, jnp.float32(1.0)
    else:
        available = scorable.sum(-1, dtype=jnp.int32)
        keys = narrow(stream_key(seed, FRONTIER, step), batch.row)
        offset = jax.vmap(lambda key, count: jax.random.randint(key, (), 0, count))(keys, jnp.maximum(available, 1))
        frontier_index, live = select_frontiers(scorable, slots, offset)
        share = (available / jnp.clip(available, 1, slots)).astype(jnp.float32)[:, None]
    slot = jnp.arange(slots, dtype=jnp.int32)
    block = jnp.broadcast_to(slot if frontier_index is None else frontier_index, live.shape)

    if objective.stratified:
        place = (slot * rows_per_step + batch.row[:, None]) / (slots * rows_per_step)
        quantile = (uniform(stream_key(seed, RATE, step)) + place.astype(jnp.float32)) % 1.0
    else:
        quantile = uniform(narrow(narrow(stream_key(seed, RATE, step), batch.row), block))
    low, high = objective.mask_rate
    rate = low + (high - low) * quantile

    position = uniform(narrow(narrow(stream_key(seed, MASK, step), batch.row), block), (scored.shape[-1],))
    scored = take_blocks(scored, frontier_index) & live[..., None]
    hidden = position < rate[..., None]
    if objective.min_one_mask:
        hidden |= position == jnp.where(scored, position, 2.0).min(-1, keepdims=True)
    weight = jnp.where(live, share * loss_weight(objective.weighting, rate), 0.0)
    return Noise(frontier_index, rate, scored & hidden, weight)


def read_frontiers(
    batch: Batch, frontier_index: Array | None, masked: Array, mask_id: int, tail: str
) -> tuple[Array, Array, Array]:
    """What the denoiser sees of its frontiers: (inputs [B, F, G] int32, targets [B, F, G] int32, valid [B, F, G] bool).

    Masked tokens read MASK. The pads after the last token of a document stand for positions that a sampler would meet
    as MASK, so `tail="mask_fill"` shows them so; otherwise they stay invalid. A block of pads alone is invalid.
    """
    blocks = batch.segments.shape[1]
    targets = take_blocks(to_blocks(batch.tokens, blocks), frontier_index)
    valid = take_blocks(to_blocks(batch.valid, blocks), frontier_index)
    if tail == "mask_fill":
        occupied = jnp.broadcast_to(valid.any(-1, keepdims=True), valid.shape)
        return jnp.where(masked | (occupied & ~valid), mask_id, targets), targets, occupied
    return jnp.where(masked, mask_id, targets), targets, valid


def corrupt(batch: Batch, noise: Noise, mask_id: int, tail: str) -> tuple[Array, Array, Array, Array]:
    """Apply `noise` to the rows: (inputs [B, F, G], targets [B, F, G], weight [B, F, G] float32, valid [B, F, G] bool).

    The weight of a token's cross-entropy is that of its frontier where it is masked, else 0.
    """
    inputs, targets, valid = read_frontiers(batch, noise.frontier_index, noise.masked, mask_id, tail)
    return inputs, targets, jnp.where(noise.masked, noise.weight[..., None], 0.0), valid
