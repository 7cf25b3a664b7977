"""CS336's DDP, FSDP and sharded optimizer, over all ranks of the default process group.

All ranks begin with rank 0's weights, whatever theirs were. A process without a group is one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as _distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshflash.parallel import init_mesh
from meshflash.parallel.blocks import count_weight_uses, unshared_blocks

dist: Any = _distributed  # torch does not declare all that it exports here

#: Megabytes that no bucket of gradients reaches.
_UNBOUNDED = 1e9


def get_ddp(module: nn.Module, **options: Any) -> nn.Module:
    """The module with gradients averaged over all ranks, by torch's DistributedDataParallel; its own is `.module`.

    Args:
        module: with weights, frozen or shared ones too, where they are to be computed with. Its buffers are rank 0's
            in every forward.
        options: of DistributedDataParallel, as `bucket_cap_mb` and `find_unused_parameters`.
    """
    _ranks()
    return DistributedDataParallel(module, **{"gradient_as_bucket_view": True, **options})


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    """The same in buckets of so many megabytes; None is one bucket of all gradients."""
    if bucket_size_mb is not None and bucket_size_mb <= 0:
        raise ValueError(f"bucket_size_mb={bucket_size_mb}: expected more than 0, or None for one bucket")
    return get_ddp(module, bucket_cap_mb=_UNBOUNDED if bucket_size_mb is None else bucket_size_mb)


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    """The same under its older name. Gradients travel in buckets here as well, which gives the same sums."""
    return get_ddp(module)


def ddp_on_after_backward(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What has to be done between backward and step: nothing, for backward ends when gradients are averaged."""


