#!/bin/bash
# On every host of a TPU pod slice, from a machine with gcloud, this checkout being at ~/dms_jax:
#   TPU=my-v5p-32 ZONE=us-east5-a experiments/launch/tpu_slice.sh qwen3-8b --data chats.jsonl --batch-size 16
# The hosts find each other by their metadata. A spot slice that was taken away is made again by a
# queued resource; the same command then goes on from the last checkpoint.
set -eu
OUT=${OUT:-/mnt/shared/run}
arguments=$(printf ' %q' "$@")
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command \
    "cd dms_jax && exec .venv/bin/dms-jax retrofit$arguments --out $OUT --data-shards all"
