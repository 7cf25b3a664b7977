"""`auto` beside every kernel that it could have chosen, on shapes that `meshflash calibrate` does not measure.

The shapes differ from the calibrated ones in length, head counts, head dim, dtype and mask: `auto` has to predict their
times. Each kernel runs both passes, and counts by the time of both together. `auto` may choose two kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.text import Text

from benchmarks.protocol import Benchmark, Rows
from meshflash.bench import calibrate
from meshflash.bench.cases import Case, on_cpu
from meshflash.bench.check import PASSES
from meshflash.bench.columns import Column, Row, terminal
from meshflash.bench.columns import markdown as write_markdown
from meshflash.bench.kernels import KernelRow, rows_of
from meshflash.bench.measure import Say, both, measure

AUTO = "auto"
#: The least speed of `auto` over that of the best kernel that counts as a right choice.
FLOOR = 0.97

#: The shapes: short ones up to 2,048 tokens, then long ones. Each has a length, a number of heads, a dtype, a head dim
#: or a mask that no table of rates has.
ON_GPU = tuple(
    Case(tokens, batch, heads, kv_heads, dim, mask, dtype, "cuda")
    for tokens, batch, heads, kv_heads, dim, mask, dtype in (
        (256, 4, 16, 16, 64, "causal", "bfloat16"),
        (300, 2, 12, 12, 64, "full", "float16"),
        (512, 8, 32, 8, 128, "causal", "bfloat16"),
        (777, 4, 16, 16, 32, "causal", "bfloat16"),
        (1000, 1, 32, 8, 128, "full", "float16"),
        (1023, 2, 64, 8, 128, "causal", "bfloat16"),
        (1281, 2, 8, 8, 256, "causal", "bfloat16"),
        (1536, 4, 16, 4, 96, "causal", "bfloat16"),
        (1999, 1, 16, 16, 128, "window-511", "bfloat16"),
        (2047, 2, 32, 32, 64, "causal", "float16"),
        (2048, 2, 32, 8, 64, "documents-lognormal-300", "bfloat16"),
        (3333, 2, 16, 16, 80, "full", "bfloat16"),
        (4321, 1, 16, 16, 96, "documents-5", "bfloat16"),
        (5001, 1, 64, 8, 128, "causal", "bfloat16"),
        (6143, 2, 16, 4, 192, "causal", "bfloat16"),
        (7777, 1, 8, 8, 256, "full", "float16"),
        (8191, 1, 32, 32, 32, "causal", "float16"),
        (9999, 1, 16, 16, 160, "causal", "bfloat16"),
        (10007, 1, 16, 16, 64, "window-333", "float16"),
        (12289, 1, 64, 8, 128, "causal", "float16"),
        (16383, 1, 32, 8, 128, "window-1024", "bfloat16"),
        (16384, 1, 32, 8, 128, "documents-lognormal-2048", "bfloat16"),
        (20001, 1, 16, 16, 64, "documents-7", "bfloat16"),
        (40000, 1, 32, 8, 128, "causal", "bfloat16"),
    )
)
ON_CPU = (Case(37, 1, 4, 2, 16, "causal"), Case(64, 1, 4, 4, 8, "window-9"))


@dataclass(frozen=True)
class HeldOutRow(KernelRow):
    """A kernel's row with the time of a call in a plain loop, and a note if the kernel has no figures."""

    loop_ms: float | None
    note: str | None


def cases_of(device: str, tokens: list[int] | None = None) -> tuple[Case, ...]:
    """Return the shapes for a device; with `tokens` only those of these lengths.

    Args:
        device: The device.
        tokens: The lengths, or None for all of them.
    """
    cases = ON_CPU if on_cpu(device) else tuple(replace(case, device=device) for case in ON_GPU)
    lengths = [case.tokens for case in cases]
    for length in tokens or ():
        if length not in lengths:
            raise ValueError(f"no shape has {length} tokens; they have {', '.join(map(str, lengths))}")
    return tuple(case for case in cases if not tokens or case.tokens in tokens)


