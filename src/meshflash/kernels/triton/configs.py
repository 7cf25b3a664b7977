"""How the Triton kernels are launched: a table by architecture, pass and head dim, never measured in a call.

`meshflash calibrate --tune` tries the candidates of a device and writes the best into the user's own table of
rates, which goes before the one here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import product

import torch

from meshflash.kernels import rates
from meshflash.kernels.contract import HALF

#: The widest head that the configurations serve.
MAX_DIM = 256
#: The kernels' passes: forward, gradients by keys, gradients by queries.
PASSES = ("forward", "bwd_dkdv", "bwd_dq")


@dataclass(frozen=True)
class Config:
    """How a kernel is launched: query and key rows of a block, warps, stages of the pipeline.

    `registers` is what a thread may have at most, so that more blocks run beside each other; 0 leaves it open.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int = 0


#: (pass, widest head) -> configuration for half precision, on GPUs with tensor descriptors and wgmma; "features" is
#: forward with more than plain scores. Those up to 128 were the best of four to twelve tried on an H200 at 4,096 and
#: 16,384 tokens; the rest are guesses.
_HOPPER = {
    ("forward", 64): Config(64, 128, 4, 2, 168),
    ("features", 64): Config(128, 64, 8, 3),
    ("forward", 128): Config(128, 128, 8, 3),
    ("forward", 256): Config(64, 64, 8, 2),
    ("bwd_dkdv", 64): Config(64, 64, 4, 3),
    ("bwd_dkdv", 128): Config(64, 128, 8, 3),
    ("bwd_dkdv", 256): Config(32, 64, 8, 1),
    ("bwd_dq", 64): Config(128, 64, 8, 3),
    ("bwd_dq", 128): Config(128, 64, 8, 2),
    ("bwd_dq", 256): Config(64, 32, 8, 1),
}
#: The same for sm_100, where accumulators take the tensor memory: compiled, but never measured.
_BLACKWELL = {
    ("forward", 64): Config(128, 64, 4, 4),
    ("forward", 128): Config(128, 64, 8, 3),
    ("forward", 256): Config(64, 64, 8, 1),
    ("bwd_dkdv", 64): Config(64, 64, 8, 2),
    ("bwd_dkdv", 128): Config(32, 64, 8, 2),
    ("bwd_dkdv", 256): Config(32, 32, 8, 1),
    ("bwd_dq", 64): Config(128, 64, 8, 3),
    ("bwd_dq", 128): Config(128, 32, 8, 2),
    ("bwd_dq", 256): Config(64, 32, 8, 1),
}
#: The same where a block has 99 KiB of shared memory or less, and products are those of one warp: compiled for sm_80,
#: where they spill little, but never measured.
_ELSEWHERE = {
    ("forward", 64): Config(128, 64, 4, 2),
    ("forward", 128): Config(128, 32, 4, 2),
    ("forward", 256): Config(64, 32, 8, 1),
    ("bwd_dkdv", 64): Config(64, 128, 8, 2),
    ("bwd_dkdv", 128): Config(32, 64, 8, 2),
    ("bwd_dkdv", 256): Config(16, 64, 8, 1),
    ("bwd_dq", 64): Config(64, 64, 4, 2),
    ("bwd_dq", 128): Config(64, 32, 4, 2),
    ("bwd_dq", 256): Config(32, 32, 8, 1),
}
#: The same for AMD's GPUs, of 64 KiB, where 4 warps of 64 threads have 512 registers each, and 8 have half of that:
#: compiled for gfx942, where none spills to memory, but never measured.
_AMD = {
    ("forward", 64): Config(128, 64, 4, 2),
    ("forward", 128): Config(128, 32, 4, 2),
    ("forward", 256): Config(64, 32, 4, 2),
    ("bwd_dkdv", 64): Config(32, 64, 4, 2),
    ("bwd_dkdv", 128): Config(32, 64, 4, 1),
    ("bwd_dkdv", 256): Config(16, 64, 4, 1),
    ("bwd_dq", 64): Config(64, 64, 4, 2),
    ("bwd_dq", 128): Config(64, 32, 4, 2),
    ("bwd_dq", 256): Config(32, 32, 4, 1),
}
#: float32 takes twice the shared memory and has no tensor cores in full precision: compiled, but never measured.
_FULL_PRECISION = {
    ("forward", 64): Config(32, 32, 4, 1),
    ("forward", 128): Config(32, 32, 8, 1),
    ("forward", 256): Config(16, 32, 8, 1),
    ("bwd_dkdv", 64): Config(32, 32, 4, 1),
    ("bwd_dkdv", 128): Config(16, 32, 8, 1),
    ("bwd_dkdv", 256): Config(16, 16, 8, 1),
    ("bwd_dq", 64): Config(32, 32, 4, 1),
    ("bwd_dq", 128): Config(32, 32, 8, 1),
    ("bwd_dq", 256): Config(16, 16, 8, 1),
}
#: Interpreted, small blocks show every edge at small shapes.
_INTERPRETED = Config(32, 32, 1, 1)


