"""Attention kernels beside each other and torch's SDPA: checked, then timed interleaved, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from meshflash.bench.cases import Case
from meshflash.bench.check import PASSES, truth
from meshflash.bench.measure import Measured, measure


@dataclass(frozen=True)
class KernelRow:
    """One kernel in one case, one pass; figures are None if memory ran out."""

    kernel: str
    ran: str
    direction: str
    case: Case
    ms: float | None
    tflops: float | None
    error: float | None
    oracle: str
    peak_bytes: int | None


def run(case: Case, names: tuple[str, ...], rounds: int, exact: bool = False) -> Iterator[KernelRow]:
    """Return each kernel's rows for a case; a wrong result raises instead of being timed.

    Args:
        case: The shape, mask and dtype.
        names: The candidates by name.
        rounds: The number of rounds, in each of which every candidate is timed once.
        exact: Whether to check against float64 at any length.
    """
    return rows_of(case, measure(case, names, rounds, partial(truth, exact=exact)))


def rows_of(case: Case, measured: Mapping[str, Measured]) -> Iterator[KernelRow]:
    """Yield a row for each pass and kernel of a measured case."""
    for direction in PASSES:
        for name, figures in measured.items():
            ms = figures.ms.get(direction)
            yield KernelRow(
                kernel=name,
                ran=figures.ran[direction],
                direction=direction,
                case=case,
                ms=ms,
                tflops=None if ms is None else case.flops(direction) / ms / 1e9,
                error=figures.errors.get(direction),
                oracle=figures.oracle,
                peak_bytes=figures.peak_bytes.get(direction),
            )
