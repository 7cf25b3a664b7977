"""Autograd over a mesh: strides, partial gradients, activation checkpointing, autocast and `torch.compile`."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import distributed as _distributed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from mesh_cases import CAUSAL, assert_close, assert_equal, cut, gradients, leaves, qkv
from meshflash import Layout, Mask, attention, flash_attention

dist: Any = _distributed  # the stubs of torch miss some of its exports


def check_strides(rank, world, group):
    """Compare strided inputs and upstream gradients with a single device."""
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
        # The upstream gradient is not contiguous either.
        upstream = got.detach().transpose(1, 2).contiguous().transpose(1, 2)
        grads_here = torch.autograd.grad(got, inputs, upstream)
        assert_close([got.detach(), *grads_here], [cut(x, layout, rank) for x in (out, *grads)])
    inputs = leaves(*local)
    attention(*inputs, layout=layout).sum().backward()  # `sum` gives an expanded upstream gradient
    ones = torch.autograd.grad(attention(*inputs, layout=layout), inputs, torch.ones_like(cut(out, layout, rank)))
    assert_equal([x.grad for x in inputs], ones)


def test_strided_inputs_and_gradients_match_a_single_device(pool):
    pool.run(2, check_strides)


def check_autograd(rank, world, group):
    """Compare partial, accumulated, nested and checkpointed gradients with a single device."""
    layout, whole = Layout.zigzag(25, world), qkv()
    call: dict[str, Any] = dict(layout=layout, mask=CAUSAL)
    local = [cut(x, layout, rank) for x in whole]
    grads = gradients(lambda *x: flash_attention(*x, mask=CAUSAL), *whole)
    want = [cut(x, layout, rank) for x in grads]

    # Only some inputs require gradients.
    q, k, v = leaves(*local)
    (dq,) = torch.autograd.grad(attention(q, k.detach(), v.detach(), **call).square().sum() / 2, (q,))
    (dv,) = torch.autograd.grad(attention(q.detach(), k.detach(), v, **call).square().sum() / 2, (v,))
    assert_close([dq, dv], [want[1], want[3]])

    # No input requires gradients.
    with torch.no_grad():
        assert not attention(q, k, v, **call).requires_grad
    assert not attention(*local, **call).requires_grad
    with torch.inference_mode():
        assert_close([attention(*local, **call).clone()], want[:1])

    # Gradients flow through the LSE only.
    inputs = leaves(*whole)
    lse = flash_attention(*inputs, mask=CAUSAL, return_lse=True)[1]
    whole_grads = torch.autograd.grad(lse.sin().sum(), inputs[:2])
    lse = attention(q, k, v, **call, return_lse=True)[1]
    assert_close(torch.autograd.grad(lse.sin().sum(), (q, k)), [cut(x, layout, rank) for x in whole_grads])

    # Gradients of two backwards accumulate.
    inputs = leaves(*local)
    for _ in range(2):
        (attention(*inputs, **call).square().sum() / 2).backward()
    assert_close([x.grad for x in inputs], [2 * x for x in want[1:]])

    # Two forwards run before their backwards, in the order of the caller or of autograd.
    first, second = leaves(*local), leaves(*(2 * x for x in local))
    one, two = attention(*first, **call), attention(*second, **call, scale=0.1)
    late = torch.autograd.grad(two.square().sum() / 2, second)
    early = torch.autograd.grad(one.square().sum() / 2, first)
    assert_close(early, want[1:])
    again = [attention(*first, **call).square().sum() / 2, attention(*second, **call, scale=0.1).square().sum() / 2]
    assert_equal(torch.autograd.grad(sum(again), (*first, *second)), (*early, *late))

    # The output of one call is the query of the next.
    def twice(run, q, k, v):
        return run(run(q, k, v), k, v)

    deep = gradients(lambda *x: twice(lambda *y: flash_attention(*y, mask=CAUSAL), *x), *whole)
    got = gradients(lambda *x: twice(lambda *y: attention(*y, **call), *x), *local)
    assert_close(got, [cut(x, layout, rank) for x in deep])

    # Activation checkpointing runs the forward again within the backward.
    dropped = gradients(partial(flash_attention, mask=CAUSAL, dropout=0.3, seed=4), *whole)
    for reentrant in (False, True):
        run = partial(checkpoint, partial(attention, **call, dropout=0.3, seed=4), use_reentrant=reentrant)
        assert_close(gradients(run, *local), [cut(x, layout, rank) for x in dropped])


def test_autograd_matches_a_single_device(pool):
    pool.run(2, check_autograd)


def check_autocast(rank, world, group):
    """Assert that autocast gives the results of bfloat16 inputs, with float32 gradients."""
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


def test_autocast_matches_bfloat16_inputs(pool):
    pool.run(2, check_autocast)


def assert_compiles(function, calls, max_compilations):
    """Assert that compiled code matches eager code, with gradients, after at most `most` compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(function, fullgraph=True, backend=counter)
    for q, k, v, *more in calls:
        got = gradients(lambda *x, more=more: fast(*x, *more), q, k, v)
        assert_equal(got, gradients(lambda *x, more=more: function(*x, *more), q, k, v))
    assert counter.frame_count <= max_compilations, f"{counter.frame_count} compilations"


