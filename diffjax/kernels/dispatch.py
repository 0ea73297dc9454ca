"""Which backend runs, in one place: an explicit choice never falls back, `auto` says what it chose and why.

`auto` follows the platform of the devices of the mesh in force, which holds ahead of time for devices that are not
here. Without a mesh the platform is known only when the program is lowered: then every candidate is traced and
`jax.lax.platform_dependent` keeps one.
"""

import contextlib
import logging
import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from diffjax.errors import UnsupportedKernel

SAVED = "saved by a kernel"  # the name (jax.ad_checkpoint.checkpoint_name) of results that rematerialisation may keep
KERNELS = {"tpu": "pallas_tpu", "cuda": "pallas_triton"}  # what `auto` prefers; everything else runs the XLA form
LARGEST_OPERAND = 2**31  # elements; larger offsets do not fit the kernels' 32-bit index arithmetic
BATCH_AXES, HEAD_AXIS = ("data", "fsdp"), "tensor"  # mesh axes over which kernels may be split

log = logging.getLogger("diffjax.kernels")
decisions: dict[str, str] = {}  # one line for each operation and shape traced since `forget`: what was chosen and why
_logged: set[str] = set()
_interpreting = False
_shapes_only = False


class Choice(NamedTuple):
    """The backend of one call on each platform; `platform` is None where only lowering will tell."""

    platform: str | None
    backends: tuple[tuple[str, str], ...]  # (platform, backend); the platform "default" stands for all others

    @property
    def backend(self) -> str:
        """The backend on the platform, as far as that is known."""
        backends = dict(self.backends)
        return backends.get(self.platform, backends["default"])


def choose(operation: str, backend: str, refusals: dict[str, Callable[[], str | None]], shape: str) -> Choice:
    """The backends for one call of `operation`.

    Args:
      backend: the config's word, `auto` or one of the keys of `refusals`.
      refusals: for every backend a function that says in a sentence why it cannot take this call, or None.
      shape: the call's shape, for messages.

    Raises:
      UnsupportedKernel (a ValueError): there is no such backend, or the one named refuses this call.
    """
    if _shapes_only:
        return Choice(None, (("default", "xla"),))
    if backend != "auto":
        if backend not in refusals:
            known = ", ".join(refusals)
            raise UnsupportedKernel(f"kernels: {operation} has no backend '{backend}'; there are auto, {known}")
        if (refusal := refusals[backend]()) is not None:
            raise UnsupportedKernel(f"kernels: {backend} cannot run {operation} of {shape}: {refusal}")
        platform = mesh_platform()
        home = {kernel: where for where, kernel in KERNELS.items()}.get(backend, platform)
        if platform not in (None, home) and not _interpreting:
            why = f"it runs on {home}, and the mesh's devices are {platform}: use auto or xla"
            raise UnsupportedKernel(f"kernels: {backend} cannot run {operation}: {why}")
        _decide(operation, shape, backend, "the config names it")
        return Choice(platform, (("default", backend),))
    platform = mesh_platform()
    candidates = [platform] if platform else list(KERNELS)
    backends = [("default", "xla")]
    for candidate in candidates:
        kernel = KERNELS.get(candidate)
        refusal = refusals[kernel]() if kernel in refusals else f"no kernel for {candidate}"
        if refusal is None:
            backends.append((candidate, kernel))
    if platform is None:
        others = "".join(f", {name} on {where}" for where, name in backends[1:])
        _decide(operation, shape, f"xla{others}", "auto, no mesh is set: the platform decides when it is lowered")
    elif len(backends) > 1:
        _decide(operation, shape, backends[1][1], f"auto, the mesh's devices are {platform}")
    elif platform in KERNELS:
        _decide(operation, shape, "xla", f"auto, falls back: {KERNELS[platform]} {refusal}", logging.WARNING)
    else:
        _decide(operation, shape, "xla", f"auto, the mesh's devices are {platform}")
    return Choice(platform, tuple(backends))


def run(choice: Choice, modules: dict[str, ModuleType], function: str, specs, *args, **static):
    """Call `function` of the chosen backend module with arrays `args` and keyword arguments `static`.

    `specs` is (in, out), trees of `Split` for args and results: kernels are not partitioned by the compiler, so under a
    mesh of several devices they run inside `jax.shard_map`.
    """

    def call(name):
        implementation = getattr(modules[name], function)
        body = lambda *args: implementation(*args, **static)
        return split_over_mesh(body, *specs) if name.startswith("pallas") else body

    backends = dict(choice.backends)
    if choice.platform is None and len(backends) > 1:
        default = call(backends.pop("default"))
        kernels = {where: call(name) for where, name in backends.items()}
        return jax.lax.platform_dependent(*args, **kernels, default=default)
    return call(choice.backend)(*args)


