"""GEMMs on a GPU against float64: run with `-m gpu`."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from typer.testing import CliRunner

from meshflash.bench import record
from meshflash.cli import app
from meshflash.gemm import configs, matmul
from meshflash.gemm.launch import ACTIVATIONS, Epilogue, run
from meshflash.gemm.plan import KERNELS, MODES, GemmProblem, make_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

#: Relative error in the norm, from rounding to the dtype and the order of sums.
ALLOWED = {"float32": 3e-6, "tf32": 1e-3, "bfloat16": 2.5e-3, "float16": 4e-4}
SHAPES = [
    (1, 1, 1),
    (1, 16384, 16384),
    (16384, 1, 4096),
    (16384, 16384, 1),
    (17, 33, 65),
    (63, 4097, 127),
    (128, 256, 64),
    (129, 257, 16384),
    (1000, 1000, 1000),
    (4096, 4096, 4096),
    (4864, 1024, 8256),
    (256, 1024, 28672),
    (8192, 8192, 520),
    (16384, 8192, 2048),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill uninitialized memory with NaN, including workspaces, which are bytes."""
    empty = torch.empty

    def poison(*args, **options):
        x = empty(*args, **options)
        return x.fill_(255 if x.dtype == torch.uint8 else torch.nan if x.dtype.is_floating_point else 0)

    monkeypatch.setattr(torch, "empty", poison)


