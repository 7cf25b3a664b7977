"""The schedules there are, by name, and how a user adds one."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Protocol

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Option, Problem
from meshflash.core.program import Direction, Program, Sizes
from meshflash.core.verify import Report, verify_programs


class Builder(Protocol):
    """A pure function: the program of one rank. All ranks' programs must fit together."""

    def __call__(self, problem: Problem, rank: int, name: str) -> Program: ...


@dataclass(frozen=True)
class Schedule:
    """A schedule: its two builders, the layout it is at home on, and its options with their defaults.

    Set `saves_buffers` where the forward saves buffers of its own. Where one of its options, `layout_of_option`, names
    another schedule, it is at home where that one is. `groups` are those that its posts are of besides "mesh".
    """

    name: str
    forward: Builder
    backward: Builder
    layout: Callable[[int, int], Layout]
    summary: str = ""
    options: tuple[tuple[str, Option], ...] = ()
    saves_buffers: bool = False
    layout_of_option: str = ""
    groups: tuple[str, ...] = ()


_SCHEDULES: dict[str, Schedule] = {}
#: The files of this folder that are no family of schedules; every other one registers its own when imported.
_TOOLS = {"compose", "registry", "writer"}
_loaded: list[str] = []
#: Called whenever a name comes to mean another schedule.
on_change: list[Callable[[], None]] = []


