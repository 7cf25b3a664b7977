"""Products as planned: our kernel with its descriptors and workspace, or torch's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshflash.gemm.configs import Config
from meshflash.gemm.partition import Partition
from meshflash.gemm.plan import TORCH, Plan, in_lines
from meshflash.kernels.contract import HALF
from meshflash.kernels.hopper.launch import descriptor, has_gluon
from meshflash.kernels.triton import configs as triton_configs
from meshflash.kernels.triton.launch import described
from meshflash.runtime.devices import CPU, TRITON

#: By name, as torch has them.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
#: How tiles in parts are added up, by how many parts are on their way at a time: numbers of a program, which has 8
#: warps, and registers of a thread. By itself the compiler takes fewer, and loads part after part.
SUMS, SUMS_WARPS = {2: (2048, 40), 4: (1024, 40), 8: (1024, 64)}, 8
#: Of a thread, in the kernel in Gluon: of those that multiply, and of those that copy.
COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24


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
    config, split = plan.config, plan.partition
    assert config is not None
    assert split is not None
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=then.dtype, device=a.device)
    kept = torch.empty_like(out) if then.keep else out
    bias = out if then.bias is None else then.bias.contiguous()
    half_out = out.dtype in HALF and in_lines(out)  # wider ones take too much shared memory
    roles = config.by_roles and half_out and not split.long and has_gluon(a.device)
    as_blocks = in_blocks(
        a, b, replace(config, block_m=config.block_m // 2) if roles else config, descriptor if roles else described
    )
    store = half_out and as_blocks is not None
    wide = any(extent(x) >= 2**31 for x in (a, b, out))
    shares = (split.steps, split.crew, split.slices, split.shared)
    common: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GROUP": config.group,
        "SLOTS": split.slots,
        "ACTIVATION": then.activation,
        "HAS_BIAS": then.bias is not None,
        "KEEP": then.keep,
        "CHAINED": split.shared > 0 and as_blocks is not None and a.device.type != CPU,
    }
    with torch.cuda.device_of(a), in_turns(split):
        partials = workspace(a.device, split.programs * split.slots * config.block_m * config.block_n)
        (a_in, a_turned), (b_in, b_turned) = as_blocks or ((a, False), (b, False))
        if roles and as_blocks:
            given = (a_in, b_in, bias, out, kept, partials, *shares)
            _by_roles(config, split.programs, given, common | {"A_TURNED": a_turned, "B_TURNED": b_turned})
        else:
            from meshflash.gemm.kernels.stream_k import product

            half = [config.block_m, config.block_n // 2]
            out_in, kept_in = (described(x, half) if store else x for x in (out, kept))
            product[(split.programs,)](
                *(a_in, b_in, bias, out, out_in, kept, kept_in, partials),
                *(m, n, k, *a.stride(), *b.stride(), out.stride(0), *shares),
                BLOCK_K=config.block_k,
                LONG=split.long,
                DESCRIPTORS=as_blocks is not None,
                A_TURNED=a_turned,
                B_TURNED=b_turned,
                OUT_DESCRIBED=store,
                WIDE=wide,
                PRECISION=precision,
                INTERPRETED=a.device.type == CPU,
                num_warps=config.warps,
                num_stages=config.stages,
                **common,
            )
        if split.shared:
            sums = (bias, out, kept, partials, m, n, out.stride(0), *shares[:3])
            _add_up(config, split, sums, common | {"LONG": split.long, "WIDE": wide})
    return out, kept if then.keep else None


def _by_roles(config: Config, programs: int, given: tuple[Any, ...], common: dict[str, Any]) -> None:
    """The tiles that are whole and the parts of others, by the kernel in Gluon."""
    from meshflash.gemm.kernels.hopper import product

    a_in, b_in, bias, out, kept, partials, *shares = given
    half = [config.block_m // 2, config.block_n // 2]
    product[(programs,)](
        *(a_in, b_in, bias, descriptor(out, half), descriptor(kept, half), partials, *out.shape, *shares),
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        COMPUTE_REGISTERS=COMPUTE_REGISTERS,
        COPY_REGISTERS=COPY_REGISTERS,
        num_warps=4,
        **common,
    )


def _add_up(config: Config, split: Partition, given: tuple[Any, ...], common: dict[str, Any]) -> None:
    """The tiles in parts."""
    from meshflash.gemm.kernels.stream_k import add_up

    at_once = loads_of(split)
    numbers, registers = SUMS[at_once]
    height = min(config.block_m, numbers // config.block_n)
    options: dict[str, Any] = {"launch_pdl": True} if common["CHAINED"] else {}
    if given[0].device.type == CPU:
        height = config.block_m
    elif not torch.version.hip:
        options["maxnreg"] = registers
    grid = split.shared, config.block_m // height
    add_up[grid](*given, ROWS=height, AT_ONCE=at_once, num_warps=SUMS_WARPS, **options, **common)


def loads_of(split: Partition) -> int:
    """How many parts of a tile are on their way at a time."""
    others = -(-split.crew * split.steps // split.slices)  # that a tile has at most besides the first part
    return next((number for number in SUMS if others <= number), max(SUMS))


def in_turns(split: Partition) -> AbstractContextManager[Any]:
    """What two kernels that share a workspace are started in: no other thread's come between, on the same stream."""
    return _both if split.shared else nullcontext()


def in_blocks(
    a: Tensor, b: Tensor, config: Config, describe: Callable[[Tensor, list[int]], Any] | None = None
) -> list[tuple[Any, bool]] | None:
    """Both as descriptors, and whether of the transpose; None where the GPU has none, or one of them does not fit."""
    if a.dtype not in HALF or not triton_configs.has_descriptors(a.device):
        return None
    turned = [not in_lines(x) for x in (a, b)]
    if not all(in_lines(x.T if t else x) for x, t in zip((a, b), turned, strict=True)):
        return None
    blocks = ([config.block_m, config.block_k], [config.block_k, config.block_n])
    describe = describe or described
    return [
        (describe(x.T, block[::-1]) if t else describe(x, block), t)
        for x, block, t in zip((a, b), blocks, turned, strict=True)
    ]


def extent(x: Tensor) -> int:
    """How far apart its first and last number are."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


#: Partial sums by device and stream: kernels of one stream follow each other.
_both = threading.Lock()
_kept: dict[tuple[torch.device, int], Tensor] = {}


def workspace(device: torch.device, numbers: int) -> Tensor:
    """Room for so many partial sums.

    It is kept for the stream, and grows. A graph that is captured gets its own, since its replays may run beside us.
    """
    alone = device.type != TRITON or torch.cuda.is_current_stream_capturing()
    key = None if alone else (device, torch.cuda.current_stream(device).cuda_stream)
    partials = _kept.get(key) if key else None
    if partials is None or partials.numel() < numbers:
        partials = torch.empty(numbers, dtype=torch.float32, device=device)
        if key:
            _kept[key] = partials
    return partials
