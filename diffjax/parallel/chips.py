"""Accelerators by name: what a topology's devices are called, how much memory they give a program, their peak.

Imports no JAX, so that a wrong name is told at once.
"""

import math
import re
from dataclasses import dataclass

from diffjax.errors import UserError

GIB = 2**30
TERA = 1e12

# Set before JAX is imported: planning starts no accelerator, and asks no cloud which one this machine has.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    name           the platform in `v5e:16x16`
    platform       "tpu", "gpu" or "cpu"
    device_kinds   what `jax.Device.device_kind` says
    memory         bytes of one device that a program may use; None where no limit is stated
    peak           dense bfloat16 FLOP/s of one chip; None where none is stated
    devices        JAX devices of one chip
    dimensions     lengths that a slice's shape has
    example        a slice that exists
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    memory: int | None
    peak: float | None
    devices: int = 1
    dimensions: int = 1
    example: str = ""


# TPU memory: the limit that libtpu's compiler (0.0.42.1) states for the topology. TPU peaks: the system architecture
# pages at docs.cloud.google.com/tpu. GPU memory and peaks: NVIDIA's data sheets (dense, SXM boards), so a process has a
# little less than that memory.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", ("TPU v4",), int(30.75 * GIB), 275 * TERA, dimensions=3, example="v4:2x2x1"),
        Chip("v5e", "tpu", ("TPU v5 lite",), int(15.75 * GIB), 197 * TERA, dimensions=2, example="v5e:16x16"),
        Chip("v5p", "tpu", ("TPU v5",), int(95.74 * GIB), 459 * TERA, dimensions=3, example="v5p:4x4x8"),
        Chip("v6e", "tpu", ("TPU v6 lite",), int(31.25 * GIB), 918 * TERA, dimensions=2, example="v6e:16x16"),
        Chip("tpu7x", "tpu", ("TPU7x",), int(94.75 * GIB), 2307 * TERA, 2, dimensions=3, example="tpu7x:2x2x1"),
        Chip("h100", "gpu", ("NVIDIA H100 80GB HBM3",), 80 * 10**9, 989 * TERA, example="h100:8"),
        Chip("h200", "gpu", ("NVIDIA H200",), 141 * 10**9, 989 * TERA, example="h200:8"),
        Chip("cpu", "cpu", ("cpu",), None, None, example="cpu:8"),
    )
}


@dataclass(frozen=True)
class Topology:
    """A named set of devices: `shape` in chips, `devices` as JAX counts them."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices


def topology(name: str) -> Topology:
    """The topology `v5e:16x16`, `cpu:8`, `h100:8`. Raises UserError for any other spelling, with the right ones."""
    platform, colon, sizes = name.partition(":")
    chip = CHIPS.get(platform)
    if not colon or chip is None:
        examples = ", ".join(chip.example for chip in CHIPS.values())
        raise UserError(f"topology '{name}' is not known: write a chip and the shape of the slice, such as {examples}")
    shape = re.fullmatch("x".join([r"([1-9]\d{0,5})"] * chip.dimensions), sizes)
    if shape is None:
        numbers = "one number" if chip.dimensions == 1 else f"{chip.dimensions} numbers joined by x"
        raise UserError(f"topology '{name}': the shape of {platform} is {numbers}, such as {chip.example}")
    return Topology(name, chip, tuple(map(int, shape.groups())))


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of one device that JAX calls `device_kind`; None for a kind that is not in the table."""
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds and chip.peak is not None:
            return chip.peak / chip.devices
    return None