_forced: dict[str, Config] = {}


def config(direction: str, dim: int, dtype: torch.dtype, device: torch.device, plain: bool = True) -> Config:
    """The configuration of a pass for heads up to this wide; for more than plain scores, with more registers."""
    if device.type == "cpu":
        return _INTERPRETED
    if dtype not in HALF:
        chosen = _FULL_PRECISION[direction, widest(dim)]
        return replace(chosen, warps=4) if torch.version.hip else chosen  # warps are twice as wide there
    chosen = _forced.get(name(direction, widest(dim))) or _settled(direction, widest(dim), device)
    if plain or direction != "forward" or torch.version.hip:
        return chosen
    own = _table(device).get(("features", widest(dim)))
    return own or replace(chosen, warps=8, stages=min(chosen.stages, 3))


def _settled(direction: str, most: int, device: torch.device) -> Config:
    known = rates.known(device)
    tuned = known.rates.configs.get(name(direction, most)) if known else None
    if tuned:
        return Config(*tuned)
    return _table(device)[direction, most]


@cache
def _table(device: torch.device) -> dict[tuple[str, int], Config]:
    if torch.version.hip:
        return _AMD
    return {9: _HOPPER, 10: _BLACKWELL}.get(torch.cuda.get_device_capability(device)[0], _ELSEWHERE)


@contextmanager
def forced(which: str, chosen: Config) -> Iterator[None]:
    """Inside the block the pass of this name runs in this configuration, on every device."""
    _forced[which] = chosen
    try:
        yield
    finally:
        del _forced[which]


def name(direction: str, most: int) -> str:
    """What a configuration is called in a table."""
    return f"{direction}/{most}"


def widest(dim: int) -> int:
    """The head dim under which a configuration is listed."""
    if dim > MAX_DIM:
        raise ValueError(f"head dim {dim}: the Triton kernel serves up to {MAX_DIM}")
    return 64 if dim <= 64 else 128 if dim <= 128 else MAX_DIM


@cache
def has_descriptors(device: torch.device) -> bool:
    """Whether tensor descriptors are copied by hardware there: NVIDIA's GPUs from Hopper on."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def candidates(direction: str, most: int) -> Iterator[Config]:
    """What is worth trying on a device; some do not fit and fail to launch."""
    rows = {"forward": (64, 128), "bwd_dkdv": (32, 64, 128), "bwd_dq": (64, 128)}[direction]
    columns = {"forward": (32, 64, 128), "bwd_dkdv": (64, 128), "bwd_dq": (32, 64)}[direction]
    for block_m, block_n, warps, stages in product(rows, columns, (4, 8), (2, 3)):
        if most <= 128 or block_m * block_n <= 64 * 64:
            yield Config(block_m, block_n, warps, stages)
    if direction == "forward" and most <= 64 and not torch.version.hip:
        yield from (Config(64, 128, 4, 2, 168), Config(64, 64, 4, 2, 128))


def written(chosen: Config) -> list[int]:
    """As a table has it."""
    return list(astuple(chosen))
