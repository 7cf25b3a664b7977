"""Hopper kernels as ring steps on a GPU: they continue a carried (out, LSE) and add to existing gradients."""

import pytest
import torch

from kernels.hopper.gpu_oracle import (
    CAUSAL,
    DIMS,
    assert_rows_close,
    check_adds_to_existing_gradients,
    needs_hopper,
    tensors,
)
from meshflash import Layout, Mask
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Features, Grads, Inputs, Rows
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.merge import merge
from meshflash.kernels.tiled import Tiled
from meshflash.kernels.triton.block_tables import make_run_tables

pytestmark = needs_hopper


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softcap", [hopper_launch.MIN_SOFTCAP, 3.0])
def test_softcap_backward_adds_to_existing_gradients(softcap, deterministic, launch_counts):
    q, k, v, dout = tensors(1, 700, 700, 4, 2, 128)
    work = worklist(CAUSAL & Mask.window(300, 0), (range(700),), (range(700),))
    check_adds_to_existing_gradients(Inputs(q, k, v, work, Features(128**-0.5, softcap)), dout, Hopper(deterministic))
    assert launch_counts == {"forward": 0, "backward": 1, "backward_dq": deterministic}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_two_ring_steps_match_one_call(dim, deterministic, launch_counts):
    """Process the keys in two halves: (out, LSE) is carried in place, gradients are added."""
    tokens, heads = 1024, 2
    q, k, v, dout = (torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    features, kernel = Features(scale=dim**-0.5), Hopper(deterministic)
    halves = range(tokens // 2), range(tokens // 2, tokens)
    steps = []
    for half in halves:
        work = worklist(CAUSAL, (range(tokens),), (half,))
        steps.append(Inputs(q, k[:, half.start : half.stop], v[:, half.start : half.stop], work, features))
    carry = q.new_empty(q.shape, dtype=torch.float32), q.new_empty(1, heads, tokens, dtype=torch.float32)
    kernel.forward(steps[0], carry)
    kernel.forward(steps[1], carry, carry=carry)
    whole = Inputs(q, k, v, worklist(CAUSAL, (range(tokens),), (range(tokens),)), features)
    out, lse = kernel.forward(whole, (torch.empty_like(carry[0]), torch.empty_like(carry[1])))
    torch.testing.assert_close(carry[0], out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(carry[1], lse, atol=1e-4, rtol=1e-5)
    delta = (out * dout.float()).sum(-1).transpose(1, 2).contiguous()
    rows = Rows(out, dout, lse, delta)
    want = kernel.backward(whole, rows, Grads(torch.empty_like(out), torch.empty_like(out), torch.empty_like(out)))
    dq = torch.ones_like(out)
    for half, step in zip(halves, steps, strict=True):
        dk, dv = (torch.ones_like(out[:, half.start : half.stop]) for _ in range(2))
        kernel.backward(step, rows, Grads(dq, dk, dv, add_dq=True, add_dkv=True))
        for got, whole_grad in zip((dk, dv), (want.dk_BSKD, want.dv_BSKE), strict=True):
            torch.testing.assert_close(got - 1, whole_grad[:, half.start : half.stop], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(dq - 1, want.dq_BTHD, atol=2e-3, rtol=2e-3)
    assert launch_counts == {"forward": 3, "backward": 3, "backward_dq": 3 * deterministic}


@pytest.mark.usefixtures("dq_accumulation")
@pytest.mark.parametrize("gqa_ratio", [1, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_hopper_and_portable_kernels_add_to_the_same_gradients(dim, gqa_ratio, launch_counts):
    """The portable kernel handles documents shorter than a block, if most documents are."""
    work = worklist(CAUSAL & Mask.documents([256, *[64] * 10, 128]), (range(1024),), (range(1024),))
    config = hopper_launch.BACKWARD[dim]
    served, portable = make_run_tables(
        work, True, config.block_n, config.block_m, 64, 2, torch.device("cuda"), True, True
    )
    assert served.on_grid
    assert len(portable)
    q, k, v, dout = tensors(2, 1024, 1024, 4, 4 // gqa_ratio, dim)
    check_adds_to_existing_gradients(Inputs(q, k, v, work, Features(dim**-0.5)), dout, Hopper())
    assert launch_counts["backward"] == 1


@pytest.mark.usefixtures("dq_accumulation", "spread_q_heads")
@pytest.mark.parametrize("mask", [Mask.full(), CAUSAL, CAUSAL & (Mask.window(200, 0) | Mask.first(130))])
@pytest.mark.parametrize("dim", DIMS)
def test_gqa_backward_adds_to_existing_gradients(dim, mask, launch_counts):
    q, k, v, dout = tensors(1, 896, 896, 8, 2, dim)
    work = worklist(mask, (range(896),), (range(896),))
    check_adds_to_existing_gradients(Inputs(q, k, v, work, Features(dim**-0.5)), dout, Hopper())
    assert launch_counts["backward"] == 1


@pytest.mark.usefixtures("dq_accumulation")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", [Layout.zigzag, Layout.striped])
@pytest.mark.parametrize("dim", DIMS)
def test_ring_steps_on_zigzag_and_striped_shards_match_float64(dim, kind, deterministic, launch_counts):
    layout = kind(2048, 2)
    kernel = Hopper(deterministic)
    for q_rank in range(2):
        for k_rank in range(2):
            work = worklist(CAUSAL, tuple(layout.ranges[q_rank]), tuple(layout.ranges[k_rank]))
            q, k, v, dout = tensors(1, 1024, 1024, 4, 1, dim)
            check_adds_to_existing_gradients(Inputs(q, k, v, work, Features(dim**-0.5)), dout, kernel)
    assert launch_counts == {"forward": 0, "backward": 4, "backward_dq": 4 * deterministic}


@pytest.mark.parametrize("dim", DIMS)
def test_carry_with_sinks_matches_float64(dim, launch_counts):
    q, k, v, _ = tensors(2, 1024, 1024, 4, 2, dim)
    sinks = torch.randn(4, device="cuda")
    scale, kernel = dim**-0.5, Hopper()
    carry = torch.empty(q.shape, device="cuda"), torch.empty(2, 4, 1024, device="cuda")
    halves = range(512), range(512, 1024)
    for half, features in zip(halves, (Features(scale), Features(scale, sink_logits_H=sinks)), strict=True):
        keys = slice(half.start, half.stop)
        x = Inputs(q, k[:, keys], v[:, keys], worklist(CAUSAL, (range(1024),), (half,)), features)
        kernel.forward(x, carry, carry=None if half.start == 0 else carry)
    work = worklist(CAUSAL, (range(1024),), (range(1024),))
    whole = Inputs(q.double(), k.double(), v.double(), work, Features(scale, sink_logits_H=sinks.double()))
    out, lse = Tiled().forward(whole)
    assert_rows_close(carry[0], out)
    torch.testing.assert_close(carry[1].double(), lse, atol=1e-4, rtol=1e-5)
    assert launch_counts["forward"] == 2


@pytest.mark.parametrize("into", ["in place", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "mask",
    [CAUSAL, Mask.full(), Mask.window(300, 0), CAUSAL & (Mask.window(200, 0) | Mask.first(130))],
    ids=["causal", "full", "window", "window and first"],
)
@pytest.mark.parametrize("tokens", [1344, 1408, 1410])
@pytest.mark.parametrize("dim", DIMS)
def test_carry_through_many_tiles_of_a_persistent_cta(dim, tokens, mask, into, launch_counts, monkeypatch):
    """The carry moves by TMA if all tiles are full and results are float32; a partial tile leaves warpgroups idle."""
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 3)
    q, k, v, _ = tensors(2, tokens, tokens, 4, 2, dim)
    x = Inputs(q, k, v, worklist(mask, (range(tokens),), (range(tokens),)), Features(dim**-0.5))
    old = torch.randn(q.shape, device="cuda"), torch.randn(2, 4, tokens, device="cuda") + 3
    old[1][:, :, 5::7] = -torch.inf
    old[0][:, 5::7] = 0
    want = Tiled().forward(x._replace(q_BTHD=q.double(), k_BSKD=k.double(), v_BSKE=v.double()))
    merge(want, (old[0].double(), old[1].double()), want)
    for _ in range(3):
        carry = old[0].clone(), old[1].clone()
        like = q if into == "bfloat16" else carry[0]
        out = carry if into == "in place" else (torch.full_like(like, torch.nan), torch.full_like(carry[1], torch.nan))
        Hopper().forward(x, out, carry=carry)
        assert_rows_close(out[0], want[0])
        torch.testing.assert_close(out[1].double(), want[1], atol=1e-4, rtol=1e-5)
    assert launch_counts["forward"] == 3


@pytest.mark.usefixtures("dq_accumulation")
@pytest.mark.parametrize("dim", DIMS)
def test_strides_of_size_one_dimensions_may_be_anything(dim, launch_counts):
    def odd(x, **options):
        """Return the tensor, or ones like it, with batch and head strides that no TMA descriptor accepts."""
        made = torch.ones_like(x, **options) if options else x
        return made.as_strided(made.shape, (7, dim, 3, 1))

    q, k, v, dout = (odd(x) for x in tensors(1, 640, 640, 1, 1, dim))
    x = Inputs(q, k, v, worklist(CAUSAL, (range(640),), (range(640),)), Features(dim**-0.5))
    check_adds_to_existing_gradients(x, dout, Hopper(), odd)
    out = odd(q, dtype=torch.float32), torch.empty(1, 1, 640, device="cuda").as_strided((1, 1, 640), (5, 3, 1))
    Hopper().forward(x, out)
    doubles = Inputs(q.double(), k.double(), v.double(), x.work, x.features)
    assert_rows_close(out[0], Tiled().forward(doubles)[0])
    assert launch_counts == {"forward": 1, "backward": 1, "backward_dq": 0}
