"""Proves programs right without a device: it runs all ranks at once on symbols instead of numbers.

What a buffer holds is known by (position, head) for each of its cells, and for sums by how often each
pair went in. At the end every pair that `Mask.visible` shows must have been counted once, and every
gradient be home. Posts are taken to complete in order within a group, as they do on the strictest
backends: what passes here deadlocks on none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshflash.core.coverage import Truth
from meshflash.core.problem import Problem
from meshflash.core.program import SAVES, Part, Post, Program, Sizes
from meshflash.core.symbols import Posted, Rank, Saved, VerificationError

__all__ = ["Report", "VerificationError", "verify_programs"]


@dataclass(frozen=True)
class Report:
    """What is known of programs that are right: bytes that each rank receives from each, its scratch, what it saves."""

    received: tuple[dict[int, int], ...]
    scratch_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...] = ()
    #: What each rank's forward left for its backward, as symbols.
    saved: tuple[dict[str, Saved | None], ...] = field(default=(), repr=False, compare=False)

    @property
    def received_bytes(self) -> tuple[int, ...]:
        """What each rank receives from all others together."""
        return tuple(sum(row.values()) for row in self.received)


def verify_programs(
    programs: Sequence[Program],
    problem: Problem,
    sizes: Sizes | None = None,
    tables: bool = True,
    after: Report | None = None,
) -> Report:
    """Raise VerificationError unless these programs, one of each rank, solve the problem together.

    Every visible (batch row, head, query, key) is computed once; every output and gradient is complete
    and home; nothing deadlocks; no buffer is read before it is written or touched while it moves. With
    `tables`, the tables that kernels walk are held against the mask as well, for the rows of each step. A
    backward finds what the forward saved whose report it comes `after`; without one, q, k, v and the results.

    >>> from meshflash.core.layout import Layout
    >>> from meshflash.core.mask import Mask
    >>> from meshflash.schedules.registry import build
    >>> layout = Layout.zigzag(16, 2)
    >>> problem = Problem(layout.ranges, layout.ranges, Mask.causal())
    >>> programs = [build("zigzag", problem, rank, "forward") for rank in range(2)]
    >>> verify_programs(programs, problem).received
    ({1: 2048}, {0: 1024})
    """
    sizes = sizes or Sizes()
    if [program.rank for program in programs] != list(range(problem.world)):
        raise VerificationError(f"expected one program for each of {problem.world} ranks, in their order")
    if len({program.direction for program in programs}) != 1:
        raise VerificationError("some programs are forward and some backward")
    try:
        truth = Truth(problem)
    except ValueError as error:
        raise VerificationError(str(error)) from error
    if after is not None and len(after.saved) != problem.world:
        raise VerificationError(f"the forward was one of {len(after.saved)} ranks, this is one of {problem.world}")
    saved = after.saved if after else (dict.fromkeys(SAVES),) * problem.world
    ranks = [Rank(program, problem, truth, tables, saved[n]) for n, program in enumerate(programs)]
    _check_groups(ranks)
    _run(ranks)
    for rank in ranks:
        rank.check_end()
    return Report(
        tuple(program.received(sizes) for program in programs),
        tuple(program.scratch_bytes(sizes) for program in programs),
        tuple(program.saved_bytes(sizes) for program in programs),
        tuple(rank.saved() for rank in ranks),
    )


class _Mesh:
    """What is on its way between all ranks. The posts of a rank in a group begin one after another."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, int], deque[Posted]] = defaultdict(deque)
        #: by group, source and target: parts that have begun and were not met yet
        self.sends: dict[tuple[str, int, int], deque[tuple[Posted, int]]] = defaultdict(deque)
        self.recvs: dict[tuple[str, int, int], deque[tuple[Posted, int]]] = defaultdict(deque)

    def post(self, post: Posted) -> None:
        """Take a post; it begins once those before it are complete, and so may others then."""
        queue = self.queues[post.step.group, post.rank.number]
        queue.append(post)
        begun = deque([post] if len(queue) == 1 else [])
        while begun:
            begun += self._begin(begun.popleft())

    def _begin(self, post: Posted) -> list[Posted]:
        """Let the parts of a post meet those of others, in order; the posts that can begin after that."""
        group, me = post.step.group, post.rank.number
        following = []
        for n, part in enumerate(post.step.sends):
            self.sends[group, me, part.peer].append((post, n))
            following += self._meet(group, me, part.peer)
        for n, part in enumerate(post.step.recvs):
            self.recvs[group, part.peer, me].append((post, n))
            following += self._meet(group, part.peer, me)
        return following

    def _meet(self, group: str, source: int, target: int) -> list[Posted]:
        sends, recvs = self.sends[group, source, target], self.recvs[group, source, target]
        if not sends or not recvs:
            return []
        (sender, n), (receiver, m) = sends.popleft(), recvs.popleft()
        _check_match(sender.rank, sender.step.sends[n], receiver.rank, receiver.step.recvs[m])
        receiver.arrived[m] = sender.contents[n]
        sender.met.append(receiver)
        receiver.met.append(sender)
        following = []
        for post in (sender,) if sender is receiver else (sender, receiver):
            if len(post.met) == len(post.step.sends) + len(post.step.recvs):
                if post.step.collective:
                    _check_collective(post)
                post.complete = True
                queue = self.queues[group, post.rank.number]
                queue.popleft()
                following += list(queue)[:1]
        return following


