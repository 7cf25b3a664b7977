"""Memory that runs out: what is free, and going on without what did not fit."""

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
    """What the function returns, or None if memory ran out on the way; what it took is given back."""
    try:
        return function()
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # how torch says it on CPUs
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def free_bytes() -> int | None:
    """The host's memory that is free, within the limit of its container; None where the system does not say."""
    found = re.search(r"MemAvailable: +(\d+) kB", _read("proc/meminfo"))
    if found is None:
        return None
    free = int(found[1]) * 1024
    limit, used = (_read(f"sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        files = re.findall(r"^(?:in)?active_file (\d+)$", _read("sys/fs/cgroup/memory.stat"), re.MULTILINE)
        free = min(free, int(limit) - int(used) + sum(map(int, files)))  # what is read of files gives way
    return free


def _read(path: str) -> str:
    try:
        return (_SYSTEM / path).read_text()
    except OSError:
        return ""
