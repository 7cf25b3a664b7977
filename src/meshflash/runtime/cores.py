"""Bind each rank to a share of the CPU cores of its node: cores of the NUMA node that its device is attached to."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

#: The root of /sys; tests put a made-up machine here.
ROOT = Path("/")
#: The variable that turns binding off: 0 leaves the cores as the launcher gave them.
BIND = "MESHFLASH_BIND"


def cores_here() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # macOS and Windows have none
    return tuple(sorted(affinity(0))) if affinity else tuple(range(os.cpu_count() or 1))


def share_of(me: int, all_cores: Sequence[tuple[int, ...]], near: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Return the cores of one local rank.

    A rank whose launcher gave it cores of its own keeps them. Ranks that were given the same cores divide them: those
    of their NUMA node if the system names it, else all of them.

    Args:
        me: This rank among the ranks of its node.
        all_cores: The cores that each rank of the node may run on.
        near: The cores of the NUMA node of each rank's device; empty where the system does not name it.

    >>> share_of(1, [(0, 1, 2, 3)] * 2)
    (2, 3)
    >>> share_of(1, [(0, 1), (2, 3)])
    (2, 3)
    >>> share_of(2, [(0, 1, 2, 3)] * 3, [(0, 1), (0, 1), (2, 3)])
    (2, 3)
    """
    mine = all_cores[me]
    alike = [rank for rank, cores in enumerate(all_cores) if cores == mine]
    if len(alike) == 1:
        return mine
    region = tuple(core for core in mine if core in near[me]) if near else ()
    if region:
        alike = [rank for rank in alike if tuple(near[rank]) == tuple(near[me])]
    region = by_core(region or mine)
    index, num_shares = alike.index(me), len(alike)
    share = region[len(region) * index // num_shares : len(region) * (index + 1) // num_shares]
    return share or (region[index % len(region)],)  # more ranks than cores share them


def by_core(cores: Sequence[int]) -> tuple[int, ...]:
    """Return the cores in an order that puts hyperthreads of one physical core side by side.

    Args:
        cores: Numbers of logical cores.
    """

    def siblings(core: int) -> tuple[int, ...]:
        try:
            path = ROOT / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
            return parsed(path.read_text())
        except (OSError, ValueError):
            return (core,)

    return tuple(sorted(cores, key=lambda core: (min(siblings(core)), core)))


def near_device(pci: str) -> tuple[int, ...]:
    """Return the cores of the NUMA node that a device is attached to; empty if the system does not name it.

    Args:
        pci: The PCI address of the device, such as 0000:17:00.0.
    """
    try:
        node = int((ROOT / "sys/bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return ()
    return _numa_cores(node) if node >= 0 else ()


def near_rank(local_rank: int, local_size: int) -> tuple[int, ...]:
    """Return the cores of the NUMA node of a rank without a device: such ranks are spread evenly over the nodes.

    Args:
        local_rank: This rank among the ranks of its host.
        local_size: The number of ranks of this host; 0 if unknown.
    """
    nodes = sorted(
        int(found[1])
        for path in (ROOT / "sys/devices/system/node").glob("node*")
        if (found := re.fullmatch(r"node(\d+)", path.name))
    )
    if len(nodes) < 2 or local_size < len(nodes):
        return ()
    return _numa_cores(nodes[local_rank * len(nodes) // local_size])


def _numa_cores(node: int) -> tuple[int, ...]:
    try:
        return parsed((ROOT / f"sys/devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return ()


def parsed(text: str) -> tuple[int, ...]:
    """Return the cores of a list as Linux writes it.

    Args:
        text: Numbers and ranges, separated by commas.

    >>> parsed("0-2,8,10-11")
    (0, 1, 2, 8, 10, 11)
    """
    out: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return tuple(out)


def take(cores: Sequence[int]) -> None:
    """Bind this process to cores, and use as many threads in torch unless OMP_NUM_THREADS is set.

    Args:
        cores: Numbers of logical cores.
    """
    import torch

    bind = getattr(os, "sched_setaffinity", None)
    if bind and os.environ.get(BIND, "1") != "0" and set(cores) < set(cores_here()):
        bind(0, set(cores))
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, len(cores)))
