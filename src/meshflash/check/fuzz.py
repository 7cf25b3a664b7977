"""Random cases, each derived only from a seed and its number, so that any of them can be run again by itself.

A case is a few calls and the order of their forwards and backwards. Besides the dimensions of the suite (schedule,
layout, mask, features, dtype) it varies strides, required gradients, autograd modes, groups, repeated calls and
threads. The order of draws is part of the format: changing it changes every case.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch

from meshflash.check.oracle import Case
from meshflash.check.spread import Item, Mode, Strides
from meshflash.check.suite import FEATURES, LAYOUTS, MASKS
from meshflash.core.layout import Layout
from meshflash.engine.compile import over_two_axes
from meshflash.schedules.registry import parse, schedule_variants

#: The default world sizes of a campaign.
WORLDS = (2, 3, 4)
#: Whether cases with several threads run them concurrently by default; otherwise their calls run one after another.
THREADS = True
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Masks that fit any number of keys, because they have no document lengths.
ANY_KEYS = ("full", "causal", "window", "both sides", "prefix", "sink tokens")

#: The action of a step: the forward or backward of one call, or one backward through all remaining calls.
Does = Literal["forward", "backward", "backward of all"]


@dataclass(frozen=True)
class Settings:
    """The settings from which cases are derived, together with their number."""

    seed: int = 0
    worlds: tuple[int, ...] = WORLDS
    schedules: tuple[str, ...] = ()
    device: str = "cpu"
    transport: str = "auto"
    threads: bool = THREADS

    def world(self, number: int) -> int:
        """Return the world size of a case."""
        return self.worlds[number % len(self.worlds)]

    def rerun(self, numbers: str) -> str:
        """Return the command that runs some cases again; `numbers` is in the format of `--case`."""
        arguments = ["meshflash check", f"--case {numbers}", f"--seed {self.seed}"]
        if self.worlds != WORLDS:
            arguments.append(f"-n {self.worlds[0]}")
        arguments += [f"--schedule '{name}'" for name in self.schedules]
        arguments += [f"--device {self.device}"] * (self.device != "cpu")
        arguments += [f"--transport '{self.transport}'"] * (self.transport != "auto")
        arguments += [f"--{'' if self.threads else 'no-'}threads"] * (self.threads != THREADS)
        return " ".join(arguments)


@dataclass(frozen=True)
class Group:
    """The ranks of a call, and the kind of their argument `mesh`.

    `kind` is "world" (the default group), "mesh" (a DeviceMesh of `shape`), "group" (a process group that later cases
    reuse; `copy` distinguishes groups of the same ranks), "new group" (created for this case), or "none" for
    `flash_attention` on a single device.
    """

    kind: Literal["world", "mesh", "group", "new group", "none"]
    ranks: tuple[int, ...]
    copy: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of a case. Calls of one thread run in order; `names` are its values of the varied dimensions."""

    item: Item
    group: Group
    mode: Mode
    thread: int
    names: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FuzzCase:
    """A case: its calls, and the steps that every rank runs for the calls of its groups. `derive` makes it."""

    number: int
    world: int
    calls: tuple[Call, ...]
    steps: tuple[tuple[Does, int], ...]
    names: tuple[tuple[str, str], ...]

    @property
    def threads(self) -> int:
        """The number of threads of a rank."""
        return len({call.thread for call in self.calls})

    @property
    def dimensions(self) -> dict[str, tuple[str, ...]]:
        """For each varied dimension, the distinct values of all calls, for the counts of a record."""
        out: dict[str, set[str]] = {}
        for name, value in [*self.names, *(pair for call in self.calls for pair in call.names)]:
            out.setdefault(name, set()).add(value)
        return {name: tuple(sorted(values)) for name, values in out.items()}

    def describe(self) -> list[str]:
        """Return a description: one line for the case, one for each call, and one for the order."""
        lines = [f"case {self.number}: {', '.join(f'{name} {value}' for name, value in self.names)}"]
        for n, call in enumerate(self.calls):
            case, ranks = call.item.case, ", ".join(map(str, call.group.ranks))
            sizes = f"batch {case.batch}, tokens {case.tokens}, heads {case.heads}/{case.kv_heads or case.heads}"
            what = ", ".join(f"{name} {value}" for name, value in call.names if name != "schedule")
            lines.append(f"  call {n} on ranks {ranks}: {call.item.schedule}, {sizes}, {what}")
        return [*lines, "  order: " + ", ".join(f"{does} {n}" for does, n in self.steps)]


