"""Context parallelism: attention modules over the ranks that share a sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from meshflash.api import attention, flash_attention
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.groups import SharesGroup

#: Options that only `attention` over several ranks takes; a call on a single device drops them.
_MESH_ONLY = ("reduce_dtype", "transport", "verify", "return_plan", "k_layout")


class MeshAttention(SharesGroup, nn.Module):
    """`meshflash.attention` as a module without weights that holds the options shared by all calls.

    Without a mesh (from `mesh=` or `ContextParallel`) it attends on this device alone, whatever process groups exist.
    A deep copy works over the same ranks.

    Args:
        mesh: The ranks that share a sequence: a 1D mesh, or a 2D mesh for hybrid schedules.
        mask: The default mask.
        schedule: The schedule of attention over the mesh.
        options: Further options of `meshflash.attention`: `scale`, `softcap`, `dropout`, `kernel`, `deterministic`, ...

    >>> import torch
    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> MeshAttention(mask=Mask.causal())(q, k, v).shape
    torch.Size([1, 5, 2, 8])
    """

    def __init__(self, *, mesh: Any = None, mask: Mask | None = None, schedule: str = "auto", **options: Any) -> None:
        super().__init__()
        self.mesh, self.mask, self.schedule, self.options = mesh, mask, schedule, options

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, layout: Layout | None = None, **options: Any
    ) -> Any:
        """Return the attention output of this rank's tokens.

        Args:
            q: The queries of this rank, `[batch, tokens, heads, dim]`.
            k: The keys of this rank, `[batch, tokens, kv heads, dim]`.
            v: The values of this rank, `[batch, tokens, kv heads, dim]`.
            mask: The mask of this call; it replaces the module's own.
            layout: Which tokens of the sequence each rank holds.
            options: Options of this call; they override the module's own.
        """
        given = self.options | options | {"mask": self.mask if mask is None else mask}
        if self.mesh is not None:
            return attention(q, k, v, mesh=self.mesh, layout=layout, schedule=self.schedule, **given)
        if layout is not None and layout.ranges != Layout.contiguous(layout.tokens, 1).ranges:
            raise ValueError(
                f"MeshAttention: the layout is for {layout.world} ranks, and this module has no mesh; give it one by "
                "mesh=, by ContextParallel, or by meshflash.parallel.parallelize"
                if layout.world > 1
                else "MeshAttention: on a single device tokens must be in order; pass the tokens in order, or no layout"
            )
        return flash_attention(q, k, v, **{name: value for name, value in given.items() if name not in _MESH_ONLY})

    def extra_repr(self) -> str:
        """Return the options of the module, for its repr."""
        ranks = 1 if self.mesh is None else self.mesh.size()
        return f"ranks={ranks}, schedule={self.schedule!r}, mask={self.mask!r}"


class ContextParallel(ParallelStyle):
    """A style for torch's `parallelize_module` that gives every `MeshAttention` of a module the mesh.

    Call the module with this rank's tokens, and with the `layout` that says which tokens these are.

    Args:
        schedule: The schedule for all attention modules; by default each module keeps its own.
    """

    def __init__(self, schedule: str | None = None) -> None:
        super().__init__()
        self.schedule = schedule

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        found = [part for part in module.modules() if isinstance(part, MeshAttention)]
        if not found:
            raise ValueError(
                f"ContextParallel: {type(module).__name__} has no meshflash.parallel.MeshAttention; call it where the "
                "model calls scaled_dot_product_attention"
            )
        for part in found:
            part.mesh = device_mesh
            part.schedule = self.schedule or part.schedule
        return module
