"""Training loops of CS336 by DDP and FSDP: start a rank, train, and time an epoch.

A step equals that of one process with the samples of all ranks, so losses are weighted by the number of samples. A rank
that has run out of batches repeats one with weight 0, because backward is a collective. `meshflash.parallel.accumulate`
does the same for models that return sums over labels; models and losses here are arbitrary.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only
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

Loss = Callable[[Any, Any], Tensor]

#: The number of times that a rank tries to connect to the store of rank 0.
CONNECT_ATTEMPTS = 20


def setup_ddp(
    rank: int | None = None, world_size: int | None = None, backend: str | None = None
) -> tuple[int, int, int]:
    """Select this process's device, make the default process group and return (rank, world_size, local_rank).

    An existing process group is used as it is. A process alone has none.

    Args:
        rank: The rank of this process, as under `torch.multiprocessing.spawn`; ranks then connect at MASTER_ADDR and
            MASTER_PORT. None means what the launcher says, see `meshflash.init`.
        world_size: The number of ranks. Give it with `rank`, or neither.
        backend: The backend of the process group; None takes the best one for the device.

    >>> setup_ddp()
    (0, 1, 0)
    >>> cleanup_ddp()
    """
    if rank is None or world_size is None:
        if rank is not None or world_size is not None:
            raise ValueError("setup_ddp: pass both rank and world_size, or neither to use the launcher's")
        here = init(backend)
        return here.rank, here.world_size, here.local_rank
    if not 0 <= rank < world_size:
        raise ValueError(f"setup_ddp: rank={rank}; expected 0 to {world_size - 1} of world_size={world_size}")
    kind = kind_here()
    local_rank = int(os.environ.get("LOCAL_RANK", rank if kind == CPU else rank % count(kind)))
    if not dist.is_initialized():
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if absent:
            raise ValueError(
                f"setup_ddp: set {' and '.join(absent)}, where ranks connect, or pass no rank and world_size"
            )
        take_device(kind, local_rank)
        _init_process_group(backend or _backend(kind), rank, world_size)
    elif (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"setup_ddp: rank={rank}, world_size={world_size}, but this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()} already; call cleanup_ddp first"
        )
    return rank, world_size, local_rank


def _init_process_group(backend: str, rank: int, world_size: int) -> None:
    """Make the default process group at MASTER_ADDR and MASTER_PORT.

    The store of an earlier group may still listen there, with that group's addresses. So each rank writes a nonce and
    waits for rank 0's answer, which only its new store gives. If the old store closes meanwhile, try again.
    """
    for attempts_left in reversed(range(CONNECT_ATTEMPTS)):
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, world_size))
            if rank:
                nonce = uuid.uuid4().hex
                store.set(f"question/{rank}", nonce)
                store.get(f"answer/{nonce}")
            else:
                for other in range(1, world_size):
                    store.set(f"answer/{store.get(f'question/{other}').decode()}", "here")
            break
        except dist.DistNetworkError:
            if rank == 0 or not attempts_left:
                raise
            time.sleep(0.2)
    dist.init_process_group(backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size)


def cleanup_ddp() -> None:
    """Destroy the default process group and free the memory kept for it; do nothing without one."""
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def train_with_ddp(rank: int | None = None, world_size: int | None = None, **named: Any) -> list[float]:
    """Train a model by DDP and return the loss of each step, the same on all ranks.

    Weights and losses are those of one process with the samples of all ranks, however many each has. The model is
    trained in place. If there is no process group, one is made and destroyed at the end.

    Args:
        rank: The rank of this process, as in `setup_ddp`. None means what the launcher says.
        world_size: The number of ranks, as in `setup_ddp`.
        named: Keyword arguments of `train`.
    """
    return train(get_ddp, rank, world_size, **named)


def train_with_fsdp(
    rank: int | None = None, world_size: int | None = None, *, compute_dtype: torch.dtype | None = None, **named: Any
) -> list[float]:
    """Train a model by FSDP and return the loss of each step. The model keeps this rank's shards; see `after`.

    Args:
        rank: The rank of this process, as in `setup_ddp`. None means what the launcher says.
        world_size: The number of ranks, as in `setup_ddp`.
        compute_dtype: The dtype of gathered weights, as in `get_fsdp`.
        named: Keyword arguments of `train`.
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
    """Run the loop of `train_with_ddp` and `train_with_fsdp`; return the loss of each step.

    Args:
        wrap: The function that wraps the model: `get_ddp` or `get_fsdp`.
        rank: The rank of this process, as in `setup_ddp`.
        world_size: The number of ranks, as in `setup_ddp`.
        model: The model, or a function that makes it.
        data: A Dataset, whose samples `MeshSampler` distributes; or this rank's batches, such as a DataLoader, iterated
            once per epoch. The first dimension of all tensors counts samples.
        loss: A function of `model(inputs)` and targets, for batches that are pairs. It returns a mean over samples.
            None means that `model(batch)` is the loss.
        optimizer: The class of the optimizer, or a function that makes one from parameters.
        epochs: The number of passes over the data.
        accumulation_steps: The number of batches of each rank in a step. The last step of an epoch may have fewer.
        batch_size: The number of samples in a batch of a rank, for a Dataset.
        shuffle: Whether each epoch has its own order, for a Dataset.
        seed: The seed of these orders.
        backend: The backend of the process group, as in `setup_ddp`.
        after: A function that gets the wrapped model at the end, while the process group exists. Call
            `fsdp_gather_full_params` there.
        options: Options of the optimizer, such as `lr`.
    """
    if epochs < 1 or accumulation_steps < 1:
        raise ValueError(f"epochs={epochs}, accumulation_steps={accumulation_steps}: expected at least 1 of each")
    owns_group = not dist.is_initialized()
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
        if owns_group:
            cleanup_ddp()
    return losses


