"""A heap whose ranks one process emulates, each with its own memory and stream: for tests, and timing on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshflash.comm.heap.contract import ALIGN, Heap
from meshflash.comm.streams import DeviceStreams


class LocalHeap(Heap):
    """A heap of several ranks in one process; `open_heap` with a number of ranks makes it.

    Write `for rank in heap.local_ranks: with heap.as_rank(rank): ...`.
    """

    kind = "local"

    def __init__(self, world: int, num_bytes: int, device: torch.device, timeout: float) -> None:
        memories = []
        for _ in range(world):
            memory = torch.zeros(num_bytes + ALIGN, dtype=torch.uint8, device=device)
            first = -memory.data_ptr() % ALIGN
            memories.append(memory[first : first + num_bytes])
        self._streams = None if device.type == "cpu" else DeviceStreams(device)
        self._rank_streams = [self._streams.new_stream() for _ in range(world)] if self._streams else []
        self._all = range(world)
        super().__init__(memories, 0, device, timeout, None)

    @property
    def local_ranks(self) -> range:
        return self._all

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Act as this rank inside the block, on its stream, after everything that the caller's stream has queued."""
        if rank not in self._all:
            raise ValueError(f"as_rank({rank}): expected a rank from 0 to {self.world - 1}")
        before, self.rank = self.rank, rank
        try:
            if self._streams is None:
                yield
            else:
                stream = self._rank_streams[rank]
                self._streams.wait_event(stream, self._streams.record_event(self._streams.current_stream()))
                with self._streams.stream_context(stream):
                    yield
        finally:
            self.rank = before

    def _finish(self) -> None:
        if self._streams is not None:
            self._streams.synchronize()

    def _release(self) -> None:
        if not self._closed:
            self._finish()
        super()._release()
