"""The verifier refuses each way in which a program can be wrong, and each of its checks refuses one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from core import wrong_buffers, wrong_steps
from core.edits import Made, Wrong, programs_of
from meshflash.core import symbols, verify
from meshflash.core.program import Program
from meshflash.core.verify import Report, VerificationError, verify_programs

WRONG = [*wrong_buffers.WRONG, *wrong_steps.WRONG]


def with_edit(wrong: Wrong) -> list[Program]:
    return [wrong.edit(p) if p.rank in wrong.ranks else p for p in programs_of(*wrong.made)]


def prove(programs: list[Program], made: Made) -> Report:
    """What is made of programs, after the forward if they are of a backward."""
    schedule, direction, problem = made
    after = verify_programs(programs_of(schedule, "forward", problem), problem) if direction == "backward" else None
    return verify_programs(programs, problem, after=after)


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_what_is_wrong_is_refused(wrong: Wrong) -> None:
    prove(programs_of(*wrong.made), wrong.made)
    with pytest.raises(VerificationError, match=wrong.message):
        prove(with_edit(wrong), wrong.made)


def test_every_check_refuses_one_of_them() -> None:
    """A new check of the verifier wants a new row in one of the tables."""
    files = {str(module.__file__): Path(str(module.__file__)).read_text().splitlines() for module in (symbols, verify)}
    checks = {
        (file, n)
        for file, lines in files.items()
        for n, line in enumerate(lines, 1)
        if ".fail(" in line and "tables" not in line
    }
    hit = set()
    for wrong in WRONG:
        with pytest.raises(VerificationError) as error:
            prove(with_edit(wrong), wrong.made)
        hit |= {(str(entry.path), entry.lineno + 1) for entry in error.traceback}
    assert [files[file][n - 1].strip() for file, n in sorted(checks - hit)] == []
