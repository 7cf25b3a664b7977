"""Executables: calls compiled for their shapes, which run forward and backward on any tensors of these shapes.

A `LocalExecutable` is one kernel call. A `MeshExecutable` runs this rank's programs over a process group; it owns its
programs, the placement of their buffers, and the kernels of their steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshflash.comm.streams import capturing
from meshflash.comm.transports.contract import Arena, Transport
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import DIRECTIONS, SAVES, Attend, AttendGrad, Direction, Program
from meshflash.core.tiles import worklist
from meshflash.engine import local
from meshflash.engine.binding import Bound, Kernels, choose_kernels
from meshflash.engine.group_context import GroupContext, checks_always, group_context, still_exists
from meshflash.engine.memory import pool
from meshflash.engine.placement import Placement, Setting
from meshflash.engine.pulls import Places, places
from meshflash.engine.spec import AttentionSpec, CallTensors
from meshflash.kernels import rates, registry
from meshflash.kernels.contract import Features, Grads, Inputs, new_outputs
from meshflash.kernels.launches import Launches
from meshflash.kernels.registry import Choice, log_kernel, open_logs

#: (schedule, problem, rank, direction) -> the program of that rank
Build = Callable[[str, Problem, int, Direction], Program]


class Results(NamedTuple):
    """What a forward returns: `saved` is the memory of buffers that the backward needs besides the caller's tensors."""

    out: Tensor
    lse: Tensor
    saved: Tensor | None


#: (dq, dk, dv, dsink_logits), the last one None where there are no sink logits.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Plan:
    """How a sequence is sharded and which schedule attends to it, and why that one."""

    schedule: str
    q: Layout
    k: Layout
    q_offset: int = 0
    reduce_dtype: str = ""
    transport: str = "auto"
    lse: bool = True
    reason: str = field(default="requested", compare=False)

    def problem(self, mask: Mask, heads: int, kv_heads: int) -> Problem:
        """Return the problem that programs solve, for these numbers of heads."""
        q = self.q.ranges
        if self.q_offset:
            q = tuple(tuple(range(r.start + self.q_offset, r.stop + self.q_offset, r.step) for r in held) for held in q)
        return Problem(q, self.k.ranges, mask, heads, kv_heads, lse=self.lse)


