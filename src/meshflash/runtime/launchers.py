"""Detect the launcher of this process and its rank: one table of launchers and their environment variables.

The first launcher of the table whose rank variable is set decides. The innermost launcher comes first: torchrun under
srun is torchrun. The local rank is read and never computed, for launchers place ranks on nodes in different orders.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshflash.runtime.hosts import tasks_on

Environment = Mapping[str, str]


class LaunchError(RuntimeError):
    """The environment lacks something about this rank, or contradicts itself; the message says what to set."""


@dataclass(frozen=True)
class Place:
    """This process among the ranks of its job, as `detect` reads it. None stands for what a launcher does not set."""

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    node: int | None = None
    #: The launcher's name for the job, unique among jobs that run at the same time; empty if it has none.
    job: str = ""

    @property
    def one_node(self) -> bool:
        """Whether all ranks are known to be on one node."""
        return self.world_size == 1 or self.local_world_size == self.world_size


@dataclass(frozen=True)
class Launcher:
    """The environment variables of a launcher. For each number, the first variable that is set counts."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    #: A variable without which this launcher did not start us, whatever else is set.
    marker: str = ""


def _prefixed(name: str, prefix: str, job: tuple[str, ...]) -> Launcher:
    """Return a launcher that sets PREFIX_RANK, PREFIX_SIZE, PREFIX_LOCAL_RANK and PREFIX_LOCAL_SIZE."""
    rank, size, local_rank, local_size = (
        (f"{prefix}_{part}",) for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    return Launcher(name, rank, size, local_rank, local_size, job=job)


#: The launchers, in order of precedence.
LAUNCHERS = (
    Launcher(
        "torchrun",
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        ("GROUP_RANK",),
        ("TORCHELASTIC_RUN_ID",),
        marker="TORCHELASTIC_RUN_ID",
    ),
    _prefixed("jsrun", "JSM_NAMESPACE", job=("PMIX_NAMESPACE", "LSB_JOBID")),
    _prefixed(
        "Open MPI", "OMPI_COMM_WORLD", job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
    ),
    _prefixed("MVAPICH2", "MV2_COMM_WORLD", job=("MPIRUN_ID",)),
    Launcher(
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        # A batch script has a SLURM_PROCID too, and is no rank. On Crays srun sets PALS_* as well, so Slurm is first.
        marker="SLURM_STEP_NUM_TASKS",
    ),
    Launcher(
        "PALS",
        ("PALS_RANKID",),
        ("PALS_SIZE", "PMI_SIZE"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        ("PALS_NODEID",),
        ("PALS_APID",),
    ),
    Launcher(
        "MPICH",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    Launcher(
        "PMIx",
        ("PMIX_RANK",),
        ("PMIX_SIZE", "WORLD_SIZE"),
        ("PMIX_LOCAL_RANK", "LOCAL_RANK"),
        ("PMIX_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
        job=("PMIX_NAMESPACE",),
    ),
    Launcher(
        "MPI",
        ("MPI_RANK",),
        ("MPI_SIZE", "MPI_WORLD_SIZE"),
        ("MPI_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK"),
        ("MPI_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"),
    ),
    Launcher(
        "variables", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("GROUP_RANK", "NODE_RANK")
    ),
)
SINGLE = "single"
#: Launchers whose ranks are MPI processes, so that mpi4py may find the other ranks.
OF_MPI = frozenset({"jsrun", "Open MPI", "MVAPICH2", "PALS", "Slurm", "MPICH", "PMIx", "MPI"})


def detect(environment: Environment | None = None) -> Place:
    """Return this process's place in its job; LaunchError if the environment is incomplete.

    Args:
        environment: The environment variables; by default those of this process.

    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    Place(launcher='Open MPI', rank=1, world_size=4, local_rank=1, local_world_size=None, node=None, job='')
    """
    given = {name: value for name, value in (os.environ if environment is None else environment).items() if value}
    for launcher in LAUNCHERS:
        if any(name in given for name in launcher.rank) and (not launcher.marker or launcher.marker in given):
            if launcher.name == "Slurm" and _within_step(given):
                continue
            return _slurm(launcher, given) if launcher.name == "Slurm" else _read(launcher, given)
    if "WORLD_SIZE" in given and _parse_number(given, "WORLD_SIZE", "variables") > 1:
        raise LaunchError("WORLD_SIZE is set and RANK is not: set RANK and LOCAL_RANK as well, or unset WORLD_SIZE")
    return Place(SINGLE)


def agent() -> str:
    """Return a name of the torchrun launch of this rank, which a restart keeps; empty if torchrun did not start it."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return ""
    parent = os.getppid()
    try:
        begun = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        begun = ""
    return f"{run} {socket.gethostname()} {parent} {begun}"


def _within_step(given: Environment) -> bool:
    """Return whether another launcher inside a Slurm step started us: its ranks differ from those of the step.

    A step of one task, such as `srun --pty bash`, may run any launcher.
    """
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"), ("PMIX_RANK", "SLURM_PROCID"))
    if any(mine in given and given[mine] != given.get(theirs) for mine, theirs in pairs):
        return True
    alone = given.get("SLURM_STEP_NUM_TASKS") == "1"
    by_hand = "RANK" in given and given.get("WORLD_SIZE", "1") != "1"
    by_pmix = "PMIX_RANK" in given and not given.get("PMIX_NAMESPACE", "slurm").startswith("slurm")
    return alone and (by_hand or by_pmix)


def _read(launcher: Launcher, given: Environment) -> Place:
    rank = _require_number(launcher, launcher.rank, given)
    world_size = _require_number(launcher, launcher.size, given)
    local_rank = 0 if world_size == 1 else _require_number(launcher, launcher.local_rank, given)
    local_size, node = (_find_number(launcher, names, given) for names in (launcher.local_size, launcher.node))
    if world_size == 1:
        local_size = 1
    job = next((given[name] for name in launcher.job if name in given), "")
    place = Place(launcher.name, rank, world_size, local_rank, local_size, node, job)
    _check(place)
    return place


def _slurm(launcher: Launcher, given: Environment) -> Place:
    """Read a place of Slurm, which lists the ranks of all nodes in one variable."""
    place = _read(launcher, given)
    spread = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE")
    local = tasks_on(spread, place.node or 0) if spread else place.local_world_size
    job = ".".join(given.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")).strip(".")
    return Place("Slurm", place.rank, place.world_size, place.local_rank, local, place.node, job)


def _require_number(launcher: Launcher, names: tuple[str, ...], given: Environment) -> int:
    found = _find_number(launcher, names, given)
    if found is None:
        seen = next(name for name in launcher.rank if name in given)
        one = " or ".join(dict.fromkeys(names))
        hand = " (or RANK, WORLD_SIZE and LOCAL_RANK, without the variables of a launcher)"
        raise LaunchError(
            f"{seen}={given[seen]} is set, as by {launcher.name}, and {one} is not: use a launcher that sets it, "
            f"or set it yourself{'' if launcher.name == 'variables' else hand}"
        )
    return found


def _find_number(launcher: Launcher, names: tuple[str, ...], given: Environment) -> int | None:
    name = next((name for name in names if name in given), None)
    return None if name is None else _parse_number(given, name, launcher.name)


def _parse_number(given: Environment, name: str, launcher: str) -> int:
    if not re.fullmatch(r"\d+", given[name]):
        raise LaunchError(f"{name}={given[name]!r}, as by {launcher}: expected a number, 0 or more")
    return int(given[name])


def _check(place: Place) -> None:
    for what, number, size in (
        ("rank", place.rank, place.world_size),
        ("local rank", place.local_rank, place.local_world_size or place.world_size),
    ):
        if not 0 <= number < size:
            raise LaunchError(f"{place.launcher} set {what} {number} of {size}: expected 0 to {size - 1}")
