"""Commands that time one kernel, one rank or a part of the engine; results feed docs/benchmarks.md."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import tables
from benchmarks.options import Update, recorder
from meshflash.bench.columns import terminal
from meshflash.cli.bench_options import (
    Batch,
    Deterministic,
    Device,
    Dim,
    Heads,
    Kernels,
    KvHeads,
    Markdown,
    MaybeKernels,
    OneDtype,
    OneMask,
    Output,
    Plot,
    Rounds,
    Source,
    Tokens,
    View,
    explained,
    show,
)


def lengths(
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequence length; repeat. By default 1,024 to 65,536, on a CPU to 4,096."),
    ] = None,
    kernel: MaybeKernels = None,
    mask: OneMask = "causal",
    batch: Batch = 1,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    dim: Dim = 64,
    dtype: OneDtype = None,
    device: Device = None,
    rounds: Rounds = 5,
    output: Output = None,
    update: Update = False,
    plot: Plot = None,
    markdown: Markdown = False,
    source: Source = None,
) -> None:
    """Standard attention and kernels over growing lengths: time, speed-up, peak memory and memory saved.

    A kernel that runs out of memory is shown as that; one that takes seconds is timed once.
    """
    from rich.console import Console

    from benchmarks import lengths as bench
    from meshflash.bench import plots
    from meshflash.bench.cases import Case, pick_device, pick_dtype
    from meshflash.bench.tables import title as title_of

    console = Console()
    view = View(
        bench.read,
        tables.lengths,
        tables.lengths_markdown,
        plots.lengths,
        lambda rows: title_of(rows[0], tokens=False),
    )
    if source is not None:
        with explained():
            written, path = view.read(source), None
    else:
        with explained(), console.status("starting") as status:
            device = pick_device(device)
            cases = [
                Case(t, batch, heads, kv_heads or heads, dim, mask, pick_dtype(dtype, device), device)
                for t in tokens or bench.default_lengths(device)
            ]
            found = recorder(f"lengths-{device}", output, update, plot)
            for case in cases:
                say = lambda text, t=case.tokens: status.update(f"{t:,} tokens: {text}")  # noqa: E731
                names = tuple(kernel or bench.default_kernels(device))
                found.add(bench.run(case, names, rounds, say))
        written, path = found.made(), found.path
    show(console, written, view, path=path, markdown=markdown, plot=plot)


def host(
    kernel: Kernels = ["auto"],  # noqa: B006
    tokens: Tokens = None,
    mask: OneMask = "causal",
    batch: Batch = 1,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    dim: Dim = 64,
    dtype: OneDtype = None,
    device: Device = None,
    deterministic: Deterministic = False,
    rounds: Rounds = 21,
    output: Output = None,
    update: Update = False,
) -> None:
    """The host's own time for a call, beside that of torch's own: 512 tokens on a GPU, 8 on a CPU."""
    from rich.console import Console

    from meshflash.bench import host as bench
    from meshflash.bench.candidates import SDPA
    from meshflash.bench.cases import Case, pick_device, pick_dtype
    from meshflash.bench.report import report

    console = Console()
    with explained(), console.status("measuring"):
        device = pick_device(device)
        found = recorder(f"host-{device}", output, update)
        tokens, dtype = tokens or bench.default_tokens(device), pick_dtype(dtype, device)
        case = Case(tokens, batch, heads, kv_heads or heads, dim, mask, dtype, device, deterministic)
        found.add(bench.run(case, tuple(kernel), rounds))
    report(console, [tables.host(found.rows, beside=SDPA)], found)


def memory(
    kernel: Kernels = ["auto"],  # noqa: B006
    tokens: Tokens = None,
    mask: OneMask = "causal",
    batch: Batch = 1,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads; 32 on a GPU, 8 on a CPU by default.")] = None,
    kv_heads: KvHeads = None,
    dim: Dim = 128,
    dtype: OneDtype = None,
    device: Device = None,
    deterministic: Deterministic = False,
    output: Output = None,
    update: Update = False,
) -> None:
    """Peak memory of forward and backward as a multiple of the bytes of q, k, v, out and their four gradients."""
    from rich.console import Console

    from benchmarks import memory as bench
    from meshflash.bench.cases import Case, pick_device, pick_dtype
    from meshflash.bench.report import report

    console = Console()
    with explained(), console.status("measuring"):
        device = pick_device(device)
        found = recorder(f"peak-{device}", output, update)
        tokens, dtype = tokens or bench.default_tokens(device), pick_dtype(dtype, device)
        heads = heads or bench.default_heads(device)
        case = Case(tokens, batch, heads, kv_heads or heads, dim, mask, dtype, device, deterministic)
        found.add(bench.run(case, tuple(kernel)))
    report(console, [tables.memory(found.rows)], found)


def tiles(
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 131072,
    documents: Annotated[int, typer.Option(min=1, help="Documents packed into it.")] = 256,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share it.")] = 64,
    output: Output = None,
    update: Update = False,
) -> None:
    """Worklists: how long one rank's table takes to build, against one rank's keys and against all of them."""
    from rich.console import Console

    from benchmarks import tiles as bench
    from meshflash.bench.report import report

    found = recorder("tiles", output, update)
    with explained():
        found.add(bench.run(tokens, documents, ranks))
    title = f"{documents} documents, {ranks} ranks, {tokens:,} tokens"
    report(Console(), [terminal(title, tables.TILES, found.rows)], found)


def rank(
    schedule: Annotated[list[str], typer.Option(help="A schedule; repeat for several.")] = ["zigzag"],  # noqa: B006
    world: Annotated[int, typer.Option("--nproc", "-n", min=1, help="Ranks, of which one is played.")] = 8,
    rank: Annotated[int, typer.Option(min=0, help="Which.")] = 3,
    local_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 1024,
    kernel: Annotated[list[str], typer.Option(help="A kernel; repeat for several.")] = ["auto"],  # noqa: B006
    batch: Batch = 1,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    dim: Dim = 64,
    mask: OneMask = "causal",
    dtype: OneDtype = None,
    device: Device = None,
    rounds: Rounds = 5,
    output: Output = None,
    update: Update = False,
) -> None:
    """One rank's own time, without messages, beside one kernel over as many pairs."""
    from rich.console import Console

    from benchmarks import rank as bench
    from meshflash.bench.cases import Case, pick_device, pick_dtype
    from meshflash.bench.report import report

    console = Console()
    with explained(), console.status("measuring"):
        device = pick_device(device)
        found = recorder(f"rank-{device}", output, update)
        tokens = world * local_tokens
        case = Case(tokens, batch, heads, kv_heads or heads, dim, mask, pick_dtype(dtype, device), device)
        for name in kernel:
            found.add(bench.run(case, tuple(schedule), world, rank, name, rounds))
    title = f"rank {rank} of {world}, {local_tokens:,} tokens each, {mask}, on {device}"
    report(console, [terminal(title, tables.RANK, found.rows)], found)