class Split(NamedTuple):
    """How one array of a kernel lies on the mesh: the dimensions of rows and of heads, and whether shards of heads each
    hold a part of a sum (the gradient of an input that all heads read)."""

    rows: int | None
    heads: int | None = None
    partial_sum: bool = False


def parts_on_mesh(rows: list[int], heads: list[int]) -> tuple[int, int]:
    """Into how many parts the mesh in force cuts arrays of so many rows and heads: what one device's kernel gets."""
    mesh = jax.sharding.get_abstract_mesh()
    part = lambda names, sizes: math.prod(mesh.shape[axis] for axis in _dividing_axes(mesh, names, sizes))
    return part(BATCH_AXES, rows), part((HEAD_AXIS,), heads)


def split_over_mesh(body: Callable, splits_in, splits_out) -> Callable:
    """`body` on each device's rows and heads, where the mesh has several devices; else `body` itself. Inside a region
    that holds some mesh axes already, the others are split."""
    mesh = jax.sharding.get_abstract_mesh()
    free_axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if mesh.empty or mesh.size == 1:
        return body
    is_split = lambda node: isinstance(node, Split)

    def split_call(*args):
        flat = list(zip(jax.tree.leaves(splits_in, is_leaf=is_split), jax.tree.leaves(args), strict=True))
        rows = [array.shape[split.rows] for split, array in flat if split.rows is not None]
        heads = [array.shape[split.heads] for split, array in flat if split.heads is not None]
        row_axes = _dividing_axes(mesh, BATCH_AXES, rows)
        head_axes = _dividing_axes(mesh, (HEAD_AXIS,), heads)

        def spec(split: Split) -> PartitionSpec:
            places = {split.rows: row_axes or None, split.heads: head_axes or None}
            places.pop(None, None)
            return PartitionSpec(*(places.get(i) for i in range(max(places, default=-1) + 1)))

        def summed(*shards):
            results = body(*shards)
            add = lambda split, array: jax.lax.psum(array, head_axes) if split.partial_sum and head_axes else array
            return jax.tree.map(add, splits_out, results, is_leaf=is_split)

        specs = lambda splits: jax.tree.map(spec, splits, is_leaf=is_split)
        return jax.shard_map(
            summed,
            mesh=mesh,
            in_specs=specs(splits_in),
            out_specs=specs(splits_out),
            axis_names=free_axes,
            check_vma=False,
        )(*args)

    return split_call


def mesh_platform() -> str | None:
    """ "cpu", "tpu" or "cuda" for the devices of the mesh in force, also of one ahead of time; None without a mesh."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = getattr(device, "platform", None)
    return "cuda" if platform == "gpu" else platform


def local_platform() -> str:
    """The platform of this process's devices; for choices that cost no correctness."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


@contextlib.contextmanager
def interpreted_kernels():
    """Trace Pallas kernels for their interpreters (tests: correct on any machine, slow)."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


@contextlib.contextmanager
def shapes_only():
    """Trace for the shapes of results, such as a model's parameters: nothing runs, so nothing is chosen or told."""
    global _shapes_only
    before, _shapes_only = _shapes_only, True
    try:
        yield
    finally:
        _shapes_only = before


def forget() -> None:
    """Start an empty list of decisions: those of another run."""
    decisions.clear()
    _logged.clear()


def interpreting() -> bool:
    """Whether kernels traced now are for the interpreter."""
    return _interpreting


def _dividing_axes(mesh, names, sizes) -> tuple[str, ...]:
    """The leading axes of `names` whose product divides every one of `sizes`; the others hold copies."""
    axes = ()
    for name in names:
        shards = math.prod(mesh.shape[axis] for axis in axes) * mesh.shape.get(name, 1)
        if name in mesh.shape and all(size % shards == 0 for size in sizes):
            axes = (*axes, name)
    return axes


def _decide(operation: str, shape: str, chosen: str, why: str, level: int = logging.INFO) -> None:
    """Keep a decision for its shape; log it once, a fall-back once for each shape."""
    line = f"{operation} {shape}" if level > logging.INFO else operation
    line = f"kernels: {line}: {chosen} ({why})"
    decisions[f"{operation} {shape}"] = f"{chosen} ({why})"
    if line not in _logged:
        _logged.add(line)
        log.log(level, line)
