"""meshflash on Modal: one container with a GPU, or a cluster of containers with eight GPUs each.

    modal deploy deploy/modal_app.py
    modal run deploy/modal_app.py::run --nproc 4
    modal run deploy/modal_app.py::cluster

A job is plain data: a list of steps, each with a line to print and a command. The environment of the `modal` command
sets `MESHFLASH_MODAL_GPU` (default H100) and `MESHFLASH_MODAL_NODES` (default 2). Needs `pip install modal` and
`modal setup`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modal
import modal.experimental

SOURCE = Path(__file__).resolve().parents[1]
PROJECT = "/root/project"
CONSTRAINTS = "/root/constraints.txt"
IGNORED = [".*", "**/__pycache__", "site", "dist", "build", "**/*.sif"]
PORT = 29500
HOUR = 60 * 60

GPU = os.environ.get("MESHFLASH_MODAL_GPU", "H100")
NODES = int(os.environ.get("MESHFLASH_MODAL_NODES", "2"))


@dataclass(frozen=True)
class Step:
    """A command, and the line that announces it; an empty line is not printed. The functions below make it."""

    command: tuple[str, ...]
    line: str = ""


Runner = Callable[[Sequence[str]], int]


def opening_lines(project: str = PROJECT) -> list[str]:
    """Return the lines that name the project folder and its files."""
    return [f"== base_dir == {project}", f"== Files in project == {sorted(os.listdir(project))}"]


def install_step(project: str = PROJECT) -> Step:
    """Return the step that installs the project; the image already has its dependencies."""
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--no-deps", project)
    return Step(install, "🔧 Building...")


def job_steps(nproc: int, project: str = PROJECT) -> list[Step]:
    """Return the steps of one container: the MPI job on `nproc` ranks that share its GPU, then the self-test."""
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: expected 1 or more")
    mpirun = ("mpirun", "-np", str(nproc), "--allow-run-as-root", "--oversubscribe")
    return [
        install_step(project),
        Step((*mpirun, "meshflash", "checksum"), "🚀 Running distributed FlashAttention..."),
        Step(("meshflash", "check", "-n", str(nproc), "--quick")),
    ]


def cluster_steps(node: int, addresses: Sequence[str], project: str = PROJECT) -> list[Step]:
    """Return the steps of one container of a cluster: a torchrun with a rank per GPU and its rendezvous at node 0."""
    torchrun = (
        "torchrun",
        f"--nnodes={len(addresses)}",
        "--nproc-per-node=gpu",
        f"--node-rank={node}",
        f"--master-addr={addresses[0]}",
        f"--master-port={PORT}",
        "--no-python",
    )
    return [
        install_step(project),
        Step((*torchrun, "meshflash", "checksum"), "🚀 Running distributed FlashAttention..."),
    ]


def execute(command: Sequence[str]) -> int:
    """Run a command with the output of this process; return its exit status."""
    return subprocess.run(command, check=False).returncode


def run_steps(lines: Iterable[str], steps: Iterable[Step], runner: Runner = execute) -> None:
    """Print the lines, then announce and run each step; raise at the first step that fails."""
    for line in lines:
        print(line, flush=True)
    for step in steps:
        if step.line:
            print(step.line, flush=True)
        status = runner(step.command)
        if status != 0:
            raise RuntimeError(f"`{shlex.join(step.command)}` ended with exit status {status}")


def image_from(base: Any, source: Path = SOURCE) -> Any:
    """Return the image: Open MPI, a C compiler for Triton, the project's dependencies, and its source tree."""
    return (
        base.debian_slim(python_version="3.12")
        .apt_install("openmpi-bin", "libopenmpi-dev", "build-essential")
        .add_local_file(source / "constraints.txt", CONSTRAINTS, copy=True)
        .pip_install_from_pyproject(
            str(source / "pyproject.toml"), optional_dependencies=["mpi"], extra_options=f"-c {CONSTRAINTS}"
        )
        # Containers may not read each other's memory; without this setting Open MPI warns at every start.
        .env({"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "PYTHONUNBUFFERED": "1"})
        .add_local_dir(source, PROJECT, ignore=IGNORED)
    )


app = modal.App("meshflash")
image = image_from(modal.Image)
# Modal 1.6 moved the decorator out of `modal.experimental`.
clustered = getattr(modal, "clustered", None) or modal.experimental.clustered


@app.function(image=image, gpu=GPU, timeout=HOUR)
def run(nproc: int = 4) -> None:
    """Run the MPI job and the self-test in one container with one GPU."""
    run_steps(opening_lines(), job_steps(nproc))


@app.function(image=image, gpu=f"{GPU}:8", timeout=HOUR)
@clustered(size=NODES, rdma=True)
def cluster() -> None:
    """Run the job over all GPUs of several containers, which Modal starts together."""
    info = modal.experimental.get_cluster_info()
    run_steps(opening_lines(), cluster_steps(info.rank, info.container_ips))
