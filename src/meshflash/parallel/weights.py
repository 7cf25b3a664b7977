"""Parallelize a model over a mesh: replicated or sharded weights, tensor parallelism, context parallelism.

The parts are torch's own: DistributedDataParallel, `fully_shard`, tensor-parallel styles. This module composes them in
the required order over the right axes. Gradients are reduced over the data axes and the context axis.
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

from meshflash.parallel.activation_checkpointing import apply_activation_checkpointing
from meshflash.parallel.blocks import unshared_blocks
from meshflash.parallel.context import ContextParallel
from meshflash.parallel.forward_wrapper import ForwardWrapper, wrap_forward
from meshflash.parallel.linear_styles import replace_linear_styles
from meshflash.parallel.mesh import check_mesh, flatten_axes, reduce_mesh, size
from meshflash.parallel.tensor_ranks import TensorRanks
from meshflash.parallel.tiled_mlp import tile_mlp
from meshflash.runtime.devices import CPU, GLOO
from meshflash.runtime.log import log
from meshflash.schedules.registry import parse

#: How `shard` shards weights; its docstring explains each mode.
MODES = ("full", "grad_op", "hybrid")

#: Replicated weights through `fully_shard` with shards over one rank, because DDP cannot reduce DTensors of `tp`.
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
    activation_checkpointing: str | None = None,
    offload_activations: bool = False,
    tiles: int = 1,
    bucket_mb: float = 25.0,
    tp_linear: TensorRanks | None = None,
) -> nn.Module:
    """Parallelize a model over a mesh: tensor, context and (sharded) data parallelism, and memory savings.

    Every rank passes the same model, or the same model on the meta device. Call the result like the model, with this
    rank's samples and tokens.

    Args:
        model: The model. For `tp` > 1 it needs a method `tensor_plan(tp)`, as the models of `meshflash.models` have.
            For `cp` > 1 it needs `MeshAttention` modules.
        mesh: A mesh of `init_mesh`.
        mode: How weights are sharded, see `shard`. The default is "hybrid" on a mesh with dp and fsdp, "full" with fsdp
            alone, and otherwise no sharding, which is `replicate`.
        wrap: Which modules are gathered one at a time, see `shard`.
        compute_dtype: The dtype of compute; master weights, gradients and optimizer state keep theirs.
        reduce_dtype: The dtype of gradient reductions; that of the master weights by default.
        offload: Whether weight shards stay in host memory.
        schedule: The schedule of attention over `cp`.
        activation_checkpointing: "full" saves only the input of each block, "selective" also its attention output; see
            `apply_activation_checkpointing`. None saves all activations.
        offload_activations: Whether checkpointed activations move to host memory, with copies that overlap compute.
        tiles: The number of slices of tokens in which MLPs are computed, see `tile_mlp`.
        bucket_mb: The size of DDP's gradient buckets in megabytes.
        tp_linear: `TensorRanks(mesh["tp"])`, with or without a heap. Linear layers then use `ColumnParallel` and
            `RowParallel` instead of torch's styles of the model's plan.
    """
    check_mesh(mesh)
    if schedule not in (None, "auto"):  # refuse a wrong name even where cp is 1
        parse(schedule)
    if tp_linear is not None and tiles != 1:
        raise ValueError("tp_linear: a tiled MLP has its own GEMMs; leave out tiles= or tp_linear=")
    if isinstance(model, DistributedDataParallel | FSDPModule):
        raise ValueError(f"parallelize: {type(model).__name__} is parallelized already; pass the plain model")
    if mode is None and size(mesh, "fsdp") > 1:
        mode = "hybrid" if size(mesh, "dp") > 1 else "full"
    use_fsdp = mode is not None or offload or size(mesh, "tp") > 1
    _check_options(model, mode, wrap)
    if reduce_dtype is not None and not use_fsdp:
        raise ValueError("reduce_dtype: DDP reduces gradients in their own dtype; set mode= to shard the weights")
    if size(mesh, "tp") > 1:
        _apply_tensor_parallel(model, _weights_mesh(mesh, mode or REPLICATED), tp_linear)
    if size(mesh, "cp") > 1:
        ContextParallel(schedule)._apply(model, mesh["cp"])
    if tiles != 1:
        tile_mlp(model, tiles)
    if activation_checkpointing is not None:
        apply_activation_checkpointing(model, activation_checkpointing, offload_activations)
    elif offload_activations:
        raise ValueError(
            "offload_activations: it offloads checkpointed activations; set "
            'activation_checkpointing="full" or "selective" too'
        )
    if use_fsdp:
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
    """Replicate all weights on every rank; DDP averages gradients over the data and context axes.

    All ranks start with the weights of rank 0. A single rank gets the model itself. With `synchronized` the
    gradients of accumulated micro-batches are reduced once.

    Args:
        model: The model, not on the meta device.
        mesh: A mesh of `init_mesh`.
        compute_dtype: The dtype of autocast around the forward; None is no autocast.
        bucket_mb: The size of DDP's gradient buckets in megabytes.
    """
    if compute_dtype is not None:
        wrap_forward(model, _Autocast, _autocast=(mesh.device_type, compute_dtype))
    ranks = reduce_mesh(mesh)
    if ranks.size() == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "replicate: weights are on the meta device; call to_empty and init_weights before, or shard them"
        )
    return _StableBucketDDP(
        model,
        process_group=ranks.get_group(),
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
    )


class _StableBucketDDP(DistributedDataParallel):
    """DDP whose bucket layout never changes, so that a resumed run reduces gradients in the same order.

    DDP rebuilds its buckets after the first backward. The position of a gradient in a bucket decides in which order
    three or more ranks add it, so the first step after a resume would round differently than an uninterrupted run. Here
    the buckets have their final layout, last weights first, from the start. The two reducer methods are private to
    torch (2.11 to 2.13 have them); without them a warning is logged.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not hasattr(self.reducer, "_push_all_rebuilt_params"):
            log.warning("this torch rebuilds DDP's buckets: a resumed run may differ in the last bits")
            return
        self.reducer._push_all_rebuilt_params()  # as if gradients had arrived in this order
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
    """Shard weights, gradients and optimizer state over the data and context axes with `fully_shard` (FSDP2, ZeRO-3).

    A single rank without `compute_dtype` and without offload gets the model itself.

    Args:
        model: The model; it is changed in place and returned.
        mesh: A mesh of `init_mesh`.
        mode: "full" shards over dp, fsdp and cp, and frees gathered weights after the forward. "grad_op" keeps them
            until the backward. "hybrid" shards over fsdp and cp, and replicates over dp.
        wrap: The unit of gathering. "blocks" gathers each block (an entry of a ModuleList that shares no weight with
            the rest) and the rest, "model" the whole model, and a function those modules for which it returns True.
        compute_dtype: The dtype in which weights are gathered and computed; master weights keep theirs. Inputs of the
            model are cast to it too, unless the model sets `casts_inputs = True`.
        reduce_dtype: The dtype of gradient reductions; by default that of the master weights.
        offload: Whether shards and optimizer state stay in host memory; slower, see the docs.
    """
    _check_options(model, None if mode == REPLICATED else mode, wrap)
    if offload and mesh.device_type == CPU:
        raise ValueError("offload: weights are in host memory already on a CPU mesh; leave out offload=")
    weights_mesh = _weights_mesh(mesh, mode)
    if weights_mesh.size() == 1 and compute_dtype is None and not offload:
        return model
    _check_backend(weights_mesh)
    masters = {p.dtype for p in model.parameters() if p.requires_grad}
    if reduce_dtype is None and compute_dtype is not None and len(masters) == 1:
        (reduce_dtype,) = masters
    # cast_forward_inputs would also cast tensors between modules, such as the cos and sin of rotary positions
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    options: dict[str, Any] = dict(
        mesh=weights_mesh[(weights_mesh.mesh_dim_names or ())[:-1]],  # all axes but tp
        reshard_after_forward=mode in ("full", "hybrid"),
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )
    for module in _modules_to_shard(model, wrap):
        fully_shard(module, **options)
    fully_shard(model, **options)
    if compute_dtype is not None and not getattr(model, "casts_inputs", False):
        model.register_forward_pre_hook(partial(_cast, compute_dtype), prepend=True, with_kwargs=True)
    return model


