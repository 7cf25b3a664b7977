"""The host handshake: ranks exchange JSON payloads over their store, by bounded and interruptible waits.

`init` uses it to exchange what ranks know of themselves, `GroupContext` to compare calls, the symmetric heap for
memory handles and barriers. Each has a key prefix of its own, and exchanges are numbered within it. All ranks take part
in the exchanges of a prefix in the same order, so that their numbers agree without talking. An exchange has three keys:

    <prefix>/<number>/payloads    a line of each rank that has come: its number, a space, its payload
    <prefix>/<number>/come        the number of ranks that have come
    <prefix>/<number>/outcome     the answer to all ranks, or why there is none; written once, by any rank

1. Every rank appends its payload, and then adds one to the counter. That makes two requests.
2. The rank that comes last reads all payloads, computes the answer from them, and writes the outcome.
3. All other ranks wait inside the store for the outcome, by one call however long it takes.
4. Rank 0 deletes the keys of earlier exchanges: an answer proves that all ranks have read the outcomes before it.

So a rank makes 3 calls of torch's store, the last one 4, and rank 0 another 3 for each earlier exchange, whatever the
number of ranks. Only the answer may be long: that of `all_gather` holds all payloads, compressed.

On a TCPStore without libuv, `compare_set` wakes no rank that waits. There the last rank makes one more call, which
does. The rank that hosts such a store knows of it, and marks its payload.

The first outcome counts, for all ranks. A rank that gives up (a timeout, Ctrl-C, a lost peer) writes one that says why,
unless there is an outcome already. A rank that finds out who is absent needs one more call: the ranks that came are in
the payloads.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from meshflash.runtime.liveness import LostRankError, one_line
from meshflash.runtime.store import BoundedStore, NotYetError, StoreError

#: Seconds that a rank which gives up spends to tell the others why. An interrupted rank must end within two seconds.
FAREWELL_SECONDS = 1.5
#: Seconds in which the store must answer a rank that finds out who is absent; a store that does not counts as stopped.
ROLL_CALL_SECONDS = 4.0
#: Seconds by which a rank's timeout is later than that of the rank before it. Ranks that time out together do not all
#: read the payloads: the first one finds out who is absent, in about 20 ms at 4,096 ranks, and tells the others.
STAGGER_SECONDS = 0.00025
#: Seconds in which a server wakes a rank that waits for an outcome which is there.
WAKE_SECONDS = 0.5
#: Bytes from which an outcome is compressed.
COMPRESSED_BYTES = 1024

#: Called every half second while a rank waits; raises if the exchange cannot end well any more.
Watch = Callable[[], None]


class AbsentRanksError(LostRankError):
    """Some ranks did not post their payload in time; `ranks` are their numbers in the handshake."""


class DepartedRankError(LostRankError):
    """A rank has left an exchange. `ranks` holds its number in the handshake, and `reason` what it told the others.

    The reason is the argument of `Handshake.leave`, or {"lost": the text of an error that names a lost rank, "ranks":
    the ranks of that error}, or {"raised": any other error, in one line}.
    """

    def __init__(self, message: str, rank: int, reason: Any) -> None:
        super().__init__(message, (rank,))
        self.reason = reason


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
        self._first_kept = 0

    def exchange(
        self, payload: Any, answer: Callable[[list[Any]], Any], seconds: float, watch: Watch | None = None
    ) -> Any:
        """Post a payload, and return what one rank answers to all of them.

        Returning proves that every rank has begun this exchange, so it is a barrier as well. An exchange that fails
        does so on all ranks, also on those that come late, and the next one may succeed.

        Args:
            payload: This rank's payload: anything that JSON can hold.
            answer: Computes the answer, which JSON can hold, from the payloads of all ranks by rank. It runs on one
                rank alone, the last one to come. All ranks must pass functions that compute the same.
            seconds: The longest wait for all ranks together.
            watch: Called every half second of a wait; it ends the exchange on all ranks by raising.

        Raises:
            AbsentRanksError: The time is over. It names all ranks that have not come.
            DepartedRankError: A rank called `leave` instead, or left the exchange by an error or by Ctrl-C.
            StoreError: The store is gone, or does not answer.
        """
        number, deadline = self.begin(), time.monotonic() + seconds
        try:
            # JSON writes line breaks in texts as \n, so that a payload is one line.
            mark = "" if self.store.wakes_waiting else _WAKE
            self.store.append(self._key(number, "payloads"), f"{self.rank}{mark} {json.dumps(payload)}\n")
            if self.store.add(self._key(number, "come"), 1) == self.world:
                payloads, wake = self._payloads(number, self.store)
                outcome = self._end(number, {"answer": answer(payloads)}, wake=wake)
            else:
                outcome = self._await_outcome(number, answer, deadline, watch)
        except StoreError:
            raise
        except BaseException as error:
            outcome = self._give_up(number, error)
        if "absent" in outcome:
            ranks = outcome["absent"]
            raise AbsentRanksError(f"rank {', '.join(map(str, ranks))} did not come to exchange {number}", ranks)
        if "departed" in outcome:
            rank, reason = outcome["departed"], outcome["reason"]
            raise DepartedRankError(f"rank {rank} left exchange {number}: {reason}", rank, reason)
        if self.rank == 0:
            self._discard_before(number)
        return outcome["answer"]

    def all_gather(self, payload: Any, seconds: float, watch: Watch | None = None) -> list[Any]:
        """Post a payload and return the payloads of all ranks, by rank. Raise what `exchange` raises.

        Args:
            payload: This rank's payload: anything that JSON can hold. Keep it small: every rank reads all of them.
            seconds: The longest wait for all ranks together.
            watch: Called every half second of a wait; it ends the exchange on all ranks by raising.
        """
        found: list[Any] = self.exchange(payload, lambda payloads: payloads, seconds, watch)
        return found

    def barrier(self, seconds: float, watch: Watch | None = None) -> None:
        """Wait until all ranks have come here. Raise what `exchange` raises.

        Args:
            seconds: The longest wait for all ranks together.
            watch: Called every half second of a wait; it ends the exchange on all ranks by raising.
        """
        self.exchange(None, lambda _: None, seconds, watch)

    def leave(self, reason: Any) -> None:
        """Take part in the next exchange only by telling why: it fails on all ranks, at once.

        Args:
            reason: The reason, as JSON can hold it, which the others get by DepartedRankError.
        """
        self._end(self.begin(), {"departed": self.rank, "reason": reason})

    def begin(self) -> int:
        """Take the number of the next exchange, whether or not it succeeds."""
        self.next_number += 1
        return self.next_number - 1

    def _await_outcome(
        self, number: int, answer: Callable[[list[Any]], Any], deadline: float, watch: Watch | None
    ) -> dict[str, Any]:
        pending = self.store.begin_read(self._key(number, "outcome"))
        try:
            # At least a millisecond: an outcome that is there already is read even if the deadline has passed.
            return _decode(pending.result(max(0.001, deadline - time.monotonic()), watch))
        except NotYetError:
            if time.monotonic() < deadline:
                # This is a worker thread, such as that of `init`, and its caller has left by an error or by Ctrl-C.
                # Say so: the ranks that have not come yet are not the reason.
                raise RuntimeError("the interpreter of this rank exits") from None
        with suppress(NotYetError):
            return _decode(pending.result(STAGGER_SECONDS * self.rank))
        spare = self.store.spare(ROLL_CALL_SECONDS)
        payloads, wake = self._payloads(number, spare)
        absent = [rank for rank, payload in enumerate(payloads) if payload is _Absent]
        # All ranks have come: the last one was lost before it answered, or is about to answer.
        mine = {"absent": absent} if absent else {"answer": answer(payloads)}
        outcome = self._end(number, mine, spare, wake)
        with suppress(StoreError):  # there is an outcome all the same
            try:
                pending.result(WAKE_SECONDS)
            except NotYetError:  # a server without libuv, unknown to all ranks: later exchanges need this client again
                spare.set(self._key(number, "outcome"), _encode(outcome))
        return outcome

    def _give_up(self, number: int, error: BaseException) -> dict[str, Any]:
        """Tell the others why this rank leaves, and raise the error; return the outcome if there is one already."""
        mine = {"departed": self.rank, "reason": _reason(error)}
        outcome = mine = _decode(_encode(mine))  # JSON has no tuples
        with suppress(StoreError):  # the error says more
            outcome = self._end(number, mine, self.store.spare(FAREWELL_SECONDS), wake=True)
        # A rank may tell why it leaves and then end, or answer and then end: that says more than its end.
        if outcome == mine or not isinstance(error, LostRankError):
            raise error
        return outcome

    def _end(
        self, number: int, outcome: dict[str, Any], store: BoundedStore | None = None, wake: bool = False
    ) -> dict[str, Any]:
        """Write the outcome of an exchange unless it has one; return the one that counts."""
        return _decode((store or self.store).set_once(self._key(number, "outcome"), _encode(outcome), wake))

    def _payloads(self, number: int, store: BoundedStore) -> tuple[list[Any], bool]:
        """Return the payloads by rank, _Absent for ranks that have not come, and whether a rank asks to be woken."""
        found: list[Any] = [_Absent] * self.world
        wake = False
        for line in store.get(self._key(number, "payloads")).decode().splitlines():
            rank, _, payload = line.partition(" ")
            wake = wake or rank.endswith(_WAKE)
            found[int(rank.removesuffix(_WAKE))] = json.loads(payload)
        return found, wake

    def _discard_before(self, number: int) -> None:
        """Delete the keys of earlier exchanges, those that failed included: no rank reads them any more."""
        for earlier in range(self._first_kept, number):
            for name in ("payloads", "come", "outcome"):
                self.store.delete(self._key(earlier, name))
        self._first_kept = number

    def _key(self, number: int, name: str) -> str:
        return f"{self.prefix}/{number}/{name}"


class _Absent:
    """Stands for the payload of a rank that has not come; no payload is this class."""


#: Follows the number of a rank that knows its server to be one without libuv: an outcome must wake waiting ranks.
_WAKE = "!"


def _reason(error: BaseException) -> dict[str, Any]:
    """Return what the other ranks are told of an error: {"lost": text, "ranks": which} or {"raised": text}."""
    if isinstance(error, LostRankError):
        return {"lost": str(error), "ranks": error.ranks}
    return {"raised": one_line(error)}


def _encode(outcome: dict[str, Any]) -> bytes:
    """Return the bytes of an outcome; compressed if it is long, as it may hold similar payloads of all ranks."""
    text = json.dumps(outcome, separators=(",", ":")).encode()
    return text if len(text) < COMPRESSED_BYTES else zlib.compress(text, 1)


def _decode(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data if data.startswith(b"{") else zlib.decompress(data))
    return found
