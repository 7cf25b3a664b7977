"""The registry of schedules: look one up by name, parse its options, build its programs, or add your own."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Protocol

from meshflash.core.coverage import MAX_KEPT_PAIRS
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Option, Problem
from meshflash.core.program import Direction, Program, Sizes
from meshflash.core.sampled import MAX_COMPLETE, sample_ranks, verify_sampled
from meshflash.core.verify import Report, verify_programs


class Builder(Protocol):
    """A pure function that builds the program of one rank. It must build matching programs for all ranks."""

    def __call__(self, problem: Problem, rank: int, name: str) -> Program: ...


@dataclass(frozen=True)
class Schedule:
    """A registered schedule: its builders, default layout and options. `register_schedule` makes one."""

    name: str
    forward: Builder
    backward: Builder
    #: The default layout, as a function of the number of tokens and of ranks.
    layout: Callable[[int, int], Layout]
    summary: str = ""
    #: Names of options with their defaults; the type of a default is the type of the option.
    options: tuple[tuple[str, Option], ...] = ()
    #: Whether the forward saves buffers of its own for the backward.
    saves_buffers: bool = False
    #: The option that names another schedule, whose default layout this one shares; "" if there is none.
    layout_of_option: str = ""
    #: Names of the groups that its posts use besides "mesh".
    groups: tuple[str, ...] = ()


_SCHEDULES: dict[str, Schedule] = {}
#: Modules of this package that define no schedule. Every other module registers its schedules when imported.
_TOOLS = {"compose", "registry", "writer"}
_loaded: list[str] = []
#: Functions to call whenever a schedule is added or removed: caches keyed by schedule names must be cleared.
on_change: list[Callable[[], None]] = []


def register(schedule: Schedule) -> None:
    """Add a schedule; raise ValueError for a bad or taken name."""
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

    Check it with `verify_programs` before you run it. That proves that every visible pair is computed once, that every
    gradient reaches its owner, that nothing deadlocks, and that no buffer is touched while it moves.

    Args:
        name: The name, a lower-case identifier.
        forward: The builder of the forward program of one rank.
        backward: The builder of the backward program of one rank.
        layout: The default layout, as a function of the number of tokens and of ranks.
        summary: One line for lists of schedules.
        options: The names of options with their defaults; builders read them from `problem.option`.
        saves_buffers: Whether the forward saves buffers of its own for the backward.
        groups: The names of the groups that its posts use besides "mesh".

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
    """Remove a schedule.

    Args:
        name: The name under which `register_schedule` added it.
    """
    find(name)
    del _SCHEDULES[name]
    _changed()


def schedules() -> tuple[Schedule, ...]:
    """Return all schedules, sorted by name."""
    _load()
    return tuple(_SCHEDULES[name] for name in sorted(_SCHEDULES))


def names() -> tuple[str, ...]:
    """Return the names of all schedules, sorted."""
    return tuple(schedule.name for schedule in schedules())


def schedule_variants(world: int) -> tuple[str, ...]:
    """Return all schedules as texts; those with an option `inner` once for each proper divisor of `world`.

    >>> [text for text in schedule_variants(8) if "(" in text]
    ['double_ring(inner=2)', 'double_ring(inner=4)', 'hybrid(inner=2)', 'hybrid(inner=4)']
    """
    inner = [n for n in range(2, world) if world % n == 0]
    out: list[str] = []
    for schedule in schedules():
        variants = [f"{schedule.name}(inner={n})" for n in inner if "inner" in dict(schedule.options)]
        out += variants or [schedule.name]
    return tuple(out)


def find(name: str) -> Schedule:
    """Return the schedule of this name, or raise ValueError that lists all names."""
    _load()
    if name not in _SCHEDULES:
        raise ValueError(f"schedule={name!r}: expected one of auto, {', '.join(names())}")
    return _SCHEDULES[name]


def parse(text: str) -> tuple[Schedule, tuple[tuple[str, Option], ...]]:
    """Parse `name` or `name(option=value, ...)` into a schedule and all of its options.

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
    """Split at commas outside of parentheses."""
    out, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            out.append("")
        else:
            out[-1] += letter
    return out


def _check_inner(text: str, key: str, value: str) -> None:
    """Raise ValueError unless an option names a schedule."""
    try:
        if value == "auto":
            raise ValueError(f"auto cannot be nested; expected one of {', '.join(names())}")
        parse(value)
    except ValueError as error:
        raise ValueError(f"schedule={text!r}, {key}={value!r}: {error}") from None


def canonical(text: str) -> str:
    """Return the canonical text of a schedule, which ranks compare: options in order, without those at their default.

    >>> canonical("hybrid( ring=allgather(head_stride=1), inner=2)"), canonical("ulysses(rounds=1)")
    ('hybrid(inner=2, ring=allgather(head_stride=1))', 'ulysses')
    """
    schedule, options = parse(text)
    default = dict(schedule.options)
    given = [f"{key}={value}" for key, value in options if value != default[key]]
    return f"{schedule.name}({', '.join(given)})" if given else schedule.name


