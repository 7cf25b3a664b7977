"""The worklist benchmark: its record, and what it counts."""

import json

from typer.testing import CliRunner

from commands import app


def test_tiles_writes_a_record(tmp_path):
    output = tmp_path / "tiles.json"
    arguments = ["benchmarks", "tiles", "--tokens", "64", "--documents", "5", "--ranks", "4", "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["rows"]
    assert [row["layout"] for row in rows] == ["contiguous", "zigzag", "striped"]
    assert all(row["all_spans"] >= row["step_spans"] > 0 and row["all_ms"] > 0 for row in rows)


def test_more_documents_than_tokens_are_refused(tmp_path):
    arguments = ["benchmarks", "tiles", "--tokens", "4", "--documents", "5", "--output", str(tmp_path / "x.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "do not fit" in result.output