def _check_groups(ranks: list[Rank]) -> None:
    for name, members in dict.fromkeys(group for rank in ranks for group in rank.program.groups):
        for member in members:
            if not 0 <= member < len(ranks) or ranks[member].program.group.get(name) != members:
                raise VerificationError(f"group {name}: rank {member} does not agree that it has the ranks {members}")


def _run(ranks: list[Rank]) -> None:
    """Let every rank go as far as it can until all are done, or none can go on."""
    mesh = _Mesh()
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            while not rank.blocked():
                step = rank.take()
                if isinstance(step, Post):
                    mesh.post(rank.posts[step.name])
                progress = True
    stuck = [rank for rank in ranks if rank.step is not None]
    if stuck:
        places = "; ".join(f"rank {rank.number} at step {rank.at} ({rank.step})" for rank in stuck)
        raise VerificationError(f"deadlock: {places}")


def _check_match(source: Rank, sent: Part, target: Rank, received: Part) -> None:
    theirs, mine = source.program.buffer[sent.slice.buffer], target.program.buffer[received.slice.buffer]
    forms = [
        (part.slice.shape, part.slice.without_lse, buffer.kind, buffer.dtype)
        for part, buffer in ((sent, theirs), (received, mine))
    ]
    if forms[0] != forms[1]:
        target.fail(
            f"receives {received.slice} and rank {source.number} sends {sent.slice}: not the same shape, kind and dtype"
        )


def _check_collective(post: Posted) -> None:
    """Every rank of the group makes this call with equal parts for all, in the order of the group."""
    step, rank = post.step, post.rank
    members = list(rank.program.group[step.group])
    peers = [[part.peer for part in side] for side in (step.sends, step.recvs)]
    shapes = {(part.slice.shape, part.slice.without_lse) for part in (*step.sends, *step.recvs)}
    forms = {other.step.collective for other in post.met}
    if peers != [members] * 2 or len(shapes) != 1 or forms != {step.collective} or len(set(post.met)) != len(members):
        rank.fail(f"post {step.name} is no {step.collective}: the ranks or their parts differ")
    if step.collective == "all_gather":
        if len({part.slice for part in step.sends}) != 1:
            rank.fail("an all_gather sends one slice to all")
    else:
        buffer = rank.program.buffer[step.sends[0].slice.buffer]
        if buffer.role != "scratch" or buffer.becomes or step.sends[0].slice.heads != (0, buffer.heads):
            rank.fail("an all_to_all sends whole rows of scratch")
    for side in [step.recvs] + ([step.sends] if step.collective == "all_to_all" else []):
        begins = [(part.slice.buffer, part.slice.rows[0]) for part in side[1:]]
        if begins != [(part.slice.buffer, part.slice.rows[1]) for part in side[:-1]]:
            rank.fail(f"the parts of an {step.collective} do not lie one after another")
