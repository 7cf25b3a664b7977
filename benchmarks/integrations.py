"""Models of Transformers under context parallelism, ours and others': which are right, refused, or silently wrong.

Each cell trains one step over two ranks and compares logits, loss and every gradient with one device, in float32. The
ranks run in `integration_ranks`, in the interpreter that has the peers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from benchmarks.integration_cases import FEATURES, MODELS, applies
from benchmarks.integration_ranks import TOLERANCE, WORLD
from benchmarks.protocol import Benchmark, Rows
from meshflash.bench.columns import Column, Row, terminal
from meshflash.bench.columns import markdown as write_markdown
from meshflash.bench.measure import Say
from meshflash.runtime.listen import LOOPBACK

ROOT = Path(__file__).parents[1]
RIGHT, WRONG, REFUSED, NO_ANSWER, NEEDS_GPU, ABSENT, NONE = (
    "right",
    "wrong",
    "refused",
    "no answer",
    "needs a GPU",
    "not installed",
    "",
)
#: What each verdict means, for the words below a table.
CAPTION = (
    f"right: all errors below {TOLERANCE:g} of the largest value; wrong: no error is raised, and this is the largest "
    "one; refused: an error is raised; no answer: a rank hangs or dies; needs a GPU: no kernel for CPUs"
)


@dataclass(frozen=True)
class IntegrationRow:
    """One model and feature under one peer.

    `error` is the largest of the errors of logits, loss and gradients; None if there is none, or if it is not finite.
    """

    peer: str
    title: str
    version: str
    model: str
    feature: str
    verdict: str
    error: float | None
    errors: dict[str, float | None]
    note: str


class Ranks:
    """A process that runs cells. The command makes it, and enters it as a context.

    Args:
        python: The interpreter that has the peers.
        peers: The module or file that has `PEERS`.
    """

    def __init__(self, python: str, peers: str) -> None:
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
        variables = dict(PYTHONPATH=os.pathsep.join(filter(None, paths)), OMP_NUM_THREADS="1")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "benchmarks.integration_ranks", peers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | variables | {"GLOO_SOCKET_IFNAME": interface},
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def ask(self, **cell: Any) -> dict[str, Any]:
        """Return the answer to a cell, or to the question for a peer's versions.

        Args:
            cell: `peer`, and for a cell also `model`, `feature` and `seconds`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(cell), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            raise ValueError(
                f"--python: its process ended: {(self._log.read().strip() or 'no output').splitlines()[-1]}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(
    ranks: Ranks, peers: Iterable[tuple[str, str]], models: Iterable[str], seconds: float, say: Say
) -> Iterator[IntegrationRow]:
    """Yield a row for each peer, model and feature.

    Args:
        ranks: The process that runs cells.
        peers: The peers, each with its title.
        models: The models.
        seconds: How long a cell may take.
        say: A function that is called with progress messages.
    """
    for peer, title in peers:
        say(f"{title}: importing")
        found = ranks.ask(peer=peer)
        version = found.get("version", "")
        for model in models:
            for feature in FEATURES:
                say(f"{title}, {model}, {feature}")
                verdict, note = NONE, ""
                errors: dict[str, float | None] = {}
                if "missing" in found:
                    verdict, note = ABSENT, found["missing"]
                elif applies(model, feature):
                    answer = ranks.ask(peer=peer, model=model, feature=feature, seconds=seconds)
                    verdict, errors, note = judge(answer["answers"])
                yield IntegrationRow(peer, title, version, model, feature, verdict, _largest(errors), errors, note)


