"""Run a planned GEMM: launch our kernels with their TMA descriptors and workspace, or call torch."""

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
from meshflash.gemm.plan import TORCH, Plan, is_tma_aligned
from meshflash.kernels.contract import HALF
from meshflash.kernels.hopper.launch import descriptor, has_gluon
from meshflash.kernels.triton import configs as triton_configs
from meshflash.kernels.triton.launch import described
from meshflash.runtime.devices import CPU, TRITON

#: Activations by name, as torch computes them.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
#: Shape of the combine kernel, by the number of partial tiles that it loads at a time: elements per CTA, and registers
#: per thread. Left to itself the compiler takes fewer registers and then loads one partial tile after another.
COMBINE_SHAPES, COMBINE_WARPS = {2: (2048, 40), 4: (1024, 40), 8: (1024, 64)}, 8
#: Registers per thread of the warp-specialized kernel: consumer warpgroups, and the TMA producer warp.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a GEMM on its float32 accumulator: add the bias, apply the activation, round to `dtype`.

    With `store_preactivation` the input of the activation is also stored, for the backward.
    """

    dtype: torch.dtype
    bias: Tensor | None = None
    activation: str | None = None
    store_preactivation: bool = False


def run(plan: Plan, a: Tensor, b: Tensor, precision: str, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    """Compute a planned GEMM; return the result, and the pre-activation if the epilogue stores it."""
    if plan.mode == TORCH:
        return _run_torch(a, b, precision, epilogue)
    return _run_kernel(plan, a, b, precision, epilogue)


def _run_torch(a: Tensor, b: Tensor, precision: str, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    with torch.autocast(a.device.type, enabled=False), _float32_precision(precision, a):
        if a.dtype in HALF and epilogue.dtype == torch.float32:
            x = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
            x = x if epilogue.bias is None else x + epilogue.bias
        elif epilogue.bias is not None and epilogue.bias.dtype == a.dtype:
            x = torch.addmm(epilogue.bias, a, b)
        else:
            x = torch.mm(a, b) if epilogue.bias is None else torch.mm(a, b) + epilogue.bias
        x = x.to(epilogue.dtype)
    out = x if epilogue.activation is None else ACTIVATIONS[epilogue.activation](x)
    return out, x if epilogue.store_preactivation else None


@contextmanager
def _float32_precision(precision: str, a: Tensor) -> Iterator[None]:
    """Set the precision of torch's float32 GEMMs on GPUs inside the block, and restore the user's setting after."""
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


def _run_kernel(plan: Plan, a: Tensor, b: Tensor, precision: str, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    config, split = plan.config, plan.partition
    assert config is not None
    assert split is not None
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=epilogue.dtype, device=a.device)
    # kernels take a pointer for every argument; where there is no pre-activation or bias, `out` fills the place unused
    preactivation = torch.empty_like(out) if epilogue.store_preactivation else out
    bias = out if epilogue.bias is None else epilogue.bias.contiguous()
    half_out = out.dtype in HALF and is_tma_aligned(out)  # a float32 tile would take too much shared memory for TMA
    warp_specialized = config.runs_warp_specialized and half_out and not split.needs_int64 and has_gluon(a.device)
    # each consumer warpgroup loads its own half of the rows of A
    operand_config = replace(config, block_m=config.block_m // 2) if warp_specialized else config
    operands = describe_operands(a, b, operand_config, descriptor if warp_specialized else described)
    out_tma = half_out and operands is not None
    int64_offsets = any(max_offset(x) >= 2**31 for x in (a, b, out))
    shares = (split.iters_per_tile, split.ctas_per_group, split.iters_per_group, split.num_split_tiles)
    common: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "L2_SWIZZLE": config.l2_swizzle,
        "PARTIALS_PER_CTA": split.partials_per_cta,
        "ACTIVATION": epilogue.activation,
        "HAS_BIAS": epilogue.bias is not None,
        "STORE_PREACT": epilogue.store_preactivation,
        # programmatic dependent launch needs a GPU that has TMA, too
        "USE_PDL": split.num_split_tiles > 0 and operands is not None and a.device.type != CPU,
    }
    with torch.cuda.device_of(a), exclusive_launch(split):
        partials = workspace(a.device, split.num_ctas * split.partials_per_cta * config.block_m * config.block_n)
        (a_in, a_transposed), (b_in, b_transposed) = operands or ((a, False), (b, False))
        if warp_specialized and operands:
            arguments = (a_in, b_in, bias, out, preactivation, partials, *shares)
            transposed = {"A_TRANSPOSED": a_transposed, "B_TRANSPOSED": b_transposed}
            _launch_warp_specialized(config, split.num_ctas, arguments, common | transposed)
        else:
            from meshflash.gemm.kernels.stream_k import gemm

            half = [config.block_m, config.block_n // 2]  # the epilogue stores a tile in two halves
            out_in, preactivation_in = (described(x, half) if out_tma else x for x in (out, preactivation))
            gemm[(split.num_ctas,)](
                *(a_in, b_in, bias, out, out_in, preactivation, preactivation_in, partials),
                *(m, n, k, *a.stride(), *b.stride(), out.stride(0), *shares),
                BLOCK_K=config.block_k,
                INT64_ITERS=split.needs_int64,
                USE_TMA=operands is not None,
                A_TRANSPOSED=a_transposed,
                B_TRANSPOSED=b_transposed,
                OUT_TMA=out_tma,
                INT64_OFFSETS=int64_offsets,
                PRECISION=precision,
                INTERPRETED=a.device.type == CPU,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                **common,
            )
        if split.num_split_tiles:
            combine_arguments = (bias, out, preactivation, partials, m, n, out.stride(0), *shares[:3])
            widths = {"INT64_ITERS": split.needs_int64, "INT64_OFFSETS": int64_offsets}
            _launch_combine(config, split, combine_arguments, common | widths)
    return out, preactivation if epilogue.store_preactivation else None


def _launch_warp_specialized(config: Config, num_ctas: int, arguments: tuple[Any, ...], common: dict[str, Any]) -> None:
    """Launch the Gluon kernel: full tiles to the output, partial sums of split tiles to the workspace."""
    from meshflash.gemm.kernels.hopper import gemm

    a_in, b_in, bias, out, preactivation, partials, *shares = arguments
    half = [config.block_m // 2, config.block_n // 2]
    gemm[(num_ctas,)](
        *(a_in, b_in, bias, descriptor(out, half), descriptor(preactivation, half), partials, *out.shape, *shares),
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        **common,
    )


def _launch_combine(config: Config, split: Partition, arguments: tuple[Any, ...], common: dict[str, Any]) -> None:
    """Launch the kernel that adds the partial sums of split tiles."""
    from meshflash.gemm.kernels.stream_k import combine

    in_flight = loads_in_flight(split)
    elements, registers = COMBINE_SHAPES[in_flight]
    height = min(config.block_m, elements // config.block_n)
    options: dict[str, Any] = {"launch_pdl": True} if common["USE_PDL"] else {}
    if arguments[0].device.type == CPU:
        height = config.block_m  # interpreted CTAs run one after another: a few large ones are fastest
    elif not torch.version.hip:
        options["maxnreg"] = registers
    grid = split.num_split_tiles, config.block_m // height
    combine[grid](*arguments, ROWS=height, LOADS_IN_FLIGHT=in_flight, num_warps=COMBINE_WARPS, **options, **common)


def loads_in_flight(split: Partition) -> int:
    """Return how many partial tiles the combine kernel loads at a time: a key of `COMBINE_SHAPES`."""
    # at most this many CTAs follow the first one of a tile
    others = -(-split.ctas_per_group * split.iters_per_tile // split.iters_per_group)
    return next((number for number in COMBINE_SHAPES if others <= number), max(COMBINE_SHAPES))


def exclusive_launch(split: Partition) -> AbstractContextManager[Any]:
    """Return a lock for launching two kernels that share a workspace; a no-op where no tile is split.

    Another thread's kernels on the same stream must not come between them: the second kernel would add its sums.
    """
    return _launch_lock if split.num_split_tiles else nullcontext()


def describe_operands(
    a: Tensor, b: Tensor, config: Config, describe: Callable[[Tensor, list[int]], Any] | None = None
) -> list[tuple[Any, bool]] | None:
    """Return TMA descriptors of both operands, each with whether it is of the transpose; None where TMA cannot load."""
    if a.dtype not in HALF or not triton_configs.has_descriptors(a.device):
        return None
    transposed = [not is_tma_aligned(x) for x in (a, b)]
    if not all(is_tma_aligned(x.T if t else x) for x, t in zip((a, b), transposed, strict=True)):
        return None
    blocks = ([config.block_m, config.block_k], [config.block_k, config.block_n])
    describe = describe or described
    return [
        (describe(x.T, block[::-1]) if t else describe(x, block), t)
        for x, block, t in zip((a, b), blocks, transposed, strict=True)
    ]


def max_offset(x: Tensor) -> int:
    """Return the distance between the first and the last element of a tensor, in elements."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


_launch_lock = threading.Lock()
#: Workspaces by device and stream: kernels of one stream run one after another, so they can share one.
_workspaces: dict[tuple[torch.device, int], Tensor] = {}


def workspace(device: torch.device, elements: int) -> Tensor:
    """Return a float32 buffer for partial sums of at least this many elements.

    Each stream keeps one, which grows. A graph under capture gets its own, since its replays may run at the same time
    as later calls.
    """
    unshared = device.type != TRITON or torch.cuda.is_current_stream_capturing()
    key = None if unshared else (device, torch.cuda.current_stream(device).cuda_stream)
    partials = _workspaces.get(key) if key else None
    if partials is None or partials.numel() < elements:
        partials = torch.empty(elements, dtype=torch.float32, device=device)
        if key:
            _workspaces[key] = partials
    return partials
