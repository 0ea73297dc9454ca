"""The device mesh, the rules that place named dimensions on it, and the placement of batches. Knows no model."""

import math
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from diffjax.config import MeshConfig
from diffjax.data.batch import Batch
from diffjax.errors import UserError
from diffjax.models.placement import AXES, BATCH_AXES, CONTEXT_AXIS, RULES, axes_of


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """A mesh over exactly `devices` (default: all), axes data, fsdp, context, tensor; one size may be -1 and fills up.

    The axes are always of type Auto: under Explicit, embedding lookups and cross-entropy on a split vocabulary raise.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(config, len(devices))
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def make_abstract_mesh(config: MeshConfig, devices: int) -> AbstractMesh:
    """The mesh of so many devices without the devices: enough for shapes and shardings."""
    return AbstractMesh(mesh_sizes(config, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """The sizes of the axes over exactly so many devices. Raises UserError where they do not multiply to that."""
    sizes = [getattr(config, axis) for axis in AXES]
    for axis, size in zip(AXES, sizes, strict=True):
        if size == 0 or size < -1:
            raise UserError(f"mesh.{axis}={size}: an axis is a positive number, or -1 to fill")
    if sizes.count(-1) > 1:
        open_axes = ", ".join(f"mesh.{axis}" for axis, size in zip(AXES, sizes, strict=True) if size == -1)
        raise UserError(f"mesh: only one axis can be -1, but {open_axes} are")
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % fixed == 0:
        sizes[sizes.index(-1)] = devices // fixed
    elif -1 in sizes:
        raise UserError(
            f"mesh: the fixed axes multiply to {fixed}, which does not divide the {devices} devices present"
        )
    if math.prod(sizes) != devices:
        raise UserError(
            f"mesh: {'*'.join(AXES)} = {math.prod(sizes)}, but {devices} devices are present; "
            "set one axis to -1 to fill"
        )
    return tuple(sizes)


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
        try:
            mesh_axes = axes_of(logical, rules)
        except ValueError as error:
            raise UserError(f"{label}: {error}") from None
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
        spec.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
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


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are split over data and fsdp; everything else is whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_sharding(mesh: Mesh) -> Batch:
    """Where each array of a batch lies: rows are split over data and fsdp, tokens and blocks of a row over context."""
    rows = row_sharding(mesh)
    tokens = NamedSharding(mesh, PartitionSpec(BATCH_AXES, CONTEXT_AXIS))
    return Batch(tokens=tokens, segments=tokens, valid=tokens, scored=tokens, row=rows)


def place_whole(tree, sharding: NamedSharding):
    """Host arrays, the same on every process, as global arrays; each device takes its part, nothing is sent around."""
    place = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])
    return jax.tree.map(place, tree)


def to_host(array: jax.Array) -> np.ndarray:
    """A global array as a host array on every process, all of which must call."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def global_batch(read_rows: Callable[[np.ndarray], Batch], batch_size: int, sharding: Batch) -> Batch:
    """Assemble a global batch from the rows that this process's devices hold, each array in its `sharding`.

    read_rows(numbers [n] int) -> Batch of numpy arrays with those rows of the global batch, in that order.
    """
    held = sharding.row.addressable_devices_indices_map((batch_size,)).values()
    numbers = np.unique(np.concatenate([np.arange(batch_size)[index] for index in held]))
    rows = read_rows(numbers)

    def assemble(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
        def part(index):
            wanted = np.arange(batch_size)[index[0]]
            return values[np.searchsorted(numbers, wanted)][(slice(None), *index[1:])]

        return jax.make_array_from_callback((batch_size, *values.shape[1:]), sharding, part)

    return Batch(*map(assemble, rows, sharding))
