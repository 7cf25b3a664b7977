"""`init` and `shutdown`: make this process a rank of its job, whichever launcher started it.

`begin` goes through these steps, each bounded by the timeout:

1. `launchers.detect` reads rank and world size from the environment.
2. `rendezvous.open_rendezvous` finds the store that all ranks share.
3. Every rank posts its `RankInfo` (host, device, backends, cores, liveness address) and reads those of all ranks, by a
   `Handshake` with the prefix `info`.
4. Every rank chooses the same backend from these, and torch makes the default process group.
5. A second exchange of the same handshake: no rank returns before all ranks have the group.
"""

from __future__ import annotations

import os
import re
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import distributed as dist

from meshflash.runtime import cores, devices
from meshflash.runtime.devices import RankInfo
from meshflash.runtime.handshake import AbsentRanksError, DepartedRankError, Handshake
from meshflash.runtime.hosts import host_name, interface_of, is_loopback, reachable_address
from meshflash.runtime.launchers import LaunchError, Place, detect
from meshflash.runtime.liveness import JOB, forget_job, knows_of_failure, listen_host, liveness
from meshflash.runtime.log import log, set_up_logging
from meshflash.runtime.parent import end_with_starter
from meshflash.runtime.rendezvous import GRACE_SECONDS, Rendezvous, open_rendezvous
from meshflash.runtime.state import refuse_inherited, state
from meshflash.runtime.store import BoundedStore, StoreError, run_within

#: Seconds that ranks wait for each other by default, in `init` and in collectives.
TIMEOUT = 300.0


