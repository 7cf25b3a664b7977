"""Calls over a mesh as users make them, each against `flash_attention` on one device."""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as _distributed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from meshflash import Layout, Mask, attention, flash_attention, register_schedule
from meshflash.engine import mesh as engine
from meshflash.engine.check import WrongResultError
from meshflash.engine.explain import Explanation
from meshflash.engine.group_context import group_context
from meshflash.schedules import allgather, registry, ring

dist: Any = _distributed  # torch does not declare all that it exports here

CAUSAL = Mask.causal()
SCHEDULES = ("ring", "zigzag", "striped", "allgather", "allgather(head_stride=1)")
#: The largest difference, as a share of the largest value, that another order of sums explains.
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def qkv(tokens=25, k_tokens=None, batch=2, heads=4, kv_heads=2, dim=8, value_dim=None, dtype=torch.float64, seed=0):
    """The whole sequence: the same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    keys = tokens if k_tokens is None else k_tokens
    shapes = (batch, tokens, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim or dim)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def cut(x, layout, rank, dim=1):
    """A rank's rows of a whole sequence."""
    return x.index_select(dim, torch.from_numpy(layout.positions(rank)))


def leaves(*tensors):
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def assert_close(got, want, share=None):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        allowed = (CLOSE[b.dtype] if share is None else share) * max(1.0, float(b.abs().max()) if b.numel() else 0.0)
        assert torch.allclose(a, b, rtol=0, atol=allowed), f"{float((a - b).abs().max()):.1e} > {allowed:.1e}"


def assert_equal(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def default_layout(schedule, tokens, world):
    return registry.default_layout(schedule)(tokens, world)


def gradients(call, *inputs):
    """out and the gradients of all inputs, for an upstream gradient that depends on nothing but the result."""
    inputs = leaves(*inputs)
    out = call(*inputs)
    (out.square().sum() / 2).backward()
    return [out.detach(), *(x.grad for x in inputs)]


def compare(rank, world, whole, layout, k_layout=None, given=None, share=None, **call):
    """Output and gradients of this rank's rows are those of one device; `call` is what both are called with."""
    k_layout = k_layout or layout
    own = {name: call.pop(name) for name in ("mesh", "schedule", "reduce_dtype", "transport", "verify") if name in call}
    given = dict(layout=layout, k_layout=None if k_layout is layout else k_layout) if given is None else given
    out, dq, dk, dv = gradients(partial(flash_attention, **call), *whole)
    want = [cut(out, layout, rank), cut(dq, layout, rank), cut(dk, k_layout, rank), cut(dv, k_layout, rank)]
    local = [cut(x, held, rank) for x, held in zip(whole, (layout, k_layout, k_layout), strict=True)]
    assert_close(gradients(partial(attention, **(given | own | call)), *local), want, share)


def no_layout(rank, world, group):
    for schedule in (*SCHEDULES, "auto"):
        for tokens in (5 * world, world, 0):
            layout = default_layout("ring" if schedule == "auto" else schedule, tokens, world)
            whole = qkv(tokens)
            compare(rank, world, whole, layout, given={}, mesh=group, schedule=schedule, mask=CAUSAL)


@pytest.mark.parametrize("world", [2, 4])
def test_equal_shards_need_no_layout(pool, world):
    pool.run(world, no_layout)


def every_mesh(rank, world, group):
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
    for table, own, ranks in ((grid, rank, world), (cube["a", "b"], rank % 2, 2)):
        for schedule in ("hybrid", "double_ring", "hybrid(ring=allgather, turned=True)"):
            whole, layout = qkv(9, seed=ranks), Layout.zigzag(9, ranks)
            compare(own, ranks, whole, layout, mesh=table, schedule=schedule, mask=CAUSAL)
    with pytest.raises(ValueError, match="must ascend"):
        check(dist.DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("a", "b")), rank, world)
    alone = [dist.new_group([other]) for other in range(world)][rank]
    check(alone, 0, 1)


def test_any_group_of_ranks_may_be_the_mesh(pool):
    pool.run(4, every_mesh)


