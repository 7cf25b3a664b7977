"""Split-KV for the tail wave on a Hopper GPU, forward and backward, against the oracle."""

import pytest
import torch

from kernels.hopper.gpu_oracle import (
    assert_rows_close,
    check_adds_to_existing_gradients,
    float64_reference,
    needs_hopper,
    tensors,
)
from meshflash import Mask, flash_attention
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Features, Grads, Inputs
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.hopper.kernel import Hopper

pytestmark = needs_hopper

#: (dim, batch, heads, KV heads, SMs) whose query tiles leave a partial tail wave.
TAIL_WAVES = [(64, 1, 3, 3, 8), (64, 2, 4, 2, 9), (128, 1, 3, 3, 23), (128, 2, 4, 2, 23)]


@pytest.mark.parametrize(("dim", "batch", "heads", "kv_heads", "num_sms"), TAIL_WAVES)
def test_split_kv_tail_wave_matches_the_oracle(dim, batch, heads, kv_heads, num_sms, num_splits, monkeypatch):
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: num_sms)
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, _ = tensors(batch, 1152, 1024, heads, kv_heads, dim)
        with torch.no_grad():
            out, lse = flash_attention(q, k, v, kernel="hopper", return_lse=True)
            want, want_lse = flash_attention(q.double(), k.double(), v.double(), kernel="tiled", return_lse=True)
        assert_rows_close(out, want)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
    assert num_splits == num_splits[:1] * 3
    assert num_splits[0] > 1


@pytest.mark.parametrize("queries", [1152, 1100])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("dim", "batch", "heads", "kv_heads", "num_sms"), TAIL_WAVES)
def test_carry_reaches_a_split_tail_wave(
    dim, batch, heads, kv_heads, num_sms, in_place, queries, launch_counts, num_splits, monkeypatch
):
    """Carry the first 300 keys into a call over the others; results overwrite the carry or are bfloat16."""
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: num_sms)
    full = Mask.full()
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, _ = tensors(batch, queries, 1324, heads, kv_heads, dim)
        first, others = slice(0, 300), slice(300, 1324)
        carry = (
            torch.full(q.shape, torch.nan, dtype=torch.float32, device="cuda"),
            torch.full((batch, heads, queries), torch.nan, device="cuda"),
        )
        work = worklist(full, (range(queries),), (range(300),))
        Hopper().forward(Inputs(q, k[:, first], v[:, first], work, Features(dim**-0.5)), carry)
        carry[0][:, 5], carry[1][:, :, 5] = 0, -torch.inf  # this query has seen nothing so far
        into = carry if in_place else (torch.full_like(q, torch.nan), torch.full_like(carry[1], torch.nan))
        work = worklist(full, (range(queries),), (range(300, 1324),))
        Hopper().forward(Inputs(q, k[:, others], v[:, others], work, Features(dim**-0.5)), into, carry)
        doubles = q.double(), k.double(), v.double()
        want, want_lse = flash_attention(*doubles, kernel="tiled", return_lse=True)
        blind, blind_lse = flash_attention(
            doubles[0][:, 5:6], doubles[1][:, others], doubles[2][:, others], kernel="tiled", return_lse=True
        )
        want[:, 5:6], want_lse[:, :, 5:6] = blind, blind_lse
        assert_rows_close(into[0], want)
        torch.testing.assert_close(into[1].double(), want_lse, atol=1e-3, rtol=1e-3)
    assert min(num_splits[1::2]) > 1
    assert launch_counts["forward"] == 6


@pytest.mark.usefixtures("dq_accumulation")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("keys", [1024, 1150, 1190])
@pytest.mark.parametrize(("queries", "blind"), [(1024, 0), (1090, 0), (1027, 3)])
@pytest.mark.parametrize(
    ("dim", "batch", "heads", "kv_heads"), [(64, 1, 3, 3), (64, 2, 4, 2), (128, 1, 6, 2), (128, 2, 3, 3)]
)
def test_backward_tail_wave_split_by_queries_matches_the_oracle(
    dim, batch, heads, kv_heads, queries, blind, keys, add, spread_q_heads, num_splits, monkeypatch
):
    """Blind first queries make blocks start at any row, which needs four shifted copies of lse and delta."""
    mask = Mask.documents([blind, queries - blind], k_lengths=[0, keys]) if blind else Mask.full()
    num_ctas = -(-keys // 128) * batch * (heads if spread_q_heads else kv_heads)
    num_sms = num_ctas // 2 - 1  # two full waves and a few tiles
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: num_sms)
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, dout = tensors(batch, queries, keys, heads, kv_heads, dim)
        x = Inputs(q, k, v, worklist(mask, (range(queries),), (range(keys),)), Features(dim**-0.5))
        if add:
            check_adds_to_existing_gradients(x, dout, Hopper())
        else:
            rows, want = float64_reference(x, dout)
            dq, dk, dv = (torch.full_like(y, torch.nan) for y in (q, k, v))
            Hopper().backward(x, rows, Grads(dq, dk, dv))
            for y, z in zip((dq, dk, dv), (want.dq_BTHD, want.dk_BSKD, want.dv_BSKE), strict=True):
                assert_rows_close(y, z)
    assert num_splits
    assert min(num_splits) > 1
