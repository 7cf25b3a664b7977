"""Commands that time training steps and count the bytes that each rank keeps."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.status import Status

from benchmarks.options import (
    MODEL,
    RECORD,
    RECORD_AND_PLOT,
    ModelOptions,
    OneDtype,
    PlotOptions,
    RecordOptions,
    Tokens,
    with_options,
)
from meshflash.bench.record import Recorder
from meshflash.cli.bench_options import Batch, Device, Rounds


@with_options
def ddp(
    ranks: Annotated[
        list[int], typer.Option("--nproc", "-n", min=1, help="Ranks; repeat for several. 1 is always measured.")
    ] = [1, 2],  # noqa: B006
    sizes: ModelOptions = MODEL,
    tokens: Tokens = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step, over all ranks.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 7,
    mps: Annotated[
        bool,
        typer.Option("--mps", help="Start CUDA MPS; each rank gets 1 / (most ranks) of the GPU, also a single one."),
    ] = False,
    options: PlotOptions = RECORD_AND_PLOT,
) -> None:
    """DDP over ranks of this machine, all with the same total batch: time of a step, speedup and efficiency.

    Losses that differ between numbers of ranks are an error. On a CPU each rank has one thread.
    """
    from benchmarks import ddp as bench
    from benchmarks.protocol import show
    from benchmarks.training import training
    from meshflash.bench.cases import pick_device

    def measure(status: Status) -> Recorder:
        device = pick_device(sizes.device)
        found = options.recorder(f"ddp-{device}")
        case = training(bench.SMALL, bench.LARGE, device, sizes.dtype, **sizes.sizes, tokens=tokens, batch=batch)
        listen = status.update if status.console.is_terminal else lambda text: typer.echo(text, err=True)
        found.add(bench.run(case, ranks, rounds, mps, listen))
        return found

    show(bench.BENCHMARK, options, measure)


@with_options
def model(
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequence length; repeat. By default 1,024 to 32,768, on a CPU 256 to 2,048."),
    ] = None,
    sizes: ModelOptions = MODEL,
    batch: Batch = 1,
    rounds: Rounds = 5,
    options: PlotOptions = RECORD_AND_PLOT,
) -> None:
    """A training step of a GPT with standard attention and with ours, over growing lengths: time and peak memory.

    Losses that differ are an error; an attention that runs out of memory is shown as that.
    """
    from benchmarks import model as bench
    from benchmarks.protocol import show
    from benchmarks.training import training
    from meshflash.bench.cases import pick_device
    from meshflash.job import shutdown

    def measure(status: Status) -> Recorder:
        device = pick_device(sizes.device)
        cases = [
            training(bench.SMALL, bench.LARGE, device, sizes.dtype, **sizes.sizes, batch=batch, tokens=count)
            for count in tokens or bench.default_lengths(device)
        ]
        found = options.recorder(f"model-{device}")
        for case in cases:
            say = lambda text, t=case.tokens: status.update(f"{t:,} tokens: {text}")  # noqa: E731
            found.add(bench.run(case, rounds, say))
        shutdown()  # the job of one rank that its mesh started
        return found

    show(bench.BENCHMARK, options, measure)


@with_options
def weights(
    world: Annotated[
        list[int], typer.Option("--nproc", "-n", min=1, help="Ranks that train the small model; repeat for several.")
    ] = [1, 2, 4, 8],  # noqa: B006
    options: PlotOptions = RECORD_AND_PLOT,
) -> None:
    """Bytes of weights, gradients and optimizer state on a rank under DDP, ZeRO-1 and FSDP.

    Measured in a small model that processes of this machine train, counted for 1, 10 and 100 billion weights.
    """
    from benchmarks import weights as bench
    from benchmarks.protocol import show

    show(
        bench.BENCHMARK,
        options,
        lambda _: options.record("weights", lambda: (*bench.measured(world), *bench.counted())),
    )


@with_options
def step(
    preset: Annotated[str, typer.Option(help="A GPT: tiny, 125m, llama3.2-1b, llama3-8b, llama3-8b-1m.")] = "tiny",
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
    plain: Annotated[
        bool, typer.Option("--plain", help="Time the model without parallelize too, interleaved.")
    ] = False,
    parts: Annotated[bool, typer.Option("--parts/--no-parts", help="Time the kernels of the step alone.")] = True,
    dtype: OneDtype = None,
    kernel: Annotated[str, typer.Option(help="The attention kernel.")] = "auto",
    device: Device = None,
    rounds: Rounds = 3,
    options: RecordOptions = RECORD,
) -> None:
    """One training step of a GPT on this device: time and memory, beside the sum of its kernels' own times."""
    from benchmarks import step as bench
    from benchmarks.protocol import show
    from meshflash.bench.cases import pick_device

    def measure(status: Status) -> Recorder:
        picked = pick_device(device)
        found = options.recorder(f"step-{picked}")
        setup = bench.Setup(
            preset=preset,
            tokens=tokens,
            layers=layers,
            dim=dim,
            activation_checkpointing=activation_checkpointing,
            offload=offload,
            dtype=dtype or ("float32" if picked == "cpu" else "bfloat16"),
            device=picked,
            kernel=kernel,
            offload_activations=offload_activations,
            tiles=tiles,
        )
        found.add([bench.run(setup, rounds, plain, parts, say=status.update)])
        return found

    show(bench.BENCHMARK, options, measure)


@with_options
def transformers(
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=1, help="Ranks that share the sequence.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; 16 on GPUs, 2 on CPUs by default.")] = None,
    tokens: Tokens = None,
    dtype: OneDtype = None,
    device: Device = None,
    rounds: Rounds = 3,
    mps: Annotated[
        bool, typer.Option("--mps", help="Start CUDA MPS; each rank gets 1 / ranks of the GPU, a single one all of it.")
    ] = False,
    options: RecordOptions = RECORD,
) -> None:
    """A training step of a Hugging Face Llama: ours beside SDPA on one device; with -n over ranks beside one rank.

    Losses that differ are an error. Both have gradient checkpointing and the same tiled loss.
    """
    from benchmarks import transformers_step as bench
    from benchmarks.protocol import show
    from meshflash.bench.cases import on_cpu, pick_device, pick_dtype

    def measure(status: Status) -> Recorder:
        where = pick_device(device)
        small = on_cpu(where)
        case = bench.LlamaCase(
            layers=layers or (2 if small else 16),
            tokens=tokens or (1000 if small else 131072),
            dtype=pick_dtype(dtype, where),
            device=where,
        )
        if mps and (small or nproc == 1):
            raise ValueError("mps: it divides a GPU among ranks; say --device cuda and --nproc 2 or more")
        say = status.update if status.console.is_terminal else lambda text: typer.echo(text, err=True)
        return options.record(f"transformers-{where}", lambda: bench.run(case, nproc, mps, rounds, say))

    show(bench.BENCHMARK, options, measure)