@dataclass(frozen=True)
class World:
    """This rank and its job. `init` makes it; as a `with` block it shuts down at the end.

    Args:
        rank: The rank of this process in the job.
        world_size: The number of ranks of the job.
        local_rank: The rank of this process among those of its node.
        local_world_size: The number of ranks of this node.
        node: The number of this node, from 0.
        device: The device of this rank.
        launcher: The name of the launcher that started this process, such as "torchrun".
        backend: The backend of the default process group, or None if there is no group.
        own: Whether `init` made the process group, so that `shutdown` ends it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    device: torch.device
    launcher: str
    backend: str | None
    own: bool = field(default=True, repr=False, compare=False)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: Any) -> None:
        end()


@dataclass
class Job:
    """What `begin` has made and `end` ends. The state of the process holds one.

    Args:
        world: This rank and its job; None while `begin` runs, and after it failed.
        rendezvous: How the ranks found each other, if `begin` made the process group.
        adopted: The process group that existed before `begin`. It is the caller's, and may end at any time.
        variables: The environment variables that `begin` has set, and `end` removes.
    """

    world: World | None = None
    rendezvous: Rendezvous | None = None
    adopted: weakref.ref[Any] | None = None
    variables: list[str] = field(default_factory=list)


#: Registry of functions that free what depends on a process group, before it ends.
on_end: list[Callable[[], None]] = []
#: Numbers the rendezvous of this process. They have keys of their own: a store may outlive a group.
_rendezvous_numbers = count(1)


def current_job() -> Job | None:
    """Return the job of this process; None before `begin` and after `end`."""
    found: Job | None = state.find("job")
    return found


def begin(backend: str | None = None, timeout: float = TIMEOUT) -> World:
    """Find the other ranks, choose device and backend, and make the default process group.

    Args:
        backend: The backend of the process group; by default the best one that all ranks have for their devices.
        timeout: Seconds that ranks wait for each other, here and in collectives.
    """
    before = current_job()
    if before is not None and before.world is not None and _still_holds(before, before.world):
        known = before.world
        parts = re.split("[:,]", known.backend or "")
        if backend and known.backend and backend != known.backend and backend not in parts:
            raise ValueError(f"backend={backend!r}: this rank has been initialised with {known.backend!r} before")
        return known
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout!r}: expected seconds > 0")
    end_with_starter()
    place = detect()
    set_up_logging(place.rank)
    # Held while ranks still join: if that fails, this rank's store must answer the others until `end`.
    job = Job(variables=before.variables if before else [])
    state.put(job, "job")
    if dist.is_initialized():
        world = _adopt_group(job, place)
    elif place.world_size == 1:
        device = devices.take_device(devices.kind_here(), place.local_rank)
        world = World(0, 1, 0, 1, 0, device, place.launcher, None)
    else:
        world = _join(job, place, backend, timeout)
    job.world = world
    log.debug(
        "rank %d of %d, started by %s: local rank %d of %d on node %d, %s, backend %s, master %s",
        *(world.rank, world.world_size, world.launcher, world.local_rank, world.local_world_size, world.node),
        *(world.device, world.backend, job.rendezvous.address if job.rendezvous else "none"),
    )
    return world


def end() -> None:
    """Free everything that lasts until now, and end the process group if `begin` made it."""
    job = current_job() or Job()
    with ExitStack() as steps:  # runs them in the reverse order, and the rest also if one of them fails
        for name in job.variables:
            steps.callback(os.environ.pop, name, None)
        steps.callback(_end_group, job)
        steps.callback(state.clear)
        for free in reversed(on_end):
            steps.callback(free)


def _end_group(job: Job) -> None:
    """End the process group that `begin` made, if it did, and leave the job."""
    if job.world is None or not job.world.own or not dist.is_available() or not dist.is_initialized():
        return
    dist.destroy_process_group()
    # Rank 0 may host the store, and ends last. After a failure some rank never departs: do not wait for it.
    if job.rendezvous is not None and not knows_of_failure():
        job.rendezvous.depart(job.world.rank, job.world.world_size)
    forget_job()


def _still_holds(job: Job, known: World) -> bool:
    """Return whether a World still holds: an adopted group may have ended, and another may have taken its place."""
    if not dist.is_initialized():
        return known.own and known.world_size == 1
    same = (known.rank, known.world_size) == (dist.get_rank(), dist.get_world_size())
    return same and (known.own or (job.adopted is not None and dist.group.WORLD is job.adopted()))


def _adopt_group(job: Job, place: Place) -> World:
    """Return the World of a process group that the caller has made; the device is the current one."""
    refuse_inherited(dist.group.WORLD)
    job.adopted = weakref.ref(dist.group.WORLD)
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, host_name())
    mine = [n for n, host in enumerate(hosts) if host == hosts[rank]]
    node = list(dict.fromkeys(hosts)).index(hosts[rank])
    local = place.local_rank if place.world_size == size else mine.index(rank)
    device, backend = devices.current(), str(dist.get_backend())
    return World(rank, size, local, len(mine), node, device, place.launcher, backend, own=False)


def _join(job: Job, place: Place, backend: str | None, timeout: float) -> World:
    """Join the other ranks and make the default process group: steps 2 to 5 of the module's docstring."""
    job.rendezvous = rendezvous = open_rendezvous(place, timeout, next(_rendezvous_numbers))
    device = devices.take_device(devices.kind_here(), place.local_rank)
    try:
        store = BoundedStore(rendezvous.store, lambda: timeout)
        handshake = Handshake(store, "info", place.rank, place.world_size)
        infos = _exchange_rank_info(place, device, rendezvous, handshake, timeout)
    except StoreError as error:
        raise LaunchError(f"rank {place.rank} of {place.world_size} lost rank 0's store: {error}") from error
    try:
        chosen, reason = devices.choose_backend(infos, backend)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if reason and place.rank == 0:
        log.warning("backend %s: %s", chosen, reason)
    local = [rank for rank, info in enumerate(infos) if info.host == infos[place.rank].host]
    nodes = list(dict.fromkeys(info.host for info in infos))
    local_cores, near = ([getattr(infos[rank], name) for rank in local] for name in ("cores", "near"))
    cores.take(cores.share_of(local.index(place.rank), local_cores, near))
    _set_gloo_interface(job, rendezvous)

    def make_group() -> None:
        # The current device is a property of each thread, and this runs in a new one.
        devices.take_device(device.type, place.local_rank)
        dist.init_process_group(
            chosen,
            store=dist.PrefixStore("group", rendezvous.store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
        )
        # A rank that returned and ended at once would close connections that other ranks still make.
        handshake.barrier(timeout)

    try:
        run_within(timeout + GRACE_SECONDS, make_group, "ranks found the store, but do not reach each other")
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0]
        cause, _ = liveness().find(JOB, range(place.world_size))
        if cause is not None:
            raise LaunchError(f"{cause} while ranks made their process group; look at its output first") from error
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} made no process group with {chosen} within {timeout:g} s "
            f"({reason}); set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME, to an interface that connects the hosts"
        ) from error
    node = nodes.index(infos[place.rank].host) if place.node is None else place.node
    local_size = place.local_world_size or len(local)
    return World(place.rank, place.world_size, place.local_rank, local_size, node, device, place.launcher, chosen)


