#!/bin/bash
# In the folder above: sbatch elastic-cifar-lightning/slurm.sh. One torchrun on each node. If a node fails, the others go on; at the end of its time the job is queued again.
#SBATCH --job-name=elastic-cifar-lightning
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail

path=${SCRATCH:-$HOME}/elastic-cifar-lightning
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --kill-on-bad-exit=0 --wait=0 torchrun --nnodes="1:$SLURM_JOB_NUM_NODES" --nproc-per-node=8 --max-restarts=100 \
        --rdzv-backend=nebula-store --rdzv-endpoint="$path" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-conf=last_call_timeout=5 \
        elastic-cifar-lightning/train.py --path "$path" --width 64 --global-batch 1024 --steps 20000 --save-every 100
