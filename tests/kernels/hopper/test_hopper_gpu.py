"""The Hopper kernels against the oracle on a GPU: run with `-m gpu`."""

from functools import partial

import pytest
import torch

from kernels.hopper.gpu_oracle import (
    CAUSAL,
    DIMS,
    LENGTHS,
    assert_rows_close,
    check_adds_to_existing_gradients,
    float64_reference,
    needs_hopper,
    tensors,
)
from meshflash import Mask, flash_attention
from meshflash.check.oracle import Case, check, gradients, replace
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Features, Inputs
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.tiled import Tiled
from meshflash.kernels.triton.block_tables import make_run_tables

pytestmark = needs_hopper

#: Full blocks, last blocks that overlap the one before, runs that begin anywhere, fewer and more tiles than SMs.
CASES = {
    "causal": Case(CAUSAL, batch=2, tokens=1024, heads=4),
    "full": Case(batch=2, tokens=1024, heads=2),
    "gqa": Case(CAUSAL, batch=2, tokens=1024, heads=8, kv_heads=2),
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
    "short full documents": Case(Mask.documents(LENGTHS), batch=1, tokens=700, heads=3),
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
    "full documents": Case(Mask.documents([256, 512, 256]), batch=2, tokens=1024, heads=2),
    "more queries": Case(CAUSAL, batch=1, tokens=700, k_tokens=300, heads=2),
    "more keys": Case(CAUSAL, batch=1, tokens=301, k_tokens=701, q_offset=400, heads=2),
    "sinks": Case(CAUSAL, batch=1, tokens=640, heads=2, sinks=True, lse_gradient=True),
    "more tiles than SMs": Case(CAUSAL, batch=1, tokens=1536, heads=24, kv_heads=8),
    "gqa, several runs": Case(CAUSAL & (Mask.window(200, 0) | Mask.first(130)), tokens=1024, heads=4, kv_heads=2),
    "gqa ratio 3, 700": Case(CAUSAL, batch=1, tokens=700, heads=6, kv_heads=2),
    "gqa ratio 4, several runs": Case(
        CAUSAL & (Mask.window(200, 0) | Mask.first(130)), batch=1, tokens=901, heads=4, kv_heads=1
    ),
    "documents by row": Case(CAUSAL & Mask.documents([[400, 624], [1000, 24]]), tokens=1024, heads=4, kv_heads=2),
}


