"""Calls over every kind of mesh, layout and registered schedule against `flash_attention` on a single device."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as _distributed

from mesh_cases import CAUSAL, SCHEDULES, assert_close, assert_equal, compare, cut, default_layout, qkv
from meshflash import Layout, Mask, attention, flash_attention, register_schedule
from meshflash.schedules import allgather, registry, ring

dist: Any = _distributed  # the stubs of torch miss some of its exports


def check_without_layout(rank, world, group):
    """Compare calls without a layout, with shards of equal length, with a single device."""
    for schedule in (*SCHEDULES, "auto"):
        for tokens in (5 * world, world, 0):
            layout = default_layout("ring" if schedule == "auto" else schedule, tokens, world)
            whole = qkv(tokens)
            compare(rank, world, whole, layout, layouts={}, mesh=group, schedule=schedule, mask=CAUSAL)


@pytest.mark.parametrize("world", [2, 4])
def test_shards_of_equal_length_need_no_layout(pool, world):
    pool.run(world, check_without_layout)


def check_every_mesh(rank, world, group):
    """Compare calls over groups, sub-groups and meshes of one and two axes with a single device."""

    def check(mesh, rank, world):
        whole, layout = qkv(9, seed=world), Layout.zigzag(9, world)
        for schedule in ("ring", "allgather"):
            compare(rank, world, whole, layout, mesh=mesh, schedule=schedule, mask=CAUSAL)

    check(None, rank, world)
    check(group, rank, world)
    check(dist.init_device_mesh("cpu", (world,)), rank, world)
    halves = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    check(halves[0] if rank in (0, 3) else halves[1], rank // 2, 2)
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    check(grid["cp"], rank % 2, 2)
    check(grid["dp"], rank // 2, 2)
    check(grid["cp"].get_group(), rank % 2, 2)
    cube = dist.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "a", "b"))
    for mesh_2d, own_rank, ranks in ((grid, rank, world), (cube["a", "b"], rank % 2, 2)):
        for schedule in ("hybrid", "double_ring", "hybrid(ring=allgather, transposed=True)"):
            whole, layout = qkv(9, seed=ranks), Layout.zigzag(9, ranks)
            compare(own_rank, ranks, whole, layout, mesh=mesh_2d, schedule=schedule, mask=CAUSAL)
    with pytest.raises(ValueError, match="must ascend"):
        check(dist.DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("a", "b")), rank, world)
    alone = [dist.new_group([other]) for other in range(world)][rank]
    check(alone, 0, 1)


def test_mesh_may_be_any_process_group_or_device_mesh(pool):
    pool.run(4, check_every_mesh)


def check_single_rank(rank, world, group):
    """Assert that a group of one rank gives the bits and the plan of `flash_attention`."""
    inputs = qkv(9)
    whole, lse = flash_attention(*inputs, mask=CAUSAL, return_lse=True)
    for mesh in (None, group, dist.init_device_mesh("cpu", (1,))):
        for more in ({}, dict(layout=Layout.zigzag(9, 1)), dict(schedule="ring"), dict(verify=True)):
            assert torch.equal(attention(*inputs, mesh=mesh, mask=CAUSAL, **more), whole)
    got = attention(*inputs, mask=CAUSAL, return_lse=True, return_plan=True)
    assert torch.equal(got[1], lse)
    assert str(got[2]) == "single device; kernels: vendor (before tiled, by a fixed order)"
    assert (got[2].schedule, got[2].world, got[2].program) == ("local", 1, None)
    compare(0, 1, inputs, Layout.contiguous(9, 1), mask=CAUSAL, q_offset=3, dropout=0.3, seed=5, softcap=2.0)


def test_group_of_one_rank_matches_flash_attention(pool):
    pool.run(1, check_single_rank)


def test_process_without_a_group_matches_flash_attention():
    assert not dist.is_initialized()
    inputs = qkv(9)
    got = attention(*inputs, mask=CAUSAL, layout=Layout.striped(9, 1), return_lse=True, verify=True)
    assert_equal(got, flash_attention(*inputs, mask=CAUSAL, return_lse=True))


def test_permuted_layout_is_refused_on_a_single_rank():
    layout = Layout(((range(5, 9), range(5)),))
    inputs = [cut(x, layout, 0) for x in qkv(9)]
    with pytest.raises(ValueError, match=r"layout: on one rank positions must be in order"):
        attention(*inputs, layout=layout, mask=CAUSAL)


def check_packed_documents(rank, world, group):
    """Compare packed documents, given as a list and as a tensor, with a single device."""
    lengths = [4, 0, 9, 1, 5]
    q, k, v = (x[0] for x in qkv(19))
    mask = CAUSAL & Mask.documents(lengths)
    whole, whole_lse = flash_attention(q, k, v, mask=mask, return_lse=True)
    for schedule in SCHEDULES:
        layout = default_layout(schedule, 19, world)
        local = [cut(x, layout, rank, 0) for x in (q, k, v)]
        for same_mask in (mask, CAUSAL & Mask.documents(torch.tensor(lengths))):
            out, lse = attention(*local, mask=same_mask, layout=layout, schedule=schedule, return_lse=True, verify=True)
            assert out.shape == (layout.lengths[rank], 4, 8)
            assert lse.shape == (4, layout.lengths[rank])
            assert_close([out, lse], [cut(whole, layout, rank, 0), cut(whole_lse, layout, rank, 1)])


def test_packed_documents_match_a_single_device(pool):
    pool.run(3, check_packed_documents)


def check_cross_attention(rank, world, group):
    """Compare cross-attention with different layouts of queries and keys with a single device."""
    for q_tokens, k_tokens in ((7, 22), (22, 7), (1, 22), (22, 1), (5, 0)):
        whole = qkv(q_tokens, k_tokens)
        layouts = Layout.zigzag(q_tokens, world), Layout.striped(k_tokens, world)
        offset = max(0, k_tokens - q_tokens)
        for schedule in ("ring", "allgather"):
            compare(rank, world, whole, *layouts, schedule=schedule, mask=CAUSAL, q_offset=offset, verify=True)
            compare(rank, world, whole, *layouts, schedule=schedule, verify=True)
    even = Layout.contiguous(4 * world, world), Layout.contiguous(2 * world, world)
    compare(rank, world, qkv(4 * world, 2 * world), *even, layouts={}, mask=CAUSAL)
    with pytest.raises(ValueError, match=r"k has 2 tokens, q has 4: give the keys a layout of their own"):
        attention(*qkv(4, 2), layout=even[0])


@pytest.mark.parametrize("world", [2, 3])
def test_cross_attention_matches_a_single_device(pool, world):
    pool.run(world, check_cross_attention)


@contextmanager
def registered_schedules():
    """Register two schedules that combine the forward of one built-in schedule with the backward of another."""
    register_schedule("mine", ring.forward, allgather.backward, options={"head_stride": 1})
    register_schedule("yours", allgather.forward, ring.backward, layout=Layout.zigzag, options={"head_stride": 0})
    try:
        yield
    finally:
        registry.unregister_schedule("mine")
        registry.unregister_schedule("yours")


def check_registered_schedules(rank, world, group):
    """Compare registered schedules with a single device, and refuse them after they are unregistered."""
    with registered_schedules():
        for schedule, name in (("mine", "contiguous"), ("mine(head_stride=2)", "contiguous"), ("yours", "zigzag")):
            tokens = 6 * world
            layout = default_layout(schedule, tokens, world)
            assert layout.name == name
            compare(rank, world, qkv(tokens), layout, layouts={}, schedule=schedule, mask=CAUSAL, verify=True)
            compare(rank, world, qkv(), default_layout(schedule, 25, world), schedule=schedule, mask=CAUSAL)
    with pytest.raises(ValueError, match=r"schedule='mine': expected one of auto, "):
        attention(*(x[:, :6] for x in qkv(6)), schedule="mine")


def test_registered_schedules_match_a_single_device(pool):
    pool.run(3, check_registered_schedules)
