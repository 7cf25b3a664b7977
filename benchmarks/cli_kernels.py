"""Commands that time kernels, one rank, or a part of the engine."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.status import Status

from benchmarks.options import (
    RECORD,
    RECORD_AND_PLOT,
    SHAPE,
    MaybeKernels,
    Nproc,
    PlotOptions,
    RecordOptions,
    Schedules,
    ShapeOptions,
    Tokens,
    with_options,
)
from meshflash.bench.record import Recorder
from meshflash.cli.bench_options import Deterministic, Device, Kernels, Rounds

#: A large model's heads, whose number depends on the device.
LARGE_SHAPE = ShapeOptions(heads=None, dim=128)


@with_options
def lengths(
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequence length; repeat. By default 1,024 to 65,536, on a CPU to 4,096."),
    ] = None,
    kernel: MaybeKernels = None,
    shape: ShapeOptions = SHAPE,
    rounds: Rounds = 5,
    options: PlotOptions = RECORD_AND_PLOT,
) -> None:
    """Standard attention and kernels over growing lengths: time, speedup, peak memory and memory saved.

    A kernel that runs out of memory is shown as that; one that takes seconds is timed once.
    """
    from benchmarks import lengths as bench
    from benchmarks.protocol import show
    from meshflash.bench.cases import pick_device

    def measure(status: Status) -> Recorder:
        device = pick_device(shape.device)
        cases = [shape.case(count, device) for count in tokens or bench.default_lengths(device)]
        found = options.recorder(f"lengths-{device}")
        for case in cases:
            say = lambda text, t=case.tokens: status.update(f"{t:,} tokens: {text}")  # noqa: E731
            found.add(bench.run(case, tuple(kernel or bench.default_kernels(device)), rounds, say))
        return found

    show(bench.BENCHMARK, options, measure)


@with_options
def host(
    only: Annotated[
        list[str] | None,
        typer.Option(help="A part: attention, short, matmul or ranks; repeat. All by default."),
    ] = None,
    world: Annotated[int, typer.Option("--ranks", "--nproc", "-n", min=2, help="Ranks of the part ranks.")] = 4,
    mps: Annotated[
        bool | None,
        typer.Option("--mps/--no-mps", help="Let ranks share a GPU by MPS; by default where they must and can."),
    ] = None,
    device: Device = None,
    rounds: Rounds = 21,
    options: RecordOptions = RECORD,
) -> None:
    """Wall time of a call in a plain loop, host time included, beside peers in the same process.

    attention has 128 tokens and 8 heads: a GPU is bound by the host then. short has 4 x 512
    tokens, 32 heads on 8. matmul stands beside torch.mm. ranks is the host's time for a call
    over ranks, and for each step of its programs. On a CPU, shapes of the last three are so small
    that computing does not count. A wrong result is an error, not a time.
    """
    from benchmarks import host as bench
    from benchmarks.protocol import show
    from meshflash.bench.cases import pick_device

    def measure(_: Status) -> Recorder:
        picked = pick_device(device)
        found = options.recorder(f"host-{picked}")
        # lines on stderr, so that a run whose output goes to a file shows its progress
        say = lambda text: typer.echo(text, err=True)  # noqa: E731
        for rows in bench.run(only or bench.PARTS, picked, rounds, world, say, mps):
            found.add(rows)
        return found

    show(bench.BENCHMARK, options, measure)


@with_options
def memory(
    kernel: Kernels = ["auto"],  # noqa: B006
    tokens: Tokens = None,
    shape: ShapeOptions = LARGE_SHAPE,
    deterministic: Deterministic = False,
    options: RecordOptions = RECORD,
) -> None:
    """Peak memory of forward and backward over the bytes of q, k, v, out and their four gradients.

    There are 32 query heads on a GPU and 8 on a CPU by default.
    """
    from benchmarks import memory as bench
    from benchmarks.protocol import show
    from meshflash.bench.cases import pick_device

    def measure(_: Status) -> Recorder:
        device = pick_device(shape.device)
        count, heads = tokens or bench.default_tokens(device), bench.default_heads(device)
        case = shape.case(count, device, heads, deterministic)
        return options.record(f"peak-{device}", partial(bench.run, case, tuple(kernel)))

    show(bench.BENCHMARK, options, measure)


@with_options
def scale(
    world: Annotated[
        list[int] | None,
        typer.Option(min=8, help="Ranks, a multiple of 8; repeat it for more. 8 to 16,384 by default."),
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help="Schedule; repeat it for more. All of them by default.")
    ] = None,
    documents: Annotated[
        int, typer.Option(min=0, help="Documents in 16M tokens over 1,024 ranks, by layout; 0 leaves them out.")
    ] = 10000,
    options: RecordOptions = RECORD,
) -> None:
    """Programs of one rank of a large world: time and memory to build them, by schedule, mask and number of ranks."""
    from benchmarks import scale as bench
    from benchmarks.protocol import show

    def measure(status: Status) -> Recorder:
        return options.record(
            "scale", partial(bench.run, world or bench.WORLDS, schedule or (), documents, status.update)
        )

    show(bench.BENCHMARK, options, measure)


@with_options
def tiles(
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 131072,
    documents: Annotated[int, typer.Option(min=1, help="Documents packed into it.")] = 256,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share it.")] = 64,
    options: RecordOptions = RECORD,
) -> None:
    """Worklists: the time to build one rank's table, over one rank's keys and over all of them."""
    from benchmarks import tiles as bench
    from benchmarks.protocol import show

    run = partial(bench.run, tokens, documents, ranks)
    show(bench.BENCHMARK, options, lambda _: options.record("tiles", run))


@with_options
def handshake(
    clients: Annotated[list[int], typer.Option(min=2, help="Ranks over a real TCPStore; repeat.")] = [16, 64, 512],  # noqa: B006
    counted: Annotated[list[int], typer.Option(min=2, help="Ranks in memory, only counted; repeat.")] = [4096],  # noqa: B006
    rounds: Rounds = 5,
    options: RecordOptions = RECORD,
) -> None:
    """Host handshakes: seconds with many clients of a real store, and calls of the store for thousands of ranks."""
    from benchmarks import handshake as bench
    from benchmarks.protocol import show

    def measure(status: Status) -> Recorder:
        found = options.recorder("handshake")
        for rows in bench.run(clients, counted, rounds, status.update):
            found.add(rows)
        return found

    show(bench.BENCHMARK, options, measure)


@with_options
def rank(
    schedule: Schedules = ["zigzag"],  # noqa: B006
    world: Annotated[int, typer.Option("--nproc", "-n", min=1, help="Ranks; one of them runs.")] = 8,
    rank: Annotated[int, typer.Option(min=0, help="The rank that runs.")] = 3,
    local_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 1024,
    kernel: Annotated[list[str], typer.Option(help="A kernel; repeat for several.")] = ["auto"],  # noqa: B006
    shape: ShapeOptions = SHAPE,
    rounds: Rounds = 5,
    options: RecordOptions = RECORD,
) -> None:
    """One rank's own time without communication, beside a single kernel over as many pairs."""
    from benchmarks import rank as bench
    from benchmarks.protocol import show
    from meshflash.bench.cases import pick_device

    def measure(_: Status) -> Recorder:
        device = pick_device(shape.device)
        found = options.recorder(f"rank-{device}")
        case = shape.case(world * local_tokens, device)
        for name in kernel:
            found.add(bench.run(case, tuple(schedule), world, rank, name, rounds))
        return found

    show(bench.BENCHMARK, options, measure)


