#!/usr/bin/env bash
# One rank for each NVIDIA GPU of a Slurm job. From the repository's root:
#   sbatch deploy/slurm/nvidia.sh                                 # meshflash checksum
#   sbatch --nodes=2 deploy/slurm/nvidia.sh python train.py       # any command
# Edit below, or say on sbatch's command line: account, partition, time, GPUs and ranks of a node (the same number).
# MESHFLASH_MODULES="cuda python" loads modules, MESHFLASH_VENV=/path activates an environment.
# meshflash finds rank, master and backend by itself.
#SBATCH --job-name=meshflash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
##SBATCH --account=YOUR_ACCOUNT
##SBATCH --partition=YOUR_PARTITION
set -euo pipefail

if [ $# -eq 0 ]; then eval "set -- ${MESHFLASH_COMMAND:-meshflash checksum}"; fi

read -r -a modules <<<"${MESHFLASH_MODULES:-}"
set +u # what sites define as `module`, and environments to activate, read variables that may not be set
if [ ${#modules[@]} -gt 0 ]; then module load "${modules[@]}"; fi
# shellcheck disable=SC1091 # the user's own
if [ -n "${MESHFLASH_VENV:-}" ]; then source "$MESHFLASH_VENV/bin/activate"; fi
set -u

# a lost rank ends the job; srun does not take the number of cores over from sbatch
flags=(--kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
# every rank sees all GPUs of its node and takes its own: GPUs that cannot see each other cannot use NVLink
if [ "${SLURM_GPUS_ON_NODE:-0}" != 0 ]; then flags+=(--gpu-bind=none); fi

exec srun "${flags[@]}" "$@"
