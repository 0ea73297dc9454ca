"""The device mesh, the rules that place named dimensions on it, and the placement of batches. Knows no model."""

import difflib
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from diffjax.config import MeshConfig
from diffjax.data.batch import Batch
from diffjax.errors import UserError

AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")

# Logical name of a parameter's dimension -> the mesh axis it is split over, or None where it stays whole.
RULES: dict[str, str | tuple[str, ...] | None] = {
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


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """A mesh over exactly `devices` (default: all), axes data, fsdp, context, tensor; one size may be -1 and fills up.

    The axes are always of type Auto: under Explicit, embedding lookups and cross-entropy on a split vocabulary raise.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = [getattr(config, axis) for axis in AXES]
    for axis, size in zip(AXES, sizes, strict=True):
        if size == 0 or size < -1:
            raise UserError(f"mesh.{axis}={size}: an axis is a positive number, or -1 to fill")
    if sizes.count(-1) > 1:
        open_axes = ", ".join(f"mesh.{axis}" for axis, size in zip(AXES, sizes, strict=True) if size == -1)
        raise UserError(f"mesh: only one axis can be -1, but {open_axes} are")
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and len(devices) % fixed == 0:
        sizes[sizes.index(-1)] = len(devices) // fixed
    elif -1 in sizes:
        raise UserError(
            f"mesh: the fixed axes multiply to {fixed}, which does not divide the {len(devices)} devices present"
        )
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh: {'*'.join(AXES)} = {math.prod(sizes)}, but {len(devices)} devices are present; "
            "set one axis to -1 to fill"
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def leaf_path(path: tuple) -> str:
    """The one spelling of a leaf's place in a tree, e.g. `layers/unit/layer_0/mlp/up/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def paths(tree) -> list[str]:
    """The path of every leaf, in tree order."""
    return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def shardings(abstract_params, logical_axes, mesh: Mesh, rules=RULES):
    """The sharding of every parameter: a tree like `abstract_params`, of NamedSharding.

    Strict: an unknown logical name, a dimension that does not divide evenly and two dimensions on one mesh axis raise
    `UserError` naming the parameter. (Linen's resolver leaves the first whole and drops the last without a word.)
    """

    def place(path, leaf, names):
        return NamedSharding(mesh, _resolve(leaf_path(path), leaf.shape, names, dict(mesh.shape), rules))

    is_leaf = lambda node: isinstance(node, jax.ShapeDtypeStruct)
    return jax.tree_util.tree_map_with_path(place, abstract_params, logical_axes, is_leaf=is_leaf)


def _resolve(name: str, shape: tuple[int, ...], axes: tuple, sizes: dict[str, int], rules) -> PartitionSpec:
    label = f"{name} [{','.join(map(str, shape))}]"
    if len(axes) != len(shape):
        raise UserError(f"{label}: has {len(shape)} dimensions, but {len(axes)} logical axes {axes}")
    spec, taken = [], {}
    for dim, (length, logical) in enumerate(zip(shape, axes, strict=True)):
        if logical is not None and logical not in rules:
            nearest = difflib.get_close_matches(logical, rules, n=1, cutoff=0.0)[0]
            raise UserError(f"{label}: logical axis '{logical}' has no rule; nearest '{nearest}'")
        target = None if logical is None else rules[logical]
        mesh_axes = (target,) if isinstance(target, str) else tuple(target or ())
        for axis in mesh_axes:
            if axis in taken:
                raise UserError(f"{label}: '{taken[axis]}' and '{logical}' both map to mesh axis '{axis}'")
            taken[axis] = logical
        parts = math.prod(sizes[axis] for axis in mesh_axes)
        if length % parts:
            below = length - length % parts
            nearest = ", ".join(str(n) for n in (below, below + parts) if n)
            axis = "*".join(mesh_axes)
            raise UserError(
                f"{label}: dim {dim} '{logical}'={length} does not divide by mesh axis '{axis}'={parts}; "
                f"nearest {nearest}"
            )
        spec.append(target)
    return PartitionSpec(*spec)


def whole_leaves(abstract_params, placement) -> list[tuple[str, int]]:
    """Parameters that every device holds in full, largest first: (path, bytes)."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    whole = [
        (leaf_path(path), leaf.size * leaf.dtype.itemsize)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(placement), strict=True)
        if sharding.is_fully_replicated
    ]
    return sorted(whole, key=lambda item: -item[1])


def check_whole_leaves(config: MeshConfig, mesh: Mesh, whole: list[tuple[str, int]]) -> None:
    """Refuse a mesh that is meant to split parameters and yet leaves a large one whole on every device."""
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return
    for path, size in whole:
        if size > config.max_replicated_bytes:
            raise UserError(
                f"{path}: {size} bytes stay whole on every device, above mesh.max_replicated_bytes="
                f"{config.max_replicated_bytes}; split it by a rule or raise the limit"
            )


def init_sharded(init: Callable, placement, *args):
    """`init(*args)` with every leaf made on its own devices; no leaf is ever whole on one of them."""
    return jax.jit(init, out_shardings=placement)(*args)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are split over data and fsdp; everything else of a batch is whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def place_whole(tree, sharding: NamedSharding):
    """Host arrays, the same on every process, as global arrays; each device takes its part, nothing is sent around."""
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index]), tree
    )


def to_host(array: jax.Array) -> np.ndarray:
    """A global array as a host array on every process, all of which must call."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def global_batch(read_rows: Callable[[np.ndarray], Batch], batch_size: int, sharding: NamedSharding) -> Batch:
    """Assemble a global batch from the rows that this process's devices hold.

    read_rows(numbers [n] int) -> Batch of numpy arrays with those rows of the global batch, in that order.
    """
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    numbers = np.unique(np.concatenate([np.arange(batch_size)[index] for index in held]))
    rows = read_rows(numbers)

    def assemble(values: np.ndarray) -> jax.Array:
        def part(index):
            wanted = np.arange(batch_size)[index[0]]
            return values[np.searchsorted(numbers, wanted)][(slice(None), *index[1:])]

        return jax.make_array_from_callback((batch_size, *values.shape[1:]), sharding, part)

    return Batch(*map(assemble, rows))
