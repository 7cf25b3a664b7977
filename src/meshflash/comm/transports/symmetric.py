"""Symmetric memory: ranks of one node pull messages from each other's memory, without a copy on the sender's side.

Every rank has a heap of the same size, which its peers can read. The sender sets a READY signal at the receiver; the
receiver copies the message and sets a DONE signal at the sender. Streams wait for the signals, and no host thread does.
All ranks make the heap together, when a program first needs it. Each group has a stream and signals of its own, and its
messages follow one another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshflash.comm.streams import DeviceStreams, MakeStreams, capturing
from meshflash.comm.transports.contract import Arena, Collective, Message, Transport

#: The two signal channels of a group: the sender's data is ready, the receiver has copied it.
READY, DONE = 0, 1
#: Heap sizes are multiples of this many bytes.
GRANULARITY_BYTES = 2**21


class Heap(Protocol):
    """Memory of one rank that its peers read, and signals between ranks that the current stream sets and waits for."""

    memory: Tensor

    def of(self, rank: int) -> Tensor:
        """Return the memory of a rank, as bytes."""

    def put(self, rank: int, channel: int) -> None:
        """Set a signal at a rank, after that rank has consumed the previous one of this channel."""

    def take(self, rank: int, channel: int) -> None:
        """Wait for the signal of a rank, and consume it."""


class TorchHeap(Heap):
    """A heap in torch's symmetric memory. Made by `Symmetric` and by the symmetric heap on GPUs."""

    def __init__(self, count: int, group: Any, device: torch.device, timeout: float) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks may share a GPU
        self.memory: Tensor = symmetric.empty(count, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self.memory, group)
        self._peers = [self._handle.get_buffer(rank, (count,), torch.uint8) for rank in range(self._handle.world_size)]
        self._timeout = int(timeout * 1e3)

    def of(self, rank: int) -> Tensor:
        return self._peers[rank]

    def put(self, rank: int, channel: int) -> None:
        self._handle.put_signal(rank, channel, self._timeout)

    def take(self, rank: int, channel: int) -> None:
        self._handle.wait_signal(rank, channel, self._timeout)


#: Makes a heap from (bytes, group, device, timeout); all ranks of the group call it together.
MakeHeap = Callable[[int, Any, torch.device, float], Heap]


class Symmetric(Transport):
    """Pulls messages from the peers' heaps. Messages to send must lie in our heap. Made by `choose`."""

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
        self._channels: dict[str, tuple[int, Any]] = {}
        self.add("mesh", group)

    def add(self, name: str, group: Any) -> None:
        """Add a group of the same ranks, with signals and a stream of its own."""
        self._channels[name] = len(self._channels), self._streams.new_stream()

    def rank(self, group: str) -> int:
        return self._rank

    def world(self, group: str) -> int:
        return self._world

    @property
    def sm_margin(self) -> int:
        """One SM for the signal that each group may wait for, and one for copies between ranks that share a GPU."""
        return len(self._channels) + 1

    @property
    def held_bytes(self) -> int:
        """The bytes of the heap, and of heaps that graphs were captured in."""
        held = [*self._captured, *([self._heap] if self._heap and self._heap not in self._captured else [])]
        return sum(heap.memory.numel() for heap in held)

    def arena(self, min_bytes: int) -> Arena:
        """Return the memory of our heap, of at least `wanted` bytes; all ranks want the same number and call together.

        A larger heap replaces a smaller one. All ranks have finished their device work when they make it, so no rank
        reads the old one any more. A heap that a graph was captured in stays, because the graph may run again.
        """
        graph = capturing(self.device)
        if self._heap is None or self._arena is None or self._arena.bytes < min_bytes:
            if graph:
                raise RuntimeError("run this call once, with its backward, before a graph is captured of it")
            # Grow by at least a half, so that growing sequences do not make a new heap in each call.
            least = 0 if self._arena is None else self._arena.bytes * 3 // 2
            self._streams.synchronize()
            size = max(-(-max(min_bytes, 1) // GRANULARITY_BYTES) * GRANULARITY_BYTES, least)
            self._heap = self._make(size, self._group, self.device, self.timeout)
            self._arena = Arena(self._heap.memory)
        if graph and self._heap not in self._captured:
            self._captured.append(self._heap)
        return self._arena

    def close(self) -> None:
        """Free the heaps."""
        self._heap = self._arena = None
        self._captured.clear()

    def wait(self, handle: Any) -> None:
        self._streams.wait_event(self._streams.current_stream(), handle)

    def _pull(self, group: str, sends: Sequence[Message], recvs: Sequence[Message], offsets: Sequence[int]) -> Any:
        heap, streams = self._heap, self._streams
        assert heap is not None, "a program whose messages are pulled runs in the arena"
        number, stream = self._channels[group]
        ready, done = 2 * number + READY, 2 * number + DONE
        streams.wait_event(
            stream, streams.record_event(streams.current_stream())
        )  # the sends are written, the targets are free
        senders, receivers = (list(dict.fromkeys(peer for peer, _ in side)) for side in (recvs, sends))
        timer = self.timer if senders else None
        with streams.stream_context(stream):
            # Signal before waiting: two ranks that exchange messages would wait for each other otherwise.
            for peer in receivers:
                heap.put(peer, ready)
            for sender in senders:
                heap.take(sender, ready)
                if timer and sender == senders[0]:
                    moves_from = timer.mark()
                for (peer, target), offset in zip(recvs, offsets, strict=True):
                    if peer == sender:
                        source = heap.of(peer)[offset : offset + target.nbytes].view(target.dtype)
                        streams.copy(target, source)
                        streams.record_stream(target, stream)
                heap.put(sender, done)
            if timer:
                timer.moved(moves_from, timer.mark())
            # The caller may overwrite what it sent only after every receiver has copied it.
            for peer in receivers:
                heap.take(peer, done)
        return streams.record_event(stream)

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        raise RuntimeError("symmetric memory moves messages by pull(), from where they lie in the sender's arena")

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        raise RuntimeError("symmetric memory moves messages by pull(), from where they lie in the sender's arena")
