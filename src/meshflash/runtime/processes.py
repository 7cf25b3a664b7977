"""Run a function in several local processes, joined by a gloo group: for the demo, benchmarks and checks.

Jobs that a launcher starts (torchrun, mpiexec, srun) do not use it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshflash.runtime.listen import LOOPBACK
from meshflash.runtime.mps import variables
from meshflash.runtime.parent import end_with_parent

#: Seconds that the other ranks get to end by themselves after one rank has failed.
GRACE_SECONDS = 5.0

#: Sends a value, such as progress, from a rank to the process that started the ranks.
Tell = Callable[[Any], None]


class RankError(RuntimeError):
    """A rank raised, died or took too long; the message names it."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    threads: int = 1,
    timeout: float = 600.0,
    listen: Tell | None = None,
) -> list[Any]:
    """Call `function(rank, world, tell, *args)` in `world` processes and return their results, by rank.

    The default process group exists while the function runs. RankError names a rank that raised, died or took too long.

    Args:
        world: The number of processes.
        function: A function at the top level of a module, because it is pickled.
        *args: Further arguments of the function; they and the results are pickled.
        threads: The number of torch threads of each process.
        timeout: Seconds until all ranks must have returned.
        listen: Called here with each value that a rank passes to its `tell`.
    """
    if world < 1:
        raise ValueError(f"world={world}: expected at least one rank")
    context = multiprocessing.get_context("spawn")
    # Without an interface gloo looks up the host's name, which may not resolve.
    inherited = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK), "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory(prefix="meshflash-") as folder, variables(**inherited):
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            call = (rank, world, theirs, str(Path(folder) / "store"), threads, timeout, function, args)
            process = context.Process(target=_rank, args=call, daemon=True, name=f"rank {rank}")
            with _ignored_interrupts():
                process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        try:
            results = _collect(pipes, processes, timeout, listen)
            for process in processes:  # let them finish what they do at exit, such as writing traces
                process.join(GRACE_SECONDS)
            return results
        finally:
            end(processes)


def end(processes: Sequence[Any]) -> None:
    """End processes that still run, by SIGTERM first: SIGKILL would end all processes that share a GPU under MPS.

    Args:
        processes: Processes of `multiprocessing`.
    """
    for stop in ("terminate", "kill"):
        running = [process for process in processes if process.is_alive()]
        for process in running:
            getattr(process, stop)()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))


def _collect(pipes: dict[Connection, int], processes: list[Any], timeout: float, listen: Tell | None) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    deadline = time.monotonic() + timeout
    world = len(processes)
    while pipes:
        ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank in sorted(pipes.values()))
            failures.append(f"rank {late} did not end" + ("" if failures else f" within {timeout:g} s"))
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join()
                kind, value = "failure", f"died with exit code {processes[rank].exitcode}"
            if kind == "message":
                if listen is not None:
                    listen(value)
                continue
            del pipes[pipe]
            if kind == "result":
                results[rank] = value
            else:
                failures.append(f"rank {rank} {value}")
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        raise RankError("\n".join(failures))
    return [results[rank] for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    pipe: Connection,
    store: str,
    threads: int,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    end_with_parent()
    try:
        import torch
        from torch import distributed as dist

        torch.set_num_threads(threads)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
        try:
            result = function(rank, world, lambda value: pipe.send(("message", value)), *args)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        pipe.send(("result", result))
    except BaseException:
        pipe.send(("failure", f"of {world} raised:\n{traceback.format_exc()}"))


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Let a process that starts here ignore Ctrl-C, which a terminal sends to all processes.

    The starting process handles it and ends the ranks. Ranks that handled it too would print a traceback each. Only the
    main thread may change how signals are handled; ranks that another thread starts are left as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the new process
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
