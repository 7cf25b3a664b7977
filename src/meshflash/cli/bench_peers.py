"""`meshflash bench kernels --peers`: the headline set, measured within minutes, and going on where it stopped."""

from __future__ import annotations

from pathlib import Path

import typer

from meshflash.cli.bench_options import RESULTS, View, explained, show
from meshflash.cli.outputs import writable

#: Options of `bench kernels` that the headline set decides.
DECIDED = ("dtype", "batch", "heads", "kv_heads", "deterministic", "exact")
#: Options of `bench kernels` that the headline set alone has.
OWN = ("minutes", "fresh", "markdown", "source")


def given(context: typer.Context, names: tuple[str, ...]) -> list[str]:
    """Which of these options were given."""
    return [name for name in names if (found := context.get_parameter_source(name)) and found.name == "COMMANDLINE"]


def peers(
    tokens: list[int] | None,
    masks: list[str] | None,
    dims: list[int] | None,
    kernels: list[str] | None,
    device: str | None,
    rounds: int,
    minutes: float,
    fresh: bool,
    output: Path | None,
    plot: Path | None,
    markdown: bool,
    source: Path | None,
) -> None:
    """Measure what is not in the record yet, and show all of it."""
    from rich.console import Console

    from meshflash.bench import headline, headline_table, plots, record
    from meshflash.bench.cases import pick_device

    console = Console()
    path = source
    if path is None:
        with explained(), console.status("starting") as status:
            budget = headline.Budget(minutes)
            device = pick_device(device)
            cases = headline.settings(device, tokens, dims, masks)
            names = tuple(dict.fromkeys(kernels or headline.default_kernels(device)))
            path = writable(output or RESULTS / f"peers-{device}.json", plot)
            before = headline.read(path) if path.exists() and not fresh else None
            known = headline.still_true(before) if before else []
            if before and len(known) < len(before["rows"]):
                console.print(f"{path}: what other code, versions or another machine measured is dropped")
            if skipped := [case for case in cases if headline.holds(known, case, names, rounds)]:
                console.print(f"skipped: {len(skipped)} of {len(cases)} settings, measured before; --fresh to repeat")
            for rows in headline.run(cases, names, rounds, budget, known, status.update):
                if before is None or rows != before["rows"]:  # else its date and command stay
                    record.write(path, rows, record.command_line())  # what is done stays if the rest is cut short
    view = View(headline.read, headline_table.table, headline_table.markdown, plots.peers, headline_table.title)
    show(console, path, view, measured=source is None, markdown=markdown, plot=plot)
