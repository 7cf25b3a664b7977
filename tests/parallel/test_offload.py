"""Offloaded activations: what is on the host when, which device memory is freed, and the order of copies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from meshflash import shutdown
from meshflash.models.gpt import GPT
from meshflash.parallel import (
    accumulate,
    apply_activation_checkpointing,
    next_tokens,
)
from meshflash.parallel import offload as offloading
from parallel.memory_models import (
    HERE,
    LAYERS,
    WIDE,
    _in_float64,  # noqa: F401 an autouse fixture
    _on_gpu,  # noqa: F401 a fixture
    gpt,
    samples,
    switched,
    trained,
    usage,
)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_saved_activations_are_on_the_host_until_the_backward(kind):
    ids, labels, _ = samples()[0]
    x, attended, lse = (ids.numel() * elements * 8 for elements in (32, 32, 4))
    loss = apply_activation_checkpointing(gpt(), kind, offload=True)(ids, labels)
    assert usage().live_bytes == LAYERS * (x if kind == "full" else x + attended + lse)
    loss.backward()
    assert usage().live_bytes == 0


def storages_alive(model, ids, labels):
    """Return which block inputs still have storage after the forward, and which have none after the backward."""
    memory: list[Any] = []
    for block in model.layers:
        block.register_forward_pre_hook(lambda _, args: memory.append(args[0].untyped_storage()._weak_ref()))
    loss = model(ids, labels)
    alive = [not torch.UntypedStorage._expired(x) for x in memory]
    loss.backward()
    gone = [torch.UntypedStorage._expired(x) for x in memory]
    for x in memory:
        torch.UntypedStorage._free_weak_ref(x)
    return alive, gone


def test_device_memory_of_offloaded_inputs_is_freed():
    ids, labels, _ = samples()[0]
    alive, _ = storages_alive(apply_activation_checkpointing(gpt(), "full"), ids, labels)
    assert alive == [True] * LAYERS
    alive, gone = storages_alive(apply_activation_checkpointing(gpt(), "full", offload=True), ids, labels)
    assert alive == [False] * (LAYERS - 1) + [True]
    assert gone == [True] * LAYERS


def test_nothing_is_offloaded_under_no_grad():
    model = apply_activation_checkpointing(gpt(), "selective", offload=True).eval()
    ids, labels, _ = samples()[0]
    with torch.no_grad():
        assert torch.equal(model(ids, labels), gpt()(ids, labels))
    assert usage().peak_bytes == 0
    model(ids, labels).backward()  # eval() does not disable gradients
    assert usage().peak_bytes > 0


@pytest.mark.parametrize(("kind", "piece"), [("full", 1 << 28), ("selective", 1 << 28), ("selective", 1 << 10)])
def test_backwards_run_in_any_order_twice_or_never(kind, piece, monkeypatch):
    monkeypatch.setattr(offloading, "CHUNK_BYTES", piece)  # the smaller chunk splits every tensor
    want = trained(gpt())[1]
    for order in ((0, 1), (1, 0)):
        model = switched(gpt(), activation_checkpointing=kind, offload_activations=True, tiles=2)
        model(*samples()[0][:2])  # its backward never runs
        calls = [model(ids, labels, mask=mask) for ids, labels, mask in samples()]
        count = sum(int((labels != -100).sum()) for _, labels, _ in samples())
        for n in order:
            (calls[n] / count).backward()
        assert all(torch.allclose(p.grad, want[name], rtol=1e-12) for name, p in model.named_parameters())
        del calls
        assert usage().live_bytes == 0
    allocations = usage().num_allocations
    loss = model(*samples()[0][:2])
    weights = list(model.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert usage().live_bytes == 0
    assert usage().num_allocations == allocations  # host buffers are reused
    shutdown()
    assert not offloading._stores


def test_exhausted_host_memory_raises_and_leaks_nothing(monkeypatch):
    model = apply_activation_checkpointing(gpt(), "full", offload=True)
    ids, labels, _ = samples()[0]
    monkeypatch.setattr(offloading, "CHUNK_BYTES", 1 << 10)
    left = iter([1 << 30] * 3)
    monkeypatch.setattr(offloading, "free_bytes", lambda: next(left, 100))  # after a few pieces
    with pytest.raises(torch.OutOfMemoryError, match=r"more of the host's memory are needed .* take shorter sequences"):
        model(ids, labels).backward()
    monkeypatch.undo()
    assert usage().live_bytes == 0
    model(ids, labels).backward()


class Two(nn.Module):
    """Two blocks that save the same strided input, and tensors nested in dicts and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: Any, factor: Any) -> Any:
        return sum(part(x, dict(factors=[factor], number=3)) for part in self.parts)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 0.5))

    def forward(self, x: Any, more: Any) -> Any:
        return (x * self.weight).exp() * more["factors"][0] * more["number"]


