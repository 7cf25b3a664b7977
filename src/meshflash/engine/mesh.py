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
from meshflash.comm.streams import capturing
from meshflash.comm.transports.contract import Arena, Transport
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import SAVES, Direction, Program
from meshflash.engine.binding import Bound, Kernels, choose_kernels
from meshflash.engine.group_context import GroupContext, checks_always
from meshflash.engine.local import rows_of
from meshflash.engine.memory import pool
from meshflash.engine.placement import Placement, Setting
from meshflash.engine.pulls import Places, places
from meshflash.kernels.contract import Features, Grads, Rows, accumulator_dtype, new_outputs

#: (schedule, problem, rank, direction) -> the program of that rank
Build = Callable[[str, Problem, int, Direction], Program]
#: (spec, tokens of q and of k on this rank, bytes of a key and its value, q_offset, world) -> the plan
Resolve = Callable[[str, int, int, int, int, int], "Plan"]
#: Programs of recent calls that an arena stays bound to; packings of documents come and go.
BOUND = 64
#: The most kinds of call whose prepared programs a group caches.
PREPARED = 256


class _Above:
    """Functions that `planning.py` registers with `connect`: the engine must not import the schedules itself."""

    build: Build
    resolve: Resolve
    saves_buffers: Callable[[str], bool]


def connect(build: Build, resolve: Resolve, saves_buffers: Callable[[str], bool] = lambda spec: False) -> None:
    """Register the functions that build programs, resolve specs to plans, and tell whether a forward saves buffers."""
    _Above.build, _Above.resolve, _Above.saves_buffers = (
        staticmethod(build),
        staticmethod(resolve),
        staticmethod(saves_buffers),
    )


def resolve(spec: str, q_tokens: int, k_tokens: int, each: int, q_offset: int, world: int) -> Plan:
    """Return the plan of a spec; ValueError if it does not fit these sizes."""
    return _Above.resolve(spec, q_tokens, k_tokens, each, q_offset, world)


def saves_buffers(spec: str) -> bool:
    """Whether the forward of a spec saves more than the caller's tensors."""
    return _Above.saves_buffers(spec)


def not_saved(member: GroupContext) -> tuple[int, ...]:
    """Which of q, k and v, by number, the last forward of this rank did not save: its backward does without."""
    saves = member.last.program("forward").saves
    return (*(() if "q" in saves else (0,)), *(() if "kv" in saves else (1, 2)))


@dataclass(frozen=True)
class Plan:
    """How a sequence is spread and by which schedule it is attended to, and why by that one."""

    schedule: str
    q: Layout
    k: Layout
    q_offset: int = 0
    reduce_dtype: str = ""
    transport: str = "auto"
    lse: bool = True
    reason: str = field(default="requested", compare=False)

    def problem(self, mask: Mask, heads: int, kv_heads: int) -> Problem:
        """What is to be solved for so many heads."""
        q = self.q.ranges
        if self.q_offset:
            q = tuple(tuple(range(r.start + self.q_offset, r.stop + self.q_offset, r.step) for r in held) for held in q)
        return Problem(q, self.k.ranges, mask, heads, kv_heads, lse=self.lse)


