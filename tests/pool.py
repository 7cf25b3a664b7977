"""Worker processes for tests of several ranks: one pool a session, its workers started on first use.

Each run gets a fresh gloo group of just its ranks, which is also their default group, so no test sees
what an earlier one left behind. Workers are forked with torch imported (`forkserver.py`); functions reach them as a
file and a name, because the test modules that define them are not on any import path.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import io
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from forkserver import context
from meshflash.runtime.listen import LOOPBACK
from meshflash.runtime.mps import variables

WORKERS = 4

#: Seconds: for a worker to import torch; for the others to end once one failed; for a stack to be written.
_START, _GRACE, _STACKS = 120.0, 2.0, 0.3

#: Groups that jobs may leave in cycles of garbage; each has a thread that wakes up a hundred times a second.
_LEFT = 16


class WorkerError(RuntimeError):
    """A worker raised, died or did not end in time; the message names its rank."""


@dataclass(frozen=True)
class _Job:
    """One call for one worker. The arguments are pickled apart, to be read after the module is there."""

    number: int
    world: int
    port: int
    module: str
    path: str
    qualname: str
    args: bytes


@dataclass(frozen=True)
class _Worker:
    """A worker as the tests' process sees it."""

    rank: int
    process: BaseProcess
    pipe: Connection
    log: Path


class Pool:
    """Up to four worker processes, of which a run takes as many as it has ranks."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._port = 0
        self._jobs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `function(rank, world, group, *args)` on ranks 0 to world - 1; their results, by rank.

        The function stands at the top level of its module. Arguments and results are pickled; tensors
        arrive as copies. Raises WorkerError if a rank raises, dies or takes longer than `timeout` seconds.
        """
        if not 1 <= world <= WORKERS:
            raise ValueError(f"world={world}: expected 1 to {WORKERS}")
        module = sys.modules.get(getattr(function, "__module__", ""))
        path = getattr(module, "__file__", None)
        if module is None or path is None or "<" in function.__qualname__:
            raise ValueError(f"{function!r}: expected a function at the top level of a module")
        self._start(world)
        self._jobs += 1
        job = _Job(
            number=self._jobs,
            world=world,
            port=self._port,
            module=module.__name__,
            path=path,
            qualname=function.__qualname__,
            args=pickle.dumps(args),
        )
        for worker in self._workers[:world]:
            with contextlib.suppress(OSError):  # It died between two runs; reading from it will tell.
                worker.pipe.send_bytes(pickle.dumps(vars(job)))
        return self._collect(world, timeout)

    def close(self) -> None:
        """End the workers. The next run starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    def _start(self, world: int) -> None:
        """Start the workers that this many ranks need and that are not there yet."""
        new = [self._spawn(rank) for rank in range(len(self._workers), world)]
        deadline = time.monotonic() + _START
        try:
            for worker in new:
                if not worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(f"rank {worker.rank} did not start in {_START:g} s")
                try:
                    self._port = pickle.loads(worker.pipe.recv_bytes()) or self._port
                except (EOFError, OSError):
                    raise WorkerError(_death(worker)) from None
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int) -> _Worker:
        start = context()
        ours, theirs = start.Pipe()
        log = Path(self._folder.name) / f"rank{rank}.log"
        # Without an interface gloo looks up the host's name, which need not resolve.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
        with variables(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=interface):
            process = start.Process(target=_work, args=(rank, theirs, str(log)), daemon=True)
            process.start()
        theirs.close()
        worker = _Worker(rank, process, ours, log)
        self._workers.append(worker)
        return worker

    def _collect(self, world: int, timeout: float) -> list[Any]:
        """Every rank's result, or a WorkerError that begins with a rank that died, or else failed first."""
        waiting = {worker.pipe: worker for worker in self._workers[:world]}
        results: dict[int, bytes] = {}
        problems: list[str] = []
        lost = False
        deadline = time.monotonic() + timeout
        try:
            while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    worker = waiting.pop(pipe)
                    try:
                        results[worker.rank], error = pickle.loads(pipe.recv_bytes())
                    except (EOFError, OSError):
                        problems.insert(0, _death(worker))  # What the others raise follows from it.
                        lost = True
                    else:
                        if error:
                            problems.append(f"rank {worker.rank} of {world} raised:\n{error}")
                if problems:
                    deadline = min(deadline, time.monotonic() + _GRACE)
            late = list(waiting.values())
            if late and problems:
                problems.append(_waited(late))
            elif late:
                problems += _hangs(late, timeout)
        finally:  # Also if the tests are interrupted: what is still to come must not answer a later run.
            if waiting or lost:
                self.close()
        if problems:
            raise WorkerError("\n".join(problems))
        return [pickle.loads(results[rank]) for rank in range(world)]


