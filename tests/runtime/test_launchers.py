"""The table of launchers: the variables of each, their precedence, and incomplete environments."""

from __future__ import annotations

import pytest

from meshflash.runtime.hosts import hosts_of, tasks_on
from meshflash.runtime.launchers import LAUNCHERS, LaunchError, Place, detect

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "PMIX_NAMESPACE": "prterun-here-77@1",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {
    "PALS_RANKID": "13",
    "PMI_RANK": "13",
    "PMI_SIZE": "24",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PALS_APID": "a-b-c",
    "PMI_LOCAL_SIZE": "12",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MPIRUN_ID": "99",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "6",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "LSB_JOBID": "123",
    "OMPI_COMM_WORLD_RANK": "6",
    "PMIX_RANK": "6",
}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}
#: Maps a name to an environment, and to the place that it describes.
PLACES = {
    "torchrun": (TORCHRUN, Place("torchrun", 5, 8, 1, 4, 1, "abc")),
    "Open MPI": (OPEN_MPI, Place("Open MPI", 1, 8, 2, 4, None, "prterun-here-77@1")),
    "MPICH or Intel MPI": (MPICH, Place("MPICH", 3, 8, 1, 2)),
    "Cray PALS": (PALS, Place("PALS", 13, 24, 1, 12, 1, "a-b-c")),
    "MVAPICH2": (MVAPICH2, Place("MVAPICH2", 2, 4, 0, 2, None, "99")),
    "jsrun": (JSRUN, Place("jsrun", 6, 12, 0, 6, None, "123")),
    "srun, no MPI": (SLURM, Place("Slurm", 9, 11, 1, 3, 2, "42.3")),
    "srun, PMI2": (SLURM | {"PMI_RANK": "9", "PMI_SIZE": "11"}, Place("Slurm", 9, 11, 1, 3, 2, "42.3")),
    "srun, PMIx": (
        SLURM | {"PMIX_RANK": "9", "PMIX_NAMESPACE": "slurm.pmix.42.3"},
        Place("Slurm", 9, 11, 1, 3, 2, "42.3"),
    ),
    "PMIx and sizes by hand": (
        {"PMIX_RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "PMIX_NAMESPACE": "x"},
        Place("PMIx", 1, 2, 1, None, None, "x"),
    ),
    "srun on a Cray, which sets PALS_* too": (
        SLURM | {"PALS_RANKID": "9", "PALS_LOCAL_RANKID": "1", "PALS_APID": "x", "PMI_RANK": "9", "PMI_SIZE": "11"},
        Place("Slurm", 9, 11, 1, 3, 2, "42.3"),
    ),
    "by hand in a step of one task": (
        SLURM
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        | {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_LOCALID": "0"},
        Place("variables", 1, 2, 1),
    ),
    "any MPI": ({"MPI_RANK": "1", "MPI_SIZE": "3", "MPI_LOCAL_RANK": "0"}, Place("MPI", 1, 3, 0)),
    "by hand": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        Place("variables", 1, 2, 1, 2),
    ),
    "a single rank by hand": ({"RANK": "0", "WORLD_SIZE": "1"}, Place("variables", 0, 1, 0, 1)),
    "no variables": ({}, Place("single")),
    "empty variables": ({"RANK": "", "WORLD_SIZE": ""}, Place("single")),
    "WORLD_SIZE=1 alone": ({"WORLD_SIZE": "1"}, Place("single")),
    "a batch script of Slurm is not a rank": (
        {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        Place("single"),
    ),
    "torchrun within srun": (SLURM | TORCHRUN, Place("torchrun", 5, 8, 1, 4, 1, "abc")),
    "mpiexec of Open MPI within srun": (SLURM | OPEN_MPI, Place("Open MPI", 1, 8, 2, 4, None, "prterun-here-77@1")),
    "mpiexec of MPICH within srun": (SLURM | MPICH, Place("MPICH", 3, 8, 1, 2)),
    "variables left over under mpiexec": (
        OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        Place("Open MPI", 1, 8, 2, 4, None, "prterun-here-77@1"),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_place_is_read_from_the_environment(name):
    environment, place = PLACES[name]
    assert detect(environment) == place


INCOMPLETE = {
    "a rank without a size": ({"RANK": "1"}, "RANK=1 is set, as by variables, and WORLD_SIZE is not"),
    "a size without a rank": (
        {"WORLD_SIZE": "4"},
        "WORLD_SIZE is set and RANK is not: set RANK and LOCAL_RANK as well",
    ),
    "no local rank": ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1 is set, as by variables, and LOCAL_RANK is not"),
    "Open MPI without a size": (
        {"OMPI_COMM_WORLD_RANK": "1"},
        "OMPI_COMM_WORLD_RANK=1 is set, as by Open MPI, and OMPI_COMM_WORLD_SIZE is not: use a launcher that sets",
    ),
    "MPICH without a local rank": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "and MPI_LOCALRANKID or PMI_LOCAL_RANK is not"),
    "PMIx alone": ({"PMIX_RANK": "1"}, "and PMIX_SIZE or WORLD_SIZE is not"),
    "not a number": (
        {"RANK": "one", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        "RANK='one', as by variables: expected a number",
    ),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='-1'.*expected a number, 0 or more"),
    "rank out of range": ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2 of 2: expected 0 to 1"),
    "local rank out of range": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
        "local rank 1 of 1: expected 0 to 0",
    ),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_incomplete_environment_is_refused_with_the_missing_variable(name):
    environment, message = INCOMPLETE[name]
    with pytest.raises(LaunchError, match=message):
        detect(environment)


def test_every_launcher_has_a_test_case():
    assert {launcher.name for launcher in LAUNCHERS} == {place.launcher for _, place in PLACES.values()} - {"single"}


def test_slurm_host_lists_are_expanded():
    assert hosts_of("n1") == ["n1"]
    assert hosts_of("frontier[00001-00003,00010]") == [f"frontier{n:05}" for n in (1, 2, 3, 10)]
    assert hosts_of("") == []
    assert tasks_on("2", 0) == 2
    assert tasks_on("what", 0) is None
