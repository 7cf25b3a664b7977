"""The transport over torch's process groups: the same code for gloo, NCCL and XCCL.

NCCL and XCCL coalesce the point-to-point messages of one exchange into one call. gloo posts them one by one, with tags.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshflash.comm.transports.contract import Collective, Message, Transport, TransportError
from meshflash.core.program import Direction

#: Tags of gloo have 31 bits. Bit 30 is always set, so that the caller's own messages with small tags are never taken
#: for ours. Then come 26 bits for number and direction of the pass, which wrap around, and 4 bits for the group.
TAG_BASE, NUM_PASS_TAGS, MAX_GROUPS = 2**30, 2**26, 2**4
#: Ranks that an error lists by number.
MAX_NAMED = 8
#: The SMs that kernels leave to NCCL where nothing limits its CTAs. NCCL's own choice depends on topology and message;
#: CTAs beyond these wait for the kernel.
NCCL_SMS = 8


class ProcessGroupTransport(Transport):
    """Moves messages over torch's process groups. Made by `choose`."""

    def __init__(self, groups: Mapping[str, Any], device: torch.device, timeout: float) -> None:
        super().__init__()
        self.groups: dict[str, Any] = {}
        #: The gloo tag of this pass; the number of the group is added to it.
        self._pass_tag = TAG_BASE
        self.device, self.timeout = device, timeout
        self._limit = timedelta(seconds=timeout)
        self._ranks: dict[str, tuple[int, int]] = {}
        self._numbers: dict[str, int] = {}
        self._global_ranks: dict[str, list[int]] = {}
        self._backends: set[str] = set()
        self._nccl_ctas = 0
        for name, group in groups.items():
            self.add(name, group)

    def add(self, name: str, group: Any) -> None:
        """Add a process group; ValueError if it cannot move tensors of this device."""
        reason = cannot_move(group, self.device)
        if reason:
            raise ValueError(f"group {name}: {reason}")
        backend = str(backend_of(group, self.device))
        self._numbers[name] = len(self._numbers)
        assert len(self._numbers) <= MAX_GROUPS, "tags have no bits for more groups of a program"
        self._global_ranks[name] = dist.get_process_group_ranks(group)
        self.groups[name] = group
        self._ranks[name] = dist.get_rank(group), dist.get_world_size(group)
        self._backends.add(backend)
        self.name = "+".join(sorted(self._backends))
        self._coalesces = "gloo" not in self._backends
        if backend == "nccl":
            self._nccl_ctas += nccl_ctas(group, self.device)
        if self._coalesces:  # NCCL connects all ranks of a group in its first call, and a program may not involve all
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    @property
    def sm_margin(self) -> int:
        """The CTAs of NCCL's kernels: messages of all groups may be in flight at the same time."""
        return self._nccl_ctas

    def set_message_tag(self, number: int, direction: Direction) -> None:
        """Tag the messages of a pass: a rank that skipped a pass times out, but never receives a wrong message."""
        self._pass_tag = TAG_BASE + ((2 * number + (direction == "backward")) % NUM_PASS_TAGS) * MAX_GROUPS

    def rank(self, group: str) -> int:
        return int(self._ranks[group][0])

    def world(self, group: str) -> int:
        return int(self._ranks[group][1])

    def wait(self, handle: list[tuple[Any, tuple[int, ...]]]) -> None:
        for work, peers in handle:
            try:
                if self._coalesces:
                    work.wait()  # blocks the device's stream, not the host; the backend's watchdog enforces the timeout
                else:
                    work.wait(self._limit)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                raise TransportError(
                    f"{_named(peers)} was lost or did not answer within {self.timeout:g} s ({reason}). It may have "
                    "raised, been ended, or called attention with other arguments; look at its output first",
                    peers,
                ) from error

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        pg = self.groups[group]
        if not self._coalesces:
            tag = self._pass_tag + self._numbers[group]
            try:
                handle = [(pg.recv([tensor], peer, tag), self._peers(group, [peer])) for peer, tensor in recvs]
                return handle + [(pg.send([tensor], peer, tag), self._peers(group, [peer])) for peer, tensor in sends]
            except RuntimeError as error:
                raise self._lost(group, [peer for peer, _ in (*sends, *recvs)], error) from error
        operations = [dist.P2POp(dist.irecv, tensor, group=pg, group_peer=peer) for peer, tensor in recvs]
        operations += [dist.P2POp(dist.isend, tensor, group=pg, group_peer=peer) for peer, tensor in sends]
        peers = self._peers(group, [peer for peer, _ in (*sends, *recvs)])
        return [(work, peers) for work in dist.batch_isend_irecv(operations)] if operations else []

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        me, world = self.rank(group), self.world(group)
        if not self._coalesces:
            # gloo's collectives carry no tag: after a skipped pass ranks would match collectives of different passes.
            parts = [source] * world if form == "all_gather" else list(source.chunk(world))
            into = list(target.chunk(world))
            into[me].copy_(parts[me])
            others = [peer for peer in range(world) if peer != me]
            return self._exchange(
                group, [(peer, parts[peer]) for peer in others], [(peer, into[peer]) for peer in others]
            )
        call = _ALL_GATHER if form == "all_gather" else dist.all_to_all_single
        peers = [peer for peer in range(world) if peer != me]
        try:
            work = call(target, source, group=self.groups[group], async_op=True)
        except RuntimeError as error:
            raise self._lost(group, peers, error) from error
        return [(work, self._peers(group, peers))]

    def _lost(self, group: str, peers: Sequence[int], error: RuntimeError) -> TransportError:
        ranks, reason = self._peers(group, peers), str(error).strip().splitlines()[0]
        return TransportError(f"{_named(ranks)} was lost: {reason}", ranks)

    def _peers(self, group: str, peers: Sequence[int]) -> tuple[int, ...]:
        """Return ranks of a group as the whole job numbers them."""
        ranks = self._global_ranks[group]
        return tuple(ranks[peer] for peer in sorted(set(peers)))


