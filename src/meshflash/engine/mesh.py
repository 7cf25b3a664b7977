"""Attention over several ranks: from a call's arguments to the programs that solve it, and their run.

What a call needs is prepared once for each kind of call and found again by its arguments. The schedule
is a name here, and programs come from whoever builds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import meshflash
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Program
from meshflash.engine.binding import Bound
from meshflash.engine.membership import Member, checks_always
from meshflash.engine.memory import pool
from meshflash.engine.placement import Placement, Setting
from meshflash.kernels.contract import Features, Grads, Rows, accumulator_dtype, new_outputs
from meshflash.transport.contract import Transport

#: (schedule, problem, rank, direction) -> the program of that rank
Build = Callable[[str, Problem, int, Direction], Program]
#: (what was asked for, tokens of q and of k on this rank, bytes of a key and its value, q_offset, world) -> the plan
Resolve = Callable[[str, int, int, int, int, int], "Plan"]
#: Programs of recent calls that an arena stays bound to; packings of documents come and go.
BOUND = 64
#: Kinds of call that a group remembers.
PREPARED = 256

_builders: list[Build] = []
_planners: list[Resolve] = []


def build_with(build: Build) -> None:
    """Say who builds programs: the room above both the schedules and this one."""
    _builders[:] = [build]


def plan_with(resolve: Resolve) -> None:
    """Say who makes plans of what was asked for: the same room."""
    _planners[:] = [resolve]


@dataclass(frozen=True)
class Plan:
    """How a sequence is spread and by which schedule it is attended to, and why by that one."""

    schedule: str
    q: Layout
    k: Layout
    q_offset: int = 0
    reduce_dtype: str = ""
    reason: str = field(default="asked for", compare=False)

    def problem(self, mask: Mask, heads: int, kv_heads: int) -> Problem:
        """What is to be solved for so many heads."""
        q = self.q.ranges
        if self.q_offset:
            q = tuple(tuple(range(r.start + self.q_offset, r.stop + self.q_offset, r.step) for r in held) for held in q)
        return Problem(q, self.k.ranges, mask, heads, kv_heads)


class Prepared:
    """One kind of call on one rank: its problem, its programs, and where they run."""

    def __init__(self, plan: Plan, mask: Mask, heads: int, kv_heads: int, rank: int, setting: Setting) -> None:
        self.plan, self.mask, self.setting, self.rank = plan, mask, setting, rank
        self.problem = plan.problem(mask, heads, kv_heads)
        self._placements: dict[tuple[Direction, bool], Placement] = {}

    def program(self, direction: Direction) -> Program:
        """What this rank does in one pass."""
        return _builders[0](self.plan.schedule, self.problem, self.rank, direction)

    def run(
        self,
        direction: Direction,
        tensors: list[Tensor],
        features: Features,
        transport: Transport,
        lse_gradient: bool = False,
    ) -> Bound:
        """Run a pass on these tensors; returns what ran."""
        placement = self._placement(direction, lse_gradient)
        memory = pool(self.setting.device)
        arena = memory.take(placement.bytes, placement.used)
        try:
            bound = arena.bound.get(placement)
            if bound is None:
                bound = Bound(placement, self.mask, features, arena.memory)
                if len(arena.bound) >= BOUND:
                    del arena.bound[next(iter(arena.bound))]
                arena.bound[placement] = bound
            bound.call(tensors, features, transport)
        except BaseException:
            memory.drop(placement.used)
            raise
        memory.give_back(arena, placement.used)
        return bound

    def _placement(self, direction: Direction, lse_gradient: bool) -> Placement:
        found = self._placements.get((direction, lse_gradient))
        if found is None:
            setting = replace(self.setting, lse_gradient=lse_gradient)
            found = self._placements[direction, lse_gradient] = Placement(self.program(direction), setting)
        return found


@dataclass(frozen=True, eq=False)
class MeshCall:
    """The arguments of one call besides its tensors."""

    asked: str
    q_offset: int
    mask: Mask
    mask_key: Any
    features: Features
    kernel: str
    deterministic: bool

    def prepare(self, member: Member, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """What was prepared for this kind of call; on its first use all ranks agree on it."""
        f = self.features
        kind = (
            *(self.asked, self.q_offset, self.mask_key, q.shape, v.shape, q.dtype, q.device),
            *(f.scale, f.softcap, f.dropout, f.batch_offset, f.head_offset),
            *(f.alibi_slopes_BH is None, f.sink_logits_H is None, self.kernel, self.deterministic),
        )
        found = member.last = member.prepared.get(kind)
        if found is not None and not checks_always():
            return found
        each = (k.shape[3] + v.shape[3]) * k.shape[0] * k.shape[2] * k.element_size()
        try:
            plan = _planners[0](self.asked, q.shape[1], k.shape[1], each, self.q_offset, member.world)
            self._check(plan, member.rank, q, k)
        except ValueError as error:
            member.tell(error)
            raise
        member.agree(self._fields(plan, q, v))
        reduce_dtype = getattr(torch, plan.reduce_dtype) if plan.reduce_dtype else accumulator_dtype(q.dtype)
        setting = Setting(
            batch=q.shape[0],
            dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=q.dtype,
            reduce_dtype=reduce_dtype,
            device=q.device,
            kernel=self.kernel,
            deterministic=self.deterministic,
        )
        found = Prepared(plan, self.mask, q.shape[2], k.shape[2], member.rank, setting)
        if len(member.prepared) >= PREPARED:
            del member.prepared[next(iter(member.prepared))]
        member.prepared[kind] = member.last = found
        return found

    def _check(self, plan: Plan, rank: int, q: Tensor, k: Tensor) -> None:
        for name, x, layout in (("q", q, plan.q), ("k", k, plan.k)):
            if x.shape[1] != layout.lengths[rank]:
                raise ValueError(
                    f"{name} has {x.shape[1]} tokens on rank {rank} of the group; its layout ({layout.name}, "
                    f"{layout.tokens} tokens over {layout.world} ranks) gives it {layout.lengths[rank]}"
                )
        self.mask.check(plan.q.tokens, plan.k.tokens, q.shape[0], plan.q_offset)

    def _fields(self, plan: Plan, q: Tensor, v: Tensor) -> dict[str, Any]:
        """What all ranks must agree on, in words that a person knows."""
        f = self.features
        return {
            "version": meshflash.__version__,
            "schedule": plan.schedule,
            "layout": plan.q.text(),
            "key layout": plan.k.text(),
            "q_offset": plan.q_offset,
            "reduce_dtype": plan.reduce_dtype,
            "mask": repr(self.mask),
            "mask's documents": hashlib.sha256(repr(self.mask_key).encode()).hexdigest()[:16],
            "batch": q.shape[0],
            "heads": q.shape[2],
            "key heads": v.shape[2],
            "dim": q.shape[3],
            "value dim": v.shape[3],
            "dtype": str(q.dtype),
            "device": q.device.type,
            "scale": f.scale,
            "softcap": f.softcap,
            "dropout": f.dropout,
            "seed": f.seed,
            "batch_offset": f.batch_offset,
            "head_offset": f.head_offset,
            "alibi_slopes": _digest(f.alibi_slopes_BH),
            "sink_logits": _digest(f.sink_logits_H),
            "kernel": self.kernel,
            "deterministic": self.deterministic,
        }


def forward(call: MeshCall, member: Member, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries."""
    prepared = call.prepare(member, q, k, v)
    out, lse = new_outputs(q, v)
    if q.shape[0]:
        prepared.run("forward", [q, k, v, out, lse], call.features, member.transport(q.device))
    return out, lse


def backward(call: MeshCall, member: Member, q: Tensor, k: Tensor, v: Tensor, rows: Rows, lse_gradient: bool) -> Grads:
    """The gradients of this rank's q, k and v."""
    prepared = call.prepare(member, q, k, v)
    grads = Grads.like(q, k, v)
    if q.shape[0]:
        tensors = [q, k, v, rows.out_BTHE, rows.dout_BTHE, rows.lse_BHT, rows.delta_BHT]
        tensors += [grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE]
        prepared.run("backward", tensors, call.features, member.transport(q.device), lse_gradient)
    return grads


def _digest(x: Tensor | None) -> str:
    if x is None:
        return "none"
    numbers = x.detach().to("cpu", torch.float64).contiguous().numpy()
    return f"{x.dtype} {list(x.shape)} {hashlib.sha256(numbers.tobytes()).hexdigest()[:16]}"
