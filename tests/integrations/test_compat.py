"""The drop-in names, over ranks, against the oracle on one: outputs, LSE and gradients of every form."""

import inspect
from itertools import pairwise

import pytest
import torch

from meshflash import Layout, Mask
from meshflash.check.oracle import Case, check, gradients, upstream
from meshflash.integrations.compat import ring_flash_attn, ringx
from meshflash.integrations.compat.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens

#: Arguments after q, k and v, as FlashAttention has them.
ORDER = [
    "dropout_p", "softmax_scale", "causal", "window_size",
    "alibi_slopes", "deterministic", "return_attn_probs", "group",
]  # fmt: skip
DENSE = {
    "ring_flash_attn": "contiguous",
    "zigzag_ring_flash_attn": "zigzag",
    "stripe_flash_attn": "striped",
    "ringX1_attn": "contiguous",
    "ringX1o_attn": "contiguous",
    "ringX2_attn": "contiguous",
    "ringX2o_attn": "contiguous",
    "ringX3_attn": "zigzag",
    "ringX3b_attn": "zigzag",
    "ringX4_attn": "zigzag",
    "ringX4o_attn": "zigzag",
}
#: Of packed documents, what a rank holds.
HELD = {
    "ring_flash_attn": ring_flash_attn._contiguous,
    "zigzag_ring_flash_attn": ring_flash_attn._zigzag,
    "stripe_flash_attn": ring_flash_attn._striped,
}
TOKENS, DOCUMENTS = 24, [8, 4, 12]


def find(name):
    return getattr(ringx if name.startswith("ringX") else ring_flash_attn, name)


def packed(q, k, v, form):
    if form == "kvpacked_":
        return q, torch.stack([k, v], -3)
    return (torch.stack([q, k, v], -3),) if form == "qkvpacked_" else (q, k, v)


def run(rank, world, group, name, form, layout, case, window, cuts, arguments):
    """One rank's output, LSE and gradients, by position."""
    whole = case.inputs(torch.float32)
    rows = torch.from_numpy(layout.positions(rank))
    local = {key: x.detach()[:, rows] for key, x in whole.items()}
    if cuts is not None:
        local = {key: x.squeeze(0) for key, x in local.items()}
    local = {key: x.clone().requires_grad_() for key, x in local.items()}
    function = find(f"{name}_{form}func")
    if name.startswith("llama3"):
        made = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cuts), True, rank, world)
        more = [*made[:4], 1, made[4]]
    else:
        more = [] if cuts is None else [torch.tensor(cuts), max(b - a for a, b in pairwise(cuts))]
    options = dict(causal=True, window_size=window, return_attn_probs=True, group=group, **arguments)
    out, lse, none = function(*packed(local["q"], local["k"], local["v"], form), *more, **options)
    assert none is None
    shape = (case.batch, case.tokens, case.heads, case.dim)
    dout, _ = upstream(torch.empty(shape), torch.empty(case.batch, case.heads, case.tokens))
    grads = torch.autograd.grad(out, list(local.values()), dout[:, rows].view(out.shape))
    found = [out, lse, *grads] if cuts is None else [x[None] for x in (out, lse, *grads)]
    return [x.detach() for x in found]


def joined(parts, layout):
    order = torch.argsort(torch.cat([torch.from_numpy(layout.positions(rank)) for rank in range(len(parts))]))
    names = ("out", "lse", "dq", "dk", "dv")
    axes = {name: 2 if name == "lse" else 1 for name in names}
    return {
        name: torch.cat([part[n] for part in parts], axes[name]).index_select(axes[name], order)
        for n, name in enumerate(names)
    }


@pytest.mark.parametrize("name", DENSE)
def test_dense(pool, name):
    layout = getattr(Layout, DENSE[name])(TOKENS, 2)
    forms = ("", "kvpacked_", "qkvpacked_") if not name.startswith("ringX") else ("",)
    for form in forms:
        for window in ((-1, -1), (5, 0)):
            mask = Mask.causal() if window[0] < 0 else Mask.causal() & Mask.window(5, 0)
            case = Case(mask, tokens=TOKENS, heads=2, kv_heads=2 if form == "qkvpacked_" else 1)
            parts = pool.run(2, run, name, form, layout, case, window, None, {})
            check(joined(parts, layout), case, case.inputs(torch.float32), 16)


