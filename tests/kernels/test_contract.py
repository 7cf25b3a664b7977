"""Kernels as steps of a ring: they continue carried (out, LSE), add to gradients, and accept any layout of rows."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from meshflash import Layout, Mask
from meshflash.check.oracle import Case, check, replace
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Features, Grads, Inputs, Kernel, KernelRequest, Rows, accumulator_dtype
from meshflash.kernels.merge import merge_
from meshflash.kernels.reference import Reference
from meshflash.kernels.registry import kernels, refusal
from meshflash.kernels.tiled import Tiled
from meshflash.kernels.vendor.cpu import Vendor

CAUSAL = Mask.causal()
CASES = {
    "causal": Case(CAUSAL, heads=4, kv_heads=2),
    "documents": Case(CAUSAL & Mask.documents([[11, 26], [36]], pad=True)),
    "window": Case(CAUSAL & (Mask.window(6, 0) | Mask.first(3)), softcap=2.0),
    "positions": Case(CAUSAL, heads=4, kv_heads=2, alibi=True, dropout=0.25, sinks=True),
}
LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}


def emulate_ring(kernel: Kernel, case: Case, layout: Layout, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run all ring steps of all ranks in this process; return the outputs and gradients of the whole sequence."""
    q, k, v = (leaves[name].detach() for name in "qkv")
    dtype = accumulator_dtype(q.dtype)
    reads_positions = case.alibi or case.dropout > 0
    features = case.features({name: x.detach() for name, x in leaves.items()})
    without_sink = replace(features, sink_logits_H=None)
    rows = [torch.from_numpy(layout.positions(rank)) for rank in range(layout.world)]

    def step(rank: int, other: int, last: bool) -> Inputs:
        work = worklist(case.mask, layout.ranges[rank], layout.ranges[other], reads_positions)
        own, keys = rows[rank], rows[other]
        return Inputs(q[:, own], k[:, keys], v[:, keys], work, features if last else without_sink)

    out = torch.empty_like(q[..., :1].expand(*q.shape[:-1], v.shape[-1]))
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype)
    for rank, own in enumerate(rows):
        # steps continue the carry in place, and the last step stores the final dtype
        carry = (torch.empty(*out[:, own].shape, dtype=dtype), torch.empty(*lse[..., own].shape, dtype=dtype))
        final = (torch.empty_like(out[:, own]), torch.empty_like(lse[..., own]))
        for n in range(layout.world):
            last = n == layout.world - 1
            x = step(rank, (rank + n) % layout.world, last)
            kernel.forward(x, final if last else carry, carry if n else None)
        out[:, own], lse[..., own] = final

    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator).to(out)
    delta = (dout.to(dtype) * out).sum(-1).transpose(1, 2).contiguous()
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    for rank, own in enumerate(rows):
        dq_own = torch.zeros_like(dq[:, own])
        for other, keys in enumerate(rows):
            grads = Grads(dq_own, dk[:, keys], dv[:, keys], add_dq=True, add_dkv=True)
            whole_rows = Rows(out[:, own], dout[:, own], lse[..., own], delta[..., own])
            kernel.backward(step(rank, other, True), whole_rows, grads)
            dk[:, keys], dv[:, keys] = grads.dk_BSKD, grads.dv_BSKE
        dq[:, own] = dq_own
    return {"out": out, "lse": lse, "dq": dq.to(q.dtype), "dk": dk.to(q.dtype), "dv": dv.to(q.dtype)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", [Tiled(block_size=4), Reference()], ids=lambda k: k.name)
def test_emulated_ring_matches_the_oracle(kernel, dtype, name, layout):
    case = CASES[name]
    leaves = case.inputs(dtype)
    got = emulate_ring(kernel, case, LAYOUTS[layout](37, 3), leaves)
    check(got, case, leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_emulated_ring_of_the_vendor_kernel_matches_the_oracle(name, layout):
    case = CASES[name]
    leaves = case.inputs(torch.float32)
    check(emulate_ring(Vendor(), case, LAYOUTS[layout](37, 3), leaves), case, leaves)


def test_vendor_refuses_a_carry_in_half_precision():
    work = worklist(CAUSAL, (range(4, 8),), (range(4),))
    case = Case(CAUSAL)
    features = case.features(case.inputs(torch.bfloat16))
    request = KernelRequest("forward", torch.device("cpu"), torch.bfloat16, 16, 16, work, features)
    assert refusal(Vendor(), request) is None
    assert "float32 partial results" in (refusal(Vendor(), replace(request, partial=True)) or "")
    assert "device cuda" in (refusal(Vendor(), replace(request, device=torch.device("cuda"))) or "")


def test_merging_rows_that_see_nothing_keeps_them_empty():
    out, lse = torch.zeros(1, 3, 1, 2), torch.full((1, 1, 3), -torch.inf)
    other, other_lse = torch.ones(1, 3, 1, 2), torch.tensor([[[-torch.inf, 0.5, -torch.inf]]])
    other[:, 0] = other[:, 2] = 0
    merge_(out, lse, other, other_lse)
    assert out[0, :, 0, 0].tolist() == [0.0, 1.0, 0.0]
    assert lse.flatten().tolist() == [-torch.inf, 0.5, -torch.inf]


def test_kernels_are_registered_in_order_and_have_a_summary():
    assert [kernel.name for kernel in kernels()] == [
        "vendor",
        "fa4",
        "fa3",
        "cudnn",
        "fa2-package",
        "fa2",
        "hopper",
        "triton",
        "tiled",
        "reference",
    ]
    assert all(kernel.summary for kernel in kernels())


@pytest.mark.parametrize("name", [field.name for field in fields(Features)])
def test_key_of_a_request_tells_whether_each_feature_is_used(name):
    work = worklist(CAUSAL, (range(8),), (range(8),))
    plain = KernelRequest("forward", torch.device("cpu"), torch.float32, 8, 8, work, Features(0.0))
    default = getattr(plain.features, name)
    values: list[Any] = [torch.ones(2), torch.zeros(2)] if default is None else [type(default)(2), type(default)(3)]
    first, second = (replace(plain, features=replace(plain.features, **{name: value})).key for value in values)
    assert plain.key != first == second
