#!/bin/bash
# sbatch slurm.sh: one process on one node. If the node fails, Slurm queues the job again, and it resumes. After the
# end of its time, sbatch slurm.sh again resumes, too.
#SBATCH --job-name=mnist
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=01:00:00
#SBATCH --requeue
set -euo pipefail

srun python train.py --path "${SCRATCH:-$HOME}/mnist" --steps 20000 --save-every 500
