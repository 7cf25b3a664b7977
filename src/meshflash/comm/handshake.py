"""The host handshake of a process group: a barrier that exchanges payloads over the group's store.

The symmetric heap uses it. The waits, the keys and the numbering are those of `runtime/handshake.py`; this file adds
the process group, and a check whether a rank that is awaited still runs. The environment variable MESHFLASH_TIMEOUT
and the error of ranks whose calls differ live here too, for `GroupContext` and the heap share them.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from meshflash.comm.transports.contract import TransportError
from meshflash.comm.transports.process_group import dist
from meshflash.runtime.handshake import AbsentRanksError, DepartedRankError, Handshake
from meshflash.runtime.hosts import host_name
from meshflash.runtime.parent import alive
from meshflash.runtime.store import BoundedStore, StoreError

#: Seconds that a rank waits for another, unless MESHFLASH_TIMEOUT sets another number.
TIMEOUT = 300.0


def timeout() -> float:
    """Return the seconds that a rank waits for another: MESHFLASH_TIMEOUT, or 300."""
    text = os.environ.get("MESHFLASH_TIMEOUT", "")
    try:
        seconds = float(text) if text else TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"MESHFLASH_TIMEOUT={text!r}: expected a number of seconds > 0")
    return seconds


class DisagreementError(ValueError):
    """Ranks called with different arguments; the message names the rank and the argument."""


class StoreBarrier:
    """A barrier of the ranks of a process group on the host, which also exchanges payloads. Made by each heap.

    All ranks make it together, and call `all_gather` and `all_gather_result` in the same order.
    """

    def __init__(self, group: Any, seconds: float) -> None:
        """Connect to the group's store and exchange which process each rank is.

        Args:
            group: A process group of torch. A group of the MPI backend has no store, and raises ValueError.
            seconds: The longest time that a rank waits for the others in one exchange.
        """
        if dist.get_backend(group) == "mpi":
            raise ValueError("a process group of the MPI backend has no store for handshakes; start with gloo or nccl")
        self.rank, self.world = int(dist.get_rank(group)), int(dist.get_world_size(group))
        self.seconds = seconds
        self._global_ranks = dist.get_process_group_ranks(group)
        #: The process of each rank, by rank; empty until the first exchange.
        self._processes: list[dict[str, Any]] = []
        with self._naming_lost_ranks():
            store = BoundedStore(dist.distributed_c10d._get_process_group_store(group), lambda: seconds)
            # A store may outlive its group, and a group may open several heaps. Each rank counts its heaps under a
            # key of its own; all ranks open heaps in the same order, so the counts agree and the prefix is new.
            epoch = store.add(f"meshflash/heap/{self.rank}", 1)
        self._handshake = Handshake(store, f"meshflash/heap/{epoch}", self.rank, self.world)
        process = {"pid": os.getpid(), "pid_space": _pid_namespace(), "host": host_name(), "job": secrets.token_hex(4)}
        self._processes = self.all_gather(process)
        #: A name that all ranks of this heap know and no other heap has: the random one of rank 0.
        self.job: str = self._processes[0]["job"]

    @property
    def hosts(self) -> int:
        """The number of hosts that the ranks run on."""
        return len({process["host"] for process in self._processes})

    def all_gather(self, payload: Any) -> list[Any]:
        """Post a payload and return those of all ranks, by rank; TransportError names a rank that does not come.

        Args:
            payload: Anything that JSON can hold.
        """
        number = self._handshake.next_number
        try:
            with self._naming_lost_ranks():
                return self._handshake.all_gather(payload, self.seconds, self._check_processes)
        except AbsentRanksError as error:
            raise TransportError(
                f"{' and '.join(map(self.named, error.ranks))} did not come to exchange {number} of the heap's ranks "
                f"within {self.seconds:g} s. It may have raised, or be in another call; look at its output first",
                [self._global_ranks[rank] for rank in error.ranks],
            ) from error
        except DepartedRankError as error:
            if "lost" in error.reason:
                raise TransportError(error.reason["lost"], error.reason["ranks"]) from error
            (rank,) = error.ranks
            raise TransportError(
                f"{self.named(rank)} left exchange {number} of the heap's ranks by {error.reason['raised']}",
                (self._global_ranks[rank],),
            ) from error

    def all_gather_result(self, make: Callable[[], Any]) -> list[Any]:
        """Run a function on every rank and return all results, by rank; if it raises on one rank, all ranks raise.

        Args:
            make: The function. Its result must fit into JSON. Its OSError, RuntimeError or ValueError is raised on
                this rank as it is, and on the others as a TransportError that names this rank.
        """
        failure: Exception | None = None
        try:
            payload = {"made": make()}
        except (OSError, RuntimeError, ValueError) as error:
            # Post the error instead of raising at once: the others would wait for this rank until the timeout.
            failure, payload = error, {"error": f"{type(error).__name__}: {error}"}
        payloads = self.all_gather(payload)
        if failure is not None:
            raise failure
        for rank, theirs in enumerate(payloads):
            if "error" in theirs:
                raise TransportError(f"{self.named(rank)} raised {theirs['error']}", (self._global_ranks[rank],))
        return [theirs["made"] for theirs in payloads]

    def leave(self, reason: str) -> None:
        """Let the next exchange fail on all ranks, at once, because this rank does not come.

        Args:
            reason: A sentence that names this rank: the message of the TransportError on the other ranks.
        """
        with contextlib.suppress(StoreError):  # the store is gone, and so is the rank that hosted it
            self._handshake.leave({"lost": reason, "ranks": [self._global_ranks[self.rank]]})

    def named(self, rank: int) -> str:
        """Return the name of a rank of this group for messages, by its number in the whole job."""
        return f"rank {self._global_ranks[rank]}"

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended, as far as this process can see."""
        if not self._processes:
            return False
        here, there = self._processes[self.rank], self._processes[rank]
        # A pid means something only on the same host and in the same container.
        return all(here[key] == there[key] for key in ("host", "pid_space")) and not alive(there["pid"])

    def describe_ended(self) -> str:
        """Return which ranks have ended, as the last part of a message; empty if all run."""
        ended = [
            f"process {self._processes[rank]['pid']} of {self.named(rank)}"
            for rank in range(self.world)
            if self.has_ended(rank)
        ]
        return f"; {', '.join(ended)} has ended" if ended else ""

    def _check_processes(self) -> None:
        """End a wait early: a process that has ended cannot come any more.

        The process table is proof enough and opens no port: the ranks of a heap are on one host. `GroupContext`,
        whose ranks may be on many, probes them over the network instead.
        """
        number = self._handshake.next_number - 1  # of the exchange that waits
        for rank in range(self.world):
            if self.has_ended(rank):
                raise TransportError(
                    f"process {self._processes[rank]['pid']} of {self.named(rank)} has ended before exchange {number} "
                    "of the heap's ranks",
                    (self._global_ranks[rank],),
                )

    @contextlib.contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        """Raise TransportError that names the ranks that ended, where the store does not answer."""
        try:
            yield
        except StoreError as error:
            raise TransportError(f"{error}{self.describe_ended()}") from error


def _pid_namespace() -> str:
    """Return the namespace that process numbers are counted in: each container has its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
