#!/usr/bin/env bash
# Runs a command in meshflash's container with docker, podman or apptainer, whichever is found.
#   deploy/run.sh [--dry-run] [--engine NAME] [--gpu nvidia|amd|intel|none] [--image NAME] [--] [COMMAND ...]
# Without a command the image's own runs: meshflash doctor. The container sees the current folder, this machine's GPUs,
# network and shared memory, and what a launcher told this process, so it also works under srun. --dry-run prints the
# command instead. Images come from deploy/build.sh; for Intel GPUs name one with --image.
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

# The group that owns a device, so that a user inside may open it.
group_of() {
  local group=video
  if [ -e "$1" ]; then group=$(stat -c %g "$1"); fi
  echo "$group"
}

case "$engine" in
docker | podman)
  # shared memory is the host's (--ipc host), so there is no size to give
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
  # files in the current folder stay the caller's; root stays the image's user, for mpirun refuses root
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
  # ranks of one node, each in a container of its own, meet through a file in /tmp
  flags+=(--volume /tmp:/tmp --volume "$PWD:/work" --workdir /work)
  run_or_print "$dry_run" "$engine" run "${flags[@]}" "${image:-meshflash:$kind}" "$@"
  ;;
apptainer | singularity)
  # it shares network, memory, environment and the current folder by itself
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
