"""Tensor-parallel linear layers with gradients: column parallel or row parallel, with or without sequence parallelism.

Weights are DTensors, sharded as torch's own styles shard them, so FSDP, checkpoints, norms and initialization treat
them alike. All dims of the input but the last are rows; under sequence parallelism tokens are the dim before the last.
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
from meshflash.parallel.autograd_op import AutogradOp, apply_op, compute_dtype
from meshflash.parallel.tensor_ranks import TensorRanks
from meshflash.runtime.devices import kind_here


@dataclass(frozen=True)
class LinearOptions:
    """The collectives of a parallel layer, beside its GEMM; the layers make it and explain each field."""

    gather_output: bool = False
    sequence_parallel: bool = False
    uneven: bool = False

    def __post_init__(self) -> None:
        if self.gather_output and self.sequence_parallel:
            raise ValueError("gather_output and sequence_parallel: tokens are gathered, or features; take one")
        if self.uneven and not self.sequence_parallel:
            raise ValueError("uneven=True is for sequence_parallel=True, where tokens are sharded over the ranks")


class ParallelLinear(nn.Linear):
    """Base of both layers: an `nn.Linear` with a shard of its weight on each rank."""

    ranks: TensorRanks
    options: LinearOptions
    #: The end of the error message for an input of the wrong shape.
    input_hint = ""

    def placements(self) -> Mapping[str, Placement]:
        """Return the DTensor placements of weight and bias."""
        raise NotImplementedError

    def make_op(self, x: Tensor) -> AutogradOp:
        """Return the op that computes the layer for this input.

        Args:
            x: The input of the layer, `[..., features]`.
        """
        raise NotImplementedError

    @torch.compiler.disable(reason="collectives, and GEMMs that are built on first use, are not traced")
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _local_weight(self.weight), _local_weight(self.bias)
        assert weight is not None
        sharded = self.options.sequence_parallel
        if isinstance(x, DTensor) or x.dim() < 1 + sharded or x.shape[-1] != weight.shape[1]:
            given = f"{'a DTensor' if isinstance(x, DTensor) else 'a tensor'} of {list(x.shape)}"
            wanted = f"[..., {'tokens, ' if sharded else ''}{weight.shape[1]}]"
            raise ValueError(f"{type(self).__name__}: expected a plain tensor {wanted}, got {given}; {self.input_hint}")
        if torch.is_autocast_enabled(x.device.type):
            dtype = compute_dtype(x)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        # sharded tokens become the first dim, so that the rows of one rank are contiguous after a gather
        first = x.movedim(-2, 0) if sharded else x
        y = apply_op(self.make_op(x), first.reshape(first.shape[:-1].numel(), x.shape[-1]), weight, bias)
        if not sharded:
            return y.reshape(*x.shape[:-1], y.shape[-1])
        between = first.shape[1:-1]
        return y.reshape(len(y) // max(1, between.numel()), *between, y.shape[-1]).movedim(0, -2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.ranks.world}, {self.options}"

    def shard_weights(
        self, ranks: TensorRanks, mesh: DeviceMesh, options: LinearOptions, source: int | None = 0
    ) -> None:
        """Shard full weights over a mesh.

        Args:
            ranks: The tensor-parallel ranks; they must be the ranks of the mesh.
            mesh: The 1D mesh of the DTensors.
            options: The collectives of the layer, beside its GEMM.
            source: The rank of the mesh whose weights all ranks take; None trusts that they are equal.
        """
        ranks.check_same(mesh)
        self.ranks, self.options = ranks, options
        for name, placement in self.placements().items():
            full = getattr(self, name)
            if full is not None:
                shards = distribute_tensor(full.detach(), mesh, [placement], src_data_rank=source)
                self.register_parameter(name, nn.Parameter(shards, requires_grad=full.requires_grad))

    def _shard_new_weights(self, ranks: TensorRanks | Any, options: LinearOptions) -> None:
        over = ranks if isinstance(ranks, TensorRanks) else TensorRanks(ranks)
        self.shard_weights(over, over.mesh(kind_here() if self.weight.is_meta else self.weight.device.type), options)


class ColumnParallelLinear(ParallelLinear):
    """An `nn.Linear` whose output features are sharded over ranks; all ranks have the same input.

    Args:
        in_features: The size of the input's last dim.
        out_features: The output features of all ranks together, chunked as by `torch.chunk`; they need not divide.
        bias: Whether the layer has a bias.
        ranks: The ranks that share the layer: a `TensorRanks`, a 1D mesh or a process group.
        gather_output: Whether each rank returns the features of all ranks.
        sequence_parallel: Whether the input holds only this rank's tokens, in the dim before the last. The output then
            holds the tokens of all ranks.
        uneven: Whether ranks may hold different numbers of tokens; they exchange the numbers in each call.
        device: The device of the weights.
        dtype: The dtype of the weights.
    """

    input_hint = "every rank has all input features"

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
        options = LinearOptions(gather_output, sequence_parallel, uneven)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._shard_new_weights(ranks, options)

    def placements(self) -> Mapping[str, Placement]:
        """Return the DTensor placements of weight and bias."""
        # with gather_output the bias is added after the gather, so each rank needs all of it
        return {"weight": Shard(0), "bias": Replicate() if self.options.gather_output else Shard(0)}

    def make_op(self, x: Tensor) -> AutogradOp:
        """Return the op that computes the layer for this input.

        Args:
            x: The input of the layer, `[..., features]`.
        """
        sizes = None
        if self.options.sequence_parallel:
            tokens, others = x.shape[-2], x.shape[:-2].numel()
            lengths = (
                self.ranks.all_gather_ints(tokens, x.device) if self.options.uneven else (tokens,) * self.ranks.world
            )
            sizes = tuple(n * others for n in lengths)
        return _ColumnParallelOp(self.ranks, self.out_features, self.options.gather_output, sizes)


class RowParallelLinear(ParallelLinear):
    """An `nn.Linear` whose input features are sharded over ranks; the output is reduced over them.

    Args:
        in_features: The input features of all ranks together, chunked as the outputs of a `ColumnParallelLinear`.
        out_features: The size of the output's last dim.
        bias: Whether the layer has a bias; it is added once, to the sum over ranks.
        ranks: The ranks that share the layer: a `TensorRanks`, a 1D mesh or a process group.
        sequence_parallel: Whether the output holds only this rank's tokens (reduce-scatter instead of all-reduce), in
            the dim before the last.
        uneven: Whether the number of ranks need not divide the number of tokens; the first ranks get one more.
        device: The device of the weights.
        dtype: The dtype of the weights.
    """

    input_hint = "a rank has those input features that a ColumnParallelLinear of the same ranks gives it"

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
        options = LinearOptions(sequence_parallel=sequence_parallel, uneven=uneven)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._shard_new_weights(ranks, options)

    def placements(self) -> Mapping[str, Placement]:
        """Return the DTensor placements of weight and bias."""
        return {"weight": Shard(1), "bias": Replicate()}

    def make_op(self, x: Tensor) -> AutogradOp:
        """Return the op that computes the layer for this input.

        Args:
            x: The input of the layer, `[..., features]`.
        """
        sizes = None
        if self.options.sequence_parallel:
            tokens, others = x.shape[-2], x.shape[:-2].numel()
            if tokens % self.ranks.world and not self.options.uneven:
                raise ValueError(
                    f"RowParallelLinear: {self.ranks.world} ranks do not divide {tokens} tokens; set uneven=True, here "
                    "and in the ColumnParallelLinear that takes them"
                )
            sizes = tuple(n * others for n in split(tokens, self.ranks.world))
        return _RowParallelOp(self.ranks, self.in_features, sizes)


@dataclass(frozen=True)
class _ColumnParallelOp(AutogradOp):
    """Forward and backward of a `ColumnParallelLinear`.

    `num_features` counts the output features of all ranks. `sizes` are the rows of each rank under sequence
    parallelism, else None.
    """

    ranks: TensorRanks
    num_features: int
    gather_output: bool
    sizes: tuple[int, ...] | None

    def empty_output(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight: Any = weights[0]
        columns = self.num_features if self.gather_output else len(weight)
        return x.new_zeros(()).expand(len(x) if self.sizes is None else sum(self.sizes), columns)

    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight, bias = _weight_and_bias(weights)
        with torch.autocast(x.device.type, enabled=False):
            if self.gather_output:
                parts = _chunks(self.num_features, self.ranks.world)
                y = self.ranks.distributed_gemm(
                    "all_scatter", x, weight.T, len(x), self.num_features, x.shape[1], parts
                )
                return y if bias is None else y.add_(bias)
            if self.sizes is None:
                return self.ranks.gemm(x, weight.T, bias)
            return self.ranks.all_gather_gemm(x, weight.T, self.sizes, self.num_features, bias)[0]

    def backward(self, dy: Tensor, wanted: Sequence[bool], x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
        weight, bias = _weight_and_bias(weights)
        with torch.autocast(x.device.type, enabled=False):
            dbias = _sum_over_rows(dy).to(bias.dtype) if bias is not None and wanted[2] else None
            if self.gather_output:
                dy = dy.split(_chunks(self.num_features, self.ranks.world), 1)[self.ranks.rank]
            dx = dweight = None
            if wanted[0]:
                m, n, how = len(dy), x.shape[1], "all_reduce" if self.sizes is None else "gemm_rs"
                dx = self.ranks.distributed_gemm(how, dy, weight, m, n, self.num_features, self.sizes)
            if wanted[1]:
                rows = x if self.sizes is None else self.ranks.gather(x, self.sizes)
                dweight = self.ranks.gemm(dy.T, rows)
        return [dx, dweight, dbias]


@dataclass(frozen=True)
class _RowParallelOp(AutogradOp):
    """Forward and backward of a `RowParallelLinear`.

    `num_features` counts the input features of all ranks. `sizes` are the output rows of each rank under sequence
    parallelism, else None.
    """

    ranks: TensorRanks
    num_features: int
    sizes: tuple[int, ...] | None

    def empty_output(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight: Any = weights[0]
        return x.new_zeros(()).expand(len(x) if self.sizes is None else self.sizes[self.ranks.rank], len(weight))

    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        weight, bias = _weight_and_bias(weights)
        how = "all_reduce" if self.sizes is None else "gemm_rs"
        with torch.autocast(x.device.type, enabled=False):
            y = self.ranks.distributed_gemm(how, x, weight.T, len(x), len(weight), self.num_features, self.sizes)
            return y if bias is None else y.add_(bias)

    def backward(self, dy: Tensor, wanted: Sequence[bool], x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
        weight, bias = _weight_and_bias(weights)
        dx = dweight = dbias = None
        with torch.autocast(x.device.type, enabled=False):
            if bias is not None and wanted[2]:
                total = _sum_over_rows(dy)
                dbias = (total if self.sizes is None else self.ranks.all_reduce(total)).to(bias.dtype)
            rows: Tensor | None = dy
            if self.sizes is None:
                dx = self.ranks.gemm(dy, weight) if wanted[0] else None
            elif wanted[0]:
                dx, rows = self.ranks.all_gather_gemm(dy, weight, self.sizes, self.num_features)
            else:
                rows = None
            if wanted[1]:
                if rows is None:
                    assert self.sizes is not None
                    rows = self.ranks.gather(dy, self.sizes)
                dweight = self.ranks.gemm(rows.T, x)
        return [dx, dweight, dbias]


def _weight_and_bias(weights: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    weight, bias = weights
    assert weight is not None
    return weight, bias


def _sum_over_rows(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _chunks(total: int, world: int) -> tuple[int, ...]:
    """Return the chunk sizes of a dim as DTensor shards it.

    >>> _chunks(10, 4), _chunks(5, 4)
    ((3, 3, 3, 1), (2, 2, 1, 0))
    """
    chunk = -(-total // world)
    return tuple(min(chunk, max(0, total - rank * chunk)) for rank in range(world))


def _local_weight(weight: Tensor | None) -> Tensor | None:
    """Return this rank's shard of a weight."""
    if not isinstance(weight, DTensor):
        return weight
    if len(weight.placements) != 1:
        raise ValueError("a weight of a parallel layer is sharded over more axes too; call the module that gathers it")
    return weight.to_local()