def _death(worker: _Worker) -> str:
    """What to say of a worker whose pipe has ended."""
    worker.process.kill()  # It may have closed its pipe and live on.
    worker.process.join()
    code = worker.process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"rank {worker.rank} died with {how}; its output ended with:\n{_tail(worker.log)}"


def _hangs(workers: list[_Worker], timeout: float) -> list[str]:
    """What to say of workers that did not answer in time: where each of them stands."""
    for worker in workers:
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(_STACKS)
    return [
        f"rank {worker.rank} did not end in {timeout:g} s; its output ended with:\n{_tail(worker.log)}"
        for worker in workers
    ]


def _waited(workers: list[_Worker]) -> str:
    ranks = ", ".join(str(worker.rank) for worker in workers)
    return f"not done {_GRACE:g} s after that, and ended: rank {ranks}"


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _work(rank: int, pipe: Connection, log: str) -> None:
    """Do jobs until the tests' process is gone."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(write_through=True)  # what a worker printed before it was killed is in its log
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever stops the tests ends the workers.
    import torch
    from torch import distributed

    dist: Any = distributed  # torch does not declare all that it exports here
    torch.set_num_threads(1)
    limit = timedelta(seconds=_START)
    store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False) if rank == 0 else None
    pipe.send_bytes(pickle.dumps(store.port if store else 0))
    jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, jobs), daemon=True).start()
    left = 0
    while True:
        job = jobs.get()
        try:
            store = store or dist.TCPStore("127.0.0.1", job.port, None, False, limit)
            if dist.is_initialized():
                left += dist.get_pg_count() - 1
                dist.destroy_process_group()
            _forget_meshes()
            if left > _LEFT:
                gc.collect()
                left = 0
            fresh = dist.PrefixStore(f"job{job.number}", store)
            dist.init_process_group("gloo", store=fresh, rank=rank, world_size=job.world)
            function = _load(job.module, job.path)
            for name in job.qualname.split("."):
                function = getattr(function, name)
            result = function(rank, job.world, dist.group.WORLD, *pickle.loads(job.args))
            answer = (pickle.dumps(result), "")
        except BaseException:  # A skip, a failed check and an exit are all news for the test.
            answer = (b"", traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


def _forget_meshes() -> None:
    """DTensor's caches take a mesh of ranks for an equal one of an earlier job, and keep the threads of its groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        getattr(_redistribute, "_planner_cache", {}).clear()  # older torch has none


def _listen(pipe: Connection, jobs: queue.SimpleQueue[_Job]) -> None:
    """Pass jobs on, and end the worker with the tests' process, even in the middle of a job."""
    try:
        while True:
            jobs.put(_Job(**pickle.loads(pipe.recv_bytes())))
    except (EOFError, OSError):
        os._exit(1)


def _load(name: str, path: str) -> Any:
    """The module that the tests' process knows by this name, so that what it pickled is found here."""
    if name in sys.modules:
        return sys.modules[name]
    with contextlib.suppress(ImportError):
        found = importlib.util.find_spec(name)
        if found and found.origin == path:
            return importlib.import_module(name)
    parent, folder = name.rpartition(".")[0], Path(path).parent
    while parent and parent not in sys.modules:
        package = ModuleType(parent)
        package.__path__ = [str(folder)]
        sys.modules[parent] = package
        parent, folder = parent.rpartition(".")[0], folder.parent
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
