"""`shard` and `unshard`: round trips, gradients, aliasing and errors."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import distributed as _distributed

from meshflash import Layout, Mask, attention, flash_attention, positions, shard, unshard

dist: Any = _distributed  # the stubs of torch miss some of its exports

CUSTOM = {
    1: Layout(((range(4, 7), range(4)),)),
    2: Layout(((range(1, 7, 2),), (range(0, 7, 2),))),
    3: Layout(((range(6, 7), range(2)), (), (range(2, 6),))),
    4: Layout(((), (range(3, 7),), (range(3),), ())),
}


def layouts(world):
    """Yield every kind of layout, with odd lengths, fewer tokens than ranks, and no tokens."""
    for tokens in (0, 1, 2, 7, 8, 23):
        for kind in (Layout.contiguous, Layout.zigzag, Layout.striped):
            yield kind(tokens, world)
    yield Layout.balanced(Mask.causal(), 23, world)
    yield CUSTOM[world]


def whole(layout, *shape, dim, dtype=torch.float32):
    """Return distinct values of this shape, with the layout's tokens inserted at `dim`; the same on every rank."""
    sizes = list(shape)
    sizes.insert(dim if dim >= 0 else len(shape) + 1 + dim, layout.tokens)
    values = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    return values.to(dtype)


def check_round_trips(rank, world, group):
    """Assert that unshard inverts shard for every layout, shape, dimension and dtype."""
    for layout in layouts(world):
        own_positions = torch.from_numpy(layout.positions(rank))
        for shape, dim, dtype in (
            ((2,), 1, torch.int64),  # token ids
            ((), 0, torch.int64),  # packed token ids
            ((3, 2), 0, torch.bfloat16),  # packed activations
            ((2, 3), -2, torch.float64),  # images as patches: [batch, tokens, patch]
            ((2, 3), -1, torch.float32),
            ((2, 1, 3), 2, torch.bool),
        ):
            x = whole(layout, *shape, dim=dim, dtype=dtype)
            local = shard(x, layout, group, dim=dim)
            assert torch.equal(local, x.index_select(dim, own_positions))
            back = unshard(local, layout, group, dim=dim)
            assert torch.equal(back, x)
            assert (back.dtype, back.is_contiguous()) == (dtype, True)
            assert torch.equal(unshard(local.movedim(dim, 0).contiguous().movedim(0, dim), layout, group, dim=dim), x)
        ids = whole(layout, 2, dim=1, dtype=torch.int64)
        assert torch.equal(unshard(shard(ids, layout), layout), ids)  # the default group, dimension 1


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shard_and_unshard_round_trip_on_every_layout(pool, world):
    pool.run(world, check_round_trips)


def check_without_a_group():
    """Assert that unshard inverts shard in a process without a group."""
    for layout in layouts(1):
        x = whole(layout, 2, 3, dim=1)
        assert torch.equal(unshard(shard(x, layout), layout), x)
    return True


def test_shard_and_unshard_copy_without_a_process_group():
    assert not dist.is_initialized()
    assert check_without_a_group()


