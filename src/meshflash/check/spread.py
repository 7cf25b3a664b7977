"""Cases spread over ranks: what a worker does with one, and the whole put together again for the oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshflash import Layout
from meshflash.api import attention
from meshflash.check.oracle import Case
from meshflash.core.program import Direction, Sizes
from meshflash.engine.membership import member
from meshflash.engine.memory import pool
from meshflash.engine.mesh import Plan
from meshflash.kernels.contract import accumulator_dtype
from meshflash.schedules.registry import home, parse, verified

WHOLE = ("q", "k", "v")


@dataclass(frozen=True)
class Item:
    """One case with the schedule and layouts that spread it; the schedule's own layout by default."""

    case: Case
    schedule: str
    world: int
    dtype: torch.dtype = torch.float32
    layout: Layout | None = None
    k_layout: Layout | None = None
    reduce_dtype: torch.dtype | None = None
    kernel: str = "auto"
    device: str = "cpu"
    transport: str = "auto"

    @property
    def lse(self) -> bool:
        """Whether the call asks for the LSE; where that changes what moves, only cases that need it do."""
        return self.case.lse_gradient or self.case.sinks or not parse(self.schedule)[0].keeps

    @property
    def q(self) -> Layout:
        return self.layout or home(self.schedule)(self.case.tokens, self.world)

    @property
    def k(self) -> Layout:
        tokens = self.case.tokens if self.case.k_tokens is None else self.case.k_tokens
        if self.k_layout is None and self.case.k_tokens is None:
            return self.q
        return self.k_layout or home(self.schedule)(tokens, self.world)


def shards(item: Item, leaves: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A rank's own leaves."""
    out = {}
    for name, x in leaves.items():
        part = x.detach()
        if name in WHOLE:
            rows = torch.from_numpy((item.q if name == "q" else item.k).positions(rank))
            part = part[:, rows.to(part.device)]
        out[name] = part.clone().requires_grad_()
    return out


@dataclass(frozen=True)
class Moved:
    """What one rank received from each, and the scratch that it held, in one pass; None where peers read it."""

    received: dict[int, int]
    scratch_bytes: int | None


#: Output, LSE and every gradient of one rank, and what each pass moved.
Result = tuple[dict[str, Tensor], dict[Direction, Moved]]


def run_item(rank: int, group: Any, item: Item) -> Result:
    """A rank's part of one case."""
    case = item.case
    local = shards(item, case.inputs(item.dtype, item.device), rank)
    device = local["q"].device
    mover = member(group.group_name).transport(device, item.transport)
    usage = pool(device).usage
    moved: dict[Direction, Moved] = {}

    def note(direction: Direction) -> None:
        received: Counter[int] = Counter()
        for (_, peer), n in mover.counters.received.items():
            received[peer] += n
        moved[direction] = Moved(dict(received), None if mover.reads_peers else usage.peak)
        mover.counters.clear()
        usage.peak = 0
        assert usage.live == 0

    mover.counters.clear()
    usage.peak = 0
    made = attention(
        local["q"],
        local["k"],
        local["v"],
        mesh=group,
        layout=item.q,
        k_layout=item.k,
        schedule=item.schedule,
        mask=case.mask,
        scale=case.scale,
        softcap=case.softcap,
        sink_logits=local.get("sink_logits"),
        alibi_slopes=case.slopes(item.device),
        dropout=case.dropout,
        seed=1234 if case.dropout else None,
        q_offset=case.q_offset,
        kernel=item.kernel,
        reduce_dtype=item.reduce_dtype,
        transport=item.transport,
        return_lse=item.lse,
    )
    results: dict[str, Tensor] = dict(zip(("out", "lse"), made if item.lse else (made,), strict=False))
    out = results["out"]
    note("forward")
    generator = torch.Generator().manual_seed(7)
    rows = torch.from_numpy(item.q.positions(rank))
    shape = (case.batch, case.tokens, case.heads, case.value_dim or case.dim)
    dout = torch.randn(shape, generator=generator)[:, rows].to(out)
    loss = (out * dout).sum()
    if case.lse_gradient:
        lse = results["lse"]
        dlse = torch.randn(case.batch, case.heads, case.tokens, generator=generator)[:, :, rows].to(lse)
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
    grads = torch.autograd.grad(loss, list(local.values()))
    note("backward")
    results |= {f"d{name}": gradient for name, gradient in zip(local, grads, strict=True)}
    return {name: x.detach().cpu() for name, x in results.items()}, moved


def run_items(rank: int, world: int, group: Any, items: list[Item]) -> list[Result]:
    """For a pool of workers."""
    return [run_item(rank, group, item) for item in items]


def check_moved(item: Item, moved: list[dict[Direction, Moved]]) -> None:
    """What ranks received and held is what the verifier says of the programs that they ran."""
    case, partial = item.case, accumulator_dtype(item.dtype)
    if item.world == 1 or not case.batch:
        return
    problem = Plan(item.schedule, item.q, item.k, case.q_offset, lse=item.lse).problem(
        case.mask, case.heads, case.kv_heads or case.heads
    )
    widths = (case.batch, case.dim, case.value_dim or case.dim)
    sizes = Sizes(*widths, item.dtype.itemsize, partial.itemsize, (item.reduce_dtype or partial).itemsize)
    for direction, report in verified(item.schedule, problem, sizes).items():
        if [rank[direction].received for rank in moved] != list(report.received):
            raise AssertionError(f"{direction}: ranks received other bytes than the verifier counted")
        held = [rank[direction].scratch_bytes for rank in moved]
        if None not in held and held != list(report.scratch_bytes):
            raise AssertionError(f"{direction}: ranks held other scratch than the verifier counted")


def _summed(name: str) -> bool:
    """Whether ranks have shares of it, as of the gradient of a weight."""
    return name.removeprefix("d") not in (*WHOLE, "out", "lse")


def share_rounding(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """How far off the sum of rounded shares may be, by name: shares that cancel are rounded at their own size."""
    return {
        name: sum(float(part[name].abs().max()) * torch.finfo(part[name].dtype).eps for part in parts)
        for name in parts[0]
        if _summed(name)
    }


def whole(item: Item, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' results as those of one device; shares of weights are summed."""
    out = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if _summed(name):
            out[name] = torch.stack(pieces).to(torch.float64).sum(0).to(pieces[0].dtype)
            continue
        layout = item.k if name in ("dk", "dv") else item.q
        order = torch.cat([torch.from_numpy(layout.positions(rank)) for rank in range(item.world)])
        joined = torch.cat(pieces, dim=2 if name == "lse" else 1)
        out[name] = joined.index_select(2 if name == "lse" else 1, torch.argsort(order))
    return out
