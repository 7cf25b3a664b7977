"""The kernels in Gluon, against the oracle on a Hopper GPU: run with `-m gpu`."""

from functools import partial

import pytest
import torch
from torch import Tensor

from meshflash import Layout, Mask, flash_attention
from meshflash.check.oracle import Case, check, gradients, replace
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Features, Grads, Inputs, Rows
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.merge import merge
from meshflash.kernels.tiled import Tiled
from meshflash.kernels.triton.block_tables import make_run_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not hopper_launch.has_gluon(torch.device("cuda")), reason="needs a Hopper GPU"
    ),
]

CAUSAL = Mask.causal()
DIMS = (64, 128)
#: Of 700 tokens: a short document first, and some that lie in one block with others.
LENGTHS = [5, 63, 1, 64, 200, 128, 239]
#: Whole blocks, blocks that begin earlier, runs that begin anywhere, less work than processors and more.
CASES = {
    "causal": Case(CAUSAL, batch=2, tokens=1024, heads=4),
    "full": Case(batch=2, tokens=1024, heads=2),
    "groups": Case(CAUSAL, batch=2, tokens=1024, heads=8, kv_heads=2),
    "one block": Case(batch=3, tokens=128, heads=2),
    "a block and a half": Case(CAUSAL, batch=2, tokens=192, heads=2),
    "causal, 700": Case(CAUSAL, batch=1, tokens=700, heads=3),
    "full, 700": Case(batch=1, tokens=700, heads=3),
    "causal, 2047": Case(CAUSAL, batch=1, tokens=2047, heads=5),
    "full, 2045": Case(batch=1, tokens=2045, heads=2),
    "window": Case(CAUSAL & Mask.window(200, 0), batch=1, tokens=1024, heads=2),
    "both sides": Case(Mask.window(101, 60), batch=1, tokens=901, heads=2),
    "window and first": Case(CAUSAL & (Mask.window(200, 0) | Mask.first(130)), batch=1, tokens=1024, heads=2),
    "documents": Case(CAUSAL & Mask.documents([400, 1, 0, 399, 224]), batch=1, tokens=1024, heads=2),
    "short documents": Case(CAUSAL & Mask.documents(LENGTHS), batch=2, tokens=700, heads=2),
    "short and whole documents": Case(Mask.documents(LENGTHS), batch=1, tokens=700, heads=3),
    "short documents, window": Case(CAUSAL & Mask.window(40, 0) & Mask.documents(LENGTHS), tokens=700, heads=2),
    "short documents, both sides": Case(Mask.window(30, 50) & Mask.documents(LENGTHS), tokens=700, heads=4, kv_heads=2),
    "short documents, first": Case(
        CAUSAL & (Mask.window(70, 0) | Mask.first(130)) & Mask.documents(LENGTHS), tokens=700, heads=4, kv_heads=1
    ),
    "short documents by row": Case(
        CAUSAL & Mask.documents([[5, 395, 300], [700], [130, 1, 569]]), batch=3, tokens=700, heads=4, kv_heads=2
    ),
    "mostly short documents": Case(CAUSAL & Mask.documents([100] * 4 + [300]), batch=2, tokens=700, heads=2),
    "padding": Case(CAUSAL & Mask.documents([400, 237], pad=True), batch=2, tokens=700, heads=2),
    "padding, whole blocks": Case(CAUSAL & Mask.documents([397, 243], pad=True), batch=2, tokens=700, heads=2),
    "whole documents": Case(Mask.documents([256, 512, 256]), batch=2, tokens=1024, heads=2),
    "more queries": Case(CAUSAL, batch=1, tokens=700, k_tokens=300, heads=2),
    "more keys": Case(CAUSAL, batch=1, tokens=301, k_tokens=701, q_offset=400, heads=2),
    "sinks": Case(CAUSAL, batch=1, tokens=640, heads=2, sinks=True, lse_gradient=True),
    "more than processors": Case(CAUSAL, batch=1, tokens=1536, heads=24, kv_heads=8),
    "groups, several runs": Case(CAUSAL & (Mask.window(200, 0) | Mask.first(130)), tokens=1024, heads=4, kv_heads=2),
    "groups of three, 700": Case(CAUSAL, batch=1, tokens=700, heads=6, kv_heads=2),
    "groups of four, several runs": Case(
        CAUSAL & (Mask.window(200, 0) | Mask.first(130)), batch=1, tokens=901, heads=4, kv_heads=1
    ),
    "documents by row": Case(CAUSAL & Mask.documents([[400, 624], [1000, 24]]), tokens=1024, heads=4, kv_heads=2),
}


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """How often each kernel in Gluon was started."""
    count = {"forward": 0, "backward": 0, "backward_dq": 0}

    def counting(name, function):
        def call(*arguments):
            count[name] += 1
            return function(*arguments)

        return call

    for name in count:
        monkeypatch.setattr(hopper_launch, name, counting(name, getattr(hopper_launch, name)))
    return count


