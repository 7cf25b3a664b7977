"""Symmetric memory: ranks of one node pull messages from each other's memory, without a copy on the sender's side.

Every rank has a heap of the same size, which its peers can read. The sender sets a READY signal at the receiver; the
receiver copies the message and sets a DONE signal at the sender. Streams wait for the signals, and no host thread does.
All ranks make the heap together, when a program first needs it. Each group has a stream and signals of its own, and its
messages follow one another.

Where the driver allows it, streams set signals and wait for them by themselves (`comm/stream_memory.py`), and copies
between GPUs run on copy engines: messages then need no SM. Copies within one GPU are kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from meshflash.comm.stream_memory import WORD, StreamSignals, stream_memory
from meshflash.comm.streams import DeviceStreams, MakeStreams, capturing
from meshflash.comm.transports.contract import Arena, Collective, Message, Transport
from meshflash.comm.watchdog import Watchdog
from meshflash.runtime.liveness import liveness
from meshflash.runtime.log import log

#: The two signal channels of a group: the sender's data is ready, the receiver has copied it.
READY, DONE = 0, 1
#: Heap sizes are multiples of this many bytes.
GRANULARITY_BYTES = 2**21
#: Signal channels of a heap: two for each group of a program.
MAX_CHANNELS = 32
#: SMs that the kernels of signals need, where streams do not set them by themselves, and those of copies in one GPU.
SIGNAL_SMS, COPY_SMS = 1, 1


class Heap(Protocol):
    """Memory of one rank that its peers read, and signals between ranks that streams set and wait for."""

    memory: Tensor
    #: Whether waits for signals end by themselves when a peer does not answer.
    has_timeout: bool

    def of(self, rank: int) -> Tensor:
        """Return the memory of a rank, as bytes."""

    def put(self, stream: Any, rank: int, channel: int) -> None:
        """Set a signal at a rank, which has consumed the previous one of this channel. The stream is the current one.

        A rank learns that the previous signal was consumed by a signal of another channel.
        """

    def take(self, stream: Any, rank: int, channel: int) -> None:
        """Wait for the signal of a rank, and consume it. The stream is the current one."""

    def release(self, stream: Any) -> None:
        """End all waits for signals; for a heap without timeouts."""


class TorchHeap(Heap):
    """A heap in torch's symmetric memory. Made by `Symmetric` and by the symmetric heap on GPUs."""

    def __init__(self, count: int, group: Any, device: torch.device, timeout: float) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks may share a GPU
        operations, _ = stream_memory(device)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        begin = -(-count // WORD) * WORD
        end = begin + MAX_CHANNELS * world * WORD
        whole: Tensor = symmetric.empty(end, dtype=torch.uint8, device=device)
        whole[begin:].zero_()
        torch.get_device_module(device).synchronize(device)  # signals are clear before a peer can set one
        self._handle: Any = symmetric.rendezvous(whole, group)
        buffers = [self._handle.get_buffer(peer, (end,), torch.uint8) for peer in range(world)]
        self.memory = whole[:count]
        self._peers = [buffer[:count] for buffer in buffers]
        self._timeout = int(timeout * 1e3)
        self._signals: StreamSignals | None = None
        if operations is not None:
            words = [buffer[begin:].view(torch.int32).view(MAX_CHANNELS, world) for buffer in buffers]
            self._signals = StreamSignals(operations, words, rank)
        self.has_timeout = self._signals is None

    def of(self, rank: int) -> Tensor:
        return self._peers[rank]

    def put(self, stream: Any, rank: int, channel: int) -> None:
        if self._signals is None:
            self._handle.put_signal(rank, channel, self._timeout)
        else:
            self._signals.put(stream, rank, channel)

    def take(self, stream: Any, rank: int, channel: int) -> None:
        if self._signals is None:
            self._handle.wait_signal(rank, channel, self._timeout)
        else:
            self._signals.take(stream, rank, channel)

    def release(self, stream: Any) -> None:
        assert self._signals is not None, "torch's own signals have a timeout"
        self._signals.release(stream)


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
        shares_device: bool = False,
    ) -> None:
        super().__init__()
        self.device, self.timeout = device, timeout
        operations, reason = stream_memory(device)
        self.sm_margin = (operations is None) * SIGNAL_SMS + shares_device * COPY_SMS
        if reason:
            log.info("symmetric memory: signals are kernels, which need an SM: %s", reason)
        self._group, self._rank, self._world, self._make = group, rank, world, make
        self._streams = streams(device)
        self._heap: Heap | None = None
        self._arena: Arena | None = None
        self._captured: list[Heap] = []
        self._channels: dict[str, tuple[int, Any]] = {}
        self._global_ranks = range(world) if group is None else dist.get_process_group_ranks(group)
        self._watchdog = Watchdog(self._streams, timeout, self._has_ended, self._release)
        self._rescue_stream: Any = None
        self.add("mesh", group)

    def add(self, name: str, group: Any) -> None:
        """Add a group of the same ranks, with signals and a stream of its own."""
        assert 2 * len(self._channels) < MAX_CHANNELS, "a heap has signals for 16 groups"
        self._channels[name] = len(self._channels), self._streams.new_stream()

    def rank(self, group: str) -> int:
        return self._rank

    def world(self, group: str) -> int:
        return self._world

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
        """Free the heaps, and end the watchdog."""
        self._watchdog.close()
        self._heap = self._arena = None
        self._captured.clear()

    def wait(self, handle: Any) -> None:
        self._watchdog.check()
        self._streams.wait_event(self._streams.current_stream(), handle)

    def _pull(self, group: str, sends: Sequence[Message], recvs: Sequence[Message], offsets: Sequence[int]) -> Any:
        heap, streams = self._heap, self._streams
        assert heap is not None, "a program whose messages are pulled runs in the arena"
        self._watchdog.check()
        number, stream = self._channels[group]
        ready, done = 2 * number + READY, 2 * number + DONE
        begin = streams.record_event(streams.current_stream())  # the sends are written, the targets are free
        streams.wait_event(stream, begin)
        senders, receivers = (list(dict.fromkeys(peer for peer, _ in side)) for side in (recvs, sends))
        timer = self.timer if senders else None
        with streams.stream_context(stream):
            # Signal before waiting: two ranks that exchange messages would wait for each other otherwise.
            for peer in receivers:
                heap.put(stream, peer, ready)
            for sender in senders:
                heap.take(stream, sender, ready)
                if timer and sender == senders[0]:
                    moves_from = timer.mark()
                for (peer, target), offset in zip(recvs, offsets, strict=True):
                    if peer == sender:
                        source = heap.of(peer)[offset : offset + target.nbytes].view(target.dtype)
                        streams.copy(target, source)
                        streams.record_stream(target, stream)
                heap.put(stream, sender, done)
            if timer:
                timer.moved(moves_from, timer.mark())
            # The caller may overwrite what it sent only after every receiver has copied it.
            for peer in receivers:
                heap.take(stream, peer, done)
        end = streams.record_event(stream)
        if not heap.has_timeout and not capturing(self.device):  # events of a capture cannot be queried
            peers = [self._global_ranks[peer] for peer in dict.fromkeys((*senders, *receivers))]
            self._watchdog.watch(group, begin, end, peers)
        return end

    def _has_ended(self, rank: int) -> bool:
        return liveness().has_ended(rank)

    def _release(self, lost: Sequence[int]) -> None:
        """Let streams go on that wait for ranks which were lost. What they receive from these ranks is NaN."""
        heap, streams = self._heap, self._streams
        if heap is None:
            return
        if self._rescue_stream is None:
            self._rescue_stream = streams.new_stream()
            with streams.stream_context(self._rescue_stream):
                for peer, rank in enumerate(self._global_ranks):
                    if rank in lost:
                        heap.of(peer).fill_(0xFF)  # NaN in every floating-point dtype
        with streams.stream_context(self._rescue_stream):
            heap.release(self._rescue_stream)

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        raise RuntimeError("symmetric memory moves messages by pull(), from where they lie in the sender's arena")

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        raise RuntimeError("symmetric memory moves messages by pull(), from where they lie in the sender's arena")
