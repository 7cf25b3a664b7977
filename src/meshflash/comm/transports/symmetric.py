"""Symmetric memory: ranks of one node pull messages out of each other's memory, without a copy on the sender's side.

Every rank has a heap of the same size, which the others can read. A rank says that what it sends is ready, its peer
copies it and says that it is done; both are marks in the heap that streams wait for, and no thread does. The heap is
made when a program needs it, by all ranks at once. Messages of a group follow one another in a stream of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshflash.comm.streams import DeviceStreams, MakeStreams, capturing
from meshflash.comm.transports.contract import Arena, Collective, Message, Transport

#: The marks of a group: what is sent is ready, what was sent has been copied.
READY, DONE = 0, 1
#: Bytes that heaps are multiples of.
GRAIN = 2**21


class Heap(Protocol):
    """Memory of one rank that its peers read, and marks that they exchange in the stream that work goes to."""

    memory: Tensor

    def of(self, rank: int) -> Tensor:
        """The memory of a rank, in bytes."""

    def put(self, rank: int, channel: int) -> None:
        """Set a mark at a rank, once it has taken the one before."""

    def take(self, rank: int, channel: int) -> None:
        """Wait for a rank's mark here, and take it away."""


class TorchHeap:
    """torch's symmetric memory."""

    def __init__(self, count: int, group: Any, device: torch.device, timeout: float) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks may share a GPU
        self.memory: Tensor = symmetric.empty(count, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self.memory, group)
        self._peers = [self._handle.get_buffer(rank, (count,), torch.uint8) for rank in range(self._handle.world_size)]
        self._timeout = int(timeout * 1e3)

    def of(self, rank: int) -> Tensor:
        """The memory of a rank, in bytes."""
        return self._peers[rank]

    def put(self, rank: int, channel: int) -> None:
        """Set a mark at a rank, once it has taken the one before."""
        self._handle.put_signal(rank, channel, self._timeout)

    def take(self, rank: int, channel: int) -> None:
        """Wait for a rank's mark here, and take it away."""
        self._handle.wait_signal(rank, channel, self._timeout)


#: (bytes, group, device, timeout) -> a heap; all ranks of the group make theirs together.
MakeHeap = Callable[[int, Any, torch.device, float], Heap]


class Symmetric(Transport):
    """Pulls messages out of peers' heaps. What is sent must lie in ours: it reads `peers`, and begins by `pull`."""

    name = "symmetric memory"
    reads_peers = True

    def __init__(
        self,
        group: Any,
        rank: int,
        world: int,
        device: torch.device,
        timeout: float,
        make: MakeHeap = TorchHeap,
        streams: MakeStreams = DeviceStreams,
    ) -> None:
        super().__init__()
        self.device, self.timeout = device, timeout
        self._group, self._rank, self._world, self._make = group, rank, world, make
        self._streams = streams(device)
        self._heap: Heap | None = None
        self._arena: Arena | None = None
        self._captured: list[Heap] = []
        self._lanes: dict[str, tuple[int, Any]] = {}
        self.add("mesh", group)

    def add(self, name: str, group: Any) -> None:
        """One more group, of the same ranks: marks and a stream of its own."""
        self._lanes[name] = len(self._lanes), self._streams.new()

    def rank(self, group: str) -> int:
        return self._rank

    def world(self, group: str) -> int:
        return self._world

    @property
    def held_bytes(self) -> int:
        """Its heap, and those that graphs were captured in."""
        held = [*self._captured, *([self._heap] if self._heap and self._heap not in self._captured else [])]
        return sum(heap.memory.numel() for heap in held)

    def arena(self, wanted: int) -> Arena:
        """The memory of our heap, of at least so many bytes: the same number on all ranks, which make it together.

        A larger heap takes the place of the one before: ranks come to make it when their devices are done, so nobody
        reads the old one any more. One that a graph was captured in stays, for the graph may run again.
        """
        graph = capturing(self.device)
        if self._heap is None or self._arena is None or self._arena.bytes < wanted:
            if graph:
                raise RuntimeError("run this call once, with its backward, before a graph is captured of it")
            least = 0 if self._arena is None else self._arena.bytes * 3 // 2
            self._streams.finish()
            size = max(-(-max(wanted, 1) // GRAIN) * GRAIN, least)
            self._heap = self._make(size, self._group, self.device, self.timeout)
            self._arena = Arena(self._heap.memory)
        if graph and self._heap not in self._captured:
            self._captured.append(self._heap)
        return self._arena

    def close(self) -> None:
        """Free its heaps."""
        self._heap = self._arena = None
        self._captured.clear()

    def wait(self, ticket: Any) -> None:
        self._streams.after(self._streams.current(), ticket)

    def _pull(self, group: str, sends: Sequence[Message], recvs: Sequence[Message], places: Sequence[int]) -> Any:
        heap, streams = self._heap, self._streams
        assert heap is not None, "programs that messages are pulled from run in its arena"
        number, lane = self._lanes[group]
        ready, done = 2 * number + READY, 2 * number + DONE
        streams.after(lane, streams.mark(streams.current()))
        givers, takers = (list(dict.fromkeys(peer for peer, _ in side)) for side in (recvs, sends))
        with streams.on(lane):
            for peer in takers:
                heap.put(peer, ready)
            for giver in givers:
                heap.take(giver, ready)
                for (peer, target), place in zip(recvs, places, strict=True):
                    if peer == giver:
                        source = heap.of(peer)[place : place + target.nbytes].view(target.dtype)
                        streams.copy(target, source)
                        streams.use(target, lane)
                heap.put(giver, done)
            for peer in takers:
                heap.take(peer, done)
        return streams.mark(lane)

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        raise RuntimeError("messages of symmetric memory are pulled from where they lie")

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        raise RuntimeError("messages of symmetric memory are pulled from where they lie")