def register(schedule: Schedule) -> None:
    """Make a schedule known by its name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", schedule.name) or schedule.name == "auto":
        raise ValueError(f"schedule name {schedule.name!r}: expected a lower-case identifier other than auto")
    if schedule.name in _SCHEDULES:
        raise ValueError(f"schedule {schedule.name!r} is registered already")
    _SCHEDULES[schedule.name] = schedule


def register_schedule(
    name: str,
    forward: Builder,
    backward: Builder,
    *,
    layout: Callable[[int, int], Layout] = Layout.contiguous,
    summary: str = "",
    options: Mapping[str, Option] | None = None,
    saves_buffers: bool = False,
    groups: tuple[str, ...] = (),
) -> None:
    """Add a schedule of your own: two pure functions `(problem, rank, name) -> Program`.

    Check it with `verify_programs` before you run it: every visible pair once, every gradient home, no
    deadlock, no buffer touched while it moves. Set `saves_buffers` where the forward saves buffers of its own;
    `groups` are those that its posts are of besides "mesh".

    >>> from meshflash.schedules import ring
    >>> register_schedule("my_ring", ring.forward, ring.backward, summary="ring by another name")
    >>> "my_ring" in names()
    True
    >>> unregister_schedule("my_ring")
    """
    _load()
    register(
        Schedule(name, forward, backward, layout, summary, tuple((options or {}).items()), saves_buffers, "", groups)
    )
    _changed()


def unregister_schedule(name: str) -> None:
    """Forget a schedule."""
    find(name)
    del _SCHEDULES[name]
    _changed()


def schedules() -> tuple[Schedule, ...]:
    """Every schedule, by name."""
    _load()
    return tuple(_SCHEDULES[name] for name in sorted(_SCHEDULES))


def names() -> tuple[str, ...]:
    """The names of all schedules."""
    return tuple(schedule.name for schedule in schedules())


def over_lines(world: int) -> tuple[str, ...]:
    """All schedules; those over two axes once for each inner axis that divides so many ranks.

    >>> [text for text in over_lines(8) if "(" in text]
    ['double_ring(inner=2)', 'double_ring(inner=4)', 'hybrid(inner=2)', 'hybrid(inner=4)']
    """
    inner = [n for n in range(2, world) if world % n == 0]
    out: list[str] = []
    for schedule in schedules():
        lines = [f"{schedule.name}(inner={n})" for n in inner if "inner" in dict(schedule.options)]
        out += lines or [schedule.name]
    return tuple(out)


def find(name: str) -> Schedule:
    """The schedule of this name."""
    _load()
    if name not in _SCHEDULES:
        raise ValueError(f"schedule={name!r}: expected one of auto, {', '.join(names())}")
    return _SCHEDULES[name]


def parse(text: str) -> tuple[Schedule, tuple[tuple[str, Option], ...]]:
    """A schedule and its options, from `name` or `name(option=value, ...)`.

    >>> parse("allgather(head_stride=2)")[1]
    (('head_stride', 2), ('chunks', 1))
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"schedule={text!r}: expected a name, or name(option=value)")
    schedule = find(match[1])
    options, given = dict(schedule.options), {}
    for item in filter(None, map(str.strip, _split(match[2] or ""))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in options:
            known = ", ".join(options) or "none"
            raise ValueError(f"schedule={text!r}: {schedule.name} has no option {key!r}; it has: {known}")
        if key in given:
            raise ValueError(f"schedule={text!r}: {key} is given twice")
        given[key] = _value(text, key, value, options[key])
    if schedule.layout_of_option in given:
        _check_inner(text, schedule.layout_of_option, str(given[schedule.layout_of_option]))
    return schedule, tuple((options | given).items())


def _split(text: str) -> list[str]:
    """At commas, but not at those within brackets."""
    out, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            out.append("")
        else:
            out[-1] += letter
    return out


def _check_inner(text: str, key: str, value: str) -> None:
    """ValueError unless an option names a schedule."""
    try:
        if value == "auto":
            raise ValueError(f"name one: {', '.join(names())}")
        parse(value)
    except ValueError as error:
        raise ValueError(f"schedule={text!r}, {key}={value!r}: {error}") from None


def canonical(text: str) -> str:
    """A schedule in the one way in which ranks compare it: options in their order, and none that is as by default.

    >>> canonical("hybrid( ring=allgather(head_stride=1), inner=2)"), canonical("ulysses(rounds=1)")
    ('hybrid(inner=2, ring=allgather(head_stride=1))', 'ulysses')
    """
    schedule, options = parse(text)
    default = dict(schedule.options)
    given = [f"{key}={value}" for key, value in options if value != default[key]]
    return f"{schedule.name}({', '.join(given)})" if given else schedule.name


def default_layout(text: str) -> Callable[[int, int], Layout]:
    """The layout that a schedule is at home on, for so many tokens and ranks.

    >>> default_layout("hybrid(ring=striped)")(8, 4).name
    'striped'
    """
    found, options = parse(text)
    return default_layout(str(dict(options)[found.layout_of_option])) if found.layout_of_option else found.layout


def _value(text: str, key: str, value: str, default: Option) -> Option:
    try:
        if isinstance(default, bool):
            return {"True": True, "False": False}[value]
        if isinstance(default, int) and int(value) < 0:
            raise ValueError
        return type(default)(value)
    except (KeyError, ValueError):
        kind = "True or False" if isinstance(default, bool) else "a number >= 0"
        raise ValueError(f"schedule={text!r}: {key}={value!r}, expected {kind}") from None


@lru_cache(maxsize=256)
def build(schedule: str, problem: Problem, rank: int, direction: Direction) -> Program:
    """The program of one rank; cached. The problem's options are those that the schedule names."""
    found, options = parse(schedule)
    builder = found.forward if direction == "forward" else found.backward
    return builder(_with_options(problem, options), rank, found.name)


@lru_cache(maxsize=256)
def _with_options(problem: Problem, options: tuple[tuple[str, Option], ...]) -> Problem:
    """The same object for every rank and both passes, so that what a problem needs is worked out once."""
    return replace(problem, options=options)


def verified(
    schedule: str, problem: Problem, sizes: Sizes | None = None, tables: bool = True
) -> dict[Direction, Report]:
    """Both passes of a schedule, proved right for a problem: VerificationError if they are not."""
    out: dict[Direction, Report] = {}
    for direction in ("forward", "backward"):
        programs = [build(schedule, problem, rank, direction) for rank in range(problem.world)]
        out[direction] = verify_programs(programs, problem, sizes, tables, after=out.get("forward"))
    return out


def build_program(
    schedule: str,
    layout: Layout,
    mask: Mask,
    rank: int,
    *,
    direction: Direction = "forward",
    heads: int = 1,
    kv_heads: int = 1,
    k_layout: Layout | None = None,
) -> Program:
    """The program of one rank of a layout; keys may have a layout of their own.

    >>> program = build_program("ring", Layout.contiguous(8, 2), Mask.causal(), rank=1)
    >>> print(program.steps[1])
    attend q[0:4, 0:1] x kv[0:4, 0:1] -> out.sum[0:4, 0:1]
    """
    if not 0 <= rank < layout.world:
        raise ValueError(f"rank={rank!r}: the layout has ranks 0 to {layout.world - 1}")
    problem = Problem(layout.ranges, (k_layout or layout).ranges, mask, heads, kv_heads)
    return build(schedule, problem, rank, direction)


def _changed() -> None:
    build.cache_clear()
    for tell in on_change:
        tell()


def _load() -> None:
    """Import every family, once."""
    if _loaded:
        return
    folder = Path(__file__).parent
    for module in pkgutil.iter_modules([str(folder)]):
        if module.name not in _TOOLS:
            import_module(f"meshflash.schedules.{module.name}")
    _loaded.append("all")
