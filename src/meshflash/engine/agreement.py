"""Agreement of the ranks of a process group: each new kind of call is the same on all of them, or all raise.

Ranks agree on the host, over the group's store and never over the device, by one exchange of `runtime/handshake.py`:

1. Every rank posts the fields of its call, long ones as a digest and their first characters.
2. The last rank to come compares them with those of rank 0, and answers "agreed" or which field differs on which rank.
3. The other ranks wait for that answer alone, so that all ranks raise the same error.

A wait ends at the deadline MESHFLASH_TIMEOUT, on Ctrl-C, when a rank fails, or when a process of this host has ended.
Until ranks have agreed for the first time, payloads carry the address at which each rank answers probes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshflash.comm.handshake import DisagreementError, timeout
from meshflash.runtime.handshake import AbsentRanksError, DepartedRankError, Handshake
from meshflash.runtime.liveness import Cause, Liveness, LostRankError
from meshflash.runtime.store import StoreError

#: Characters of a differing field that an error message shows, and that a payload holds of it.
MAX_SHOWN_CHARACTERS = 160
#: Seconds between two looks at the processes that a handshake waits for.
PROBE_SECONDS = 2.0


class MissingRankError(LostRankError):
    """A rank did not come to a handshake in time; the message names it."""


class Agreement:
    """One rank's side of the agreements of a process group. `GroupContext` makes one."""

    def __init__(self, handshake: Handshake, global_ranks: Sequence[int], liveness: Liveness, scope: str) -> None:
        """Take the handshake of the group.

        Args:
            handshake: The handshake of the group's ranks, used for nothing else.
            global_ranks: The number in the whole job of each rank of the group, for messages and probes.
            liveness: Looks at processes, and learns from the first agreement where all ranks answer probes.
            scope: The name of the group in probes.
        """
        self.handshake, self._global_ranks, self._liveness, self._scope = handshake, global_ranks, liveness, scope
        self._has_addresses = False

    def agree(self, fields: dict[str, Any], hint: str = "") -> None:
        """Compare the fields of a call with those of all other ranks; all ranks call it, in the same order.

        Args:
            fields: The call, as JSON can hold it.
            hint: A sentence that says why a rank may not have come; it ends with a space.

        Raises:
            DisagreementError: A rank has other fields, or raised before the handshake; the message names it.
            MissingRankError: A rank has ended, or did not come within MESHFLASH_TIMEOUT; the message names it.
        """
        number, seconds = self.handshake.next_number, timeout()
        payload: dict[str, Any] = {"fields": json.dumps({name: _text(value) for name, value in fields.items()})}
        if not self._has_addresses:
            payload["address"] = self._liveness.address
        try:
            answer = self.handshake.exchange(payload, self._compare, seconds, self._make_watch(number))
        except StoreError as error:
            raise self.missing(None, f"{error}, so that ranks cannot agree in handshake {number}") from error
        except AbsentRanksError as absent:
            ranks = ", ".join(str(self._global_ranks[rank]) for rank in absent.ranks)
            raise MissingRankError(
                f"rank {ranks} did not come to handshake {number} within {seconds:g} s. It may have raised, been "
                f"ended, or be in another call; look at its output first. {hint}MESHFLASH_TIMEOUT sets the seconds"
            ) from absent
        except DepartedRankError as departed:
            raise self._name_departed(departed, number) from departed
        if not self._has_addresses:
            self._liveness.know(dict(zip(self._global_ranks, answer["addresses"], strict=True)))
            # A rank that was interrupted in the first agreement comes to the next one without the addresses that the
            # others have, and do not post again.
            self._has_addresses = None not in answer["addresses"]
        if answer["difference"]:
            raise DisagreementError(answer["difference"])

    def broadcast_error(self, error: Exception) -> None:
        """Tell the other ranks, if they come to the next handshake, why this rank does not join their call.

        Args:
            error: The error that this rank is about to raise.
        """
        self.handshake.leave({"error": str(error)})

    def missing(self, cause: Cause | None, otherwise: str) -> MissingRankError:
        """Return an error that names the rank that failed, if probes find one, and else says `otherwise`.

        Args:
            cause: The rank that failed, if it is known already.
            otherwise: The rest of the message.
        """
        return missing_rank_error(self._liveness, self._scope, self._global_ranks, cause, otherwise)

    def _make_watch(self, number: int) -> Callable[[], None]:
        """Return a function that ends a wait if a rank is known to have failed, or if a process has ended."""
        probe_at = time.monotonic() + PROBE_SECONDS

        def watch() -> None:
            nonlocal probe_at
            cause = self._liveness.cause(self._scope)
            if cause is None and time.monotonic() > probe_at:
                probe_at = time.monotonic() + PROBE_SECONDS
                found = (self._liveness.find_ended(self._scope, rank) for rank in self._global_ranks)
                cause = next(filter(None, found), None)
            if cause is not None:
                raise self.missing(cause, f"while ranks were in handshake {number}")

        return watch

    def _compare(self, payloads: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the answer to the payloads of all ranks: the first difference from rank 0, and all addresses."""
        mine = payloads[0]["fields"]
        # Equal texts need no decoding: at thousands of ranks that is most of the work.
        others = (rank for rank, theirs in enumerate(payloads) if theirs["fields"] != mine)
        differences = (
            self._difference(json.loads(mine), json.loads(payloads[rank]["fields"]), rank) for rank in others
        )
        addresses = [theirs.get("address") for theirs in payloads]
        known = any(address is not None for address in addresses)
        return {"difference": next(filter(None, differences), ""), "addresses": addresses if known else []}

    def _difference(self, mine: dict[str, str], theirs: dict[str, str], rank: int) -> str:
        """Return how another rank's call differs from rank 0's; empty if it does not."""
        for field in mine | theirs:
            a, b = mine.get(field, "null"), theirs.get(field, "null")
            if a != b:
                more = "; where shards differ in length, give a layout" if field == "layout" else ""
                return (
                    f"ranks disagree in {field}: rank {self._global_ranks[0]} has {_shown(a)}, rank "
                    f"{self._global_ranks[rank]} has {_shown(b)}; all ranks of a group must make the same call, each "
                    f"with its own shard{more}"
                )
        return ""

    def _name_departed(self, departed: DepartedRankError, number: int) -> Exception:
        """Return the error of this rank for another one that left the exchange."""
        rank, reason = self._global_ranks[departed.ranks[0]], departed.reason
        if "error" in reason:
            return DisagreementError(f"rank {rank} raised: {reason['error']}")
        if "lost" in reason:
            return MissingRankError(reason["lost"])
        return MissingRankError(f"rank {rank} left handshake {number} by {reason['raised']}; look at its output first")


def missing_rank_error(
    liveness: Liveness, scope: str, ranks: Sequence[int], cause: Cause | None, otherwise: str
) -> MissingRankError:
    """Return an error that names the rank that failed, if probes find one, and else says `otherwise`.

    Args:
        liveness: Probes the ranks.
        scope: The name of the group in probes.
        ranks: The ranks of the group, as the whole job numbers them.
        cause: The rank that failed, if it is known already.
        otherwise: The rest of the message.
    """
    if cause is None:
        cause, _ = liveness.find(scope, ranks)
    if cause is None:
        return MissingRankError(f"{otherwise}. Rank {ranks[0]} or its launcher hosts the store")
    return MissingRankError(f"{cause}, {otherwise}; look at its output first")


def _text(value: Any) -> str:
    """Return the text of a field that ranks compare; of a long one, its first characters and a digest."""
    text = json.dumps(value)
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:MAX_SHOWN_CHARACTERS]} {hashlib.sha256(text.encode()).hexdigest()}"


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + " ..."
