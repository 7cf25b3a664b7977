"""A small job with a known answer: a batch is split over ranks, each runs attention, and the outputs are summed.

Inputs come from a formula, so the checksums do not depend on a random generator or a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as _distributed

from meshflash.api import flash_attention
from meshflash.runtime import devices
from meshflash.runtime.world import World

dist: Any = _distributed  # torch does not declare all that it exports here


@dataclass(frozen=True)
class Part:
    """The result of one rank."""

    rank: int
    device: str
    local_batch: int
    start: int
    checksum: float
    milliseconds: float


def share(batch: int, world: int, rank: int) -> tuple[int, int]:
    """Return the number of batch rows of a rank, and its first row; the first ranks take the remainder.

    >>> [share(10, 4, rank) for rank in range(4)]
    [(3, 0), (3, 3), (2, 6), (2, 8)]
    """
    each, more = divmod(batch, world)
    return each + (rank < more), rank * each + min(rank, more)


def inputs(rank: int, batch: int, tokens: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a rank, with one head, in float32.

    Args:
        rank: The rank, which enters the formula.
        batch: The number of batch rows of this rank.
        tokens: The number of tokens.
        dim: The head dimension.
        device: The device of the tensors.
    """
    b, t, d = (torch.arange(n, dtype=torch.float32, device=device) for n in (batch, tokens, dim))
    x = 0.01 * (rank + 1) + 0.001 * b[:, None, None] + 0.0001 * t[None, :, None] + 0.00001 * d[None, None, :]
    x = x[:, :, None, :]
    return x, 0.5 * x, 0.3 * x


def run(world: World, batch: int, tokens: int, dim: int) -> list[Part] | None:
    """Run the job on this rank; return the results of all ranks on rank 0, and None on the others.

    Args:
        world: This rank.
        batch: The number of batch rows of all ranks together.
        tokens: The number of tokens.
        dim: The head dimension.
    """
    local, start = share(batch, world.world_size, world.rank)
    q, k, v = inputs(world.rank, local, tokens, dim, world.device)
    total, ms = 0.0, 0.0
    if local:
        flash_attention(q, k, v)  # the first call compiles
        out, ms = timed(lambda: flash_attention(q, k, v), world.device)
        total = float(out.double().sum())
    index = world.device.index
    mine = Part(world.rank, world.device.type if index is None else str(index), local, start, total, ms)
    if world.world_size == 1:
        return [mine]
    parts: list[Any] | None = None if world.rank else [None] * world.world_size
    dist.gather_object(mine, parts)
    return parts


def timed(function: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """Return the result of a function, and its milliseconds on the device."""
    if device.type == devices.CPU:
        begin = time.perf_counter()
        out = function()
        return out, (time.perf_counter() - begin) * 1e3
    module: Any = torch.get_device_module(device)
    first, last = (module.Event(enable_timing=True) for _ in range(2))
    first.record()
    out = function()
    last.record()
    last.synchronize()
    return out, float(first.elapsed_time(last))


def report(parts: list[Part], world: World, batch: int, tokens: int, dim: int) -> str:
    """Return the report that the job prints."""
    kind = world.device.type
    rule = "=" * 53
    lines = [
        f"World size = {world.world_size}, {kind.upper()} devices on node = {devices.count(kind) or 1}",
        *(f"[Rank {part.rank}] Using device {part.device}" for part in parts),
        f"Global config: B = {batch}, T = {tokens}, D = {dim}",
        *(f"[Rank {part.rank}] local_B = {part.local_batch}, start_B = {part.start}" for part in parts),
        *(
            f"[Rank {part.rank}] local_checksum = {part.checksum:.6f}, kernel_time = {part.milliseconds:.3f} ms"
            for part in parts
        ),
        rule,
        f"Global checksum across all GPUs : {sum(part.checksum for part in parts):.6f}",
        f"Max kernel time among all ranks : {max(part.milliseconds for part in parts):.3f} ms",
        f"World size (num ranks / GPUs)   : {world.world_size}",
        rule,
    ]
    return "\n".join(lines)