@with_options
def engine(
    schedule: Schedules = ["ring", "zigzag", "striped", "allgather"],  # noqa: B006
    world: Nproc = 8,
    rounds: Rounds = 21,
    options: RecordOptions = RECORD,
) -> None:
    """The engine's own time for each step of a program on rank 0: kernels and transport do nothing."""
    from benchmarks import engine as bench
    from benchmarks.protocol import show

    run = partial(bench.run, tuple(schedule), world, rounds)
    show(bench.BENCHMARK, options, lambda _: options.record("engine", run))


@with_options
def bytes_moved(
    schedule: Annotated[list[str], typer.Option(help="A schedule; repeat for several. All by default.")] = [],  # noqa: B006
    world: Nproc = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length, over all ranks.")] = 131072,
    options: RecordOptions = RECORD,
) -> None:
    """Bytes that ranks receive in each schedule, counted in its programs, beside those of peers; as Markdown."""
    from benchmarks import bytes_moved as bench
    from benchmarks.protocol import show
    from meshflash.bench.cases import Case
    from meshflash.schedules.registry import schedule_variants

    def measure(_: Status) -> Recorder:
        found = options.recorder("bytes")
        for kv_heads in (32, 8):
            for mask in ("full", "causal", "window-4096"):
                case = Case(tokens, 1, 32, kv_heads, 128, mask, "bfloat16")
                found.add(bench.run(case, tuple(schedule) or schedule_variants(world), world))
        return found

    show(bench.BENCHMARK, options, measure)
