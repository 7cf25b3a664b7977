"""Rounding errors in half precision: sharding a sequence over ranks does not increase them."""

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


def run_on_single_device(leaves: dict[str, Tensor], kernel: str, dout: Tensor) -> dict[str, Tensor]:
    """Return the output and gradients of a single device."""
    out, _ = CASE.run(leaves, kernel)
    grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def rms_error(value: Tensor, exact: Tensor) -> float:
    assert value.numel() == ELEMENTS
    return float((value.double() - exact.double()).square().mean().sqrt())


@pytest.fixture(scope="module")
def single_device() -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the results in float32, and the errors of a single device in bfloat16."""
    leaves = CASE.inputs(torch.bfloat16)
    like = torch.empty(0, dtype=torch.bfloat16)
    dout, _ = upstream(Item(CASE, "ring", 1), like, like, 0)
    exact = run_on_single_device(as_dtype(leaves, torch.float32), "auto", dout)
    got = run_on_single_device(leaves, "tiled", dout)
    return exact, {name: rms_error(got[name], exact[name]) for name in NAMES}


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["ring", "zigzag"])
def test_bfloat16_error_over_ranks_is_that_of_a_single_device(single_device, schedule, world):
    assert ELEMENTS >= 10**6
    exact, single_errors = single_device
    got = run_item(Item(CASE, schedule, world, torch.bfloat16, kernel="tiled"), CASE.inputs(torch.bfloat16))
    errors = {name: rms_error(got[name], exact[name]) / single_errors[name] for name in NAMES}
    assert max(errors.values()) <= 1.1, errors


def test_bfloat16_reductions_increase_only_the_errors_of_dk_and_dv(single_device):
    exact, single_errors = single_device
    item = Item(CASE, "zigzag", 4, torch.bfloat16, kernel="tiled", reduce_dtype=torch.bfloat16)
    got = run_item(item, CASE.inputs(torch.bfloat16))
    errors = {name: rms_error(got[name], exact[name]) / single_errors[name] for name in NAMES}
    assert max(errors["out"], errors["dq"]) <= 1.1
    assert min(errors["dk"], errors["dv"]) > 1.1
    assert max(errors["dk"], errors["dv"]) < 4
