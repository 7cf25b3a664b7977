"""A discrete-event simulation of programs: when ranks compute, communicate and wait.

    rank 0   [ attend 0 ][ attend 1 ]....[ attend 2 ]      .... = exposed communication: a Wait that takes time
      link   <== hop 1 ==><===== hop 2 ======>

How: each rank has a clock. `_Rank.advance` runs its steps up to the first Wait whose post has no known end. A post
starts when it is issued, the previous post of its group has completed, and the same holds for every peer's matching
post (`_Move.ready`). As soon as all of these times are known, `_Move.resolve` fixes its start and end, which lets ranks
advance. `simulate` alternates the two until nothing is left. Posts of different groups do not slow each other.

How long steps and posts take is the business of `Costs`. `RateCosts` is the simplest one: attention takes `visible
pairs / pairs_per_second`, a post `latency + bytes / bytes_per_second`, and all other steps take no time. Alternatively
the durations of compute steps come from a real run, and only communication is modelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from meshflash.core.problem import Problem
from meshflash.core.program import Attend, AttendGrad, Post, Program, Sizes, Wait
from meshflash.core.tiles import worklist
from meshflash.kernels.rate_curves import BACKWARD
from meshflash.planner.timeline import Event, Kind, Timeline


class Costs(Protocol):
    """How long steps and messages take, and the sizes that turn rows into bytes."""

    @property
    def sizes(self) -> Sizes:
        """The sizes of the call."""

    def step_seconds(self, program: Program, index: int) -> float:
        """Return the seconds that a rank spends in a step that is no Wait; for a Post, those to issue it.

        Args:
            program: The program of the rank.
            index: The number of the step.
        """

    def post_seconds(self, program: Program, post: Post) -> float:
        """Return the seconds that the messages of a post take, once all ranks have issued their sides.

        Args:
            program: The program of the rank.
            post: The post.
        """


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


class RateCosts:
    """Costs at one rate of attention and one of messages, or with measured steps and messages at a rate."""

    def __init__(
        self, problem: Problem, sizes: Sizes, rates: Rates, seconds: Sequence[Sequence[float]] | None = None
    ) -> None:
        """Set the rates.

        Args:
            problem: The problem that the programs solve.
            sizes: The sizes that turn rows into bytes.
            rates: The speed of compute and communication.
            seconds: For each rank, the measured seconds of each of its steps. They replace the model of compute.
        """
        self.sizes = sizes
        self._problem, self._rates, self._seconds = problem, rates, seconds

    def step_seconds(self, program: Program, index: int) -> float:
        """Return the measured seconds of a step, or those of its pairs. Only attention takes time then."""
        if self._seconds is not None:
            return self._seconds[program.rank][index]
        step = program.steps[index]
        return self._pairs(step) / self._rates.pairs_per_second if isinstance(step, Attend | AttendGrad) else 0.0

    def post_seconds(self, program: Program, post: Post) -> float:
        """Return the latency, plus the time of the bytes received or sent, whichever are more."""
        if all(part.peer == program.rank for part in (*post.sends, *post.recvs)):
            return 0.0
        return self._rates.latency + max(moved_bytes(program, post, self.sizes)) / self._rates.bytes_per_second

    def _pairs(self, step: Attend | AttendGrad) -> float:
        """Return the work of a step, in pairs of one head and batch row of a forward."""
        mask = self._problem.mask
        pairs = worklist(mask, step.q_positions, step.k_positions).pairs * (step.heads[1] - step.heads[0])
        batch = self.sizes.batch if mask.batch_rows is None else 1
        return pairs * batch * (BACKWARD if isinstance(step, AttendGrad) else 1.0)


def moved_bytes(program: Program, post: Post, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes that a post receives from other ranks, and those that it sends to them.

    Args:
        program: The program of the post.
        post: The post.
        sizes: The sizes that turn rows into bytes.
    """
    received, sent = (
        sum(program.slice_bytes(part.slice, sizes) for part in side if part.peer != program.rank)
        for side in (post.recvs, post.sends)
    )
    return received, sent


def simulate(programs: Sequence[Program], costs: Costs, assumes: str = "") -> Timeline:
    """Simulate the programs of all ranks.

    A post starts when it and all matching posts of its peers are issued and the earlier posts of their groups are
    complete. It ends no earlier than those that send to it. Messages of a rank to itself take no time.

    Args:
        programs: One program for each rank, in rank order.
        costs: How long steps and messages take.
        assumes: A description of where the costs come from; the timeline's title shows it.

    >>> from meshflash.core.mask import Mask
    >>> from meshflash.schedules.registry import build
    >>> problem = Problem(((range(4),),), ((range(4),),), Mask.causal())
    >>> costs = RateCosts(problem, Sizes(), Rates(1.0, 1.0))
    >>> simulate([build("ring", problem, 0, "forward")], costs).total
    10.0
    """
    ranks = [_Rank(program, costs) for program in programs]
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
    """A post in the simulation: its duration, and the times at which it is issued, starts and ends."""

    rank: int
    step: int
    post: Post
    seconds: float
    #: the previous post of the same rank and group, which must complete first
    previous: _Move | None
    #: the posts of peers that it exchanges parts with, and those that send to it
    peers: list[_Move] = field(default_factory=list)
    senders: list[_Move] = field(default_factory=list)
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
        self.complete = self.begin + max(self.seconds, *(sender.seconds for sender in self.senders), 0.0)
        return True


class _Rank:
    """One rank of the simulation: its program, the index of the next step, and its clock in seconds."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.at, self.clock = 0, 0.0
        self.events: list[Event] = []
        self.moves: dict[str, _Move] = {}
        last: dict[str, _Move] = {}
        for n, step in enumerate(program.steps):
            if isinstance(step, Post):
                seconds = costs.post_seconds(program, step)
                self.moves[step.name] = last[step.group] = _Move(program.rank, n, step, seconds, last.get(step.group))

    def advance(self) -> list[_Move] | None:
        """Run steps up to the first Wait whose end is unknown. Return the posts issued, or None if no step ran."""
        issued, begin = [], self.at
        for step in self.program.steps[begin:]:
            start = self.clock
            kind: Kind = "other"
            if isinstance(step, Post):
                self.clock += self.costs.step_seconds(self.program, self.at)
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
                self.clock += self.costs.step_seconds(self.program, self.at)
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
            received, sent = moved_bytes(self.program, move.post, self.costs.sizes)
            label = f"{move.post.name}: {received:,} bytes in, {sent:,} out"
            self._record("move", move.begin, move.complete, label, move.step)
        return self.events

    def _record(self, kind: Kind, begin: float, end: float, label: str, step: int) -> None:
        self.events.append(Event(self.program.rank, kind, begin, end, label, step))


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
                other.senders.append(one)
