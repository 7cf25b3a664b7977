"""Every kernel x feature x dtype against the oracle, forward and every gradient, on NaN-poisoned memory."""

import pytest
import torch

from meshflash import Mask
from meshflash.kernels import tiled
from meshflash.kernels.registry import spy
from oracle import Case, check, gradients, replace

CAUSAL = Mask.causal()

#: name -> (case, whether the vendor kernel serves it in float32, and in half precision)
CASES = {
    "full": (Case(), True, True),
    "causal": (Case(CAUSAL), True, True),
    "length 1": (Case(CAUSAL, tokens=1), True, True),
    "length 0": (Case(CAUSAL, tokens=0), True, True),
    "no keys": (Case(tokens=5, k_tokens=0), True, True),
    "long and odd": (Case(CAUSAL, batch=1, tokens=613, heads=1), True, True),
    "gqa": (Case(CAUSAL, heads=6, kv_heads=2), True, True),
    "mqa": (Case(CAUSAL, heads=3, kv_heads=1), True, True),
    "dim 8": (Case(CAUSAL, dim=8), True, True),
    "dim 40": (Case(CAUSAL, dim=40), True, True),
    "dim 80": (Case(CAUSAL, dim=80), True, True),
    "dim 96": (Case(CAUSAL, dim=96), True, True),
    "dim 192": (Case(CAUSAL, dim=192), True, True),
    "dim 256": (Case(CAUSAL, dim=256), True, True),
    "value dim below": (Case(CAUSAL, dim=24, value_dim=16), False, False),
    "value dim above": (Case(CAUSAL, dim=16, value_dim=40, heads=4, kv_heads=2), False, False),
    "scale": (Case(CAUSAL, scale=0.7), True, True),
    "softcap": (Case(CAUSAL, softcap=2.0), False, False),
    "alibi": (Case(CAUSAL, alibi=True, heads=4, kv_heads=2), False, False),
    "alibi, full": (Case(alibi=True), False, False),
    "sinks": (Case(CAUSAL, sinks=True, heads=4, kv_heads=2), True, False),
    "dropout": (Case(CAUSAL, dropout=0.3, heads=4, kv_heads=2), False, False),
    "lse gradient": (Case(CAUSAL, lse_gradient=True, heads=4, kv_heads=2), False, False),
    "documents": (Case(CAUSAL & Mask.documents([5, 0, 20, 12])), True, True),
    "documents, both ways": (Case(Mask.documents([1, 30, 6])), True, True),
    "documents by row": (Case(CAUSAL & Mask.documents([[5, 32], [37]])), True, True),
    "documents and padding": (Case(CAUSAL & Mask.documents([[5, 20], [30]], pad=True)), True, True),
    "cross documents": (Case(Mask.documents([7, 30], k_lengths=[20, 9]), k_tokens=29), True, True),
    "window": (Case(Mask.window(5, 3)), False, False),
    "causal window": (Case(CAUSAL & Mask.window(7, 0)), False, False),
    "prefix": (Case(CAUSAL | Mask.first(11)), True, False),
    "sink tokens": (Case(CAUSAL & (Mask.window(6, 0) | Mask.first(4))), False, False),
    "sink tokens by document": (
        Case(
            Mask.documents([9, 28]) & CAUSAL & (Mask.window(6, 0) | Mask.first(2, per_document=True)),
            heads=4,
            kv_heads=2,
        ),
        False,
        False,
    ),
    "more keys": (Case(CAUSAL, tokens=13, k_tokens=37), True, True),
    "fewer keys": (Case(CAUSAL, tokens=37, k_tokens=13), True, True),
    "decoding": (Case(CAUSAL, tokens=1, k_tokens=37, q_offset=36), True, True),
    "last aligned": (Case(CAUSAL, tokens=13, k_tokens=37, q_offset=24), True, False),
    "empty rows": (Case(Mask.window(None, 0) & Mask.window(4, None), tokens=37, k_tokens=20), False, False),
    "everything": (
        Case(
            Mask.documents([[9, 28], [36]], pad=True) & CAUSAL & (Mask.window(6, 0) | Mask.first(3)),
            heads=6,
            kv_heads=2,
            dim=24,
            value_dim=40,
            scale=0.4,
            softcap=3.0,
            sinks=True,
            alibi=True,
            dropout=0.2,
            lse_gradient=True,
        ),
        False,
        False,
    ),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN while deterministic algorithms are asked for."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that every case has several."""
    monkeypatch.setattr(tiled, "MIN_BLOCK", 8)
    monkeypatch.setattr(tiled, "MAX_BLOCK", 8)


def _run(case: Case, dtype: torch.dtype, kernel: str) -> None:
    leaves = case.inputs(dtype)
    check(gradients(case.run(leaves, kernel), leaves, case), case, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tiled(name, dtype, small_blocks):
    _run(CASES[name][0], dtype, "tiled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["long and odd", "gqa", "everything"])
def test_tiled_with_its_own_block_size(name, dtype):
    _run(CASES[name][0], dtype, "tiled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reference(name, dtype):
    _run(CASES[name][0], dtype, "reference")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_vendor_serves_or_says_what_it_lacks(name, dtype):
    case, full_precision, half_precision = CASES[name]
    if half_precision if dtype in HALF else full_precision:
        _run(case, dtype, "vendor")
    else:
        with pytest.raises(ValueError, match=r'kernel="vendor" lacks .*; able here: tiled, reference, or "auto"'):
            _run(case, dtype, "vendor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_auto_takes_the_fastest_that_can(name, dtype):
    case, full_precision, half_precision = CASES[name]
    with spy() as ran:
        _run(case, dtype, "auto")
    backward = "vendor" if (half_precision if dtype in HALF else full_precision) else "tiled"
    # only the gradient of the LSE is asked of the backward alone
    forward = "vendor" if case.lse_gradient and name == "lse gradient" else backward
    assert ran == [(forward, "forward"), (backward, "backward")]


@pytest.mark.parametrize("kernel", ["tiled", "vendor", "reference"])
def test_gradcheck(kernel):
    case = Case(CAUSAL & Mask.documents([4, 5]), batch=1, tokens=9, heads=4, kv_heads=2, dim=4, sinks=True)
    leaves = case.inputs(torch.float64)

    def function(*tensors):
        return case.run(dict(zip(leaves, tensors, strict=True)), kernel)[0]

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_gradcheck_with_every_feature(kernel, small_blocks):
    case = replace(CASES["everything"][0], batch=1, tokens=11, mask=CAUSAL & Mask.window(5, 0) | Mask.first(2))
    case = replace(case, heads=2, kv_heads=1, dim=3, value_dim=2)
    leaves = case.inputs(torch.float64)

    def function(*tensors):
        return case.run(dict(zip(leaves, tensors, strict=True)), kernel)

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("name", ["gqa", "everything"])
def test_repeated_calls_give_the_same_bits(name):
    case = CASES[name][0]
    leaves = case.inputs(torch.bfloat16)
    first, second = (gradients(case.run(leaves), leaves, case) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("kernel", ["tiled", "vendor"])
def test_sink_of_minus_infinity_is_no_sink(kernel):
    case = Case(CAUSAL & Mask.documents([5, 20], pad=True), sinks=True)
    leaves = case.inputs(torch.float32)
    with torch.no_grad():
        leaves["sink_logits"].fill_(-torch.inf)
        out, lse = case.run(leaves, kernel)
        plain, plain_lse = replace(case, sinks=False).run({n: leaves[n] for n in "qkv"}, kernel)
    assert torch.allclose(out, plain, atol=1e-6)
    assert torch.allclose(lse, plain_lse, atol=1e-6)
