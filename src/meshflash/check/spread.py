"""Sharded cases: run one call on one rank, and reassemble the results of all ranks for the oracle."""

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
from meshflash.engine.executable import Plan
from meshflash.engine.group_context import group_context
from meshflash.engine.memory import pool
from meshflash.kernels.contract import accumulator_dtype
from meshflash.schedules.registry import default_layout, parse, verified

#: Inputs that are sharded by position; all others are replicated.
SHARDED = ("q", "k", "v")

#: The memory layout of a tensor: contiguous; heads before tokens; columns of wider rows; every other column; or
#: stride 0 along the axes on which its values repeat.
Strides = Literal["contiguous", "transposed", "sliced", "stepped", "expanded"]
#: The autograd mode of a call.
Mode = Literal["grad", "no_grad", "inference_mode"]


@dataclass(frozen=True)
class Item:
    """A case with the schedule, the layouts and the memory layout that it runs with.

    Args:
        case: The case.
        schedule: The schedule that must run.
        world: The number of ranks.
        dtype: The dtype of the inputs.
        layout: The layout of the queries; the schedule's default layout if None.
        k_layout: The layout of the keys; that of the queries if None.
        reduce_dtype: The dtype in which gradients travel.
        kernel: The kernel.
        device: The device type.
        transport: The transport.
        strides: The memory layout of q, k, v and dout, by name.
        frozen: The names of the leaves that need no gradient.
        values: The seed of the inputs.
        requested: The schedule that the call passes, if it is another text: over a DeviceMesh of two dimensions, the
            call adds the inner dimension itself.
        packed: Whether to drop the axis of a batch of 1.
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
        """Whether the call asks for the LSE. If that changes what moves, only cases that need it ask."""
        return self.case.lse_gradient or self.case.sinks or not parse(self.schedule)[0].saves_buffers

    @property
    def q(self) -> Layout:
        """The layout of the queries."""
        return self.layout or default_layout(self.schedule)(self.case.tokens, self.world)

    @property
    def k(self) -> Layout:
        """The layout of the keys."""
        tokens = self.case.tokens if self.case.k_tokens is None else self.case.k_tokens
        if self.k_layout is None and self.case.k_tokens is None:
            return self.q
        return self.k_layout or default_layout(self.schedule)(tokens, self.world)


def restride(x: Tensor, how: Strides, repeated: tuple[int, ...] = ()) -> Tensor:
    """Return a detached copy of `[batch, tokens, heads, dim]` with another memory layout.

    Args:
        x: The tensor.
        how: The memory layout.
        repeated: The axes on which the values of `x` repeat, for "expanded".

    >>> restride(torch.zeros(2, 5, 3, 4), "transposed").stride()
    (60, 4, 20, 1)
    """
    x = x.detach()
    if how == "transposed":
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    if how == "sliced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
        wide[..., 1:-2] = x  # NaN around the values: a kernel that reads it gives NaN
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
    """Return a copy of a rank's tensor with the memory layout that the item gives it."""
    how: Strides = dict(item.strides).get(name, "contiguous")
    return restride(x, how, tuple(axis for other, axis in item.case.repeated if other == name))


