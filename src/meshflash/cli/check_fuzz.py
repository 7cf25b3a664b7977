"""`meshflash check --fuzz N` runs a campaign of random cases; `--case NUMBER` repeats one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from meshflash.check.campaign import Record
    from meshflash.check.fuzz import Settings
    from meshflash.runtime.world import World

#: Seconds between two lines of progress if the output is not a terminal.
PROGRESS_SECONDS = 60.0
#: The number of failed cases, refusals and descriptions that are printed.
MAX_SHOWN = 10


def settings_of(
    seed: int, world: int | None, schedules: Sequence[str], device: str, transport: str, threads: bool | None
) -> Settings:
    """Return the settings that random cases are derived from."""
    from meshflash.check.fuzz import THREADS, WORLDS, Settings

    worlds = WORLDS if world is None else (world,)
    return Settings(seed, worlds, tuple(schedules), device, transport, THREADS if threads is None else threads)


def fuzz(
    console: Console, settings: Settings, count: int, output: Path | None, fresh: bool, limit: float, here: World | None
) -> None:
    """Run the cases of a campaign that its record lacks, and print all of it; exit with 1 if a case failed."""
    from meshflash.bench import record as records
    from meshflash.check.campaign import Campaign, Record, RecordError, go_on
    from meshflash.core.files import OutputError

    path = output or Path(f"fuzz-seed{settings.seed}.json")
    header = records.header(records.command_line())
    record = Record(settings, header)
    writes_record = here is None or here.rank == 0
    if writes_record and path.exists() and not fresh:
        try:
            record = go_on(path, settings, header)
        except RecordError as error:
            raise typer.BadParameter(str(error), param_hint="--output") from error
        console.print(f"{path}: {len(record.done)} cases are done; --fresh to start again", soft_wrap=True)
    if writes_record:
        try:
            record.write(path)  # before the work, so that a path that cannot be written fails now
        except OutputError as error:
            raise typer.BadParameter(str(error), param_hint="--output") from error
    with console.status("starting") as status:
        campaign = Campaign(record, path if writes_record else None, _progress(console, status.update), limit)
        try:
            if here:
                campaign.run_here(range(count), here)
            else:
                campaign.run(range(count))
        except KeyboardInterrupt:
            console.print(f"interrupted after {len(record.done)} cases: the same command resumes from {path}")
            raise typer.Exit(130) from None
    if writes_record:
        _show(console, record)
        console.print(f"written: {path}", soft_wrap=True)
        _end(console, record)


def repeat(console: Console, settings: Settings, numbers: Sequence[int], limit: float) -> None:
    """Repeat cases of a campaign, in order and in the same processes; exit with 1 if one fails."""
    from meshflash.check.campaign import Campaign, Record
    from meshflash.check.fuzz import derive

    for number in numbers[:MAX_SHOWN]:
        for line in derive(settings, number).describe():
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    record = Record(settings)
    with console.status("starting") as status:
        Campaign(record, None, status.update, limit).run(numbers)
    for refusal, count in record.refusals.items():
        console.print(f"refused: {count} x {refusal}", soft_wrap=True, markup=False)
    _end(console, record)


def _progress(console: Console, update: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that reports progress: at once on a terminal, every PROGRESS_SECONDS elsewhere."""
    last = [time.monotonic()]

    def say(text: str) -> None:
        update(f"fuzz: {text}")
        if not console.is_terminal and time.monotonic() - last[0] > PROGRESS_SECONDS:
            last[0] = time.monotonic()
            console.print(text)

    return say


def _show(console: Console, record: Record) -> None:
    """Print counts by schedule and by each other dimension, and the refused calls."""
    from meshflash.bench.columns import Column, terminal
    from meshflash.bench.tables import SCHEDULE

    columns = (SCHEDULE, *(Column(outcome, outcome) for outcome in ("right", "refused", "missed")))
    rows = [{"schedule": name, **counts} for name, counts in sorted(record.dimensions.get("schedule", {}).items())]
    console.print(terminal("cases that call each schedule", columns, rows))
    for name, values in sorted(record.dimensions.items()):
        if name != "schedule":
            summary = ", ".join(f"{value} {_count(counts)}" for value, counts in sorted(values.items()))
            console.print(f"{name}: {summary}", soft_wrap=True, highlight=False, markup=False)
    for refusal, number in sorted(record.refusals.items(), key=lambda pair: -pair[1])[:MAX_SHOWN]:
        console.print(f"refused: {number} x {refusal}", soft_wrap=True, markup=False)
    console.print(f"refused: {record.refused_share:.1%} of {sum(record.calls.values())} calls")
    if record.largest_error:
        largest = record.largest_error
        console.print(f"largest error: {largest['of allowed']:.2f} of allowed, {largest['of']}, case {largest['case']}")
    console.print(f"seed {record.settings.seed}, {record.seconds / 60:.1f} minutes")


def _count(counts: dict[str, Any]) -> str:
    missed = f" ({counts['missed']} missed)" if counts["missed"] else ""
    return f"{sum(counts.values())}{missed}"


def _end(console: Console, record: Record) -> None:
    """Print the failed cases and the verdict; exit with 1 if a case failed."""
    for miss in record.misses[:MAX_SHOWN]:
        console.print(f"missed: case {miss['case']}: {miss['message']}", soft_wrap=True, markup=False)
        console.print(f"  repeat: {miss['rerun']}", soft_wrap=True, highlight=False, markup=False)
        if before := miss.get("rerun with those before"):
            console.print(
                f"  repeat with the earlier cases of its processes: {before}",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
    done = len(record.done)
    if record.misses:
        console.print(f"{len(record.misses)} of {done} cases missed")
        raise typer.Exit(1)
    console.print(f"{done} cases, none missed")
