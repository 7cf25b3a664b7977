"""What a rank knows of a process group: its place, its transport, and that all ranks agree.

Ranks agree by a handshake on the host, over the group's store and never over the device: once for each
new kind of call. Rank 0 compares what all say and tells them; who disagrees or never comes is named.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as _distributed

from meshflash.transport.choice import Where, choose
from meshflash.transport.contract import Transport

dist: Any = _distributed  # torch does not declare all that it exports here

#: Seconds that a rank waits for another, unless MESHFLASH_TIMEOUT says otherwise.
TIMEOUT = 300.0
#: Letters of a difference that are shown.
SHOWN = 160
#: How a verdict begins that is not about what ranks said, but about who did not come.
_MISSING = "missing: "


class DisagreementError(ValueError):
    """Ranks called attention with different arguments; the message names rank and field."""


class MissingRankError(RuntimeError):
    """A rank did not come to a handshake in time; the message names it."""


def timeout() -> float:
    """Seconds that a rank waits for another."""
    text = os.environ.get("MESHFLASH_TIMEOUT", "")
    try:
        seconds = float(text) if text else TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"MESHFLASH_TIMEOUT={text!r}: expected a number of seconds > 0")
    return seconds


def checks_always() -> bool:
    """Whether ranks compare their arguments in every call: MESHFLASH_CHECK=always, for debugging."""
    text = os.environ.get("MESHFLASH_CHECK", "")
    if text not in ("", "first", "always"):
        raise ValueError(f"MESHFLASH_CHECK={text!r}: expected first or always")
    return text == "always"


class Member:
    """This rank as a member of one process group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.handshakes = 0
        self.left = ""
        self.prepared: dict[Any, Any] = {}
        self.last: Any = None
        #: The process groups by the names that programs call them; all are of the same ranks.
        self.groups = {"mesh": group}
        self._transports: dict[tuple[torch.device, str], Transport] = {}
        if dist.get_backend(group) == "mpi":
            raise ValueError("a process group of the MPI backend has no store to agree by; start with gloo or nccl")
        self._store = dist.distributed_c10d._get_process_group_store(group)
        # a store may outlive its group: what an earlier one of the same name left there is not for this one
        self._epoch = self._store.add(f"meshflash/epoch/{self.rank}", 1)

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
        try:
            self._store.wait(names, timedelta(seconds=timeout()))
        except RuntimeError as error:
            raise MissingRankError(f"not all ranks said within {timeout():g} s where their devices are") from error
        return [Where(**json.loads(bytes(self._store.get(name)).decode())) for name in names]

    def join(self, names: Iterable[str]) -> None:
        """Make the groups of these names that are not there yet; all ranks must come to it, in the same order.

        What moves in one does not wait for what moves in another.
        """
        for name in names:
            if name in self.groups:
                continue
            self.groups[name] = group = _another(self.group, name)
            for transport in self._transports.values():
                transport.add(name, group)

    def close(self) -> None:
        """Free what its transports hold."""
        self.prepared.clear()
        self.last = None
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def tell(self, error: Exception) -> None:
        """Let the others know, if they come to a handshake, why this rank will not join their call."""
        number = self.handshakes
        self.handshakes += 1
        if self.rank:
            self._store.set(self._name(number, self.rank), json.dumps({"error": str(error)}))
        else:
            self._store.set(self._name(number, "verdict"), f"rank {self.global_rank(0)} raised: {error}")

    @contextmanager
    def present(self) -> Iterator[None]:
        """A part in a call. A rank that leaves it by an error takes no part any more.

        Messages of others may still be on their way, and would be taken for those of a later call.
        """
        try:
            yield
        except BaseException as error:
            self.left = f"{type(error).__name__}: {error}"
            raise

    def check_here(self) -> None:
        """Raise if this rank has left."""
        if self.left:
            raise RuntimeError(
                f"this rank left an earlier call of this process group ({self.left}), whose messages may still be on "
                "their way; make a new process group"
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
        self._store.set(self._name(number, self.rank), json.dumps(fields))
        if self.rank == 0:
            try:
                verdict = self._judge(number, fields, deadline, hint)
            except MissingRankError as missing:  # the store may end with this rank, before others know
                self._store.set(self._name(number, "verdict"), f"{_MISSING}{missing}")
                raise
            self._store.set(self._name(number, "verdict"), verdict)
        else:
            verdict = self._read(number, "verdict", deadline, hint)
        if number and (self.rank or verdict == "agreed"):  # then all have come, and nobody reads of the last any more
            self._store.delete_key(self._name(number - 1, self.rank))
            if self.rank == 0:
                self._store.delete_key(self._name(number - 1, "verdict"))
        if verdict.startswith(_MISSING):
            raise MissingRankError(verdict.removeprefix(_MISSING))
        if verdict != "agreed":
            raise DisagreementError(verdict)

    def _judge(self, number: int, mine: dict[str, Any], deadline: float, hint: str) -> str:
        for rank in range(1, self.world):
            theirs = json.loads(self._read(number, rank, deadline, hint))
            who = f"rank {self.global_rank(rank)}"
            if "error" in theirs:
                return f"{who} raised: {theirs['error']}"
            for field in mine | theirs:
                a, b = mine.get(field), theirs.get(field)
                if json.dumps(a) != json.dumps(b):
                    more = "; where shards differ in length, give a layout" if field == "layout" else ""
                    return (
                        f"ranks disagree in {field}: rank {self.global_rank(0)} has {_short(a)}, {who} has "
                        f"{_short(b)}; all ranks of a group must make the same call, each with its own shard{more}"
                    )
        return "agreed"

    def _read(self, number: int, who: int | str, deadline: float, hint: str) -> str:
        """What another rank wrote; on time, or an error that names those who never came."""
        name = self._name(number, who)
        try:
            self._store.wait([name], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            try:
                absent = [rank for rank in range(self.world) if not self._store.check([self._name(number, rank)])]
            except RuntimeError:  # the store is gone, and so is the rank that held it
                absent = [0]
            ranks = ", ".join(str(self.global_rank(rank)) for rank in absent or [0])
            raise MissingRankError(
                f"rank {ranks} did not come to handshake {number} within {timeout():g} s. It may have raised, been "
                f"ended, or be in another call; look at its output first. {hint}MESHFLASH_TIMEOUT sets the seconds"
            ) from error
        return bytes(self._store.get(name)).decode()

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
_members: dict[str, Member] = {}


def member(name: str) -> Member:
    """This rank as a member of the group of this name."""
    group = dist.distributed_c10d._resolve_process_group(name)
    found = _members.get(name)
    if found is None or found.group is not group:
        for other in [other for other in _members if not _there(other)]:
            _members.pop(other).close()
        found = _members[name] = Member(group)
    return found


def forget() -> None:
    """Prepare every kind of call anew: what schedules build has changed."""
    for found in _members.values():
        found.prepared.clear()


def leave() -> None:
    """Forget all groups, and free what their transports hold."""
    for found in _members.values():
        found.close()
    _members.clear()


def _there(name: str) -> bool:
    """Whether the group that a member was made for still is."""
    try:
        return dist.distributed_c10d._resolve_process_group(name) is _members[name].group
    except (RuntimeError, LookupError):
        return False
