"""Where the ranks of a heap meet on the host: each says a word in the group's store, and reads those of all.

Every wait ends: at the deadline, or as soon as a rank of this machine is seen to have died. Who is missing is named.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from meshflash.comm.transports.contract import TransportError
from meshflash.comm.transports.process_group import dist
from meshflash.runtime.hosts import host_name
from meshflash.runtime.parent import alive

#: Seconds between two looks at whether a rank that is waited for still lives.
LOOK = 0.5


#: Seconds that a rank waits for another, unless MESHFLASH_TIMEOUT says otherwise.
TIMEOUT = 300.0


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


class DisagreementError(ValueError):
    """Ranks called with different arguments; the message names rank and field."""


class Meeting:
    """The ranks of a process group on the host; all must make theirs, and come to each meeting, in the same order."""

    def __init__(self, group: Any, seconds: float) -> None:
        if dist.get_backend(group) == "mpi":
            raise ValueError("a process group of the MPI backend has no store to meet by; start with gloo or nccl")
        self.rank, self.world = int(dist.get_rank(group)), int(dist.get_world_size(group))
        self.seconds = seconds
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._ranks = dist.get_process_group_ranks(group)
        # a store may outlive its group: what an earlier heap left there is not for this one
        self._name = f"meshflash/heap/{self._store.add(f'meshflash/heap/{self.rank}', 1)}"
        self._number = 0
        self._said: list[dict[str, Any]] = []
        self._said = self.all({"pid": os.getpid(), "space": _space(), "host": host_name(), "job": secrets.token_hex(4)})
        #: A name that all ranks know and no other heap has.
        self.job: str = self._said[0]["job"]

    @property
    def hosts(self) -> int:
        """On how many hosts the ranks are."""
        return len({said["host"] for said in self._said})

    def all(self, word: Any) -> list[Any]:
        """What each rank says, by rank; TransportError that names a rank that does not come."""
        deadline = time.monotonic() + self.seconds
        name = f"{self._name}/{self._number}"
        try:
            self._store.set(f"{name}/{self.rank}", json.dumps(word))
            words = [self._heard(f"{name}/{rank}", rank, deadline) for rank in range(self.world)]
            if self._number:  # all have come to this meeting, so nobody reads of the last any more
                self._store.delete_key(f"{self._name}/{self._number - 1}/{self.rank}")
        except dist.DistNetworkError as error:
            raise TransportError(
                f"the store of the process group is gone, and with it the rank that held it{self.lost()}"
            ) from error
        self._number += 1
        return words

    def share(self, make: Callable[[], Any]) -> list[Any]:
        """What each rank makes, by rank; where one cannot, all raise what it says."""
        failure: Exception | None = None
        try:
            word = {"made": make()}
        except (OSError, RuntimeError, ValueError) as error:
            failure, word = error, {"error": f"{type(error).__name__}: {error}"}
        words = self.all(word)
        if failure is not None:
            raise failure
        for rank, said in enumerate(words):
            if "error" in said:
                raise TransportError(f"{self.named(rank)} raised {said['error']}")
        return [said["made"] for said in words]

    def leave(self, word: Any) -> None:
        """Say a word at the next meeting without coming to it: why this rank will not be there."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and who held it with it
            self._store.set(f"{self._name}/{self._number}/{self.rank}", json.dumps(word))

    def named(self, rank: int) -> str:
        """A rank as the whole job numbers it."""
        return f"rank {self._ranks[rank]}"

    def gone(self, rank: int) -> bool:
        """Whether a rank has died, as far as can be seen from here."""
        if not self._said:
            return False
        here, there = self._said[self.rank], self._said[rank]
        return all(here[key] == there[key] for key in ("host", "space")) and not alive(there["pid"])

    def lost(self) -> str:
        """Which ranks have died, to end a message with."""
        dead = [
            f"process {self._said[rank]['pid']} of {self.named(rank)}" for rank in range(self.world) if self.gone(rank)
        ]
        return f"; {', '.join(dead)} has ended" if dead else ""

    def _heard(self, name: str, rank: int, deadline: float) -> Any:
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait([name], timedelta(seconds=max(0.001, min(LOOK, left))))
                return json.loads(bytes(self._store.get(name)))
            except dist.DistNetworkError:
                raise
            except RuntimeError as error:
                if left > LOOK and not self.gone(rank):
                    continue
                if self.gone(rank):
                    raise TransportError(
                        f"process {self._said[rank]['pid']} of {self.named(rank)} has ended before meeting "
                        f"{self._number} of the heap's ranks"
                    ) from error
                raise TransportError(
                    f"{self.named(rank)} did not come to meeting {self._number} of the heap's ranks within "
                    f"{self.seconds:g} s. It may have raised, or be in another call; look at its output first"
                ) from error


def _space() -> str:
    """Which processes the numbers of processes are of: containers count their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
