#!/usr/bin/env bash
# Runs one rank per tile on nodes with six Intel GPUs (12 tiles) and Slingshot, such as Aurora. From the root:
#   qsub -A ACCOUNT deploy/pbs/aurora.sh                                             # meshflash checksum
#   qsub -A ACCOUNT -v MESHFLASH_COMMAND="python train.py" deploy/pbs/aurora.sh      # qsub passes no arguments
#   deploy/pbs/aurora.sh python train.py                                             # inside an interactive job
# Edit below, or set on qsub's command line: account, queue, file systems, time, nodes. MESHFLASH_MODULES="frameworks"
# replaces the modules, MESHFLASH_VENV=/path activates an environment, MESHFLASH_PER_NODE=12 sets the ranks per
# node. Variables that are already set keep their values. If oneCCL over libfabric fails, CCL_ATL_TRANSPORT=mpi with
# CCL_KVS_MODE=mpi uses the site's MPI. meshflash detects rank and backend.
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
set +u # `module` functions of sites and `activate` scripts read variables that may be unset
module load "${modules[@]}"
# shellcheck disable=SC1091 # a file of the user
if [ -n "${MESHFLASH_VENV:-}" ]; then source "$MESHFLASH_VENV/bin/activate"; fi
set -u

nodes=$(sort -u "${PBS_NODEFILE:?"run this in a PBS job"}" | wc -l)
per_node=${MESHFLASH_PER_NODE:-12}
ranks=$((nodes * per_node))

# Every tile is a device, and every rank sees all tiles of its node.
export ZE_FLAT_DEVICE_HIERARCHY="${ZE_FLAT_DEVICE_HIERARCHY:-FLAT}"

# oneCCL uses its own algorithms over libfabric; PALS starts it.
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

# Compiled kernels stay on the node; otherwise thousands of ranks would write into one home folder.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/${USER:-meshflash}-triton}"

# The names in the node file belong to the management network; use the fast network for the rendezvous.
if [ "$nodes" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
  first=$(head -n 1 "$PBS_NODEFILE")
  export MASTER_ADDR="${first%%.*}${MESHFLASH_FAST_DOMAIN-.hsn.cm.aurora.alcf.anl.gov}"
fi

# Eight cores near each tile; the system uses the first core of each socket.
bind=list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100

# Pass the number of ranks explicitly: under PMIx the defaults of the launcher may count one node only.
export PALS_SIZE="$ranks" PALS_LOCAL_SIZE="$per_node"
exec mpiexec -n "$ranks" -ppn "$per_node" --cpu-bind "${MESHFLASH_CPU_BIND:-$bind}" "$@"
