"""Switches that save memory change no result: offloaded activations, MLPs in tiles; and what they really free."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from comm.fake_streams import HostStreams, as_streams
from commands import app
from meshflash import Mask, shutdown
from meshflash.models import vit
from meshflash.models.gpt import GPT, tiny
from meshflash.models.layers import GatedMLP
from meshflash.parallel import (
    accumulate,
    cross_entropy_sum,
    init_mesh,
    next_tokens,
    parallelize,
    recompute,
    spread_batch,
)
from meshflash.parallel import offload as offloading
from meshflash.parallel import tiles as tiling
from meshflash.parallel.mesh import DATA, place, size
from meshflash.parallel.tiles import tile_mlp

HERE = torch.device("cpu")
LAYERS = 4
SWITCHES: Any = [
    dict(tiles=3),
    dict(recompute="full", offload_activations=True),
    dict(recompute="selective", offload_activations=True),
    dict(recompute="full", tiles=4),
    dict(recompute="selective", offload_activations=True, tiles=5),
]


@pytest.fixture(autouse=True)
def _in_float64():
    torch.set_default_dtype(torch.float64)
    offloading.release()
    yield
    offloading.release()
    torch.set_default_dtype(torch.float32)


def usage():
    return offloading.store_of(HERE).usage


def gpt(layers=LAYERS):
    return GPT(tiny(vocabulary=61, dim=32, hidden=48, heads=4, kv_heads=4, layers=layers))


def switched(model, recompute=None, offload_activations=False, tiles=1):
    if tiles > 1:
        tile_mlp(model, tiles)
    return model if recompute is None else recompute_blocks(model, recompute, offload_activations)


recompute_blocks = recompute


def samples():
    """Micro-batches of other lengths, with documents and ignored labels: (tokens, labels, mask)."""
    found = []
    for n, tokens in enumerate((37, 53)):
        ids = torch.randint(61, (3, tokens), generator=torch.Generator().manual_seed(n))
        mask = Mask.causal() & Mask.documents([7, tokens - 9, 2]) if n else None
        labels = next_tokens(ids, mask)
        labels[0, 3 + n :] = -100
        found.append((ids, labels, mask))
    return found


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(model, batches=None, mesh=None):
    """The loss, and the gradients by name."""
    batches = batches or [dict(tokens=t, labels=y, mask=m) for t, y, m in samples()]
    told = accumulate(model, batches, mesh)
    return told.loss, {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}


def error(got, want):
    """The largest difference of losses and gradients, by what a gradient has at most."""
    assert got[1].keys() == want[1].keys()
    pairs = [(got[0], want[0]), *((got[1][name], grad) for name, grad in want[1].items())]
    return max(float((a - b).abs().max()) / max(1e-3, float(b.abs().max())) for a, b in pairs)


class Slow(HostStreams):
    """Streams whose copies come late, into memory that is NaN before."""

    def pinned(self, count: int, dtype: torch.dtype) -> Any:
        return torch.full((count,), 255, dtype=dtype)

    def copy(self, target: Any, source: Any) -> None:
        assert self.current() is not self.main
        super().copy(target, source)


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("streams", ["none", "slow"])
def test_every_switch_has_the_loss_and_gradients_of_none(switches, streams, monkeypatch):
    if streams == "slow":
        monkeypatch.setattr(offloading, "make_streams", as_streams(Slow(0.002)))
        torch.use_deterministic_algorithms(True)  # and new memory of the device is NaN, too
    try:
        got = trained(switched(gpt(), **switches))
    finally:
        torch.use_deterministic_algorithms(False)
    assert error(got, trained(gpt())) < 1e-12
    if "offload_activations" in switches:
        # by micro-batch all blocks' but the last one's, each ahead of its backward
        each = 3 if switches["recompute"] == "selective" else 1
        assert usage().brought == usage().ahead == 2 * each * (LAYERS - 1)
        assert usage().live == 0


def on_meshes(rank, world, group):
    """By mesh and switches: how far from one process."""
    torch.set_default_dtype(torch.float64)
    try:
        want, found = trained(gpt(2)), []
        images = torch.randn(2, 3, 24, 16, generator=torch.Generator().manual_seed(0))
        classes = torch.tensor([1, 7])
        seen = vit.ViT(vit.tiny(dim=32, hidden=48))
        (loss := seen(images, classes)).backward()
        grads: Any = {name: p.grad for name, p in seen.named_parameters()}
        wanted = loss.detach() / 2, {name: grad / 2 for name, grad in grads.items()}
        meshes: Any = dict(fsdp=2), dict(cp=2), dict(tp=2), dict(dp=2)
        for n, axes in enumerate(meshes):
            mesh = init_mesh(**axes, device="cpu")
            batches = []
            for ids, labels, mask in samples():
                rows = torch.arange(len(ids)).tensor_split(size(mesh, DATA))[place(mesh, DATA)]
                batches.append(spread_batch(ids[rows], mesh, labels=labels[rows], mask=mask))
            counts = []
            for switches in (dict(recompute="selective"), SWITCHES[-1], SWITCHES[n]):
                with Collectives() as seen_here:
                    got = trained(parallelize(gpt(2), mesh, **switches), batches, mesh)
                counts.append(seen_here.count)
                found.append((axes, switches, error(got, want)))
            assert 0 < counts[1] <= counts[0], (axes, counts)  # weights and gradients travel once for all tiles
            if "tp" in axes:  # biases, too
                model = parallelize(vit.ViT(vit.tiny(dim=32, hidden=48)), mesh, **SWITCHES[-1])
                got = trained(model, [dict(patches=images, labels=classes)], mesh)
                found.append((axes, "vit", error(got, wanted)))
        return found, usage().live
    finally:
        torch.set_default_dtype(torch.float32)


class Collectives(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count += "wait" not in func.__name__
        return func(*args, **(kwargs or {}))


def test_every_mesh_has_the_loss_and_gradients_of_one_process(pool):
    for found, live in pool.run(2, on_meshes):
        assert live == 0
        for *what, far in found:
            assert far < 1e-12, (what, far)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_what_blocks_keep_is_on_the_host_until_the_backward(kind):
    ids, labels, _ = samples()[0]
    x, attended, lse = (ids.numel() * numbers * 8 for numbers in (32, 32, 4))
    loss = recompute(gpt(), kind, offload=True)(ids, labels)
    assert usage().live == LAYERS * (x if kind == "full" else x + attended + lse)
    loss.backward()
    assert usage().live == 0


def storages_alive(model, ids, labels):
    """How many of the blocks' inputs have memory after a forward."""
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


