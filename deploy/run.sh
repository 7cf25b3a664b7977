#!/usr/bin/env bash
# Runs a command in the container of meshflash with docker, podman or apptainer, whichever is installed.
#   deploy/run.sh [--dry-run] [--engine NAME] [--gpu nvidia|amd|intel|none] [--image NAME] [--] [COMMAND ...]
# The default command is that of the image: meshflash doctor. The container gets the current folder, the GPUs, network
# and shared memory of this machine, and the variables of the launcher, so it also works under srun. --dry-run prints
# the command instead. deploy/build.sh builds the images; for Intel GPUs name one with --image.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=deploy/common.sh
source "$here/common.sh"

dry_run=no engine='' gpu='' image=''
while [ $# -gt 0 ]; do
  case "$1" in
  --dry-run) dry_run=yes ;;
  --engine) shift && engine=${1:?"--engine: expected a name"} ;;
  --gpu) shift && gpu=${1:?"--gpu: expected nvidia, amd, intel or none"} ;;
  --image) shift && image=${1:?"--image: expected a name"} ;;
  --) shift && break ;;
  -*) fail "$1: expected --dry-run, --engine NAME, --gpu NAME or --image NAME" ;;
  *) break ;;
  esac
  shift
done
engine=${engine:-$(find_engine)}
gpu=${gpu:-$(find_gpu)}
case "$gpu" in
nvidia | amd | none) ;;
intel) if [ -z "$image" ]; then fail "no image is made for Intel GPUs here: name one with --image"; fi ;;
*) fail "$gpu: expected nvidia, amd, intel or none" ;;
esac
kind=$(kind_for "$gpu")

# Print the group that owns a device, so that the user in the container may open it.
group_of() {
  local group=video
  if [ -e "$1" ]; then group=$(stat -c %g "$1"); fi
  echo "$group"
}

case "$engine" in
docker | podman)
  # The container uses the host's shared memory (--ipc host), so it needs no size of its own.
  flags=(--rm --network host --ipc host --ulimit memlock=-1 --ulimit stack=67108864)
  if [ -t 0 ] && [ -t 1 ]; then flags+=(--interactive --tty); fi
  case "$engine $gpu" in
  "docker nvidia") flags+=(--gpus all) ;;
  "podman nvidia") flags+=(--device nvidia.com/gpu=all) ;;
  *amd) flags+=(--device /dev/kfd --device /dev/dri --security-opt seccomp=unconfined) ;;
  *intel) flags+=(--device /dev/dri) ;;
  esac
  case "$engine $gpu" in
  "docker amd") flags+=(--group-add "$(group_of /dev/kfd)") ;;
  "docker intel") flags+=(--group-add "$(group_of /dev/dri/renderD128)") ;;
  "podman amd" | "podman intel") flags+=(--group-add keep-groups) ;;
  esac
  if [ -e /dev/infiniband ]; then flags+=(--device /dev/infiniband); fi
  # Files in the current folder keep the caller as owner. If root calls, keep the image's user: mpirun refuses root.
  if [ "$(id -u)" != 0 ]; then
    if [ "$engine" = docker ]; then flags+=(--user "$(id -u):$(id -g)"); else flags+=(--userns keep-id); fi
    flags+=(--env HOME=/tmp --env USER=meshflash)
  fi
  for name in $(compgen -e); do
    case "$name" in
    RANK | WORLD_SIZE | LOCAL_RANK | LOCAL_WORLD_SIZE | MASTER_ADDR | MASTER_PORT | OMP_NUM_THREADS) ;;
    SLURM_* | MESHFLASH_* | NCCL_* | CCL_* | FI_* | UCX_* | GLOO_* | *_VISIBLE_DEVICES | ZE_AFFINITY_MASK) ;;
    *) continue ;;
    esac
    flags+=(--env "$name")
  done
  # Ranks of one node, each in its own container, find each other through a file in /tmp.
  flags+=(--volume /tmp:/tmp --volume "$PWD:/work" --workdir /work)
  run_or_print "$dry_run" "$engine" run "${flags[@]}" "${image:-meshflash:$kind}" "$@"
  ;;
apptainer | singularity)
  # apptainer shares network, memory, environment and the current folder by default.
  flags=()
  case "$gpu" in
  nvidia) flags=(--nv) ;;
  amd) flags=(--rocm) ;;
  intel) flags=(--bind /dev/dri) ;;
  esac
  run_or_print "$dry_run" "$engine" run ${flags[@]+"${flags[@]}"} "${image:-meshflash-$kind.sif}" "$@"
  ;;
*) fail "$engine: expected docker, podman, apptainer or singularity" ;;
esac
