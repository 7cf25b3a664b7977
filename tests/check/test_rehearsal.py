"""Rehearsals: every schedule passes at 96 ranks, and broken schedules, programs and engines are told."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshflash.check import rehearsal
from meshflash.check.rehearsal import Scene, object_bytes, rehearse
from meshflash.cli import app
from meshflash.cli.rehearse import parse_size
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Attend, Post, Program
from meshflash.schedules import ring
from meshflash.schedules.registry import build_program, names, register_schedule, unregister_schedule

SMALL = Scene(96, 96 * 64, lambda tokens, scale: Mask.causal(), 4, 2, tokens_per_rank=2, proof_ranks=6)


def run_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["rehearse", *arguments])


@pytest.mark.parametrize("schedule", names())
def test_every_schedule_passes_a_rehearsal_of_96_ranks(schedule: str) -> None:
    told: list[str] = []
    outcome = rehearse(SMALL, schedule, told.append)
    assert outcome.message == ""
    assert outcome.passed
    assert outcome.ranks == (0, 48, 95)
    assert outcome.verified == "3 of 96"
    assert "6 ranks of the same layout are right as a world of their own" in outcome.summary
    assert all(value > 0 for value in (outcome.steps, outcome.build_ms, outcome.program_bytes, outcome.run_ms))
    assert outcome.received_bytes
    assert any("verify backward of rank 48" in text for text in told)


def test_scratch_of_a_ring_does_not_grow_with_the_world_and_that_of_a_gather_does() -> None:
    scene = replace(SMALL, mask=lambda tokens, scale: Mask.full())
    assert rehearse(scene, "ring").scratch_growth == 1.0
    growth = rehearse(scene, "allgather").scratch_growth
    assert growth is not None
    assert growth > 1.9


def test_a_small_world_is_verified_completely() -> None:
    outcome = rehearse(replace(SMALL, world=8, tokens=64), "zigzag")
    assert (outcome.verified, outcome.message) == ("all ranks", "")
    assert outcome.summary == "proved: all 8 ranks together; sampled: nothing"


def test_too_much_scratch_is_a_failure() -> None:
    outcome = rehearse(replace(SMALL, max_scratch=1000), "allgather")
    assert not outcome.passed
    assert "bytes of scratch, more than the limit of 1,000" in outcome.message


@pytest.fixture
def broken() -> Iterator[str]:
    """Register a ring that leaves out its last attention on ranks beyond the first 64: small worlds are right."""

    def forward(problem: Problem, rank: int, name: str) -> Program:
        program = ring.forward(problem, rank, name)
        last = max(n for n, step in enumerate(program.steps) if isinstance(step, Attend))
        if rank < 64:
            return program
        return replace(program, steps=(*program.steps[:last], *program.steps[last + 1 :]))

    register_schedule("broken", forward, ring.backward)
    yield "broken"
    unregister_schedule("broken")


def test_a_broken_schedule_fails_and_the_command_exits_with_1(broken: str, tmp_path: Path) -> None:
    output = tmp_path / "rehearsal.json"
    arguments = ["-n", "96", "--tokens", "1k", "--heads", "2", "--tokens-per-rank", "2", "--proof-ranks", "4"]
    result = run_command(*arguments, "--schedule", broken, "--schedule", "ring", "--output", str(output))
    assert result.exit_code == 1
    assert "verify: VerificationError: forward of rank 95: output out" in result.output
    assert "1 of 2 schedules failed: broken" in result.output
    rows = json.loads(output.read_text())["rows"]
    assert [row["passed"] for row in rows] == [False, True]
    assert (rows[1]["world"], rows[1]["tokens"], rows[1]["ranks"]) == (96, 1024, [0, 48, 95])


def test_a_builder_that_raises_is_one_failed_schedule() -> None:
    def forward(problem: Problem, rank: int, name: str) -> Program:
        raise KeyError(rank)

    register_schedule("raising", forward, ring.backward)
    try:
        outcome = rehearse(SMALL, "raising")
    finally:
        unregister_schedule("raising")
    assert outcome.message == "build: KeyError: 0"


@pytest.mark.parametrize("wrong", ["scratch", "bytes"])
def test_scratch_and_bytes_must_be_those_of_the_program(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "scratch":
        monkeypatch.setattr(Program, "scratch_bytes", lambda self, sizes: 1)
        message = "bytes of scratch, not 1"
    else:
        monkeypatch.setattr(rehearsal.Loopback, "_copy_own", lambda self, *given: self._rank)
        message = "0 bytes were received, not"
    outcome = rehearse(SMALL, "ring")
    assert outcome.message.startswith("run: RuntimeError: ")
    assert message in outcome.message


def test_command_prints_one_table_and_says_what_was_reduced() -> None:
    arguments = ["-n", "70", "--tokens", "70k", "--heads", "4", "--kv-heads", "2", "--mask", "window-2048"]
    result = run_command(*arguments, "--schedule", "ring", "--tokens-per-rank", "3", "--proof-ranks", "4")
    assert result.exit_code == 0, result.output
    assert "71,680 tokens over 70 ranks, window-2048, 4 heads, 2 KV heads" in result.output
    assert "built at 1,024 tokens a rank; verified and run at 3" in result.output
    assert "proved: 3 ranks and" in result.output
    assert "sampled: " in result.output


def test_the_rehearsal_of_the_docs_prints_their_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checking.md").read_text()
    commands = re.findall(r"^meshflash rehearse (-n .*)$", page, re.MULTILINE)
    shown = re.search(r"The last command prints\n\n```text\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    result = run_command(*shlex.split(commands[-1]))
    assert result.exit_code == 0, result.output

    def rows(text: str) -> list[list[str]]:
        """Return the rows of the table without times and the memory of objects, which differ between machines."""
        cells = [line.split() for line in text.splitlines() if line.startswith(("ring ", "allgather "))]
        return [[*row[:2], *row[4:]] for row in cells]

    assert rows(result.output) == rows(shown[1]) != []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "expected a number such as 4096, 512k or 16M"),
        (["--tokens", "16T"], "expected a number such as 4096, 512k or 16M"),
        (["-n", "4096", "--tokens", "1k"], "expected at least one token for each of 4096 ranks"),
        (["--schedule", "rings"], "expected one of auto"),
        (["--mask", "windows-3"], "expected full, causal, window-N"),
        (["--dtype", "int8"], "expected one of float32"),
        (["--heads", "6", "--kv-heads", "4"], "expected a divisor of 6 query heads"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str) -> None:
    result = run_command(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_sizes_have_binary_suffixes() -> None:
    assert [parse_size(text) for text in ("7", "2k", "16M", "1G", " 3m ")] == [7, 2048, 1 << 24, 1 << 30, 3 << 20]


def test_bytes_of_a_program_count_each_object_once() -> None:
    layout = Layout.contiguous(16, 8)
    programs = [build_program("ring", layout, Mask.full(), rank) for rank in (0, 1)]
    alone = object_bytes(programs[:1])
    assert alone < object_bytes(programs) < 2 * alone + 1
    assert object_bytes([programs[0], programs[0]]) < alone + 100
    assert sum(isinstance(step, Post) for step in programs[0].steps) * 100 < alone
