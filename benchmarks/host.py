"""What a user pays for a call in a plain loop, the host's time included: every part in one table, beside its peers.

`host_calls` has the calls on a single device, `host_ranks` those over ranks. The host's time alone, which calibration
needs, is measured by `meshflash.bench.host`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from benchmarks import host_ranks
from benchmarks.host_calls import ATTENTION, MATMUL, SHORT, run_attention, run_matmul
from benchmarks.host_ranks import FIXED_MICROSECONDS, RANKS
from benchmarks.host_timing import BOTH, CallRow
from benchmarks.protocol import Benchmark, Rows
from meshflash.bench.columns import Column, Row, optional, terminal
from meshflash.bench.columns import markdown as write_markdown
from meshflash.bench.measure import Say
from meshflash.bench.tables import kernel_cell

PARTS = (ATTENTION, SHORT, MATMUL, RANKS)
#: Marks the best peer.
BEST = "*"
CAPTION = (
    "us: wall time of a call in a loop with one synchronize at its end, median of rounds; ratio: our time over that of "
    f"the best peer ({BEST}), lower is better; ranks: us is the host's time until a call returns, us per step is (us - "
    f"{FIXED_MICROSECONDS:g}) / steps"
)


def run(
    parts: Sequence[str], device: str, rounds: int, world: int, say: Say, use_mps: bool | None = None
) -> Iterator[list[CallRow]]:
    """Measure parts, and yield the rows of each of them.

    Args:
        parts: The parts by name; ValueError for an unknown one.
        device: The device that was picked.
        rounds: The number of rounds, in each of which every candidate is timed once.
        world: The number of ranks of the part RANKS.
        say: A function that is called with progress messages.
        use_mps: Whether ranks share a GPU through MPS; None means where they must and can.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--only {part!r}: expected one of {', '.join(PARTS)}")
    for part in PARTS:
        if part not in parts:
            continue
        if part == RANKS:
            yield host_ranks.run(device, world, rounds, say, use_mps)
        elif part == MATMUL:
            yield list(run_matmul(device, rounds, say))
        else:
            yield list(run_attention(part, device, rounds, say))


def call_cell(row: Row) -> str:
    """Return the part and the shape of a row in a few words."""
    if row["part"] == MATMUL:
        return f"{MATMUL} {row['m']}x{row['n']}x{row['k']}"
    heads = f"{row['heads']}/{row['kv_heads']}" if row["heads"] != row["kv_heads"] else str(row["heads"])
    over = f" over {row['world']}" if row["part"] == RANKS else ""
    return f"{row['part']} {row['batch']}x{row['tokens']:,}{over}, {heads} heads, dim {row['head_dim']}, {row['mask']}"


def _pass_cell(row: Row) -> str:
    return "fwd+bwd" if row["pass"] == BOTH else str(row["pass"])


def _candidate_cell(row: Row) -> str:
    if row["part"] == RANKS:
        return f"{row['kernel']} rank {row['rank']}"
    return kernel_cell(row) + f" {BEST}" * row["best_peer"]


def _rate_cell(row: Row) -> str:
    rate = row["tflops"]
    return "" if rate is None else f"{rate:.{1 if rate >= 1 else 4}f}"


COLUMNS = (
    Column("call", call_cell, is_text=True, once=True),
    Column("pass", _pass_cell, is_text=True, once=True),
    Column("candidate", _candidate_cell, is_text=True),
    Column("us", optional("microseconds", "{:.1f}")),
    Column("TFLOP/s", _rate_cell),
    Column("ratio", optional("ratio", "{:.2f}")),
    Column("steps", optional("steps", "{}")),
    Column("us per\nstep", optional("step_microseconds", "{:.1f}")),
)


def title(rows: Rows) -> str:
    """Return what was measured, in words."""
    rounds = rows[0]["rounds"]
    return f"a call in a plain loop, {rows[0]['dtype']}, {rounds} round{'s' * (rounds > 1)}, on {rows[0]['device']}"


def tables(rows: Rows) -> Sequence[RenderableType]:
    """Return the table, and below it why peers were left out."""
    return [terminal(title(rows), COLUMNS, _shown(rows), call_cell, CAPTION, dense=True), *map(Text, notes(rows))]


def markdown(rows: Rows) -> str:
    """Return the same for a document."""
    below = "\n".join(f"- {line}" for line in notes(rows))
    return f"{write_markdown(COLUMNS, _shown(rows))}\n\n{CAPTION}.\n\n{below}".rstrip()


def notes(rows: Rows) -> list[str]:
    """Return how ranks ran, and which peers were left out of which part and why."""
    over_ranks = [row for row in rows if row["part"] == RANKS]
    lines = [
        f"{RANKS}: {transport}{', MPS' if mps else ''}, kernels that ran: {ran}"
        for transport, mps, ran in dict.fromkeys((row["transport"], row["mps"], row["ran"]) for row in over_ranks)
    ]
    left_out = dict.fromkeys((row["part"], row["kernel"], row["note"]) for row in rows if row["note"])
    return lines + [f"{part}: {kernel} was left out: {note}" for part, kernel, note in left_out]


def _shown(rows: Rows) -> Rows:
    return [row for row in rows if not row["note"]]


BENCHMARK = Benchmark("host", frozenset({"part", "microseconds", "best_peer", "steps"}), tables, markdown, title)
