"""A tiny GPT that learns to copy, over ranks and alone, with the same losses: what the demo shows last."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshflash.core.files import write_whole
from meshflash.runtime.processes import Tell, run_ranks
from meshflash.train.config import Config, Mesh, change, preset

STEPS = 120
#: Width, height and margin of the picture of losses.
WIDTH, HEIGHT, EDGE = 720, 300, 40


@dataclass(frozen=True)
class Learnt:
    """Losses over a mesh and of one process, and how many answers were right at the end."""

    mesh: str
    over_ranks: list[float]
    alone: list[float]
    accuracy: float

    @property
    def apart(self) -> float:
        """How far losses of the first ten steps are from each other, relative: later ones part as in any training."""
        pairs = zip(self.over_ranks[:10], self.alone[:10], strict=True)
        return max(abs(a - b) / b for a, b in pairs)


def learn(listen: Tell, steps: int = STEPS) -> Learnt:
    """Train the copy task on 4 processes, two samples' worth of data by two parts of each sequence; then on one."""
    config: Config = change(preset("gpt", "tiny"), {"run": {"steps": steps, "evaluate": steps}})
    spread = replace(config, mesh=Mesh(dp=2, cp=2, schedule="zigzag"))
    losses, valid = run_ranks(4, _train, spread, listen=listen)[0]
    alone, _ = run_ranks(1, _train, config, listen=listen)[0]
    return Learnt("dp 2 x cp 2", losses, alone, valid["accuracy"])


def _train(rank: int, world: int, tell: Tell, config: Config) -> tuple[list[float], dict[str, float]]:
    from meshflash.train import loop

    if rank == 0:
        tell(f"learning to copy on {world} process{'es' if world > 1 else ''}")
    trained = loop.train(config, quiet=True)
    return trained.losses, trained.valid


def losses_svg(curves: Mapping[str, Sequence[float]]) -> str:
    """Losses by step as a picture, one line for each name."""
    top = max(max(values) for values in curves.values())
    steps = max(len(values) for values in curves.values())
    colors = ("#d95f02", "#1b9e77", "#7570b3")
    room, depth = WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE
    head = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    parts = [f'<svg {head} viewBox="0 0 {WIDTH} {HEIGHT}">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for n in range(5):
        y = EDGE + depth * n / 4
        parts.append(f'<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{EDGE - 6}" y="{y + 4}" text-anchor="end">{top * (4 - n) / 4:.1f}</text>')
    for n, (name, values) in enumerate(curves.items()):
        places = (
            (EDGE + room * at / max(1, steps - 1), HEIGHT - EDGE - depth * v / top) for at, v in enumerate(values)
        )
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        color, dashes = colors[n % len(colors)], ' stroke-dasharray="6 5"' if n else ""
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2"{dashes} points="{points}"/>')
        where = f'x="{WIDTH - EDGE}" y="{EDGE + 16 * (n + 1)}" text-anchor="end"'
        parts.append(f'<text {where} fill="{color}">{html.escape(name)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step, of {steps}</text></svg>')
    return "\n".join(parts)


def page(path: Path, title: str, sections: Sequence[tuple[str, str, str]]) -> None:
    """One HTML page of sections: a heading, a sentence, and a picture as SVG."""
    body = "\n".join(f"<h2>{html.escape(h)}</h2>\n<p>{html.escape(text)}</p>\n{svg}" for h, text, svg in sections)
    style = "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}svg{width:100%;height:auto}"
    write_whole(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head><body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n",
    )


def rows(learnt: Learnt) -> list[dict[str, Any]]:
    """The losses as a record takes them."""
    pairs = zip(learnt.over_ranks, learnt.alone, strict=True)
    return [{"step": n, "over_ranks": a, "alone": b} for n, (a, b) in enumerate(pairs, 1)]
