"""What a transport is: messages between the ranks of named groups, begun and then waited for.

A message is a flat, contiguous tensor. Ranks are numbered within a group. Messages between two ranks of
a group arrive in the order in which they were begun.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from meshflash.core.program import Direction
from meshflash.runtime.liveness import LostRankError

#: (rank in the group, flat tensor)
Message = tuple[int, Tensor]
Collective = Literal["all_gather", "all_to_all"]


class TransportError(LostRankError):
    """A peer was lost in a call, or did not answer in time."""


@dataclass
class Counters:
    """What a transport has moved since it was made: bytes by group and peer, and calls by form."""

    received: Counter[tuple[str, int]] = field(default_factory=Counter)
    sent: Counter[tuple[str, int]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def received_bytes(self) -> int:
        """What was received from all peers."""
        return sum(self.received.values())

    def clear(self) -> None:
        """Count from 0 again."""
        for counter in (self.received, self.sent, self.calls):
            counter.clear()


@dataclass(eq=False)
class Arena:
    """A flat piece of memory, and what was bound to it, so that a repeated call builds nothing."""

    memory: Tensor
    bound: dict[Any, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.memory.numel()


class Transport(ABC):
    """Moves messages. What it begins returns a ticket for `wait`."""

    name: str
    #: Whether it pulls messages out of its peers' memory, by `pull`, and has programs run in memory of its own.
    reads_peers = False
    #: Why its messages cannot go into a graph that is captured; empty where they can.
    not_captured = ""

    def __init__(self) -> None:
        self.counters = Counters()

    @property
    def held_bytes(self) -> int:
        """Memory of the device that it holds by itself, beyond torch's own allocator."""
        return 0

    def begin_pass(self, number: int, direction: Direction) -> None:
        """Say which pass the messages from now on belong to, so that they cannot be taken for those of another.

        Ranks count their passes alike. A transport that cannot tell passes apart ignores it.
        """
        return

    def exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        """Begin to send and receive these messages, all at once. Those to and from ourselves are copied."""
        me = self._copy_own(group, sends, recvs)
        sends = [message for message in sends if message[0] != me]
        recvs = [message for message in recvs if message[0] != me]
        return self._exchange(group, sends, recvs)

    def pull(self, group: str, sends: Sequence[Message], recvs: Sequence[Message], places: Sequence[int]) -> Any:
        """The same where messages are pulled: each begins at this byte of its sender's memory."""
        me = self._copy_own(group, sends, recvs)
        sends = [message for message in sends if message[0] != me]
        others = [(message, place) for message, place in zip(recvs, places, strict=True) if message[0] != me]
        return self._pull(group, sends, [message for message, _ in others], [place for _, place in others])

    def _copy_own(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> int:
        """Copy what we send to ourselves, and count what others get and give; our number."""
        me = self.rank(group)
        received, sent = self.counters.received, self.counters.sent
        own = [tensor for peer, tensor in sends if peer == me]
        if own:
            for tensor, source in zip((tensor for peer, tensor in recvs if peer == me), own, strict=True):
                tensor.copy_(source)
        for peer, tensor in sends:
            if peer != me:
                sent[group, peer] += tensor.nbytes
        for peer, tensor in recvs:
            if peer != me:
                received[group, peer] += tensor.nbytes
        self.counters.calls["exchange"] += 1
        return me

    def collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        """Begin a collective: everyone's source to all, or its n-th part to rank n; in the order of the group."""
        me, world = self.rank(group), self.world(group)
        each = source.nbytes if form == "all_gather" else source.nbytes // world
        for peer in range(world):
            if peer != me:
                self.counters.received[group, peer] += each
                self.counters.sent[group, peer] += each
        self.counters.calls[form] += 1
        return self._collective(form, group, source, target)

    def arena(self, wanted: int) -> Arena:
        """Memory for a program to run in, of at least so many bytes, where peers read it."""
        raise NotImplementedError

    def _pull(self, group: str, sends: Sequence[Message], recvs: Sequence[Message], places: Sequence[int]) -> Any:
        raise NotImplementedError

    def add(self, name: str, group: Any) -> None:
        """One more group, where groups are given."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what it holds; nothing is on its way any more."""
        return

    @abstractmethod
    def rank(self, group: str) -> int:
        """Our number within a group."""

    @abstractmethod
    def world(self, group: str) -> int:
        """How many ranks a group has."""

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Wait until what this ticket stands for has moved; TransportError if a peer is lost."""

    @abstractmethod
    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any: ...

    @abstractmethod
    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any: ...
