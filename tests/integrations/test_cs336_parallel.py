"""CS336's names for DDP, FSDP, a sharded optimizer and training: what one process computes, on several ranks."""

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

dist: Any = _distributed  # torch does not declare all that it exports here
cs336: Any = _cs336  # what they return is looked into
training: Any = _training

EXACT: dict[str, Any] = dict(rtol=0.0, atol=1e-9)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim, bias=False)
        self.parts = nn.ModuleList([nn.Linear(dim, dim)])  # blocks within blocks

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.parts[0](self.norm(x)))))


class Model(nn.Module):
    """Ids to logits: blocks, a head that shares the embedding's weight, frozen weights, a frozen norm and a buffer."""

    def __init__(self, words=13, dim=8, shared=False):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        blocks: list[Any] = [Block(dim), Block(dim)]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.still = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, words)
        self.head.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.randn(dim), requires_grad=False)
        self.register_buffer("shift", torch.randn(dim))
        blocks[0].up.bias.requires_grad_(False)
        self.still.requires_grad_(False)
        if shared:  # over the border of a block
            blocks[1].up.weight = blocks[0].up.weight

    def forward(self, ids):
        x = self.embed(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.still(x)) * self.fixed)


def made(seed, **sizes):
    """A model of a seed's weights, vectors too, in float64."""
    torch.manual_seed(seed)
    model = Model(**sizes).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    return model


def drawn(samples, words=13):
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randint(words, (samples,), generator=generator) for _ in range(2))


def same(got, want, why):
    assert list(got) == list(want), why
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, **EXACT, msg=f"{why}: {name}")


