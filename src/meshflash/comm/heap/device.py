"""Device-side calls of a symmetric heap: address translation, put, get, signal, wait, and remote atomics.

Address translation: all ranks allocate in the same order, so a tensor lies at the same offset from the heap's base on
every rank. A pointer into our heap becomes a pointer into a peer's heap by adding the difference of the two base
addresses.

Ordering: `signal` is a release of everything that the CTA stored before it, and `wait` the matching acquire, both at
system scope. Flags hold epochs, which only grow: a reset of a flag would race with the next signal.

Every wait ends. After its time limit it records rank and step in the heap's status, and the host raises an error from
it.

The same code is compiled for NVIDIA and AMD GPUs, and interpreted on CPUs across processes.
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

#: Number of int64 words in the status: failed (0 or 1), peer, step, expected epoch, seen epoch, time limit; two are
#: unused. And the index of the time limit of a wait, in nanoseconds.
STATUS_WORDS, LIMIT = 8, 5
_LIMIT = tl.constexpr(LIMIT)
_HIP = tl.constexpr(torch.version.hip is not None)
#: The default memory order of atomics. Triton 3.6 refuses a plain string as a default.
ACQ_REL = tl.constexpr("acq_rel")


def device_function(function: Callable[..., Any]) -> Any:
    """Make a function callable from kernels.

    Under the interpreter it stays plain Python: a call of a jitted function there patches the whole language again,
    which takes a millisecond.
    """
    return function if INTERPRETED else triton.jit(function)


if INTERPRETED:

    def clock():
        """Return the time in nanoseconds; yield the core first, since the process that we wait for may need it."""
        os.sched_yield()
        return time.monotonic_ns()

else:

    @triton.jit
    def clock():
        """Return the time of this GPU in nanoseconds."""
        if _HIP:  # this counter ticks at 100 MHz
            ticks = tl.inline_asm_elementwise(
                "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
            )
            return ticks * 10
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@device_function
def translate(pointers, bases, rank, peer):
    """Return pointers into a peer's heap, at the offsets that `pointers` have in the heap of `rank`."""
    BYTES: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth // 8
    distance = (tl.load(bases + peer) - tl.load(bases + rank)) // BYTES
    # heaps begin at multiples of 256 bytes; without the hint the compiler could not vectorize stores to peers
    return pointers + tl.multiple_of(distance, 16)


@device_function
def put(pointers, values, bases, rank, peer, mask=None):
    """Store values into a peer's heap, at the offsets of `pointers` in ours. A signal must follow."""
    tl.store(translate(pointers, bases, rank, peer), values, mask=mask)


@device_function
def get(pointers, bases, rank, peer, mask=None, other=None):
    """Load values from a peer's heap, at the offsets of `pointers` in ours. A wait must come first."""
    return tl.load(translate(pointers, bases, rank, peer), mask=mask, other=other)


@device_function
def block_pointers(pointer, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return pointers to a block of rows `stride` elements apart, and a mask of those within `rows` and `columns`."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    return pointer + (r.to(tl.int64) * stride + c), (r < rows) & (c < columns)


@device_function
def put_rows(
    target, t_stride, source, s_stride, rows, columns, bases, rank, peer, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Copy a block of rows to a peer: from `source`, anywhere, to the offset of `target` in our heap."""
    targets, mask = block_pointers(target, t_stride, rows, columns, ROWS, COLUMNS)
    sources, _ = block_pointers(source, s_stride, rows, columns, ROWS, COLUMNS)
    put(targets, tl.load(sources, mask=mask), bases, rank, peer, mask)


@device_function
def get_rows(
    target, t_stride, source, s_stride, rows, columns, bases, rank, peer, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Copy a block of rows from a peer: from the offset of `source` in our heap, to `target`, anywhere."""
    sources, mask = block_pointers(source, s_stride, rows, columns, ROWS, COLUMNS)
    targets, _ = block_pointers(target, t_stride, rows, columns, ROWS, COLUMNS)
    tl.store(targets, get(sources, bases, rank, peer, mask), mask=mask)


@device_function
def signal(flag, epoch, bases, rank, peer):
    """Set a flag on a peer to an epoch; a wait for it there sees everything that this CTA put before."""
    tl.debug_barrier()  # one thread sets the flag, after all threads have put
    value = tl.cast(epoch, flag.dtype.element_ty)
    tl.atomic_xchg(translate(flag, bases, rank, peer), value, sem="release", scope="sys")


@device_function
def arrive(flag, count, bases, rank, peer):
    """Add to a flag on a peer: a `signal` for flags that several CTAs or ranks count up together."""
    tl.debug_barrier()  # as in `signal`
    value = tl.cast(count, flag.dtype.element_ty)
    tl.atomic_add(translate(flag, bases, rank, peer), value, sem="release", scope="sys")


@device_function
def wait(flag, epoch, status, peer, step):
    """Wait until a flag of ours has reached an epoch, and return whether it has; data put before the signal is visible.

    If the flag does not get there in time, the host's error names `peer` and `step`, and later waits return at once.
    """
    # an atomic add of 0 is a load with acquire semantics, which tl.load does not have
    zero = tl.cast(0, flag.dtype.element_ty)
    seen = tl.atomic_add(flag, zero, sem="acquire", scope="sys")
    if seen < epoch:
        limit = tl.load(status + _LIMIT)
        begin = clock()
        is_late = tl.load(status, volatile=True) != 0  # an earlier wait has failed: do not wait again
        while (seen < epoch) & (is_late == 0):
            seen = tl.atomic_add(flag, zero, sem="acquire", scope="sys")
            is_late = clock() - begin > limit
        if seen < epoch:
            # only the first failure is recorded: later ones follow from it
            no_failure = tl.cast(0, tl.int64)
            if tl.atomic_cas(status, no_failure, no_failure + 1, sem="relaxed", scope="gpu") == 0:
                tl.store(status + 1, tl.cast(peer, tl.int64))
                tl.store(status + 2, tl.cast(step, tl.int64))
                tl.store(status + 3, tl.cast(epoch, tl.int64))
                tl.store(status + 4, seen.to(tl.int64))
    tl.debug_barrier()  # no thread reads the data before the waiting one has acquired it
    return seen >= epoch


@device_function
def atomic_add(pointer, value, bases, rank, peer, SEM: tl.constexpr = ACQ_REL):
    """Add to an int32 or int64 of a peer atomically, and return the old value."""
    value = tl.cast(value, pointer.dtype.element_ty)
    return tl.atomic_add(translate(pointer, bases, rank, peer), value, sem=SEM, scope="sys")


@device_function
def atomic_exchange(pointer, value, bases, rank, peer, SEM: tl.constexpr = ACQ_REL):
    """Set an int32 or int64 of a peer atomically, and return the old value."""
    value = tl.cast(value, pointer.dtype.element_ty)
    return tl.atomic_xchg(translate(pointer, bases, rank, peer), value, sem=SEM, scope="sys")


@device_function
def atomic_cas(pointer, expected, value, bases, rank, peer, SEM: tl.constexpr = ACQ_REL):
    """Set an int32 or int64 of a peer if it equals `expected`, atomically, and return the old value."""
    expected = tl.cast(expected, pointer.dtype.element_ty)
    value = tl.cast(value, pointer.dtype.element_ty)
    return tl.atomic_cas(translate(pointer, bases, rank, peer), expected, value, sem=SEM, scope="sys")
