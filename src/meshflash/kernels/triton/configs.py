"""Launch configurations of the portable Triton kernels, by architecture, pass and head dim; no call measures anything.

`meshflash calibrate --tune` tries the candidates on a device and writes the fastest into the user's own table of rates,
which takes precedence over the tables here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import product

import torch

from meshflash.kernels import rates
from meshflash.kernels.contract import HALF

#: The largest head dim that the configurations serve.
MAX_DIM = 256
#: The passes: forward, backward by keys for dK and dV, backward by queries for dQ.
PASSES = ("forward", "bwd_dkdv", "bwd_dq")


@dataclass(frozen=True)
class Config:
    """The configuration of a launch: query and key rows of a block, warps of a CTA, stages of the software pipeline.

    `registers` caps the registers of a thread, so that more CTAs share an SM; 0 means no cap.
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
#: The same where a CTA has 99 KiB of shared memory or less, and each warp issues its own matrix instructions (mma, not
#: wgmma): compiled for sm_80, where they spill little, but never measured.
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
#: Under the interpreter: small, so that tests cover partial blocks at small shapes.
_INTERPRETED = Config(32, 32, 1, 1)


_forced: dict[str, Config] = {}


def config(direction: str, dim: int, dtype: torch.dtype, device: torch.device, plain: bool = True) -> Config:
    """Return the configuration of a pass.

    Args:
        direction: One of `PASSES`.
        dim: The larger of head dim and value dim.
        dtype: The dtype of the inputs.
        device: The device.
        plain: Whether scores are `scale * q.k` alone; others get more registers in the forward.
    """
    if device.type == "cpu":
        return _INTERPRETED
    if dtype not in HALF:
        chosen = _FULL_PRECISION[direction, padded_head_dim(dim)]
        return replace(chosen, warps=4) if torch.version.hip else chosen  # AMD warps have 64 threads
    padded_dim = padded_head_dim(dim)
    chosen = _forced.get(name(direction, padded_dim)) or _tuned_or_default(direction, padded_dim, device)
    if plain or direction != "forward" or torch.version.hip:
        return chosen
    own = _table(device).get(("features", padded_dim))
    return own or replace(chosen, warps=8, stages=min(chosen.stages, 3))


def _tuned_or_default(direction: str, padded_dim: int, device: torch.device) -> Config:
    known = rates.known(device)
    tuned = known.rates.configs.get(name(direction, padded_dim)) if known else None
    if tuned:
        return Config(*tuned)
    return _table(device)[direction, padded_dim]


@cache
def _table(device: torch.device) -> dict[tuple[str, int], Config]:
    if torch.version.hip:
        return _AMD
    return {9: _HOPPER, 10: _BLACKWELL}.get(torch.cuda.get_device_capability(device)[0], _ELSEWHERE)


@contextmanager
def forced(which: str, chosen: Config) -> Iterator[None]:
    """Run the pass of this name in this configuration inside of the block, on every device."""
    _forced[which] = chosen
    _announce()
    try:
        yield
    finally:
        del _forced[which]
        _announce()


#: Functions that `forced` calls: recorded launches elsewhere are those of other configurations.
on_change: list[Callable[[], None]] = []


def _announce() -> None:
    for drop_launches in on_change:
        drop_launches()


def name(direction: str, padded_dim: int) -> str:
    """Return the name of a configuration in a table of rates."""
    return f"{direction}/{padded_dim}"


def padded_head_dim(dim: int) -> int:
    """Return the head dim under which the configuration of a head dim is listed."""
    if dim > MAX_DIM:
        raise ValueError(f"head dim {dim}: the Triton kernel serves up to {MAX_DIM}")
    return 64 if dim <= 64 else 128 if dim <= 128 else MAX_DIM


@cache
def has_descriptors(device: torch.device) -> bool:
    """Return whether a device has TMA, which loads by tensor descriptors: NVIDIA GPUs from Hopper on."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def candidates(direction: str, padded_dim: int) -> Iterator[Config]:
    """Yield the configurations worth trying on a device; some do not fit, and fail to launch."""
    rows = {"forward": (64, 128), "bwd_dkdv": (32, 64, 128), "bwd_dq": (64, 128)}[direction]
    columns = {"forward": (32, 64, 128), "bwd_dkdv": (64, 128), "bwd_dq": (32, 64)}[direction]
    for block_m, block_n, warps, stages in product(rows, columns, (4, 8), (2, 3)):
        if padded_dim <= 128 or block_m * block_n <= 64 * 64:
            yield Config(block_m, block_n, warps, stages)
    if direction == "forward" and padded_dim <= 64 and not torch.version.hip:
        yield from (Config(64, 128, 4, 2, 168), Config(64, 64, 4, 2, 128))


def written(chosen: Config) -> list[int]:
    """Return a configuration as a table of rates holds it."""
    return list(astuple(chosen))
