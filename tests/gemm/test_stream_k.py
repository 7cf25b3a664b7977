"""The kernel of products, interpreted on CPUs, against float64: shapes, dtypes, strides, epilogues, program orders."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from meshflash.gemm import configs, launch, partition
from meshflash.gemm.configs import Config
from meshflash.gemm.launch import ACTIVATIONS, Epilogue, run
from meshflash.gemm.plan import KERNELS, Product, plan
from meshflash.kernels.triton import configs as triton_configs

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU test_gemm_gpu.py runs them")

SMALL = Config(16, 16, 16, 1, 1, group=2)
#: By what the result is rounded to; sums and epilogues are in float32. The interpreter cuts bfloat16 off, where a GPU
#: rounds, which alone is a relative 3.4e-3.
ALLOWED = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 4e-4}
#: Sizes below, at and above blocks, one tile in parts, full waves, and what is left over.
SHAPES = [(1, 1, 1), (1, 16, 100), (17, 1, 33), (16, 16, 16), (33, 18, 49), (32, 32, 64), (35, 50, 20), (5, 70, 31)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nobody wrote is NaN: results, what is kept, and the workspace."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x):
        return x.fill_(torch.nan) if x.dtype.is_floating_point else x

    monkeypatch.setattr(torch, "empty", lambda *args, **more: poison(empty(*args, **more)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **more: poison(empty_like(*args, **more)))


@pytest.fixture
def programs(monkeypatch):
    def set_to(number):
        monkeypatch.setattr(configs, "cores", lambda device: number)

    set_to(3)
    return set_to


def multiply(a, b, mode, then=None, config=SMALL):
    return run(plan(Product.of(a, b), mode, config, ""), a, b, "ieee", then or Epilogue(a.dtype))


def check(got, want, dtype=None):
    dtype = dtype or got.dtype
    assert got.isfinite().all()
    assert float((got.double() - want).norm()) <= ALLOWED[dtype] * float(want.norm())


def operands(m, n, k, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))


@pytest.mark.parametrize("mode", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_shapes(shape, mode, programs):
    a, b = operands(*shape)
    out, kept = multiply(a, b, mode)
    assert kept is None
    check(out, a.double() @ b.double())


@pytest.mark.parametrize("number", [1, 2, 7, 13])
def test_any_number_of_programs(number, programs):
    programs(number)
    a, b = operands(33, 34, 70)
    check(multiply(a, b, "stream_k")[0], a.double() @ b.double())


@pytest.mark.parametrize("parts", [2, 3, 5, 9, 21])
def test_any_number_of_parts(parts, programs):
    """So many are on their way at a time, or more, or fewer."""
    programs(parts)
    a, b = operands(15, 14, 16 * 21)
    assert plan(Product.of(a, b), "stream_k", SMALL, "").programs == parts
    check(multiply(a, b, "stream_k")[0], a.double() @ b.double())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, out_dtype, programs):
    a, b = operands(33, 18, 40, dtype)
    out, _ = multiply(a, b, "stream_k", Epilogue(out_dtype))
    assert out.dtype == out_dtype
    check(out, a.double() @ b.double())


def in_padding(x, turned=False):
    """The same numbers between NaN, in rows of a multiple of 16 bytes, or as columns of such."""
    if turned:
        return in_padding(x.T).T
    rows, columns = x.shape
    room = x.new_full((rows + 2, -(-columns // 8) * 8 + 8), torch.nan)
    room[:rows, :columns] = x
    return room[:rows, :columns]


def every_second(x):
    room = x.new_full((x.shape[0], 2 * x.shape[1] + 1), torch.nan)
    room[:, : 2 * x.shape[1] : 2] = x
    return room[:, : 2 * x.shape[1] : 2]


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        (in_padding, in_padding),
        (lambda x: in_padding(x, True), in_padding),
        (in_padding, lambda x: in_padding(x, True)),
        (lambda x: in_padding(x, True), lambda x: in_padding(x, True)),
        (every_second, in_padding),
        (lambda x: x[:1].expand_as(x), every_second),
        (every_second, lambda x: every_second(x.T).T),
    ],
)
def test_strides(of_a, of_b, programs):
    a, b = operands(33, 18, 40)
    a, b = of_a(a), of_b(b)
    check(multiply(a, b, "stream_k")[0], a.double() @ b.double())


@pytest.mark.parametrize("mode", KERNELS)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_descriptors(turned, mode, programs, monkeypatch):
    made = []
    describe = launch.described

    def keep(x, block):
        made.append(x)
        return describe(x, block)

    monkeypatch.setattr(triton_configs, "has_descriptors", lambda device: True)
    monkeypatch.setattr(launch, "described", keep)
    a, b = operands(33, 24, 43, torch.bfloat16)
    a, b = (in_padding(x, t) for x, t in zip((a, b), turned, strict=True))
    bias = torch.randn(24)
    want = a.double() @ b.double() + bias
    out, kept = multiply(a, b, mode, Epilogue(a.dtype, bias, "silu", keep=True))
    assert len(made) == 4, "both operands and both results"
    check(out, functional.silu(want))
    check(kept, want)
    made.clear()
    check(multiply(a[:, :40], every_second(b)[:40], mode)[0], a[:, :40].double() @ b[:40].double())
    assert not made, "what no descriptor describes is loaded without"


def test_a_result_that_no_descriptor_describes(programs, monkeypatch):
    monkeypatch.setattr(triton_configs, "has_descriptors", lambda device: True)
    a, b = operands(20, 19, 40, torch.bfloat16)
    out, _ = multiply(in_padding(a), in_padding(b), "stream_k")
    check(out, a.double() @ b.double())


def test_addresses_beyond_32_bits(programs):
    stride = 2**30 + 1  # 4 rows of it are past 2**31 numbers; what nobody touches takes no memory
    room = torch.from_numpy(np.empty(3 * stride + 40, dtype=np.float16))
    a = room.as_strided((4, 40), (stride, 1))
    a.copy_(operands(4, 18, 40, torch.float16)[0])
    b = operands(4, 18, 40, torch.float16)[1]
    check(multiply(a, b, "stream_k")[0], a.double() @ b.double())


def test_a_hundred_calls_on_one_workspace(programs, monkeypatch):
    """The same inputs give the same bits whatever came between."""
    room = torch.full((3 * 2 * 256,), torch.nan)
    monkeypatch.setattr(launch, "workspace", lambda device, numbers: room)
    first: dict[int, torch.Tensor] = {}
    for turn in range(100):
        seed = turn % 7
        a, b = operands(16, 17 if seed == 0 else 16, 17 + seed, seed=seed)  # two tiles in parts, or one
        out, _ = multiply(a, b, "stream_k")
        if seed not in first:
            first[seed] = out
            check(out, a.double() @ b.double())
        assert torch.equal(out, first[seed])
        room.fill_(torch.nan)


def test_threads_on_one_workspace(programs, monkeypatch):
    """Nobody's kernels come between the two of another: its parts would be added up instead."""
    room = torch.full((3 * 2 * 256,), torch.nan)
    monkeypatch.setattr(launch, "workspace", lambda device, numbers: room)
    pairs = [operands(16, 16, 40, seed=seed) for seed in range(4)]  # one tile in three parts
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: multiply(pair[0], pair[1], "stream_k")[0], pairs * 3))
    for out, (a, b) in zip(found, pairs * 3, strict=True):
        check(out, a.double() @ b.double())


