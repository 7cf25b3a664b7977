"""The engine's own time for each step of a program: kernels and transport do nothing."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from unittest import mock

import torch

from benchmarks import protocol
from benchmarks.protocol import one_table
from meshflash.bench.columns import Column
from meshflash.bench.tables import SCHEDULE
from meshflash.comm.transports.loopback import Loopback
from meshflash.core.mask import Mask
from meshflash.core.program import Direction
from meshflash.engine import binding
from meshflash.engine.executable import MeshExecutable, Plan
from meshflash.engine.placement import Setting
from meshflash.kernels.contract import Features, Grads, Inputs, Kernel, KernelRequest, Outputs, Rows
from meshflash.kernels.registry import Choice
from meshflash.schedules import registry

#: Calls in a round.
CALLS = 50


@dataclass(frozen=True)
class EngineRow:
    """One program: its number of steps, and the engine's microseconds for a step."""

    schedule: str
    direction: str
    world: int
    steps: int
    microseconds: float


class _NoOpKernel(Kernel):
    """A kernel that computes nothing."""

    name = "nothing"
    summary = "computes nothing"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return None

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        assert outputs is not None
        return outputs

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        assert grads is not None
        return grads


def run(schedules: tuple[str, ...], world: int, rounds: int) -> list[EngineRow]:
    """Return the engine's time on rank 0 of each schedule for a short causal sequence, with copies and additions."""
    rows = []
    with mock.patch.object(binding, "choose", return_value=Choice(_NoOpKernel(), "it is given")):
        for schedule in schedules:
            layout = registry.default_layout(schedule)(64 * world, world)
            for direction in ("forward", "backward"):
                rows.append(_measure(schedule, Plan(schedule, layout, layout), direction, world, rounds))
    return rows


def _measure(schedule: str, plan: Plan, direction: Direction, world: int, rounds: int) -> EngineRow:
    q, k = torch.zeros(1, 64, 4, 16), torch.zeros(1, 64, 2, 16)
    lse = torch.zeros(1, 4, 64)
    setting = Setting(1, 16, 16, q.dtype, q.dtype, q.device, "auto", False)
    prepared = MeshExecutable(plan, Mask.causal(), 4, 2, 0, setting, registry.build)
    forward = [q, k, k.clone(), q.clone(), lse]
    tensors = forward if direction == "forward" else [q, k, k, q, lse, q, lse, q.clone(), k.clone(), k.clone()]
    transport, features = _NoOpTransport(0, world), Features(scale=1.0)
    tensors.append(q.new_empty(prepared.saved_bytes, dtype=torch.uint8))
    prepared.run(direction, tensors, features, transport)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(CALLS):
            prepared.run(direction, tensors, features, transport)
        times.append((time.perf_counter() - begin) / CALLS)
    steps = len(prepared.program(direction).steps)
    return EngineRow(schedule, direction, world, steps, statistics.median(times) / steps * 1e6)


class _NoOpTransport(Loopback):
    """A transport whose calls cost nothing, not even counting."""

    def exchange(self, *_: object) -> None:
        return None

    def collective(self, *_: object) -> None:
        return None

    def wait(self, handle: object) -> None:
        return None


COLUMNS = (
    SCHEDULE,
    Column("pass", "pass", is_text=True),
    Column("steps", "steps"),
    Column("us per step", lambda row: f"{row['microseconds']:.1f}"),
)


def title(rows: protocol.Rows) -> str:
    """Return the setting in words."""
    return f"the engine's own time, {rows[0]['world']} ranks"


BENCHMARK = one_table("engine", {"steps", "microseconds"}, COLUMNS, title)
