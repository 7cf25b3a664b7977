"""Which device a rank has, and by which backend devices of a kind talk: the one room that selects devices."""

from __future__ import annotations

import importlib
import importlib.util
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as _distributed

dist: Any = _distributed  # torch does not declare all that it exports here

#: Kinds of accelerators, the first that is there is taken; and the backends that move their tensors, best first.
BACKENDS: dict[str, tuple[str, ...]] = {"cuda": ("nccl",), "xpu": ("xccl", "ccl")}
CPU = "cpu"
#: What torch calls the GPUs that Triton compiles for, NVIDIA's and AMD's.
TRITON = "cuda"
#: Moves tensors of CPUs, and of others by way of the host.
GLOO = "gloo"


def kind_here() -> str:
    """The kind of the devices that ranks of this machine compute on."""
    return next((kind for kind in BACKENDS if count(kind)), CPU)


def count(kind: str) -> int:
    """How many devices of a kind this process sees."""
    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def device_of(local_rank: int, kind: str | None = None) -> torch.device:
    """The device of a local rank; with more ranks than devices they share.

    >>> device_of(3, "cpu")
    device(type='cpu')
    """
    kind = kind or kind_here()
    if kind == CPU:
        return torch.device(CPU)
    return torch.device(kind, local_rank % max(1, count(kind)))


def current(kind: str | None = None) -> torch.device:
    """The device of a kind, or of the one that is here, that is current: the process's own choice.

    >>> current("cpu")
    device(type='cpu')
    """
    kind = kind or kind_here()
    return torch.device(CPU) if kind == CPU else torch.device(kind, getattr(torch, kind).current_device())


def take_device(kind: str, local_rank: int) -> torch.device:
    """The same, from now on the current one.

    >>> take_device("cpu", 3)
    device(type='cpu')
    """
    device = device_of(local_rank, kind)
    if device.type != CPU:
        torch.get_device_module(device).set_device(device)
    return device


def name_of(device: torch.device) -> str:
    """What tells a device from others of its host, whatever numbers processes know it by."""
    if device.type == CPU:
        return ""
    found = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(found, "uuid", "") or device)


def symmetric_memory(kind: str) -> bool:
    """Whether this build of torch lets ranks read each other's memory on devices of a kind."""
    found = importlib.util.find_spec("torch.distributed._symmetric_memory")
    return kind == "cuda" and found is not None


def pci_of(device: torch.device) -> str:
    """Where a device hangs on the machine, as the system writes it; empty where torch does not tell."""
    if device.type == CPU:
        return ""
    found = torch.get_device_module(device).get_device_properties(device)
    numbers = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    known = [number for number in numbers if number is not None]
    return "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == 3 else ""


def available(backend: str) -> bool:
    """Whether this build of torch, or a package beside it, has a backend."""
    if backend == "ccl":  # the bindings of before torch had its own
        for package in ("oneccl_bindings_for_pytorch", "torch_ccl"):
            if importlib.util.find_spec(package) is not None:
                importlib.import_module(package)
                return True
        return False
    return bool(getattr(dist, f"is_{backend}_available", bool)())


@dataclass(frozen=True)
class Said:
    """What a rank says of itself before all choose: its host, device, the backends that it has, its cores."""

    host: str
    kind: str
    device: str
    backends: tuple[str, ...]
    #: Those that it may run on, and those of them that are near its device.
    cores: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    #: Where it answers probes, as `liveness.Address` reads it.
    address: tuple[str | int, ...] = ()


def choose_backend(said: Sequence[Said], forced: str | None = None) -> tuple[str, str]:
    """The backend of all ranks, and why it is not the best of their devices; ValueError where they cannot have one.

    >>> ranks = [Said("a", "cuda", "GPU-1", ("nccl", "gloo")), Said("a", "cuda", "GPU-2", ("nccl", "gloo"))]
    >>> choose_backend(ranks)
    ('cpu:gloo,cuda:nccl', '')
    >>> choose_backend([ranks[0], ranks[0]])[0]
    'gloo'
    """
    if forced:
        for part in forced.split(","):
            backend = part.rpartition(":")[2]
            lacking = [rank for rank, one in enumerate(said) if backend not in one.backends]
            if lacking:
                raise ValueError(
                    f"backend={forced!r}: rank {_list(lacking)} has no {backend}; it has {_names(said[lacking[0]])}"
                )
        return forced, ""
    kinds = sorted({one.kind for one in said})
    if len(kinds) > 1:
        of = {kind: [n for n, one in enumerate(said) if one.kind == kind] for kind in kinds}
        each = "; ".join(f"{kind}: rank {_list(ranks)}" for kind, ranks in of.items())
        raise ValueError(
            f"ranks compute on different kinds of devices ({each}). Show all of them the same kind, or none: a device "
            "may be hidden by CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or ZE_AFFINITY_MASK"
        )
    kind = kinds[0]
    if kind == CPU:
        return GLOO, ""
    shared = len({(one.host, one.device) for one in said}) < len(said)
    wanted = BACKENDS[kind]
    if shared:
        return GLOO, f"ranks share a device, which {wanted[0]} refuses; tensors move by its memory, or through the host"
    for backend in wanted:
        if all(backend in one.backends for one in said):
            reason = "" if backend == wanted[0] else f"{wanted[0]} is not in this build of torch"
            return (f"{CPU}:{GLOO},{kind}:{backend}" if backend != "ccl" else backend), reason
    return GLOO, f"{' and '.join(wanted)} are missing on some rank; tensors move through the host"


def _names(one: Said) -> str:
    return ", ".join(one.backends) or "none"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def peak_memory(device: torch.device | str) -> int:
    """The most bytes that this process has held: tensors on a device; on a CPU, all of the process.

    >>> peak_memory("cpu") > 2**20
    True
    """
    device = torch.device(device)
    if device.type != CPU:
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
