"""Bytes of parameters, gradients and optimizer state on each rank under DDP, ZeRO-1 and FSDP.

Measured: a small GPT takes one step of AdamW over processes, and each rank sums the storages that it then holds.
Counted: the same sums from the shapes of models on the meta device, which allocate nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks import plots
from benchmarks.protocol import Benchmark, Rows
from meshflash.bench.columns import NO_MEMORY, Column, Row, markdown, terminal
from meshflash.models.gpt import GPT, GPTConfig, tiny
from meshflash.parallel import accumulate, init_mesh, replicate, shard, shard_batch, sharded_optimizer
from meshflash.parallel.weights import parameters
from meshflash.runtime.processes import run_ranks

DDP, ZERO, FSDP = METHODS = ("DDP", "ZeRO-1", "FSDP")

#: The model that is trained: eight processes on two cores finish a step in seconds.
SMALL = tiny(vocabulary=4096, layers=4, dim=256, heads=8, kv_heads=4, hidden=768)
TOKENS = 32

#: The models that are counted: Llama's shapes, with about as many weights as their names say.
LARGE = {
    "1B": GPTConfig(32_000, 20, 2048, 32, 4, 5632),
    "10B": GPTConfig(128_256, 42, 4096, 32, 8, 14_336),
    "100B": GPTConfig(128_256, 88, 10_240, 80, 8, 28_672),
}
RANKS = (2, 4, 8, 64)

#: Memory of a GPU, in bytes.
GPU_BYTES = 80 * 10**9

#: AdamW counts its steps in a float32 for each weight tensor: bytes.
STEP_BYTES = 4


@dataclass(frozen=True)
class Held:
    """Bytes that one rank keeps from step to step. `held_bytes` measures them, `count` computes them."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class WeightsRow:
    """The rank that keeps most. `saved` is the fraction of DDP's bytes that it does not keep.

    Measured rows have the loss after their step and the bytes counted for them. Counted rows of FSDP have the bf16
    copies that are gathered at a time: of the largest block, and of the weights outside of blocks. `fits` says whether
    all of it, copies included, is at most GPU_BYTES; activations are not counted.
    """

    how: str
    model: str
    weights: int
    method: str
    ranks: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    total_bytes: int
    saved: float
    counted_bytes: int
    loss: float | None = None
    block_bytes: int = 0
    outside_bytes: int = 0
    fits: bool = True


def measured(worlds: Sequence[int], config: GPTConfig = SMALL) -> Iterator[WeightsRow]:
    """Yield the rows of a model that processes of this machine train for a step."""
    whole = on_meta(config)
    for world in worlds:
        ranks = run_ranks(world, train, config)
        most = {method: max((rank[method][0] for rank in ranks), key=lambda held: held.total) for method in METHODS}
        for method, held in most.items():
            counted_bytes = max(rank.total for rank in count(whole, method, world))
            loss = ranks[0][method][1]
            yield _row("measured", "small", whole, method, world, held, most[DDP], counted_bytes, loss=loss)


def counted(worlds: Sequence[int] = RANKS) -> Iterator[WeightsRow]:
    """Yield the rows of models that are too large to train here."""
    for name, config in LARGE.items():
        whole = on_meta(config)
        for world in worlds:
            most = {method: max(count(whole, method, world), key=lambda held: held.total) for method in METHODS}
            for method, held in most.items():
                block, outside = gathered(whole, world) if method == FSDP else (0, 0)
                copies = dict(block_bytes=block, outside_bytes=outside, fits=held.total + block + outside <= GPU_BYTES)
                yield _row("counted", name, whole, method, world, held, most[DDP], held.total, **copies)


