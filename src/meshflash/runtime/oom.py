"""Out of memory: how much the host has left, and how to go on after an allocation that did not fit."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

_SYSTEM = Path("/")


def attempt(function: Callable[[], T]) -> T | None:
    """Return the result of a function, or None if it ran out of memory; the memory that it took is freed.

    Args:
        function: The function to call.
    """
    try:
        return function()
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # torch's message on CPUs
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def free_bytes() -> int | None:
    """Return the free bytes of the host's memory, within the limit of its container; None if unknown."""
    found = re.search(r"MemAvailable: +(\d+) kB", _read("proc/meminfo"))
    if found is None:
        return None
    free = int(found[1]) * 1024
    limit, used = (_read(f"sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        files = re.findall(r"^(?:in)?active_file (\d+)$", _read("sys/fs/cgroup/memory.stat"), re.MULTILINE)
        free = min(free, int(limit) - int(used) + sum(map(int, files)))  # the page cache is freed on demand
    return free


def _read(path: str) -> str:
    try:
        return (_SYSTEM / path).read_text()
    except OSError:
        return ""
