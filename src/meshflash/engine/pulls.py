"""The addresses of peers' messages in their memory, for transports that read them from there.

Programs are pure functions of the rank, so a rank computes where its peers place their messages without asking them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from meshflash.core.program import Part, Post, Program
from meshflash.engine.placement import Placement

#: (post, number of the received part, field) -> the byte at which the message begins in the sender's arena.
Places = dict[tuple[str, int, str], int]


def places(program: Program, placement_of: Callable[[int], Placement]) -> Places:
    """Return the address of every message that a program receives from another rank.

    Args:
        program: The program of this rank.
        placement_of: A function that returns the placement of a peer's program, by rank.
    """
    out: Places = {}
    for peer in {part.peer for post in _posts(program) for part in post.recvs} - {program.rank}:
        theirs = placement_of(peer)
        sent = _parts(theirs.program, program.rank, sends=True)
        for group, received in _parts(program, peer, sends=False).items():
            for (post, n, part), (source, _, given) in zip(received, sent[group], strict=True):
                for field in program.fields(part.slice):
                    out[post.name, n, field.name] = theirs.begins(source, given.slice, field)
    return out


def _posts(program: Program) -> list[Post]:
    return [step for step in program.steps if isinstance(step, Post)]


def _parts(program: Program, peer: int, sends: bool) -> dict[str, list[tuple[Post, int, Part]]]:
    """Return the parts that go to a peer, or come from it, by group, in the order in which sends match receives."""
    out: dict[str, list[tuple[Post, int, Part]]] = defaultdict(list)
    for post in _posts(program):
        for n, part in enumerate(post.sends if sends else post.recvs):
            if part.peer == peer:
                out[post.group].append((post, n, part))
    return out
