"""Attention over ranks on one machine: each schedule beside the others, beside one rank, and beside plain torch.

All of them do the same total work in turns, in the same processes; each is checked before it is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as _distributed
from torch.nn import functional

from meshflash.api import attention, flash_attention
from meshflash.bench.kernels import WORST_ERROR, parse_mask
from meshflash.bench.peers import peer_bytes
from meshflash.bench.timing import watched
from meshflash.core.mask import Mask
from meshflash.engine.membership import member
from meshflash.engine.memory import pool
from meshflash.launch.processes import Tell, run_ranks
from meshflash.schedules.registry import parse
from meshflash.sharding import shard, unshard

dist: Any = _distributed  # torch does not declare all that it exports here

ONE = "one rank"
PLAIN = "torch all-gather"
PASSES = ("forward", "forward+backward")

Local = tuple[Tensor, Tensor, Tensor, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """One problem, over all ranks."""

    tokens: int = 8192
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    mask: str = "causal"
    dtype: str = "float32"

    @property
    def rule(self) -> Mask:
        """The mask that the name stands for."""
        return parse_mask(self.mask, self.tokens)

    def tensors(self) -> Local:
        """q, k, v and the gradient of the output, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, dout = (
            torch.randn(self.batch, self.tokens, h, self.head_dim, generator=generator).to(getattr(torch, self.dtype))
            for h in heads
        )
        return q, k, v, dout


@dataclass(frozen=True)
class Row:
    """One schedule on one pass: time, speed against one rank, what moved, what it took, and its error.

    Bytes received and peak bytes are those of the rank with the most; the mean is over all ranks.
    """

    schedule: str
    direction: str
    world: int
    shape: Shape
    ms: float
    speedup: float
    received_bytes: int
    received_mean: float
    peer_bytes: int | None
    peak_bytes: int
    error: float

    def flat(self) -> dict[str, Any]:
        """For a record."""
        row = asdict(self)
        return {**row.pop("shape"), **{"pass" if key == "direction" else key: value for key, value in row.items()}}


def run(
    shape: Shape, schedules: tuple[str, ...], world: int, rounds: int, threads: int = 1, listen: Tell | None = None
) -> list[Row]:
    """Every schedule's rows, forward and forward+backward; one that is wrong raises instead of being timed."""
    for schedule in schedules:
        if schedule not in (ONE, PLAIN):
            parse(schedule)
    if shape.dtype not in {str(dtype).removeprefix("torch.") for dtype in WORST_ERROR}:
        raise ValueError(f"dtype {shape.dtype!r}: expected one of float32, bfloat16, float16, float64")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.kv_heads} key heads do not divide {shape.heads} query heads")
    _ = shape.rule
    results = run_ranks(world, _measure, shape, schedules, rounds, threads=threads, timeout=3600.0, listen=listen)
    rows: list[Row] = results[0]
    return rows


def _measure(rank: int, world: int, tell: Tell, shape: Shape, schedules: tuple[str, ...], rounds: int) -> list[Row]:
    """One rank's part; the rows are rank 0's."""
    say = tell if rank == 0 else lambda _: None
    whole, mask = shape.tensors(), shape.rule
    one = _Candidate(ONE, shape, mask, whole, world)
    calls = {ONE: one} | {name: _Candidate(name, shape, mask, whole, world) for name in schedules}
    seen: dict[str, _Seen] = {}
    errors: dict[str, tuple[float, float]] = {ONE: (0.0, 0.0)}
    tiny = torch.zeros(1, 1, 1, 8, requires_grad=True)
    # the first use of the op, of its backward and of the profiler takes seconds
    watched(lambda: flash_attention(tiny, tiny, tiny).sum().backward(), torch.device("cpu"))
    for name, call in calls.items():
        say(f"checking {name}")
        if name == ONE:
            seen[name] = call.watch() if rank == 0 else _Seen([], (0.0, 0.0), (0, 0), (0, 0))
            continue
        seen[name] = call.watch()
        assert call.layout is not None
        got = [unshard(x, call.layout) for x in seen[name].results]
        errors[name] = _errors(got, seen[ONE].results, shape) if rank == 0 else (0.0, 0.0)
    times: dict[tuple[str, str], list[float]] = {}
    for n in range(rounds):
        say(f"round {n + 1} of {rounds}")
        for direction in PASSES:
            for name, call in calls.items():
                milliseconds = _time(call, direction, alone=name == ONE, rank=rank)
                times.setdefault((name, direction), []).append(milliseconds)
    rows = []
    for n, direction in enumerate(PASSES):
        ms = {name: statistics.median(times.get((name, direction), [_most(seen[name].ms[n])])) for name in calls}
        most = {name: [int(_most(x[n])) for x in (seen[name].received, seen[name].peaks)] for name in calls}
        for name in calls:
            peer = None if name in (ONE, PLAIN) else peer_bytes(name, shape, world, direction)
            received, peak = most[name]
            mean = _sum(seen[name].received[n]) / world
            rows.append(
                Row(
                    schedule=name,
                    direction=direction,
                    world=1 if name == ONE else world,
                    shape=shape,
                    ms=ms[name],
                    speedup=ms[ONE] / ms[name],
                    received_bytes=received,
                    received_mean=mean,
                    peer_bytes=peer,
                    peak_bytes=peak,
                    error=errors[name][n],
                )
            )
    return rows


