#!/bin/bash
# sbatch slurm.sh: one torchrun on each node. If a node fails, the others go on. Two minutes before the end of its time the job saves, and
# queues itself again.
#SBATCH --job-name=elastic-cifar
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail

path=${SCRATCH:-$HOME}/elastic-cifar
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# --requeue alone queues a job again only if a node fails. srun hands SIGTERM on to the tasks.
trap 'is_over=1; kill -TERM "$step" || true' USR1

srun --kill-on-bad-exit=0 --wait=0 torchrun --nnodes="1:$SLURM_JOB_NUM_NODES" --nproc-per-node=8 --max-restarts=100 \
        --rdzv-backend=nebula-store --rdzv-endpoint="$path" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-conf=last_call_timeout=5 \
        train.py --path "$path" --width 64 --global-batch 1024 --steps 20000 --save-every 100 &
step=$!
status=0
wait "$step" || status=$?
if [[ -n ${is_over:-} ]]; then
        wait "$step" || status=$? # the trap has ended the first wait
        scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
