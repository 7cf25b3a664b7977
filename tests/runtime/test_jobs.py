"""Real jobs under real launchers: attention against a single process, concurrent jobs, lost ranks."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from runtime import jobs
from runtime.jobs import (
    check,
    free_port,
    launcher,
    libraries,
    reports_in,
    run,
    start,
    start_ranks,
    wait_for,
    worker,
)

MANY = ("--allow-run-as-root", "--oversubscribe")


def test_open_mpi_job_runs_without_mpi4py(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\n")
    job = run([launcher("openmpi"), *MANY, "--hostfile", str(hosts), "-n", "4", *worker("attend", 60)])
    check(job, 4, "Open MPI")
    assert {report["local_size"] for report in job.reports} == {4}
    assert sorted(report["local"] for report in job.reports) == [0, 1, 2, 3]
    assert not any(report["mpi"] for report in job.reports)


def test_two_concurrent_mpich_jobs_do_not_interfere_without_mpi4py():
    command = [launcher("mpich"), "-n", "2", "-ppn", "2", *worker("attend", 60)]
    started = [start(command) for _ in range(2)]
    found = [wait_for(job) for job in started]
    for job in found:
        check(job, 2, "MPICH")
    masters = [{report["master"] for report in job.reports} for job in found]
    assert [len(master) for master in masters] == [1, 1]
    assert masters[0] != masters[1]


@pytest.mark.parametrize(
    ("kind", "name", "hidden"),
    [
        ("openmpi", "Open MPI", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        pytest.param("mpich", "MPICH", "MPI_LOCALNRANKS", marks=pytest.mark.slow),
    ],
)
def test_mpi4py_broadcasts_the_address_of_rank_0(kind, name, hidden):
    """Hide the number of local ranks, so that ranks do not know that they share a node."""
    more = MANY if kind == "openmpi" else ()
    job = run([launcher(kind), *more, "-n", "2", *worker("attend", 60, hidden)], libraries(kind))
    check(job, 2, name)
    assert all(report["mpi"] for report in job.reports)
    assert {report["local_size"] for report in job.reports} == {2}


@pytest.mark.slow
def test_16_processes_agree_on_new_kinds_of_calls_and_name_the_rank_that_differs():
    """Ranks of the handshake tests are threads; these are processes, each with `init` and a process group of gloo."""
    found = [wait_for(rank, 240) for rank in start_ranks("kinds", 16, 120, free_port())]
    assert [rank.code for rank in found] == [0] * 16, "\n".join(rank.text for rank in found)
    reports = [report for rank in found for report in rank.reports]
    assert sorted(report["rank"] for report in reports) == list(range(16))
    assert max(report["error"] for report in reports) < 1e-12
    assert {report["text"].partition(";")[0] for report in reports} == {
        "ranks disagree in scale: rank 0 has 0.5, rank 11 has 0.25"
    }
    # three kinds of calls, the one that failed, and the one after it; a second call of a kind needs no handshake
    assert {report["handshakes"] for report in reports} == {5}


def test_init_works_again_after_shutdown():
    """A new group ignores the keys and variables of an earlier group."""
    job = run([launcher("mpich"), "-n", "2", *worker("again", 30)])
    assert job.code == 0, job.text
    assert sorted((report["n"], report["rank"]) for report in job.reports) == [
        (n, rank) for n in range(3) for rank in range(2)
    ]
    found = [wait_for(rank) for rank in start_ranks("again", 2, 30, free_port())]
    assert [rank.code for rank in found] == [0, 0], found[0].text + found[1].text


@pytest.mark.slow
def test_torchrun_job_runs_on_a_single_node():
    job = run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            *worker("attend", 60)[1:],
        ]
    )
    check(job, 2, "torchrun")


@pytest.mark.slow
def test_torchrun_job_runs_with_two_agents():
    port = free_port()
    options = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    ]
    options += ["--rdzv-id", "two", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *worker("attend", 60)[1:]]
    found = [wait_for(job) for job in [start(command) for _ in range(2)]]
    assert [job.code for job in found] == [0, 0], found[0].text + found[1].text
    reports = [report for job in found for report in job.reports]
    check(jobs.FinishedJob(0, reports, ""), 4, "torchrun")
    assert sorted((report["node"], report["local"]) for report in reports) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_occupied_port_is_named():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first, second = [wait_for(rank, 60) for rank in start_ranks("fail", 2, 3, port)]
    assert f"LaunchError: rank 0 of 2 cannot host the store at 127.0.0.1:{port} (" in first.reports[0]["error"]
    assert "MASTER_PORT to a free port" in first.reports[0]["error"]
    assert "a process listens there, and does not answer" in second.reports[0]["error"]
    assert max(first.reports[0]["seconds"], second.reports[0]["seconds"]) < 3 + 10


def test_unreachable_address_is_named_within_the_timeout():
    rank = jobs.Forked(
        worker("fail", 3)[1:],
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        },
    )
    job = wait_for(rank, 60)
    assert job.code == 4
    (report,) = job.reports
    assert "LaunchError: rank 1 of 2 found no rank 0 within 3 s at 127.0.0.1:" in report["error"]
    assert "set MASTER_ADDR to a name or address of rank 0's host" in report["error"]
    assert report["seconds"] < 3 + 10


def test_absent_rank_is_named():
    (rank, *others) = start_ranks("fail", 1, 3, free_port(), WORLD_SIZE="2")
    assert not others
    job = wait_for(rank, 60)
    assert job.code == 4
    assert "rank 1 of 2 did not come to 127.0.0.1" in job.reports[0]["error"]


def kill_one(seed, world=3, timeout=8.0):
    """Kill one rank at a random moment of repeated attention; all others must end with an error that names a rank."""
    draw = random.Random(seed)
    ranks = start_ranks("loop", world, timeout, free_port())
    running: dict[int, list[str]] = {rank: [] for rank in range(world)}
    for rank, process in enumerate(ranks):  # wait until all have run attention once
        while not reports_in("".join(running[rank])):
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "".join(running[rank])
            running[rank].append(line)
    time.sleep(draw.random())
    victim = draw.randrange(world)
    os.kill(ranks[victim].pid, signal.SIGKILL)
    begin = time.monotonic()
    for rank, process in enumerate(ranks):
        job = wait_for(process, timeout + 30)
        if rank != victim:
            assert job.code == 3, job.text
            assert job.reports[-1]["kind"] in ("TransportError", "MissingRankError")
            assert "rank" in job.reports[-1]["lost"]
    assert time.monotonic() - begin < timeout + 10


def test_killed_rank_ends_the_other_ranks():
    kill_one(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
def test_rank_killed_at_random_moments_ends_the_other_ranks(seed):
    kill_one(seed)


@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_example_script_runs_under_mpi(kind):
    script = str(Path(__file__).parents[2] / "examples" / "mpi_attention.py")
    more = MANY if kind == "openmpi" else ()
    job = run([launcher(kind), *more, "-n", "2", sys.executable, script])
    assert job.code == 0, job.text
    for rank in range(2):
        assert f"Rank {rank}/2 on device cpu" in job.text
        assert f"Rank {rank}: Output shape torch.Size([1, 512, 8, 64])" in job.text


def first_reports(process, count):
    """Return the first `count` JSON lines of the ranks of a job."""
    text = ""
    while len(reports_in(text)) < count:
        line = process.stdout.readline()
        assert line, text
        text += line
    return reports_in(text)


def assert_processes_end(reports):
    """Assert that the processes of these reports end within ten seconds."""
    deadline, places = time.monotonic() + 10, [Path(f"/proc/{report['process']}") for report in reports]
    while any(place.exists() for place in places) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(place.exists() for place in places)


@pytest.mark.parametrize("stop_signal", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_ranks_end_with_their_launcher(stop_signal):
    """After Ctrl-C or SIGKILL of `launch`, its ranks end."""
    process = start([sys.executable, "-m", "meshflash", "launch", "-n", "2", *worker("loop", 60)[1:]])
    reports = first_reports(process, 2)
    process.send_signal(stop_signal)
    job = wait_for(process, 60)
    assert job.code != 0
    assert "SignalException" not in job.text
    assert_processes_end(reports)


def test_ranks_of_a_benchmark_end_with_their_parent(tmp_path):
    """After SIGKILL of the parent the ranks must end by themselves."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, time\n"
        "from meshflash.runtime.processes import run_ranks\n"
        "def rank(rank, world, send):\n"
        "    send(os.getpid())\n"
        "    time.sleep(100)\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(2, rank, listen=lambda pid: print('report', json.dumps({'process': pid}), flush=True))\n"
    )
    process = start([sys.executable, str(script)])
    reports = first_reports(process, 2)
    process.kill()
    wait_for(process, 60)
    assert_processes_end(reports)
