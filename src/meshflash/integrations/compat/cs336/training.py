"""CS336's training by DDP and FSDP: a process as a rank, a small loop for each, and its time.

A batch's loss is a mean over its samples, and a step is to be that of one process with all samples of all ranks. So
losses are weighted by samples, which `meshflash.parallel.accumulate` does by labels: it wants models that return sums
over them, and blanks them where a rank has no batch. Models and losses here are anyone's; such a rank repeats a batch
with the weight 0.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as _distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset

from meshflash.integrations.compat.cs336.parallel import (
    FullySharded,
    ddp_on_after_backward,
    fsdp_on_after_backward,
    get_ddp,
    get_fsdp,
)
from meshflash.job import init, shutdown
from meshflash.parallel import MeshSampler, init_mesh, synchronized
from meshflash.runtime.devices import BACKENDS, CPU, GLOO, available, count, current, kind_here, take_device

dist: Any = _distributed  # torch does not declare all that it exports here

Loss = Callable[[Any, Any], Tensor]

#: How often a rank tries to meet the others.
MEETINGS = 20


def setup_ddp(
    rank: int | None = None, world_size: int | None = None, backend: str | None = None
) -> tuple[int, int, int]:
    """(rank, world_size, local_rank) of this process, with its device taken and the default process group made.

    By default as its launcher says, see `meshflash.init`; a process alone has no group. With `rank` and `world_size`,
    as under `torch.multiprocessing.spawn`, ranks meet at MASTER_ADDR and MASTER_PORT. A group that is there is taken.

    >>> setup_ddp()
    (0, 1, 0)
    >>> cleanup_ddp()
    """
    if rank is None or world_size is None:
        if rank is not None or world_size is not None:
            raise ValueError("setup_ddp: give both rank and world_size, or neither for what the launcher says")
        here = init(backend)
        return here.rank, here.world_size, here.local_rank
    if not 0 <= rank < world_size:
        raise ValueError(f"setup_ddp: rank={rank}; expected 0 to {world_size - 1} of world_size={world_size}")
    kind = kind_here()
    local_rank = int(os.environ.get("LOCAL_RANK", rank if kind == CPU else rank % count(kind)))
    if not dist.is_initialized():
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if absent:
            raise ValueError(f"setup_ddp: set {' and '.join(absent)}, where ranks meet, or give no rank and world_size")
        take_device(kind, local_rank)
        _meet(backend or _backend(kind), rank, world_size)
    elif (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"setup_ddp: rank {rank} of {world_size}, and this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()} already; call cleanup_ddp first"
        )
    return rank, world_size, local_rank


def _meet(backend: str, rank: int, world_size: int) -> None:
    """Make the group. Rank 0's store of the group before may still answer, and end meanwhile: then once more.

    That store has the addresses of the group before: rank 0 answers a question of each rank, which it does in its own
    store alone.
    """
    for left in reversed(range(MEETINGS)):
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, world_size))
            if rank:
                question = uuid.uuid4().hex
                store.set(f"question/{rank}", question)
                store.get(f"answer/{question}")
            else:
                for other in range(1, world_size):
                    store.set(f"answer/{store.get(f'question/{other}').decode()}", "here")
            break
        except dist.DistNetworkError:
            if rank == 0 or not left:
                raise
            time.sleep(0.2)
    dist.init_process_group(backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size)


def cleanup_ddp() -> None:
    """End the default process group, and free what was kept for it. Without one nothing is done."""
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def train_with_ddp(rank: int | None = None, world_size: int | None = None, **named: Any) -> list[float]:
    """Train a model that every rank keeps, and return the loss of each step, the same on all ranks.

    Weights and losses are those of one process with the samples of all ranks, whatever number each has. The model is
    trained where it is: afterwards it has the weights. A process group that is not there yet is made, and ended.

    Args:
        rank: as `setup_ddp` takes it; by default what the launcher says.
        world_size: likewise.
        named: of `train`.
    """
    return train(get_ddp, rank, world_size, **named)


def train_with_fsdp(
    rank: int | None = None, world_size: int | None = None, *, compute_dtype: torch.dtype | None = None, **named: Any
) -> list[float]:
    """The same with weights in parts on all ranks; the model then has this rank's, see `after`.

    Args:
        rank: as `setup_ddp` takes it; by default what the launcher says.
        world_size: likewise.
        compute_dtype: see `get_fsdp`.
        named: of `train`.
    """
    return train(lambda model: get_fsdp(model, compute_dtype), rank, world_size, **named)


def train(
    wrap: Callable[[nn.Module], nn.Module],
    rank: int | None = None,
    world_size: int | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module],
    data: Iterable[Any] | Dataset[Any],
    loss: Loss | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    epochs: int = 1,
    accumulation_steps: int = 1,
    batch_size: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    backend: str | None = None,
    after: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> list[float]:
    """The loop of `train_with_ddp` and `train_with_fsdp`.

    Args:
        wrap: `get_ddp` or `get_fsdp`.
        rank: as `setup_ddp` takes it.
        world_size: likewise.
        model: or a function that makes one.
        data: a Dataset, of which each rank takes its samples by `MeshSampler`; or this rank's batches, as of a
            DataLoader, to be gone through once an epoch. Samples are in the first dimension of all tensors.
        loss: of `model(inputs)` and targets, where a batch is a pair of them; without it `model(batch)` is the loss.
            It is a mean over samples.
        optimizer: a class, or what makes one of parameters.
        epochs: how often the data is gone through.
        accumulation_steps: batches of each rank to a step. The last step of an epoch takes what is left.
        batch_size: samples of a rank's batch, of a Dataset.
        shuffle: whether each epoch of a Dataset has an order of its own.
        seed: of these orders.
        backend: of the process group.
        after: called with the wrapped model at the end, while there are ranks, as `fsdp_gather_full_params` needs.
        options: of the optimizer, as `lr`.
    """
    if epochs < 1 or accumulation_steps < 1:
        raise ValueError(f"epochs={epochs}, accumulation_steps={accumulation_steps}: expected at least 1 of each")
    began = not dist.is_initialized()
    setup_ddp(rank, world_size, backend)
    try:
        model = model if isinstance(model, nn.Module) else model()
        wrapped = wrap(model.to(current()))
        learner = optimizer([p for p in wrapped.parameters() if p.requires_grad], **options)
        loader = _loader(data, batch_size, shuffle, seed)
        losses = []
        for epoch in range(epochs):
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            for group in _groups(loader, accumulation_steps):
                losses.append(_step(wrapped, learner, group, loss))
        if after is not None:
            after(wrapped)
    finally:
        if began:
            cleanup_ddp()
    return losses


def benchmark_ddp(
    model: nn.Module,
    dataloader: Iterable[Any],
    epochs: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
) -> float:
    """Average seconds that an epoch takes on this rank; rank 0 prints each, and the average.

    Times are taken when the device has done its work. All ranks have equally many batches.

    Args:
        model: of `get_ddp` or `get_fsdp`, or any other.
        dataloader: this rank's batches, to be gone through once an epoch.
        epochs: how many are timed.
        optimizer: makes a step after each batch; without it gradients are dropped.
        loss: of `model(inputs)` and targets, where a batch is a pair of them; without it `model(batch)` is the loss.
    """
    if epochs < 1:
        raise ValueError(f"epochs={epochs}: expected at least 1")
    device = next(model.parameters()).device
    speaks = not dist.is_initialized() or dist.get_rank() == 0
    times = []
    for epoch in range(epochs):
        start = _now(device)
        for batch in dataloader:
            _loss(model, batch, loss).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
        times.append(_now(device) - start)
        if speaks:
            print(f"Epoch {epoch}: {times[-1]:.2f}s")
    average = sum(times) / len(times)
    if speaks:
        print(f"Average per epoch: {average:.2f}s")
    return average


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, group: list[tuple[Any, int]], loss: Loss | None) -> float:
    """One step with the batches of a group and their numbers of samples; the mean loss over all ranks' samples."""
    device = next(model.parameters()).device
    samples = int(_over_ranks(float(sum(number for _, number in group)))[0])
    lost = torch.zeros((), dtype=torch.float64, device=device)
    for n, (batch, number) in enumerate(group):
        last = n == len(group) - 1
        if isinstance(model, FullySharded):
            model.set_requires_gradient_sync(last)
        with synchronized(model, last):
            found = _loss(model, batch, loss)
            (found * (number * dist.get_world_size() / samples)).backward()  # gradients are averaged over ranks
        if number:
            lost += found.detach() * number
    (fsdp_on_after_backward if isinstance(model, FullySharded) else ddp_on_after_backward)(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return _over_ranks(float(lost))[0] / samples


def _loss(model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    batch = _to(batch, next(model.parameters()).device)
    if loss is None:
        found: Tensor = model(batch)
        return found
    inputs, targets = batch
    return loss(model(inputs), targets)


def _groups(loader: Iterable[Any], number: int) -> Iterator[list[tuple[Any, int]]]:
    """Batches of each step with their numbers of samples, equally many on all ranks."""
    source = ((batch, samples) for batch in loader if (samples := _samples(batch)))
    last: Any = None
    while True:
        group = [pair for _, pair in zip(range(number), source, strict=False)]
        if group:
            last = group[-1][0]
        most, lacks = _over_ranks(float(len(group)), float(last is None), operation="MAX")
        if lacks:  # asked of all ranks, so that all raise
            raise ValueError(
                "data: a rank has no samples in an epoch; give each at least one, and what can be gone through again"
            )
        if not most:
            return
        yield group + [(last, 0)] * (int(most) - len(group))


def _samples(batch: Any) -> int:
    """How many samples a batch has.

    >>> _samples({"x": [torch.zeros(3, 2), torch.zeros(3)]})
    3
    """
    first = batch
    while not isinstance(first, Tensor):
        parts = list(first.values() if isinstance(first, dict) else first)
        if not parts or isinstance(first, str):
            raise ValueError(
                f"data: expected batches of tensors, in tuples, lists or dicts; got {type(batch).__name__}"
            )
        first = parts[0]
    return len(first)


def _to(batch: Any, device: torch.device) -> Any:
    """A batch on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: _to(x, device) for name, x in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_to(x, device) for x in batch]
        return parts if isinstance(batch, list) else tuple(parts)
    return batch


def _loader(data: Iterable[Any] | Dataset[Any], batch_size: int, shuffle: bool, seed: int) -> Iterable[Any]:
    """A rank's batches: of a Dataset those of its samples, else the data itself."""
    if not isinstance(data, Dataset) or isinstance(data, IterableDataset):
        return data
    sampler = MeshSampler(data, init_mesh(), shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
    return DataLoader(data, batch_size, sampler=sampler)


def _over_ranks(*numbers: float, operation: str = "SUM") -> list[float]:
    """The sums, or the largest, of all ranks' numbers."""
    found = torch.tensor(numbers, dtype=torch.float64, device=current())
    dist.all_reduce(found, getattr(dist.ReduceOp, operation))
    return list(found.tolist())


def _backend(kind: str) -> str:
    """The best backend for devices of a kind, beside the one for CPUs."""
    best = next((name for name in BACKENDS.get(kind, ()) if available(name)), None)
    return GLOO if best is None else f"{CPU}:{GLOO},{kind}:{best}"


def _now(device: torch.device) -> float:
    """The time at which a device has done all that it was given."""
    if device.type != CPU:
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