def shards(item: Item, leaves: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the leaves of one rank: its shards of q, k and v, and copies of the other inputs.

    Args:
        item: The item.
        leaves: The leaves of the whole case.
        rank: The number of the rank, from 0.
    """
    out = {}
    for name, x in leaves.items():
        part = x.detach()
        if name in SHARDED:
            rows = torch.from_numpy((item.q if name == "q" else item.k).positions(rank))
            part = part[:, rows.to(part.device)]
        out[name] = _laid_out(item, name, part).requires_grad_(name not in item.frozen)
    return out


@dataclass(frozen=True)
class Moved:
    """The bytes that a rank received from each peer in one pass, and its peak scratch.

    `scratch_bytes` is None if peers read messages from it, as scratch then also holds packed messages.
    """

    received: dict[int, int]
    scratch_bytes: int | None


#: Output, LSE and every gradient of one rank by name, and the traffic of each pass.
Result = tuple[dict[str, Tensor], dict[Direction, Moved]]


class Run:
    """One call on one rank, with its forward and its backward as separate steps.

    Args:
        rank: The rank within the group.
        group: The process group; None runs `flash_attention`.
        item: The item to run.
        mesh: The argument `mesh` of the call, if it is not the group itself.
        count: Whether to count bytes and scratch. Calls in other threads would spoil the counts.
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
        """The leaves that take gradients; none after a forward without autograd."""
        watched = self._made["out"].requires_grad
        return {name: x for name, x in self.local.items() if x.requires_grad} if watched else {}

    @property
    def result(self) -> Result:
        """The results on the host, and the traffic."""
        made = {name: x.detach().cpu() for name, x in {**self._made, **self._grads}.items()}
        return made, self.moved

    def forward(self, mode: Mode = "grad") -> None:
        """Run the forward."""
        item = self.item
        self._reset_counters()
        q, k, v = (self.local[name].squeeze(0) if item.packed else self.local[name] for name in SHARDED)
        options = item.case.options(self.local) | dict(kernel=item.kernel, return_lse=item.lse)
        if self.group is not None:
            options |= dict(
                mesh=self.mesh,
                layout=item.q,
                k_layout=item.k,
                schedule=item.requested or item.schedule,
                reduce_dtype=item.reduce_dtype,
                transport=item.transport,
            )
        context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]
        with context():
            made = (flash_attention if self.group is None else attention)(q, k, v, **options)
            if item.packed:
                made = tuple(x.unsqueeze(0) for x in made) if item.lse else made.unsqueeze(0)
        self._made = dict(zip(("out", "lse"), made if item.lse else (made,), strict=False))
        self._record_traffic("forward")

    def upstream(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs, and the gradients from which a backward starts."""
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
        """Run the backward, if any leaf takes a gradient."""
        leaves = self.leaves
        if not leaves:
            return
        self._reset_counters()
        outputs, gradients = self.upstream()
        self.store_gradients(torch.autograd.grad(outputs, list(leaves.values()), gradients))
        self._record_traffic("backward")

    def store_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Store the gradients of the leaves, in their order."""
        self._grads = {f"d{name}": x for name, x in zip(self.leaves, gradients, strict=True)}

    def _reset_counters(self) -> None:
        if self._counts:
            self._transport.counters.clear()
            pool(self.local["q"].device).usage.peak = 0

    def _record_traffic(self, direction: Direction) -> None:
        """Record the traffic since the counters were reset."""
        if not self._counts:
            return
        transport, usage = self._transport, pool(self.local["q"].device).usage
        received: Counter[int] = Counter()
        for (_, peer), n in transport.counters.received.items():
            received[peer] += n
        self.moved[direction] = Moved(dict(received), None if transport.reads_peers else usage.peak)
        assert usage.live == 0

    @property
    def _transport(self) -> Transport:
        return group_context(self.group.group_name).transport(self.local["q"].device, self.item.transport)


def run_item(rank: int, group: Any, item: Item) -> Result:
    """Run one item on one rank, forward and backward."""
    run = Run(rank, group, item)
    run.forward()
    run.backward()
    return run.result


def check_moved(item: Item, moved: list[dict[Direction, Moved]]) -> None:
    """Raise AssertionError unless traffic and scratch of all ranks equal the verifier's count.

    Args:
        item: The item that the ranks ran.
        moved: The traffic of each rank, by direction.
    """
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


def _is_partial_sum(name: str) -> bool:
    """Whether each rank holds a share of a sum, as of the gradient of a weight."""
    return name.removeprefix("d") not in (*SHARDED, "out", "lse")


def share_rounding(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Return, by name, the error of a sum of rounded shares: shares that cancel are rounded at their own magnitude."""
    return {
        name: sum(float(part[name].abs().max()) * torch.finfo(part[name].dtype).eps for part in parts)
        for name in parts[0]
        if _is_partial_sum(name)
    }


def whole(item: Item, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Reassemble the results of all ranks into those of a single device; shares of sums are added.

    Args:
        item: The item that the ranks ran.
        parts: The results of each rank, by name.
    """
    out = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if _is_partial_sum(name):
            out[name] = torch.stack(pieces).to(torch.float64).sum(0).to(pieces[0].dtype)
            continue
        layout = item.k if name in ("dk", "dv") else item.q
        order = torch.cat([torch.from_numpy(layout.positions(rank)) for rank in range(item.world)])
        joined = torch.cat(pieces, dim=2 if name == "lse" else 1)
        out[name] = joined.index_select(2 if name == "lse" else 1, torch.argsort(order))
    return out
