"""Timelines, and a discrete-event simulation of programs: when ranks compute, communicate and wait.

    rank 0   [ attend 0 ][ attend 1 ]....[ attend 2 ]      .... = exposed communication: a Wait that takes time
      link   <== hop 1 ==><===== hop 2 ======>

The model (no measurement): attention takes `visible pairs / pairs_per_second`; a post takes `latency + bytes /
bytes_per_second`; all other steps take no time. Alternatively the durations of compute steps come from a real run, and
only communication is modelled.

How: each rank has a clock. `_Rank.advance` runs its steps up to the first Wait whose post has no known end. A post
starts when it is issued, the previous post of its group has completed, and the same holds for every peer's matching
post (`_Move.ready`). As soon as all of these times are known, `_Move.resolve` fixes its start and end, which lets ranks
advance. `simulate` alternates the two until nothing is left. Posts of different groups do not slow each other.
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
#: Where the times of a timeline come from; titles and summaries state it.
Source = Literal["simulated", "measured"]

#: Time of a backward over that of a forward, for the same pairs: a backward does five GEMMs, a forward two.
BACKWARD_COST = 2.5


@dataclass(frozen=True)
class Rates:
    """The speed of a rank in the model.

    Args:
        pairs_per_second: The (query, key) pairs of one head that a rank computes in a second of a forward.
        bytes_per_second: The bandwidth of a rank's link, for each direction.
        latency: The seconds that a post takes besides its bytes.
    """

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
    """One step of a rank, from `begin` to `end` in seconds. A Wait is an "other" event that takes time."""

    rank: int
    kind: Kind
    begin: float
    end: float
    label: str
    step: int

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """The events of all ranks; the events of a rank are in the order of its steps. A "move" is the event of a post.

    `simulate` makes simulated timelines, `recorded.timeline` measured ones: `source` tells which. `assumes` describes
    the rates of a simulation.
    """

    name: str
    world: int
    events: tuple[Event, ...]
    source: Source
    assumes: str = ""

    @cached_property
    def total(self) -> float:
        """The seconds until the last rank is done."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def efficiency(self) -> float:
        """The fraction of the time in which ranks compute, on average."""
        return sum(map(self.busy, range(self.world))) / self.world / self.total if self.total else 1.0

    def of(self, rank: int, kind: Kind) -> list[Event]:
        """Return the events of one kind of a rank. The n-th "attend" is its attend step n."""
        return self._sorted[rank, kind]

    def busy(self, rank: int) -> float:
        """Return the seconds in which a rank computes."""
        return sum(event.seconds for event in self.of(rank, "attend"))

    def exposed(self, rank: int) -> float:
        """Return the seconds of exposed communication of a rank: it waits and computes nothing."""
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
        """The schedule, the number of ranks, and whether times are simulated or measured."""
        assumes = f" ({self.assumes})" if self.assumes else ""
        return f"{self.name} on {self.world} rank{'' if self.world == 1 else 's'}, {self.source}{assumes}"

    @property
    def summary(self) -> str:
        """Total time, efficiency and exposed communication in one line, labelled simulated or measured."""
        worst = max(range(self.world), key=self.exposed, default=0)
        exposed = self.exposed(worst)
        where = f" (rank {worst})" if exposed else ""
        return (
            f"{self.source}: total {format_seconds(self.total)}, efficiency {self.efficiency:.1%}, "
            f"exposed comm {format_seconds(exposed)}{where}"
        )


def format_seconds(seconds: float) -> str:
    """Format a time in a suitable unit.

    >>> format_seconds(0.00125), format_seconds(2.5e-7), format_seconds(0)
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
    """Simulate the programs of all ranks.

    A post starts when it and all matching posts of its peers are issued and the earlier posts of their groups are
    complete. It takes the latency, plus the time of the bytes it receives or sends, whichever are more. Messages of a
    rank to itself take no time.

    Args:
        programs: One program for each rank, in rank order.
        problem: The problem that the programs solve.
        sizes: The sizes that turn rows into bytes.
        rates: The speed of compute and communication.
        seconds: For each rank, the measured seconds of each of its steps. They replace the model of compute.
        assumes: A description of where the rates come from; the timeline's title shows it.

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
        still = [move for move in waiting if not move.resolve()]
        progress |= len(still) < len(waiting)
        waiting = still
    stuck = [f"rank {n} at step {rank.at}" for n, rank in enumerate(ranks) if rank.at < len(rank.program.steps)]
    if stuck or waiting:
        raise ValueError(f"simulate(programs): deadlock ({', '.join(stuck)}); verify_programs says why")
    events = [event for rank in ranks for event in sorted(rank.all_events(), key=lambda event: event.step)]
    name = " ".join(dict.fromkeys(f"{program.name} {program.direction}" for program in programs))
    return Timeline(name, len(programs), tuple(events), "simulated", assumes)


