"""The command line of the soak campaign: `make soak`, or `python -m soak` with src and tests on the path."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from meshflash.bench import record
from soak.campaign import Campaign, Outcome
from soak.cases import FAMILIES, Case, draw, selection
from soak.zygote import Zygote

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "soak.json"
STATE = ROOT / ".soak" / "state.jsonl"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class State:
    """The finished cases of an interrupted campaign, one line each; the command makes it.

    Only rows of the same commit and seed count.
    """

    def __init__(self, path: Path, commit: str, fresh: bool) -> None:
        self.path, self._commit = path, commit
        self._lock = threading.Lock()
        self.rows: dict[tuple[int, str], dict[str, Any]] = {}
        if path.exists() and not fresh:
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # a killed campaign may leave an incomplete last line
                    continue
                if row["commit"] == commit:
                    self.rows[row["seed"], row["case"]] = row
        elif fresh:
            path.unlink(missing_ok=True)

    def add(self, case: Case, outcome: Outcome, wall: float) -> None:
        """Append the outcome of a case to the file."""
        row = {
            "commit": self._commit,
            "seed": case.seed,
            "family": case.family,
            "case": case.name,
            "wrong": outcome.wrong,
            "seconds": outcome.seconds,
            "wall": wall,
        }
        with self._lock:
            self.rows[case.seed, case.name] = row
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


@app.command()
def soak(
    family: Annotated[list[str], typer.Argument(help=f"Families to run: {', '.join(FAMILIES)}; all by default.")] = [],  # noqa: B006
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of cases of each family; each has its own default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed from which all cases are drawn.")] = 0,
    case: Annotated[
        str | None, typer.Option(help="Run a single case, such as damage/7, and print every detail.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cases that run at the same time.")] = 1,
    output: Annotated[Path, typer.Option(dir_okay=False, help="File for the record.")] = RECORD,
    state: Annotated[
        Path, typer.Option(dir_okay=False, help="File from which an interrupted campaign resumes.")
    ] = STATE,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; do not resume an interrupted campaign.")] = False,
) -> None:
    """Kill, stop and starve ranks, and damage checkpoints: survivors must name the right rank and end in time."""
    console = Console()
    try:
        cases = selection(family, count, seed) if case is None else [_named(case, seed)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="meshflash-soak-") as folder:
        campaign = Campaign(Path(folder))
        if case is not None:
            raise typer.Exit(_run_single(campaign, cases[0], console))
        header = record.header(
            shlex.join(["make", "soak"] if len(sys.argv) == 1 else ["python -m soak", *sys.argv[1:]])
        )
        progress_state = State(state, header["commit"], fresh)
        begin = time.monotonic()
        try:
            _run(
                campaign,
                [one for one in cases if (seed, one.name) not in progress_state.rows],
                jobs,
                progress_state,
                console,
            )
        except KeyboardInterrupt:
            console.print(f"interrupted after {len(progress_state.rows)} cases; run the same command to resume")
            raise typer.Exit(130) from None
    rows = summarize(cases, progress_state.rows, header, jobs)
    write(output, rows, header)
    progress_state.path.unlink(missing_ok=True)
    show(rows, console, time.monotonic() - begin)
    raise typer.Exit(1 if any(row["wrong"] for row in rows) else 0)


def _named(text: str, seed: int) -> Case:
    """Return the case of a name such as damage/7."""
    name, _, number = text.rpartition("/")
    if not number.isdigit():
        raise ValueError(f"--case {text}: expected a family and a number, as damage/7")
    return draw(name, seed, int(number))


def _run(campaign: Campaign, cases: list[Case], jobs: int, progress_state: State, console: Console) -> None:
    """Run cases, several at a time, with a bar for each family."""
    zygotes: list[Zygote] = []
    thread_data = threading.local()

    def run(case: Case) -> tuple[Case, Outcome, float]:
        if not hasattr(thread_data, "zygote"):
            thread_data.zygote = Zygote()
            zygotes.append(thread_data.zygote)
        begin = time.monotonic()
        outcome = campaign.run(case, thread_data.zygote)
        campaign.clean(case)
        return case, outcome, time.monotonic() - begin

    columns = (
        TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[wrong]} wrong"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as threads:
        bars = {
            name: progress.add_task(name, total=sum(case.family == name for case in cases), wrong=0, start=False)
            for name in dict.fromkeys(case.family for case in cases)
        }
        wrong = dict.fromkeys(bars, 0)
        futures = [threads.submit(run, case) for case in cases]
        try:
            for future in as_completed(futures):
                case, outcome, wall = future.result()
                progress_state.add(case, outcome, wall)
                wrong[case.family] += bool(outcome.wrong)
                progress.start_task(bars[case.family])
                progress.update(bars[case.family], advance=1, wrong=wrong[case.family])
                for text in outcome.wrong:
                    progress.console.print(f"{case.name}: {text}", highlight=False, markup=False, style="red")
        finally:
            for future in futures:
                future.cancel()
            threads.shutdown(wait=True)
            for zygote in zygotes:
                zygote.close()


def _run_single(campaign: Campaign, case: Case, console: Console) -> int:
    """Run one case; print its drawn values, and the exit codes, errors and output of its ranks."""
    zygote = Zygote()
    try:
        outcome = campaign.run(case, zygote)
        console.print_json(json.dumps({"case": case.name, "seed": case.seed} | case.values))
        for ended in outcome.details:
            for rank, code in enumerate(ended.codes):
                after = "" if ended.fired is None else f", {ended.times[rank] - ended.fired:.2f} s after the fault"
                report = ended.report(rank)
                console.print(f"{ended.folder.name}, rank {rank}: code {code}{after if code is not None else ''}")
                for text in (report.get("trace") or report.get("message", ""), ended.output(rank)):
                    if text.strip():
                        console.print(text.rstrip(), markup=False, highlight=False, style="dim")
    finally:
        zygote.close()
    for text in outcome.wrong:
        console.print(f"wrong: {text}", markup=False, highlight=False)
    console.print("wrong" if outcome.wrong else "right")
    return 1 if outcome.wrong else 0


def summarize(
    cases: list[Case], done: dict[tuple[int, str], dict[str, Any]], header: dict[str, Any], jobs: int
) -> list[dict[str, Any]]:
    """Return a row for each family; it lists wrong cases by name, so that each can be run alone."""
    rows = []
    for name in dict.fromkeys(case.family for case in cases):
        found = [done[case.seed, case.name] for case in cases if case.family == name]
        seconds = [row["seconds"] for row in found if row["seconds"] is not None]
        wrong = [row for row in found if row["wrong"]]
        rows.append(
            {
                "family": name,
                "seed": cases[0].seed,
                "tried": len(found),
                "right": len(found) - len(wrong),
                "wrong": len(wrong),
                "seconds_median": round(statistics.median(seconds), 3) if seconds else None,
                "seconds_max": round(max(seconds), 3) if seconds else None,
                "case_seconds": round(sum(row["wall"] for row in found) / len(found), 3),
                "jobs": jobs,
                "commit": header["commit"],
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "wrong_cases": [{"case": row["case"], "wrong": row["wrong"]} for row in wrong],
            }
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]], header: dict[str, Any]) -> None:
    """Write the record. Families that did not run keep their earlier rows; each row holds its commit and date."""
    earlier = record.read(path)["rows"] if path.exists() else []
    fresh = {row["family"]: row for row in rows}
    merged = {row["family"]: row for row in earlier} | fresh
    record.write(path, [merged[name] for name in FAMILIES if name in merged], header["command"])


def show(rows: list[dict[str, Any]], console: Console, wall: float) -> None:
    """Print the final table, with the hours that a thousand cases of each family would take."""
    table = Table(title=f"soak campaign, seed {rows[0]['seed']}, {wall / 60:.1f} min")
    for column in ("family", "tried", "right", "wrong", "median s", "max s", "s per case", "h per 1,000"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for row in rows:
        ends = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("seconds_median", "seconds_max")]
        hours = row["case_seconds"] * 1000 / row["jobs"] / 3600
        table.add_row(
            row["family"], *(str(row[key]) for key in ("tried", "right", "wrong")), *ends,
            f"{row['case_seconds']:.2f}", f"{hours:.2f}",
        )  # fmt: skip
    console.print(table)
    for row in rows:
        for one in row["wrong_cases"]:
            console.print(f"{one['case']}: {one['wrong'][0]}", markup=False, highlight=False)


if __name__ == "__main__":
    app()