def one_rank(rank, world, group):
    inputs = qkv(9)
    whole, lse = flash_attention(*inputs, mask=CAUSAL, return_lse=True)
    for mesh in (None, group, dist.init_device_mesh("cpu", (1,))):
        for more in ({}, dict(layout=Layout.zigzag(9, 1)), dict(schedule="ring"), dict(verify=True)):
            assert torch.equal(attention(*inputs, mesh=mesh, mask=CAUSAL, **more), whole)
    got = attention(*inputs, mask=CAUSAL, return_lse=True, return_plan=True)
    assert torch.equal(got[1], lse)
    assert str(got[2]) == "one rank; kernels: vendor (before tiled, by a fixed order)"
    assert (got[2].schedule, got[2].world, got[2].program) == ("local", 1, None)
    compare(0, 1, inputs, Layout.contiguous(9, 1), mask=CAUSAL, q_offset=3, dropout=0.3, seed=5, softcap=2.0)


def test_one_rank_is_flash_attention(pool):
    pool.run(1, one_rank)


def test_no_group_is_one_rank():
    assert not dist.is_initialized()
    one_rank_without = qkv(9)
    got = attention(*one_rank_without, mask=CAUSAL, layout=Layout.striped(9, 1), return_lse=True, verify=True)
    assert_equal(got, flash_attention(*one_rank_without, mask=CAUSAL, return_lse=True))


def test_a_layout_that_is_out_of_order_is_refused_on_one_rank():
    layout = Layout(((range(5, 9), range(5)),))
    inputs = [cut(x, layout, 0) for x in qkv(9)]
    with pytest.raises(ValueError, match=r"layout: on one rank positions must be in order"):
        attention(*inputs, layout=layout, mask=CAUSAL)


def packed(rank, world, group):
    lengths = [4, 0, 9, 1, 5]
    q, k, v = (x[0] for x in qkv(19))
    mask = CAUSAL & Mask.documents(lengths)
    whole, whole_lse = flash_attention(q, k, v, mask=mask, return_lse=True)
    for schedule in SCHEDULES:
        layout = default_layout(schedule, 19, world)
        local = [cut(x, layout, rank, 0) for x in (q, k, v)]
        for given in (mask, CAUSAL & Mask.documents(torch.tensor(lengths))):
            out, lse = attention(*local, mask=given, layout=layout, schedule=schedule, return_lse=True, verify=True)
            assert out.shape == (layout.lengths[rank], 4, 8)
            assert lse.shape == (4, layout.lengths[rank])
            assert_close([out, lse], [cut(whole, layout, rank, 0), cut(whole_lse, layout, rank, 1)])


def test_packed_documents(pool):
    pool.run(3, packed)


def plan(rank, world, group):
    inputs = [cut(x, Layout.zigzag(32, world), rank) for x in qkv(32, dtype=torch.float32)]
    out, lse, ran = attention(
        *inputs, schedule="zigzag", mask=CAUSAL, kernel="tiled", return_lse=True, return_plan=True
    )
    assert isinstance(ran, Explanation)
    assert out.shape == inputs[0].shape
    assert lse.shape == (2, 4, 16)
    assert (ran.schedule, ran.layout, ran.world, ran.transport) == ("zigzag", "zigzag", world, "gloo")
    assert (ran.reason, ran.kernels) == ("asked for", ("tiled",))
    assert ran.program is group_context(group.group_name).last.program("forward")
    assert (ran.program.rank, ran.program.world, ran.program.direction) == (rank, world, "forward")
    mover = group_context(group.group_name).transport(torch.device("cpu"))
    mover.counters.clear()
    attention(*inputs, schedule="zigzag", mask=CAUSAL)
    assert ran.received_bytes == mover.counters.received_bytes > 0
    assert ran.scratch_bytes > 0
    text = f"zigzag (asked for) over {world} ranks, layout zigzag, by gloo; kernels: tiled (asked for); forward: "
    assert str(ran) == f"{text}{ran.received_bytes:,} bytes received, {ran.scratch_bytes:,} of scratch"
    ran = attention(*inputs, mask=CAUSAL, return_plan=True)[1]
    assert ran.schedule == "allgather"
    assert ran.reason == "auto: keys and values of the whole sequence take at most 64 MiB a rank"
    assert ran.kernels == ("vendor",)


def test_the_plan_says_what_ran(pool):
    pool.run(2, plan)


