"""The contract of a transport: it posts messages between the ranks of named groups, and waits for them later.

A message is a flat, contiguous tensor. Ranks are numbered within a group. Messages between two ranks of a group arrive
in the order in which they were posted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from meshflash.core.program import Direction
from meshflash.runtime.liveness import LostRankError

#: The peer, by its rank in the group, and a flat tensor.
Message = tuple[int, Tensor]
Collective = Literal["all_gather", "all_to_all"]


class MessageTimer(Protocol):
    """Times messages where a trace is wanted."""

    def mark(self) -> Any:
        """Return a mark of the present: an event in the current stream of a device, or the host's time."""

    def moved(self, begin: Any, end: Any) -> None:
        """Note when the messages of the present post moved.

        Args:
            begin: The mark when the first one began.
            end: The mark when the last one ended.
        """


class TransportError(LostRankError):
    """A peer was lost in a call, or did not answer in time; the message names it."""


@dataclass
class Counters:
    """The traffic of a transport since it was made: bytes by (group, peer), and calls by kind."""

    received: Counter[tuple[str, int]] = field(default_factory=Counter)
    sent: Counter[tuple[str, int]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def received_bytes(self) -> int:
        """The bytes received from all peers."""
        return sum(self.received.values())

    def clear(self) -> None:
        """Set all counts to 0."""
        for counter in (self.received, self.sent, self.calls):
            counter.clear()


@dataclass(eq=False)
class Arena:
    """A flat piece of memory that programs run in. Pools of scratch memory make it, and transports that read peers."""

    memory: Tensor

    @property
    def bytes(self) -> int:
        """The size of the memory."""
        return self.memory.numel()


class Transport(ABC):
    """Moves messages between ranks. `transports.choice.choose` makes one for each group and device.

    Every call that posts messages returns a handle for `wait`, as torch's `Work`.
    """

    name: str
    #: Whether it reads messages from the peers' memory by `pull`. Programs then run in memory of its `arena`.
    reads_peers = False
    #: Why its messages cannot be captured in a CUDA graph; empty if they can.
    capture_unsupported_reason = ""
    #: Set while a trace is recorded. Transports whose messages move in streams of their own call it.
    timer: MessageTimer | None = None

    def __init__(self) -> None:
        self.counters = Counters()

    @property
    def sm_margin(self) -> int:
        """The SMs that its messages need while kernels run; 0 where no kernel moves them."""
        return 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that the transport holds outside of torch's caching allocator."""
        return 0

    def set_message_tag(self, number: int, direction: Direction) -> None:
        """Tag all further messages with a pass, so that no rank receives a message of another pass.

        A transport without message tags ignores the call.

        Args:
            number: The index of the pass in the group, the same on all ranks.
            direction: The direction of the pass, "forward" or "backward".
        """
        return

    def exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        """Post sends and receives, all at once; messages from this rank to itself are copied. Return a handle.

        Args:
            group: The name of the group.
            sends: The messages to send.
            recvs: The tensors to receive into, by sender.
        """
        me = self._copy_own(group, sends, recvs)
        sends = [message for message in sends if message[0] != me]
        recvs = [message for message in recvs if message[0] != me]
        return self._exchange(group, sends, recvs)

    def pull(self, group: str, sends: Sequence[Message], recvs: Sequence[Message], offsets: Sequence[int]) -> Any:
        """Post like `exchange`, for a transport that reads its peers' memory.

        Args:
            group: The name of the group.
            sends: The messages that peers will read.
            recvs: The tensors to copy into, by sender.
            offsets: The offset of each received message in its sender's arena, in bytes.
        """
        me = self._copy_own(group, sends, recvs)
        sends = [message for message in sends if message[0] != me]
        others = [(message, offset) for message, offset in zip(recvs, offsets, strict=True) if message[0] != me]
        return self._pull(group, sends, [message for message, _ in others], [offset for _, offset in others])

    def _copy_own(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> int:
        """Copy the messages of this rank to itself, count the bytes of all others, and return this rank."""
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
        """Post a collective and return a handle.

        Args:
            form: "all_gather" sends every source to all ranks; "all_to_all" sends its n-th part to rank n.
            group: The name of the group.
            source: The tensor of this rank.
            target: Receives the parts of all ranks, in their order.
        """
        me, world = self.rank(group), self.world(group)
        each = source.nbytes if form == "all_gather" else source.nbytes // world
        for peer in range(world):
            if peer != me:
                self.counters.received[group, peer] += each
                self.counters.sent[group, peer] += each
        self.counters.calls[form] += 1
        return self._collective(form, group, source, target)

    def arena(self, min_bytes: int) -> Arena:
        """Return memory for a program to run in, which peers can read.

        Args:
            min_bytes: The least number of bytes, the same on all ranks.
        """
        raise NotImplementedError

    def _pull(self, group: str, sends: Sequence[Message], recvs: Sequence[Message], offsets: Sequence[int]) -> Any:
        raise NotImplementedError

    def add(self, name: str, group: Any) -> None:
        """Add a process group.

        Args:
            name: The name that programs use.
            group: A process group of torch, with the same ranks.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free memory and threads. No message may be under way."""
        return

    @abstractmethod
    def rank(self, group: str) -> int:
        """Return this rank's number within a group."""

    @abstractmethod
    def world(self, group: str) -> int:
        """Return the number of ranks of a group."""

    @abstractmethod
    def wait(self, handle: Any) -> None:
        """Wait until the messages of a handle have moved; TransportError if a peer is lost.

        Args:
            handle: What `exchange`, `pull` or `collective` returned.
        """

    @abstractmethod
    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any: ...

    @abstractmethod
    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any: ...


class StackedTransport(Transport):
    """Base of transports that move their messages by another transport, `inner`, with its groups and ranks."""

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self.inner = inner

    def add(self, name: str, group: Any) -> None:
        """Add a process group to the inner transport."""
        self.inner.add(name, group)

    def set_message_tag(self, number: int, direction: Direction) -> None:
        self.inner.set_message_tag(number, direction)

    def rank(self, group: str) -> int:
        return self.inner.rank(group)

    def world(self, group: str) -> int:
        return self.inner.world(group)
