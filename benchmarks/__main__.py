"""`python -m benchmarks`: run one benchmark, print its table, and write its record on request."""

from __future__ import annotations

import typer

from benchmarks import cli_fused, cli_integrations, cli_kernels, cli_peers, cli_training, cli_variants

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Benchmarks behind docs/benchmarks.md.")
for command in (
    cli_peers.peers,
    cli_variants.variants,
    cli_kernels.lengths,
    cli_kernels.host,
    cli_kernels.handshake,
    cli_kernels.memory,
    cli_kernels.rank,
    cli_kernels.engine,
    cli_kernels.tiles,
    cli_kernels.scale,
    cli_fused.fused,
    cli_integrations.integrations,
    cli_training.ddp,
    cli_training.model,
    cli_training.step,
    cli_training.transformers,
    cli_training.weights,
):
    app.command()(command)
app.command("held-out")(cli_peers.held_out)
app.command("bytes")(cli_kernels.bytes_moved)

if __name__ == "__main__":
    app()
