"""A symmetric heap for kernels that talk: memory of the same size on every rank, opened by one call.

    with open_heap(group, bytes=2**20) as heap:
        x = heap.allocate((128, 64))
        heap.barrier()
        kernel[grid](x.local, heap.bases, heap.status, heap.rank)
        heap.check()

What kernels do with it is in `device.py`; the page "Symmetric heap" of the guide draws it.
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

#: Kinds of heaps, and what each is.
KINDS = {
    "symmetric": "memory of GPUs of one host, one process a rank; ranks may share a GPU",
    "shared": "memory of the host, one process a rank, for kernels that Triton interprets on CPUs",
    "local": "one process plays all ranks, each on a stream of its own",
}
#: Seconds that a rank waits for another at most, unless MESHFLASH_TIMEOUT says less.
TIMEOUT = 60.0


def open_heap(
    group: Any = None,
    *,
    bytes: int,
    device: torch.device | str | None = None,
    kind: str | None = None,
    timeout: float | None = None,
) -> Heap:
    """A heap of so many bytes on each rank of a process group; all ranks open it together.

    Args:
        group: a process group; None is the default group. A number of ranks, if this process plays them all.
        bytes: of each rank's heap.
        device: where; by default the device that is current.
        kind: "symmetric", "shared" or "local"; by default the one that the group and the device call for.
        timeout: seconds that a rank waits for another, in kernels and in meetings, before it raises.

    >>> with open_heap(2, bytes=4096, device="cpu") as heap:
    ...     x = heap.allocate(4, torch.int32)
    ...     heap.barrier()
    ...     x.peer(1)[2] = 7
    ...     with heap.play(1):
    ...         print(x.local.tolist())
    ...     x.free()
    [0, 0, 7, 0]
    """
    where = current() if device is None else torch.device(device)
    if where.index is None:  # tensors say which one they are on
        where = current(where.type)
    plays = isinstance(group, int) and not isinstance(group, bool)
    if kind is None:
        kind = "local" if plays else "shared" if where.type == "cpu" else "symmetric"
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    seconds = min(TIMEOUT, seconds_of_mesh()) if timeout is None else timeout
    if bytes < 1 or not 0 < seconds < math.inf:
        raise ValueError(f"bytes={bytes}, timeout={seconds}: expected a number >= 1, and seconds > 0")
    size = -(-bytes // ALIGN) * ALIGN
    if kind == "local":
        if not plays or group < 1:
            raise ValueError("kind='local': this process plays all ranks; give their number, such as open_heap(4, ...)")
        return LocalHeap(group, size, where, seconds)
    if plays:
        raise ValueError(
            f"kind={kind!r}: expected a process group, or None for the default one; a number is for 'local'"
        )
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "no process group is there; call meshflash.init() first, or say how many ranks to play: open_heap(4)"
            )
        group = dist.group.WORLD
    if kind == "shared" and where.type != "cpu":
        raise ValueError(
            f"kind='shared' is memory of the host, and device={where}; use kind='symmetric', or device='cpu'"
        )
    return (SharedHeap if kind == "shared" else SymmetricHeap)(group, size, where, seconds)
