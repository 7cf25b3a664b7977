"""Slow jobs that need a running Slurm, or two hosts simulated by network namespaces; run them by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from runtime.jobs import FinishedJob, check, run, start, wait_for, worker

pytestmark = pytest.mark.slow


def require_slurm():
    """Skip the test if no Slurm runs on this machine."""
    if not shutil.which("srun") or subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("no Slurm runs here")


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_srun_job_runs(mpi):
    require_slurm()
    if mpi not in subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True).stdout:
        pytest.skip(f"this Slurm has no {mpi}")
    job = run(["srun", "-n", "3", "--overcommit", f"--mpi={mpi}", *worker("attend", 60)])
    check(job, 3, "Slurm")
    assert {report["local_size"] for report in job.reports} == {3}
    assert sorted(report["local"] for report in job.reports) == [0, 1, 2]


def test_two_concurrent_srun_steps_do_not_interfere():
    require_slurm()
    found = [
        wait_for(job) for job in [start(["srun", "-n", "2", "--overcommit", *worker("attend", 60)]) for _ in range(2)]
    ]
    for job in found:
        check(job, 2, "Slurm")
    assert len({report["master"] for job in found for report in job.reports}) == 2


def ip(*arguments):
    """Run a command of iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts():
    """Yield two network namespaces, connected by a pair of interfaces."""
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    names = ("meshflash-a", "meshflash-b")
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "mf0", "netns", names[0], "type", "veth", "peer", "name", "mf1", "netns", names[1])
        for n, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.99.0.{n + 1}/24", "dev", f"mf{n}")
            ip("-n", name, "link", "set", f"mf{n}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def on(host, command):
    """Return the command that runs in the namespace of a host."""
    return ["ip", "netns", "exec", host, *command]


def test_two_hosts_join_by_environment_variables(two_hosts):
    """Ranks on two hosts connect to MASTER_ADDR, and gloo uses the interface that leads there."""
    ranks = [
        start(
            on(two_hosts[rank // 2], worker("attend", 60)),
            {
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_RANK": str(rank % 2),
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(rank // 2),
                "MASTER_ADDR": "10.99.0.1",
                "MASTER_PORT": "29511",
            },
        )
        for rank in range(4)
    ]
    found = [wait_for(rank) for rank in ranks]
    check(
        FinishedJob(
            max(job.code for job in found), [report for job in found for report in job.reports], found[-1].text
        ),
        4,
        "variables",
    )
    assert sorted((report["node"], report["local"]) for job in found for report in job.reports) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_two_hosts_join_by_torchrun(two_hosts):
    def agent(n):
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(n)]
        options += ["--master-addr", "10.99.0.1", "--master-port", "29512"]
        return on(two_hosts[n], [sys.executable, "-m", "torch.distributed.run", *options, *worker("attend", 60)[1:]])

    found = [wait_for(job) for job in [start(agent(n)) for n in range(2)]]
    assert [job.code for job in found] == [0, 0], found[0].text + found[1].text
    check(FinishedJob(0, [report for job in found for report in job.reports], ""), 4, "torchrun")


def test_unreachable_host_is_an_error(two_hosts):
    """A rank that finds no rank 0 names the address within its timeout."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.99.0.77", "MASTER_PORT": "29513"}
    job = wait_for(start(on(two_hosts[1], worker("fail", 4)), variables), 60)
    assert job.code == 4, job.text
    assert "rank 1 of 2 found no rank 0 within 4 s at 10.99.0.77:29513" in job.reports[0]["error"]
    assert job.reports[0]["seconds"] < 4 + 10
