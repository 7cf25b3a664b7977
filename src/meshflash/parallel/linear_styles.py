"""Styles for torch's `parallelize_module` that turn an `nn.Linear` of a model into a parallel layer of `linear.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshflash.parallel.linear import ColumnParallelLinear, Form, ParallelLinear, RowParallelLinear
from meshflash.parallel.tensor_ranks import TensorRanks


class _LinearStyle(ParallelStyle):
    """What both styles do. Without `ranks` the mesh's process group carries messages."""

    kind: type[ParallelLinear]

    def __init__(self, form: Form, ranks: TensorRanks | None) -> None:
        super().__init__()
        self.form, self.ranks = form, ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            raise ValueError(f"{type(self).__name__}: expected an nn.Linear to divide; got {type(module).__name__}")
        ranks, layer = self.ranks or _ranks_of(device_mesh), cast(Any, module)
        ranks.check_same(device_mesh)  # before the module is changed
        layer.__class__ = self.kind
        layer.divide(ranks, device_mesh, self.form, self.src_data_rank)
        return module


class ColumnParallel(_LinearStyle):
    """An `nn.Linear` becomes a `ColumnParallelLinear`, whose arguments these are, and keeps its weights."""

    kind = ColumnParallelLinear

    def __init__(
        self,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        uneven: bool = False,
        ranks: TensorRanks | None = None,
    ) -> None:
        super().__init__(Form(gather_output, sequence_parallel, uneven), ranks)


class RowParallel(_LinearStyle):
    """An `nn.Linear` becomes a `RowParallelLinear`, whose arguments these are, and keeps its weights."""

    kind = RowParallelLinear

    def __init__(
        self, *, sequence_parallel: bool = False, uneven: bool = False, ranks: TensorRanks | None = None
    ) -> None:
        super().__init__(Form(sequence_parallel=sequence_parallel, uneven=uneven), ranks)


def own_styles(plan: Mapping[str, ParallelStyle], ranks: TensorRanks) -> dict[str, ParallelStyle]:
    """A plan with styles of this module for those of torch that say the same; what says anything else stays."""
    return {name: _own_style(style, ranks) for name, style in plan.items()}


def _own_style(style: ParallelStyle, ranks: TensorRanks) -> ParallelStyle:
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return style
    told: Any = style
    (given,), (gives,) = told.input_layouts, told.output_layouts
    if not told.use_local_output:
        return style
    if type(style) is RowwiseParallel:
        return RowParallel(ranks=ranks) if given == Shard(-1) and gives == Replicate() else style
    if given != Replicate() or gives not in (Shard(-1), Replicate()):
        return style
    return ColumnParallel(gather_output=gives == Replicate(), ranks=ranks)


def _ranks_of(mesh: DeviceMesh) -> TensorRanks:
    """The ranks of a mesh, the same for all its layers: those of the same sizes share their products."""
    kept = vars(mesh)
    if "_meshflash_tensor_ranks" not in kept:
        kept["_meshflash_tensor_ranks"] = TensorRanks(mesh)
    found: TensorRanks = kept["_meshflash_tensor_ranks"]
    return found
