"""Unit tests of `meshflash.parallel`: meshes, samplers, micro-batches and attention modules."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

from meshflash import Layout, Mask, attention, flash_attention, init, shard, shutdown
from meshflash.models.gpt import GPT, tiny
from meshflash.parallel import (
    IGNORE_INDEX,
    ContextParallel,
    MeshAttention,
    MeshSampler,
    accumulate,
    apply_activation_checkpointing,
    clip_grad_norm,
    cross_entropy_sum,
    gradient_norm,
    init_mesh,
    micro_batches,
    next_tokens,
    parallelize,
    replicate,
    shard_batch,
    sharded_optimizer,
    synchronized,
)
from meshflash.parallel import shard as shard_weights
from meshflash.parallel.mesh import REDUCE_AXES, flatten_axes, mesh_rank, reduce_mesh, size
from meshflash.parallel.weights import parameters


def axes_of_orders(rank, world, group):
    """Return the ranks of this rank's axes for several orders of axes."""
    found: dict[str, Any] = {}
    for order in ("cp-tp-dp", "tp-cp-dp", "dp-cp-tp", "cp-fsdp-tp-dp"):
        mesh = init_mesh(1, 1, 2, 2, order=order, device="cpu")
        found[order] = mesh["cp"].mesh.tolist(), mesh["tp"].mesh.tolist()
    mesh = init_mesh(2, 1, 2, 1, device="cpu")
    found["places"] = (
        mesh_rank(mesh, ("dp", "fsdp")),
        mesh_rank(mesh, REDUCE_AXES),
        sorted(reduce_mesh(mesh).mesh.tolist()),
    )
    assert flatten_axes(mesh, "dp", "fsdp-cp", "tp") is flatten_axes(mesh, "dp", "fsdp-cp", "tp")
    return found


