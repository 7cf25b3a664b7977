"""DDP, FSDP, the sharded optimizer and training by their CS336 names: several ranks match a single process."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import time
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as _distributed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from meshflash.integrations.compat import cs336 as _cs336
from meshflash.integrations.compat.cs336 import training as _training
from meshflash.parallel import gradient_norm

dist: Any = _distributed  # the stubs of torch miss some of its exports
cs336: Any = _cs336  # tests use attributes that the return types do not declare
training: Any = _training

EXACT: dict[str, Any] = dict(rtol=0.0, atol=1e-9)


class Block(nn.Module):
    """A residual MLP block with a nested `ModuleList`; `Model` makes it."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim, bias=False)
        self.parts = nn.ModuleList([nn.Linear(dim, dim)])  # a list of modules within a block

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.parts[0](self.norm(x)))))


class Model(nn.Module):
    """A small language model with the special cases of sharding; `made` makes it.

    Its head shares the weight of the embedding; some weights and a norm are frozen; it has a buffer.
    """

    def __init__(self, vocabulary=13, dim=8, shared=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        blocks: list[Any] = [Block(dim), Block(dim)]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.still = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        self.head.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.randn(dim), requires_grad=False)
        self.register_buffer("shift", torch.randn(dim))
        blocks[0].up.bias.requires_grad_(False)
        self.still.requires_grad_(False)
        if shared:  # a weight that two blocks share
            blocks[1].up.weight = blocks[0].up.weight

    def forward(self, ids):
        x = self.embed(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.still(x)) * self.fixed)


def make_model(seed, **sizes):
    """Return a float64 model; all parameters, vectors too, are random and depend on the seed."""
    torch.manual_seed(seed)
    model = Model(**sizes).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    return model


def draw_samples(samples, vocabulary=13):
    """Return random ids and labels."""
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randint(vocabulary, (samples,), generator=generator) for _ in range(2))


def assert_same_state(got, want, why):
    """Assert that two state dicts have the same names and values; `why` names the check in errors."""
    assert list(got) == list(want), why
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, **EXACT, msg=f"{why}: {name}")


