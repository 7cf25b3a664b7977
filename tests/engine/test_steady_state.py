"""A repeated call allocates nothing, builds nothing and makes no handshake; caches of changing calls stay bounded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import SCHEDULES
from hub import prepare
from meshflash import Layout, Mask, attention
from meshflash.check.oracle import Case
from meshflash.check.spread import Item, shards
from meshflash.comm.transports.loopback import Loopback
from meshflash.core.program import Program
from meshflash.core.tiles import Worklist
from meshflash.engine import cache as cache_module
from meshflash.engine.binding import Bound
from meshflash.engine.cache import cache
from meshflash.engine.executable import MeshExecutable
from meshflash.engine.group_context import group_context
from meshflash.engine.memory import pool
from meshflash.engine.placement import Placement
from meshflash.kernels.contract import Grads, Inputs, Kernel, KernelRequest, Outputs, Rows, new_outputs
from meshflash.kernels.registry import Choice

CAUSAL = Mask.causal()
CPU = torch.device("cpu")
BUILT: tuple[type[Any], ...] = (Program, Bound, Worklist, Placement, MeshExecutable)


@contextmanager
def count_constructions() -> Iterator[Counter[str]]:
    """Count the objects constructed inside the block, by class."""
    built: Counter[str] = Counter()

    def count_init(kind: type[Any]) -> Callable[..., None]:
        plain = kind.__init__

        def init(self: Any, *arguments: Any, **named: Any) -> None:
            built[kind.__name__] += 1
            plain(self, *arguments, **named)

        return init

    with pytest.MonkeyPatch.context() as patch:
        for kind in BUILT:
            patch.setattr(kind, "__init__", count_init(kind))
        yield built


def step(tokens: int, world: int, **call: Any) -> None:
    """Run a forward and a backward."""
    q, k, v = (torch.ones(2, tokens // world, 4, 8).requires_grad_() for _ in range(3))
    attention(q, k, v, **call).sum().backward()


def repeat_calls(rank: int, world: int, group: Any) -> None:
    """Repeat calls of each kind; after two rounds nothing is built, allocated or negotiated."""
    kinds: list[list[dict[str, Any]]] = [[dict(tokens=32, schedule=schedule, mask=CAUSAL)] for schedule in SCHEDULES]
    kinds.append([call for calls in kinds for call in calls])  # all schedules alternate
    kinds.append([dict(tokens=32, mask=CAUSAL), dict(tokens=64, mask=CAUSAL & Mask.window(9, 0), schedule="zigzag")])
    kinds.append(
        [dict(tokens=32, mask=CAUSAL & Mask.documents(torch.tensor([9, 23])), layout=Layout.zigzag(32, world))]
    )
    here, usage = group_context(group.group_name), pool(CPU).usage
    for calls in kinds:
        for _ in range(2):
            for call in calls:
                step(world=world, **call)
        before = usage.allocations, here.handshakes, cache.size(here)
        with count_constructions() as built:
            for _ in range(5):
                for call in calls:
                    step(world=world, **call)
        assert not built, built
        assert before == (usage.allocations, here.handshakes, cache.size(here))
        assert usage.live == 0


def test_repeated_call_builds_allocates_and_negotiates_nothing(pool):
    pool.run(2, repeat_calls)


def count_constructions_of_first_call(rank: int, world: int, group: Any) -> None:
    """Check that a first call constructs every counted class."""
    with count_constructions() as built:
        step(32, world, mask=CAUSAL & Mask.window(11, 0), schedule="zigzag")
    assert set(built) == {kind.__name__ for kind in BUILT}


def test_constructions_of_a_first_call_are_counted(pool):
    pool.run(2, count_constructions_of_first_call)


def change_seeds_slopes_and_logits(rank: int, world: int, group: Any) -> None:
    """Repeat a call with new seeds, slopes and sink logits."""
    here = group_context(group.group_name)
    for seed in range(10):
        if seed == 2:
            before = here.handshakes, cache.size(here), pool(CPU).usage.allocations
        slopes, logits = torch.rand(4, generator=torch.Generator().manual_seed(seed)), torch.full((4,), float(seed))
        more = dict(dropout=0.5, seed=seed, alibi_slopes=slopes, sink_logits=logits)
        step(32, world, mask=CAUSAL, schedule="ring", **more)
    assert before == (here.handshakes, cache.size(here), pool(CPU).usage.allocations)


def test_changing_seeds_slopes_and_logits_need_no_new_handshake(pool):
    pool.run(2, change_seeds_slopes_and_logits)


def change_packings(rank: int, world: int, group: Any) -> None:
    """Call with a new packing in each step; caches and free arenas stay bounded."""
    draw = random.Random(0)  # the same on all ranks
    here, memory = group_context(group.group_name), pool(CPU)
    memory.clear()  # other tests of this worker left arenas
    layout = Layout.zigzag(32, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "MAX_ENTRIES", 9)
        for n in range(40):
            cuts = [0, *sorted(draw.sample(range(1, 32), draw.randint(1, 5))), 32]
            mask = CAUSAL & Mask.from_cu_seqlens(torch.tensor(cuts))
            step(32, world, mask=mask, layout=layout, schedule=draw.choice(("zigzag", "allgather")))
            assert cache.size(here) <= 9
            assert len(memory._free) == 1
            if n == 20:
                allocations = memory.usage.allocations
        # an evicted call needs a new handshake
        before = here.handshakes
        step(32, world, mask=CAUSAL, layout=layout)
        assert here.handshakes == before + 1
    assert memory.usage.allocations - allocations <= 3  # only for a packing that needs more memory than any before
    assert memory.usage.live == 0


def test_caches_stay_bounded_when_packings_change_every_step(pool):
    pool.run(2, change_packings)


class Idle(Kernel):
    """A kernel that computes nothing, so that only the engine's own operations are recorded."""

    name, summary = "idle", "nothing"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return None

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        assert outputs is not None
        return outputs

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        assert grads is not None
        return grads