@contextmanager
def synchronized(model: nn.Module, last: bool = True) -> Iterator[None]:
    """Reduce gradients in the backward inside this context only if it is the last micro-batch of an accumulation.

    Args:
        model: A model of `parallelize`, `replicate` or `shard`; any other model is left alone.
        last: Whether this is the last micro-batch of the step.
    """
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
    """Return the weights that require gradients, each once even if modules share it; sharded weights as DTensors."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a forward without a backward leaves weights gathered
    return (p for p in model.parameters() if p.requires_grad)


class _Autocast(ForwardWrapper):
    """Run the forward under autocast."""

    _autocast: tuple[str, torch.dtype]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind, dtype = self._autocast
        with torch.autocast(kind, dtype):
            return super().forward(*args, **kwargs)


def _check_options(model: nn.Module, mode: str | None, wrap: Wrap) -> None:
    """Raise ValueError for an unknown mode or wrap, on any number of ranks."""
    if mode not in (None, *MODES):
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    _modules_to_shard(model, wrap)


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast the floating-point inputs of the model to the compute dtype."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


def _weights_mesh(mesh: DeviceMesh, mode: str | None) -> DeviceMesh:
    """Return the mesh of the weights: the axes of replicas (if any), of shards, and of tensor parallelism."""
    if mode == "hybrid":
        return flatten_axes(mesh, "dp", "fsdp-cp", "tp")
    if mode == REPLICATED:
        return flatten_axes(mesh, "dp-fsdp-cp", "one", "tp")
    return flatten_axes(mesh, "dp-fsdp-cp", "tp")


def _check_backend(mesh: DeviceMesh) -> None:
    """Raise ValueError if gloo would gather shards from device memory, which aborts the process."""
    kind = torch.device(mesh.device_type)
    if kind.type != CPU and mesh.size() > 1 and GLOO in mesh.get_group(0)._get_backend(kind).name().lower():
        raise ValueError(
            f"mesh: its backend for {kind.type} is gloo, which cannot gather shards; give each rank a "
            "device of its own, or keep all weights on each (mode None, tp 1)"
        )


def _apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, linear: TensorRanks | None) -> None:
    """Shard heads and hidden units over `tp`, on the same mesh object that the weights are then sharded over."""
    _check_backend(mesh)
    plan, ranks = getattr(model, "tensor_plan", None), mesh["tp"].size()
    if plan is None:
        raise ValueError(
            f"tp={ranks}: {type(model).__name__} has no method tensor_plan(tp) that returns a plan for "
            "torch.distributed.tensor.parallel.parallelize_module"
        )
    styles = plan(ranks) if linear is None else replace_linear_styles(plan(ranks), linear)
    parallelize_module(model, mesh["tp"], styles)


def _modules_to_shard(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """Return the modules that are gathered one at a time, inner modules first."""
    if callable(wrap):
        return [module for module in list(model.modules())[:0:-1] if wrap(module)]
    if wrap == "model":
        return []
    if wrap != "blocks":
        raise ValueError(f'wrap={wrap!r}: expected "blocks", "model" or a function of a module')
    return unshared_blocks(model)
