"""How a model lies on a mesh: weights kept by every rank, or spread over them; heads and hidden units divided.

All of it is torch's own: DistributedDataParallel, `fully_shard`, tensor-parallel styles. What is here composes them in
the order that they need, over the right ranks: gradients are summed over the data axes and the context axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from meshflash.parallel.blocks import own_blocks
from meshflash.parallel.context import ContextParallel
from meshflash.parallel.linear_styles import own_styles
from meshflash.parallel.mesh import check_mesh, fold, size, summed
from meshflash.parallel.overlay import Overlay, lay_over
from meshflash.parallel.recompute import recompute as recompute_blocks
from meshflash.parallel.tensor_ranks import TensorRanks
from meshflash.parallel.tiles import tile_mlp
from meshflash.runtime.devices import CPU, GLOO
from meshflash.runtime.log import log
from meshflash.schedules.registry import parse

#: How weights are spread: what "full" keeps after a forward it would gather again for the backward.
MODES = ("full", "grad_op", "hybrid")

#: Replicas by the same code: shards over one rank. Where heads are divided DDP cannot sum their gradients.
REPLICATED = "replicated"

Wrap = str | Callable[[nn.Module], bool]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: str | None = None,
    wrap: Wrap = "blocks",
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    offload: bool = False,
    schedule: str | None = None,
    recompute: str | None = None,
    offload_activations: bool = False,
    tiles: int = 1,
    bucket_mb: float = 25.0,
    tp_linear: TensorRanks | None = None,
) -> nn.Module:
    """Lay a model on a mesh: tensor parallel, context parallel, recomputation, and replicas or shards of the weights.

    Every rank has the same model, or the same one on the meta device. The result is called like the model, with this
    rank's samples and tokens.

    Args:
        model: with a method `tensor_plan(tp)`, as those of `meshflash.models`, where `tp` is more than 1, and with
            `MeshAttention` in it where `cp` is.
        mesh: of `init_mesh`.
        mode: how weights are spread, see `shard`. By default "hybrid" where the mesh has both dp and fsdp, "full"
            where it has fsdp alone, and none, which is `replicate`, where it has neither.
        wrap: which modules are gathered one at a time, see `shard`.
        compute_dtype: what weights are computed with; masters, gradients and optimizer keep their own.
        reduce_dtype: what gradients are summed in; that of the masters by default.
        offload: keep shards in the host's memory.
        schedule: of the attention over `cp`.
        recompute: "full" keeps the input of each block only, "selective" its attention too; see `recompute`.
        offload_activations: keep that in the host's memory, copied beside what is computed.
        tiles: slices of tokens that MLPs are computed in, see `tile_mlp`.
        bucket_mb: megabytes of gradients that replicas sum at a time.
        tp_linear: `TensorRanks(mesh["tp"])`, with a heap or without: divide linear layers by `ColumnParallel` and
            `RowParallel` where the model's plan has torch's styles for them, which are the default.
    """
    check_mesh(mesh)
    if schedule not in (None, "auto"):  # though it may be that nothing moves
        parse(schedule)
    if tp_linear is not None and tiles != 1:
        raise ValueError("tp_linear: an MLP in tiles multiplies by itself; leave out tiles= or tp_linear=")
    if isinstance(model, DistributedDataParallel | FSDPModule):
        raise ValueError(f"parallelize: {type(model).__name__} lies on a mesh already")
    if mode is None and size(mesh, "fsdp") > 1:
        mode = "hybrid" if size(mesh, "dp") > 1 else "full"
    spread = mode is not None or offload or size(mesh, "tp") > 1
    _check_options(model, mode, wrap)
    if reduce_dtype is not None and not spread:
        raise ValueError("reduce_dtype: replicas sum gradients in their own dtype; say mode= to spread the weights")
    if size(mesh, "tp") > 1:
        _divide(model, _whole(mesh, mode or REPLICATED), tp_linear)
    if size(mesh, "cp") > 1:
        ContextParallel(schedule)._apply(model, mesh["cp"])
    if tiles != 1:
        tile_mlp(model, tiles)
    if recompute is not None:
        recompute_blocks(model, recompute, offload_activations)
    elif offload_activations:
        raise ValueError(
            'offload_activations: it moves what blocks keep for their backward; say recompute="full" or "selective" too'
        )
    if spread:
        return shard(
            model,
            mesh,
            mode or REPLICATED,
            wrap=wrap,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            offload=offload,
        )
    return replicate(model, mesh, compute_dtype=compute_dtype, bucket_mb=bucket_mb)


def replicate(
    model: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype | None = None, bucket_mb: float = 25.0
) -> nn.Module:
    """Every rank keeps all weights; gradients are averaged over the data and context axes by DDP.

    A rank alone gets the model itself. Gradients that a step accumulates travel once if `synchronized` is asked; frozen
    weights have none. All ranks begin with rank 0's weights.
    """
    if compute_dtype is not None:
        lay_over(model, _Autocast, _autocast=(mesh.device_type, compute_dtype))
    ranks = summed(mesh)
    if ranks.size() == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "replicate: weights are on the meta device; call to_empty and init_weights before, or spread them"
        )
    return _Replicas(
        model,
        process_group=ranks.get_group(),
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
    )


class _Replicas(DistributedDataParallel):
    """DDP whose buckets keep their first layout, so that a resumed run sums gradients in the same order.

    DDP lays its buckets out anew after the first backward. Where in a bucket a gradient lies decides in which order
    three or more ranks add it: the first step after a resume would round otherwise than the same step of a run that
    never stopped. The layout here is that of the backward from the start: the last weights first. Both methods of the
    reducer are torch's own and private (2.11 to 2.13 have them); without them a warning says what is lost.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not hasattr(self.reducer, "_push_all_rebuilt_params"):
            log.warning("this torch lays DDP's buckets out anew: a resumed run may differ in the last bits")
            return
        self.reducer._push_all_rebuilt_params()  # as if their gradients had come in this order
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> Any:
        weights, sparse = super()._build_params_for_reducer()
        return weights[::-1], sparse[::-1]


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: str = "full",
    *,
    wrap: Wrap = "blocks",
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> nn.Module:
    """Spread weights, gradients and what the optimizer keeps over the data and context axes, by `fully_shard`.

    A rank alone, without another dtype to compute in and without offload, has nothing to spread.

    Args:
        model: is changed in place, and returned.
        mesh: of `init_mesh`.
        mode: "full" spreads over dp, fsdp and cp and frees gathered weights after the forward; "grad_op" keeps them for
            the backward; "hybrid" spreads over fsdp and cp, and keeps a copy for each rank of dp.
        wrap: what is gathered at a time: each of the model's "blocks" (entries of its ModuleLists that share no weight
            with the rest) and the rest, the whole "model", or those modules that a function says.
        compute_dtype: what weights are gathered and computed in; the masters stay as they are. A call's own tensors
            are cast to it too, unless the model says `casts_inputs = True`.
        reduce_dtype: what gradients are summed in; by default that of the masters.
        offload: keep shards and the optimizer's state in the host's memory; slower, see the docs.
    """
    _check_options(model, None if mode == REPLICATED else mode, wrap)
    if offload and mesh.device_type == CPU:
        raise ValueError("offload: weights are in the host's memory already, for the mesh is of CPUs")
    whole = _whole(mesh, mode)
    if whole.size() == 1 and compute_dtype is None and not offload:
        return model
    _check_backend(whole)
    masters = {p.dtype for p in model.parameters() if p.requires_grad}
    if reduce_dtype is None and compute_dtype is not None and len(masters) == 1:
        (reduce_dtype,) = masters
    # torch would cast what modules pass to each other too, the angles of rotary positions among it
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    options: dict[str, Any] = dict(
        mesh=whole[(whole.mesh_dim_names or ())[:-1]],
        reshard_after_forward=mode in ("full", "hybrid"),
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )
    for module in _wrapped(model, wrap):
        fully_shard(module, **options)
    fully_shard(model, **options)
    if compute_dtype is not None and not getattr(model, "casts_inputs", False):
        model.register_forward_pre_hook(partial(_cast, compute_dtype), prepend=True, with_kwargs=True)
    return model