def train_as_the_course(model, ids, labels, after, steps=4):
    """Train as the assignment does: mean loss of this rank's samples, backward, the `after` hook, optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(ids), labels).backward()
        after(model, optimizer)
        optimizer.step()
    return optimizer


def no_hook(model, optimizer):
    """Do nothing after the backward, as a single process does."""


def samples_of_rank(x, rank, world):
    """Return the samples of one rank."""
    return x.tensor_split(world)[rank]


def check_ddp_and_fsdp(rank, world, group):
    """Train with every DDP and FSDP adapter; assert that weights and gradients match a single process."""
    ids, labels = draw_samples(6 * world)
    local = samples_of_rank(ids, rank, world), samples_of_rank(labels, rank, world)
    for shared in (False, True) if world == 2 else (True,):
        start = make_model(0, shared=shared)
        want = deepcopy(start)
        train_as_the_course(want, ids, labels, no_hook)
        assert not torch.equal(want.embed.weight, start.embed.weight)

        for get, after in (
            (cs336.get_ddp, cs336.ddp_on_after_backward),
            (cs336.get_ddp_individual_parameters, cs336.ddp_individual_parameters_on_after_backward),
            (lambda model: cs336.get_ddp_bucketed(model, 0.0001), cs336.ddp_bucketed_on_after_backward),
            (lambda model: cs336.get_ddp_bucketed(model, None), cs336.ddp_bucketed_on_after_backward),
        )[: 1 if shared else 4]:
            module = make_model(rank, shared=shared)  # each rank starts with different weights
            model = get(module)
            assert model.module is module
            assert_same_state(module.state_dict(), start.state_dict(), "DDP begins with rank 0's weights")
            train_as_the_course(model, *local, after)
            assert_same_state(module.state_dict(), want.state_dict(), "DDP")
            assert module.head.weight is module.embed.weight

        module = make_model(rank, shared=shared)
        model = cs336.get_fsdp(module)
        assert model.module is module
        assert_same_state(cs336.fsdp_gather_full_params(model), start.state_dict(), "FSDP begins with rank 0's weights")
        optimizer = train_as_the_course(model, *local, cs336.fsdp_on_after_backward)
        got = cs336.fsdp_gather_full_params(model)
        assert_same_state(got, want.state_dict(), "FSDP")
        assert_same_state(cs336.fsdp_gather_full_params(module), got, "FSDP, of the module")
        assert got["head.weight"] is got["embed.weight"]
        total = torch.stack([p.grad.norm() for p in want.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(gradient_norm(model), total, **EXACT)
        check_shards(model, optimizer, want, world)
        with torch.no_grad():
            model(ids)
            module.norm.weight.zero_()
        assert got["norm.weight"].any()  # the gathered weights are copies
        assert all(
            isinstance(p, DTensor) for p in module.blocks[0].up.parameters()
        )  # sharded again, also after a forward without backward


def check_shards(model, optimizer, want, world):
    """Assert that a rank keeps its shard of the matrices and their optimizer state, and the whole norm vectors.

    The assignment asks for this split.
    """
    names = dict(model.module.named_parameters())
    norms = {name for name in names if "norm" in name or "still" in name}
    assert {name for name, p in names.items() if not isinstance(p, DTensor)} == norms
    local = sum(p.to_local().numel() for p in names.values() if isinstance(p, DTensor))
    sharded = [p for name, p in want.named_parameters() if name not in norms]
    assert local <= sum(-(-p.shape[0] // world) * p[0].numel() for p in sharded)  # rows are split as evenly as possible
    for p in names.values():
        if p.requires_grad:
            assert p.grad.shape == p.shape
            assert type(p.grad) is (DTensor if isinstance(p, DTensor) else torch.Tensor)
            state = optimizer.state[p]["exp_avg"]
            assert not isinstance(p, DTensor) or state.to_local().numel() == p.to_local().numel()
        else:
            assert p.grad is None


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_and_fsdp_match_a_single_process(pool, world):
    pool.run(world, check_ddp_and_fsdp)


def check_compute_dtype(rank, world, group):
    """Assert that FSDP computes in bfloat16, and keeps weights, gradients and optimizer state in float32."""
    ids, labels = draw_samples(8 * world)
    start = make_model(0).float()
    model = cs336.get_fsdp(deepcopy(start) if rank == 0 else make_model(rank).float(), compute_dtype=torch.bfloat16)
    seen = {}

    def watch(part, args, out):
        seen[type(part).__name__.removeprefix("FSDP")] = args[0].dtype, part.weight.dtype, out.dtype

    model.module.blocks[0].up.register_forward_hook(watch)
    model.module.norm.register_forward_hook(watch)
    optimizer = train_as_the_course(
        model,
        samples_of_rank(ids, rank, world),
        samples_of_rank(labels, rank, world),
        cs336.fsdp_on_after_backward,
        steps=1,
    )
    low, full = torch.bfloat16, torch.float32
    assert seen == {"Linear": (low, low, low), "LayerNorm": (full, full, low)}
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {full}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {full}
    got = cs336.fsdp_gather_full_params(model)
    assert {x.dtype for x in got.values()} == {full}
    grad = start.embed.weight
    functional.cross_entropy(start(ids), labels).backward()
    found = model.module.embed.weight.grad.full_tensor()
    error = float((found - grad.grad).norm() / grad.grad.norm())
    assert 1e-5 < error < 0.05  # the error of bfloat16, and not larger


def test_compute_dtype_keeps_the_dtype_of_master_weights(pool):
    pool.run(2, check_compute_dtype)


def two_parameter_groups(model):
    """Return two parameter groups, with one weight listed twice and with frozen weights."""
    first = list(model.blocks.parameters())
    others = [p for p in model.parameters() if not any(p is x for x in first)]
    return [{"params": [*first, first[0]], "lr": 0.02}, {"params": others}]


def check_sharded_optimizer(rank, world, group):
    """Assert that the sharded optimizer matches AdamW, and that ranks share its state about equally."""
    ids, labels = draw_samples(5)
    for groups in (False, True):
        models = make_model(0), make_model(0)
        later = make_model(1), make_model(1)
        plain_params = [p for p in models[0].parameters() if p.requires_grad]
        if groups:
            a, b = two_parameter_groups(models[0])
            plain_params = [
                {**a, "params": [p for p in a["params"][:-1] if p.requires_grad]},
                {**b, "params": [p for p in b["params"] if p.requires_grad]},
            ]
        options: dict[str, Any] = dict(lr=0.05, weight_decay=0.1)
        plain = torch.optim.AdamW(plain_params, **options)
        params = two_parameter_groups(models[1]) if groups else [*models[1].parameters(), models[1].head.weight]
        sharded = cs336.get_sharded_optimizer(iter(params), torch.optim.AdamW, **options)
        for step in range(6):
            if step == 3:
                plain.add_param_group({"params": [*later[0].blocks.parameters()], "lr": 0.2})
                sharded.add_param_group({"params": [*later[1].blocks.parameters()], "lr": 0.2})
            for model, other, optimizer in zip(models, later, (plain, sharded), strict=True):
                optimizer.zero_grad()
                (functional.cross_entropy(model(ids), labels) + functional.cross_entropy(other(ids), labels)).backward()
                optimizer.step()
        assert_same_state(models[1].state_dict(), models[0].state_dict(), "sharded optimizer")
        assert_same_state(later[1].blocks.state_dict(), later[0].blocks.state_dict(), "added group")
        local = sum(state["exp_avg"].numel() for state in sharded.optim.state.values())
        all_elements = sum(state["exp_avg"].numel() for state in plain.state.values())
        elements: list[Any] = [None] * world
        dist.all_gather_object(elements, local)
        assert sum(elements) == all_elements
        assert max(elements) < all_elements / world + models[0].embed.weight.numel()
    fsdp = cs336.get_fsdp(make_model(0))
    assert type(cs336.get_sharded_optimizer(fsdp.parameters(), torch.optim.SGD, lr=0.1)) is torch.optim.SGD


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_optimizer_matches_the_unsharded_one(pool, world):
    pool.run(world, check_sharded_optimizer)


def test_single_process_gets_an_unsharded_optimizer():
    model = make_model(0)
    optimizer = cs336.get_sharded_optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["params"] == [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="got a tuple"):
        cs336.get_sharded_optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        cs336.get_sharded_optimizer([model.fixed], torch.optim.SGD, lr=0.1)


def train_steps(ids, labels, steps, epochs):
    """Train in a single process on these samples; return losses and weights."""
    model = make_model(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in steps * epochs:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids[step]), labels[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def steps_of_all_ranks(samples, world, size, accumulation):
    """Return the samples of each step, over all ranks; a rank takes every `world`-th sample."""
    places = range(-(-samples // world))
    steps = [places[n : n + size * accumulation] for n in range(0, len(places), size * accumulation)]
    return [[i for r in range(world) for i in range(r, samples, world) if i // world in step] for step in steps]


class Lossy(nn.Module):
    """A model that returns its loss for a dict of ids and labels; the tests make it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return functional.cross_entropy(self.model(batch["ids"]), batch["labels"])


