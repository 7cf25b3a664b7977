"""`meshflash bench`: benchmarks that print the peers beside us and write what they measured.

Those of training are in `bench_training`, what all share in `bench_options`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli import bench_gemm, bench_peers, bench_training, bench_ways
from meshflash.cli.bench_options import (
    DTYPES,
    MASKS,
    RESULTS,
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
from meshflash.cli.outputs import writable, writable_folder

app = typer.Typer(no_args_is_help=True, help="Measure, with the peers beside us.")


@app.command()
def kernels(
    context: typer.Context,
    tokens: Annotated[list[int], typer.Option(min=1, help="Sequence length; repeat for several.")] = [2048],  # noqa: B006 - typer copies it
    mask: Annotated[list[str], typer.Option(help=f"{MASKS}; repeat for several.")] = ["causal", "full"],  # noqa: B006
    dim: Annotated[list[int], typer.Option(min=1, help="Head dim; repeat for several.")] = [64],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help=f"{DTYPES}; repeat for several.")] = ["float32"],  # noqa: B006
    kernel: Kernels = ["auto", "tiled", "torch sdpa"],  # noqa: B006
    batch: Batch = 1,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    device: Device = None,
    deterministic: Deterministic = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Check against float64 above 4,096 tokens too, however long it takes.")
    ] = False,
    rounds: Rounds = 9,
    output: Output = None,
    plot: Plot = None,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Ours beside its peers in 24 cells; --tokens, --dim, --mask, --kernel narrow it."),
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=0, help="With --peers: time for all of it; slow peers are left out first.")
    ] = 10.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="With --peers: measure anew what the record has.")] = False,
    markdown: Markdown = False,
    source: Source = None,
) -> None:
    """Attention kernels, forward and backward: time, error and peak memory.

    All kernels of a cell run in turns in one process; one that is wrong is an error, not a time.

    With --peers, what a peer fails at is said, and what was measured before is not measured again.
    """
    others = bench_peers.given(context, bench_peers.DECIDED if peers else bench_peers.OWN)
    if others:
        words = ", ".join(f"--{'from' if name == 'source' else name.replace('_', '-')}" for name in others)
        raise typer.BadParameter(f"{words}: not {'with' if peers else 'without'} --peers")
    if peers:
        named = bench_peers.given(context, ("tokens", "mask", "dim", "kernel"))
        bench_peers.peers(
            tokens if "tokens" in named else None,
            mask if "mask" in named else None,
            dim if "dim" in named else None,
            kernel if "kernel" in named else None,
            *(device, rounds, minutes, fresh, output, plot, markdown, source),
        )
        return
    from rich.console import Console
    from rich.progress import track

    from meshflash.bench import kernels as bench
    from meshflash.bench import plots, record, tables
    from meshflash.bench.candidates import SDPA
    from meshflash.bench.cases import Case, pick_device
    from meshflash.bench.report import report

    console = Console()
    rows = []
    with explained():
        device = pick_device(device)
        cases = [
            Case(t, batch, heads, kv_heads or heads, d, m, dt, device, deterministic)
            for dt, m, d, t in product(dtype, mask, dim, tokens)
        ]
        path = writable(output or RESULTS / f"kernels-{device}.json", plot)
        for case in track(cases, "measuring", console=console, transient=True):
            rows += [record.flat(row) for row in bench.run(case, tuple(kernel), rounds, exact)]
            record.write(path, rows, record.command_line())  # what is done stays if the rest is cut short
    title = f"attention kernels on {device}"
    report(console, tables.kernels(rows, beside=SDPA), rows, path, plot, plots.kernels, title)


@app.command()
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
    plot: Plot = None,
    markdown: Markdown = False,
    source: Source = None,
) -> None:
    """Standard attention and kernels over growing lengths: time, speed-up, peak memory and memory saved.

    A kernel that runs out of memory is shown as that; one that takes seconds is timed once.
    """
    from rich.console import Console

    from meshflash.bench import lengths as bench
    from meshflash.bench import plots, record, tables
    from meshflash.bench.cases import Case, pick_device, pick_dtype

    console = Console()
    path = source
    if path is None:
        with explained(), console.status("starting") as status:
            device = pick_device(device)
            cases = [
                Case(t, batch, heads, kv_heads or heads, dim, mask, pick_dtype(dtype, device), device)
                for t in tokens or bench.default_lengths(device)
            ]
            path, rows = writable(output or RESULTS / f"lengths-{device}.json", plot), []
            for case in cases:
                say = lambda text, t=case.tokens: status.update(f"{t:,} tokens: {text}")  # noqa: E731
                names = tuple(kernel or bench.default_kernels(device))
                rows += [record.flat(row) for row in bench.run(case, names, rounds, say)]
                record.write(path, rows, record.command_line())
    view = View(
        bench.read,
        tables.lengths,
        tables.lengths_markdown,
        plots.lengths,
        lambda rows: tables.title(rows[0], tokens=False),
    )
    show(console, path, view, measured=source is None, markdown=markdown, plot=plot)


@app.command()
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
) -> None:
    """The host's own time for a call, beside that of torch's own: 512 tokens on a GPU, 8 on a CPU."""
    from rich.console import Console

    from meshflash.bench import host as bench
    from meshflash.bench import record, tables
    from meshflash.bench.candidates import SDPA
    from meshflash.bench.cases import Case, pick_device, pick_dtype
    from meshflash.bench.report import report

    console = Console()
    with explained(), console.status("measuring"):
        device = pick_device(device)
        path = writable(output or RESULTS / f"host-{device}.json")
        tokens, dtype = tokens or bench.default_tokens(device), pick_dtype(dtype, device)
        case = Case(tokens, batch, heads, kv_heads or heads, dim, mask, dtype, device, deterministic)
        rows = [record.flat(row) for row in bench.run(case, tuple(kernel), rounds)]
    report(console, [tables.host(rows, beside=SDPA)], rows, path)


@app.command()
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
) -> None:
    """Peak memory of forward and backward as a multiple of the bytes of q, k, v, out and their four gradients."""
    from rich.console import Console

    from meshflash.bench import memory as bench
    from meshflash.bench import record, tables
    from meshflash.bench.cases import Case, pick_device, pick_dtype
    from meshflash.bench.report import report

    console = Console()
    with explained(), console.status("measuring"):
        device = pick_device(device)
        path = writable(output or RESULTS / f"peak-{device}.json")
        tokens, dtype = tokens or bench.default_tokens(device), pick_dtype(dtype, device)
        heads = heads or bench.default_heads(device)
        case = Case(tokens, batch, heads, kv_heads or heads, dim, mask, dtype, device, deterministic)
        rows = [record.flat(row) for row in bench.run(case, tuple(kernel))]
    report(console, [tables.memory(rows)], rows, path)


@app.command()
def tiles(
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 131072,
    documents: Annotated[int, typer.Option(min=1, help="Documents packed into it.")] = 256,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share it.")] = 64,
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = RESULTS / "tiles.json",
) -> None:
    """Worklists: how long one rank's table takes to build, against one rank's keys and against all of them."""
    from rich.console import Console
    from rich.table import Table

    from meshflash.bench import record
    from meshflash.bench import tiles as bench

    writable(output)
    with explained():
        rows = [record.flat(row) for row in bench.run(tokens, documents, ranks)]
    title = f"{documents} documents, {ranks} ranks, {tokens:,} tokens"
    table = Table("layout", title=title, title_justify="left", title_style="bold")
    for name in ("one rank's keys, ms", "spans", "all keys, ms", "spans"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row['step_ms']:.2f}", f"{row['step_spans']:,}", f"{row['all_ms']:.2f}", f"{row['all_spans']:,}")
        table.add_row(row["layout"], *numbers)
    Console().print(table)
    record.write(output, rows, record.command_line())
    typer.echo(f"written: {output}")


@app.command()
def attention(
    schedule: Annotated[
        list[str],
        typer.Option(help='A schedule, with options as in "allgather(head_stride=2)", or "torch all-gather"; repeat.'),
    ] = ["zigzag", "ring", "striped", "allgather", "torch all-gather"],  # noqa: B006
    world: Annotated[int, typer.Option("--world", "-n", min=1, help="Ranks, each a process of this machine.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length, over all ranks.")] = 8192,
    batch: Batch = 1,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    dim: Dim = 64,
    mask: OneMask = "causal",
    causal: Annotated[bool | None, typer.Option(help="In place of --mask: causal, or full.")] = None,
    dtype: Annotated[str, typer.Option(help=f"{DTYPES}.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each rank, and of the one rank beside them.")] = 1,
    rounds: Annotated[
        int, typer.Option("--rounds", "--iters", min=1, help="Rounds, in each of which every schedule takes its turn.")
    ] = 7,
    device: Annotated[str, typer.Option(help="cpu or cuda; ranks share GPUs where there are more of them.")] = "cpu",
    transport: Annotated[
        str, typer.Option(help='As in attention: auto, symmetric, "throttled(auto, 50, 10)".')
    ] = "auto",
    kernel: Annotated[str, typer.Option(help="That of all ranks, and of the one rank beside them.")] = "auto",
    forward_only: Annotated[bool, typer.Option(help="Time no backward.")] = False,
    mps: Annotated[bool, typer.Option(help="Start CUDA MPS, and give each rank its part of the GPU.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Have ranks write traces there, for `meshflash trace`.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a trace by torch's profiler there, of each schedule and rank.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write; by device where None.")] = None,
    plot: Plot = None,
) -> None:
    """Attention over ranks: each schedule's time beside one rank on the same total work, bytes, waiting and memory.

    Every schedule is checked against one rank before it is timed; one that is wrong is an error, not a time.
    """
    from rich.console import Console

    from meshflash.bench import attention as bench
    from meshflash.bench import plots, record, tables
    from meshflash.bench.cases import Case, pick_device
    from meshflash.bench.report import report
    from meshflash.comm.transports.choice import check as check_transport
    from meshflash.runtime.mps import variables

    console = Console()
    written = writable(output or RESULTS / f"attention-{device}.json", plot)
    for folder in filter(None, (trace, profile)):
        writable_folder(folder)
    traced = {"MESHFLASH_TRACE": str(trace)} if trace else {}
    if causal is not None:
        mask = "causal" if causal else "full"
    with explained(), console.status("starting") as status, variables(**traced):
        case = Case(tokens, batch, heads, kv_heads or heads, dim, mask, dtype, pick_device(device))
        check_transport(transport)
        setup = bench.Setup(world, rounds, threads, transport, kernel, forward_only, mps, str(profile or ""))
        listen = status.update if console.is_terminal else lambda text: typer.echo(text, err=True)
        rows = [record.flat(row) for row in bench.run(case, tuple(schedule), setup, listen).rows]
    title = f"{mask}, {tokens:,} tokens over {world} ranks on {device}"
    report(console, tables.schedules(rows, bench.ONE), rows, written, plot, plots.schedules, title)


@app.command()
def rank(
    schedule: Annotated[list[str], typer.Option(help="A schedule; repeat for several.")] = ["zigzag"],  # noqa: B006
    world: Annotated[int, typer.Option("--world", "-n", min=1, help="Ranks, of which one is played.")] = 8,
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
) -> None:
    """One rank's own time, without messages, beside one kernel over as many pairs."""
    from rich.console import Console
    from rich.table import Table

    from meshflash.bench import rank as bench
    from meshflash.bench import record
    from meshflash.bench.cases import Case, pick_device, pick_dtype
    from meshflash.bench.report import report

    console = Console()
    with explained(), console.status("measuring"):
        device = pick_device(device)
        path = writable(output or RESULTS / f"rank-{device}.json")
        tokens = world * local_tokens
        case = Case(tokens, batch, heads, kv_heads or heads, dim, mask, pick_dtype(dtype, device), device)
        rows = [
            record.flat(row) for name in kernel for row in bench.run(case, tuple(schedule), world, rank, name, rounds)
        ]
    title = f"rank {rank} of {world}, {local_tokens:,} tokens each, {mask}, on {device}"
    table = Table("schedule", "kernel", "pass", title=title, title_justify="left", title_style="bold")
    for name in ("ms", "its kernels", "one kernel", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = [f"{row[key]:.3f}" for key in ("ms", "attend_ms", "one_ms", "ratio")]
        table.add_row(row["schedule"], row["kernel"], row["pass"], *numbers)
    report(console, [table], rows, path)


@app.command()
def engine(
    schedule: Annotated[list[str], typer.Option(help="A schedule; repeat for several.")] = [  # noqa: B006
        "ring",
        "zigzag",
        "striped",
        "allgather",
    ],
    world: Annotated[int, typer.Option("--world", "-n", min=2, help="Ranks, of which rank 0 is played.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 21,
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = RESULTS / "engine.json",
) -> None:
    """The engine's own time for each step of a program: kernels and transport do nothing."""
    from rich.console import Console
    from rich.table import Table

    from meshflash.bench import engine as bench
    from meshflash.bench import record

    writable(output)
    with explained():
        rows = [record.flat(row) for row in bench.run(tuple(schedule), world, rounds)]
    title = f"the engine's own time, {world} ranks"
    table = Table("schedule", "pass", title=title, title_justify="left", title_style="bold")
    for name in ("steps", "us a step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["schedule"], row["pass"], str(row["steps"]), f"{row['microseconds']:.1f}")
    Console().print(table)
    record.write(output, rows, record.command_line())
    typer.echo(f"written: {output}")


@app.command("bytes")
def moved(
    schedule: Annotated[list[str], typer.Option(help="A schedule; repeat for several. All by default.")] = [],  # noqa: B006
    world: Annotated[int, typer.Option("--world", "-n", min=2, help="Ranks.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length, over all ranks.")] = 131072,
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = RESULTS / "bytes.json",
) -> None:
    """Bytes that ranks receive in each schedule, counted in its programs, beside what peers move; as Markdown."""
    from meshflash.bench import bytes as bench
    from meshflash.bench import record, tables
    from meshflash.bench.cases import Case
    from meshflash.schedules.registry import over_lines

    writable(output)
    rows = []
    with explained():
        for kv_heads in (32, 8):
            for mask in ("full", "causal", "window-4096"):
                case = Case(tokens, 1, 32, kv_heads, 128, mask, "bfloat16")
                rows += [record.flat(row) for row in bench.run(case, tuple(schedule) or over_lines(world), world)]
    typer.echo(tables.moved_markdown(rows))
    record.write(output, rows, record.command_line())
    typer.echo(f"written: {output}")


app.command()(bench_gemm.gemm)
app.command()(bench_training.ddp)
app.command()(bench_training.model)
app.command()(bench_training.step)
app.command()(bench_training.weights)
app.command()(bench_ways.ways)
