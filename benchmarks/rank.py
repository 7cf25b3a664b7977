"""One rank of a schedule alone: its program with real kernels and a transport that moves nothing, beside one kernel.

The difference is what a schedule costs besides communication: kernels on parts of the keys, merges, copies, launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import Rows, one_table
from meshflash.api import flash_attention
from meshflash.bench.cases import Case
from meshflash.bench.columns import Column
from meshflash.bench.tables import SCHEDULE
from meshflash.bench.timing import interleaved
from meshflash.comm.transports.loopback import Loopback
from meshflash.core.program import Direction
from meshflash.core.tiles import worklist
from meshflash.engine.executable import MeshExecutable, Plan
from meshflash.engine.local import rows_of
from meshflash.engine.memory import pool
from meshflash.engine.placement import Setting
from meshflash.engine.trace import recording
from meshflash.kernels import registry as kernels
from meshflash.kernels.contract import Features, Grads, accumulator_dtype, new_outputs
from meshflash.schedules import registry

SINGLE_KERNEL = "single kernel"
PASSES: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class RankRow:
    """A rank's own time in one pass, the time of its kernels, and that of a single kernel over as many pairs.

    `ran` names the kernels of its steps, `single_kernel_ran` the single kernel. `ratio` is the time over that kernel's.
    """

    schedule: str
    direction: str
    world: int
    rank: int
    case: Case
    kernel: str
    ran: str
    single_kernel_ran: str
    ms: float
    kernels_ms: float
    single_kernel_ms: float
    ratio: float


def run(case: Case, schedules: tuple[str, ...], world: int, rank: int, kernel: str, rounds: int) -> list[RankRow]:
    """Return a row for each pass of each schedule; the tokens of the case are those of all ranks."""
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank}: expected 0 to {world - 1}")
    device = torch.device(case.device)
    rows = []
    for schedule in schedules:
        alone = _LoneRank(case, schedule, world, rank, kernel, device)
        for direction in PASSES:
            functions = {schedule: alone.call(direction), SINGLE_KERNEL: alone.single_kernel(direction)}
            ran = {}
            for name, function in functions.items():
                with kernels.record_kernels() as seen:
                    function()
                ran[name] = seen.names(direction)
            ms = interleaved(functions, device, rounds)
            ratio = ms[schedule] / ms[SINGLE_KERNEL]
            times = ms[schedule], alone.time_kernels(direction), ms[SINGLE_KERNEL]
            rows.append(
                RankRow(
                    schedule, direction, world, rank, case, kernel, ran[schedule], ran[SINGLE_KERNEL], *times, ratio
                )
            )
        pool(device).clear()
    return rows


class _LoneRank:
    """A rank without peers: its messages are never sent nor received."""

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
        plan = Plan(schedule, layout, layout, lse=False)
        self.prepared = MeshExecutable(plan, case.rule, case.heads, case.kv_heads, rank, setting, registry.build)
        self.features, self.transport = Features(scale=case.head_dim**-0.5), Loopback(rank, world)
        self.saved = self.q.new_empty(self.prepared.saved_bytes, dtype=torch.uint8)
        self.out, self.lse = new_outputs(self.q, self.v)
        self.call("forward")()
        for arena in pool(device)._free:  # messages never arrive: random data, because a GPU draws less power on zeros
            arena.memory[: arena.bytes // 2 * 2].view(torch.bfloat16).normal_(generator=generator)
        pairs = worklist(case.rule, layout.ranges[rank], ((range(case.tokens)),)).pairs
        keys = max(1, round(pairs / max(1, rows)))
        self.many = [tensor(keys, case.kv_heads).requires_grad_() for _ in range(2)]
        self.queries = self.q.clone().requires_grad_()

    def call(self, direction: Direction) -> Callable[[], Any]:
        """Return the call of a pass."""
        return self._forward if direction == "forward" else self._backward

    def time_kernels(self, direction: Direction) -> float:
        """Return the milliseconds of its kernels in one run."""
        with recording() as trace:
            self.call(direction)()
        return trace.seconds("attend") * 1e3

    def single_kernel(self, direction: Direction) -> Callable[[], Any]:
        """Return a call of one kernel over as many pairs: every query sees the mean number of keys."""
        call = partial(
            flash_attention, self.queries, *self.many, kernel=self.kernel, deterministic=self.case.deterministic
        )
        if direction == "forward":
            return call
        out, _ = call(return_lse=True)  # so that the backward is our own, whose kernel is recorded
        return partial(torch.autograd.grad, out, (self.queries, *self.many), self.dout, retain_graph=True)

    def _forward(self) -> None:
        tensors = [self.q, self.k, self.v, self.out, self.lse, self.saved]
        self.prepared.run("forward", tensors, self.features, self.transport)

    def _backward(self) -> None:
        rows = rows_of(self.out, self.lse, self.dout, None)
        grads = Grads.like(self.q, self.k, self.v)
        tensors = [self.q, self.k, self.v, self.out, self.lse, self.dout, rows.delta_BHT]
        tensors += [grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, self.saved]
        self.prepared.run("backward", tensors, self.features, self.transport)


COLUMNS = (
    SCHEDULE,
    Column("kernel", "kernel", is_text=True),
    Column("pass", "pass", is_text=True),
    Column("ms", lambda row: f"{row['ms']:.3f}"),
    Column("its kernels\n(ms)", lambda row: f"{row['kernels_ms']:.3f}"),
    Column("single kernel\n(ms)", lambda row: f"{row['single_kernel_ms']:.3f}"),
    Column("ratio", lambda row: f"{row['ratio']:.3f}"),
)


def title(rows: Rows) -> str:
    """Return the setting in words."""
    row = rows[0]
    tokens = row["tokens"] // row["world"]
    return f"rank {row['rank']} of {row['world']}, {tokens:,} tokens each, {row['mask']}, on {row['device']}"


BENCHMARK = one_table("rank", {"kernels_ms", "single_kernel_ms"}, COLUMNS, title)
