"""`context_parallel` with torch's signature: models that call SDPA, over ranks against one device in float64."""

import inspect
import threading
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as sdpa  # imported by name before any context
from torch.utils.checkpoint import checkpoint

from meshflash import Layout, Mask
from meshflash.integrations.torch_cp import _Marked, context_parallel, context_parallel_unshard

#: Batch rows, tokens (37 divides nothing), words, width, heads.
ROWS, TOKENS, WORDS, WIDTH, HEADS = 2, 37, 23, 16, 4
DOCUMENTS = Mask.documents([11, 26])
LIMIT = 1e-12


class Attention(nn.Module):
    """A layer of attention that calls SDPA as a user's model does."""

    def __init__(self, kv_heads, options):
        super().__init__()
        self.kv_heads, self.options = kv_heads, options
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, rotation):
        heads = self.qkv(x).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)
        q, k, v = heads.split([HEADS, self.kv_heads, self.kv_heads], 1)
        out = sdpa(q * rotation, k * rotation, v, enable_gqa=self.kv_heads < HEADS, **self.options)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers, which may run again in the backward; how they do so is an argument of the call."""

    def __init__(self, kv_heads=HEADS, compiles=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Attention(kv_heads, options) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()
        if compiles:
            for layer in self.layers:
                layer.compile(backend="aot_eager", fullgraph=True)

    def forward(self, ids, labels, rotation, run=lambda layer, *inputs: layer(*inputs)):
        x = self.embedding(ids)
        for layer in self.layers:
            x = run(layer, x, rotation)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def _batch():
    """Return ids, labels and a table of all positions, `[tokens, head dim]`."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2))
    table = torch.randn(TOKENS, WIDTH // HEADS, generator=generator, dtype=torch.float64)
    return [ids, labels, table]


def _dense(mask, rows=slice(None)):
    """Return a mask as a matrix of pairs."""
    i = torch.arange(TOKENS)
    return torch.from_numpy(mask.visible(i[:, None].numpy(), i[None].numpy()))[rows]


def _gradients(model):
    """Return copies of the gradients of all parameters."""
    grads = [p.grad for p in model.parameters()]
    return [g.clone() for g in grads if g is not None]


def _wanted(model):
    """Return the loss and the gradients of one device."""
    model.zero_grad()
    loss = model(*_batch())
    loss.backward()
    return float(loss.detach()), _gradients(model)


def _errors(model, loss, wanted, group):
    """Return the errors of the sums over ranks of a loss and of the gradients, relative to their largest values."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    top = max(float(g.abs().max()) for g in wanted[1])
    found = [abs(float(total) - wanted[0]) / abs(wanted[0])]
    for p, want in zip(model.parameters(), wanted[1], strict=True):
        dist.all_reduce(p.grad, group=group)
        found.append(float((p.grad - want).abs().max()) / top)
    return max(found)


#: Options of SDPA and of the context by case, with the mask that one device needs in place of the context's.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "causal": (dict(is_causal=True), {}, None),
    "full": ({}, {}, None),
    "scaled": (dict(is_causal=True, scale=0.3), dict(schedule="ring"), None),
    "grouped queries": (dict(is_causal=True, kv_heads=2), dict(layout="contiguous"), None),
    "documents": (dict(is_causal=True), dict(mask=DOCUMENTS, layout="balanced"), Mask.causal() & DOCUMENTS),
    "whole documents": ({}, dict(mask=DOCUMENTS, layout="striped", schedule="allgather"), DOCUMENTS),
}


def _trained(rank, world, group, case, as_group):
    """Return the error of a training step, what buffers hold in the context, and whether all are restored."""
    options, arguments, mask = CASES[case]
    one = dict(options) if mask is None else {"attn_mask": _dense(mask)}
    wanted = _wanted(Model(**one))
    model, batch = Model(**options), _batch()
    mesh = group if as_group else DeviceMesh.from_group(group, "cpu")
    with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1, -1, 0], **arguments) as cp:
        lengths = {batch[0].shape[1], batch[1].shape[1], batch[2].shape[0]}
        loss = model(*batch)
        loss.backward()
    restored = all(torch.equal(x, y) for x, y in zip(batch, _batch(), strict=True))
    return _errors(model, loss, wanted, group), lengths == {cp.layout.lengths[rank]}, restored


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_model_that_calls_sdpa_equals_one_device(pool, case, world):
    for error, is_sharded, is_restored in pool.run(world, _trained, case, case == "full"):
        assert error < LIMIT
        assert is_sharded
        assert is_restored


def _backwards(loss, parameters):
    """Return the ways to compute gradients."""

    def grad():
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g

    return {"method": loss.backward, "function": lambda: torch.autograd.backward([loss]), "grad": grad}


def _checkpointed(rank, world, group, how, backward, is_inside, compiles):
    """Return the error of a training step whose layers run again, or what torch says."""
    model, batch = Model(is_causal=True, compiles=compiles), _batch()
    wanted = _wanted(Model(is_causal=True))
    mesh = DeviceMesh.from_group(group, "cpu")
    cp: Any = None

    def once(layer, *inputs):
        options = {} if how != "context_fn" else dict(context_fn=cp.checkpoint_contexts)
        if how == "unchecked":
            options = dict(determinism_check="none")
        return checkpoint(layer, *inputs, use_reentrant=how == "reentrant", **options)

    def nested(layer, *inputs):
        return checkpoint(once, layer, *inputs, use_reentrant=False)

    try:
        # what a layer saves as an input must outlive the context for a backward behind it
        with context_parallel(
            mesh, buffers=batch, buffer_seq_dims=[1, 1, 0], no_restore_buffers=() if is_inside else set(batch)
        ) as cp:
            loss = model(*batch, run=nested if how == "nested" else once)
            run = _backwards(loss, list(model.parameters()))[backward]
            if is_inside:
                run()
        if not is_inside:
            run()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return _errors(model, loss, wanted, group)


@pytest.mark.parametrize("backward", ["method", "function", "grad"])
@pytest.mark.parametrize("how", ["plain", "nested"])
def test_layers_run_again_over_the_ranks(pool, how, backward):
    assert max(pool.run(2, _checkpointed, how, backward, True, False)) < LIMIT


@pytest.mark.parametrize("is_inside", [True, False])
def test_checkpoint_contexts_let_the_backward_run_anywhere(pool, is_inside):
    assert max(pool.run(3, _checkpointed, "context_fn", "method", is_inside, False)) < LIMIT


@pytest.mark.parametrize(
    ("how", "message"),
    [("plain", "number of tensors was saved during the original forward and recomputation"), ("nested", "recomput")],
)
def test_layers_that_run_again_outside_of_the_context_are_an_error(pool, how, message):
    for said in pool.run(2, _checkpointed, how, "method", False, False):
        assert message in said


def test_layers_that_run_again_outside_are_an_error_without_the_checks_of_torch(pool):
    for said in pool.run(2, _checkpointed, "unchecked", "method", False, False):
        assert isinstance(said, str)


@pytest.mark.parametrize("is_inside", [True, False])
def test_reentrant_checkpoints_are_refused(pool, is_inside):
    for said in pool.run(2, _checkpointed, "reentrant", "method", is_inside, False):
        assert "use_reentrant=True) is not supported; pass False" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "context_fn"])
def test_compiled_layers_run_over_the_ranks(pool, how):
    assert max(pool.run(2, _checkpointed, how, "method", True, True, timeout=200)) < LIMIT


def test_the_mark_of_a_context_is_missed_where_other_tensors_are_saved():
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: torch.ones(2)):
        out = _Marked.apply(x)
    with pytest.raises(RuntimeError, match="outside of the context, over this rank's tokens alone"):
        out.sum().backward()
    assert torch.equal(torch.autograd.grad(_Marked.apply(x).sum(), x)[0], torch.ones(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_run_again_in_the_threads_of_a_backward_on_a_gpu():
    x = torch.randn(2, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    layer = Attention(HEADS, dict(is_causal=True)).to(x)
    rotation = torch.ones(TOKENS, WIDTH // HEADS, device="cuda", dtype=torch.bfloat16)
    layer(x, rotation).float().square().sum().backward()
    wanted = _gradients(layer)
    layer.zero_grad()
    with context_parallel(None, buffers=[x, rotation], buffer_seq_dims=[1, 0]):
        checkpoint(layer, x, rotation, use_reentrant=False).float().square().sum().backward()
    for got, want in zip(_gradients(layer), wanted, strict=True):
        assert float((got - want).abs().max()) < 0.05 * float(want.abs().max())


def _behind(rank, world, group):
    """Return the error of a backward behind the context, of a model that saves no buffer."""
    model, wanted = Model(is_causal=True), _wanted(Model(is_causal=True))
    batch = _batch()
    with context_parallel(group, buffers=batch, buffer_seq_dims=[1, 1, 0]):
        loss = model(*(x.clone() for x in batch))
    loss.backward()
    return _errors(model, loss, wanted, group)


def test_the_backward_may_run_behind_the_context(pool):
    assert max(pool.run(2, _behind)) < LIMIT


def _buffers(rank, world, group):
    """Return what becomes of buffers: kept, restored, sharing memory, after an error, saved by a graph."""
    whole = torch.arange(2.0 * TOKENS).view(2, TOKENS)
    kept, first, last = whole.clone(), whole[:, :-1], whole[:, 1:]
    twin = torch.arange(TOKENS - 1)
    place = first.data_ptr()
    weight = torch.ones(TOKENS - 1, requires_grad=True)
    product = (first * weight).sum()
    with context_parallel(
        group, buffers=[first, last, twin], buffer_seq_dims=[1, 1, 0], no_restore_buffers=[twin]
    ) as cp:
        own = torch.from_numpy(cp.layout.positions(rank))
        inside = torch.equal(first, whole[:, own]) and torch.equal(last, whole[:, own + 1]) and torch.equal(twin, own)
        gathered = context_parallel_unshard(group, [first, twin], [1, 0])
    after = torch.equal(first, whole[:, :-1]) and first.data_ptr() == place and torch.equal(twin, own)
    gathered_is_whole = torch.equal(gathered[0], whole[:, :-1]) and torch.equal(gathered[1], torch.arange(TOKENS - 1))
    again = context_parallel_unshard(group, [twin], [0], layout=cp.layout)[0]
    try:
        product.backward()
        said = "no error"
    except RuntimeError as error:
        said = str(error)
    with pytest.raises(KeyError), context_parallel(group, buffers=[kept], buffer_seq_dims=[1]):
        raise KeyError
    with torch.inference_mode(), context_parallel(group, buffers=[kept], buffer_seq_dims=[1]):
        pass
    usable = (kept * torch.ones(TOKENS, requires_grad=True)).sum().requires_grad
    return inside, after, gathered_is_whole, len(again) == TOKENS - 1, torch.equal(kept, whole), usable, said


def test_buffers_are_sharded_and_restored(pool):
    for *checks, said in pool.run(3, _buffers):
        assert checks == [True] * 6
        assert "modified by an inplace operation" in said


def _contexts(rank, world, group):
    """Return errors of attention in nested contexts, after them, and in another thread."""
    q = torch.randn(1, 2, TOKENS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    short = q[:, :, :9]
    pairs = [(q, Mask.causal()), (short, Mask.documents([4, 5])), (q, Mask.causal())]
    outer, inner = q.clone(), short.clone()
    found, others = [], []
    with context_parallel(group, buffers=[outer], buffer_seq_dims=[2], mask=pairs[0][1]) as cp:
        found += context_parallel_unshard(group, [sdpa(outer, outer, outer)], [2])
        with context_parallel(group, buffers=[inner], buffer_seq_dims=[2], mask=pairs[1][1], layout="striped"):
            found += context_parallel_unshard(group, [sdpa(inner, inner, inner)], [2])
        found += context_parallel_unshard(group, [sdpa(outer, outer, outer)], [2])
        thread = threading.Thread(target=lambda: others.append(sdpa(short, short, short)))
        thread.start()
        thread.join()
        with torch.no_grad(), context_parallel(group, layout=cp.layout):  # without buffers
            whole = context_parallel_unshard(group, [sdpa(outer, outer, outer, is_causal=True)], [2])[0]
    found.append(whole)
    wants = [functional.scaled_dot_product_attention(x, x, x, _dense(m)[: x.shape[2], : x.shape[2]]) for x, m in pairs]
    wants.append(wants[0])
    local = functional.scaled_dot_product_attention(short, short, short)
    wants.append(local)
    return [float((a - b).abs().max()) for a, b in zip([*found, others[0]], wants, strict=True)]


def test_contexts_nest_and_belong_to_their_thread(pool):
    for errors in pool.run(2, _contexts):
        assert len(errors) == 5
        assert max(errors) < LIMIT


def _multi_head(rank, world, group):
    """Return the error of torch's own layer, with gradients, and what it says if it would compute weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
    whole = layer(x, src_mask=mask, is_causal=True).square().sum()
    whole.backward()
    wanted = float(whole), _gradients(layer)
    layer.zero_grad()
    with context_parallel(group, buffers=[x], buffer_seq_dims=[1]):
        own = mask[: x.shape[1], : x.shape[1]]  # only is_causal is read
        loss = layer(x, src_mask=own, is_causal=True).square().sum()
        loss.backward()
        with pytest.raises(ValueError, match="pass need_weights=False"):
            layer.self_attn(x, x, x)
    return _errors(layer, loss, wanted, group)


def test_layers_of_torch_equal_one_device(pool):
    assert max(pool.run(2, _multi_head)) < LIMIT


def _refused(rank, world, group):
    """Return what calls say that are not supported, the second time on one rank only."""
    said = []
    for is_wrong in (True, rank == 0):
        q = torch.randn(1, 2, TOKENS, 8, generator=torch.Generator().manual_seed(3))
        with context_parallel(group, buffers=[q], buffer_seq_dims=[2]):
            tokens = q.shape[2]
            wrong: list[dict[str, Any]] = [
                dict(attn_mask=torch.ones(tokens, tokens, dtype=torch.bool)),
                dict(dropout_p=0.1),
                dict(key=q[:, :, :5], value=q[:, :, :5]),
                dict(key=q[:, :1], value=q[:, :1]),
                dict(query=q[:, :, :5], key=q[:, :, :5], value=q[:, :, :5]),
            ]
            for given in wrong:
                arguments: dict[str, Any] = {"query": q, "key": q, "value": q, **(given if is_wrong else {})}
                try:
                    sdpa(**arguments)
                    said.append("no error")
                except (ValueError, RuntimeError) as error:
                    said.append(str(error))
    return said


REFUSED = [
    "context_parallel(..., mask=meshflash.Mask.documents(lengths))",
    "meshflash.attention(..., dropout=, seed=)",
    "cross-attention is not supported in context_parallel; call meshflash.attention(..., layout=, k_layout=)",
    "pass enable_gqa=True",
    "q has 5 tokens on rank",
]


def test_calls_that_are_not_supported_are_errors_on_every_rank(pool):
    for said in pool.run(2, _refused):
        for text, part in zip(said, REFUSED * 2, strict=True):
            assert part in text, said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(buffers=[torch.ones(5)]), "1 buffers and 0 buffer_seq_dims"),
        (dict(buffers=[torch.ones(5)], buffer_seq_dims=[1]), r"buffer_seq_dims\[0\]=1, and the buffer has 1 dim"),
        (dict(buffers=[torch.ones(5), torch.ones(6)], buffer_seq_dims=[0, 0]), r"hold \[5, 6\] tokens"),
        (dict(buffers=[nn.Parameter(torch.ones(5))], buffer_seq_dims=[0]), r"call meshflash.shard\(x, layout, mesh\)"),
        (dict(buffers=["ids"], buffer_seq_dims=[0]), "must be a plain tensor, got str"),
        (dict(buffers=[torch.ones(5)] * 2, buffer_seq_dims=[0, 0]), "layout"),
        (dict(no_restore_buffers={torch.ones(5)}), "no_restore_buffers must be a part of buffers"),
        (dict(), r"pass layout=, such as meshflash.Layout.zigzag\(tokens, ranks\)"),
        (dict(buffers=[torch.ones(5)], buffer_seq_dims=[0], layout="snake"), "expected a Layout, or one of"),
        (dict(buffers=[torch.ones(5)], buffer_seq_dims=[0], layout=Layout.zigzag(6, 1)), "x has 5 tokens"),
        (dict(buffers=[torch.ones(5)], buffer_seq_dims=[0], mask=torch.ones(5)), "mask must be a meshflash.Mask"),
    ],
)
def test_wrong_arguments_raise_with_a_remedy(arguments, message):
    buffers = arguments.get("buffers") or []
    if len(buffers) == 2 and buffers[0] is buffers[1]:
        message = r"buffers\[1\] is in buffers before"
    with pytest.raises(ValueError, match=message), context_parallel(None, **arguments):
        pass
    assert all(x.shape == (5,) for x in buffers[:1] if isinstance(x, torch.Tensor))


def test_unshard_needs_a_layout_and_a_dimension_for_each_buffer():
    with pytest.raises(ValueError, match=r"then layout=cp\.layout"):
        context_parallel_unshard(None, [torch.ones(5)], [0])
    with pytest.raises(ValueError, match="1 buffers and 2 seq_dims"):
        context_parallel_unshard(None, [torch.ones(5)], [0, 0], layout=Layout.zigzag(5, 1))


def test_arguments_are_those_of_torch():
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental import _attention

    for ours, theirs in (
        (context_parallel, experimental.context_parallel),
        (context_parallel_unshard, _attention.context_parallel_unshard),
    ):
        names = [n for n in inspect.signature(theirs).parameters if n != "load_balancer"]
        assert list(inspect.signature(ours).parameters)[: len(names)] == names
