"""The Python in the README and the guide runs as it stands, and the pictures are what their commands draw."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshflash.cli import app
from meshflash.schedules.registry import names, unregister_schedule

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{n}")
    for page in PAGES
    for n, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block):
    before = names()
    exec(compile(block, "docs", "exec"), {})
    for name in set(names()) - set(before):
        unregister_schedule(name)


def test_there_are_blocks():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_are_those_of_proved_programs(picture, tmp_path):
    pages = "\n".join(page.read_text() for page in PAGES)
    command = re.search(rf"`meshflash (draw .*? --svg docs/images/{picture.name})`", pages)
    assert command is not None
    words = shlex.split(command[1])
    result = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "again.svg")], catch_exceptions=False)
    assert "proved right" in result.output
    assert (tmp_path / "again.svg").read_text() == picture.read_text()
