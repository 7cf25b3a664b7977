"""Open a symmetric heap: memory of the same size on every rank, for kernels that communicate.

    with open_heap(group, bytes=2**20) as heap:
        x = heap.allocate((128, 64))
        heap.barrier()
        kernel[grid](x.local, heap.bases, heap.status, heap.rank)
        heap.check()

`contract.py` defines a heap and its tensors, `device.py` the calls of kernels. The page "Symmetric heap" of the guide
explains both.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from meshflash.comm.handshake import timeout as seconds_of_mesh
from meshflash.comm.heap.contract import ALIGN, Heap, SymmetricTensor, Usage
from meshflash.comm.heap.gpu import SymmetricHeap
from meshflash.comm.heap.local import LocalHeap
from meshflash.comm.heap.shared_files import SharedHeap
from meshflash.runtime.devices import current, dist

__all__ = ["ALIGN", "KINDS", "TIMEOUT", "Heap", "SymmetricTensor", "Usage", "open_heap"]

#: Kinds of heaps, with a description of each.
KINDS = {
    "symmetric": "GPU memory on one host, one process per rank; ranks may share a GPU",
    "shared": "host memory, one process per rank, for kernels that Triton interprets on CPUs",
    "local": "one process emulates all ranks, each on a stream of its own",
}
#: Longest time that a rank waits for another, in seconds, unless MESHFLASH_TIMEOUT is shorter.
TIMEOUT = 60.0


def open_heap(
    group: Any = None,
    *,
    bytes: int,
    device: torch.device | str | None = None,
    kind: str | None = None,
    timeout: float | None = None,
) -> Heap:
    """Open a heap on every rank of a process group; all ranks call this together.

    Args:
        group: A process group, None for the default group, or a number of ranks that this process emulates.
        bytes: The size of each rank's heap.
        device: The device of the memory; by default the current device.
        kind: "symmetric", "shared" or "local"; by default it follows from the group and the device.
        timeout: The seconds that a rank waits for another, in kernels and in barriers, before it raises.

    >>> with open_heap(2, bytes=4096, device="cpu") as heap:
    ...     x = heap.allocate(4, torch.int32)
    ...     heap.barrier()
    ...     x.peer(1)[2] = 7
    ...     with heap.as_rank(1):
    ...         print(x.local.tolist())
    ...     x.free()
    [0, 0, 7, 0]
    """
    where = current() if device is None else torch.device(device)
    if where.index is None:  # tensors carry an index, and devices are compared with theirs
        where = current(where.type)
    emulates = isinstance(group, int) and not isinstance(group, bool)
    if kind is None:
        kind = "local" if emulates else "shared" if where.type == "cpu" else "symmetric"
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    seconds = min(TIMEOUT, seconds_of_mesh()) if timeout is None else timeout
    if bytes < 1 or not 0 < seconds < math.inf:
        raise ValueError(f"bytes={bytes}, timeout={seconds}: expected a number >= 1, and seconds > 0")
    size = -(-bytes // ALIGN) * ALIGN
    if kind == "local":
        if not emulates or group < 1:
            raise ValueError(
                "kind='local': this process emulates all ranks; give their number, such as open_heap(4, ...)"
            )
        return LocalHeap(group, size, where, seconds)
    if emulates:
        raise ValueError(
            f"kind={kind!r}: expected a process group, or None for the default one; a number is for 'local'"
        )
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "there is no process group; call meshflash.init() first, or emulate ranks in this process: open_heap(4)"
            )
        group = dist.group.WORLD
    if kind == "shared" and where.type != "cpu":
        raise ValueError(f"kind='shared' is host memory, and device={where}; use kind='symmetric', or device='cpu'")
    return (SharedHeap if kind == "shared" else SymmetricHeap)(group, size, where, seconds)