class Prepared:
    """One kind of call on one rank: its problem, its programs, and where they run."""

    def __init__(
        self, plan: Plan, mask: Mask, heads: int, kv_heads: int, rank: int, setting: Setting, group: str = ""
    ) -> None:
        self.plan, self.mask, self.setting, self.rank, self.group = plan, mask, setting, rank, group
        self.problem = plan.problem(mask, heads, kv_heads)
        self._placements: dict[tuple[Direction, bool], Placement] = {}
        self._kernels: dict[tuple[Direction, bool], Kernels] = {}
        self._pulls: dict[tuple[Direction, int], Placement] = {}

    def program(self, direction: Direction) -> Program:
        """What this rank does in one pass."""
        program = _Above.build(self.plan.schedule, self.problem, self.rank, direction)
        ranks = tuple(range(self.problem.world))
        if program.group.get("mesh") != ranks or set(program.group.values()) != {ranks}:
            raise ValueError(
                f"schedule {self.plan.schedule!r} uses the groups {program.groups}; there must be one called "
                '"mesh", and all must be of all ranks in their order'
            )
        return program

    def check_saved(self) -> None:
        """ValueError where the backward reads what the forward does not save."""
        forward, backward = self.program("forward"), self.program("backward")
        for buffer in backward.buffers:
            missing = buffer.role == "input" and buffer.name in SAVES and buffer.name not in forward.saves
            if missing or (buffer.role == "saved" and forward.buffer.get(buffer.name) != buffer):
                raise ValueError(
                    f"schedule {self.plan.schedule!r}: its backward reads {buffer.name!r}, and its forward does not "
                    "save it so; check them with verify_programs(..., after=report of the forward)"
                )

    @property
    def groups(self) -> list[str]:
        """The names of the groups that both passes use."""
        return sorted({*self.program("forward").group, *self.program("backward").group})

    def kernels(self, direction: Direction, features: Features, lse_gradient: bool = False) -> Kernels:
        """The kernels of a pass; ValueError if the requested one cannot serve it."""
        found = self._kernels.get((direction, lse_gradient))
        if found is None:
            setting = self._placement(direction, lse_gradient).setting
            found = choose_kernels(self.program(direction), self.mask, setting, features)
            self._kernels[direction, lse_gradient] = found
        return found

    def run(
        self,
        direction: Direction,
        tensors: list[Tensor],
        features: Features,
        transport: Transport,
        lse_gradient: bool = False,
    ) -> None:
        """Run a pass on these tensors.

        What goes into a graph runs in memory of the graph's own, for what is pooled may be freed before it.
        """
        captured = capturing(self.setting.device)
        if captured and transport.capture_unsupported_reason:
            raise RuntimeError(
                f"attention over {transport.name} cannot be captured: {transport.capture_unsupported_reason}. Take "
                'another transport, such as NCCL or "symmetric", or leave attention out of the graph'
            )
        if transport.reads_peers:
            self._bound_to_heap(direction, features, transport, lse_gradient).call(
                tensors, features, transport, self.group
            )
            return
        placement = self._placement(direction, lse_gradient)
        if captured:
            own = torch.empty(placement.bytes, dtype=torch.uint8, device=self.setting.device)
            self._bound_to(placement, own, features, lse_gradient).call(tensors, features, transport, self.group)
            return
        memory = pool(self.setting.device)
        arena = memory.take(placement.bytes, placement.used)
        try:
            bound = _bound(arena, placement, lambda: self._bound_to(placement, arena.memory, features, lse_gradient))
            bound.call(tensors, features, transport, self.group)
        except BaseException:
            memory.drop(placement.used)
            raise
        memory.give_back(arena, placement.used)

    def _bound_to(
        self,
        placement: Placement,
        memory: Tensor,
        features: Features,
        lse_gradient: bool,
        where: Places | None = None,
    ) -> Bound:
        """A pass bound to memory."""
        kernels = self.kernels(placement.program.direction, features, lse_gradient)
        return Bound(placement, kernels, features.sink_logits_H is not None, memory, where)

    def _placement(self, direction: Direction, lse_gradient: bool) -> Placement:
        found = self._placements.get((direction, lse_gradient))
        if found is None:
            setting = replace(self.setting, lse_gradient=lse_gradient)
            kept = tuple(b for b in self.program("forward").buffers if b.role == "saved")
            found = self._placements[direction, lse_gradient] = Placement(self.program(direction), setting, kept)
        return found

    def _bound_to_heap(
        self, direction: Direction, features: Features, transport: Transport, lse_gradient: bool
    ) -> Bound:
        """A pass bound to memory that peers read: as large as the rank needs that needs most, so that all agree."""
        arena = transport.arena(max(self._pulled(direction, rank).bytes for rank in range(self.problem.world)))
        placement = self._pulled(direction, self.rank)

        def bind() -> Bound:
            where = places(placement.program, lambda peer: self._pulled(direction, peer))
            return self._bound_to(placement, arena.memory, features, lse_gradient, where)

        return _bound(arena, (placement, lse_gradient), bind)

    def _pulled(self, direction: Direction, rank: int) -> Placement:
        """How a rank's program lies where messages are pulled."""
        found = self._pulls.get((direction, rank))
        if found is None:
            forward, program = (
                _Above.build(self.plan.schedule, self.problem, rank, each) for each in ("forward", direction)
            )
            kept = tuple(b for b in forward.buffers if b.role == "saved")
            found = self._pulls[direction, rank] = Placement(program, self.setting, kept, pulled=True)
        return found

    def transport(self, member: GroupContext) -> Transport:
        """What moves its messages."""
        return member.transport(self.setting.device, self.plan.transport)

    @property
    def saved_bytes(self) -> int:
        """The memory of what a forward saves."""
        return self._placement("forward", lse_gradient=False).saved


def _bound(arena: Arena, key: Any, bind: Callable[[], Bound]) -> Bound:
    """What was bound to an arena under this key, or is now; the oldest gives way."""
    found: Bound | None = arena.bound.get(key)
    if found is None:
        if len(arena.bound) >= BOUND:
            del arena.bound[next(iter(arena.bound))]
        with torch.inference_mode(False):  # views of the arena serve later calls, too
            found = arena.bound[key] = bind()
    return found