def operands(m, n, k, dtype_name="bfloat16", layout="nn", seed=0):
    """Return random A and B in the given layout."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = torch.float32 if dtype_name == "tf32" else getattr(torch, dtype_name)

    def matrix(rows, columns, transposed):
        shape = (columns, rows) if transposed else (rows, columns)
        x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        return x.T if transposed else x

    return matrix(m, k, layout[0] == "t"), matrix(k, n, layout[1] == "t")


def check(got, want, dtype_name="bfloat16", least=0.0):
    """Compare relative to the norm of `want`, or to `least` where almost everything in it cancelled."""
    assert got.shape == want.shape
    error = float((got.double() - want.double()).norm()) / max(float(want.double().norm()), least)
    assert error <= ALLOWED[dtype_name], error


def precision(dtype_name):
    return "tf32" if dtype_name == "tf32" else "ieee"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_match_float64(shape, mode):
    a, b = operands(*shape)
    check(matmul(a, b, mode=mode, out_dtype=torch.float32), a.double() @ b.double())
    check(matmul(a, b, mode=mode), a.double() @ b.double())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype_name", ALLOWED)
def test_dtypes_and_layouts_match_float64(dtype_name, layout, mode):
    for shape in ((1024, 768, 2048), (333, 250, 1001)):
        a, b = operands(*shape, dtype_name, layout)
        check(matmul(a, b, mode=mode, precision=precision(dtype_name)), a.double() @ b.double(), dtype_name)


def test_a_hundred_random_shapes_match_float64():
    draw = random.Random(0)

    def size():
        return int(2 ** draw.uniform(0, 12.5))

    for call in range(100):
        m, n, k = size(), size(), size()
        dtype_name, layout, mode = draw.choice([*ALLOWED]), draw.choice(["nn", "nt", "tn", "tt"]), draw.choice(KERNELS)
        a, b = operands(m, n, k, dtype_name, layout, seed=call)
        bias = torch.randn(n, device="cuda") if draw.random() < 0.5 else None
        activation = draw.choice([None, *ACTIVATIONS])
        got = matmul(a, b, bias=bias, activation=activation, mode=mode, precision=precision(dtype_name))
        want = a.double() @ b.double() + (0 if bias is None else bias.double())
        if activation:
            want = ACTIVATIONS[activation](want)
        few = m * n < 64  # an activation may zero all of so few results, but not their rounding errors
        check(got, want, dtype_name, least=(m * n * k) ** 0.5 if few else 0.0)


@pytest.mark.parametrize("mode", KERNELS)
def test_every_candidate_configuration_matches_float64(mode):
    for layout in ("nn", "nt", "tn", "tt"):
        a, b = operands(1112, 1096, 2056, layout=layout)
        problem = GemmProblem.of(a, b)
        for config in configs.candidates("bfloat16", a.device):
            out, _ = run(make_plan(problem, mode, config, ""), a, b, "ieee", Epilogue(a.dtype))
            check(out, a.double() @ b.double())


@pytest.mark.parametrize("warp_specialized", [0, 1])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogues_of_both_kernels_match_float64(activation, warp_specialized):
    """For full tiles and for split tiles."""
    a, b = operands(1112, 1096, 2056)
    bias = torch.randn(1096, device="cuda")
    config = next(x for x in configs.HOPPER_CANDIDATES if x.warp_specialized == warp_specialized)
    for mode in ("stream_k", "data_parallel"):
        found = make_plan(GemmProblem.of(a, b), mode, config, "")
        out, preactivation = run(found, a, b, "ieee", Epilogue(a.dtype, bias, activation, store_preactivation=True))
        want = a.double() @ b.double() + bias.double()
        check(preactivation, want)
        check(out, ACTIVATIONS[activation](want) if activation else want)


@pytest.mark.parametrize(("mode", "shape"), [("stream_k", (1536, 1280, 1024)), ("split_k", (256, 512, 8192))])
def test_two_hundred_calls_give_the_same_bits(mode, shape):
    """Other inputs, and other shapes on the same workspace, run in between."""
    m, n, k = shape
    first: dict[int, torch.Tensor] = {}
    other = operands(700, 300, 5000, seed=99)
    for call in range(200):
        seed = call % 5
        a, b = operands(m, n, k, seed=seed)
        out = matmul(a, b, mode=mode)
        if call % 3 == 0:
            matmul(*other, mode=mode)
        if seed in first:
            assert torch.equal(out, first[seed])
        else:
            first[seed] = out
            check(out, a.double() @ b.double())


def test_concurrent_streams_give_the_same_bits():
    a, b = operands(1536, 1280, 4096)
    want = matmul(a, b, mode="stream_k")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(matmul(a, b, mode="stream_k"))
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)


def test_threads_on_one_stream_give_the_same_bits():
    pairs = [operands(1536, 1280, 1024, seed=seed) for seed in range(4)]
    want = [matmul(a, b, mode="stream_k") for a, b in pairs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: matmul(*pair, mode="stream_k"), pairs * 25))
    assert all(torch.equal(out, want[n % 4]) for n, out in enumerate(found))


def test_captured_graph_replays_with_new_inputs():
    a, b = operands(1536, 1280, 1024)
    want = matmul(a, b, mode="stream_k")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(a, b, mode="stream_k")
    for seed in (1, 2):
        x, y = operands(1536, 1280, 1024, seed=seed)
        a.copy_(x)
        b.copy_(y)
        graph.replay()
        assert torch.equal(out, matmul(x, y, mode="stream_k"))
        assert not torch.equal(out, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_match_float64(activation, mode):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((500, 640), (640, 384), (384,))
    tensors = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    tensors = [x.requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    dout = torch.randn(500, 384, generator=generator, device="cuda")
    out = matmul(*tensors[:2], bias=tensors[2], activation=activation, mode=mode)
    want = exact[0] @ exact[1] + exact[2]
    want = ACTIVATIONS[activation](want) if activation else want
    check(out.detach(), want.detach())
    got = torch.autograd.grad(out, tensors, dout.bfloat16())
    for x, y in zip(got, torch.autograd.grad(want, exact, dout.double()), strict=True):
        error = float((x.double() - y).norm() / y.norm())
        assert error <= 1e-2, error  # saved tensors and dout are rounded to bfloat16 first


def test_operands_with_offsets_beyond_32_bits_match_float64():
    padded = torch.full((3, 2**30 + 8), torch.nan, dtype=torch.bfloat16, device="cuda")
    a, b = operands(3, 200, 500)
    padded[:, :500] = a
    for strided in (padded[:, :500], padded.view(-1)[1:][: 2 * (2**30 + 8) + 501].as_strided((3, 499), (2**30 + 8, 1))):
        check(
            matmul(strided, b[: strided.shape[1]], mode="stream_k"), strided.double() @ b[: strided.shape[1]].double()
        )
    del padded, strided
    tall, slim = operands(2**21, 1032, 16)  # the result has more than 2**31 elements
    out = matmul(tall, slim, mode="data_parallel")
    check(out[-1000:], tall[-1000:].double() @ slim.double())


def test_memory_next_to_the_operands_is_not_read():
    a, b = operands(300, 200, 500)
    for unit in (8, 1):
        inside = []
        for x in (a, b):
            padded = torch.full((x.shape[0] + 3, x.shape[1] + 16 + unit - 1), torch.nan, dtype=x.dtype, device="cuda")
            padded[: x.shape[0], : x.shape[1]] = x
            inside.append(padded[: x.shape[0], : x.shape[1]])
        for mode in KERNELS:
            check(matmul(*inside, mode=mode), a.double() @ b.double())


@pytest.mark.parametrize("options", [(), ("--tune",), ("--calibrate",)])
def test_bench_gemm_times_tunes_and_calibrates_on_a_gpu(options, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHFLASH_RATES", str(tmp_path))
    words = [
        "bench",
        "gemm",
        "--shape",
        "1024x1024x2048",
        "--rounds",
        "2",
        "--output",
        str(tmp_path / "x.json"),
        *options,
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (result.output, result.exception)
    rows = record.read(tmp_path / "x.json")["rows"]
    assert all(row["ms"] > 0 for row in rows)
    if "--calibrate" in options:
        a, b = operands(1024, 1024, 2048)
        found = matmul(a, b, return_plan=True)[1]
        assert "the fastest at 1024x1024x2048" in found.why
