"""A simulated Hopper backward on a CPU matches float64: tables, descriptors, accumulation, and portable tiles."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from meshflash import Layout, Mask
from meshflash.core.tiles import worklist
from meshflash.kernels import prepared_launch
from meshflash.kernels.contract import Features, Grads, Inputs, Rows
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.launches import Launcher
from meshflash.kernels.tiled import Tiled

pytest.importorskip("meshflash.kernels.hopper.backward")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_hopper_gpu.py tests it on a GPU", allow_module_level=True)

from kernels.hopper import simulated
from meshflash.kernels.hopper import backward as hopper_backward

CAUSAL, FULL = Mask.causal(), Mask.full()


@pytest.fixture
def kernel(monkeypatch):
    """Replace the backward kernel by its simulation, and let the launch code believe in a Hopper GPU."""
    kernel = simulated.SimulatedBackward(hopper_backward.backward, simulated.patch_scalar_functions(monkeypatch))
    monkeypatch.setattr(hopper_backward, "backward", kernel)
    monkeypatch.setattr(hopper_launch, "descriptor", simulated.SimulatedDescriptor)
    monkeypatch.setattr(hopper_launch, "_unsupported_call", lambda *_: None)
    monkeypatch.setattr(hopper_launch, "kernels_off", lambda _: None)
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 10**6)
    monkeypatch.setattr(hopper_launch, "spreads_heads", lambda *_: False)
    monkeypatch.setattr(prepared_launch, "has_driver", lambda: True)
    monkeypatch.setattr(prepared_launch, "prepare", locate_arguments)
    monkeypatch.setattr(prepared_launch, "fill_with_zeros", lambda address, words: None)
    return kernel


def locate_arguments(compiled, grid, arguments, locate, numbers):
    """Stand in for `prepare`: a launch is recorded if it is known what each tensor and each descriptor points to."""
    tensors = [x if isinstance(x, torch.Tensor) else getattr(x, "x", None) for x in arguments]
    return None if any(x is not None and locate(x) is None for x in tensors) else object()


def assert_close(got_BTHD, want_BTHD):
    """Compare every 64 rows of each batch row and head separately, so that one wrong block cannot hide."""
    for got, want in zip(got_BTHD.double().split(64, 1), want_BTHD.split(64, 1), strict=True):
        error, size = (x.norm(dim=(1, 3)) for x in (got - want, want))
        assert (error <= 0.012 * size + 2e-3).all()


def check(work, dim, batch, heads, kv_heads, add, padded):
    """Check gradients against float64, and that later calls can repeat the launches.

    `add` adds them to ones, otherwise they overwrite NaN; `padded` gives their rows gaps in memory.
    """
    torch.manual_seed(0)
    queries, keys = (sum(map(len, ranges)) for ranges in (work.q_ranges, work.k_ranges))
    q, dout = torch.randn(2, batch, queries, heads, dim).bfloat16()
    k, v = torch.randn(2, batch, keys, kv_heads, dim).bfloat16()
    x = Inputs(q, k, v, work, Features(dim**-0.5))
    exact = x._replace(q_BTHD=q.double(), k_BSKD=k.double(), v_BSKE=v.double())
    out, lse = Tiled().forward(exact)
    delta = (out * dout).sum(-1).transpose(1, 2).contiguous()
    want = Tiled().backward(exact, Rows(out, dout.double(), lse, delta))

    def buffer_like(y):
        b, t, h, d = y.shape
        whole = torch.full((b, h, t + 3 * padded, d + 8 * padded), 1.0 if add else torch.nan)
        return whole.to(torch.float32 if add else torch.bfloat16)[:, :, :t, :d].transpose(1, 2)

    grads = Grads(buffer_like(q), buffer_like(k), buffer_like(v), add_dq=add, add_dkv=add)
    rows = Rows(out.bfloat16(), dout, lse.float(), delta.float())
    launcher = Launcher([q, k, v, dout, rows.lse_BHT, rows.delta_BHT, *grads[:3]])
    Hopper()._backward(x, rows, grads, launcher)
    assert launcher.replay(0), "the launches cannot be repeated: later calls run the launch code again"
    assert_close(grads.dq_BTHD - int(add), want.dq_BTHD)
    assert_close(grads.dk_BSKD - int(add), want.dk_BSKD)
    assert_close(grads.dv_BSKE - int(add), want.dv_BSKE)


def contiguous_work(mask, queries, keys=None):
    return worklist(mask, (range(queries),), (range(queries if keys is None else keys),))


ZIGZAG = Layout.zigzag(512, 2)
WORK = {
    "full": lambda: contiguous_work(FULL, 256),
    "full, odd": lambda: contiguous_work(FULL, 197, 300),
    "causal": lambda: contiguous_work(CAUSAL, 384),
    "causal, odd": lambda: contiguous_work(CAUSAL, 301),
    "window": lambda: contiguous_work(CAUSAL & Mask.window(90, 0), 333),
    "first keys": lambda: contiguous_work(CAUSAL & (Mask.window(70, 0) | Mask.first(130)), 320),
    "documents": lambda: contiguous_work(CAUSAL & Mask.documents([5, 130, 1, 200]), 336),
    "full documents": lambda: contiguous_work(Mask.documents([150, 186]), 336),
    "queries that see nothing": lambda: contiguous_work(Mask.documents([3, 256], k_lengths=[0, 384]), 259, 384),
    "documents by row": lambda: contiguous_work(CAUSAL & Mask.documents([[5, 251], [256, 0]]), 256),
    "zigzag": lambda: worklist(CAUSAL, tuple(ZIGZAG.ranges[0]), tuple(ZIGZAG.ranges[0])),
}


@pytest.mark.parametrize("into", ["new", "rows", "tiles"])
@pytest.mark.parametrize("name", WORK)
def test_simulated_backward_matches_float64(name, into, kernel, monkeypatch):
    """Write new gradients, or add to given ones in rows or through tiles; dim and GQA ratio alternate over cases."""
    number = list(WORK).index(name) + len(into)
    configs = {
        d: replace(c, min_keys_for_tiled_dq=0 if into == "tiles" else 1 << 30)
        for d, c in hopper_launch.BACKWARD.items()
    }
    monkeypatch.setattr(hopper_launch, "BACKWARD", configs)
    kv_heads = 1 + number // 2 % 2
    check(WORK[name](), (64, 128)[number % 2], 2, 2, kv_heads, add=into != "new", padded=into == "tiles")
    (launch,) = kernel.launches
    shifted = name == "queries that see nothing"
    want = {"SHIFTED_LSE": shifted, "DQ_TILED": into != "rows" and not shifted}
    want |= {"HEADS_PER_CTA": 2 // kv_heads, "ACCUMULATE": into != "new"}
    assert {key: getattr(launch, key) for key in want} == want
    assert (launch.ACCUMULATE and launch.D == 128 and not launch.PARTIAL_TILES) == launch.TMA_REDUCE_DKDV


@pytest.mark.parametrize(("kv_heads", "spread"), [(2, False), (1, True)])
def test_portable_kernel_serves_the_remaining_tiles(kv_heads, spread, kernel, monkeypatch):
    """Both kernels add to the same dQ; the portable one writes its dK and dV after accumulated ones are converted."""
    monkeypatch.setattr(hopper_launch, "spreads_heads", lambda *_: spread)
    check(contiguous_work(CAUSAL & Mask.documents([128, 64, 64, 50]), 306), 64, 1, 2, kv_heads, add=False, padded=False)
    (launch,) = kernel.launches
    assert len(launch.TILES) == 1
    assert 2 // kv_heads == launch.CTAS_PER_KV_HEAD


@pytest.mark.parametrize("into", ["new", "rows", "tiles"])
@pytest.mark.parametrize("spread_q_heads", [False, True])
@pytest.mark.parametrize("name", ["full", "full, odd", "queries that see nothing", "causal, odd", "window"])
def test_split_tail_wave_and_spread_query_heads_match_float64(name, spread_q_heads, into, kernel, monkeypatch):
    from meshflash.kernels.hopper import split_kv

    for cost in ("SPLIT_COST", "BACKWARD_COST", "TRAFFIC_COST"):
        monkeypatch.setattr(split_kv, cost, 0)
    number = list(WORK).index(name) + len(into)
    configs = {
        d: replace(c, min_keys_for_tiled_dq=0 if into == "tiles" else 1 << 30)
        for d, c in hopper_launch.BACKWARD.items()
    }
    monkeypatch.setattr(hopper_launch, "BACKWARD", configs)
    monkeypatch.setattr(hopper_launch, "spreads_heads", lambda *_: spread_q_heads)
    work = WORK[name]()
    tiles, groups = 2 * -(-sum(map(len, work.k_ranges)) // 128), 4 if spread_q_heads else 2
    monkeypatch.setattr(
        hopper_launch, "num_sms", lambda device: tiles * groups - 1
    )  # one tile remains for the tail wave
    check(work, (64, 128)[number % 2], 2, 4, 2, add=into != "new", padded=into == "tiles")
    first, *more = kernel.launches
    split = name not in ("causal, odd", "window")
    assert (len(more), first.num_work) == (split, tiles * groups - split)
    assert ((1, 2, True) if spread_q_heads else (2, 1, into != "new")) == (
        first.HEADS_PER_CTA,
        first.CTAS_PER_KV_HEAD,
        first.ACCUMULATE,
    )
    assert all(
        (last.HEADS_PER_CTA, last.CTAS_PER_KV_HEAD, last.ACCUMULATE)
        == (first.HEADS_PER_CTA, first.CTAS_PER_KV_HEAD, True)
        for last in more
    )
    for launch in kernel.launches:
        assert (launch.ACCUMULATE and launch.D == 128 and not launch.PARTIAL_TILES) == launch.TMA_REDUCE_DKDV


def test_unaligned_gradients_are_accumulated_by_atomics(kernel, monkeypatch):
    monkeypatch.setattr(hopper_launch, "tma_aligned", lambda x: x.dtype != torch.float32)
    monkeypatch.setattr(hopper_launch, "spreads_heads", lambda *_: True)
    check(contiguous_work(FULL, 256), 128, 1, 4, 2, add=False, padded=False)
    assert [(launch.ACCUMULATE, launch.TMA_REDUCE_DKDV) for launch in kernel.launches] == [(True, False)]


ALL_OPERANDS = {"k, v", "q, dout", "k of dq"}


@pytest.mark.parametrize(
    ("dim", "packs_descriptors", "mask", "heads", "kv_heads", "spread", "hidden"),
    [
        *(
            (64, packs, *case)
            for packs in (False, True)
            for case in (
                (CAUSAL, 2, 2, False, {"q, dout"}),
                (FULL, 2, 2, False, {"k of dq"}),
                (FULL, 4, 2, False, {"k of dq"}),
                (CAUSAL, 4, 2, True, {"k of dq"}),
                (CAUSAL, 4, 2, False, set() if packs else ALL_OPERANDS),
                (CAUSAL & Mask.window(90, 0), 2, 2, False, {"k of dq"}),
            )
        ),
        (128, False, CAUSAL, 2, 2, False, set()),
        (128, False, FULL, 2, 2, False, set()),
        (128, False, CAUSAL, 4, 2, True, set()),
        (128, False, CAUSAL, 4, 2, False, {"k, v", "q, dout"}),
        (128, False, CAUSAL & Mask.window(90, 0), 2, 2, False, set()),
        (128, True, CAUSAL, 2, 2, False, set()),
        (128, True, FULL, 2, 2, False, set()),
        (128, True, FULL, 4, 2, False, {"q, dout"}),
        (128, True, FULL, 4, 2, True, {"q, dout"}),
        (128, True, CAUSAL, 4, 2, True, set()),
        (128, True, CAUSAL, 4, 2, False, {"k, v", "q, dout"}),
        (128, True, CAUSAL & Mask.window(90, 0), 2, 2, False, set()),
    ],
)
def test_launches_hide_the_indices_that_cost_least(
    dim, packs_descriptors, mask, heads, kv_heads, spread, hidden, kernel, monkeypatch
):
    monkeypatch.setattr(hopper_backward, "PACKS_DESCRIPTORS", packs_descriptors)
    monkeypatch.setattr(hopper_launch, "spreads_heads", lambda *_: spread)
    check(contiguous_work(mask, 384), dim, 1, heads, kv_heads, add=False, padded=False)
    (launch,) = kernel.launches
    names = ("D", "LOWER", "UPPER", "CLIPPED", "SOFTCAP", "SINGLE_RUN", "HEADS_PER_CTA", "PARTIAL_TILES", "ACCUMULATE")
    constants = [getattr(launch, name) for name in names]
    assert {operand for operand in ALL_OPERANDS if hopper_backward.hides_index(operand, *constants)} == hidden
