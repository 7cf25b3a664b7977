"""Plots of the rows of a record: bars in panels. matplotlib comes with the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def kernels(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw bars of time and of peak memory for each kernel, a group for each pass and shape."""
    rows = [row for row in rows if row["ms"] is not None]
    bars(rows, "kernel", _group, {"time (ms)": ("ms", 1), "peak memory (MiB)": ("peak_bytes", 2**20)}, title, path)


def schedules(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw bars of the speedup over a single device and of bytes received for each schedule, a group for each pass."""
    panels = {"speedup over a single device": ("speedup", 1), "recv (MB), mean over ranks": ("received_mean", 1e6)}
    bars(rows, "schedule", lambda row: row["pass"], panels, title, path)


def bars(
    rows: list[dict[str, Any]],
    named: str,
    group: Callable[[dict[str, Any]], str],
    panels: dict[str, tuple[str, float]],
    title: str,
    path: Path,
) -> None:
    """Draw a panel for each column: bars by name, in groups.

    Args:
        rows: The rows to draw.
        named: The key of the name of a bar, which the legend shows.
        group: A function from a row to the label of its group.
        panels: The label of each panel, with the key of its column and the unit that its values are divided by.
        title: The line above all panels.
        path: The file to write.
    """
    plt = pyplot()
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
    finish(figure, axes[0], len(names), title, path)


def finish(figure: Any, axis: Any, names: int, title: str, path: Path) -> None:
    """Add one legend for all panels and the title, then write the file.

    Args:
        figure: The figure of matplotlib.
        axis: The axes whose handles and labels the legend shows.
        names: The number of entries in the legend.
        title: The line above all panels.
        path: The file to write; its suffix is the format.
    """
    handles, labels = axis.get_legend_handles_labels()
    columns = min(names, 5 if max(map(len, labels), default=0) <= 12 else 4)  # more would not fit the width
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def _group(row: dict[str, Any]) -> str:
    return f"{row['mask']}\nT={row['tokens']:,}\nD={row['head_dim']}\n{row['pass']}"


def pyplot() -> Any:
    """Return matplotlib's pyplot without a display; RuntimeError names the package if it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
