"""The interpreted Triton kernel against the oracle: every case, atomic and deterministic dQ, and in schedules."""

import os

import pytest
import torch

from cases import CASES
from mesh_cases import run_items
from meshflash import Mask, flash_attention
from meshflash.check.oracle import Case, check, gradients, replace
from meshflash.check.spread import Item, check_moved, whole
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Features, KernelRequest
from meshflash.kernels.registry import choose, refusal
from meshflash.kernels.triton import launch as triton_launch
from meshflash.kernels.triton.block_tables import make_tile_table
from meshflash.kernels.triton.kernel import Triton

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="test_gpu.py runs them on a GPU")

#: Allowed rounding units. The true gradient of a row that sees one key is 0; two sums in different orders leave a rest.
UNITS = 16
make_descriptors = triton_launch._make_descriptors
SMALL = {name: case for name, (case, _, _) in CASES.items() if case.tokens < 100}


def run(case: Case, dtype: torch.dtype, deterministic: bool) -> None:
    """Check a case of the interpreted kernel against the oracle."""
    leaves = case.inputs(dtype)
    torch.use_deterministic_algorithms(deterministic)
    try:
        got = gradients(case.run(leaves, "triton"), leaves, case)
    finally:
        torch.use_deterministic_algorithms(False)
    check(got, case, leaves, UNITS)


@pytest.mark.parametrize("name", SMALL)
def test_every_case_matches_the_oracle(name):
    run(SMALL[name], torch.float32, deterministic=True)


@pytest.mark.parametrize(
    "name", ["causal", "gqa", "documents by row", "sink tokens", "empty rows", "decoding", "dim 40"]
)
def test_atomic_dq_matches_the_oracle(name):
    run(SMALL[name], torch.float32, deterministic=False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("causal", torch.bfloat16),
        ("gqa", torch.bfloat16),
        ("gqa", torch.float16),
        ("sinks", torch.float16),
        ("prefix", torch.bfloat16),
        ("larger value dim", torch.float16),
        ("one document in one row", torch.bfloat16),
    ],
    ids=str,
)
def test_half_precision_matches_the_oracle(name, dtype):
    run(SMALL[name], dtype, deterministic=True)


@pytest.mark.parametrize("name", ["causal", "gqa", "documents by row", "causal window", "dim 8", "smaller value dim"])
def test_tma_descriptors_match_the_oracle(name, monkeypatch):
    made = []

    def keep(*x):
        made.append(make_descriptors(*x))
        return made[-1]

    monkeypatch.setattr(triton_launch, "_make_descriptors", keep)
    monkeypatch.setattr(triton_launch, "has_descriptors", lambda device: True)
    case = SMALL[name]
    assert case.tokens > 32, "the case needs a full block, because partial blocks are loaded without descriptors"
    run(case, torch.bfloat16, deterministic=True)
    assert len(made) == 3
    assert None not in made


def test_tensors_that_tma_cannot_address_are_loaded_by_pointers(monkeypatch):
    monkeypatch.setattr(triton_launch, "has_descriptors", lambda device: True)
    torch.manual_seed(0)  # two roundings of a value of 4 or more may be further apart than the limit
    x = torch.randn(1, 70, 2, 24, dtype=torch.bfloat16)[..., 1:17]
    want = flash_attention(x, x, x, mask=Mask.causal(), kernel="tiled")
    assert torch.allclose(flash_attention(x, x, x, mask=Mask.causal(), kernel="triton"), want, atol=2e-2)


@pytest.mark.parametrize(("queries", "keys"), [(40, 0), (0, 40)])
def test_empty_tensors_with_tma_enabled_are_accepted(queries, keys, monkeypatch):
    monkeypatch.setattr(triton_launch, "has_descriptors", lambda device: True)
    run(Case(tokens=queries, k_tokens=keys), torch.bfloat16, deterministic=True)


@pytest.mark.parametrize("scale", [1e-46, 1e-30])
def test_denormal_scales_match_the_oracle(scale):
    run(Case(Mask.causal(), tokens=9, scale=scale), torch.float32, deterministic=True)


def test_very_large_softcap_matches_the_oracle():
    run(Case(Mask.causal(), tokens=9, softcap=1e6), torch.float32, deterministic=True)


def test_padding_rows_have_no_weight_beside_very_negative_scores():
    q = torch.full((1, 37, 1, 16), 5.0).requires_grad_()
    k = (torch.full((1, 37, 1, 16), -2.5) + 0.01 * torch.randn(1, 37, 1, 16)).requires_grad_()
    v, dout = torch.randn(1, 37, 1, 16).requires_grad_(), torch.randn(1, 37, 1, 16)
    got, want = (
        torch.autograd.grad(flash_attention(q, k, v, scale=1.0, kernel=name), (q, k, v), dout)
        for name in ("triton", "tiled")
    )
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("dim", [40, 80, 96])
def test_head_dims_computed_as_two_widths_match_the_oracle(dim):
    run(Case(Mask.causal(), tokens=37, dim=dim, value_dim=dim), torch.float32, deterministic=True)
    run(Case(Mask.causal(), tokens=37, dim=dim, value_dim=24), torch.float32, deterministic=False)


