"""Drop-in replacements of other libraries over several ranks: outputs, LSE and gradients match the oracle."""

import inspect
from itertools import pairwise

import pytest
import torch

from meshflash import Layout, Mask
from meshflash.check.oracle import Case, check, gradients, replace, upstream
from meshflash.integrations.compat import ring_flash_attn, ringx, sp_aurora, yunchang
from meshflash.integrations.compat.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens
from meshflash.runtime.state import ProcessState

#: The arguments after q, k and v, in FlashAttention's order.
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
    "sp_aurora": "contiguous",
    "ulysses_flash_attn": "contiguous",
}
#: The functions that return the token ranges of a rank for a packed document.
RANGES_OF_RANK = {
    "ring_flash_attn": ring_flash_attn._contiguous,
    "zigzag_ring_flash_attn": ring_flash_attn._zigzag,
    "stripe_flash_attn": ring_flash_attn._striped,
}
TOKENS, DOCUMENTS = 24, [8, 4, 12]
#: yunchang's arguments after q, k and v.
MODULE_ORDER = [*ORDER[:4], "softcap", *ORDER[4:-1]]
#: (ranks, Ulysses degree, ring degree).
TABLES = [(2, 2, 1), (2, 1, 2), (3, 3, 1), (3, 1, 3), (4, 4, 1), (4, 2, 2), (4, 1, 4)]


def find_drop_in(name):
    """Return the drop-in function of this name."""
    modules = {"ringX": ringx, "sp_au": sp_aurora, "ulyss": sp_aurora}
    return getattr(modules.get(name[:5], ring_flash_attn), name)


def packed(q, k, v, form):
    """Return the inputs as the form packs them: separate, k and v stacked, or all stacked."""
    if form == "kvpacked_":
        return q, torch.stack([k, v], -3)
    return (torch.stack([q, k, v], -3),) if form == "qkvpacked_" else (q, k, v)


def run(rank, world, group, name, form, layout, case, window, cuts, arguments):
    """Return output, LSE and gradients of one rank."""
    whole = case.inputs(torch.float32)
    rows = torch.from_numpy(layout.positions(rank))
    local = {key: x.detach()[:, rows] for key, x in whole.items()}
    if cuts is not None:
        local = {key: x.squeeze(0) for key, x in local.items()}
    local = {key: x.clone().requires_grad_() for key, x in local.items()}
    function = find_drop_in(f"{name}_{form}func")
    if name.startswith("llama3"):
        made = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cuts), True, rank, world)
        more = [*made[:4], 1, made[4]]
    else:
        more = [] if cuts is None else [torch.tensor(cuts), max(b - a for a, b in pairwise(cuts))]
    options = dict(causal=True, window_size=window, return_attn_probs=True, group=group) | arguments
    out, lse, *none = function(*packed(local["q"], local["k"], local["v"], form), *more, **options)
    assert none == ([] if name.startswith("ulysses") else [None])
    shape = (case.batch, case.tokens, case.heads, case.dim)
    dout, _ = upstream(torch.empty(shape), torch.empty(case.batch, case.heads, case.tokens))
    grads = torch.autograd.grad(out, list(local.values()), dout[:, rows].view(out.shape))
    found = [out, lse, *grads] if cuts is None else [x[None] for x in (out, lse, *grads)]
    return [x.detach() for x in found]


def reassemble(parts, layout):
    """Reassemble the results of all ranks in the order of the sequence."""
    order = torch.argsort(torch.cat([torch.from_numpy(layout.positions(rank)) for rank in range(len(parts))]))
    names = ("out", "lse", "dq", "dk", "dv")
    axes = {name: 2 if name == "lse" else 1 for name in names}
    return {
        name: torch.cat([part[n] for part in parts], axes[name]).index_select(axes[name], order)
        for n, name in enumerate(names)
    }


