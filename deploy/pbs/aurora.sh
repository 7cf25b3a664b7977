#!/usr/bin/env bash
# One rank for each tile on nodes with six Intel GPUs (12 tiles) and Slingshot, such as Aurora. From the root:
#   qsub -A ACCOUNT deploy/pbs/aurora.sh                                             # meshflash checksum
#   qsub -A ACCOUNT -v MESHFLASH_COMMAND="python train.py" deploy/pbs/aurora.sh      # qsub passes no arguments on
#   deploy/pbs/aurora.sh python train.py                                             # inside an interactive job
# Edit below, or say on qsub's command line: account, queue, file systems, time, nodes. MESHFLASH_MODULES="frameworks"
# replaces the modules, MESHFLASH_VENV=/path activates an environment, MESHFLASH_PER_NODE=12 is ranks of a node.
# A variable that is set already stays as it is. Where oneCCL over libfabric fails, CCL_ATL_TRANSPORT=mpi with
# CCL_KVS_MODE=mpi goes over the site's MPI. meshflash finds rank and backend by itself.
#PBS -N meshflash
#PBS -l select=1
#PBS -l place=scatter
#PBS -l walltime=00:10:00
#PBS -l filesystems=home
#PBS -q debug
#PBS -j oe
##PBS -A YOUR_ACCOUNT
set -euo pipefail

cd "${PBS_O_WORKDIR:-.}"
if [ $# -eq 0 ]; then eval "set -- ${MESHFLASH_COMMAND:-meshflash checksum}"; fi

read -r -a modules <<<"${MESHFLASH_MODULES:-frameworks}"
set +u # what sites define as `module`, and environments to activate, read variables that may not be set
module load "${modules[@]}"
# shellcheck disable=SC1091 # the user's own
if [ -n "${MESHFLASH_VENV:-}" ]; then source "$MESHFLASH_VENV/bin/activate"; fi
set -u

nodes=$(sort -u "${PBS_NODEFILE:?"run this in a PBS job"}" | wc -l)
per_node=${MESHFLASH_PER_NODE:-12}
ranks=$((nodes * per_node))

# every tile is a device of its own, and every rank sees all of its node's
export ZE_FLAT_DEVICE_HIERARCHY="${ZE_FLAT_DEVICE_HIERARCHY:-FLAT}"

# oneCCL: its own algorithms, over libfabric, started by PALS
export CCL_BACKEND="${CCL_BACKEND:-native}"
export CCL_ATL_TRANSPORT="${CCL_ATL_TRANSPORT:-ofi}"
export CCL_PROCESS_LAUNCHER="${CCL_PROCESS_LAUNCHER:-pmix}"
export PALS_PMI="${PALS_PMI:-pmix}"
export CCL_ZE_ENABLE="${CCL_ZE_ENABLE:-1}"
export CCL_ZE_IPC_EXCHANGE="${CCL_ZE_IPC_EXCHANGE:-drmfd}"
export FI_PROVIDER="${FI_PROVIDER:-cxi}"
export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-userfaultfd}"
export FI_CXI_DEFAULT_CQ_SIZE="${FI_CXI_DEFAULT_CQ_SIZE:-1048576}"
export FI_CXI_RX_MATCH_MODE="${FI_CXI_RX_MATCH_MODE:-hybrid}"

# compiled kernels stay on the node: thousands of ranks would write into one home folder
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/${USER:-meshflash}-triton}"

# by the names of the node file ranks would meet on the management network
if [ "$nodes" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
  first=$(head -n 1 "$PBS_NODEFILE")
  export MASTER_ADDR="${first%%.*}${MESHFLASH_FAST_DOMAIN-.hsn.cm.aurora.alcf.anl.gov}"
fi

# eight cores beside each tile; the first core of each socket is the system's
bind=list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100

# the sizes by hand: under PMIx the launcher's own may be those of one node
export PALS_SIZE="$ranks" PALS_LOCAL_SIZE="$per_node"
exec mpiexec -n "$ranks" -ppn "$per_node" --cpu-bind "${MESHFLASH_CPU_BIND:-$bind}" "$@"