def check_training(rank, world, group):
    """Assert that losses and weights of both training functions match a single process."""
    ids, labels = draw_samples(11)
    named = dict(optimizer=torch.optim.AdamW, lr=0.05, epochs=2)
    wholes = []
    for size, accumulation in ((2, 1), (1, 4), (2, 2)):  # 11 samples: uneven batches and an incomplete last step
        losses, weights = train_steps(ids, labels, steps_of_all_ranks(11, world, size, accumulation), 2)
        for train in (cs336.train_with_ddp, cs336.train_with_fsdp):
            got = train(
                rank,
                world,
                model=lambda: make_model(rank),
                data=TensorDataset(ids, labels),
                loss=functional.cross_entropy,
                batch_size=size,
                accumulation_steps=accumulation,
                after=lambda model: wholes.append(cs336.fsdp_gather_full_params(model)),
                **named,
            )
            why = f"{train.__name__}, {size} x {accumulation}"
            assert got == pytest.approx(losses, abs=1e-9), why
            assert_same_state({name.removeprefix("module."): x for name, x in wholes[-1].items()}, weights, why)
    # Each rank has its own batches, with different sizes and a different number of them.
    cuts = [[(0, 3), (3, 4), (4, 6)], [(6, 8)], [(8, 11), (11, 11)]][:world]
    losses, weights = train_steps(ids, labels, [[0, 1, 2, 3, 6, 7] + [8, 9, 10] * (world > 2), [4, 5]], 2)
    batches = [{"ids": ids[a:b], "labels": labels[a:b]} for a, b in cuts[rank]]
    for train in (cs336.train_with_ddp, cs336.train_with_fsdp):
        model = Lossy(make_model(rank))
        got = train(rank, world, model=model, data=batches, accumulation_steps=2, **named)
        assert got == pytest.approx(losses, abs=1e-9)
        assert_same_state(cs336.fsdp_gather_full_params(model.model), weights, "own batches")
    with pytest.raises(ValueError, match="a rank has no samples"):  # raised on all ranks, so that none waits
        cs336.train_with_ddp(rank, world, model=Lossy(make_model(rank)), data=batches if rank else [], **named)
    assert dist.is_initialized()  # the group existed before the training