@pytest.mark.parametrize("name", DENSE)
def test_dense_functions_match_reference(pool, name):
    layout = getattr(Layout, DENSE[name])(TOKENS, 2)
    forms = ("", "kvpacked_", "qkvpacked_") if not name.startswith("ringX") else ("",)
    for form in forms:
        for window in ((-1, -1), (5, 0)):
            mask = Mask.causal() if window[0] < 0 else Mask.causal() & Mask.window(5, 0)
            case = Case(mask, tokens=TOKENS, heads=2, kv_heads=2 if form == "qkvpacked_" else 1)
            parts = pool.run(2, run, name, form, layout, case, window, None, {})
            check(reassemble(parts, layout), case, case.inputs(torch.float32), 16)


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("name", ["sp_aurora", "ulysses_flash_attn"])
def test_sp_aurora_matches_reference_at_odd_lengths(pool, name, world):
    layout = Layout.contiguous(13 * world, world)
    for causal in (True, False):
        case = Case(Mask.causal() if causal else Mask.full(), tokens=13 * world, heads=4, kv_heads=2)
        parts = pool.run(world, run, name, "", layout, case, (-1, -1), None, {"causal": causal})
        check(reassemble(parts, layout), case, case.inputs(torch.float32), 16)


@pytest.mark.parametrize("form", ["", "kvpacked_", "qkvpacked_"])
@pytest.mark.parametrize(
    "name", ["ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn", "llama3_flash_attn"]
)
def test_varlen_functions_match_reference_on_packed_documents(pool, name, form):
    world, ranges_of_rank = (
        2,
        getattr(ring_flash_attn, {"r": "_contiguous", "z": "_zigzag", "s": "_striped"}.get(name[0], "_zigzag")),
    )
    cuts = [0, *torch.tensor(DOCUMENTS).cumsum(0).tolist()]
    if name.startswith("llama3"):
        layout, given = Layout.contiguous(TOKENS, world), cuts
    else:
        given = [cut // world for cut in cuts]
        ranges_of_rank = RANGES_OF_RANK[name]
        ranges = [
            [r for a, b in pairwise(given) for r in ranges_of_rank(a * world, b - a, rank, world)]
            for rank in range(world)
        ]
        layout = Layout(tuple(map(tuple, ranges)))
    case = Case(Mask.causal() & Mask.documents(DOCUMENTS), batch=1, tokens=TOKENS, heads=2)
    parts = pool.run(world, run, f"{name}_varlen", form, layout, case, (-1, -1), given, {})
    check(reassemble(parts, layout), case, case.inputs(torch.float32), 16)


@pytest.mark.parametrize("name", [*DENSE, "ring_flash_attn_varlen", "llama3_flash_attn_varlen"])
def test_functions_have_the_argument_names_and_order_of_the_originals(name):
    function = find_drop_in(f"{name}_func")
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


def test_sp_aurora_functions_have_the_signatures_of_ring_flash_attn():
    for form in ("", "kvpacked_", "qkvpacked_"):
        names = [
            list(inspect.signature(getattr(module, f"ring_flash_attn_{form}func")).parameters)
            for module in (sp_aurora, ring_flash_attn)
        ]
        assert names[0] == names[1]
    q = torch.randn(1, 5, 2, 8)
    for name in ("ring_flash_attn_func", "sp_aurora_func", "ulysses_flash_attn_func"):
        out = getattr(sp_aurora, name)(q, q, q, 0.0, None, True)
        assert torch.equal(out, ring_flash_attn.ring_flash_attn_func(q, q, q, causal=True))


def test_functions_run_on_a_single_device_without_a_process_group():
    case = Case(Mask.causal(), tokens=11)
    leaves = case.inputs(torch.float32)
    made = ringx.ringX4_attn_func(*leaves.values(), causal=True, return_attn_probs=True)
    check(gradients(made[:2], leaves, case), case, leaves)
    out = ringx.ringX4_attn_func(*leaves.values(), 0.0, None, True)
    assert torch.equal(out, made[0])


def test_alibi_and_scale_match_reference():
    case = Case(Mask.full(), tokens=11, scale=0.3, alibi=True)
    leaves = case.inputs(torch.float32)
    made = ring_flash_attn.stripe_flash_attn_func(
        *leaves.values(), softmax_scale=0.3, alibi_slopes=case.slopes(), deterministic=True, return_attn_probs=True
    )
    check(gradients(made[:2], leaves, case), case, leaves)


def test_unsupported_arguments_raise_with_a_remedy():
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="each rank would drop different pairs"):
        ring_flash_attn.ring_flash_attn_func(q, q, q, 0.1)
    x, cuts = torch.randn(3, 1, 8), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="zigzag needs two equal chunks"):
        ring_flash_attn.zigzag_ring_flash_attn_varlen_func(x, x, x, cuts, 3, causal=True)
    with pytest.raises(ValueError, match="the very tensor"):
        ring_flash_attn.llama3_flash_attn_varlen_func(x, x, x, cuts, cuts, 3, 3, 1, slice(0, 3), causal=True)
    with pytest.raises(ValueError, match="takes any length"):
        llama3_flash_attn_prepare_cu_seqlens(cuts, True, 0, 2)