@pytest.mark.parametrize("mode", ["stream_k", "split_k"])
def test_slices_counted_in_64_bits(mode, programs, monkeypatch):
    monkeypatch.setattr(partition, "MOST_SLICES", 1)
    a, b = operands(16, 17, 40)
    check(multiply(a, b, mode)[0], a.double() @ b.double())


@pytest.mark.parametrize(("mode", "shape"), [("stream_k", (33, 18, 100)), ("split_k", (16, 16, 100))])
def test_any_order_of_programs_gives_the_same_bits(mode, shape, programs, monkeypatch):
    from triton.runtime import interpreter

    programs(4)
    a, b = operands(*shape)
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx
    want, _ = multiply(a, b, mode)
    check(want, a.double() @ b.double())
    for order in (lambda x: builder.grid_dim[0] - 1 - x, lambda x: x ^ 1 if x | 1 < builder.grid_dim[0] else x):
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z, order=order: place(order(x), y, z))
        got, _ = multiply(a, b, mode)
        assert torch.equal(got, want)


@pytest.mark.parametrize("mode", ["stream_k", "data_parallel"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_epilogues(mode, activation, bias_dtype, programs):
    a, b = operands(17, 18, 40)
    bias = torch.randn(36, dtype=bias_dtype)[::2] if bias_dtype else None
    want = a.double() @ b.double() + (0 if bias is None else bias.double())
    out, kept = multiply(a, b, mode, Epilogue(a.dtype, bias, activation, keep=True))
    check(kept, want)
    check(out, ACTIVATIONS[activation](want) if activation else want)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_nan_and_infinity_stay_what_they_are(programs):
    a, b = operands(17, 18, 40)
    a[3, 5], a[7, 0] = torch.nan, torch.inf
    for mode in KERNELS:
        out, _ = multiply(a, b, mode, Epilogue(a.dtype, None, "relu"))
        want = torch.relu(a @ b)
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.isinf(), want.isinf())
