"""Styles for torch's `parallelize_module` that turn the `nn.Linear` of a model into the layers of `linear.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshflash.parallel.linear import ColumnParallelLinear, LinearOptions, ParallelLinear, RowParallelLinear
from meshflash.parallel.tensor_ranks import TensorRanks


class _LinearStyle(ParallelStyle):
    """Base of both styles. Without `ranks` the collectives go over the mesh's process group."""

    kind: type[ParallelLinear]

    def __init__(self, options: LinearOptions, ranks: TensorRanks | None) -> None:
        super().__init__()
        self.options, self.ranks = options, ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            raise ValueError(f"{type(self).__name__}: expected an nn.Linear to divide; got {type(module).__name__}")
        ranks, layer = self.ranks or _ranks_of(device_mesh), cast(Any, module)
        ranks.check_same(device_mesh)  # before the module is changed
        layer.__class__ = self.kind
        layer.shard_weights(ranks, device_mesh, self.options, self.src_data_rank)
        return module


class ColumnParallel(_LinearStyle):
    """Turn an `nn.Linear` into a `ColumnParallelLinear` with the same weights.

    Args:
        gather_output: Whether each rank returns the features of all ranks.
        sequence_parallel: Whether the input holds only this rank's tokens, in the dim before the last. The output then
            holds the tokens of all ranks.
        uneven: Whether ranks may hold different numbers of tokens; they exchange the numbers in each call.
        ranks: The ranks of the layer. None uses the process group of the mesh that `parallelize_module` gets.
    """

    kind = ColumnParallelLinear

    def __init__(
        self,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        uneven: bool = False,
        ranks: TensorRanks | None = None,
    ) -> None:
        super().__init__(LinearOptions(gather_output, sequence_parallel, uneven), ranks)


class RowParallel(_LinearStyle):
    """Turn an `nn.Linear` into a `RowParallelLinear` with the same weights.

    Args:
        sequence_parallel: Whether the output holds only this rank's tokens (reduce-scatter instead of all-reduce), in
            the dim before the last.
        uneven: Whether the number of ranks need not divide the number of tokens; the first ranks get one more.
        ranks: The ranks of the layer. None uses the process group of the mesh that `parallelize_module` gets.
    """

    kind = RowParallelLinear

    def __init__(
        self, *, sequence_parallel: bool = False, uneven: bool = False, ranks: TensorRanks | None = None
    ) -> None:
        super().__init__(LinearOptions(sequence_parallel=sequence_parallel, uneven=uneven), ranks)


def replace_linear_styles(plan: Mapping[str, ParallelStyle], ranks: TensorRanks) -> dict[str, ParallelStyle]:
    """Return a plan with torch's column- and row-wise styles replaced by the equivalent styles of this module.

    Styles with other layouts than the defaults stay as they are.

    Args:
        plan: The model's plan for `parallelize_module`.
        ranks: The tensor-parallel ranks of the new layers.
    """
    return {name: _replace_style(style, ranks) for name, style in plan.items()}


def _replace_style(style: ParallelStyle, ranks: TensorRanks) -> ParallelStyle:
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return style
    torch_style: Any = style
    (source,), (target,) = torch_style.input_layouts, torch_style.output_layouts
    if not torch_style.use_local_output:
        return style
    if type(style) is RowwiseParallel:
        return RowParallel(ranks=ranks) if source == Shard(-1) and target == Replicate() else style
    if source != Replicate() or target not in (Shard(-1), Replicate()):
        return style
    return ColumnParallel(gather_output=target == Replicate(), ranks=ranks)


def _ranks_of(mesh: DeviceMesh) -> TensorRanks:
    """Return the cached ranks of a mesh: layers of the same sizes then share their GEMMs."""
    cached = vars(mesh)
    if "_meshflash_tensor_ranks" not in cached:
        cached["_meshflash_tensor_ranks"] = TensorRanks(mesh)
    return cached["_meshflash_tensor_ranks"]
