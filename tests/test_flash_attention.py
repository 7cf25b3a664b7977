"""`flash_attention` on a single device: strides, autocast, activation checkpointing, compilation, and every error."""

import random
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from meshflash import Mask, flash_attention
from meshflash.check.oracle import Case, check, gradients
from meshflash.engine.op import attention_op
from meshflash.engine.spec import AttentionSpec
from meshflash.kernels.registry import record_kernels

CAUSAL = Mask.causal()


def qkv(*shape, dtype=torch.float32, requires_grad=True):
    """Return random q, k and v of one shape."""
    return tuple(torch.randn(*shape, dtype=dtype).requires_grad_(requires_grad) for _ in range(3))


@pytest.mark.parametrize("kernel", ["auto", "tiled"])
def test_non_contiguous_inputs_and_gradients_match_contiguous_ones(kernel):
    case = Case(CAUSAL, heads=4, kv_heads=2)
    leaves = case.inputs(torch.float32)
    strided = {}
    for name, x in leaves.items():
        wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1]).transpose(1, 2).contiguous().transpose(1, 2)
        wide[..., ::2] = x.detach()
        strided[name] = wide[..., ::2].detach().requires_grad_()
        assert not strided[name].is_contiguous()
    check(gradients(case.run(strided, kernel), strided, case), case, leaves)


def test_expanded_upstream_gradient_matches_contiguous_one():
    q, k, v = qkv(1, 7, 2, 8)
    flash_attention(q, k, v).sum().backward()
    want = torch.autograd.grad(flash_attention(q, k, v), q, torch.ones(1, 7, 2, 8))[0]
    assert q.grad is not None
    assert torch.equal(q.grad, want)


@pytest.mark.parametrize("kernel", ["auto", "tiled"])
def test_expanded_keys_match_contiguous_ones(kernel):
    q, k, v = qkv(2, 7, 4, 8)
    one, other = k[:1, :, :1].detach(), v[:1, :, :1].detach()
    wide = [x.expand(2, 7, 4, 8) for x in (one, other)]
    got = flash_attention(q, *wide, mask=CAUSAL, kernel=kernel)
    assert torch.equal(got, flash_attention(q, *(x.contiguous() for x in wide), mask=CAUSAL, kernel=kernel))


def test_packed_inputs_match_a_batch_of_one():
    q, k, v = qkv(11, 4, 8)
    mask = CAUSAL & Mask.documents([4, 7])
    out, lse = flash_attention(q, k[:, :2], v[:, :2], mask=mask, return_lse=True)
    batched = flash_attention(q[None], k[None, :, :2], v[None, :, :2], mask=mask)
    assert out.shape == (11, 4, 8)
    assert lse.shape == (4, 11)
    assert torch.equal(out, batched[0])


def test_documents_match_separate_calls():
    q, k, v = qkv(11, 2, 8)
    packed = flash_attention(q, k, v, mask=CAUSAL & Mask.documents([4, 7]))
    alone = [flash_attention(q[s], k[s], v[s], mask=CAUSAL) for s in (slice(0, 4), slice(4, 11))]
    assert torch.allclose(packed, torch.cat(alone), atol=1e-6)


def test_gradients_reach_only_inputs_that_require_them():
    q, k, v = qkv(1, 7, 2, 8, requires_grad=False)
    v.requires_grad_()
    flash_attention(q, k, v, mask=CAUSAL).sum().backward()
    assert v.grad is not None
    assert q.grad is None


def test_gradients_flow_through_the_lse_alone():
    case = Case(CAUSAL)
    q, k, v = case.inputs(torch.float64).values()
    _, lse = flash_attention(q, k, v, mask=CAUSAL, return_lse=True)
    got = torch.autograd.grad(lse.sum(), (q, k), retain_graph=True)
    want = torch.autograd.grad(case.dense({"q": q, "k": k, "v": v})[1].sum(), (q, k))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, want, strict=True))


