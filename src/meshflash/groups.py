"""Resolve a `mesh` argument to a process group, and this rank in it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import distributed as dist

from meshflash.runtime.launchers import LaunchError, detect
from meshflash.runtime.state import state


def group_of(mesh: Any) -> tuple[str, int, int]:
    """Return (name, rank, world size) of a process group, of all ranks of a DeviceMesh, or of the default group.

    A process without a process group is a world of one. If a launcher started it as one rank of several, LaunchError:
    attention over the local shard alone would be silently wrong.

    Args:
        mesh: A process group, a DeviceMesh of one or two dimensions, or None for the default group.

    >>> group_of(None)
    ('', 0, 1)
    """
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        _refuse_uninitialized()
        return "", 0, 1
    group = mesh
    if mesh is None:
        group = dist.group.WORLD
    elif isinstance(mesh, dist.DeviceMesh):
        _check_mesh(mesh)
        if mesh.ndim == 2:
            return _flatten_mesh(mesh)
        group = mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"mesh: expected a process group that this rank is in, or a DeviceMesh, or None; got {type(mesh).__name__}"
        )
    return group.group_name, dist.get_rank(group), dist.get_world_size(group)


def inner_of(mesh: Any) -> int:
    """Return the size of the inner axis of a two-dimensional DeviceMesh; 0 for anything else.

    Args:
        mesh: The `mesh` argument of a call.
    """
    return int(mesh.size(1)) if dist.is_available() and isinstance(mesh, dist.DeviceMesh) and mesh.ndim == 2 else 0


def _refuse_uninitialized() -> None:
    """Raise LaunchError if a launcher started several ranks and no process group joins them.

    The environment is read on the first call after `shutdown`; torch.compile evaluates this while it traces.
    """
    if state.find("started alone"):
        return
    place = detect()
    if place.world_size > 1:
        raise LaunchError(
            f"no process group: {place.launcher} started this process as rank {place.rank} of {place.world_size}, and "
            "without a process group it would attend to its own shard alone. Call meshflash.init() first (or "
            "torch.distributed.init_process_group); flash_attention attends on one device"
        )
    state.put(True, "started alone")


class SharesGroup:
    """A base class of modules whose deep copies share the process group: a group can neither be copied nor made alone.

    `_shared` names the attributes that hold a process group or a DeviceMesh.
    """

    _shared: tuple[str, ...] = ("mesh",)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for name in self._shared:
            memo[id(getattr(self, name))] = getattr(self, name)
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


def _check_mesh(mesh: Any) -> None:
    """Raise ValueError unless this rank is in the DeviceMesh, and the mesh has one or two dimensions."""
    if mesh.get_coordinate() is None:
        raise ValueError("mesh: this rank is not in it; only its ranks may call")
    if mesh.ndim > 2:
        names = mesh.mesh_dim_names or ()
        example = f'mesh["{names[0]}"]' if names else 'init_device_mesh(..., mesh_dim_names=("cp",))["cp"]'
        raise ValueError(
            f"mesh: it has {mesh.ndim} dimensions, and a sequence is spread over one or two; pass a sub-mesh: {example}"
        )


def _flatten_mesh(mesh: Any) -> tuple[str, int, int]:
    """Return (name, rank, world size) of all ranks of a two-dimensional DeviceMesh, in row-major order.

    The result is the same in every call, so torch.compile evaluates it once.
    """
    ranks = mesh.mesh.flatten().tolist()
    group: Any = dist.group.WORLD
    if ranks != list(range(dist.get_world_size())):
        if not mesh.mesh_dim_names:
            raise ValueError("mesh: name the dimensions of a DeviceMesh of two, with mesh_dim_names")
        group = mesh._flatten().get_group()
        if ranks != dist.get_process_group_ranks(group):
            raise ValueError("mesh: the ranks of a DeviceMesh of two dimensions must ascend, row by row")
    return str(group.group_name), int(dist.get_rank(group)), len(ranks)


# The effect of torch.compiler.assume_constant_result, without its import of the whole compiler.
_flatten_mesh._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_uninitialized._dynamo_marked_constant = True  # type: ignore[attr-defined]
