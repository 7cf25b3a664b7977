"""The headline set: our kernel beside its peers at three lengths, two head dims and two masks, forward and backward.

All kernels of a case (length, dim, mask) are interleaved in one process, each checked before it is timed; a case is two
cells. The record is written after each case. Its rows are not measured again while machine, versions and code are the
same. If time runs short, slow peers are left out first.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch

import meshflash
from benchmarks.protocol import Rows
from benchmarks.sampled import sampled
from meshflash.bench import record
from meshflash.bench.candidates import DENSE_TOKENS, FLEX, SDPA, STANDARD, check_names, own_among, own_kernel
from meshflash.bench.cases import Case, on_cpu, pick_dtype
from meshflash.bench.check import PASSES, truth
from meshflash.bench.kernels import KernelRow, rows_of
from meshflash.bench.measure import Say, measure
from meshflash.bench.timing import SAMPLE_MS
from meshflash.kernels import registry

#: Peers that are left out if time runs short, in this order.
SLOW = (FLEX, "fa2")
#: Masks of the headline set.
MASKS = ("causal", "full")
NO_TIME = "no time"
NO_MEMORY = "memory: it ran out"
ABSENT = "absent"

#: Each pass is timed twice: on the device alone, and in a plain loop.
TIMINGS = 2
#: Calls of each pass besides those of the rounds: to check, to measure memory, and to warm up.
OTHER_CALLS = 6
#: Safety factor of predicted seconds, which do not include the oracle.
SAFETY_FACTOR = 1.2


@dataclass(frozen=True)
class Scale:
    """Lengths and head dims; `width` is heads times dim, and `total` batch times tokens, at least one sequence."""

    tokens: tuple[int, ...]
    dims: tuple[int, ...]
    width: int
    total: int


ON_GPU = Scale((4096, 16384, 65536), (64, 128), 2048, 32768)
ON_CPU = Scale((128, 256), (16, 32), 64, 256)


@dataclass(frozen=True)
class Peer(KernelRow):
    """A kernel's row with its version, the rounds, the seconds to check it, and a note if it has no figures.

    `ms` is the time of the device; `loop_ms` is that of a call in a plain loop, the host's time included.
    """

    version: str
    rounds: int
    check_s: float
    note: str | None
    loop_ms: float | None


def default_kernels(device: str) -> tuple[str, ...]:
    """Return ours and all peers on a GPU, and kernels that run on a CPU there."""
    return ("auto", "tiled", SDPA, FLEX) if on_cpu(device) else (own_kernel(device), "fa4", "cudnn", "fa2", FLEX)


def cases_of(
    device: str, tokens: list[int] | None = None, dims: list[int] | None = None, masks: list[str] | None = None
) -> list[Case]:
    """Return the cases of the set, or those asked for; short ones first, because they predict the time of others."""
    scale = ON_CPU if on_cpu(device) else ON_GPU
    for mask in masks or []:
        if mask not in MASKS:
            raise ValueError(f"mask {mask!r}: peers are compared on {' and '.join(MASKS)}")
    cases = []
    for t, d, mask in product(sorted(set(tokens or scale.tokens)), dims or scale.dims, masks or MASKS):
        batch, heads = max(1, scale.total // t), max(1, scale.width // d)
        cases.append(Case(t, batch, heads, heads, d, mask, pick_dtype(None, device), device))
    return list(dict.fromkeys(cases))


def still_valid(written: dict[str, Any]) -> Rows:
    """Return the rows of a record that are still valid: same machine, versions and code, case by case."""
    now = record.header("")
    if any(written["header"][key] != now[key] for key in ("machine", "versions")):
        return []
    return [row for _, own in by_case(written["rows"]) if _same(own) for row in own]


def by_case(rows: Rows) -> Iterator[tuple[Case, Rows]]:
    """Yield the rows of each case, which are adjacent."""
    for case, own in groupby(rows, key=_case):
        yield case, list(own)


def run(
    cases: list[Case], names: tuple[str, ...], rounds: int, budget: Budget, known: Rows, say: Say
) -> Iterator[Rows]:
    """Measure cases; after each one yield all rows so far.

    Our kernel raises if it fails or is wrong. A peer that cannot be imported, fails, is wrong, or has no time left gets
    rows with a note instead of figures.

    Args:
        cases: The cases to measure.
        names: The kernels.
        rounds: The number of rounds, in each of which every kernel is timed once.
        budget: The time for all of it.
        known: Rows of an earlier run, which are not measured again.
        say: A function that is called with progress messages.
    """
    check_names(names)
    done = dict(by_case(known))
    todo = [case for case in cases if not holds(known, case, names, rounds)]
    for n, case in enumerate(todo):
        rows = [row for own in done.values() for row in own]
        taken = budget.affords(todo[n:], names, rounds, rows)
        old = done.pop(case, [])  # a case that is measured comes last
        if not old or not holds(old, case, taken, rounds):
            say_of = lambda text, n=n, case=case: say(f"{n + 1} of {len(todo)}, {words(case)}: {text}")  # noqa: E731
            old = [record.flat(row) for row in _measured(case, names, taken, rounds, say_of)]
        done[case] = old
        yield [row for own in _in_order(done) for row in own]
    if not todo:
        yield [row for own in _in_order(done) for row in own]


class Budget:
    """The seconds of a run from now on, and which kernels they suffice for. The command makes it."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + minutes * 60

    def affords(self, todo: list[Case], names: tuple[str, ...], rounds: int, rows: Rows) -> tuple[str, ...]:
        """Return the kernels that there is time for in the first of the cases to do.

        Slow peers get the time that all others leave in all cases. A kernel without earlier rows counts as taking none.
        """
        left = self._end - self._clock()
        fast = [name for name in names if name not in SLOW]
        if left <= 0 or sum(_seconds(todo[0], name, rounds, rows) for name in fast) > left:
            return ()
        over = left - sum(_seconds(case, name, rounds, rows) for case in todo for name in fast)
        taken = set(fast)
        for name in reversed(SLOW):
            need = _seconds(todo[0], name, rounds, rows)
            if name in names and need <= over:
                taken.add(name)
                over -= need
        return tuple(name for name in names if name in taken)


