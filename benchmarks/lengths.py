"""How time and memory grow with the length: standard attention, which holds every score, beside kernels that do not.

Each candidate is checked before it is timed (`check.oracle_of` says by what at which length). One that runs
out of memory is shown as that, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshflash.bench import record
from meshflash.bench.candidates import STANDARD, own_kernel
from meshflash.bench.cases import Case, on_cpu
from meshflash.bench.check import PASSES
from meshflash.bench.measure import Measured, Say, both, measure
from meshflash.kernels import registry


@dataclass(frozen=True)
class LengthRow:
    """One kernel at one length. What has no figure, or nothing to compare with, for want of memory is None.

    `ms` is forward and backward together, like `peak_bytes`, which count what is held beyond the inputs;
    `saved` is the part of standard attention's peak that this kernel does without.
    """

    kernel: str
    ran: str
    forward_ran: str
    backward_ran: str
    case: Case
    forward_ms: float | None
    backward_ms: float | None
    ms: float | None
    speedup: float | None
    peak_bytes: int | None
    saved: float | None
    error: float | None
    oracle: str


def default_lengths(device: str) -> list[int]:
    """1,024 to 65,536 on a GPU, to 4,096 on a CPU."""
    return [1024 * 2**n for n in range(3 if on_cpu(device) else 7)]


def default_kernels(device: str) -> list[str]:
    """Standard attention, the tiled kernel, our GPU kernel where Triton is installed, and the one that is chosen."""
    own = [kernel.name for kernel in registry.kernels() if kernel.name == own_kernel(device) and not kernel.missing()]
    return [STANDARD, "tiled", *([] if on_cpu(device) else own), "auto"]


def read(path: Path) -> dict[str, Any]:
    """A record of lengths."""
    written = record.read(path)
    if not all("forward_ms" in row for row in written.get("rows") or [{}]):
        raise ValueError(f"{path} is not a record of `meshflash bench lengths`")
    return written


def run(case: Case, names: tuple[str, ...], rounds: int, say: Say = lambda _: None) -> Iterator[LengthRow]:
    """Each kernel's row for one length; a kernel that is wrong raises instead of being timed."""
    measured = measure(case, names, rounds, say=say)
    standard = measured.get(STANDARD)
    base_ms = _both(standard) if standard else None
    base_bytes = standard.both_bytes if standard else None
    for name, figures in measured.items():
        ms, peak = _both(figures), figures.both_bytes
        yield LengthRow(
            kernel=name,
            ran=both(figures.ran["forward"], figures.ran["backward"]),
            forward_ran=figures.ran["forward"],
            backward_ran=figures.ran["backward"],
            case=case,
            forward_ms=figures.ms.get("forward"),
            backward_ms=figures.ms.get("backward"),
            ms=ms,
            speedup=None if ms is None or base_ms is None else base_ms / ms,
            peak_bytes=peak,
            saved=None if peak is None or base_bytes is None else 1 - peak / base_bytes,
            error=max(figures.errors.values(), default=None),
            oracle=figures.oracle,
        )


def _both(figures: Measured) -> float | None:
    """Milliseconds of forward and backward together."""
    return sum(figures.ms.values()) if len(figures.ms) == len(PASSES) else None
