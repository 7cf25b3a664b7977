"""The benchmark of large worlds: its record, and what it counts."""

import json

from typer.testing import CliRunner

from commands import app

RUN = ["benchmarks", "scale", "--world", "8", "--schedule", "ring", "--schedule", "hybrid(inner=8)", "--documents", "0"]


def test_scale_writes_a_record_of_every_schedule_and_mask(tmp_path):
    output = tmp_path / "scale.json"
    result = CliRunner().invoke(app, [*RUN, "--output", str(output)])
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["rows"]
    assert [(row["name"], row["mask"]) for row in rows] == [
        (name, mask) for name in ("ring", "hybrid(inner=8)") for mask in ("causal", "window", "documents")
    ]
    assert all(row["build_ms"] > 0 and row["megabytes"] > 0 and row["steps"] > 1 for row in rows)
    assert [row["packing_ms"] is not None for row in rows] == [False, False, True] * 2
