"""One rank of many, alone: its program by real kernels over a transport that moves nothing, beside one kernel.

What a schedule costs a rank besides its messages: kernels on parts of the keys, sums of parts, copies, launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshflash.api import flash_attention
from meshflash.bench.cases import Case
from meshflash.bench.timing import interleaved
from meshflash.comm.transports.loopback import Loopback
from meshflash.core.program import Direction
from meshflash.core.tiles import worklist
from meshflash.engine import mesh
from meshflash.engine.local import rows_of
from meshflash.engine.memory import pool
from meshflash.engine.placement import Setting
from meshflash.engine.trace import recording
from meshflash.kernels import registry as kernels
from meshflash.kernels.contract import Features, Grads, accumulator_dtype, new_outputs
from meshflash.schedules import registry

ONE = "one kernel"
PASSES: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class RankRow:
    """A rank's own time in one pass, the share of its kernels in it, and one kernel over as many pairs.

    `ran` are the kernels that its steps ran, `one_ran` is the one kernel beside them.
    """

    schedule: str
    direction: str
    world: int
    rank: int
    case: Case
    kernel: str
    ran: str
    one_ran: str
    ms: float
    attend_ms: float
    one_ms: float
    ratio: float


def run(case: Case, schedules: tuple[str, ...], world: int, rank: int, kernel: str, rounds: int) -> list[RankRow]:
    """The passes of each schedule; the tokens of the case are those of all ranks."""
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank}: expected 0 to {world - 1}")
    device = torch.device(case.device)
    rows = []
    for schedule in schedules:
        played = _Played(case, schedule, world, rank, kernel, device)
        for direction in PASSES:
            functions = {schedule: played.of(direction), ONE: played.one(direction)}
            ran = {}
            for name, function in functions.items():
                with kernels.record_kernels() as seen:
                    function()
                ran[name] = seen.names(direction)
            ms = interleaved(functions, device, rounds)
            ratio = ms[schedule] / ms[ONE]
            times = ms[schedule], played.attends(direction), ms[ONE]
            rows.append(RankRow(schedule, direction, world, rank, case, kernel, ran[schedule], ran[ONE], *times, ratio))
        pool(device).clear()
    return rows


class _Played:
    """A rank whose peers are not there."""

    def __init__(self, case: Case, schedule: str, world: int, rank: int, kernel: str, device: torch.device) -> None:
        self.case, self.kernel, self.device = case, kernel, device
        layout = registry.default_layout(schedule)(case.tokens, world)
        rows, dtype = layout.lengths[rank], case.torch_dtype
        generator = torch.Generator(device).manual_seed(0)

        def tensor(tokens: int, heads: int) -> Tensor:
            shape = (case.batch, tokens, heads, case.head_dim)
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.q, self.k, self.v, self.dout = (
            tensor(rows, heads) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
        )
        setting = Setting(
            case.batch,
            case.head_dim,
            case.head_dim,
            dtype,
            accumulator_dtype(dtype),
            device,
            kernel,
            case.deterministic,
        )
        plan = mesh.Plan(schedule, layout, layout, lse=False)
        self.prepared = mesh.Prepared(plan, case.rule, case.heads, case.kv_heads, rank, setting)
        self.features, self.transport = Features(scale=case.head_dim**-0.5), Loopback(rank, world)
        self.saved = self.q.new_empty(self.prepared.saved_bytes, dtype=torch.uint8)
        self.out, self.lse = new_outputs(self.q, self.v)
        self.of("forward")()
        for arena in pool(device)._free:  # messages that never come: numbers, for zeros take less power
            arena.memory[: arena.bytes // 2 * 2].view(torch.bfloat16).normal_(generator=generator)
        pairs = worklist(case.rule, layout.ranges[rank], ((range(case.tokens)),)).pairs
        keys = max(1, round(pairs / max(1, rows)))
        self.many = [tensor(keys, case.kv_heads).requires_grad_() for _ in range(2)]
        self.queries = self.q.clone().requires_grad_()

    def of(self, direction: Direction) -> Callable[[], Any]:
        """Its pass."""
        return self._forward if direction == "forward" else self._backward

    def attends(self, direction: Direction) -> float:
        """Milliseconds of its kernels alone, in one run."""
        with recording() as trace:
            self.of(direction)()
        return trace.seconds("attend") * 1e3

    def one(self, direction: Direction) -> Callable[[], Any]:
        """One kernel over as many pairs: all queries see as many keys as they do on average."""
        call = partial(
            flash_attention, self.queries, *self.many, kernel=self.kernel, deterministic=self.case.deterministic
        )
        if direction == "forward":
            return call
        return partial(torch.autograd.grad, call(), (self.queries, *self.many), self.dout, retain_graph=True)

    def _forward(self) -> None:
        tensors = [self.q, self.k, self.v, self.out, self.lse, self.saved]
        self.prepared.run("forward", tensors, self.features, self.transport)

    def _backward(self) -> None:
        rows = rows_of(self.out, self.lse, self.dout, None)
        grads = Grads.like(self.q, self.k, self.v)
        tensors = [self.q, self.k, self.v, self.out, self.lse, self.dout, rows.delta_BHT]
        tensors += [grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, self.saved]
        self.prepared.run("backward", tensors, self.features, self.transport)