def run(case: Case, rounds: int, say: Say) -> Iterator[HeldOutRow]:
    """Yield a row for each pass and kernel: first `auto`, then every kernel that it may choose for both passes.

    `auto` raises if it fails or is wrong; another kernel gets a note. The tiled kernel of plain torch operations, many
    times slower, is timed only where no other kernel serves the shape.

    Args:
        case: The shape.
        rounds: The number of rounds, in each of which every kernel is timed once.
        say: A function that is called with progress messages.
    """
    supported = calibrate.supported(case)
    names = (AUTO, *(name for name in supported if name != "tiled" or len(supported) == 1))
    measured = measure(case, names, rounds, say=say, noted=names[1:], loops=True)
    for row in rows_of(case, measured):
        figures = measured[row.kernel]
        yield HeldOutRow(**vars(row), loop_ms=figures.loop_ms.get(row.direction), note=figures.note)


def summary(rows: Rows) -> list[str]:
    """Return at how many shapes `auto` reaches the floor, by each kind of time, and which shapes it misses."""
    out = []
    for words, ratio, best in (("kernel time", "ratio", "best"), ("plain loops", "loop_ratio", "loop_best")):
        lines = [line for line in _lines(rows) if line[ratio] is not None]
        missed = [line for line in lines if line[ratio] < FLOOR]
        reached = f"{len(lines) - len(missed)} of {len(lines)} shapes"
        out.append(f"{words}: auto reaches {FLOOR:.2f}x of the best kernel at {reached}")
        out += [f"  {line[ratio]:.2f}x: {line['shape']}: {line['ran']}, best {line[best]}" for line in missed]
    notes = dict.fromkeys(f"{row['kernel']} at {_shape(row)}: {row['note']}" for row in rows if row["note"])
    return [*out, *notes]


def tables(rows: Rows) -> list[RenderableType]:
    """Return the table, and below it the summary."""
    return [terminal(title(rows), COLUMNS, _lines(rows), dense=True), *map(Text, summary(rows))]


def markdown(rows: Rows) -> str:
    """Return the same for a document."""
    below = "\n".join(f"- {line.strip()}" for line in summary(rows))
    return f"{write_markdown(COLUMNS, _lines(rows))}\n\n{below}"


def title(rows: Rows) -> str:
    """Return what was measured, in words."""
    return f"auto on held-out shapes: TFLOP/s, and speed over the best kernel in both passes, on {rows[0]['device']}"


def _lines(rows: Rows) -> list[Row]:
    """Return a row of the table for each shape: `auto`, and the best kernel by each kind of time."""
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(_shape(row), []).append(row)
    lines = []
    for shape, group in groups.items():
        auto = {row["pass"]: row for row in group if row["kernel"] == AUTO}
        best, ratio = _best(group, "ms")
        loop_best, loop_ratio = _best(group, "loop_ms")
        lines.append(
            {"shape": shape, "ran": both(*(auto[direction]["ran"] for direction in PASSES))}
            | {direction: auto[direction]["tflops"] for direction in PASSES}
            | {"best": best, "ratio": ratio, "loop_best": loop_best, "loop_ratio": loop_ratio}
        )
    return lines


def _best(group: Rows, key: str) -> tuple[str, float | None]:
    """Return the fastest kernel but `auto` over both passes, and the speed of `auto` over its own."""
    times: dict[str, float] = {}
    for name in dict.fromkeys(row["kernel"] for row in group):
        own = [row[key] for row in group if row["kernel"] == name]
        if len(own) == len(PASSES) and None not in own:
            times[name] = sum(own)
    auto = times.pop(AUTO, None)
    if auto is None or not times:
        return "", None
    best = min(times, key=lambda name: times[name])
    return best, times[best] / auto


def _shape(row: Row) -> str:
    heads = f"{row['heads']}" if row["heads"] == row["kv_heads"] else f"{row['heads']}/{row['kv_heads']}"
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[row["dtype"]]
    return f"{row['batch']}x{row['tokens']} {heads}x{row['head_dim']} {row['mask']} {dtype}"


def _speed(key: str) -> Column:
    header = "x best" if key == "ratio" else "x best\nin a loop"
    return Column(header, lambda row: "" if row[key] is None else f"{row[key]:.2f}")


def _rate(direction: str) -> Column:
    return Column(direction, lambda row: "" if row[direction] is None else f"{row[direction]:.3g}")


COLUMNS = (
    Column("batch x tokens, heads x dim, mask", "shape", is_text=True),
    Column("auto ran", "ran", is_text=True),
    *map(_rate, PASSES),
    Column("best", "best", is_text=True),
    _speed("ratio"),
    _speed("loop_ratio"),
)

BENCHMARK = Benchmark("held-out", frozenset({"loop_ms", "note", "kernel"}), tables, markdown, title)
