"""What is measured: one shape, mask and dtype on one device. Masks, dtypes and devices go by their names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshflash.core.mask import Mask
from meshflash.core.tiles import worklist
from meshflash.runtime.devices import CPU, kind_here

#: No time is shown of what has a relative error above this; plain PyTorch stays well below.
WORST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-10}
#: The standard deviation of the logarithm of lengths in `documents-lognormal-N`: a few long ones hold most tokens.
SIGMA = 1.0

#: q, k, v and the gradient of the output.
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One shape, mask and dtype; over several ranks, that of all of them. One that cannot be is a ValueError."""

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
        """The mask that the name stands for."""
        return parse_mask(self.mask, self.tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that the name stands for."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def worst_error(self) -> float:
        """The relative error above which a result counts as wrong."""
        return WORST_ERROR[self.torch_dtype]

    def tensors(self) -> Tensors:
        """q, k, v and the gradient of the output; the same each time, and on every rank."""
        generator = torch.Generator(self.device).manual_seed(0)

        def tensor(heads: int) -> Tensor:
            shape = (self.batch, self.tokens, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=self.device).to(self.torch_dtype)

        q, k, v = (tensor(heads).requires_grad_() for heads in (self.heads, self.kv_heads, self.kv_heads))
        return q, k, v, tensor(self.heads)

    def flops(self, direction: str) -> float:
        """Of the pairs that the mask shows: 4 for each of dim, and 2.5 times that backward."""
        whole = (range(self.tokens),)
        forward = 4.0 * self.batch * self.heads * self.head_dim * worklist(self.rule, whole, whole).pairs
        return forward * 2.5 if direction == "backward" else forward


def pick_device(name: str | None) -> str:
    """The device of this name if it can be used; the GPU, if there is one, for None."""
    if name is None:
        return kind_here()
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r}: {str(error).splitlines()[0]}") from error
    return name


def pick_dtype(name: str | None, device: str) -> str:
    """The dtype of this name; for None what one computes in on the device: bfloat16 on GPUs, float32 on CPUs."""
    return name or ("float32" if on_cpu(device) else "bfloat16")


def on_cpu(device: str) -> bool:
    """Whether the device of this name is the CPU."""
    return torch.device(device).type == CPU


def parse_mask(name: str, tokens: int) -> Mask:
    """A mask by name: full, causal, or one of these, all causal.

    window-N: N keys back. documents-N: N documents of equal length. documents-lognormal-N: documents with
    lengths drawn from a lognormal distribution of mean N, the same each time; the last is cut to fit.

    >>> parse_mask("window-4", 16)
    window(4, 0)
    """
    kind, _, number = name.rpartition("-")
    count = int(number) if number.isdigit() else 0
    if name == "full":
        return Mask.full()
    if name == "causal":
        return Mask.causal()
    if kind == "window" and count:
        return Mask.causal() & Mask.window(count, 0)
    if kind == "documents" and 0 < count <= tokens:
        return Mask.causal() & Mask.documents([tokens // count + (n < tokens % count) for n in range(count)])
    if kind == "documents-lognormal" and count:
        return Mask.causal() & Mask.documents(_lognormal(count, tokens))
    raise ValueError(
        f"mask {name!r}: expected full, causal, window-N, documents-N or documents-lognormal-N, such as window-512"
    )


def _lognormal(mean: int, tokens: int) -> list[int]:
    """Document lengths of this mean, that of the distribution before rounding and cutting, adding up to `tokens`."""
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    left = tokens
    while left:
        drawn = generator.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA)
        lengths.append(min(left, max(1, round(drawn))))
        left -= lengths[-1]
    return lengths
