"""What ranks keep: counts against what ranks really hold, what FSDP saves, and what the command writes."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from benchmarks import weights
from benchmarks.weights import DDP, FSDP, METHODS, ZERO
from commands import app
from meshflash.bench import record
from meshflash.models.gpt import GPT, GPTConfig, tiny
from meshflash.parallel import init_mesh, shard

#: Rows that no number of ranks divides, and fewer than ranks: 6 rows on 4 ranks are 2, 2, 2 and none.
ODD = GPTConfig(vocabulary=251, layers=3, dim=18, heads=3, kv_heads=1, hidden=50)
TIED = GPTConfig(vocabulary=97, layers=2, dim=20, heads=2, kv_heads=1, hidden=33, tied=True)
CONFIGS = {"even": tiny(), "odd": ODD, "tied": TIED}

#: What FSDP saves at least, by ranks.
BARS = {2: 0.45, 4: 0.70, 8: 0.84}


def train_all(rank, world, group):
    held = {name: weights.train(rank, world, None, config) for name, config in CONFIGS.items()}
    return held, {name: whole_at_a_time(config) for name, config in CONFIGS.items()}


def whole_at_a_time(config):
    """The most bytes of gathered weights while a block computes, in bf16."""
    model = GPT(config)
    shard(model, init_mesh(device="cpu"), compute_dtype=torch.bfloat16)
    seen = []

    def look(*_):
        whole = [p.untyped_storage() for p in model.parameters() if not isinstance(p, DTensor)]
        seen.append(sum({storage.data_ptr(): storage.nbytes() for storage in whole}.values()))

    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.register_forward_hook(look)
    model(torch.arange(8)[None])
    return max(seen)


@pytest.mark.parametrize("world", [2, 4])
def test_counted_bytes_equal_those_that_ranks_hold(pool, world):
    ranks = pool.run(world, train_all)
    for name, config in CONFIGS.items():
        model = weights.on_meta(config)
        for method in METHODS:
            assert [held[name][method][0] for held, _ in ranks] == weights.count(model, method, world), (name, method)
        for held, whole in ranks:
            assert whole[name] == sum(weights.gathered(model, world))
            losses = [held[name][method][1] for method in METHODS]
            assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    most = {method: max(held["even"][method][0].total for held, _ in ranks) for method in METHODS}
    assert 1 - most[FSDP] / most[DDP] >= BARS[world]
    assert most[FSDP] < most[ZERO] < most[DDP]


def test_uneven_shards_are_padded_and_their_moments_are_not():
    model = weights.on_meta(ODD)
    shards = weights.count(model, FSDP, 4)
    assert len({held.parameters for held in shards}) == 1
    assert 4 * shards[0].parameters > sum(p.nbytes for p in model.parameters())
    assert shards[3].optimizer < shards[0].optimizer
    tensors = len(list(model.parameters()))
    moments = 2 * sum(p.nbytes for p in model.parameters())
    assert sum(held.optimizer for held in shards) == moments + 4 * tensors * weights.STEP_BYTES
    assert sum(held.optimizer for held in weights.count(model, ZERO, 4)) == moments + tensors * weights.STEP_BYTES


def test_shared_storage_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.other.weight = nn.Parameter(self.one.weight.detach())

    model = Tied()
    flat = torch.zeros(32)
    model.one.weight.grad, model.other.weight.grad = flat[:16].view(4, 4), flat[16:].view(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    assert weights.held_bytes(model, optimizer) == weights.Held(64, 128, 0)
    optimizer.step()
    assert weights.held_bytes(model, optimizer).optimizer == 2 * (2 * 64 + weights.STEP_BYTES)


def test_large_models_are_counted_and_not_allocated():
    rows = {(row.model, row.method, row.ranks): row for row in weights.counted()}
    for (name, method, ranks), row in rows.items():
        assert row.weights == pytest.approx(float(name[:-1]) * 1e9, rel=0.03)
        if method == DDP:
            assert row.total_bytes == pytest.approx(16 * row.weights, rel=1e-6)
            assert row.fits == (name == "1B")
        if method == FSDP:
            assert row.saved >= BARS.get(ranks, 0.98)
            assert row.fits == (row.total_bytes + row.block_bytes + row.outside_bytes <= 80e9)
    assert rows["100B", FSDP, 64].fits
    assert not rows["100B", ZERO, 64].fits
    assert all(p.is_meta for p in weights.on_meta(weights.LARGE["100B"]).parameters())


def test_weights_writes_a_record_and_shows_out_of_memory(tmp_path):
    words = [
        "benchmarks",
        "weights",
        "-n",
        "2",
        "--output",
        str(tmp_path / "x.json"),
        "--plot",
        str(tmp_path / "x.png"),
    ]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    rows = record.read(tmp_path / "x.json")["rows"]
    measured = [row for row in rows if row["how"] == "measured"]
    assert [(row["method"], row["ranks"]) for row in measured] == [(method, 2) for method in METHODS]
    assert all(row["total_bytes"] == row["counted_bytes"] > 0 for row in measured)
    assert [row["saved"] >= bar for row, bar in zip(measured, (0.0, 0.2, BARS[2]), strict=True)] == [True] * 3
    assert len(rows) == len(measured) + len(weights.LARGE) * len(weights.RANKS) * len(METHODS)
    assert (tmp_path / "x.png").stat().st_size > 1000
    line = next(line for line in result.output.splitlines() if line.strip().startswith("100B "))
    assert line.count("out of memory") == 3
    assert "…" not in result.output
    assert f"{rows[-1]['weights']:,}" in result.output
