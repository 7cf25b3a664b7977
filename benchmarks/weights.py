"""Bytes of parameters, gradients and optimizer state that each rank keeps under DDP, ZeRO-1 and FSDP.

Measured: a small GPT takes one step of AdamW over processes, and each rank adds up the storages that it then holds.
Counted: the same sums from the shapes of models on the meta device, of which nothing is ever allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshflash.bench.tables import NO_MEMORY
from meshflash.models.gpt import GPT, GPTConfig, tiny
from meshflash.parallel import accumulate, init_mesh, replicate, shard, shard_batch, sharded_optimizer
from meshflash.parallel.weights import parameters
from meshflash.runtime.processes import run_ranks

DDP, ZERO, FSDP = METHODS = ("DDP", "ZeRO-1", "FSDP")

#: What is trained: a step of real work that eight processes on two cores end in seconds.
SMALL = tiny(vocabulary=4096, layers=4, dim=256, heads=8, kv_heads=4, hidden=768)
TOKENS = 32

#: What is counted: Llama's shapes, with about as many weights as their names say.
LARGE = {
    "1B": GPTConfig(32_000, 20, 2048, 32, 4, 5632),
    "10B": GPTConfig(128_256, 42, 4096, 32, 8, 14_336),
    "100B": GPTConfig(128_256, 88, 10_240, 80, 8, 28_672),
}
RANKS = (2, 4, 8, 64)

#: A rank's memory.
ROOM = 80 * 10**9

#: AdamW counts its steps in a float32 for each weight tensor.
STEP = 4


@dataclass(frozen=True)
class Held:
    """Bytes that one rank keeps from step to step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class WeightsRow:
    """The rank that keeps most. `saved` is the share of DDP's bytes that it does not keep.

    Measured rows have the loss after their step and what was counted for them. Counted rows of FSDP have the bf16
    copies that are whole at a time: those of the largest block, and of the weights outside of blocks. `fits` is
    whether all that is counted, copies included, is at most `ROOM`; activations are not counted.
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
    """Rows of a model that processes of this machine train for a step."""
    whole = on_meta(config)
    for world in worlds:
        ranks = run_ranks(world, train, config)
        most = {method: max((rank[method][0] for rank in ranks), key=lambda held: held.total) for method in METHODS}
        for method, held in most.items():
            counted_bytes = max(rank.total for rank in count(whole, method, world))
            loss = ranks[0][method][1]
            yield _row("measured", "small", whole, method, world, held, most[DDP], counted_bytes, loss=loss)


def counted(worlds: Sequence[int] = RANKS) -> Iterator[WeightsRow]:
    """Rows of models that no rank need hold."""
    for name, config in LARGE.items():
        whole = on_meta(config)
        for world in worlds:
            most = {method: max(count(whole, method, world), key=lambda held: held.total) for method in METHODS}
            for method, held in most.items():
                block, outside = gathered(whole, world) if method == FSDP else (0, 0)
                copies = dict(block_bytes=block, outside_bytes=outside, fits=held.total + block + outside <= ROOM)
                yield _row("counted", name, whole, method, world, held, most[DDP], held.total, **copies)


def on_meta(config: GPTConfig) -> GPT:
    """The model's shapes alone."""
    with torch.device("meta"):
        return GPT(config)


def train(rank: int, world: int, _: Any, config: GPTConfig = SMALL) -> dict[str, tuple[Held, float]]:
    """One step under each method, each data rank on its own tokens: what this rank then holds, and the next loss."""
    mesh = init_mesh(device="cpu")
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocabulary, (1, TOKENS), generator=generator)
    batch = shard_batch(tokens, mesh)
    found = {}
    for method in METHODS:
        model, optimizer = lay(GPT(config), method, mesh)
        accumulate(model, [batch], mesh)
        optimizer.step()
        kept = hold(model, optimizer)
        found[method] = kept, float(accumulate(model, [batch], mesh).loss)
    return found


