"""How the kernel of products is launched: tables by architecture and dtype, never measured in a call.

Those of Hopper were timed on an H200; the others were compiled, and spill next to nothing. `meshflash bench gemm
--calibrate` times the candidates of a device and writes the best of each shape into the user's own table, which goes
before these.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Config:
    """Rows, columns and depth of a block, warps, stages of the pipeline.

    `group` rows of tiles are gone through together, and `per_core` programs run on each multiprocessor. With `roles` a
    warp of its own copies, beside 8 that multiply, in Gluon; where that is not to be had, it is as without.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    per_core: int = 1
    roles: int = 0

    def __post_init__(self) -> None:
        powers = (self.block_m, self.block_n, self.block_k, self.warps)
        if min(powers) < 1 or any(n & (n - 1) for n in powers):
            raise ValueError(f"{self}: expected sizes of a block, and warps, that are powers of two")
        if min(self.stages, self.group, self.per_core) < 1 or self.roles not in (0, 1):
            raise ValueError(f"{self}: expected stages, group and per_core >= 1, and roles 0 or 1")

    @property
    def by_roles(self) -> bool:
        """Whether the kernel in Gluon has such tiles: each of its two groups of warps multiplies 64 rows at least."""
        return bool(self.roles) and self.block_m >= 128

    def __str__(self) -> str:
        more = f" g{self.group}" if self.group != 8 else ""
        more += f" x{self.per_core}" if self.per_core > 1 else ""
        more += " roles" if self.roles else ""
        return f"{self.block_m}x{self.block_n}x{self.block_k} {self.warps}w {self.stages}s{more}"


#: Half precision on GPUs with tensor descriptors and wgmma, from large products to small ones.
_HOPPER = (Config(128, 256, 64, 8, 3), Config(128, 128, 64, 8, 4), Config(64, 128, 64, 4, 4, per_core=2))
#: Half precision where a block has 99 KiB of shared memory or less, and where operands have no descriptor.
_ELSEWHERE = (Config(128, 128, 32, 8, 3), Config(64, 64, 32, 4, 3, per_core=2), Config(64, 64, 32, 4, 3))
#: Half precision on AMD's GPUs.
_AMD = (Config(128, 128, 32, 4, 2), Config(64, 64, 32, 4, 2, per_core=2), Config(64, 64, 32, 4, 2))
#: float32 as tf32, and in full, which no tensor core does.
_TF32 = (Config(128, 128, 32, 8, 3), Config(64, 64, 32, 4, 3, per_core=2), Config(64, 64, 32, 4, 3))
_FULL_PRECISION = (Config(64, 64, 16, 4, 2, per_core=2),) * 3
#: Interpreted, small blocks show every edge at small shapes.
_INTERPRETED = Config(16, 32, 16, 1, 1, group=2)
#: Programs that are played one after another there: enough for tiles in several parts.
INTERPRETED_PROGRAMS = 5


def default(m: int, n: int, numbers: str, lined: bool, device: torch.device) -> Config:
    """The configuration for a result of m x n: the largest blocks that leave work for all multiprocessors.

    Few rows or columns take the smallest, which waste the least. Operands that are `lined` have descriptors, where
    the device has them.
    """
    if device.type == "cpu":
        return _INTERPRETED
    large, medium, small = table(numbers, lined, device)
    if min(m, n) <= small.block_m:
        return small
    tiles = -(-m // large.block_m) * -(-n // large.block_n)
    return large if 2 * tiles >= cores(device) else medium


def table(numbers: str, lined: bool, device: torch.device) -> tuple[Config, Config, Config]:
    """The configurations for these numbers, from large products to small ones."""
    if numbers in ("float32", "tf32"):
        return _TF32 if numbers == "tf32" and not torch.version.hip else _FULL_PRECISION
    if torch.version.hip:
        return _AMD
    return _HOPPER if lined and torch.cuda.get_device_capability(device)[0] in (9, 10) else _ELSEWHERE


def candidates(numbers: str, device: torch.device) -> tuple[Config, ...]:
    """What is worth trying on a device; some may not fit and fail to launch."""
    if device.type == "cpu":
        return (_INTERPRETED,)
    found = table(numbers, True, device)
    if found is not _HOPPER:
        return tuple(dict.fromkeys(found))
    return HOPPER_CANDIDATES


#: For half precision on a Hopper GPU: all fit and none spills.
HOPPER_CANDIDATES = (
    Config(128, 256, 64, 8, 4, roles=1),
    Config(128, 256, 64, 8, 4, group=16, roles=1),
    Config(256, 128, 64, 8, 4, roles=1),
    Config(128, 128, 64, 8, 6, roles=1),
    Config(128, 256, 64, 8, 3),
    Config(128, 256, 64, 8, 4, group=16),
    Config(256, 128, 64, 8, 4),
    Config(128, 128, 64, 8, 4),
    Config(128, 128, 64, 8, 6),
    Config(128, 128, 64, 4, 3, per_core=2),
    Config(64, 256, 64, 4, 4),
    Config(64, 128, 64, 4, 4, per_core=2),
    Config(64, 64, 128, 4, 3, per_core=2),
)


@cache
def cores(device: torch.device) -> int:
    """Multiprocessors of a device, or of the part of it that this process may use."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def written(config: Config) -> list[int]:
    """As a table has it."""
    return list(astuple(config))
