"""Which transport moves a group's tensors: the one that was asked for, or the best that can."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from meshflash.transport.contract import Transport
from meshflash.transport.host_staged import HostStaged
from meshflash.transport.process_group import ProcessGroupTransport, cannot_move
from meshflash.transport.throttled import Throttled

CPU = torch.device("cpu")
#: What may be asked for, in the order in which "auto" tries them, and what each does.
TRANSPORTS = {
    "process_group": "the backend that the process group has for the device: NCCL, XCCL, gloo for CPUs",
    "host_staged": "through pinned memory of the host, by the backend that the group has for CPUs",
}
_THROTTLED = r"throttled\(\s*(\w+)\s*,\s*([\d.e+-]+)\s*,\s*([\d.e+-]+)\s*\)"


def check(asked: str) -> None:
    """ValueError unless this names a transport.

    >>> check("throttled(auto, 50, 10)")
    """
    _parsed(asked)


def choose(asked: str, groups: Mapping[str, Any], device: torch.device, timeout: float) -> Transport:
    """The transport of these groups for tensors of a device; ValueError where none can, or not the one asked for."""
    name, throttle = _parsed(asked)
    reasons = {one: missing(one, groups, device) for one in TRANSPORTS if name in ("auto", one)}
    able = [one for one, reason in reasons.items() if reason is None]
    if not able:
        told = "; ".join(f"{one}: {reason}" for one, reason in reasons.items())
        raise ValueError(f"transport={asked!r} cannot move tensors on {device.type}: {told}")
    made: Transport = ProcessGroupTransport(groups, device if able[0] == "process_group" else CPU, timeout)
    if able[0] == "host_staged":
        made = HostStaged(made, device, timeout)
    return Throttled(made, device, throttle[0] * 1e9, throttle[1] * 1e-6) if throttle else made


def missing(name: str, groups: Mapping[str, Any], device: torch.device) -> str | None:
    """What a transport lacks for these groups and tensors of a device; None where it can move them."""
    if name == "process_group":
        return next(filter(None, (cannot_move(group, device) for group in groups.values())), None)
    if device.type == "cpu":
        return "tensors are on the host already"
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
