"""Attention over a mesh: saved buffers, gathered keys, transports, the optional LSE and spellings of a schedule."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as _distributed
from torch._subclasses.fake_tensor import FakeTensorMode

from mesh_cases import assert_close, compare, cut, leaves, qkv
from meshflash import Layout, Mask, attention, flash_attention, register_schedule, shard, unshard
from meshflash.core.program import Buffer, Copy, Slice
from meshflash.engine.group_context import group_context
from meshflash.schedules import allgather, registry
from meshflash.schedules.compose import heads_for_sequence

CAUSAL = Mask.causal()
dist: Any = _distributed  # the stubs of torch miss some of its exports


def saves_more(problem, rank, name="saves_more"):
    """Build a forward program that saves a copy of q in addition to the buffers that every backward reads."""
    program = allgather.forward(problem, rank, name)
    rows, heads = problem.q_lengths[rank], problem.heads
    saved_q, whole = Buffer("mine", "q", rows, heads, role="saved"), Slice("q", (0, rows), (0, heads))
    steps = (*program.steps, Copy(whole, replace(whole, buffer="mine")))
    return replace(program, buffers=(*program.buffers, saved_q), steps=steps, saves=(*program.saves, "mine"))


def check_saved_buffers(rank, world, group):
    """Run a schedule that saves more than needed; refuse one that saves too little."""
    register_schedule("saves_more", saves_more, allgather.backward, saves_buffers=True)
    register_schedule("mixed", heads_for_sequence("ring")[0], allgather.backward, saves_buffers=True)
    try:
        for batch in (1, 2):
            whole, layout = qkv(9, batch=batch), Layout.contiguous(9, world)
            compare(rank, world, whole, layout, mesh=group, schedule="saves_more", mask=CAUSAL)
        local = leaves(*(cut(x, layout, rank) for x in whole))
        with pytest.raises(ValueError, match="'mixed': its backward reads 'q', and its forward does not save it"):
            attention(*local, mesh=group, layout=layout, schedule="mixed")
    finally:
        registry.unregister_schedule("saves_more")
        registry.unregister_schedule("mixed")


def test_backward_uses_only_buffers_saved_by_its_forward(pool):
    pool.run(2, check_saved_buffers)


def check_freed_inputs(rank, world, group):
    """Check that Ulysses frees q, k and v after the exchange of heads, also on ranks without heads."""
    for heads in (1, 2):
        q, k, v = leaves(*(x for x in qkv(4, heads=heads, kv_heads=1)))
        held = [x * 1 for x in (q, k, v)]
        out = attention(*held, mesh=group, schedule="ulysses", mask=CAUSAL)
        references = [weakref.ref(x.untyped_storage()) for x in held]
        held[0].zero_()
        del held
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
        out.sum().backward()
        assert q.grad.abs().sum() > 0


def test_ulysses_frees_inputs_after_exchanging_heads(pool):
    pool.run(2, check_freed_inputs)


def check_fake_tensors_and_compilation(rank, world, group):
    """Run meta and fake tensors through schedules, and compile a call over two axes."""
    for schedule in ("ring", "ulysses", "hybrid(inner=1)"):
        call = partial(attention, mesh=group, schedule=schedule, mask=CAUSAL)
        meta = [torch.empty(1, 4, 2, 8, device="meta", requires_grad=True) for _ in range(3)]
        assert call(*meta).shape == (1, 4, 2, 8)
        with FakeTensorMode():
            assert call(*(torch.empty(1, 4, 2, 8) for _ in range(3))).shape == (1, 4, 2, 8)
    mesh_2d = dist.init_device_mesh("cpu", (world, 1), mesh_dim_names=("a", "b"))
    torch._dynamo.reset()
    call = partial(attention, mesh=mesh_2d, schedule="hybrid", mask=CAUSAL)
    compiled = torch.compile(lambda *x: call(*x) * 2, fullgraph=True, backend="aot_eager")
    inputs = qkv(4)
    assert_close([compiled(*inputs)], [call(*inputs) * 2])


def test_fake_tensors_and_compilation_work_on_a_2d_mesh(pool):
    pool.run(2, check_fake_tensors_and_compilation)


def check_spellings(rank, world, group):
    """Check that ranks may spell a schedule differently, and that destroyed groups leave nothing behind."""
    spellings = ("hybrid(ring=allgather, inner=2)", "hybrid(inner=2,ring=allgather(head_stride=0), rounds=1)")
    inputs = qkv(4)
    made = attention(*inputs, mesh=group, schedule=spellings[0] if rank else "hybrid( inner=2, ring=allgather )")
    assert made.shape == inputs[0].shape
    before = len(dist.distributed_c10d._world.pg_names)
    for _ in range(3):
        another = dist.new_group(list(range(world)))
        attention(*inputs, mesh=another, schedule="double_ring")
        dist.barrier()
        dist.destroy_process_group(another)
    assert len(dist.distributed_c10d._world.pg_names) == before  # gloo separates groups by tags, so none is left behind


def test_equivalent_schedule_strings_agree_and_groups_do_not_leak(pool):
    pool.run(2, check_spellings)


def check_gathered_keys(rank, world, group):
    """Check two cross-attention layers that attend to the same keys, which are gathered once."""
    whole = dict(zip("qkv", qkv(11), strict=True))
    k_whole, v_whole = (x[:, :7].clone() for x in (whole["k"], whole["v"]))
    for layout in (Layout.zigzag(11, world), Layout.striped(11, world), Layout.contiguous(11, world)):
        for mask, offset in ((None, 0), (CAUSAL, 3), (Mask.window(2, 4), 0)):
            options: dict[str, Any] = dict(mask=mask, q_offset=offset, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]))
            leaves = [x.clone().requires_grad_() for x in (whole["q"], k_whole, v_whole)]
            out = flash_attention(flash_attention(*leaves, **options), *leaves[1:], **options)
            want = torch.autograd.grad(out.square().sum(), leaves)
            keys = Layout.zigzag(7, world)
            own = [
                shard(x, held, group).requires_grad_()
                for x, held in zip((whole["q"], k_whole, v_whole), (layout, keys, keys), strict=True)
            ]
            k, v = (unshard(x, keys, group) for x in own[1:])
            counters = group_context(group.group_name).transport(own[0].device).counters
            counters.clear()
            layer: Any = partial(attention, mesh=group, layout=layout, k_layout="gathered", **options)
            mine = layer(layer(own[0], k, v), k, v)
            assert not counters.received
            got = torch.autograd.grad(mine.square().sum(), own)
            for a, b, held in zip((mine, *got), (out, *want), (layout, layout, keys, keys), strict=True):
                assert torch.allclose(a, shard(b, held, group), atol=1e-10)
    with pytest.raises(ValueError, match="schedule='ring': where k_layout is 'gathered' nothing moves"):
        layer(own[0], k, v, schedule="ring")
    with pytest.raises(ValueError, match="transport='process_group': where k_layout is 'gathered' nothing moves"):
        layer(own[0], k, v, transport="process_group")
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.float32: where k_layout is 'gathered' nothing moves"):
        layer(own[0], k, v, reduce_dtype=torch.float32)
    with pytest.raises(ValueError, match="q has 1 tokens, its layout gives rank"):
        layer(own[0][:, :1], k, v)
    with pytest.raises(ValueError, match="return_plan, verify: not supported with k_layout='gathered'"):
        layer(own[0], k, v, verify=True)
    with pytest.raises(ValueError, match=r"k_layout: expected a meshflash.Layout, .* or 'gathered'; got 'whole'"):
        layer(own[0], k, v, k_layout="whole")


def test_keys_gathered_once_serve_several_layers(pool):
    for world in (2, 3):
        pool.run(world, check_gathered_keys)


def check_transports(rank, world, group):
    """Assert that results and plan follow the transport argument, and that unusable transports raise."""
    whole, layout = qkv(9, seed=world), Layout.zigzag(9, world)
    local = [cut(x, layout, rank) for x in whole]
    for transport, name in (("process_group", "gloo"), ("throttled(auto, 1, 100)", "gloo at 1 GB/s and 100 us")):
        compare(rank, world, whole, layout, mesh=group, schedule="zigzag", transport=transport, mask=CAUSAL)
        _, plan = attention(*local, mesh=group, layout=layout, transport=transport, return_plan=True)
        assert plan.transport == name
    for transport, reason in (
        ("host_staged", "tensors are on the host already"),
        ("pigeon", "expected one of auto, p"),
    ):
        with pytest.raises(ValueError, match=reason):
            attention(*local, mesh=group, layout=layout, transport=transport)


def test_transport_argument_selects_the_transport(pool):
    pool.run(2, check_transports)


def check_different_return_lse(rank, world, group):
    """Check that ranks may differ in `return_lse` for a schedule that leaves the LSE on its own rank."""
    q, k, v = (cut(x, Layout.contiguous(25, world), rank) for x in qkv())
    layout = Layout.contiguous(25, world)
    outs = [attention(q, k, v, layout=layout, schedule="ring", return_lse=n == rank) for n in range(3)]
    lses = [made[1] for made in outs if isinstance(made, tuple)]
    assert len(lses) == 1
    _, want = flash_attention(*qkv(), return_lse=True)
    assert_close(lses, [cut(want, layout, rank, 2)])


def test_ranks_may_differ_in_return_lse(pool):
    pool.run(3, check_different_return_lse)


def check_gradients_without_lse(rank, world, group):
    """Check that gradients are the same whether or not the LSE is sent back with the output."""
    whole, layout = qkv(tokens=23), Layout.zigzag(23, world)
    for schedule in ("ulysses", "ulysses(rounds=2)", "hybrid(inner=2)" if world == 4 else "hybrid"):
        grads = []
        for return_lse in (False, True):
            local = leaves(*(cut(x, layout, rank) for x in whole))
            made = attention(*local, layout=layout, schedule=schedule, mask=CAUSAL, return_lse=return_lse)
            out = made[0] if return_lse else made
            grads.append(torch.autograd.grad(out.square().sum(), local))
        assert_close(*grads)


@pytest.mark.parametrize("world", [2, 4])
def test_results_do_not_depend_on_return_lse(pool, world):
    pool.run(world, check_gradients_without_lse)


def check_call_after_inference_mode(rank, world, group):
    """Assert that a call after inference mode has gradients and the same output."""
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    with torch.inference_mode():
        first = attention(x, x, x, schedule="zigzag")
    again = attention(x, x, x, schedule="zigzag")
    again.sum().backward()
    assert torch.equal(first, again.detach())
    assert x.grad is not None


def test_call_after_inference_mode_has_gradients(pool):
    pool.run(2, check_call_after_inference_mode)


def check_strided_upstream_gradient(rank, world, group, schedule):
    """Compare gradients for a strided upstream gradient with a single device."""
    layout = Layout.contiguous(8, world)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 8, 1, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    dout = torch.randn(1, 8, 1, 8, generator=generator, dtype=torch.float64)[..., ::2]
    rows = slice(4 * rank, 4 * rank + 4)
    own = [x.detach()[:, rows].clone().requires_grad_() for x in whole]
    got = torch.autograd.grad(attention(*own, layout=layout, schedule=schedule), own, dout[:, rows])
    want = torch.autograd.grad(flash_attention(*whole), whole, dout)
    for mine, one in zip(got, want, strict=True):
        assert torch.allclose(mine, one[:, rows], atol=1e-12)


@pytest.mark.parametrize("schedule", ["ulysses", "ringx1", "zigzag"])
def test_upstream_gradients_may_have_any_stride(pool, schedule):
    pool.run(2, check_strided_upstream_gradient, schedule)
