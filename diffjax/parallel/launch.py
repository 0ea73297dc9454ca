"""How a process finds the other processes of its run: a pure function of config, environment and hardware.

Starts nothing; `diffjax.parallel.distributed` acts on the answer.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diffjax.config import DistributedConfig
from diffjax.errors import UserError

SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
KUBERNETES = ("JOB_COMPLETION_INDEX", "DIFFJAX_COORDINATOR")
VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


@dataclass(frozen=True)
class Hardware:
    """What the machine says of itself: GPUs that are there, and whether a TPU can be used."""

    gpus: int = 0
    tpu: bool = False


@dataclass(frozen=True)
class Join:
    """`mode` and why it was chosen; where to meet, as which of how many. In mode tpu JAX asks the pod for the rest.

    local_device_ids are places in the list of GPUs that the process sees, not their numbers in CUDA_VISIBLE_DEVICES.
    """

    mode: str
    reason: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None


def look_at_hardware() -> Hardware:
    """A TPU counts when its device node is there and libtpu is installed: libtpu alone means nothing."""
    gpus = len([node for node in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", node.name)])
    nodes = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return Hardware(gpus, bool(nodes) and importlib.util.find_spec("libtpu") is not None)


def choose(config: DistributedConfig, environment: Mapping[str, str], hardware: Hardware) -> Join:
    """The way this process joins the others. Raises UserError where a mode was asked for that the environment lacks."""
    slurm_missing = [name for name in SLURM_STEP if not environment.get(name)]
    kubernetes_missing = [name for name in KUBERNETES if not environment.get(name)]
    mode = config.mode
    if mode == "none":
        return Join("none", "distributed.mode=none")
    if mode == "explicit" or (mode == "auto" and config.coordinator is not None):
        return _several(
            Join("explicit", "the config says so", config.coordinator, config.num_processes, config.process_id)
        )
    if mode == "slurm" or (mode == "auto" and not slurm_missing):
        if slurm_missing:
            raise UserError(f"distributed.mode=slurm: {' and '.join(slurm_missing)} not set; start the run with srun")
        return _several(_slurm(environment, hardware))
    if mode == "kubernetes" or (mode == "auto" and not kubernetes_missing):
        if kubernetes_missing:
            raise UserError(
                f"distributed.mode=kubernetes: {' and '.join(kubernetes_missing)} not set; see scripts/launch_k8s.yaml"
            )
        count = _number(environment, "DIFFJAX_NUM_PROCESSES")
        rank = _number(environment, "JOB_COMPLETION_INDEX")
        return _several(Join("kubernetes", "an indexed job", environment["DIFFJAX_COORDINATOR"], count, rank))
    if mode == "tpu" or hardware.tpu:
        if not hardware.tpu:
            raise UserError("distributed.mode=tpu: this machine has no TPU device, or libtpu is not installed")
        return Join("tpu", "a TPU and libtpu are present")
    if environment.get("SLURM_JOB_ID"):
        return Join("none", f"a Slurm job, but no step of it ({slurm_missing[0]} is not set); srun starts one")
    return Join("none", "no coordinator is configured, and this is no Slurm step, Kubernetes job or TPU host")


def _several(join: Join) -> Join:
    """One process needs no coordination."""
    if join.num_processes == 1:
        return Join("none", f"mode {join.mode} with one process")
    if not 0 <= join.process_id < join.num_processes:
        raise UserError(f"process {join.process_id} of {join.num_processes}: processes are numbered from 0")
    return join


def _slurm(environment: Mapping[str, str], hardware: Hardware) -> Join:
    host = first_host(environment["SLURM_STEP_NODELIST"])
    port = 61440 + _number(environment, "SLURM_JOB_ID") % 4096
    tasks, rank = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_PROCID")
    if tasks == 1:
        return Join("slurm", "a Slurm step", num_processes=1, process_id=0)
    return Join("slurm", "a Slurm step", f"{host}:{port}", tasks, rank, _slurm_devices(environment, hardware))


def _slurm_devices(environment: Mapping[str, str], hardware: Hardware) -> tuple[int, ...] | None:
    """The GPUs of this task among those it sees; None where it sees none."""
    visible = _visible_gpus(environment, hardware)
    if visible <= 1:
        return (0,) if visible else None
    if environment.get("SLURM_GPUS_PER_TASK") == str(visible):  # bound: what a task sees is its own
        return tuple(range(visible))
    tasks, local = _tasks_on_node(environment), _number(environment, "SLURM_LOCALID")
    if visible % tasks:
        raise UserError(
            f"{visible} GPUs are visible to {tasks} tasks on this node and cannot be shared evenly; "
            "give srun --ntasks-per-node a divisor of the GPUs"
        )
    share = visible // tasks
    return tuple(range(local * share, (local + 1) * share))


def _visible_gpus(environment: Mapping[str, str], hardware: Hardware) -> int:
    for name in VISIBLE_GPUS:
        if name in environment:
            entries = [entry.strip() for entry in environment[name].split(",")]
            return len([entry for entry in entries if entry not in ("", "-1", "NoDevFiles")])
    return hardware.gpus


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """From Slurm's list of tasks on each node, such as 4(x2),3."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text or 'not set'}: expected a list such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environment, "SLURM_NODEID") if len(set(counts)) > 1 else 0
    return counts[node]


def first_host(nodes: str) -> str:
    """The first name of a Slurm list of nodes: `gpu[03-07,11],cpu1` -> `gpu03`."""
    name = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name)


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise UserError(f"{name}={value}: expected a number" if value else f"{name} is not set")
    return int(value)


def proxies(environment: Mapping[str, str]) -> list[str]:
    """Proxy variables that may catch the connection to the coordinator and hang the join."""
    return sorted(name for name, value in environment.items() if name.lower() in PROXIES and value)
