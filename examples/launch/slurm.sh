#!/bin/bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500

# every node is looked at first; a job on a bad node ends here, before any collective
srun --ntasks-per-node=1 mindspeed preflight --lock mindspeed.lock --run runs/job

# TERM, 300 s before the time limit, reaches the ranks: they save and end with status 75
trap 'kill -TERM "$ranks"' TERM
srun --kill-on-bad-exit=1 mindspeed pretrain -f job.yaml --lock mindspeed.lock --auto-resume runs/job &
ranks=$!
while
    status=0
    wait "$ranks" || status=$?
    kill -0 "$ranks" 2>/dev/null
do :; done

# after the time limit and after a failed rank the job starts again, and continues from the newest checkpoint
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
