"""DDP, FSDP and sharded optimizer of CS336, over the default process group.

All ranks start with rank 0's weights. A process without a process group counts as one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshflash.parallel import init_mesh
from meshflash.parallel.blocks import count_weight_uses, unshared_blocks

#: A bucket size in megabytes that no model reaches: all gradients share one bucket.
_UNBOUNDED_MB = 1e9


def get_ddp(module: nn.Module, **options: Any) -> nn.Module:
    """Wrap a module in torch's DistributedDataParallel, which averages gradients over all ranks.

    Args:
        module: The module, on the device where it computes; `.module` of the result. Weights may be frozen or shared.
            Every forward uses rank 0's buffers.
        options: Options of DistributedDataParallel, such as `bucket_cap_mb` and `find_unused_parameters`.
    """
    _num_ranks()
    return DistributedDataParallel(module, **{"gradient_as_bucket_view": True, **options})


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    """Wrap a module as `get_ddp` does, with a given bucket size.

    Args:
        module: The module, as in `get_ddp`.
        bucket_size_mb: The size of a bucket of gradients in megabytes. None puts all gradients into one bucket.
    """
    if bucket_size_mb is not None and bucket_size_mb <= 0:
        raise ValueError(f"bucket_size_mb={bucket_size_mb}: expected more than 0, or None for one bucket")
    return get_ddp(module, bucket_cap_mb=_UNBOUNDED_MB if bucket_size_mb is None else bucket_size_mb)


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    """Wrap a module as `get_ddp` does. Gradients are reduced in buckets here too, which gives the same sums.

    Args:
        module: The module, as in `get_ddp`.
    """
    return get_ddp(module)


def ddp_on_after_backward(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do nothing: gradients are averaged when backward returns.

    Args:
        ddp_model: A module of `get_ddp`.
        optimizer: The optimizer of its weights.
    """


