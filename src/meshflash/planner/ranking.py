"""Rank schedules for a call on a machine: predicted times, bytes and memory, and why the first one wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Attend, AttendGrad, Direction, Program, Sizes, Wait
from meshflash.planner.costs import FreeLinks, MachineCosts
from meshflash.planner.hardware import Machine
from meshflash.planner.simulator import simulate
from meshflash.schedules import registry

#: The most ranks that are simulated one by one.
MOST_RANKS = 64
#: The schedules that are also planned on the balanced layout of documents.
BALANCED = ("ring", "allgather")
#: Times that differ by less than this factor count as equal.
SIMILAR = 1.05
#: The parts that a time beyond the ideal one is lost to, in words.
PARTS = {
    "kernels": "steps that attend below the rate of a single call",
    "steps": "steps that copy, merge and reduce",
    "imbalance": "load imbalance",
    "communication": "waits for messages",
}


@dataclass(frozen=True)
class PlannedCall:
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

    `seconds` is the time of the passes, and `efficiency` that of one call on a single device, divided by the number of
    ranks, over it. The rest is lost, as means over ranks, to `kernels`: attention beyond the time of one call, `steps`
    that do not attend, `imbalance` of the load, and `communication`. `received_bytes` and `memory_bytes` are of the
    rank with the most: what it receives, and the tensors and buffers of the call. `unsupported_reason` says why a
    schedule cannot run, and is "" otherwise.
    """

    schedule: str
    layout: str
    seconds: float = 0.0
    efficiency: float = 0.0
    kernels: float = 0.0
    steps: float = 0.0
    imbalance: float = 0.0
    communication: float = 0.0
    received_bytes: int = 0
    memory_bytes: int = 0
    unsupported_reason: str = ""

    @property
    def text(self) -> str:
        """The schedule, with its layout where that is not the default one."""
        return f"{self.schedule} on {self.layout}" if self.layout == "balanced" else self.schedule


def rank_schedules(
    call: PlannedCall,
    machine: Machine,
    memory_bytes: float | None = None,
    names: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Prediction]:
    """Return the schedules from the fastest one; those that cannot run come last.

    Args:
        call: The call.
        machine: The machine.
        memory_bytes: The memory that a rank may use; that of the machine by default.
        names: The schedules, as texts; all by default.
        say: A function that is told the progress.
    """
    limit = machine.memory_bytes if memory_bytes is None else memory_bytes
    if "auto" in (names or ()):
        raise ValueError("schedule 'auto': the plan compares schedules; name them, or leave them out to compare all")
    texts = list(dict.fromkeys(map(registry.canonical, names or registry.schedule_variants(call.world))))
    candidates = [(text, text) for text in texts]
    if call.mask.has_documents:
        candidates += [(text, "balanced") for text in BALANCED if text in texts]
    found: list[Prediction] = []
    for text, layout in candidates:
        say(f"{text}, {len(found) + 1} of {len(candidates)}")
        found.append(_predict(call, machine, limit, text, layout))
    return sorted(found, key=lambda each: (bool(each.unsupported_reason), each.seconds))


def explain_ranking(ranked: Sequence[Prediction]) -> str:
    """Return why the first schedule is faster than others, in a sentence or two; "" if only one was planned.

    >>> fast = Prediction("zigzag", "zigzag", 1.0, 0.9, communication=0.1)
    >>> slow = Prediction("ring", "contiguous", 2.0, 0.45, imbalance=1.0, communication=0.1)
    >>> explain_ranking([fast, slow])
    'zigzag is 2.00x as fast as ring, which loses 50 percentage points more to load imbalance.'
    """
    runs = [each for each in ranked if not each.unsupported_reason]
    if not runs:
        return "No schedule can run."
    if len(runs) == 1:
        return "" if len(ranked) == 1 else f"{runs[0].text} is the only one that can run."
    first = runs[0]
    close = [each for each in runs if each.seconds < first.seconds * SIMILAR]
    text = ""
    if len(close) > 1:
        among = ", ".join(each.text for each in close[:-1]) + f" and {close[-1].text}"
        text = f"{among} are within {SIMILAR - 1:.0%} of each other, which is less than this prediction can tell apart."
    if len(close) == len(runs):
        return text
    slower = runs[len(close)]
    gains = {part: getattr(slower, part) / slower.seconds - getattr(first, part) / first.seconds for part in PARTS}
    part = max(gains, key=lambda each: gains[each])
    return (
        f"{text} {first.text} is {slower.seconds / first.seconds:.2f}x as fast as {slower.text}, which loses "
        f"{gains[part] * 100:.0f} percentage points more to {PARTS[part]}."
    ).lstrip()


def _predict(call: PlannedCall, machine: Machine, limit: float, name: str, layout_name: str) -> Prediction:
    try:
        layout = call.layout(layout_name)
        problem = Problem(layout.ranges, layout.ranges, call.mask, call.heads, call.kv_heads, lse=False)
        passes = {
            each: [registry.build(name, problem, rank, each) for rank in range(call.world)] for each in call.directions
        }
    except ValueError as error:
        return Prediction(name, layout_name, unsupported_reason=str(error))
    costs = MachineCosts(machine, problem, call.sizes)
    total, free, attends, others = _seconds(call, costs, passes)
    ideal = costs.ideal_seconds(call.tokens, call.directions)
    memory = max(_memory(call, problem, [programs[rank] for programs in passes.values()]) for rank in range(call.world))
    received = max(
        sum(sum(programs[rank].received(call.sizes).values()) for programs in passes.values())
        for rank in range(call.world)
    )
    reason = "" if memory <= limit else f"needs {memory / 1e9:.3g} GB a rank, and there are {limit / 1e9:.3g}"
    return Prediction(
        schedule=name,
        layout=layout.name,
        seconds=total,
        efficiency=ideal / total if total else 1.0,
        kernels=attends - ideal,
        steps=others,
        imbalance=free - attends - others,
        communication=total - free,
        received_bytes=received,
        memory_bytes=memory,
        unsupported_reason=reason,
    )


def _seconds(
    call: PlannedCall, costs: MachineCosts, passes: dict[Direction, list[Program]]
) -> tuple[float, float, float, float]:
    """Return the seconds of all passes, those with free links, and as means over ranks those of attends and others."""
    total = free = attends = others = 0.0
    for programs in passes.values():
        timeline = simulate(programs, costs)
        total += timeline.total
        attends += sum(map(timeline.busy, range(call.world))) / call.world
        others += (
            sum(
                costs.step_seconds(program, n)
                for program in programs
                for n, step in enumerate(program.steps)
                if not isinstance(step, Attend | AttendGrad | Wait)
            )
            / call.world
        )
        free += simulate(programs, FreeLinks(costs)).total
    return total, free, attends, others


def _memory(call: PlannedCall, problem: Problem, programs: list[Program]) -> int:
    """Return the bytes of a rank's tensors in a call, and of the buffers of the pass with the most."""
    rank = programs[0].rank
    sizes, rows, keys = call.sizes, problem.q_lengths[rank], problem.k_lengths[rank]
    q = sizes.row_bytes("q", "input") * rows * call.heads
    kv = sizes.row_bytes("kv", "input") * keys * call.kv_heads
    out = sizes.row_bytes("out", "input") * rows * call.heads
    tensors = q + kv + out
    if "backward" in call.directions:
        tensors *= 2  # the gradients of each
    saved = max(program.saved_bytes(sizes) for program in programs)
    return tensors + saved + max(program.scratch_bytes(sizes) for program in programs)
