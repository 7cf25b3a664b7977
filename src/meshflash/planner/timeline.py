"""Timelines: when each rank computes, communicates and waits, as simulated or as measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

Kind = Literal["attend", "move", "other"]
#: Where the times of a timeline come from; titles and summaries state it.
Source = Literal["simulated", "measured"]


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
