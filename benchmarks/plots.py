"""Plots of the benchmarks outside of the package, from the rows of a record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshflash.bench.plots import bars, finish, pyplot


def peers(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw bars of TFLOP/s for each kernel, a panel for each pass and a group for each case; no figure, no bar."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        group = f"{row['mask']}\nT={row['tokens']:,}\nD={row['head_dim']}"
        if row["tflops"] is not None:
            empty = {"kernel": row["kernel"], "group": group, "forward": 0.0, "backward": 0.0}
            merged.setdefault((row["kernel"], group), empty)[row["pass"]] = row["tflops"]
    if not merged:
        raise RuntimeError("no kernel has figures")
    panels = {f"{direction}, TFLOP/s": (direction, 1.0) for direction in ("forward", "backward")}
    bars(list(merged.values()), "kernel", lambda row: row["group"], panels, title, path)


def weights(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw bars of the bytes on a rank and of those saved against DDP, a group for each model and number of ranks."""
    panels = {"memory of a rank (GB)": ("total_bytes", 1e9), "saved against DDP (%)": ("saved", 0.01)}
    rows = [row for row in rows if row["how"] == "counted"]
    bars(rows, "method", lambda row: f"{row['model']}\n{row['ranks']} ranks", panels, title, path)


def lengths(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw time and peak memory over the length, both logarithmic, a line for each kernel."""
    plt = pyplot()
    panels = {"forward + backward (ms)": ("ms", 1), "peak memory (MiB)": ("peak_bytes", 2**20)}
    figure, axes = plt.subplots(1, len(panels), figsize=(9.0, 4.2), layout="constrained")
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    ticks = sorted({row["tokens"] for row in rows})
    for axis, (label, (column, unit)) in zip(axes, panels.items(), strict=True):
        for n, name in enumerate(names):
            points = [(row["tokens"], row[column] / unit) for row in rows if row["kernel"] == name and row[column]]
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=name)
            if 0 < len(points) < len(ticks):
                place = {"xytext": (-6, 4), "textcoords": "offset points", "ha": "right"}
                axis.annotate("out of memory beyond", points[-1], **place, fontsize=7, color=f"C{n}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks], fontsize=8, rotation=30)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    finish(figure, axes[0], len(names), title, path)


def over_k(rows: list[dict[str, Any]], panel: Callable[[dict[str, Any]], str], title: str, path: Path) -> None:
    """Draw the time over the best unfused one by K, which is logarithmic: a line for each variant.

    `panel` gives the title of the panel that a row belongs to.
    """
    plt = pyplot()
    panels = list(dict.fromkeys(panel(row) for row in rows))
    size = (max(5.0, 2.6 * len(panels)), 3.8)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    names = list(dict.fromkeys(row["variant"] for row in rows))
    for axis, head in zip(axes[0], panels, strict=True):
        own = [row for row in rows if panel(row) == head]
        for name in names:
            points = sorted((row["k"], row["ratio"]) for row in own if row["variant"] == name)
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
        ticks = sorted({row["k"] for row in own})
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{k:,}" for k in ticks], fontsize=7, rotation=40)
        axis.set_title(head, fontsize=9)
        axis.set_xlabel("K")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time / best unfused")
    finish(figure, axes[0][0], len(names), title, path)