def auto(rank, world, group, limit):
    inputs = [cut(x, Layout.zigzag(16, world), rank) for x in qkv(16, dtype=torch.float32)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshflash.planning.GATHER_BYTES", limit)
        ran = attention(*inputs, layout=Layout.zigzag(16, world), mask=CAUSAL, return_plan=True)[1]
        other = attention(*inputs, mask=CAUSAL, return_plan=True)[1]
    return [(each.schedule, each.layout) for each in (ran, other)]


def test_auto_gathers_up_to_a_limit_and_never_moves_a_token(pool):
    whole = 16 * 2 * 2 * (8 + 8) * 4  # tokens, batch, key heads, dims, bytes
    for limit, schedules in ((whole, ["allgather", "allgather"]), (whole - 1, ["zigzag", "ring"])):
        for ran in pool.run(2, auto, limit):
            assert ran == list(zip(schedules, ["zigzag", "contiguous"], strict=True))


def auto_uneven(rank, world, group, limit):
    layout = Layout(((range(3),), (range(3, 7),)))
    inputs = [cut(x, layout, rank) for x in qkv(7, batch=1, kv_heads=4, dim=8, dtype=torch.float32)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshflash.planning.GATHER_BYTES", limit * 4 * (8 + 8) * 4)  # tokens, heads, dims, bytes
        return attention(*inputs, layout=layout, mask=CAUSAL, return_plan=True)[1].schedule


@pytest.mark.parametrize(("limit", "schedule"), [(7, "allgather"), (6, "ring")])
def test_auto_is_the_same_on_ranks_that_hold_more_and_less(pool, limit, schedule):
    assert pool.run(2, auto_uneven, limit) == [schedule] * 2


def verify(rank, world, group):
    whole = qkv(40, dtype=torch.float32)
    for schedule in SCHEDULES:
        layout = default_layout(schedule, 40, world)
        inputs = [cut(x, layout, rank) for x in whole]
        call: dict[str, Any] = dict(schedule=schedule, layout=layout, mask=CAUSAL, verify=True)
        features: dict[str, Any] = dict(
            sink_logits=torch.randn(4, generator=torch.Generator().manual_seed(0)), softcap=3.0
        )
        features |= dict(alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]), dropout=0.3, seed=3, q_offset=2)
        attention(*inputs, **call)
        attention(*inputs, **(call | features))
        attention(*(x.bfloat16() for x in inputs), **call)
    short = Layout(((range(3),), *[()] * (world - 1)))
    attention(*(cut(x, short, rank) for x in whole), layout=short, mask=CAUSAL & Mask.window(1, 0), verify=True)


def test_verify_passes_what_is_right(pool):
    pool.run(3, verify)