@pytest.mark.parametrize("world", [2, 3])
def test_training_matches_a_single_process(pool, world):
    pool.run(world, check_training)


def count_reductions(rank, world, group):
    """Count gradient reductions in a step of four batches."""
    calls: list[Any] = []
    model = cs336.get_ddp(make_model(0))
    model.register_comm_hook(calls, bucket_sum)
    batch = draw_samples(3)
    group_of = next(training._groups([batch] * 4, 4))
    training._step(model, torch.optim.SGD(model.parameters(), lr=0.1), group_of, functional.cross_entropy)
    once = len(calls)
    training._step(model, torch.optim.SGD(model.parameters(), lr=0.1), group_of[:1], functional.cross_entropy)
    assert len(calls) == 2 * once > 0

    sums = cs336.get_fsdp(make_model(0))
    whole = sums.module.norm.weight
    sums.set_requires_gradient_sync(False)
    functional.cross_entropy(
        sums(samples_of_rank(batch[0], rank, world)), samples_of_rank(batch[1], rank, world)
    ).backward()
    grads = [torch.empty_like(whole) for _ in range(world)]
    dist.all_gather(grads, whole.grad)
    assert not torch.allclose(grads[0], grads[1])
    assert sums.module.head.bias.grad is None  # not reduced yet
    with mock.patch.object(sums, "set_requires_gradient_sync", wraps=sums.set_requires_gradient_sync) as set_sync:
        training._step(sums, torch.optim.SGD(sums.parameters(), lr=0.1), group_of, functional.cross_entropy)
    assert [call.args for call in set_sync.call_args_list] == [(False,), (False,), (False,), (True,)]


def bucket_sum(calls, bucket):
    """All-reduce a DDP bucket, and record that it ran."""
    calls.append(bucket.index())
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


def test_gradients_are_reduced_only_in_the_last_batch_of_a_step(pool):
    pool.run(2, count_reductions)


def check_setup_and_cleanup(rank, world, group, port):
    """Set up and clean up repeatedly, with arguments and with the variables of a launcher."""
    cs336.cleanup_ddp()
    assert not dist.is_initialized()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        for _ in range(2):
            assert cs336.setup_ddp(rank, world, "gloo") == (rank, world, rank)
            assert cs336.setup_ddp(rank, world) == (rank, world, rank)  # a repeated call returns the same
            with pytest.raises(ValueError, match="already; call cleanup_ddp first"):
                cs336.setup_ddp(0, world + 1)
            ranks = torch.ones(())
            dist.all_reduce(ranks)
            assert int(ranks) == world
            dist.barrier()
            if rank == 0:
                time.sleep(0.3)  # the old store of rank 0 still answers while the other rank reconnects
            cs336.cleanup_ddp()
            cs336.cleanup_ddp()
            assert not dist.is_initialized()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        for _ in range(2):  # through meshflash.init
            assert cs336.setup_ddp() == (rank, world, rank)
            assert dist.get_world_size() == world
            cs336.cleanup_ddp()
            assert not dist.is_initialized()
        data = draw_samples(3)
        losses = cs336.train_with_ddp(model=make_model(rank), data=[data], loss=functional.cross_entropy, lr=0.1)
        assert losses == pytest.approx([float(functional.cross_entropy(make_model(0)(data[0]), data[1]))], abs=1e-9)
        assert not dist.is_initialized()  # the training ends the group that it created
    finally:
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)


