"""From a product to a plan: which way it is computed, in which tiles, by how many programs, and why."""

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
#: The ways that our kernel has, and torch's own; "auto" is one of them, by what was measured.
KERNELS = ("stream_k", "data_parallel", "split_k")
MODES = (*KERNELS, TORCH)
PRECISIONS = ("ieee", "tf32")


@dataclass(frozen=True)
class Plan:
    """How a product is computed, and why so. torch's own has no configuration and no partition that we know of."""

    mode: str
    why: str
    config: Config | None = None
    partition: Partition | None = None

    @property
    def programs(self) -> int:
        """Programs that our kernel is started with, 0 for torch's own."""
        return self.partition.programs if self.partition else 0

    def __str__(self) -> str:
        if self.config is None or self.partition is None:
            return f"{self.mode}: {self.why}"
        split = self.partition
        whole = split.tiles - split.shared
        return (
            f"{self.mode}: {split.tiles} tiles of {self.config}, {split.shared} shared and {whole} whole, "
            f"over {split.programs} programs; {self.why}"
        )


@dataclass(frozen=True)
class Product:
    """What decides a plan: sizes, dtype, device, and how the operands lie.

    `layout` has an n for one whose rows are in line and a t for one whose columns are; `lined` is whether both begin
    their lines at multiples of 16 bytes, as descriptors want.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    layout: str = "nn"
    precision: str = "ieee"
    lined: bool = True

    @staticmethod
    def of(a: Tensor, b: Tensor, precision: str = "ieee") -> Product:
        """That of two matrices."""
        layout = "".join("t" if x.stride(0) == 1 and x.stride(1) != 1 else "n" for x in (a, b))
        lined = all(in_lines(x) or in_lines(x.T) for x in (a, b))
        return Product(a.shape[0], b.shape[1], a.shape[1], a.dtype, a.device, layout, precision, lined)

    @property
    def numbers(self) -> str:
        """What is multiplied, as tables call it."""
        name = str(self.dtype).removeprefix("torch.")
        return "tf32" if name == "float32" and self.precision == "tf32" else name

    @property
    def unsupported_reason(self) -> str | None:
        """Why our kernel cannot serve it, or None."""
        if self.dtype not in (torch.float32, *HALF):
            return f"the kernel has no {self.numbers}"
        if self.device.type not in (CPU, TRITON):
            return f"the kernel does not run on {self.device.type}"
        if not find_spec("triton"):
            return "triton is not installed"
        if self.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "on a CPU the kernel runs where TRITON_INTERPRET=1 is set from the start"
        if max(self.m, self.n, self.k) > 2**31 - 1024:  # a block goes past the end
            return "the kernel counts rows and columns in 32 bits"
        return None


def in_lines(x: Tensor) -> bool:
    """Whether a descriptor can describe it: numbers of a row are neighbours, rows begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    return x.stride(1) == 1 and x.stride(0) % unit == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0


def choose(product: Product, mode: str = "auto") -> Plan:
    """The plan of a product in a mode; "auto" takes what was fastest at the nearest shape that was measured.

    A mode that is asked for runs in the configuration in which it was fastest there.
    """
    if not product.m * product.n * product.k:
        return Plan(TORCH, "there is nothing to multiply")
    if mode == TORCH:
        return Plan(TORCH, "asked for")
    if mode != "auto" and product.unsupported_reason:
        raise ValueError(f'mode {mode!r}: {product.unsupported_reason}; write mode="torch" or mode="auto"')
    if mode != "auto":
        known = rates.known(product.device) if product.lined else None
        like = (mode, "data_parallel") if mode == "split_k" else (mode,)  # tiles that need no split are whole
        measured = (known.table.best(*_key(product), name) for name in like) if known else ()
        found = next(filter(None, measured), None)
        return plan(product, mode, Config(*found.config) if found and found.config else None, "asked for")
    if product.unsupported_reason:
        return Plan(TORCH, product.unsupported_reason)
    if not product.lined and triton_configs.has_descriptors(product.device):
        return Plan(TORCH, "rows do not begin at multiples of 16 bytes, and such products are not among the rates")
    known = rates.known(product.device)
    if known is None:
        return Plan(TORCH, "no rates of products were measured on this device: meshflash bench gemm --calibrate")
    found = known.table.best(*_key(product))
    if found is None:
        return Plan(TORCH, f"no shape near this one is among the rates ({known.source})")
    why = f"the fastest at {found.m}x{found.n}x{found.k} ({known.source})"
    if found.mode == TORCH:
        return Plan(TORCH, why)
    return plan(product, found.mode, Config(*found.config) if found.config else None, why)


def _key(product: Product) -> tuple[str, str, int, int, int]:
    """As tables of rates find it."""
    return product.numbers, product.layout, product.m, product.n, product.k


def plan(product: Product, mode: str, config: Config | None, why: str) -> Plan:
    """The plan of our kernel in a mode, in this configuration or in that of the table."""
    config = config or configs.default(product.m, product.n, product.numbers, product.lined, product.device)
    rows, columns, steps = (
        -(-size // block)
        for size, block in (
            (product.m, config.block_m),
            (product.n, config.block_n),
            (product.k, config.block_k),
        )
    )
    programs = configs.cores(product.device) * config.per_core
    if mode == "split_k":
        split = partition.split_k(rows, columns, steps, _parts(rows * columns, programs))
    else:
        share: Callable[[int, int, int, int], Partition] = getattr(partition, mode)
        split = share(rows, columns, steps, programs)
    return Plan(mode, why, config, split)


def _parts(tiles: int, programs: int) -> int:
    """As many as keep all programs busy; one where tiles do."""
    return 1 if tiles >= programs else max(2, programs // tiles)