class Executable(ABC):
    """A compiled call. `compile_spec` makes one, and the engine's cache keeps it.

    `unsaved` are the numbers of those of q, k and v that the backward does not read.
    """

    spec: AttentionSpec
    plan: Plan | None
    device_type: str
    unsaved: tuple[int, ...] = ()
    #: Whether the cache has dropped it. Over ranks it must not run again then: all ranks agree on the call anew.
    is_dropped = False

    def is_current(self) -> bool:
        """Return whether the executable may run again without a comparison of the call with those of other ranks."""
        return True

    def for_autograd(self, x: CallTensors) -> Executable:
        """Return the executable that computes the same with gradients of q, k and v, but not of the LSE."""
        return self

    #: Whether torch's own autograd differentiates `forward`, so that a backward needs no Python.
    has_torch_autograd = False

    @abstractmethod
    def forward(self, x: CallTensors) -> Results:
        """Compute (out, lse), and what the backward needs besides."""

    @abstractmethod
    def backward(self, x: CallTensors, made: Results, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        """Compute the gradients of q, k, v and the sink logits. Those of out and lse may be None."""


#: Host time of an autograd Function in Python, forward and backward, beyond that of an op that torch differentiates.
#: Measured on the host of an H200: 155 to 171 us for one that computes nothing, 107 to 111 us for `a * b`.
FUNCTION_SECONDS = 60e-6


def _cost_with_gradients(forward: Choice, backward: Choice, more_host: float) -> rates.Cost | None:
    """Return the cost of a forward and its backward together; None where no rates are known.

    Args:
        forward: The kernel of the forward.
        backward: The kernel of the backward.
        more_host: What autograd adds to the host's time of both passes together.
    """
    if forward.predicted is None or backward.predicted is None:
        return None
    costs = forward.predicted.cost(more_host / 2), backward.predicted.cost(more_host / 2)
    return rates.Cost(costs[0].layer + costs[1].layer, costs[0].device + costs[1].device)


class LocalExecutable(Executable):
    """A call on a single device: the tiles to compute, and the kernel of each pass."""

    #: The executable of another kernel that serves calls with gradients, once `_has_chosen`.
    _other: LocalExecutable | None

    def __init__(self, spec: AttentionSpec, x: CallTensors, plan: Plan | None = None) -> None:
        self.spec, self.plan, self.device_type = spec, plan, x.q.device.type
        self._has_batch = x.q.shape[0] > 0
        self._reads_tensors = x.sink_logits is not None or x.alibi_slopes is not None or x.seed is not None
        self._features = spec.features(x)
        shard = (spec.layout, spec.gathered_rank) if spec.layout is not None and spec.gathered_rank >= 0 else None
        self._inputs = local.inputs(x.q, x.k, x.v, spec.mask, self._features, spec.q_offset, shard)
        self._work = self._inputs.work
        self._forward = local.choice(self._inputs, spec.kernel, "forward", spec.deterministic)
        self._backward: dict[bool, Choice] = {}
        self._launches = Launches()
        self._has_chosen, self._other = False, None
        del self._inputs

    def for_autograd(self, x: CallTensors) -> Executable:
        if not self._has_chosen:
            name, has_torch_autograd = self._choose_for_autograd(self._bind(x))
            if name == self.spec.kernel:
                self.has_torch_autograd = has_torch_autograd
            else:
                self._other = LocalExecutable(self.spec._replace(kernel=name), x, self.plan)
                self._other.has_torch_autograd, self._other._has_chosen = has_torch_autograd, True
            self._has_chosen = True
        return self._other or self

    def _choose_for_autograd(self, inputs: Inputs) -> tuple[str, bool]:
        """Return the kernel of a forward and its backward, and whether torch's autograd differentiates the forward.

        "auto" compares the fastest kernel of each pass with each kernel that serves both. A forward that is one torch
        op with a derivative saves the host a Function in Python.
        """
        spec, forward = self.spec, self._forward
        try:
            backward = local.choice(inputs, spec.kernel, "backward", spec.deterministic)
        except ValueError:  # a backward raises it, if there is one
            return spec.kernel, False
        if not self._has_batch:
            return spec.kernel, False
        if forward.kernel.name == backward.kernel.name and forward.kernel.has_torch_autograd(inputs):
            return forward.kernel.name, True
        fastest = _cost_with_gradients(forward, backward, FUNCTION_SECONDS)
        if spec.kernel != "auto" or fastest is None:  # named, or nobody knows what is faster
            return spec.kernel, False
        costs = {(spec.kernel, False): fastest}
        for name in registry.names()[1:]:
            pair = local.choices(inputs, name, spec.deterministic)
            if pair is None:
                continue
            differentiated = pair[0].kernel.has_torch_autograd(inputs)
            more_host = pair[0].kernel.torch_autograd_seconds if differentiated else FUNCTION_SECONDS
            cost = _cost_with_gradients(*pair, more_host)
            if cost is not None:
                costs[name, differentiated] = cost
        return rates.cheapest(costs)

    def forward(self, x: CallTensors) -> Results:
        if open_logs:
            log_kernel(self._forward, "forward")
        if not self._has_batch:
            return Results(*new_outputs(x.q, x.v), None)
        out, lse = self._forward.kernel.forward(self._bind(x))
        return Results(out, lse, None)

    def backward(self, x: CallTensors, made: Results, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        inputs, has_lse_gradient = self._bind(x), dlse is not None
        choice = self._backward.get(has_lse_gradient)
        if choice is None:
            choice = local.choice(inputs, self.spec.kernel, "backward", self.spec.deterministic, has_lse_gradient)
            self._backward[has_lse_gradient] = choice
        log_kernel(choice, "backward")
        sinks = x.sink_logits
        with_delta = choice.kernel.reads_delta or sinks is not None or has_lse_gradient
        rows = local.rows_of(made.out, made.lse, dout, dlse, with_delta, self._launches)
        grads = choice.kernel.backward(inputs, rows) if self._has_batch else Grads.like(x.q, x.k, x.v)
        return grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, local.sink_gradient(sinks, rows)

    def _bind(self, x: CallTensors) -> Inputs:
        features = self.spec.features(x) if self._reads_tensors else self._features
        return Inputs(x.q, x.k, x.v, self._work, features, self._launches)


class MeshExecutable(Executable):
    """A call over a process group on one rank: its problem, its programs, and the memory that they run in."""

    def __init__(
        self,
        plan: Plan,
        mask: Mask,
        heads: int,
        kv_heads: int,
        rank: int,
        setting: Setting,
        build: Build,
    ) -> None:
        self.plan: Plan = plan
        self.mask, self.setting, self.rank, self._build = mask, setting, rank, build
        self.device_type = setting.device.type
        self.problem = plan.problem(mask, heads, kv_heads)
        self._placements: dict[tuple[Direction, bool], Placement] = {}
        self._kernels: dict[tuple[Direction, bool], Kernels] = {}
        self._pulls: dict[tuple[Direction, int], Placement] = {}
        self._programs: dict[tuple[Direction, int], Program] = {}
        self._heap_bytes: dict[Direction, int] = {}
        self._launches = Launches()
        self._bound_to_arena: WeakKeyDictionary[Arena, dict[Any, Bound]] = WeakKeyDictionary()
        #: The name of the group in traces.
        self.group_name = ""

    def attach(self, spec: AttentionSpec, context: GroupContext) -> None:
        """Bind the executable to the group that it runs over, once all ranks have agreed on the call."""
        self.spec, self.context, self.group_name = spec, context, spec.group
        saves = self.program("forward").saves
        self.unsaved = (*(() if "q" in saves else (0,)), *(() if "kv" in saves else (1, 2)))

    def is_current(self) -> bool:
        return not self.is_dropped and group_context(self.group_name) is self.context and not checks_always()

    def may_recur(self) -> bool:
        """Return whether the same call may be made again: its group still exists. Any thread may ask."""
        return not self.is_dropped and still_exists(self.group_name, self.context.group)

    def forward(self, x: CallTensors) -> Results:
        context = self.context
        with context.in_use():
            context.check_not_poisoned()
            out, lse = new_outputs(x.q, x.v)
            if "out" in self.program("forward").without_lse:
                lse.fill_(torch.nan)  # no rank reads it
            saved = x.q.new_empty(self.saved_bytes, dtype=torch.uint8)
            if x.q.shape[0]:
                transport = self.transport(context)
                with context.run_pass("forward", transport):
                    self.run("forward", [x.q, x.k, x.v, out, lse, saved], self.spec.features(x), transport)
        return Results(out, lse, saved)

    def backward(self, x: CallTensors, made: Results, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        context = self.context
        with context.in_use():
            context.check_not_poisoned()
            grads = Grads.like(x.q, x.k, x.v)
            # without delta, where the program computes that elsewhere
            has_delta = "dout" not in self.program("backward").without_lse
            rows = local.rows_of(made.out, made.lse, dout, dlse, has_delta, self._launches)
            if x.q.shape[0]:
                delta = made.lse if rows.delta is None else rows.delta
                given = rows.dout_BTHE.contiguous()  # messages are sent from where it lies
                tensors = [*x[:3], made.out, made.lse, given, delta, grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE]
                assert made.saved is not None
                transport = self.transport(context)
                with context.run_pass("backward", transport):
                    features = self.spec.features(x)
                    self.run("backward", [*tensors, made.saved], features, transport, dlse is not None)
        return grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, local.sink_gradient(x.sink_logits, rows)

    def program(self, direction: Direction, rank: int | None = None) -> Program:
        """Return the program of one pass, of this rank unless another one is given."""
        rank = self.rank if rank is None else rank
        found = self._programs.get((direction, rank))
        if found is None:
            found = self._programs[direction, rank] = self._build(self.plan.schedule, self.problem, rank, direction)
            ranks = tuple(range(self.problem.world))
            if found.group.get("mesh") != ranks or set(found.group.values()) != {ranks}:
                raise ValueError(
                    f"schedule {self.plan.schedule!r} uses the groups {found.groups}; there must be one called "
                    '"mesh", and all must be of all ranks in their order'
                )
        return found

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

    def plan_for(self, mask: Mask, layout: Layout | None = None) -> Plan:
        """Return the plan of the same call with another mask; raise ValueError if they do not fit it.

        Args:
            mask: The mask of the call.
            layout: The layout of queries and keys; None means the present ones.
        """
        plan = self.plan if layout is None else replace(self.plan, q=layout, k=layout)
        if plan.q.world != self.problem.world:
            raise ValueError(f"layout: it is for {plan.q.world} ranks, the group has {self.problem.world}")
        mask.check(plan.q.tokens, plan.k.tokens, self.setting.batch, plan.q_offset)
        return plan

    @property
    def exact_positions(self) -> bool:
        """Whether kernels read positions, so that tables must keep them all."""
        # A copy, since another thread may add the kernels of its first backward meanwhile.
        return any(work.exact_positions for kernels in list(self._kernels.values()) for _, work in kernels.values())

    def prepare(self, plan: Plan, mask: Mask) -> None:
        """Build the programs and tables of the same call with another mask, into the caches that it will look into.

        Args:
            plan: The plan of the call, from `plan_for`.
            mask: The mask of the call.
        """
        problem, exact = plan.problem(mask, self.problem.heads, self.problem.kv_heads), self.exact_positions
        for direction in DIRECTIONS:
            for step in self._build(plan.schedule, problem, self.rank, direction).steps:
                if isinstance(step, Attend | AttendGrad):
                    work = worklist(mask, step.q_positions, step.k_positions, exact)
                    _ = work.by_query if direction == "forward" else work.by_key

    @property
    def groups(self) -> list[str]:
        """The names of the groups that both passes use."""
        return sorted({*self.program("forward").group, *self.program("backward").group})

    def kernels(self, direction: Direction, features: Features, lse_gradient: bool = False) -> Kernels:
        """The kernels of a pass; ValueError where the one that was asked for cannot serve it."""
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
            bound = self._bound_to_heap(direction, features, transport, lse_gradient)
            bound.call(tensors, features, transport, self.group_name)
            return
        placement = self._placement(direction, lse_gradient)
        if captured:
            own = torch.empty(placement.bytes, dtype=torch.uint8, device=self.setting.device)
            self._bound_to(placement, own, features, lse_gradient).call(tensors, features, transport, self.group_name)
            return
        memory = pool(self.setting.device)
        arena = memory.take(placement.bytes, placement.used)
        try:
            bound = self._bound(arena, placement, features, lse_gradient)
            bound.call(tensors, features, transport, self.group_name)
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
        size = self._heap_bytes.get(direction)
        if size is None:
            size = max(self._pulled(direction, rank).bytes for rank in range(self.problem.world))
            self._heap_bytes[direction] = size
        arena = transport.arena(size)
        placement = self._pulled(direction, self.rank)
        return self._bound(arena, placement, features, lse_gradient)

    def _bound(self, arena: Arena, placement: Placement, features: Features, lse_gradient: bool) -> Bound:
        """Return a pass bound to an arena, in which later calls run it again."""
        bound = self._bound_to_arena.setdefault(arena, {})
        key = placement, lse_gradient
        found = bound.get(key)
        if found is None:
            where = None
            if placement.pulled:
                direction = placement.program.direction
                where = places(placement.program, lambda peer: self._pulled(direction, peer))
            with torch.inference_mode(False):  # views of the arena serve later calls, too
                found = bound[key] = self._bound_to(placement, arena.memory, features, lse_gradient, where)
        return found

    def _pulled(self, direction: Direction, rank: int) -> Placement:
        """How a rank's program lies where messages are pulled."""
        found = self._pulls.get((direction, rank))
        if found is None:
            forward, program = self.program("forward", rank), self.program(direction, rank)
            kept = tuple(b for b in forward.buffers if b.role == "saved")
            found = self._pulls[direction, rank] = Placement(program, self.setting, kept, pulled=True)
        return found

    def transport(self, context: GroupContext) -> Transport:
        """Return the transport that moves its messages."""
        return context.transport(self.setting.device, self.plan.transport)

    @property
    def saved_bytes(self) -> int:
        """The memory of what a forward saves."""
        return self._placement("forward", lse_gradient=False).saved
