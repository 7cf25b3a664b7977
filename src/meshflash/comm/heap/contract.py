"""The contract of a symmetric heap and its tensors: memory of one size on every rank, allocated in the same order.

The same calls give the same offsets on every rank. So a rank finds a tensor on a peer without a message: at the same
offset from the base of the peer's heap as from its own. This file has what all kinds of heaps share: allocation,
barriers, and errors for peers that were lost. `api.py` opens a heap.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshflash.comm.handshake import DisagreementError, StoreBarrier
from meshflash.comm.heap.allocator import ALIGN, BlockAllocator
from meshflash.comm.heap.device import LIMIT, STATUS_WORDS
from meshflash.comm.transports.contract import TransportError


@dataclass(frozen=True)
class Usage:
    """How full one rank's heap is, from `Heap.usage`.

    `bytes` is its size, `used` and `peak` the bytes allocated now and at most, `largest` the largest free range, and
    `allocations` the number of live allocations.
    """

    bytes: int
    used: int
    peak: int
    largest: int
    allocations: int


class Heap(ABC):
    """Memory of the same size on every rank that kernels of all ranks read and write. `open_heap` makes it.

    All ranks must call `allocate`, `free` and `barrier` in the same order; `barrier` verifies that they did.
    """

    kind: str

    def __init__(
        self,
        memories: Sequence[Tensor],
        rank: int,
        device: torch.device,
        timeout: float,
        barrier: StoreBarrier | None,
    ) -> None:
        self.rank, self.world, self.device, self.timeout = rank, len(memories), device, timeout
        addresses = [memory.data_ptr() for memory in memories]
        assert all(address % ALIGN == 0 for address in addresses), "kernels rely on aligned heaps: see device.translate"
        #: Base address of each rank's heap, as mapped into this process.
        self.bases = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._memories = tuple(memories)
        self._barrier = barrier  # None where this process has all ranks
        self._allocator = BlockAllocator(memories[0].numel())
        self._live: dict[Allocation, None] = {}  # a dict as an ordered set
        self._freed_offsets: list[int] = []  # freed since the last barrier; peers may still write there
        self._calls: list[str] = []  # allocate and free since the last barrier, for the comparison of ranks
        self._num_calls = self._num_agreed = 0  # all calls so far, and those that a barrier has compared
        self._closed = False
        words = [0] * STATUS_WORDS
        words[LIMIT] = int(timeout * 1e9)  # nanoseconds
        self._statuses = {rank: torch.tensor(words, dtype=torch.int64, device=device) for rank in self.local_ranks}

    @property
    def local_ranks(self) -> range:
        """The ranks of this process: its own, or all ranks on a local heap."""
        return range(self.rank, self.rank + 1)

    @property
    def status(self) -> Tensor:
        """Status words of this rank for kernels: the time limit of waits, and the first wait that failed."""
        return self._statuses[self.rank]

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Act as this rank inside the block; on a local heap also on its stream.

        Args:
            rank: A rank of `local_ranks`.
        """
        if rank not in self.local_ranks:
            raise ValueError(f"as_rank({rank}): this process is rank {self.rank}; write `for rank in heap.local_ranks`")
        yield

    def allocate(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, *, name: str = "", align: int = ALIGN
    ) -> SymmetricTensor:
        """Allocate a tensor of zeros on every rank. Call `barrier` before peers may access it.

        Args:
            shape: The shape on each rank, the same on all.
            dtype: The dtype of the elements.
            name: A name for error messages.
            align: The alignment in bytes, a power of 2 of at most 256.
        """
        self._check_open()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(n < 0 for n in shape) or align < dtype.itemsize or align & (align - 1) or align > ALIGN:
            raise ValueError(
                f"allocate({shape}, {dtype}, align={align}): expected sizes >= 0, and for align a power of 2 from "
                f"{dtype.itemsize} to {ALIGN}"
            )
        size = math.prod(shape) * dtype.itemsize
        text = f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}".strip()
        offset = self._allocator.allocate(max(size, 1), align)  # empty tensors need an offset of their own, too
        if offset is None:
            pending = len(self._freed_offsets)
            hint = f"; {pending} freed ones become available at the next barrier()" if pending else ""
            raise ValueError(
                f"allocate {text}: {size:,} bytes requested, and of the heap's {self._allocator.size:,} at most "
                f"{self._allocator.largest:,} are free in one piece{hint}; open_heap(..., bytes=) takes a larger number"
            )
        allocation = Allocation(self._num_calls, offset, text)
        self._note(f"allocate {text}" + (f" align {align}" if align != ALIGN else ""))
        self._live[allocation] = None
        ranges = [memory[offset : offset + size] for memory in self._memories]
        for rank in self.local_ranks:
            with self.as_rank(rank):
                ranges[rank].zero_()
        return SymmetricTensor(self, allocation, [x.view(dtype).view(shape) for x in ranges], is_view=False)

    def free(self, tensor: SymmetricTensor) -> None:
        """Free an allocation. Its bytes become available after the next `barrier`, when no peer can still write there.

        Args:
            tensor: The tensor that `allocate` returned, not a view of it.
        """
        self._check_open()
        allocation = tensor._allocation
        if tensor.heap is not self or allocation not in self._live:
            raise ValueError(f"free {allocation.text}: it is free already, or of another heap")
        if tensor._is_view:
            raise ValueError(f"free {allocation.text}: this is a view; free the tensor that allocate returned")
        del self._live[allocation]
        self._freed_offsets.append(allocation.offset)
        self._note(f"free {allocation.text}")

    def barrier(self) -> None:
        """Wait until all ranks have come here and their devices are idle; verify that they made the same calls.

        Raises TransportError, on all ranks, if a rank is lost or a wait in a kernel timed out, and DisagreementError if
        ranks allocated or freed differently. Then makes freed memory available again.
        """
        self._check_open()
        self._finish()
        failures = self._failures()
        if self._barrier is None:
            if failures:
                raise TransportError(failures)
        else:
            payloads = self._barrier.all_gather(self._payload(failures))
            reported = [payload["failures"] for payload in payloads if payload["failures"]]
            if reported:
                raise TransportError(failures or reported[0])
            self._compare(payloads)
        for offset in self._freed_offsets:
            self._allocator.release(offset)
        self._freed_offsets.clear()
        self._calls.clear()
        self._num_agreed = self._num_calls

    def check(self) -> None:
        """Wait for the device, and raise TransportError if a wait in a kernel of this process timed out."""
        self._check_open()
        self._finish()
        failures = self._failures()
        if failures:
            raise TransportError(failures)

    @property
    def usage(self) -> Usage:
        """How full the heap is; freed memory counts as used until the next `barrier`."""
        allocator = self._allocator
        return Usage(allocator.size, allocator.used, allocator.peak, allocator.largest, len(self._live))

    def close(self) -> None:
        """Release the memory, after a `barrier` that shows peers are done with it. Warn of live allocations."""
        if self._closed:
            return
        live = [allocation.text for allocation in self._live]
        self._release()
        if live:
            warnings.warn(
                f"{self._named(self.rank)}: the heap was closed with {len(live)} allocations that were not freed: "
                f"{'; '.join(live)}",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Heap:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and not self._closed:
            try:
                self.barrier()
            except BaseException:
                self._release()
                raise
            self.close()
        else:  # no warning of live allocations: they follow from the error
            if self._barrier is not None and not self._closed:
                # peers that wait in a barrier raise this message instead of timing out
                self._barrier.leave(f"{self._named(self.rank)} left the heap by {type(error).__name__}: {error}")
            self._release()

    @abstractmethod
    def _finish(self) -> None:
        """Wait until the device has finished all work of the local ranks."""

    def _release(self) -> None:
        """Drop all references to the memory."""
        self._closed = True
        self._live.clear()
        self._memories = ()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this heap is closed; open another one")

    def _named(self, rank: int) -> str:
        return f"rank {rank}" if self._barrier is None else self._barrier.named(rank)

    def _payload(self, failures: str) -> dict[str, Any]:
        """Return what a rank sends to the others in a barrier: its failures, and its calls since the last barrier."""
        return {"failures": failures, "first": self._num_agreed, "calls": self._calls}

    def _note(self, call: str) -> None:
        self._calls.append(call)
        self._num_calls += 1

    def _failures(self) -> str:
        """Return a sentence for every wait that timed out in kernels of the local ranks; empty if none did."""
        found = []
        for rank, status in self._statuses.items():
            has_failed, peer, step, expected, seen, *_ = status.tolist()
            if has_failed:
                found.append(
                    f"{self._named(rank)} waited {self.timeout:g} s in step {step} for {self._named(peer)}, whose "
                    f"signal stands at {seen} and was to reach {expected}"
                )
        ended = self._barrier.describe_ended() if self._barrier is not None and found else ""
        return "; ".join(found) + ended

    def _compare(self, payloads: Sequence[dict[str, Any]]) -> None:
        """Raise DisagreementError for the first call in which a rank differs from rank 0."""
        reference = payloads[0]
        for rank, theirs in enumerate(payloads):
            for number in range(max(len(reference["calls"]), len(theirs["calls"]))):
                a, b = (
                    payload["calls"][number] if number < len(payload["calls"]) else "nothing"
                    for payload in (reference, theirs)
                )
                if a != b:
                    raise DisagreementError(
                        f"ranks disagree in call {reference['first'] + number} of the heap: {self._named(0)} called "
                        f"{a}, {self._named(rank)} {b}; all ranks must allocate and free the same, in the same order"
                    )


@dataclass(eq=False)
class Allocation:
    """A byte range of the heap, at `offset` on every rank.

    `number` counts the calls of allocate and free before it, and `text` describes it in messages.
    """

    number: int
    offset: int
    text: str


class SymmetricTensor:
    """A tensor that every rank has at the same offset of its heap; `Heap.allocate` makes it.

    Indexing and `view` return the same part of it on every rank.
    """

    def __init__(self, heap: Heap, allocation: Allocation, tensors: Sequence[Tensor], is_view: bool = True) -> None:
        self.heap, self._allocation, self._tensors, self._is_view = heap, allocation, tuple(tensors), is_view

    @property
    def local(self) -> Tensor:
        """The tensor of this rank."""
        self._check_live()
        return self._tensors[self.heap.rank]

    def peer(self, rank: int) -> Tensor:
        """Return the tensor of another rank, to read and write from here.

        Args:
            rank: The rank whose tensor to return.
        """
        self._check_live()
        if not 0 <= rank < self.heap.world:
            raise ValueError(f"peer({rank}): expected a rank from 0 to {self.heap.world - 1}")
        if self._allocation.number >= self.heap._num_agreed:
            raise RuntimeError(
                f"{self._allocation.text}: call heap.barrier() between allocate and peer; the peer may not have it yet"
            )
        return self._tensors[rank]

    @property
    def bases(self) -> Tensor:
        """Base addresses of the heap on all ranks, by which kernels translate pointers."""
        return self.heap.bases

    @property
    def shape(self) -> torch.Size:
        """The shape on each rank."""
        return self._tensors[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._tensors[0].dtype

    def __getitem__(self, index: Any) -> SymmetricTensor:
        return self._make_view([tensor[index] for tensor in self._tensors])

    def view(self, *shape: int) -> SymmetricTensor:
        """Return the same memory in another shape.

        Args:
            shape: The new shape, as in `torch.Tensor.view`.
        """
        return self._make_view([tensor.view(*shape) for tensor in self._tensors])

    def _make_view(self, tensors: Sequence[Tensor]) -> SymmetricTensor:
        if any(
            a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
            for a, b in zip(tensors, self._tensors, strict=True)
        ):
            raise ValueError("a list or a tensor as an index copies; take slices, which are views of the heap")
        return SymmetricTensor(self.heap, self._allocation, tensors)

    def free(self) -> None:
        """Free it: see `Heap.free`."""
        self.heap.free(self)

    def _check_live(self) -> None:
        self.heap._check_open()
        if self._allocation not in self.heap._live:
            raise RuntimeError(f"{self._allocation.text} was freed; its memory may belong to another tensor")

    def __repr__(self) -> str:
        return f"SymmetricTensor({self._allocation.text}, rank {self.heap.rank} of {self.heap.world})"
