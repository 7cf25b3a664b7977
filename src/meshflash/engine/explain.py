"""The explanation of a call that `return_plan` returns: what ran, and why."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from meshflash.core.program import Program
from meshflash.engine.check import check_rows
from meshflash.engine.compile import compile_spec
from meshflash.engine.executable import Executable, MeshExecutable, Plan
from meshflash.engine.op import attend
from meshflash.engine.spec import AttentionSpec, CallTensors
from meshflash.kernels.registry import KernelLog, record_kernels


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


def attend_and_explain(
    spec: AttentionSpec, x: CallTensors, record: bool, verify: bool
) -> tuple[Tensor, Tensor, Explanation]:
    """Return (out, lse) of a call, and what ran.

    Args:
        spec: The call without its tensors.
        x: The tensors of the call.
        record: Whether to record the kernels that run.
        verify: Whether to check some rows against a plain implementation. Either all ranks verify, or none.
    """
    executable = compile_spec(spec.canonical(), x)
    context = executable.context if isinstance(executable, MeshExecutable) else None
    plan = executable.plan
    assert plan is not None, "keys that every rank holds have no plan"
    with context.in_use() if context else nullcontext():
        with record_kernels() if record else nullcontext(KernelLog()) as ran:
            out, lse = attend(spec, x)
        if verify:
            if context:
                # check_rows communicates: a rank that does not verify would block the others until the timeout
                context.agree({"verify": True}, "It may not verify: pass verify=True on all ranks, or on none. ")
            group, rank = (context.group, context.rank) if context else (None, 0)
            check_rows(plan, group, rank, executable.spec.mask, spec.features(x), *x[:3], out, lse)
    return out, lse, _explain(executable, plan, ran)


def _explain(executable: Executable, plan: Plan, ran: KernelLog) -> Explanation:
    entries = tuple(dict.fromkeys(ran))
    names, why = tuple(name for name, _ in entries), tuple(ran.reasons[entry] for entry in entries)
    if not isinstance(executable, MeshExecutable):
        return Explanation("local", "one rank", plan.q.name, 1, "none", names, why)
    program, sizes = executable.program("forward"), executable.setting.sizes
    return Explanation(
        schedule=plan.schedule,
        reason=plan.reason,
        layout=plan.q.name,
        world=executable.context.world,
        transport=executable.transport(executable.context).name,
        kernels=names,
        kernel_reasons=why,
        received_bytes=sum(program.received(sizes).values()),
        scratch_bytes=program.scratch_bytes(sizes),
        saved_bytes=program.saved_bytes(sizes),
        program=program,
    )
