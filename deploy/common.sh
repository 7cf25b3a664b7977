# shellcheck shell=bash
# Functions of deploy/build.sh, deploy/run.sh and deploy/train.sh: errors, detection of container engine and GPUs, and
# dry runs. Source this file; do not run it.

fail() {
  echo "${0##*/}: $*" >&2
  exit 2
}

# Print the first container engine that is installed.
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

# Print the vendor of this machine's GPUs. /dev/dri alone proves nothing: servers have it for their console.
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

# Print the build target for these GPUs; print nothing if there is none.
kind_for() {
  case "$1" in
  nvidia) echo cuda ;;
  amd) echo rocm ;;
  none) echo cpu ;;
  esac
}

# Run a command, or print it with shell quoting if the first argument is yes.
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
