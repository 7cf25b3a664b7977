"""Tiled MLPs and the tiled loss: exact results, and no tensor of the size that all tokens need."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshflash import shutdown
from meshflash.models import vit
from meshflash.models.layers import GatedMLP
from meshflash.parallel import (
    cross_entropy_sum,
    init_mesh,
    parallelize,
)
from meshflash.parallel.tiled_mlp import tile_mlp
from parallel.memory_models import (
    _in_float64,  # noqa: F401 an autouse fixture
    _on_gpu,  # noqa: F401 a fixture
    gpt,
    relative_errors,
    samples,
)


class LargestStorage(TorchDispatchMode):
    """A dispatch mode that records the elements of the largest storage that any op allocates; `largest` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return out


def largest(function, *inputs):
    """Return the elements of the largest storage that a forward and its backward allocate."""
    with LargestStorage() as seen:
        function(*inputs).sum().backward()
    return seen.elements


def test_cross_entropy_never_materializes_all_logits():
    hidden, weight = torch.randn(96, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    labels = torch.randint(512, (96,))
    plain = largest(lambda: functional.cross_entropy(hidden @ weight.T, labels, reduction="sum"))
    assert plain >= 96 * 512
    assert largest(lambda: cross_entropy_sum(hidden, weight, labels, tokens=10)) == 10 * 512


@pytest.mark.parametrize("make", [GatedMLP, vit.MLP])
def test_tiled_mlp_never_materializes_all_hidden_units(make):
    mlp, x = make(8, 64), torch.randn(3, 35, 8, requires_grad=True)
    assert largest(mlp, x) >= 105 * 64
    assert largest(tile_mlp(mlp, 4), x) == 27 * 64


@pytest.mark.parametrize("make", [GatedMLP, vit.MLP])
@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize("frozen", ["", "x", "down", "in"])
def test_tiled_mlp_matches_the_plain_mlp(make, tokens, frozen):
    mlp = make(8, 24)
    x = torch.randn(2, tokens, 8, requires_grad=frozen != "x")
    for name, p in mlp.named_parameters():
        nn.init.normal_(p)
        p.requires_grad_(not frozen or frozen == "x" or ("down" in name) != (frozen == "down"))
    trainable = [p for p in (x, *mlp.parameters()) if p.requires_grad]
    want = mlp(x)
    upstream = torch.randn_like(want)
    grads = torch.autograd.grad((want * upstream).sum(), trainable)
    fired: Counter[Any] = Counter()
    for p in trainable:
        p.register_post_accumulate_grad_hook(lambda p: fired.update([id(p)]))
    got = tile_mlp(mlp, 3)(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (got * upstream).sum().backward()
    assert all(fired[id(p)] == 1 for p in trainable)
    for p, grad in zip(trainable, grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [GatedMLP, vit.MLP])
def test_tiles_accumulate_gradients_in_float32(make, autocast):
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
            errors[name] = relative_errors(exact, grads)
    assert all(tiled <= 1.1 * plain for tiled, plain in zip(errors["tiles"], errors["plain"], strict=True)), errors


def test_unsupported_models_and_options_are_refused():
    with pytest.raises(ValueError, match="tiles=0: expected at least 1"):
        tile_mlp(gpt(1), 0)
    with pytest.raises(ValueError, match=r"Linear has no meshflash.parallel.tiled_mlp.TiledMLP"):
        tile_mlp(nn.Linear(2, 2), 2)
    model: Any = tile_mlp(gpt(1), 2)
    model.layers[0].mlp.up_proj = nn.Sequential(model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match=r"takes the weights of its nn.Linear themselves; got Sequential"):
        model(*samples()[0][:2])
    mesh = init_mesh(device="cpu")
    with pytest.raises(ValueError, match='set activation_checkpointing="full" or "selective" too'):
        parallelize(gpt(1), mesh, offload_activations=True)
    shutdown()


@pytest.mark.gpu
@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize("make", [GatedMLP, vit.MLP])
def test_tiles_accumulate_in_float32_and_save_memory_on_a_gpu(make):
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
            errors[name] = relative_errors(exact, grads)
    assert all(tiled <= 1.2 * plain for tiled, plain in zip(errors["tiles"], errors["plain"], strict=True)), errors
    assert peaks["tiles"] < peaks["plain"] - 16384 * 2048 * 2
