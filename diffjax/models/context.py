"""The context: all that a frontier may know of the finished blocks, as one pytree."""

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from diffjax.models.attention import AttentionContext


@flax.struct.dataclass
class Context:
    """length [B] int32, tokens absorbed; layers, by unit and tail, an AttentionContext or a MambaContext for each run
    of layers, stacked over the run and over the repeats of the unit.

    Attention holds 2 * Hkv * P * capacity numbers a row and layer; Mamba 1 state H * P * N and (W-1)(H * P + 2 g N)
    inputs, whatever was read.
    """

    length: Array
    layers: dict


def is_attention(node) -> bool:
    return isinstance(node, AttentionContext)


def capacity_of(context: Context) -> int | None:
    """Tokens the context can hold, or None when nothing in it grows."""
    nodes = [node for node in jax.tree.leaves(context.layers, is_leaf=is_attention) if is_attention(node)]
    return nodes[0].k.shape[-3] if nodes else None


def grow(context: Context, capacity: int) -> Context:
    """The same context with room for `capacity` tokens.

    Raises:
      ValueError: the capacity is smaller than the present one.
    """
    present = capacity_of(context)
    if present is None or present == capacity:
        return context
    if capacity < present:
        raise ValueError(f"a context of capacity {present} cannot shrink to {capacity}")

    def pad(array: Array) -> Array:
        pads = [(0, 0)] * array.ndim
        pads[-3] = (0, capacity - present)
        return jnp.pad(array, pads)

    grown = lambda node: AttentionContext(pad(node.k), pad(node.v)) if is_attention(node) else node
    return context.replace(layers=jax.tree.map(grown, context.layers, is_leaf=is_attention))
