"""All kernels that run on a GPU match the oracle there: run with `-m gpu`."""

import random

import pytest
import torch

from cases import CASES
from meshflash import Mask, flash_attention
from meshflash.check.oracle import Case, check, gradients
from meshflash.core.tiles import worklist
from meshflash.engine import local
from meshflash.kernels import registry
from meshflash.kernels.registry import record_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CAUSAL = Mask.causal()
#: Vendor kernels; they take half precision.
VENDOR_KERNELS = ("cudnn", "fa2", "fa2-package", "fa3", "fa4")
#: Cases large enough that blocks are full, TMA descriptors load them and the pipeline fills.
REAL = {
    "causal": Case(CAUSAL, batch=1, tokens=1023, heads=4, dim=64),
    "causal, aligned": Case(CAUSAL, batch=2, tokens=1024, heads=2, dim=64),
    "full, aligned": Case(batch=2, tokens=512, heads=4, kv_heads=2, dim=64),
    "short, aligned": Case(CAUSAL, batch=32, tokens=64, heads=2, dim=64),
    "causal, 128": Case(CAUSAL, batch=2, tokens=777, heads=2, dim=128),
    "causal, 128, aligned": Case(CAUSAL, batch=2, tokens=1024, heads=4, kv_heads=2, dim=128),
    "full, gqa": Case(batch=1, tokens=640, heads=8, kv_heads=2, dim=128),
    "more queries": Case(CAUSAL, batch=1, tokens=700, k_tokens=300, heads=2, dim=64),
    "more keys": Case(CAUSAL, batch=1, tokens=300, k_tokens=700, heads=2, dim=64),
    "last aligned": Case(CAUSAL, batch=1, tokens=300, k_tokens=700, q_offset=400, heads=2, dim=64),
    "documents": Case(CAUSAL & Mask.documents([400, 1, 0, 399, 224]), batch=1, tokens=1024, heads=2, dim=64),
    "window": Case(CAUSAL & Mask.window(200, 0), batch=1, tokens=1024, heads=2, dim=128),
    "both sides": Case(Mask.window(100, 60), batch=1, tokens=900, heads=2, dim=64),
    "dim 96": Case(CAUSAL, batch=1, tokens=515, heads=2, dim=96),
    "dim 80": Case(CAUSAL, batch=1, tokens=515, heads=2, dim=80),
    "dim 256": Case(CAUSAL, batch=1, tokens=515, heads=2, dim=256),
    "dim 192, value dim 128": Case(CAUSAL, batch=1, tokens=515, heads=2, dim=192, value_dim=128),
    "softcap, sinks": Case(CAUSAL, batch=1, tokens=515, heads=4, kv_heads=2, dim=64, softcap=3.0, sinks=True),
    "alibi, dropout": Case(CAUSAL, batch=1, tokens=515, heads=4, kv_heads=2, dim=64, alibi=True, dropout=0.2),
    "lse gradient": Case(CAUSAL, batch=1, tokens=515, heads=2, dim=128, lse_gradient=True),
}


@pytest.fixture(autouse=True)
def ieee_matmul():
    """Turn TF32 off, whatever an earlier test set."""
    torch.backends.cuda.matmul.allow_tf32 = False