@pytest.mark.parametrize("form", ["", "kvpacked_", "qkvpacked_"])
@pytest.mark.parametrize(
    "name", ["ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn", "llama3_flash_attn"]
)
def test_packed_documents(pool, name, form):
    world, held = (
        2,
        getattr(ring_flash_attn, {"r": "_contiguous", "z": "_zigzag", "s": "_striped"}.get(name[0], "_zigzag")),
    )
    cuts = [0, *torch.tensor(DOCUMENTS).cumsum(0).tolist()]
    if name.startswith("llama3"):
        layout, given = Layout.contiguous(TOKENS, world), cuts
    else:
        given = [cut // world for cut in cuts]
        held = HELD[name]
        ranges = [[r for a, b in pairwise(given) for r in held(a * world, b - a, rank, world)] for rank in range(world)]
        layout = Layout(tuple(map(tuple, ranges)))
    case = Case(Mask.causal() & Mask.documents(DOCUMENTS), batch=1, tokens=TOKENS, heads=2)
    parts = pool.run(world, run, f"{name}_varlen", form, layout, case, (-1, -1), given, {})
    check(joined(parts, layout), case, case.inputs(torch.float32), 16)


@pytest.mark.parametrize("name", [*DENSE, "ring_flash_attn_varlen", "llama3_flash_attn_varlen"])
def test_arguments_have_the_names_and_the_order_of_the_peers(name):
    function = find(f"{name}_func")
    names = list(inspect.signature(function).parameters)
    assert names[:3] == ["q", "k", "v"]
    assert names[-len(ORDER) :] == ORDER
    assert function.__name__ == f"{name}_func"
    between = names[3 : -len(ORDER)]
    expected = {"ring_flash_attn_varlen": ["cu_seqlens", "max_seqlen"]}
    expected["llama3_flash_attn_varlen"] = [
        "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice",
    ]  # fmt: skip
    assert between == expected.get(name, [])


def test_without_ranks_it_is_attention_on_one_device():
    case = Case(Mask.causal(), tokens=11)
    leaves = case.inputs(torch.float32)
    made = ringx.ringX4_attn_func(*leaves.values(), causal=True, return_attn_probs=True)
    check(gradients(made[:2], leaves, case), case, leaves)
    out = ringx.ringX4_attn_func(*leaves.values(), 0.0, None, True)
    assert torch.equal(out, made[0])


def test_alibi_and_scale_work():
    case = Case(Mask.full(), tokens=11, scale=0.3, alibi=True)
    leaves = case.inputs(torch.float32)
    made = ring_flash_attn.stripe_flash_attn_func(
        *leaves.values(), softmax_scale=0.3, alibi_slopes=case.slopes(), deterministic=True, return_attn_probs=True
    )
    check(gradients(made[:2], leaves, case), case, leaves)


def test_what_cannot_be_right_is_refused():
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="ranks would drop other pairs each"):
        ring_flash_attn.ring_flash_attn_func(q, q, q, 0.1)
    x, cuts = torch.randn(3, 1, 8), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="not two pieces of the same length"):
        ring_flash_attn.zigzag_ring_flash_attn_varlen_func(x, x, x, cuts, 3, causal=True)
    with pytest.raises(ValueError, match="the very tensor"):
        ring_flash_attn.llama3_flash_attn_varlen_func(x, x, x, cuts, cuts, 3, 3, 1, slice(0, 3), causal=True)
    with pytest.raises(ValueError, match="takes any length"):
        llama3_flash_attn_prepare_cu_seqlens(cuts, True, 0, 2)
    for function in (ring_flash_attn.substitute_hf_flash_attn, ring_flash_attn.update_ring_flash_attn_params):
        with pytest.raises(NotImplementedError, match="Transformers"):
            function()


@pytest.mark.parametrize("causal", [True, False])
def test_prepared_cuts_cover_what_a_rank_sees(causal):
    cuts = torch.tensor([0, 2, 9, 10, 24])
    for rank in range(4):
        q, k, longest_q, longest_k, keys = llama3_flash_attn_prepare_cu_seqlens(cuts, causal, rank, 4)
        assert q[-1] == 6
        assert k[-1] == keys.stop - keys.start
        assert keys.start <= rank * 6
        assert keys.stop == (rank * 6 + 6 if causal else cuts[cuts >= rank * 6 + 6][0])
        assert (longest_q, longest_k) == (int(q.diff().max()), int(k.diff().max()))
