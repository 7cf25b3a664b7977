"""Which transport moves a group's tensors: the one that was asked for, or the best that can."""

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
#: What may be asked for, in the order in which "auto" tries them, and what each does.
TRANSPORTS = {
    "process_group": "the backend that the process group has for the device: NCCL, XCCL, gloo for CPUs",
    "symmetric": "ranks of one host pull from each other's memory, also where they share a GPU",
    "host_staged": "through pinned memory of the host, by the backend that the group has for CPUs",
}


@dataclass(frozen=True)
class Where:
    """Where a rank's device is: the host, the host as NCCL is told, and the device's own name there."""

    host: str
    nccl_host: str
    device: str

    @staticmethod
    def here(device: torch.device) -> Where:
        """That of this process."""
        host = f"{platform.node()} {boot()}"
        return Where(host, os.environ.get("NCCL_HOSTID") or host, name_of(device) or str(device))


_NUMBER = r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*"
_THROTTLED = rf"throttled\(\s*(\w+)\s*,{_NUMBER},{_NUMBER}\)"


def check(asked: str) -> None:
    """ValueError unless this names a transport.

    >>> check("throttled(auto, 50, 10)")
    """
    _parsed(asked)


def choose(
    asked: str, groups: Mapping[str, Any], device: torch.device, timeout: float, where: Sequence[Where] = ()
) -> Transport:
    """The transport of these groups for tensors of a device; ValueError where none can, or not the one asked for.

    `where` says of all ranks where their devices are; for CPUs it does not matter.
    """
    name, throttle = _parsed(asked)
    reasons = {one: missing(one, groups, device, where) for one in TRANSPORTS if name in ("auto", one)}
    able = [one for one, reason in reasons.items() if reason is None]
    if not able:
        told = "; ".join(f"{one}: {reason}" for one, reason in reasons.items())
        raise ValueError(f"transport={asked!r} cannot move tensors on {device.type}: {told}")
    made = _made(able[0], groups, device, timeout)
    return Throttled(made, device, throttle[0] * 1e9, throttle[1] * 1e-6) if throttle else made


def _made(name: str, groups: Mapping[str, Any], device: torch.device, timeout: float) -> Transport:
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
    """What a transport lacks for these groups and tensors of a device; None where it can move them."""
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


def _parsed(asked: str) -> tuple[str, tuple[float, float] | None]:
    """The name of a transport and, where it is throttled, GB a second and microseconds."""
    match = re.fullmatch(_THROTTLED, asked) if isinstance(asked, str) else None
    name = match[1] if match else asked
    if name != "auto" and name not in TRANSPORTS:
        known = ", ".join(("auto", *TRANSPORTS))
        raise ValueError(
            f"transport={asked!r}: expected one of {known}, or throttled(one of them, GB a second, microseconds)"
        )
    return name, (float(match[2]), float(match[3])) if match else None
