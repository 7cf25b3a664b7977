"""The kernels by specialized warps, interpreted: what they compute, and which blocks are theirs."""

import os
from contextlib import ExitStack

import pytest
import torch

from cases import CASES
from meshflash import Mask, flash_attention
from meshflash.check.oracle import Case, check, gradients
from meshflash.core.tiles import worklist
from meshflash.kernels import triton_configs, triton_hopper
from meshflash.kernels.contract import Features, Grads, Inputs, Rows
from meshflash.kernels.triton_configs import Config
from meshflash.kernels.triton_kernel import Triton
from meshflash.kernels.triton_tables import runs

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU test_gpu.py runs them")

UNITS = 16
SMALL = {name: case for name, (case, _, _) in CASES.items() if case.tokens < 100}
#: Blocks of the interpreted kernels: rows of the block that stays, and of those that come by.
STAYS, COMES = 32, 16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Every head dim is served; gives how many blocks were, by pass."""
    count = {"forward": 0, "by_keys": 0, "by_queries": 0}

    def counting(name, function, tables):
        def call(*arguments):
            count[name] += len(arguments[tables])
            return function(*arguments)

        return call

    monkeypatch.setattr(triton_hopper, "forward", counting("forward", triton_hopper.forward, 7))
    for name in ("by_keys", "by_queries"):
        method = counting(name, getattr(triton_hopper.Backward, name), 2)
        monkeypatch.setattr(triton_hopper.Backward, name, method)
    with ExitStack() as stack:
        for dim in (8, 16, 32, 64):
            for name, rows in (
                ("forward", (STAYS, COMES)),
                ("by_keys", (COMES, STAYS)),
                ("by_queries", (STAYS, COMES)),
            ):
                which = triton_configs.name(f"specialized-{name}", dim)
                stack.enter_context(triton_configs.forced(which, Config(*rows, 1, 1)))
        yield count


def run(case: Case, dtype: torch.dtype = torch.float32) -> None:
    leaves = case.inputs(dtype)
    check(gradients(case.run(leaves, "triton"), leaves, case), case, leaves, UNITS)


@pytest.mark.parametrize(
    "name",
    ["full", "mqa", "dim 8", "value dim above", "scale 0", "softcap", "sinks", "dropout", "documents by row", "window",
     "documents and padding", "one document in one row, sinks", "sink tokens", "more keys", "fewer keys", "decoding",
     "empty rows", "no keys", "batch 0"],
)  # fmt: skip
def test_cases_that_are_served_in_part_or_not_at_all(name):
    run(SMALL[name])


@pytest.mark.parametrize(
    ("mask", "tokens"),
    [
        (Mask.causal(), 64),
        (Mask.causal(), 70),
        (Mask.full(), 64),
        (Mask.full(), 70),
        (Mask.causal() & Mask.window(20, 0), 70),
        (Mask.causal() & Mask.documents([40, 30]), 70),
        (Mask.causal() | Mask.first(17), 70),
        (Mask.causal() & (Mask.window(20, 0) | Mask.first(17)), 70),
    ],
    ids=str,
)
def test_serves(mask, tokens, served):
    run(Case(mask, tokens=tokens, heads=4, kv_heads=2, sinks=True))
    assert all(served.values()), served


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, served):
    run(Case(Mask.causal(), tokens=70, heads=4, kv_heads=2, lse_gradient=True), dtype)
    assert all(served.values()), served


@pytest.mark.parametrize("layout", ["bhtd", "packed", "padded"])
def test_layouts(layout, served):
    """Heads before tokens, q, k and v of one tensor, rows with room between them."""
    tokens, heads, dim = 70, 2, 16
    if layout == "bhtd":
        q, k, v = (torch.randn(2, heads, tokens, dim).transpose(1, 2) for _ in range(3))
    elif layout == "packed":
        q, k, v = torch.randn(2, tokens, 3, heads, dim).unbind(2)
    else:
        q, k, v = (torch.randn(2, tokens, heads, dim + 8)[..., :dim] for _ in range(3))
    leaves, dout = [x.requires_grad_() for x in (q, k, v)], torch.randn(2, tokens, heads, dim)
    got, want = (
        torch.autograd.grad(flash_attention(*leaves, mask=Mask.causal(), kernel=name), leaves, dout)
        for name in ("triton", "tiled")
    )
    assert all(served.values()), served
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_rows_outside_of_a_span_are_not_read():
    """Of a document the last block is not whole; what lies behind it may be anything."""
    mask = Mask.causal() & Mask.documents([[40], [55]], pad=True)
    leaves = [torch.randn(2, 70, 2, 16) for _ in range(3)]
    want = flash_attention(*leaves, mask=mask, kernel="tiled")
    poisoned = [x.clone() for x in leaves]
    for x in poisoned:
        x[0, 40:], x[1, 55:] = float("nan"), float("nan")
    taken = [x.requires_grad_() for x in poisoned]
    got = flash_attention(*taken, mask=mask, kernel="triton")
    dout = torch.randn(2, 70, 2, 16)
    dout[0, 40:], dout[1, 55:] = float("nan"), float("nan")
    gradients = torch.autograd.grad(got, taken, dout)
    for row, end in ((0, 40), (1, 55)):
        assert torch.allclose(got[row, :end], want[row, :end], atol=1e-5)
        assert all(x[row, :end].isfinite().all() for x in gradients)


def test_a_carry_is_continued_and_gradients_are_added(served):
    """Keys in two halves, one after the other, as a ring has them."""
    q, k, v, dout = (torch.randn(1, 64, 2, 16) for _ in range(4))
    features = Features(scale=0.25)
    kernel = Triton(deterministic=True)
    parts = []
    for half in (range(32), range(32, 64)):
        work = worklist(Mask.causal(), (range(64),), (half,))
        parts.append(Inputs(q, k[:, half.start : half.stop], v[:, half.start : half.stop], work, features))
    carry = kernel.forward(parts[0], (torch.empty(1, 64, 2, 16), torch.empty(1, 2, 64)))
    carry = kernel.forward(parts[1], (torch.empty(1, 64, 2, 16), torch.empty(1, 2, 64)), carry)
    whole = Inputs(q, k, v, worklist(Mask.causal(), (range(64),), (range(64),)), features)
    out, lse = kernel.forward(whole)
    assert torch.allclose(carry[0], out, atol=1e-5)
    assert torch.allclose(carry[1], lse, atol=1e-5)
    delta = (out * dout).sum(-1).transpose(1, 2)
    want = kernel.backward(whole, Rows(dout, out, lse, delta))
    dq = torch.zeros(1, 64, 2, 16)
    for n, part in enumerate(parts):
        halves = torch.ones(1, 32, 2, 16), torch.ones(1, 32, 2, 16)
        kernel.backward(part, Rows(dout, out, lse, delta), Grads(dq, *halves, add_dq=True, add_dkv=True))
        for got, all_of_it in zip(halves, (want.dk_BSKD, want.dv_BSKE), strict=True):
            assert torch.allclose(got - 1, all_of_it[:, 32 * n : 32 * n + 32], atol=1e-5)
    assert torch.allclose(dq, want.dq_BTHD, atol=1e-5)
    assert all(served.values()), served


def test_runs_are_whole_blocks_inside_of_their_spans():
    mask = Mask.causal() & Mask.documents([40, 10, 61])
    for by_key in (False, True):
        work = worklist(mask, (range(111),), (range(111),))
        served, rest = runs(work, by_key, 32, 16, 8, 1, CPU)
        assert {row for _, row, *_ in rest.tiles.tolist()} == {40, 48}, "the document that is shorter than a block"
        assert all(rows <= 8 for _, _, rows, *_ in rest.tiles.tolist())
        spans = served.spans.tolist()
        for _, row, _, _, _, first, turns in served.tiles.tolist():
            begin, count, limit, *_ = spans[first]
            document = (0, 40) if row < 40 else (50, 111)
            assert document[0] <= begin < limit == document[1]
            assert count == turns
        assert served.lower  # a last block overlaps, and seen from keys the diagonal is below


def test_bands_over_other_steps_and_configurations_that_are_forced_are_left_to_the_rest():
    stripes = worklist(Mask.causal(), (range(0, 256, 4),), (range(1, 256, 4),))
    assert not len(runs(stripes, False, 32, 16, 32, 1, CPU)[1])
    others = worklist(Mask.causal(), (range(0, 256, 4),), (range(1, 256, 2),))
    assert not len(runs(others, False, 32, 16, 32, 1, CPU)[0])
    full = worklist(Mask.full(), (range(0, 256, 4),), (range(1, 256, 4),))
    assert not len(runs(full, False, 32, 16, 32, 1, CPU)[1])
    assert triton_configs.specialized("forward", 128, torch.bfloat16, CPU) is None
    assert triton_configs.specialized("forward", 16, torch.bfloat16, CPU) is not None


@pytest.mark.parametrize("specialized", [True, False])
def test_heads_that_lie_more_than_two_billion_numbers_apart(specialized, served):
    """Their memory is asked for, and next to none of it touched."""
    stride, tokens, dim = 2**30, 40, 16 if specialized else 24
    far = torch.empty(2 * stride + tokens * dim, dtype=torch.float16)
    x = far.as_strided((1, tokens, 3, dim), (far.numel(), dim, stride, 1))
    x.copy_(torch.randn(1, tokens, 3, dim))
    near = x.contiguous()
    want = flash_attention(near, near, near, mask=Mask.causal(), kernel="triton")
    assert torch.equal(flash_attention(x, near, x, mask=Mask.causal(), kernel="triton"), want)
    assert bool(served["forward"]) == specialized
