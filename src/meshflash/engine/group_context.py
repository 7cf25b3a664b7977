"""One rank's view of a process group: its transports, the handshake before new calls, and the rank that failed first.

`agreement.py` compares the calls of ranks. A rank that fails in a call tells its peers before it raises; a rank that
loses a connection first finds out which rank failed (`runtime/liveness.py`), and reports that one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed as _distributed

from meshflash.comm.handshake import timeout
from meshflash.comm.transports.choice import Where, choose
from meshflash.comm.transports.contract import Transport, TransportError
from meshflash.core.program import Direction
from meshflash.engine.agreement import Agreement, MissingRankError, missing_rank_error
from meshflash.engine.cache import cache
from meshflash.runtime.handshake import AbsentRanksError, DepartedRankError, Handshake
from meshflash.runtime.liveness import (
    Cause,
    Status,
    knows_of_failure,
    listen_host,
    liveness,
    one_line,
)
from meshflash.runtime.state import refuse_inherited, state
from meshflash.runtime.store import BoundedStore, StoreError, store_address

dist: Any = _distributed  # torch's stubs do not declare all that this module exports

#: Passes that tags keep apart between one process group and the next one of its name.
PASSES_PER_EPOCH = 2**20


def checks_always() -> bool:
    """Return whether ranks compare their arguments in every call, as MESHFLASH_CHECK=always requests for debugging."""
    text = os.environ.get("MESHFLASH_CHECK", "")
    if text not in ("", "first", "always"):
        raise ValueError(f"MESHFLASH_CHECK={text!r}: expected first or always")
    return text == "always"


class GroupContext:
    """This rank as a member of one process group. `group_context` makes one for each group."""

    def __init__(self, group: Any) -> None:
        """Connect to the group's store.

        Args:
            group: A process group of torch. A group of the MPI backend has no store, and raises ValueError.
        """
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        #: Passes that this rank has begun, forward and backward alike; all ranks count alike.
        self.passes = 0
        #: The error by which this rank left a call; it takes part in no further call of this group.
        self.poisoned = ""
        #: The process groups by the names that programs use; all have the same ranks.
        self.groups = {"mesh": group}
        self._transports: dict[tuple[torch.device, str], Transport] = {}
        #: The handshake about each type of device, and where those devices are once all ranks have said it.
        self._where_handshakes: dict[str, Handshake] = {}
        self._where: dict[str, list[Where]] = {}
        self._in_use = threading.RLock()
        if dist.get_backend(group) == "mpi":
            raise ValueError("a process group of the MPI backend has no store for handshakes; start with gloo or nccl")
        store = dist.distributed_c10d._get_process_group_store(group)
        self._liveness = liveness(listen_host(store_address(store)))
        #: The name of this group in probes. Groups of one name may follow each other, hence the epoch.
        self._scope = f"{group.group_name}/0"
        try:
            self._store = BoundedStore(store, timeout, self._check_store_host)
            # A store may outlive its group, and still hold the keys of an earlier group of the same name. Each rank
            # counts such groups under a key of its own; all make them in the same order, so the counts agree.
            self._epoch = self._store.add(f"meshflash/epoch/{self.rank}", 1)
        except StoreError as error:
            raise self._missing(None, f"{error}, before the first call of this process group") from error
        self._scope = f"{group.group_name}/{self._epoch}"
        self._liveness.clear(self._scope)
        handshake = Handshake(self._store, f"meshflash/{self._epoch}", self.rank, self.world)
        self._agreement = Agreement(handshake, self._global_ranks, self._liveness, self._scope)

    @property
    def handshakes(self) -> int:
        """Return the number of handshakes that this rank has begun."""
        return self._agreement.handshake.next_number

    def _check_store_host(self) -> None:
        """Stop waiting for a store whose host has ended: rank 0 of the job hosts it, unless a launcher does."""
        cause = self._liveness.cause(self._scope) or self._liveness.find_ended(self._scope, 0)
        if cause is not None:
            raise self._missing(cause, "which hosted the store of the ranks")

    def transport(self, device: torch.device, name: str = "auto") -> Transport:
        """Return the transport that moves this group's tensors on a device; ValueError if there is none.

        Args:
            device: The device of the tensors.
            name: A transport by name, or "auto" for the best one that works.
        """
        found = self._transports.get((device, name))
        if found is None:
            where = [] if device.type == "cpu" else self._gather_devices(device)
            found = self._transports[device, name] = choose(name, self.groups, device, timeout(), where)
        return found

    def _gather_devices(self, device: torch.device) -> list[Where]:
        """Return where the devices of all ranks are. All ranks call it, in their first call on such a device."""
        if device.type in self._where:
            return self._where[device.type]
        if device.type not in self._where_handshakes:
            # A prefix of its own: the numbers of the agreement's handshake count the calls that ranks compare.
            prefix = f"meshflash/{self._epoch}/where/{device.type}"
            self._where_handshakes[device.type] = Handshake(self._store, prefix, self.rank, self.world)
        # The same handshake after a failure: a new one would read the outcome of the exchange that failed.
        handshake = self._where_handshakes[device.type]
        try:
            found = handshake.all_gather(asdict(Where.here(device)), timeout())
        except (AbsentRanksError, DepartedRankError) as error:
            ranks = ", ".join(str(self.global_rank(rank)) for rank in error.ranks)
            raise MissingRankError(f"rank {ranks} did not say within {timeout():g} s where its device is") from error
        self._where[device.type] = [Where(**one) for one in found]
        return self._where[device.type]

    def ensure_groups(self, names: Iterable[str]) -> None:
        """Make the process groups of these names that do not exist yet; all ranks call it, in the same order.

        Messages of one group do not wait for those of another. gloo tells messages apart by tags, so on gloo all
        names stand for the same group.

        Args:
            names: The groups that a program uses.
        """
        for name in names:
            if name in self.groups:
                continue
            backends = {part.rpartition(":")[2] for part in str(dist.get_backend_config(self.group)).split(",")}
            self.groups[name] = group = self.group if backends == {"gloo"} else _duplicate_group(self.group, name)
            for transport in self._transports.values():
                transport.add(name, group)

    def close(self) -> None:
        """Drop the executables of this group, free what its transports hold, and let go of it. No call may follow."""
        cache.drop(self)
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        # Autograd graphs of earlier calls may outlive this context, and must not keep the group alive.
        self.groups.clear()
        self.group = None

    def broadcast_error(self, error: Exception) -> None:
        """Tell the other ranks, if they come to the next handshake, why this rank does not join their call.

        Args:
            error: The error that this rank is about to raise.
        """
        self._report(f"raised {one_line(error)}")
        with suppress(StoreError):  # the caller raises its own error, which says more
            self._agreement.broadcast_error(error)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let one thread at a time call over this group: messages of two calls at once would be mixed up."""
        if self.group is None:
            raise RuntimeError(
                "the process group of this call was ended, or shutdown() was called since its forward: run backward "
                "before that"
            )
        refuse_inherited(self.group)  # a forked child may run the backward of a call of its parent
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
    def run_pass(self, direction: Direction, transport: Transport) -> Iterator[None]:
        """Take part in one pass of a call. An error in it poisons this context: later calls are refused.

        Messages of the other ranks may still be on their way, and a later call would take them for its own.

        Args:
            direction: "forward" or "backward".
            transport: The transport of the pass.
        """
        self.passes += 1
        transport.set_message_tag(self._epoch * PASSES_PER_EPOCH + self.passes, direction)
        what = f"{direction} pass {self.passes}"
        self._report(f"is in {what}", direction)
        try:
            yield
        except BaseException as error:
            self.poisoned = f"{type(error).__name__}: {error}"
            if isinstance(error, TransportError):
                raise self._name_first_failure(error, direction) from error
            # Tell the peers before this rank unwinds: they are about to lose their connections to it.
            self._liveness.blame(self._scope, Cause(self.global_rank(self.rank), f"raised {one_line(error)}"))
            raise
        self._report(f"finished {what} and has made no call since", direction)

    def _report(self, doing: str, direction: str = "") -> None:
        """Set the answer to probes: what this rank does in this group, and how many passes it has begun."""
        self._liveness.status[self._scope] = Status(doing, self.passes, direction)

    def _name_first_failure(self, error: TransportError, direction: Direction) -> TransportError:
        """Return the error of a lost message as one that names the rank that failed first."""
        ranks = [self.global_rank(rank) for rank in range(self.world)]
        # Probe the ranks that the transport suspects, and the rest only if those answer: each probe may take seconds.
        cause, answers = self._liveness.find(self._scope, error.ranks)
        if cause is None:
            cause, more = self._liveness.find(self._scope, [rank for rank in ranks if rank not in error.ranks])
            answers |= more
        if cause is None:
            # All ranks run. Blame one that has not begun this pass; a rank that is ahead has done its part.
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

    def check_not_poisoned(self) -> None:
        """Raise RuntimeError if this rank left an earlier call by an error."""
        if self.poisoned:
            raise RuntimeError(
                f"this rank left an earlier call of this process group ({self.poisoned}), whose messages may still be "
                "on their way; make a new process group"
            )

    def global_rank(self, rank: int) -> int:
        """Return the number in the whole job of a rank of this group.

        Args:
            rank: The number within the group.
        """
        return int(self._global_ranks[rank])

    def agree(self, fields: dict[str, Any], hint: str = "") -> None:
        """Compare the fields of a call with those of all other ranks; all ranks call it, in the same order.

        Args:
            fields: The call, as JSON can hold it.
            hint: A sentence that says why a rank may not have come; it ends with a space.

        Raises:
            DisagreementError: A rank has other fields, or raised before the handshake; the message names it.
            MissingRankError: A rank has ended, or did not come within MESHFLASH_TIMEOUT; the message names it.
        """
        self._report(f"is in handshake {self.handshakes}; it may have called attention with other arguments")
        self._agreement.agree(fields, hint)

    def _missing(self, cause: Cause | None, otherwise: str) -> MissingRankError:
        """Return an error that names the rank that failed, if probes find one, and else says `otherwise`."""
        return missing_rank_error(self._liveness, self._scope, self._global_ranks, cause, otherwise)


