"""The ranks of a job as a mesh of four named axes, and the groups of them that share something.

Ranks of `dp` and `fsdp` have other samples; over those of `fsdp` weights are spread. `cp` has other tokens of the same
samples, `tp` other heads and hidden units of the same tokens. A weight's gradient is a sum over all axes but `tp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as _distributed
from torch.distributed.device_mesh import DeviceMesh

from meshflash.job import init
from meshflash.runtime.devices import BACKENDS, GLOO, kind_here

dist: Any = _distributed  # torch does not declare all that it exports here

AXES = ("dp", "fsdp", "cp", "tp")
#: Axes with other samples.
DATA = ("dp", "fsdp")
#: Axes whose ranks add their gradients.
SUMMED = ("dp", "fsdp", "cp")


def init_mesh(
    dp: int = -1, fsdp: int = 1, cp: int = 1, tp: int = 1, order: str = "cp-tp-dp", device: str | None = None
) -> DeviceMesh:
    """A DeviceMesh with the axes dp, fsdp, cp and tp over all ranks; starts the job where nobody did.

    Args:
        dp: ranks with other samples that keep all weights; -1 takes what the others leave.
        fsdp: ranks with other samples that each keep a part of the weights.
        cp: ranks that share a sequence.
        tp: ranks that share heads and hidden units.
        order: which ranks are neighbours, the fastest axis first: "cp-tp-dp" puts the ranks of a sequence side by
            side. fsdp is beside dp where it is not named.
        device: the kind of device; by default the one that this machine has.

    >>> init_mesh().mesh_dim_names
    ('dp', 'fsdp', 'cp', 'tp')
    >>> from meshflash import shutdown
    >>> shutdown()  # the job that init_mesh started
    """
    world = _start()
    sizes = {"dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp}
    for name, size in sizes.items():
        if size < 1 and (name, size) != ("dp", -1):
            raise ValueError(f"init_mesh: {name}={size}; expected at least 1" + (", or -1" if name == "dp" else ""))
    if dp == -1:
        sizes["dp"] = max(1, world // (fsdp * cp * tp))
    if math.prod(sizes.values()) != world:
        asked = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"init_mesh: {asked} is {math.prod(sizes.values())} ranks, and the job has {world}")
    slowest_first = _order(order)[::-1]
    ranks = torch.arange(world, device="cpu").reshape([sizes[name] for name in slowest_first])
    ranks = ranks.permute([slowest_first.index(name) for name in AXES])
    return DeviceMesh(device or kind_here(), ranks, mesh_dim_names=AXES)


def fold(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The same ranks with neighbouring axes joined: `fold(mesh, "dp", "fsdp-cp", "tp")`. Made once for a mesh.

    An axis "one" has one rank. What lays weights on ranks takes one such mesh for sums, shards and tensor parallelism:
    torch composes those of one mesh only. All ranks call it.
    """
    check_mesh(mesh)
    if [name for part in axes if part != "one" for name in part.split("-")] != list(AXES):
        raise ValueError(f"fold: expected the axes {', '.join(AXES)} in this order; got {', '.join(axes)}")
    made = vars(mesh).setdefault("_meshflash_folded", {})
    if axes not in made:
        shape = [1 if part == "one" else size(mesh, part.split("-")) for part in axes]
        made[axes] = DeviceMesh(mesh.device_type, mesh.mesh.reshape(shape), mesh_dim_names=axes)
    found: DeviceMesh = made[axes]
    return found


def summed(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that add their gradients: those with other samples or other tokens."""
    return fold(mesh, "-".join(SUMMED), "tp")["-".join(SUMMED)]


def size(mesh: DeviceMesh, names: str | Sequence[str]) -> int:
    """How many ranks the named axes have together."""
    names = (names,) if isinstance(names, str) else tuple(names)
    check_mesh(mesh)
    return math.prod(int(mesh.size(AXES.index(name))) for name in names)


def place(mesh: DeviceMesh, names: Sequence[str]) -> int:
    """This rank's number among the ranks that differ in the named axes; the last one runs fastest."""
    check_mesh(mesh)
    found = 0
    for name in names:
        found = found * size(mesh, name) + int(mesh.get_local_rank(name))
    return found


def check_mesh(mesh: Any) -> None:
    """ValueError unless it is a mesh of `init_mesh`."""
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names != AXES:
        given = getattr(mesh, "mesh_dim_names", None) or type(mesh).__name__
        raise ValueError(f"mesh: expected one of init_mesh, with the axes {', '.join(AXES)}; got {given}")


def _start() -> int:
    """How many ranks the job has; one alone gets a process group too, for torch's own parts ask for one."""
    if not dist.is_initialized():
        init()
    if not dist.is_initialized():
        kind = kind_here()
        backends = [f"cpu:{GLOO},{kind}:{name}" for name in BACKENDS.get(kind, ()) if dist.is_backend_available(name)]
        dist.init_process_group((*backends, GLOO)[0], store=dist.HashStore(), rank=0, world_size=1)
    return int(dist.get_world_size())


def _order(text: str) -> list[str]:
    """All axes, the fastest first.

    >>> _order("cp-tp-dp")
    ['cp', 'tp', 'fsdp', 'dp']
    """
    names = text.split("-")
    if len(set(names)) != len(names) or not {"dp", "cp", "tp"} <= set(names) <= set(AXES):
        raise ValueError(f'order={text!r}: expected the axes dp, cp and tp, the fastest first, as in "cp-tp-dp"')
    if "fsdp" not in names:
        names.insert(names.index("dp"), "fsdp")
    return names
