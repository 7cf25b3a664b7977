"""Transports within one process: one rank without its peers, and all ranks of a world in threads.

`Loopback` runs one rank alone: it counts and drops sends, and leaves receive buffers as they are. It serves to time a
rank's own work. `Hub` connects ranks that run in threads, so that a world of any size fits into one process.
"""

from __future__ import annotations

import queue
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshflash.comm.transports.contract import Collective, Message, Transport, TransportError


class Loopback(Transport):
    """One rank of a world whose other ranks do not exist. Made by benchmarks and tests."""

    name = "loopback"

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world

    def rank(self, group: str) -> int:
        return self._rank

    def world(self, group: str) -> int:
        return self._world

    def wait(self, handle: Any) -> None:
        return None

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        return None

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        return None


class Hub:
    """The mailboxes of ranks that run in threads of this process. Made by checks and tests."""

    def __init__(self, world: int, timeout: float = 60.0) -> None:
        self.world, self.timeout = world, timeout
        self.boxes: dict[tuple[str, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        for source in range(world):
            for target in range(world):
                self.boxes["mesh", source, target] = queue.SimpleQueue()

    def transport(self, rank: int) -> HubTransport:
        """Return the transport of one rank.

        Args:
            rank: The number of the rank, from 0.
        """
        return HubTransport(self, rank)


@dataclass(eq=False)
class _Slot:
    """A posted receive."""

    group: str
    peer: int
    tensor: Tensor
    arrived: bool = False


class HubTransport(Transport):
    """The transport of a rank whose peers run in other threads of this process. Made by `Hub.transport`."""

    name = "hub"

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__()
        self.hub, self._rank = hub, rank
        self._awaited: dict[tuple[str, int], deque[_Slot]] = defaultdict(deque)

    def rank(self, group: str) -> int:
        return self._rank

    def world(self, group: str) -> int:
        return self.hub.world

    def wait(self, handle: list[_Slot]) -> None:
        for slot in handle:
            while not slot.arrived:  # messages match receives in the order of the posts, whichever handle is waited for
                first = self._awaited[slot.group, slot.peer].popleft()
                first.tensor.copy_(self._take(first.group, first.peer))
                first.arrived = True

    def _take(self, group: str, peer: int) -> Tensor:
        try:
            return self.hub.boxes[group, peer, self._rank].get(timeout=self.hub.timeout)
        except queue.Empty:
            raise TransportError(f"rank {peer} did not send within {self.hub.timeout:g} s") from None

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        for peer, tensor in sends:
            self.hub.boxes[group, self._rank, peer].put(tensor.clone())
        slots = [_Slot(group, peer, tensor) for peer, tensor in recvs]
        for slot in slots:
            self._awaited[group, slot.peer].append(slot)
        return slots

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        world = self.hub.world
        parts = [source] * world if form == "all_gather" else source.chunk(world)
        return self._exchange(group, list(enumerate(parts)), list(enumerate(target.chunk(world))))