def check_gradients(rank, world, group):
    """Compare the gradients of shard, of unshard and of both with their definition."""
    generator = torch.Generator().manual_seed(0)
    for layout in layouts(world):
        own_positions = torch.from_numpy(layout.positions(rank))
        for dim in (0, 1, -2):
            x = whole(layout, 2, 3, dim=dim, dtype=torch.float64).requires_grad_()
            upstream = torch.randn(world, *x.shape, generator=generator, dtype=torch.float64)
            local = shard(x, layout, group, dim=dim)
            (grad,) = torch.autograd.grad(local, x, upstream[rank].index_select(dim, own_positions))
            others = torch.ones(layout.tokens, dtype=torch.bool).index_fill(0, own_positions, False).nonzero().flatten()
            assert torch.equal(grad.index_select(dim, own_positions), upstream[rank].index_select(dim, own_positions))
            assert not grad.index_select(dim, others).any()

            leaf = local.detach().requires_grad_()
            back = unshard(leaf, layout, group, dim=dim)
            (grad,) = torch.autograd.grad(back, leaf, upstream[rank])
            assert torch.allclose(grad, upstream.sum(0).index_select(dim, own_positions), rtol=1e-15, atol=1e-15)
            assert grad.is_contiguous()

            # `unshard` after `shard`: the gradient is the sum over all ranks at the rank's own tokens, else zero.
            (grad,) = torch.autograd.grad(unshard(shard(x, layout, group, dim), layout, group, dim), x, upstream[rank])
            want = torch.zeros_like(x).index_copy(dim, own_positions, upstream.sum(0).index_select(dim, own_positions))
            assert torch.allclose(grad, want, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_of_shard_and_unshard_match_a_single_device(pool, world):
    pool.run(world, check_gradients)


def check_independent_results(rank, world, group):
    """Assert that results share no memory with inputs or with later results."""
    for layout in layouts(world):
        for function in (shard, unshard):
            tokens = layout.tokens if function is shard else layout.lengths[rank]
            x = torch.zeros(2, tokens, 3)
            result = function(x, layout, group).requires_grad_()
            assert result is not x
            assert not result.numel() or result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            assert result._base is not x
            assert result.is_leaf
            assert not x.requires_grad
            with torch.no_grad():
                result.fill_(1)
            assert not x.any()
            assert x._version == 0
            again = function(x.requires_grad_(), layout, group)  # gradients still flow
            assert not again.is_leaf
            again.sum().backward()
            assert x.grad is not None
    own_array = positions(layout, rank)
    own_array[:] = -1  # the caller owns this array; later calls return another
    assert positions(layout, rank).tolist() == layout.positions(rank).tolist() == [*chain(*layout.ranges[rank])]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_do_not_alias_the_callers_tensors(pool, world):
    pool.run(world, check_independent_results)


def test_compiled_shard_does_not_alias_the_callers_tensor():
    torch._dynamo.reset()
    layout = Layout.zigzag(6, 1)
    compiled = torch.compile(lambda x: shard(x, layout), fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 6, 2)
    result = compiled(x).requires_grad_()
    assert not x.requires_grad
    assert result.data_ptr() != x.data_ptr()
    compiled(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def check_loss_over_whole_sequence(rank, world, group):
    """Assert that the loss of the whole sequence, divided by ranks, gives single-device gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 23, 2, 8, generator=generator, dtype=torch.float64).requires_grad_()
    want = torch.autograd.grad(flash_attention(x, x, x, mask=Mask.causal()).square().mean(), x)[0]
    layout = Layout.zigzag(23, world)
    local = shard(x, layout, group)
    out = unshard(attention(local, local, local, mesh=group, layout=layout, mask=Mask.causal()), layout, group)
    grad = torch.autograd.grad(out.square().mean() / world, x)[0]  # all ranks compute the same loss
    dist.all_reduce(grad, group=group)
    assert torch.allclose(grad, want, rtol=0, atol=1e-14)


def test_loss_over_the_whole_sequence_divided_by_ranks_matches_a_single_device(pool):
    pool.run(3, check_loss_over_whole_sequence)


def check_subgroups(rank, world, group):
    """Assert that unshard inverts shard over a mesh axis and over its group."""
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x = torch.arange(14).reshape(2, 7)
    for mesh, own in ((grid["cp"], rank % 2), (grid["dp"].get_group(), rank // 2)):
        layout = Layout.zigzag(7, 2)
        local = shard(x, layout, mesh)
        assert torch.equal(local, x[:, torch.from_numpy(layout.positions(own))])
        assert torch.equal(unshard(local, layout, mesh), x)


def test_shard_and_unshard_work_on_a_subgroup(pool):
    pool.run(4, check_subgroups)


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


def check_wrong_lengths(rank, world, group):
    """Assert that a shard of the wrong length and a mesh of three axes are refused."""
    with pytest.raises(ValueError, match=rf"unshard: x has 7 tokens in dimension 1, the layout gives rank {rank} \d"):
        unshard(X, Layout.zigzag(7, world), group)
    with pytest.raises(ValueError, match=r"mesh: it has 3 dimensions"):
        unshard(X, Layout.zigzag(7, world), dist.init_device_mesh("cpu", (world, 1, 1)))


def test_shard_of_wrong_length_is_refused(pool):
    pool.run(2, check_wrong_lengths)
