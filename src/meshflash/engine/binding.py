"""A program bound to shapes, kernels and memory: each step becomes a function of one call.

All that can be known before a call is worked out here, once; a repeated call runs the same functions on
other tensors. Steps are told apart by their kind alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from meshflash.core.mask import Mask
from meshflash.core.program import (
    KINDS,
    Add,
    Attend,
    AttendGrad,
    Clear,
    Copy,
    Field,
    Finish,
    Interval,
    Part,
    Post,
    Slice,
    Step,
    Wait,
)
from meshflash.core.tiles import Worklist, worklist
from meshflash.engine.placement import Placement
from meshflash.kernels.contract import Ask, Features, Grads, Inputs, Kernel, Pass, Rows
from meshflash.kernels.merge import add_sinks_
from meshflash.kernels.registry import choose, tell_spies
from meshflash.transport.contract import Message, Transport

#: The caller's tensors of each pass, in the order in which a call lists them: (buffer, field).
TENSORS: dict[Pass, tuple[tuple[str, str], ...]] = {
    "forward": (("q", "q"), ("kv", "k"), ("kv", "v"), ("out", "out"), ("out", "lse")),
    "backward": (
        ("q", "q"),
        ("kv", "k"),
        ("kv", "v"),
        ("rows", "out"),
        ("rows", "dout"),
        ("rows", "lse"),
        ("rows", "delta"),
        ("dq", "dq"),
        ("dkv", "dk"),
        ("dkv", "dv"),
    ),
}


class Call:
    """One run: the caller's tensors, the features of each set of heads, the transport, and what is on its way."""

    __slots__ = ("features", "tensors", "tickets", "transport")

    def __init__(self, tensors: list[Tensor], features: list[Features], transport: Transport, posts: int) -> None:
        self.tensors, self.features, self.transport = tensors, features, transport
        self.tickets: list[Any] = [None] * posts


Run = Callable[[Call], None]
Get = Callable[[list[Tensor]], Tensor]


