"""What benchmarks of training share: a GPT of given sizes that takes steps of AdamW on its part of the same samples.

Weights and samples follow from the sizes alone, so that losses of the same steps agree however they were computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshflash.bench import record
from meshflash.bench.cases import on_cpu, pick_dtype
from meshflash.models.gpt import GPT, GPTConfig
from meshflash.parallel import accumulate, parallelize, shard_batch
from meshflash.parallel.mesh import DATA_AXES, mesh_rank, size
from meshflash.parallel.weights import parameters

#: How far losses of the same step may be apart, relative: sums are taken in another order, and steps follow from them.
WORST_LOSS = {"float32": 1e-4, "bfloat16": 2e-3}
#: The rate of AdamW: a few steps on the same samples change the loss by more than that.
RATE = 3e-4


@dataclass(frozen=True)
class Training:
    """The sizes of a GPT, and a step's samples, over all ranks. What cannot be is a ValueError."""

    layers: int
    dim: int
    heads: int
    vocabulary: int
    tokens: int
    batch: int
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in WORST_LOSS:
            raise ValueError(f"dtype {self.dtype!r}: expected one of {', '.join(WORST_LOSS)}; weights are float32")
        _ = self.config

    @property
    def config(self) -> GPTConfig:
        """The model: a key head for each head, and Llama's 8/3 hidden units for each dim, in multiples of 64."""
        hidden = 64 * math.ceil(self.dim / 24)
        return GPTConfig(self.vocabulary, self.layers, self.dim, self.heads, self.heads, hidden, tokens=self.tokens)

    @property
    def words(self) -> str:
        """The model in words."""
        sizes = f"GPT, layers {self.layers}, dim {self.dim}, heads {self.heads}, words {self.vocabulary:,}"
        return f"{sizes}, {self.config.num_parameters:,} weights, {self.dtype}, on {self.device}"


def training(small: Training, large: Training, device: str, dtype: str | None, **sizes: int | None) -> Training:
    """The small sizes on a CPU and the large ones on a GPU, but for those that were asked.

    >>> size = Training(2, 64, 4, 256, 512, 1)
    >>> training(size, size, "cpu", None, dim=128, heads=None).dim
    128
    """
    asked: dict[str, Any] = {name: number for name, number in sizes.items() if number is not None}
    base = small if on_cpu(device) else large
    return replace(base, device=device, dtype=pick_dtype(dtype, device), **asked)


class Trainer:
    """This rank's replica of the model, its samples of the batch, and its optimizer."""

    def __init__(self, case: Training, mesh: DeviceMesh, device: torch.device) -> None:
        with device:
            self.gpt: Any = GPT(case.config)
        dtype = None if case.dtype == "float32" else getattr(torch, case.dtype)
        self.model: Any = parallelize(self.gpt, mesh, compute_dtype=dtype)
        self.optimizer = torch.optim.AdamW(parameters(self.model), lr=RATE, fused=True)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(case.vocabulary, (case.batch, case.tokens), generator=generator)
        own = tokens.tensor_split(size(mesh, DATA_AXES))[mesh_rank(mesh, DATA_AXES)]
        self.mesh, self.batch = mesh, shard_batch(own.to(device), mesh)

    def step(self) -> Tensor:
        """Forward, backward and the optimizer's step; the loss of one device."""
        try:
            loss = accumulate(self.model, [self.batch], self.mesh).loss
            self.optimizer.step()
        finally:  # also where memory ran out on the way
            self.optimizer.zero_grad()
        return loss

    def restart(self) -> None:
        """The weights of the beginning."""
        self.gpt.init_weights()
        self.optimizer.state.clear()


def check_losses(losses: Mapping[str, float], dtype: str) -> None:
    """RuntimeError unless all losses are the first one."""
    first, want = next(iter(losses.items()))
    for name, loss in losses.items():
        if not abs(loss - want) <= WORST_LOSS[dtype] * abs(want):
            raise RuntimeError(
                f"{name}: loss {loss:.6f} where {first} has {want:.6f}, and {dtype} allows a relative "
                f"{WORST_LOSS[dtype]:.0e}; it is wrong, so it is not shown"
            )


def read(path: Path, columns: set[str], command: str) -> dict[str, Any]:
    """A record of a command whose rows have these columns; ValueError for another."""
    written = record.read(path)
    if not all(columns <= row.keys() for row in written.get("rows") or [{}]):
        raise ValueError(f"{path} is not a record of `meshflash {command}`")
    return written


def of_row(row: Mapping[str, Any]) -> Training:
    """What a record's row was measured with."""
    return Training(**{name: row[name] for name in Training.__dataclass_fields__})


def in_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a document."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))