def lay(model: nn.Module, method: str, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on a mesh by one of the methods, and its AdamW."""
    model = shard(model, mesh, "full") if method == FSDP else replicate(model, mesh)
    if method == ZERO:
        return model, sharded_optimizer(model, torch.optim.AdamW, mesh, lr=1e-3)
    return model, torch.optim.AdamW(parameters(model), lr=1e-3)


def hold(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """What this rank holds: storages, each once, however many tensors share it.

    >>> layer = nn.Linear(3, 2)
    >>> hold(layer, torch.optim.AdamW(layer.parameters()))
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

    state = getattr(optimizer, "optim", optimizer).state  # of ZeRO, that of the optimizer of this rank's weights
    return Held(
        add(model.parameters()),
        add(p.grad for p in model.parameters() if p.grad is not None),
        add(x for own in state.values() for x in own.values() if isinstance(x, Tensor)),
    )


def count(model: nn.Module, method: str, world: int) -> list[Held]:
    """What each rank would hold after a step of AdamW on all weights of a model, from their shapes.

    >>> [held.total for held in count(nn.Linear(3, 5, bias=False), FSDP, 2)]
    [148, 124]
    """
    weights = list(model.parameters())
    if method == FSDP:
        return _count_shards(weights, world)
    whole = sum(p.nbytes for p in weights)
    owners = _partition(weights, world) if method == ZERO else [weights] * world
    return [Held(whole, whole, sum(2 * p.nbytes + STEP for p in own)) for own in owners]


def gathered(model: GPT, world: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of the weights that FSDP holds whole at a time: the largest block, and all that is outside of blocks.

    Those outside, the embedding and the head, are the root's: they stay through the whole forward. A block on its way
    while another computes comes on top.
    """

    def size(part: nn.Module) -> int:
        return sum(p.detach().chunk(world)[0].numel() * world * itemsize for p in part.parameters())

    blocks = [size(block) for block in model.layers]
    return max(blocks), size(model) - sum(blocks)


def _count_shards(weights: Sequence[Tensor], world: int) -> list[Held]:
    """As `fully_shard` cuts: rows by `torch.chunk`; weights and gradients are padded to the first part, moments not."""
    padded, own = 0, [0] * world
    for p in weights:
        parts = p.detach().chunk(world)
        padded += parts[0].nbytes
        for rank in range(world):
            own[rank] += STEP + (2 * parts[rank].nbytes if rank < len(parts) else 0)
    return [Held(padded, padded, moments) for moments in own]


def _partition(weights: Sequence[Tensor], world: int) -> list[list[Tensor]]:
    """As ZeroRedundancyOptimizer does: the largest first, each to the rank that has least."""
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


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """What was measured, and what was counted, each a table."""
    return [
        table([row for row in rows if row["how"] == how])
        for how, table in (("measured", _measured_table), ("counted", _counted_table))
    ]


def _measured_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("ranks", "method", "weights", "gradients", "optimizer", "sum", "counted", "saved")
    table = _table(f"measured, {rows[0]['weights']:,} weights: MB of the rank that keeps most", columns)
    table.caption = "saved: against DDP on as many ranks"
    for ranks, own in groupby(rows, key=lambda row: row["ranks"]):
        for n, row in enumerate(own):
            keys = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "total_bytes", "counted_bytes")
            numbers = [f"{row[key] / 1e6:.2f}" for key in keys]
            table.add_row("" if n else str(ranks), row["method"], *numbers, f"{row['saved']:.1%}")
        table.add_section()
    return table


def _counted_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("model", "ranks", *METHODS, "saved", "block", "rest")
    table = _table("counted, 16 bytes a weight: GB of the rank that keeps most", columns)
    sizes = {row["model"]: row["weights"] for row in rows}
    table.caption = (
        f"{', '.join(f'{name}: {weights:,} weights' for name, weights in sizes.items())}. saved: by FSDP, against DDP. "
        "block, rest: bf16 copies that FSDP gathers at a time, of the largest block and of what is outside of "
        f"blocks. {NO_MEMORY}: more than {ROOM / 1e9:.0f} GB with these copies and without activations"
    )
    last = ""
    for (name, ranks), group in groupby(rows, key=lambda row: (row["model"], row["ranks"])):
        own = {row["method"]: row for row in group}
        if last and name != last:
            table.add_section()
        kept = [_gigabytes(own[m]["total_bytes"]) if own[m]["fits"] else NO_MEMORY for m in METHODS]
        copies = [_gigabytes(own[FSDP][key]) for key in ("block_bytes", "outside_bytes")]
        table.add_row("" if name == last else name, str(ranks), *kept, f"{own[FSDP]['saved']:.1%}", *copies)
        last = name
    return table


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.2f}"


def _table(head: str, columns: Sequence[str]) -> Table:
    table = Table(title=head, title_justify="left", title_style="bold", caption_justify="left")
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
    for name in columns:
        table.add_column(name, justify="left" if name in ("method", "model") else "right", no_wrap=True)
    return table
