"""`meshflash demo`: one sequence over four ranks of this machine, with every schedule, and a model that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.outputs import writable_folder

#: Bytes a second of the links that the simulated timeline goes by; its title says so.
LINK = 1e9


def command(
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length, over all ranks.")] = 4096,
    world: Annotated[int, typer.Option("--world", "-n", min=2, max=16, help="Ranks, each a process.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Query heads; half as many key heads if even.")] = 2,
    schedule: Annotated[str, typer.Option(help="The schedule that is drawn.")] = "zigzag",
    rounds: Annotated[
        int, typer.Option(min=3, help="Rounds, in each of which every schedule takes its turn; the median counts.")
    ] = 3,
    folder: Annotated[Path, typer.Option(help="Where the figures and the pictures go.")] = Path("meshflash-demo"),
    train: Annotated[bool, typer.Option(help="Train a tiny GPT over ranks, beside one process.")] = True,
    steps: Annotated[int, typer.Option(min=10, help="Steps of that training.")] = 120,
) -> None:
    """Attend to one causal sequence spread over ranks: errors, bytes, memory of each schedule, and pictures of one.

    Its timeline is shown twice: as simulated from rates, and as measured over the ranks. Then a tiny GPT learns, over
    ranks, what no rank could learn alone.
    """
    from rich.console import Console

    from meshflash.bench import attention as bench
    from meshflash.bench import learning, pictures, record, tables
    from meshflash.bench.cases import Case
    from meshflash.core.files import write_whole
    from meshflash.core.program import Sizes
    from meshflash.core.tiles import worklist
    from meshflash.runtime.cores import cores_here
    from meshflash.schedules.registry import schedule_variants
    from meshflash.viz.timeline import Rates

    writable_folder(folder)
    console = Console()
    case = Case(tokens=tokens, heads=heads, kv_heads=heads if heads % 2 else heads // 2)
    sizes = Sizes(dim=case.head_dim, value_dim=case.head_dim, input_bytes=4)
    try:
        built = pictures.programs(schedule, tokens, world, heads, case.kv_heads, case.rule, "forward", sizes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console.print(
        f"One causal sequence of {tokens:,} tokens over {world} processes joined by gloo, query heads and key heads "
        f"{heads} to {case.kv_heads}: every schedule, forward and backward, checked against one device."
    )
    schedules = tuple(dict.fromkeys((*schedule_variants(world), schedule)))
    with console.status("starting the processes") as status:
        listen = lambda text: status.update(str(text))  # noqa: E731
        found = bench.run(case, schedules, bench.Setup(world, rounds, timeline=schedule), listen)
    flat = [record.flat(row) for row in found.rows]
    console.print(*tables.schedules(flat, bench.ONE))
    console.print(
        "MB in: what a rank received, on average. Error: of the output, and the largest of output and gradients, "
        "relative to one device. MiB: the peak of memory beyond the inputs, on the rank that held most.\n"
    )
    whole = (range(tokens),)
    seconds = next(row.ms for row in found.rows if row.schedule == bench.ONE and row.direction == "forward") / 1e3
    pairs = worklist(case.rule, whole, whole).pairs * heads
    drawn = pictures.draw(
        built,
        f"{schedule}: {tokens:,} tokens over {world} ranks",
        Rates(pairs / seconds, LINK, 1e-4),
        f"links of {LINK / 1e9:g} GB/s, kernel rate of the single-device run",
        found.timeline,
    )
    texts = (drawn.coverage, drawn.timeline, drawn.measured)
    console.print(*texts, sep="\n\n", highlight=False, soft_wrap=True)
    record.write(folder / "demo.json", flat, record.command_line())
    write_whole(folder / "demo.svg", drawn.svg)
    what = f"{tokens:,} tokens over {world} ranks: which rank attends to what, in which step."
    simulated = (
        f"Computed from the programs for links of {LINK / 1e9:g} GB/s and ranks that attend as fast as the single "
        "device did alone: what the schedule would do on hardware of its own. No time here is measured."
    )
    measured = f"The same forward as it ran here, recorded on {world} processes that share {len(cores_here())} cores."
    sections = [
        (f"The schedule {schedule}", what, drawn.parts["coverage"]),
        ("Timeline, simulated", simulated, drawn.parts["simulated"]),
        *([("Timeline, measured", measured, drawn.parts["measured"])] if found.timeline else []),
    ]
    if train:
        with console.status("learning to copy") as status:
            learnt = learning.learn(lambda text: status.update(str(text)), steps)
        said = (
            f"A tiny GPT learnt to repeat what it read, on 4 processes ({learnt.mesh}): {learnt.accuracy:.1%} right "
            f"after {steps} steps. The first ten losses match a single process to {learnt.apart:.0e}."
        )
        console.print(said)
        curves = {f"4 processes, {learnt.mesh}": learnt.over_ranks, "one process": learnt.alone}
        sections.append(("Learning across ranks", said, learning.losses_svg(curves)))
        record.write(folder / "learning.json", learning.rows(learnt), record.command_line())
    learning.page(folder / "index.html", "meshflash: one sequence over several ranks", sections)
    console.print(f"written: {folder / 'demo.json'}, {folder / 'index.html'}", soft_wrap=True)
