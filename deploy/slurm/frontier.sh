#!/usr/bin/env bash
# Runs one rank per GCD on nodes with four AMD MI250X (8 GCDs) and Slingshot, such as Frontier. From the root:
#   sbatch --account=ABC123 deploy/slurm/frontier.sh              # meshflash checksum
#   sbatch --account=ABC123 --nodes=8 deploy/slurm/frontier.sh python train.py
# Edit below, or set on sbatch's command line: account, partition, time, nodes. MESHFLASH_MODULES="rocm/7.2.0 ..."
# replaces the modules, MESHFLASH_VENV=/path activates an environment, and MESHFLASH_OFI_RCCL=/path/to/lib names the
# folder of the aws-ofi-rccl plugin (a module may set it, too). Without the plugin RCCL uses TCP between nodes.
# Variables that are already set keep their values. meshflash detects rank, master and backend.
#SBATCH --job-name=meshflash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --time=00:10:00
##SBATCH --account=YOUR_ACCOUNT
##SBATCH --partition=batch
set -euo pipefail

if [ $# -eq 0 ]; then eval "set -- ${MESHFLASH_COMMAND:-meshflash checksum}"; fi

read -r -a modules <<<"${MESHFLASH_MODULES:-PrgEnv-gnu rocm craype-accel-amd-gfx90a}"
set +u # `module` functions of sites and `activate` scripts read variables that may be unset
module load "${modules[@]}"
# shellcheck disable=SC1091 # a file of the user
if [ -n "${MESHFLASH_VENV:-}" ]; then source "$MESHFLASH_VENV/bin/activate"; fi
set -u

# Sockets for the rendezvous use the fast network.
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn0}"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-hsn0}"

# RCCL uses libfabric, from GPU memory, on any of the four network cards.
if [ -n "${MESHFLASH_OFI_RCCL:-}" ]; then
  export LD_LIBRARY_PATH="$MESHFLASH_OFI_RCCL${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
elif [ "${SLURM_NNODES:-1}" -gt 1 ] && [[ "${LD_LIBRARY_PATH:-}" != *ofi-[rn]ccl* ]]; then
  echo "frontier.sh: no aws-ofi-rccl in LD_LIBRARY_PATH: RCCL goes over TCP; set MESHFLASH_OFI_RCCL" >&2
fi
export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}"
export NCCL_CROSS_NIC="${NCCL_CROSS_NIC:-1}"

# The default queues of the provider are sized for MPI; collectives over many ranks need longer ones.
export FI_PROVIDER="${FI_PROVIDER:-cxi}"
export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-kdreg2}"
export FI_CXI_ATS="${FI_CXI_ATS:-0}"
export FI_CXI_DISABLE_HOST_REGISTER="${FI_CXI_DISABLE_HOST_REGISTER:-1}"
export FI_CXI_DEFAULT_CQ_SIZE="${FI_CXI_DEFAULT_CQ_SIZE:-131072}"
export FI_CXI_DEFAULT_TX_SIZE="${FI_CXI_DEFAULT_TX_SIZE:-2048}"
export FI_CXI_RX_MATCH_MODE="${FI_CXI_RX_MATCH_MODE:-hybrid}"

# Compiled kernels stay on the node; otherwise thousands of ranks would write into one home folder.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/${USER:-meshflash}-triton}"

exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-7}" --gpus-per-task=1 --gpu-bind=closest "$@"