def engine(
    schedule: Annotated[list[str], typer.Option(help="A schedule; repeat for several.")] = [  # noqa: B006
        "ring",
        "zigzag",
        "striped",
        "allgather",
    ],
    world: Annotated[int, typer.Option("--nproc", "-n", min=2, help="Ranks, of which rank 0 is played.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 21,
    output: Output = None,
    update: Update = False,
) -> None:
    """The engine's own time for each step of a program: kernels and transport do nothing."""
    from rich.console import Console

    from benchmarks import engine as bench
    from meshflash.bench.report import report

    found = recorder("engine", output, update)
    with explained():
        found.add(bench.run(tuple(schedule), world, rounds))
    title = f"the engine's own time, {world} ranks"
    report(Console(), [terminal(title, tables.ENGINE, found.rows)], found)


def moved(
    schedule: Annotated[list[str], typer.Option(help="A schedule; repeat for several. All by default.")] = [],  # noqa: B006
    world: Annotated[int, typer.Option("--nproc", "-n", min=2, help="Ranks.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length, over all ranks.")] = 131072,
    output: Output = None,
    update: Update = False,
) -> None:
    """Bytes that ranks receive in each schedule, counted in its programs, beside what peers move; as Markdown."""
    from rich.console import Console

    from benchmarks import bytes_moved as bench
    from meshflash.bench.cases import Case
    from meshflash.bench.report import report
    from meshflash.schedules.registry import schedule_variants

    found = recorder("bytes", output, update)
    with explained():
        for kv_heads in (32, 8):
            for mask in ("full", "causal", "window-4096"):
                case = Case(tokens, 1, 32, kv_heads, 128, mask, "bfloat16")
                found.add(bench.run(case, tuple(schedule) or schedule_variants(world), world))
    typer.echo(tables.bytes_markdown(found.rows))
    report(Console(), [], found)