def test_autocast_casts_inputs():
    q, k, v = qkv(1, 7, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = flash_attention(q, k, v, mask=CAUSAL, return_lse=True)
        mixed = flash_attention(q, k.bfloat16(), v.bfloat16(), mask=CAUSAL)
    assert out.dtype == mixed.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("features", [dict(softcap=30.0), dict(mask=Mask.window(9, 0))], ids=str)
def test_autocast_keeps_float32_accumulators(features):
    q, k, v = qkv(1, 65, 2, 16, dtype=torch.bfloat16)
    plain, plain_lse = flash_attention(q, k, v, return_lse=True, **features)
    wanted = torch.autograd.grad(plain.float().square().sum(), (q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = flash_attention(q, k, v, return_lse=True, **features)
        got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_autocast_refuses_unsupported_dtypes(dtype):
    q, k, v = qkv(1, 7, 2, 8, requires_grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="must share one of the dtypes"):
        flash_attention(q, k.to(dtype), v)


def test_meta_tensors_give_output_and_lse_shapes():
    q, k, v = (torch.empty(1, 7, 2, 8, device="meta") for _ in range(3))
    out, lse = flash_attention(q, k, v, mask=CAUSAL, return_lse=True)
    assert out.shape == (1, 7, 2, 8)
    assert lse.shape == (1, 2, 7)
    assert out.is_meta


def test_dropout_seed_ignores_the_default_device():
    q, k, v = qkv(1, 7, 2, 8)
    torch.manual_seed(0)
    plain = flash_attention(q, k, v, dropout=0.5)
    torch.manual_seed(0)
    with torch.device("meta"):
        assert torch.equal(flash_attention(q, k, v, dropout=0.5), plain)


def test_forward_mode_is_refused():
    x = torch.randn(1, 7, 2, 8)
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(lambda a: flash_attention(a, a, a), (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(ValueError, match="no forward-mode derivative"):
        flash_attention(forward_ad.make_dual(x, torch.ones_like(x)), x, x)
    with forward_ad.dual_level():
        flash_attention(x, x, x)


def test_mask_copies_document_lengths():
    q, k, v = qkv(9, 2, 8)
    cu_seqlens = torch.tensor([0, 4, 9])
    mask = Mask.from_cu_seqlens(cu_seqlens)
    before = flash_attention(q, k, v, mask=mask)
    cu_seqlens[1] = 2
    assert torch.equal(flash_attention(q, k, v, mask=mask), before)
    assert mask.positions_in_document(9).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_nan_gradients_of_the_lse_of_empty_rows_are_ignored(kernel):
    q, k, v = qkv(1, 9, 2, 8)
    mask = Mask.window(2, 0) & Mask.first(3)
    out, lse = flash_attention(q, k, v, mask=mask, kernel=kernel, return_lse=True)
    dlse = torch.ones_like(lse).masked_fill(lse == -torch.inf, torch.nan)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse))
    assert not any(grad.isnan().any() for grad in grads)


def test_backward_raises_if_inputs_changed_after_the_forward():
    q, k, v = qkv(1, 7, 2, 8)
    out = flash_attention(q * 1, k, v)
    k.data.add_(0)  # autograd does not notice this change
    with torch.no_grad():
        v.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_activation_checkpointing_replays_dropout():
    q, k, v = qkv(1, 16, 2, 8)

    def block(*x):
        return flash_attention(*x, mask=CAUSAL, dropout=0.4)

    torch.manual_seed(5)
    plain = torch.autograd.grad(block(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(5)
    replayed = torch.autograd.grad(checkpoint(block, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


def test_gradients_accumulate():
    q, k, v = qkv(1, 7, 2, 8)
    for _ in range(2):
        flash_attention(q, k, v, mask=CAUSAL).sum().backward()
    twice = torch.autograd.grad(2 * flash_attention(q, k, v, mask=CAUSAL).sum(), q)[0]
    assert q.grad is not None
    assert torch.allclose(q.grad, twice)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [("vendor", "derivative for .* is not implemented"), ("tiled", "no autograd formula")],
)
def test_double_backward_is_refused(kernel, message):
    q, k, v = qkv(1, 7, 2, 8)
    grad = torch.autograd.grad(flash_attention(q, k, v, kernel=kernel).sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=message):
        grad.sum().backward()


def _op_arguments(features, mask):
    """Return the positional arguments of the registered op for a call with these features."""
    q, k, v = qkv(2, 9, 2, 8)
    seed = torch.tensor(3) if features.get("dropout") else None
    sinks = torch.randn(2, requires_grad=True) if features.get("sinks") else None
    slopes = torch.rand(2, 2) if features.get("alibi") else None
    spec = AttentionSpec(mask, 0.3, features.get("softcap", 0.0), features.get("dropout", 0.0))
    return q, k, v, sinks, slopes, seed, *spec.encode()


@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"softcap": 2.0, "alibi": True, "dropout": 0.2}], ids=str)
def test_op_passes_opcheck(features):
    torch.library.opcheck(attention_op, _op_arguments(features, CAUSAL & Mask.documents([4, 5])))


def packings(count, tokens):
    """Yield `count` lists of cumulative lengths with 2 to 9 documents each."""
    draw = random.Random(0)
    for _ in range(count):
        yield [0, *sorted(draw.sample(range(1, tokens), draw.randint(1, 8))), tokens]


def _mask_inside(q, k, v, cu_seqlens):
    """Build the mask inside of the compiled function."""
    return flash_attention(q, k, v, mask=CAUSAL & Mask.from_cu_seqlens(cu_seqlens))


def _mask_outside(q, k, v, mask):
    """Take the mask as an argument of the compiled function."""
    return flash_attention(q, k, v, mask=mask)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (_mask_inside, torch.tensor),
        (_mask_outside, lambda cu: CAUSAL & Mask.from_cu_seqlens(torch.tensor(cu))),
        (_mask_outside, lambda cu: CAUSAL & Mask.from_cu_seqlens(cu)),
    ],
    ids=["mask built while compiling", "mask from a tensor", "mask from a list"],
)
def test_fifty_packings_compile_at_most_twice(function, argument):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    q, k, v = qkv(64, 2, 8)
    for cu in packings(50, 64):
        out = compiled(q, k, v, argument(cu))
        assert torch.equal(out, _mask_inside(q, k, v, torch.tensor(cu)))
    assert counter.frame_count <= 2


def test_compiled_gradients_match_eager_for_every_feature():
    torch._dynamo.reset()
    case = Case(CAUSAL & (Mask.window(6, 0) | Mask.first(2)), heads=4, kv_heads=2, softcap=2.0, sinks=True)
    leaves = case.inputs(torch.float32)

    def plain(q, k, v, sink_logits, slopes):
        return flash_attention(
            q,
            k,
            v,
            mask=case.mask,
            softcap=2.0,
            sink_logits=sink_logits,
            alibi_slopes=slopes,
            dropout=0.2,
            seed=3,
        )

    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    arguments = [*leaves.values(), torch.rand(4)]
    grads = [torch.autograd.grad(f(*arguments).square().sum(), list(leaves.values())) for f in (compiled, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.slow
def test_inductor_matches_eager():
    torch._dynamo.reset()
    q, k, v = qkv(1, 33, 2, 8)
    compiled = torch.compile(lambda *x: flash_attention(*x, mask=CAUSAL) * 2, fullgraph=True)
    out = compiled(q, k, v)
    assert torch.allclose(out, 2 * flash_attention(q, k, v, mask=CAUSAL), atol=1e-6)
    out.sum().backward()


def test_record_kernels_names_the_kernel_that_ran():
    q, k, v = qkv(1, 7, 2, 8)
    with record_kernels() as outer, record_kernels() as inner:
        flash_attention(q, k, v, kernel="tiled").sum().backward()
    flash_attention(q, k, v)
    assert outer == inner == [("tiled", "forward"), ("tiled", "backward")]


X = torch.zeros(2, 5, 4, 8)
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "not a tensor": (dict(q=[1.0]), r"q: expected a tensor, got list"),
    "two dimensions": (
        dict(q=X[0, 0]),
        r"q: expected \[batch, tokens, heads, dim\], or packed .*got \[4, 8\]",
    ),
    "mixed dimensions": (dict(k=X[0]), r"k: expected .* got \[5, 4, 8\] beside q \[2, 5, 4, 8\]"),
    "batch": (dict(k=X[:1], v=X[:1]), r"batch sizes differ: q \[2, 5, 4, 8\], k \[1, 5, 4, 8\]"),
    "key tokens": (dict(v=X[:, :3]), r"k and v must have the same tokens and heads; .*v \[2, 3, 4, 8\]"),
    "value dim": (dict(v=X[..., :0]), r"v must have a dim of 1 or more; got v \[2, 5, 4, 0\]"),
    "dim": (dict(k=X[..., :4]), r"q and k must have the same dim, .*got 8 in q .* and 4 in k \[2, 5, 4, 4\]"),
    "no dim": (dict(q=X[..., :0], k=X[..., :0]), r"q must have a dim of 1 or more; got q \[2, 5, 4, 0\]"),
    "boolean mask": (dict(mask=True), r"mask: expected a meshflash.Mask, such as Mask.causal\(\), .*got bool"),
    "heads": (dict(k=X[:, :, :3], v=X[:, :, :3]), r"3 heads in k do not divide 4 heads in q"),
    "dtypes": (dict(k=X.half()), r"must share one of the dtypes float16, .*k torch.float16"),
    "integers": (dict(q=X.int(), k=X.int(), v=X.int()), r"must share one of the dtypes .*q torch.int32"),
    "devices": (dict(k=X.to("meta")), r"must be on one device; got q cpu, k meta"),
    "mask": (dict(mask=torch.ones(5, 5)), r"mask: expected a meshflash.Mask, .*got Tensor"),
    "mask name": (dict(mask="causal"), r"mask: expected a meshflash.Mask, .*got str"),
    "documents": (
        dict(mask=Mask.documents([3, 3])),
        r"documents\(lengths\): 6 tokens in the documents, 5 in",
    ),
    "document rows": (dict(mask=Mask.documents([[5]] * 3)), r"3 rows of documents for a batch of 2"),
    "no documents": (dict(mask=Mask.first(1, per_document=True)), r"exactly one documents\(...\), .*holds 0"),
    "scale": (dict(scale=float("nan")), r"scale=nan: expected a finite number"),
    "softcap": (dict(softcap=0.0), r"softcap=0.0: expected a number > 0, or None"),
    "softcap inf": (dict(softcap=float("inf")), r"softcap=inf: expected a finite number"),
    "sinks": (
        dict(sink_logits=torch.zeros(3)),
        r"sink_logits: expected .* shape \[4\]; got torch.float32 \[3\]",
    ),
    "sinks dtype": (
        dict(sink_logits=torch.zeros(4, dtype=torch.int64)),
        r"sink_logits: .*got torch.int64 \[4\]",
    ),
    "sinks device": (dict(sink_logits=torch.zeros(4, device="meta")), r"sink_logits: expected it on cpu"),
    "slopes": (dict(alibi_slopes=torch.zeros(1)), r"alibi_slopes: expected .* \[4\] or \[2, 4\]; got"),
    "slopes number": (dict(alibi_slopes=0.5), r"alibi_slopes: expected .*; got float"),
    "learned slopes": (
        dict(alibi_slopes=torch.zeros(4, requires_grad=True)),
        r"pass alibi_slopes.detach\(\)",
    ),
    "dropout": (dict(dropout=1.0), r"dropout=1.0: expected a probability, 0 <= dropout < 1"),
    "dropout nan": (dict(dropout=float("nan")), r"dropout=nan: expected a finite number"),
    "dropout none": (dict(dropout=None), r"dropout=None: expected a finite number"),
    "scale bool": (dict(scale=True), r"scale=True: expected a finite number"),
    "dropout bool": (dict(dropout=False), r"dropout=False: expected a finite number"),
    "scale text": (dict(scale="1"), r"scale='1': expected a finite number"),
    "seed float": (dict(seed=1.7), r"seed=1.7: expected an int, or an int64 tensor"),
    "seed bool": (dict(seed=True), r"seed=True: expected an int"),
    "seed meta": (dict(seed=torch.zeros((), dtype=torch.int64, device="meta")), r"seed: its tensor is on the meta"),
    "mask meta": (
        dict(mask=Mask.documents(torch.zeros(2, dtype=torch.int64, device="meta"))),
        r"mask: its tensor is on the meta device",
    ),
    "q_offset float": (dict(q_offset=1.5), r"q_offset=1.5: expected an integer"),
    "q_offset huge": (dict(q_offset=2**31), r"q_offset=2147483648: expected a number >= 0 and below"),
    "batch_offset": (dict(batch_offset=None), r"batch_offset=None: expected an integer"),
    "deterministic": (dict(deterministic="no"), r"deterministic='no': expected True or False"),
    "no heads": (dict(q=X[:, :, :0]), r"4 heads in k do not divide 0 heads in q"),
    "lengths bf16": (
        dict(mask=Mask.documents(torch.ones(5).bfloat16())),
        r"lengths must be integers; got torch.bfloat16",
    ),
    "cumulative": (dict(mask=Mask.from_cu_seqlens([0, 3])), r"from_cu_seqlens\(cu_seqlens\): 3 tokens in the"),
    "seed": (dict(dropout=0.5, seed=-1), r"seed=-1: expected 0 <= seed < 2\*\*63"),
    "seed tensor": (dict(dropout=0.5, seed=torch.zeros(2)), r"seed: expected an int, or an int64 tensor"),
    "q_offset": (dict(q_offset=-1), r"q_offset=-1: expected a number >= 0"),
    "head_offset": (dict(head_offset=-2), r"head_offset=-2: expected a number >= 0"),
    "kernel": (
        dict(kernel="fast"),
        r"kernel='fast': expected one of auto, vendor, .*triton, tiled, reference",
    ),
    "unsupported feature": (
        dict(kernel="vendor", softcap=1.0),
        r'kernel="vendor" does not support softcap; supported here: (triton, )?tiled',
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument_and_the_expected_value(name):
    arguments, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        flash_attention(**({"q": X, "k": X, "v": X} | arguments))


def test_meta_tensors_give_meta_results():
    q, k, v = (torch.empty(1, 4096, 2, 8, device="meta", requires_grad=True) for _ in range(3))
    with record_kernels() as ran:
        out = flash_attention(q, k, v, mask=CAUSAL, dropout=0.1, seed=3)
        out.sum().backward()
    assert out.shape == q.shape
    assert q.grad is not None
    assert not ran


def test_batched_gradients_are_refused():
    q, k, v = qkv(1, 7, 2, 8)
    out = flash_attention(q, k, v, mask=CAUSAL & Mask.documents([3, 4]))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)


def test_positions_beyond_the_supported_range_are_refused():
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="positions up to"):
        flash_attention(x, x, x, mask=CAUSAL, q_offset=2**30 - 5)


def test_equal_values_of_another_type_are_refused_after_a_valid_call():
    x = torch.zeros(1, 4, 1, 8)
    flash_attention(x, x, x, mask=CAUSAL, q_offset=1)
    with pytest.raises(ValueError, match="q_offset=True: expected an integer"):
        flash_attention(x, x, x, mask=CAUSAL, q_offset=True)
