"""Simulates programs: when each rank attends, what moves meanwhile, and where it has to wait.

A model and no measurement: attention takes time by its visible pairs, a move by its bytes, and all other
steps none; or steps take what they took in a real run, and only moves are modelled. Posts of a group move one
after another; those of different groups do not slow each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, get_args

from meshflash.core.problem import Problem
from meshflash.core.program import Attend, AttendGrad, Part, Post, Program, Sizes, Step, Wait
from meshflash.core.tiles import worklist

Kind = Literal["attend", "move", "other"]
#: Where a timeline's figures come from. Every title and summary says it.
Source = Literal["simulated", "measured"]

#: A backward does five products of matrices for each pair, a forward two.
BACKWARD_COST = 2.5


@dataclass(frozen=True)
class Rates:
    """How fast ranks are: pairs of one (query, key) and head; bytes over each rank's link; seconds to begin a post."""

    pairs_per_second: float
    bytes_per_second: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (value > 0 or (value == 0 and each.name == "latency")):
                raise ValueError(f"Rates({each.name}={value}): expected a positive number")


@dataclass(frozen=True)
class Event:
    """What a rank does from `begin` to `end`: a step of its program. A wait is an "other" that takes time."""

    rank: int
    kind: Kind
    begin: float
    end: float
    label: str
    step: int

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """The events of all ranks, those of a rank in the order of its steps; a move is the event of its post.

    `source` says whether they are of a simulation or of a real run, and `assumes` what a simulation goes by.
    """

    name: str
    world: int
    events: tuple[Event, ...]
    source: Source
    assumes: str = ""

    @cached_property
    def total(self) -> float:
        """Seconds until the last rank is done."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def efficiency(self) -> float:
        """The share of the time in which ranks compute, on average."""
        return sum(map(self.busy, range(self.world))) / self.world / self.total if self.total else 1.0

    def of(self, rank: int, kind: Kind) -> list[Event]:
        """The events of one kind of a rank. The n-th "attend" is its attend step n."""
        return self._sorted[rank, kind]

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(event.seconds for event in self.of(rank, "attend"))

    def exposed(self, rank: int) -> float:
        """Seconds in which a rank waits for what moves."""
        return sum(event.seconds for event in self.of(rank, "other"))

    @cached_property
    def _sorted(self) -> dict[tuple[int, Kind], list[Event]]:
        kinds: tuple[Kind, ...] = get_args(Kind)
        out: dict[tuple[int, Kind], list[Event]] = {(rank, kind): [] for rank in range(self.world) for kind in kinds}
        for event in self.events:
            out[event.rank, event.kind].append(event)
        return out

    @property
    def title(self) -> str:
        """What it is of, and whether it is simulated or measured."""
        assumes = f" ({self.assumes})" if self.assumes else ""
        return f"{self.name} on {self.world} rank{'' if self.world == 1 else 's'}, {self.source}{assumes}"

    @property
    def summary(self) -> str:
        """Its figures in a line, labelled simulated or measured."""
        worst = max(range(self.world), key=self.exposed, default=0)
        exposed = self.exposed(worst)
        where = f" (rank {worst})" if exposed else ""
        return (
            f"{self.source}: total {in_words(self.total)}, efficiency {self.efficiency:.1%}, "
            f"exposed comm {in_words(exposed)}{where}"
        )


def in_words(seconds: float) -> str:
    """A time in a unit that suits it.

    >>> in_words(0.00125), in_words(2.5e-7), in_words(0)
    ('1.25 ms', '250 ns', '0')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns" if seconds else "0"


def simulate(
    programs: Sequence[Program],
    problem: Problem,
    sizes: Sizes,
    rates: Rates,
    seconds: Sequence[Sequence[float]] | None = None,
    assumes: str = "",
) -> Timeline:
    """Run the programs of all ranks, in their order, against a clock. `seconds` of each rank's steps may be known.

    `assumes` says in words where the rates come from; the timeline's title shows it.

    A post moves once it is made, all earlier ones of its group are complete, and the posts that it
    exchanges parts with are as far. It then takes the latency, and the time of all it receives or of all it
    sends, whichever is longer; what a rank sends to itself takes none.

    >>> from meshflash.core.mask import Mask
    >>> from meshflash.schedules.registry import build
    >>> problem = Problem(((range(4),),), ((range(4),),), Mask.causal())
    >>> simulate([build("ring", problem, 0, "forward")], problem, Sizes(), Rates(1.0, 1.0)).total
    10.0
    """
    known: Sequence[Sequence[float] | None] = seconds or [None] * len(programs)
    ranks = [_Rank(program, problem, sizes, rates, took) for program, took in zip(programs, known, strict=True)]
    _match(ranks)
    waiting: list[_Move] = []
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            issued = rank.advance()
            progress |= issued is not None
            waiting += issued or ()
        still = [move for move in waiting if not move.settle()]
        progress |= len(still) < len(waiting)
        waiting = still
    stuck = [f"rank {n} at step {rank.at}" for n, rank in enumerate(ranks) if rank.at < len(rank.program.steps)]
    if stuck or waiting:
        raise ValueError(f"simulate(programs): they never end ({', '.join(stuck)}); verify_programs says why")
    events = [event for rank in ranks for event in sorted(rank.all_events(), key=lambda event: event.step)]
    name = " ".join(dict.fromkeys(f"{program.name} {program.direction}" for program in programs))
    return Timeline(name, len(programs), tuple(events), "simulated", assumes)