def ddp_on_train_batch_start(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What has to be done at the start of a step: nothing, for DDP begins anew in each forward."""


ddp_individual_parameters_on_after_backward = ddp_on_after_backward
ddp_bucketed_on_after_backward = ddp_on_after_backward
ddp_bucketed_on_train_batch_start = ddp_on_train_batch_start


class FullySharded(nn.Module):
    """A module whose weights lie in parts on all ranks, by `fully_shard`; its own is `.module`, changed in place.

    As in the assignment norms are not spread: a module without others in it whose weights are all vectors keeps them
    whole on every rank, computes in their dtype, and has its gradients averaged as soon as they are there. A norm is
    thus used on all ranks or on none.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        self._sync = True
        weights = list(module.parameters())
        if any(p.is_meta for p in weights):
            raise ValueError(
                "get_fsdp: weights are on the meta device, and rank 0's are to be sent; call "
                "meshflash.parallel.shard, then to_empty and what draws them"
            )
        ranks = _ranks()
        for x in (*weights, *module.buffers()):
            sent = x.detach().contiguous()
            dist.broadcast(sent, 0)
            if sent.data_ptr() != x.data_ptr():
                x.detach().copy_(sent)
        norms = [part for part in module.modules() if _is_norm(part)]
        elsewhere = count_weight_uses(part for part in module.modules() if not _is_norm(part))
        whole = {p for part in norms for p in part.parameters() if id(p) not in elsewhere}
        for p in whole:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._average)
        if compute_dtype is not None:
            for part in norms:
                _keep_dtype(part, compute_dtype)
        masters = {p.dtype for p in weights if p.requires_grad}
        summed = masters.pop() if compute_dtype is not None and len(masters) == 1 else None
        options: dict[str, Any] = dict(
            mesh=init_device_mesh(weights[0].device.type if weights else "cpu", (ranks,)),
            mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=summed),
            ignored_params=whole,
            reshard_after_forward=True,
        )
        for part in (*unshared_blocks(module), module):
            fully_shard(part, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns."""
        return self.module(*args, **kwargs)

    def set_requires_gradient_sync(self, sync: bool) -> None:
        """Whether the next backward sums gradients over ranks, or keeps them until one that does."""
        self._sync = sync
        self.module.set_requires_gradient_sync(sync)  # type: ignore[operator]

    def _average(self, weight: Tensor) -> None:
        """Average the gradient of a whole weight. What was averaged by an earlier backward stays as it is."""
        if self._sync and weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """The module with weights, gradients and so the optimizer's state in parts on all ranks; its own is `.module`.

    Blocks (entries of ModuleLists) are gathered one at a time, what is left at once, and with it a block that shares
    weights with modules outside of it. Make the optimizer of its parameters afterwards, and clip their gradients with
    `meshflash.parallel.clip_grad_norm`.

    Args:
        module: with weights, frozen or shared ones too, where they are to be computed with.
        compute_dtype: what weights are gathered and computed in, without those of norms. The masters stay as they
            are, and gradients are summed in their dtype.
    """
    return FullySharded(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What has to be done between backward and step: nothing, for backward leaves gradients where they belong."""


@torch.no_grad()
def fsdp_gather_full_params(fsdp_model: nn.Module) -> dict[str, Tensor]:
    """All weights, whole, on every rank: copies, by the names of the module's own `state_dict()`. All ranks call it."""
    module = fsdp_model.module if isinstance(fsdp_model, FullySharded) else fsdp_model
    found: dict[int, Tensor] = {}
    names: dict[str, Tensor] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if id(x) not in found:  # shared weights travel once
            found[id(x)] = (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        names[name] = found[id(x)]
    return names


def get_sharded_optimizer(
    params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """An optimizer of which each rank keeps and computes a part (ZeRO-1), by torch's ZeroRedundancyOptimizer.

    Args:
        params: parameters, or dicts of parameter groups, the same on all ranks; one that is there twice counts once,
            and one that does not require a gradient not at all.
        optimizer_cls: the class of the optimizer. One rank gets just that, and so do weights of `get_fsdp`, whose
            state is in parts already.
        kwargs: its options.

    >>> model = nn.Linear(2, 2)
    >>> model.bias.requires_grad = False
    >>> optimizer = get_sharded_optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    >>> type(optimizer).__name__, len(optimizer.param_groups[0]["params"])
    ('AdamW', 1)
    """
    given = list(params)
    if given and all(isinstance(group, dict) and "params" in group for group in given):
        groups = [{**group, "params": _learning(group["params"])} for group in given]
    else:
        groups = [{"params": _learning(given)}]
    learning = [p for group in groups for p in group["params"]]
    if not learning:
        raise ValueError("get_sharded_optimizer: no parameter requires a gradient; give at least one that does")
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone or any(isinstance(p, DTensor) for p in learning):
        return optimizer_cls(groups, **kwargs)
    return ZeroRedundancyOptimizer(groups, optimizer_cls, **kwargs)


def _ranks() -> int:
    """How many ranks there are; torch's parts ask for a process group, and one alone gets one too."""
    if not dist.is_initialized():
        init_mesh()
    return int(dist.get_world_size())


def _is_norm(part: nn.Module) -> bool:
    """Whether a module has vectors alone, and no modules."""
    weights = list(part.parameters())
    return bool(weights) and not list(part.children()) and all(p.ndim < 2 for p in weights)


def _keep_dtype(norm: nn.Module, compute_dtype: torch.dtype) -> None:
    """Let a norm compute in the dtype of its weights, between others that compute in another one."""
    own = next(norm.parameters()).dtype

    def cast(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    norm.register_forward_pre_hook(lambda _, args: tuple(cast(x, own) for x in args))
    norm.register_forward_hook(lambda _, args, out: cast(out, compute_dtype))


def _learning(params: Any) -> list[Tensor]:
    """The parameters that learn, each once."""
    params = [params] if isinstance(params, Tensor) else list(params)
    for p in params:
        if not isinstance(p, Tensor):
            raise ValueError(f"params: expected parameters, or dicts with 'params'; got a {type(p).__name__}")
    return [p for p in dict.fromkeys(params) if p.requires_grad]
