"""Checks of what a program declares, before the verifier runs it: its groups, its buffers and their roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshflash.core.program import KEY_KINDS, KINDS, SAVES

if TYPE_CHECKING:
    from meshflash.core.symbols import Rank


def check_program(rank: Rank) -> None:
    """Check what can be checked without running: groups, names, roles, shapes and dtypes of buffers.

    Args:
        rank: The rank whose program is checked; its `fail` raises VerificationError.
    """
    program, problem = rank.program, rank.problem
    if program.world != problem.world:
        rank.fail(f"is written for {program.world} ranks, the problem has {problem.world}")
    for name, members in program.groups:
        if rank.number not in members or list(members) != sorted(set(members)):
            rank.fail(f"group {name} must list its ranks once, in order, and this rank among them")
    if len(program.group) != len(program.groups):
        rank.fail("two groups have the same name")
    if len(program.buffer) != len(program.buffers):
        rank.fail("two buffers have the same name")
    _check_roles(rank)
    for b in program.buffers:
        if b.kind not in KINDS or b.rows < 0 or b.heads < 1:
            rank.fail(f"{b.name} has an unknown kind or an invalid shape")
        lengths = problem.k_lengths if b.kind in KEY_KINDS else problem.q_lengths
        heads = problem.kv_heads if b.kind in KEY_KINDS else problem.heads
        own = (b.kind, lengths[rank.number], heads, "input", "")
        if b.role in ("input", "output") and (b.name, b.rows, b.heads, b.dtype, b.becomes) != own:
            rank.fail(f"the caller's buffer {b.name} does not have the shape and dtype of the problem")
        if b.becomes:
            target = program.buffer.get(b.becomes)
            if target is None or (target.role, target.kind) != ("output", b.kind) or b.dtype == "reduce":
                rank.fail(f"{b.name} cannot become {b.becomes}")
            if (target.rows, target.heads) != (b.rows, b.heads):
                rank.fail(f"{b.name} becomes {b.becomes} but has another shape")
            if sum(other.becomes == b.becomes for other in program.buffers) > 1:
                rank.fail(f"two buffers become {b.becomes}")


def _check_roles(rank: Rank) -> None:
    """Check that the caller's buffers fit the direction, and that saved buffers match between the passes."""
    program = rank.program
    forward = program.direction == "forward"
    found = {b.name: b.role for b in program.buffers if b.role in ("input", "output")}
    saved = {b.name: b for b in program.buffers if b.role == "saved"}
    if forward:
        wanted = {"q": "input", "kv": "input", "out": "output"}
    else:
        wanted = {"dout": "input", "dq": "output", "dkv": "output"}
        wanted |= {name: "input" for name in SAVES if name in found and name in rank.saved_inputs}
    if found != wanted:
        rank.fail(f"the caller's buffers are {found}, expected {wanted}")
    if len(set(program.saves)) != len(program.saves):
        rank.fail("saves a buffer twice")
    needed = {"out", *saved}
    if not (needed <= set(program.saves) <= needed | set(SAVES) if forward else not program.saves):
        rank.fail(f"saves {program.saves}, expected {sorted(needed) if forward else []}")
    for name, b in saved.items():
        if b.kind not in SAVES or b.dtype != "input" or b.becomes:
            rank.fail(f"{name} cannot be saved: queries, keys and results are, in the input's dtype")
        there = rank.saved_inputs.get(name)
        if not forward and (there is None or there[1].cells.shape != (b.rows, b.heads)):
            rank.fail(f"reads {name}, which no forward saved with this number of rows and heads")
        if not forward and there is not None and there[0] != b.kind:
            rank.fail(f"reads {name} as {b.kind}, which the forward saved as {there[0]}")