@dataclass(eq=False)
class _Move:
    """A post in the simulation: its bytes and duration, and the times at which it is issued, starts and ends."""

    rank: int
    step: int
    post: Post
    recv_bytes: int
    sent_bytes: int
    seconds: float
    #: the previous post of the same rank and group, which must complete first
    previous: _Move | None
    #: the posts of peers that it exchanges parts with
    peers: list[_Move] = field(default_factory=list)
    #: None until known
    issued: float | None = None
    begin: float = 0.0
    complete: float | None = None

    @property
    def ready(self) -> float | None:
        """The time from which this side could start, or None while unknown."""
        if self.issued is None or self.previous is None:
            return self.issued
        return None if self.previous.complete is None else max(self.issued, self.previous.complete)

    def resolve(self) -> bool:
        """Fix start and end if all sides are known to be ready; return whether they are."""
        sides = [move.ready for move in (self, *self.peers)]
        known = [side for side in sides if side is not None]
        if len(known) < len(sides):
            return False
        self.begin = max(known)
        self.complete = self.begin + self.seconds
        return True


class _Rank:
    """One rank of the simulation: its program, the index of the next step, and its clock in seconds."""

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
                recv_bytes, sent_bytes = (self._bytes(side) for side in (step.recvs, step.sends))
                only_itself = all(part.peer == program.rank for part in (*step.sends, *step.recvs))
                transfer = max(recv_bytes, sent_bytes) / rates.bytes_per_second  # links are full duplex
                seconds = 0.0 if only_itself else rates.latency + transfer
                move = _Move(program.rank, n, step, recv_bytes, sent_bytes, seconds, last.get(step.group))
                self.moves[step.name] = last[step.group] = move

    def advance(self) -> list[_Move] | None:
        """Run steps up to the first Wait whose end is unknown. Return the posts issued, or None if no step ran."""
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
                    start = self.clock  # the time of a copy must not count as exposed communication
            self._record(kind, start, self.clock, str(step), self.at)
            self.at += 1
        return issued if self.at > begin else None

    def all_events(self) -> list[Event]:
        """Return the events of all steps and of all moves."""
        for move in self.moves.values():
            assert move.complete is not None
            label = f"{move.post.name}: {move.recv_bytes:,} bytes in, {move.sent_bytes:,} out"
            self._record("move", move.begin, move.complete, label, move.step)
        return self.events

    def _record(self, kind: Kind, begin: float, end: float, label: str, step: int) -> None:
        self.events.append(Event(self.program.rank, kind, begin, end, label, step))

    def _bytes(self, side: tuple[Part, ...]) -> int:
        others = (part.slice for part in side if part.peer != self.program.rank)
        return sum(self.program.slice_bytes(part, self.sizes) for part in others)

    def _seconds(self, step: Step) -> float:
        """Return the duration of the next step, which is not a Wait."""
        if self.took is not None:
            return self.took[self.at]
        return self._pairs(step) / self.rates.pairs_per_second if isinstance(step, Attend | AttendGrad) else 0.0

    def _pairs(self, step: Attend | AttendGrad) -> float:
        """Return the work of a step, in pairs of one head and batch row of a forward."""
        mask = self.problem.mask
        pairs = worklist(mask, step.q_positions, step.k_positions).pairs * (step.heads[1] - step.heads[0])
        batch = self.sizes.batch if mask.batch_rows is None else 1
        return pairs * batch * (BACKWARD_COST if isinstance(step, AttendGrad) else 1.0)


def _match(ranks: list[_Rank]) -> None:
    """Link each post with the posts of its peers: parts between two ranks match in the order of their posts."""
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
                one.peers.append(other)
                other.peers.append(one)
