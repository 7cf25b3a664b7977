"""Repeated calls on a GPU, whose launches are recorded, give what calls with ordinary launches give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshflash import Mask, flash_attention
from meshflash.engine.cache import cache
from meshflash.gemm import matmul
from meshflash.kernels import launches as recorded
from meshflash.kernels import prepared_launch
from meshflash.kernels.hopper.support import has_gluon

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    KERNELS = ["hopper", "triton"] if has_gluon(torch.device("cuda", 0)) else ["triton"]
else:
    KERNELS = ["triton"]
CAUSAL = Mask.causal()
#: (batch, tokens, heads, KV heads, mask, other arguments)
CASES: dict[str, Any] = {
    "odd length": (2, 333, 4, 2, CAUSAL, {}),
    "full": (1, 128, 8, 8, None, {}),
    "tail wave": (1, 4096, 17, 17, None, {}),
    "window": (1, 1000, 4, 2, Mask.window(100, 0), {}),
    "documents": (1, 1000, 4, 2, CAUSAL & Mask.documents([3, 500, 97, 400]), {}),
    "sinks": (1, 500, 4, 2, CAUSAL, {"sink_logits": True}),
    "deterministic": (1, 500, 4, 2, CAUSAL, {"deterministic": True}),
}


@pytest.fixture
def counts(monkeypatch):
    """Count the replays, and begin without cached executables."""
    found = {"replays": 0}
    call = recorded.Replay.__call__

    def counted(self, inputs, numbers):
        results = call(self, inputs, numbers)
        found["replays"] += results is not None
        return results

    monkeypatch.setattr(recorded.Replay, "__call__", counted)
    cache.clear()
    return found


def inputs(batch, tokens, heads, kv_heads, dim, seed):
    """Return q, k, v and dout."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(batch, tokens, n, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def run(q, k, v, dout, *, kernel, mask, more):
    """Return the results and all gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attention(*leaves, mask=mask, kernel=kernel, return_lse=True, **more)
    out.backward(dout)
    return [x.detach() for x in (out, lse, *(leaf.grad for leaf in leaves))]


def check_equal(found, want):
    """The forward has the same bits; atomics of the backward add in any order."""
    for x, y in zip(found[:2], want[:2], strict=True):
        assert torch.equal(x, y)
    for x, y in zip(found[2:], want[2:], strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_repeated_calls_match_ordinary_launches(name, kernel, dim, counts, monkeypatch):
    batch, tokens, heads, kv_heads, mask, more = CASES[name]
    if "sink_logits" in more:
        more = {"sink_logits": torch.randn(heads, device="cuda")}
    calls = [inputs(batch, tokens, heads, kv_heads, dim, seed) for seed in range(3)]
    found = [run(*call, kernel=kernel, mask=mask, more=more) for call in calls]
    assert counts["replays"] >= 4
    cache.clear()
    monkeypatch.setattr(prepared_launch, "prepare", lambda *_, **__: None)
    before = counts["replays"]
    want = [run(*call, kernel=kernel, mask=mask, more=more) for call in calls]
    assert counts["replays"] == before
    for x, y in zip(found, want, strict=True):
        check_equal(x, y)


def test_dropout_of_each_call_has_its_own_seed(counts):
    q, k, v, _ = inputs(1, 300, 4, 2, 64, 0)
    more: dict[str, Any] = dict(mask=CAUSAL, dropout=0.3, kernel="triton", alibi_slopes=torch.rand(4, device="cuda"))
    seeds = (1, 2, 2**40, 2**40 + 1, 1)
    found = [flash_attention(q, k, v, seed=seed, **more) for seed in seeds]
    assert counts["replays"] == 3
    assert torch.equal(found[0], found[4])
    assert not any(torch.equal(found[0], x) for x in found[1:4])
    for seed, x in zip(seeds, found, strict=True):
        exact = flash_attention(q.float(), k.float(), v.float(), seed=seed, **(more | {"kernel": "tiled"}))
        torch.testing.assert_close(x.float(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_of_one_projection_and_shared_tensors(kernel, counts):
    """q, k and v overlap in memory, or are one tensor, and calls come in any order."""
    for _ in range(3):
        packed = torch.randn(1, 257, 12, 64, device="cuda", dtype=torch.bfloat16)
        apart = [torch.randn(1, 257, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        one = apart[0]
        for q, k, v in (packed.split(4, dim=2), apart, (one, one, one), (one, apart[1], one)):
            found = flash_attention(q, k, v, mask=CAUSAL, kernel=kernel)
            exact = flash_attention(*(x.double() for x in (q, k, v)), mask=CAUSAL, kernel="tiled")
            torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)
    assert counts["replays"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_streams_and_graphs_beside_recorded_launches(kernel, counts):
    q, k, v, _ = inputs(1, 640, 8, 8, 64, 0)
    want = flash_attention(q, k, v, mask=CAUSAL, kernel=kernel)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(4):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(flash_attention(q, k, v, mask=CAUSAL, kernel=kernel))
        torch.cuda.synchronize()
        assert all(torch.equal(x, want) for x in found)
    assert counts["replays"] == 9
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attention(q, k, v, mask=CAUSAL, kernel=kernel)
    assert counts["replays"] == 9
    for _ in range(2):
        captured.zero_()
        graph.replay()
        beside = flash_attention(q, k, v, mask=CAUSAL, kernel=kernel)
        assert torch.equal(captured, want)
        assert torch.equal(beside, want)


def test_profiler_sees_every_launch(counts):
    import triton

    q, k, v, _ = inputs(1, 128, 8, 8, 64, 0)
    for _ in range(2):
        flash_attention(q, k, v, kernel=KERNELS[0])
    assert counts["replays"] == 1
    seen: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        flash_attention(q, k, v, kernel=KERNELS[0])
    finally:
        hook.remove(seen.append)
    assert seen
    assert counts["replays"] == 1


@pytest.mark.parametrize("mode", ["stream_k", "data_parallel", "split_k"])
@pytest.mark.parametrize(("m", "n", "k"), [(1000, 504, 776), (256, 512, 4096)])
def test_repeated_matmul_matches_float64(mode, m, n, k, counts):
    for call in range(4):
        a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        bias = torch.randn(n, device="cuda")
        found = matmul(a, b, bias=bias, activation="silu", mode=mode)
        x = a.double() @ b.double() + bias
        torch.testing.assert_close(found.double(), x * torch.sigmoid(x), rtol=2e-2, atol=0.3)
        assert counts["replays"] == call


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("queries", "keys"), [(0, 64), (64, 0), (0, 0)])
def test_calls_without_queries_or_keys(kernel, queries, keys, counts):
    for _ in range(3):
        q = torch.randn(1, queries, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(1, keys, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        flash_attention(q, k, v, kernel=kernel).sum().backward()
        for x in (q, k, v):
            assert x.grad is not None
            assert not x.grad.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_sink_logits_of_another_dtype_are_read_as_what_they_are(kernel, counts):
    q, k, v, _ = inputs(1, 200, 4, 2, 64, 0)
    logits = torch.tensor([0.5, -1.25, 3.0, 0.0], device="cuda")
    found = [
        flash_attention(q, k, v, kernel=kernel, sink_logits=logits.to(dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    ]
    assert counts["replays"] == 2
    assert all(torch.equal(x, found[0]) for x in found)