class AllocationRecorder(TorchDispatchMode):
    """Record all ops, and those that allocate: neither views, nor in place, nor into a given tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.allocating: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all.append(str(func))
        if any(value.alias_info is None for value in func._schema.returns):
            self.allocating.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bound_program_allocates_no_tensor(monkeypatch, schedule, batch, dtype):
    monkeypatch.setattr("meshflash.engine.binding.choose", lambda name, request: Choice(Idle(), "for the test"))
    for name in ("merge_", "delta_"):  # these launch kernels as well
        monkeypatch.setattr(f"meshflash.engine.binding.{name}", lambda *tensors, **_: None)
    for mask in (Mask.full(), CAUSAL, CAUSAL & Mask.window(9, 0)):
        item = Item(Case(mask, batch=batch, tokens=37, heads=4, kv_heads=2), schedule, 3, dtype)
        for rank in range(3):
            local = {name: x.detach() for name, x in shards(item, item.case.inputs(dtype), rank).items()}
            q, k, v = local.values()
            out, lse = new_outputs(q, v)
            passes = {
                "forward": [q, k, v, out, lse],
                "backward": [q, k, v, out, lse, out.clone(), lse.clone(), *map(torch.empty_like, (q, k, v))],
            }
            prepared, features, mover = prepare(item, rank), item.case.features(local), Loopback(rank, 3)
            saved = torch.zeros(prepared.saved_bytes, dtype=torch.uint8)
            for direction, given in passes.items():
                tensors = [*given, saved]
                prepared.run(direction, tensors, features, mover)  # type: ignore[arg-type]
                with AllocationRecorder() as recorder:
                    prepared.run(direction, tensors, features, mover)  # type: ignore[arg-type]
                assert not recorder.allocating, (direction, recorder.allocating)


def test_allocation_recorder_detects_allocating_ops():
    x = torch.zeros(4)
    with AllocationRecorder() as recorder:
        x.view(2, 2).narrow(0, 0, 1).fill_(1.0).add_(1.0)
        assert not recorder.allocating
        assert recorder.all
        x.clone(), torch.empty(3), x + 1, x.reshape(2, 2).t().contiguous(), x.double()
    assert len(recorder.allocating) == 5
