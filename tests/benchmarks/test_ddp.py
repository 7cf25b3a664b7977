"""`python -m benchmarks ddp`: what it writes, what MPS gives each rank, and that losses that differ are an error."""

import math
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import ddp, training
from benchmarks.ddp import WHOLE_GPU
from benchmarks.training import Training, check_losses
from commands import app
from meshflash.bench import record

SMALL = Training(layers=1, dim=32, heads=2, vocabulary=64, tokens=16, batch=4)


def invoke(words, *more):
    return CliRunner().invoke(app, [*words.split(), *map(str, more)], env={"COLUMNS": "80"})


def lonely(rank, world, tell, case, rounds):
    """Ranks that do not sum their gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "parallelize", lambda model, mesh, compute_dtype=None: model)
        return ddp.train(rank, world, tell, case, rounds, "").loss


def train(rank, world, group, *args):
    return ddp.train(rank, world, lambda _: None, *args)


def steps(rank, world, group):
    told: list[str] = []
    found = [ddp.train(rank, world, told.append, SMALL, 3, f"{world}")]
    found.append(ddp.train(rank, world, told.append, replace(SMALL, dtype="bfloat16"), 1, "half"))
    return found, lonely(rank, world, told.append, SMALL, 3), told


def test_losses_of_two_ranks_match_a_single_rank(pool):
    both, (alone,) = pool.run(2, steps), pool.run(1, steps)
    for dtype, one, *two in zip(("float32", "bfloat16"), alone[0], *(found for found, _, _ in both), strict=True):
        check_losses({"one": one.loss} | {f"{n}": rank.loss for n, rank in enumerate(two)}, dtype)
        assert one.backend == ""
        assert [rank.backend for rank in two] == ["gloo", "gloo"]
        assert len({len(rank.ms) for rank in (one, *two)}) == 1
        assert all(ms > 0 for rank in two for ms in rank.ms)
    assert len(alone[0][0].ms) == 3
    assert alone[0][0].loss < math.log(64)  # it learns
    with pytest.raises(RuntimeError, match="it is wrong"):
        check_losses({"one": alone[0][0].loss, "apart": both[0][1]}, "float32")
    assert both[0][2][:2] == ["2: building the model", "2: warming up"]
    assert both[1][2] == []


def test_ddp_writes_a_record_and_shows_it_again(tmp_path, monkeypatch, pool):
    monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", "ddp"])
    # ranks that have started already
    monkeypatch.setattr(ddp, "run_ranks", lambda world, function, *args, **options: pool.run(world, train, *args))
    output, plot = tmp_path / "ddp.json", tmp_path / "ddp.png"
    words = "benchmarks ddp --device cpu --nproc 2 --layers 1 --dim 32 --heads 2 --vocabulary 64 --tokens 16 --rounds 1"
    result = invoke(words, "--output", output, "--plot", plot)
    assert result.exit_code == 0, result.output
    one, two = record.read(output)["rows"]
    assert (one["ranks"], two["ranks"]) == (1, 2)  # one is measured whatever is asked
    assert (one["speedup"], one["efficiency"]) == (1.0, 1.0)
    assert two["speedup"] == pytest.approx(one["ms"] / two["ms"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    assert two["tokens_per_second"] == pytest.approx(4 * 16 / two["ms"] * 1e3)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert (two["threads"], two["gpu_percent"], two["vs_whole_gpu"]) == (1, None, None)
    assert two["gradient_bytes"] == 4 * SMALL.config.num_parameters
    assert plot.stat().st_size > 1000
    assert "each rank has 1 thread" in " ".join(result.output.split())
    again = invoke("benchmarks ddp", "--from", output)
    assert again.exit_code == 0, again.output
    assert again.output in result.output
    written = invoke("benchmarks ddp --markdown", "--from", output).output
    assert written.startswith("`python -m benchmarks ddp` on ")
    assert f"| 2 | {two['ms']:,.2f} | {two['speedup']:.2f}x |" in written
    assert invoke("benchmarks model", "--from", output).exit_code == 2


def test_single_rank_has_the_same_part_of_the_gpu_as_each_of_many(monkeypatch):
    """MPS is given what each run needs; the whole GPU has a row of its own."""
    seen = []
    speed = {(1, "25"): 400.0, (2, "25"): 220.0, (4, "25"): 125.0, (1, None): 110.0}

    def run_ranks(ranks, function, case, rounds, name, **options):
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        seen.append((ranks, share))
        slow = speed[ranks, share]
        times = [[slow - 1, slow, 9e9], [slow, slow - 2, slow - 3]][:ranks]
        return [ddp._Timed(ms, 4.0, "gloo" if ranks > 1 else "", "vendor", "vendor") for ms in times]

    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    monkeypatch.setattr(ddp, "run_ranks", run_ranks)
    monkeypatch.setattr(ddp, "mps", ddp.nullcontext)
    case = replace(SMALL, device="cuda", dtype="bfloat16")
    rows = [record.flat(row) for row in ddp.run(case, (4, 2), 3, share_gpu=True)]
    assert seen == list(speed)
    assert [(row["ranks"], row["gpu_percent"]) for row in rows] == [(1, 25), (2, 25), (4, 25), (1, 100)]
    assert [row["ms"] for row in rows] == list(speed.values())  # the median of steps, each the slowest rank's
    assert rows[2]["efficiency"] == 400 / 125 / 4
    assert rows[2]["vs_whole_gpu"] == 110 / 125
    assert rows[3]["efficiency"] is None
    caption = ddp.caption(rows)
    assert "has 25% of the GPU by MPS" in caption
    assert "travel by gloo, through the host, for NCCL refuses ranks that share a GPU" in caption
    assert "| 4 | 25% | 125.00 | 3.20x | 0.800 | 0.880 | 512 | 4.00000 |" in ddp.markdown(rows)
    assert ddp.tables(rows)[0].row_count == 4


def test_losses_that_differ_are_an_error():
    check_losses({"1 rank": 5.0, "2 ranks": 5.0004}, "float32")
    for wrong in (5.001, math.nan):
        with pytest.raises(RuntimeError, match=f"2 ranks: loss {wrong:.6f} where {WHOLE_GPU} has 5.000000"):
            check_losses({WHOLE_GPU: 5.0, "2 ranks": wrong}, "float32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("benchmarks ddp --device cpu --batch 4 --nproc 3", "3 ranks do not divide it; take a multiple of 3"),
        ("benchmarks ddp --device cpu --mps", "say --device cuda too"),
        ("benchmarks ddp --device cpu --dtype float16", "expected one of float32, bfloat16"),
        ("benchmarks ddp --device cpu --heads 3", "3 heads do not divide it"),
        ("benchmarks model --device cpu --dtype int8", "expected one of float32, bfloat16"),
    ],
)
def test_invalid_arguments_name_the_remedy(words, message):
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_gradients_on_a_gpu_are_50_to_80_megabytes():
    """Gradients of 50 to 80 MB, which gloo sums while a part of a GPU computes."""
    case = training.training(ddp.SMALL, ddp.LARGE, "cuda", None, batch=64, dim=None)
    assert (case.batch, case.dim, case.dtype) == (64, 512, "bfloat16")
    assert 50e6 < 4 * case.config.num_parameters < 80e6
