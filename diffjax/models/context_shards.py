"""Rows split over the mesh axis `context`: the region in which mixers see one shard, and all that shards exchange.

Every shard holds T / c consecutive tokens of each row, whole blocks, and the frontiers that stand for them. What needs
the rest of the row crosses here and nowhere else: convolution inputs and one state a shard (Mamba), keys and values
(attention), and what single frontiers read of the shard that owns their block. `axis()` tells a mixer whether it runs
on shards at all; without one every exchange is the identity.

An all-gather names the rows and heads of the other mesh axes, like a kernel: the compiler has no rule for one and
would gather the rows of all devices.

Under `check_vma=False` gradients of arrays that all shards hold are summed over the shards on the way out of the
region, and cotangents of outputs that all shards hold arrive divided by their number.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from diffjax.kernels.dispatch import Split, split_over_mesh
from diffjax.kernels.precision import accumulation_dtype, einsum
from diffjax.models.placement import CONTEXT_AXIS as AXIS
from diffjax.models.streams import CleanStream, FrontierStream


def count() -> int:
    """How many shards the mesh in force cuts a row into."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def axis() -> str | None:
    """The axis to exchange over, or None where rows are whole."""
    return AXIS if AXIS in jax.sharding.get_abstract_mesh().manual_axes else None


def on_shards(backbone: Callable) -> Callable:
    """`backbone(params, clean [B, L, D], frontier [B, F, G, D], clean_stream, frontier_stream)` on each shard.

    It returns ((clean, frontier), contexts, auxiliary), the last two without arrays. The clean stream is split over
    tokens; frontiers are split with their blocks where there is one for each block, else every shard holds all. Of the
    mesh only the axis `context` is taken by hand: data, fsdp and tensor stay the compiler's.
    """

    def split_backbone(params, clean, frontier, clean_stream: CleanStream, stream: FrontierStream):
        whole, split = PartitionSpec(), PartitionSpec(None, AXIS)
        by_block = split if stream.index is None else whole
        clean_specs = CleanStream(split, split, split, split, split, whole, whole)
        clean_stream = clean_stream._replace(reset=clean_stream.reset[:, :-1])  # one for each block; the edge behind

        def one_shard(params, clean, frontier, clean_stream, stream):
            reset = jnp.pad(clean_stream.reset, [(0, 0), (0, 1)])  # the shard's last block comes back here
            tokens = jnp.full_like(clean_stream.count, clean.shape[1])
            clean_stream = clean_stream._replace(reset=reset, count=tokens)
            hidden, *others = backbone(params, clean, frontier, clean_stream, stream)
            if jax.tree.leaves(others):
                raise NotImplementedError("auxiliary outputs of shards have no rule yet that combines them")
            return hidden, *others

        return jax.shard_map(
            one_shard,
            in_specs=(whole, split, by_block, clean_specs, by_block),
            out_specs=((split, by_block), whole, whole),
            axis_names={AXIS},
            check_vma=False,
        )(params, clean, frontier, clean_stream, stream)

    return split_backbone


def gather_tokens(array: Array) -> Array:
    """[B, T / c, H, P] of every shard -> [B, T, H, P] on every shard."""
    if axis() is None:
        return array
    gather = lambda array: jax.lax.all_gather(array, AXIS, axis=1, tiled=True)
    return split_over_mesh(gather, (Split(0, 2),), Split(0, 2))(array)


