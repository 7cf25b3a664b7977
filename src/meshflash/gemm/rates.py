"""How fast each way to a product is on a device, as measured; nothing is ever measured in a call.

A table lists modes at shapes. `meshflash bench gemm --calibrate` writes one into the user's own folder, beside that
of the attention kernels; tables that come with meshflash lie under `measured/`.
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
from meshflash.kernels.rates import identity, own_file, pick, write_whole
from meshflash.runtime.devices import TRITON

#: Where the tables are that come with meshflash.
SHIPPED = Path(__file__).parent / "measured"
#: How far a measured shape may be: each size by this factor at most.
NEAR = 2.0


@dataclass(frozen=True)
class Rate:
    """What one mode reached at one shape: TFLOP/s. `layout` has a t for each operand whose columns are neighbours."""

    mode: str
    numbers: str
    layout: str
    m: int
    n: int
    k: int
    tflops: float
    config: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Table:
    """The measured rates of a device."""

    device: str
    architecture: str
    rates: tuple[Rate, ...]
    measured_with: dict[str, str] = field(default_factory=dict)

    def best(self, numbers: str, layout: str, m: int, n: int, k: int, mode: str | None = None) -> Rate | None:
        """The fastest, of all or in a mode, at the nearest shape of such numbers and layout; None if none is near."""
        like = [rate for rate in self.rates if (rate.numbers, rate.layout) == (numbers, layout)]
        like = [rate for rate in like if mode in (None, rate.mode)]

        def distance(rate: Rate) -> float:
            sizes = zip((m, n, k), (rate.m, rate.n, rate.k), strict=True)
            return max(abs(math.log(size / measured)) for size, measured in sizes)

        nearest = min(map(distance, like), default=math.inf)
        if nearest > math.log(NEAR):
            return None
        return max((rate for rate in like if distance(rate) == nearest), key=lambda rate: rate.tflops)

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        rows = [asdict(rate) | {"tflops": float(f"{rate.tflops:.4g}")} for rate in self.rates]
        about = {"device": self.device, "architecture": self.architecture, "measured_with": self.measured_with}
        return about | {"rates": rows}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Table:
        """As it was written."""
        rates = tuple(Rate(**row | {"config": tuple(row["config"])}) for row in data["rates"])
        if not all(0 < rate.tflops < math.inf and min(rate.m, rate.n, rate.k) > 0 for rate in rates):
            raise ValueError("rates and sizes must be numbers > 0")
        return Table(str(data["device"]), str(data["architecture"]), rates, data.get("measured_with", {}))


@dataclass(frozen=True)
class Known:
    """A table, and how it came to be used, in words."""

    table: Table
    source: str


def known(device: torch.device) -> Known | None:
    """The table for a device: the user's own, the one that comes with meshflash, or one of its architecture."""
    return _known(*identity(device)) if device.type == TRITON else None


@cache
def _known(name: str, architecture: str) -> Known | None:
    """Rates that were measured here go before those of the table that comes for the very same device."""
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
    """The user's own table of a device, if there is one."""
    found = pick(name, "", partial(file_of, name), SHIPPED / "none", _read)
    return found[0] if found else None


def file_of(name: str) -> Path:
    """Where the user's own table of a device is."""
    return own_file(f"gemm {name}")


def add(new: Iterable[Rate], device: torch.device, measured_with: dict[str, str]) -> Path:
    """Write what was measured on a device into the user's own table, beside what is there. Where it lies."""
    about = identity(device)
    own, path = _own(about[0]), file_of(about[0])
    write(Table(*about, merged(own.rates if own else (), new), measured_with), path)
    return path


def merged(old: Iterable[Rate], new: Iterable[Rate]) -> tuple[Rate, ...]:
    """All rates, of which a new one takes the place of that of the same mode, numbers, layout and sizes.

    >>> from dataclasses import replace
    >>> slow, fast = (Rate("bulk", "bfloat16", "ag_gemm/4/1", 8, 8, 8, tflops) for tflops in (1.0, 2.0))
    >>> merged([slow, replace(slow, layout="nn")], [fast]) == (replace(slow, layout="nn"), fast)
    True
    """

    def name(rate: Rate) -> tuple[str | int, ...]:
        return rate.mode, rate.numbers, rate.layout, rate.m, rate.n, rate.k

    new = tuple(new)
    again = {name(rate) for rate in new}
    return (*(rate for rate in old if name(rate) not in again), *new)


def write(table: Table, path: Path) -> None:
    """Write a table, which is read from now on."""
    write_whole(table.to_json(), path)
    _known.cache_clear()


def _read(path: Path) -> Table:
    try:
        return Table.from_json(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        again = "remove it, or run meshflash bench gemm --calibrate"
        raise ValueError(f"{path}: not a table of rates of products ({error!r}); {again}") from error
