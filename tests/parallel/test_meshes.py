"""Loss, gradients and optimizer steps match a single process on every mesh, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshflash import Mask
from meshflash.models.gpt import GPT, tiny
from meshflash.parallel import (
    accumulate,
    clip_grad_norm,
    gradient_norm,
    init_mesh,
    next_tokens,
    parallelize,
    shard_batch,
    sharded_optimizer,
)
from meshflash.parallel.mesh import DATA_AXES, mesh_rank, size

STEPS = 2
OPTIMIZER: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1, eps=1e-3)


def config(tied):
    """Return a small GPT configuration."""
    return tiny(vocabulary=61, dim=32, hidden=48, heads=4, kv_heads=4, tied=tied)


def samples(step):
    """Return (tokens, labels, mask) of a step's micro-batches: varying lengths, uneven documents, ignored labels."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for n, tokens in enumerate((19, 31, 23)):
        ids = torch.randint(61, (5, tokens), generator=generator)
        mask = Mask.causal() & Mask.documents([7, tokens - 9, 2]) if n else None
        labels = next_tokens(ids, mask)
        labels[0, 3 + n :] = -100
        labels[4, ::2] = -100
        found.append((ids, labels, mask))
    return found


def shard_samples(batches, mesh, layout):
    """Return this rank's shard: uneven rows, and the last micro-batch on the first data rank only."""
    found = []
    for n, (ids, labels, mask) in enumerate(batches):
        rows = torch.arange(len(ids)).tensor_split(size(mesh, DATA_AXES))[mesh_rank(mesh, DATA_AXES)]
        if n == len(batches) - 1 and n:
            rows = torch.arange(len(ids) if mesh_rank(mesh, DATA_AXES) == 0 else 0)
        if len(rows):
            found.append(shard_batch(ids[rows], mesh, labels=labels[rows], mask=mask, layout=layout))
    return found


