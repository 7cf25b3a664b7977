"""`meshflash rehearse`: play single ranks of a large world on this machine, without GPUs or the other ranks."""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshflash.cli.bench_options import DTYPES, MASKS, Batch, Dim, explained
from meshflash.cli.outputs import writable

if TYPE_CHECKING:
    from rich.status import Status

    from meshflash.check.rehearsal import Outcome, Scene

#: Suffixes of sizes: powers of 1,024, as numbers of tokens and bytes usually are.
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """Return a number of tokens or bytes, such as 4096, 512k, 16M or 80G; k, M and G are powers of 1,024.

    >>> parse_size("16M")
    16777216
    """
    match = re.fullmatch(r"(\d+)([kmg]?)", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r}: expected a number such as 4096, 512k or 16M")
    return int(match[1]) * UNITS[match[2]]


def command(
    world: Annotated[int, typer.Option("--nproc", "-n", min=2, help="Ranks of the world to rehearse.")] = 4096,
    tokens: Annotated[
        str, typer.Option(help="Sequence length over all ranks, such as 512k or 16M; k and M are powers of 1,024.")
    ] = "16M",
    schedule: Annotated[
        list[str], typer.Option(help="A schedule, with its options; repeat for several. Default: all.")
    ] = [],  # noqa: B006
    mask: Annotated[str, typer.Option(help=f"{MASKS}.")] = "causal",
    batch: Batch = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads; as many as query heads by default.")] = None,
    dim: Dim = 128,
    dtype: Annotated[str, typer.Option(help=f"{DTYPES}; of the real run.")] = "bfloat16",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to look at: first, last, middle, then random ones.")] = 3,
    partners: Annotated[int, typer.Option(min=0, help="Partners that are verified with each of these ranks.")] = 2,
    tokens_per_rank: Annotated[
        int, typer.Option(min=1, help="Tokens a rank at which programs are verified and run; windows shrink likewise.")
    ] = 8,
    proof_ranks: Annotated[
        int, typer.Option(min=2, max=64, help="Ranks of the small world that is verified completely.")
    ] = 32,
    max_scratch: Annotated[
        str, typer.Option(help="Fail if a rank needs more scratch than this, such as 8G. Default: no limit.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of random ranks and partners.")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON report to write.")] = None,
) -> None:
    """Play single ranks of a large world here: build their programs, verify them, run them, check their memory.

    No GPU and no other rank is needed, so the owner of 4,096 GPUs finds surprises at home. Programs are built at the
    full size. They are verified and run at --tokens-per-rank, on the CPU, with messages that are counted and dropped.
    The output says what was proved and what was only sampled. Exits with 1 if anything is wrong.
    """
    from rich.console import Console

    from meshflash.bench import record, tables
    from meshflash.bench.cases import WORST_ERROR
    from meshflash.bench.masks import parse_mask, scaled_mask
    from meshflash.check.rehearsal import Scene, rehearse
    from meshflash.schedules.registry import names, parse

    with explained():
        real_tokens, limit = parse_size(tokens), parse_size(max_scratch) if max_scratch else 0
        if real_tokens < world:
            raise ValueError(f"--tokens {tokens}: expected at least one token for each of {world} ranks")
        known = {str(each).removeprefix("torch."): each.itemsize for each in WORST_ERROR}
        if dtype not in known:
            raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(known)}")
        if heads % (kv_heads or heads):
            raise ValueError(f"--kv-heads {kv_heads}: expected a divisor of {heads} query heads")
        for name in schedule:
            parse(name)
        scene = Scene(
            world,
            real_tokens,
            lambda count, scale: scaled_mask(mask, count, real_tokens, scale),
            heads,
            kv_heads or heads,
            dim,
            known[dtype],
            batch,
            tokens_per_rank,
            ranks,
            partners,
            proof_ranks,
            limit,
            seed,
        )
        parse_mask(mask, real_tokens)
    if output:
        writable(output)
    console = Console()
    outcomes: list[Outcome] = []
    with console.status("rehearse") as status:
        chosen = tuple(schedule) or names()
        for name in chosen:
            place = f"{len(outcomes) + 1} of {len(chosen)}"
            outcomes.append(rehearse(scene, name, partial(_show, status, place)))
    rows = [_row(scene, mask, outcome) for outcome in outcomes]
    console.print(tables.rehearsals(rows))
    looked_at = ", ".join(map(str, outcomes[0].ranks))
    console.print(f"looked at ranks {looked_at}; programs, scratch and bytes are those of the largest of them")
    if scene.small_tokens < scene.tokens:
        console.print(
            f"built at {real_tokens // world:,} tokens a rank; verified and run at {scene.small_tokens / world:.3g}, "
            f"with windows and documents shrunk likewise (--tokens-per-rank), and at a head dim of 16",
            soft_wrap=True,
        )
    for outcome in outcomes:
        if outcome.passed:
            console.print(f"{outcome.schedule}: {outcome.summary}", soft_wrap=True, highlight=False)
        else:
            console.print(f"{outcome.schedule} failed: {outcome.message}", soft_wrap=True, highlight=False)
    if output:
        record.write(output, rows, record.command_line())
        console.print(f"written: {output}", soft_wrap=True)
    failed = [outcome.schedule for outcome in outcomes if not outcome.passed]
    if failed:
        console.print(f"{len(failed)} of {len(outcomes)} schedules failed: {', '.join(failed)}")
        raise typer.Exit(1)


def _show(status: Status, place: str, text: str) -> None:
    """Show what is being done."""
    status.update(f"{place}: {text}")


def _row(scene: Scene, mask: str, outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a flat row of a record."""
    sizes = {
        key: getattr(scene, key)
        for key in ("world", "tokens", "batch", "heads", "kv_heads", "dim", "input_bytes", "small_tokens")
    }
    found = asdict(outcome) | {"ranks": list(outcome.ranks), "passed": outcome.passed}
    return sizes | {"mask": mask} | found