@dataclass(eq=False)
class _Move:
    """A post: when it was made, when it moves, and the posts it meets."""

    rank: int
    step: int
    post: Post
    received: int
    sent: int
    seconds: float
    before: _Move | None
    meets: list[_Move] = field(default_factory=list)
    issued: float | None = None
    begin: float = 0.0
    complete: float | None = None

    @property
    def ready(self) -> float | None:
        """From when on this side could move."""
        if self.issued is None or self.before is None:
            return self.issued
        return None if self.before.complete is None else max(self.issued, self.before.complete)

    def settle(self) -> bool:
        """Know when it moves, if all sides are known to be ready. Whether that is known."""
        sides = [move.ready for move in (self, *self.meets)]
        known = [side for side in sides if side is not None]
        if len(known) < len(sides):
            return False
        self.begin = max(known)
        self.complete = self.begin + self.seconds
        return True


class _Rank:
    """One rank: its program, how far it is, and its clock."""

    def __init__(
        self, program: Program, problem: Problem, sizes: Sizes, rates: Rates, took: Sequence[float] | None = None
    ) -> None:
        self.program, self.problem, self.sizes, self.rates, self.took = program, problem, sizes, rates, took
        self.at, self.clock = 0, 0.0
        self.events: list[Event] = []
        self.moves: dict[str, _Move] = {}
        last: dict[str, _Move] = {}
        for n, step in enumerate(program.steps):
            if isinstance(step, Post):
                received, sent = (self._bytes(side) for side in (step.recvs, step.sends))
                alone = all(part.peer == program.rank for part in (*step.sends, *step.recvs))
                seconds = 0.0 if alone else rates.latency + max(received, sent) / rates.bytes_per_second
                move = _Move(program.rank, n, step, received, sent, seconds, last.get(step.group))
                self.moves[step.name] = last[step.group] = move

    def advance(self) -> list[_Move] | None:
        """Do steps up to the first wait that cannot end yet: the posts made on the way; None if there is no step."""
        issued, begin = [], self.at
        for step in self.program.steps[begin:]:
            start = self.clock
            kind: Kind = "other"
            if isinstance(step, Post):
                self.clock += self._seconds(step)
                self.moves[step.name].issued = self.clock
                issued.append(self.moves[step.name])
                self.at += 1
                continue
            if isinstance(step, Wait):
                complete = self.moves[step.post].complete
                if complete is None:
                    break
                self.clock = max(self.clock, complete)
            else:
                self.clock += self._seconds(step)
                if isinstance(step, Attend | AttendGrad):
                    kind = "attend"
                else:
                    start = self.clock  # what a copy takes is no wait
            self._note(kind, start, self.clock, str(step), self.at)
            self.at += 1
        return issued if self.at > begin else None

    def all_events(self) -> list[Event]:
        """Those of the steps, and those of the moves."""
        for move in self.moves.values():
            assert move.complete is not None
            label = f"{move.post.name}: {move.received:,} bytes in, {move.sent:,} out"
            self._note("move", move.begin, move.complete, label, move.step)
        return self.events

    def _note(self, kind: Kind, begin: float, end: float, label: str, step: int) -> None:
        self.events.append(Event(self.program.rank, kind, begin, end, label, step))

    def _bytes(self, side: tuple[Part, ...]) -> int:
        others = (part.slice for part in side if part.peer != self.program.rank)
        return sum(self.program.slice_bytes(part, self.sizes) for part in others)

    def _seconds(self, step: Step) -> float:
        """How long the next step, which is no wait, takes."""
        if self.took is not None:
            return self.took[self.at]
        return self._pairs(step) / self.rates.pairs_per_second if isinstance(step, Attend | AttendGrad) else 0.0

    def _pairs(self, step: Attend | AttendGrad) -> float:
        """What a step computes, in pairs of one head and batch row of a forward."""
        mask = self.problem.mask
        pairs = worklist(mask, step.q_positions, step.k_positions).pairs * (step.heads[1] - step.heads[0])
        batch = self.sizes.batch if mask.batch_rows is None else 1
        return pairs * batch * (BACKWARD_COST if isinstance(step, AttendGrad) else 1.0)


def _match(ranks: list[_Rank]) -> None:
    """Let posts know whom they meet: parts between two ranks match in the order of their posts within a group."""
    sends: dict[tuple[str, int, int], list[_Move]] = defaultdict(list)
    recvs: dict[tuple[str, int, int], list[_Move]] = defaultdict(list)
    for rank in ranks:
        for move in rank.moves.values():
            for part in move.post.sends:
                sends[move.post.group, move.rank, part.peer].append(move)
            for part in move.post.recvs:
                recvs[move.post.group, part.peer, move.rank].append(move)
    for group, source, target in {**sends, **recvs}:
        pair = (group, source, target)
        if len(sends[pair]) != len(recvs[pair]):
            raise ValueError(
                f"simulate(programs): rank {source} sends {len(sends[pair])} parts to rank {target}, "
                f"which receives {len(recvs[pair])}; verify_programs says where"
            )
        for one, other in zip(sends[pair], recvs[pair], strict=True):
            if one is not other:
                one.meets.append(other)
                other.meets.append(one)
