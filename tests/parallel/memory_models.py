"""Models, batches and fixtures for the tests of activation checkpointing, offloading and tiled MLPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshflash import Mask, shutdown
from meshflash.models.gpt import GPT, tiny
from meshflash.parallel import accumulate, apply_activation_checkpointing, next_tokens
from meshflash.parallel import offload as offloading
from meshflash.parallel.tiled_mlp import tile_mlp

CPU = torch.device("cpu")
LAYERS = 4
MEMORY_OPTIONS: Any = [
    dict(tiles=3),
    dict(activation_checkpointing="full", offload_activations=True),
    dict(activation_checkpointing="selective", offload_activations=True),
    dict(activation_checkpointing="full", tiles=4),
    dict(activation_checkpointing="selective", offload_activations=True, tiles=5),
]


WIDE = tiny(vocabulary=512, dim=512, head_dim=64, heads=8, kv_heads=8, hidden=1024, layers=10)


@pytest.fixture(autouse=True)
def _in_float64():
    """Run every test in float64, with an empty offload store before and after it."""
    torch.set_default_dtype(torch.float64)
    offloading.release()
    yield
    offloading.release()
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def _on_gpu():
    """Run a test on a GPU in float32; skip it without one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.set_default_dtype(torch.float32)
    yield
    torch.use_deterministic_algorithms(False)
    shutdown()


def usage():
    """Return the statistics of the CPU's offload store."""
    return offloading.offload_store(CPU).usage


def gpt(layers=LAYERS):
    """Return a small GPT, with the same weights each time."""
    return GPT(tiny(vocabulary=61, dim=32, hidden=48, heads=4, kv_heads=4, layers=layers))


def with_memory_options(model, activation_checkpointing=None, offload_activations=False, tiles=1):
    """Apply these memory options to a model."""
    if tiles > 1:
        tile_mlp(model, tiles)
    return (
        model
        if activation_checkpointing is None
        else apply_activation_checkpointing(model, activation_checkpointing, offload_activations)
    )


def samples():
    """Return (tokens, labels, mask) of micro-batches of different lengths, with documents and ignored labels."""
    found = []
    for n, tokens in enumerate((37, 53)):
        ids = torch.randint(61, (3, tokens), generator=torch.Generator().manual_seed(n))
        mask = Mask.causal() & Mask.documents([7, tokens - 9, 2]) if n else None
        labels = next_tokens(ids, mask)
        labels[0, 3 + n :] = -100
        found.append((ids, labels, mask))
    return found


def full_tensor(x):
    """Return the full tensor of a DTensor; other tensors unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def loss_and_gradients(model, batches=None, mesh=None):
    """Accumulate gradients of these batches; return the loss, and the gradients by name."""
    batches = batches or [dict(tokens=t, labels=y, mask=m) for t, y, m in samples()]
    totals = accumulate(model, batches, mesh)
    return totals.loss, {name.removeprefix("module."): full_tensor(p.grad) for name, p in model.named_parameters()}


def error(got, want):
    """Return the largest error of loss and gradients, relative to the largest value of each."""
    assert got[1].keys() == want[1].keys()
    pairs = [(got[0], want[0]), *((got[1][name], grad) for name, grad in want[1].items())]
    return max(float((a - b).abs().max()) / max(1e-3, float(b.abs().max())) for a, b in pairs)


def relative_errors(exact, grads):
    """Return the error of each gradient, relative to the norm of the exact one."""
    return [float((g.double() - e).norm() / e.norm()) for g, e in zip(grads, exact, strict=True)]
