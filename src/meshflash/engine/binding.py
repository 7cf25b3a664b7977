"""A program bound to shapes, kernels and memory: each step becomes a function of one call.

All that can be known before a call is worked out here, once; a repeated call runs the same functions on
other tensors. Steps are told apart by their kind alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshflash.comm.streams import capturing
from meshflash.comm.transports.contract import Transport
from meshflash.core.mask import Mask
from meshflash.core.program import (
    KINDS,
    Add,
    Attend,
    AttendGrad,
    Buffer,
    Clear,
    Copy,
    Delta,
    Field,
    Finish,
    Interval,
    Part,
    Post,
    Program,
    Slice,
    Step,
    Wait,
)
from meshflash.core.tiles import Worklist, worklist
from meshflash.engine.placement import Placement, Setting
from meshflash.engine.pulls import Places
from meshflash.engine.trace import active
from meshflash.kernels.contract import Features, Grads, Inputs, KernelRequest, Pass, Rows
from meshflash.kernels.launches import Launches
from meshflash.kernels.merge import add_sinks_, delta_, merge_
from meshflash.kernels.registry import Choice, choose, log_kernel

#: The caller's tensors of each pass, in the order in which a call lists them: (buffer, field).
TENSORS: dict[Pass, tuple[tuple[str, str], ...]] = {
    "forward": (("q", "q"), ("kv", "k"), ("kv", "v"), ("out", "out"), ("out", "lse")),
    "backward": (
        ("q", "q"),
        ("kv", "k"),
        ("kv", "v"),
        ("out", "out"),
        ("out", "lse"),
        ("dout", "dout"),
        ("dout", "delta"),
        ("dq", "dq"),
        ("dkv", "dk"),
        ("dkv", "dv"),
    ),
}


#: The kernel of each step that attends, and the tiles that it walks.
Kernels = dict[Attend | AttendGrad, tuple[Choice, Worklist]]


def choose_kernels(program: Program, mask: Mask, setting: Setting, features: Features) -> Kernels:
    """The kernels of a program; ValueError if the requested one cannot serve a step."""
    exact = features.alibi_slopes_BH is not None or features.dropout > 0
    out: Kernels = {}
    for step in program.steps:
        if not isinstance(step, Attend | AttendGrad):
            continue
        targets = (step.out,) if isinstance(step, Attend) else (step.dq, step.dkv)
        in_parts = any(program.buffer[target.buffer].dtype != "input" for target in targets)
        work = worklist(mask, step.q_positions, step.k_positions, exact)
        request = KernelRequest(
            direction=program.direction,
            device=setting.device,
            dtype=setting.dtype,
            head_dim=setting.dim,
            value_dim=setting.value_dim,
            work=work,
            features=replace(features, sink_logits_H=None) if in_parts else features,
            partial=in_parts,
            lse_gradient=setting.lse_gradient or _reads_delta_of_peers(program, step),
            deterministic=setting.deterministic,
            batch=setting.batch,
            heads=step.heads[1] - step.heads[0],
            gqa=step.heads[1] - step.heads[0] > step.kv.shape[1],
            is_step=True,
        )
        out[step] = choose(setting.kernel, request), work
    return out


def run_beside_messages(program: Program) -> list[bool]:
    """Return whether each step runs while messages of this rank may be in flight: after a post and before its wait.

    Args:
        program: A program; messages of its rank to itself are copies.
    """
    posted: set[str] = set()
    found = []
    for step in program.steps:
        found.append(bool(posted))
        if isinstance(step, Post) and any(part.peer != program.rank for part in (*step.sends, *step.recvs)):
            posted.add(step.name)
        elif isinstance(step, Wait):
            posted.discard(step.post)
    return found


def _reads_delta_of_peers(program: Program, step: Attend | AttendGrad) -> bool:
    """Whether a step reads the delta that another rank computed for its own rows.

    That delta may contain the gradient of the peer's LSE, of which this rank knows nothing: its own loss may not read
    the LSE at all. A kernel that computes delta by itself would drop it.
    """
    if not isinstance(step, AttendGrad) or "dout" in program.without_lse:
        return False
    return program.buffer[step.dout.buffer].role != "input"


class Call:
    """One run: its tensors, the features of each set of heads, the transport, and what is on its way."""

    __slots__ = ("features", "tensors", "tickets", "transport")

    def __init__(self, tensors: list[Tensor], features: list[Features], transport: Transport, posts: int) -> None:
        self.tensors, self.features, self.transport = tensors, features, transport
        self.tickets: list[Any] = [None] * posts


Run = Callable[[Call], Any]


class Bound:
    """A program whose steps are functions, and the kernels that they run.

    The tensors of a call are one list, and steps know theirs by number: first the caller's and the memory of what
    is saved, then views of scratch, which are the same in every call, and parts of the former, each made once a call.
    """

    def __init__(
        self, placement: Placement, kernels: Kernels, sinks: bool, memory: Tensor, places: Places | None = None
    ) -> None:
        self.program, self.setting = program, setting = placement.program, placement.setting
        self._places = places or {}
        self._kernels, self._sinks, self._placement, self._memory = kernels, sinks, placement, memory
        self._heads: dict[tuple[Interval, bool], int] = {}
        self._caller = {key: n for n, key in enumerate(TENSORS[program.direction])}
        for buffer in program.buffers:
            if program.shares(buffer, setting.sizes):
                for field in KINDS[buffer.kind]:
                    self._caller[buffer.name, field.name] = self._caller[buffer.becomes, field.name]
        self._posts = {step.name: n for n, step in enumerate(s for s in program.steps if isinstance(s, Post))}
        self._saved = len(TENSORS[program.direction])
        self._tensors: list[Tensor] = [memory] * (self._saved + 1)
        self._parts: list[tuple[int, Callable[[list[Tensor]], Tensor]]] = []
        self._numbers: dict[Any, int] = {}
        steps = enumerate(zip(program.steps, run_beside_messages(program), strict=True))
        bound = [(n, run) for n, (step, beside_messages) in steps for run in self._bind(step, beside_messages)]
        self.runs, self._steps = [run for _, run in bound], [n for n, _ in bound]

    def call(self, tensors: list[Tensor], features: Features, transport: Transport, group: str = "") -> None:
        """Run it on these tensors, in the order of TENSORS, and the memory of what is saved behind them.

        It is recorded, as a call of this group, where a trace is wanted.
        """
        everything = self._tensors.copy()
        everything[: len(tensors)] = tensors
        for number, part in self._parts:
            everything[number] = part(tensors)
        by_heads = [_of_heads(features, heads, sinks) for heads, sinks in self._heads]
        call = Call(everything, by_heads, transport, len(self._posts))
        recorder = None if capturing(self.setting.device) else active()
        if recorder is not None:
            steps = [(n, partial(run, call)) for n, run in zip(self._steps, self.runs, strict=True)]
            recorder.run(self.program, group, self.setting.device, steps, transport)
            return
        for run in self.runs:
            run(call)

    def _bind(self, step: Step, beside_messages: bool) -> list[Run]:
        match step:
            case Attend():
                return [self._attend(step, beside_messages)]
            case AttendGrad():
                return [self._attend_grad(step)]
            case Post():
                return [*self._pack(step), self._post(step)]
            case Wait():
                return [self._wait(step)]
            case Copy():
                return [] if self._same(step.src, step.dst) else [self._apply(step, torch.Tensor.copy_)]
            case Add():
                merges = self.program.buffer[step.dst.buffer].kind == "out"
                return [self._merge(step) if merges else self._apply(step, torch.Tensor.add_)]
            case Clear():
                return [self._clear(step)]
            case Finish():
                return self._finish(step)
            case Delta():
                return [self._delta(step)]

    def _attend(self, step: Attend, beside_messages: bool) -> Run:
        choice, work = self._kernels[step]
        kernel = choice.kernel
        features = self._features_of(step.heads, sinks=step.final)
        (q,), (k, v), (out, lse) = self._views(step.q), self._views(step.kv), self._views(step.out)
        carry, launches = step.carry, Launches()

        def run(call: Call) -> None:
            t = call.tensors
            outputs = t[out], t[lse]
            log_kernel(choice, "forward")
            margin = call.transport.sm_margin if beside_messages else 0
            x = Inputs(t[q], t[k], t[v], work, call.features[features], launches, margin)
            kernel.forward(x, outputs, outputs if carry else None)

        return run

    def _attend_grad(self, step: AttendGrad) -> Run:
        choice, work = self._kernels[step]
        kernel = choice.kernel
        features = self._features_of(step.heads, sinks=False)
        (q,), (k, v), (dq,), (dk, dv) = (self._views(place) for place in (step.q, step.kv, step.dq, step.dkv))
        (out, lse), (dout, delta) = self._views(step.out), self._views(step.dout)
        add_dq, add_dkv, launches = step.add_dq, step.add_dkv, Launches()

        def run(call: Call) -> None:
            t = call.tensors
            log_kernel(choice, "backward")
            x = Inputs(t[q], t[k], t[v], work, call.features[features], launches)
            rows = Rows(t[out], t[dout], t[lse], t[delta])
            kernel.backward(x, rows, Grads(t[dq], t[dk], t[dv], add_dq, add_dkv))

        return run

    def _pack(self, step: Post) -> list[Run]:
        """Copy what cannot be sent from where it lies."""
        return [
            _copy_to(self._placement.copy(self._memory, (step.name, place), field), number)
            for place in self._placement.staged(step)
            for field, number in zip(self.program.fields(place), self._views(place), strict=True)
        ]

    def _post(self, step: Post) -> Run:
        ticket, group = self._posts[step.name], step.group
        staged = set(self._placement.staged(step))
        if step.collective and not self._placement.pulled:
            form = step.collective
            sources, targets = (self._whole(step, parts, staged) for parts in (step.sends, step.recvs))
            pairs = list(zip(sources, targets, strict=True))

            def together(call: Call) -> None:
                t = call.tensors
                call.tickets[ticket] = [
                    call.transport.collective(form, group, t[source], t[target]) for source, target in pairs
                ]

            return together
        sends, recvs = (
            [
                (part.peer, number)  # groups have all ranks in their order, so this is its number in the group
                for part in parts
                for number in self._messages(step, part.slice, staged)
            ]
            for parts in (step.sends, step.recvs)
        )

        if self._placement.pulled:
            from_where = [
                self._places.get((step.name, n, field.name), 0)
                for n, part in enumerate(step.recvs)
                for field in self.program.fields(part.slice)
            ]

        def exchange(call: Call) -> None:
            t = call.tensors
            out = [(peer, t[number]) for peer, number in sends]
            back = [(peer, t[number]) for peer, number in recvs]
            call.tickets[ticket] = [call.transport.exchange(group, out, back)]

        def pull(call: Call) -> None:
            t = call.tensors
            out = [(peer, t[number]) for peer, number in sends]
            back = [(peer, t[number]) for peer, number in recvs]
            call.tickets[ticket] = [call.transport.pull(group, out, back, from_where)]

        return pull if self._placement.pulled else exchange

    def _whole(self, step: Post, parts: tuple[Part, ...], staged: set[Slice]) -> list[int]:
        """The parts of a collective as one message for each field: they lie one after another, or are one slice."""
        first, last = parts[0].slice, parts[-1].slice
        return self._messages(step, replace(first, rows=(first.rows[0], last.rows[1])), staged)

    def _messages(self, step: Post, place: Slice, staged: set[Slice]) -> list[int]:
        """A slice as flat messages, one for each field."""
        out = []
        for field in self.program.fields(place):
            caller = self._caller.get((place.buffer, field.name))
            if place in staged or caller is None:
                key = (step.name, place) if place in staged else place.buffer
                if self._is_saved(key):
                    out.append(self._part(("message", key, field, place), self._of_saved(place, field, flat=True)))
                else:
                    fixed = self._placement.message(self._memory, key, field, place)
                    out.append(self._fixed(("message", key, field, place), fixed))
            else:
                out.append(self._part(("message", field, place), _rows(caller, place.rows)))
        return out

    def _wait(self, step: Wait) -> Run:
        ticket = self._posts[step.post]

        def run(call: Call) -> None:
            for each in call.tickets[ticket]:
                call.transport.wait(each)

        return run

    def _apply(self, step: Copy | Add, operation: Callable[[Tensor, Tensor], Tensor]) -> Run:
        pairs = list(zip(self._views(step.dst), self._views(step.src), strict=True))

        def run(call: Call) -> None:
            t = call.tensors
            for dst, src in pairs:
                operation(t[dst], t[src])

        return run

    def _merge(self, step: Add) -> Run:
        (out, lse), (part, part_lse) = self._views(step.dst), self._views(step.src)
        launches = Launches()

        def run(call: Call) -> None:
            t = call.tensors
            merge_(t[out], t[lse], t[part], t[part_lse], launches)

        return run

    def _clear(self, step: Clear) -> Run:
        values = [(-torch.inf if field.name == "lse" else 0.0) for field in self.program.fields(step.dst)]
        targets = list(zip(self._views(step.dst), values, strict=True))

        def run(call: Call) -> None:
            for target, value in targets:
                call.tensors[target].fill_(value)

        return run

    def _finish(self, step: Finish) -> list[Run]:
        (src, src_lse), (dst, dst_lse) = self._views(step.src), self._views(step.dst)
        same = self._same(step.src, step.dst)
        if same and not self._sinks:
            return []
        features = self._features_of(step.heads, sinks=True)

        def run(call: Call) -> None:
            t = call.tensors
            out, lse = t[src], t[src_lse]
            sinks = call.features[features].sink_logits_H
            if sinks is not None:
                add_sinks_(out, lse, sinks)
            if not same:
                t[dst].copy_(out)
                t[dst_lse].copy_(lse)

        return [run]

    def _delta(self, step: Delta) -> Run:
        (out, lse), (dout, target) = self._views(step.out), self._views(step.dout)
        launches = Launches()

        def run(call: Call) -> None:
            t = call.tensors
            delta_(t[target], t[out], t[dout], t[lse], launches=launches)

        return run

    def _features_of(self, heads: Interval, sinks: bool) -> int:
        """Which of a call's features a step takes: those of its heads, with or without sink logits."""
        return self._heads.setdefault((heads, sinks), len(self._heads))

    def _views(self, place: Slice) -> list[int]:
        """The tensors of a slice, by their numbers."""
        buffer = self.program.buffer[place.buffer]
        out = []
        for field in self.program.fields(place):
            caller = self._caller.get((place.buffer, field.name))
            if caller is None and self._is_saved(place.buffer):
                out.append(self._part((field, place), self._of_saved(place, field, flat=False)))
            elif caller is None:
                out.append(self._fixed((field, place), self._placement.view(self._memory, place, field)))
            elif (place.rows, place.heads) == ((0, buffer.rows), (0, buffer.heads)):
                out.append(caller)
            else:
                part = _rows_and_heads(caller, place, buffer, rows_at=1 if field.width else 2)
                out.append(self._part((caller, place.rows, place.heads), part))
        return out

    def _is_saved(self, key: Any) -> bool:
        """Whether a key of the placement is a buffer that is saved."""
        return isinstance(key, str) and self.program.buffer[key].role == "saved"

    def _of_saved(self, place: Slice, field: Field, flat: bool) -> Callable[[list[Tensor]], Tensor]:
        """Rows and heads of what is saved, whose memory is another one in each call; where they lie there is known."""
        number = self._saved
        dtype, size, stride, offset = self._placement.strided(place, field, flat)
        return lambda tensors: tensors[number].view(dtype).as_strided(size, stride, offset)

    def _fixed(self, key: Any, tensor: Tensor) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor)
        return self._numbers[key]

    def _part(self, key: Any, part: Callable[[list[Tensor]], Tensor]) -> int:
        if key not in self._numbers:
            self._parts.append((len(self._tensors), part))
        return self._fixed(key, self._memory)

    def _same(self, src: Slice, dst: Slice) -> bool:
        """Whether a copy would copy memory to itself."""
        indices = [
            [self._caller.get((place.buffer, field.name)) for field in self.program.fields(place)]
            for place in (src, dst)
        ]
        return indices[0] == indices[1] and None not in indices[0] and (src.rows, src.heads) == (dst.rows, dst.heads)


