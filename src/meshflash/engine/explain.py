"""The explanation of a call that `return_plan` returns: what ran, and why."""

from __future__ import annotations

from dataclasses import dataclass

from meshflash.core.program import Program
from meshflash.engine.group_context import GroupContext
from meshflash.engine.mesh import Plan
from meshflash.kernels.registry import KernelLog


@dataclass(frozen=True)
class Explanation:
    """One call on one rank: how the ranks worked together, what moved, and which kernels ran.

    Args:
        schedule: The schedule, with its options; "local" on a single device.
        reason: Why the schedule was taken.
        layout: The name of the layout of the queries.
        world: The number of ranks.
        transport: The transport that moved messages; "none" on a single device.
        kernels: The names of the kernels that ran, each once.
        kernel_reasons: For each of `kernels`, why it was taken.
        received_bytes: The bytes that this rank received in the forward.
        scratch_bytes: The bytes of scratch that the forward used on this rank.
        saved_bytes: The bytes that the forward saved for the backward beyond the caller's tensors.
        program: The forward program of this rank; None on a single device.
    """

    schedule: str
    reason: str
    layout: str
    world: int
    transport: str
    kernels: tuple[str, ...]
    kernel_reasons: tuple[str, ...] = ()
    received_bytes: int = 0
    scratch_bytes: int = 0
    saved_bytes: int = 0
    program: Program | None = None

    def __str__(self) -> str:
        reasons = [f" ({why})" for why in self.kernel_reasons] or [""] * len(self.kernels)
        kernels = ", ".join(name + why for name, why in zip(self.kernels, reasons, strict=True))
        if self.program is None:
            return f"single device; kernels: {kernels}"
        return (
            f"{self.schedule} ({self.reason}) over {self.world} ranks, layout {self.layout}, by {self.transport}; "
            f"kernels: {kernels}; forward: {self.received_bytes:,} bytes received, {self.scratch_bytes:,} of scratch"
        )


def explain(plan: Plan, reason: str, member: GroupContext | None, ran: KernelLog) -> Explanation:
    """What the last call of this rank was."""
    entries = tuple(dict.fromkeys(ran))
    names, why = tuple(name for name, _ in entries), tuple(ran.reasons[entry] for entry in entries)
    if member is None or member.last is None:
        return Explanation("local", "single device", plan.q.name, 1, "none", names, why)
    prepared = member.last
    program, sizes = prepared.program("forward"), prepared.setting.sizes
    return Explanation(
        schedule=plan.schedule,
        reason=reason,
        layout=plan.q.name,
        world=member.world,
        transport=prepared.transport(member).name,
        kernels=names,
        kernel_reasons=why,
        received_bytes=sum(program.received(sizes).values()),
        scratch_bytes=program.scratch_bytes(sizes),
        saved_bytes=program.saved_bytes(sizes),
        program=program,
    )
