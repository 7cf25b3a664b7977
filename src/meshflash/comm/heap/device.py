"""What kernels do in a symmetric heap: translate addresses, put, get, signal, wait, and atomics on a peer's numbers.

The same code runs compiled on NVIDIA and AMD GPUs, and interpreted on CPUs across processes. A signal is a release of
all that was put before it, a wait the acquire of it, both for the whole system. Signals are epochs that grow and are
never reset. Every wait ends: past its limit it writes down whom it waited for, which the host raises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from meshflash.kernels.triton.common import INTERPRETED

#: Words of the status: whether a wait failed, its peer and step, what was wanted and seen; nanoseconds to wait.
STATUS_WORDS, LIMIT = 8, 5
_LIMIT = tl.constexpr(LIMIT)
_HIP = tl.constexpr(torch.version.hip is not None)


def device(function: Callable[..., Any]) -> Any:
    """A function for kernels to call.

    Interpreted, it is plain Python in the kernel that calls it: Triton would patch the whole language again in each
    call, which takes a millisecond.
    """
    return function if INTERPRETED else triton.jit(function)


if INTERPRETED:

    def clock():
        """Nanoseconds; whoever asks waits for another process, which may need this core."""
        os.sched_yield()
        return time.monotonic_ns()

else:

    @triton.jit
    def clock():
        """Nanoseconds."""
        if _HIP:  # it counts at 100 MHz
            ticks = tl.inline_asm_elementwise(
                "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
            )
            return ticks * 10
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@device
def translate(pointers, bases, rank, peer):
    """Pointers into the heap of `rank`, at the same places in the heap of a peer."""
    WIDTH: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth // 8
    apart = (tl.load(bases + peer) - tl.load(bases + rank)) // WIDTH
    return pointers + tl.multiple_of(apart, 16)  # heaps begin at multiples of 256 bytes: wide stores stay wide


@device
def put(pointers, values, bases, rank, peer, mask=None):
    """Store values at a peer, where the pointers point to in our heap. A signal must follow."""
    tl.store(translate(pointers, bases, rank, peer), values, mask=mask)


@device
def get(pointers, bases, rank, peer, mask=None, other=None):
    """Load values from a peer, from where the pointers point to in our heap. A wait must have come before."""
    return tl.load(translate(pointers, bases, rank, peer), mask=mask, other=other)


@device
def block(pointer, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to a block of rows, so many numbers apart, and which of them lie within `rows` and `columns`."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    return pointer + (r.to(tl.int64) * stride + c), (r < rows) & (c < columns)


@device
def put_rows(
    target, t_stride, source, s_stride, rows, columns, bases, rank, peer, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Copy a block of rows of ours to a peer: from `source`, anywhere, to where `target` points to in our heap."""
    there, mask = block(target, t_stride, rows, columns, ROWS, COLUMNS)
    here, _ = block(source, s_stride, rows, columns, ROWS, COLUMNS)
    put(there, tl.load(here, mask=mask), bases, rank, peer, mask)


@device
def get_rows(
    target, t_stride, source, s_stride, rows, columns, bases, rank, peer, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Copy a block of rows of a peer to us: from where `source` points to in our heap, to `target`, anywhere."""
    there, mask = block(source, s_stride, rows, columns, ROWS, COLUMNS)
    here, _ = block(target, t_stride, rows, columns, ROWS, COLUMNS)
    tl.store(here, get(there, bases, rank, peer, mask), mask=mask)


@device
def signal(flag, epoch, bases, rank, peer):
    """Set a flag at a peer to an epoch: who waits for it there sees all that this program put before."""
    tl.debug_barrier()  # one thread sets it, after all threads have put
    value = tl.cast(epoch, flag.dtype.element_ty)
    tl.atomic_xchg(translate(flag, bases, rank, peer), value, sem="release", scope="sys")


@device
def arrive(flag, count, bases, rank, peer):
    """Add to a flag at a peer, where several programs or ranks come together; else as `signal`."""
    tl.debug_barrier()
    value = tl.cast(count, flag.dtype.element_ty)
    tl.atomic_add(translate(flag, bases, rank, peer), value, sem="release", scope="sys")


@device
def wait(flag, epoch, status, peer, step):
    """Wait until a flag of ours has reached an epoch: what was put before the signal is there. Whether it has.

    `peer` and `step` are what the error says, if it does not come in time. Later waits then do not wait any more.
    """
    zero = tl.cast(0, flag.dtype.element_ty)
    seen = tl.atomic_add(flag, zero, sem="acquire", scope="sys")
    if seen < epoch:
        limit = tl.load(status + _LIMIT)
        begin = clock()
        late = tl.load(status, volatile=True) != 0
        while (seen < epoch) & (late == 0):
            seen = tl.atomic_add(flag, zero, sem="acquire", scope="sys")
            late = clock() - begin > limit
        if seen < epoch:
            nothing = tl.cast(0, tl.int64)
            if tl.atomic_cas(status, nothing, nothing + 1, sem="relaxed", scope="gpu") == 0:
                tl.store(status + 1, tl.cast(peer, tl.int64))
                tl.store(status + 2, tl.cast(step, tl.int64))
                tl.store(status + 3, tl.cast(epoch, tl.int64))
                tl.store(status + 4, seen.to(tl.int64))
    tl.debug_barrier()  # no thread reads before the one that waited
    return seen >= epoch


@device
def add(pointer, value, bases, rank, peer, SEM: tl.constexpr = "acq_rel"):
    """Add to an int32 or int64 of a peer at once; what was there."""
    value = tl.cast(value, pointer.dtype.element_ty)
    return tl.atomic_add(translate(pointer, bases, rank, peer), value, sem=SEM, scope="sys")


@device
def exchange(pointer, value, bases, rank, peer, SEM: tl.constexpr = "acq_rel"):
    """Set an int32 or int64 of a peer; what was there."""
    value = tl.cast(value, pointer.dtype.element_ty)
    return tl.atomic_xchg(translate(pointer, bases, rank, peer), value, sem=SEM, scope="sys")


@device
def compare_exchange(pointer, expected, value, bases, rank, peer, SEM: tl.constexpr = "acq_rel"):
    """Set an int32 or int64 of a peer if it is as expected; what was there."""
    expected = tl.cast(expected, pointer.dtype.element_ty)
    value = tl.cast(value, pointer.dtype.element_ty)
    return tl.atomic_cas(translate(pointer, bases, rank, peer), expected, value, sem=SEM, scope="sys")
