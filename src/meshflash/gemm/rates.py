"""Measured GEMM throughput by device, mode and shape: the tables that mode="auto" reads. No call measures anything.

`meshflash bench gemm --calibrate` writes a table to the user's cache, next to the one of the attention kernels. Tables
that ship with meshflash are under `measured/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from meshflash.core.reading import read_json
from meshflash.engine.cache import cache as executables
from meshflash.kernels.rates import identity, own_file, pick, write_whole
from meshflash.runtime.devices import TRITON

#: Folder of the tables that ship with meshflash.
SHIPPED = Path(__file__).parent / "measured"
#: A measured shape is near if each of m, n and k differs by at most this factor.
NEAR_FACTOR = 2.0


@dataclass(frozen=True)
class Rate:
    """The TFLOP/s that one mode reached at one shape; a row of a `Table`.

    `mode` is a mode of `matmul`, or a variant of a fused GEMM + collective such as "epilogue/2". `layout` has one
    letter for each operand, "t" for a transposed one; of a fused GEMM it is collective/ranks/ranks per device, such as
    "all_reduce/4/1". `config` holds the integers of a `Config`, or nothing for torch.
    """

    mode: str
    dtype: str
    layout: str
    m: int
    n: int
    k: int
    tflops: float
    config: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Table:
    """The measured rates of one device; `known` finds one, and `meshflash bench gemm --calibrate` writes one."""

    device: str
    architecture: str
    rates: tuple[Rate, ...]
    measured_with: dict[str, str] = field(default_factory=dict)

    def best(self, dtype: str, layout: str, m: int, n: int, k: int, mode: str | None = None) -> Rate | None:
        """Return the fastest rate at the nearest measured shape of this dtype and layout, or None if none is near.

        With `mode`, only rates of that mode count.
        """
        like = [rate for rate in self.rates if (rate.dtype, rate.layout) == (dtype, layout)]
        like = [rate for rate in like if mode in (None, rate.mode)]

        def distance(rate: Rate) -> float:
            sizes = zip((m, n, k), (rate.m, rate.n, rate.k), strict=True)
            return max(abs(math.log(size / measured)) for size, measured in sizes)

        nearest = min(map(distance, like), default=math.inf)
        if nearest > math.log(NEAR_FACTOR):
            return None
        return max((rate for rate in like if distance(rate) == nearest), key=lambda rate: rate.tflops)

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON data."""
        rows = [asdict(rate) | {"tflops": float(f"{rate.tflops:.4g}")} for rate in self.rates]
        about = {"device": self.device, "architecture": self.architecture, "measured_with": self.measured_with}
        return about | {"rates": rows}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Table:
        """Build a table from JSON data; raise ValueError for rates or sizes that are not positive."""
        rates = tuple(Rate(**row | {"config": tuple(row["config"])}) for row in data["rates"])
        if not all(0 < rate.tflops < math.inf and min(rate.m, rate.n, rate.k) > 0 for rate in rates):
            raise ValueError("rates and sizes must be numbers > 0")
        return Table(str(data["device"]), str(data["architecture"]), rates, data.get("measured_with", {}))


@dataclass(frozen=True)
class Known:
    """A table and a sentence that says where it comes from, for `Plan.why`."""

    table: Table
    source: str


def known(device: torch.device) -> Known | None:
    """Return the rates for a device: the user's table, the shipped table, or a shipped one of its architecture."""
    return _known(*identity(device)) if device.type == TRITON else None


@cache
def _known(name: str, architecture: str) -> Known | None:
    """Merge the user's rates over the shipped ones, but only if those were measured on the same kind of device."""
    own = _own(name)
    shipped = pick(name, architecture, lambda: SHIPPED / "none", SHIPPED, _read)
    if own is None:
        return Known(*shipped) if shipped else None
    here = f"measured here, in {file_of(name)}"
    if shipped is None or shipped[0].device != name:
        return Known(own, here)
    both = Table(name, architecture, merged(shipped[0].rates, own.rates), own.measured_with)
    return Known(both, f"{here}, and {shipped[1]}")


def _own(name: str) -> Table | None:
    """Return the user's table of a device, if there is one."""
    found = pick(name, "", partial(file_of, name), SHIPPED / "none", _read)
    return found[0] if found else None


def file_of(name: str) -> Path:
    """Return the path of the user's table of a device."""
    return own_file(f"gemm {name}")


def add(new: Iterable[Rate], device: torch.device, measured_with: dict[str, str]) -> Path:
    """Merge measured rates into the user's table of a device and return its path."""
    about = identity(device)
    own, path = _own(about[0]), file_of(about[0])
    write(Table(*about, merged(own.rates if own else (), new), measured_with), path)
    return path


def merged(old: Iterable[Rate], new: Iterable[Rate]) -> tuple[Rate, ...]:
    """Return all rates; a new one replaces an old one of the same mode, dtype, layout and sizes.

    >>> from dataclasses import replace
    >>> slow, fast = (Rate("bulk", "bfloat16", "ag_gemm/4/1", 8, 8, 8, tflops) for tflops in (1.0, 2.0))
    >>> merged([slow, replace(slow, layout="nn")], [fast]) == (replace(slow, layout="nn"), fast)
    True
    """

    def key(rate: Rate) -> tuple[str | int, ...]:
        return rate.mode, rate.dtype, rate.layout, rate.m, rate.n, rate.k

    new = tuple(new)
    replaced = {key(rate) for rate in new}
    return (*(rate for rate in old if key(rate) not in replaced), *new)


def write(table: Table, path: Path) -> None:
    """Write a table and forget the cached ones, so that the next lookup reads it."""
    write_whole(table.to_json(), path)
    _known.cache_clear()
    executables.drop(None)  # GEMMs that were planned by the old table


def _read(path: Path) -> Table:
    try:
        return Table.from_json(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "remove it, or run meshflash bench gemm --calibrate"
        raise ValueError(f"{path}: not a table of GEMM rates ({error!r}); {remedy}") from error
