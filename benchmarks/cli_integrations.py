"""The command that runs models of Transformers under our context parallelism and others'."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.status import Status

from benchmarks.options import RECORD, RecordOptions, with_options
from meshflash.bench.record import Recorder


@with_options
def integrations(
    python: Annotated[str, typer.Option(help="An interpreter that has Transformers and the peers.")] = sys.executable,
    peer: Annotated[list[str] | None, typer.Option(help="A peer; repeat. All by default.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model; repeat. All by default.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long a cell may take.")] = 60.0,
    options: RecordOptions = RECORD,
) -> None:
    """Models of Transformers over two ranks against one device: ours, Accelerate's and ringmaster's.

    Each cell is a training step whose logits, loss and gradients are right, silently wrong, or refused. Peers that
    cannot be imported are marked.
    """
    from benchmarks import integrations as bench
    from benchmarks.integration_cases import MODELS
    from benchmarks.integration_peers import PEERS
    from benchmarks.protocol import show

    def measure(status: Status) -> Recorder:
        for what, given, known in (("peer", peer, PEERS), ("model", model, MODELS)):
            if unknown := [name for name in given or [] if name not in known]:
                raise ValueError(f"{what} {unknown[0]!r}: expected one of {', '.join(known)}")
        peers = [(name, PEERS[name].title) for name in peer or PEERS]

        def run(ranks: bench.Ranks) -> list[bench.IntegrationRow]:
            return list(bench.run(ranks, peers, model or list(MODELS), seconds, status.update))

        with bench.Ranks(python, "benchmarks.integration_peers") as ranks:
            return options.record("integrations", lambda: run(ranks))

    show(bench.BENCHMARK, options, measure)
