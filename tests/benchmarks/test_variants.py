"""Variants of kernel calls: what is measured by default, what is written and shown, and checks that can fail."""

import json
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import variants, variants_table
from commands import app
from meshflash.bench import record
from meshflash.bench.candidates import own_kernel
from meshflash.bench.cases import Case
from meshflash.bench.check import PASSES, WrongError
from meshflash.bench.timing import interleaved
from meshflash.core.tiles import visible_per_query
from meshflash.kernels.contract import Grads
from meshflash.kernels.tiled import Tiled

SMALL = "benchmarks variants --device cpu --tokens 24 --long-tokens 64 --dim 16 --rounds 1"
CASE = Case(tokens=24, batch=2, heads=4, kv_heads=4, head_dim=8)
CALLS = dict.fromkeys((variants.PLAIN, variants.STEP, variants.DETERMINISTIC), CASE)


def invoke(words, *more):
    return CliRunner().invoke(app, [*words.split(), *map(str, more)], env={"COLUMNS": "80"})


def test_default_variants_and_masks_on_a_gpu():
    *calls, short, long = variants.settings("cuda")
    assert [(s["plain"].head_dim, s["plain"].mask) for s in calls] == [
        (dim, mask) for dim in (64, 128) for mask in ("causal", "full")
    ]
    for setting in calls:
        plain = setting["plain"]
        assert (plain.tokens, plain.batch, plain.heads * plain.head_dim, plain.dtype) == (16384, 2, 2048, "bfloat16")
        assert setting["step"] == setting["deterministic"] == plain
        assert ("gqa" in setting) == (plain.mask == "causal")
        if "gqa" in setting:
            assert setting["gqa"] == replace(plain, kv_heads=plain.heads // 4)
            assert setting["gqa"].flops("backward") == plain.flops("backward")
    for dim, setting in ((64, short), (128, long)):
        assert list(setting) == ["causal", "window-4096", "documents"]
        for case in setting.values():
            assert (case.tokens, case.batch, case.heads, case.kv_heads, case.head_dim) == (131072, 1, 8, 8, dim)
        assert setting["window-4096"].flops("forward") < setting["causal"].flops("forward") / 10
    assert variants.default_kernel("cuda") == own_kernel("cuda")


def test_documents_have_32_random_lengths_and_are_deterministic():
    rule = variants.Packed(tokens=4096).rule
    starts = np.flatnonzero(visible_per_query(rule, 4096) == 1)
    lengths = np.diff([*starts, 4096])
    assert len(lengths) == len(starts) == 32
    assert len(set(lengths.tolist())) > 20
    assert rule == variants.Packed(tokens=4096).rule
    with pytest.raises(ValueError, match="32 documents do not fit in 31 tokens"):
        variants.Packed(tokens=31)


def test_variants_writes_a_record_and_shows_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", "variants"])
    output, plot = tmp_path / "variants.json", tmp_path / "variants.png"
    result = invoke(SMALL, "--output", output, "--plot", plot)
    assert result.exit_code == 0, (result.output, result.exception)
    assert plot.stat().st_size > 1000
    assert max(map(len, result.output.splitlines()[:-2])) <= 80
    rows = json.loads(output.read_text())["rows"]
    calls = ["plain", "step", "deterministic"]
    masks = ["causal", "window-256", "documents"]
    expected = [(p, way) for own in ([*calls, "gqa"], calls, masks) for p in PASSES for way in own]
    found = [(row["pass"], row["variant"]) for row in rows]
    assert found == [each for each in expected if each != ("forward", "deterministic")]
    for row in rows:
        assert row["kernel"] == row["ran"] == "tiled"
        assert row["ms"] > 0
        assert row["error"] < 2e-5
        assert row["oracle"] == ("plain" if row["variant"] == "step" else "reference in float64")
        beside = next(
            other
            for other in rows
            if (other["variant"], other["pass"]) == (row["baseline"], row["pass"])
            and (other["mask"] == row["mask"] or row["baseline"] == "causal")
        )
        assert row["ratio"] == pytest.approx(row["tflops"] / beside["tflops"])
        if row["variant"] == "documents":
            pairs = visible_per_query(variants.Packed(tokens=64).rule, 64).sum()
            flops = 4 * 4 * 16 * pairs * (2.5 if row["pass"] == "backward" else 1)
            assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(flops)
    again = invoke("benchmarks variants", "--from", output)
    assert again.output.splitlines() == result.output.splitlines()[:-2]
    shown = invoke("benchmarks variants --markdown", "--from", output).output
    assert shown.startswith("`python -m benchmarks variants` on ")
    assert "| dim | mask | variant | fwd ms | TFLOP/s | x plain | bwd ms | TFLOP/s | x plain |" in shown
    assert "| 16 | causal | deterministic |  |  |  | " in shown
    assert "| dim | variant | fwd ms | TFLOP/s | x causal | bwd ms | TFLOP/s | x causal |" in shown
    assert shown.count("| 1.00 |") >= 2 * 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kernel other", "kernel 'other'"),
        ("--kernel vendor --dtype bfloat16", "float32 partial results"),
        ("--dim 48", "multiple of 4"),
        ("--mask other", "mask 'other'"),
        ("--long-tokens 16", "32 documents do not fit"),
    ],
)
def test_invalid_arguments_name_the_remedy(words, said, tmp_path):
    result = invoke(f"{SMALL} {words}", "--output", tmp_path / "x.json")
    assert result.exit_code == 2, (result.output, result.exception)
    assert said in " ".join(result.output.replace("│", " ").split())


