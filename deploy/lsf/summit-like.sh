#!/usr/bin/env bash
# Runs one rank per GPU under LSF with jsrun, on nodes such as Summit's: six NVIDIA GPUs, 42 cores. From the root:
#   bsub -P ABC123 deploy/lsf/summit-like.sh                       # meshflash checksum
#   bsub -P ABC123 -nnodes 2 deploy/lsf/summit-like.sh python train.py
# If bsub does not read the directives of a script argument: bsub < deploy/lsf/summit-like.sh, with the command in the
# variable MESHFLASH_COMMAND. Edit: project, time, nodes. MESHFLASH_PER_NODE=6 sets GPUs and ranks per node,
# MESHFLASH_CORES=7 the cores per rank, MESHFLASH_MODULES="cuda" loads modules, MESHFLASH_VENV=/path activates an
# environment. meshflash detects rank and backend.
#BSUB -J meshflash
#BSUB -nnodes 1
#BSUB -W 0:10
#BSUB -o meshflash-%J.out
##BSUB -P YOUR_PROJECT
set -euo pipefail

if [ $# -eq 0 ]; then eval "set -- ${MESHFLASH_COMMAND:-meshflash checksum}"; fi

read -r -a modules <<<"${MESHFLASH_MODULES:-}"
set +u # `module` functions of sites and `activate` scripts read variables that may be unset
if [ ${#modules[@]} -gt 0 ]; then module load "${modules[@]}"; fi
# shellcheck disable=SC1091 # a file of the user
if [ -n "${MESHFLASH_VENV:-}" ]; then source "$MESHFLASH_VENV/bin/activate"; fi
set -u

# This script runs on a launch node without GPUs, which the list names first.
mapfile -t hosts < <(uniq "${LSB_DJOB_HOSTFILE:?"run this in an LSF job"}" | tail -n +2)
nodes=${#hosts[@]}
if [ "$nodes" -eq 0 ]; then echo "summit-like.sh: $LSB_DJOB_HOSTFILE names no compute node" >&2 && exit 2; fi
per_node=${MESHFLASH_PER_NODE:-6}
cores=${MESHFLASH_CORES:-7}

# No variable of LSF names the first node to ranks on other nodes.
if [ "$nodes" -gt 1 ]; then export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"; fi

# One resource set per node: GPUs of different sets cannot access each other's memory.
exec jsrun --nrs "$nodes" --rs_per_host 1 --tasks_per_rs "$per_node" --gpu_per_rs "$per_node" \
  --cpu_per_rs "$((per_node * cores))" --launch_distribution packed --bind "proportional-packed:$cores" "$@"
