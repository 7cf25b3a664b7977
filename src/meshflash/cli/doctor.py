"""`meshflash doctor`: examine this machine, and print what works, what does not, and how to fix it."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshflash import __version__
from meshflash.runtime.doctor import Finding, examine

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Examine this machine: versions, devices, kernels, launchers, limits. Exits 1 if there is a problem."""
    findings = examine()
    problems = [finding for finding in findings if finding.status == "problem"]
    if as_json:
        report = {
            "version": __version__,
            "problems": len(problems),
            "findings": [asdict(finding) for finding in findings],
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        Console().print(_table(findings), _summary(problems))
    raise typer.Exit(1 if problems else 0)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        for row, finding in enumerate(group):
            detail = Text(finding.detail)
            if finding.status == "note" and finding.advice:
                detail.append(f"\n{finding.advice}", style="dim")
            status = Text(finding.status, style=_STYLES[finding.status])
            table.add_row(Text("" if row else topic), Text(finding.name), status, detail)
        table.add_row()
    return table


def _summary(problems: list[Finding]) -> Group:
    if not problems:
        return Group(Text("No problems found.", style=_STYLES["ok"]))
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines: list[Text | Padding] = [Text(f"{count} found:", style=_STYLES["problem"])]
    for finding in problems:
        lines.append(Text(f"{finding.topic}, {finding.name}: {finding.detail}"))
        lines.append(Padding(Text(finding.advice, style="bold"), (0, 0, 0, 4)))
    return Group(*lines)
