"""What benchmarks of training share: a GPT that takes steps of AdamW on its shard of the same samples.

Weights and samples depend on the sizes alone, so losses of the same steps agree however they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshflash.bench.cases import on_cpu, pick_dtype
from meshflash.models.gpt import GPT, GPTConfig
from meshflash.parallel import accumulate, parallelize, shard_batch
from meshflash.parallel.mesh import DATA_AXES, mesh_rank, size
from meshflash.parallel.weights import parameters

#: The largest relative difference of losses of the same step: sums in another order round differently.
WORST_LOSS = {"float32": 1e-4, "bfloat16": 2e-3}
#: Learning rate of AdamW: a few steps on the same samples change the loss by more than WORST_LOSS.
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Training:
    """The sizes of a GPT and of a step's batch over all ranks. Impossible sizes raise ValueError."""

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
        """The model: as many KV heads as query heads, and a hidden size of 8/3 dim as in Llama, in multiples of 64."""
        hidden = 64 * math.ceil(self.dim / 24)
        return GPTConfig(self.vocabulary, self.layers, self.dim, self.heads, self.heads, hidden, tokens=self.tokens)

    @property
    def words(self) -> str:
        """The model in words."""
        sizes = f"GPT, layers {self.layers}, dim {self.dim}, heads {self.heads}, vocabulary {self.vocabulary:,}"
        return f"{sizes}, {self.config.num_parameters:,} weights, {self.dtype}, on {self.device}"


def training(small: Training, large: Training, device: str, dtype: str | None, **sizes: int | None) -> Training:
    """Return the small sizes on a CPU and the large ones on a GPU, but for those that are given.

    >>> size = Training(2, 64, 4, 256, 512, 1)
    >>> training(size, size, "cpu", None, dim=128, heads=None).dim
    128
    """
    given: dict[str, Any] = {name: number for name, number in sizes.items() if number is not None}
    base = small if on_cpu(device) else large
    return replace(base, device=device, dtype=pick_dtype(dtype, device), **given)


class Trainer:
    """This rank's replica of the model, its samples of the batch, and its optimizer. Each rank makes one."""

    def __init__(self, case: Training, mesh: DeviceMesh, device: torch.device) -> None:
        with device:
            self.gpt: Any = GPT(case.config)
        dtype = None if case.dtype == "float32" else getattr(torch, case.dtype)
        self.model: Any = parallelize(self.gpt, mesh, compute_dtype=dtype)
        self.optimizer = torch.optim.AdamW(parameters(self.model), lr=LEARNING_RATE, fused=True)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(case.vocabulary, (case.batch, case.tokens), generator=generator)
        own = tokens.tensor_split(size(mesh, DATA_AXES))[mesh_rank(mesh, DATA_AXES)]
        self.mesh, self.batch = mesh, shard_batch(own.to(device), mesh)

    def step(self) -> Tensor:
        """Run forward, backward and the optimizer; return the loss over the whole batch."""
        try:
            loss = accumulate(self.model, [self.batch], self.mesh).loss
            self.optimizer.step()
        finally:  # also where memory ran out on the way
            self.optimizer.zero_grad()
        return loss

    def restart(self) -> None:
        """Restore the initial weights."""
        self.gpt.init_weights()
        self.optimizer.state.clear()


def check_losses(losses: Mapping[str, float], dtype: str) -> None:
    """Raise RuntimeError unless all losses agree with the first one."""
    first, want = next(iter(losses.items()))
    for name, loss in losses.items():
        if not abs(loss - want) <= WORST_LOSS[dtype] * abs(want):
            raise RuntimeError(
                f"{name}: loss {loss:.6f} where {first} has {want:.6f}, and {dtype} allows a relative "
                f"{WORST_LOSS[dtype]:.0e}; it is wrong, so it is not shown"
            )


def of_row(row: Mapping[str, Any]) -> Training:
    """Return the sizes that a row of a record was measured with."""
    return Training(**{name: row[name] for name in Training.__dataclass_fields__})
