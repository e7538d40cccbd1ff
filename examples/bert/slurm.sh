#!/bin/bash
# sbatch slurm.sh: one torchrun on each of 2 nodes. If a node fails, Slurm queues the job again, and it resumes. After the
# end of its time, sbatch slurm.sh again resumes, too.
#SBATCH --job-name=bert
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --requeue
set -euo pipefail

path=${SCRATCH:-$HOME}/bert

srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=8 --max-restarts=3 \
        --rdzv-backend=nebula-store --rdzv-endpoint="$path" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
        train.py --path "$path" --steps 20000 --save-every 500
