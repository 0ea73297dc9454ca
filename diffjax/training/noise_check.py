"""The check that a mesh draws the noise of one device: what repeating a run on other hardware rests on."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from diffjax.data.batch import Batch
from diffjax.parallel import mesh as mesh_lib

ROWS = 8  # at least, and as many as it takes for every device to draw one


def check_noise(draw_noise: Callable, batch: Batch, mesh: Mesh) -> None:
    """Draw the noise of some full rows on the mesh and on one device, and compare.

    Random numbers that changed with the number of shards were reported on large meshes (jax issues 21232, 40232).
    Masks and blocks must be equal; rates and weights are computed from the draws and may be rounded apart.

    Args:
      draw_noise: (step, batch) -> pytree of arrays [B, ...].
      batch: the abstract global batch.

    Raises:
      RuntimeError: they differ.
    """
    if mesh.size == 1:
        return
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = -(-ROWS // parts) * parts
    full = jax.tree.map(lambda leaf: np.ones((rows, *leaf.shape[1:]), leaf.dtype), batch)
    full = full._replace(row=np.arange(rows, dtype=np.int32))
    some = lambda numbers: Batch(*(array[numbers] for array in full))
    split = mesh_lib.global_batch(some, rows, mesh_lib.batch_sharding(mesh))
    on_mesh = jax.tree.map(mesh_lib.to_host, _draw(draw_noise, split, mesh))

    device = mesh.local_devices[0]
    shape = (1,) * len(mesh.axis_names)
    one = Mesh(np.array([device]).reshape(shape), mesh.axis_names, (AxisType.Auto,) * len(shape))
    alone = jax.tree.map(np.asarray, _draw(draw_noise, jax.device_put(full, device), one))
    for path, got, want in zip(mesh_lib.paths(alone), *map(jax.tree.leaves, (on_mesh, alone)), strict=True):
        floating = np.issubdtype(want.dtype, np.floating)
        wrong = ~np.isclose(got, want, rtol=1e-6, atol=1e-6) if floating else got != want
        if wrong.any():
            sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
            raise RuntimeError(
                f"the noise drawn on the mesh ({sizes}) is not that of one device: '{path}' differs in "
                f"{wrong.reshape(rows, -1).any(axis=1).sum()} of {rows} rows; a run on this mesh could not be repeated"
            )


def _draw(draw_noise: Callable, batch: Batch, mesh: Mesh):
    with jax.set_mesh(mesh):
        return jax.jit(draw_noise)(np.int32(0), batch)
