"""Launch configurations of the GEMM kernels: tables by architecture and dtype; nothing is measured during a call.

The Hopper table was timed on an H200. The other tables were compiled for their targets and spill next to nothing, but
were not timed. `meshflash bench gemm --calibrate` times the candidates of a device and writes the best ones of each
shape to the user's rate table, which takes precedence over these.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Config:
    """A launch configuration: tile sizes, warps and pipeline stages. Tables of this file and rate tables hold them.

    `l2_swizzle` rows of tiles are walked together, so that concurrent CTAs share operand blocks in L2. `ctas_per_sm`
    CTAs of the persistent grid run on each SM. `warp_specialized` (0 or 1) asks for the Gluon kernel with a TMA
    producer warp and two consumer warpgroups; a call that this kernel does not support runs the Triton kernel with the
    same tiles. Rate tables store a configuration as the list of these integers, in this order.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    l2_swizzle: int = 8
    ctas_per_sm: int = 1
    warp_specialized: int = 0

    def __post_init__(self) -> None:
        powers = (self.block_m, self.block_n, self.block_k, self.num_warps)
        if min(powers) < 1 or any(n & (n - 1) for n in powers):
            raise ValueError(f"{self}: expected sizes of a block, and warps, that are powers of two")
        if min(self.num_stages, self.l2_swizzle, self.ctas_per_sm) < 1 or self.warp_specialized not in (0, 1):
            raise ValueError(f"{self}: expected stages, l2_swizzle and ctas_per_sm >= 1, and warp_specialized 0 or 1")

    @property
    def runs_warp_specialized(self) -> bool:
        """Whether the warp-specialized kernel has these tiles: each consumer warpgroup needs 64 rows for its wgmma."""
        return bool(self.warp_specialized) and self.block_m >= 128

    def __str__(self) -> str:
        more = f" g{self.l2_swizzle}" if self.l2_swizzle != 8 else ""
        more += f" x{self.ctas_per_sm}" if self.ctas_per_sm > 1 else ""
        more += " ws" if self.warp_specialized else ""
        return f"{self.block_m}x{self.block_n}x{self.block_k} {self.num_warps}w {self.num_stages}s{more}"


#: Half precision on GPUs with TMA descriptors and wgmma, for large, medium and small outputs.
_HOPPER = (Config(128, 256, 64, 8, 3), Config(128, 128, 64, 8, 4), Config(64, 128, 64, 4, 4, ctas_per_sm=2))
#: Half precision where a CTA has at most 99 KiB of shared memory, and for operands that TMA cannot load.
_ELSEWHERE = (Config(128, 128, 32, 8, 3), Config(64, 64, 32, 4, 3, ctas_per_sm=2), Config(64, 64, 32, 4, 3))
#: Half precision on AMD GPUs.
_AMD = (Config(128, 128, 32, 4, 2), Config(64, 64, 32, 4, 2, ctas_per_sm=2), Config(64, 64, 32, 4, 2))
#: float32 operands rounded to tf32 for the tensor cores, and full float32, which no tensor core multiplies.
_TF32 = (Config(128, 128, 32, 8, 3), Config(64, 64, 32, 4, 3, ctas_per_sm=2), Config(64, 64, 32, 4, 3))
_FULL_PRECISION = (Config(64, 64, 16, 4, 2, ctas_per_sm=2),) * 3
#: Under the interpreter: small blocks, so that small test shapes have edges, tails and split tiles.
_INTERPRETED = Config(16, 32, 16, 1, 1, l2_swizzle=2)
#: SMs that the interpreter pretends to have; it runs CTAs one after another. Enough for tiles with several splits.
INTERPRETED_NUM_SMS = 5


def default(m: int, n: int, dtype_name: str, tma_aligned: bool, device: torch.device) -> Config:
    """Return the configuration for an m x n output: the largest tiles that still give every SM work.

    Outputs with few rows or columns get the smallest tiles, which waste least. `tma_aligned` says whether TMA can load
    the operands, on devices that have it.
    """
    if device.type == "cpu":
        return _INTERPRETED
    large, medium, small = table(dtype_name, tma_aligned, device)
    if min(m, n) <= small.block_m:
        return small
    tiles = -(-m // large.block_m) * -(-n // large.block_n)
    return large if 2 * tiles >= num_sms(device) else medium


def table(dtype_name: str, tma_aligned: bool, device: torch.device) -> tuple[Config, Config, Config]:
    """Return the configurations of a dtype for large, medium and small outputs."""
    if dtype_name in ("float32", "tf32"):
        return _TF32 if dtype_name == "tf32" and not torch.version.hip else _FULL_PRECISION
    if torch.version.hip:
        return _AMD
    return _HOPPER if tma_aligned and torch.cuda.get_device_capability(device)[0] in (9, 10) else _ELSEWHERE


def candidates(dtype_name: str, device: torch.device) -> tuple[Config, ...]:
    """Return the configurations that tuning tries on a device; some may exceed its resources and fail to launch."""
    if device.type == "cpu":
        return (_INTERPRETED,)
    found = table(dtype_name, True, device)
    if found is not _HOPPER:
        return tuple(dict.fromkeys(found))
    return HOPPER_CANDIDATES


#: Tuning candidates for half precision on Hopper; all of them fit, and none spills.
HOPPER_CANDIDATES = (
    Config(128, 256, 64, 8, 4, warp_specialized=1),
    Config(128, 256, 64, 8, 4, l2_swizzle=16, warp_specialized=1),
    Config(256, 128, 64, 8, 4, warp_specialized=1),
    Config(128, 128, 64, 8, 6, warp_specialized=1),
    Config(128, 256, 64, 8, 3),
    Config(128, 256, 64, 8, 4, l2_swizzle=16),
    Config(256, 128, 64, 8, 4),
    Config(128, 128, 64, 8, 4),
    Config(128, 128, 64, 8, 6),
    Config(128, 128, 64, 4, 3, ctas_per_sm=2),
    Config(64, 256, 64, 4, 4),
    Config(64, 128, 64, 4, 4, ctas_per_sm=2),
    Config(64, 64, 128, 4, 3, ctas_per_sm=2),
)


@cache
def num_sms(device: torch.device) -> int:
    """Return the SMs of a device that this process may use; MPS may give it fewer than the device has."""
    if device.type == "cpu":
        return INTERPRETED_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def to_list(config: Config) -> list[int]:
    """Return a configuration as the list of integers that rate tables store."""
    return list(astuple(config))