def tampered(rank, world, group, bad, how):
    plain = engine.forward

    def wrong(*arguments):
        out, lse, saved = plain(*arguments)
        if how == "out":
            out *= 1.01
        elif how == "row":
            out[:, -1] += 1
        elif how == "nan":
            out[0, 0, 0, 0] = torch.nan
        else:
            lse[..., 0] = -torch.inf
        return out, lse, saved

    inputs = [cut(x, Layout.zigzag(42, world), rank) for x in qkv(42, dtype=torch.float32)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == bad:
            patch.setattr(engine, "forward", wrong)
        with pytest.raises(WrongResultError) as error:
            attention(*inputs, schedule="zigzag", mask=CAUSAL, verify=True)
    attention(*inputs, schedule="zigzag", mask=CAUSAL, verify=True)
    return str(error.value)


@pytest.mark.parametrize(("bad", "how"), [(1, "out"), (0, "row"), (2, "nan"), (1, "lse")])
def test_verify_raises_on_every_rank_if_one_is_wrong(pool, bad, how):
    messages = pool.run(3, tampered, bad, how)
    assert len(set(messages)) == 1
    assert f"verify: rank {bad} of the group is off by" in messages[0]
    assert "schedule zigzag, layout zigzag, mask causal" in messages[0]


def dropout(rank, world, group):
    whole = qkv(26)
    for seed in (3, torch.tensor(4)):
        for schedule in ("ring", "zigzag", "allgather"):
            layout = default_layout(schedule, 26, world)
            more: dict[str, Any] = dict(batch_offset=1, head_offset=2, mesh=group, schedule=schedule, mask=CAUSAL)
            compare(rank, world, whole, layout, dropout=0.4, seed=seed, **more)
    # what is dropped is seen in the values: identity matrices show the pairs that were kept
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
def test_dropout_keeps_the_same_pairs_on_any_split(pool, world):
    pool.run(world, dropout)


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


def calls(rank, world, group):
    for name, (shape, call) in CALLS.items():
        for schedule in ("zigzag", "allgather(head_stride=1)"):
            try:
                compare(rank, world, qkv(**shape), default_layout(schedule, 25, world), schedule=schedule, **call)
            except AssertionError as error:
                raise AssertionError(f"{name}, {schedule}: {error}") from error


@pytest.mark.parametrize("world", [2, 3])
def test_features_and_shapes(pool, world):
    pool.run(world, calls)


def cross(rank, world, group):
    for q_tokens, k_tokens in ((7, 22), (22, 7), (1, 22), (22, 1), (5, 0)):
        whole = qkv(q_tokens, k_tokens)
        layouts = Layout.zigzag(q_tokens, world), Layout.striped(k_tokens, world)
        offset = max(0, k_tokens - q_tokens)
        for schedule in ("ring", "allgather"):
            compare(rank, world, whole, *layouts, schedule=schedule, mask=CAUSAL, q_offset=offset, verify=True)
            compare(rank, world, whole, *layouts, schedule=schedule, verify=True)
    even = Layout.contiguous(4 * world, world), Layout.contiguous(2 * world, world)
    compare(rank, world, qkv(4 * world, 2 * world), *even, given={}, mask=CAUSAL)
    with pytest.raises(ValueError, match=r"k has 2 tokens, q has 4: give the keys a layout of their own"):
        attention(*qkv(4, 2), layout=even[0])


@pytest.mark.parametrize("world", [2, 3])
def test_cross_attention(pool, world):
    pool.run(world, cross)


def sinks(rank, world, group):
    whole, logits = qkv(), torch.linspace(-1, 2, 4, dtype=torch.float64)
    *_, want = gradients(lambda q, k, v, s: flash_attention(q, k, v, mask=CAUSAL, sink_logits=s), *whole, logits)
    for schedule in SCHEDULES:
        layout = default_layout(schedule, 25, world)

        def call(q, k, v, sink_logits, schedule=schedule, layout=layout):
            return attention(q, k, v, mask=CAUSAL, sink_logits=sink_logits, schedule=schedule, layout=layout)

        *_, share = gradients(call, *(cut(x, layout, rank) for x in whole), logits)
        dist.all_reduce(share, group=group)
        assert_close([share], [want])


def test_the_gradient_of_sink_logits_is_the_sum_over_ranks(pool):
    pool.run(3, sinks)


def reduced(rank, world, group):
    changed = []
    for dtype in (torch.float32, torch.bfloat16):
        for schedule in SCHEDULES:
            layout = default_layout(schedule, 40, world)
            local = [cut(x, layout, rank) for x in qkv(40, dtype=dtype)]
            call: dict[str, Any] = dict(schedule=schedule, layout=layout, mask=CAUSAL)
            exact, low, same = (
                gradients(partial(attention, **call, reduce_dtype=reduce_dtype), *local)
                for reduce_dtype in (None, torch.bfloat16, torch.float32)
            )
            assert_equal(exact, same)
            assert_equal(exact[:2], low[:2])  # what does not travel as a sum is not rounded
            assert_close(low[2:], exact[2:], share=2**-8 * (world + (dtype == torch.bfloat16)))
            changed.append(not torch.equal(exact[2], low[2]))
    return changed


def test_sums_of_gradients_may_travel_in_bfloat16(pool):
    assert all(any(ranks) for ranks in zip(*pool.run(3, reduced), strict=True))


def memory(rank, world, group):
    layout = Layout.zigzag(25, world)
    whole = qkv()
    out, *grads = gradients(lambda *x: flash_attention(*x, mask=CAUSAL), *whole)
    local = [cut(x, layout, rank) for x in whole]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in local]
    wide = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in local]
    assert not any(x.is_contiguous() for x in (*strided, *wide))
    for inputs in (strided, wide):
        inputs = [x.detach().requires_grad_() for x in inputs]
        got = attention(*inputs, layout=layout, mask=CAUSAL)
        # an upstream gradient that is no contiguous tensor either
        upstream = got.detach().transpose(1, 2).contiguous().transpose(1, 2)
        grads_here = torch.autograd.grad(got, inputs, upstream)
        assert_close([got.detach(), *grads_here], [cut(x, layout, rank) for x in (out, *grads)])
    inputs = leaves(*local)
    attention(*inputs, layout=layout).sum().backward()  # an expanded gradient
    ones = torch.autograd.grad(attention(*inputs, layout=layout), inputs, torch.ones_like(cut(out, layout, rank)))
    assert_equal([x.grad for x in inputs], ones)


def test_strided_inputs_and_gradients(pool):
    pool.run(2, memory)