def _exchange_rank_info(
    place: Place, device: torch.device, rendezvous: Rendezvous, handshake: Handshake, timeout: float
) -> list[RankInfo]:
    """Return what all ranks know of themselves, by rank, and remember where each of them answers probes."""
    backends = tuple(name for name in ("nccl", "xccl", "ccl", "mpi", devices.GLOO) if devices.available(name))
    pci = devices.pci_of(device)
    near = cores.near_device(pci) if pci else cores.near_rank(place.local_rank, place.local_world_size or 0)
    own = liveness(listen_host(rendezvous.address))
    own.reset()
    mine = RankInfo(host_name(), device.type, devices.name_of(device), backends, cores.cores_here(), near, own.address)
    try:
        infos = [read_rank_info(payload) for payload in handshake.all_gather(write_rank_info(mine), timeout)]
    except AbsentRanksError as error:
        raise LaunchError(
            f"rank {', '.join(map(str, error.ranks))} of {place.world_size} did not come to {rendezvous.address} "
            f"within {timeout:g} s; look at its output first"
        ) from error
    except DepartedRankError as error:
        raise LaunchError(
            f"rank {error.ranks[0]} of {place.world_size} left while ranks met at {rendezvous.address}: "
            f"{error.reason['raised']}; look at its output first"
        ) from error
    own.know({rank: info.address for rank, info in enumerate(infos)})
    return infos


def write_rank_info(info: RankInfo) -> list[Any]:
    """Return a RankInfo for JSON. It is short, for every rank reads those of all: no names, and cores as ranges.

    Args:
        info: What this rank knows of itself.

    >>> write_rank_info(RankInfo("a", "cpu", "", ("gloo",), (0, 1, 2, 8), (8,)))
    ['a', 'cpu', '', ('gloo',), [(0, 3), (8, 9)], [(8, 9)], ()]
    """
    ranges = ([(run[0], run[-1] + 1) for run in _runs(found)] for found in (info.cores, info.near))
    return [info.host, info.kind, info.device, info.backends, *ranges, info.address]


def read_rank_info(payload: list[Any]) -> RankInfo:
    """Return the RankInfo that `write_rank_info` wrote, from JSON, which knows lists and no tuples.

    Args:
        payload: What another rank wrote.

    >>> read_rank_info(["a", "cpu", "", ["gloo"], [[0, 3], [8, 9]], [[8, 9]], []])
    RankInfo(host='a', kind='cpu', device='', backends=('gloo',), cores=(0, 1, 2, 8), near=(8,), address=())
    """
    host, kind, device, backends, *ranges, address = payload
    own, near = (tuple(core for first, end in each for core in range(first, end)) for each in ranges)
    return RankInfo(host, kind, device, tuple(backends), own, near, tuple(address))


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return consecutive numbers together, in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _set_gloo_interface(job: Job, rendezvous: Rendezvous) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to rank 0, where gloo would choose a wrong one.

    gloo looks up this host's own name. Many hosts map it to a loopback address, or do not resolve it at all.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    address = rendezvous.address.rpartition(":")[0]
    try:
        known = socket.gethostbyname(socket.gethostname())
    except OSError:
        known = ""
    if known and not is_loopback(known) and not is_loopback(address):
        return
    try:
        name = interface_of(reachable_address(address))
    except ValueError:
        return
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        job.variables.append("GLOO_SOCKET_IFNAME")
