"""One process plays all ranks, each with memory and a stream of its own: for timing on one GPU, and for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshflash.comm.heap.contract import ALIGN, Heap
from meshflash.comm.streams import DeviceStreams


class LocalHeap(Heap):
    """Heaps of several ranks in one process. Write `for rank in heap.played: with heap.play(rank): ...`."""

    kind = "local"

    def __init__(self, world: int, count: int, device: torch.device, timeout: float) -> None:
        memories = []
        for _ in range(world):
            memory = torch.zeros(count + ALIGN, dtype=torch.uint8, device=device)
            first = -memory.data_ptr() % ALIGN
            memories.append(memory[first : first + count])
        self._streams = None if device.type == "cpu" else DeviceStreams(device)
        self._lanes = [self._streams.new() for _ in range(world)] if self._streams else []
        self._all = range(world)
        super().__init__(memories, 0, device, timeout, None)

    @property
    def played(self) -> range:
        return self._all

    @contextmanager
    def play(self, rank: int) -> Iterator[None]:
        """Be this rank in the block, on its stream. Its work begins after what the caller's stream was given."""
        if rank not in self._all:
            raise ValueError(f"play({rank}): expected a rank from 0 to {self.world - 1}")
        before, self.rank = self.rank, rank
        try:
            if self._streams is None:
                yield
            else:
                lane = self._lanes[rank]
                self._streams.after(lane, self._streams.mark(self._streams.current()))
                with self._streams.on(lane):
                    yield
        finally:
            self.rank = before

    def _finish(self) -> None:
        if self._streams is not None:
            self._streams.finish()

    def _release(self) -> None:
        if not self._closed:
            self._finish()
        super()._release()