def default_layout(text: str) -> Callable[[int, int], Layout]:
    """Return the default layout of a schedule, as a function of the number of tokens and of ranks.

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
    """Build the program of one rank; cached.

    Args:
        schedule: The name of the schedule, with options in parentheses; they replace those of the problem.
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
        direction: "forward" or "backward".
    """
    found, options = parse(schedule)
    builder = found.forward if direction == "forward" else found.backward
    return builder(_with_options(problem, options), rank, found.name)


@lru_cache(maxsize=256)
def _with_options(problem: Problem, options: tuple[tuple[str, Option], ...]) -> Problem:
    """Return one object for all ranks and both passes, so that cached properties such as `needs` are computed once."""
    return replace(problem, options=options)


def verified(
    schedule: str, problem: Problem, sizes: Sizes | None = None, tables: bool = True
) -> dict[Direction, Report]:
    """Build and verify both passes of a schedule; raise VerificationError if a program is wrong.

    Up to 64 ranks this is a proof. Beyond, some ranks are looked at, as `verified_sample` says, and the reports have
    entries for these ranks only.

    Args:
        schedule: The name of the schedule, with options in parentheses.
        problem: The positions that every rank holds, and the mask.
        sizes: The sizes that turn rows into bytes.
        tables: Whether to check the tile tables of each step against the mask as well.
    """
    if problem.world > MAX_COMPLETE:
        return verified_sample(schedule, problem, sample_ranks(problem.world), sizes, tables)
    out: dict[Direction, Report] = {}
    for direction in ("forward", "backward"):
        programs = [build(schedule, problem, rank, direction) for rank in range(problem.world)]
        out[direction] = verify_programs(programs, problem, sizes, tables, after=out.get("forward"))
    return out


def verified_sample(
    schedule: str,
    problem: Problem,
    ranks: Sequence[int],
    sizes: Sizes | None = None,
    tables: bool = True,
    *,
    num_partners: int = 4,
    proof_ranks: int = MAX_COMPLETE,
    seed: int = 0,
    listen: Callable[[str], None] = lambda text: None,
) -> dict[Direction, Report]:
    """Verify both passes of some ranks of a schedule, and a small world of the same layout and mask completely.

    `Report.summary` says what that proves and what is only sampled. The small world has the first ranks of the layout,
    with the positions that they hold and the same mask. For these, it is a proof, of the absence of deadlocks as well.

    Args:
        schedule: The name of the schedule, with options in parentheses.
        problem: The positions that every rank holds, and the mask.
        ranks: The ranks to look at.
        sizes: The sizes that turn rows into bytes.
        tables: Whether to check the tile tables of small steps against the mask as well.
        num_partners: The most partners of each rank to look at.
        proof_ranks: The number of ranks of the small world, at most 64.
        seed: The seed of random partners and rows.
        listen: A function that is told what is being looked at.

    >>> layout = Layout.zigzag(160, 80)
    >>> problem = Problem(layout.ranges, layout.ranges, Mask.causal())
    >>> print(verified_sample("zigzag", problem, [7], proof_ranks=8)["backward"].proved.split("; ")[-1])
    8 ranks of the same layout are right as a world of their own, without deadlock
    """
    found, _ = verify_sampled(
        lambda rank, direction: build(schedule, problem, rank, direction),
        problem,
        ranks,
        sizes=sizes,
        tables=tables,
        num_partners=num_partners,
        seed=seed,
        listen=listen,
    )
    small, reason = _first_ranks(schedule, problem, min(proof_ranks, MAX_COMPLETE))
    if small is None:
        return {
            name: replace(report, sampled=f"{report.sampled}; no small world was proved: {reason}")
            for name, report in found.items()
        }
    listen(f"verify a world of {small.world} ranks")
    verified(schedule, small, sizes, tables=False)
    also = f"{small.world} ranks of the same layout are right as a world of their own, without deadlock"
    return {name: replace(report, proved=f"{report.proved}; {also}") for name, report in found.items()}


def _first_ranks(schedule: str, problem: Problem, count: int) -> tuple[Problem | None, str]:
    """Return the problem of the first ranks, few and small enough to be verified completely; or None and the reason."""
    inner = int(dict(parse(schedule)[1]).get("inner", 0))
    count = min(count, problem.world)
    count -= count % (inner or 1)
    if not count:
        return None, f"groups of {inner} ranks are too many for a small world"
    small = replace(problem, q=problem.q[:count], k=problem.k[:count])
    pairs = (problem.mask.batch_rows or 1) * sum(small.q_lengths) * sum(small.k_lengths)
    if pairs > MAX_KEPT_PAIRS:
        return None, f"{sum(small.q_lengths):,} tokens of {count} ranks are too many for a proof"
    return small, ""


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
    """Build the program of one rank for a layout.

    Args:
        schedule: The name of the schedule, with options in parentheses.
        layout: The layout of the queries, and of the keys unless `k_layout` is given.
        mask: The mask between queries and keys.
        rank: The rank that runs the program.
        direction: "forward" or "backward".
        heads: The number of query heads.
        kv_heads: The number of key heads, which divides `heads`.
        k_layout: The layout of the keys, if it differs.

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
    for clear_cache in on_change:
        clear_cache()


def _load() -> None:
    """Import every module of this package once, so that each registers its schedules."""
    if _loaded:
        return
    folder = Path(__file__).parent
    for module in pkgutil.iter_modules([str(folder)]):
        if module.name not in _TOOLS:
            import_module(f"meshflash.schedules.{module.name}")
    _loaded.append("all")
