"""Transports within one process: a rank of a larger world that hears nobody, and a whole world in threads.

`Loopback` plays one rank alone: what it sends is counted and dropped, what it receives stays as it is. It
times a rank's own work. `Hub` joins ranks that run in threads, so that any world fits into one process.
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
    """One rank of a world of which no other rank is there."""

    name = "loopback"

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world

    def rank(self, group: str) -> int:
        return self._rank

    def world(self, group: str) -> int:
        return self._world

    def wait(self, ticket: Any) -> None:
        return None

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        return None

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        return None


class Hub:
    """Where the messages of a world in threads lie until they are taken."""

    def __init__(self, world: int, timeout: float = 60.0) -> None:
        self.world, self.timeout = world, timeout
        self.boxes: dict[tuple[str, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        for source in range(world):
            for target in range(world):
                self.boxes["mesh", source, target] = queue.SimpleQueue()

    def transport(self, rank: int) -> HubTransport:
        """That of one rank."""
        return HubTransport(self, rank)


@dataclass(eq=False)
class _Slot:
    """Where a message is awaited."""

    group: str
    peer: int
    tensor: Tensor
    arrived: bool = False


class HubTransport(Transport):
    """A rank whose peers run in other threads of this process, all in the group "mesh"."""

    name = "hub"

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__()
        self.hub, self._rank = hub, rank
        self._awaited: dict[tuple[str, int], deque[_Slot]] = defaultdict(deque)

    def rank(self, group: str) -> int:
        return self._rank

    def world(self, group: str) -> int:
        return self.hub.world

    def wait(self, ticket: list[_Slot]) -> None:
        for slot in ticket:
            while not slot.arrived:  # messages go to where they were awaited first, whatever is waited for first
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
