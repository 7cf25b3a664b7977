"""Cases spread over ranks: what a worker does with one, and the whole put together again for the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meshflash import Layout
from meshflash.api import attention, flash_attention
from meshflash.check.oracle import Case, upstream
from meshflash.comm.transports.contract import Transport
from meshflash.core.program import Direction, Sizes
from meshflash.engine.group_context import group_context
from meshflash.engine.memory import pool
from meshflash.engine.mesh import Plan
from meshflash.kernels.contract import accumulator_dtype
from meshflash.schedules.registry import default_layout, parse, verified

WHOLE = ("q", "k", "v")

#: How a tensor lies in memory: in order; heads before tokens; as columns of wider rows; as every other column; or
#: with a stride of 0 along the axes on which its values repeat.
Strides = Literal["contiguous", "transposed", "sliced", "stepped", "expanded"]
#: How autograd watches a call.
Mode = Literal["grad", "no_grad", "inference_mode"]


@dataclass(frozen=True)
class Item:
    """One case with the schedule and layouts that spread it; the schedule's own layout by default.

    `strides` says how q, k, v and dout lie in memory, by name; `frozen` names the leaves that need no gradient.
    `values` is the seed of the inputs. `requested` is the schedule as the call names it where that is another text,
    as over a DeviceMesh of two dimensions, which adds the inner axis. `packed` drops the axis of a batch of 1.
    """

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
    strides: tuple[tuple[str, Strides], ...] = ()
    frozen: tuple[str, ...] = ()
    values: int = 0
    requested: str = ""
    packed: bool = False

    @property
    def lse(self) -> bool:
        """Whether the call asks for the LSE; where that changes what moves, only cases that need it do."""
        return self.case.lse_gradient or self.case.sinks or not parse(self.schedule)[0].saves_buffers

    @property
    def q(self) -> Layout:
        return self.layout or default_layout(self.schedule)(self.case.tokens, self.world)

    @property
    def k(self) -> Layout:
        tokens = self.case.tokens if self.case.k_tokens is None else self.case.k_tokens
        if self.k_layout is None and self.case.k_tokens is None:
            return self.q
        return self.k_layout or default_layout(self.schedule)(tokens, self.world)


def restride(x: Tensor, how: Strides, repeated: tuple[int, ...] = ()) -> Tensor:
    """Return a copy of `[batch, tokens, heads, dim]` that lies in memory as `how` says; no autograd history.

    >>> restride(torch.zeros(2, 5, 3, 4), "transposed").stride()
    (60, 4, 20, 1)
    """
    x = x.detach()
    if how == "transposed":
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    if how == "sliced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
        wide[..., 1:-2] = x  # what lies around the values is NaN: nobody may read it
        return wide[..., 1:-2]
    if how == "stepped":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    if how == "expanded" and x.numel():
        first = x
        for axis in repeated:
            first = first.narrow(axis, 0, 1)
        return first.clone(memory_format=torch.contiguous_format).expand_as(x)
    return x.clone(memory_format=torch.contiguous_format)


def _laid_out(item: Item, name: str, x: Tensor) -> Tensor:
    """A copy of a rank's tensor with the strides that the item gives it."""
    how: Strides = dict(item.strides).get(name, "contiguous")
    return restride(x, how, tuple(axis for other, axis in item.case.repeated if other == name))


