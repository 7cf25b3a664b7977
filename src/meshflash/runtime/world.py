"""`init` and `shutdown`: this process as a rank of a job, whoever started it."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as _distributed

from meshflash.runtime import cores, devices
from meshflash.runtime.devices import Said
from meshflash.runtime.hosts import host_name, interface_of, is_loopback, reachable_address
from meshflash.runtime.launchers import LaunchError, Place, detect
from meshflash.runtime.liveness import JOB, forget_job, knows_of_failure, listen_host, liveness
from meshflash.runtime.log import log, set_up_logging
from meshflash.runtime.parent import end_with_starter
from meshflash.runtime.rendezvous import GRACE, Meeting, meet
from meshflash.runtime.store import BoundedStore, StoreError, within

dist: Any = _distributed  # torch does not declare all that it exports here

#: Seconds that ranks wait for each other, at the start and in collectives.
TIMEOUT = 300.0


@dataclass(frozen=True)
class World:
    """This rank and its job; in a `with` block it is shut down at the end."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    device: torch.device
    launcher: str
    backend: str | None
    #: Whether shutdown ends the process group, too: not one that was there before.
    own: bool = field(default=True, repr=False, compare=False)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: Any) -> None:
        end()


_world: World | None = None
_meeting: Meeting | None = None
#: The process group that was there before.
_group: Any = None
#: How often this process has met others: what they say is kept apart, for a store may outlive a group.
_meetings = 0
#: Environment variables that were set here.
_set: list[str] = []
#: What else is to be freed before a process group ends.
on_end: list[Callable[[], None]] = []


def begin(backend: str | None = None, timeout: float = TIMEOUT) -> World:
    """Find the other ranks, choose device and backend, and make the default process group."""
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
        _world = _adopted(place)
    elif place.world_size == 1:
        device = devices.take_device(devices.kind_here(), place.local_rank)
        _world = World(0, 1, 0, 1, 0, device, place.launcher, None)
    else:
        _world = _joined(place, backend, timeout)
    log.debug(
        "rank %d of %d, started by %s: local rank %d of %d on node %d, %s, backend %s, master %s",
        *(_world.rank, _world.world_size, _world.launcher, _world.local_rank, _world.local_world_size, _world.node),
        *(_world.device, _world.backend, _meeting.where if _meeting else "none"),
    )
    return _world


def end() -> None:
    """Free what is kept, and end the process group that `begin` made."""
    global _world, _meeting
    for free in on_end:
        free()
    if _world is not None and _world.own and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        if _meeting is not None and not knows_of_failure():
            _meeting.part(_world.rank, _world.world_size)
        forget_job()
    for name in _set:
        os.environ.pop(name, None)
    _set.clear()
    _world = _meeting = _group = None


def _current(known: World) -> bool:
    """Whether what was known still holds: an adopted group may have ended since, and another may have been made."""
    if not dist.is_initialized():
        return known.own and known.world_size == 1
    same = (known.rank, known.world_size) == (dist.get_rank(), dist.get_world_size())
    return same and (known.own or dist.group.WORLD is _group)


def _adopted(place: Place) -> World:
    """A process group that was there before: its ranks are those of the job, and the device is the current one."""
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


def _joined(place: Place, backend: str | None, timeout: float) -> World:
    global _meeting, _meetings
    _meetings += 1
    _meeting = meeting = meet(place, timeout, _meetings)
    device = devices.take_device(devices.kind_here(), place.local_rank)
    said = _told(place, device, meeting, timeout)
    try:
        chosen, reason = devices.choose_backend(said, backend)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if reason and place.rank == 0:
        log.warning("backend %s: %s", chosen, reason)
    mine = [n for n, one in enumerate(said) if one.host == said[place.rank].host]
    nodes = list(dict.fromkeys(one.host for one in said))
    cores.take(cores.share_of(mine.index(place.rank), [said[n].cores for n in mine], [said[n].near for n in mine]))
    _name_interface(meeting)

    def group() -> None:
        devices.take_device(device.type, place.local_rank)  # for it is a matter of each thread
        dist.init_process_group(
            chosen,
            store=dist.PrefixStore("group", meeting.store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
        )
        meeting.gather(place.world_size, timeout)  # one that left at once would break off others that still connect

    try:
        within(timeout + GRACE, group, "ranks found the store, and do not reach each other")
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0]
        cause, _ = liveness().find(JOB, range(place.world_size))
        if cause is not None:
            raise LaunchError(f"{cause} while ranks made their process group; look at its output first") from error
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} made no group of {chosen} within {timeout:g} s ({reason}); "
            "set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME, to an interface by which hosts reach each other"
        ) from error
    node = nodes.index(said[place.rank].host) if place.node is None else place.node
    local_size = place.local_world_size or len(mine)
    return World(place.rank, place.world_size, place.local_rank, local_size, node, device, place.launcher, chosen)


def _told(place: Place, device: torch.device, meeting: Meeting, timeout: float) -> list[Said]:
    """What all ranks say of themselves."""
    backends = ("nccl", "xccl", "ccl", "mpi", devices.GLOO)
    has = tuple(name for name in backends if devices.available(name))
    pci = devices.pci_of(device)
    near = cores.near_device(pci) if pci else cores.near_rank(place.local_rank, place.local_world_size or 0)
    alive = liveness(listen_host(meeting.where))
    alive.reset()
    mine = Said(host_name(), device.type, devices.name_of(device), has, cores.cores_here(), near, alive.address)
    names = [f"said/{rank}" for rank in range(place.world_size)]
    try:
        store = BoundedStore(meeting.store, lambda: timeout)
        store.set(names[place.rank], json.dumps(asdict(mine)))
        if not store.wait(names, timeout):
            absent = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
            raise LaunchError(
                f"rank {', '.join(absent)} of {place.world_size} did not come to {meeting.where} within {timeout:g} s; "
                "look at its output first"
            )
        said = [_read(store.get(name)) for name in names]
    except StoreError as error:
        raise LaunchError(f"rank {place.rank} of {place.world_size} lost rank 0's store: {error}") from error
    alive.know({rank: one.address for rank, one in enumerate(said)})
    return said


def _read(text: str) -> Said:
    one: dict[str, Any] = json.loads(text)
    lists = (tuple(one[key]) for key in ("backends", "cores", "near", "address"))
    return Said(one["host"], one["kind"], one["device"], *lists)


def _name_interface(meeting: Meeting) -> None:
    """Tell gloo which interface to use, where it would go by a name of this host that leads nowhere.

    It is the one that leads to rank 0: on one node that meets by loopback, the loopback.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    address = meeting.where.rpartition(":")[0]
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