def with_dim(case: Case, dim: int) -> Case:
    return replace(case, dim=dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_match_the_oracle(name, dim, dtype, launch_counts):
    case = with_dim(CASES[name], dim)
    for seed in range(2):
        leaves = case.inputs(dtype, "cuda", seed)
        check(gradients(case.run(leaves, "hopper"), leaves, case), case, leaves)
    assert launch_counts == {"forward": 2, "backward": 2, "backward_dq": 0}


@pytest.mark.usefixtures("spread_q_heads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kv_heads])
def test_gqa_matches_the_oracle(name, dim, dtype, launch_counts):
    test_gradients_match_the_oracle(name, dim, dtype, launch_counts)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", CASES)
def test_deterministic_backward_repeats_bit_for_bit(name, dim, launch_counts):
    case = with_dim(CASES[name], dim)
    leaves = case.inputs(torch.bfloat16, "cuda")
    tensors = [leaves[key] for key in "qkv"]
    call = partial(flash_attention, *tensors, mask=case.mask, q_offset=case.q_offset, kernel="hopper")
    dout = torch.randn_like(tensors[0])
    runs = []
    for _ in range(3):
        out = call(deterministic=True)
        runs.append([out, *torch.autograd.grad(out, tensors, dout)])
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    assert launch_counts == {"forward": 3, "backward": 3, "backward_dq": 3}
    fast = call()
    for a, b in zip(runs[0][1:], torch.autograd.grad(fast, tensors, dout), strict=True):
        assert (a.double() - b.double()).norm() <= 0.01 * b.double().norm()


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("softcap", [0.1, 3.0, 50.0, 1e3])
@pytest.mark.parametrize("name", ["gqa ratio 3, 700", "full", "short documents", "padding", "sinks"])
def test_softcap_matches_the_oracle(name, softcap, dtype, dim, launch_counts):
    """Softcaps range from one that limits most scores to one far above; at dim 64 "auto" uses the portable backward."""
    case = replace(CASES[name], dim=dim, softcap=softcap)
    leaves = case.inputs(dtype, "cuda")
    check(gradients(case.run(leaves, "hopper" if dim == 128 else "auto"), leaves, case), case, leaves)
    assert launch_counts == {"forward": 1, "backward": int(dim == 128), "backward_dq": 0}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", [CAUSAL, Mask.full(), CAUSAL & Mask.documents([1500, 36, 2560])], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_repeated_backwards_lose_no_block_of_deferred_dq(kv_heads, mask, dim, launch_counts):
    """A warpgroup may run a block ahead of the other; the deterministic backward computes dQ in a second kernel."""
    case = Case(mask, batch=2, tokens=4096, heads=4, kv_heads=kv_heads, dim=dim)
    leaves = case.inputs(torch.bfloat16, "cuda")
    tensors = [leaves[key] for key in "qkv"]
    call = partial(flash_attention, *tensors, mask=mask, kernel="hopper")
    dout = torch.randn_like(tensors[0])
    want = torch.autograd.grad(call(deterministic=True), tensors, dout)
    out = call()
    for _ in range(40):
        for a, b in zip(torch.autograd.grad(out, tensors, dout, retain_graph=True), want, strict=True):
            error, size = (x.float().unflatten(1, (-1, 64)).norm(dim=(2, 4)) for x in (a - b, b))  # per 64 rows
            assert (error <= 0.02 * size).all()
    assert launch_counts["backward"] == 41


@pytest.mark.parametrize("dim", DIMS)
def test_l2_sections_of_unequal_numbers_of_heads_match_the_oracle(dim, monkeypatch):
    """Heads are processed in sections whose K and V fit in L2; the last section has fewer heads."""
    monkeypatch.setattr(hopper_launch, "L2_KV_BYTES", 2 * 4 * 2048 * dim)
    case = Case(CAUSAL, batch=1, tokens=2048, heads=15, kv_heads=5, dim=dim)
    leaves = case.inputs(torch.bfloat16, "cuda")
    check(gradients(case.run(leaves, "hopper"), leaves, case), case, leaves)


@pytest.mark.parametrize("dim", DIMS)
def test_cuda_graph_replays_match_eager_calls(dim, launch_counts):
    # more tiles than SMs, so that CTAs take tiles from the global counter
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
    assert launch_counts["forward"]


def test_tile_counter_survives_back_to_back_calls_on_two_streams():
    """A kernel resets its tile counter to 0 before it ends."""
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


@pytest.mark.usefixtures("dq_accumulation")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("gqa_ratio", [1, 4])
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
def test_documents_of_any_length_are_served_on_a_grid(dim, mask, gqa_ratio, deterministic, launch_counts):
    work = worklist(mask, (range(700),), (range(700),))
    config = hopper_launch.BACKWARD[dim]
    sizes = config.block_n, config.block_m, 64, 2
    served, portable = make_run_tables(work, True, *sizes, torch.device("cuda"), True, True)
    assert served.clipped
    assert served.on_grid
    assert not len(portable)
    q, k, v, dout = tensors(2, 700, 700, 4, 4 // gqa_ratio, dim)
    check_adds_to_existing_gradients(Inputs(q, k, v, work, Features(dim**-0.5)), dout, Hopper(deterministic))
    assert launch_counts == {"forward": 0, "backward": 1, "backward_dq": deterministic}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("lengths", "grid"),
    [([400, 237], False), ([397, 243], True), ([[5, 635], [400, 0]], False), ([[5, 635], [384, 0]], True)],
)
@pytest.mark.parametrize("dim", DIMS)
def test_nan_in_padding_does_not_reach_gradients(dim, lengths, grid, deterministic, launch_counts):
    mask = CAUSAL & Mask.documents(lengths, pad=True)
    work = worklist(mask, (range(700),), (range(700),))
    config = hopper_launch.BACKWARD[dim]
    sizes = config.block_n, config.block_m, 64, 2
    served, _ = make_run_tables(work, True, *sizes, torch.device("cuda"), True, True)
    assert served.on_grid == grid
    q, k, v, dout = tensors(2, 700, 700, 2, 2, dim)
    rows, want = float64_reference(Inputs(q, k, v, work, Features(dim**-0.5)), dout)
    for batch, documents in enumerate(lengths if isinstance(lengths[0], list) else [lengths] * 2):
        for x in (q, k, v, dout, rows.delta_BHT.transpose(1, 2)):
            x[batch, sum(documents) :] = torch.nan
    got = Hopper(deterministic).backward(Inputs(q, k, v, work, Features(dim**-0.5)), rows)
    for x, y in zip((got.dq_BTHD, got.dk_BSKD, got.dv_BSKE), (want.dq_BTHD, want.dk_BSKD, want.dv_BSKE), strict=True):
        assert_rows_close(x, y)
    assert launch_counts == {"forward": 0, "backward": 1, "backward_dq": deterministic}


@pytest.mark.parametrize("name", ["sinks", "gqa ratio 3, 700"])
@pytest.mark.parametrize("dim", DIMS)
def test_deterministic_gradients_of_sinks_match_the_oracle(dim, name, launch_counts):
    case = replace(CASES[name], dim=dim, sinks=True)
    leaves = case.inputs(torch.bfloat16, "cuda")
    q, k, v, sinks = (leaves[key] for key in ("q", "k", "v", "sink_logits"))
    outputs = flash_attention(
        q, k, v, sink_logits=sinks, mask=case.mask, kernel="hopper", deterministic=True, return_lse=True
    )
    check(gradients(outputs, leaves, case), case, leaves)
    assert launch_counts == {"forward": 1, "backward": 1, "backward_dq": 1}


#: (mask, query positions, key positions) of calls with warpgroups that see fewer blocks than their tile, have fewer
#: than 64 rows, or see nothing at all.
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
def test_warpgroups_that_skip_blocks_match_the_oracle(name, dim, launch_counts):
    mask, queries, keys = SKIPPING[name]
    work = worklist(mask, (queries,), (keys,))
    config = hopper_launch.FORWARD[dim]
    served, _ = make_run_tables(work, False, config.block_m, config.block_n, 64, 1, torch.device("cuda"))
    assert served.single_run
    q, k, v, _ = tensors(1, len(queries), len(keys), 8, 8, dim)
    x = Inputs(q, k, v, work, Features(dim**-0.5))
    out, lse = (torch.full(shape, torch.nan, device="cuda") for shape in (q.shape, (1, 8, len(queries))))
    Hopper().forward(x, (out, lse))
    want, want_lse = Tiled().forward(x._replace(q_BTHD=q.double(), k_BSKD=k.double(), v_BSKE=v.double()))
    assert_rows_close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)
    sees_nothing = (want_lse == -torch.inf).transpose(1, 2)
    assert not out[sees_nothing].any()
    bfloat16_out = torch.full_like(q, torch.nan)  # stored by TMA where tiles are full
    Hopper().forward(x, (bfloat16_out, lse))
    assert_rows_close(bfloat16_out, want)
    assert not bfloat16_out[sees_nothing].any()
    assert launch_counts["forward"] == 2
