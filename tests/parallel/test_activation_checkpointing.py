"""Activation checkpointing, offloading and tiling keep loss and gradients, on a single device and on meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from comm.fake_streams import HostStreams, as_streams
from commands import app
from meshflash import shutdown
from meshflash.models import vit
from meshflash.parallel import (
    init_mesh,
    parallelize,
    shard_batch,
)
from meshflash.parallel import offload as offloading
from meshflash.parallel import tiled_mlp as tiling
from meshflash.parallel.mesh import DATA_AXES, mesh_rank, size
from parallel.memory_models import (
    LAYERS,
    MEMORY_OPTIONS,
    _in_float64,  # noqa: F401 an autouse fixture
    error,
    gpt,
    loss_and_gradients,
    samples,
    usage,
    with_memory_options,
)


class SlowStreams(HostStreams):
    """Streams whose copies complete late, into host memory filled with NaN; the tests make them."""

    def allocate_pinned(self, count: int, dtype: torch.dtype) -> Any:
        return torch.full((count,), 255, dtype=dtype)

    def copy(self, target: Any, source: Any) -> None:
        assert self.current_stream() is not self.main
        super().copy(target, source)


@pytest.mark.parametrize("options", MEMORY_OPTIONS)
@pytest.mark.parametrize("streams", ["none", "slow"])
def test_loss_and_gradients_match_the_plain_model_for_each_memory_option(options, streams, monkeypatch):
    if streams == "slow":
        monkeypatch.setattr(offloading, "make_streams", as_streams(SlowStreams(0.002)))
        torch.use_deterministic_algorithms(True)  # also fills new device memory with NaN
    try:
        got = loss_and_gradients(with_memory_options(gpt(), **options))
    finally:
        torch.use_deterministic_algorithms(False)
    assert error(got, loss_and_gradients(gpt())) < 1e-12
    if "offload_activations" in options:
        # For each micro-batch all blocks but the last are offloaded, and each of them is prefetched.
        tensors_per_block = 3 if options["activation_checkpointing"] == "selective" else 1
        assert usage().num_fetched == usage().num_prefetched == 2 * tensors_per_block * (LAYERS - 1)
        assert usage().live_bytes == 0


class Collectives(TorchDispatchMode):
    """A dispatch mode that counts collectives; `errors_on_meshes` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count += "wait" not in func.__name__
        return func(*args, **(kwargs or {}))


def errors_on_meshes(rank, world, group):
    """Return the error against a single process for each mesh and set of options."""
    torch.set_default_dtype(torch.float64)
    try:
        want, found = loss_and_gradients(gpt(2)), []
        images = torch.randn(2, 3, 24, 16, generator=torch.Generator().manual_seed(0))
        classes = torch.tensor([1, 7])
        vit_model = vit.ViT(vit.tiny(dim=32, hidden=48))
        (loss := vit_model(images, classes)).backward()
        grads: Any = {name: p.grad for name, p in vit_model.named_parameters()}
        want_vit = loss.detach() / 2, {name: grad / 2 for name, grad in grads.items()}
        meshes: Any = dict(fsdp=2), dict(cp=2), dict(tp=2), dict(dp=2)
        for n, axes in enumerate(meshes):
            mesh = init_mesh(**axes, device="cpu")
            batches = []
            for ids, labels, mask in samples():
                rows = torch.arange(len(ids)).tensor_split(size(mesh, DATA_AXES))[mesh_rank(mesh, DATA_AXES)]
                batches.append(shard_batch(ids[rows], mesh, labels=labels[rows], mask=mask))
            counts = []
            for options in (dict(activation_checkpointing="selective"), MEMORY_OPTIONS[-1], MEMORY_OPTIONS[n]):
                with Collectives() as collectives:
                    got = loss_and_gradients(parallelize(gpt(2), mesh, **options), batches, mesh)
                counts.append(collectives.count)
                found.append((axes, options, error(got, want)))
            assert 0 < counts[1] <= counts[0], (axes, counts)  # one gather and one reduction for all tiles
            if "tp" in axes:  # a ViT has biases, a GPT has none
                model = parallelize(vit.ViT(vit.tiny(dim=32, hidden=48)), mesh, **MEMORY_OPTIONS[-1])
                got = loss_and_gradients(model, [dict(patches=images, labels=classes)], mesh)
                found.append((axes, "vit", error(got, want_vit)))
        return found, usage().live_bytes
    finally:
        torch.set_default_dtype(torch.float32)


def test_loss_and_gradients_match_a_single_process_on_each_mesh(pool):
    for found, live in pool.run(2, errors_on_meshes):
        assert live == 0
        for *case, largest in found:
            assert largest < 1e-12, (case, largest)


def test_recomputing_a_block_does_not_compute_its_tiles_twice(monkeypatch):
    calls: list[int] = []
    original = tiling._TiledMLPOp._projected

    def counting_projection(self, x, weights):
        calls.append(len(x))
        return original(self, x, weights)

    monkeypatch.setattr(tiling._TiledMLPOp, "_projected", counting_projection)
    for kind in (None, "full", "selective"):
        calls.clear()
        loss_and_gradients(with_memory_options(gpt(1), activation_checkpointing=kind, tiles=3))
        assert calls == 2 * [37] * 3 + 2 * [53] * 3


def test_bench_step_accepts_the_memory_options(tmp_path):
    torch.set_default_dtype(torch.float32)
    arguments = "benchmarks step --tokens 33 --rounds 1 --activation-checkpointing full --offload-activations --tiles 3"
    result = CliRunner().invoke(
        app, [*arguments.split(), "--device", "cpu", "--output", f"{tmp_path}/s.json"], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "linear 64 to 128 of 11 tokens" in " ".join(result.output.split())
    shutdown()
