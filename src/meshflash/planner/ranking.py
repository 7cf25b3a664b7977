"""Rank schedules for a call on a machine: predicted times, bytes and memory, and why the first one wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Program, Sizes
from meshflash.planner.costs import FreeLinks, MachineCosts
from meshflash.planner.hardware import Machine
from meshflash.planner.simulator import simulate
from meshflash.schedules import registry

#: The most ranks that are simulated one by one.
MOST_RANKS = 64
#: Further schedules besides `registry.schedule_variants`: those on the balanced layout of documents.
BALANCED = ("ring", "allgather")
#: Times that differ by less than this factor count as equal.
SIMILAR = 1.03
#: The parts of a time, and what they say of a schedule that has more of them than another one.
PARTS = {
    "kernels": "to steps that compute more slowly than one call",
    "imbalance": "to ranks with unequal work",
    "communication": "to messages that it waits for",
}


@dataclass(frozen=True)
class Case:
    """The call that is planned.

    Attributes:
        tokens: The number of tokens.
        world: The number of ranks.
        mask: The mask.
        heads: The number of query heads.
        kv_heads: The number of KV heads.
        sizes: Batch, head dims and the bytes of elements.
        directions: The passes.
    """

    tokens: int
    world: int
    mask: Mask
    heads: int
    kv_heads: int
    sizes: Sizes
    directions: tuple[Direction, ...] = ("forward", "backward")

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MOST_RANKS:
            raise ValueError(f"nproc={self.world}: expected 1 to {MOST_RANKS} ranks, which are simulated one by one")
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens}: expected at least one")

    def layout(self, name: str) -> Layout:
        """Return a layout of the tokens by its name, or the default one of a schedule.

        Args:
            name: "balanced", or the text of a schedule.
        """
        if name == "balanced":
            return Layout.balanced(self.mask, self.tokens, self.world)
        return registry.default_layout(name)(self.tokens, self.world)


@dataclass(frozen=True)
class Prediction:
    """What a schedule costs; `rank_schedules` makes it.

    `seconds` is the time of the passes. Of it, `kernels` is attention beyond the time of one call on a single device,
    `imbalance` is lost to ranks with unequal work, and `communication` to messages. `received_bytes` and
    `memory_bytes` are of the rank with the most: what it receives, and the tensors and buffers of the call. `refused`
    says why a schedule cannot run, and is "" otherwise.
    """

    schedule: str
    layout: str
    seconds: float = 0.0
    efficiency: float = 0.0
    kernels: float = 0.0
    imbalance: float = 0.0
    communication: float = 0.0
    received_bytes: int = 0
    memory_bytes: int = 0
    refused: str = ""

    @property
    def text(self) -> str:
        """The schedule, with its layout where that is not the default one."""
        return f"{self.schedule} on {self.layout}" if self.layout == "balanced" else self.schedule


def rank_schedules(
    case: Case,
    machine: Machine,
    memory_bytes: float | None = None,
    names: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Prediction]:
    """Return the schedules from the fastest one; those that cannot run come last.

    Args:
        case: The call.
        machine: The machine.
        memory_bytes: The memory that a rank may use; that of the machine by default.
        names: The schedules, as texts; all by default.
        say: A function that is told the progress.
    """
    limit = machine.memory_bytes if memory_bytes is None else memory_bytes
    candidates = [(name, name) for name in names or registry.schedule_variants(case.world)]
    if names is None and case.mask.has_documents:
        candidates += [(name, "balanced") for name in BALANCED]
    found: list[Prediction] = []
    for name, layout in candidates:
        say(f"{name}, {len(found) + 1} of {len(candidates)}")
        found.append(_predict(case, machine, limit, name, layout))
    return sorted(found, key=lambda each: (bool(each.refused), each.seconds))


def why(ranked: Sequence[Prediction]) -> str:
    """Return why the first schedule is faster than others, in a sentence or two.

    >>> fast = Prediction("zigzag", "zigzag", 1.0, 0.9, 0.02, 0.0, 0.08)
    >>> slow = Prediction("ring", "contiguous", 2.0, 0.45, 0.04, 1.0, 0.06)
    >>> why([fast, slow])
    'zigzag is 2.00x as fast as ring, which loses 50% more of its time to ranks with unequal work.'
    """
    runs = [each for each in ranked if not each.refused]
    if not runs:
        return "No schedule can run."
    first = runs[0]
    close = [each for each in runs if each.seconds < first.seconds * SIMILAR]
    text = ""
    if len(close) > 1:
        among = ", ".join(each.text for each in close[:-1]) + f" and {close[-1].text}"
        text = f"{among} are within {SIMILAR - 1:.0%} of each other, which is less than this prediction can tell apart."
    if len(close) == len(runs):
        return text or f"{first.text} is the only one that can run."
    slower = runs[len(close)]
    gains = {part: getattr(slower, part) / slower.seconds - getattr(first, part) / first.seconds for part in PARTS}
    part = max(gains, key=lambda each: gains[each])
    return (
        f"{text} {first.text} is {slower.seconds / first.seconds:.2f}x as fast as {slower.text}, which loses "
        f"{gains[part]:.0%} more of its time {PARTS[part]}."
    ).lstrip()


def _predict(case: Case, machine: Machine, limit: float, name: str, layout_name: str) -> Prediction:
    try:
        layout = case.layout(layout_name)
        problem = Problem(layout.ranges, layout.ranges, case.mask, case.heads, case.kv_heads, lse=False)
        passes = {
            each: [registry.build(name, problem, rank, each) for rank in range(case.world)] for each in case.directions
        }
    except ValueError as error:
        return Prediction(name, layout_name, refused=str(error))
    costs = MachineCosts(machine, problem, case.sizes)
    total, free, busy = _seconds(case, costs, passes)
    ideal = costs.ideal_seconds(case.tokens, case.directions)
    memory = max(_memory(case, problem, [programs[rank] for programs in passes.values()]) for rank in range(case.world))
    received = max(
        sum(sum(programs[rank].received(case.sizes).values()) for programs in passes.values())
        for rank in range(case.world)
    )
    refused = "" if memory <= limit else f"needs {memory / 1e9:.3g} GB a rank, and there are {limit / 1e9:.3g}"
    return Prediction(
        schedule=name,
        layout=layout.name,
        seconds=total,
        efficiency=ideal / total if total else 1.0,
        kernels=busy - ideal,
        imbalance=free - busy,
        communication=total - free,
        received_bytes=received,
        memory_bytes=memory,
        refused=refused,
    )


def _seconds(case: Case, costs: MachineCosts, passes: dict[Direction, list[Program]]) -> tuple[float, float, float]:
    """Return the seconds of all passes, those with free links, and the mean seconds in which ranks attend."""
    total = free = busy = 0.0
    for programs in passes.values():
        timeline = simulate(programs, costs)
        total += timeline.total
        busy += sum(map(timeline.busy, range(case.world))) / case.world
        free += simulate(programs, FreeLinks(costs)).total
    return total, free, busy


def _memory(case: Case, problem: Problem, programs: list[Program]) -> int:
    """Return the bytes of a rank's tensors in a call, and of the buffers of the pass with the most."""
    rank = programs[0].rank
    sizes, rows, keys = case.sizes, problem.q_lengths[rank], problem.k_lengths[rank]
    q = sizes.row_bytes("q", "input") * rows * case.heads
    kv = sizes.row_bytes("kv", "input") * keys * case.kv_heads
    out = sizes.row_bytes("out", "input") * rows * case.heads
    tensors = q + kv + out
    if "backward" in case.directions:
        tensors *= 2  # the gradients of each
    saved = max(program.saved_bytes(sizes) for program in programs)
    return tensors + saved + max(program.scratch_bytes(sizes) for program in programs)
