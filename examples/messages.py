"""Two ranks pass messages from kernel to kernel: put, signal, wait.

python examples/messages.py

On a machine without a GPU the same kernel is interpreted, in two processes that share memory.
"""

import os
import time
from contextlib import nullcontext

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it once, when it is imported

import triton
import triton.language as tl

from meshflash.comm.heap.api import open_heap
from meshflash.comm.heap.device import put, signal, wait
from meshflash.runtime.devices import kind_here, take_device
from meshflash.runtime.mps import missing, mps
from meshflash.runtime.processes import run_ranks

ROUNDS, WORDS = 100, 64


@triton.jit(do_not_specialize=["rank", "rounds"])
def ping_pong(inbox, flag, wrong, bases, status, rank, rounds, WORDS: tl.constexpr):
    """Rank 0 sends a message, and rank 1 returns it with 1 added to each word, `rounds` times in one kernel."""
    words = tl.arange(0, WORDS)
    peer = 1 - rank
    for n in range(1, rounds + 1):
        if rank == 0:
            put(inbox + words, n * WORDS + words, bases, rank, peer)
            signal(flag, n, bases, rank, peer)
        wait(flag, n, status, peer, n)
        message = tl.load(inbox + words)
        expected = n * WORDS + words + peer
        tl.store(wrong + words, tl.load(wrong + words) + (message != expected).to(tl.int32))
        if rank == 1:
            put(inbox + words, message + 1, bases, rank, peer)
            signal(flag, n, bases, rank, peer)


def talk(rank, world, tell):
    """Run one of the two ranks."""
    device = take_device(kind_here(), rank)
    with open_heap(bytes=2**16, device=device, timeout=30) as heap:
        inbox, flag = heap.allocate(WORDS, torch.int32), heap.allocate(1, torch.int32)
        wrong = torch.zeros(WORDS, dtype=torch.int32, device=device)
        heap.barrier()
        begin = time.perf_counter()
        ping_pong[(1,)](inbox.local, flag.local, wrong, heap.bases, heap.status, rank, ROUNDS, WORDS=WORDS)
        heap.check()  # raises if the peer was lost
        seconds = time.perf_counter() - begin
        tell(
            f"rank {rank} ({heap.kind} memory on {device}): {ROUNDS} messages of {WORDS} words there and back, "
            f"{int(wrong.sum())} words wrong; {seconds / ROUNDS * 1e6:.0f} us each"
        )
        inbox.free()
        flag.free()


def main() -> None:
    """Start both ranks; if they share a GPU, they run concurrently only under MPS."""
    shared = torch.cuda.device_count() == 1 and missing() is None
    with mps() if shared else nullcontext():
        run_ranks(2, talk, timeout=120, listen=print)


if __name__ == "__main__":
    main()