def ddp_on_train_batch_start(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do nothing: DDP resets its buckets in each forward.

    Args:
        ddp_model: A module of `get_ddp`.
        optimizer: The optimizer of its weights.
    """


ddp_individual_parameters_on_after_backward = ddp_on_after_backward
ddp_bucketed_on_after_backward = ddp_on_after_backward
ddp_bucketed_on_train_batch_start = ddp_on_train_batch_start


class FullySharded(nn.Module):
    """A module whose weights are sharded over all ranks by `fully_shard`. `get_fsdp` makes it; `.module` is the module.

    Norms are replicated, as in the assignment: a leaf module whose weights are all vectors keeps them on every rank,
    computes in their dtype, and averages its gradients as soon as they are accumulated. That average is a collective,
    so all ranks must use a norm, or none.

    Args:
        module: The module to shard, which is changed in place.
        compute_dtype: The dtype of gathered weights and of activations, as in `get_fsdp`.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        self._sync = True
        weights = list(module.parameters())
        if any(p.is_meta for p in weights):
            raise ValueError(
                "get_fsdp: weights are on the meta device, so rank 0 has none to broadcast; call "
                "meshflash.parallel.shard, then to_empty and the initialization"
            )
        ranks = _num_ranks()
        for x in (*weights, *module.buffers()):
            sent = x.detach().contiguous()
            dist.broadcast(sent, 0)
            if sent.data_ptr() != x.data_ptr():
                x.detach().copy_(sent)
        norms = [part for part in module.modules() if _is_norm(part)]
        elsewhere = count_weight_uses(part for part in module.modules() if not _is_norm(part))
        replicated = {p for part in norms for p in part.parameters() if id(p) not in elsewhere}
        for p in replicated:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._average)
        if compute_dtype is not None:
            for part in norms:
                _keep_dtype(part, compute_dtype)
        masters = {p.dtype for p in weights if p.requires_grad}
        reduce_dtype = masters.pop() if compute_dtype is not None and len(masters) == 1 else None
        options: dict[str, Any] = dict(
            mesh=init_device_mesh(weights[0].device.type if weights else "cpu", (ranks,)),
            mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
            ignored_params=replicated,
            reshard_after_forward=True,
        )
        for part in (*unshared_blocks(module), module):
            fully_shard(part, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward.

        Args:
            args: The positional arguments of the module.
            kwargs: The keyword arguments of the module.
        """
        return self.module(*args, **kwargs)

    def set_requires_gradient_sync(self, sync: bool) -> None:
        """Set whether the next backward reduces gradients over ranks, or accumulates them locally.

        Args:
            sync: Whether to reduce.
        """
        self._sync = sync
        self.module.set_requires_gradient_sync(sync)  # type: ignore[operator]

    def _average(self, weight: Tensor) -> None:
        """Average the gradient of a replicated weight over ranks. Averaging equal values again changes nothing."""
        if self._sync and weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """Shard the weights and gradients of a module over all ranks, and so the state of an optimizer made afterwards.

    Blocks (entries of ModuleLists) are gathered one at a time. All other weights are gathered together, with any block
    that shares weights with modules outside of it. Clip gradients with `meshflash.parallel.clip_grad_norm`.

    Args:
        module: The module, on the device where it computes; `.module` of the result, changed in place. Weights may be
            frozen or shared.
        compute_dtype: The dtype in which weights other than those of norms are gathered and computed. Master weights
            keep their dtype, and gradients are reduced in it.
    """
    return FullySharded(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do nothing: backward leaves each rank with the reduced gradients of its shards.

    Args:
        fsdp_model: A module of `get_fsdp`.
        optimizer: The optimizer of its weights.
    """


@torch.no_grad()
def fsdp_gather_full_params(fsdp_model: nn.Module) -> dict[str, Tensor]:
    """Gather all weights on every rank: copies, by the names of the module's `state_dict()`. All ranks call it.

    Args:
        fsdp_model: A module of `get_fsdp`.
    """
    module = fsdp_model.module if isinstance(fsdp_model, FullySharded) else fsdp_model
    found: dict[int, Tensor] = {}
    names: dict[str, Tensor] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if id(x) not in found:  # gather shared weights once
            found[id(x)] = (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        names[name] = found[id(x)]
    return names


def get_sharded_optimizer(
    params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """Return an optimizer whose state is sharded over ranks (ZeRO-1), by torch's ZeroRedundancyOptimizer.

    Args:
        params: The parameters, or dicts of parameter groups, the same on all ranks. Duplicates count once; frozen
            parameters are left out.
        optimizer_cls: The class of the optimizer. It is used directly on one rank, and for weights of `get_fsdp`, whose
            state is sharded already.
        kwargs: Options of the optimizer.

    >>> model = nn.Linear(2, 2)
    >>> model.bias.requires_grad = False
    >>> optimizer = get_sharded_optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    >>> type(optimizer).__name__, len(optimizer.param_groups[0]["params"])
    ('AdamW', 1)
    """
    given = list(params)
    if given and all(isinstance(group, dict) and "params" in group for group in given):
        groups = [{**group, "params": _trainable(group["params"])} for group in given]
    else:
        groups = [{"params": _trainable(given)}]
    trainable = [p for group in groups for p in group["params"]]
    if not trainable:
        raise ValueError("get_sharded_optimizer: no parameter requires a gradient; pass at least one that does")
    is_single = not dist.is_initialized() or dist.get_world_size() == 1
    if is_single or any(isinstance(p, DTensor) for p in trainable):
        return optimizer_cls(groups, **kwargs)
    return ZeroRedundancyOptimizer(groups, optimizer_cls, **kwargs)


def _num_ranks() -> int:
    """Return the number of ranks. torch's DDP and FSDP need a process group, so a single process gets one too."""
    if not dist.is_initialized():
        init_mesh()
    return int(dist.get_world_size())


def _is_norm(part: nn.Module) -> bool:
    """Return whether a module is a leaf whose weights are all vectors or scalars."""
    weights = list(part.parameters())
    return bool(weights) and not list(part.children()) and all(p.ndim < 2 for p in weights)


def _keep_dtype(norm: nn.Module, compute_dtype: torch.dtype) -> None:
    """Make a norm compute in the dtype of its weights, and cast its output to `compute_dtype`."""
    own = next(norm.parameters()).dtype

    def cast(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    norm.register_forward_pre_hook(lambda _, args: tuple(cast(x, own) for x in args))
    norm.register_forward_hook(lambda _, args, out: cast(out, compute_dtype))


def _trainable(params: Any) -> list[Tensor]:
    """Return the parameters that require gradients, each once."""
    params = [params] if isinstance(params, Tensor) else list(params)
    for p in params:
        if not isinstance(p, Tensor):
            raise ValueError(f"params: expected parameters, or dicts with 'params'; got a {type(p).__name__}")
    return [p for p in dict.fromkeys(params) if p.requires_grad]
