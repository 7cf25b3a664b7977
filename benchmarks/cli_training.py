"""Commands that time training steps and count the bytes that each rank keeps."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.options import Update, recorder
from meshflash.cli.bench_options import (
    Batch,
    Device,
    Markdown,
    OneDtype,
    Output,
    Plot,
    Rounds,
    Source,
    Tokens,
    View,
    explained,
    show,
)

DEVICE = "by default what suits the device"
MaybeLayers = Annotated[int | None, typer.Option(min=1, help=f"Layers of the model; {DEVICE}.")]
MaybeDim = Annotated[int | None, typer.Option(min=1, help=f"Dim of the model; {DEVICE}.")]
MaybeHeads = Annotated[int | None, typer.Option(min=1, help=f"Heads; {DEVICE}.")]
MaybeVocabulary = Annotated[int | None, typer.Option(min=2, help=f"Words; {DEVICE}.")]
TrainingDtype = Annotated[
    str | None,
    typer.Option(help="float32 or bfloat16, with float32 weights; bfloat16 on GPUs, float32 on CPUs by default."),
]


def ddp(
    ranks: Annotated[
        list[int], typer.Option("--nproc", "-n", min=1, help="Ranks; repeat for several. 1 is always measured.")
    ] = [1, 2],  # noqa: B006
    layers: MaybeLayers = None,
    dim: MaybeDim = None,
    heads: MaybeHeads = None,
    vocabulary: MaybeVocabulary = None,
    tokens: Tokens = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step, over all ranks.")] = None,
    dtype: TrainingDtype = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 7,
    device: Device = None,
    mps: Annotated[
        bool, typer.Option("--mps", help="Start CUDA MPS; each rank, also one alone, has 1 / (most ranks) of the GPU.")
    ] = False,
    output: Output = None,
    update: Update = False,
    plot: Plot = None,
    markdown: Markdown = False,
    source: Source = None,
) -> None:
    """DDP over ranks of this machine, all with the same total batch: time of a step, speed-up and efficiency.

    Losses that differ between numbers of ranks are an error. On a CPU each rank has one thread.
    """
    from rich.console import Console

    from benchmarks import ddp as bench
    from benchmarks.training import training
    from meshflash.bench.cases import pick_device

    console = Console()
    view = View(bench.read, bench.table, bench.markdown, bench.plot, bench.title)
    if source is not None:
        with explained():
            written, path = view.read(source), None
    else:
        with explained(), console.status("starting") as status:
            device = pick_device(device)
            found = recorder(f"ddp-{device}", output, update, plot)
            sizes = dict(layers=layers, dim=dim, heads=heads, vocabulary=vocabulary, tokens=tokens, batch=batch)
            case = training(bench.SMALL, bench.LARGE, device, dtype, **sizes)
            listen = status.update if console.is_terminal else lambda text: typer.echo(text, err=True)
            found.add(bench.run(case, ranks, rounds, mps, listen))
        written, path = found.made(), found.path
    show(console, written, view, path=path, markdown=markdown, plot=plot)


def model(
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequence length; repeat. By default 1,024 to 32,768, on a CPU 256 to 2,048."),
    ] = None,
    layers: MaybeLayers = None,
    dim: MaybeDim = None,
    heads: MaybeHeads = None,
    vocabulary: MaybeVocabulary = None,
    batch: Batch = 1,
    dtype: TrainingDtype = None,
    device: Device = None,
    rounds: Rounds = 5,
    output: Output = None,
    update: Update = False,
    plot: Plot = None,
    markdown: Markdown = False,
    source: Source = None,
) -> None:
    """A training step of a GPT with standard attention and with ours, over growing lengths: time and peak memory.

    Losses that differ are an error; what runs out of memory is shown as that.
    """
    from rich.console import Console

    from benchmarks import model as bench
    from benchmarks.training import training
    from meshflash.bench.cases import pick_device
    from meshflash.job import shutdown

    console = Console()
    view = View(bench.read, bench.table, bench.markdown, bench.plot, bench.title)
    if source is not None:
        with explained():
            written, path = view.read(source), None
    else:
        with explained(), console.status("starting") as status:
            device = pick_device(device)
            sizes = dict(layers=layers, dim=dim, heads=heads, vocabulary=vocabulary, batch=batch)
            cases = [
                training(bench.SMALL, bench.LARGE, device, dtype, **sizes, tokens=t)
                for t in tokens or bench.default_lengths(device)
            ]
            found = recorder(f"model-{device}", output, update, plot)
            for case in cases:
                say = lambda text, t=case.tokens: status.update(f"{t:,} tokens: {text}")  # noqa: E731
                found.add(bench.run(case, rounds, say))
            shutdown()  # the job of one rank that its mesh started
        written, path = found.made(), found.path
    show(console, written, view, path=path, markdown=markdown, plot=plot)


def weights(
    world: Annotated[
        list[int], typer.Option("--nproc", "-n", min=1, help="Ranks that train the small model; repeat for several.")
    ] = [1, 2, 4, 8],  # noqa: B006
    output: Output = None,
    update: Update = False,
    plot: Plot = None,
) -> None:
    """Bytes of weights, gradients and optimizer that a rank keeps under DDP, ZeRO-1 and FSDP.

    Measured in a small model that processes of this machine train, counted for 1, 10 and 100 billion weights.
    """
    from rich.console import Console

    from benchmarks import weights as bench
    from meshflash.bench import plots
    from meshflash.bench.report import report

    console = Console()
    found = recorder("weights", output, update, plot)
    with explained(), console.status("measuring"):
        found.add((*bench.measured(world), *bench.counted()))
    title = "weights, gradients and AdamW's state in float32: what a rank keeps"
    report(console, bench.tables(found.rows), found, plot, plots.weights, title)


def step(
    preset: Annotated[str, typer.Option(help="A GPT's: tiny, 125m, llama3.2-1b, llama3-8b, llama3-8b-1m.")] = "tiny",
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 2048,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers, if not the preset's.")] = None,
    dim: Annotated[
        int | None, typer.Option(min=1, help="Dim, if not the preset's; 4 times as many hidden units.")
    ] = None,
    activation_checkpointing: Annotated[str | None, typer.Option(help="full or selective.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep weights and optimizer on the host.")] = False,
    offload_activations: Annotated[
        bool, typer.Option("--offload-activations", help="Keep what activation checkpointing saves on the host.")
    ] = False,
    tiles: Annotated[int, typer.Option(min=1, help="Slices of tokens that MLPs are computed in.")] = 1,
    plain: Annotated[bool, typer.Option("--plain", help="Time the bare model too, in turns.")] = False,
    parts: Annotated[bool, typer.Option("--parts/--no-parts", help="Time the kernels of the step apart.")] = True,
    dtype: OneDtype = None,
    kernel: Annotated[str, typer.Option(help="Of the attention.")] = "auto",
    device: Device = None,
    rounds: Rounds = 3,
    output: Output = None,
    update: Update = False,
) -> None:
    """One training step of a GPT on this device: time and memory, beside the sum of its kernels' own times."""
    from rich.console import Console

    from benchmarks import step as bench
    from benchmarks import tables
    from meshflash.bench.cases import pick_device
    from meshflash.bench.report import report

    console = Console()
    with explained(), console.status("building") as status:
        device = pick_device(device)
        found = recorder(f"step-{device}", output, update)
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        setup = bench.Setup(
            preset,
            tokens,
            layers,
            dim,
            "full",
            activation_checkpointing,
            offload,
            dtype,
            device,
            kernel,
            offload_activations,
            tiles,
        )
        row = bench.run(setup, rounds, plain, parts, say=status.update)
        found.add([row])
    title = f"{preset}, {tokens:,} tokens, {dtype}, on {device}"
    report(console, tables.step(row, title), found)