def autograd(rank, world, group):
    layout, whole = Layout.zigzag(25, world), qkv()
    call: dict[str, Any] = dict(layout=layout, mask=CAUSAL)
    local = [cut(x, layout, rank) for x in whole]
    grads = gradients(lambda *x: flash_attention(*x, mask=CAUSAL), *whole)
    want = [cut(x, layout, rank) for x in grads]

    # only some inputs need gradients
    q, k, v = leaves(*local)
    (dq,) = torch.autograd.grad(attention(q, k.detach(), v.detach(), **call).square().sum() / 2, (q,))
    (dv,) = torch.autograd.grad(attention(q.detach(), k.detach(), v, **call).square().sum() / 2, (v,))
    assert_close([dq, dv], [want[1], want[3]])

    # none does
    with torch.no_grad():
        assert not attention(q, k, v, **call).requires_grad
    assert not attention(*local, **call).requires_grad
    with torch.inference_mode():
        assert_close([attention(*local, **call).clone()], want[:1])

    # through the LSE alone
    inputs = leaves(*whole)
    lse = flash_attention(*inputs, mask=CAUSAL, return_lse=True)[1]
    whole_grads = torch.autograd.grad(lse.sin().sum(), inputs[:2])
    lse = attention(q, k, v, **call, return_lse=True)[1]
    assert_close(torch.autograd.grad(lse.sin().sum(), (q, k)), [cut(x, layout, rank) for x in whole_grads])

    # gradients add up
    inputs = leaves(*local)
    for _ in range(2):
        (attention(*inputs, **call).square().sum() / 2).backward()
    assert_close([x.grad for x in inputs], [2 * x for x in want[1:]])

    # two forwards, and their backwards in the order that autograd or the user chooses
    first, second = leaves(*local), leaves(*(2 * x for x in local))
    one, two = attention(*first, **call), attention(*second, **call, scale=0.1)
    late = torch.autograd.grad(two.square().sum() / 2, second)
    early = torch.autograd.grad(one.square().sum() / 2, first)
    assert_close(early, want[1:])
    again = [attention(*first, **call).square().sum() / 2, attention(*second, **call, scale=0.1).square().sum() / 2]
    assert_equal(torch.autograd.grad(sum(again), (*first, *second)), (*early, *late))

    # one call's result in the next
    def twice(run, q, k, v):
        return run(run(q, k, v), k, v)

    deep = gradients(lambda *x: twice(lambda *y: flash_attention(*y, mask=CAUSAL), *x), *whole)
    got = gradients(lambda *x: twice(lambda *y: attention(*y, **call), *x), *local)
    assert_close(got, [cut(x, layout, rank) for x in deep])

    # checkpoints run the forward again within the backward
    dropped = gradients(partial(flash_attention, mask=CAUSAL, dropout=0.3, seed=4), *whole)
    for reentrant in (False, True):
        run = partial(checkpoint, partial(attention, **call, dropout=0.3, seed=4), use_reentrant=reentrant)
        assert_close(gradients(run, *local), [cut(x, layout, rank) for x in dropped])


def test_autograd(pool):
    pool.run(2, autograd)


