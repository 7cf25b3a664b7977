"""The case of a benchmark of attention: one shape, mask and dtype on one device, all of them by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshflash.bench.masks import parse_mask
from meshflash.core.mask import Mask
from meshflash.core.tiles import worklist
from meshflash.runtime.devices import CPU, kind_here

#: Relative errors above these count as wrong; such a result is not timed. Plain PyTorch stays well below.
WORST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-10}

#: q, k, v and the gradient of the output.
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One shape, mask and dtype, over all ranks together. An impossible one raises ValueError."""

    tokens: int = 2048
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    mask: str = "causal"
    dtype: str = "float32"
    device: str = "cpu"
    deterministic: bool = False

    def __post_init__(self) -> None:
        known = [str(dtype).removeprefix("torch.") for dtype in WORST_ERROR]
        if self.dtype not in known:
            raise ValueError(f"dtype {self.dtype!r}: expected one of {', '.join(known)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key heads do not divide {self.heads} query heads")
        _ = self.rule

    @property
    def rule(self) -> Mask:
        """The mask of this name."""
        return parse_mask(self.mask, self.tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of this name."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def worst_error(self) -> float:
        """The relative error above which a result counts as wrong."""
        return WORST_ERROR[self.torch_dtype]

    def tensors(self) -> Tensors:
        """Return q, k, v and the gradient of the output; the same each time, and on every rank."""
        generator = torch.Generator(self.device).manual_seed(0)

        def tensor(heads: int) -> Tensor:
            shape = (self.batch, self.tokens, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=self.device).to(self.torch_dtype)

        q, k, v = (tensor(heads).requires_grad_() for heads in (self.heads, self.kv_heads, self.kv_heads))
        return q, k, v, tensor(self.heads)

    def flops(self, direction: str) -> float:
        """Return the FLOPs of a pass over all visible pairs: 4 dim for each pair, 2.5 times that backward."""
        whole = (range(self.tokens),)
        forward = 4.0 * self.batch * self.heads * self.head_dim * worklist(self.rule, whole, whole).pairs
        return forward * 2.5 if direction == "backward" else forward


def pick_device(name: str | None) -> str:
    """Return this device if it can be used, else raise ValueError; for None the GPU if there is one."""
    if name is None:
        return kind_here()
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r}: {str(error).splitlines()[0]}") from error
    return name


def pick_dtype(name: str | None, device: str) -> str:
    """Return this dtype; for None bfloat16 on GPUs and float32 on CPUs."""
    return name or ("float32" if on_cpu(device) else "bfloat16")


def on_cpu(device: str) -> bool:
    """Return whether the device of this name is the CPU."""
    return torch.device(device).type == CPU
