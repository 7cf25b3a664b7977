#!/usr/bin/env bash
# Builds the container image of meshflash with docker, podman or apptainer, whichever is installed.
#   deploy/build.sh [--dry-run] [--engine NAME] [--tag NAME] [cpu|cuda|rocm] [-- MORE ARGUMENTS OF THE ENGINE]
# The default target fits this machine's GPUs. docker and podman tag the image meshflash:TARGET; apptainer writes
# meshflash-TARGET.sif into the current folder. --dry-run prints the command instead.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
# shellcheck source=deploy/common.sh
source "$here/common.sh"

dry_run=no engine='' tag='' target=''
while [ $# -gt 0 ]; do
  case "$1" in
  --dry-run) dry_run=yes ;;
  --engine) shift && engine=${1:?"--engine: expected a name"} ;;
  --tag) shift && tag=${1:?"--tag: expected a name"} ;;
  cpu | cuda | rocm) target=$1 ;;
  --) shift && break ;;
  *) fail "$1: expected --dry-run, --engine NAME, --tag NAME, cpu, cuda or rocm" ;;
  esac
  shift
done
engine=${engine:-$(find_engine)}
target=${target:-$(kind_for "$(find_gpu)")}
if [ -z "$target" ]; then fail "no image is made for Intel GPUs here: use the site's torch, or name cpu"; fi

case "$engine" in
docker | podman)
  flags=(--file "$here/Dockerfile" --target "$target" --tag "${tag:-meshflash:$target}")
  run_or_print "$dry_run" "$engine" build "${flags[@]}" "$@" "$root"
  ;;
apptainer | singularity)
  # one list of base images: the Dockerfile's
  image=$(sed -n "s/^ARG ${target^^}_IMAGE=//p" "$here/Dockerfile")
  output=$PWD/${tag:-meshflash-$target.sif}
  cd "$root" # the definition names its files from here
  flags=(--build-arg "KIND=$target" --build-arg "IMAGE=$image")
  run_or_print "$dry_run" "$engine" build "${flags[@]}" "$@" "$output" deploy/meshflash.def
  ;;
*) fail "$engine: expected docker, podman, apptainer or singularity" ;;
esac
