#!/bin/bash
# One process a GPU on 4 nodes of 8:
#   sbatch experiments/launch/slurm.sh qwen3-8b --data chats.jsonl --batch-size 32
#SBATCH --job-name=retrofit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the end of the time every process is told, and a checkpoint is written.
#SBATCH --signal=TERM@120

OUT=${OUT:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_ID}
srun --kill-on-bad-exit=1 dms-jax retrofit "$@" --out "$OUT" --data-shards all
status=$?
if [ $status -eq 130 ]; then # interrupted, with a checkpoint: queue the job again
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
