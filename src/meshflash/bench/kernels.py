"""Kernels beside each other and beside torch's own: right first, then timed in turns, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from meshflash.api import flash_attention
from meshflash.bench.timing import interleaved, peak_bytes
from meshflash.core.mask import Mask
from meshflash.core.tiles import worklist
from meshflash.kernels import registry

#: The oracle is dense up to this many tokens; beyond, the tiled kernel in float64 stands in for it.
DENSE_TOKENS = 4096
#: No kernel's time is shown if its relative error is above this; plain PyTorch stays well below.
WORST_ERROR = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SDPA = "torch sdpa"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Cell:
    """One shape, mask and dtype."""

    tokens: int = 2048
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    mask: str = "causal"
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def rule(self) -> Mask:
        """The mask that the name stands for."""
        return parse_mask(self.mask, self.tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that the name stands for."""
        dtype = getattr(torch, self.dtype, None)
        if dtype not in WORST_ERROR:
            known = ", ".join(str(known).removeprefix("torch.") for known in WORST_ERROR)
            raise ValueError(f"dtype {self.dtype!r}: expected one of {known}")
        return dtype

    def flops(self, direction: str) -> float:
        """Of the pairs that the mask shows: 4 for each of dim, and 2.5 times that backward."""
        whole = (range(self.tokens),)
        forward = 4.0 * self.batch * self.heads * self.head_dim * worklist(self.rule, whole, whole).pairs
        return forward * 2.5 if direction == "backward" else forward


@dataclass(frozen=True)
class Row:
    """One kernel in one cell, one pass."""

    kernel: str
    ran: str
    direction: str
    cell: Cell
    ms: float
    tflops: float
    error: float
    peak_bytes: int

    def flat(self) -> dict[str, Any]:
        """As JSON takes it."""
        row = asdict(self)
        cell = row.pop("cell")
        return {
            "kernel": row.pop("kernel"),
            "ran": row.pop("ran"),
            "pass": row.pop("direction"),
            **cell,
            **row,
        }


def pick_device(name: str | None) -> str:
    """The device of this name if it can be used; the GPU, if there is one, for None."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r}: {str(error).splitlines()[0]}") from error
    return name


def parse_mask(name: str, tokens: int) -> Mask:
    """A mask by name: full, causal, window-N (causal, N keys back), documents-N (causal, N equal documents).

    >>> parse_mask("window-4", 16)
    causal & window(4, 0)
    """
    kind, _, number = name.partition("-")
    count = int(number) if number.isdigit() else 0
    if kind == "full" and not number:
        return Mask.full()
    if kind == "causal" and not number:
        return Mask.causal()
    if kind == "window" and count:
        return Mask.causal() & Mask.window(count, 0)
    if kind == "documents" and 0 < count <= tokens:
        lengths = [tokens // count + (n < tokens % count) for n in range(count)]
        return Mask.causal() & Mask.documents(lengths)
    raise ValueError(f"mask {name!r}: expected full, causal, window-N or documents-N, such as window-512")


def candidates(cell: Cell, names: tuple[str, ...]) -> dict[str, Attention]:
    """The functions to compare, by name."""
    known = (*registry.names(), SDPA)
    mask = cell.rule
    out: dict[str, Attention] = {}
    for name in names:
        if name not in known:
            raise ValueError(f"kernel {name!r}: expected one of {', '.join(known)}")
        out[name] = _sdpa(cell) if name == SDPA else partial(flash_attention, mask=mask, kernel=name)
    return out


def _sdpa(cell: Cell) -> Attention:
    """Torch's own; it takes other masks than causal only as a matrix, made here once and not timed."""
    matrix = None
    if cell.mask not in ("full", "causal"):
        if cell.tokens > DENSE_TOKENS:
            raise ValueError(f"{SDPA} would need a matrix of {cell.tokens} x {cell.tokens} for the mask {cell.mask}")
        i = np.arange(cell.tokens)
        matrix = torch.from_numpy(cell.rule.visible(i[:, None], i)).to(cell.device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(
            q, k, v, matrix, is_causal=cell.mask == "causal", enable_gqa=True
        ).transpose(1, 2)

    return attention


def run(cell: Cell, names: tuple[str, ...], rounds: int) -> Iterator[Row]:
    """Each kernel's rows for a cell; a kernel that is wrong raises instead of being timed."""
    device, dtype = torch.device(cell.device), cell.torch_dtype
    generator = torch.Generator(device).manual_seed(0)

    def tensor(heads: int) -> Tensor:
        shape = (cell.batch, cell.tokens, heads, cell.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

    q, k, v = tensor(cell.heads), tensor(cell.kv_heads), tensor(cell.kv_heads)
    dout = tensor(cell.heads).detach()
    functions = candidates(cell, names)
    errors, ran = _check(cell, functions, (q, k, v), dout)

    outputs = {name: function(q, k, v) for name, function in functions.items()}
    forward: dict[str, Callable[[], Any]] = {name: partial(f, q, k, v) for name, f in functions.items()}
    backward: dict[str, Callable[[], Any]] = {
        name: partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True) for name, out in outputs.items()
    }
    for direction, calls in (("forward", forward), ("backward", backward)):
        times = interleaved(calls, device, rounds)
        for name, ms in times.items():
            yield Row(
                kernel=name,
                ran=ran[name, direction],
                direction=direction,
                cell=cell,
                ms=ms,
                tflops=cell.flops(direction) / ms / 1e9,
                error=errors[name, direction],
                peak_bytes=peak_bytes(calls[name], device),
            )


def _check(
    cell: Cell, functions: dict[str, Attention], inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], str]]:
    """The relative error of each kernel and pass against float64, and which kernel ran; raises if one is wrong."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    oracle = "reference" if cell.tokens <= DENSE_TOKENS else "tiled"
    want = flash_attention(*exact, mask=cell.rule, kernel=oracle)
    want_grads = torch.autograd.grad(want, exact, dout.double())
    want = want.detach()
    errors: dict[tuple[str, str], float] = {}
    ran: dict[tuple[str, str], str] = {}
    for name, function in functions.items():
        with registry.spy() as seen:
            out = function(*inputs)
            grads = torch.autograd.grad(out, inputs, dout)
        ran |= {(name, direction): name for direction in ("forward", "backward")}
        ran |= {(name, direction): kernel for kernel, direction in seen}
        errors[name, "forward"] = _relative_error(out.detach(), want)
        errors[name, "backward"] = max(_relative_error(a, b) for a, b in zip(grads, want_grads, strict=True))
        for direction in ("forward", "backward"):
            if not errors[name, direction] <= WORST_ERROR[cell.torch_dtype]:
                raise RuntimeError(
                    f"{name}, {direction}: relative error {errors[name, direction]:.1e} against float64 at {cell}; "
                    "it is wrong, so it is not timed"
                )
    return errors, ran


def _relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).norm() / reference.norm())