@pytest.mark.parametrize("make", [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:, :1].expand(-1, 40), torch.clone])
def test_a_tensor_that_two_blocks_save_is_offloaded_once_for_any_strides(make):
    found = []
    for offload in (False, True):
        x, factor = (
            torch.randn(40, 40, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in (0, 1)
        )
        model = Two()
        if offload:
            apply_activation_checkpointing(model, "full", offload=True)
        given = make(x)
        out = model(given, make(factor))
        if offload:
            assert usage().live_bytes == given.nbytes * 2
        out.sum().backward()
        found.append([x.grad, factor.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_input_changed_in_place_is_refused():
    model: Any = apply_activation_checkpointing(Two(), "full", offload=True)
    x = torch.randn(40, 40).requires_grad_().clone()
    kept = model.parts[0](x, dict(factors=[1.0], number=1))
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="was changed in place"):
        model.parts[1](x, dict(factors=[1.0], number=1))
    assert kept.requires_grad


class Clocks(offloading.SynchronousStreams):
    """Streams with vector clocks: an unordered pair of conflicting memory accesses fails the test."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.clocks: dict[str, Counter[str]] = {"main": Counter()}
        self.uses: list[Any] = []
        self.at = "main"

    def current_stream(self) -> Any:
        return self.at

    def new_stream(self) -> Any:
        name = f"side {len(self.clocks)}"
        self.clocks[name] = Counter()
        return name

    def record_event(self, stream: Any) -> Any:
        return Counter(self.clocks[stream])

    def wait_event(self, stream: Any, event: Any) -> None:
        self.clocks[stream] |= event

    def stream_context(self, stream: Any) -> Any:
        return self._On(self, stream)

    class _On:
        def __init__(self, clocks: Any, stream: str) -> None:
            self.clocks, self.stream = clocks, stream

        def __enter__(self) -> None:
            self.before, self.clocks.at = self.clocks.at, self.stream

        def __exit__(self, *_: Any) -> None:
            self.clocks.at = self.before

    def copy(self, target: Any, source: Any) -> None:
        assert self.at != "main"
        self.use_memory(read=source, written=target)
        super().copy(target, source)

    def use_memory(self, read: Any = None, written: Any = None) -> None:
        self.clocks[self.at][self.at] += 1
        now = self.at, Counter(self.clocks[self.at])
        for x, writes in ((read, False), (written, True)):
            if x is None:
                continue
            memory = x.untyped_storage().data_ptr()
            for other, wrote, stream, clock in self.uses:
                if other == memory and (writes or wrote):
                    assert clock[stream] <= now[1][stream], f"{self.at} uses what {stream} may still use"
            self.uses.append((memory, writes, *now))


def test_memory_is_not_reused_before_its_copies_complete(monkeypatch):
    monkeypatch.setattr(offloading, "make_streams", Clocks)
    store = offloading.offload_store(HERE)
    clocks: Any = store.streams
    device = [torch.full((500,), float(n)) for n in range(9)]

    def kept(n):
        clocks.use_memory(written=device[n])
        call = store.begin_block()
        return call, call.offload(device[n])

    def asked(call, x):
        value = call.load(x)
        clocks.use_memory(read=value)
        return float(value[0])

    def reused(n):
        """Simulate the allocator: the next owner of freed memory overwrites it at once."""
        clocks.use_memory(written=device[n])
        device[n].fill_(-1.0)

    first, second, third = kept(0), kept(1), kept(2)
    reused(0)
    reused(1)
    assert asked(*third) == 2.0  # the last block is never offloaded
    assert store.usage.num_prefetched == 1
    assert asked(*second) == 1.0
    assert asked(*first) == 0.0
    assert asked(*first) == 0.0  # twice, as with retain_graph
    del third, second  # host buffers are freed while copies may still read them
    fourth, fifth = kept(3), kept(4)
    assert store.usage.num_allocations == 3
    reused(3)
    assert asked(*fourth) == 3.0
    del fifth  # its copy may be in flight
    reused(4)
    sixth = kept(5)
    assert asked(*sixth) == 5.0
    del first, fourth
    seventh = kept(6)
    clocks.at = clocks.new_stream()  # continue on another stream
    assert asked(*sixth) == 5.0
    del sixth
    eighth, ninth = kept(7), kept(8)
    assert asked(*eighth) == 7.0
    assert asked(*seventh) == 6.0
    assert asked(*ninth) == 8.0
    assert store.usage.num_allocations == 3


def on_gpu(dtype, switches, tokens):
    """Return loss and gradients of the second step, and its peak memory beyond what was allocated before."""
    model: Any = switched(GPT(WIDE).cuda(), **switches)
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    batch: Any = dict(tokens=ids, labels=next_tokens(ids))
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        for _ in range(2):  # the first step allocates workspaces and compiles kernels
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            told = accumulate(model, [batch, batch])
            torch.cuda.synchronize()
    return told.loss, [p.grad for p in model.parameters()], torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_is_bitwise_equal_and_saves_memory_on_a_gpu(kind, dtype, monkeypatch):
    tokens = 16384
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    torch.use_deterministic_algorithms(True)  # attention and embedding add in another order each time otherwise
    loss, grads, peak = on_gpu(dtype, dict(activation_checkpointing=kind), tokens)
    same, again, _ = on_gpu(dtype, dict(activation_checkpointing=kind), tokens)
    assert torch.equal(loss, same), "two runs without offload differ, so nothing can be said"
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), "two runs without offload differ"
    got, others, less = on_gpu(dtype, dict(activation_checkpointing=kind, offload_activations=True), tokens)
    assert torch.equal(got, loss)
    assert all(torch.equal(a, b) for a, b in zip(others, grads, strict=True))
    # autocast leaves what blocks pass on in float32; two blocks' tensors are on the device at a time, and some slack
    each = tokens * 512 * (4 + (dtype.itemsize if kind == "selective" else 0))
    assert less < peak - (WIDE.layers - 4) * each
    used = offloading.offload_store(torch.device("cuda", torch.cuda.current_device())).usage
    assert used.live_bytes == 0
    assert used.num_prefetched == used.num_fetched > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_gpu")
def test_offload_copies_overlap_kernels_on_a_gpu():
    model: Any = apply_activation_checkpointing(GPT(WIDE).cuda(), "full", offload=True)
    ids = torch.randint(512, (1, 16384), device="cuda")
    model(ids, next_tokens(ids)).backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(ids, next_tokens(ids)).backward()
        torch.cuda.synchronize()
    inner: Any = profile.profiler
    events = [e for e in inner.kineto_results.events() if "CUDA" in str(e.device_type()) and e.duration_ns() > 0]
    # 33 MB take longer than this over any bus, and what else may be copied does not
    copies = [e for e in events if "Memcpy" in e.name() and "Pinned" in e.name() and e.duration_ns() > 50_000]
    kernels = [e for e in events if not e.name().startswith(("Memcpy", "Memset"))]
    computing = Counter(e.device_resource_id() for e in kernels).most_common(1)[0][0]
    for way in ("DtoH", "HtoD"):
        some = [e for e in copies if way in e.name()]
        assert len(some) >= WIDE.layers - 1
        assert all(e.device_resource_id() != computing for e in some)
        beside = [e for e in some if any(_overlap(e, kernel) for kernel in kernels)]
        assert len(beside) > len(some) // 2


def _overlap(a: Any, b: Any) -> bool:
    return bool(a.start_ns() < b.start_ns() + b.duration_ns() and b.start_ns() < a.start_ns() + a.duration_ns())
