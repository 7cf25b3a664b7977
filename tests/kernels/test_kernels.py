"""Every kernel, feature and dtype against the oracle: the forward and every gradient, on memory filled with NaN."""

import pytest
import torch

from cases import CASES
from meshflash import Mask
from meshflash.check.oracle import Case, check, gradients, replace
from meshflash.kernels import tiled
from meshflash.kernels.registry import record_kernels

CAUSAL = Mask.causal()
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Make `torch.empty` fill tensors with NaN, which deterministic mode does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks(monkeypatch):
    """Make blocks small enough that every case has several."""
    monkeypatch.setattr(tiled, "MIN_BLOCK", 8)
    monkeypatch.setattr(tiled, "MAX_BLOCK", 8)


def _run_and_check(case: Case, dtype: torch.dtype, kernel: str) -> None:
    leaves = case.inputs(dtype)
    check(gradients(case.run(leaves, kernel), leaves, case), case, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tiled_matches_the_oracle(name, dtype, small_blocks):
    _run_and_check(CASES[name][0], dtype, "tiled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["long and odd", "gqa", "everything"])
def test_tiled_with_its_default_block_size_matches_the_oracle(name, dtype):
    _run_and_check(CASES[name][0], dtype, "tiled")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reference_matches_the_oracle(name, dtype):
    _run_and_check(CASES[name][0], dtype, "reference")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_vendor_matches_the_oracle_or_names_the_unsupported_feature(name, dtype):
    case, full_precision, half_precision = CASES[name]
    if half_precision if dtype in HALF else full_precision:
        _run_and_check(case, dtype, "vendor")
    else:
        with pytest.raises(
            ValueError, match=r'kernel="vendor" does not support .*; supported here: .*tiled, reference, or "auto"'
        ):
            _run_and_check(case, dtype, "vendor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_auto_takes_vendor_where_supported_and_tiled_elsewhere(name, dtype):
    case, full_precision, half_precision = CASES[name]
    with record_kernels() as log:
        _run_and_check(case, dtype, "auto")
    backward = "vendor" if (half_precision if dtype in HALF else full_precision) else "tiled"
    # a gradient of the LSE restricts the backward alone
    forward = "vendor" if case.lse_gradient and name == "lse gradient" else backward
    assert log == [(forward, "forward"), (backward, "backward")]


@pytest.mark.parametrize("kernel", ["tiled", "vendor", "reference"])
def test_kernels_pass_gradcheck(kernel):
    case = Case(CAUSAL & Mask.documents([4, 5]), batch=1, tokens=9, heads=4, kv_heads=2, dim=4, sinks=True)
    leaves = case.inputs(torch.float64)

    def function(*tensors):
        return case.run(dict(zip(leaves, tensors, strict=True)), kernel)[0]

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_kernels_with_every_feature_pass_gradcheck(kernel, small_blocks):
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