@dataclass(frozen=True, eq=False)
class _Seen:
    """What one run of a candidate showed: output and gradients; and of each pass milliseconds, bytes, peak."""

    results: list[Tensor]
    ms: tuple[float, float]
    received: tuple[int, int]
    peaks: tuple[int, int]


class _Candidate:
    """One way to attend, on this rank's tokens."""

    def __init__(self, name: str, shape: Shape, mask: Mask, whole: Local, world: int) -> None:
        self.name, self.shape, self.world = name, shape, world
        if name == ONE:
            self.layout = None
            self.local = whole
        else:
            home = "ring" if name == PLAIN else name
            self.layout = parse(home)[0].layout(shape.tokens, world)
            self.local = tuple(shard(x, self.layout).contiguous() for x in whole)  # type: ignore[assignment]
        self.leaves = [x.requires_grad_() for x in self.local[:3]]
        self._attention = self._function(mask)

    def forward(self) -> Tensor:
        return self._attention(*self.leaves)

    def both(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        return torch.autograd.grad(self.forward(), self.leaves, self.local[3])

    def watch(self) -> _Seen:
        """Run both passes once, looking at results, bytes and memory."""
        device = torch.device("cpu")
        pool(device).clear()  # scratch that another schedule left would not be seen
        if self.name != ONE:
            dist.barrier()
        counters = None
        if self.name not in (ONE, PLAIN):
            counters = member(dist.group.WORLD.group_name).transport(device).counters
            counters.clear()
        received, begin = [], time.perf_counter()
        forward = watched(self.forward, device)
        ms = [(time.perf_counter() - begin) * 1e3]
        received.append(counters.received_bytes if counters else 0)
        backward = watched(lambda: torch.autograd.grad(forward.result, self.leaves, self.local[3]), device)
        ms.append((time.perf_counter() - begin) * 1e3)
        received.append(counters.received_bytes if counters else 0)
        if self.name == PLAIN:  # K and V gathered, and their gradients summed and scattered
            gathered = (self.world - 1) * sum(x.nbytes for x in self.local[1:3])
            received = [gathered, 2 * gathered]
        both = max(forward.peak_bytes, forward.held_bytes + backward.peak_bytes)
        return _Seen(
            [forward.result.detach(), *backward.result],
            (ms[0], ms[1]),
            (received[0], received[1]),
            (forward.peak_bytes, both),
        )

    def _function(self, mask: Mask) -> Attention:
        if self.name == ONE:
            return lambda q, k, v: flash_attention(q, k, v, mask=mask)
        if self.name == PLAIN:
            return self._plain(mask)
        return lambda q, k, v: attention(q, k, v, mask=mask, schedule=self.name, layout=self.layout)

    def _plain(self, mask: Mask) -> Attention:
        """What one writes in plain torch: gather K and V, then its own attention with a matrix as the mask."""
        from torch.distributed import _functional_collectives as collectives

        # torch 2.13 renamed it and warns of the old name
        old = "all_gather_tensor_autograd"
        all_gather = getattr(collectives, "all_gather_single_autograd", None) or getattr(collectives, old)
        assert self.layout is not None
        mine = self.layout.positions(dist.get_rank())
        others = np.concatenate([self.layout.positions(rank) for rank in range(self.world)])
        matrix = torch.from_numpy(mask.visible(mine[:, None], others[None, :]))

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (all_gather(x, 1, dist.group.WORLD) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return functional.scaled_dot_product_attention(q, k, v, matrix, enable_gqa=True).transpose(1, 2)

        return plain


def _time(call: _Candidate, direction: str, alone: bool, rank: int) -> float:
    """Milliseconds until the last rank is done; alone, of rank 0 while the others wait."""
    function = call.forward if direction == "forward" else call.both
    dist.barrier()
    begin = time.perf_counter()
    if not alone or rank == 0:
        function()
    elapsed = torch.tensor([(time.perf_counter() - begin) * 1e3])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _errors(got: list[Tensor], want: list[Tensor] | None, shape: Shape) -> tuple[float, float]:
    """The relative error of the output, and the largest of output and gradients, against one rank."""
    if want is None:
        return 0.0, 0.0
    each = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, want, strict=True)]
    worst = WORST_ERROR[getattr(torch, shape.dtype)]
    if not max(each) <= worst:
        raise RuntimeError(f"relative error {max(each):.1e} against one rank, where {shape.dtype} allows {worst:.0e}")
    return each[0], max(each)


def _most(number: float) -> float:
    """The largest of all ranks' numbers."""
    return _of_all(number, dist.ReduceOp.MAX)


def _sum(number: float) -> float:
    """The sum of all ranks' numbers."""
    return _of_all(number, dist.ReduceOp.SUM)


def _of_all(number: float, operation: Any) -> float:
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return float(tensor)