def on_meta(config: GPTConfig) -> GPT:
    """Return the model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return GPT(config)


def train(rank: int, world: int, _: Any, config: GPTConfig = SMALL) -> dict[str, tuple[Held, float]]:
    """Take one step under each method, each rank on its own tokens; return the bytes then held and the next loss."""
    mesh = init_mesh(device="cpu")
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocabulary, (1, TOKENS), generator=generator)
    batch = shard_batch(tokens, mesh)
    found = {}
    for method in METHODS:
        model, optimizer = lay_out(GPT(config), method, mesh)
        accumulate(model, [batch], mesh)
        optimizer.step()
        kept = held_bytes(model, optimizer)
        found[method] = kept, float(accumulate(model, [batch], mesh).loss)
    return found


def lay_out(model: nn.Module, method: str, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model laid out on a mesh by one of the methods, and its AdamW."""
    model = shard(model, mesh, "full") if method == FSDP else replicate(model, mesh)
    if method == ZERO:
        return model, sharded_optimizer(model, torch.optim.AdamW, mesh, lr=1e-3)
    return model, torch.optim.AdamW(parameters(model), lr=1e-3)


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """Return the bytes that this rank holds; a storage counts once, however many tensors share it.

    >>> layer = nn.Linear(3, 2)
    >>> held_bytes(layer, torch.optim.AdamW(layer.parameters()))
    Held(parameters=32, gradients=0, optimizer=0)
    """
    seen: set[int] = set()

    def add(tensors: Iterable[Tensor]) -> int:
        total = 0
        for x in tensors:
            storage = (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    state = getattr(optimizer, "optim", optimizer).state  # ZeRO-1 wraps an optimizer of this rank's weights
    return Held(
        add(model.parameters()),
        add(p.grad for p in model.parameters() if p.grad is not None),
        add(x for own in state.values() for x in own.values() if isinstance(x, Tensor)),
    )


def count(model: nn.Module, method: str, world: int) -> list[Held]:
    """Return the bytes of each rank after a step of AdamW on all weights of a model, from their shapes.

    >>> [held.total for held in count(nn.Linear(3, 5, bias=False), FSDP, 2)]
    [148, 124]
    """
    weights = list(model.parameters())
    if method == FSDP:
        return _count_shards(weights, world)
    whole = sum(p.nbytes for p in weights)
    owners = _partition(weights, world) if method == ZERO else [weights] * world
    return [Held(whole, whole, sum(2 * p.nbytes + STEP_BYTES for p in own)) for own in owners]


def gathered(model: GPT, world: int, itemsize: int = 2) -> tuple[int, int]:
    """Return the bytes that FSDP gathers at a time: of the largest block, and of all weights outside of blocks.

    Weights outside of blocks, the embedding and the head, belong to the root module and stay gathered through the
    forward. A prefetched block comes on top.
    """

    def size(part: nn.Module) -> int:
        return sum(p.detach().chunk(world)[0].numel() * world * itemsize for p in part.parameters())

    blocks = [size(block) for block in model.layers]
    return max(blocks), size(model) - sum(blocks)


def _count_shards(weights: Sequence[Tensor], world: int) -> list[Held]:
    """Shard rows by `torch.chunk` as `fully_shard` does, which pads weights and gradients to the first chunk."""
    padded, own = 0, [0] * world
    for p in weights:
        parts = p.detach().chunk(world)
        padded += parts[0].nbytes
        for rank in range(world):
            own[rank] += STEP_BYTES + (2 * parts[rank].nbytes if rank < len(parts) else 0)
    return [Held(padded, padded, moments) for moments in own]


def _partition(weights: Sequence[Tensor], world: int) -> list[list[Tensor]]:
    """Partition as ZeroRedundancyOptimizer does: the largest first, each to the rank that has least."""
    owners: list[list[Tensor]] = [[] for _ in range(world)]
    sizes = [0] * world
    for p in sorted(weights, key=Tensor.numel, reverse=True):
        rank = sizes.index(min(sizes))
        owners[rank].append(p)
        sizes[rank] += p.numel()
    return owners


def _row(
    how: str, name: str, model: GPT, method: str, world: int, held: Held, ddp: Held, counted: int, **more: Any
) -> WeightsRow:
    weights = sum(p.numel() for p in model.parameters())
    parts = (held.parameters, held.gradients, held.optimizer, held.total)
    return WeightsRow(how, name, weights, method, world, *parts, 1 - held.total / ddp.total, counted, **more)


def _megabytes(header: str, key: str) -> Column:
    return Column(header, lambda row: f"{row[key] / 1e6:.2f}")


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.2f}"


MEASURED = (
    Column("ranks", "ranks", once=True),
    Column("method", "method", is_text=True),
    _megabytes("weights", "parameter_bytes"),
    _megabytes("gradients", "gradient_bytes"),
    _megabytes("optimizer", "optimizer_bytes"),
    _megabytes("sum", "total_bytes"),
    _megabytes("counted", "counted_bytes"),
    Column("saved", lambda row: f"{row['saved']:.1%}"),
)
COUNTED = (
    Column("model", "model", is_text=True, once=True),
    Column("ranks", "ranks"),
    *(Column(method, method) for method in METHODS),
    Column("saved", lambda row: f"{row['saved']:.1%}"),
    Column("block", lambda row: _gigabytes(row["block_bytes"])),
    Column("rest", lambda row: _gigabytes(row["outside_bytes"])),
)


def tables(rows: Rows) -> list[Table]:
    """Return a table of measured rows, and one of counted rows."""
    trained, merged = [row for row in rows if row["how"] == "measured"], _merge_methods(rows)
    sizes = {row["model"]: row["weights"] for row in merged}
    caption = (
        f"{', '.join(f'{name}: {weights:,} weights' for name, weights in sizes.items())}. saved: by FSDP, against DDP. "
        "block, rest: bf16 copies that FSDP gathers at a time, of the largest block and of the weights outside of "
        f"blocks. {NO_MEMORY}: more than {GPU_BYTES / 1e9:.0f} GB with these copies and without activations"
    )
    head = f"measured, {trained[0]['weights']:,} weights: MB of the rank that keeps most"
    return [
        terminal(head, MEASURED, trained, "ranks", "saved: against DDP on as many ranks"),
        terminal("counted, 16 bytes a weight: GB of the rank that keeps most", COUNTED, merged, "model", caption),
    ]


def _merge_methods(rows: Rows) -> Rows:
    """Return a row for each counted model and number of ranks: that of FSDP, with a cell for each method."""
    merged: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row["how"] == "counted":
            own = merged.setdefault((row["model"], row["ranks"]), {})
            own[row["method"]] = _gigabytes(row["total_bytes"]) if row["fits"] else NO_MEMORY
            own |= row if row["method"] == FSDP else {}
    return list(merged.values())


BENCHMARK = Benchmark(
    name="weights",
    keys=frozenset({"how", "parameter_bytes", "counted_bytes"}),
    tables=tables,
    markdown=lambda rows: "\n\n".join(
        (
            markdown(MEASURED, [row for row in rows if row["how"] == "measured"]),
            markdown(COUNTED, _merge_methods(rows)),
        )
    ),
    title=lambda rows: "bytes of weights, gradients and AdamW's state in float32 on a rank",
    draw=plots.weights,
)
