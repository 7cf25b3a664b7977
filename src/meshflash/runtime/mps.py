"""NVIDIA's Multi-Process Service (MPS) for ranks that share a GPU: without it their kernels run one rank at a time.

The service keeps its pipes and logs in a private folder, so that it does not disturb other users of the machine, and
ends with the block. Never end one of its clients by SIGKILL: the other clients would be lost with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
#: Where clients look for the service unless CUDA_MPS_PIPE_DIRECTORY says otherwise.
DEFAULT_PIPES = "/tmp/nvidia-mps"
#: Hardware queues of each client, unless CUDA_DEVICE_MAX_CONNECTIONS is set. MPS gives few by default, and streams that
#: share one wait for each other: a kernel would wait for a message that another rank has not sent yet.
CONNECTIONS = 8


def missing() -> str | None:
    """Return why MPS cannot be started; None if it can."""
    return None if shutil.which(CONTROL) else f"{CONTROL} is not there; it comes with NVIDIA's driver"


def client_reason() -> str | None:
    """Return why this process would use its GPU through MPS, or None if it would not."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if folder:
        return f"CUDA_MPS_PIPE_DIRECTORY={folder} is set"
    return f"{DEFAULT_PIPES} has the pipe of a control daemon" if Path(DEFAULT_PIPES, "control").exists() else None


@contextmanager
def mps() -> Iterator[None]:
    """Start MPS: processes that start in this block share the GPU by it. ValueError if MPS is not installed."""
    reason = missing()
    if reason:
        raise ValueError(f"MPS: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="meshflash-mps-") as folder,
        variables(
            CUDA_MPS_PIPE_DIRECTORY=folder,
            CUDA_MPS_LOG_DIRECTORY=folder,
            CUDA_DEVICE_MAX_CONNECTIONS=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", str(CONNECTIONS)),
        ),
    ):
        subprocess.run([CONTROL, "-d"], check=True, capture_output=True, timeout=60)
        try:
            yield
        finally:
            subprocess.run([CONTROL], input="quit\n", text=True, check=False, capture_output=True, timeout=60)


@contextmanager
def variables(**new: str) -> Iterator[None]:
    """Set environment variables for the processes that start in this block, and restore them afterwards.

    Args:
        **new: The variables and their values.

    >>> with variables(MESHFLASH_EXAMPLE="1"):
    ...     os.environ["MESHFLASH_EXAMPLE"]
    '1'
    >>> "MESHFLASH_EXAMPLE" in os.environ
    False
    """
    old = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
