"""Commands that time our kernels beside FlashAttention and cuDNN, in 24 cells and on held-out shapes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.status import Status

from benchmarks.options import RECORD, RECORD_AND_PLOT, PlotOptions, RecordOptions, with_options
from meshflash.bench.record import Recorder
from meshflash.cli.bench_options import MASKS, Device, Rounds


@with_options
def peers(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Sequence length; repeat. All by default.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help=f"{MASKS}; repeat. All by default.")] = None,
    dim: Annotated[list[int] | None, typer.Option(min=1, help="Head dim; repeat. All by default.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="A kernel; repeat. All peers by default.")] = None,
    device: Device = None,
    rounds: Rounds = 9,
    minutes: Annotated[float, typer.Option(min=0, help="Time for all of it; slow peers are left out first.")] = 10.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the record has.")] = False,
    options: PlotOptions = RECORD_AND_PLOT,
) -> None:
    """Our kernels beside their peers in 24 cells: lengths, head dims, masks, forward and backward.

    A peer that fails is named. Cells that the record has already are not measured again.
    """
    from benchmarks import peers as bench
    from benchmarks.peers_table import BENCHMARK
    from benchmarks.protocol import show
    from meshflash.bench import record
    from meshflash.bench.cases import pick_device

    def measure(status: Status) -> Recorder:
        budget = bench.Budget(minutes)
        picked = pick_device(device)
        cases = bench.cases_of(picked, tokens, dim, mask)
        names = tuple(dict.fromkeys(kernel or bench.default_kernels(picked)))
        found = options.recorder(f"peers-{picked}")
        path = found.path
        before = BENCHMARK.read(path) if path and path.exists() and not fresh else None
        known = bench.still_valid(before) if before else []
        if before and len(known) < len(before["rows"]):
            status.console.print(f"{path}: rows of other code, versions or machines are dropped")
        if skipped := [case for case in cases if bench.holds(known, case, names, rounds)]:
            status.console.print(f"skipped: {len(skipped)} of {len(cases)} cases, measured before; --fresh to repeat")
        for rows in bench.run(cases, names, rounds, budget, known, status.update):
            found.rows = rows
            is_unchanged = before is not None and rows == before["rows"]
            found.header = before["header"] if before and is_unchanged else None  # its date and command stay
            if path and not is_unchanged:
                record.write(path, rows, record.command_line())
        return found

    show(BENCHMARK, options, measure)


@with_options
def held_out(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Only shapes of this length; repeat.")] = None,
    device: Device = None,
    rounds: Rounds = 7,
    options: RecordOptions = RECORD,
) -> None:
    """Compare `auto` with every kernel that it could have chosen, on shapes that no table of rates has.

    Odd lengths, GQA, float16, head dims 32 to 256, windows and documents, forward and backward.
    """
    from benchmarks import held_out as bench
    from benchmarks.protocol import show
    from meshflash.bench.cases import pick_device

    def measure(status: Status) -> Recorder:
        picked = pick_device(device)
        cases = bench.cases_of(picked, tokens)
        found = options.recorder(f"held-out-{picked}")
        for n, case in enumerate(cases):
            # a line for each shape on stderr, so that a run whose output goes to a file shows its progress
            typer.echo(f"{n + 1} of {len(cases)}: {case}", err=True)
            say = lambda text, n=n: status.update(f"{n + 1} of {len(cases)}: {text}")  # noqa: E731
            found.add(bench.run(case, rounds, say))
        return found

    show(bench.BENCHMARK, options, measure)