def _named(ranks: Sequence[int]) -> str:
    return " or ".join(f"rank {rank}" for rank in ranks) if len(ranks) <= MAX_NAMED else "a rank of the group"


#: torch 2.13 renamed it, and warns about the old name.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def backend_of(group: Any, device: torch.device) -> str | None:
    """Return the backend that moves a group's tensors on a device; None if there is none.

    Args:
        group: A process group of torch.
        device: The device of the tensors.
    """
    config = dist.get_backend_config(group)
    for part in str(config).split(","):
        kind, _, backend = part.partition(":")
        if kind == device.type:
            return backend
    return None


def nccl_ctas(group: Any, device: torch.device) -> int:
    """Return the most CTAs that NCCL launches for a call of a group, as its options or the environment limit them.

    Args:
        group: A process group of torch, whose backend for the device is NCCL.
        device: The device of the tensors.
    """
    options = getattr(group._get_backend(device), "options", None)
    limits = [getattr(getattr(options, "config", None), "max_ctas", 0)]  # NCCL's own value for "not set" is negative
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):
        given = os.environ.get(name, "")
        limits.append(int(given) if given.isdecimal() else 0)
    return min((limit for limit in limits if limit > 0), default=NCCL_SMS)


def cannot_move(group: Any, device: torch.device) -> str | None:
    """Return why a group cannot move tensors on a device directly; None if it can.

    Args:
        group: A process group of torch.
        device: The device of the tensors.
    """
    backend = backend_of(group, device)
    if backend is None:
        return f"the process group has no backend for {device.type}"
    if backend == "gloo" and device.type != "cpu":
        # gloo would crash the process: it reads a device pointer as host memory.
        return (
            f"gloo cannot move tensors on {device.type}; initialise the process group with a backend of that device, "
            'such as "cpu:gloo,cuda:nccl"'
        )
    return None
