# shellcheck shell=bash
# What deploy/build.sh, deploy/run.sh and deploy/train.sh share: errors, which container engine there is, which GPUs, and
# how to show a command.
# Sourced, not run.

fail() {
  echo "${0##*/}: $*" >&2
  exit 2
}

# The first container engine that is installed.
find_engine() {
  local name
  for name in docker podman apptainer singularity; do
    if command -v "$name" >/dev/null; then
      echo "$name"
      return
    fi
  done
  fail "found none of docker, podman, apptainer, singularity"
}

# Whose GPUs this machine has. /dev/dri alone says nothing: servers have it for their console.
find_gpu() {
  if command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ]; then
    echo nvidia
  elif [ -e /dev/kfd ]; then
    echo amd
  elif command -v xpu-smi >/dev/null || command -v sycl-ls >/dev/null; then
    echo intel
  else
    echo none
  fi
}

# The build target that serves these GPUs; nothing where there is none.
kind_for() {
  case "$1" in
  nvidia) echo cuda ;;
  amd) echo rocm ;;
  none) echo cpu ;;
  esac
}

# Runs a command, or prints it as a shell would read it where the first argument is yes.
run_or_print() {
  local dry_run=$1 text
  shift
  if [ "$dry_run" = yes ]; then
    printf -v text '%q ' "$@"
    echo "${text% }"
  else
    exec "$@"
  fi
}
