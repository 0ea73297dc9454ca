"""Adafactor's second moment (arXiv:1804.04235) for stacked matrices of any rank.

optax factors a leaf over its two largest axes. In a leaf of stacked layers or heads those need not be a matrix's input
and output, so here they are named; a matrix alone gets what optax gives it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from diffjax.training.parameter_roles import Layout

FACTORED_FROM = 128  # a matrix with a shorter side keeps its whole second moment: factors would save next to nothing
DECAY_POWER = 0.8
CLIP_RMS = 1.0


class SecondMoment(NamedTuple):
    """count int32, updates so far. Of a factored matrix `rows` (means over outputs) and `columns` (means over inputs),
    both of the parameter's rank with the averaged axes 1 long; of all else `whole`, of the parameter's shape.
    """

    count: jax.Array
    rows: optax.Params
    columns: optax.Params
    whole: optax.Params


def is_factored(shape: tuple[int, ...], layout: Layout) -> bool:
    return min(math.prod(shape[axis] for axis in side) for side in (layout.inputs, layout.outputs)) >= FACTORED_FROM


def scale_by_second_moment(layouts, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """g / sqrt(v), then cut to an RMS of 1 in each layer; v averages g^2 + epsilon^2.

    The average decays by min(1 - t^-0.8, beta2) at update t, so that the first is no average with zero.
    layouts: tree of Layout, like the parameters.
    """
    absent = optax.MaskedNode()

    def by_kind(factored: Callable | None, whole: Callable | None) -> Callable:
        """A function of (leaf, layout, *others) that is one or the other; None stores nothing."""

        def apply(leaf, layout, *others):
            function = factored if is_factored(leaf.shape, layout) else whole
            return absent if function is None else function(leaf, layout, *others)

        return apply

    def init(params):
        rows = by_kind(lambda leaf, layout: _zeros_without(leaf, layout.outputs), None)
        columns = by_kind(lambda leaf, layout: _zeros_without(leaf, layout.inputs), None)
        whole = by_kind(None, lambda leaf, layout: jnp.zeros_like(leaf))
        return SecondMoment(
            jnp.zeros((), jnp.int32), *(jax.tree.map(part, params, layouts) for part in (rows, columns, whole))
        )

    def update(gradients, state, params=None):
        count = state.count + 1
        decay = jnp.minimum(1.0 - count.astype(jnp.float32) ** -DECAY_POWER, beta2)
        average = lambda old, new: (decay * old + (1.0 - decay) * new).astype(new.dtype)
        rows = by_kind(lambda v, layout, old: average(old, v.mean(layout.outputs, keepdims=True)), None)
        columns = by_kind(lambda v, layout, old: average(old, v.mean(layout.inputs, keepdims=True)), None)
        whole = by_kind(None, lambda v, layout, old: average(old, v))
        squares = jax.tree.map(lambda g: g * g + epsilon**2, gradients)
        new = SecondMoment(
            count,
            jax.tree.map(rows, squares, layouts, state.rows),
            jax.tree.map(columns, squares, layouts, state.columns),
            jax.tree.map(whole, squares, layouts, state.whole),
        )
        scale = by_kind(
            lambda g, layout, row, column, _: (
                g * jax.lax.rsqrt(row / row.mean(layout.inputs, keepdims=True)) * jax.lax.rsqrt(column)
            ),
            lambda g, layout, row, column, v: g * jax.lax.rsqrt(v),
        )
        scaled = jax.tree.map(scale, gradients, layouts, new.rows, new.columns, new.whole)
        return jax.tree.map(_clip_layers, scaled, layouts), new

    return optax.GradientTransformation(init, update)


def _zeros_without(leaf: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.zeros([1 if axis in axes else length for axis, length in enumerate(leaf.shape)], leaf.dtype)


def _clip_layers(update: jax.Array, layout: Layout) -> jax.Array:
    own = tuple(range(layout.stacked, update.ndim))
    rms = jnp.sqrt(jnp.mean(update * update, own, keepdims=True))
    return update / jnp.maximum(1.0, rms / CLIP_RMS)
