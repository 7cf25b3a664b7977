"""From a GEMM problem to a plan: mode, tiles, number of CTAs, and the reason for the choice."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from meshflash.gemm import configs, partition, rates
from meshflash.gemm.configs import Config
from meshflash.gemm.partition import Partition
from meshflash.kernels.contract import HALF
from meshflash.kernels.triton import configs as triton_configs
from meshflash.runtime.devices import CPU, TRITON

TORCH = "torch"
#: Modes of our kernels; each is a function of `partition.py`.
KERNELS = ("stream_k", "data_parallel", "split_k")
#: All modes; "auto" picks one of them by measured rates.
MODES = (*KERNELS, TORCH)
PRECISIONS = ("ieee", "tf32")


@dataclass(frozen=True)
class Plan:
    """How a GEMM is computed and why; `choose` makes it, and `matmul(..., return_plan=True)` returns it.

    Args:
        mode: The kernel that computes it, by its name in `matmul`.
        why: A sentence for the user.
        config: The tile configuration of our kernels; None in mode "torch".
        partition: The division of the tiles among CTAs; None in mode "torch".
    """

    mode: str
    why: str
    config: Config | None = None
    partition: Partition | None = None

    @property
    def num_ctas(self) -> int:
        """Grid size of our kernel, 0 in mode "torch"."""
        return self.partition.num_ctas if self.partition else 0

    def __str__(self) -> str:
        if self.config is None or self.partition is None:
            return f"{self.mode}: {self.why}"
        split = self.partition
        num_full_tiles = split.num_tiles - split.num_split_tiles
        return (
            f"{self.mode}: {split.num_tiles} tiles of {self.config}, {split.num_split_tiles} split along K and "
            f"{num_full_tiles} full, on {split.num_ctas} CTAs; {self.why}"
        )


@dataclass(frozen=True)
class GemmProblem:
    """The sizes, dtype, device and operand layout of a GEMM; `GemmProblem.of` reads them from two matrices.

    `layout` has one letter for A and one for B: "n" for a row-major operand, "t" for a column-major one. `tma_aligned`
    says whether TMA can load both operands: rows, or columns of a transposed operand, are contiguous and begin at
    multiples of 16 bytes.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    layout: str = "nn"
    precision: str = "ieee"
    tma_aligned: bool = True

    @staticmethod
    def of(a: Tensor, b: Tensor, precision: str = "ieee") -> GemmProblem:
        """Return the problem of a @ b."""
        layout = "".join("t" if x.stride(0) == 1 and x.stride(1) != 1 else "n" for x in (a, b))
        tma_aligned = all(is_tma_aligned(x) or is_tma_aligned(x.T) for x in (a, b))
        return GemmProblem(a.shape[0], b.shape[1], a.shape[1], a.dtype, a.device, layout, precision, tma_aligned)

    @property
    def dtype_name(self) -> str:
        """The dtype as rate tables call it: torch's name, or "tf32" for float32 in that precision."""
        name = str(self.dtype).removeprefix("torch.")
        return "tf32" if name == "float32" and self.precision == "tf32" else name

    @property
    def unsupported_reason(self) -> str | None:
        """Why our kernels cannot compute this problem, or None if they can."""
        if self.dtype not in (torch.float32, *HALF):
            return f"the kernel has no {self.dtype_name}"
        if self.device.type not in (CPU, TRITON):
            return f"the kernel does not run on {self.device.type}"
        if not find_spec("triton"):
            return "triton is not installed"
        if self.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "on a CPU the kernel runs only if TRITON_INTERPRET=1 is set before the start"
        if max(self.m, self.n, self.k) > 2**31 - 1024:  # the last block reaches past the end by up to its own size
            return "the kernel counts rows and columns in 32 bits"
        return None


def is_tma_aligned(x: Tensor) -> bool:
    """Return whether TMA can describe a matrix: contiguous rows that begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    return x.stride(1) == 1 and x.stride(0) % unit == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0


def choose(problem: GemmProblem, mode: str = "auto") -> Plan:
    """Return the plan of a problem; "auto" takes the mode that was fastest at the nearest measured shape.

    An explicit mode runs in the configuration in which it was fastest there, and raises ValueError if our kernels
    cannot compute the problem.
    """
    if not problem.m * problem.n * problem.k:
        return Plan(TORCH, "there is nothing to multiply")
    if mode == TORCH:
        return Plan(TORCH, "requested")
    if mode != "auto" and problem.unsupported_reason:
        raise ValueError(f'mode {mode!r}: {problem.unsupported_reason}; write mode="torch" or mode="auto"')
    if mode != "auto":
        known = rates.known(problem.device) if problem.tma_aligned else None
        # split_k without a split is data_parallel, so a rate of the latter serves where it was not measured itself
        measured_as = (mode, "data_parallel") if mode == "split_k" else (mode,)
        measured = (known.table.best(*_rate_key(problem), name) for name in measured_as) if known else ()
        found = next(filter(None, measured), None)
        return make_plan(problem, mode, Config(*found.config) if found and found.config else None, "requested")
    if problem.unsupported_reason:
        return Plan(TORCH, problem.unsupported_reason)
    if not problem.tma_aligned and triton_configs.has_descriptors(problem.device):
        return Plan(TORCH, "rows do not begin at multiples of 16 bytes, and such operands were not measured")
    known = rates.known(problem.device)
    if known is None:
        return Plan(TORCH, "no GEMM rates were measured on this device: meshflash bench gemm --calibrate")
    found = known.table.best(*_rate_key(problem))
    if found is None:
        return Plan(TORCH, f"no shape near this one was measured ({known.source})")
    why = f"the fastest at {found.m}x{found.n}x{found.k} ({known.source})"
    if found.mode == TORCH:
        return Plan(TORCH, why)
    return make_plan(problem, found.mode, Config(*found.config) if found.config else None, why)


def _rate_key(problem: GemmProblem) -> tuple[str, str, int, int, int]:
    """Return the arguments by which `rates.Table.best` finds a problem."""
    return problem.dtype_name, problem.layout, problem.m, problem.n, problem.k


def make_plan(problem: GemmProblem, mode: str, config: Config | None, why: str) -> Plan:
    """Return the plan of one of our kernels' modes, in this configuration or else the default one."""
    config = config or configs.default(problem.m, problem.n, problem.dtype_name, problem.tma_aligned, problem.device)
    tiles_m, tiles_n = -(-problem.m // config.block_m), -(-problem.n // config.block_n)
    iters_per_tile = -(-problem.k // config.block_k)
    num_ctas = configs.num_sms(problem.device) * config.ctas_per_sm
    if mode == "split_k":
        num_tiles = tiles_m * tiles_n
        splits = 1 if num_tiles >= num_ctas else max(2, num_ctas // num_tiles)  # enough to keep all CTAs busy
        split = partition.split_k(tiles_m, tiles_n, iters_per_tile, splits)
    else:
        divide: Callable[[int, int, int, int], Partition] = getattr(partition, mode)
        split = divide(tiles_m, tiles_n, iters_per_tile, num_ctas)
    return Plan(mode, why, config, split)
