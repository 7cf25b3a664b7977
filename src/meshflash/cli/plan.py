"""`meshflash plan`: predict which schedule is fastest on a machine, without running anything. Needs no torch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshflash.cli.bench_options import MASKS, Dim, explained
from meshflash.cli.outputs import writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from meshflash.core.mask import Mask
    from meshflash.planner.hardware import Machine
    from meshflash.planner.ranking import PlannedCall, Prediction

#: What a suffix of a number of tokens stands for.
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
#: The most tokens that can be planned.
MOST_TOKENS = 1 << 26


def command(
    tokens: Annotated[str, typer.Option(help="Sequence length over all ranks; 128K is 131,072, and 1M 1,048,576.")],
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=1, help="Ranks that share the sequence.")],
    heads: Annotated[str, typer.Option(help="Query heads, or query heads / KV heads.")] = "32/8",
    dim: Dim = 128,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    mask: Annotated[str, typer.Option(help=f"{MASKS}.")] = "causal",
    documents: Annotated[
        Path | None, typer.Option(help="A file with the length of a packed document on each line, in place of --mask.")
    ] = None,
    machine: Annotated[str, typer.Option(help="A machine that ships, or the path of a description.")] = "h200",
    per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of a node, if not as the machine says.")] = None,
    memory: Annotated[float | None, typer.Option(min=0, help="GB that a rank may use for the call.")] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help="A schedule, with options as in hybrid(inner=4); repeat. All by default.")
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Plan the forward alone.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file to write the predictions to.")] = None,
) -> None:
    """Predict times, bytes and memory of every schedule on a machine, and say which one wins and why."""
    from rich.console import Console
    from rich.markup import escape

    from meshflash.core.files import write_whole
    from meshflash.planner import hardware, ranking

    if output is not None:
        writable(output)
    with explained():
        count = number_of_tokens(tokens)
        described = hardware.load(machine, per_node)
        call = _planned_call(count, nproc, heads, dim, batch, _mask(mask, documents, count))
        if forward_only:
            call = replace(call, directions=("forward",))
    console, errors = Console(), Console(stderr=True)
    limit = described.memory_bytes if memory is None else memory * 1e9
    with explained(), errors.status("") as status:
        tell = lambda text: status.update(escape(text))  # noqa: E731
        ranked = ranking.rank_schedules(call, described, limit, schedule, tell)
    title = f"{count:,} tokens over {nproc} rank{'s' * (nproc > 1)} of {described.title}"
    console.print(table(ranked, title, documents.name if documents else mask, described))
    lines = [f"refused: {each.text}: {each.unsupported_reason}" for each in ranked if each.unsupported_reason]
    lines.append(ranking.explain_ranking(ranked))
    if output is not None:
        asked = asdict(call) | {"mask": str(call.mask), "memory_limit_bytes": limit}
        links = [asdict(link) for link in described.links]
        about = {"title": described.title, "sources": dict(described.sources), "links": links}
        data = {"call": asked, "machine": about, "plan": [asdict(each) for each in ranked]}
        write_whole(output, json.dumps(data, indent=1) + "\n")
        lines.append(f"written: {output}")
    for line in filter(None, lines):
        console.print(escape(line), soft_wrap=True)


def number_of_tokens(text: str) -> int:
    """Return the number of tokens of a text such as 8192, 128K or 1M.

    >>> number_of_tokens("128K"), number_of_tokens("1,000")
    (131072, 1000)
    """
    match = re.fullmatch(r"(\d{1,12})([km]?)", text.replace(",", "").strip().lower())
    count = int(match[1]) * UNITS[match[2]] if match else 0
    if not 1 <= count <= MOST_TOKENS:
        raise ValueError(f"tokens={text!r}: expected a number from 1 to {MOST_TOKENS:,}, such as 8192, 128K or 1M")
    return count


def _planned_call(tokens: int, nproc: int, heads: str, dim: int, batch: int, mask: Mask) -> PlannedCall:
    from meshflash.core.program import Sizes
    from meshflash.planner.ranking import PlannedCall

    query_heads, _, kv_heads = heads.partition("/")
    if not (query_heads.isdecimal() and (kv_heads or query_heads).isdecimal()):
        raise ValueError(f"heads={heads!r}: expected query heads, or query heads / KV heads, such as 32/8")
    counts = int(query_heads), int(kv_heads or query_heads)
    if not (1 <= counts[1] <= counts[0] and counts[0] % counts[1] == 0):
        raise ValueError(f"heads={heads!r}: expected a number of KV heads that divides the query heads")
    return PlannedCall(tokens, nproc, mask, *counts, Sizes(batch=batch, dim=dim, value_dim=dim))


def _mask(name: str, documents: Path | None, tokens: int) -> Mask:
    from meshflash.bench.masks import parse_mask
    from meshflash.core.mask import Mask
    from meshflash.core.reading import read_bytes

    if documents is None:
        return parse_mask(name, tokens)
    try:
        lengths = [int(line) for line in read_bytes(documents).decode().split()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{documents}: expected the length of a document on each line ({error})") from None
    if not lengths or min(lengths) < 1 or sum(lengths) > tokens:
        raise ValueError(f"{documents}: expected lengths > 0 that add up to at most {tokens:,} tokens")
    return Mask.causal() & Mask.documents(lengths, pad=True)


def table(ranked: list[Prediction], title: str, mask: str, machine: Machine) -> Table:
    """Return the predictions as a table for the terminal.

    Args:
        ranked: What `rank_schedules` returned.
        title: What was planned, in words.
        mask: The mask in words.
        machine: The machine.
    """
    from rich.markup import escape

    from meshflash.bench.columns import Column, terminal

    def if_it_runs(cell: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda row: cell(row) if row["seconds"] and not row["unsupported_reason"] else ""

    def lost(header: str, part: str) -> Column:
        return Column(header, if_it_runs(lambda row: f"{row[part] / row['seconds']:.1%}"))

    columns = (
        Column("schedule", lambda row: escape(row["text"]), is_text=True),
        Column("layout", lambda row: escape(row["layout"]), is_text=True),
        Column("ms", if_it_runs(lambda row: f"{row['seconds'] * 1e3:,.2f}")),
        Column("eff.", if_it_runs(lambda row: f"{row['efficiency']:.3f}")),
        lost("kernels", "kernels"),
        lost("steps", "steps"),
        lost("imbal-\nance", "imbalance"),
        lost("comm", "communication"),
        Column("recv\n(MB)", lambda row: f"{row['received_bytes'] / 1e6:,.0f}" if row["memory_bytes"] else ""),
        Column("GB", lambda row: f"{row['memory_bytes'] / 1e9:.2f}" if row["memory_bytes"] else ""),
    )
    rows = [asdict(each) | {"text": each.text} for each in ranked]
    sources = "; ".join(dict.fromkeys((*machine.sources.values(), *(link.source for link in machine.links))))
    caption = (
        f"{mask}; predicted, nothing ran. ms: of the slowest rank. eff.: over one call on a single device, for each "
        "rank; it may exceed 1, because whole blocks compute faster than causal ones. Lost, as means over ranks, to "
        "kernels: attention below the rate of a single call; steps: copies, sums, merges; load imbalance; comm: waits "
        f"for messages. recv and GB: of the rank with the most, tensors and buffers of the call. Sources: {sources}"
    )
    return terminal(escape(title), columns, rows, caption=escape(caption), dense=True)