@contextmanager
def synchronized(model: nn.Module, last: bool = True) -> Iterator[None]:
    """Around a forward and backward: gradients travel only in the last one of an accumulation."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(last)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    """The weights that learn, each once however many modules share it; of spread ones this rank's parts."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a forward without a backward may have left them gathered
    return (p for p in model.parameters() if p.requires_grad)


class _Autocast(Overlay):
    """A forward under autocast."""

    _autocast: tuple[str, torch.dtype]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind, dtype = self._autocast
        with torch.autocast(kind, dtype):
            return super().forward(*args, **kwargs)


def _check_options(model: nn.Module, mode: str | None, wrap: Wrap) -> None:
    """ValueError for a mode or a wrap that is not known, on however many ranks."""
    if mode not in (None, *MODES):
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    _wrapped(model, wrap)


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call's own tensors in the dtype that the weights are computed in."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


def _whole(mesh: DeviceMesh, mode: str | None) -> DeviceMesh:
    """The axes that a model lies on: of replicas, of shards, and of heads and hidden units."""
    if mode == "hybrid":
        return fold(mesh, "dp", "fsdp-cp", "tp")
    if mode == REPLICATED:
        return fold(mesh, "dp-fsdp-cp", "one", "tp")
    return fold(mesh, "dp-fsdp-cp", "tp")


def _check_backend(whole: DeviceMesh) -> None:
    """ValueError where shards would be gathered by gloo from a device's memory: it ends the process."""
    kind = torch.device(whole.device_type)
    if kind.type != CPU and whole.size() > 1 and GLOO in whole.get_group(0)._get_backend(kind).name().lower():
        raise ValueError(
            f"mesh: its ranks move tensors of {kind.type} by gloo, by which shards cannot travel; give each rank a "
            "device of its own, or keep all weights on each (mode None, tp 1)"
        )


def _divide(model: nn.Module, whole: DeviceMesh, linear: TensorRanks | None) -> None:
    """Divide heads and hidden units over `tp`, on the very mesh that the weights are then spread over."""
    _check_backend(whole)
    plan, ranks = getattr(model, "tensor_plan", None), whole["tp"].size()
    if plan is None:
        raise ValueError(
            f"tp={ranks}: {type(model).__name__} has no method tensor_plan(tp) that returns a plan for "
            "torch.distributed.tensor.parallel.parallelize_module"
        )
    styles = plan(ranks) if linear is None else own_styles(plan(ranks), linear)
    parallelize_module(model, whole["tp"], styles)


def _wrapped(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner ones first."""
    if callable(wrap):
        return [module for module in list(model.modules())[:0:-1] if wrap(module)]
    if wrap == "model":
        return []
    if wrap != "blocks":
        raise ValueError(f'wrap={wrap!r}: expected "blocks", "model" or a function of a module')
    return own_blocks(model)
