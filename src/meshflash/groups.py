"""Which process group a `mesh` argument means, and which rank of it this is."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import distributed as _distributed

from meshflash.runtime.launchers import LaunchError, detect

dist: Any = _distributed  # torch does not declare all that it exports here


def group_of(mesh: Any) -> tuple[str, int, int]:
    """Return (name, rank, world) of a process group, of all ranks of a DeviceMesh, or of the default group.

    Without a process group this process is a world of one, unless a launcher started it as one rank of several:
    then LaunchError, because attending to the local shard alone would be silently wrong.

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
            return _table(mesh)
        group = mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"mesh: expected a process group that this rank is in, or a DeviceMesh, or None; got {type(mesh).__name__}"
        )
    return group.group_name, dist.get_rank(group), dist.get_world_size(group)


def inner_of(mesh: Any) -> int:
    """How many ranks the inner axis of a DeviceMesh of two dimensions has; 0 where there is one axis."""
    return int(mesh.size(1)) if dist.is_available() and isinstance(mesh, dist.DeviceMesh) and mesh.ndim == 2 else 0


def _refuse_uninitialized() -> None:
    """Raise LaunchError where a launcher started several ranks and nobody made a process group of them.

    The environment is read once, on the first call; a compiler evaluates this while it traces.
    """
    global _started_alone
    if _started_alone:
        return
    place = detect()
    if place.world_size > 1:
        raise LaunchError(
            f"no process group: {place.launcher} started this process as rank {place.rank} of {place.world_size}, and "
            "without a process group it would attend to its own shard alone. Call meshflash.init() first (or "
            "torch.distributed.init_process_group); flash_attention attends on one device"
        )
    _started_alone = True


#: Whether the environment was read and says that this process is the only rank.
_started_alone = False


class SharesGroup:
    """A module whose deep copies work over the same ranks: process groups cannot be copied, nor be made by one rank.

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
    """ValueError unless this rank is in a DeviceMesh of one or two dimensions."""
    if mesh.get_coordinate() is None:
        raise ValueError("mesh: this rank is not in it; only its ranks may call")
    if mesh.ndim > 2:
        names = mesh.mesh_dim_names or ()
        example = f'mesh["{names[0]}"]' if names else 'init_device_mesh(..., mesh_dim_names=("cp",))["cp"]'
        raise ValueError(
            f"mesh: it has {mesh.ndim} dimensions, and a sequence is spread over one or two; pass a sub-mesh: {example}"
        )


def _table(mesh: Any) -> tuple[str, int, int]:
    """(name, rank, world) of the ranks of a DeviceMesh of two dimensions, the last one running fastest.

    It is the same in every call; a compiler asks once.
    """
    ranks, group = mesh.mesh.flatten().tolist(), dist.group.WORLD
    if ranks != list(range(dist.get_world_size())):
        if not mesh.mesh_dim_names:
            raise ValueError("mesh: name the dimensions of a DeviceMesh of two, with mesh_dim_names")
        group = mesh._flatten().get_group()
        if ranks != dist.get_process_group_ranks(group):
            raise ValueError("mesh: the ranks of a DeviceMesh of two dimensions must ascend, row by row")
    return str(group.group_name), int(dist.get_rank(group)), len(ranks)


# what torch.compiler.assume_constant_result says of it, without its import of the whole compiler
_table._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_uninitialized._dynamo_marked_constant = True  # type: ignore[attr-defined]
