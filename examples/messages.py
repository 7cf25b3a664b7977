"""Two ranks pass messages from kernel to kernel: put, signal, wait.

python examples/messages.py

On a machine without a GPU the same kernel is interpreted, in two processes that share memory.
"""

import os
import time
from contextlib import nullcontext

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it once, on import

import triton
import triton.language as tl

from meshflash.comm.heap.api import open_heap
from meshflash.comm.heap.device import put, signal, wait
from meshflash.runtime.devices import kind_here, take_device
from meshflash.runtime.mps import missing, mps
from meshflash.runtime.processes import run_ranks

ROUNDS, ELEMENTS = 100, 64


@triton.jit(do_not_specialize=["rank", "rounds"])
def ping_pong(inbox, flag, wrong, bases, status, rank, rounds, ELEMENTS: tl.constexpr):
    """Exchange `rounds` messages in one kernel: rank 0 sends, rank 1 adds 1 to each element and sends back."""
    offsets = tl.arange(0, ELEMENTS)
    peer = 1 - rank
    for n in range(1, rounds + 1):
        if rank == 0:
            put(inbox + offsets, n * ELEMENTS + offsets, bases, rank, peer)
            signal(flag, n, bases, rank, peer)
        wait(flag, n, status, peer, n)
        message = tl.load(inbox + offsets)
        expected = n * ELEMENTS + offsets + peer
        tl.store(wrong + offsets, tl.load(wrong + offsets) + (message != expected).to(tl.int32))
        if rank == 1:
            put(inbox + offsets, message + 1, bases, rank, peer)
            signal(flag, n, bases, rank, peer)


def exchange(rank, world, send):
    """Run one of the two ranks."""
    device = take_device(kind_here(), rank)
    with open_heap(bytes=2**16, device=device, timeout=30) as heap:
        inbox, flag = heap.allocate(ELEMENTS, torch.int32), heap.allocate(1, torch.int32)
        wrong = torch.zeros(ELEMENTS, dtype=torch.int32, device=device)
        heap.barrier()
        begin = time.perf_counter()
        ping_pong[(1,)](inbox.local, flag.local, wrong, heap.bases, heap.status, rank, ROUNDS, ELEMENTS=ELEMENTS)
        heap.check()  # raises if the peer was lost
        seconds = time.perf_counter() - begin
        send(
            f"rank {rank} ({heap.kind} memory on {device}): {ROUNDS} messages of {ELEMENTS} words there and back, "
            f"{int(wrong.sum())} words wrong; {seconds / ROUNDS * 1e6:.0f} us each"
        )
        inbox.free()
        flag.free()


def main() -> None:
    """Start both ranks; if they share a GPU, they run concurrently only under MPS."""
    shared = torch.cuda.device_count() == 1 and missing() is None
    with mps() if shared else nullcontext():
        run_ranks(2, exchange, timeout=120, listen=print)


if __name__ == "__main__":
    main()
