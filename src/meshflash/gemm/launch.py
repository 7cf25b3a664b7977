"""Products as planned: our kernel with its descriptors and workspace, or torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshflash.gemm.configs import Config
from meshflash.gemm.planning import TORCH, Plan, in_lines
from meshflash.kernels import triton_configs
from meshflash.kernels.contract import HALF
from meshflash.kernels.triton_launch import described
from meshflash.launch.devices import TRITON

#: By name, as torch has them.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
#: Sums of parts that a thread has at a time, beside as many parts: the more, the less it waits for memory.
SUMS = 64


@dataclass(frozen=True)
class Epilogue:
    """What follows the sums, in float32: bias, activation, dtype. `keep` also stores what the activation gets."""

    dtype: torch.dtype
    bias: Tensor | None = None
    activation: str | None = None
    keep: bool = False


def run(plan: Plan, a: Tensor, b: Tensor, precision: str, then: Epilogue) -> tuple[Tensor, Tensor | None]:
    """The result, and what the activation got where that is kept."""
    return _by_torch(a, b, precision, then) if plan.mode == TORCH else _by_kernel(plan, a, b, precision, then)


def _by_torch(a: Tensor, b: Tensor, precision: str, then: Epilogue) -> tuple[Tensor, Tensor | None]:
    with torch.autocast(a.device.type, enabled=False), _float32_as(precision, a):
        if a.dtype in HALF and then.dtype == torch.float32:
            x = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
            x = x if then.bias is None else x + then.bias
        elif then.bias is not None and then.bias.dtype == a.dtype:
            x = torch.addmm(then.bias, a, b)
        else:
            x = torch.mm(a, b) if then.bias is None else torch.mm(a, b) + then.bias
        x = x.to(then.dtype)
    out = x if then.activation is None else ACTIVATIONS[then.activation](x)
    return out, x if then.keep else None


@contextmanager
def _float32_as(precision: str, a: Tensor) -> Iterator[None]:
    """Inside the block torch multiplies float32 so on GPUs, whatever it was told before."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if not a.is_cuda or a.dtype != torch.float32 or before == precision:
        yield
        return
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def _by_kernel(plan: Plan, a: Tensor, b: Tensor, precision: str, then: Epilogue) -> tuple[Tensor, Tensor | None]:
    from meshflash.gemm.stream_k import product

    config, split = plan.config, plan.partition
    assert config is not None
    assert split is not None
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=then.dtype, device=a.device)
    kept = torch.empty_like(out) if then.keep else out
    as_blocks = in_blocks(a, b, config)
    store = as_blocks is not None and out.dtype in HALF and in_lines(out)  # wider ones take too much shared memory
    half = [config.block_m, config.block_n // 2]
    out_in, kept_in = (described(x, half) if store else x for x in (out, kept))
    (a_in, a_turned), (b_in, b_turned) = as_blocks or ((a, False), (b, False))
    size = config.block_m * config.block_n
    partials, counts = workspace(a.device, split.programs * split.slots * size, split.shared)
    with torch.cuda.device_of(a):
        product[(split.programs,)](
            *(a_in, b_in, out if then.bias is None else then.bias.contiguous()),
            *(out, out_in, kept, kept_in, partials, counts),
            *(m, n, k, *a.stride(), *b.stride(), out.stride(0)),
            *(split.steps, split.crew, split.slices, split.shared),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP=config.group,
            SLOTS=split.slots,
            COLUMNS=min(SUMS * 32 * config.warps // config.block_m, config.block_n),
            FLATTEN=bool(config.flatten),
            DESCRIPTORS=as_blocks is not None,
            A_TURNED=a_turned,
            B_TURNED=b_turned,
            OUT_DESCRIBED=store,
            ACTIVATION=then.activation,
            HAS_BIAS=then.bias is not None,
            KEEP=then.keep,
            WIDE=any(extent(x) >= 2**31 for x in (a, b, out)),
            PRECISION=precision,
            INTERPRETED=a.device.type == "cpu",
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return out, kept if then.keep else None


def in_blocks(a: Tensor, b: Tensor, config: Config) -> list[tuple[Any, bool]] | None:
    """Both as descriptors, and whether of the transpose; None where the GPU has none, or one of them does not fit."""
    if a.dtype not in HALF or not triton_configs.has_descriptors(a.device):
        return None
    turned = [not in_lines(x) for x in (a, b)]
    if not all(in_lines(x.T if t else x) for x, t in zip((a, b), turned, strict=True)):
        return None
    blocks = ([config.block_m, config.block_k], [config.block_k, config.block_n])
    return [
        (described(x.T, block[::-1]) if t else described(x, block), t)
        for x, block, t in zip((a, b), blocks, turned, strict=True)
    ]


def extent(x: Tensor) -> int:
    """How far apart its first and last number are."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


#: Partial sums and counts by device and stream: kernels of one stream follow each other.
_kept: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}


def workspace(device: torch.device, numbers: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Room for so many partial sums, and counts of so many tiles: they are zero, and kernels leave them so.

    It is kept for the stream, and grows. A graph that is captured gets its own, since its replays may run beside us.
    """
    if device.type != TRITON:  # interpreted programs do not run beside each other, but threads do
        return _room(device, numbers, tiles)
    if torch.cuda.is_current_stream_capturing():
        return _room(device, numbers, tiles)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    partials, counts = _kept.get(key) or _room(device, 0, 0)
    if partials.numel() < numbers or counts.numel() < tiles:
        partials, counts = _room(device, max(numbers, partials.numel()), max(tiles, counts.numel()))
    _kept[key] = partials, counts
    return partials, counts


def _room(device: torch.device, numbers: int, tiles: int) -> tuple[Tensor, Tensor]:
    partials = torch.empty(numbers, dtype=torch.float32, device=device)
    return partials, torch.zeros(tiles, dtype=torch.int32, device=device)
