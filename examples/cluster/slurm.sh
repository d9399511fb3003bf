#!/bin/bash
# Pretraining on several nodes under Slurm: sbatch examples/cluster/slurm.sh
# A job that is about to be stopped saves its state and ends with 0; queued again, it goes on.
#SBATCH --job-name=diff-transformer
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

recipe=${RECIPE:-paper_3b}
corpus=${CORPUS:?set CORPUS to a folder that diff-transformer prepare made}
out=${OUT:-runs/$recipe}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
resume=()
[ -e "$out/config.json" ] && resume=(--resume)

# torchrun kills processes that have not ended so many seconds after the signal; saving a large model takes its time.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
# exec: the signal reaches torchrun, which passes it on to every process of the run.
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$first:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m diff_transformer train --recipe "$recipe" --set "data.corpus=$corpus" --out "$out" "${resume[@]}"
