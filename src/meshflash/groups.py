"""Which process group a `mesh` argument means, and which rank of it this is."""

from __future__ import annotations

from typing import Any

from torch import distributed as _distributed

dist: Any = _distributed  # torch does not declare all that it exports here


def group_of(mesh: Any) -> tuple[str, int, int]:
    """(name, rank, world) of a process group, of a DeviceMesh of one dimension, or of the default group.

    >>> group_of(None)
    ('', 0, 1)
    """
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        return "", 0, 1
    group = mesh
    if mesh is None:
        group = dist.group.WORLD
    elif isinstance(mesh, dist.DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ()
            example = f'mesh["{names[0]}"]' if names else 'init_device_mesh(..., mesh_dim_names=("cp",))["cp"]'
            raise ValueError(
                f"mesh: it has {mesh.ndim} dimensions, and a sequence is spread over one; pass a sub-mesh: {example}"
            )
        group = mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"mesh: expected a process group that this rank is in, or a DeviceMesh, or None; got {type(mesh).__name__}"
        )
    return group.group_name, dist.get_rank(group), dist.get_world_size(group)
