"""The dry run: what a config asks of a set of devices, before any of them is paid for.

Three layers. Shapes and rules give parameters and bytes a device; counting gives FLOPs and context sizes; and, on
request, the real train step is compiled ahead of time for the devices named. Only the last needs a compiler for them.
"""

import contextlib
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from diffjax.config import Config
from diffjax.data.batch import abstract_batch
from diffjax.data.tokenizer import MASK, Tokenizer
from diffjax.diffusion.corruption import draw
from diffjax.diffusion.objectives import block_diffusion
from diffjax.errors import UserError
from diffjax.kernels import dispatch
from diffjax.models import flops
from diffjax.models.denoiser import Denoiser
from diffjax.parallel import mesh as mesh_lib
from diffjax.parallel.chips import Topology, topology
from diffjax.parallel.collectives import collectives
from diffjax.parallel.memory import bytes_on_a_device, context_bytes, temporaries
from diffjax.training.step import Layout, compile_step, lay_out, make_train_step

ASSUMED_UTILISATION = 0.4
REMAT_POLICIES = ("none", "block", "dots")
DOES_NOT_FIT = 3
TPU_EXTRA = "pip install 'diffjax[tpu-plan]'"


@dataclass(frozen=True)
class Memory:
    """What a step needs on each device under one rematerialisation policy.

    need           bytes; None where the compiler gave up without saying
    compiled       need is the compiler's figure, not an estimate
    parts          need by part; of a compiled step arguments, outputs, aliased (subtracted), temporaries, code
    flops_per_token          with what the backward pass computes again
    """

    remat: str
    need: int | None
    compiled: bool
    fits: bool
    parts: dict[str, int]
    flops_per_token: float
    compile_seconds: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one compiled step. Those in a loop count as often as it turns; `unknown` of them lie
    in loops whose length the program does not state, and are counted once there."""

    kind: str
    count: int
    bytes: int
    unknown: int


@dataclass(frozen=True)
class Plan:
    """The report. Bytes are per device unless the name says otherwise, FLOPs per token of a row.

    context_bytes_fixed_compute_dtype   the same, were the states of Mamba layers kept in the compute dtype
    flops_per_token                     forward and backward, attended pairs only: what MFU counts
    flops_per_token_paper               forward, after data.sequence_length tokens, by arXiv 2609.11998 section 5.4
    memory                              under the config's policy; `remat` has all that were asked for
    """

    topology: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    vocab_size: int
    parameters: int
    parameters_by_group: dict[str, int]
    whole_on_each_device: list[dict]
    state_bytes: dict[str, int]
    memory: Memory
    have: int | None
    margin: int | None
    fits: bool
    remat: list[Memory]
    context_bytes_per_token: int
    context_bytes_fixed: int
    context_bytes_fixed_compute_dtype: int
    context_bytes: dict[int, int]
    flops_per_token_paper: int
    flops_per_token: float
    flops_per_token_forward: float
    tokens_per_step: int
    flops_per_step: float
    assumed_utilisation: float
    assumed_step_seconds: float | None
    collectives: list[Traffic] | None
    kernels: dict[str, str]
    exit_code: int


def plan(
    config: Config,
    topology_name: str | None = None,
    *,
    compiled: bool = False,
    every_remat: bool = False,
    lengths: Sequence[int] = (),
) -> Plan:
    """What `config` needs on a topology (default: its mesh.topology).

    compiled: compile the train step for it and report the compiler's figures; every_remat: under all policies.
    lengths: tokens at which the size of a sequence's context is reported.

    Raises UserError: no topology, an unknown one, a config that its mesh does not divide, or no compiler for it.
    """
    name = topology_name or config.mesh.topology
    if name is None:
        raise UserError("plan: name the devices, with --topology or the key mesh.topology, such as v5e:16x16 or cpu:8")
    where = topology(name)
    path = config.data.tokenizer.path
    vocab_size = Tokenizer.load(path).vocab_size if path else config.data.tokenizer.vocab_size
    denoiser = Denoiser(config.model, vocab_size=vocab_size, kernels=config.kernels)
    mesh = mesh_lib.make_abstract_mesh(config.mesh, where.devices)
    layout = lay_out(config, denoiser, mesh)
    state = _state_bytes(config, layout, mesh)

    estimates = [_estimate(config, vocab_size, where, dict(mesh.shape), state, remat) for remat in REMAT_POLICIES]
    memories = {memory.remat: memory for memory in estimates}
    sent, kernels = None, {}
    if compiled:
        devices = _devices(where)
        for remat in REMAT_POLICIES if every_remat else (config.model.remat,):
            of_policy = replace(config, model=replace(config.model, remat=remat))
            memory, traffic = _compile(of_policy, vocab_size, where, devices)
            memories[remat] = replace(memories[remat], **memory)
            if remat == config.model.remat:
                sent, kernels = traffic, dict(dispatch.decisions)

    chosen, have = memories[config.model.remat], where.chip.memory
    length, rows = config.data.sequence_length, config.training.batch_size
    per_token = flops.flops_per_token(config, vocab_size)
    peak = where.chip.peak and where.chip.peak * math.prod(where.shape)
    fixed = context_bytes(denoiser, 0)
    growth = context_bytes(denoiser, 1) - fixed
    return Plan(
        topology=where.name,
        device_kind=where.chip.device_kinds[0],
        devices=where.devices,
        mesh=dict(mesh.shape),
        vocab_size=vocab_size,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(layout.state["params"])),
        parameters_by_group=_by_group(config, layout.state["params"]),
        whole_on_each_device=[{"path": path, "bytes": size} for path, size in layout.whole],
        state_bytes=state,
        memory=chosen,
        have=have,
        margin=None if have is None or chosen.need is None else have - chosen.need,
        fits=chosen.fits,
        remat=list(memories.values()),
        context_bytes_per_token=growth,
        context_bytes_fixed=fixed,
        context_bytes_fixed_compute_dtype=context_bytes(denoiser, 0, jnp.dtype(config.model.dtype)),
        context_bytes={tokens: fixed + tokens * growth for tokens in lengths or (length, 65536, 262144)},
        flops_per_token_paper=flops.flops_per_token_paper(config.model, vocab_size, length),
        flops_per_token=per_token,
        flops_per_token_forward=per_token / (1 + flops.BACKWARD),
        tokens_per_step=rows * length,
        flops_per_step=per_token * rows * length,
        assumed_utilisation=ASSUMED_UTILISATION,
        assumed_step_seconds=peak and per_token * rows * length / (ASSUMED_UTILISATION * peak),
        collectives=sent,
        kernels=kernels,
        exit_code=0 if chosen.fits else DOES_NOT_FIT,
    )


def _state_bytes(config: Config, layout: Layout, mesh) -> dict[str, int]:
    """Bytes a device of what lives from step to step, and of the batch and one set of gradients."""
    state, placement = layout.state, layout.placement
    batch = abstract_batch(config.training.batch_size, config.data.sequence_length, config.model.block_size)
    names = {"params": "parameters", "opt": "optimizer", "ema": "average"}
    sizes = {name: bytes_on_a_device(state[key], placement[key]) for key, name in names.items() if key in state}
    rest = [key for key in state if key not in names]
    sizes["counters"] = sum(bytes_on_a_device(state[key], placement[key]) for key in rest)
    return {**sizes, "batch": bytes_on_a_device(batch, mesh_lib.batch_sharding(mesh))}


def _estimate(config: Config, vocab_size: int, where: Topology, mesh_shape, state: dict, remat: str) -> Memory:
    parts = state | temporaries(config, vocab_size, mesh_shape, remat, state["parameters"])
    need = sum(parts.values())
    return Memory(
        remat=remat,
        need=need,
        compiled=False,
        fits=where.chip.memory is None or need <= where.chip.memory,
        parts=parts,
        flops_per_token=flops.hardware_flops_per_token(config, vocab_size, remat),
    )


def _by_group(config: Config, params) -> dict[str, int]:
    """Parameters of the embedding, the head, mixers by kind, MLPs and the norms between them."""
    groups: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        first, *words = mesh_lib.leaf_path(path).split("/")
        group = {"embed": "embedding", "head": "head", "norm": "norms"}.get(first)
        if group is None:
            _, layer, part, *_ = words
            kind = config.model.pattern[int(layer.removeprefix("layer_"))]
            group = {"mixer": {"A": "attention", "M": "mamba"}[kind], "mlp": "mlp"}.get(part, "norms")
        groups[group] += leaf.size
    return dict(groups)


def _devices(where: Topology) -> list:
    """Devices to compile for. Raises UserError where there is no compiler for them."""
    if where.chip.platform == "gpu":
        raise UserError(
            f"plan: --compile has no compiler for {where.name} where no such GPU is; without it the plan is an estimate"
        )
    if where.chip.platform == "cpu":
        return _cpu_devices(where)
    if find_spec("libtpu") is None:
        raise UserError(f"plan: --compile for {where.name} needs the compiler for TPUs: {TPU_EXTRA}")
    megacore = {"chip_config_name": "megacore"} if where.chip.name == "v4" else {}
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=where.name, **megacore)
    except Exception as error:  # libtpu's own classes; the reason stands in the text
        raise UserError(f"plan: libtpu knows no {where.name}: {str(error).splitlines()[0]}") from None
    return list(description.devices)


def _cpu_devices(where: Topology) -> list:
    with contextlib.suppress(RuntimeError):  # JAX has started: what it has must do
        jax.config.update("jax_num_cpu_devices", where.devices)
    present = jax.devices("cpu")
    if len(present) < where.devices:
        raise UserError(
            f"plan: {where.name} needs {where.devices} devices, and JAX has started with {len(present)}; "
            f"set jax_num_cpu_devices={where.devices} before its first use"
        )
    return present[: where.devices]


def _compile(config: Config, vocab_size: int, where: Topology, devices: list) -> tuple[dict, list[Traffic] | None]:
    """The train step as `diffjax train` compiles it: fields of Memory, and what its devices send."""
    mesh = mesh_lib.make_mesh(config.mesh, devices)
    denoiser = Denoiser(config.model, vocab_size=vocab_size, kernels=config.kernels)
    rows, axes = config.training.batch_size, denoiser.logical_axes()
    objective = block_diffusion(denoiser, config.objective, MASK, config.data.tail, config.kernels.cross_entropy_chunk)
    draw_noise = lambda step, batch: draw(config.objective, config.run.seed, step, batch, rows)
    layout = lay_out(config, denoiser, mesh)
    train_step = make_train_step(config, objective, draw_noise, mesh, layout.placement["params"], axes)
    batch = abstract_batch(rows, config.data.sequence_length, config.model.block_size)
    dispatch.forget()
    began = time.monotonic()
    try:
        with jax.set_mesh(mesh):
            compiled = compile_step(train_step, layout.state, layout.placement, batch, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        parts = {}
        fields = {"need": _needed(str(error)), "fits": False}
        sent = None
    else:
        stats = compiled.memory_analysis()
        parts = {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "aliased": -stats.alias_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
        }
        need, have = sum(parts.values()), where.chip.memory
        fields = {"need": need, "fits": have is None or need <= have}
        sent = _traffic(compiled.as_text())
    return {**fields, "parts": parts, "compiled": True, "compile_seconds": time.monotonic() - began}, sent


def _needed(message: str) -> int | None:
    """Bytes that the TPU compiler says a program too large for the chip would need."""
    found = re.search(r"Used ([\d.]+)([KMGT]?) of|total memory required[^(]*\(([\d.]+)([KMGT]?)\)", message)
    if found is None:
        return None
    number, unit = [group for group in found.groups() if group is not None]
    return round(float(number) * 1024 ** " KMGT".index(unit or " "))


def _traffic(hlo: str) -> list[Traffic]:
    """Collectives by kind, most bytes first."""
    kinds: dict[str, list[int]] = {}
    for one in collectives(hlo):
        total = kinds.setdefault(one.kind, [0, 0, 0])
        times = 1 if one.times is None else one.times
        for index, value in enumerate((times, times * one.bytes, one.times is None)):
            total[index] += value
    return sorted((Traffic(kind, *total) for kind, total in kinds.items()), key=lambda traffic: -traffic.bytes)
