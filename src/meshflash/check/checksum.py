"""A small job with a known answer: attention on a batch split over ranks, and the sum of all outputs.

Every rank computes its inputs by a formula, so the sums depend on no random generator and no machine. The expected sums
come from plain float64 attention on the same inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshflash.api import flash_attention
from meshflash.runtime import devices
from meshflash.runtime.world import World

#: The largest relative error of a checksum that passes: that of float32 kernels, with a margin for summation order.
TOLERANCE = 1e-4
#: Scores that the reference holds at a time; bounds its memory to 128 MiB in float64.
REFERENCE_SCORES = 2**24


@dataclass(frozen=True)
class Part:
    """The result of one rank, which `run` gathers on rank 0."""

    rank: int
    device: str
    local_batch: int
    start: int
    checksum: float
    expected: float
    milliseconds: float

    @property
    def is_right(self) -> bool:
        """Whether the checksum matches the expected one."""
        return abs(self.checksum - self.expected) <= TOLERANCE * abs(self.expected)


def share(batch: int, world: int, rank: int) -> tuple[int, int]:
    """Return how many rows of a batch a rank has, and its first row; the first ranks take the remainder.

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
    total, expected, ms = 0.0, 0.0, 0.0
    if local:
        flash_attention(q, k, v)  # the first call compiles
        out, ms = timed(lambda: flash_attention(q, k, v), world.device)
        total, expected = float(out.double().sum()), reference(q, k, v)
    index = world.device.index
    mine = Part(world.rank, world.device.type if index is None else str(index), local, start, total, expected, ms)
    if world.world_size == 1:
        return [mine]
    parts: list[Any] | None = None if world.rank else [None] * world.world_size
    dist.gather_object(mine, parts)
    return parts


def reference(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the sum of the attention outputs of one head in float64, by the definition.

    >>> x = torch.zeros(1, 3, 1, 2)
    >>> reference(x, x, x + 1)
    6.0
    """
    q, k, v = (x.squeeze(2).double() for x in (q, k, v))
    sums = v.sum(-1, keepdim=True)  # only the sum over the head dim is wanted: it commutes with the weights
    block = max(1, REFERENCE_SCORES // max(1, k.shape[1]))
    total = 0.0
    for q_b, k_b, sums_b in zip(q, k, sums, strict=True):
        for rows in q_b.split(block):
            total += float((torch.softmax(rows @ k_b.T * q.shape[-1] ** -0.5, dim=-1) @ sums_b).sum())
    return total


def timed(function: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """Return the result of a function, and the milliseconds that the device takes for it."""
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
    """Return the lines that the job prints: each rank's sums and times, those of all ranks, and PASS or FAIL."""
    kind = world.device.type
    devices_name = "devices" if kind == devices.CPU else "GPUs"
    total, expected = (sum(getattr(part, name) for part in parts) for name in ("checksum", "expected"))
    wrong = [part.rank for part in parts if not part.is_right]
    apart = abs(total - expected) / abs(expected) if expected else abs(total)
    verdict = f"FAIL: wrong on rank {', '.join(map(str, wrong))}" if wrong else "PASS"
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
        f"{f'Global checksum across all {devices_name}':<34} : {total:.6f}",
        f"{'Expected checksum (float64)':<34} : {expected:.6f}",
        f"{'Max kernel time among all ranks':<34} : {max(part.milliseconds for part in parts):.3f} ms",
        f"{f'World size (num ranks / {devices_name})':<34} : {world.world_size}",
        rule,
        f"{verdict} (relative error {apart:.1e}, at most {TOLERANCE:g})",
    ]
    return "\n".join(lines)
