"""The verifier: proves programs correct without a device, by symbolic execution of all ranks at once.

What is proved, for one problem and one program per rank:

1. Coverage. Every (batch row, head, query, key) that `Mask.visible` shows enters its result, and each gradient, exactly
   once. The truth comes from the mask's definition alone, never from the tile code that the kernels use.
2. Placement. Every output row ends at the rank that owns it, finished and complete.
3. Progress. No deadlock, even on a backend that completes the posts of a group strictly in order. That is the strictest
   order a transport may impose, so a program that passes deadlocks on no transport.
4. Memory. No buffer is read before it is written, touched while it moves, or written when it may be the caller's.

How: each cell (row, head) of a buffer holds a symbol instead of values: which (position, head) it stands for, and for
sums a count of how often each pair went in. `symbols.Rank` interprets the steps of one rank on such buffers; `_Mesh`
below delivers messages between ranks; `_run` advances every rank until all are done or none can move.

    verify_programs -> Visibility -> Rank per program -> _run: run_step(), deliver posts -> check_end() -> Report

The symbolic state is exact, so this is a proof for the given problem and not a sample. It is one for this problem only:
callers verify each (schedule, layout, mask) that they run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshflash.core.coverage import Visibility
from meshflash.core.problem import Problem
from meshflash.core.program import SAVES, Part, Post, Program, Sizes
from meshflash.core.symbols import Posted, Rank, Saved, VerificationError

__all__ = ["Report", "VerificationError", "verify_programs"]


@dataclass(frozen=True)
class Report:
    """The costs of verified programs, one entry per rank. `verify_programs` makes it."""

    #: For each rank, the bytes that it receives from each other rank.
    received: tuple[dict[int, int], ...]
    #: For each rank, the bytes of its scratch buffers and packed messages.
    scratch_bytes: tuple[int, ...]
    #: For each rank, the bytes that its forward saves beyond the caller's tensors.
    saved_bytes: tuple[int, ...] = ()
    #: For each rank, the symbolic contents that its forward saved; the verification of the backward starts from them.
    saved: tuple[dict[str, Saved | None], ...] = field(default=(), repr=False, compare=False)

    @property
    def received_bytes(self) -> tuple[int, ...]:
        """For each rank, the bytes that it receives from all other ranks together."""
        return tuple(sum(row.values()) for row in self.received)


def verify_programs(
    programs: Sequence[Program],
    problem: Problem,
    sizes: Sizes | None = None,
    tables: bool = True,
    after: Report | None = None,
) -> Report:
    """Prove that programs solve a problem together, or raise VerificationError with the rank and step that is wrong.

    Every visible (batch row, head, query, key) is computed once; every output and gradient is complete and at its
    owner; nothing deadlocks; no buffer is read before it is written or touched while it moves.

    Args:
        programs: One program for each rank, in rank order, all of one direction.
        problem: The positions that every rank holds, and the mask.
        sizes: The sizes that turn rows into the bytes of the report.
        tables: Whether to check the tile tables that kernels walk against the mask as well, for the rows of each step.
        after: The report of the forward that a backward follows, whose saved buffers it reads. Without one, the
            backward reads q, k, v and the results.

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
        raise VerificationError(
            f"programs: expected one for each of {problem.world} ranks in rank order, "
            f"got ranks {[program.rank for program in programs]}"
        )
    if len({program.direction for program in programs}) != 1:
        raise VerificationError("programs: some are forward and some are backward; pass those of one direction")
    try:
        visibility = Visibility(problem)
    except ValueError as error:
        raise VerificationError(str(error)) from error
    if after is not None and len(after.saved) != problem.world:
        raise VerificationError(
            f"after: the forward ran on {len(after.saved)} ranks, this backward on {problem.world}; pass its forward"
        )
    saved = after.saved if after else (dict.fromkeys(SAVES),) * problem.world
    ranks = [Rank(program, problem, visibility, tables, saved[n]) for n, program in enumerate(programs)]
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
    """The messages in flight between all ranks, under the strictest ordering a transport may impose.

    The posts of one rank in one group form a queue. Only the head of a queue is active; it becomes complete when each
    of its parts has met the matching part of the peer. Parts between two ranks match in the order of their posts.
    """

    def __init__(self) -> None:
        #: (group, rank) -> posts in order; index 0 is active
        self.queues: dict[tuple[str, int], deque[Posted]] = defaultdict(deque)
        #: (group, source, target) -> (post, index of the part): active parts that have not met their counterpart
        self.sends: dict[tuple[str, int, int], deque[tuple[Posted, int]]] = defaultdict(deque)
        self.recvs: dict[tuple[str, int, int], deque[tuple[Posted, int]]] = defaultdict(deque)

    def post(self, post: Posted) -> None:
        """Append a post to its queue, and activate it and whatever its completion unblocks."""
        queue = self.queues[post.step.group, post.rank.number]
        queue.append(post)
        # A post behind others stays queued; activating one may complete posts of several ranks, which activates more.
        ready = deque([post] if len(queue) == 1 else [])
        while ready:
            ready += self._activate(ready.popleft())

    def _activate(self, post: Posted) -> list[Posted]:
        """Match the parts of a post with those of its peers, and return the posts that become active in turn."""
        group, me = post.step.group, post.rank.number
        unblocked = []
        for n, part in enumerate(post.step.sends):
            self.sends[group, me, part.peer].append((post, n))
            unblocked += self._match(group, me, part.peer)
        for n, part in enumerate(post.step.recvs):
            self.recvs[group, part.peer, me].append((post, n))
            unblocked += self._match(group, part.peer, me)
        return unblocked

    def _match(self, group: str, source: int, target: int) -> list[Posted]:
        """Deliver the oldest part from source to target if both sides are active; return the posts it unblocks."""
        sends, recvs = self.sends[group, source, target], self.recvs[group, source, target]
        if not sends or not recvs:
            return []
        (sender, n), (receiver, m) = sends.popleft(), recvs.popleft()
        _check_match(sender.rank, sender.step.sends[n], receiver.rank, receiver.step.recvs[m])
        # The contents were copied when the post was made: what the sender does later must not change the message.
        receiver.arrived[m] = sender.contents[n]
        sender.matched.append(receiver)
        receiver.matched.append(sender)
        unblocked = []
        for post in (sender,) if sender is receiver else (sender, receiver):
            if len(post.matched) == len(post.step.sends) + len(post.step.recvs):
                if post.step.collective:
                    _check_collective(post)
                post.complete = True
                queue = self.queues[group, post.rank.number]
                queue.popleft()
                unblocked += list(queue)[:1]
        return unblocked