def benchmark_ddp(
    model: nn.Module,
    dataloader: Iterable[Any],
    epochs: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
) -> float:
    """Return the average seconds of an epoch on this rank; rank 0 prints each epoch and the average.

    The device is synchronized before each time is taken. All ranks must have equally many batches.

    Args:
        model: The model, wrapped by `get_ddp` or `get_fsdp`, or plain.
        dataloader: This rank's batches, iterated once per epoch.
        epochs: The number of epochs to time.
        optimizer: The optimizer, which makes a step after each batch. Without it gradients are dropped.
        loss: A function of `model(inputs)` and targets, for batches that are pairs. None means that `model(batch)` is
            the loss.
    """
    if epochs < 1:
        raise ValueError(f"epochs={epochs}: expected at least 1")
    device = next(model.parameters()).device
    prints = not dist.is_initialized() or dist.get_rank() == 0
    times = []
    for epoch in range(epochs):
        start = _now(device)
        for batch in dataloader:
            _loss(model, batch, loss).backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
        times.append(_now(device) - start)
        if prints:
            print(f"Epoch {epoch}: {times[-1]:.2f}s")
    average = sum(times) / len(times)
    if prints:
        print(f"Average per epoch: {average:.2f}s")
    return average


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, group: list[tuple[Any, int]], loss: Loss | None) -> float:
    """Make one step with a group of (batch, number of samples); return the mean loss over all ranks' samples."""
    device = next(model.parameters()).device
    samples = int(_all_reduce(float(sum(number for _, number in group)))[0])
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
    return _all_reduce(float(lost))[0] / samples


def _loss(model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    device = next(model.parameters()).device
    batch = tree_map_only(Tensor, lambda x: x.to(device), batch)
    if loss is None:
        return model(batch)
    inputs, targets = batch
    return loss(model(inputs), targets)


def _groups(loader: Iterable[Any], number: int) -> Iterator[list[tuple[Any, int]]]:
    """Yield the (batch, number of samples) pairs of each step, equally many on all ranks."""
    source = ((batch, samples) for batch in loader if (samples := _samples(batch)))
    last: Any = None
    while True:
        group = [pair for _, pair in zip(range(number), source, strict=False)]
        if group:
            last = group[-1][0]
        most, is_empty = _all_reduce(float(len(group)), float(last is None), operation="MAX")
        if is_empty:  # a maximum over ranks, so that all ranks raise
            raise ValueError(
                "data: a rank has no samples in an epoch; give each rank at least one, in data that can be reused"
            )
        if not most:
            return
        yield group + [(last, 0)] * (int(most) - len(group))


def _samples(batch: Any) -> int:
    """Return the number of samples of a batch.

    >>> _samples({"x": [torch.zeros(3, 2), torch.zeros(3)]})
    3
    """
    first = next(iter(tree_leaves(batch)), None)
    if not isinstance(first, Tensor):
        raise ValueError(f"data: expected batches of tensors, in tuples, lists or dicts; got {type(batch).__name__}")
    return len(first)


def _loader(data: Iterable[Any] | Dataset[Any], batch_size: int, shuffle: bool, seed: int) -> Iterable[Any]:
    """Return this rank's batches: a DataLoader over its samples of a Dataset, or the data itself."""
    if not isinstance(data, Dataset) or isinstance(data, IterableDataset):
        return data
    sampler = MeshSampler(data, init_mesh(), shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
    return DataLoader(data, batch_size, sampler=sampler)


def _all_reduce(*numbers: float, operation: str = "SUM") -> list[float]:
    """All-reduce numbers over ranks: sums, or maxima with `operation="MAX"`."""
    found = torch.tensor(numbers, dtype=torch.float64, device=current())
    dist.all_reduce(found, getattr(dist.ReduceOp, operation))
    return list(found.tolist())


def _backend(kind: str) -> str:
    """Return the best backend for devices of a kind, with gloo for CPU tensors."""
    best = next((name for name in BACKENDS.get(kind, ()) if available(name)), None)
    return GLOO if best is None else f"{CPU}:{GLOO},{kind}:{best}"


def _now(device: torch.device) -> float:
    """Synchronize the device and return the time in seconds."""
    if device.type != CPU:
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
