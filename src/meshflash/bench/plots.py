"""Pictures from records. matplotlib comes with the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def kernels(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars of milliseconds and of peak memory for each kernel, a group for each pass and shape."""
    rows = [row for row in rows if row["ms"] is not None]
    bars(rows, "kernel", _group, {"milliseconds": ("ms", 1), "peak memory, MiB": ("peak_bytes", 2**20)}, title, path)


def peers(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars of TFLOP/s for each kernel, a panel for each pass and a group for each setting; no figure, no bar."""
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


def schedules(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars of speed against one rank and of megabytes received for each schedule, a group for each pass."""
    panels = {"times one rank's speed": ("speedup", 1), "received by a rank, MB": ("received_mean", 1e6)}
    bars(rows, "schedule", lambda row: row["pass"], panels, title, path)


def weights(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars of what a rank keeps and of what it saves against DDP, a group for each model and number of ranks."""
    panels = {"kept by a rank, GB": ("total_bytes", 1e9), "saved against DDP, %": ("saved", 0.01)}
    rows = [row for row in rows if row["how"] == "counted"]
    bars(rows, "method", lambda row: f"{row['model']}\n{row['ranks']} ranks", panels, title, path)


def lengths(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Lines of milliseconds and of peak memory over the length, both logarithmic, one for each kernel."""
    plt = _pyplot()
    panels = {"forward and backward, ms": ("ms", 1), "peak memory, MiB": ("peak_bytes", 2**20)}
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
    _finish(figure, axes[0], len(names), title, path)


def over_depth(rows: list[dict[str, Any]], panel: Callable[[dict[str, Any]], str], title: str, path: Path) -> None:
    """Lines of the time as a multiple of the best unfused one over K, which is logarithmic: one for each variant."""
    plt = _pyplot()
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
    axes[0][0].set_ylabel("times the best unfused")
    _finish(figure, axes[0][0], len(names), title, path)


def bars(
    rows: list[dict[str, Any]],
    named: str,
    group: Callable[[dict[str, Any]], str],
    panels: dict[str, tuple[str, float]],
    title: str,
    path: Path,
) -> None:
    """A panel for each column of the rows, in its unit: bars by name, in groups."""
    plt = _pyplot()
    names = list(dict.fromkeys(row[named] for row in rows))
    groups = list(dict.fromkeys(group(row) for row in rows))
    size = (max(7.0, 1.1 * len(groups) + 2), 6.5)
    figure, axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, layout="constrained")
    width = 0.8 / len(names)
    colors = plt.get_cmap("tab20" if len(names) > 10 else "tab10").colors  # no two names share one
    for axis, (label, (column, unit)) in zip(axes, panels.items(), strict=True):
        for n, name in enumerate(names):
            mine = {group(row): row for row in rows if row[named] == name}
            places = [groups.index(key) + (n - (len(names) - 1) / 2) * width for key in mine]
            axis.bar(places, [row[column] / unit for row in mine.values()], width, label=name, color=colors[n])
        heights = [bar.get_height() for bar in axis.patches]
        if min(heights) > 0 and max(heights) > 20 * min(heights):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xticks(range(len(groups)), groups, fontsize=8)
    _finish(figure, axes[0], len(names), title, path)


def _finish(figure: Any, axis: Any, names: int, title: str, path: Path) -> None:
    """One legend for all panels, the title, and the file."""
    handles, labels = axis.get_legend_handles_labels()
    columns = min(names, 5 if max(map(len, labels), default=0) <= 12 else 4)  # more would not fit the width
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    _pyplot().close(figure)


def _group(row: dict[str, Any]) -> str:
    return f"{row['mask']}\nT={row['tokens']:,}\nD={row['head_dim']}\n{row['pass']}"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
