#!/usr/bin/env bash
# Trains a config on the nodes of a Slurm job and queues the job again when it was preempted with its state saved.
#
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 scripts/launch_slurm.sh configs/seed_3b_mamba.yaml [section.key=value ...]
#
# Submit from a folder that all nodes share, with diffjax installed in the environment that sbatch passes on.
# The processes find each other by themselves; one task for each GPU, or one for each node, both work.
#SBATCH --job-name=diffjax
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=diffjax-%j.log
set -uo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch [options] scripts/launch_slurm.sh CONFIG [section.key=value ...]" >&2
    exit 2
fi

# Reads the config as the run will, so that a wrong key ends the job here.
run_dir=$(python -c '
import sys
from diffjax.config import load_config
from diffjax.errors import UserError
try:
    print(load_config(sys.argv[1], sys.argv[2:]).run.dir)
except UserError as error:
    sys.exit(print(error, file=sys.stderr) or 2)
' "$@") || exit $?

# How the run ended, as its first process noted it: "ATTEMPT CODE". A killed run leaves the note of the one before.
last_exit() {
    python -c '
import json, sys
try:
    note = json.load(open(sys.argv[1]))
    print(note["attempt"], note["code"])
except (OSError, ValueError, KeyError):
    print("0 none")
' "$run_dir/last_exit.json"
}

read -r attempt_before _ <<< "$(last_exit)"
srun --kill-on-bad-exit=0 python -m diffjax train "$@"
code=$?
read -r attempt noted <<< "$(last_exit)"
[ "$attempt" = "$attempt_before" ] && noted=none
echo "srun ended with $code, the run with $noted"

# srun gives the highest code of its tasks, so one aborted task hides the 75 of the others.
if [ "$code" -eq 75 ] || [ "$noted" = 75 ]; then
    echo "preempted, state saved: job ${SLURM_JOB_ID} is queued again"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
