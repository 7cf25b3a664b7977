#!/usr/bin/env bash
# Runs one rank per NVIDIA GPU of a PBS job. From the repository's root:
#   qsub deploy/pbs/nvidia.sh                                                 # meshflash checksum
#   qsub -v MESHFLASH_COMMAND="python train.py" deploy/pbs/nvidia.sh          # any command; qsub passes no arguments
#   deploy/pbs/nvidia.sh python train.py                                      # inside an interactive job
# Edit below, or set on qsub's command line: account, queue, time, nodes, GPUs. MESHFLASH_PER_NODE=8 sets the ranks per
# node (default 4), MESHFLASH_MODULES="cuda openmpi" loads modules, MESHFLASH_VENV=/path activates an environment.
# meshflash detects rank and backend; it finds the master on a single node, or with mpi4py.
#PBS -N meshflash
#PBS -l select=1:ncpus=32:ngpus=4:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=00:10:00
#PBS -j oe
##PBS -A YOUR_ACCOUNT
##PBS -q YOUR_QUEUE
set -euo pipefail

cd "${PBS_O_WORKDIR:-.}"
if [ $# -eq 0 ]; then eval "set -- ${MESHFLASH_COMMAND:-meshflash checksum}"; fi

read -r -a modules <<<"${MESHFLASH_MODULES:-}"
set +u # `module` functions of sites and `activate` scripts read variables that may be unset
if [ ${#modules[@]} -gt 0 ]; then module load "${modules[@]}"; fi
# shellcheck disable=SC1091 # a file of the user
if [ -n "${MESHFLASH_VENV:-}" ]; then source "$MESHFLASH_VENV/bin/activate"; fi
set -u

nodes=$(sort -u "${PBS_NODEFILE:?"run this in a PBS job"}" | wc -l)
per_node=${MESHFLASH_PER_NODE:-4}
ranks=$((nodes * per_node))

version=$(mpiexec --version 2>&1 || true)
if [[ "$version" == *"Open MPI"* || "$version" == *OpenRTE* || "$version" == *PRRTE* ]]; then
  # Open MPI starts ranks on other nodes without the environment of this node.
  flags=(-n "$ranks" --map-by "ppr:$per_node:node" --bind-to none)
  for name in PATH LD_LIBRARY_PATH MASTER_ADDR MASTER_PORT; do
    if [ -n "${!name:-}" ]; then flags+=(-x "$name"); fi
  done
else
  flags=(-n "$ranks" -ppn "$per_node")
fi

exec mpiexec "${flags[@]}" "$@"
