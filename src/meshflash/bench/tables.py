"""Tables of the commands that come with the package, readable at 80 columns: their columns, titles and captions."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any

from rich.table import Table

from meshflash.bench.columns import Column, Row, mebibytes, milliseconds, optional, terminal
from meshflash.kernels.rates import Rates

#: Keys of a row whose values name a case; all passes of a case stand in one table.
CASE = ("mask", "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "device", "deterministic")
#: More schedules than this do not fit a terminal.
MANY_SCHEDULES = 24
#: The baseline of schedules: the same work on one device.
SINGLE_DEVICE = "single device"
#: The parts of the time of a call that keep it from an efficiency of 1.
MISSING_PARTS = ("kernels", "comm", "steps", "idle", "untraced")
#: Marks an impossible figure.
FLAG = "!"


def kernel_cell(row: Row) -> str:
    """Return the name of a kernel, and the kernel that ran if another one was chosen."""
    return row["kernel"] if row["ran"] == row["kernel"] else f"{row['kernel']} ({row['ran']})"


PASS = Column("pass", "pass", is_text=True, once=True)
KERNEL = Column("kernel", kernel_cell, is_text=True)
SCHEDULE = Column("schedule", "schedule", is_text=True)


def ratio_header(baseline: str) -> str:
    """Return the header of a column of ratios to a baseline, such as "x sdpa" for "torch sdpa"."""
    return f"x {baseline.split()[-1]}"


def kernels(rows: list[Row], baseline: str) -> list[Table]:
    """Return a table for each case: kernels by pass, each with its speed as a multiple of the kernel `baseline`."""
    columns = (
        PASS,
        KERNEL,
        Column("ms", lambda row: milliseconds(row["ms"])),
        Column("TFLOP/s", optional("tflops", "{:.3f}")),
        Column(ratio_header(baseline), optional("speedup", "{:.2f}")),
        Column("error", optional("error", "{:.1e}")),
        Column("peak MiB", lambda row: mebibytes(row["peak_bytes"], "")),
    )
    found = []
    for own in _by_case(rows):
        times = {row["pass"]: row["ms"] for row in own if row["kernel"] == baseline}
        shown = [row | {"speedup": _ratio(times.get(row["pass"]), row["ms"])} for row in own]
        found.append(terminal(title_on_device(own), columns, shown, "pass", f"error: against {own[0]['oracle']}"))
    return found


def schedules(rows: list[Row]) -> list[Table]:
    """Return a table for each case: schedules by pass, with time, communication and memory."""
    return [_schedules(own) for own in _by_case(rows)]


def _schedules(rows: list[Row]) -> Table:
    has_simulation = any(row["simulated_ms"] is not None for row in rows)
    # on a CPU ranks share cores: no rank has hardware of its own, and efficiency means nothing
    shares_cores = rows[0]["device"] == "cpu"
    columns = (
        Column("pass", lambda row: "forward" if row["pass"] == "forward" else "both", is_text=True, once=True),
        SCHEDULE,
        Column("ms", lambda row: _short(row["ms"])),
        Column("±", spread),
        *(
            (Column("speedup", lambda row: _flagged(row, f"{row['speedup']:.2f}")),)
            if shares_cores
            else (
                Column("TFLOP/s", lambda row: f"{row['tflops']:.3g}"),
                Column("eff.", lambda row: _flagged(row, f"{row['efficiency']:.3f}")),
            )
        ),
        Column("exposed\ncomm (ms)", lambda row: _over_ranks(row, _short(row["exposed_ms"]))),
        *((Column("sim.\n(ms)", lambda row: _over_ranks(row, _short(row["simulated_ms"]))),) * has_simulation),
        Column("recv\n(MB)", lambda row: _over_ranks(row, f"{row['received_mean'] / 1e6:.1f}")),
        Column("error", lambda row: _over_ranks(row, f"{row['error']:.0e}")),
        Column("peak\nMiB", lambda row: mebibytes(row["peak_bytes"])),
    )
    head = f"{title(rows[0])}, {max(row['world'] for row in rows)} ranks"
    return terminal(head, columns, rows, "pass", _schedules_caption(rows, shares_cores, has_simulation))


def missing_efficiency(rows: list[Row]) -> list[Table]:
    """Return a table for each case of what keeps schedules from an efficiency of 1; none for ranks that share cores."""
    over_ranks = [row for row in rows if row.get("elapsed_ms") and row["device"] != "cpu"]
    columns = (
        Column("pass", lambda row: "forward" if row["pass"] == "forward" else "both", is_text=True, once=True),
        SCHEDULE,
        Column("eff.", lambda row: f"{row['efficiency']:.3f}"),
        *(Column(name, partial(_missing_cell, name)) for name in MISSING_PARTS),
    )
    caption = (
        "percent of the time of a call, means over ranks, from traced calls back to back: kernels: attention beyond "
        "the time of the single device; comm: waits for messages; steps: copies, sums, merges; idle: no step runs, "
        "such as where the host is late; untraced: how much longer the timed calls took than the traced ones"
    )
    return [
        terminal(f"{title(own[0])}, missing efficiency", columns, own, "pass", caption) for own in _by_case(over_ranks)
    ]


def _missing_cell(part: str, row: Row) -> str:
    return f"{missing_parts(row)[part]:.1%}"


def missing_parts(row: Row) -> dict[str, float]:
    """Return the parts of a call's time that are missing from an efficiency of 1, which they add up to.

    >>> row = {"efficiency": 0.75, "ms": 20.0, "attend_ms": 16.0, "wait_ms": 2.0, "rest_ms": 1.0, "elapsed_ms": 19.5}
    >>> missing_parts(row)
    {'kernels': 0.05, 'comm': 0.1, 'steps': 0.05, 'idle': 0.025, 'untraced': 0.025}
    """
    attends, waits, rest, elapsed = (
        row[name] / row["ms"] for name in ("attend_ms", "wait_ms", "rest_ms", "elapsed_ms")
    )
    found = (attends - row["efficiency"], waits, rest, elapsed - attends - waits - rest, 1 - elapsed)
    return {name: round(part, 6) for name, part in zip(MISSING_PARTS, found, strict=True)}


def _schedules_caption(rows: list[Row], shares_cores: bool, has_simulation: bool) -> str:
    rounds = rows[0]["rounds"]
    speed = "speedup: over the single device (baseline)"
    if not shares_cores:
        speed = "eff.: measured speed over that of the single device (baseline), for each rank's part of the hardware"
    caption = (
        f"ms: median of {rounds} interleaved round{'' if rounds == 1 else 's'}; ±: half of max - min, relative; "
        f"{speed}; exposed comm: measured, of the rank that waits longest; recv: mean over ranks"
    )
    caption += "; sim.: exposed comm of the same programs, simulated" if has_simulation else ""
    layouts = {row.get("layout", "auto") for row in rows} - {"", "auto"}
    caption += f"; layout: {', '.join(sorted(layouts))}" if layouts else ""
    caption += f"; kernels that ran: {_kernels_that_ran(rows)}"
    limits = [row["speedup_limit"] for row in rows if impossible(row)]
    if limits:
        caption += (
            f"\n{FLAG} impossible: above {max(limits):g}, the most that these ranks and cores could give; "
            "the machine was busy, measure again"
        )
    return caption


def impossible(row: Row) -> bool:
    """Return whether a speedup is more than the ranks, and the cores that they share, could give.

    >>> impossible({"speedup": 13.59, "speedup_limit": 2.0}), impossible({"speedup": 1.9, "speedup_limit": 2.0})
    (True, False)
    """
    return bool(row["speedup"] > row["speedup_limit"])


def spread(row: Row) -> str:
    """Return half of the distance from the fastest to the slowest round, relative to the median.

    >>> spread({"ms": 100.0, "ms_low": 90.0, "ms_high": 120.0, "rounds": 3})
    '15%'
    """
    return f"{(row['ms_high'] - row['ms_low']) / 2 / row['ms']:.0%}" if row["rounds"] > 1 else "-"


def checks(rows: list[Row]) -> Table:
    """Return schedules with how many checks were right, missed and refused, the worst error, and bytes received.

    Many schedules become one row for each name, whatever their options.
    """
    many = len({row["schedule"] for row in rows}) > MANY_SCHEDULES
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["schedule"].partition("(")[0] if many else row["schedule"], []).append(row)
    columns = (
        SCHEDULE,
        *(Column(name, name) for name in ("right", "missed", "refused")),
        Column("worst error", lambda row: f"{row['error']:.0e} {row['worst'].removesuffix('_logits')}"),
        Column("of allowed", lambda row: f"{row['error'] / row['allowed']:.2f}" if row["allowed"] else "-"),
        Column("recv (KB)", lambda row: f"{row['received'] / 1e3:.1f}"),
    )
    shown = []
    for schedule, own in by_name.items():
        count = {name: sum(row["outcome"] == name for row in own) for name in ("right", "missed", "refused")}
        worst = max(own, key=lambda row: row["error"] / row["allowed"] if row["allowed"] else 0.0)
        received = sum(row["forward_bytes"] + row["backward_bytes"] for row in own) / max(1, len(own))
        shown.append({**worst, **count, "schedule": schedule, "received": received})
    return terminal(f"against float64, {rows[0]['world']} ranks", columns, shown)


def rehearsals(rows: list[Row]) -> Table:
    """Return schedules with what a rank of a large world builds, holds and receives, and whether all of it is right."""

    def growth(row: Row) -> str:
        return "-" if row["scratch_growth"] is None else f"{row['scratch_growth']:.2f}"

    columns = (
        SCHEDULE,
        Column("steps", lambda row: f"{row['steps']:,}"),
        Column("build\n(ms)", lambda row: f"{row['build_ms']:,.0f}"),
        Column("program\n(MB)", lambda row: f"{row['program_bytes'] / 1e6:,.2f}"),
        Column("scratch\n(MB)", lambda row: f"{row['scratch_bytes'] / 1e6:,.1f}"),
        Column("over half\nthe world", growth),
        Column("recv\n(GB)", lambda row: f"{row['received_bytes'] / 1e9:,.2f}"),
        Column("ranks\nverified", lambda row: row["verified"].partition(" of ")[0], is_text=True),
        Column("outcome", lambda row: "passed" if row["passed"] else "FAILED", is_text=True),
    )
    first = rows[0]
    title = (
        f"{first['tokens']:,} tokens over {first['world']:,} ranks, {first['mask']}, {first['heads']} heads, "
        f"{first['kv_heads']} KV heads, head dim {first['dim']}"
    )
    return terminal(title, columns, rows)


def rates(found: Rates) -> Table:
    """Return the measured rates in TFLOP/s, kernels beside each other; the fastest of a row is bold."""
    rows: dict[tuple[str, str, int, int], Row] = {}
    for rate in found.rates:
        mask = rate.variant or ("causal" if rate.causal else "full")
        key = (rate.direction, mask, rate.head_dim, rate.tokens)
        rows.setdefault(key, {})[rate.kernel] = rate.tflops

    def cell(kernel: str) -> Any:
        def text(row: Row) -> str:
            rate = row["rates"].get(kernel)
            return (
                "" if rate is None else f"[bold]{rate:.0f}[/]" if rate == max(row["rates"].values()) else f"{rate:.0f}"
            )

        return text

    columns = (
        Column("pass", "pass", is_text=True),
        Column("mask", "mask", is_text=True),
        Column("dim", "dim"),
        Column("tokens", lambda row: f"{row['tokens']:,}"),
        *(Column(name, cell(name)) for name in dict.fromkeys(rate.kernel for rate in found.rates)),
    )
    shown = [
        {"pass": direction, "mask": mask, "dim": dim, "tokens": tokens, "rates": own}
        for (direction, mask, dim, tokens), own in sorted(rows.items(), key=lambda item: item[0], reverse=True)
    ]
    return terminal(f"{found.device}: TFLOP/s", columns, shown)


def title(case: Row, tokens: bool = True) -> str:
    """Return the shape of a case in words, with or without its number of tokens."""
    heads = f"{case['heads']} heads"
    if case["kv_heads"] != case["heads"]:
        heads += f" on {case['kv_heads']}"
    words = [case["mask"], f"{case['tokens']:,} tokens", f"batch {case['batch']}", heads, f"dim {case['head_dim']}"]
    if not tokens:
        del words[1]
    return ", ".join([*words, case["dtype"], *(["deterministic"] if case["deterministic"] else [])])


def title_on_device(rows: list[Row]) -> str:
    """Return the case of the first row and its device in words."""
    return f"{title(rows[0])} on {rows[0]['device']}"


def _by_case(rows: list[Row]) -> list[list[Row]]:
    return [list(own) for _, own in groupby(rows, key=lambda row: tuple(row[key] for key in CASE))]


def _kernels_that_ran(rows: list[Row]) -> str:
    """Return which kernels ran in each pass, over all schedules."""
    words = []
    for direction in ("forward", "backward"):
        found = dict.fromkeys(name for row in rows for name in row[f"{direction}_ran"].split(", ") if name)
        words += [f"{direction} {', '.join(found)}"] if found else []
    return "; ".join(words)


def _over_ranks(row: Row, text: str) -> str:
    """Return the text, or nothing for a single device, which receives and waits for nothing."""
    return "" if row["world"] == 1 else text


def _flagged(row: Row, text: str) -> str:
    return f"{text}{FLAG}" if impossible(row) else text


def _ratio(baseline_ms: float | None, ms: float | None) -> float | None:
    return None if baseline_ms is None or ms is None else baseline_ms / ms


def _short(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.{0 if milliseconds >= 100 else 2}f}"
