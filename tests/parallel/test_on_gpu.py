"""Parallel models on GPUs: ranks that share a GPU, sharding and offloading. Run with `-m gpu`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from meshflash import shutdown
from meshflash.models.gpt import GPT, tiny
from meshflash.parallel import (
    accumulate,
    clip_grad_norm,
    gradient_norm,
    init_mesh,
    next_tokens,
    parallelize,
    shard_batch,
)
from meshflash.parallel.mesh import DATA_AXES, mesh_rank, size
from meshflash.runtime.devices import take_device
from meshflash.runtime.mps import missing, mps
from meshflash.runtime.processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SIZES = tiny(vocabulary=301, dim=128, heads=2, kv_heads=2, hidden=192)


def tokens():
    """Return random token ids, the same each time."""
    return torch.randint(301, (4, 203), generator=torch.Generator().manual_seed(0)).cuda()


def reference():
    """Return loss and gradients of a single device, in float32."""
    model = GPT(SIZES).cuda()
    totals = accumulate(model, [dict(tokens=tokens(), labels=next_tokens(tokens()))])
    return float(totals.loss), {name: p.grad for name, p in model.named_parameters()}


def train_on_shared_gpu(rank, world, send, axes):
    """Return the errors of replicas that share a GPU against a single device, and the error that shards raise."""
    take_device("cuda", rank)
    loss, grads = reference()
    mesh = init_mesh(**axes, device="cuda")
    model: Any = parallelize(GPT(SIZES).cuda(), mesh, schedule="zigzag", activation_checkpointing="selective")
    rows = torch.arange(4).tensor_split(size(mesh, DATA_AXES))[mesh_rank(mesh, DATA_AXES)]
    totals = accumulate(model, [shard_batch(tokens()[rows.cuda()], mesh)], mesh)
    errors = [float((p.grad - grads[name.removeprefix("module.")]).abs().max()) for name, p in model.named_parameters()]
    try:
        parallelize(GPT(SIZES).cuda(), mesh, mode="full")
        message = ""
    except ValueError as error:
        message = str(error)
    return abs(float(totals.loss) - loss), max(errors), message


@pytest.mark.parametrize("axes", [{"cp": 2}, {"dp": 2}])
def test_ranks_that_share_a_gpu_match_a_single_process(axes):
    with nullcontext() if missing() else mps():
        for loss, error, message in run_ranks(2, train_on_shared_gpu, axes):
            assert loss < 1e-5
            assert error < 1e-5
            assert "is gloo, which cannot gather shards" in message


@pytest.mark.parametrize("offload", [False, True])
def test_sharding_on_a_single_gpu_matches_the_plain_model(offload):
    loss, grads = reference()
    mesh = init_mesh(device="cuda")
    model: Any = parallelize(
        GPT(SIZES),
        mesh,
        mode="full",
        compute_dtype=torch.bfloat16,
        offload=offload,
        activation_checkpointing="selective",
    )
    model.to("cpu" if offload else "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(5):
        totals = accumulate(model, [shard_batch(tokens(), mesh)], mesh)
        losses.append(float(totals.loss))
        if step == 0:
            assert {p.grad.device.type for p in model.parameters()} == {"cpu" if offload else "cuda"}
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            named = {name: p.grad.to_local().cuda() for name, p in model.named_parameters()}
            largest = max(float((named[name] - grad).norm() / grad.norm()) for name, grad in grads.items())
            assert largest < 0.05  # the error of bfloat16
        norm = gradient_norm(model)
        assert float(clip_grad_norm(model, 0.1)) == pytest.approx(float(norm))
        assert float(gradient_norm(model)) == pytest.approx(min(0.1, float(norm)), rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(loss, rel=1e-2)
    assert losses[-1] < losses[0] - 0.5
    shutdown()
