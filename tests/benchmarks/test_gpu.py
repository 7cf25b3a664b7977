"""Benchmarks on a GPU: every command runs, and judges kernels beyond the dense oracle's reach."""

import pytest
import torch
from typer.testing import CliRunner

from commands import app
from meshflash.bench import record
from meshflash.bench.candidates import DENSE_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LONG = DENSE_TOKENS + 64


@pytest.mark.parametrize(
    "words",
    [
        f"benchmarks lengths --tokens 256 --tokens {LONG} --rounds 2",
        f"bench kernels --tokens 512 --tokens {LONG} --heads 8 --kv-heads 2 --dtype bfloat16 --rounds 2",
        "bench kernels --tokens 512 --dtype bfloat16 --mask documents-lognormal-64 --deterministic --rounds 2",
        f"bench kernels --tokens {LONG} --dtype bfloat16 --mask window-256 --kernel auto --rounds 2",
        f"benchmarks peers --tokens 512 --tokens {LONG} --dim 64 --rounds 2 --kernel triton --kernel fa2 --kernel flex",
        "benchmarks host --rounds 3 --only attention --only short --only matmul",
        "benchmarks host --rounds 3 --only ranks --ranks 2",
        f"benchmarks memory --tokens {LONG} --heads 4",
        "benchmarks model --tokens 256 --tokens 512 --layers 2 --dim 128 --heads 2 --rounds 2",
        "benchmarks ddp --layers 2 --dim 128 --heads 2 --tokens 256 --batch 4 --rounds 2",
    ],
)
def test_commands_on_a_gpu(words, tmp_path):
    result = CliRunner().invoke(app, [*words.split(), "--output", str(tmp_path / "x.json")])
    assert result.exit_code == 0, (result.output, result.exception)
    rows = record.read(tmp_path / "x.json")["rows"]
    assert all(row["device"] == "cuda" for row in rows)
    for row in rows:
        if row.get("note") and not row.get("ours"):
            continue  # a peer that cannot run here
        figure = row.get("ms") or row.get("microseconds") or row.get("ratio")
        assert figure is not None
        assert figure > 0
