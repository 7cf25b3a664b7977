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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from meshflash.runtime import cores, devices
from meshflash.runtime.devices import RankInfo
from meshflash.runtime.handshake import AbsentRanksError, Handshake
from meshflash.runtime.hosts import host_name, interface_of, is_loopback, reachable_address
from meshflash.runtime.launchers import LaunchError, Place, detect
from meshflash.runtime.liveness import JOB, forget_job, knows_of_failure, listen_host, liveness
from meshflash.runtime.log import log, set_up_logging
from meshflash.runtime.parent import end_with_starter
from meshflash.runtime.rendezvous import GRACE_SECONDS, Rendezvous, open_rendezvous
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


_world: World | None = None
_rendezvous: Rendezvous | None = None
#: The process group that existed before `init`.
_group: Any = None
#: Rendezvous of this process so far. They have keys of their own: a store may outlive a group.
_num_rendezvous = 0
#: Environment variables that `init` has set, and `shutdown` removes.
_set: list[str] = []
#: Functions that free what depends on a process group, before it ends.
on_end: list[Callable[[], None]] = []


def begin(backend: str | None = None, timeout: float = TIMEOUT) -> World:
    """Find the other ranks, choose device and backend, and make the default process group.

    Args:
        backend: The backend of the process group; by default the best one that all ranks have for their devices.
        timeout: Seconds that ranks wait for each other, here and in collectives.
    """
    global _world
    if _world is not None and _current(_world):
        parts = re.split("[:,]", _world.backend or "")
        if backend and _world.backend and backend != _world.backend and backend not in parts:
            raise ValueError(f"backend={backend!r}: this rank has been initialised with {_world.backend!r} before")
        return _world
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout!r}: expected seconds > 0")
    end_with_starter()
    place = detect()
    set_up_logging(place.rank)
    if dist.is_initialized():
        _world = _adopt_group(place)
    elif place.world_size == 1:
        device = devices.take_device(devices.kind_here(), place.local_rank)
        _world = World(0, 1, 0, 1, 0, device, place.launcher, None)
    else:
        _world = _join(place, backend, timeout)
    log.debug(
        "rank %d of %d, started by %s: local rank %d of %d on node %d, %s, backend %s, master %s",
        *(_world.rank, _world.world_size, _world.launcher, _world.local_rank, _world.local_world_size, _world.node),
        *(_world.device, _world.backend, _rendezvous.address if _rendezvous else "none"),
    )
    return _world


def end() -> None:
    """Free what depends on the process group, and end it if `begin` made it."""
    global _world, _rendezvous, _group
    for free in on_end:
        free()
    if _world is not None and _world.own and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        # Rank 0 may host the store, and ends last. After a failure some rank never departs: do not wait for it.
        if _rendezvous is not None and not knows_of_failure():
            _rendezvous.depart(_world.rank, _world.world_size)
        forget_job()
    for name in _set:
        os.environ.pop(name, None)
    _set.clear()
    _world = _rendezvous = _group = None


def _current(known: World) -> bool:
    """Return whether a World still holds: an adopted group may have ended, and another may have taken its place."""
    if not dist.is_initialized():
        return known.own and known.world_size == 1
    same = (known.rank, known.world_size) == (dist.get_rank(), dist.get_world_size())
    return same and (known.own or dist.group.WORLD is _group)


def _adopt_group(place: Place) -> World:
    """Return the World of a process group that the caller has made; the device is the current one."""
    global _group
    _group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, host_name())
    mine = [n for n, host in enumerate(hosts) if host == hosts[rank]]
    node = list(dict.fromkeys(hosts)).index(hosts[rank])
    local = place.local_rank if place.world_size == size else mine.index(rank)
    device, backend = devices.current(), str(dist.get_backend())
    return World(rank, size, local, len(mine), node, device, place.launcher, backend, own=False)


def _join(place: Place, backend: str | None, timeout: float) -> World:
    """Join the other ranks and make the default process group: steps 2 to 5 of the module's docstring."""
    global _rendezvous, _num_rendezvous
    _num_rendezvous += 1
    _rendezvous = rendezvous = open_rendezvous(place, timeout, _num_rendezvous)
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
    _set_gloo_interface(rendezvous)

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
        handshake.all_gather("has the group", timeout)

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
        infos = [_parse_rank_info(payload) for payload in handshake.all_gather(asdict(mine), timeout)]
    except AbsentRanksError as error:
        raise LaunchError(
            f"rank {', '.join(map(str, error.ranks))} of {place.world_size} did not come to {rendezvous.address} "
            f"within {timeout:g} s; look at its output first"
        ) from error
    own.know({rank: info.address for rank, info in enumerate(infos)})
    return infos


def _parse_rank_info(payload: dict[str, Any]) -> RankInfo:
    """Return a RankInfo from JSON, which knows lists and no tuples."""
    lists = (tuple(payload[key]) for key in ("backends", "cores", "near", "address"))
    return RankInfo(payload["host"], payload["kind"], payload["device"], *lists)


def _set_gloo_interface(rendezvous: Rendezvous) -> None:
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
        _set.append("GLOO_SOCKET_IFNAME")