def run(case, dtype, kernel="auto", seed=0):
    """Check a case against the oracle; return its results and the log of the kernels that ran."""
    leaves = case.inputs(dtype, "cuda", seed)
    with record_kernels() as log:
        got = gradients(case.run(leaves, kernel), leaves, case)
    check(got, case, leaves)
    return got, log


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_auto_matches_the_oracle_and_float64_runs_tiled(name, dtype):
    _, log = run(CASES[name][0], dtype)
    assert len(log) == 2
    if dtype == torch.float64:
        assert {kernel for kernel, _ in log} == {"tiled"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", REAL)
def test_triton_at_real_shapes_matches_the_oracle(name, dtype):
    run(REAL[name], dtype, "triton")


def hopper_or_triton(case):
    """Return "hopper" if that kernel supports both passes of a case, else "triton"."""
    leaves = case.inputs(torch.bfloat16, "cuda")
    q, k, v = (leaves[name].detach() for name in "qkv")
    x = local.inputs(q, k, v, case.mask, case.features(leaves), case.q_offset)
    hopper = next(kernel for kernel in registry.kernels() if kernel.name == "hopper")
    unsupported = any(
        registry.refusal(hopper, local.kernel_request(x, direction)) for direction in ("forward", "backward")
    )
    return "triton" if unsupported else "hopper"


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("kernel", VENDOR_KERNELS)
def test_vendor_kernels_at_real_shapes_match_the_oracle(kernel, name):
    case = REAL[name]
    leaves = case.inputs(torch.bfloat16, "cuda")
    q, k, v = (leaves[name].detach() for name in "qkv")
    x = local.inputs(q, k, v, case.mask, case.features(leaves), case.q_offset)
    requests = [
        local.kernel_request(x, direction, lse_gradient=case.lse_gradient) for direction in ("forward", "backward")
    ]
    found = next(one for one in registry.kernels() if one.name == kernel)
    reasons = [registry.refusal(found, request) for request in requests]
    if any(reasons):
        pytest.skip(f"not supported: {reasons}")
    _, log = run(case, torch.bfloat16, kernel)
    assert [name for name, _ in log] == [kernel] * 2


def in_padding(x, pad, heads_first):
    """Return the tensor embedded in NaN, with heads before tokens in memory or after them."""
    b, t, h, d = x.shape
    if heads_first:
        buffer = x.new_full((b, h, t + pad, d + 8), torch.nan).transpose(1, 2)
    else:
        buffer = x.new_full((b, t + pad, h + 1, d + 8), torch.nan)
    buffer[:, :t, :h, :d] = x.detach()
    return buffer[:, :t, :h, :d].requires_grad_()


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", ["causal", "causal, 128", "full, gqa", "documents", "dim 96"])
def test_memory_next_to_the_rows_is_not_read(name, heads_first):
    case = REAL[name]
    leaves = case.inputs(torch.bfloat16, "cuda")
    leaves |= {key: in_padding(leaves[key], pad, heads_first) for key, pad in (("q", 3), ("k", 5), ("v", 1))}
    for kernel in {"triton", hopper_or_triton(case)}:
        got = gradients(case.run(leaves, kernel), leaves, case)
        check(got, case, leaves)


def random_case(draw):
    """Return a case of random mask, shape and features, all of which the Triton kernel supports."""
    tokens = draw.randint(1, 900)
    masks = [Mask.full(), CAUSAL, CAUSAL & Mask.window(draw.randint(0, 300), 0), Mask.window(draw.randint(0, 99), 50)]
    cuts = sorted(draw.randint(0, tokens) for _ in range(3))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    masks += [CAUSAL & Mask.documents(lengths), CAUSAL & (Mask.window(40, 0) | Mask.first(draw.randint(1, 99)))]
    kv_heads = draw.choice([1, 2, 3])
    return Case(
        draw.choice(masks),
        batch=draw.randint(1, 3),
        tokens=tokens,
        heads=kv_heads * draw.choice([1, 2, 4]),
        kv_heads=kv_heads,
        dim=draw.choice([16, 40, 64, 64, 96, 128, 128]),
        value_dim=draw.choice([None, None, None, 32]),
        softcap=draw.choice([None, None, 3.0]),
        sinks=draw.random() < 0.2,
        alibi=draw.random() < 0.2,
        dropout=draw.choice([0.0, 0.0, 0.0, 0.3]),
        lse_gradient=draw.random() < 0.2,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", ["hopper", "triton", "auto"])
def test_fifty_random_cases_match_the_oracle(kernel, dtype):
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    for n in range(50):
        case = random_case(draw)
        try:
            run(case, dtype, hopper_or_triton(case) if kernel == "hopper" else kernel, seed=n)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {n}: {case}: {error}") from error


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("kernel", ["auto", "hopper", "triton"])
def test_deterministic_calls_repeat_bit_for_bit(kernel, name):
    """In deterministic mode torch also fills new tensors with NaN, which exposes reads of unwritten memory."""
    kernel = hopper_or_triton(REAL[name]) if kernel == "hopper" else kernel
    torch.use_deterministic_algorithms(True)
    try:
        (first, _), (second, _) = run(REAL[name], torch.bfloat16, kernel), run(REAL[name], torch.bfloat16, kernel)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_dropout_keeps_the_same_pairs_on_a_gpu_and_on_a_cpu():
    case = Case(Mask.causal(), heads=4, kv_heads=2, dropout=0.4)
    leaves = case.inputs(torch.float32)
    on_gpu = {name: x.detach().cuda() for name, x in leaves.items()}
    assert torch.allclose(case.run(leaves)[0], case.run(on_gpu)[0].cpu(), atol=1e-5)


def test_two_halves_of_keys_by_cudnn_merge_in_float32():
    """The error of two merged halves is at most 1.1 times that of all keys at once."""
    case = Case(batch=1, tokens=1024, heads=4, dim=64)
    leaves = case.inputs(torch.bfloat16, "cuda")
    q, k, v = (leaves[name].detach() for name in "qkv")
    features = case.features(leaves)
    found = next(one for one in registry.kernels() if one.name == "cudnn")
    whole = local.inputs(q, k, v, case.mask, features)
    if registry.refusal(found, local.kernel_request(whole, "forward")):
        pytest.skip("no cuDNN")
    exact = case.dense({name: x.detach().double() for name, x in leaves.items()})[0]
    out = torch.empty_like(q, dtype=torch.float32), torch.empty(1, 4, 1024, device="cuda")
    for n in range(2):
        keys = slice(512 * n, 512 * n + 512)
        half = whole._replace(
            k_BSKD=k[:, keys],
            v_BSKE=v[:, keys],
            work=worklist(case.mask, (range(1024),), (range(keys.start, keys.stop),)),
        )
        found.forward(half, out, out if n else None)
    once = found.forward(whole)[0]
    errors = [(x.double() - exact).norm() for x in (out[0], once)]
    assert errors[0] <= 1.1 * errors[1]


def test_cpu_vendor_kernel_refuses_cuda_tensors_and_names_the_device():
    x = torch.zeros(1, 4, 1, 8, device="cuda")
    with pytest.raises(ValueError, match="does not support the device cuda; it runs on cpu"):
        flash_attention(x, x, x, kernel="vendor")


def test_tensors_on_two_devices_are_refused():
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="must be on one device; got q cpu, k cuda:0"):
        flash_attention(x, x.cuda(), x.cuda())


def test_cu_seqlens_on_a_gpu_give_the_same_mask_as_lengths():
    q, k, v = (torch.randn(11, 2, 8, device="cuda") for _ in range(3))
    cu_seqlens = torch.tensor([0, 4, 11], device="cuda", dtype=torch.int32)
    got = flash_attention(q, k, v, mask=Mask.from_cu_seqlens(cu_seqlens))
    assert torch.equal(got, flash_attention(q, k, v, mask=Mask.documents([4, 7])))


def test_compiled_attention_on_a_gpu_matches_eager():
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 33, 2, 16, device="cuda", requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda *x: flash_attention(*x, mask=Mask.causal()) * 2, fullgraph=True)
    assert torch.allclose(compiled(q, k, v), 2 * flash_attention(q, k, v, mask=Mask.causal()), atol=1e-5)
