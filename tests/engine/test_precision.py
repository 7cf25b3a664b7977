"""How far half precision is from the truth: spreading a sequence over ranks adds nothing to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hub import run_item, upstream
from meshflash import Mask
from meshflash.check.oracle import Case, as_dtype
from meshflash.check.spread import Item

CASE = Case(Mask.causal(), batch=1, tokens=2048, heads=8, dim=64)
ELEMENTS = CASE.batch * CASE.tokens * CASE.heads * CASE.dim
NAMES = ("out", "dq", "dk", "dv")


def on_one_device(leaves: dict[str, Tensor], kernel: str, dout: Tensor) -> dict[str, Tensor]:
    out, _ = CASE.run(leaves, kernel)
    grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def rms(value: Tensor, truth: Tensor) -> float:
    assert value.numel() == ELEMENTS
    return float((value.double() - truth.double()).square().mean().sqrt())


@pytest.fixture(scope="module")
def one_device() -> tuple[dict[str, Tensor], dict[str, float]]:
    """The truth, in float32, and the error of one device in bfloat16."""
    leaves = CASE.inputs(torch.bfloat16)
    like = torch.empty(0, dtype=torch.bfloat16)
    dout, _ = upstream(Item(CASE, "ring", 1), like, like, 0)
    truth = on_one_device(as_dtype(leaves, torch.float32), "auto", dout)
    got = on_one_device(leaves, "tiled", dout)
    return truth, {name: rms(got[name], truth[name]) for name in NAMES}


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["ring", "zigzag"])
def test_the_error_in_bfloat16_is_that_of_one_device(one_device, schedule, world):
    assert ELEMENTS >= 10**6
    truth, alone = one_device
    got = run_item(Item(CASE, schedule, world, torch.bfloat16, kernel="tiled"), CASE.inputs(torch.bfloat16))
    errors = {name: rms(got[name], truth[name]) / alone[name] for name in NAMES}
    assert max(errors.values()) <= 1.1, errors


def test_the_error_is_seen_where_sums_are_rounded_on_their_way(one_device):
    truth, alone = one_device
    item = Item(CASE, "zigzag", 4, torch.bfloat16, kernel="tiled", reduce_dtype=torch.bfloat16)
    got = run_item(item, CASE.inputs(torch.bfloat16))
    errors = {name: rms(got[name], truth[name]) / alone[name] for name in NAMES}
    assert max(errors["out"], errors["dq"]) <= 1.1
    assert min(errors["dk"], errors["dv"]) > 1.1
    assert max(errors["dk"], errors["dv"]) < 4
