"""How a process finds the others: a table of fake environments; nothing here needs Slurm, Kubernetes or a TPU."""

import pytest

from diffjax.config import DistributedConfig
from diffjax.errors import UserError
from diffjax.parallel.launch import Hardware, Join, choose, first_host, proxies

STEP = {
    "SLURM_JOB_ID": "123457",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}
PLACE = f"gpu03:{61440 + 123457 % 4096}"
POD = {"JOB_COMPLETION_INDEX": "3", "DIFFJAX_COORDINATOR": "seed-train-0-0.seed:12321", "DIFFJAX_NUM_PROCESSES": "4"}
EXPLICIT = {"coordinator": "10.0.0.1:12321", "num_processes": 8, "process_id": 3}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def slurm(*devices):
    return (PLACE, 8, 6, devices or None)


@pytest.mark.parametrize(
    ("keys", "environment", "hardware", "mode", "arguments"),
    [
        (EXPLICIT, {}, {}, "explicit", ("10.0.0.1:12321", 8, 3, None)),
        (EXPLICIT, {**STEP, **POD}, {"tpu": True, "gpus": 8}, "explicit", ("10.0.0.1:12321", 8, 3, None)),
        ({**EXPLICIT, "num_processes": 1, "process_id": 0}, {}, {}, "none", (None,) * 4),
        # Slurm: on CPUs; one GPU each by binding; shared GPUs, as ordinals and not as numbers; a whole node each.
        ({}, STEP, {}, "slurm", slurm()),
        ({}, {**STEP, "CUDA_VISIBLE_DEVICES": "5"}, {"gpus": 8}, "slurm", slurm(0)),
        ({}, {**STEP, "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"gpus": 8}, "slurm", slurm(2)),
        ({}, STEP, {"gpus": 8}, "slurm", slurm(4, 5)),
        ({}, {**STEP, "ROCR_VISIBLE_DEVICES": "0,1,2,3"}, {}, "slurm", slurm(2)),
        ({}, {**STEP, "CUDA_VISIBLE_DEVICES": ""}, {"gpus": 8}, "slurm", slurm()),
        ({}, {**STEP, "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, {"gpus": 8}, "slurm", slurm(0, 1)),
        ({}, {**STEP, "SLURM_STEP_TASKS_PER_NODE": "7,1", "SLURM_LOCALID": "0"}, {"gpus": 4}, "slurm",
         slurm(0, 1, 2, 3)),
        ({"mode": "slurm"}, {**STEP, **POD}, {"tpu": True}, "slurm", slurm()),
        ({}, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {"gpus": 8}, "none", (None,) * 4),
        # Variables of a job, or some of a step, are no step: interactive shells and batch scripts have them.
        ({}, without(STEP, "SLURM_STEP_NODELIST"), {}, "none", (None,) * 4),
        ({}, without(STEP, "SLURM_LOCALID"), {}, "none", (None,) * 4),
        ({}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, {}, "none", (None,) * 4),
        ({}, {**STEP, "SLURM_PROCID": ""}, {}, "none", (None,) * 4),
        ({}, POD, {"tpu": True}, "kubernetes", ("seed-train-0-0.seed:12321", 4, 3, None)),
        ({}, without(POD, "DIFFJAX_COORDINATOR"), {}, "none", (None,) * 4),
        ({}, {**POD, "JOB_COMPLETION_INDEX": "0", "DIFFJAX_NUM_PROCESSES": "1"}, {}, "none", (None,) * 4),
        ({}, {}, {"tpu": True}, "tpu", (None,) * 4),
        ({}, {}, {"gpus": 8}, "none", (None,) * 4),
        ({"mode": "none"}, {**STEP, **POD}, {"tpu": True}, "none", (None,) * 4),
    ],
)  # fmt: skip
def test_what_is_chosen(keys, environment, hardware, mode, arguments):
    join = choose(DistributedConfig(**keys), environment, Hardware(**hardware))
    assert isinstance(join, Join) and join.mode == mode and join.reason
    assert (join.coordinator, join.num_processes, join.process_id, join.local_device_ids) == arguments


@pytest.mark.parametrize(
    ("keys", "environment", "hardware", "said"),
    [
        ({"mode": "slurm"}, {"SLURM_JOB_ID": "1"}, {}, "SLURM_STEP_NODELIST and .* not set; start the run with srun"),
        ({"mode": "kubernetes"}, {}, {}, "JOB_COMPLETION_INDEX and DIFFJAX_COORDINATOR not set"),
        ({"mode": "tpu"}, {}, {}, "no TPU device"),
        ({}, without(POD, "DIFFJAX_NUM_PROCESSES"), {}, "DIFFJAX_NUM_PROCESSES is not set"),
        ({}, {**POD, "JOB_COMPLETION_INDEX": "4"}, {}, "process 4 of 4: processes are numbered from 0"),
        ({}, {**STEP, "SLURM_PROCID": "x"}, {}, "SLURM_PROCID=x: expected a number"),
        ({}, STEP, {"gpus": 6}, "6 GPUs are visible to 4 tasks on this node and cannot be shared evenly"),
        ({}, without(STEP, "SLURM_STEP_TASKS_PER_NODE"), {"gpus": 8}, "SLURM_STEP_TASKS_PER_NODE=not set: expected"),
    ],
)
def test_what_is_refused(keys, environment, hardware, said):
    with pytest.raises(UserError, match=said):
        choose(DistributedConfig(**keys), environment, Hardware(**hardware))


def test_one_process_says_what_is_missing():
    assert "SLURM_LOCALID" in choose(DistributedConfig(), without(STEP, "SLURM_LOCALID"), Hardware()).reason


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[03-07,11],cpu1", "gpu03"),
        ("cpu1,gpu[03-07]", "cpu1"),
        ("gpu[7]", "gpu7"),
        ("rack[2-3]node[10,12-14].site", "rack2node10.site"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_proxies():
    environment = {"HTTPS_PROXY": "x", "http_proxy": "y", "no_proxy": "z", "ALL_PROXY": "", "MY_HTTP_PROXY": "x"}
    assert proxies(environment) == ["HTTPS_PROXY", "http_proxy"]
