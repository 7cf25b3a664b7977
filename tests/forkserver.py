"""Child processes that start with torch imported: forked from a server that has imported it once.

Importing torch and what tests need of it takes seconds of a core, and a test session starts hundreds of ranks. The
server has no threads and has never computed, so that its children may do both. As under the start method "spawn", a
child inherits nothing else of the tests' process: functions and arguments reach it pickled.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext
from multiprocessing.forkserver import ensure_running
from typing import Any

import torch

from interpreted import speed_up
from meshflash.runtime.mps import variables

#: Modules that the server imports; it leaves out those that are not installed.
PRELOAD = (
    "meshflash.cli",
    "meshflash.train.inference",
    "numpy.testing",
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing",
    "triton.runtime.interpreter",
    "typer._adapters",
)


class _Process(ForkServerProcess):
    """A process with the environment variables that its starter has, rather than those the server was started with."""

    def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...] = (), **options: Any) -> None:
        super().__init__(target=_run, args=(dict(os.environ), target, args), **options)


class _Context(ForkServerContext):
    """The start method "forkserver", with the starter's environment variables."""

    Process = _Process


def context() -> ForkServerContext | SpawnContext:
    """Return how tests start processes: from the server, or anew where there is a GPU, which no fork may inherit."""
    if torch.cuda.is_available() or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    found = _Context()
    found.set_forkserver_preload(list(PRELOAD))
    # both are read by imports, whatever a test has set when it is the first to start a process
    with variables(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        ensure_running()
    return found


def _run(environment: Mapping[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests' process, which ends its children
    os.environ.clear()
    os.environ.update(environment)
    speed_up()
    try:
        target(*args)
    finally:
        atexit._run_exitfuncs()  # a forked process skips them, a spawned one does not
