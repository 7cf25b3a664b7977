"""The GEMM kernel under the interpreter against float64: shapes, dtypes, strides, epilogues, and orders of CTAs."""

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
from meshflash.gemm.plan import KERNELS, GemmProblem, make_plan
from meshflash.kernels.triton import configs as triton_configs

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="test_gemm_gpu.py runs them on a GPU")

SMALL = Config(16, 16, 16, 1, 1, l2_swizzle=2)
#: Relative errors by output dtype; accumulators and epilogues are float32. The interpreter truncates to bfloat16
#: where a GPU rounds, which alone is a relative 3.4e-3.
ALLOWED = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 4e-4}
#: Sizes below, at and above the tile size; one split tile, full waves, and a tail.
SHAPES = [(1, 1, 1), (1, 16, 100), (17, 1, 33), (16, 16, 16), (33, 18, 49), (32, 32, 64), (35, 50, 20), (5, 70, 31)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill uninitialized memory with NaN: results, pre-activations and the workspace."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x):
        return x.fill_(torch.nan) if x.dtype.is_floating_point else x

    monkeypatch.setattr(torch, "empty", lambda *args, **options: poison(empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: poison(empty_like(*args, **options)))


@pytest.fixture
def num_ctas(monkeypatch):
    """Set the number of CTAs; 3 by default."""

    def set_to(number):
        monkeypatch.setattr(configs, "num_sms", lambda device: number)

    set_to(3)
    return set_to


def multiply(a, b, mode, epilogue=None, config=SMALL):
    return run(make_plan(GemmProblem.of(a, b), mode, config, ""), a, b, "ieee", epilogue or Epilogue(a.dtype))


def check(got, want, dtype=None):
    """Compare with float64 by the relative error of the norm."""
    dtype = dtype or got.dtype
    assert got.isfinite().all()
    assert float((got.double() - want).norm()) <= ALLOWED[dtype] * float(want.norm())


def operands(m, n, k, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))


@pytest.mark.parametrize("mode", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_shapes_match_float64(shape, mode, num_ctas):
    a, b = operands(*shape)
    out, preactivation = multiply(a, b, mode)
    assert preactivation is None
    check(out, a.double() @ b.double())


@pytest.mark.parametrize("number", [1, 2, 7, 13])
def test_any_number_of_ctas_matches_float64(number, num_ctas):
    num_ctas(number)
    a, b = operands(33, 34, 70)
    check(multiply(a, b, "stream_k")[0], a.double() @ b.double())


@pytest.mark.parametrize("splits", [2, 3, 5, 9, 21])
def test_any_number_of_splits_matches_float64(splits, num_ctas):
    """The numbers are below, at and above what the combine kernel loads at a time."""
    num_ctas(splits)
    a, b = operands(15, 14, 16 * 21)
    assert make_plan(GemmProblem.of(a, b), "stream_k", SMALL, "").num_ctas == splits
    check(multiply(a, b, "stream_k")[0], a.double() @ b.double())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_pairs_of_dtypes_match_float64(dtype, out_dtype, num_ctas):
    a, b = operands(33, 18, 40, dtype)
    out, _ = multiply(a, b, "stream_k", Epilogue(out_dtype))
    assert out.dtype == out_dtype
    check(out, a.double() @ b.double())


def in_padding(x, transposed=False):
    """Return the matrix embedded in NaN, with rows (or columns, if transposed) at multiples of 16 bytes."""
    if transposed:
        return in_padding(x.T).T
    rows, columns = x.shape
    padded = x.new_full((rows + 2, -(-columns // 8) * 8 + 8), torch.nan)
    padded[:rows, :columns] = x
    return padded[:rows, :columns]


def every_second(x):
    """Return the matrix with NaN between its columns in memory."""
    padded = x.new_full((x.shape[0], 2 * x.shape[1] + 1), torch.nan)
    padded[:, : 2 * x.shape[1] : 2] = x
    return padded[:, : 2 * x.shape[1] : 2]


@pytest.mark.parametrize(
    ("relayout_a", "relayout_b"),
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
def test_any_strides_match_float64(relayout_a, relayout_b, num_ctas):
    a, b = operands(33, 18, 40)
    a, b = relayout_a(a), relayout_b(b)
    check(multiply(a, b, "stream_k")[0], a.double() @ b.double())


@pytest.mark.parametrize("mode", KERNELS)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_aligned_operands_and_results_use_tma_descriptors(transposed, mode, num_ctas, monkeypatch):
    made = []
    describe = launch.described

    def record(x, block):
        made.append(x)
        return describe(x, block)

    monkeypatch.setattr(triton_configs, "has_descriptors", lambda device: True)
    monkeypatch.setattr(launch, "described", record)
    a, b = operands(33, 24, 43, torch.bfloat16)
    a, b = (in_padding(x, t) for x, t in zip((a, b), transposed, strict=True))
    bias = torch.randn(24)
    want = a.double() @ b.double() + bias
    out, preactivation = multiply(a, b, mode, Epilogue(a.dtype, bias, "silu", store_preactivation=True))
    assert len(made) == 4, "both operands, the output and the pre-activation"
    check(out, functional.silu(want))
    check(preactivation, want)
    made.clear()
    check(multiply(a[:, :40], every_second(b)[:40], mode)[0], a[:, :40].double() @ b[:40].double())
    assert not made, "operands that TMA cannot load go by pointers"


def test_unaligned_result_is_stored_by_pointers(num_ctas, monkeypatch):
    monkeypatch.setattr(triton_configs, "has_descriptors", lambda device: True)
    a, b = operands(20, 19, 40, torch.bfloat16)
    out, _ = multiply(in_padding(a), in_padding(b), "stream_k")
    check(out, a.double() @ b.double())


def test_operands_with_offsets_beyond_32_bits_match_float64(num_ctas):
    stride = 2**30 + 1  # 4 rows reach past 2**31 elements; untouched pages take no memory
    memory = torch.from_numpy(np.empty(3 * stride + 40, dtype=np.float16))
    a = memory.as_strided((4, 40), (stride, 1))
    a.copy_(operands(4, 18, 40, torch.float16)[0])
    b = operands(4, 18, 40, torch.float16)[1]
    check(multiply(a, b, "stream_k")[0], a.double() @ b.double())


def test_a_hundred_calls_on_one_workspace_give_the_same_bits(num_ctas, monkeypatch):
    """The same inputs give the same bits whatever ran in between."""
    partials = torch.full((3 * 2 * 256,), torch.nan)
    monkeypatch.setattr(launch, "new_partials", lambda *_: partials)
    first: dict[int, torch.Tensor] = {}
    for call in range(100):
        seed = call % 7
        a, b = operands(16, 17 if seed == 0 else 16, 17 + seed, seed=seed)  # two split tiles, or one
        out, _ = multiply(a, b, "stream_k")
        if seed not in first:
            first[seed] = out
            check(out, a.double() @ b.double())
        assert torch.equal(out, first[seed])
        partials.fill_(torch.nan)


def test_threads_do_not_mix_partial_sums(num_ctas):
    """Every call has partial sums of its own, so kernels of another thread may come between its two kernels."""
    pairs = [operands(16, 16, 40, seed=seed) for seed in range(4)]  # one tile with three splits
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: multiply(pair[0], pair[1], "stream_k")[0], pairs * 3))
    for out, (a, b) in zip(found, pairs * 3, strict=True):
        check(out, a.double() @ b.double())


@pytest.mark.parametrize("mode", ["stream_k", "split_k"])
def test_iterations_counted_in_int64_match_float64(mode, num_ctas, monkeypatch):
    monkeypatch.setattr(partition, "MAX_INT32_ITERS", 1)
    a, b = operands(16, 17, 40)
    check(multiply(a, b, mode)[0], a.double() @ b.double())


@pytest.mark.parametrize(("mode", "shape"), [("stream_k", (33, 18, 100)), ("split_k", (16, 16, 100))])
def test_any_order_of_ctas_gives_the_same_bits(mode, shape, num_ctas, monkeypatch):
    from triton.runtime import interpreter

    num_ctas(4)
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
def test_every_epilogue_matches_float64(mode, activation, bias_dtype, num_ctas):
    a, b = operands(17, 18, 40)
    bias = torch.randn(36, dtype=bias_dtype)[::2] if bias_dtype else None
    want = a.double() @ b.double() + (0 if bias is None else bias.double())
    out, preactivation = multiply(a, b, mode, Epilogue(a.dtype, bias, activation, store_preactivation=True))
    check(preactivation, want)
    check(out, ACTIVATIONS[activation](want) if activation else want)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_nan_and_infinity_propagate(num_ctas):
    a, b = operands(17, 18, 40)
    a[3, 5], a[7, 0] = torch.nan, torch.inf
    for mode in KERNELS:
        out, _ = multiply(a, b, mode, Epilogue(a.dtype, None, "relu"))
        want = torch.relu(a @ b)
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.isinf(), want.isinf())
