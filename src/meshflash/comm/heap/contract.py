"""What a symmetric heap is: memory of the same size on every rank, where the same calls give the same places.

So a rank knows where its own data lies at a peer: as far from the begin of the peer's heap as from its own. What the
kinds of heaps share lives here: allocation, meetings, and what becomes of a peer that was lost.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from meshflash.comm.handshake import DisagreementError, Meeting
from meshflash.comm.heap.allocator import ALIGN, Blocks
from meshflash.comm.heap.device import LIMIT, STATUS_WORDS
from meshflash.comm.transports.contract import TransportError


@dataclass(frozen=True)
class Usage:
    """Bytes of one rank's heap: in all, taken now and at most, the largest piece left; how many allocations."""

    bytes: int
    used: int
    peak: int
    largest: int
    allocations: int


class Heap(ABC):
    """Memory of the same size on every rank, which all of them read and write. Made by `open_heap`.

    All ranks call `allocate`, `free` and `barrier` in the same order; `barrier` compares what they called.
    """

    kind: str

    def __init__(
        self, memories: Sequence[Tensor], rank: int, device: torch.device, timeout: float, meeting: Meeting | None
    ) -> None:
        self.rank, self.world, self.device, self.timeout = rank, len(memories), device, timeout
        addresses = [memory.data_ptr() for memory in memories]
        assert all(address % ALIGN == 0 for address in addresses), "kernels count on it that heaps are aligned"
        #: Where the heap begins at each rank, as addresses in this process.
        self.bases = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._memories = tuple(memories)
        self._meeting = meeting
        self._blocks = Blocks(memories[0].numel())
        self._alive: dict[Allocation, None] = {}
        self._freed: list[int] = []
        self._calls: list[str] = []
        self._count = self._agreed = 0
        self._closed = False
        words = [0] * STATUS_WORDS
        words[LIMIT] = int(timeout * 1e9)
        self._statuses = {played: torch.tensor(words, dtype=torch.int64, device=device) for played in self.played}

    @property
    def played(self) -> range:
        """The ranks that this process plays: its own, unless one process plays all."""
        return range(self.rank, self.rank + 1)

    @property
    def status(self) -> Tensor:
        """What kernels write when a wait ends without its signal, and how long they wait; `check` reads it."""
        return self._statuses[self.rank]

    @contextmanager
    def play(self, rank: int) -> Iterator[None]:
        """Be this rank in the block, on its stream where one process plays several."""
        if rank not in self.played:
            raise ValueError(f"play({rank}): this process plays rank {self.rank}; write `for rank in heap.played`")
        yield

    def allocate(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, *, name: str = "", align: int = ALIGN
    ) -> SymmetricTensor:
        """A tensor of zeros on every rank. Call `barrier` before peers may touch it."""
        self._check_open()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(n < 0 for n in shape) or align < dtype.itemsize or align & (align - 1) or align > ALIGN:
            raise ValueError(
                f"allocate({shape}, {dtype}, align={align}): expected sizes >= 0, and for align a power of 2 from "
                f"{dtype.itemsize} to {ALIGN}"
            )
        size = math.prod(shape) * dtype.itemsize
        text = f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}".strip()
        room = max(size, 1)
        place = self._blocks.take(room, align)
        if place is None:
            back = f"; {len(self._freed)} freed ones come back at the next barrier()" if self._freed else ""
            raise ValueError(
                f"allocate {text}: {size:,} bytes asked for, and of the heap's {self._blocks.size:,} there are at most "
                f"{self._blocks.largest:,} in one piece{back}; open_heap(..., bytes=) takes a larger number"
            )
        allocation = Allocation(self._count, place, text)
        self._note(f"allocate {text}" + (f" align {align}" if align != ALIGN else ""))
        self._alive[allocation] = None
        parts = [memory[place : place + size] for memory in self._memories]
        for rank in self.played:
            with self.play(rank):
                parts[rank].zero_()
        return SymmetricTensor(self, allocation, [part.view(dtype).view(shape) for part in parts], whole=True)

    def free(self, tensor: SymmetricTensor) -> None:
        """Give an allocation back. Its bytes are given out again after the next `barrier`, when no peer uses them."""
        self._check_open()
        allocation = tensor._allocation
        if tensor.heap is not self or allocation not in self._alive:
            raise ValueError(f"free {allocation.text}: it is free already, or of another heap")
        if not tensor._whole:
            raise ValueError(f"free {allocation.text}: this is a view; free what allocate gave")
        del self._alive[allocation]
        self._freed.append(allocation.place)
        self._note(f"free {allocation.text}")

    def barrier(self) -> None:
        """Wait until all ranks are here and their devices are done; then all have called the same, or all raise.

        TransportError where a rank is lost or a wait in a kernel ended without its signal; DisagreementError where
        ranks allocated or freed differently.
        """
        self._check_open()
        self._finish()
        failures = self._failures()
        if self._meeting is None:
            if failures:
                raise TransportError(failures)
        else:
            words = self._meeting.all(self._word(failures))
            told = [word["failures"] for word in words if word["failures"]]
            if told:
                raise TransportError(failures or told[0])
            self._compare(words)
        for place in self._freed:
            self._blocks.give(place)
        self._freed.clear()
        self._calls.clear()
        self._agreed = self._count

    def check(self) -> None:
        """TransportError if a wait in a kernel of this process ended without its signal. Waits for the device."""
        self._check_open()
        self._finish()
        failures = self._failures()
        if failures:
            raise TransportError(failures)

    @property
    def usage(self) -> Usage:
        """How full it is; what was freed counts as taken until the next `barrier`."""
        blocks = self._blocks
        return Usage(blocks.size, blocks.used, blocks.peak, blocks.largest, len(self._alive))

    def close(self) -> None:
        """Give the memory back; peers must be done with it (`barrier`). Warns of allocations that were not freed."""
        if self._closed:
            return
        alive = [allocation.text for allocation in self._alive]
        self._release()
        if alive:
            warnings.warn(
                f"{self._named(self.rank)}: the heap was closed with {len(alive)} allocations that were not freed: "
                f"{'; '.join(alive)}",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Heap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._closed:
            try:
                self.barrier()
            except BaseException:
                self._release()
                raise
            self.close()
        else:  # what was not freed follows from the error
            if self._meeting is not None and not self._closed:
                self._meeting.leave(
                    self._word(f"{self._named(self.rank)} left the heap by {kind and kind.__name__}: {error}")
                )
            self._release()

    @abstractmethod
    def _finish(self) -> None:
        """Wait until the device has done what the played ranks gave it."""

    def _release(self) -> None:
        """Let go of the memory."""
        self._closed = True
        self._alive.clear()
        self._memories = ()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this heap is closed; open another one")

    def _named(self, rank: int) -> str:
        return f"rank {rank}" if self._meeting is None else self._meeting.named(rank)

    def _word(self, failures: str) -> dict[str, Any]:
        """What a rank says in a barrier: what went wrong, and what it called since the last one."""
        return {"failures": failures, "first": self._agreed, "calls": self._calls}

    def _note(self, call: str) -> None:
        self._calls.append(call)
        self._count += 1

    def _failures(self) -> str:
        """What the kernels of the played ranks could not wait for; empty where all went well."""
        found = []
        for rank, status in self._statuses.items():
            code, peer, step, wanted, seen, *_ = status.tolist()
            if code:
                found.append(
                    f"{self._named(rank)} waited {self.timeout:g} s in step {step} for {self._named(peer)}, whose "
                    f"signal stands at {seen} and was to reach {wanted}"
                )
        ended = self._meeting.lost() if self._meeting is not None and found else ""
        return "; ".join(found) + ended

    def _compare(self, words: Sequence[dict[str, Any]]) -> None:
        mine = words[0]
        for rank, theirs in enumerate(words):
            for number in range(max(len(mine["calls"]), len(theirs["calls"]))):
                a, b = (word["calls"][number] if number < len(word["calls"]) else "nothing" for word in (mine, theirs))
                if a != b:
                    raise DisagreementError(
                        f"ranks disagree in call {mine['first'] + number} of the heap: {self._named(0)} called "
                        f"{a}, {self._named(rank)} {b}; all ranks must allocate and free the same, in the same order"
                    )


@dataclass(eq=False)
class Allocation:
    """A piece of the heap. `number` counts the calls of allocate and free."""

    number: int
    place: int
    text: str


class SymmetricTensor:
    """A tensor that every rank has at the same place of its heap: ours, and by address those of the peers.

    Indexing and `view` give the same part of it on every rank.
    """

    def __init__(self, heap: Heap, allocation: Allocation, tensors: Sequence[Tensor], whole: bool = False) -> None:
        self.heap, self._allocation, self._tensors, self._whole = heap, allocation, tuple(tensors), whole

    @property
    def local(self) -> Tensor:
        """Ours."""
        self._check_there()
        return self._tensors[self.heap.rank]

    def peer(self, rank: int) -> Tensor:
        """That of a rank, to be read and written from here."""
        self._check_there()
        if not 0 <= rank < self.heap.world:
            raise ValueError(f"peer({rank}): expected a rank from 0 to {self.heap.world - 1}")
        if self._allocation.number >= self.heap._agreed:
            raise RuntimeError(
                f"{self._allocation.text}: call heap.barrier() between allocate and peer; the peer may not have it yet"
            )
        return self._tensors[rank]

    @property
    def bases(self) -> Tensor:
        """Where the heap begins at each rank, as addresses: what kernels translate pointers by."""
        return self.heap.bases

    @property
    def shape(self) -> torch.Size:
        """Its shape on each rank."""
        return self._tensors[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self._tensors[0].dtype

    def __getitem__(self, index: Any) -> SymmetricTensor:
        return self._part([tensor[index] for tensor in self._tensors])

    def view(self, *shape: int) -> SymmetricTensor:
        """The same memory in another shape."""
        return self._part([tensor.view(*shape) for tensor in self._tensors])

    def _part(self, tensors: Sequence[Tensor]) -> SymmetricTensor:
        if any(
            a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
            for a, b in zip(tensors, self._tensors, strict=True)
        ):
            raise ValueError("a list or a tensor as an index copies; take slices, which are views of the heap")
        return SymmetricTensor(self.heap, self._allocation, tensors)

    def free(self) -> None:
        """Give it back: see `Heap.free`."""
        self.heap.free(self)

    def _check_there(self) -> None:
        self.heap._check_open()
        if self._allocation not in self.heap._alive:
            raise RuntimeError(f"{self._allocation.text} was freed; others may have its memory")

    def __repr__(self) -> str:
        return f"SymmetricTensor({self._allocation.text}, rank {self.heap.rank} of {self.heap.world})"
