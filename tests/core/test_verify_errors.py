"""The verifier refuses wrong programs, and each of its checks is exercised by one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from core import wrong_buffers, wrong_steps
from core.edits import Made, Wrong, programs_of
from meshflash.core import delivery, symbols
from meshflash.core.program import Program
from meshflash.core.verify import Report, VerificationError, verify_programs

WRONG = [*wrong_buffers.WRONG, *wrong_steps.WRONG]


def apply_edit(wrong: Wrong) -> list[Program]:
    return [wrong.edit(p) if p.rank in wrong.ranks else p for p in programs_of(*wrong.made)]


def verify(programs: list[Program], made: Made) -> Report:
    """Verify programs; a backward after its forward."""
    schedule, direction, problem = made
    after = verify_programs(programs_of(schedule, "forward", problem), problem) if direction == "backward" else None
    return verify_programs(programs, problem, after=after)


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_verifier_refuses_wrong_programs(wrong: Wrong) -> None:
    verify(programs_of(*wrong.made), wrong.made)
    with pytest.raises(VerificationError, match=wrong.message):
        verify(apply_edit(wrong), wrong.made)


def test_every_check_of_the_verifier_is_exercised() -> None:
    """A new check of the verifier needs a new row in `wrong_buffers` or `wrong_steps`."""
    files = {
        str(module.__file__): Path(str(module.__file__)).read_text().splitlines() for module in (symbols, delivery)
    }
    checks = {
        (file, n)
        for file, lines in files.items()
        for n, line in enumerate(lines, 1)
        if ".fail(" in line and "tables" not in line
    }
    hit = set()
    for wrong in WRONG:
        with pytest.raises(VerificationError) as error:
            verify(apply_edit(wrong), wrong.made)
        hit |= {(str(entry.path), entry.lineno + 1) for entry in error.traceback}
    assert [files[file][n - 1].strip() for file, n in sorted(checks - hit)] == []
