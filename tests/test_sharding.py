"""Spreading sequences over ranks and bringing them together: round trips, gradients, errors."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import distributed as _distributed

from meshflash import Layout, Mask, attention, flash_attention, positions, shard, unshard

dist: Any = _distributed  # torch does not declare all that it exports here

CUSTOM = {
    1: Layout(((range(4, 7), range(4)),)),
    2: Layout(((range(1, 7, 2),), (range(0, 7, 2),))),
    3: Layout(((range(6, 7), range(2)), (), (range(2, 6),))),
    4: Layout(((), (range(3, 7),), (range(3),), ())),
}


def layouts(world):
    """Every kind of layout, of odd lengths, shorter than the world, and of none at all."""
    for tokens in (0, 1, 2, 7, 8, 23):
        for kind in (Layout.contiguous, Layout.zigzag, Layout.striped):
            yield kind(tokens, world)
    yield Layout.balanced(Mask.causal(), 23, world)
    yield CUSTOM[world]


def whole(layout, *shape, dim, dtype=torch.float32):
    """Numbers of this shape with the layout's tokens in a dimension, the same on every rank."""
    sizes = list(shape)
    sizes.insert(dim if dim >= 0 else len(shape) + 1 + dim, layout.tokens)
    numbers = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    return numbers.to(dtype)


def round_trips(rank, world, group):
    for layout in layouts(world):
        held = torch.from_numpy(layout.positions(rank))
        for shape, dim, dtype in (
            ((2,), 1, torch.int64),  # token ids
            ((), 0, torch.int64),  # packed token ids
            ((3, 2), 0, torch.bfloat16),  # packed activations
            ((2, 3), -2, torch.float64),  # images as patches: [batch, tokens, patch]
            ((2, 3), -1, torch.float32),
            ((2, 1, 3), 2, torch.bool),
        ):
            x = whole(layout, *shape, dim=dim, dtype=dtype)
            mine = shard(x, layout, group, dim=dim)
            assert torch.equal(mine, x.index_select(dim, held))
            back = unshard(mine, layout, group, dim=dim)
            assert torch.equal(back, x)
            assert (back.dtype, back.is_contiguous()) == (dtype, True)
            assert torch.equal(unshard(mine.movedim(dim, 0).contiguous().movedim(0, dim), layout, group, dim=dim), x)
        ids = whole(layout, 2, dim=1, dtype=torch.int64)
        assert torch.equal(unshard(shard(ids, layout), layout), ids)  # the default group, dimension 1


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shard_and_unshard_round_trip_on_every_layout(pool, world):
    pool.run(world, round_trips)


def without_a_group():
    for layout in layouts(1):
        x = whole(layout, 2, 3, dim=1)
        assert torch.equal(unshard(shard(x, layout), layout), x)
    return True


def test_shard_and_unshard_copy_without_a_process_group():
    assert not dist.is_initialized()
    assert without_a_group()