def shards(item: Item, leaves: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A rank's own leaves."""
    out = {}
    for name, x in leaves.items():
        part = x.detach()
        if name in WHOLE:
            rows = torch.from_numpy((item.q if name == "q" else item.k).positions(rank))
            part = part[:, rows.to(part.device)]
        out[name] = _laid_out(item, name, part).requires_grad_(name not in item.frozen)
    return out


@dataclass(frozen=True)
class Moved:
    """What one rank received from each, and the scratch that it held, in one pass; None where peers read it."""

    received: dict[int, int]
    scratch_bytes: int | None


#: Output, LSE and every gradient of one rank, and what each pass moved.
Result = tuple[dict[str, Tensor], dict[Direction, Moved]]


class Run:
    """One call on one rank: the forward now, and the backward when the caller says so.

    `rank` is that of the call's group; `mesh` is what the call is given, where that is not the group itself. Without
    a group it is `flash_attention`. Bytes are counted unless other calls run in other threads meanwhile.
    """

    def __init__(self, rank: int, group: Any, item: Item, mesh: Any = None, count: bool = True) -> None:
        self.item, self.rank, self.group, self.mesh = item, rank, group, group if mesh is None else mesh
        self.local = shards(item, item.case.inputs(item.dtype, item.device, item.values), rank)
        self.moved: dict[Direction, Moved] = {}
        self._counts = count and group is not None and item.world > 1
        self._made: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The leaves that take gradients; none after a forward that autograd did not watch."""
        watched = self._made["out"].requires_grad
        return {name: x for name, x in self.local.items() if x.requires_grad} if watched else {}

    @property
    def result(self) -> Result:
        """What there is to compare, on the host."""
        made = {name: x.detach().cpu() for name, x in {**self._made, **self._grads}.items()}
        return made, self.moved

    def forward(self, mode: Mode = "grad") -> None:
        """Make the call."""
        item, case = self.item, self.item.case
        self._clear()
        q, k, v = (self.local[name].squeeze(0) if item.packed else self.local[name] for name in WHOLE)
        options: dict[str, Any] = dict(
            mask=case.mask,
            scale=case.scale,
            softcap=case.softcap,
            sink_logits=self.local.get("sink_logits"),
            alibi_slopes=case.slopes(item.device),
            dropout=case.dropout,
            seed=case.dropout_seed if case.dropout else None,
            q_offset=case.q_offset,
            kernel=item.kernel,
            return_lse=item.lse,
        )
        if self.group is not None:
            options |= dict(
                mesh=self.mesh,
                layout=item.q,
                k_layout=item.k,
                schedule=item.requested or item.schedule,
                reduce_dtype=item.reduce_dtype,
                transport=item.transport,
            )
        watch = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]
        with watch():
            made = (flash_attention if self.group is None else attention)(q, k, v, **options)
            if item.packed:
                made = tuple(x.unsqueeze(0) for x in made) if item.lse else made.unsqueeze(0)
        self._made = dict(zip(("out", "lse"), made if item.lse else (made,), strict=False))
        self._note("forward")

    def upstream(self) -> tuple[list[Tensor], list[Tensor]]:
        """What a backward starts from: the outputs and their gradients."""
        item, case, out = self.item, self.item.case, self._made["out"]
        rows = torch.from_numpy(item.q.positions(self.rank))
        like = out.new_empty(0, device="cpu")
        shape = (case.batch, case.tokens, case.heads, case.value_dim or case.dim)
        lse_shape = (case.batch, case.heads, case.tokens)
        dout, dlse = upstream(like.new_empty(shape), torch.empty(lse_shape, dtype=torch.float64), case)
        outputs, gradients = [out], [_laid_out(item, "dout", dout[:, rows].to(out))]
        if case.lse_gradient:
            lse = self._made["lse"]
            outputs.append(lse)
            gradients.append(dlse[:, :, rows].to(lse).masked_fill(lse == -torch.inf, 0.0))
        return outputs, gradients

    def backward(self) -> None:
        """Take the gradients of the leaves, if there are any."""
        leaves = self.leaves
        if not leaves:
            return
        self._clear()
        outputs, gradients = self.upstream()
        self.keep(torch.autograd.grad(outputs, list(leaves.values()), gradients))
        self._note("backward")

    def keep(self, gradients: Sequence[Tensor]) -> None:
        """Take these for the gradients of the leaves."""
        self._grads = {f"d{name}": x for name, x in zip(self.leaves, gradients, strict=True)}

    def _clear(self) -> None:
        if self._counts:
            self._mover.counters.clear()
            pool(self.local["q"].device).usage.peak = 0

    def _note(self, direction: Direction) -> None:
        """Note what moved since the last time."""
        if not self._counts:
            return
        mover, usage = self._mover, pool(self.local["q"].device).usage
        received: Counter[int] = Counter()
        for (_, peer), n in mover.counters.received.items():
            received[peer] += n
        self.moved[direction] = Moved(dict(received), None if mover.reads_peers else usage.peak)
        assert usage.live == 0

    @property
    def _mover(self) -> Transport:
        return group_context(self.group.group_name).transport(self.local["q"].device, self.item.transport)


def run_item(rank: int, group: Any, item: Item) -> Result:
    """A rank's part of one case."""
    run = Run(rank, group, item)
    run.forward()
    run.backward()
    return run.result


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
        if direction not in moved[0]:
            continue
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
