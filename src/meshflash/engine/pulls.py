"""Where peers' messages lie in their memory, for transports that pull them from there.

Programs are pure functions of rank, so that a rank knows what its peers send from where.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from meshflash.core.program import Part, Post, Program
from meshflash.engine.placement import Placement

#: By post, number of the part that is received, and field: the byte at which it begins in the sender's memory.
Places = dict[tuple[str, int, str], int]


def places(program: Program, placement_of: Callable[[int], Placement]) -> Places:
    """For all that a program receives from others."""
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
    """What goes to, or comes from, a peer, by group, in the order in which parts match."""
    out: dict[str, list[tuple[Post, int, Part]]] = defaultdict(list)
    for post in _posts(program):
        for n, part in enumerate(post.sends if sends else post.recvs):
            if part.peer == peer:
                out[post.group].append((post, n, part))
    return out