def _copy_to(target: Tensor, number: int) -> Run:
    return lambda call: target.copy_(call.tensors[number])


def _rows(caller: int, rows: Interval) -> Callable[[list[Tensor]], Tensor]:
    """Some rows of a caller's tensor of batch 1, as a flat message."""
    begin, end = rows
    return lambda tensors: tensors[caller][0, begin:end].view(-1)


def _rows_and_heads(caller: int, place: Slice, buffer: Buffer, rows_at: int) -> Callable[[list[Tensor]], Tensor]:
    """Some rows and heads of a caller's tensor."""
    (begin, end), (first, last) = place.rows, place.heads
    heads_at = 3 - rows_at
    if place.heads == (0, buffer.heads):
        return lambda tensors: tensors[caller].narrow(rows_at, begin, end - begin)
    return lambda tensors: tensors[caller].narrow(rows_at, begin, end - begin).narrow(heads_at, first, last - first)


def _of_heads(features: Features, heads: Interval, sinks: bool) -> Features:
    """The features of some heads, with or without sink logits."""
    slopes, logits = features.alibi_slopes_BH, features.sink_logits_H
    first, last = heads
    if slopes is None and logits is None and not first:
        return features
    return replace(
        features,
        head_offset=features.head_offset + first,
        alibi_slopes_BH=None if slopes is None else slopes[:, first:last],
        sink_logits_H=None if logits is None or not sinks else logits[first:last],
    )