class Bound:
    """A program whose steps are functions, and the kernels that they run."""

    def __init__(self, placement: Placement, mask: Mask, features: Features, memory: Tensor) -> None:
        self.program, self.setting = program, setting = placement.program, placement.setting
        self.kernels: list[tuple[Step, Kernel]] = []
        self._mask, self._features, self._placement, self._memory = mask, features, placement, memory
        self._exact = features.alibi_slopes_BH is not None or features.dropout > 0
        self._heads: dict[tuple[Interval, bool], int] = {}
        self._index = {key: n for n, key in enumerate(TENSORS[program.direction])}
        for buffer in program.buffers:
            if program.shares(buffer, setting.sizes):
                for field in KINDS[buffer.kind]:
                    self._index[buffer.name, field.name] = self._index[buffer.becomes, field.name]
        self._posts = {step.name: n for n, step in enumerate(s for s in program.steps if isinstance(s, Post))}
        self.runs = [run for step in program.steps for run in self._bind(step)]

    def call(self, tensors: list[Tensor], features: Features, transport: Transport) -> None:
        """Run it on these tensors, in the order of TENSORS."""
        by_heads = [_of_heads(features, heads, sinks) for heads, sinks in self._heads]
        call = Call(tensors, by_heads, transport, len(self._posts))
        for run in self.runs:
            run(call)

    def _bind(self, step: Step) -> list[Run]:
        match step:
            case Attend():
                return [self._attend(step)]
            case AttendGrad():
                return [self._attend_grad(step)]
            case Post():
                return [*self._pack(step), self._post(step)]
            case Wait():
                return [self._wait(step)]
            case Copy():
                return [] if self._same(step.src, step.dst) else [self._apply(step, torch.Tensor.copy_)]
            case Add():
                return [self._apply(step, torch.Tensor.add_)]
            case Clear():
                return [self._clear(step)]
            case Finish():
                return self._finish(step)

    def _attend(self, step: Attend) -> Run:
        kernel, work = self._kernel(step, partial=not step.final)
        features = self._features_of(step.heads, sinks=step.final)
        (q,), (k, v), (out, lse) = self._gets(step.q), self._gets(step.kv), self._gets(step.out)
        carry = step.carry

        def run(call: Call) -> None:
            t = call.tensors
            outputs = out(t), lse(t)
            tell_spies(kernel, "forward")
            x = Inputs(q(t), k(t), v(t), work, call.features[features])
            kernel.forward(x, outputs, outputs if carry else None)

        return run

    def _attend_grad(self, step: AttendGrad) -> Run:
        partial = any(self.program.buffer[place.buffer].dtype != "input" for place in (step.dq, step.dkv))
        kernel, work = self._kernel(step, partial)
        features = self._features_of(step.heads, sinks=False)
        (q,), (k, v), (dq,), (dk, dv) = (self._gets(place) for place in (step.q, step.kv, step.dq, step.dkv))
        out, dout, lse, delta = self._gets(step.rows)
        add_dq, add_dkv = step.add_dq, step.add_dkv

        def run(call: Call) -> None:
            t = call.tensors
            tell_spies(kernel, "backward")
            x = Inputs(q(t), k(t), v(t), work, call.features[features])
            rows = Rows(out(t), dout(t), lse(t), delta(t))
            kernel.backward(x, rows, Grads(dq(t), dk(t), dv(t), add_dq, add_dkv))

        return run

    def _pack(self, step: Post) -> list[Run]:
        """Copy what cannot be sent from where it lies."""
        return [
            _copy_to(self._placement.copy(self._memory, (step.name, place), field), get)
            for place in self.program.staged(step, self.setting.sizes)
            for field, get in zip(self._fields(place), self._gets(place), strict=True)
        ]

    def _post(self, step: Post) -> Run:
        members, ticket = self.program.group[step.group], self._posts[step.name]
        group, staged = step.group, set(self.program.staged(step, self.setting.sizes))
        if step.collective:
            form = step.collective
            sources, targets = self._whole(step, step.sends, staged), self._whole(step, step.recvs, staged)

            def together(call: Call) -> None:
                t = call.tensors
                call.tickets[ticket] = [
                    call.transport.collective(form, group, source(t), target(t))
                    for source, target in zip(sources, targets, strict=True)
                ]

            return together

        def messages(parts: tuple[Part, ...]) -> list[tuple[int, Get]]:
            return [
                (members.index(part.peer), get) for part in parts for get in self._messages(step, part.slice, staged)
            ]

        sends, recvs = messages(step.sends), [(peer, get([])) for peer, get in messages(step.recvs)]
        if all(_fixed(get) for _, get in sends):
            fixed: list[Message] = [(peer, get([])) for peer, get in sends]

            def exchange(call: Call) -> None:
                call.tickets[ticket] = [call.transport.exchange(group, fixed, recvs)]

            return exchange

        def from_caller(call: Call) -> None:
            t = call.tensors
            call.tickets[ticket] = [call.transport.exchange(group, [(peer, get(t)) for peer, get in sends], recvs)]

        return from_caller

    def _whole(self, step: Post, parts: tuple[Part, ...], staged: set[Slice]) -> list[Get]:
        """The parts of a collective as one message for each field: they lie one after another, or are one slice."""
        first, last = parts[0].slice, parts[-1].slice
        return self._messages(step, replace(first, rows=(first.rows[0], last.rows[1])), staged)

    def _messages(self, step: Post, place: Slice, staged: set[Slice]) -> list[Get]:
        """A slice as flat messages, one for each field."""
        out: list[Get] = []
        for field in self._fields(place):
            index = self._index.get((place.buffer, field.name))
            if place in staged or index is None:
                key = (step.name, place) if place in staged else place.buffer
                out.append(_Fixed(self._placement.message(self._memory, key, field, place)))
                continue
            assert field.width, "LSE and delta of the caller are packed before they are sent"
            begin, end = place.rows

            def rows(t: list[Tensor], index: int = index, begin: int = begin, end: int = end) -> Tensor:
                return t[index][0, begin:end].view(-1)

            out.append(rows)
        return out

    def _wait(self, step: Wait) -> Run:
        ticket = self._posts[step.post]

        def run(call: Call) -> None:
            for each in call.tickets[ticket]:
                call.transport.wait(each)

        return run

    def _apply(self, step: Copy | Add, operation: Callable[[Tensor, Tensor], Tensor]) -> Run:
        pairs = list(zip(self._gets(step.dst), self._gets(step.src), strict=True))

        def run(call: Call) -> None:
            t = call.tensors
            for dst, src in pairs:
                operation(dst(t), src(t))

        return run

    def _clear(self, step: Clear) -> Run:
        values = [(-torch.inf if field.name == "lse" else 0.0) for field in self._fields(step.dst)]
        targets = list(zip(self._gets(step.dst), values, strict=True))

        def run(call: Call) -> None:
            for target, value in targets:
                target(call.tensors).fill_(value)

        return run

    def _finish(self, step: Finish) -> list[Run]:
        (src, src_lse), (dst, dst_lse) = self._gets(step.src), self._gets(step.dst)
        same = self._same(step.src, step.dst)
        if same and self._features.sink_logits_H is None:
            return []
        features = self._features_of(step.heads, sinks=True)

        def run(call: Call) -> None:
            t = call.tensors
            out, lse = src(t), src_lse(t)
            sinks = call.features[features].sink_logits_H
            if sinks is not None:
                add_sinks_(out, lse, sinks)
            if not same:
                dst(t).copy_(out)
                dst_lse(t).copy_(lse)

        return [run]

    def _kernel(self, step: Attend | AttendGrad, partial: bool) -> tuple[Kernel, Worklist]:
        setting = self.setting
        work = worklist(self._mask, step.q_positions, step.k_positions, self._exact)
        ask = Ask(
            direction=self.program.direction,
            device=setting.device.type,
            dtype=setting.dtype,
            head_dim=setting.dim,
            value_dim=setting.value_dim,
            work=work,
            features=replace(self._features, sink_logits_H=None) if partial else self._features,
            partial=partial,
            lse_gradient=setting.lse_gradient,
            deterministic=setting.deterministic,
        )
        kernel = choose(setting.kernel, ask)
        self.kernels.append((step, kernel))
        return kernel, work

    def _features_of(self, heads: Interval, sinks: bool) -> int:
        """Which of a call's features a step takes: those of its heads, with or without sink logits."""
        return self._heads.setdefault((heads, sinks), len(self._heads))

    def _fields(self, place: Slice) -> tuple[Field, ...]:
        return KINDS[self.program.buffer[place.buffer].kind]

    def _gets(self, place: Slice) -> list[Get]:
        """The tensors of a slice, as functions of the caller's tensors."""
        buffer = self.program.buffer[place.buffer]
        whole_rows, whole_heads = place.rows == (0, buffer.rows), place.heads == (0, buffer.heads)
        out: list[Get] = []
        for field in KINDS[buffer.kind]:
            index = self._index.get((place.buffer, field.name))
            if index is None:
                out.append(_Fixed(self._placement.view(self._memory, place, field)))
            elif whole_rows and whole_heads:
                out.append(itemgetter(index))
            else:
                out.append(_part(index, place, rows_at=1 if field.width else 2))
        return out

    def _same(self, src: Slice, dst: Slice) -> bool:
        """Whether a copy would copy memory to itself."""
        indices = [
            [self._index.get((place.buffer, field.name)) for field in self._fields(place)] for place in (src, dst)
        ]
        return indices[0] == indices[1] and None not in indices[0] and (src.rows, src.heads) == (dst.rows, dst.heads)


class _Fixed:
    """A tensor that is the same in every call."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self, _: list[Tensor]) -> Tensor:
        return self.tensor


def _copy_to(target: Tensor, get: Get) -> Run:
    def run(call: Call) -> None:
        target.copy_(get(call.tensors))

    return run


def _fixed(get: Get) -> bool:
    return isinstance(get, _Fixed)


def _part(index: int, place: Slice, rows_at: int) -> Get:
    """Some rows and heads of a caller's tensor."""
    begin, rows = place.rows[0], place.rows[1] - place.rows[0]
    first, heads = place.heads[0], place.heads[1] - place.heads[0]
    heads_at = 3 - rows_at

    def get(t: list[Tensor]) -> Tensor:
        return t[index].narrow(rows_at, begin, rows).narrow(heads_at, first, heads)

    return get


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
