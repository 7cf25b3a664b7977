"""A rank's share of the cores of its node: threads, and the part of the machine that is near its device."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

#: Where the system tells of itself.
ROOT = Path("/")
#: 0 leaves cores as the launcher gave them.
BIND = "MESHFLASH_BIND"


def cores_here() -> tuple[int, ...]:
    """The cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return tuple(sorted(affinity(0))) if affinity else tuple(range(os.cpu_count() or 1))


def share_of(me: int, all_cores: Sequence[tuple[int, ...]], near: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """The cores of one local rank, from what all of them may run on.

    Ranks that a launcher gave cores of their own keep them. Those who have the same share it: within the part of the
    machine that is `near` each, where the system tells, else all of it.

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
    at, ways = alike.index(me), len(alike)
    part = region[len(region) * at // ways : len(region) * (at + 1) // ways]
    return part or (region[at % len(region)],)


def by_core(cores: Sequence[int]) -> tuple[int, ...]:
    """The same, threads of one core beside each other, where the system tells which they are."""

    def siblings(core: int) -> tuple[int, ...]:
        try:
            path = ROOT / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
            return parsed(path.read_text())
        except (OSError, ValueError):
            return (core,)

    return tuple(sorted(cores, key=lambda core: (min(siblings(core)), core)))


def near_device(pci: str) -> tuple[int, ...]:
    """The cores of the part of the machine that a device hangs on; empty where the system does not tell."""
    try:
        node = int((ROOT / "sys/bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return ()
    return _of_node(node) if node >= 0 else ()


def near_rank(local_rank: int, local_size: int) -> tuple[int, ...]:
    """The cores of a part of the machine, where ranks without devices are spread over its parts in turn."""
    nodes = sorted(
        int(found[1])
        for path in (ROOT / "sys/devices/system/node").glob("node*")
        if (found := re.fullmatch(r"node(\d+)", path.name))
    )
    if len(nodes) < 2 or local_size < len(nodes):
        return ()
    return _of_node(nodes[local_rank * len(nodes) // local_size])


def _of_node(node: int) -> tuple[int, ...]:
    try:
        return parsed((ROOT / f"sys/devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return ()


def parsed(text: str) -> tuple[int, ...]:
    """A list of cores as the system writes it.

    >>> parsed("0-2,8,10-11")
    (0, 1, 2, 8, 10, 11)
    """
    out: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return tuple(out)


def take(cores: Sequence[int]) -> None:
    """Run on these cores from now on, with as many threads, unless OMP_NUM_THREADS says how many."""
    import torch

    bind = getattr(os, "sched_setaffinity", None)
    if bind and os.environ.get(BIND, "1") != "0" and set(cores) < set(cores_here()):
        bind(0, set(cores))
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, len(cores)))