def test_unaligned_rows_are_padded_to_one_width():
    """On Hopper the compiler gives wrong results for unaligned rows in two widths."""
    aligned, padded = torch.zeros(1, 5, 2, 96), torch.zeros(1, 5, 2, 104)[..., :96]
    shifted = torch.zeros(5 * 2 * 96 + 1)[1:].view(1, 5, 2, 96)
    assert triton_launch._split_widths(aligned, aligned, aligned) == ((64, 32), (64, 32))
    for other in (padded, shifted):
        assert triton_launch._split_widths(aligned, other, aligned) == ((128, 0), (128, 0))


def test_triton_kernel_inside_schedules_matches_the_oracle(pool):
    items = [
        Item(SMALL[name], schedule, 2, kernel="triton")
        for schedule, name in (
            ("zigzag", "causal"),
            ("striped", "gqa"),
            ("allgather", "sinks"),
            ("ring", "causal window"),
        )
    ]
    parts = pool.run(2, run_items, items, timeout=120.0)
    for n, item in enumerate(items):
        check(whole(item, [part[n][0] for part in parts]), item.case, item.case.inputs(item.dtype), UNITS)
        check_moved(item, [part[n][1] for part in parts])


def make_request(**more):
    work = worklist(Mask.causal(), (range(8),), (range(8),))
    return replace(KernelRequest("backward", torch.device("cpu"), torch.float32, 16, 16, work, Features(1.0)), **more)


def test_unsupported_dtype_head_dim_and_device_are_named(monkeypatch):
    assert refusal(Triton(), make_request()) is None
    assert "float64" in (refusal(Triton(), make_request(dtype=torch.float64)) or "")
    assert "above 256" in (refusal(Triton(), make_request(head_dim=257)) or "")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in (refusal(Triton(), make_request()) or "")


def test_auto_never_chooses_the_interpreter():
    assert choose("auto", make_request()).kernel.name != "triton"
    assert choose("auto", make_request(device=torch.device("cuda"))).kernel.name == "triton"


def test_deterministic_calls_get_a_deterministic_kernel():
    chosen = [choose("triton", make_request(deterministic=wanted)).kernel for wanted in (False, True)]
    assert [kernel.deterministic for kernel in chosen if isinstance(kernel, Triton)] == [False, True]


def test_tiles_start_with_the_heaviest_and_hold_every_row_once():
    mask = Mask.causal() & Mask.documents([[5, 27], [32]])
    work = worklist(mask, (range(32),), (range(32),))
    for by_key in (False, True):
        tiles = make_tile_table(work, by_key, 8, 2, torch.device("cpu")).tiles.tolist()
        rows = sorted((batch, row + n) for batch, row, count, *_ in tiles for n in range(count))
        assert rows == [(batch, row) for batch in range(2) for row in range(32)]
    plain = worklist(Mask.causal(), (range(32),), (range(32),))
    firsts = [row for _, row, *_ in make_tile_table(plain, False, 8, 1, torch.device("cpu")).tiles.tolist()]
    assert firsts == [24, 16, 8, 0]
    assert make_tile_table(plain, False, 8, 1, torch.device("cpu")) is make_tile_table(
        plain, False, 8, 1, torch.device("cpu")
    )


def test_rows_with_strided_elements_match_the_reference():
    q, k, v = (torch.randn(1, 2, 16, 9).transpose(1, 3) for _ in range(3))
    got = flash_attention(q, k, v, mask=Mask.causal(), kernel="triton")
    assert torch.allclose(got, flash_attention(q, k, v, mask=Mask.causal(), kernel="reference"), atol=1e-5)


def test_heads_more_than_two_billion_elements_apart_match_contiguous_ones():
    """The memory is reserved, but almost none of it is touched."""
    stride, tokens, dim = 2**30, 40, 24
    far = torch.empty(2 * stride + tokens * dim, dtype=torch.float16)
    x = far.as_strided((1, tokens, 3, dim), (far.numel(), dim, stride, 1))
    x.copy_(torch.randn(1, tokens, 3, dim))
    near = x.contiguous()
    want = flash_attention(near, near, near, mask=Mask.causal(), kernel="triton")
    assert torch.equal(flash_attention(x, near, x, mask=Mask.causal(), kernel="triton"), want)