def holds(rows: Rows, case: Case, names: tuple[str, ...], rounds: int) -> bool:
    """Return whether rows hold figures or final notes of all these kernels for a case, with as many rounds."""
    return set(names) <= {
        row["kernel"]
        for row in rows
        if _case(row) == case and row["rounds"] == rounds and not str(row["note"]).startswith(NO_TIME)
    }


def words(case: Case) -> str:
    """Return a case in a few words."""
    return f"{case.batch} x {case.tokens:,} tokens, dim {case.head_dim}, {case.mask}"


def version_of(name: str) -> str:
    """Return the version of a kernel: of its package, or for ours a digest of sources and environment variables."""
    packages = {"fa4": "flash-attn-4", "fa3": "flash-attn-3", "fa2-package": "flash-attn"}
    if name in packages:
        try:
            return f"{packages[name]} {version(packages[name])}"
        except PackageNotFoundError:
            return f"{packages[name]}, of no known version"
    if name == "cudnn":
        return f"cuDNN {torch.backends.cudnn.version()}"
    if name in (SDPA, FLEX, STANDARD, "fa2", "vendor"):
        return f"torch {torch.__version__}"
    return f"meshflash {meshflash.__version__}, sources {_sources()}"


def _measured(case: Case, names: tuple[str, ...], taken: tuple[str, ...], rounds: int, say: Say) -> list[Peer]:
    """Return the rows of a case: figures of the kernels in `taken` that are installed, notes for the others."""
    notes = dict.fromkeys(names, f"{NO_TIME}: the minutes were over, or needed for others")
    seconds = dict.fromkeys(names, 0.0)
    missing = {kernel.name: kernel.missing() for kernel in registry.kernels() if kernel.name in names}
    notes |= {name: f"{ABSENT}: {reason}" for name, reason in missing.items() if reason}
    present = tuple(name for name in taken if not missing.get(name))
    rows: list[KernelRow] = []
    loop_ms: dict[tuple[str, str], float] = {}
    if present:
        ours = own_among(names)
        oracle = truth if case.tokens <= DENSE_TOKENS else sampled
        measured = measure(case, present, rounds, oracle, say, noted=set(names) - {ours}, loops=True)
        rows = list(rows_of(case, measured))
        loop_ms = {(p, name): ms for name, figures in measured.items() for p, ms in figures.loop_ms.items()}
        notes |= {name: figures.note or NO_MEMORY for name, figures in measured.items()}
        seconds |= {name: figures.check_s for name, figures in measured.items()}
    found = {(row.direction, row.kernel): row for row in rows}
    empty = [
        KernelRow(name, name, direction, case, None, None, None, "", None) for direction in PASSES for name in names
    ]
    return [
        Peer(
            **vars(row),
            version=version_of(row.kernel),
            rounds=rounds,
            check_s=seconds[row.kernel],
            note=notes[row.kernel] if row.ms is None else None,
            loop_ms=loop_ms.get((row.direction, row.kernel)),
        )
        for row in (found.get((row.direction, row.kernel), row) for row in empty)
    ]


def _seconds(case: Case, name: str, rounds: int, rows: Rows) -> float:
    """Predict the seconds of a kernel in a case from the longest known case of its dim and mask; 0 without one.

    FlexAttention is compiled for each length, others once for a dim and mask.
    """
    alike = [
        row
        for row in rows
        if (row["kernel"], row["head_dim"], row["mask"]) == (name, case.head_dim, case.mask) and row["ms"] is not None
    ]
    longest = max((row["tokens"] for row in alike), default=0)
    total = 0.0
    for row in alike:
        if row["tokens"] == longest:
            ms = row["ms"] * case.flops(row["pass"]) / _case(row).flops(row["pass"])
            total += row["check_s"] / len(PASSES) if name == FLEX else 0.0
            total += (TIMINGS * rounds * (ms + max(ms, SAMPLE_MS)) + OTHER_CALLS * ms) / 1e3
    return total * SAFETY_FACTOR


def _in_order(done: dict[Case, Rows]) -> list[Rows]:
    """Return the rows of cases from short to long."""
    return [done[case] for case in sorted(done, key=lambda case: (case.tokens, case.head_dim, case.mask))]


def _case(row: dict[str, Any]) -> Case:
    return Case(**{name: row[name] for name in Case.__dataclass_fields__})


def _same(rows: Rows) -> bool:
    """Return whether all kernels of these rows have the same version now, and those that were absent still are."""
    absent = {f"{ABSENT}: {kernel.missing()}" for kernel in registry.kernels() if kernel.missing()}
    return all(
        row["version"] == version_of(row["kernel"])
        and (row["note"] in absent or not str(row["note"]).startswith(ABSENT))
        for row in rows
    )


@cache
def _sources() -> str:
    """Return a digest of the package's sources and of the environment variables that it reads."""
    root = Path(meshflash.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    digest.update(repr(sorted(item for item in os.environ.items() if item[0].startswith("MESHFLASH_"))).encode())
    return digest.hexdigest()[:12]
