"""`meshflash demo`: run every schedule over ranks of this machine, draw one of them, and train a tiny GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.bench_options import explained
from meshflash.cli.outputs import writable_folder

#: Bandwidth of the links in the simulated timeline, bytes per second. The title of the picture states it.
LINK_BYTES_PER_SECOND = 1e9
#: Latency of those links, seconds.
LINK_LATENCY_SECONDS = 1e-4


def command(
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length, over all ranks.")] = 4096,
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=2, max=16, help="Ranks, one process each.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Query heads; half as many key heads if the number is even.")] = 2,
    schedule: Annotated[str, typer.Option(help="The schedule to draw.")] = "zigzag",
    rounds: Annotated[
        int, typer.Option(min=3, help="Rounds that time every schedule once each; the median counts.")
    ] = 3,
    folder: Annotated[Path, typer.Option(help="Folder for the record and the pictures.")] = Path("meshflash-demo"),
    train: Annotated[bool, typer.Option(help="Also train a tiny GPT, over ranks and on one process.")] = True,
    steps: Annotated[int, typer.Option(min=10, help="Training steps of the tiny GPT.")] = 120,
) -> None:
    """Run one causal sequence over ranks with every schedule: time, error, bytes and memory of each.

    One schedule is drawn, with its timeline simulated and measured. Then a tiny GPT learns, over ranks, to repeat a
    sequence, with the losses of a single process. The page `index.html` shows all of it.
    """
    from rich.console import Console

    from meshflash.bench import attention as bench
    from meshflash.bench import demo_page, learning, pictures, record, tables
    from meshflash.bench.cases import Case
    from meshflash.bench.demo_page import Section
    from meshflash.core.files import write_whole
    from meshflash.core.program import Sizes
    from meshflash.core.tiles import worklist
    from meshflash.planner.simulator import Rates
    from meshflash.runtime.cores import cores_here
    from meshflash.schedules.registry import schedule_variants

    writable_folder(folder)
    console = Console()
    case = Case(tokens=tokens, heads=heads, kv_heads=heads if heads % 2 else heads // 2)
    sizes = Sizes(dim=case.head_dim, value_dim=case.head_dim, input_bytes=4)
    with explained():
        built = pictures.programs(schedule, tokens, nproc, heads, case.kv_heads, case.rule, "forward", sizes)
    introduction = (
        f"One causal sequence of {tokens:,} tokens over {nproc} processes joined by gloo, {heads} query and "
        f"{case.kv_heads} KV heads: every schedule, forward and backward, checked against a single device."
    )
    console.print(introduction)
    schedules = tuple(dict.fromkeys((*schedule_variants(nproc), schedule)))
    with console.status("starting the processes") as status:
        listen = lambda text: status.update(str(text))  # noqa: E731
        found = bench.run(case, schedules, bench.Setup(nproc, rounds, timeline=schedule), listen)
    flat = [record.flat(row) for row in found.rows]
    console.print(*tables.schedules(flat))
    console.print(
        "error: the largest of output and gradients, relative to the single device; peak MiB: memory beyond the "
        "inputs, of the rank that holds most.\n"
    )
    whole = (range(tokens),)
    seconds = (
        next(row.ms for row in found.rows if row.schedule == tables.SINGLE_DEVICE and row.direction == "forward") / 1e3
    )
    pairs = worklist(case.rule, whole, whole).pairs * heads
    drawn = pictures.draw(
        built,
        f"{schedule}: {tokens:,} tokens over {nproc} ranks",
        Rates(pairs / seconds, LINK_BYTES_PER_SECOND, LINK_LATENCY_SECONDS),
        f"links of {LINK_BYTES_PER_SECOND / 1e9:g} GB/s, kernel rate of the single-device run",
        found.timeline,
    )
    texts = (drawn.coverage, drawn.timeline, drawn.measured)
    console.print(*texts, sep="\n\n", highlight=False, soft_wrap=True)
    record.write(folder / "demo.json", flat, record.command_line())
    write_whole(folder / "demo.svg", drawn.svg)
    simulated = (
        f"Simulated from the schedule's programs, for links of {LINK_BYTES_PER_SECOND / 1e9:g} GB/s and ranks that "
        "compute as fast as the single device did: what the schedule would do with a device for each rank. Nothing "
        "in this picture is measured."
    )
    measured = f"The same forward pass, recorded here on {nproc} processes that share {len(cores_here())} cores."
    what = f"Which rank attends to which keys, in which step: {tokens:,} tokens over {nproc} ranks."
    sections = [
        Section("Results", introduction, demo_page.results_table(flat)),
        Section(f"The schedule {schedule}", what, drawn.parts["coverage"], is_wide=False),
        Section("Timeline, simulated", simulated, drawn.parts["simulated"]),
        *([Section("Timeline, measured", measured, drawn.parts["measured"])] if found.timeline else []),
    ]
    if train:
        with console.status("learning to copy") as status:
            learnt = learning.learn(lambda text: status.update(str(text)), steps)
        summary = (
            f"A tiny GPT learnt to repeat what it read, on 4 processes ({learnt.mesh}): {learnt.accuracy:.1%} right "
            f"after {steps} steps. The first ten losses match a single process to {learnt.apart:.0e}."
        )
        console.print(summary)
        curves = {f"4 processes, {learnt.mesh}": learnt.over_ranks, "single process": learnt.alone}
        sections.append(Section("Training over ranks", summary, demo_page.losses_svg(curves), is_wide=False))
        record.write(folder / "learning.json", learning.rows(learnt), record.command_line())
    demo_page.page(folder / "index.html", "meshflash: one sequence over several ranks", sections)
    console.print(f"written: {folder / 'demo.json'}, {folder / 'index.html'}", soft_wrap=True)
