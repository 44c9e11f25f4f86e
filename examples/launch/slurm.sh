#!/bin/bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500

# every node is looked at first; a job on a bad node ends here, before any collective
srun --ntasks-per-node=1 mindspeed preflight --lock mindspeed.lock

# TERM, 120 s before the time limit, reaches the ranks: they save and end
trap 'kill -TERM "$ranks"; wait "$ranks"' TERM
if [ -d runs/job/checkpoints ]; then
    srun --kill-on-bad-exit=1 mindspeed pretrain --resume runs/job --lock mindspeed.lock &
else
    srun --kill-on-bad-exit=1 mindspeed pretrain -f job.yaml --run runs/job --lock mindspeed.lock &
fi
ranks=$!
wait "$ranks"