def test_variants_refuses_files_that_are_not_its_record(tmp_path):
    for text in ('{"header": {}, "rows": [{"ms": 1}]}', '{"rows": []}', "no JSON"):
        (tmp_path / "x.json").write_text(text)
        assert invoke("benchmarks variants", "--from", tmp_path / "x.json").exit_code == 2


def test_variants_match_the_oracle_in_other_dtypes_and_kernels():
    for dtype, kernel in (("bfloat16", "tiled"), ("float64", "tiled"), ("float32", "auto")):
        case = replace(CASE, dtype=dtype)
        rows = list(variants.run(dict.fromkeys(CALLS, case), kernel, rounds=1))
        assert len(rows) == 5
        assert all(row.error <= case.worst_error for row in rows)
    assert {row.ran for row in rows} == {"vendor"}
    assert "auto (vendor)" in variants_table.title([record.flat(row) for row in rows])


def wrong_plain(forward, backward):
    def wrong(self, x, outputs=None, carry=None):
        out_BTHE, lse_BHT = forward(self, x, outputs, carry)
        out_BTHE[0, 0] += 1
        return out_BTHE, lse_BHT

    return wrong, backward


def wrong_carry(forward, backward):
    return lambda self, x, outputs=None, carry=None: forward(self, x, outputs), backward


def wrong_sums(forward, backward):
    def wrong(self, x, rows, grads=None):
        return backward(self, x, rows, grads and Grads(grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, add_dq=True))

    return forward, wrong


def without_numbers(forward, backward):
    def wrong(self, x, rows, grads=None):
        made = backward(self, x, rows, grads)
        made.dv_BSKE[0, 0, 0, 0] = torch.nan
        return made

    return forward, wrong


def other_bits(forward, backward):
    calls = count()

    def wrong(self, x, rows, grads=None):
        made = backward(self, x, rows, grads)
        made.dq_BTHD[0, -1] *= 1 + 2.0**-20 * next(calls)
        return made

    return forward, wrong


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (wrong_plain, "plain, forward: relative error .* against reference in float64"),
        (wrong_carry, "step, forward: relative error .* against plain"),
        (wrong_sums, "step, backward: relative error .* against plain"),
        (without_numbers, "plain, backward: relative error nan"),
        (other_bits, "deterministic, backward: two calls differ"),
    ],
)
def test_wrong_variant_is_not_timed(mistake, said, monkeypatch):
    forward, backward = mistake(Tiled.forward, Tiled.backward)
    monkeypatch.setattr(Tiled, "forward", forward)
    monkeypatch.setattr(Tiled, "backward", backward)
    monkeypatch.setattr(variants, "interleaved", None)
    with pytest.raises(WrongError, match=said):
        list(variants.run(CALLS, "tiled", rounds=1))


def test_variant_without_memory_is_shown_as_out_of_memory(monkeypatch):
    def greedy(functions, device, rounds):
        return interleaved({name: call for name, call in functions.items() if name != "step"}, device, rounds)

    monkeypatch.setattr(variants, "interleaved", greedy)
    rows = [record.flat(row) for row in variants.run(CALLS, "tiled", rounds=1)]
    assert [row["variant"] for row in rows if row["ms"] is None] == ["step", "step"]
    assert "| 8 | causal | step | out of memory |  |  | out of memory |  |  |" in variants_table.markdown(rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_variants_on_a_gpu(tmp_path):
    words = "benchmarks variants --tokens 4160 --long-tokens 8256 --rounds 2"
    result = invoke(words, "--output", tmp_path / "x.json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert all(row["ran"] == own_kernel("cuda") and row["ms"] > 0 for row in record.read(tmp_path / "x.json")["rows"])
