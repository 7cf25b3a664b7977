"""Context parallelism: attention modules that work over the ranks that share a sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from meshflash.api import attention, flash_attention
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.groups import SharesGroup

#: What only a call over ranks takes.
_OVER_RANKS = ("reduce_dtype", "transport", "verify", "return_plan", "k_layout")


class MeshAttention(SharesGroup, nn.Module):
    """`meshflash.attention` as a module: what is the same in every call is said once. It has no weights.

    Until `mesh=` or `ContextParallel` gives it ranks that share a sequence, it attends on this device alone, whatever
    process groups there are. A deep copy works over the same ranks.

    >>> import torch
    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> MeshAttention(mask=Mask.causal())(q, k, v).shape
    torch.Size([1, 5, 2, 8])
    """

    def __init__(self, *, mesh: Any = None, mask: Mask | None = None, schedule: str = "auto", **options: Any) -> None:
        """Options are those of `meshflash.attention`: `scale`, `softcap`, `dropout`, `kernel`, `deterministic`, ..."""
        super().__init__()
        self.mesh, self.mask, self.schedule, self.options = mesh, mask, schedule, options

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, layout: Layout | None = None, **options: Any
    ) -> Any:
        """Attention of this rank's tokens; a mask of the call goes before the module's own."""
        given = self.options | options | {"mask": self.mask if mask is None else mask}
        if self.mesh is not None:
            return attention(q, k, v, mesh=self.mesh, layout=layout, schedule=self.schedule, **given)
        if layout is not None and layout.ranges != Layout.contiguous(layout.tokens, 1).ranges:
            raise ValueError(
                f"MeshAttention: the layout is for {layout.world} ranks, and this module has no mesh; give it one by "
                "mesh=, by ContextParallel, or by meshflash.parallel.parallelize"
                if layout.world > 1
                else "MeshAttention: on one rank tokens are in order; the layout has them in another"
            )
        return flash_attention(q, k, v, **{name: value for name, value in given.items() if name not in _OVER_RANKS})

    def extra_repr(self) -> str:
        ranks = 1 if self.mesh is None else self.mesh.size()
        return f"ranks={ranks}, schedule={self.schedule!r}, mask={self.mask!r}"


class ContextParallel(ParallelStyle):
    """A style for torch's `parallelize_module`: every `MeshAttention` within a module works over the mesh.

    The module is then called with this rank's tokens, and with the `layout` that says which those are. A mesh of two
    dimensions, or `schedule`, says which schedule; by default each module keeps its own.
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