def autocast(rank, world, group):
    layout, whole = Layout.zigzag(65, world), qkv(65, dtype=torch.float32, dim=16)
    local = [cut(x, layout, rank) for x in whole]
    rounded = gradients(lambda *x: attention(*x, layout=layout, mask=CAUSAL), *(x.bfloat16() for x in local))

    def call(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v, layout=layout, mask=CAUSAL)

    got = gradients(call, *local)
    assert got[0].dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in got[1:])
    assert_equal([got[0], *(x.bfloat16() for x in got[1:])], rounded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gradients(lambda *x: attention(*x, layout=layout, mask=CAUSAL), *(x.bfloat16() for x in local))
    assert_equal(inside, rounded)


def test_autocast(pool):
    pool.run(2, autocast)


def bits(rank, world, group):
    for schedule in SCHEDULES:
        layout = default_layout(schedule, 40, world)
        local = [cut(x, layout, rank) for x in qkv(40, dtype=torch.float32)]
        call = partial(attention, layout=layout, schedule=schedule, mask=CAUSAL)
        first = gradients(partial(call, deterministic=True), *local)
        assert_equal(first, gradients(partial(call, deterministic=True), *local))
        torch.use_deterministic_algorithms(True)
        try:
            assert_equal(first, gradients(call, *local))
            assert group_context(group.group_name).last.setting.deterministic
        finally:
            torch.use_deterministic_algorithms(False)


def test_deterministic_calls_give_the_same_bits(pool):
    pool.run(3, bits)


@contextmanager
def my_schedules():
    """Any backward may follow any forward."""
    register_schedule("mine", ring.forward, allgather.backward, options={"head_stride": 1})
    register_schedule("yours", allgather.forward, ring.backward, layout=Layout.zigzag, options={"head_stride": 0})
    try:
        yield
    finally:
        registry.unregister_schedule("mine")
        registry.unregister_schedule("yours")


def own_schedules(rank, world, group):
    with my_schedules():
        for schedule, name in (("mine", "contiguous"), ("mine(head_stride=2)", "contiguous"), ("yours", "zigzag")):
            tokens = 6 * world
            layout = default_layout(schedule, tokens, world)
            assert layout.name == name
            compare(rank, world, qkv(tokens), layout, given={}, schedule=schedule, mask=CAUSAL, verify=True)
            compare(rank, world, qkv(), default_layout(schedule, 25, world), schedule=schedule, mask=CAUSAL)
    with pytest.raises(ValueError, match=r"schedule='mine': expected one of auto, "):
        attention(*(x[:, :6] for x in qkv(6)), schedule="mine")


def test_a_schedule_of_ones_own(pool):
    pool.run(3, own_schedules)


def compiled_once(function, calls, most):
    """Forward and backward of compiled code are those of plain code, in at most so many compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(function, fullgraph=True, backend=counter)
    for q, k, v, *more in calls:
        got = gradients(lambda *x, more=more: fast(*x, *more), q, k, v)
        assert_equal(got, gradients(lambda *x, more=more: function(*x, *more), q, k, v))
    assert counter.frame_count <= most, f"{counter.frame_count} compilations"


def compiled(rank, world, group):
    layouts = Layout.zigzag(24, world), Layout.balanced(CAUSAL, 24, world), Layout(((range(12, 24),), (range(12),)))
    grid = dist.init_device_mesh("cpu", (world,))
    inputs = [[x[:, :12] for x in qkv(12, dtype=torch.float32, seed=10 * n + rank)] for n in range(3)]
    for mesh in (None, group, grid):
        compiled_once(lambda *x, mesh=mesh: attention(*x, mesh=mesh, mask=CAUSAL) * 2, inputs, 1)
    for layout in layouts:
        compiled_once(lambda *x, layout=layout: attention(*x, layout=layout, mask=CAUSAL) * 2, inputs, 1)
    arguments = [(*each, Layout.zigzag(24, world)) for each in inputs]
    compiled_once(lambda q, k, v, layout: attention(q, k, v, layout=layout, schedule="ring"), arguments, 1)
    compiled_once(lambda *x: attention(*x, layout=Layout.zigzag(24, world), schedule="zigzag"), inputs, 1)

    def everything(q, k, v, logits, seed):
        call: dict[str, Any] = dict(mask=CAUSAL, softcap=2.0, dropout=0.2, seed=seed, layout=layouts[0])
        return attention(q, k, v, **call, sink_logits=logits, reduce_dtype=torch.bfloat16, return_lse=True)[0]

    compiled_once(everything, [(*each, torch.ones(4), torch.tensor(n)) for n, each in enumerate(inputs)], 1)


def test_compiled_calls_are_those_of_plain_code(pool):
    pool.run(2, compiled)


def compiled_often(rank, world, group):
    draw = random.Random(0)  # the same on all ranks

    def packing():
        return torch.tensor([0, *sorted(draw.sample(range(1, 24), draw.randint(1, 5))), 24])

    layout = Layout.zigzag(24, world)
    packings = [(*qkv(12, dtype=torch.float32, seed=n), packing()) for n in range(10)]
    compiled_once(lambda q, k, v, cu: attention(q, k, v, mask=CAUSAL & Mask.from_cu_seqlens(cu)), packings, 2)
    lengths = [(*x, cu.diff()) for *x, cu in packings]
    compiled_once(
        lambda q, k, v, n: attention(q, k, v, mask=CAUSAL & Mask.documents(n), layout=layout, schedule="zigzag"),
        lengths,
        2,
    )
    sizes = [qkv(n, dtype=torch.float32, batch=1) for n in range(8, 16)]
    compiled_once(lambda *x: attention(*x, mask=CAUSAL, schedule="zigzag"), sizes, 2)


def test_lengths_that_change_compile_at_most_twice(pool):
    pool.run(2, compiled_often)
