"""The command that times a kernel in the variants that schedules call, beside a plain call of as many FLOPs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.status import Status

from benchmarks.options import RECORD_AND_PLOT, OneDtype, PlotOptions, Tokens, with_options
from meshflash.bench.record import Recorder
from meshflash.cli.bench_options import MASKS, Device, Rounds


@with_options
def variants(
    kernel: Annotated[str | None, typer.Option(help="A kernel; ours on a GPU, tiled on a CPU by default.")] = None,
    tokens: Tokens = None,
    long_tokens: Annotated[
        int | None, typer.Option(min=1, help="Sequence length for masks; by default what suits the device.")
    ] = None,
    dim: Annotated[
        list[int] | None, typer.Option(min=1, help="Head dim; repeat. 64 and 128, on a CPU 16 and 32 by default.")
    ] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help=f"Of the variants: {MASKS}; repeat. causal and full by default.")
    ] = None,
    dtype: OneDtype = None,
    device: Device = None,
    rounds: Rounds = 9,
    options: PlotOptions = RECORD_AND_PLOT,
) -> None:
    """A kernel as schedules call it beside the plain call, and masks beside causal.

    plain writes the final dtype. step, as in a ring, carries results and
    accumulates gradients in float32. deterministic is the backward with the
    same bits each time. gqa has 4 query heads for each KV head. Masks are
    causal, a window and 32 packed documents, at a long length; rates are of
    visible pairs. All are interleaved in one process; a wrong variant is an
    error, not a time.
    """
    from benchmarks import variants as bench
    from benchmarks.protocol import show
    from benchmarks.variants_table import BENCHMARK
    from meshflash.bench.cases import pick_device

    def measure(status: Status) -> Recorder:
        picked = pick_device(device)
        settings = bench.settings(picked, tokens, long_tokens, dim, mask, dtype)
        found = options.recorder(f"variants-{picked}")
        for n, setting in enumerate(settings):
            say = lambda text, n=n: status.update(f"{n + 1} of {len(settings)}: {text}")  # noqa: E731
            found.add(bench.run(setting, kernel or bench.default_kernel(picked), rounds, say))
        return found

    show(BENCHMARK, options, measure)