def judge(answers: list[dict[str, Any] | None]) -> tuple[str, dict[str, float | None], str]:
    """Return the verdict on a cell, its errors, and the error that was raised.

    Args:
        answers: What each rank answered; None for a rank that did not.
    """
    given = [answer for answer in answers if answer is not None]
    raised = [answer for answer in given if "error" in answer]
    died = [(rank, a["died"]) for rank, a in enumerate(answers) if a is not None and "died" in a]
    if died:  # what others raise follows from it
        return NO_ANSWER, {}, f"rank {died[0][0]} died with {died[0][1]}"
    if raised:
        first = min(raised, key=lambda answer: answer["needs_gpu"])
        return (NEEDS_GPU if first["needs_gpu"] else REFUSED), {}, first["error"]
    if len(given) < len(answers):
        return NO_ANSWER, {}, f"rank {answers.index(None)} did not answer in time"
    if any("inapplicable" in answer for answer in given):
        return NONE, {}, ""
    errors = _worst(answer["errors"] for answer in given)
    largest = _largest(errors)
    if largest is not None and largest <= TOLERANCE:
        return RIGHT, errors, ""
    if any(answer["needs_gpu"] for answer in given):
        return NEEDS_GPU, {}, "the kernel that stands in for one of GPUs lacks what this model needs"
    return WRONG, errors, ""


def _worst(found: Iterable[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the largest error of each kind over ranks; None is not a finite number, and larger than all."""
    worst: dict[str, float | None] = {}
    for errors in found:
        for what, error in errors.items():
            other = worst.get(what, 0.0)
            worst[what] = None if error is None or other is None else max(error, other)
    return worst


def _largest(errors: dict[str, float | None]) -> float | None:
    finite = [error for error in errors.values() if error is not None]
    return max(finite) if finite and len(finite) == len(errors) else None


def title(rows: Rows) -> str:
    """Return what was measured, in words.

    Args:
        rows: The rows of a record.
    """
    return f"Training steps over {WORLD} gloo ranks against one device, float32"


def tables(rows: Rows) -> list[RenderableType]:
    """Return the table, the versions, and what was refused and why.

    Args:
        rows: The rows of a record.
    """
    table = terminal(title(rows), _columns(once=True), _lines(rows), "model", CAPTION)
    return [table, *(Text(line) for line in [*versions(rows), *notes(rows)])]


def markdown(rows: Rows) -> str:
    """Return the table for a document.

    Args:
        rows: The rows of a record.
    """
    return write_markdown(_columns(once=False), _lines(rows))


def versions(rows: Rows) -> list[str]:
    """Return the versions of each peer.

    Args:
        rows: The rows of a record.
    """
    return list(dict.fromkeys(f"{row['title']}: {row['version'] or ABSENT}" for row in rows))


def notes(rows: Rows) -> list[str]:
    """Return what was raised, each message once, with the cells.

    Args:
        rows: The rows of a record.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["note"] and row["verdict"] != ABSENT:
            key = row["title"], f"{row['verdict']}: {row['note']}"
            found.setdefault(key, []).append(f"{row['model']} {row['feature']}")
    return [f"{peer}, {', '.join(cells)}: {note}" for (peer, note), cells in found.items()]


def _lines(rows: Rows) -> list[Row]:
    """Return a row of the table for each model and peer."""
    lines: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: list(MODELS).index(row["model"])):
        words = f"{row['model']}: {MODELS[row['model']]}"
        line = lines.setdefault((row["model"], row["title"]), {"model": words, "title": row["title"]})
        line[row["feature"]] = _cell(row)
    return list(lines.values())


def _cell(row: Row) -> str:
    verdict, error = row["verdict"], row["error"]
    if verdict != WRONG:
        return verdict or "-"
    return f"{WRONG}: not finite" if error is None else f"{WRONG}: {error:.2g}"


def _columns(once: bool) -> list[Column]:
    return [
        Column("model", "model", is_text=True, once=once),
        Column("with", "title", is_text=True),
        *(Column(feature, lambda row, feature=feature: row[feature], is_text=True) for feature in FEATURES),  # type: ignore[misc]
    ]


BENCHMARK = Benchmark("integrations", frozenset({"peer", "feature", "verdict"}), tables, markdown, title)
