"""`prepare` builds the programs and tables of a new packing ahead, and changes no result."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from mesh_cases import compare, cut, default_layout, qkv
from meshflash import Layout, Mask, attention, prepare
from meshflash.core import tiles
from meshflash.schedules import registry

CAUSAL = Mask.causal()
FIRST, SECOND = CAUSAL & Mask.documents([5, 1, 10, 8]), CAUSAL & Mask.documents([2, 9, 13])


def misses():
    """Return how many programs and worklists were built."""
    return registry.build.cache_info().misses, tiles._cached_worklist.cache_info().misses


def call(rank, schedule, layout, mask):
    """Run a forward and a backward on this rank's shard."""
    shards = [cut(x, layout, rank).detach().requires_grad_() for x in qkv(24)[:3]]
    attention(*shards, layout=layout, schedule=schedule, mask=mask).sum().backward()


def check_prepared_calls_build_nothing(rank, world, group):
    for schedule in ("ring", "zigzag", "allgather", "hybrid", "ringx4"):
        layout = default_layout(schedule, 24, world)
        call(rank, schedule, layout, FIRST)
        assert prepare(SECOND) >= 1
        before = misses()
        call(rank, schedule, layout, SECOND)
        assert misses() == before, schedule
        compare(rank, world, qkv(24), layout, mesh=group, schedule=schedule, mask=SECOND)


def test_a_prepared_mask_builds_no_program_and_no_table_in_its_call(pool):
    pool.run(2, check_prepared_calls_build_nothing)


def check_another_layout(rank, world, group):
    before = Layout.balanced(FIRST, 24, world)
    after = Layout(((range(3), range(20, 24)), (range(3, 20),)), "custom")
    call(rank, "ring", before, FIRST)
    thread = threading.Thread(target=prepare, args=(SECOND, after))
    thread.start()
    thread.join()
    built = misses()
    call(rank, "ring", after, SECOND)
    assert misses() == built
    with pytest.raises(ValueError, match="it is for 3 ranks, the group has 2"):
        prepare(SECOND, Layout.contiguous(24, 3))
    with pytest.raises(ValueError, match="25 tokens in the documents, 24 in the sequence"):
        prepare(CAUSAL & Mask.documents([12, 13]))


def test_another_thread_prepares_another_layout(pool):
    pool.run(2, check_another_layout)


def check_only_one_rank_prepares(rank, world, group):
    layout = Layout.contiguous(24, world)
    call(rank, "ring", layout, FIRST)
    if rank:
        prepare(SECOND)
    call(rank, "ring", layout, SECOND)


def test_ranks_need_not_prepare_alike(pool):
    pool.run(2, check_only_one_rank_prepares)


def check_a_group_ends(rank, world, group):
    layout = Layout.contiguous(24, world)
    ended = dist.new_group(list(range(world)))
    for mesh in (group, ended):
        shards = [cut(x, layout, rank) for x in qkv(24)[:3]]
        attention(*shards, mesh=mesh, layout=layout, schedule="ring", mask=FIRST)
    dist.destroy_process_group(ended)
    assert prepare(SECOND) >= 1


def test_calls_over_a_group_that_has_ended_are_left_out(pool):
    pool.run(2, check_a_group_ends)


def check_calls_that_are_always_compared(rank, world, group):
    layout = Layout.contiguous(24, world)
    call(rank, "ring", layout, FIRST)
    os.environ["MESHFLASH_CHECK"] = "always"
    try:
        assert prepare(SECOND) >= 1
        before = misses()
        call(rank, "ring", layout, SECOND)
        assert misses() == before
    finally:
        del os.environ["MESHFLASH_CHECK"]


def test_calls_that_ranks_always_compare_are_prepared(pool):
    pool.run(2, check_calls_that_are_always_compared)


def check_other_ranks_of_a_process(rank, world, group):
    layout = Layout.contiguous(24, 2)
    for members in ((0, 1), (1, 2)):  # rank 1 is the second rank of one group, and the first one of the other
        mesh = dist.new_group(list(members))
        if rank in members:
            shards = [cut(x, layout, members.index(rank)).detach().requires_grad_() for x in qkv(24)[:3]]
            attention(*shards, mesh=mesh, layout=layout, schedule="ring", mask=FIRST).sum().backward()
    assert prepare(SECOND) == 1 + (rank == 1)


def test_a_process_prepares_all_of_its_ranks(pool):
    pool.run(3, check_other_ranks_of_a_process)


def check_layers_with_features(rank, world, group):
    layout = Layout.zigzag(24, world)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def layers(mask):
        for alibi_slopes in (None, slopes, None):
            shards = [cut(x, layout, rank).detach().requires_grad_() for x in qkv(24)[:3]]
            out = attention(*shards, layout=layout, schedule="zigzag", mask=mask, alibi_slopes=alibi_slopes)
            out.sum().backward()

    layers(FIRST)
    third = CAUSAL & Mask.documents([7, 4, 13])  # of no other test, whose tables would be there already
    prepare(third)
    before = misses()
    layers(third)
    assert misses() == before


def test_layers_with_and_without_features_are_prepared(pool):
    pool.run(2, check_layers_with_features)


def check_calls_that_do_not_fit(rank, world, group):
    short, long = Layout.contiguous(12, world), Layout.contiguous(24, world)
    shards = [cut(x, short, rank) for x in qkv(12)[:3]]
    attention(*shards, layout=short, schedule="ring", mask=CAUSAL)
    with pytest.raises(ValueError, match="24 tokens in the documents, 12 in the sequence"):
        prepare(SECOND)
    call(rank, "ring", long, FIRST)
    assert prepare(SECOND) == 1


def test_calls_that_the_mask_does_not_fit_are_left_out(pool):
    pool.run(2, check_calls_that_do_not_fit)


@pytest.mark.parametrize(
    ("arguments", "message"), [((None,), "expected a Mask"), ((CAUSAL, 3), "layout=3.: expected a Layout")]
)
def test_other_arguments_than_a_mask_and_a_layout_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        prepare(*arguments)


def test_nothing_is_prepared_before_the_first_call_over_ranks():
    x = torch.zeros(1, 4, 1, 8)
    attention(x, x, x)
    assert prepare(CAUSAL & Mask.documents([4])) == 0
