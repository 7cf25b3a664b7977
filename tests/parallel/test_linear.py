"""Parallel linear layers: forward and every gradient match `nn.Linear`, on real ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from meshflash.gemm.distributed.tiles import split
from meshflash.models.gpt import GPT, tiny
from meshflash.models.vit import ViT
from meshflash.models.vit import tiny as tiny_vit
from meshflash.parallel import (
    ColumnParallel,
    ColumnParallelLinear,
    RowParallel,
    RowParallelLinear,
    TensorRanks,
    accumulate,
    clip_grad_norm,
    gradient_norm,
    init_mesh,
    next_tokens,
    parallelize,
    shard_batch,
)
from meshflash.parallel.linear_styles import replace_linear_styles
from meshflash.train.checkpoint import Checkpoints

ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """A layer under test: its kind, options, sizes and construction; `layers` and the tests make it."""

    kind: str
    features: tuple[int, int] = (6, 8)
    rows: tuple[int, ...] = (2, 4)
    bias: bool = True
    dtype: torch.dtype = torch.float64
    gather: bool = False
    sequence: bool = False
    uneven: bool = False
    styled: bool = False
    variant: str = ""

    @property
    def options(self) -> dict[str, Any]:
        gather = dict(gather_output=True) if self.gather else {}
        return dict(sequence_parallel=self.sequence, uneven=self.uneven, **gather)

    def parts(self, x: torch.Tensor, rank: int, world: int, result: bool) -> torch.Tensor:
        """Return a rank's shard of the full input or output."""
        by_tokens = self.sequence and result == (self.kind == "row")
        if by_tokens:
            return x.split(split(x.shape[-2], world), -2)[rank]
        if result != (self.kind == "column") or self.gather:
            return x
        step = -(-x.shape[-1] // world)
        return x[..., min(step * rank, x.shape[-1]) : step * (rank + 1)]

    def layer(self, plain: nn.Linear, mesh: Any, ranks: TensorRanks) -> nn.Module:
        """Return the layer with the weights of a plain one."""
        if self.styled:
            made: Any = nn.Sequential(copy.deepcopy(plain))
            style = (ColumnParallel if self.kind == "column" else RowParallel)(ranks=ranks, **self.options)
            return parallelize_module(made, mesh, {"0": style})
        cls = ColumnParallelLinear if self.kind == "column" else RowParallelLinear
        layer: Any = cls(*self.features, self.bias, ranks=ranks, dtype=self.dtype, **self.options)
        made = nn.Sequential(layer)
        with torch.no_grad():
            for name, value in plain.named_parameters():
                like = getattr(layer, name)
                like.copy_(torch.distributed.tensor.distribute_tensor(value, like.device_mesh, like.placements))
        return made


def full_tensor(x: Any) -> Any:
    """Return the full tensor of a DTensor; other tensors unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def relative_error(got: Any, want: Any) -> float:
    """Return the largest difference, relative to the largest value of `want`."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-3)) if want.numel() else 0.0


def errors_of(case: Case, mesh: Any, ranks: TensorRanks) -> list[float]:
    """Return the errors of outputs and gradients of two micro-batches against `nn.Linear`."""
    rank, world = ranks.rank, ranks.world
    torch.manual_seed(3)
    plain = nn.Linear(*case.features, case.bias, dtype=torch.float64 if case.dtype != torch.float32 else case.dtype)
    plain = plain.to(case.dtype)
    layer = case.layer(plain, mesh, ranks)
    found = []
    for rows in (case.rows, (*case.rows[:-1], case.rows[-1] + (3 if case.uneven else 2 * world))):
        x = torch.randn(*rows, case.features[0], dtype=case.dtype, requires_grad=True)
        g = torch.randn(*rows, case.features[1], dtype=case.dtype)
        y = plain(x)
        y.backward(g)
        local = case.parts(x.detach(), rank, world, False).requires_grad_()
        got = layer(local)
        got.backward(case.parts(g, rank, world, True))
        assert local.grad is not None
        assert x.grad is not None
        found += [relative_error(got.detach(), case.parts(y.detach(), rank, world, True))]
        found += [relative_error(local.grad, case.parts(x.grad, rank, world, False))]
        layer.eval()
        with torch.no_grad():
            found += [relative_error(layer(local), got)]
    for name, weight in plain.named_parameters():
        parameter = layer.get_parameter(f"0.{name}")
        found.append(relative_error(full_tensor(parameter.grad), weight.grad))
    return found


def compare(rank: int, world: int, group: Any, cases: list[Case]) -> list[Any]:
    """Return the errors of every case; cases alternate between a mesh axis and a process group."""
    mesh = init_mesh(tp=world, device="cpu")["tp"]
    ranks_of = {False: TensorRanks(mesh), True: TensorRanks(group)}
    return [(case, errors_of(case, mesh, ranks_of[bool(n % 2)])) for n, case in enumerate(cases)]


def layers() -> list[Case]:
    """Return all options with and without bias, as layer and style, in float64 and float32, with uneven sizes."""
    forms = [
        Case("column"),
        Case("column", gather=True),
        Case("column", sequence=True),
        Case("row"),
        Case("row", sequence=True),
    ]
    found = []
    for n, options in enumerate(forms):
        found.append(replace(options, styled=bool(n % 2)))
        found.append(replace(options, styled=not n % 2, bias=False, dtype=torch.float32))
        odd = replace(
            options, features=(7, 5), rows=(3, 7), uneven=options.sequence
        )  # 5 features over 4 ranks leave one rank without any
        found.append(replace(odd, styled=True))
        found.append(replace(odd, rows=(3,), dtype=torch.float32))  # with 4 ranks, one has no tokens
        found.append(replace(odd, features=(5, 7), rows=(2, 1, 6), dtype=torch.bfloat16))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_parallel_layers_match_a_single_process(pool, world):
    for rank in pool.run(world, compare, layers()):
        for case, errors in rank:
            assert max(errors) < ALLOWED[case.dtype], (case, errors)


class MLP(nn.Module):
    """A user's model of two linear layers; the tests make it."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Any) -> Any:
        return self.down(nn.functional.gelu(self.up(x)))


def check_styles(rank, world, group):
    """Return errors, messages and dtypes of a user's model with parallel styles."""
    mesh = init_mesh(tp=world, device="cpu")["tp"]
    found: dict[str, Any] = {}
    forms: Any = {"same": {}, "sequence": dict(sequence_parallel=True, uneven=True)}
    for name, options in forms.items():
        torch.manual_seed(0)
        plain = MLP(5, 9).double()
        plan: Any = {"up": ColumnParallel(**options), "down": RowParallel(**options)}
        mlp: Any = parallelize_module(copy.deepcopy(plain), mesh, plan)
        assert mlp.up.ranks is mlp.down.ranks
        x, g = torch.randn(2, 7, 5).double(), torch.randn(2, 7, 5).double()
        want = plain(x)
        want.backward(g)
        rows = (lambda y: y.split(split(7, world), 1)[rank]) if options else (lambda y: y)
        got = copy.deepcopy(mlp)(rows(x))
        mlp(rows(x)).backward(rows(g))
        found[name] = [relative_error(got.detach(), rows(want.detach()))]
        found[name] += [
            relative_error(full_tensor(mlp.get_parameter(k).grad), p.grad) for k, p in plain.named_parameters()
        ]
        found[name] += [float(k != m) for k, m in zip(plain.state_dict(), mlp.state_dict(), strict=True)]
    try:
        torch.compile(mlp, backend="eager", fullgraph=True)(rows(x))
        found["whole graph"] = "compiled"
    except RuntimeError as error:
        found["whole graph"] = str(error)
    torch._dynamo.reset()
    found["compiled"] = [relative_error(torch.compile(mlp, backend="eager")(rows(x)).detach(), got.detach())]
    torch._dynamo.reset()
    single: Any = parallelize_module(MLP(5, 9), mesh, plan)
    with torch.autocast("cpu", torch.bfloat16):
        y = single(rows(x).float())
    y.sum().backward()
    found["autocast"] = y.dtype, single.up.weight.grad.dtype
    return found


def test_styles_shard_a_users_model(pool):
    for found in pool.run(2, check_styles):
        for name in ("same", "sequence", "compiled"):
            assert max(found[name]) < 1e-12, (name, found[name])
        assert "GEMMs that are built on first use" in found["whole graph"]
        assert found["autocast"] == (torch.bfloat16, torch.float32)


def invalid_call_messages(rank, world, group):
    """Return the error message of each invalid call."""
    mesh = init_mesh(tp=2, device="cpu")
    tp = mesh["tp"]
    row = RowParallelLinear(4, 4, ranks=tp, sequence_parallel=True)
    column = ColumnParallelLinear(4, 4, ranks=tp, sequence_parallel=True)
    calls: list[Any] = [
        lambda: row(torch.zeros(3, 2)),
        lambda: row(torch.zeros(4, 4)),
        lambda: row(torch.zeros(2)),
        lambda: column(torch.zeros(1 + rank, 4)),
        lambda: column(torch.zeros(2, 4, dtype=torch.float64)),
        lambda: ColumnParallelLinear(4, 4, ranks=tp, sequence_parallel=True, gather_output=True),
        lambda: RowParallelLinear(4, 4, ranks=tp, uneven=True),
        lambda: ColumnParallelLinear(4, 4, ranks=mesh),
        lambda: TensorRanks(tp, variant="epilogue"),
        lambda: TensorRanks(tp, precision="half"),
        lambda: parallelize_module(nn.Embedding(4, 4), tp, ColumnParallel()),
        lambda: parallelize_module(nn.Linear(4, 4), init_mesh(device="cpu")["tp"], RowParallel(ranks=TensorRanks(tp))),
        lambda: parallelize(GPT(tiny()), mesh, tp_linear=TensorRanks(tp), tiles=2),
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_invalid_arguments_are_refused(pool):
    want = (
        "2 ranks do not divide 3 tokens; set uneven=True", "expected a plain tensor [..., tokens, 2]",
        "got a tensor of [2]; a rank has those input features", "ranks disagree in rows: rank 0 has 2",
        "write b.to(a.dtype)", "take one", "uneven=True is for sequence_parallel=True", "mesh of 4 dimensions",
        "needs a heap", "precision 'half'", "expected an nn.Linear to divide; got Embedding",
        "make them of the same axis", "leave out tiles= or tp_linear=",
    )  # fmt: skip
    for messages in pool.run(2, invalid_call_messages):
        assert len(messages) == len(want)
        for text, part in zip(messages, want, strict=True):
            assert part in text


def errors_over_heap(rank, world, group, cases):
    """Return the errors and plans of every case, with GEMMs that communicate over a heap."""
    from meshflash.comm.heap.api import open_heap

    mesh = init_mesh(tp=world, device="cpu")["tp"]
    found = []
    with open_heap(group, bytes=2**22, device="cpu") as heap:
        for case in cases:
            with TensorRanks(mesh, heap=heap, variant=case.variant) as ranks:
                found.append((case, errors_of(case, mesh, ranks), ranks.plans))
        assert heap.usage.allocations == 0
    return found


def test_gemms_communicate_over_a_heap_if_one_is_given(pool):
    common = pytest.importorskip("meshflash.kernels.triton.common")
    if not common.INTERPRETED:
        pytest.skip("kernels are interpreted on CPUs")
    variants = ("epilogue", "producer_consumer", "bulk", "epilogue", "producer_consumer")
    forms = [layers()[n] for n in range(1, 25, 5)]
    cases = [replace(options, variant=variant, bias=True) for options, variant in zip(forms, variants, strict=True)]
    cases += [replace(case, features=(7, 5), rows=(3,), uneven=True) for case in (cases[2], cases[4])]
    for rank in pool.run(2, errors_over_heap, [*cases, replace(cases[0], dtype=torch.float64)]):
        for case, errors, plans in rank:
            assert max(errors) < ALLOWED[case.dtype], (case, errors)
            assert plans
            assert all(("process group" in plan) == (case.dtype == torch.float64) for plan in plans), plans


def config():
    """Return a small GPT configuration."""
    return tiny(vocabulary=61, dim=32, hidden=48, heads=4, kv_heads=4)


def learn(model: Any, mesh: Any) -> list[Any]:
    """Return losses and norms of two steps of two micro-batches, the first gradients, and the final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    metrics: list[float] = []
    grads: dict[str, Any] = {}
    for step in range(2):
        ids = torch.randint(61, (2, 3, 19), generator=torch.Generator().manual_seed(step))
        if mesh is None:
            batches: Any = [dict(tokens=x, labels=next_tokens(x)) for x in ids]
        else:
            batches = [shard_batch(x, mesh) for x in ids]
        totals = accumulate(model, batches, mesh)
        metrics += [float(totals.loss), float(gradient_norm(model))]
        grads = grads or {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}
        clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [metrics, grads, {name: full_tensor(p.detach()) for name, p in model.named_parameters()}]


def train_gpt(rank, world, group, runs):
    """Return the largest error against a single process for each mesh and set of options."""
    torch.set_default_dtype(torch.float64)
    try:
        want = learn(GPT(config()), None)
        found = []
        for shape, options in runs:
            mesh = init_mesh(**shape, device="cpu")
            model = parallelize(GPT(config()), mesh, tp_linear=TensorRanks(mesh["tp"]), **options)
            kinds = {type(m).__name__.removeprefix("FSDP") for m in model.modules()}
            got = learn(model, mesh)
            errors = [abs(a - b) / abs(b) for a, b in zip(got[0], want[0], strict=True)]
            for a, b in zip(got[1:], want[1:], strict=True):
                assert a.keys() == b.keys()
                errors += [relative_error(a[name], b[name]) for name in b]
            found.append((shape, {"ColumnParallelLinear", "RowParallelLinear"} <= kinds, max(errors)))
        return found
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("world", "runs"),
    [
        (2, [(dict(tp=2), {}), (dict(tp=2), dict(activation_checkpointing="full"))]),
        (4, [(dict(tp=2, cp=2), dict(activation_checkpointing="selective")), (dict(tp=2, fsdp=2), {})]),
    ],
    ids=["2", "4"],
)
def test_gpt_with_parallel_layers_matches_a_single_process(pool, world, runs):
    for rank in pool.run(world, train_gpt, runs):
        for shape, ours, error in rank:
            assert ours
            assert error < 1e-9, (shape, error)


class CountingRanks(TensorRanks):
    """Tensor-parallel ranks that count the distributed GEMMs; `count_gemms` makes them."""

    calls = 0

    def distributed_gemm(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().distributed_gemm(*args, **kwargs)


def count_gemms(rank, world, group):
    """Return the distributed GEMMs of a block, without and with activation checkpointing."""
    found = []
    for activation_checkpointing in (None, "full"):
        mesh = init_mesh(tp=2, device="cpu")
        ranks = CountingRanks(mesh["tp"])
        model: Any = parallelize(
            GPT(config()), mesh, tp_linear=ranks, activation_checkpointing=activation_checkpointing
        )
        ids = torch.randint(61, (1, 9), generator=torch.Generator().manual_seed(0))
        model(ids, labels=next_tokens(ids)).backward()
        found.append(ranks.calls / len(model.layers))
    # Placements equal those of PyTorch's styles, so that checkpoints are interchangeable.
    torchs = parallelize(GPT(config()), mesh)
    for (name, a), (other, b) in zip(model.state_dict().items(), torchs.state_dict().items(), strict=True):
        assert (name, a.placements, a.to_local().shape) == (other, b.placements, b.to_local().shape)
    return found


def test_recomputing_a_block_skips_its_last_gemm(pool):
    # Forward: o and down. Backward: q, k, v, gate and up. Recomputation: o, but not down.
    assert pool.run(2, count_gemms) == [[7, 8]] * 2


def exchange_checkpoints(rank, world, group, folder):
    """Save with one kind of layers and resume with the other; return the error after two steps, one of them resumed."""
    mesh = init_mesh(tp=2, device="cpu")
    kinds: dict[str, dict[str, Any]] = {"torch": {}, "ours": {"tp_linear": TensorRanks(mesh["tp"])}}
    batches = [shard_batch(ids, mesh) for ids in torch.randint(61, (2, 3, 19), generator=torch.manual_seed(0))]

    def build(kind):
        model = parallelize(GPT(config()), mesh, **kinds[kind])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model, optimizer, batch):
        accumulate(model, [batch], mesh)
        optimizer.step()
        optimizer.zero_grad()

    found = {}
    for kind, other in (("torch", "ours"), ("ours", "torch")):
        checkpoints = Checkpoints(f"{folder}/{kind}", mesh=mesh)
        model, optimizer = build(kind)
        step(model, optimizer, batches[0])
        checkpoints.save(1, model, optimizer, {"step": 1}, wait=True)
        resumed, resumed_optimizer = build(other)
        for p in resumed.parameters():
            p.detach().to_local().fill_(torch.nan)
        checkpoints.load(resumed, resumed_optimizer)
        for one, two in ((model, optimizer), (resumed, resumed_optimizer)):
            step(one, two, batches[1])
        pairs = zip(resumed.named_parameters(), model.named_parameters(), strict=True)
        found[kind] = max(relative_error(full_tensor(a.detach()), full_tensor(b.detach())) for (_, a), (_, b) in pairs)
    return found


def test_checkpoints_of_torch_styles_and_parallel_layers_are_interchangeable(pool, tmp_path):
    for found in pool.run(2, exchange_checkpoints, str(tmp_path)):
        assert all(error < 1e-5 for error in found.values()), found


def test_styles_with_other_layouts_are_not_replaced():
    class Ranks:
        pass

    ranks: Any = Ranks()
    plan: Any = GPT(tiny()).tensor_plan(2) | {"x": ColwiseParallel(use_local_output=False)}
    got = replace_linear_styles(plan, ranks)
    assert got["embed_tokens"] is plan["embed_tokens"]
    assert got["x"] is plan["x"]
    kinds = {name: type(style) for name, style in replace_linear_styles(ViT(tiny_vit()).tensor_plan(2), ranks).items()}
    assert set(kinds.values()) == {ColumnParallel, RowParallel}
    assert type(got["layers.*.mlp.down_proj"]) is RowParallel