def check_compiled_calls(rank, world, group):
    """Assert that calls compile once for every kind of mesh, layout and feature."""
    layouts = Layout.zigzag(24, world), Layout.balanced(CAUSAL, 24, world), Layout(((range(12, 24),), (range(12),)))
    grid = dist.init_device_mesh("cpu", (world,))
    inputs = [[x[:, :12] for x in qkv(12, dtype=torch.float32, seed=10 * n + rank)] for n in range(3)]
    for mesh in (None, group, grid):
        assert_compiles(lambda *x, mesh=mesh: attention(*x, mesh=mesh, mask=CAUSAL) * 2, inputs, 1)
    for layout in layouts:
        assert_compiles(lambda *x, layout=layout: attention(*x, layout=layout, mask=CAUSAL) * 2, inputs, 1)
    arguments = [(*each, Layout.zigzag(24, world)) for each in inputs]
    assert_compiles(lambda q, k, v, layout: attention(q, k, v, layout=layout, schedule="ring"), arguments, 1)
    assert_compiles(lambda *x: attention(*x, layout=Layout.zigzag(24, world), schedule="zigzag"), inputs, 1)

    def everything(q, k, v, logits, seed):
        call: dict[str, Any] = dict(mask=CAUSAL, softcap=2.0, dropout=0.2, seed=seed, layout=layouts[0])
        return attention(q, k, v, **call, sink_logits=logits, reduce_dtype=torch.bfloat16, return_lse=True)[0]

    assert_compiles(everything, [(*each, torch.ones(4), torch.tensor(n)) for n, each in enumerate(inputs)], 1)


def test_compiled_calls_equal_eager_calls(pool):
    pool.run(2, check_compiled_calls)


def check_changing_lengths(rank, world, group):
    """Assert that calls with changing documents or sizes compile at most twice."""
    draw = random.Random(0)  # the same on all ranks

    def packing():
        return torch.tensor([0, *sorted(draw.sample(range(1, 24), draw.randint(1, 5))), 24])

    layout = Layout.zigzag(24, world)
    packings = [(*qkv(12, dtype=torch.float32, seed=n), packing()) for n in range(10)]
    assert_compiles(lambda q, k, v, cu: attention(q, k, v, mask=CAUSAL & Mask.from_cu_seqlens(cu)), packings, 2)
    lengths = [(*x, cu.diff()) for *x, cu in packings]
    assert_compiles(
        lambda q, k, v, n: attention(q, k, v, mask=CAUSAL & Mask.documents(n), layout=layout, schedule="zigzag"),
        lengths,
        2,
    )
    sizes = [qkv(n, dtype=torch.float32, batch=1) for n in range(8, 16)]
    assert_compiles(lambda *x: attention(*x, mask=CAUSAL, schedule="zigzag"), sizes, 2)


def test_changing_lengths_compile_at_most_twice(pool):
    pool.run(2, check_changing_lengths)