def left_tail(array: Array, width: int) -> Array:
    """The `width` tokens before this shard's own [B, T / c, ...], zeros before the row's first: [B, width, ...].

    A shard shorter than the tail needs several shards to its left, which send what they have in turn.
    """
    length, shards, parts = array.shape[1], count(), []
    for hop in range(1, -(-width // length) + 1):
        piece = array[:, max(0, hop * length - width) :]
        to_right = [(shard, shard + hop) for shard in range(shards - hop)]
        # Shards to which nobody sends get zeros.
        parts.append(jax.lax.ppermute(piece, AXIS, to_right) if to_right else jnp.zeros_like(piece))
    return jnp.concatenate([*reversed(parts), array[:, :0]], axis=1)


def entering_state(x: Array, dt: Array, A: Array, Bm: Array, reset: Array) -> Array:
    """The state with which the scan of `diffjax.kernels.ssd.ssd_scan` comes to this shard, [B, H, P, N].

    x [B, T / c, H, P], dt [B, T / c, H], A [H], Bm [B, T / c, g, N]; reset [B, n] bool, block k of the shard starts a
    document. Each shard sends one state, what its tokens leave from zero, and one decay a head; the
    recurrence is associative, so that a sum over the shards to the left is their state. 2 P N FLOP a token and head.
    """

    def exchange(*own):
        return combine(*(jax.lax.all_gather(array, AXIS) for array in own), jax.lax.axis_index(AXIS))

    decay, state = summary(x, dt, A, Bm, reset)
    splits = (Split(0, 1), Split(0), Split(0, 1)), Split(0, 1)
    return split_over_mesh(exchange, *splits)(decay, reset.any(axis=1), state)


def summary(x: Array, dt: Array, A: Array, Bm: Array, reset: Array) -> tuple[Array, Array]:
    """What a run of tokens does to a state: (log decay [B, H] over all of them, whatever resets lie between; state
    [B, H, P, N] that they leave from zero, tokens before the last reset left out)."""
    batch, length, heads, head_dim = x.shape
    groups, size = Bm.shape[2], length // reset.shape[1]
    starts = jnp.repeat(reset, size, axis=1) & (jnp.arange(length) % size == 0)
    decay = dt * A
    weighted = ((kept_to_end(decay, starts, axis=1) * dt)[..., None] * x).astype(x.dtype)
    weighted = weighted.reshape(batch, length, groups, heads // groups, head_dim)
    state = einsum("btgrp,btgn->bgrpn", weighted, Bm).reshape(batch, heads, head_dim, -1)
    return decay.sum(axis=1), state.astype(accumulation_dtype(x.dtype))


def combine(decays: Array, cuts: Array, states: Array, shard: Array | int) -> Array:
    """The state [B, H, P, N] entering `shard`, from the summaries of all c shards: decays [c, B, H], states
    [c, B, H, P, N], cuts [c, B] bool (a document starts in the shard)."""
    left = (jnp.arange(decays.shape[0]) < shard)[:, None]
    kept = kept_to_end(jnp.where(left[..., None], decays, 0), cuts & left, axis=0)
    return jnp.sum(kept[..., None, None] * jnp.where(left[..., None, None, None], states, 0), axis=0)


def kept_to_end(decay: Array, cut: Array, axis: int) -> Array:
    """The share of what element t leaves that lasts to the end: exp(sum of log decays [..., H] of later elements), 0
    where a later element is `cut` [...] (forgets what came before it).

    Sums run from the right, and never as a difference: the elements that still count, near the end, have the short and
    exact ones.
    """

    def of_later(array):
        shifted = jax.lax.slice_in_dim(array, 1, None, axis=axis)
        pads = [(0, 0)] * array.ndim
        pads[axis] = (0, 1)
        return jax.lax.cumsum(jnp.pad(shifted, pads), axis, reverse=True)

    forgotten = of_later(cut.astype(jnp.int32)) > 0
    return jnp.exp(jnp.where(forgotten[..., None], -jnp.inf, of_later(decay)))


def of_owner(read: Callable[[Array], Array], index: Array, blocks: int) -> Array:
    """`read(index)` [B, F, ...] for blocks `index` [B, F] of the row, of which this shard holds `blocks` consecutive
    ones: the shard that owns a block reads it and all shards get it."""
    if axis() is None:
        return read(index)
    own = index - jax.lax.axis_index(AXIS) * blocks
    values = read(jnp.clip(own, 0, blocks - 1))
    owned = (own >= 0) & (own < blocks)
    owned = owned.reshape(*owned.shape, *(1,) * (values.ndim - 2))
    return jax.lax.psum(jnp.where(owned, values, 0), AXIS)
