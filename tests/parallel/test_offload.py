"""Offloaded activations: host memory, freed device memory, the order of copies, and their overlap with kernels."""

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
from meshflash.runtime.state import state
from parallel.memory_models import (
    CPU,
    LAYERS,
    WIDE,
    _in_float64,  # noqa: F401 an autouse fixture
    _on_gpu,  # noqa: F401 a fixture
    gpt,
    loss_and_gradients,
    samples,
    usage,
    with_memory_options,
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
    freed = [torch.UntypedStorage._expired(x) for x in memory]
    for x in memory:
        torch.UntypedStorage._free_weak_ref(x)
    return alive, freed


def test_device_memory_of_offloaded_inputs_is_freed():
    ids, labels, _ = samples()[0]
    alive, _ = storages_alive(apply_activation_checkpointing(gpt(), "full"), ids, labels)
    assert alive == [True] * LAYERS
    alive, freed = storages_alive(apply_activation_checkpointing(gpt(), "full", offload=True), ids, labels)
    assert alive == [False] * (LAYERS - 1) + [True]
    assert freed == [True] * LAYERS


def test_nothing_is_offloaded_under_no_grad():
    model = apply_activation_checkpointing(gpt(), "selective", offload=True).eval()
    ids, labels, _ = samples()[0]
    with torch.no_grad():
        assert torch.equal(model(ids, labels), gpt()(ids, labels))
    assert usage().peak_bytes == 0
    model(ids, labels).backward()  # eval() does not disable gradients
    assert usage().peak_bytes > 0


@pytest.mark.parametrize(("kind", "chunk_bytes"), [("full", 1 << 28), ("selective", 1 << 28), ("selective", 1 << 10)])
def test_backwards_run_in_any_order_twice_or_never(kind, chunk_bytes, monkeypatch):
    monkeypatch.setattr(offloading, "CHUNK_BYTES", chunk_bytes)  # the smaller chunk splits every tensor
    want = loss_and_gradients(gpt())[1]
    for order in ((0, 1), (1, 0)):
        model = with_memory_options(gpt(), activation_checkpointing=kind, offload_activations=True, tiles=2)
        model(*samples()[0][:2])  # the backward of this call never runs
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
    assert not state.all_of("offload store")


def test_exhausted_host_memory_raises_and_leaks_nothing(monkeypatch):
    model = apply_activation_checkpointing(gpt(), "full", offload=True)
    ids, labels, _ = samples()[0]
    monkeypatch.setattr(offloading, "CHUNK_BYTES", 1 << 10)
    free_sizes = iter([1 << 30] * 3)
    monkeypatch.setattr(
        offloading, "free_bytes", lambda: next(free_sizes, 100)
    )  # host memory runs out after a few chunks
    with pytest.raises(torch.OutOfMemoryError, match=r"more of the host's memory are needed .* take shorter sequences"):
        model(ids, labels).backward()
    monkeypatch.undo()
    assert usage().live_bytes == 0
    model(ids, labels).backward()


class Two(nn.Module):
    """Two blocks that save the same strided input, and tensors nested in dicts and lists; the tests make it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: Any, factor: Any) -> Any:
        return sum(part(x, dict(factors=[factor], number=3)) for part in self.parts)


class Scaled(nn.Module):
    """A block that scales its input; `Two` makes it."""

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
        strided = make(x)
        out = model(strided, make(factor))
        if offload:
            assert usage().live_bytes == strided.nbytes * 2
        out.sum().backward()
        found.append([x.grad, factor.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_input_changed_in_place_is_refused():
    model: Any = apply_activation_checkpointing(Two(), "full", offload=True)
    x = torch.randn(40, 40).requires_grad_().clone()
    out = model.parts[0](x, dict(factors=[1.0], number=1))
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="was changed in place"):
        model.parts[1](x, dict(factors=[1.0], number=1))
    assert out.requires_grad


class Clocks(offloading.SynchronousStreams):
    """Streams with vector clocks, made by the offload store under test.

    Two conflicting memory accesses without an order between them fail the test.
    """

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
        """Record an access of the current stream; fail if an earlier access of another stream may still run."""
        self.clocks[self.at][self.at] += 1
        now = self.at, Counter(self.clocks[self.at])
        for x, writes in ((read, False), (written, True)):
            if x is None:
                continue
            memory = x.untyped_storage().data_ptr()
            for other, wrote, stream, clock in self.uses:
                if other == memory and (writes or wrote):
                    assert clock[stream] <= now[1][stream], f"{self.at} uses memory that {stream} may still use"
            self.uses.append((memory, writes, *now))


def test_memory_is_not_reused_before_its_copies_complete(monkeypatch):
    monkeypatch.setattr(offloading, "make_streams", Clocks)
    store = offloading.offload_store(CPU)
    clocks: Any = store.streams
    device = [torch.full((500,), float(n)) for n in range(9)]

    def offload(n):
        clocks.use_memory(written=device[n])
        call = store.begin_block()
        return call, call.offload(device[n])

    def load(call, x):
        value = call.load(x)
        clocks.use_memory(read=value)
        return float(value[0])

    def reuse(n):
        """Overwrite freed memory at once, as the next owner of the allocator's block may do."""
        clocks.use_memory(written=device[n])
        device[n].fill_(-1.0)

    first, second, third = offload(0), offload(1), offload(2)
    reuse(0)
    reuse(1)
    assert load(*third) == 2.0  # the last block is never offloaded
    assert store.usage.num_prefetched == 1
    assert load(*second) == 1.0
    assert load(*first) == 0.0
    assert load(*first) == 0.0  # a second load, as with retain_graph
    del third, second  # host buffers are freed while copies may still read them
    fourth, fifth = offload(3), offload(4)
    assert store.usage.num_allocations == 3
    reuse(3)
    assert load(*fourth) == 3.0
    del fifth  # its copy may still run
    reuse(4)
    sixth = offload(5)
    assert load(*sixth) == 5.0
    del first, fourth
    seventh = offload(6)
    clocks.at = clocks.new_stream()  # continue on another stream
    assert load(*sixth) == 5.0
    del sixth
    eighth, ninth = offload(7), offload(8)
    assert load(*eighth) == 7.0
    assert load(*seventh) == 6.0
    assert load(*ninth) == 8.0
    assert store.usage.num_allocations == 3


def on_gpu(dtype, options, tokens):
    """Return loss and gradients of the second step, and its peak memory beyond what was allocated before."""
    model: Any = with_memory_options(GPT(WIDE).cuda(), **options)
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    batch: Any = dict(tokens=ids, labels=next_tokens(ids))
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        for _ in range(2):  # the first step allocates workspaces and compiles kernels
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            totals = accumulate(model, [batch, batch])
            torch.cuda.synchronize()
    return totals.loss, [p.grad for p in model.parameters()], torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_is_bitwise_equal_and_saves_memory_on_a_gpu(kind, dtype, monkeypatch):
    tokens = 16384
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting
    torch.use_deterministic_algorithms(True)  # otherwise attention and embedding sum in a different order each time
    loss, grads, peak = on_gpu(dtype, dict(activation_checkpointing=kind), tokens)
    same, again, _ = on_gpu(dtype, dict(activation_checkpointing=kind), tokens)
    assert torch.equal(loss, same), "two runs without offload differ, so that the comparison is meaningless"
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), "two runs without offload differ"
    got, offload_grads, offload_peak = on_gpu(
        dtype, dict(activation_checkpointing=kind, offload_activations=True), tokens
    )
    assert torch.equal(got, loss)
    assert all(torch.equal(a, b) for a, b in zip(offload_grads, grads, strict=True))
    # Under autocast blocks pass on float32. The tensors of two blocks are on the device at a time; allow two more.
    bytes_per_block = tokens * 512 * (4 + (dtype.itemsize if kind == "selective" else 0))
    assert offload_peak < peak - (WIDE.layers - 4) * bytes_per_block
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
    # A block input of 33 MB takes longer than 50 us over any bus; other copies take less.
    copies = [e for e in events if "Memcpy" in e.name() and "Pinned" in e.name() and e.duration_ns() > 50_000]
    kernels = [e for e in events if not e.name().startswith(("Memcpy", "Memset"))]
    computing = Counter(e.device_resource_id() for e in kernels).most_common(1)[0][0]
    for direction in ("DtoH", "HtoD"):
        copies_one_way = [e for e in copies if direction in e.name()]
        assert len(copies_one_way) >= WIDE.layers - 1
        assert all(e.device_resource_id() != computing for e in copies_one_way)
        overlapping = [e for e in copies_one_way if any(_overlap(e, kernel) for kernel in kernels)]
        assert len(overlapping) > len(copies_one_way) // 2


def _overlap(a: Any, b: Any) -> bool:
    """Do the two events overlap in time?"""
    return bool(a.start_ns() < b.start_ns() + b.duration_ns() and b.start_ns() < a.start_ns() + a.duration_ns())