def test_the_first_axis_of_the_order_has_neighboring_ranks(pool):
    found = pool.run(4, axes_of_orders)
    assert found[1]["cp-tp-dp"] == ([0, 1], [1, 3])
    assert found[1]["tp-cp-dp"] == ([1, 3], [0, 1])
    assert found[1]["dp-cp-tp"] == ([0, 1], [1, 3])
    assert found[2]["cp-fsdp-tp-dp"] == ([2, 3], [0, 2])
    assert [rank["places"] for rank in found] == [(n // 2, n, [0, 1, 2, 3]) for n in range(4)]


def invalid_call_messages(rank, world, group):
    """Return the error message of each invalid call."""
    messages = []
    mesh = init_mesh(cp=2, device="cpu")
    own: Any = dict(tokens=torch.zeros(1, 3, dtype=torch.int64), labels=torch.zeros(1, 3, dtype=torch.int64))
    calls = [
        lambda: init_mesh(cp=3, device="cpu"),
        lambda: init_mesh(cp=0, device="cpu"),
        lambda: init_mesh(order="cp-dp", device="cpu"),
        lambda: reduce_mesh(mesh["cp"]),
        lambda: shard_weights(GPT(tiny()), mesh, "half"),
        lambda: shard_weights(GPT(tiny()), mesh, wrap="layers"),
        lambda: parallelize(nn.Linear(2, 2), init_mesh(tp=2, device="cpu")),
        lambda: parallelize(GPT(tiny(kv_heads=1)), init_mesh(tp=2, device="cpu")),
        lambda: parallelize(GPT(tiny(hidden=33)), init_mesh(tp=2, device="cpu")),
        lambda: parallelize(nn.Linear(2, 2), mesh),
        lambda: parallelize(GPT(tiny()), init_mesh(dp=2, device="cpu"), schedule="rings"),
        lambda: replicate(GPT(tiny()).to("meta"), mesh),
        lambda: parallelize(GPT(tiny()), mesh)(**own),
        lambda: apply_activation_checkpointing(GPT(tiny()), "some"),
        lambda: shard_batch(own["tokens"], mesh, layout="spiral"),
        lambda: accumulate(nn.Linear(2, 2), [own] if rank else [], mesh),
        lambda: GPT(tiny())(**own, layout=Layout.zigzag(6, 2)),
        lambda: MeshSampler(1, init_mesh(device="cpu")),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def test_invalid_arguments_are_refused(pool):
    want = (
        "cp 3 x tp 1 is 3 ranks, and the job has 2", "cp=0; expected at least 1", "expected the axes dp, cp and tp",
        "expected one of init_mesh", "mode='half': expected one of full, grad_op, hybrid", 'expected "blocks", "model"',
        "Linear has no method tensor_plan", "tp=2: it does not divide the 1 KV heads", "33 hidden units",
        "Linear has no meshflash.parallel.MeshAttention", "schedule='rings': expected one of auto",
        "weights are on the meta device", "ranks share the sequence; give layout=",
        "activation_checkpointing='some': expected one of full, selective",
        "layout='spiral': expected a Layout, or one of auto, zigzag", "a rank has no batch", "this module has no mesh",
        "1 samples for 2 data ranks",
    )  # fmt: skip
    for messages in pool.run(2, invalid_call_messages):
        assert len(messages) == len(want)
        for text, part in zip(messages, want, strict=True):
            assert part in text


class SampleCounts(nn.Module):
    """A model with a weight for each sample, whose gradient counts the uses of the sample; the tests make it."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, index: Any, labels: Any) -> Any:
        return self.weight[index].where(labels != IGNORE_INDEX, 0.0).sum()


def train_epoch(rank, world, group, samples, batch, num_micro_batches):
    """Train for an epoch; return the sampler's order and length, the uses of each sample, and the steps."""
    mesh = init_mesh(-1, 1, 2 if world == 4 else 1, 1, device="cpu")
    sampler = MeshSampler(samples, mesh, seed=3)
    sampler.set_epoch(5)
    data: Any = range(samples)
    loader: Any = DataLoader(data, batch, sampler=sampler)
    model = replicate(SampleCounts(samples), mesh)
    batches = (dict(index=b, labels=torch.ones_like(b)) for b in loader)
    counts, steps = torch.zeros(samples, dtype=torch.float64), []
    for step_batches in micro_batches(batches, num_micro_batches, mesh):
        model.zero_grad()
        totals = accumulate(model, step_batches, mesh)
        weight: Any = next(model.parameters())
        counts += weight.grad * totals.tokens
        steps.append(int(totals.tokens))
    return list(sampler), len(sampler), counts.tolist(), steps


@pytest.mark.parametrize(("world", "samples"), [(1, 7), (2, 7), (3, 7), (4, 5)])
def test_every_sample_counts_once_on_any_number_of_ranks(pool, world, samples):
    found = pool.run(world, train_epoch, samples, 2, 2)
    copies = 2 if world == 4 else 1  # ranks of cp have the same samples, and this model has the same loss on them
    for _, _, counts, steps in found:
        assert counts == pytest.approx([copies] * samples, abs=1e-12)
        assert sum(steps) == copies * samples
        assert steps == found[0][3]
    order = sorted(n for own, *_ in found[::copies] for n in own)
    assert order == list(range(samples))
    assert all(len(own) == length for own, length, *_ in found)


def test_the_order_of_samples_is_the_same_on_any_mesh(pool):
    alone = pool.run(1, train_epoch, 7, 2, 1)[0][0]
    three = [own for own, *_ in pool.run(3, train_epoch, 7, 2, 1)]
    assert [three[n % 3][n // 3] for n in range(7)] == alone
    assert alone != list(range(7))


class UserModel(nn.Module):
    """A user's model that contains `MeshAttention`; the tests make it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 3 * 16)
        self.attend = MeshAttention(mask=Mask.causal() & Mask.window(9, 0), softcap=5.0)

    def forward(self, x: Any, layout: Layout | None = None) -> Any:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return self.attend(q, k, v, layout=layout)


def apply_style(rank, world, group):
    """Return the error of a user's model with the `ContextParallel` style, and its repr."""
    torch.manual_seed(0)
    model, x = UserModel().double(), torch.randn(2, 17, 8, dtype=torch.float64)
    want = model(x)  # a process group exists, but no mesh: a single device
    mesh = init_mesh(cp=world, device="cpu")
    layout = Layout.striped(17, world)
    parallelize_module(model, mesh["cp"], {"attend": ContextParallel("striped")})
    got = model(shard(x, layout, mesh["cp"]), layout=layout)
    return float((got - shard(want, layout, mesh["cp"])).abs().max()), repr(model.attend)


def test_context_parallel_style_applies_to_a_users_model(pool):
    for error, text in pool.run(3, apply_style):
        assert error < 1e-12
        assert text.startswith("MeshAttention(ranks=3, schedule='striped', mask=")


def test_mesh_attention_without_a_mesh_is_flash_attention():
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    module = MeshAttention(mask=Mask.causal(), scale=0.3, reduce_dtype=torch.float64)
    torch.testing.assert_close(module(q, k, v), flash_attention(q, k, v, mask=Mask.causal(), scale=0.3))
    torch.testing.assert_close(module(q, k, v, mask=Mask.full()), flash_attention(q, k, v, scale=0.3))
    got, lse = module(q, k, v, return_lse=True)
    torch.testing.assert_close(got, attention(q, k, v, mask=Mask.causal(), scale=0.3))
    assert lse.shape == (1, 2, 9)


def count_reductions(rank, world, group):
    """Return the number of reductions in a step of three micro-batches, and the sizes of the optimizer state."""
    mesh = init_mesh(device="cpu")
    model: Any = replicate(SampleCounts(8), mesh, bucket_mb=1e-6)
    calls: list[Any] = []
    model.register_comm_hook(calls, _averaged)
    labels = torch.ones(2, dtype=torch.int64)
    accumulate(model, [dict(index=torch.tensor([n, n]), labels=labels) for n in range(3)], mesh)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    layers[3].weight.requires_grad_(False)
    layers[2].weight = layers[1].weight
    optimizer: Any = sharded_optimizer(replicate(layers, mesh), torch.optim.Adam, mesh)
    layers(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return len(calls), len(optimizer.optim.state), sum(len(group["params"]) for group in optimizer.param_groups)


def _averaged(calls, bucket):
    """Average a DDP bucket over ranks, and record that it ran."""
    calls.append(bucket)
    buffer = bucket.buffer() / torch.distributed.get_world_size()
    return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])


def test_gradients_are_reduced_once_and_optimizer_state_is_sharded(pool):
    found = pool.run(2, count_reductions)
    assert [calls for calls, *_ in found] == [1, 1]
    num_trainable = found[0][2]
    assert num_trainable == 6  # four biases and two weights: one weight is shared, one is frozen
    assert [state for _, state, _ in found] == [3, 3]


class Nested(nn.Module):
    """Nested blocks, one of them with the weight of the head; the tests make it."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2)) for _ in range(2)]
        self.stages = nn.ModuleList(nn.ModuleDict({"layers": layers}) for layers in inner)
        self.outer = nn.ModuleList([Stage() for _ in range(2)])
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.outer[0].layers[1].weight  # type: ignore[union-attr, index]

    def forward(self, x: Any) -> Any:
        for stage in self.stages:
            for layer in stage["layers"]:  # type: ignore[index]
                x = torch.tanh(layer(x))
        for block in self.outer:
            x = block(x)
        return self.head(x).square().sum()


class Stage(nn.Module):
    """Two residual layers; `Nested` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def nested_gradient_errors(rank, world, group):
    """Return the gradient errors of nested blocks with each kind of activation checkpointing."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for kind in ("full", "selective"):
        torch.manual_seed(0)
        model, plain = Nested().double(), Nested().double()
        plain.load_state_dict(model.state_dict())
        plain(x).backward()
        mesh = init_mesh(fsdp=2, device="cpu")
        sharded: Any = shard_weights(apply_activation_checkpointing(model, kind), mesh)
        (sharded(x.chunk(2)[rank]) * 2).backward()
        pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
        found.append(max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs))
    return found


def test_nested_blocks_and_shared_weights_are_sharded(pool):
    for errors in pool.run(2, nested_gradient_errors):
        assert max(errors) < 1e-12


def test_init_mesh_works_for_a_single_process():
    mesh = init_mesh(device="cpu")
    assert mesh.mesh_dim_names == ("dp", "fsdp", "cp", "tp")
    assert size(mesh, REDUCE_AXES) == 1
    assert init().world_size == 1
    shutdown()
    assert not torch.distributed.is_initialized()


def unsynchronized_gradient_errors(rank, world, group):
    """Return the errors of gradients after an unsynchronized micro-batch and an evaluation."""
    torch.set_default_dtype(torch.float64)
    try:
        mesh = init_mesh(fsdp=2, device="cpu")
        ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
        batch: Any = dict(tokens=ids, labels=next_tokens(ids))
        plain: Any = GPT(tiny())
        plain(**batch).backward()
        want: dict[str, Any] = {name: p.grad for name, p in plain.named_parameters()}
        errors = []
        for mode in ("full", "grad_op"):
            model: Any = shard_weights(GPT(tiny()), mesh, mode)
            with synchronized(model, last=False):
                model(**batch).backward()
            with torch.no_grad():
                model(**batch)
            model(**batch).backward()  # reduces the sum with the earlier gradients
            with torch.no_grad():
                model(**batch)  # may leave weights gathered
            norm = gradient_norm(model)
            weights: Any = parameters(model)
            found = {name: p.grad.full_tensor() for name, p in zip(want, weights, strict=True)}
            errors.append(max(float((found[name] - 2 * grad).abs().max()) for name, grad in want.items()))
            errors.append(abs(float(norm - 2 * gradient_norm(plain))))
        return errors
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_are_reduced_again_after_an_unsynchronized_micro_batch(pool):
    for errors in pool.run(2, unsynchronized_gradient_errors):
        assert max(errors) < 1e-12


class DropoutModel(nn.Module):
    """Blocks with two kinds of dropout; the tests make it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DropoutBlock() for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class DropoutBlock(nn.Module):
    """Attention with dropout, and a dropout layer; `DropoutModel` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)
        self.attend = MeshAttention(dropout=0.4)

    def forward(self, x: Any) -> Any:
        q = self.project(x)[:, :, None]
        return x + self.drop(self.attend(q, q, q)[:, :, 0])


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_blocks_use_the_same_dropout(kind):
    x = torch.randn(1, 9, 8)
    plain = DropoutModel()
    checkpointed = apply_activation_checkpointing(copy.deepcopy(plain), kind)
    grads = []
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("option", ["activation_checkpointing", "autocast"])
def test_deepcopy_computes_with_its_own_weights(option):
    ids = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(0))
    model: Any = GPT(tiny())
    if option == "activation_checkpointing":
        apply_activation_checkpointing(model)
    else:
        model = replicate(model, init_mesh(device="cpu"), compute_dtype=torch.bfloat16)
        shutdown()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert float(other(ids, labels=next_tokens(ids)).detach()) == pytest.approx(11 * math.log(256), rel=1e-3)
    other(ids, labels=next_tokens(ids)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


def test_padding_gets_no_labels_and_labels_out_of_range_raise():
    ids = torch.arange(16)[None]
    labels = next_tokens(ids, Mask.causal() & Mask.documents([5, 6], pad=True))
    assert labels.tolist() == [[1, 2, 3, 4, IGNORE_INDEX, 6, 7, 8, 9, 10, *[IGNORE_INDEX] * 6]]
    rows = next_tokens(ids.expand(2, -1), Mask.documents([[5, 6], [16, 0]], pad=True))
    assert (rows != IGNORE_INDEX).sum(1).tolist() == [9, 15]
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    for wrong in (-1, 5, 999):
        with pytest.raises(RuntimeError, match="labels: expected 0 to 4"):
            cross_entropy_sum(hidden, weight, torch.tensor([0, wrong, 1]))
    with pytest.raises(ValueError, match="tokens=0"):
        cross_entropy_sum(hidden, weight, torch.zeros(3, dtype=torch.int64), tokens=0)


def unsupported_call_messages(rank, world, group):
    """Return an infinity norm with an empty shard, and the error message of each invalid call."""
    mesh = init_mesh(fsdp=2, device="cpu")
    ids = torch.zeros(1, 6, dtype=torch.int64)
    model = shard_weights(GPT(tiny()), mesh, wrap=lambda part: isinstance(part, nn.Linear))
    small = nn.Linear(4, 1)
    sharded = shard_weights(small, mesh)
    sharded(torch.ones(1, 4)).sum().backward()
    norm = float(gradient_norm(sharded, float("inf")))  # one rank's shard is empty
    messages = []
    for call in (
        lambda: model(ids, labels=ids),
        lambda: parallelize(model, mesh),
        lambda: parallelize(GPT(tiny()), init_mesh(device="cpu"), reduce_dtype=torch.float32),
        lambda: parallelize(GPT(tiny(vocabulary=1)), init_mesh(tp=2, device="cpu")),
        lambda: shard_weights(GPT(tiny()), mesh, offload=True),
        lambda: apply_activation_checkpointing(nn.Linear(2, 2)),
        lambda: clip_grad_norm(small, -1.0),
    ):
        try:
            call()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return norm, messages


def test_unsupported_models_and_meshes_are_refused(pool):
    want = (
        "the embedding and the head are read outside", "is parallelized already", "reduce_dtype: DDP reduces",
        "a rank would have none of the 1 rows of the vocabulary", "weights are in host memory already",
        "Linear has no blocks", "max_norm=-1.0; expected more than 0",
    )  # fmt: skip
    for norm, messages in pool.run(2, unsupported_call_messages):
        assert norm == 1.0
        for text, part in zip(messages, want, strict=True):
            assert part in text


def test_derived_model_sizes_are_consistent():
    assert tiny(dim=32, heads=4).head_dim == 8
    assert tiny(dim=32, heads=4, head_dim=16).head_dim == 16
    for wrong in (dict(dim=12, heads=4, kv_heads=4), dict(kv_heads=0), dict(layers=0)):
        with pytest.raises(ValueError, match="expected"):
            tiny(**wrong)
