"""Features of attention over a mesh: dropout, softcap, ALiBi, sinks, reduction dtypes and determinism."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as _distributed

from mesh_cases import CAUSAL, SCHEDULES, assert_close, assert_equal, compare, cut, default_layout, gradients, qkv
from meshflash import Mask, attention, flash_attention
from meshflash.engine.cache import cache
from meshflash.engine.group_context import group_context

dist: Any = _distributed  # the stubs of torch miss some of its exports


def check_dropout(rank, world, group):
    """Compare dropout with a single device, and assert that it keeps the same pairs of query and key."""
    whole = qkv(26)
    for seed in (3, torch.tensor(4)):
        for schedule in ("ring", "zigzag", "allgather"):
            layout = default_layout(schedule, 26, world)
            more: dict[str, Any] = dict(batch_offset=1, head_offset=2, mesh=group, schedule=schedule, mask=CAUSAL)
            compare(rank, world, whole, layout, dropout=0.4, seed=seed, **more)
    # Values that form an identity matrix show the pairs of query and key that dropout kept.
    tokens = 6 * world
    q, k = torch.zeros(1, tokens, 2, 4), torch.zeros(1, tokens, 2, 4)
    v = torch.eye(tokens)[None, :, None].expand(1, tokens, 2, tokens)
    kept = flash_attention(q, k, v, dropout=0.5, seed=9) > 0
    for schedule in SCHEDULES:
        layout = default_layout(schedule, tokens, world)
        local = attention(*(cut(x, layout, rank) for x in (q, k, v)), schedule=schedule, dropout=0.5, seed=9)
        assert torch.equal(local > 0, cut(kept, layout, rank))
    with pytest.raises(ValueError, match="seed: give the same seed on all ranks"):
        attention(*(cut(x, layout, rank) for x in whole), layout=layout, dropout=0.5)
    attention(*(cut(x, layout, rank) for x in (q, k, v)), seed=None, dropout=0.0)


@pytest.mark.parametrize("world", [2, 3])
def test_dropout_drops_the_same_pairs_on_any_number_of_ranks(pool, world):
    pool.run(world, check_dropout)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softcap": ({}, dict(mask=CAUSAL, softcap=1.5)),
    "alibi": ({}, dict(mask=CAUSAL, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.7]))),
    "alibi by row": ({}, dict(mask=CAUSAL, alibi_slopes=torch.rand(2, 4, generator=torch.Generator().manual_seed(1)))),
    "scale": ({}, dict(scale=0.3)),
    "mqa": (dict(kv_heads=1), dict(mask=CAUSAL)),
    "mha": (dict(kv_heads=4), dict(mask=CAUSAL & Mask.window(9, 0))),
    "value dim": (dict(dim=8, value_dim=20), dict(mask=CAUSAL)),
    "q_offset": ({}, dict(mask=CAUSAL, q_offset=7)),
    "documents by row": ({}, dict(mask=CAUSAL & Mask.documents([[20, 5], [1, 24]]))),
    "float32": (dict(dtype=torch.float32), dict(mask=CAUSAL)),
    "float16": (dict(dtype=torch.float16), dict(mask=CAUSAL)),
    "bfloat16": (dict(dtype=torch.bfloat16), dict(mask=CAUSAL)),
    "reference": (dict(dtype=torch.float32), dict(mask=CAUSAL, kernel="reference")),
    "tiled": (dict(dtype=torch.float32), dict(mask=CAUSAL, kernel="tiled")),
}


def check_features(rank, world, group):
    """Compare all calls of `CALLS` with a single device."""
    for name, (shape, call) in CALLS.items():
        for schedule in ("zigzag", "allgather(head_stride=1)"):
            try:
                compare(rank, world, qkv(**shape), default_layout(schedule, 25, world), schedule=schedule, **call)
            except AssertionError as error:
                raise AssertionError(f"{name}, {schedule}: {error}") from error


@pytest.mark.parametrize("world", [2, 3])
def test_features_and_shapes_match_a_single_device(pool, world):
    pool.run(world, check_features)


def check_sink_gradients(rank, world, group):
    """Assert that sink gradients, summed over ranks, match a single device."""
    whole, logits = qkv(), torch.linspace(-1, 2, 4, dtype=torch.float64)
    *_, want = gradients(lambda q, k, v, s: flash_attention(q, k, v, mask=CAUSAL, sink_logits=s), *whole, logits)
    for schedule in SCHEDULES:
        layout = default_layout(schedule, 25, world)

        def call(q, k, v, sink_logits, schedule=schedule, layout=layout):
            return attention(q, k, v, mask=CAUSAL, sink_logits=sink_logits, schedule=schedule, layout=layout)

        *_, share = gradients(call, *(cut(x, layout, rank) for x in whole), logits)
        dist.all_reduce(share, group=group)
        assert_close([share], [want])


def test_sink_logit_gradients_summed_over_ranks_match_a_single_device(pool):
    pool.run(3, check_sink_gradients)


def compare_reduce_dtypes(rank, world, group):
    """Assert that bfloat16 reductions round dK and dV only; return where dK changed."""
    changed = []
    for dtype in (torch.float32, torch.bfloat16):
        for schedule in SCHEDULES:
            layout = default_layout(schedule, 40, world)
            local = [cut(x, layout, rank) for x in qkv(40, dtype=dtype)]
            call: dict[str, Any] = dict(schedule=schedule, layout=layout, mask=CAUSAL)
            exact, rounded, same = (
                gradients(partial(attention, **call, reduce_dtype=reduce_dtype), *local)
                for reduce_dtype in (None, torch.bfloat16, torch.float32)
            )
            assert_equal(exact, same)
            assert_equal(exact[:2], rounded[:2])  # output and dq are not reduced over ranks, so they are not rounded
            assert_close(rounded[2:], exact[2:], share=2**-8 * (world + (dtype == torch.bfloat16)))
            changed.append(not torch.equal(exact[2], rounded[2]))
    return changed


def test_bfloat16_reduce_dtype_rounds_only_reduced_gradients(pool):
    assert all(any(ranks) for ranks in zip(*pool.run(3, compare_reduce_dtypes), strict=True))


def check_determinism(rank, world, group):
    """Assert that deterministic calls give equal bits, by argument and by PyTorch's global switch."""
    for schedule in SCHEDULES:
        layout = default_layout(schedule, 40, world)
        local = [cut(x, layout, rank) for x in qkv(40, dtype=torch.float32)]
        call = partial(attention, layout=layout, schedule=schedule, mask=CAUSAL)
        first = gradients(partial(call, deterministic=True), *local)
        assert_equal(first, gradients(partial(call, deterministic=True), *local))
        torch.use_deterministic_algorithms(True)
        try:
            assert_equal(first, gradients(call, *local))
            assert cache.newest(group_context(group.group_name)).setting.deterministic
        finally:
            torch.use_deterministic_algorithms(False)


def test_deterministic_calls_are_bitwise_equal(pool):
    pool.run(3, check_determinism)
