"""The DeviceMesh of a job: four named axes over all ranks.

Ranks along `dp` and `fsdp` process different samples; `fsdp` also shards the weights. Ranks along `cp` hold different
tokens of the same samples, and ranks along `tp` different heads and hidden units of the same tokens. The gradient of a
weight is summed over all axes but `tp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshflash.job import init
from meshflash.runtime.devices import BACKENDS, GLOO, kind_here

AXES = ("dp", "fsdp", "cp", "tp")
#: Axes along which ranks process different samples.
DATA_AXES = ("dp", "fsdp")
#: Axes over which gradients are reduced.
REDUCE_AXES = ("dp", "fsdp", "cp")


def init_mesh(
    dp: int = -1, fsdp: int = 1, cp: int = 1, tp: int = 1, order: str = "cp-tp-dp", device: str | None = None
) -> DeviceMesh:
    """Return a DeviceMesh with the axes dp, fsdp, cp and tp over all ranks; start the job if nothing has.

    Args:
        dp: The data-parallel size: ranks with different samples and all weights. -1 takes all remaining ranks.
        fsdp: The sharded data-parallel size: ranks with different samples, each with a shard of the weights.
        cp: The context-parallel size: ranks that share a sequence.
        tp: The tensor-parallel size: ranks that share heads and hidden units.
        order: The order of the axes, fastest first. "cp-tp-dp" makes the ranks of a sequence neighbors. fsdp goes
            next to dp unless it is named.
        device: The device type; by default the type that this machine has.

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
        requested = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"init_mesh: {requested} is {math.prod(sizes.values())} ranks, and the job has {world}")
    slowest_first = _order(order)[::-1]
    ranks = torch.arange(world, device="cpu").reshape([sizes[name] for name in slowest_first])
    ranks = ranks.permute([slowest_first.index(name) for name in AXES])
    return DeviceMesh(device or kind_here(), ranks, mesh_dim_names=AXES)


def flatten_axes(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Return the same ranks with adjacent axes flattened, as in `flatten_axes(mesh, "dp", "fsdp-cp", "tp")`.

    Weights need a single mesh for replication, sharding and tensor parallelism, because torch composes placements of
    one mesh only. The result is cached on the mesh. All ranks must call it, since it makes process groups.

    Args:
        mesh: A mesh of `init_mesh`.
        axes: The new axes in order. "a-b" flattens two adjacent axes, and "one" adds an axis of size 1.
    """
    check_mesh(mesh)
    if [name for part in axes if part != "one" for name in part.split("-")] != list(AXES):
        raise ValueError(f"flatten_axes: expected the axes {', '.join(AXES)} in this order; got {', '.join(axes)}")
    made = vars(mesh).setdefault("_meshflash_flattened", {})
    if axes not in made:
        shape = [1 if part == "one" else size(mesh, part.split("-")) for part in axes]
        made[axes] = DeviceMesh(mesh.device_type, mesh.mesh.reshape(shape), mesh_dim_names=axes)
    return made[axes]


def reduce_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1D mesh over which gradients are reduced: all ranks with different samples or tokens."""
    return flatten_axes(mesh, "-".join(REDUCE_AXES), "tp")["-".join(REDUCE_AXES)]


def size(mesh: DeviceMesh, names: str | Sequence[str]) -> int:
    """Return the product of the sizes of the named axes.

    Args:
        mesh: A mesh of `init_mesh`.
        names: The name of an axis, or several.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    check_mesh(mesh)
    return math.prod(int(mesh.size(AXES.index(name))) for name in names)


def mesh_rank(mesh: DeviceMesh, names: Sequence[str]) -> int:
    """Return this rank's index along the named axes, flattened with the last axis fastest.

    Args:
        mesh: A mesh of `init_mesh`.
        names: The names of the axes, slowest first.
    """
    check_mesh(mesh)
    found = 0
    for name in names:
        found = found * size(mesh, name) + int(mesh.get_local_rank(name))
    return found


def check_mesh(mesh: Any) -> None:
    """Raise ValueError unless the mesh is one of `init_mesh`."""
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names != AXES:
        given = getattr(mesh, "mesh_dim_names", None) or type(mesh).__name__
        raise ValueError(f"mesh: expected one of init_mesh, with the axes {', '.join(AXES)}; got {given}")


def _start() -> int:
    """Return the world size. A single process gets a process group too, since torch's parallel modules need one."""
    if not dist.is_initialized():
        init()
    if not dist.is_initialized():
        kind = kind_here()
        backends = [f"cpu:{GLOO},{kind}:{name}" for name in BACKENDS.get(kind, ()) if dist.is_backend_available(name)]
        dist.init_process_group((*backends, GLOO)[0], store=dist.HashStore(), rank=0, world_size=1)
    return int(dist.get_world_size())


def _order(text: str) -> list[str]:
    """Return all four axes of an `order` text, fastest first.

    >>> _order("cp-tp-dp")
    ['cp', 'tp', 'fsdp', 'dp']
    """
    names = text.split("-")
    if len(set(names)) != len(names) or not {"dp", "cp", "tp"} <= set(names) <= set(AXES):
        raise ValueError(f'order={text!r}: expected the axes dp, cp and tp, the fastest first, as in "cp-tp-dp"')
    if "fsdp" not in names:
        names.insert(names.index("dp"), "fsdp")
    return names