@dataclass(frozen=True, eq=False)
class MeshCall:
    """The arguments of one call besides its tensors."""

    spec: str
    q_offset: int
    mask: Mask
    mask_key: Any
    features: Features
    kernel: str
    deterministic: bool
    #: Whether autograd records the call, so that a backward is to come.
    will_backward: bool = False

    def prepare(self, member: GroupContext, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """What was prepared for this kind of call; on its first use all ranks agree on it."""
        f = self.features
        kind = (
            *(self.spec, self.q_offset, self.mask_key, q.shape, v.shape, q.dtype, q.device),
            *(f.scale, f.softcap, f.dropout, f.batch_offset, f.head_offset),
            *(f.alibi_slopes_BH is None, f.sink_logits_H is None, self.kernel, self.deterministic, self.will_backward),
        )
        member.check_not_poisoned()
        found = member.prepared.get(kind)
        if found is None or checks_always():
            if capturing(q.device):
                raise RuntimeError(
                    "a graph is being captured, and ranks have to agree on this call first: make it once before the "
                    "capture, without MESHFLASH_CHECK=always"
                )
            try:
                found = found or self._new(member, q, k, v)
            except Exception as error:
                member.broadcast_error(error)
                raise
            member.agree({**self._fields(found.plan, q, v), "groups": found.groups})
            member.ensure_groups(found.groups)
            found.transport(member)
            if len(member.prepared) >= PREPARED and kind not in member.prepared:
                del member.prepared[next(iter(member.prepared))]
            member.prepared[kind] = found
        member.last = found
        return found

    def _new(self, member: GroupContext, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """A kind of call that was not made before; ValueError where it cannot be made."""
        each = (k.shape[3] + v.shape[3]) * k.shape[0] * k.shape[2] * k.element_size()
        plan = resolve(self.spec, q.shape[1], k.shape[1], each, self.q_offset, member.world)
        self._check(plan, member.rank, q, k)
        setting = Setting(
            batch=q.shape[0],
            dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=q.dtype,
            reduce_dtype=getattr(torch, plan.reduce_dtype) if plan.reduce_dtype else accumulator_dtype(q.dtype),
            device=q.device,
            kernel=self.kernel,
            deterministic=self.deterministic,
        )
        heads = (q.shape[2], k.shape[2])
        prepared = Prepared(plan, self.mask, *heads, member.rank, setting, member.group.group_name)
        prepared.check_saved()
        prepared.kernels("forward", self.features)
        if self.kernel != "auto":  # "auto" finds one in every pass
            prepared.kernels("backward", self.features)
        return prepared

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
            "layout": _words(plan.q),
            "key layout": _words(plan.k),
            "q_offset": plan.q_offset,
            "reduce_dtype": plan.reduce_dtype,
            "transport": plan.transport,
            "return_lse": plan.lse,
            "mask": repr(self.mask),
            "mask's documents": [_digest(x if isinstance(x, Tensor) else torch.tensor(x)) for x in self.mask.pack()[1]],
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
            "autograd": _AUTOGRAD[self.will_backward],
        }


def forward(call: MeshCall, member: GroupContext, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse) of this rank's queries, and the memory of what the backward needs besides."""
    with member.in_use():
        prepared = call.prepare(member, q, k, v)
        out, lse = new_outputs(q, v)
        if "out" in prepared.program("forward").without_lse:
            lse.fill_(torch.nan)  # no caller requested it
        saved = q.new_empty(prepared.saved_bytes, dtype=torch.uint8)
        if q.shape[0]:
            transport = prepared.transport(member)
            with member.run_pass("forward", transport):
                prepared.run("forward", [q, k, v, out, lse, saved], call.features, transport)
    return out, lse, saved


def backward(
    call: MeshCall,
    member: GroupContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    made: tuple[Tensor, Tensor, Tensor],
    given: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Rows]:
    """The gradients of this rank's q, k and v, from what the forward made and the gradients of (out, lse).

    With them comes what was known of its rows; without delta, where the program makes that elsewhere.
    """
    with member.in_use():
        prepared = call.prepare(member, q, k, v)
        grads = Grads.like(q, k, v)
        out, lse, saved = made
        rows = rows_of(out, lse, *given, with_delta="dout" not in prepared.program("backward").without_lse)
        if q.shape[0]:
            delta = lse if rows.delta is None else rows.delta
            dout = rows.dout_BTHE.contiguous()  # messages are sent from where it lies
            tensors = [q, k, v, out, lse, dout, delta, grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, saved]
            transport = prepared.transport(member)
            with member.run_pass("backward", transport):
                prepared.run("backward", tensors, call.features, transport, given[1] is not None)
    return grads, rows


#: What ranks compare of `MeshCall.will_backward`, in words for an error.
_AUTOGRAD = {True: "records the call", False: "off: no_grad, or no input requires a gradient"}


def _words(layout: Layout) -> str:
    """A layout by its name and sizes where it has them, whatever it was made by."""
    for make in (Layout.contiguous, Layout.zigzag, Layout.striped):
        named = make(layout.tokens, layout.world)
        if named == layout:
            return named.text()
    return Layout(layout.ranges).text()


def _digest(x: Tensor | None) -> str:
    if x is None:
        return "none"
    numbers = x.detach().to("cpu", torch.float64).contiguous().numpy()
    kind = str(x.dtype) if x.is_floating_point() else "integers"
    return f"{kind} {list(x.shape)} {hashlib.sha256(numbers.tobytes()).hexdigest()[:16]}"
