"""The worker pool of these tests: results, exceptions, deaths and hangs of workers reach the calling test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshflash.runtime.parent import alive
from pool import Pool, WorkerError


@dataclass(frozen=True)
class Case:
    """An argument and a result that only this module can unpickle; the tests make it."""

    scale: float
    x: torch.Tensor


def reduce(rank: int, world: int, group: Any, case: Case) -> Case:
    """All-reduce the tensor of a case, scaled by rank and scale."""
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, world)
    assert dist.get_world_size() == world
    assert torch.get_num_threads() == 1
    x = case.x * rank * case.scale
    dist.all_reduce(x, group=group)
    return Case(case.scale, x)


def process(rank: int, world: int, group: Any) -> int:
    """Return the process id of the worker."""
    return os.getpid()


def raise_on(rank: int, world: int, group: Any, bad: int) -> None:
    """Raise on rank `bad`."""
    if rank == bad:
        raise KeyError("the message")


def raise_before_barrier(rank: int, world: int, group: Any, bad: int) -> None:
    """Raise on rank `bad`, so that the other ranks wait in a barrier."""
    raise_on(rank, world, group, bad)
    dist.barrier(group)


def leave_unmatched(rank: int, world: int, group: Any) -> None:
    """Send a message that no rank receives."""
    if rank == 0:
        dist.isend(torch.ones(1), 1, group=group)


def die_on(rank: int, world: int, group: Any, bad: int) -> None:
    """Kill rank `bad`, so that the other ranks wait in a barrier."""
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)


def sleep_on(rank: int, world: int, group: Any, bad: int) -> None:
    """Hang on rank `bad`."""
    if rank == bad:
        time.sleep(600)


def unpicklable(rank: int, world: int, group: Any) -> Any:
    """Return a result that cannot be pickled."""
    return lambda: rank


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_of_a_run_share_a_process_group(pool: Pool, world: int) -> None:
    results = pool.run(world, reduce, Case(2.0, torch.ones(3)))
    assert len(results) == world
    for result in results:
        assert isinstance(result, Case)
        torch.testing.assert_close(result.x, torch.full((3,), 2.0 * sum(range(world))))


def test_workers_are_reused_by_the_next_run(pool: Pool) -> None:
    first = pool.run(2, process)
    assert pool.run(2, process) == first
    assert os.getpid() not in first


def test_exception_names_its_rank_and_keeps_the_workers(pool: Pool) -> None:
    before = pool.run(3, process)
    with pytest.raises(WorkerError, match=r"(?s)rank 1 of 3 raised:.*raise_on.*KeyError: 'the message'"):
        pool.run(3, raise_on, 1)
    assert pool.run(3, process) == before


def test_pending_messages_do_not_reach_the_next_run(pool: Pool) -> None:
    pool.run(2, leave_unmatched)
    pool.run(2, reduce, Case(1.0, torch.ones(1)))


def test_unpicklable_result_names_its_rank(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 0 of 1 raised:.*pickle"):
        pool.run(1, unpicklable)


@pytest.mark.parametrize("function", [lambda rank, world, group: None, len])
def test_function_that_a_worker_cannot_import_is_refused(pool: Pool, function: Any) -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        pool.run(1, function)


@pytest.mark.parametrize("world", [0, 5])
def test_world_larger_than_the_pool_is_refused(pool: Pool, world: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 4"):
        pool.run(world, process)


@pytest.mark.slow
def test_ranks_that_wait_for_a_failed_rank_are_ended(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)^rank 1 of 2 raised:.*ended: rank 0"):
        pool.run(2, raise_before_barrier, 1, timeout=60)
    assert len(pool.run(2, process)) == 2


@pytest.mark.slow
def test_killed_worker_is_named_and_the_pool_recovers(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 1 died with SIGKILL"):
        pool.run(2, die_on, 1)
    assert len(pool.run(2, process)) == 2


@pytest.mark.slow
def test_hanging_worker_is_ended_with_its_stack_and_the_pool_recovers(pool: Pool) -> None:
    pool.run(2, process)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)rank 1 did not end in 0.5 s.*in sleep_on"):
        pool.run(2, sleep_on, 1, timeout=0.5)
    assert time.monotonic() - began < 5
    assert len(pool.run(2, process)) == 2


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    script = (
        "import os, sys, threading, time\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from pool import Pool\n"
        "from test_pool import process, sleep_on\n"
        "pool = Pool()\n"
        "print(*pool.run(1, process), flush=True)\n"
        "threading.Timer(0.5, os._exit, [0]).start()\n"
        "pool.run(1, sleep_on, 0)\n"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", script, here]
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # `os._exit` leaves temporary files behind
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    worker = int(done.stdout)
    deadline = time.monotonic() + 5
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)