def test_functions_for_transformers_have_the_arguments_of_the_originals():
    names = {
        ring_flash_attn.substitute_hf_flash_attn: ["process_group", "heads_k_stride"],
        ring_flash_attn.update_ring_flash_attn_params: ["cu_seqlens", "process_group"],
    }
    for function, arguments in names.items():
        assert list(inspect.signature(function).parameters) == arguments


@pytest.mark.parametrize("causal", [True, False])
def test_prepared_cu_seqlens_cover_the_visible_keys_of_a_rank(causal):
    cuts = torch.tensor([0, 2, 9, 10, 24])
    for rank in range(4):
        q, k, longest_q, longest_k, keys = llama3_flash_attn_prepare_cu_seqlens(cuts, causal, rank, 4)
        assert q[-1] == 6
        assert k[-1] == keys.stop - keys.start
        assert keys.start <= rank * 6
        assert keys.stop == (rank * 6 + 6 if causal else cuts[cuts >= rank * 6 + 6][0])
        assert (longest_q, longest_k) == (int(q.diff().max()), int(k.diff().max()))


def run_module(rank, world, group, make, kind, degrees, case, dtype, options):
    """Call a yunchang module on one rank; return output and gradients, each with the positions of its tokens."""
    ulysses, ring, low = degrees
    yunchang.set_seq_parallel_pg(ulysses, ring, rank, world, use_ulysses_low=low)
    ranks = ulysses * ring

    def cut(x):
        extract = yunchang.EXTRACT_FUNC_DICT[kind]
        return extract(x.detach(), rank % ranks, world_size=ranks, rd=ring, ud=ulysses)

    whole = case.inputs(dtype, seed=rank // ranks)
    local = {key: cut(x).requires_grad_() for key, x in whole.items()}
    attention = getattr(yunchang, make)
    attention = attention(group) if make == "UlyssesAttention" else attention(ring_impl_type=kind)
    inputs = packed(local["q"], local["k"], local["v"], "qkvpacked_" if "Packed" in make else "")
    out = attention(*inputs, alibi_slopes=case.slopes(), return_attn_probs=True, **options)
    shape = (case.batch, case.tokens, case.heads, case.dim)
    dout, _ = upstream(torch.empty(shape), torch.empty(case.batch, case.heads, case.tokens))
    grads = torch.autograd.grad(out, list(local.values()), cut(dout).to(out))
    return [(x.detach(), cut(torch.arange(x.shape[1] * ranks).view(1, -1)).view(-1)) for x in (out, *grads)]


def check_module(pool, make, kind, table, case, dtype=torch.float32, **options):
    """Assert that a yunchang module over several ranks matches the oracle."""
    world, *degrees = table
    made = pool.run(world, run_module, make, kind, degrees, case, dtype, options)
    each = degrees[0] * degrees[1]
    for first in range(0, world, each):
        got = {}
        for name, parts in zip(("out", "dq", "dk", "dv"), zip(*made[first : first + each], strict=True), strict=True):
            values, rows = (torch.cat(x, 1 if x[0].ndim > 1 else 0) for x in zip(*parts, strict=True))
            assert torch.equal(rows.sort().values, torch.arange(len(rows)))
            got[name] = values[:, rows.argsort()]
        check(got, case, case.inputs(dtype, seed=first // each), 16)


@pytest.mark.parametrize("kind", ["basic", "zigzag", "strip"])
@pytest.mark.parametrize("table", [*((*table, True) for table in TABLES), (4, 2, 2, False)], ids=str)
def test_long_context_attention_matches_reference(pool, kind, table):
    """Use 7 tokens for each rank, a length that yunchang itself cannot always shard."""
    case = Case(Mask.causal(), tokens=7 * table[0], heads=4, kv_heads=2, dim=40)
    check_module(pool, "LongContextAttention", kind, table, case, causal=True)
    check_module(pool, "LongContextAttention", kind, table, replace(case, mask=Mask.full()), torch.float64)


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("kind", ["zigzag", "strip"])
def test_long_context_attention_supports_all_features(pool, kind, low):
    mask = Mask.causal() & Mask.window(9, 0)
    case = Case(mask, tokens=20, heads=4, kv_heads=1, scale=0.3, softcap=2.0, alibi=True)
    check_module(
        pool, "LongContextAttention", kind, (4, 2, 2, low), case,
        causal=True, window_size=(9, 0), softmax_scale=0.3, softcap=2.0, deterministic=True,
    )  # fmt: skip


def test_qkvpacked_long_context_attention_matches_reference(pool):
    for kind in ("basic", "zigzag", "strip"):
        case = Case(Mask.causal(), tokens=20, heads=4)
        check_module(pool, "LongContextAttentionQKVPacked", kind, (4, 2, 2, True), case, causal=True)


@pytest.mark.parametrize("table", [(4, 2, 1, True), (4, 1, 2, True), (4, 1, 1, True)], ids=str)
def test_several_sequences_use_separate_groups_of_ranks(pool, table):
    case = Case(Mask.causal(), tokens=10, heads=2)
    check_module(pool, "LongContextAttention", "zigzag", table, case, causal=True)


def run_compiled(rank, world, group):
    """Return whether a compiled module gives the result of the eager one."""
    yunchang.set_seq_parallel_pg(1, world, rank, world)
    q = torch.randn(1, 5, 2, 8)
    attention = yunchang.LongContextAttention(ring_impl_type="strip")
    return torch.equal(torch.compile(attention, backend="eager")(q, q, q, causal=True), attention(q, q, q, causal=True))


@pytest.mark.slow
def test_long_context_attention_compiles_with_graph_breaks(pool):
    assert all(pool.run(2, run_compiled))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ulysses_attention_matches_reference(pool, world):
    case = Case(Mask.causal(), tokens=9 * world, heads=4, kv_heads=2)
    check_module(pool, "UlyssesAttention", "basic", (world, world, 1, True), case, causal=True)
    check_module(pool, "UlyssesAttention", "basic", (world, world, 1, True), replace(case, mask=Mask.full()))


@pytest.mark.parametrize("table", [(2, 2, 1, True), (2, 1, 2, True)], ids=str)
def test_keys_may_have_another_length_without_a_mask(pool, table):
    case = Case(Mask.full(), tokens=10, k_tokens=14, heads=2)
    check_module(pool, "LongContextAttention", "basic", table, case)
    check_module(pool, "UlyssesAttention", "basic", (2, 2, 1, True), case)


@pytest.mark.parametrize(
    ("kind", "low", "firsts", "step"),
    [
        ("basic", True, [0, 4, 8, 12], 1),
        ("zigzag", True, [0, 12, 4, 8], 1),
        ("strip", True, [0, 8, 1, 9], 2),
        ("basic", False, [0, 8, 4, 12], 1),
        ("zigzag", False, [0, 4, 12, 8], 1),
        ("strip", False, [0, 1, 8, 9], 2),
    ],
)
def test_extract_functions_return_the_positions_of_the_layout(monkeypatch, kind, low, firsts, step):
    """Match yunchang's own functions if neighbours exchange heads (`low`), else the order that its modules expect."""
    monkeypatch.setattr(yunchang, "state", ProcessState())
    yunchang.state.put((yunchang._Degrees(2, 2, low), None), "yunchang")
    ring = {"basic": "ring", "strip": "striped"}.get(kind, kind)
    schedule = yunchang.LongContextAttention(ring_impl_type=kind).schedule
    assert schedule == f"hybrid(inner=2, ring={ring}, transposed={not low})"
    whole = torch.arange(16.0, requires_grad=True).view(1, 16)
    for rank, first in enumerate(firsts):
        cut = yunchang.EXTRACT_FUNC_DICT[kind](whole, rank, 4, 2, 2)
        assert cut.flatten().tolist() == [first + step * n for n in range(4)]
        assert cut.requires_grad == (kind != "basic")
        across = yunchang.EXTRACT_FUNC_DICT[kind](whole.T, rank, world_size=4, rd=2, ud=2, dim=0)
        assert torch.equal(across, cut.T)


def test_modules_have_the_argument_names_and_order_of_yunchang():
    made = {
        yunchang.LongContextAttention: ["ring_impl_type", "use_pack_qkv", "use_sync", "attn_type", "attn_processor"],
        yunchang.LongContextAttentionQKVPacked: ["ring_impl_type", "use_sync", "attn_type"],
        yunchang.UlyssesAttention: ["use_sync", "attn_type"],
    }
    for module, names in made.items():
        first = ["sequence_process_group"] if module is yunchang.UlyssesAttention else []
        assert list(inspect.signature(module).parameters) == [*first, "scatter_idx", "gather_idx", *names]
        assert issubclass(module, torch.nn.Module)
    for module in (yunchang.LongContextAttention, yunchang.UlyssesAttention):
        names = list(inspect.signature(module.forward).parameters)
        assert names == ["self", "query", "key", "value", *MODULE_ORDER, "args"]
    names = list(inspect.signature(yunchang.set_seq_parallel_pg).parameters)
    assert names == ["sp_ulysses_degree", "sp_ring_degree", "rank", "world_size", "use_ulysses_low"]


def test_arguments_without_effect_are_accepted():
    yunchang.set_seq_parallel_pg(1, 1, 0, 1)
    q = torch.randn(1, 5, 2, 8)
    out = yunchang.LongContextAttention(2, 1, "basic_pytorch", True, True, yunchang.AttnType.FA3)(
        q, q, q, 0.0, None, True
    )
    assert torch.equal(out, yunchang.UlyssesAttention(None, 2, 1, True, "torch")(q, q, q, causal=True))
    assert torch.equal(yunchang.basic_extract_local(q, 0, 1), q)


def test_unsupported_yunchang_arguments_raise_with_a_remedy(monkeypatch):
    q = torch.randn(1, 4, 2, 8)
    monkeypatch.setattr(yunchang, "state", ProcessState())
    with pytest.raises(ValueError, match="set_seq_parallel_pg first"):
        yunchang.LongContextAttention()
    with pytest.raises(ValueError, match=r"this is rank 0 of 1; .*init_process_group first"):
        yunchang.set_seq_parallel_pg(2, 1, 0, 2)
    with pytest.raises(ValueError, match=r"sp_ring_degree=2: .* divides world_size=1"):
        yunchang.set_seq_parallel_pg(1, 2, 0, 1)
    with pytest.raises(ValueError, match="5 tokens do not divide by 4 ranks"):
        yunchang.zigzag_extract_local(torch.zeros(1, 5), 0, 4, 2, 2)
    with pytest.raises(ValueError, match=r"expected rd \* ud ranks"):
        yunchang.stripe_extract_local(torch.zeros(1, 8), 0, 4, 4, 2)
    yunchang.set_seq_parallel_pg(1, 1, 0, 1)
    with pytest.raises(ValueError, match="set_seq_parallel_pg got: rd=1, ud=1"):
        yunchang.zigzag_extract_local(torch.zeros(1, 8), 0, 4, 2, 2)
    for arguments, message in (
        ({"scatter_idx": 1, "gather_idx": 2}, "transpose the tensors"),
        ({"ring_impl_type": "stripe"}, "expected one of basic, zigzag, strip"),
        ({"attn_type": yunchang.AttnType.SAGE_FP8}, "it approximates attention"),
        ({"attn_type": "fa9"}, "expected one of aiter, fa, fa3"),
        ({"attn_processor": torch.nn.Identity()}, "leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            yunchang.LongContextAttention(**arguments)
    with pytest.raises(ValueError, match=r"expected 3 and 1.*\[batch, tokens, 3, heads, dim\]"):
        yunchang.LongContextAttentionQKVPacked(scatter_idx=2)
    for module in (yunchang.LongContextAttention(), yunchang.UlyssesAttention()):
        with pytest.raises(ValueError, match="each rank would drop different pairs"):
            module(q, q, q, dropout_p=0.1)
        with pytest.raises(ValueError, match="1 surplus positional arguments"):
            module(q, q, q, 0.0, None, True, (-1, -1), 0.0, None, False, False, "more")
        for options in ({"causal": True}, {"window_size": (0, -1)}, {"alibi_slopes": torch.ones(2)}):
            with pytest.raises(ValueError, match="q has 3 tokens, k has 4"):
                module(q[:, :3], q, q, **options)


def test_different_lengths_with_a_mask_are_refused():
    q, k = torch.zeros(1, 3, 2, 8), torch.zeros(1, 4, 2, 8)
    for causal, window in ((True, (-1, -1)), (False, (2, 2))):
        with pytest.raises(ValueError, match="q has 3 tokens, k has 4, and their positions are not defined"):
            ring_flash_attn.ring_flash_attn_func(q, k, k, causal=causal, window_size=window)
    assert ring_flash_attn.ring_flash_attn_func(q, k, k).shape == q.shape
