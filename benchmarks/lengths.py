"""Time and memory over the sequence length: standard attention, which holds every score, beside flash kernels.

Each candidate is checked before it is timed (`check.oracle_of` names the oracle). A candidate that runs out of memory
is shown as that, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import plots
from benchmarks.protocol import one_table
from meshflash.bench.candidates import STANDARD, own_kernel
from meshflash.bench.cases import Case, on_cpu
from meshflash.bench.check import PASSES
from meshflash.bench.columns import Column, mebibytes, milliseconds, optional
from meshflash.bench.measure import Measured, Say, both, measure
from meshflash.bench.tables import KERNEL, title
from meshflash.kernels import registry


@dataclass(frozen=True)
class LengthRow:
    """One kernel at one length. A figure is None if memory ran out for it, or for the standard attention it needs.

    `ms` and `peak_bytes` are of forward and backward together; the peak excludes the inputs. `saved` is the fraction of
    standard attention's peak that this kernel does not need.
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
    """Return the lengths for a device: 1,024 to 65,536 on a GPU, to 4,096 on a CPU."""
    return [1024 * 2**n for n in range(3 if on_cpu(device) else 7)]


def default_kernels(device: str) -> list[str]:
    """Return standard attention, the tiled kernel, our GPU kernel if it can run, and "auto"."""
    own = [kernel.name for kernel in registry.kernels() if kernel.name == own_kernel(device) and not kernel.missing()]
    return [STANDARD, "tiled", *([] if on_cpu(device) else own), "auto"]


def run(case: Case, names: tuple[str, ...], rounds: int, say: Say = lambda _: None) -> Iterator[LengthRow]:
    """Yield the row of each kernel at one length; a wrong result raises instead of being timed."""
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
    """Return the milliseconds of forward and backward together."""
    return sum(figures.ms.values()) if len(figures.ms) == len(PASSES) else None


COLUMNS = (
    Column("tokens", lambda row: f"{row['tokens']:,}", once=True),
    KERNEL,
    Column("forward\n(ms)", lambda row: milliseconds(row["forward_ms"], "")),
    Column("backward\n(ms)", lambda row: milliseconds(row["backward_ms"], "")),
    Column("both\n(ms)", lambda row: milliseconds(row["ms"])),
    Column("speedup", optional("speedup", "{:.2f}x")),
    Column("peak\nMiB", lambda row: mebibytes(row["peak_bytes"], "")),
    Column("memory\nsaved", optional("saved", "{:.0%}")),
)

BENCHMARK = one_table(
    "lengths",
    {"forward_ms"},
    COLUMNS,
    lambda rows: f"{title(rows[0], tokens=False)} on {rows[0]['device']}",
    section="tokens",
    draw=plots.lengths,
)
