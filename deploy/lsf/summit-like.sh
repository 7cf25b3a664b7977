#!/usr/bin/env bash
# One rank for each GPU under LSF with jsrun, on nodes such as Summit's: six NVIDIA GPUs, 42 cores. From the root:
#   bsub -P ABC123 deploy/lsf/summit-like.sh                       # meshflash checksum
#   bsub -P ABC123 -nnodes 2 deploy/lsf/summit-like.sh python train.py
# Where bsub does not read the lines below from a command: bsub < deploy/lsf/summit-like.sh, and the command in the
# variable MESHFLASH_COMMAND. Edit: project, time, nodes. MESHFLASH_PER_NODE=6 is GPUs and ranks of a node,
# MESHFLASH_CORES=7 cores of a rank, MESHFLASH_MODULES="cuda" loads modules, MESHFLASH_VENV=/path activates an
# environment. meshflash finds rank and backend by itself.
#BSUB -J meshflash
#BSUB -nnodes 1
#BSUB -W 0:10
#BSUB -o meshflash-%J.out
##BSUB -P YOUR_PROJECT
set -euo pipefail

if [ $# -eq 0 ]; then eval "set -- ${MESHFLASH_COMMAND:-meshflash checksum}"; fi

read -r -a modules <<<"${MESHFLASH_MODULES:-}"
set +u # what sites define as `module`, and environments to activate, read variables that may not be set
if [ ${#modules[@]} -gt 0 ]; then module load "${modules[@]}"; fi
# shellcheck disable=SC1091 # the user's own
if [ -n "${MESHFLASH_VENV:-}" ]; then source "$MESHFLASH_VENV/bin/activate"; fi
set -u

# this script runs on a launch node, which the list names first and which has no GPUs
mapfile -t hosts < <(uniq "${LSB_DJOB_HOSTFILE:?"run this in an LSF job"}" | tail -n +2)
nodes=${#hosts[@]}
if [ "$nodes" -eq 0 ]; then echo "summit-like.sh: $LSB_DJOB_HOSTFILE names no compute node" >&2 && exit 2; fi
per_node=${MESHFLASH_PER_NODE:-6}
cores=${MESHFLASH_CORES:-7}

# no variable of LSF tells ranks on other nodes where the first one is
if [ "$nodes" -gt 1 ]; then export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"; fi

# one resource set for a whole node: GPUs of different sets cannot reach each other's memory
exec jsrun --nrs "$nodes" --rs_per_host 1 --tasks_per_rs "$per_node" --gpu_per_rs "$per_node" \
  --cpu_per_rs "$((per_node * cores))" --launch_distribution packed --bind "proportional-packed:$cores" "$@"