def _check_groups(ranks: list[Rank]) -> None:
    """All members of a group must list the same members, or their collectives would never match."""
    for name, members in dict.fromkeys(group for rank in ranks for group in rank.program.groups):
        for member in members:
            if not 0 <= member < len(ranks) or ranks[member].program.group.get(name) != members:
                raise VerificationError(
                    f"group {name}: rank {member} does not list the ranks {members}, as another member does"
                )


def _run(ranks: list[Rank]) -> None:
    """Advance every rank as far as it can go, until all are done; raise if some are left and none can advance.

    The result does not depend on the order in which ranks advance: posts match in their own fixed order.
    """
    mesh = _Mesh()
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            while not rank.blocked():
                step = rank.run_step()
                if isinstance(step, Post):
                    mesh.post(rank.posts[step.name])
                progress = True
    stuck = [rank for rank in ranks if rank.step is not None]
    if stuck:
        places = "; ".join(f"rank {rank.number} at step {rank.step_index} ({rank.step})" for rank in stuck)
        raise VerificationError(f"deadlock: {places}")


def _check_match(source: Rank, sent: Part, target: Rank, received: Part) -> None:
    """A message must arrive as it was sent: the same shape, kind and dtype."""
    theirs, mine = source.program.buffer[sent.slice.buffer], target.program.buffer[received.slice.buffer]
    forms = [
        (part.slice.shape, part.slice.without_lse, buffer.kind, buffer.dtype)
        for part, buffer in ((sent, theirs), (received, mine))
    ]
    if forms[0] != forms[1]:
        target.fail(
            f"receives {received.slice}, but rank {source.number} sends {sent.slice}: shape, kind or dtype differ"
        )


def _check_collective(post: Posted) -> None:
    """A transport may run this post as one collective call only if the call does what the parts say.

    Every rank of the group makes it, with equal parts in group order, which lie one after another in memory.
    """
    step, rank = post.step, post.rank
    members = list(rank.program.group[step.group])
    peers = [[part.peer for part in side] for side in (step.sends, step.recvs)]
    shapes = {(part.slice.shape, part.slice.without_lse) for part in (*step.sends, *step.recvs)}
    forms = {other.step.collective for other in post.matched}
    if (
        peers != [members] * 2
        or len(shapes) != 1
        or forms != {step.collective}
        or len(set(post.matched)) != len(members)
    ):
        rank.fail(f"post {step.name} cannot be one {step.collective}: the ranks or their parts differ")
    if step.collective == "all_gather":
        if len({part.slice for part in step.sends}) != 1:
            rank.fail("an all_gather must send the same slice to all ranks")
    else:
        buffer = rank.program.buffer[step.sends[0].slice.buffer]
        if buffer.role != "scratch" or buffer.becomes or step.sends[0].slice.heads != (0, buffer.heads):
            rank.fail("an all_to_all must send rows with all heads of a scratch buffer")
    for side in [step.recvs] + ([step.sends] if step.collective == "all_to_all" else []):
        begins = [(part.slice.buffer, part.slice.rows[0]) for part in side[1:]]
        if begins != [(part.slice.buffer, part.slice.rows[1]) for part in side[:-1]]:
            rank.fail(f"the parts of an {step.collective} are not contiguous in their buffer")
