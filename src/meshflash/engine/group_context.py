"""What a rank knows of a process group: its place, its transport, that all ranks agree, and which rank failed.

Ranks agree by a handshake on the host, over the group's store and never over the device: once for each
new kind of call. Rank 0 compares what all say and tells them; who disagrees or never comes is named. A rank
that fails in a call finds out which rank failed first, and reports that one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed as _distributed

from meshflash.comm.handshake import DisagreementError, timeout
from meshflash.comm.transports.choice import Where, choose
from meshflash.comm.transports.contract import Transport, TransportError
from meshflash.core.program import Direction
from meshflash.runtime.liveness import Cause, LostRankError, Status, listen_host, liveness, one_line
from meshflash.runtime.store import BoundedStore, StoreError, where

dist: Any = _distributed  # torch does not declare all that it exports here

#: Letters of a difference that are shown.
SHOWN = 160
#: Seconds of waiting in a handshake after which, and then again, this rank looks whether the awaited process runs.
PROBE_AFTER = 2.0
#: Passes that tags keep apart between one process group and the next one of its name.
EPOCH = 2**20


class MissingRankError(LostRankError):
    """A rank did not come to a handshake in time; the message names it."""


def checks_always() -> bool:
    """Whether ranks compare their arguments in every call: MESHFLASH_CHECK=always, for debugging."""
    text = os.environ.get("MESHFLASH_CHECK", "")
    if text not in ("", "first", "always"):
        raise ValueError(f"MESHFLASH_CHECK={text!r}: expected first or always")
    return text == "always"


class GroupContext:
    """This rank as a member of one process group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.handshakes = 0
        #: Passes that this rank has begun, forward and backward alike; all ranks count alike.
        self.passes = 0
        self.poisoned = ""
        self.prepared: dict[Any, Any] = {}
        self.last: Any = None
        #: The process groups by the names that programs call them; all are of the same ranks.
        self.groups = {"mesh": group}
        self._transports: dict[tuple[torch.device, str], Transport] = {}
        self._in_use = threading.RLock()
        if dist.get_backend(group) == "mpi":
            raise ValueError("a process group of the MPI backend has no store to agree by; start with gloo or nccl")
        store = dist.distributed_c10d._get_process_group_store(group)
        self._liveness = liveness(listen_host(where(store)))
        #: What probes call this group: groups of one name may follow each other.
        self._scope = f"{group.group_name}/0"
        try:
            self._store = BoundedStore(store, timeout, self._look_at_host)
            # a store may outlive its group: what an earlier one of the same name left there is not for this one
            self._epoch = self._store.add(f"meshflash/epoch/{self.rank}", 1)
        except StoreError as error:
            raise self._missing(None, f"{error}, before the first call of this process group") from error
        self._scope = f"{group.group_name}/{self._epoch}"
        self._liveness.clear(self._scope)

    def _look_at_host(self) -> None:
        """Do not wait for a store whose host has ended: that of rank 0 of the job, unless a launcher holds it."""
        cause = self._liveness.cause(self._scope) or self._liveness.find_ended(self._scope, 0)
        if cause is not None:
            raise self._missing(cause, "which held the store that ranks agree by")

    def transport(self, device: torch.device, name: str = "auto") -> Transport:
        """How this group moves tensors of a device; ValueError where it cannot, or not by this transport."""
        found = self._transports.get((device, name))
        if found is None:
            where = [] if device.type == "cpu" else self._where(device)
            found = self._transports[device, name] = choose(name, self.groups, device, timeout(), where)
        return found

    def _where(self, device: torch.device) -> list[Where]:
        """Where the devices of all ranks are; all must come to it, which they do in their first call there."""
        key = f"meshflash/{self._epoch}/where/{device.type}"
        self._store.set(f"{key}/{self.rank}", json.dumps(asdict(Where.here(device))))
        names = [f"{key}/{rank}" for rank in range(self.world)]
        if not self._store.wait(names, timeout()):
            raise MissingRankError(f"not all ranks said within {timeout():g} s where their devices are")
        return [Where(**json.loads(self._store.get(name))) for name in names]

    def join(self, names: Iterable[str]) -> None:
        """Make the groups of these names that are not there yet; all ranks must come to it, in the same order.

        What moves in one does not wait for what moves in another. On gloo messages of the same group with tags of
        their own do not either, so that none has to be made.
        """
        for name in names:
            if name in self.groups:
                continue
            backends = {part.rpartition(":")[2] for part in str(dist.get_backend_config(self.group)).split(",")}
            self.groups[name] = group = self.group if backends == {"gloo"} else _another(self.group, name)
            for transport in self._transports.values():
                transport.add(name, group)

    def close(self) -> None:
        """Free what its transports hold."""
        self.prepared.clear()
        self.last = None
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def broadcast_error(self, error: Exception) -> None:
        """Let the others know, if they come to a handshake, why this rank will not join their call."""
        number = self.handshakes
        self.handshakes += 1
        self._report(f"raised {one_line(error)}")
        with suppress(StoreError):  # the caller raises its own error, which says more
            if self.rank:
                self._store.set(self._name(number, self.rank), json.dumps({"error": str(error)}))
            else:
                self._give_verdict(number, "disagree", f"rank {self.global_rank(0)} raised: {error}")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let one thread at a time call over this group: messages of two calls at once would be mixed up."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "two threads call attention over one process group at the same time, and their messages would be "
                "mixed up; give each thread a process group of its own (torch.distributed.new_group)"
            )
        try:
            yield
        finally:
            self._in_use.release()

    @contextmanager
    def present(self, direction: Direction, transport: Transport) -> Iterator[None]:
        """Take part in one pass of a call. A rank that leaves it by an error takes no part any more.

        Messages of others may still be on their way, and would be taken for those of a later call.
        """
        self.passes += 1
        transport.begin_pass(self._epoch * EPOCH + self.passes, direction)
        what = f"{direction} pass {self.passes}"
        self._report(f"is in {what}", direction)
        try:
            yield
        except BaseException as error:
            self.poisoned = f"{type(error).__name__}: {error}"
            if isinstance(error, TransportError):
                raise self._explained(error, direction) from error
            self._liveness.blame(self._scope, Cause(self.global_rank(self.rank), f"raised {one_line(error)}"))
            raise
        self._report(f"finished {what} and has made no call since", direction)

    def _report(self, doing: str, direction: str = "") -> None:
        """Let peers that ask know what this rank does in this group, and how many passes it has begun."""
        self._liveness.status[self._scope] = Status(doing, self.passes, direction)

    def _explained(self, error: TransportError, direction: Direction) -> TransportError:
        """The error of a lost message as one that names the rank that failed first."""
        ranks = [self.global_rank(rank) for rank in range(self.world)]
        cause, answers = self._liveness.find(self._scope, error.ranks)
        if cause is None:
            cause, more = self._liveness.find(self._scope, [rank for rank in ranks if rank not in error.ranks])
            answers |= more
        if cause is None:
            # a rank that is ahead of this one has done its part
            behind = {
                rank: one
                for rank, one in answers.items()
                if one.passes < self.passes or (one.passes == self.passes and one.direction != direction)
            }
            if not behind:
                return error
            rank, one = min(behind.items(), key=lambda item: item[1].passes)
            skipped = "; all ranks must call backward, or none" if direction == "backward" else ""
            reason = f"did not join {direction} pass {self.passes} of the process group: it {one.doing}{skipped}"
            cause = self._liveness.blame(self._scope, Cause(rank, reason, answers=True))
        return TransportError(f"{cause}; look at its output first", (cause.rank,))

    def check_here(self) -> None:
        """Raise if this rank has left."""
        if self.poisoned:
            raise RuntimeError(
                f"this rank left an earlier call of this process group ({self.poisoned}), whose messages may still be "
                "on their way; make a new process group"
            )

    def global_rank(self, rank: int) -> int:
        """A rank of this group, as the whole job numbers it."""
        return int(dist.get_global_rank(self.group, rank))

    def agree(self, fields: dict[str, Any], hint: str = "") -> None:
        """Compare these fields with those of all other ranks; all must come to it, in the same order.

        The hint says why a rank may not have come.
        """
        number = self.handshakes
        self.handshakes += 1
        deadline = time.monotonic() + timeout()
        payload: dict[str, Any] = {"fields": fields}
        if number == 0:
            payload["address"] = self._liveness.address
        self._report(f"is in handshake {number}; it may have called attention with other arguments")
        try:
            self._store.set(self._name(number, self.rank), json.dumps(payload))
            if self.rank == 0:
                kind, text = self._judge(number, payload, deadline, hint)
            else:
                kind, text = self._read_verdict(number, deadline, hint)
            if number and (self.rank or kind == "agreed"):  # all have come, and nobody reads of the last any more
                self._store.delete(self._name(number - 1, self.rank))
                if self.rank == 0:
                    self._store.delete(self._name(number - 1, "verdict"))
        except StoreError as error:
            raise self._missing(None, f"{error}, so that ranks cannot agree in handshake {number}") from error
        if kind == "missing":
            raise MissingRankError(text)
        if kind != "agreed":
            raise DisagreementError(text)

    def _judge(self, number: int, mine: dict[str, Any], deadline: float, hint: str) -> tuple[str, str]:
        """As rank 0, compare what all ranks say; the verdict, which all ranks get."""
        addresses = {self.global_rank(0): mine.get("address")}
        kind, text = "agreed", ""
        try:
            for rank in range(1, self.world):
                theirs = json.loads(self._read(number, rank, deadline, hint))
                addresses[self.global_rank(rank)] = theirs.get("address")
                text = self._difference(mine["fields"], theirs, rank)
                if text:
                    kind = "disagree"
                    break
        except MissingRankError as missing:  # the store may end with this rank, before others know
            self._give_verdict(number, "missing", str(missing))
            raise
        table = addresses if number == 0 and kind == "agreed" else {}
        self._liveness.know(table)
        self._give_verdict(number, kind, text, table)
        return kind, text

    def _difference(self, mine: dict[str, Any], theirs: dict[str, Any], rank: int) -> str:
        """In what another rank's call differs from rank 0's; empty where it does not."""
        who = f"rank {self.global_rank(rank)}"
        if "error" in theirs:
            return f"{who} raised: {theirs['error']}"
        for field in mine | theirs["fields"]:
            a, b = mine.get(field), theirs["fields"].get(field)
            if json.dumps(a) != json.dumps(b):
                more = "; where shards differ in length, give a layout" if field == "layout" else ""
                return (
                    f"ranks disagree in {field}: rank {self.global_rank(0)} has {_short(a)}, {who} has "
                    f"{_short(b)}; all ranks of a group must make the same call, each with its own shard{more}"
                )
        return ""

    def _give_verdict(self, number: int, kind: str, text: str, addresses: dict[int, Any] | None = None) -> None:
        verdict = {"kind": kind, "text": text, "addresses": addresses or {}}
        self._store.set(self._name(number, "verdict"), json.dumps(verdict))

    def _read_verdict(self, number: int, deadline: float, hint: str) -> tuple[str, str]:
        verdict = json.loads(self._read(number, "verdict", deadline, hint))
        self._liveness.know({int(rank): address for rank, address in verdict["addresses"].items()})
        return verdict["kind"], verdict["text"]

    def _read(self, number: int, who: int | str, deadline: float, hint: str) -> str:
        """What another rank wrote; on time, or an error that names those who never came."""
        name = self._name(number, who)
        source = 0 if isinstance(who, str) else who
        probe_at = time.monotonic() + PROBE_AFTER

        def look() -> None:
            """Do not wait for a rank that has ended: its process cannot come any more."""
            nonlocal probe_at
            cause = self._liveness.cause(self._scope)
            if cause is None and time.monotonic() > probe_at:
                probe_at = time.monotonic() + PROBE_AFTER
                cause = self._liveness.find_ended(self._scope, self.global_rank(source))
            if cause is not None:
                raise self._missing(cause, f"while ranks were in handshake {number}")

        if not self._store.wait([name], max(0.001, deadline - time.monotonic()), look):
            absent = [rank for rank in range(self.world) if not self._store.check([self._name(number, rank)])]
            ranks = ", ".join(str(self.global_rank(rank)) for rank in absent or [0])
            raise MissingRankError(
                f"rank {ranks} did not come to handshake {number} within {timeout():g} s. It may have raised, been "
                f"ended, or be in another call; look at its output first. {hint}MESHFLASH_TIMEOUT sets the seconds"
            )
        return self._store.get(name)

    def _missing(self, cause: Cause | None, otherwise: str) -> MissingRankError:
        """An error that names the rank that failed, if probes find one, and else says what is known."""
        if cause is None:
            cause, _ = self._liveness.find(self._scope, [self.global_rank(rank) for rank in range(self.world)])
        if cause is None:
            return MissingRankError(f"{otherwise}. Rank {self.global_rank(0)} or its launcher holds the store")
        return MissingRankError(f"{cause}, {otherwise}; look at its output first")

    def _name(self, number: int, who: int | str) -> str:
        return f"meshflash/{self._epoch}/{number}/{who}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."