class _DuplicateGroup:
    """One more process group of the same ranks and backends. `_duplicate_group` makes it, and `shutdown` ends it."""

    def __init__(self, ranks: list[int], backend: str) -> None:
        self.group: Any = dist.new_group(ranks, backend=backend, use_local_synchronization=True)

    @property
    def exists(self) -> bool:
        """Whether nobody has destroyed the group, alone or with all other groups."""
        return self.group in dist.distributed_c10d._world.pg_names

    def close(self) -> None:
        """End the group, unless a rank failed: its messages are never received, and the end would wait for them."""
        if self.exists and not knows_of_failure():
            dist.destroy_process_group(self.group)


def _duplicate_group(group: Any, name: str) -> Any:
    """Return one more group of the same ranks and backends; groups of the same ranks share one of each name."""
    ranks, backend = dist.get_process_group_ranks(group), str(dist.get_backend_config(group))
    key = ("duplicate group", *ranks, backend, name)
    found = state.find(*key)
    if found is None or not found.exists:
        found = _DuplicateGroup(ranks, backend)
        state.put(found, *key)
    return found.group


def group_context(name: str) -> GroupContext:
    """Return this rank's context of a process group, made on first use. It lives until `shutdown`.

    Args:
        name: The name of the group, as torch registers it. A new group may take the name of one that has ended.
    """
    group = dist.distributed_c10d._resolve_process_group(name)
    found: GroupContext | None = state.find(_KIND, name)
    if found is None or found.group is not group:
        found = _make_context(name, group)
    return found


#: The kind of contexts in the state of the process; their keys end with the name of the group.
_KIND = "group context"


def _make_context(name: str, group: Any) -> GroupContext:
    """Make the context of a group, and drop those of groups that exist no more."""
    refuse_inherited(group)
    with state.lock:  # or another thread, which read the table before, would drop the new context for the old one
        for key, context in state.all_of(_KIND).items():
            if not still_exists(str(key[1]), context.group):
                state.pop(*key)
                context.close()
        return state.get(lambda: GroupContext(group), _KIND, name)


def open_contexts() -> list[GroupContext]:
    """Return the contexts of all groups that this process has called over since the last `shutdown`."""
    return list(state.all_of(_KIND).values())


def close_contexts() -> None:
    """Close the contexts of all groups, and free what their transports hold."""
    for key, context in state.all_of(_KIND).items():
        state.pop(*key)
        context.close()


def still_exists(name: str, group: Any) -> bool:
    """Return whether a group still exists under its name.

    Args:
        name: The name of the group, as torch registers it.
        group: The group.
    """
    try:
        return dist.distributed_c10d._resolve_process_group(name) is group
    except (RuntimeError, LookupError):
        return False