@pytest.fixture(params=["in rows", "in tiles"])
def added(request, monkeypatch):
    """How sums that are given are added to, however many keys there are."""
    least = 0 if request.param == "in tiles" else 1 << 30
    configs = {dim: replace(config, min_keys_for_tiled_dq=least) for dim, config in hopper_launch.BACKWARD.items()}
    monkeypatch.setattr(hopper_launch, "BACKWARD", configs)


def tensors(batch, q_tokens, k_tokens, heads, kv_heads, dim):
    """(q, k, v, dout)."""
    shapes = ((q_tokens, heads), (k_tokens, kv_heads), (k_tokens, kv_heads), (q_tokens, heads))
    return [torch.randn(batch, *shape, dim, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def exact(x: Inputs, dout: Tensor) -> tuple[Rows, Grads]:
    """What a backward knows of its rows, and the gradients, by a plain kernel in float64."""
    doubles = replace(x, q_BTHD=x.q_BTHD.double(), k_BSKD=x.k_BSKD.double(), v_BSKE=x.v_BSKE.double())
    out, lse = Tiled().forward(doubles)
    delta = (out * dout.double()).sum(-1).transpose(1, 2).contiguous()
    grads = Tiled().backward(doubles, Rows(out, dout.double(), lse, delta))
    return Rows(out.to(dout.dtype), dout, lse.float(), delta.float()), grads


def close(got: Tensor, want: Tensor) -> None:
    """Every 64 rows by themselves, so that a block that is missing or doubled is not lost among others."""
    for a, b in zip(got.double().split(64, 1), want.split(64, 1), strict=True):
        assert (a - b).norm() <= 0.02 * b.norm() + 1e-3


def added_to_ones(x: Inputs, dout: Tensor, kernel: Hopper, like=torch.ones_like) -> None:
    """A step of a ring: its gradients, added to sums that are there."""
    rows, want = exact(x, dout)
    dq, dk, dv = (like(y, dtype=torch.float32) for y in (x.q_BTHD, x.k_BSKD, x.v_BSKE))
    kernel.backward(x, rows, Grads(dq, dk, dv, add_dq=True, add_dkv=True))
    for y, z in zip((dq, dk, dv), (want.dq_BTHD, want.dk_BSKD, want.dv_BSKE), strict=True):
        close(y - 1, z)


def of_dim(case: Case, dim: int) -> Case:
    return replace(case, dim=dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_match_the_oracle(name, dim, dtype, ran):
    case = of_dim(CASES[name], dim)
    for seed in range(2):
        leaves = case.inputs(dtype, "cuda", seed)
        check(gradients(case.run(leaves, "hopper"), leaves, case), case, leaves)
    assert ran == {"forward": 2, "backward": 2, "backward_dq": 0}


@pytest.fixture(params=[0, 1 << 30], ids=["spread", "together"])
def groups(request, monkeypatch):
    """Whether heads of a group have programs of their own, however few blocks there are."""
    monkeypatch.setattr(hopper_launch, "MIN_QUERIES_TO_SPREAD", request.param)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kv_heads])
def test_gqa_matches_the_oracle(name, dim, dtype, ran):
    test_gradients_match_the_oracle(name, dim, dtype, ran)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", CASES)
def test_deterministic_backward_repeats_bit_for_bit(name, dim, ran):
    case = of_dim(CASES[name], dim)
    leaves = case.inputs(torch.bfloat16, "cuda")
    tensors = [leaves[key] for key in "qkv"]
    call = partial(flash_attention, *tensors, mask=case.mask, q_offset=case.q_offset, kernel="hopper")
    dout = torch.randn_like(tensors[0])
    runs = []
    for _ in range(3):
        out = call(deterministic=True)
        runs.append([out, *torch.autograd.grad(out, tensors, dout)])
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    assert ran == {"forward": 3, "backward": 3, "backward_dq": 3}
    fast = call()
    for a, b in zip(runs[0][1:], torch.autograd.grad(fast, tensors, dout), strict=True):
        assert (a.double() - b.double()).norm() <= 0.01 * b.double().norm()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("softcap", [0.1, 3.0, 50.0, 1e3])
@pytest.mark.parametrize("name", ["groups of three, 700", "full", "short documents", "padding", "sinks"])
def test_softcap(name, softcap, dtype, dim, ran):
    """From a cap that most scores run into to one that is far away; at dim 64 "auto" takes the portable backward."""
    case = replace(CASES[name], dim=dim, softcap=softcap)
    leaves = case.inputs(dtype, "cuda")
    check(gradients(case.run(leaves, "hopper" if dim == 128 else "auto"), leaves, case), case, leaves)
    assert ran == {"forward": 1, "backward": int(dim == 128), "backward_dq": 0}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softcap", [hopper_launch.MIN_SOFTCAP, 3.0])
def test_softcap_in_a_step_of_a_ring(softcap, deterministic, ran):
    q, k, v, dout = tensors(1, 700, 700, 4, 2, 128)
    work = worklist(CAUSAL & Mask.window(300, 0), (range(700),), (range(700),))
    added_to_ones(Inputs(q, k, v, work, Features(128**-0.5, softcap)), dout, Hopper(deterministic))
    assert ran == {"forward": 0, "backward": 1, "backward_dq": deterministic}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", [CAUSAL, Mask.full(), CAUSAL & Mask.documents([1500, 36, 2560])], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_deferred_dq_loses_no_block(kv_heads, mask, dim, ran):
    """A group may be a block ahead of the other: gradients again and again, beside those of a backward without dQ."""
    case = Case(mask, batch=2, tokens=4096, heads=4, kv_heads=kv_heads, dim=dim)
    leaves = case.inputs(torch.bfloat16, "cuda")
    tensors = [leaves[key] for key in "qkv"]
    call = partial(flash_attention, *tensors, mask=mask, kernel="hopper")
    dout = torch.randn_like(tensors[0])
    want = torch.autograd.grad(call(deterministic=True), tensors, dout)
    out = call()
    for _ in range(40):
        for a, b in zip(torch.autograd.grad(out, tensors, dout, retain_graph=True), want, strict=True):
            error, size = (x.float().unflatten(1, (-1, 64)).norm(dim=(2, 4)) for x in (a - b, b))  # of every 64 rows
            assert (error <= 0.02 * size).all()
    assert ran["backward"] == 41


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_two_ring_steps_match_one_call(dim, deterministic, ran):
    """Keys in two halves: sums are carried in place, gradients added."""
    tokens, heads = 1024, 2
    q, k, v, dout = (torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    features, kernel = Features(scale=dim**-0.5), Hopper(deterministic)
    halves = range(tokens // 2), range(tokens // 2, tokens)
    parts = []
    for half in halves:
        work = worklist(CAUSAL, (range(tokens),), (half,))
        parts.append(Inputs(q, k[:, half.start : half.stop], v[:, half.start : half.stop], work, features))
    sums = q.new_empty(q.shape, dtype=torch.float32), q.new_empty(1, heads, tokens, dtype=torch.float32)
    kernel.forward(parts[0], sums)
    kernel.forward(parts[1], sums, carry=sums)
    whole = Inputs(q, k, v, worklist(CAUSAL, (range(tokens),), (range(tokens),)), features)
    out, lse = kernel.forward(whole, (torch.empty_like(sums[0]), torch.empty_like(sums[1])))
    torch.testing.assert_close(sums[0], out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(sums[1], lse, atol=1e-4, rtol=1e-5)
    delta = (out * dout.float()).sum(-1).transpose(1, 2).contiguous()
    rows = Rows(out, dout, lse, delta)
    want = kernel.backward(whole, rows, Grads(torch.empty_like(out), torch.empty_like(out), torch.empty_like(out)))
    dq = torch.ones_like(out)
    for half, part in zip(halves, parts, strict=True):
        dk, dv = (torch.ones_like(out[:, half.start : half.stop]) for _ in range(2))
        kernel.backward(part, rows, Grads(dq, dk, dv, add_dq=True, add_dkv=True))
        for got, all_of_it in zip((dk, dv), (want.dk_BSKD, want.dv_BSKE), strict=True):
            torch.testing.assert_close(got - 1, all_of_it[:, half.start : half.stop], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(dq - 1, want.dq_BTHD, atol=2e-3, rtol=2e-3)
    assert ran == {"forward": 3, "backward": 3, "backward_dq": 3 * deterministic}


@pytest.mark.parametrize("dim", DIMS)
def test_sections_of_heads(dim, monkeypatch):
    """Several, of which the last has fewer heads than the others."""
    monkeypatch.setattr(hopper_launch, "L2_KV_BYTES", 2 * 4 * 2048 * dim)
    case = Case(CAUSAL, batch=1, tokens=2048, heads=15, kv_heads=5, dim=dim)
    leaves = case.inputs(torch.bfloat16, "cuda")
    check(gradients(case.run(leaves, "hopper"), leaves, case), case, leaves)


@pytest.mark.parametrize("dim", DIMS)
def test_cuda_graph_replays_match_eager_calls(dim, ran):
    # more pieces of work than processors, so that a counter deals them
    q, k, v = (torch.randn(2, 2044, 8, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def both():
        out = flash_attention(q, k, v, mask=CAUSAL, kernel="hopper", deterministic=True)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = both()
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
        for x in kept:
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(kept, both(), strict=True))
    assert ran["forward"]


def test_tile_counter_survives_back_to_back_calls_on_two_streams():
    """Counters of tiles are at 0 again when a kernel ends: many calls, behind each other and on two streams."""
    q, k, v = (torch.randn(1, 4096, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    want = flash_attention(q, k, v, mask=CAUSAL, kernel="hopper")
    streams = [torch.cuda.Stream() for _ in range(2)]
    got = []
    torch.cuda.synchronize()
    for n in range(40):
        with torch.cuda.stream(streams[n % 2]):
            got.append(flash_attention(q, k, v, mask=CAUSAL, kernel="hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(x, want) for x in got)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_gluon_and_portable_kernels_add_to_the_same_sums(dim, group, ran):
    """Where most documents are shorter than a block, these are left to the ordinary kernel."""
    work = worklist(CAUSAL & Mask.documents([256, *[64] * 10, 128]), (range(1024),), (range(1024),))
    config = hopper_launch.BACKWARD[dim]
    served, rest = make_run_tables(work, True, config.block_n, config.block_m, 64, 2, torch.device("cuda"), True, True)
    assert served.on_grid
    assert len(rest)
    q, k, v, dout = tensors(2, 1024, 1024, 4, 4 // group, dim)
    added_to_ones(Inputs(q, k, v, work, Features(dim**-0.5)), dout, Hopper())
    assert ran["backward"] == 1


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL & Mask.documents(LENGTHS),
        Mask.documents(LENGTHS),
        Mask.window(30, 50) & Mask.documents(LENGTHS),
        CAUSAL & Mask.documents([[5, 395, 300], [130, 1, 569]]),
        CAUSAL & Mask.documents([99, 601]),
    ],
)
@pytest.mark.parametrize("dim", DIMS)
def test_documents_of_any_length_are_served_on_a_grid(dim, mask, group, deterministic, ran):
    work = worklist(mask, (range(700),), (range(700),))
    config = hopper_launch.BACKWARD[dim]
    sizes = config.block_n, config.block_m, 64, 2
    served, rest = make_run_tables(work, True, *sizes, torch.device("cuda"), True, True)
    assert served.clipped
    assert served.on_grid
    assert not len(rest)
    q, k, v, dout = tensors(2, 700, 700, 4, 4 // group, dim)
    added_to_ones(Inputs(q, k, v, work, Features(dim**-0.5)), dout, Hopper(deterministic))
    assert ran == {"forward": 0, "backward": 1, "backward_dq": deterministic}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("lengths", "grid"),
    [([400, 237], False), ([397, 243], True), ([[5, 635], [400, 0]], False), ([[5, 635], [384, 0]], True)],
)
@pytest.mark.parametrize("dim", DIMS)
def test_nan_in_padding_does_not_reach_gradients(dim, lengths, grid, deterministic, ran):
    mask = CAUSAL & Mask.documents(lengths, pad=True)
    work = worklist(mask, (range(700),), (range(700),))
    config = hopper_launch.BACKWARD[dim]
    sizes = config.block_n, config.block_m, 64, 2
    served, _ = make_run_tables(work, True, *sizes, torch.device("cuda"), True, True)
    assert served.on_grid == grid
    q, k, v, dout = tensors(2, 700, 700, 2, 2, dim)
    rows, want = exact(Inputs(q, k, v, work, Features(dim**-0.5)), dout)
    for batch, documents in enumerate(lengths if isinstance(lengths[0], list) else [lengths] * 2):
        for x in (q, k, v, dout, rows.delta_BHT.transpose(1, 2)):
            x[batch, sum(documents) :] = torch.nan
    got = Hopper(deterministic).backward(Inputs(q, k, v, work, Features(dim**-0.5)), rows)
    for x, y in zip((got.dq_BTHD, got.dk_BSKD, got.dv_BSKE), (want.dq_BTHD, want.dk_BSKD, want.dv_BSKE), strict=True):
        close(x, y)
    assert ran == {"forward": 0, "backward": 1, "backward_dq": deterministic}


@pytest.mark.usefixtures("added", "groups")
@pytest.mark.parametrize("mask", [Mask.full(), CAUSAL, CAUSAL & (Mask.window(200, 0) | Mask.first(130))])
@pytest.mark.parametrize("dim", DIMS)
def test_sums_of_groups(dim, mask, ran):
    q, k, v, dout = tensors(1, 896, 896, 8, 2, dim)
    work = worklist(mask, (range(896),), (range(896),))
    added_to_ones(Inputs(q, k, v, work, Features(dim**-0.5)), dout, Hopper())
    assert ran["backward"] == 1


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", [Layout.zigzag, Layout.striped])
@pytest.mark.parametrize("dim", DIMS)
def test_steps_of_a_ring_by_chunks_and_stripes(dim, kind, deterministic, ran):
    layout = kind(2048, 2)
    kernel = Hopper(deterministic)
    for mine in range(2):
        for others in range(2):
            work = worklist(CAUSAL, tuple(layout.ranges[mine]), tuple(layout.ranges[others]))
            q, k, v, dout = tensors(1, 1024, 1024, 4, 1, dim)
            added_to_ones(Inputs(q, k, v, work, Features(dim**-0.5)), dout, kernel)
    assert ran == {"forward": 0, "backward": 4, "backward_dq": 4 * deterministic}


@pytest.mark.parametrize("dim", DIMS)
def test_carry_and_sinks_match_the_oracle(dim, ran):
    q, k, v, _ = tensors(2, 1024, 1024, 4, 2, dim)
    sinks = torch.randn(4, device="cuda")
    scale, kernel = dim**-0.5, Hopper()
    sums = torch.empty(q.shape, device="cuda"), torch.empty(2, 4, 1024, device="cuda")
    halves = range(512), range(512, 1024)
    for half, features in zip(halves, (Features(scale), Features(scale, sink_logits_H=sinks)), strict=True):
        part = slice(half.start, half.stop)
        x = Inputs(q, k[:, part], v[:, part], worklist(CAUSAL, (range(1024),), (half,)), features)
        kernel.forward(x, sums, carry=None if half.start == 0 else sums)
    work = worklist(CAUSAL, (range(1024),), (range(1024),))
    whole = Inputs(q.double(), k.double(), v.double(), work, Features(scale, sink_logits_H=sinks.double()))
    out, lse = Tiled().forward(whole)
    close(sums[0], out)
    torch.testing.assert_close(sums[1].double(), lse, atol=1e-4, rtol=1e-5)
    assert ran["forward"] == 2


@pytest.mark.parametrize("into", ["sums", "other sums", "results"])
@pytest.mark.parametrize(
    "mask",
    [CAUSAL, Mask.full(), Mask.window(300, 0), CAUSAL & (Mask.window(200, 0) | Mask.first(130))],
    ids=["causal", "full", "window", "window and first"],
)
@pytest.mark.parametrize("tokens", [1344, 1408, 1410])
@pytest.mark.parametrize("dim", DIMS)
def test_carry_through_many_tiles_of_a_persistent_cta(dim, tokens, mask, into, ran, monkeypatch):
    """By descriptors where all tiles are level and sums stay sums; some groups of the short tile have no rows."""
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 3)
    q, k, v, _ = tensors(2, tokens, tokens, 4, 2, dim)
    x = Inputs(q, k, v, worklist(mask, (range(tokens),), (range(tokens),)), Features(dim**-0.5))
    old = torch.randn(q.shape, device="cuda"), torch.randn(2, 4, tokens, device="cuda") + 3
    old[1][:, :, 5::7] = -torch.inf
    old[0][:, 5::7] = 0
    want = Tiled().forward(replace(x, q_BTHD=q.double(), k_BSKD=k.double(), v_BSKE=v.double()))
    merge(want, (old[0].double(), old[1].double()), want)
    for _ in range(3):
        sums = old[0].clone(), old[1].clone()
        like = q if into == "results" else sums[0]
        out = sums if into == "sums" else (torch.full_like(like, torch.nan), torch.full_like(sums[1], torch.nan))
        Hopper().forward(x, out, carry=sums)
        close(out[0], want[0])
        torch.testing.assert_close(out[1].double(), want[1], atol=1e-4, rtol=1e-5)
    assert ran["forward"] == 3


@pytest.mark.parametrize("name", ["sinks", "groups of three, 700"])
@pytest.mark.parametrize("dim", DIMS)
def test_deterministic_gradients_of_sinks(dim, name, ran):
    case = replace(CASES[name], dim=dim, sinks=True)
    leaves = case.inputs(torch.bfloat16, "cuda")
    q, k, v, sinks = (leaves[key] for key in ("q", "k", "v", "sink_logits"))
    outputs = flash_attention(
        q, k, v, sink_logits=sinks, mask=case.mask, kernel="hopper", deterministic=True, return_lse=True
    )
    check(gradients(outputs, leaves, case), case, leaves)
    assert ran == {"forward": 1, "backward": 1, "backward_dq": 1}


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("dim", DIMS)
def test_strides_of_size_one_dimensions_may_be_anything(dim, ran):
    def odd(x, **options):
        """Ones like it, or itself, where a batch row and a head have strides that no descriptor takes."""
        made = torch.ones_like(x, **options) if options else x
        return made.as_strided(made.shape, (7, dim, 3, 1))

    q, k, v, dout = (odd(x) for x in tensors(1, 640, 640, 1, 1, dim))
    x = Inputs(q, k, v, worklist(CAUSAL, (range(640),), (range(640),)), Features(dim**-0.5))
    added_to_ones(x, dout, Hopper(), odd)
    out = odd(q, dtype=torch.float32), torch.empty(1, 1, 640, device="cuda").as_strided((1, 1, 640), (5, 3, 1))
    Hopper().forward(x, out)
    doubles = Inputs(q.double(), k.double(), v.double(), x.work, x.features)
    close(out[0], Tiled().forward(doubles)[0])
    assert ran == {"forward": 1, "backward": 1, "backward_dq": 0}


@pytest.fixture
def parts(monkeypatch):
    """Into how many parts tiles of last rounds were split, which costs nothing."""
    from meshflash.kernels.hopper import split_kv

    found = []
    for name in ("SPLIT_COST", "COMBINE_COST", "BACKWARD_COST", "TRAFFIC_COST"):
        monkeypatch.setattr(split_kv, name, 0)
    plan = split_kv.split_tail_wave

    def planned(*arguments, **more):
        last = plan(*arguments, **more)
        found.append(last.num_splits if last else 1)
        return last

    monkeypatch.setattr(split_kv, "split_tail_wave", planned)
    return found


#: (dim, batch, heads, key heads, processors): some tiles of queries are left after full rounds.
ROUNDS = [(64, 1, 3, 3, 8), (64, 2, 4, 2, 9), (128, 1, 3, 3, 23), (128, 2, 4, 2, 23)]


@pytest.mark.parametrize(("dim", "batch", "heads", "kv_heads", "processors"), ROUNDS)
def test_split_kv_tail_wave_matches_the_oracle(dim, batch, heads, kv_heads, processors, parts, monkeypatch):
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: processors)
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, _ = tensors(batch, 1152, 1024, heads, kv_heads, dim)
        with torch.no_grad():
            out, lse = flash_attention(q, k, v, kernel="hopper", return_lse=True)
            want, want_lse = flash_attention(q.double(), k.double(), v.double(), kernel="tiled", return_lse=True)
        close(out, want)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
    assert parts == parts[:1] * 3
    assert parts[0] > 1


@pytest.mark.parametrize("queries", [1152, 1100])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("dim", "batch", "heads", "kv_heads", "processors"), ROUNDS)
def test_carry_reaches_a_split_tail_wave(
    dim, batch, heads, kv_heads, processors, wide, queries, ran, parts, monkeypatch
):
    """Into the very room of what is carried, or in half precision; first keys, and then all others."""
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: processors)
    full = Mask.full()
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, _ = tensors(batch, queries, 1324, heads, kv_heads, dim)
        first, others = slice(0, 300), slice(300, 1324)
        carry = (
            torch.full(q.shape, torch.nan, dtype=torch.float32, device="cuda"),
            torch.full((batch, heads, queries), torch.nan, device="cuda"),
        )
        work = worklist(full, (range(queries),), (range(300),))
        Hopper().forward(Inputs(q, k[:, first], v[:, first], work, Features(dim**-0.5)), carry)
        carry[0][:, 5], carry[1][:, :, 5] = 0, -torch.inf  # saw nothing so far
        into = carry if wide else (torch.full_like(q, torch.nan), torch.full_like(carry[1], torch.nan))
        work = worklist(full, (range(queries),), (range(300, 1324),))
        Hopper().forward(Inputs(q, k[:, others], v[:, others], work, Features(dim**-0.5)), into, carry)
        doubles = q.double(), k.double(), v.double()
        want, want_lse = flash_attention(*doubles, kernel="tiled", return_lse=True)
        blind, blind_lse = flash_attention(
            doubles[0][:, 5:6], doubles[1][:, others], doubles[2][:, others], kernel="tiled", return_lse=True
        )
        want[:, 5:6], want_lse[:, :, 5:6] = blind, blind_lse
        close(into[0], want)
        torch.testing.assert_close(into[1].double(), want_lse, atol=1e-3, rtol=1e-3)
    assert min(parts[1::2]) > 1
    assert ran["forward"] == 6


@pytest.mark.usefixtures("added", "groups")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("keys", [1024, 1150, 1190])
@pytest.mark.parametrize(("queries", "blind"), [(1024, 0), (1090, 0), (1027, 3)])
@pytest.mark.parametrize(
    ("dim", "batch", "heads", "kv_heads"), [(64, 1, 3, 3), (64, 2, 4, 2), (128, 1, 6, 2), (128, 2, 3, 3)]
)
def test_backward_tail_wave_split_by_queries_matches_the_oracle(
    dim, batch, heads, kv_heads, queries, blind, keys, add, parts, monkeypatch
):
    """Where the first queries see nothing, blocks begin anywhere, and lse and delta are there four times."""
    mask = Mask.documents([blind, queries - blind], k_lengths=[0, keys]) if blind else Mask.full()
    programs = -(-keys // 128) * batch * (kv_heads if hopper_launch.MIN_QUERIES_TO_SPREAD else heads)
    processors = programs // 2 - 1  # two rounds, and a few tiles
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: processors)
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, dout = tensors(batch, queries, keys, heads, kv_heads, dim)
        x = Inputs(q, k, v, worklist(mask, (range(queries),), (range(keys),)), Features(dim**-0.5))
        if add:
            added_to_ones(x, dout, Hopper())
        else:
            rows, want = exact(x, dout)
            dq, dk, dv = (torch.full_like(y, torch.nan) for y in (q, k, v))
            Hopper().backward(x, rows, Grads(dq, dk, dv))
            for y, z in zip((dq, dk, dv), (want.dq_BTHD, want.dk_BSKD, want.dv_BSKE), strict=True):
                close(y, z)
    assert parts
    assert min(parts) > 1


#: Calls whose groups of 64 rows see other blocks than their tile, fewer rows than 64, or nothing at all:
#: (mask, positions of queries, positions of keys).
SKIPPING = {
    **{
        f"causal, {tokens} from {begin}": (CAUSAL, range(begin, begin + tokens), range(begin + tokens))
        for tokens in (64, 65, 128, 129, 192, 193, 320, 4160)
        for begin in (0, 1, 65, 200)
        if begin + tokens >= 128
    },
    **{
        f"window {left}, {right} of {tokens}": (Mask.window(left, right), range(tokens), range(tokens))
        for width in (1, 64, 100, 128, 200)
        for left, right in ((width, 0), (0, width), (width, width))
        for tokens in (333, 901)
    },
    **{
        f"{rows} rows in a tile, {name}": (mask, range(128, 128 + rows), range(512))
        for rows in (1, 63, 64, 65, 127, 128, 129, 191)
        for name, mask in {"full": Mask.full(), "causal": CAUSAL, "window": Mask.window(100, 30)}.items()
    },
    **{
        f"keys from {begin}, {name}": (mask, range(576), range(begin, begin + 401))
        for begin in (64, 150, 191, 320)
        for name, mask in {"causal": CAUSAL, "window": Mask.window(90, 0)}.items()
    },
    "queries beyond a window": (Mask.window(64, 0), range(500, 1201), range(600)),
    "queries before and beyond a window": (Mask.window(20, 20), range(961), range(401, 570)),
}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", SKIPPING)
def test_warpgroups_that_skip_blocks_match_the_oracle(name, dim, ran):
    mask, queries, keys = SKIPPING[name]
    work = worklist(mask, (queries,), (keys,))
    config = hopper_launch.FORWARD[dim]
    served, _ = make_run_tables(work, False, config.block_m, config.block_n, 64, 1, torch.device("cuda"))
    assert served.single_run
    q, k, v, _ = tensors(1, len(queries), len(keys), 8, 8, dim)
    x = Inputs(q, k, v, work, Features(dim**-0.5))
    out, lse = (torch.full(shape, torch.nan, device="cuda") for shape in (q.shape, (1, 8, len(queries))))
    Hopper().forward(x, (out, lse))
    want, want_lse = Tiled().forward(replace(x, q_BTHD=q.double(), k_BSKD=k.double(), v_BSKE=v.double()))
    close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)
    nothing = (want_lse == -torch.inf).transpose(1, 2)
    assert not out[nothing].any()
    half = torch.full_like(q, torch.nan)  # which descriptors store, where tiles are level
    Hopper().forward(x, (half, lse))
    close(half, want)
    assert not half[nothing].any()
    assert ran["forward"] == 2