def derive(settings: Settings, number: int) -> FuzzCase:
    """Return the case of a number; it is the same on every rank and machine.

    Args:
        settings: The settings of the campaign.
        number: The number of the case.
    """
    draw = random.Random(f"{settings.seed}/{number}")
    world = settings.world(number)
    pattern = _pick(draw, {"single": 40, "repeated": 18, "mixed": 24, "threads": 12, "local threads": 6})
    if pattern == "local threads":
        groups, kind = [Group("none", (draw.randrange(world),))], "none"
    else:
        groups, kind = _groups(draw, world, two=pattern == "threads")
    calls, steps, order = _calls(draw, settings, pattern, groups)
    names = {"world": str(world), "pattern": pattern, "groups": kind, "order": order}
    if pattern.endswith("threads") and not settings.threads:
        names["pattern"] = f"{pattern}, one after another"
    return FuzzCase(number, world, tuple(calls), tuple(steps), tuple(names.items()))


def _pick(draw: random.Random, weights: dict[str, int]) -> str:
    return draw.choices(list(weights), list(weights.values()))[0]


def _groups(draw: random.Random, world: int, two: bool) -> tuple[list[Group], str]:
    """Return the groups that the calls of a case alternate between, and their label in the record."""
    everyone = tuple(range(world))
    some = tuple(sorted(draw.sample(everyone, draw.randint(1 if draw.random() < 0.2 else 2, world))))
    others = tuple(rank for rank in everyone if rank not in some)
    more = tuple(sorted({draw.choice(some), *draw.sample(everyone, draw.randint(1, world))}))
    shape = draw.choice([(world // n, n) for n in range(1, world + 1) if world % n == 0])
    pairs = {
        "disjoint groups": [Group("group", some), Group("group", others or some, copy=not others)],
        "overlapping groups": [Group("group", some), Group("group", more, copy=more == some)],
        "world and a group": [Group("world", everyone), Group("group", some)],
    }
    singles = {
        "world": [Group("world", everyone)],
        "group": [Group("group", some)],
        "new group": [Group("new group", some)],
        "mesh of 1 dim": [Group("mesh", everyone, shape=(world,))],
        "mesh of 2 dims": [Group("mesh", everyone, shape=shape)],
    }
    weights = dict.fromkeys(pairs, 10)
    if not two:
        weights |= {"world": 30, "group": 12, "new group": 4, "mesh of 1 dim": 6, "mesh of 2 dims": 14}
    kind = _pick(draw, weights)
    return (singles | pairs)[kind], kind


def _calls(
    draw: random.Random, settings: Settings, pattern: str, groups: Sequence[Group]
) -> tuple[list[Call], list[tuple[Does, int]], str]:
    """Return calls that alternate over the groups, the steps that make them, and the label of their order."""
    calls: list[Call] = []
    if pattern == "local threads":
        kinds = [_call(draw, settings, groups[0], 0, small=True) for _ in range(3)]
        for thread in range(4):  # threads make equal kinds of calls, so that they contend for the same cache entries
            calls += [_repeat_call(draw, draw.choice(kinds), thread) for _ in range(3)]
    else:
        rounds = {"single": 1, "repeated": draw.randint(2, 3), "mixed": draw.randint(2, 3), "threads": 2}[pattern]
        small = rounds * len(groups) > 1
        first: list[Call] = []
        for n in range(rounds):
            for group_index, group in enumerate(groups):
                thread = group_index if pattern == "threads" else 0
                repeats = n and (pattern == "repeated" or (pattern == "threads" and draw.random() < 0.5))
                new = (
                    _repeat_call(draw, first[group_index], thread)
                    if repeats
                    else _call(draw, settings, group, thread, small)
                )
                first = first if n else [*first, new]
                calls.append(new)
    steps, order = _steps(draw, len(calls), together=not pattern.endswith("threads"))
    return calls, steps, order


def _steps(draw: random.Random, calls: int, together: bool) -> tuple[list[tuple[Does, int]], str]:
    """Return the order in which forward and backward passes of the calls run."""
    forwards: list[tuple[Does, int]] = [("forward", n) for n in range(calls)]
    if calls == 1:
        return [*forwards, ("backward", 0)], "one call"
    order = _pick(draw, {"each backward at once": 25, "as called": 20, "reversed": 20, "shuffled": 25, "together": 15})
    if order == "each backward at once":
        return [(does, n) for n in range(calls) for does in ("forward", "backward")], order
    if order == "together" and together:
        return [*forwards, ("backward of all", 0)], order
    backward_order = list(range(calls))
    if order == "reversed":
        backward_order.reverse()
    elif order != "as called":
        order = "shuffled"
        draw.shuffle(backward_order)
    return [*forwards, *(("backward", n) for n in backward_order)], order


def _repeat_call(draw: random.Random, call: Call, thread: int) -> Call:
    """Return the same kind of call with other values, and sometimes another dropout seed or autograd mode."""
    item = replace(call.item, values=draw.randrange(1, 1 << 30))
    if item.case.dropout and draw.random() < 0.5:
        item = replace(item, case=replace(item.case, dropout_seed=draw.randrange(1 << 30)))
    mode = _mode(draw) if draw.random() < 0.3 else call.mode
    names = tuple((name, mode if name == "autograd" else value) for name, value in call.names)
    return replace(call, item=item, mode=mode, thread=thread, names=names)


def _mode(draw: random.Random) -> Mode:
    return _pick(draw, {"grad": 80, "no_grad": 15, "inference_mode": 5})  # type: ignore[return-value]


def _call(draw: random.Random, settings: Settings, group: Group, thread: int, small: bool) -> Call:
    """Return one random call on a group."""
    world = len(group.ranks)
    long = draw.randint(8, 64) if small else draw.randint(64, 150)
    tokens = draw.choice((1, 2, 3, 5, 7, draw.randint(8, 64), draw.randint(8, 64), long))
    mask, feature = draw.choice(list(MASKS)), draw.choice(list(FEATURES))
    case = replace(Case(MASKS[mask](tokens), tokens=tokens), **FEATURES[feature])
    if "row" not in mask and mask != "padding":
        case = replace(case, batch=draw.randint(1, 3))
    kv_heads = draw.randint(1, 4)
    case = replace(case, heads=kv_heads * draw.choice((1, 2, 3, 4)), kv_heads=kv_heads)
    lse_gradient, sinks = draw.random() < 0.2, draw.random() < 0.2
    case = replace(case, lse_gradient=case.lse_gradient or lse_gradient, sinks=case.sinks or sinks)
    layout, held = _layout(draw, tokens, world)
    k_held = None
    if mask in ANY_KEYS and draw.random() < 0.15:
        case = replace(case, k_tokens=draw.randint(1, 64), q_offset=draw.choice((0, 0, 1, draw.randint(0, 40))))
        k_held = _layout(draw, case.k_tokens or 0, world)[1]
    strides, repeated = _strides(draw)
    case = replace(case, repeated=repeated, dropout_seed=draw.randrange(1 << 30))
    dtype = draw.choice(DTYPES)
    reduce = torch.bfloat16 if dtype == torch.bfloat16 and draw.random() < 0.3 else None
    schedule, requested = _schedule(draw, settings, group)
    frozen = _frozen(draw, case)
    item = Item(
        *(case, schedule, world, dtype, held, k_held),
        reduce_dtype=reduce if world > 1 else None,
        kernel="tiled" if draw.random() < 0.15 else "auto",
        device=settings.device,
        transport=settings.transport,
        strides=strides,
        frozen=frozen,
        values=draw.randrange(1, 1 << 30),
        requested=requested,
        packed=case.batch == 1 and draw.random() < 0.25,
    )
    mode = _mode(draw)
    names = {
        "schedule": "flash_attention" if group.kind == "none" else parse(schedule)[0].name,
        "ranks": str(world),
        "layout": layout,
        "mask": mask,
        "features": feature,
        "dtype": str(dtype).removeprefix("torch."),
        "keys": "own" if k_held is None else "other",
        **{f"strides of {name}": how for name, how in strides},
        "gradients": "+".join(name for name in ("q", "k", "v") if name not in frozen) or "no q, k, v",
        "LSE gradient": "yes" if case.lse_gradient else "no",
        "autograd": mode,
        "kernel": item.kernel,
        "shape": "packed" if item.packed else "batch",
    }
    return Call(item, group, mode, thread, tuple(names.items()))


def _layout(draw: random.Random, tokens: int, world: int) -> tuple[str, Layout]:
    """Return a random layout and its name; some have random ranges ("scattered")."""
    name = draw.choice(list(LAYOUTS))
    if world == 1:
        return "contiguous", Layout.contiguous(tokens, 1)  # attention on a single device refuses other layouts
    if draw.random() < 0.2:
        return "scattered", _scattered(draw, tokens, world)
    return name, LAYOUTS[name](tokens, world)


def _strides(draw: random.Random) -> tuple[tuple[tuple[str, Strides], ...], tuple[tuple[str, int], ...]]:
    """Return the memory layouts of q, k, v and dout, and the axes on which values of expanded tensors repeat."""
    names = ("q", "k", "v", "dout")
    kinds: tuple[Strides, ...] = ("contiguous", "contiguous", "transposed", "sliced", "stepped", "expanded")
    strides = {name: draw.choice(kinds) for name in names}
    if draw.random() < 0.3:
        strides = dict.fromkeys(names, "contiguous")
    repeated: list[tuple[str, int]] = []
    for name in names:
        axes = draw.choice(((0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2, 3) if name == "dout" else (0, 1)))
        repeated += [(name, axis) for axis in axes] if strides[name] == "expanded" else []
    return tuple(strides.items()), tuple(repeated)


def _frozen(draw: random.Random, case: Case) -> tuple[str, ...]:
    """Return the leaves that need no gradient, the same on all ranks."""
    if draw.random() < 0.65:
        return ()
    names = ("q", "k", "v", *(("sink_logits",) if case.sinks else ()))
    return tuple(sorted(draw.sample(names, draw.choice((1, 1, 2, 2, len(names))))))


def _schedule(draw: random.Random, settings: Settings, group: Group) -> tuple[str, str]:
    """Return a schedule with all its options, and the text that the call passes if it differs."""
    world = len(group.ranks)
    chosen = draw.choice(settings.schedules or schedule_variants(world))
    if len(group.shape) == 2:
        two = [name for name in settings.schedules if "inner" in dict(parse(name)[0].options)]
        chosen = draw.choice(two or ("hybrid", "double_ring"))
        varied = dict(parse(_varied(draw, chosen, world))[1]) | {"inner": 0}
        requested = f"{parse(chosen)[0].name}({', '.join(f'{key}={value}' for key, value in varied.items())})"
        return over_two_axes(requested, group.shape[1]), requested
    if not settings.schedules and draw.random() < 0.08:
        return "allgather", "auto"  # auto gathers keys in cases as small as these
    return _varied(draw, chosen, world), ""


def _varied(draw: random.Random, schedule: str, world: int) -> str:
    """Return a schedule with random values for its options, unless it was given with options."""
    found, _ = parse(schedule)
    if "(" in schedule and found.name != "hybrid":
        return schedule
    inner = draw.choice([n for n in range(1, world + 1) if world % n == 0])
    rings = ("ring", "zigzag", "striped", "allgather", "ringx1", "ringx3", "ringx4", "double_ring")
    values: dict[str, Any] = {
        "inner": inner,
        "ring": draw.choice(rings),
        "transposed": draw.random() < 0.5,
        "rounds": draw.randint(1, 3),
        "head_stride": draw.randint(0, 2),
        "chunks": draw.randint(1, 3),
    }
    options = [f"{key}={values.get(key, default)}" for key, default in found.options]
    return f"{found.name}({', '.join(options)})" if options else found.name


def _scattered(draw: random.Random, tokens: int, world: int) -> Layout:
    """Return a layout of random ranges, dealt out to ranks at random; some ranks may get none."""
    cuts = sorted({0, tokens, *(draw.randint(0, tokens) for _ in range(2 * world))})
    held: list[list[range]] = [[] for _ in range(world)]
    for begin, end in pairwise(cuts):
        held[draw.randrange(world)].append(range(begin, end))
    for runs in held:
        draw.shuffle(runs)
    return Layout(tuple(tuple(runs) for runs in held))
