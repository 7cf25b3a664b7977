#!/usr/bin/env bash
# Runs one rank per NVIDIA GPU of a Slurm job. From the repository's root:
#   sbatch deploy/slurm/nvidia.sh                                 # meshflash checksum
#   sbatch --nodes=2 deploy/slurm/nvidia.sh python train.py       # any command
# Edit below, or set on sbatch's command line: account, partition, time, GPUs and ranks per node (the same number).
# MESHFLASH_MODULES="cuda python" loads modules, MESHFLASH_VENV=/path activates an environment.
# meshflash detects rank, master and backend.
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
set +u # `module` functions of sites and `activate` scripts read variables that may be unset
if [ ${#modules[@]} -gt 0 ]; then module load "${modules[@]}"; fi
# shellcheck disable=SC1091 # a file of the user
if [ -n "${MESHFLASH_VENV:-}" ]; then source "$MESHFLASH_VENV/bin/activate"; fi
set -u

# A lost rank ends the job. srun does not inherit the number of cores from sbatch.
flags=(--kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
# Every rank sees all GPUs of its node and selects its own: GPUs that cannot see each other cannot use NVLink.
if [ "${SLURM_GPUS_ON_NODE:-0}" != 0 ]; then flags+=(--gpu-bind=none); fi

exec srun "${flags[@]}" "$@"
