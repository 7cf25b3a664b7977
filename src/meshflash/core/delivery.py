"""Delivery: messages between the ranks that the verifier looks at, under the strictest order a transport may impose.

`run` advances ranks step by step and `Mesh` matches their posts. Ranks that are not looked at are one `Outside`, which
takes every message at once and answers every receive; `sampled.py` has the only one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Protocol

from meshflash.core.contents import Content, VerificationError
from meshflash.core.program import Part, Post
from meshflash.core.symbols import Posted, Rank


class Outside(Protocol):
    """The ranks of the world that are not looked at, as seen by those that are."""

    def receive(self, post: Posted, part: Part) -> Content:
        """Return what arrives from a rank outside."""
        ...

    def send(self, post: Posted, part: Part, content: Content) -> None:
        """Take what leaves for a rank outside."""
        ...


class Mesh:
    """The messages in flight between ranks, under the strictest ordering a transport may impose.

    The posts of one rank in one group form a queue. Only the head of a queue is active; it becomes complete when each
    of its parts has met the matching part of the peer. Parts between two ranks match in the order of their posts.

    Args:
        ranks: The ranks that are looked at, by number.
        outside: The other ranks of the world, if there are any. They are always ready.
    """

    def __init__(self, ranks: Mapping[int, Rank], outside: Outside | None) -> None:
        self.ranks, self.outside = ranks, outside
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
            if part.peer in self.ranks:
                self.sends[group, me, part.peer].append((post, n))
                unblocked += self._match(group, me, part.peer)
        for n, part in enumerate(post.step.recvs):
            if part.peer in self.ranks:
                self.recvs[group, part.peer, me].append((post, n))
                unblocked += self._match(group, part.peer, me)
        return unblocked + self._move_outside(post)

    def _move_outside(self, post: Posted) -> list[Posted]:
        """Exchange the parts of a post with ranks outside, and return the posts that become active in turn."""
        sends = [n for n, part in enumerate(post.step.sends) if part.peer not in self.ranks]
        recvs = [n for n, part in enumerate(post.step.recvs) if part.peer not in self.ranks]
        if not sends and not recvs:
            return []
        assert self.outside is not None
        for n in sends:
            self.outside.send(post, post.step.sends[n], post.contents[n])
        for n in recvs:
            post.arrived[n] = self.outside.receive(post, post.step.recvs[n])
        post.num_matched += len(sends) + len(recvs)
        return self._complete(post)

    def _match(self, group: str, source: int, target: int) -> list[Posted]:
        """Deliver the oldest part from source to target if both sides are active; return the posts it unblocks."""
        sends, recvs = self.sends[group, source, target], self.recvs[group, source, target]
        if not sends or not recvs:
            return []
        (sender, n), (receiver, m) = sends.popleft(), recvs.popleft()
        _check_match(sender.rank, sender.step.sends[n], receiver.rank, receiver.step.recvs[m])
        # The contents were copied when the post was made: what the sender does later must not change the message.
        receiver.arrived[m] = sender.contents[n]
        for post, other in ((sender, receiver), (receiver, sender)):
            post.matched.add(other)
            post.num_matched += 1
        unblocked = []
        for post in (sender,) if sender is receiver else (sender, receiver):
            unblocked += self._complete(post)
        return unblocked

    def _complete(self, post: Posted) -> list[Posted]:
        """Complete a post if all of its parts are matched; return the post that it unblocks."""
        if post.num_matched < len(post.step.sends) + len(post.step.recvs):
            return []
        if post.step.collective:
            _check_collective(post, self.ranks)
        post.complete = True
        queue = self.queues[post.step.group, post.rank.number]
        queue.popleft()
        return list(queue)[:1]


def check_groups(ranks: Mapping[int, Rank]) -> None:
    """All members of a group must list the same members, or their collectives would never match."""
    world = max((rank.problem.world for rank in ranks.values()), default=0)
    for name, members in dict.fromkeys(group for rank in ranks.values() for group in rank.program.groups):
        for member in members:
            listed = ranks[member].program.group.get(name) if member in ranks else members
            if not 0 <= member < world or listed != members:
                raise VerificationError(
                    f"group {name}: rank {member} does not list the ranks {members}, as another member does"
                )


def run(ranks: Mapping[int, Rank], outside: Outside | None = None) -> None:
    """Advance every rank as far as it can go, until all are done; raise if some are left and none can advance.

    The result does not depend on the order in which ranks advance: posts match in their own fixed order.

    Args:
        ranks: The ranks to run, by number.
        outside: The other ranks of the world, if there are any.
    """
    mesh = Mesh(ranks, outside)
    progress = True
    while progress:
        progress = False
        for rank in ranks.values():
            while not rank.blocked():
                step = rank.run_step()
                if isinstance(step, Post):
                    mesh.post(rank.posts[step.name])
                progress = True
    stuck = [rank for rank in ranks.values() if rank.step is not None]
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


def _check_collective(post: Posted, ranks: Mapping[int, Rank]) -> None:
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
        or forms - {step.collective}
        or len(post.matched) != sum(member in ranks for member in members)
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