def gradients(rank, world, group):
    generator = torch.Generator().manual_seed(0)
    for layout in layouts(world):
        held = torch.from_numpy(layout.positions(rank))
        for dim in (0, 1, -2):
            x = whole(layout, 2, 3, dim=dim, dtype=torch.float64).requires_grad_()
            upstream = torch.randn(world, *x.shape, generator=generator, dtype=torch.float64)
            mine = shard(x, layout, group, dim=dim)
            (grad,) = torch.autograd.grad(mine, x, upstream[rank].index_select(dim, held))
            others = torch.ones(layout.tokens, dtype=torch.bool).index_fill(0, held, False).nonzero().flatten()
            assert torch.equal(grad.index_select(dim, held), upstream[rank].index_select(dim, held))
            assert not grad.index_select(dim, others).any()

            leaf = mine.detach().requires_grad_()
            back = unshard(leaf, layout, group, dim=dim)
            (grad,) = torch.autograd.grad(back, leaf, upstream[rank])
            assert torch.allclose(grad, upstream.sum(0).index_select(dim, held), rtol=1e-15, atol=1e-15)
            assert grad.is_contiguous()

            # one after the other: each rank's gradient of the whole is the sum of all, at its own tokens
            (grad,) = torch.autograd.grad(unshard(shard(x, layout, group, dim), layout, group, dim), x, upstream[rank])
            want = torch.zeros_like(x).index_copy(dim, held, upstream.sum(0).index_select(dim, held))
            assert torch.allclose(grad, want, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_of_shard_and_unshard_match_one_device(pool, world):
    pool.run(world, gradients)


def independent_results(rank, world, group):
    for layout in layouts(world):
        for function in (shard, unshard):
            tokens = layout.tokens if function is shard else layout.lengths[rank]
            x = torch.zeros(2, tokens, 3)
            made = function(x, layout, group).requires_grad_()
            assert made is not x
            assert not made.numel() or made.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            assert made._base is not x
            assert made.is_leaf
            assert not x.requires_grad
            with torch.no_grad():
                made.fill_(1)
            assert not x.any()
            assert x._version == 0
            again = function(x.requires_grad_(), layout, group)  # and yet gradients flow
            assert not again.is_leaf
            again.sum().backward()
            assert x.grad is not None
    place = positions(layout, rank)
    place[:] = -1  # a caller's own array, which no later call hands out
    assert positions(layout, rank).tolist() == layout.positions(rank).tolist() == [*chain(*layout.ranges[rank])]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_do_not_alias_the_callers_tensors(pool, world):
    pool.run(world, independent_results)


def test_compiled_shard_does_not_alias_the_callers_tensor():
    torch._dynamo.reset()
    layout = Layout.zigzag(6, 1)
    compiled = torch.compile(lambda x: shard(x, layout), fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 6, 2)
    made = compiled(x).requires_grad_()
    assert not x.requires_grad
    assert made.data_ptr() != x.data_ptr()
    compiled(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def a_loss_of_the_whole(rank, world, group):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 23, 2, 8, generator=generator, dtype=torch.float64).requires_grad_()
    want = torch.autograd.grad(flash_attention(x, x, x, mask=Mask.causal()).square().mean(), x)[0]
    layout = Layout.zigzag(23, world)
    mine = shard(x, layout, group)
    out = unshard(attention(mine, mine, mine, mesh=group, layout=layout, mask=Mask.causal()), layout, group)
    grad = torch.autograd.grad(out.square().mean() / world, x)[0]  # all ranks compute the same loss
    dist.all_reduce(grad, group=group)
    assert torch.allclose(grad, want, rtol=0, atol=1e-14)


def test_loss_over_the_whole_sequence_divided_by_ranks_matches_one_device(pool):
    pool.run(3, a_loss_of_the_whole)


def other_meshes(rank, world, group):
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x = torch.arange(14).reshape(2, 7)
    for mesh, own in ((grid["cp"], rank % 2), (grid["dp"].get_group(), rank // 2)):
        layout = Layout.zigzag(7, 2)
        mine = shard(x, layout, mesh)
        assert torch.equal(mine, x[:, torch.from_numpy(layout.positions(own))])
        assert torch.equal(unshard(mine, layout, mesh), x)


def test_shard_and_unshard_work_on_a_subgroup(pool):
    pool.run(4, other_meshes)


X = torch.zeros(2, 7, 3)
ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "not a tensor": (shard, dict(x=[1]), r"shard: expected a tensor, got list"),
    "no layout": (shard, dict(layout=None), r"shard: expected a meshflash.Layout, such as .*; got None"),
    "a name": (unshard, dict(layout="zigzag"), r"unshard: expected a meshflash.Layout, such as .*; got 'zigzag'"),
    "dim": (shard, dict(dim=3), r"shard: dim=3, and x has 3 dimensions"),
    "dim below": (unshard, dict(dim=-4), r"unshard: dim=-4, and x has 3 dimensions"),
    "world": (shard, dict(layout=Layout.zigzag(7, 2)), r"shard: the layout is for 2 ranks, the group has 1"),
    "length": (shard, dict(layout=Layout.zigzag(8, 1)), r"shard: x has 7 tokens in dimension 1, the layout 8"),
    "length in another dim": (shard, dict(dim=2), r"shard: x has 3 tokens in dimension 2, the layout 7"),
    "shard's length": (
        unshard,
        dict(layout=Layout.zigzag(8, 1)),
        r"unshard: x has 7 tokens in dimension 1, the layout gives rank 0 8",
    ),
    "mesh": (shard, dict(mesh="cp"), r"mesh: expected a process group that this rank is in, .*got str"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_expected_value(name):
    function, arguments, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        function(**(dict(x=X, layout=Layout.zigzag(7, 1)) | arguments))


def wrong_on_every_rank(rank, world, group):
    with pytest.raises(ValueError, match=rf"unshard: x has 7 tokens in dimension 1, the layout gives rank {rank} \d"):
        unshard(X, Layout.zigzag(7, world), group)
    with pytest.raises(ValueError, match=r"mesh: it has 3 dimensions"):
        unshard(X, Layout.zigzag(7, world), dist.init_device_mesh("cpu", (world, 1, 1)))


def test_shard_of_wrong_length_is_refused(pool):
    pool.run(2, wrong_on_every_rank)