def test_setup_and_cleanup_can_be_repeated(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pool.run(2, check_setup_and_cleanup, port)


def test_single_process_trains_without_a_process_group():
    assert not dist.is_initialized()
    ids, labels = draw_samples(7)
    losses, weights = train_steps(ids, labels, [[0, 1, 2, 3], [4, 5, 6]], 1)
    for train in (cs336.train_with_ddp, cs336.train_with_fsdp):
        found: list[Any] = []
        got = train(
            model=make_model(0),
            data=TensorDataset(ids, labels),
            loss=functional.cross_entropy,
            batch_size=4,
            lr=0.05,
            after=lambda model, found=found: found.append(cs336.fsdp_gather_full_params(model)),
        )
        assert got == pytest.approx(losses, abs=1e-9)
        assert_same_state({name.removeprefix("module."): x for name, x in found[0].items()}, weights, "alone")
        assert not dist.is_initialized()


def test_errors_name_the_argument_and_a_remedy(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ValueError, match="pass both rank and world_size"):
        cs336.setup_ddp(rank=0)
    with pytest.raises(ValueError, match="expected 0 to 1 of world_size=2"):
        cs336.setup_ddp(2, 2)
    with pytest.raises(ValueError, match="set MASTER_ADDR, where ranks connect"):
        cs336.setup_ddp(0, 2)
    with pytest.raises(ValueError, match="bucket_size_mb=0"):
        cs336.get_ddp_bucketed(make_model(0), 0)
    with pytest.raises(ValueError, match="accumulation_steps=0"):
        cs336.train_with_ddp(model=make_model(0), data=[], accumulation_steps=0)
    with pytest.raises(ValueError, match="epochs=0"):
        cs336.benchmark_ddp(make_model(0), [], epochs=0)
    with pytest.raises(ValueError, match="expected batches of tensors"):
        cs336.train_with_ddp(model=make_model(0), data=["text"])
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ValueError, match="on the meta device"):
        cs336.get_fsdp(model)
    assert not dist.is_initialized()


def run_benchmark(rank, world, group):
    """Return the seconds and the output of the benchmark; only a given optimizer may change weights."""
    ids, labels = draw_samples(4)
    model = cs336.get_ddp(Lossy(make_model(0)))
    before = model.module.model.norm.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        seconds = cs336.benchmark_ddp(model, [{"ids": ids, "labels": labels}] * 2, 2, optimizer)
    assert not torch.equal(model.module.model.norm.weight, before)
    before = model.module.model.norm.weight.clone()
    with contextlib.redirect_stdout(io.StringIO()):
        cs336.benchmark_ddp(model.module.model, [(ids, labels)], 1, loss=functional.cross_entropy)
    assert torch.equal(model.module.model.norm.weight, before)
    return seconds, printed.getvalue()


def test_benchmark_returns_seconds_and_rank_0_prints_them(pool):
    (seconds, printed), (_, silence) = pool.run(2, run_benchmark)
    assert silence == ""
    *epochs, average = re.findall(r"^(Epoch 0|Epoch 1|Average per epoch): (\d+\.\d\d)s$", printed, re.MULTILINE)
    assert [name for name, _ in epochs] == ["Epoch 0", "Epoch 1"]
    assert average == ("Average per epoch", f"{seconds:.2f}")
    assert seconds > 0


def test_benchmark_synchronizes_the_device_before_taking_times(monkeypatch):
    events: list[str] = []

    class Module:
        @staticmethod
        def synchronize(device):
            events.append("synchronize")

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(len(events)))
    assert training._now(torch.device("cuda")) == 1.0  # the time is taken after the synchronization
