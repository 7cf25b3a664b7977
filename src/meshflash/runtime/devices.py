"""Select the device of a rank, and the backend by which devices of its kind communicate. No other module does so."""

from __future__ import annotations

import importlib
import importlib.util
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

#: Kinds of accelerators, in the order in which they are tried, and their communication backends, best first.
BACKENDS: dict[str, tuple[str, ...]] = {"cuda": ("nccl",), "xpu": ("xccl", "ccl")}
CPU = "cpu"
#: torch's name for the GPUs that Triton compiles for, NVIDIA's and AMD's alike.
TRITON = "cuda"
#: The backend for tensors on CPUs, and for tensors of devices that are staged through the host.
GLOO = "gloo"


def kind_here() -> str:
    """Return the kind of the devices that ranks of this machine compute on."""
    return next((kind for kind in BACKENDS if count(kind)), CPU)


def count(kind: str) -> int:
    """Return how many devices of a kind this process sees.

    Args:
        kind: A device type of torch, such as "cuda".
    """
    module = getattr(torch, kind, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def device_of(local_rank: int, kind: str | None = None) -> torch.device:
    """Return the device of a local rank; more ranks than devices share them.

    Args:
        local_rank: The rank among those of this host.
        kind: A device type of torch; by default the kind of this machine.

    >>> device_of(3, "cpu")
    device(type='cpu')
    """
    kind = kind or kind_here()
    if kind == CPU:
        return torch.device(CPU)
    return torch.device(kind, local_rank % max(1, count(kind)))


def current(kind: str | None = None) -> torch.device:
    """Return the current device, which the process has chosen by itself.

    Args:
        kind: A device type of torch; by default the kind of this machine.

    >>> current("cpu")
    device(type='cpu')
    """
    kind = kind or kind_here()
    return torch.device(CPU) if kind == CPU else torch.device(kind, getattr(torch, kind).current_device())


def take_device(kind: str, local_rank: int) -> torch.device:
    """Make the device of a local rank the current one, and return it.

    Args:
        kind: A device type of torch.
        local_rank: The rank among those of this host.

    >>> take_device("cpu", 3)
    device(type='cpu')
    """
    device = device_of(local_rank, kind)
    if device.type != CPU:
        torch.get_device_module(device).set_device(device)
    return device


def name_of(device: torch.device) -> str:
    """Return a name that is unique on the host: processes may number the same device differently.

    Args:
        device: A device of this process; a CPU has the empty name.
    """
    if device.type == CPU:
        return ""
    found = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(found, "uuid", "") or device)


def symmetric_memory(kind: str) -> bool:
    """Return whether this build of torch lets ranks read each other's memory on devices of a kind.

    Args:
        kind: A device type of torch.
    """
    found = importlib.util.find_spec("torch.distributed._symmetric_memory")
    return kind == "cuda" and found is not None


def pci_of(device: torch.device) -> str:
    """Return the PCI address of a device; empty if torch does not know it.

    Args:
        device: A device of this process.
    """
    if device.type == CPU:
        return ""
    found = torch.get_device_module(device).get_device_properties(device)
    numbers = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    known = [number for number in numbers if number is not None]
    return "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == 3 else ""


def available(backend: str) -> bool:
    """Return whether this build of torch, or a package beside it, has a communication backend.

    Args:
        backend: The name of the backend, such as "nccl".
    """
    if backend == "ccl":  # Intel's bindings from before torch had xccl
        for package in ("oneccl_bindings_for_pytorch", "torch_ccl"):
            if importlib.util.find_spec(package) is not None:
                importlib.import_module(package)
                return True
        return False
    return bool(getattr(dist, f"is_{backend}_available", bool)())


@dataclass(frozen=True)
class RankInfo:
    """The device, host and backends of one rank. `init` exchanges it, then ranks choose backend and cores."""

    #: The host, as `host_name` returns it.
    host: str
    #: The device type of torch, and the name of the device that is unique on the host.
    kind: str
    device: str
    #: The communication backends that this rank has.
    backends: tuple[str, ...]
    #: The CPU cores that the rank may run on, and the cores of its device's NUMA node.
    cores: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    #: Where the rank answers probes, as `liveness.Address` reads it.
    address: tuple[str | int, ...] = ()


def choose_backend(infos: Sequence[RankInfo], forced: str | None = None) -> tuple[str, str]:
    """Return the backend of all ranks, and why it is not the best one for their devices; ValueError if there is none.

    Args:
        infos: What all ranks know of themselves, by rank.
        forced: The backend that the user asks for, such as "gloo" or "cpu:gloo,cuda:nccl".

    >>> ranks = [RankInfo("a", "cuda", "GPU-1", ("nccl", "gloo")), RankInfo("a", "cuda", "GPU-2", ("nccl", "gloo"))]
    >>> choose_backend(ranks)
    ('cpu:gloo,cuda:nccl', '')
    >>> choose_backend([ranks[0], ranks[0]])[0]
    'gloo'
    """
    if forced:
        for part in forced.split(","):
            backend = part.rpartition(":")[2]
            lacking = [rank for rank, one in enumerate(infos) if backend not in one.backends]
            if lacking:
                raise ValueError(
                    f"backend={forced!r}: rank {_list(lacking)} has no {backend}; it has "
                    f"{', '.join(infos[lacking[0]].backends) or 'none'}"
                )
        return forced, ""
    kinds = sorted({one.kind for one in infos})
    if len(kinds) > 1:
        of = {kind: [n for n, one in enumerate(infos) if one.kind == kind] for kind in kinds}
        each = "; ".join(f"{kind}: rank {_list(ranks)}" for kind, ranks in of.items())
        raise ValueError(
            f"ranks compute on different kinds of devices ({each}). Show all of them the same kind, or none: a device "
            "may be hidden by CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or ZE_AFFINITY_MASK"
        )
    kind = kinds[0]
    if kind == CPU:
        return GLOO, ""
    shared = len({(one.host, one.device) for one in infos}) < len(infos)
    wanted = BACKENDS[kind]
    if shared:
        return GLOO, f"ranks share a device, which {wanted[0]} refuses; tensors move by its memory, or through the host"
    for backend in wanted:
        if all(backend in one.backends for one in infos):
            reason = "" if backend == wanted[0] else f"{wanted[0]} is not in this build of torch"
            return (f"{CPU}:{GLOO},{kind}:{backend}" if backend != "ccl" else backend), reason
    missing = f"{' and '.join(wanted)} {'is' if len(wanted) == 1 else 'are'} missing"
    return GLOO, f"{missing} on some rank; tensors move through the host"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def peak_memory(device: torch.device | str) -> int:
    """Return the most bytes that this process has held: in tensors on a device, or in all on a CPU.

    Args:
        device: A device of this process.

    >>> peak_memory("cpu") > 2**20
    True
    """
    device = torch.device(device)
    if device.type != CPU:
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