def by_the_course(model, ids, labels, after, steps=4):
    """The assignment's loop: a mean over this rank's samples, backward, the hook, a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(ids), labels).backward()
        after(model, optimizer)
        optimizer.step()
    return optimizer


def nothing(model, optimizer):
    pass


def own(x, rank, world):
    return x.tensor_split(world)[rank]


def adapters(rank, world, group):
    ids, labels = drawn(6 * world)
    mine = own(ids, rank, world), own(labels, rank, world)
    for shared in (False, True) if world == 2 else (True,):
        start = made(0, shared=shared)
        want = deepcopy(start)
        by_the_course(want, ids, labels, nothing)
        assert not torch.equal(want.embed.weight, start.embed.weight)

        for get, after in (
            (cs336.get_ddp, cs336.ddp_on_after_backward),
            (cs336.get_ddp_individual_parameters, cs336.ddp_individual_parameters_on_after_backward),
            (lambda model: cs336.get_ddp_bucketed(model, 0.0001), cs336.ddp_bucketed_on_after_backward),
            (lambda model: cs336.get_ddp_bucketed(model, None), cs336.ddp_bucketed_on_after_backward),
        )[: 1 if shared else 4]:
            module = made(rank, shared=shared)  # other weights on each rank
            model = get(module)
            assert model.module is module
            same(module.state_dict(), start.state_dict(), "DDP begins with rank 0's weights")
            by_the_course(model, *mine, after)
            same(module.state_dict(), want.state_dict(), "DDP")
            assert module.head.weight is module.embed.weight

        module = made(rank, shared=shared)
        model = cs336.get_fsdp(module)
        assert model.module is module
        same(cs336.fsdp_gather_full_params(model), start.state_dict(), "FSDP begins with rank 0's weights")
        optimizer = by_the_course(model, *mine, cs336.fsdp_on_after_backward)
        got = cs336.fsdp_gather_full_params(model)
        same(got, want.state_dict(), "FSDP")
        same(cs336.fsdp_gather_full_params(module), got, "FSDP, of the module")
        assert got["head.weight"] is got["embed.weight"]
        total = torch.stack([p.grad.norm() for p in want.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(gradient_norm(model), total, **EXACT)
        kept(model, optimizer, want, world)
        with torch.no_grad():
            model(ids)
            module.norm.weight.zero_()
        assert got["norm.weight"].any()  # copies
        assert all(isinstance(p, DTensor) for p in module.blocks[0].up.parameters())  # also after a forward alone


def kept(model, optimizer, want, world):
    """A rank has its part of the matrices and of their state, and the norms' vectors whole, as the assignment says."""
    names = dict(model.module.named_parameters())
    norms = {name for name in names if "norm" in name or "still" in name}
    assert {name for name, p in names.items() if not isinstance(p, DTensor)} == norms
    local = sum(p.to_local().numel() for p in names.values() if isinstance(p, DTensor))
    spread = [p for name, p in want.named_parameters() if name not in norms]
    assert local <= sum(-(-p.shape[0] // world) * p[0].numel() for p in spread)  # rows, as evenly as may be
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
    pool.run(world, adapters)


def half(rank, world, group):
    ids, labels = drawn(8 * world)
    start = made(0).float()
    model = cs336.get_fsdp(deepcopy(start) if rank == 0 else made(rank).float(), compute_dtype=torch.bfloat16)
    seen = {}

    def watch(part, args, out):
        seen[type(part).__name__.removeprefix("FSDP")] = args[0].dtype, part.weight.dtype, out.dtype

    model.module.blocks[0].up.register_forward_hook(watch)
    model.module.norm.register_forward_hook(watch)
    optimizer = by_the_course(
        model, own(ids, rank, world), own(labels, rank, world), cs336.fsdp_on_after_backward, steps=1
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
    assert 1e-5 < error < 0.05  # of bfloat16, and not of more


def test_compute_dtype_keeps_the_dtype_of_master_weights(pool):
    pool.run(2, half)


def halves(model):
    """Two parameter groups, with a weight twice and frozen ones."""
    first = list(model.blocks.parameters())
    others = [p for p in model.parameters() if not any(p is x for x in first)]
    return [{"params": [*first, first[0]], "lr": 0.02}, {"params": others}]


def sharded_optimizers(rank, world, group):
    ids, labels = drawn(5)
    for groups in (False, True):
        models = made(0), made(0)
        later = made(1), made(1)
        plain_params = [p for p in models[0].parameters() if p.requires_grad]
        if groups:
            a, b = halves(models[0])
            plain_params = [
                {**a, "params": [p for p in a["params"][:-1] if p.requires_grad]},
                {**b, "params": [p for p in b["params"] if p.requires_grad]},
            ]
        options: dict[str, Any] = dict(lr=0.05, weight_decay=0.1)
        plain = torch.optim.AdamW(plain_params, **options)
        params = halves(models[1]) if groups else [*models[1].parameters(), models[1].head.weight]
        sharded = cs336.get_sharded_optimizer(iter(params), torch.optim.AdamW, **options)
        for step in range(6):
            if step == 3:
                plain.add_param_group({"params": [*later[0].blocks.parameters()], "lr": 0.2})
                sharded.add_param_group({"params": [*later[1].blocks.parameters()], "lr": 0.2})
            for model, other, optimizer in zip(models, later, (plain, sharded), strict=True):
                optimizer.zero_grad()
                (functional.cross_entropy(model(ids), labels) + functional.cross_entropy(other(ids), labels)).backward()
                optimizer.step()
        same(models[1].state_dict(), models[0].state_dict(), "sharded optimizer")
        same(later[1].blocks.state_dict(), later[0].blocks.state_dict(), "added group")
        mine = sum(state["exp_avg"].numel() for state in sharded.optim.state.values())
        everyone = sum(state["exp_avg"].numel() for state in plain.state.values())
        numbers: list[Any] = [None] * world
        dist.all_gather_object(numbers, mine)
        assert sum(numbers) == everyone
        assert max(numbers) < everyone / world + models[0].embed.weight.numel()
    spread = cs336.get_fsdp(made(0))
    assert type(cs336.get_sharded_optimizer(spread.parameters(), torch.optim.SGD, lr=0.1)) is torch.optim.SGD


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_optimizer_matches_the_unsharded_one(pool, world):
    pool.run(world, sharded_optimizers)


def test_single_process_gets_an_unsharded_optimizer():
    model = made(0)
    optimizer = cs336.get_sharded_optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["params"] == [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="got a tuple"):
        cs336.get_sharded_optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        cs336.get_sharded_optimizer([model.fixed], torch.optim.SGD, lr=0.1)


def steps_of(ids, labels, steps, epochs):
    """One process: losses and weights of steps with these samples."""
    model = made(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in steps * epochs:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids[step]), labels[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def batches_of(samples, world, size, number):
    """Which samples each step of all ranks has, where each rank takes every world-th."""
    places = range(-(-samples // world))
    steps = [places[n : n + size * number] for n in range(0, len(places), size * number)]
    return [[i for r in range(world) for i in range(r, samples, world) if i // world in step] for step in steps]


class Lossy(nn.Module):
    """A model that returns its loss, of dicts."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return functional.cross_entropy(self.model(batch["ids"]), batch["labels"])


def trainings(rank, world, group):
    ids, labels = drawn(11)
    named = dict(optimizer=torch.optim.AdamW, lr=0.05, epochs=2)
    wholes = []
    for size, number in ((2, 1), (1, 4), (2, 2)):  # 11 samples: uneven batches, incomplete last groups
        losses, weights = steps_of(ids, labels, batches_of(11, world, size, number), 2)
        for train in (cs336.train_with_ddp, cs336.train_with_fsdp):
            got = train(
                rank,
                world,
                model=lambda: made(rank),
                data=TensorDataset(ids, labels),
                loss=functional.cross_entropy,
                batch_size=size,
                accumulation_steps=number,
                after=lambda model: wholes.append(cs336.fsdp_gather_full_params(model)),
                **named,
            )
            why = f"{train.__name__}, {size} x {number}"
            assert got == pytest.approx(losses, abs=1e-9), why
            same({name.removeprefix("module."): x for name, x in wholes[-1].items()}, weights, why)
    # batches of each rank's own: of other sizes, and not equally many
    cuts = [[(0, 3), (3, 4), (4, 6)], [(6, 8)], [(8, 11), (11, 11)]][:world]
    losses, weights = steps_of(ids, labels, [[0, 1, 2, 3, 6, 7] + [8, 9, 10] * (world > 2), [4, 5]], 2)
    batches = [{"ids": ids[a:b], "labels": labels[a:b]} for a, b in cuts[rank]]
    for train in (cs336.train_with_ddp, cs336.train_with_fsdp):
        model = Lossy(made(rank))
        got = train(rank, world, model=model, data=batches, accumulation_steps=2, **named)
        assert got == pytest.approx(losses, abs=1e-9)
        same(cs336.fsdp_gather_full_params(model.model), weights, "own batches")
    with pytest.raises(ValueError, match="a rank has no samples"):  # on all ranks, and none waits
        cs336.train_with_ddp(rank, world, model=Lossy(made(rank)), data=batches if rank else [], **named)
    assert dist.is_initialized()  # it was there before


@pytest.mark.parametrize("world", [2, 3])
def test_training_matches_a_single_process(pool, world):
    pool.run(world, trainings)


def counted(rank, world, group):
    """How often gradients travel when four batches make a step."""
    calls: list[Any] = []
    model = cs336.get_ddp(made(0))
    model.register_comm_hook(calls, bucket_sum)
    batch = drawn(3)
    group_of = next(training._groups([batch] * 4, 4))
    training._step(model, torch.optim.SGD(model.parameters(), lr=0.1), group_of, functional.cross_entropy)
    once = len(calls)
    training._step(model, torch.optim.SGD(model.parameters(), lr=0.1), group_of[:1], functional.cross_entropy)
    assert len(calls) == 2 * once > 0

    sums = cs336.get_fsdp(made(0))
    whole = sums.module.norm.weight
    sums.set_requires_gradient_sync(False)
    functional.cross_entropy(sums(own(batch[0], rank, world)), own(batch[1], rank, world)).backward()
    grads = [torch.empty_like(whole) for _ in range(world)]
    dist.all_gather(grads, whole.grad)
    assert not torch.allclose(grads[0], grads[1])
    assert sums.module.head.bias.grad is None  # still whole on its rank
    with mock.patch.object(sums, "set_requires_gradient_sync", wraps=sums.set_requires_gradient_sync) as told:
        training._step(sums, torch.optim.SGD(sums.parameters(), lr=0.1), group_of, functional.cross_entropy)
    assert [call.args for call in told.call_args_list] == [(False,), (False,), (False,), (True,)]


def bucket_sum(calls, bucket):
    calls.append(bucket.index())
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


def test_gradients_are_reduced_only_in_the_last_batch_of_a_step(pool):
    pool.run(2, counted)


def started(rank, world, group, port):
    cs336.cleanup_ddp()
    assert not dist.is_initialized()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        for _ in range(2):
            assert cs336.setup_ddp(rank, world, "gloo") == (rank, world, rank)
            assert cs336.setup_ddp(rank, world) == (rank, world, rank)  # the same
            with pytest.raises(ValueError, match="already; call cleanup_ddp first"):
                cs336.setup_ddp(0, world + 1)
            ranks = torch.ones(())
            dist.all_reduce(ranks)
            assert int(ranks) == world
            dist.barrier()
            if rank == 0:
                time.sleep(0.3)  # its store still answers when the others come again
            cs336.cleanup_ddp()
            cs336.cleanup_ddp()
            assert not dist.is_initialized()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        for _ in range(2):  # by meshflash.init
            assert cs336.setup_ddp() == (rank, world, rank)
            assert dist.get_world_size() == world
            cs336.cleanup_ddp()
            assert not dist.is_initialized()
        data = drawn(3)
        losses = cs336.train_with_ddp(model=made(rank), data=[data], loss=functional.cross_entropy, lr=0.1)
        assert losses == pytest.approx([float(functional.cross_entropy(made(0)(data[0]), data[1]))], abs=1e-9)
        assert not dist.is_initialized()  # a group of its own ends with it
    finally:
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)


def test_setup_and_cleanup_can_be_repeated(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pool.run(2, started, port)


def test_single_process_trains_without_a_process_group():
    assert not dist.is_initialized()
    ids, labels = drawn(7)
    losses, weights = steps_of(ids, labels, [[0, 1, 2, 3], [4, 5, 6]], 1)
    for train in (cs336.train_with_ddp, cs336.train_with_fsdp):
        found: list[Any] = []
        got = train(
            model=made(0),
            data=TensorDataset(ids, labels),
            loss=functional.cross_entropy,
            batch_size=4,
            lr=0.05,
            after=lambda model, found=found: found.append(cs336.fsdp_gather_full_params(model)),
        )
        assert got == pytest.approx(losses, abs=1e-9)
        same({name.removeprefix("module."): x for name, x in found[0].items()}, weights, "alone")
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
        cs336.get_ddp_bucketed(made(0), 0)
    with pytest.raises(ValueError, match="accumulation_steps=0"):
        cs336.train_with_ddp(model=made(0), data=[], accumulation_steps=0)
    with pytest.raises(ValueError, match="epochs=0"):
        cs336.benchmark_ddp(made(0), [], epochs=0)
    with pytest.raises(ValueError, match="expected batches of tensors"):
        cs336.train_with_ddp(model=made(0), data=["text"])
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ValueError, match="on the meta device"):
        cs336.get_fsdp(model)
    assert not dist.is_initialized()


def timed(rank, world, group):
    ids, labels = drawn(4)
    model = cs336.get_ddp(Lossy(made(0)))
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
    (seconds, printed), (_, silence) = pool.run(2, timed)
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
    assert training._now(torch.device("cuda")) == 1.0  # after one event
