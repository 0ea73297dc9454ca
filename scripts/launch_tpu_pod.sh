#!/usr/bin/env bash
# Trains a config on all workers of a Cloud TPU pod and starts it again when it was preempted with its state saved.
#
#   ZONE=us-central2-b scripts/launch_tpu_pod.sh POD configs/seed_3b_hybrid.yaml run.dir=/mnt/shared/hybrid [...]
#
# Each worker needs diffjax with jax[tpu] and the configs in FOLDER (default: diffjax), and run.dir and data.corpus in a
# file system that all workers mount. The processes find each other by the pod's metadata. Not for TPU7x, which this API
# does not reach: use scripts/launch_k8s.yaml on GKE.
set -uo pipefail

if [ $# -lt 2 ]; then
    echo "usage: ZONE=... scripts/launch_tpu_pod.sh POD CONFIG [section.key=value ...]" >&2
    exit 2
fi
: "${ZONE:?set ZONE to the zone of the pod, such as us-central2-b}"
pod=$1
shift
printf -v words ' %q' "$@"

while true; do
    gcloud compute tpus tpu-vm ssh "$pod" --zone="$ZONE" --worker=all \
        --command="cd ${FOLDER:-diffjax} && exec python3 -m diffjax train$words"
    code=$?
    [ "$code" -eq 75 ] || exit "$code"
    echo "preempted, state saved: starting again"
done
