"""Where named dimensions lie on the mesh: the one table of rules, and the constraint that activations take from it."""

import difflib
import math

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES, CONTEXT_AXIS = ("data", "fsdp"), "context"

Rules = dict[str, str | tuple[str, ...] | None]

# Logical name of a parameter's dimension -> the mesh axis it is split over, or None where it stays whole.
RULES: Rules = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "ssm_heads": "tensor",
    "ssm_head_dim": None,
    "groups": None,
    "state": None,
    "conv": None,
    "layers": None,
}
# The same of activations: features lie as in the parameters, but rows have the axis that splits a parameter's width.
ACTIVATION_RULES: Rules = {
    **RULES,
    "embed": None,
    "batch": BATCH_AXES,
    "length": CONTEXT_AXIS,
    "frontier": CONTEXT_AXIS,
    "block": None,
    "lookup_batch": "data",  # between table and rows, see denoiser.Embedding
    "lookup_embed": RULES["embed"],
}


def constrain(x: Array, *names: str | None) -> Array:
    """`x`, with the compiler told how it lies on the mesh in force; `x` itself without a mesh or on one device.

    Args:
      names: the logical name of every dimension of x, None for one that stays whole.

    A mesh axis that does not divide its dimension (a batch of one row) is left out, and so is one that is Manual where
    this is traced (inside `jax.shard_map` the array is a device's own part of it already).

    Raises:
      ValueError: a name without a rule, or another number of names than dimensions.
    """
    if len(names) != x.ndim:
        raise ValueError(f"an array of {x.ndim} dimensions got {len(names)} names {names}")
    wanted = [axes_of(name, ACTIVATION_RULES) for name in names]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    automatic = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    spec = []
    for length, axes in zip(x.shape, wanted, strict=True):
        kept = tuple(axis for axis in axes if axis in automatic)
        while length % math.prod(mesh.shape[axis] for axis in kept):
            kept = kept[:-1]
        spec.append(kept or None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def axes_of(name: str | None, rules: Rules) -> tuple[str, ...]:
    """The mesh axes that a logical name stands for. Raises ValueError for a name without a rule."""
    if name is None:
        return ()
    if name not in rules:
        nearest = difflib.get_close_matches(name, rules, n=1, cutoff=0.0)[0]
        raise ValueError(f"logical axis '{name}' has no rule; nearest '{nearest}'")
    target = rules[name]
    return (target,) if isinstance(target, str) else tuple(target or ())
