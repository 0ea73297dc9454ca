"""The launch scripts, run with fake srun, scontrol and gcloud, and the manifest, rendered and parsed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diffjax.config import DistributedConfig
from diffjax.parallel.launch import Hardware, choose

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def cluster(tmp_path):
    """Fakes that write down how they were called; `srun` runs srun.sh and `gcloud` gcloud.sh of the folder."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    for name, then in (("srun", ". ./srun.sh"), ("scontrol", "true"), ("gcloud", ". ./gcloud.sh")):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%s|" {name} "$@" >> calls; echo >> calls\n{then}\n')
        (programs / name).chmod(0o755)
    (tmp_path / "a.yaml").write_text("run: {dir: 'a run'}\n")
    return tmp_path


def launch(cluster, script, *arguments, **variables):
    environment = {**os.environ, "PATH": f"{cluster}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", SCRIPTS / script, *arguments], cwd=cluster, env={**environment, **variables},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    calls = (cluster / "calls").read_text().splitlines() if (cluster / "calls").exists() else []
    return done.returncode, [call.rstrip("|").split("|") for call in calls], done.stdout + done.stderr


@pytest.mark.parametrize("script", ["launch_slurm.sh", "launch_tpu_pod.sh"])
def test_the_shell_can_read_it_and_it_says_how_to_use_it(script):
    subprocess.run(["bash", "-n", SCRIPTS / script], check=True)
    done = subprocess.run(["bash", SCRIPTS / script], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


def note(attempt, code):
    return f"""mkdir -p 'a run'; echo '{{"attempt": {attempt}, "code": {code}, "step": 4}}' > 'a run/last_exit.json'"""


@pytest.mark.parametrize(
    ("before", "during", "requeued", "code"),
    [
        (None, f"{note(1, 0)}; exit 0", False, 0),
        (None, f"{note(1, 75)}; exit 75", True, 0),
        (None, f"{note(1, 75)}; exit 134", True, 0),  # one aborted task hides the others' 75
        (None, "exit 75", True, 0),  # the note was lost
        (note(1, 75), f"{note(2, 75)}; exit 137", True, 0),
        (note(1, 75), "exit 134", False, 134),  # this time the run left no note: the old one says nothing
        (note(1, 75), f"{note(2, 2)}; exit 2", False, 2),
        (None, f"{note(1, 4)}; exit 4", False, 4),
    ],
)
def test_slurm_queues_again_what_was_preempted(cluster, before, during, requeued, code):
    if before:
        subprocess.run(before, shell=True, cwd=cluster, check=True)
    (cluster / "srun.sh").write_text(during)
    got, calls, output = launch(cluster, "launch_slurm.sh", "a.yaml", "training.steps=200", SLURM_JOB_ID="77")
    assert got == code, output
    run = ["srun", "--kill-on-bad-exit=0", "python", "-m", "diffjax", "train", "a.yaml", "training.steps=200"]
    assert calls == [run, *([["scontrol", "requeue", "77"]] * requeued)]


def test_slurm_starts_nothing_with_a_wrong_config(cluster):
    code, calls, output = launch(cluster, "launch_slurm.sh", "a.yaml", "training.step=200", SLURM_JOB_ID="77")
    assert (code, calls) == (2, []) and "unknown key 'training.step'" in output and "Traceback" not in output


def test_slurm_signals_the_steps_and_not_only_the_shell():
    options = re.findall(r"^#SBATCH (\S+)", (SCRIPTS / "launch_slurm.sh").read_text(), re.M)
    assert {"--signal=TERM@300", "--requeue", "--open-mode=append"} <= set(options)


def test_a_pod_is_started_again_while_it_is_preempted(cluster):
    (cluster / "gcloud.sh").write_text("[ $(wc -l < calls) -lt 3 ] && exit 75; exit 3")
    code, calls, output = launch(cluster, "launch_tpu_pod.sh", "pod", "a.yaml", "run.dir=/mnt/a b", ZONE="z")
    assert code == 3 and len(calls) == 3 and calls[0] == calls[2], output
    assert calls[0][:-1] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=z", "--worker=all"]
    assert calls[0][-1] == r"--command=cd diffjax && exec python3 -m diffjax train a.yaml run.dir=/mnt/a\ b"
    code, _, output = launch(cluster, "launch_tpu_pod.sh", "pod", "a.yaml")
    assert code != 0 and "set ZONE" in output


def test_kubernetes_manifest():
    text = (SCRIPTS / "launch_k8s.yaml").read_text()
    export, listed = (re.search(pattern, text)[1] for pattern in (r"export (.*)", r"envsubst '(.*?)'"))
    values = dict(word.split("=", 1) for word in export.split())
    assert listed.split() == [f"${name}" for name in values]
    rendered = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)
    jobset = yaml.safe_load(rendered)
    assert "$" not in re.sub(r'"\$[0@]"', "", "\n".join(line.partition("#")[0] for line in rendered.splitlines()))

    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 4, 4)
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 300)
    ignored = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert [rule["onExitCodes"]["values"] for rule in ignored if "onExitCodes" in rule] == [[75]]
    assert [rule["onPodConditions"][0]["type"] for rule in ignored if "onPodConditions" in rule] == ["DisruptionTarget"]
    names = {rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert names == {container["name"]}
    assert container["command"][-1].startswith("exec ")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0

    environment = {item["name"]: item["value"] for item in container["env"]}
    join = choose(DistributedConfig(), {**environment, "JOB_COMPLETION_INDEX": "2"}, Hardware(gpus=8))
    name = jobset["metadata"]["name"]
    first = f"{name}-{replicated['name']}-0-0.{name}"  # JobSet's name of the first pod: jobset-job-replica-index.jobset
    assert (join.mode, join.coordinator, join.num_processes, join.process_id) == ("kubernetes", f"{first}:12321", 4, 2)
