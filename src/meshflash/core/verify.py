"""The verifier: proves programs correct without a device, by symbolic execution of all ranks at once.

What is proved, for one problem and one program per rank:

1. Coverage. Every (batch row, head, query, key) that `Mask.visible` shows enters its result, and each gradient, exactly
   once. The truth comes from the mask's definition alone, never from the tile code that the kernels use.
2. Placement. Every output row ends at the rank that owns it, finished and complete.
3. Progress. No deadlock, even on a backend that completes the posts of a group strictly in order. That is the strictest
   order a transport may impose, so a program that passes deadlocks on no transport.
4. Memory. No buffer is read before it is written, touched while it moves, or written when it may be the caller's.

How: each cell (row, head) of a buffer holds a symbol instead of values: which (position, head) it stands for, and for
sums a number by which `sums.SymbolTable` knows how often each pair went in. `symbols.Rank` interprets the steps of one
rank on such buffers; `delivery.Mesh` delivers messages between ranks; `delivery.run` advances every rank until all are
done or none can move.

    verify_programs -> Visibility -> Rank per program -> run: run_step(), deliver posts -> check_end() -> Report

The symbolic state is exact, so this is a proof for the given problem and not a sample. It is one for this problem only:
callers verify each (schedule, layout, mask) that they run. It needs the programs of all ranks; `sampled.py` looks at a
few ranks of a large world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshflash.core.contents import Saved, VerificationError
from meshflash.core.coverage import Visibility
from meshflash.core.delivery import check_groups, run
from meshflash.core.problem import Problem
from meshflash.core.program import SAVES, Program, Sizes
from meshflash.core.sums import SymbolTable
from meshflash.core.symbols import Rank

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
    #: The sums and symbols that the saved contents refer to.
    table: SymbolTable | None = field(default=None, repr=False, compare=False)
    #: The ranks that the entries are of.
    ranks: tuple[int, ...] = ()
    #: What was proved, and what was only sampled; "" if nothing was.
    proved: str = ""
    sampled: str = ""

    @property
    def summary(self) -> str:
        """What was proved and what was sampled, in words."""
        return f"proved: {self.proved}; sampled: {self.sampled or 'nothing'}"

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
    table = after.table if after and after.table else SymbolTable(problem.mask)
    ranks = [Rank(program, problem, visibility, tables, saved[n], table) for n, program in enumerate(programs)]
    by_number = dict(enumerate(ranks))
    check_groups(by_number)
    run(by_number)
    for rank in ranks:
        rank.check_end()
    return Report(
        tuple(program.received(sizes) for program in programs),
        tuple(program.scratch_bytes(sizes) for program in programs),
        tuple(program.saved_bytes(sizes) for program in programs),
        tuple(rank.saved() for rank in ranks),
        table,
        tuple(range(problem.world)),
        f"all {problem.world} ranks together",
    )
