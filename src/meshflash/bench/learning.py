"""The training run of the demo: a tiny GPT learns to copy, over ranks and on a single process, with equal losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshflash.runtime.processes import Tell, run_ranks
from meshflash.train.config import Config, Mesh, change, preset

#: Training steps by default.
STEPS = 120


@dataclass(frozen=True)
class Learnt:
    """The losses over a mesh and of a single process, and the share of right answers at the end. `learn` makes it."""

    mesh: str
    over_ranks: list[float]
    alone: list[float]
    accuracy: float

    @property
    def apart(self) -> float:
        """The largest relative difference of the first ten losses; later ones diverge by rounding, as always."""
        pairs = zip(self.over_ranks[:10], self.alone[:10], strict=True)
        return max(abs(a - b) / b for a, b in pairs)


def learn(listen: Tell, steps: int = STEPS) -> Learnt:
    """Train the copy task on 4 processes, data parallel 2 x context parallel 2; then on a single process."""
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


def rows(learnt: Learnt) -> list[dict[str, Any]]:
    """Return the losses as rows of a record."""
    pairs = zip(learnt.over_ranks, learnt.alone, strict=True)
    return [{"step": n, "over_ranks": a, "alone": b} for n, (a, b) in enumerate(pairs, 1)]
