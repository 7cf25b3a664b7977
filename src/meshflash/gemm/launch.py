"""Run a planned GEMM: launch our kernels with their TMA descriptors and workspace, or call torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshflash.engine.op import without_autocast
from meshflash.gemm.configs import Config
from meshflash.gemm.partition import Partition
from meshflash.gemm.plan import TORCH, Plan, is_tma_aligned
from meshflash.kernels.contract import HALF
from meshflash.kernels.hopper.launch import descriptor
from meshflash.kernels.hopper.support import has_gluon
from meshflash.kernels.launches import Launcher, Launches
from meshflash.kernels.launches import run as run_launches
from meshflash.kernels.triton import configs as triton_configs
from meshflash.kernels.triton.launch import described
from meshflash.runtime.devices import CPU

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


class Epilogue(NamedTuple):
    """The epilogue of a GEMM on its float32 accumulator: add the bias, apply the activation, round to `dtype`.

    With `store_preactivation` the input of the activation is also stored, for the backward.
    """

    dtype: torch.dtype
    bias: Tensor | None = None
    activation: str | None = None
    store_preactivation: bool = False


def run(
    plan: Plan, a: Tensor, b: Tensor, precision: str, epilogue: Epilogue, launches: Launches | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute a planned GEMM; return the result, and the pre-activation if the epilogue stores it.

    `launches` are the recorded launches of equal calls on other tensors.
    """
    if plan.mode == TORCH:
        return _run_torch(a, b, precision, epilogue)
    return _run_kernel(plan, a, b, precision, epilogue, launches)


def _run_torch(a: Tensor, b: Tensor, precision: str, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    with without_autocast(a), _float32_precision(precision, a):
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


def _float32_precision(precision: str, a: Tensor) -> AbstractContextManager[Any]:
    """Return a context with this precision of torch's float32 GEMMs on GPUs; it restores the user's setting."""
    if not a.is_cuda or a.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == precision:
        return _NO_CONTEXT
    return _set_float32_precision(precision)


_NO_CONTEXT = nullcontext()


@contextmanager
def _set_float32_precision(precision: str) -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def _run_kernel(
    plan: Plan, a: Tensor, b: Tensor, precision: str, epilogue: Epilogue, launches: Launches | None
) -> tuple[Tensor, Tensor | None]:
    bias = None if epilogue.bias is None else epilogue.bias.contiguous()
    launch = partial(_launch, plan, a, b, precision, epilogue._replace(bias=bias))
    inputs = (a, b) if bias is None else (a, b, bias)
    name = epilogue.activation, epilogue.store_preactivation, epilogue.dtype
    out, *preactivation = run_launches(launches, name, inputs, launch)
    return out, preactivation[0] if preactivation else None


def _launch(
    plan: Plan, a: Tensor, b: Tensor, precision: str, epilogue: Epilogue, launcher: Launcher
) -> tuple[Tensor, ...]:
    """Launch the GEMM; return the result, and the pre-activation if the epilogue stores it."""
    config, split = plan.config, plan.partition
    assert config is not None
    assert split is not None
    (m, k), n = a.shape, b.shape[1]
    out = launcher.result(m, n, like=a, dtype=epilogue.dtype)
    # kernels take a pointer for every argument; where there is no pre-activation or bias, `out` fills the place unused
    preactivation = launcher.result(m, n, like=out) if epilogue.store_preactivation else out
    bias = out if epilogue.bias is None else epilogue.bias
    half_out = out.dtype in HALF and is_tma_aligned(out)  # a float32 tile would take too much shared memory for TMA
    warp_specialized = config.runs_warp_specialized and half_out and not split.needs_int64 and has_gluon(a.device)
    # each consumer warpgroup loads its own half of the rows of A
    operand_config = replace(config, block_m=config.block_m // 2) if warp_specialized else config
    operands = describe_operands(a, b, operand_config, descriptor if warp_specialized else described)
    out_tma = half_out and operands is not None
    int64_offsets = any(max_offset(y) >= 2**31 for y in (a, b, out))
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
    partials = new_partials(launcher, split, config, a)
    (a_in, a_transposed), (b_in, b_transposed) = operands or ((a, False), (b, False))
    if warp_specialized and operands:
        arguments = (a_in, b_in, bias, out, preactivation, partials, *shares)
        transposed = {"A_TRANSPOSED": a_transposed, "B_TRANSPOSED": b_transposed}
        _launch_warp_specialized(launcher, config, split.num_ctas, arguments, common | transposed)
    else:
        from meshflash.gemm.kernels.stream_k import gemm

        half = [config.block_m, config.block_n // 2]  # the epilogue stores a tile in two halves
        out_in, preactivation_in = (described(y, half) if out_tma else y for y in (out, preactivation))
        launcher.launch(
            gemm,
            (split.num_ctas,),
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
        _launch_combine(launcher, config, split, combine_arguments, common | widths)
    return (out, preactivation) if epilogue.store_preactivation else (out,)


def new_partials(launcher: Launcher, split: Partition, config: Config, like: Tensor) -> Tensor:
    """Return a buffer for the partial sums of split tiles, of at least one element."""
    elements = split.num_ctas * split.partials_per_cta * config.block_m * config.block_n
    return launcher.empty(max(1, elements), like=like, dtype=torch.float32)


def _launch_warp_specialized(
    launcher: Launcher, config: Config, num_ctas: int, arguments: tuple[Any, ...], common: dict[str, Any]
) -> None:
    """Launch the Gluon kernel: full tiles to the output, partial sums of split tiles to the workspace."""
    from meshflash.gemm.kernels.hopper import gemm

    a_in, b_in, bias, out, preactivation, partials, *shares = arguments
    half = [config.block_m // 2, config.block_n // 2]
    launcher.launch(
        gemm,
        (num_ctas,),
        *(a_in, b_in, bias, descriptor(out, half), descriptor(preactivation, half), partials, *out.shape, *shares),
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        **common,
    )


def _launch_combine(
    launcher: Launcher, config: Config, split: Partition, arguments: tuple[Any, ...], common: dict[str, Any]
) -> None:
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
    shape = dict(ROWS=height, LOADS_IN_FLIGHT=in_flight, num_warps=COMBINE_WARPS)
    launcher.launch(combine, grid, *arguments, **shape, **options, **common)


def loads_in_flight(split: Partition) -> int:
    """Return how many partial tiles the combine kernel loads at a time: a key of `COMBINE_SHAPES`."""
    # at most this many CTAs follow the first one of a tile
    others = -(-split.ctas_per_group * split.iters_per_tile // split.iters_per_group)
    return next((number for number in COMBINE_SHAPES if others <= number), max(COMBINE_SHAPES))


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