def full_tensor(x):
    """Return the full tensor of a DTensor; other tensors unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def difference(got, want):
    """Return the largest difference, relative to the largest value of `want`."""
    return float((full_tensor(got) - want).abs().max() / max(1e-3, float(want.abs().max())))


def reference(tied, micro):
    """Return loss, gradients, norm, and weights after some steps of a single process."""
    model = GPT(config(tied))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    first: Any = None
    for step in range(STEPS):
        batches = [dict(tokens=t, labels=y, mask=m) for t, y, m in samples(step)[:micro]]
        optimizer.zero_grad()
        totals = accumulate(model, batches)
        if first is None:
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            first = float(totals.loss), int(totals.tokens), grads, float(gradient_norm(model))
        clip_grad_norm(model, 0.5)
        optimizer.step()
    return *first, {name: p.detach() for name, p in model.named_parameters()}


def compare(rank, world, group, shapes):
    """Return the errors of loss, gradients, norm and weights against a single process for each mesh."""
    torch.set_default_dtype(torch.float64)
    try:
        references = {(tied, micro): reference(tied, micro) for tied in (True, False) for micro in (1, 3)}
        found = []
        for shape, tied, micro, options in shapes:
            dp, fsdp, cp, tp = shape
            mesh = init_mesh(dp, fsdp, cp, tp, order=options.get("order", "cp-tp-dp"), device="cpu")
            loss, tokens, grads, norm, weights = references[tied, micro]
            parallel_options = {
                name: options[name]
                for name in ("mode", "activation_checkpointing", "schedule", "wrap")
                if name in options
            }
            model = parallelize(GPT(config(tied)), mesh, **parallel_options)
            kind: Any = sharded_optimizer if options.get("zero") else lambda m, o, _, **k: o(m.parameters(), **k)
            optimizer = kind(model, torch.optim.AdamW, mesh, **OPTIMIZER)
            for step in range(STEPS):
                optimizer.zero_grad()
                totals = accumulate(
                    model, shard_samples(samples(step)[:micro], mesh, options.get("layout", "zigzag")), mesh
                )
                if step == 0:
                    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
                    assert named.keys() == grads.keys()
                    errors = [abs(float(totals.loss) - loss) / loss, abs(int(totals.tokens) - tokens)]
                    errors.append(max(difference(p.grad, grads[name]) for name, p in named.items()))
                    errors.append(abs(float(gradient_norm(model)) - norm) / norm)
                clip_grad_norm(model, 0.5)
                optimizer.step()
            errors.append(max(difference(p.detach(), weights[name]) for name, p in named.items()))
            found.append((shape, tied, micro, options, errors))
        return found
    finally:
        torch.set_default_dtype(torch.float32)


def meshes(world):
    """Return every mesh of `world` ranks twice, cycling through options of `parallelize`."""
    shapes = [s for s in itertools.product((1, 2, 3, 4), repeat=4) if s[0] * s[1] * s[2] * s[3] == world and s[3] != 3]
    option_sets: Any = itertools.cycle(
        (
            dict(schedule="zigzag", activation_checkpointing="selective"),
            dict(schedule="ulysses", layout="contiguous", zero=True),
            dict(schedule="allgather", layout="striped", order="tp-cp-dp"),
            dict(activation_checkpointing="full", layout="balanced", wrap="model", zero=True),
            dict(order="dp-cp-tp", activation_checkpointing="full"),
        )
    )
    found: list[Any] = []
    for shape in shapes:
        for micro in (1, 3):
            options = dict(next(option_sets))
            if shape[1] > 1 and micro == 3:
                options["mode"] = "grad_op"
            found.append((shape, (len(found) // 2) % 2 == 0, micro, options))
    return found


def every_other(shapes, first):
    """Return one of the two entries of each mesh, alternating between one micro-batch and three."""
    return [shapes[2 * n + (n + first) % 2] for n in range(len(shapes) // 2)]


@pytest.mark.parametrize(
    ("world", "shapes"),
    [
        (2, meshes(2)),
        (3, meshes(3)),
        (4, every_other(meshes(4), 0)),
        pytest.param(4, every_other(meshes(4), 1), marks=pytest.mark.slow),
    ],
    ids=["2", "3", "4", "4, remaining meshes"],
)
def test_loss_gradients_and_steps_match_a_single_process_on_each_mesh(pool, world, shapes):
    for rank in pool.run(world, compare, shapes, timeout=300.0):
        assert len(rank) == len(shapes)
        for *case, errors in rank:
            assert max(errors) < 1e-9, (case, errors)


def test_a_single_rank_matches_a_plain_process(pool):
    option_sets: Any = [dict(), dict(mode="full"), dict(mode="full", activation_checkpointing="selective", zero=True)]
    (rows,) = pool.run(1, compare, [((1, 1, 1, 1), True, 3, options) for options in option_sets])
    for *case, errors in rows:
        assert max(errors) < 1e-9, (case, errors)


def build_on_meta(rank, world, group):
    """Return which weights equal those of a plain model, and the number of local elements."""
    mesh = init_mesh(fsdp=2, tp=2, device="cpu")
    with torch.device("meta"):
        model: Any = GPT(config(tied=False))
    model = parallelize(model, mesh)
    model.to_empty(device="cpu")
    model.init_weights(7)
    want = dict(GPT(config(tied=False), seed=7).named_parameters())
    local = sum(p.to_local().numel() for p in model.parameters())
    return [torch.equal(full_tensor(p), want[name]) for name, p in model.named_parameters()], local


def test_a_model_built_on_meta_gets_the_same_initial_weights(pool):
    total = sum(p.numel() for p in GPT(config(tied=False)).parameters())
    for same, local in pool.run(4, build_on_meta):
        assert all(same)
        assert local < 0.35 * total


def half_precision(rank, world, group):
    """Return loss, whether a layer computes in bfloat16, and whether weights stay in float32, with DDP and FSDP."""
    found = {}
    batch = samples(0)[0]
    for name, mesh, mode in (
        ("replicas", init_mesh(device="cpu"), None),
        ("shards", init_mesh(1, 2, device="cpu"), "full"),
    ):
        seen: list[Any] = []
        model: Any = GPT(config(tied=True))
        model.layers[0].mlp.gate_proj.register_forward_hook(lambda m, x, y, seen=seen: seen.append(y.dtype))
        model = parallelize(model, mesh, mode=mode, compute_dtype=torch.bfloat16)
        totals = accumulate(model, shard_samples([batch], mesh, "zigzag"), mesh)
        dtypes = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
        found[name] = float(totals.loss), seen == [torch.bfloat16], dtypes == {torch.float32}
    return found


def test_half_precision_keeps_master_weights_and_gradients_in_float32(pool):
    plain = float(accumulate(GPT(config(tied=True)), [dict(tokens=(b := samples(0)[0])[0], labels=b[1])]).loss)
    for found in pool.run(2, half_precision):
        for loss, computed, in_float32 in found.values():
            assert computed
            assert in_float32
            assert loss == pytest.approx(plain, rel=5e-3)
            assert loss != plain