def _another(group: Any, name: str) -> Any:
    """One more group of the same ranks and backends; one of each name serves all groups of the same ranks."""
    ranks, backend = dist.get_process_group_ranks(group), str(dist.get_backend_config(group))
    key = (*ranks, backend, name)
    found = _others.get(key)
    if found is None or found not in dist.distributed_c10d._world.pg_names:
        found = _others[key] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return found


_others: dict[Any, Any] = {}
_members: dict[str, GroupContext] = {}
_members_lock = threading.Lock()


def group_context(name: str) -> GroupContext:
    """This rank as a member of the group of this name."""
    group = dist.distributed_c10d._resolve_process_group(name)
    found = _members.get(name)
    if found is None or found.group is not group:
        with _members_lock:
            found = _members.get(name)
            if found is None or found.group is not group:
                for other in [other for other in _members if not _there(other)]:
                    _members.pop(other).close()
                found = _members[name] = GroupContext(group)
    return found


def forget() -> None:
    """Prepare every kind of call anew: what schedules build has changed."""
    for found in list(_members.values()):
        found.prepared.clear()


def leave() -> None:
    """Forget all groups, and free what their transports hold."""
    with _members_lock:
        for found in _members.values():
            found.close()
        _members.clear()


def _there(name: str) -> bool:
    """Whether the group that a member was made for still is."""
    try:
        return dist.distributed_c10d._resolve_process_group(name) is _members[name].group
    except (RuntimeError, LookupError):
        return False