def test_memory_of_offloaded_inputs_is_freed():
    ids, labels, _ = samples()[0]
    alive, _ = storages_alive(recompute(gpt(), "full"), ids, labels)
    assert alive == [True] * LAYERS
    alive, gone = storages_alive(recompute(gpt(), "full", offload=True), ids, labels)
    assert alive == [False] * (LAYERS - 1) + [True]
    assert gone == [True] * LAYERS


def test_without_gradients_nothing_is_kept():
    model = recompute(gpt(), "selective", offload=True).eval()
    ids, labels, _ = samples()[0]
    with torch.no_grad():
        assert torch.equal(model(ids, labels), gpt()(ids, labels))
    assert usage().peak == 0
    model(ids, labels).backward()  # eval says nothing of gradients
    assert usage().peak > 0


@pytest.mark.parametrize(("kind", "piece"), [("full", 1 << 28), ("selective", 1 << 28), ("selective", 1 << 10)])
def test_calls_in_flight_in_any_order_twice_and_without_a_backward(kind, piece, monkeypatch):
    monkeypatch.setattr(offloading, "PIECE", piece)  # of the host's memory; the smaller one cuts every tensor
    want = trained(gpt())[1]
    for order in ((0, 1), (1, 0)):
        model = switched(gpt(), recompute=kind, offload_activations=True, tiles=2)
        model(*samples()[0][:2])  # nobody asks for its gradients
        calls = [model(ids, labels, mask=mask) for ids, labels, mask in samples()]
        count = sum(int((labels != -100).sum()) for _, labels, _ in samples())
        for n in order:
            (calls[n] / count).backward()
        assert all(torch.allclose(p.grad, want[name], rtol=1e-12) for name, p in model.named_parameters())
        del calls
        assert usage().live == 0
    allocations = usage().allocations
    loss = model(*samples()[0][:2])
    weights = list(model.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert usage().live == 0
    assert usage().allocations == allocations  # memory of the host is used again
    shutdown()
    assert not offloading._stores


def test_a_host_without_memory_is_an_error_that_leaves_nothing_behind(monkeypatch):
    model = recompute(gpt(), "full", offload=True)
    ids, labels, _ = samples()[0]
    monkeypatch.setattr(offloading, "PIECE", 1 << 10)
    left = iter([1 << 30] * 3)
    monkeypatch.setattr(offloading, "free_bytes", lambda: next(left, 100))  # after a few pieces
    with pytest.raises(torch.OutOfMemoryError, match=r"more of the host's memory are needed .* take shorter sequences"):
        model(ids, labels).backward()
    monkeypatch.undo()
    assert usage().live == 0
    model(ids, labels).backward()


class Two(nn.Module):
    """Two blocks of the same input, which lies askew, and of others in other shapes."""

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
def test_a_tensor_that_two_blocks_keep_is_kept_once_whatever_its_strides(make):
    found = []
    for offload in (False, True):
        x, factor = (
            torch.randn(40, 40, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in (0, 1)
        )
        model = Two()
        if offload:
            recompute(model, "full", offload=True)
        given = make(x)
        out = model(given, make(factor))
        if offload:
            assert usage().live == given.nbytes * 2
        out.sum().backward()
        found.append([x.grad, factor.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_input_that_is_changed_is_refused():
    model: Any = recompute(Two(), "full", offload=True)
    x = torch.randn(40, 40).requires_grad_().clone()
    kept = model.parts[0](x, dict(factors=[1.0], number=1))
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="was changed in place"):
        model.parts[1](x, dict(factors=[1.0], number=1))
    assert kept.requires_grad


class Clocks(offloading.AtOnce):
    """Streams that know what comes before what: conflicting uses of memory that have no order are found."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.clocks: dict[str, Counter[str]] = {"main": Counter()}
        self.uses: list[Any] = []
        self.at = "main"

    def current(self) -> Any:
        return self.at

    def new(self) -> Any:
        name = f"side {len(self.clocks)}"
        self.clocks[name] = Counter()
        return name

    def mark(self, stream: Any) -> Any:
        return Counter(self.clocks[stream])

    def after(self, stream: Any, event: Any) -> None:
        self.clocks[stream] |= event

    def on(self, stream: Any) -> Any:
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


def test_no_memory_is_used_before_its_copies_are_done(monkeypatch):
    monkeypatch.setattr(offloading, "make_streams", Clocks)
    store = offloading.store_of(HERE)
    clocks: Any = store.streams
    device = [torch.full((500,), float(n)) for n in range(9)]

    def kept(n):
        clocks.use_memory(written=device[n])
        call = store.call()
        return call, call.keep(device[n])

    def asked(call, x):
        value = call.recall(x)
        clocks.use_memory(read=value)
        return float(value[0])

    def reused(n):
        """Whoever gets the memory of a tensor that is gone writes to it at once."""
        clocks.use_memory(written=device[n])
        device[n].fill_(-1.0)

    first, second, third = kept(0), kept(1), kept(2)
    reused(0)
    reused(1)
    assert asked(*third) == 2.0  # which never left
    assert store.usage.ahead == 1
    assert asked(*second) == 1.0
    assert asked(*first) == 0.0
    assert asked(*first) == 0.0  # twice: a graph that is retained
    del third, second  # memory of the host is free while copies may read it
    fourth, fifth = kept(3), kept(4)
    assert store.usage.allocations == 3
    reused(3)
    assert asked(*fourth) == 3.0
    del fifth  # its copy may be under way
    reused(4)
    sixth = kept(5)
    assert asked(*sixth) == 5.0
    del first, fourth
    seventh = kept(6)
    clocks.at = clocks.new()  # another stream than that which all this was done for
    assert asked(*sixth) == 5.0
    del sixth
    eighth, ninth = kept(7), kept(8)
    assert asked(*eighth) == 7.0
    assert asked(*seventh) == 6.0
    assert asked(*ninth) == 8.0
    assert store.usage.allocations == 3


class Largest(TorchDispatchMode):
    """The most numbers that a tensor had which an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.itemsize)
        return out


def largest(function, *inputs):
    with Largest() as seen:
        function(*inputs).sum().backward()
    return seen.numbers


def test_logits_of_all_tokens_are_never_held():
    hidden, weight = torch.randn(96, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    labels = torch.randint(512, (96,))
    plain = largest(lambda: functional.cross_entropy(hidden @ weight.T, labels, reduction="sum"))
    assert plain >= 96 * 512
    assert largest(lambda: cross_entropy_sum(hidden, weight, labels, tokens=10)) == 10 * 512


@pytest.mark.parametrize("make", [GatedMLP, vit.MLP])
def test_hidden_units_of_all_tokens_are_never_held(make):
    mlp, x = make(8, 64), torch.randn(3, 35, 8, requires_grad=True)
    assert largest(mlp, x) >= 105 * 64
    assert largest(tile_mlp(mlp, 4), x) == 27 * 64


@pytest.mark.parametrize("make", [GatedMLP, vit.MLP])
@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize("frozen", ["", "x", "down", "in"])
def test_an_mlp_in_tiles_is_the_mlp(make, tokens, frozen):
    mlp = make(8, 24)
    x = torch.randn(2, tokens, 8, requires_grad=frozen != "x")
    for name, p in mlp.named_parameters():
        nn.init.normal_(p)
        p.requires_grad_(not frozen or frozen == "x" or ("down" in name) != (frozen == "down"))
    learning = [p for p in (x, *mlp.parameters()) if p.requires_grad]
    want = mlp(x)
    weigh = torch.randn_like(want)
    grads = torch.autograd.grad((want * weigh).sum(), learning)
    fired: Counter[Any] = Counter()
    for p in learning:
        p.register_post_accumulate_grad_hook(lambda p: fired.update([id(p)]))
    got = tile_mlp(mlp, 3)(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (got * weigh).sum().backward()
    assert all(fired[id(p)] == 1 for p in learning)
    for p, grad in zip(learning, grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), want, rtol=1e-12, atol=1e-12)


def test_a_block_that_is_computed_again_leaves_the_tiles_to_the_backward(monkeypatch):
    calls: list[int] = []
    made = tiling._Slices._projected

    def counted(self, x, weights):
        calls.append(len(x))
        return made(self, x, weights)

    monkeypatch.setattr(tiling._Slices, "_projected", counted)
    for kind in (None, "full", "selective"):
        calls.clear()
        trained(switched(gpt(1), recompute=kind, tiles=3))
        assert calls == 2 * [37] * 3 + 2 * [53] * 3


def far_from(exact, grads):
    return [float((g.double() - e).norm() / e.norm()) for g, e in zip(grads, exact, strict=True)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [GatedMLP, vit.MLP])
def test_in_half_precision_tiles_are_added_in_float32(make, autocast):
    torch.manual_seed(0)
    mlp, x = make(16, 32), torch.randn(4, 512, 16)
    errors = {}
    for name in ("exact", "plain", "tiles"):
        dtype = torch.float64 if name == "exact" else torch.float32 if autocast else torch.bfloat16
        one = make(16, 32)
        one.load_state_dict({key: w.bfloat16().double() for key, w in mlp.state_dict().items()})
        one.to(dtype)
        if name == "tiles":
            tile_mlp(one, 64)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and name != "exact"):
            out = one(x.bfloat16().to(dtype))
        if name != "exact":
            assert out.dtype == torch.bfloat16
        out.double().square().sum().backward()
        grads = [p.grad for p in one.parameters()]
        assert {g.dtype for g in grads} == {dtype}
        if name == "exact":
            exact = grads
        else:
            errors[name] = far_from(exact, grads)
    assert all(tiled <= 1.1 * plain for tiled, plain in zip(errors["tiles"], errors["plain"], strict=True)), errors


def test_refusals():
    with pytest.raises(ValueError, match="tiles=0: expected at least 1"):
        tile_mlp(gpt(1), 0)
    with pytest.raises(ValueError, match=r"Linear has no meshflash.parallel.tiles.TiledMLP"):
        tile_mlp(nn.Linear(2, 2), 2)
    model: Any = tile_mlp(gpt(1), 2)
    model.layers[0].mlp.up_proj = nn.Sequential(model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match=r"takes the weights of its nn.Linear themselves; got Sequential"):
        model(*samples()[0][:2])
    mesh = init_mesh(device="cpu")
    with pytest.raises(ValueError, match='say recompute="full" or "selective" too'):
        parallelize(gpt(1), mesh, offload_activations=True)
    shutdown()


def test_the_bench_of_a_step_takes_the_switches(tmp_path):
    torch.set_default_dtype(torch.float32)
    words = (
        "benchmarks step --tokens 33 --rounds 1 --recompute full --offload-activations --tiles 3 --device cpu --output"
    )
    result = CliRunner().invoke(app, [*words.split(), f"{tmp_path}/s.json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "linear 64 to 128 of 11 tokens" in " ".join(result.output.split())
    shutdown()


@pytest.fixture
def _on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.set_default_dtype(torch.float32)
    yield
    torch.use_deterministic_algorithms(False)
    shutdown()


WIDE = tiny(vocabulary=512, dim=512, head_dim=64, heads=8, kv_heads=8, hidden=1024, layers=10)


def on_gpu(dtype, switches, tokens):
    """Loss and gradients of a second step, and the most memory that it took beyond what it found."""
    model: Any = switched(GPT(WIDE).cuda(), **switches)
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    batch: Any = dict(tokens=ids, labels=next_tokens(ids))
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        for _ in range(2):  # the first one takes scratch and makes kernels
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
def test_on_a_gpu_offload_changes_no_bit_and_saves_memory(kind, dtype, monkeypatch):
    tokens = 16384
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    torch.use_deterministic_algorithms(True)  # attention and embedding add in another order each time otherwise
    loss, grads, peak = on_gpu(dtype, dict(recompute=kind), tokens)
    same, again, _ = on_gpu(dtype, dict(recompute=kind), tokens)
    assert torch.equal(loss, same), "two runs without offload differ, so nothing can be said"
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), "two runs without offload differ"
    got, others, less = on_gpu(dtype, dict(recompute=kind, offload_activations=True), tokens)
    assert torch.equal(got, loss)
    assert all(torch.equal(a, b) for a, b in zip(others, grads, strict=True))
    # autocast leaves what blocks pass on in float32; two blocks' tensors are on the device at a time, and some slack
    each = tokens * 512 * (4 + (dtype.itemsize if kind == "selective" else 0))
    assert less < peak - (WIDE.layers - 4) * each
    used = offloading.store_of(torch.device("cuda", torch.cuda.current_device())).usage
    assert used.live == 0
    assert used.ahead == used.brought > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_gpu")
def test_on_a_gpu_copies_run_beside_kernels():
    model: Any = recompute(GPT(WIDE).cuda(), "full", offload=True)
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


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize("make", [GatedMLP, vit.MLP])
def test_on_a_gpu_tiles_are_added_in_float32_and_save_memory(make):
    torch.manual_seed(0)
    mlp, x = make(256, 2048).cuda(), torch.randn(1, 16384, 256, device="cuda")
    exact: Any = []
    errors, peaks = {}, {}
    for name in ("exact", "plain", "tiles"):
        dtype = torch.float64 if name == "exact" else torch.bfloat16
        one = make(256, 2048).cuda()
        one.load_state_dict({key: w.bfloat16().float() for key, w in mlp.state_dict().items()})
        one.to(dtype)
        if name == "tiles":
            tile_mlp(one, 16)
        for _ in range(2):
            one.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one(x.bfloat16().to(dtype)).square().sum().backward()
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated() - before
        grads = [p.grad for p in one.parameters()]
        if name == "exact":
            exact = grads
        else:
            errors[name] = far_from(exact, grads)
    assert all(tiled <= 1.2 * plain for tiled, plain in zip(errors["tiles"], errors["plain"], strict=True)), errors
    assert peaks["tiles"] < peaks["plain"] - 16384 * 2048 * 2
