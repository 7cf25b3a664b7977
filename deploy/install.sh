#!/usr/bin/env bash
# Installs meshflash during an image build; deploy/Dockerfile and deploy/meshflash.def call it as root.
#   install.sh system cpu|cuda|rocm    Open MPI, a C compiler for Triton, torch in /opt/meshflash
#   install.sh project cpu|cuda|rocm   meshflash itself, from the wheel or the source tree beside this script
# TORCH_INDEX names another package index for torch.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=/opt/meshflash
step=${1:?"expected system or project"}
kind=${2:?"expected cpu, cuda or rocm"}

case "$kind" in
cpu) index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu} ;;
cuda) index=${TORCH_INDEX:-} ;; # torch on PyPI is the CUDA build
rocm) index=${TORCH_INDEX:-https://download.pytorch.org/whl/rocm7.2} ;;
*) echo "install.sh: $kind is not cpu, cuda or rocm" >&2 && exit 2 ;;
esac

install=("$venv/bin/pip" install --no-cache-dir --disable-pip-version-check --constraint "$here/constraints.txt")

case "$step" in
system)
  packages=(ca-certificates gcc libc6-dev openmpi-bin libopenmpi-dev)
  # The image for CPUs is an official Python image.
  if [ "$kind" != cpu ]; then packages+=(python3 python3-dev python3-venv); fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update
  apt-get install --yes --no-install-recommends "${packages[@]}"
  rm -rf /var/lib/apt/lists/*
  python3 -m venv "$venv"
  if [ -n "$index" ]; then
    "${install[@]}" --index-url "$index" torch
  else
    "${install[@]}" torch
  fi
  ;;
project)
  # Install the wheel, or the source tree if there is no wheel.
  shopt -s nullglob
  wheels=("$here"/wheels/meshflash-*.whl)
  what=${wheels[0]:-$here/source}
  if [ "$kind" = rocm ]; then
    # torch for ROCm installs its own Triton into the folder of the Triton on PyPI.
    "${install[@]}" numpy typer rich 'mpi4py>=4'
    "${install[@]}" --no-deps "$what"
  else
    "${install[@]}" "${what}[mpi]"
  fi
  ;;
*)
  echo "install.sh: $step is not system or project" >&2
  exit 2
  ;;
esac
