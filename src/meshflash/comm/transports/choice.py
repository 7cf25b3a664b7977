"""Choose the transport of a group's tensors: the requested one, or the best one that works."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshflash.comm.transports.contract import Transport
from meshflash.comm.transports.host_staged import HostStaged
from meshflash.comm.transports.process_group import ProcessGroupTransport, cannot_move, dist
from meshflash.comm.transports.symmetric import Symmetric
from meshflash.comm.transports.throttled import Throttled
from meshflash.runtime.devices import name_of, symmetric_memory
from meshflash.runtime.hosts import boot

CPU = torch.device("cpu")
#: The transports by name, in the order in which "auto" tries them, and what each does.
TRANSPORTS = {
    "process_group": "the backend that the process group has for the device: NCCL, XCCL, gloo for CPUs",
    "symmetric": "ranks of one host pull from each other's memory, also where they share a GPU",
    "host_staged": "through pinned memory of the host, by the backend that the group has for CPUs",
}


@dataclass(frozen=True)
class Where:
    """The location of a rank's device. Ranks exchange it in their first call on a device."""

    #: The host, by name and boot id.
    host: str
    #: The host as NCCL counts hosts: NCCL_HOSTID overrides it.
    nccl_host: str
    #: The name of the device that is unique on its host.
    device: str

    @staticmethod
    def here(device: torch.device) -> Where:
        """Return where a device of this process is.

        Args:
            device: A device of this process.
        """
        host = f"{platform.node()} {boot()}"
        return Where(host, os.environ.get("NCCL_HOSTID") or host, name_of(device) or str(device))


_NUMBER = r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*"
_THROTTLED = rf"throttled\(\s*(\w+)\s*,{_NUMBER},{_NUMBER}\)"


def check(requested: str) -> None:
    """Raise ValueError unless a text names a transport.

    Args:
        requested: "auto", a name of TRANSPORTS, or throttled(name, GB a second, microseconds).

    >>> check("throttled(auto, 50, 10)")
    """
    _parse(requested)


def choose(
    requested: str, groups: Mapping[str, Any], device: torch.device, timeout: float, where: Sequence[Where] = ()
) -> Transport:
    """Return the transport of these groups for tensors on a device; ValueError if none works, or not the requested one.

    Args:
        requested: "auto", a name of TRANSPORTS, or throttled(name, GB a second, microseconds).
        groups: The process groups by the names that programs use.
        device: The device of the tensors.
        timeout: Seconds that a rank waits for a message.
        where: Where the devices of all ranks are; empty for CPUs.
    """
    name, throttle = _parse(requested)
    reasons = {one: missing(one, groups, device, where) for one in TRANSPORTS if name in ("auto", one)}
    supported = [one for one, reason in reasons.items() if reason is None]
    if not supported:
        listed = "; ".join(f"{one}: {reason}" for one, reason in reasons.items())
        raise ValueError(f"transport={requested!r} cannot move tensors on {device.type}: {listed}")
    made = _make(supported[0], groups, device, timeout)
    return Throttled(made, device, throttle[0] * 1e9, throttle[1] * 1e-6) if throttle else made


def _make(name: str, groups: Mapping[str, Any], device: torch.device, timeout: float) -> Transport:
    if name == "process_group":
        return ProcessGroupTransport(groups, device, timeout)
    if name == "host_staged":
        return HostStaged(ProcessGroupTransport(groups, CPU, timeout), device, timeout)
    mesh = groups["mesh"]
    found = Symmetric(mesh, dist.get_rank(mesh), dist.get_world_size(mesh), device, timeout)
    for other in groups:
        if other != "mesh":
            found.add(other, groups[other])
    return found


def missing(name: str, groups: Mapping[str, Any], device: torch.device, where: Sequence[Where] = ()) -> str | None:
    """Return why a transport cannot move tensors of a device over these groups; None if it can.

    Args:
        name: A name of TRANSPORTS.
        groups: The process groups by the names that programs use.
        device: The device of the tensors.
        where: Where the devices of all ranks are; empty for CPUs.
    """
    if name == "process_group":
        reason = next(filter(None, (cannot_move(group, device) for group in groups.values())), None)
        shared = len({(rank.nccl_host, rank.device) for rank in where}) < len(where)
        return reason or ("ranks share a device, which its backend refuses" if shared else None)
    if device.type == "cpu":
        return "tensors are on the host already"
    if name == "symmetric":
        hosts = {rank.host for rank in where}
        if not symmetric_memory(device.type):
            return f"this torch has no symmetric memory for {device.type}"
        return f"ranks are on {len(hosts)} hosts" if len(hosts) != 1 else None
    reason = next(filter(None, (cannot_move(group, CPU) for group in groups.values())), None)
    return f'{reason}; initialise it with one, such as "cpu:gloo,cuda:nccl"' if reason else None


def _parse(requested: str) -> tuple[str, tuple[float, float] | None]:
    """Return the name of a transport and, if it is throttled, its GB a second and microseconds."""
    match = re.fullmatch(_THROTTLED, requested) if isinstance(requested, str) else None
    name = match[1] if match else requested
    if name != "auto" and name not in TRANSPORTS:
        known = ", ".join(("auto", *TRANSPORTS))
        raise ValueError(
            f"transport={requested!r}: expected one of {known}, or throttled(one of them, GB a second, microseconds)"
        )
    return name, (float(match[2]), float(match[3])) if match else None
