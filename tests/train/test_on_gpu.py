"""Training on a GPU: losses match a CPU, a resumed run is bitwise equal, and --find-max-tokens. Run with `-m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshflash import shutdown
from meshflash.train import config as configs
from meshflash.train import loop
from meshflash.train.checkpoint import Checkpoints
from meshflash.train.max_tokens import find_max_tokens
from meshflash.train.report import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def shut_down():
    """Shut down after every test."""
    yield
    shutdown()


def config(**run):
    """Return a small configuration with these settings of the run."""
    found = configs.preset("gpt", "tiny")
    sizes = configs.change(found, {"model": {"dim": 128, "heads": 2}, "optimizer": {"warmup": 100, "lr": 1e-3}})
    return replace(sizes, run=replace(sizes.run, **({"steps": 12, "log": 4, "evaluate": 6, "save": 4} | run)))


@pytest.mark.parametrize("memory", [{}, {"activation_checkpointing": "full", "offload_activations": True, "tiles": 3}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_losses_match_the_cpu_and_a_run_resumes(tmp_path, dtype, memory, monkeypatch):
    whole = config(dtype=dtype, deterministic=True)
    whole = replace(whole, memory=replace(whole.memory, **memory))
    want = loop.train(whole, tmp_path / "whole", quiet=True)
    loop.train(replace(whole, run=replace(whole.run, steps=8)), tmp_path / "parts", quiet=True)
    rest = loop.train(whole, tmp_path / "parts", quiet=True)
    assert rest.losses == want.losses[8:]  # bitwise
    assert rest.valid == want.valid
    pairs = zip(rest.model.parameters(), want.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    rows = [row for row in read_metrics(tmp_path / "whole") if "mfu" in row]
    assert rows
    assert all(0 < row["memory"] < 1 and row["tokens_per_second"] > 0 for row in rows)
    shutdown()
    monkeypatch.setattr(loop, "current", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = loop.train(replace(whole, run=replace(whole.run, dtype="float32")), None, quiet=True)
    assert want.losses == pytest.approx(on_cpu.losses, rel=1e-4 if dtype == "float32" else 2e-2)
    model = on_cpu.model
    Checkpoints(tmp_path / "whole" / "checkpoints").load(model)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(model.parameters(), want.model.parameters(), strict=True))


def test_find_max_tokens_respects_the_memory_limit(monkeypatch):
    found = configs.change(config(), {"model": {"layers": 3}, "memory": {"activation_checkpointing": "full"}})
    torch.cuda.empty_cache()
    limit = 256 << 20
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    monkeypatch.setattr("meshflash.train.max_tokens._device_bytes", lambda _: limit)
    messages: list[str] = []
    try:
        fits = find_max_tokens(found, messages.append)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert fits.tokens >= 8192
    assert fits.device_bytes < limit
    assert any("out of memory" in line for line in messages)
