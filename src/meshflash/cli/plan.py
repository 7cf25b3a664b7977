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
    from meshflash.core.mask import Mask
    from meshflash.planner.ranking import Case, Prediction

#: What a suffix of a number of tokens stands for.
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
#: The most tokens that can be planned.
MOST_TOKENS = 1 << 34


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

    from meshflash.core.files import write_whole
    from meshflash.planner import hardware, ranking

    if output is not None:
        writable(output)
    with explained():
        count = number_of_tokens(tokens)
        described = hardware.load(machine, per_node)
        case = _case(count, nproc, heads, dim, batch, _mask(mask, documents, count))
        if forward_only:
            case = replace(case, directions=("forward",))
    console, errors = Console(), Console(stderr=True)
    with explained(), errors.status("") as status:
        limit = None if memory is None else memory * 1e9
        ranked = ranking.rank_schedules(case, described, limit, schedule, status.update)
    title = f"{count:,} tokens over {nproc} ranks of {described.title}"
    console.print(table(ranked, title, documents.name if documents else mask, described))
    for refused in (each for each in ranked if each.refused):
        console.print(f"refused: {refused.text}: {refused.refused}", soft_wrap=True)
    console.print(ranking.why(ranked), soft_wrap=True)
    if output is not None:
        data = {"machine": described.title, "sources": dict(described.sources), "plan": [asdict(p) for p in ranked]}
        write_whole(output, json.dumps(data, indent=1) + "\n")
        console.print(f"written: {output}", soft_wrap=True)


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


def _case(tokens: int, nproc: int, heads: str, dim: int, batch: int, mask: Mask) -> Case:
    from meshflash.core.program import Sizes
    from meshflash.planner.ranking import Case

    query_heads, _, kv_heads = heads.partition("/")
    if not (query_heads.isdecimal() and (kv_heads or query_heads).isdecimal()):
        raise ValueError(f"heads={heads!r}: expected query heads, or query heads / KV heads, such as 32/8")
    counts = int(query_heads), int(kv_heads or query_heads)
    if not (1 <= counts[1] <= counts[0] and counts[0] % counts[1] == 0):
        raise ValueError(f"heads={heads!r}: expected a number of KV heads that divides the query heads")
    return Case(tokens, nproc, mask, *counts, Sizes(batch=batch, dim=dim, value_dim=dim))


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


def table(ranked: list[Prediction], title: str, mask: str, machine: Any) -> Any:
    """Return the predictions as a table for the terminal.

    Args:
        ranked: What `rank_schedules` returned.
        title: What was planned, in words.
        mask: The mask in words.
        machine: The machine.
    """
    from meshflash.bench.columns import Column, terminal

    def part(name: str) -> Any:
        return lambda row: "" if row["refused"] else f"{row[name] / row['seconds']:.1%}"

    columns = (
        Column("schedule", lambda row: row["text"], is_text=True),
        Column("layout", "layout", is_text=True),
        Column("ms", lambda row: "" if row["refused"] else f"{row['seconds'] * 1e3:,.2f}"),
        Column("eff.", lambda row: "" if row["refused"] else f"{row['efficiency']:.3f}"),
        Column("kernels", part("kernels")),
        Column("uneven\nwork", part("imbalance")),
        Column("comm", part("communication")),
        Column("recv\n(MB)", lambda row: f"{row['received_bytes'] / 1e6:,.0f}" if row["memory_bytes"] else ""),
        Column("GB", lambda row: f"{row['memory_bytes'] / 1e9:.2f}" if row["memory_bytes"] else ""),
    )
    rows = [asdict(each) | {"text": each.text} for each in ranked]
    sources = "; ".join(dict.fromkeys((machine.sources["kernels"], *(link.source for link in machine.links))))
    caption = (
        f"{mask}; predicted, nothing ran. ms: of the slowest rank. eff.: over one call on one device, for each rank; "
        "it may exceed 1, because whole blocks compute faster than causal ones. Lost to kernels: attention slower than "
        "one call; to uneven work of ranks; to comm: waits for messages. recv and GB: of the rank with the most, "
        f"tensors and buffers of the call. Sources: {sources}"
    )
    return terminal(title, columns, rows, caption=caption)
