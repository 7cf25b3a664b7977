"""Linear layers whose features lie on several ranks, with gradients: by columns or rows, sequence parallel or not.

Weights are DTensors, cut as torch's own styles cut them: what spreads, saves, counts and draws those takes these too.
Dims before the last one are rows; where tokens lie in parts on the ranks, they are the dim before the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from meshflash.gemm.distributed.tiles import split
from meshflash.parallel.one_step import Step, computed_in, run_step
from meshflash.parallel.tensor_ranks import TensorRanks
from meshflash.runtime.devices import kind_here


@dataclass(frozen=True)
class Form:
    """What a parallel layer does beside its product: see the layers."""

    gather_output: bool = False
    sequence_parallel: bool = False
    uneven: bool = False

    def __post_init__(self) -> None:
        if self.gather_output and self.sequence_parallel:
            raise ValueError("gather_output and sequence_parallel: tokens are gathered, or features; take one")
        if self.uneven and not self.sequence_parallel:
            raise ValueError("uneven=True is for sequence_parallel=True, where tokens lie in parts on the ranks")


class ParallelLinear(nn.Linear):
    """What both kinds of layers are: an `nn.Linear` with a part of its weight on each rank."""

    ranks: TensorRanks
    form: Form
    #: What an input must be, for who gave another.
    takes = ""

    def placements(self) -> Mapping[str, Placement]:
        """How weight and bias are cut."""
        raise NotImplementedError

    def step(self, x: Tensor) -> Step:
        """What is computed for an input."""
        raise NotImplementedError

    @torch.compiler.disable(reason="collectives, and products that are made on first use, are not traced")
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _own(self.weight), _own(self.bias)
        assert weight is not None
        in_parts = self.form.sequence_parallel
        if isinstance(x, DTensor) or x.dim() < 1 + in_parts or x.shape[-1] != weight.shape[1]:
            given = f"{'a DTensor' if isinstance(x, DTensor) else 'a tensor'} of {list(x.shape)}"
            wanted = f"[..., {'tokens, ' if in_parts else ''}{weight.shape[1]}]"
            raise ValueError(f"{type(self).__name__}: expected a plain tensor {wanted}, got {given}; {self.takes}")
        if torch.is_autocast_enabled(x.device.type):
            dtype = computed_in(x)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        # tokens go first where they lie in parts: a rank's rows are then side by side
        first = x.movedim(-2, 0) if in_parts else x
        y = run_step(self.step(x), first.reshape(first.shape[:-1].numel(), x.shape[-1]), weight, bias)
        if not in_parts:
            return y.reshape(*x.shape[:-1], y.shape[-1])
        between = first.shape[1:-1]
        return y.reshape(len(y) // max(1, between.numel()), *between, y.shape[-1]).movedim(0, -2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.ranks.world}, {self.form}"

    def divide(self, ranks: TensorRanks, mesh: DeviceMesh, form: Form, source: int | None = 0) -> None:
        """Cut whole weights over a mesh; those of its first rank are taken, unless `source` is None."""
        ranks.check_same(mesh)
        self.ranks, self.form = ranks, form
        for name, placement in self.placements().items():
            whole = getattr(self, name)
            if whole is not None:
                part = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=source)
                self.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))

    def _divide_new(self, ranks: TensorRanks | Any, form: Form) -> None:
        over = ranks if isinstance(ranks, TensorRanks) else TensorRanks(ranks)
        self.divide(over, over.mesh(kind_here() if self.weight.is_meta else self.weight.device.type), form)


class ColumnParallelLinear(ParallelLinear):
    """`nn.Linear` of which each rank has some output features: from the same input on all ranks to its own features.

    Args:
        in_features: of the whole layer, and of the input.
        out_features: of all ranks together; torch.chunk cuts them, and they need not divide.
        bias: added to the own features.
        ranks: `TensorRanks`, or what they are made of: a mesh of one dimension, or a process group.
        gather_output: give the features of all ranks to all.
        sequence_parallel: the input has this rank's tokens, in the dim before the last, and the output those of all.
        uneven: ranks may have other numbers of tokens than each other; they tell them in each call.
        device: of the weights.
        dtype: of the weights.
    """

    takes = "every rank has all input features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ranks: TensorRanks | Any = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        uneven: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        form = Form(gather_output, sequence_parallel, uneven)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._divide_new(ranks, form)

    def placements(self) -> Mapping[str, Placement]:
        # gathered features get their bias after, from all of it
        return {"weight": Shard(0), "bias": Replicate() if self.form.gather_output else Shard(0)}

    def step(self, x: Tensor) -> Step:
        sizes = None
        if self.form.sequence_parallel:
            tokens, others = x.shape[-2], x.shape[:-2].numel()
            told = self.ranks.numbers(tokens, x.device) if self.form.uneven else (tokens,) * self.ranks.world
            sizes = tuple(n * others for n in told)
        return _Columns(self.ranks, self.out_features, self.form.gather_output, sizes)


class RowParallelLinear(ParallelLinear):
    """`nn.Linear` of which each rank has some input features: from those to the same output on all ranks, or to rows.

    Args:
        in_features: of all ranks together; torch.chunk cuts them, as it cuts the outputs of a `ColumnParallelLinear`.
        out_features: of the whole layer, and of the output.
        bias: added once, to the sum over ranks.
        ranks: `TensorRanks`, or what they are made of: a mesh of one dimension, or a process group.
        sequence_parallel: the output has this rank's tokens only, in the dim before the last.
        uneven: tokens need not divide over ranks; the first ranks get one more.
        device: of the weights.
        dtype: of the weights.
    """

    takes = "a rank has those input features that a ColumnParallelLinear of the same ranks gives it"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ranks: TensorRanks | Any = None,
        sequence_parallel: bool = False,
        uneven: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        form = Form(sequence_parallel=sequence_parallel, uneven=uneven)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._divide_new(ranks, form)

    def placements(self) -> Mapping[str, Placement]:
        return {"weight": Shard(1), "bias": Replicate()}

    def step(self, x: Tensor) -> Step:
        sizes = None
        if self.form.sequence_parallel:
            tokens, others = x.shape[-2], x.shape[:-2].numel()
            if tokens % self.ranks.world and not self.form.uneven:
                raise ValueError(
                    f"RowParallelLinear: {self.ranks.world} ranks do not divide {tokens} tokens; say uneven=True, here "
                    "and in the ColumnParallelLinear that takes them"
                )
            sizes = tuple(n * others for n in split(tokens, self.ranks.world))
        return _Rows(self.ranks, self.in_features, sizes)


@dataclass(frozen=True)
class _Columns(Step):
    """Of a layer by columns: `whole` output features on all ranks, and rows of each rank where these lie in parts."""

    ranks: TensorRanks
    whole: int
    gathers: bool
    sizes: tuple[int, ...] | None

    def place(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight: Any = weights[0]
        columns = self.whole if self.gathers else len(weight)
        return x.new_zeros(()).expand(len(x) if self.sizes is None else sum(self.sizes), columns)

    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight, bias = _pair(weights)
        with torch.autocast(x.device.type, enabled=False):
            if self.gathers:
                parts = _chunks(self.whole, self.ranks.world)
                y = self.ranks.product("all_scatter", x, weight.T, len(x), self.whole, x.shape[1], parts)
                return y if bias is None else y.add_(bias)
            if self.sizes is None:
                return self.ranks.multiply(x, weight.T, bias)
            return self.ranks.gather_product(x, weight.T, self.sizes, self.whole, bias)[0]

    def backward(self, dy: Tensor, wanted: Sequence[bool], x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
        weight, bias = _pair(weights)
        with torch.autocast(x.device.type, enabled=False):
            dbias = _sum_rows(dy).to(bias.dtype) if bias is not None and wanted[2] else None
            if self.gathers:
                dy = dy.split(_chunks(self.whole, self.ranks.world), 1)[self.ranks.rank]
            dx = dweight = None
            if wanted[0]:
                m, n, how = len(dy), x.shape[1], "all_reduce" if self.sizes is None else "gemm_rs"
                dx = self.ranks.product(how, dy, weight, m, n, self.whole, self.sizes)
            if wanted[1]:
                rows = x if self.sizes is None else self.ranks.gather(x, self.sizes)
                dweight = self.ranks.multiply(dy.T, rows)
        return [dx, dweight, dbias]


@dataclass(frozen=True)
class _Rows(Step):
    """Of a layer by rows: `whole` input features on all ranks, and the rows that each rank gets where it gets some."""

    ranks: TensorRanks
    whole: int
    sizes: tuple[int, ...] | None

    def place(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight: Any = weights[0]
        return x.new_zeros(()).expand(len(x) if self.sizes is None else self.sizes[self.ranks.rank], len(weight))

    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight, bias = _pair(weights)
        how = "all_reduce" if self.sizes is None else "gemm_rs"
        with torch.autocast(x.device.type, enabled=False):
            y = self.ranks.product(how, x, weight.T, len(x), len(weight), self.whole, self.sizes)
            return y if bias is None else y.add_(bias)

    def backward(self, dy: Tensor, wanted: Sequence[bool], x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
        weight, bias = _pair(weights)
        dx = dweight = dbias = None
        with torch.autocast(x.device.type, enabled=False):
            if bias is not None and wanted[2]:
                total = _sum_rows(dy)
                dbias = (total if self.sizes is None else self.ranks.add(total)).to(bias.dtype)
            rows: Tensor | None = dy
            if self.sizes is None:
                dx = self.ranks.multiply(dy, weight) if wanted[0] else None
            elif wanted[0]:
                dx, rows = self.ranks.gather_product(dy, weight, self.sizes, self.whole)
            else:
                rows = None
            if wanted[1]:
                if rows is None:
                    assert self.sizes is not None
                    rows = self.ranks.gather(dy, self.sizes)
                dweight = self.ranks.multiply(rows.T, x)
        return [dx, dweight, dbias]


def _pair(weights: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    weight, bias = weights
    assert weight is not None
    return weight, bias


def _sum_rows(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _chunks(total: int, world: int) -> tuple[int, ...]:
    """How DTensor cuts a dim.

    >>> _chunks(10, 4), _chunks(5, 4)
    ((3, 3, 3, 1), (2, 2, 1, 0))
    """
    step = -(-total // world)
    return tuple(min(step, max(0, total - rank * step)) for rank in range(world))


def _own(weight: Tensor | None) -> Tensor | None:
    """This rank's part."""
    if not isinstance(weight, DTensor):
        return weight
    if len(weight.placements) != 1:
        raise ValueError("a weight of a parallel layer is spread over other ranks too; call the module that gathers it")
    return weight.to_local()
