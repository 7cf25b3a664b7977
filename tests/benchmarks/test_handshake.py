"""The handshake benchmark: its record, and the calls that it counts."""

import json

from typer.testing import CliRunner

from commands import app


def test_handshake_writes_a_record_and_shows_it_again(tmp_path):
    output = tmp_path / "handshake.json"
    words = "benchmarks handshake --clients 3 --counted 40 --rounds 2 --output"
    result = CliRunner().invoke(app, [*words.split(), str(output)])
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["rows"]
    exchanges = ["init", "first call", "new call"]
    assert [(row["clients"], row["store"], row["exchange"]) for row in rows] == [
        *((3, "TCP", name) for name in exchanges),
        *((40, "memory", name) for name in exchanges),
    ]
    for row in rows:
        deleted = 3 * (row["exchange"] == "new call")
        assert row["calls"] <= 4
        assert row["rank_0_calls"] <= 4 + deleted
        assert row["all_calls"] == 3 * row["clients"] + 1 + deleted
        assert (row["seconds"] is None) == (row["store"] == "memory")
    again = CliRunner().invoke(app, ["benchmarks", "handshake", "--from", str(output)])
    assert again.stdout.splitlines() == result.stdout.splitlines()[:-1]  # the last line names the file
