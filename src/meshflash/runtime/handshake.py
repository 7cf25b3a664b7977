"""The host handshake: ranks exchange JSON payloads over their store, by bounded and interruptible waits.

`init` uses it to exchange what ranks know of themselves, `GroupContext` to compare calls, the symmetric heap for
memory handles and barriers. Each has a key prefix of its own, and exchanges are numbered within it:

    <prefix>/<number>/<rank>      the payload of one rank, written once by that rank
    <prefix>/<number>/verdict     rank 0's decision, only where rank 0 judges (`GroupContext.agree`)

All ranks take part in the exchanges of a prefix in the same order, so that their numbers agree without talking.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshflash.runtime.liveness import LostRankError
from meshflash.runtime.store import BoundedStore

#: The slot of rank 0's decision, beside the slots 0 to world_size - 1 of the ranks' payloads.
VERDICT = "verdict"

#: Called every half second with the rank that is awaited; raises if that rank cannot come any more.
Watch = Callable[[int], None]


class AbsentRanksError(LostRankError):
    """Some ranks did not post their payload in time; `ranks` are their numbers in the handshake."""


class Handshake:
    """One rank's side of a numbered series of exchanges. Made by `init`, `GroupContext` and `StoreBarrier`."""

    def __init__(self, store: BoundedStore, prefix: str, rank: int, world_size: int) -> None:
        """Begin a series at exchange 0.

        Args:
            store: The store of all ranks. Each call of it is bounded, and raises StoreError if the store is lost.
            prefix: The start of all keys. It must be new in this store: an old payload would be taken for a new one.
            rank: This rank.
            world_size: The number of ranks that take part.
        """
        self.store, self.prefix, self.rank, self.world = store, prefix, rank, world_size
        #: The number of the next exchange.
        self.next_number = 0

    def begin(self) -> int:
        """Take the number of the next exchange, whether or not it succeeds."""
        self.next_number += 1
        return self.next_number - 1

    def post(self, number: int, payload: Any, slot: int | str | None = None) -> None:
        """Write a payload without waiting for anybody.

        Args:
            number: The exchange.
            payload: Anything that JSON can hold.
            slot: Where to write; by default the slot of this rank.
        """
        self.store.set(self._key(number, self.rank if slot is None else slot), json.dumps(payload))

    def is_posted(self, number: int, slot: int | str) -> bool:
        """Return whether a payload has been posted, without waiting for it.

        Args:
            number: The exchange.
            slot: A rank, or VERDICT.
        """
        return self.store.check([self._key(number, slot)])

    def read(self, number: int, slot: int | str, deadline: float, watch: Watch | None = None) -> Any:
        """Wait for a payload and return it.

        Args:
            number: The exchange.
            slot: A rank, or VERDICT for rank 0's decision.
            deadline: The end of the wait, on the clock `time.monotonic`.
            watch: Called every half second with the awaited rank; it ends the wait by raising.

        Raises:
            AbsentRanksError: The deadline has passed. It names all ranks without a payload, not only the awaited one.
        """
        source = 0 if slot == VERDICT else int(slot)
        on_poll = None if watch is None else (lambda: watch(source))
        # At least a millisecond: what has been posted already is read even if the deadline has passed.
        if not self.store.wait([self._key(number, slot)], max(0.001, deadline - time.monotonic()), on_poll):
            absent = [rank for rank in range(self.world) if not self.is_posted(number, rank)]
            absent = absent or [source]  # all have posted: the verdict is missing, and rank 0 owes it
            raise AbsentRanksError(f"rank {', '.join(map(str, absent))} did not come to exchange {number}", absent)
        return json.loads(self.store.get(self._key(number, slot)))

    def all_gather(self, payload: Any, seconds: float, watch: Watch | None = None) -> list[Any]:
        """Post a payload and return the payloads of all ranks, by rank.

        Returning proves that every rank has begun this exchange, so it is a barrier as well. An exchange that fails
        keeps its number. A rank that then gives up replaces its payload by the reason, for ranks that come late.

        Args:
            payload: This rank's payload: anything that JSON can hold.
            seconds: The longest wait for all ranks together.
            watch: Called every half second with the awaited rank; it ends the wait by raising.
        """
        deadline = time.monotonic() + seconds
        number = self.next_number
        self.post(number, payload)
        payloads = [
            # JSON turns tuples into lists: return our own payload as the others see it.
            json.loads(json.dumps(payload)) if rank == self.rank else self.read(number, rank, deadline, watch)
            for rank in range(self.world)
        ]
        # Every rank has posted to this exchange, so every rank has read all of the exchange before it.
        self.discard(number - 1)
        self.next_number = number + 1
        return payloads

    def discard(self, number: int, slots: Sequence[int | str] = ()) -> None:
        """Delete this rank's payload, and other slots, of an exchange that every rank has read.

        Args:
            number: The exchange. A number below 0 stands for none.
            slots: Further slots to delete, such as VERDICT.
        """
        if number >= 0:
            for slot in (self.rank, *slots):
                self.store.delete(self._key(number, slot))

    def _key(self, number: int, slot: int | str) -> str:
        return f"{self.prefix}/{number}/{slot}"
