"""Pictures from records. matplotlib comes with the extra `plots`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def kernels(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars of milliseconds and of peak memory for each kernel, a group for each pass and shape."""
    plt = _pyplot()
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    groups = list(dict.fromkeys(_group(row) for row in rows))
    size = (max(7.0, 1.1 * len(groups) + 2), 6.5)
    figure, axes = plt.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        mine = {_group(row): row for row in rows if row["kernel"] == name}
        places = [groups.index(group) + (n - (len(names) - 1) / 2) * width for group in mine]
        axes[0].bar(places, [row["ms"] for row in mine.values()], width, label=name)
        axes[1].bar(places, [row["peak_bytes"] / 2**20 for row in mine.values()], width, label=name)
    for axis, label in zip(axes, ("milliseconds", "peak memory, MiB"), strict=True):
        heights = [bar.get_height() for bar in axis.patches]
        if max(heights) > 20 * min(heights):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xticks(range(len(groups)), groups, fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _group(row: dict[str, Any]) -> str:
    return f"{row['mask']}\nT={row['tokens']:,}\nD={row['head_dim']}\n{row['pass']}"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("plots need matplotlib: pip install 'meshflash[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
