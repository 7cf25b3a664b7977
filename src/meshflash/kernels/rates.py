"""How fast each kernel is on a device, as measured, and what that predicts for a call.

Tables lie beside this file under `measured/`, one for each device that was measured; `meshflash calibrate`
writes one for the device at hand into the user's own folder, which goes first. A device without a table takes
that of one of the same architecture. Nothing is ever measured in a call.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from meshflash.core import files
from meshflash.core.reading import read_json
from meshflash.kernels.contract import KernelRequest, Launch, Pass

#: Where the tables are that come with meshflash.
SHIPPED = Path(__file__).parent / "measured"
#: Backward has five products where forward has two.
BACKWARD = 2.5


@dataclass(frozen=True)
class Rate:
    """What one kernel reached in one pass: useful TFLOP/s at this head dim, mask and number of keys."""

    kernel: str
    direction: Pass
    causal: bool
    head_dim: int
    tokens: int
    tflops: float


@dataclass(frozen=True, eq=False)
class Rates:
    """The measured rates of a device, and the microseconds that the host takes for a call of each kernel.

    `configs` are those of the Triton kernels that turned out best there, where they were tried.
    """

    device: str
    architecture: str
    rates: tuple[Rate, ...]
    host_us: dict[str, dict[str, float]]
    measured_with: dict[str, str] = field(default_factory=dict)
    configs: dict[str, list[int]] = field(default_factory=dict)

    def seconds(self, kernel: str, ask: KernelRequest, launches: Iterable[Launch]) -> float | None:
        """How long a call should take; None where this kernel was not measured."""
        device = host = 0.0
        for launch in launches:
            rate = self._rate(kernel, ask.direction, launch.causal, ask.head_dim, launch.keys)
            if rate is None:
                return None
            rows = ask.batch if launch.every_batch_row else 1
            device += 2.0 * (ask.head_dim + ask.value_dim) * launch.pairs * rows * ask.heads / (rate * 1e12)
            host += self.host_us.get(kernel, {}).get(ask.direction, 0.0) * 1e-6
        return max(host, device * (BACKWARD if ask.direction == "backward" else 1.0))

    def _rate(self, kernel: str, direction: Pass, causal: bool, dim: int, keys: int) -> float | None:
        """TFLOP/s: of the next wider head that was measured, and between the nearest numbers of keys."""
        curves = self._curves.get((kernel, direction, causal))
        if not curves:
            return None
        curve = curves[min((d for d in curves if d >= dim), default=max(curves))]
        tokens = [t for t, _ in curve]
        at = bisect_left(tokens, keys)
        if at == 0:
            return curve[0][1] * min(1.0, keys / tokens[0])
        if at == len(curve):
            return curve[-1][1]
        (low, slow), (high, fast) = curve[at - 1 : at + 1]
        return slow + (fast - slow) * math.log(keys / low) / math.log(high / low)

    @cached_property
    def _curves(self) -> dict[tuple[str, str, bool], dict[int, list[tuple[int, float]]]]:
        """(tokens, TFLOP/s) in the order of tokens: by (kernel, pass, causal), then by head dim."""
        out: dict[tuple[str, str, bool], dict[int, list[tuple[int, float]]]] = {}
        for rate in sorted(self.rates, key=lambda rate: rate.tokens):
            by_dim = out.setdefault((rate.kernel, rate.direction, rate.causal), {})
            by_dim.setdefault(rate.head_dim, []).append((rate.tokens, rate.tflops))
        return out

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "device": self.device,
            "architecture": self.architecture,
            "measured_with": self.measured_with,
            "host_us": self.host_us,
            "configs": self.configs,
            "rates": [
                {
                    "kernel": rate.kernel,
                    "pass": rate.direction,
                    "mask": "causal" if rate.causal else "full",
                    "head_dim": rate.head_dim,
                    "tokens": rate.tokens,
                    "tflops": float(f"{rate.tflops:.4g}"),
                }
                for rate in self.rates
            ],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Rates:
        """As it was written."""
        rates = tuple(
            Rate(row["kernel"], row["pass"], row["mask"] == "causal", row["head_dim"], row["tokens"], row["tflops"])
            for row in data["rates"]
        )
        about, host = (str(data["device"]), str(data["architecture"])), dict(data["host_us"])
        if not all(0 < rate.tflops < math.inf and rate.tokens > 0 for rate in rates):
            raise ValueError("rates must be numbers > 0")
        if not all(us >= 0 for by_pass in host.values() for us in by_pass.values()):
            raise ValueError("host times must be numbers >= 0")
        if not all(_is_config(numbers) for numbers in data.get("configs", {}).values()):
            raise ValueError("configurations must be four numbers > 0, and one >= 0 or none")
        return Rates(*about, rates, host, data.get("measured_with", {}), data.get("configs", {}))


def _is_config(numbers: list[int]) -> bool:
    return len(numbers) in (4, 5) and min(numbers[:4]) > 0 and min(numbers) >= 0


@dataclass(frozen=True)
class Known:
    """A table, and how it came to be used, in words."""

    rates: Rates
    source: str


def known(device: torch.device) -> Known | None:
    """The table for a device: the user's own, the one that comes with meshflash, or one of its architecture."""
    if device.type != "cuda":
        return None
    return _known(*identity(device))


@cache
def identity(device: torch.device) -> tuple[str, str]:
    """The name of a device and its architecture, as tables give them."""
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "").partition(":")[0] if torch.version.hip else ""
    return properties.name, name or f"sm_{properties.major}{properties.minor}"


@cache
def _known(name: str, architecture: str) -> Known | None:
    found = pick(name, architecture, partial(own_file, name), SHIPPED, _read)
    return Known(*found) if found else None


class Measured(Protocol):
    """A table of what was measured on a device."""

    @property
    def device(self) -> str:
        """Its name."""

    @property
    def architecture(self) -> str:
        """What it has in common with others."""


M = TypeVar("M", bound=Measured)


def pick(
    name: str, architecture: str, own: Callable[[], Path], shipped: Path, read: Callable[[Path], M]
) -> tuple[M, str] | None:
    """The table of a device, and in words which it is: the user's own, or of those in a folder the nearest."""
    file = _there(own)
    if file:
        return read(file), f"measured here, in {file}"
    tables = [read(path) for path in sorted(shipped.glob("*.json"))]
    for table in tables:
        if table.device == name:
            return table, f"the table of {name}"
    for table in tables:
        if table.architecture == architecture:
            return table, f"the table of {table.device}, of the same architecture"
    return None


def own_file(name: str) -> Path:
    """Where the user's own table of a device is: under MESHFLASH_RATES, or the user's cache."""
    folder = os.environ.get("MESHFLASH_RATES")
    if not folder:
        folder = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshflash")
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Path(folder) / f"{slug}.json"


def _there(own: Callable[[], Path]) -> Path | None:
    """The user's own table, if there is one; a home that is not there or not ours has none."""
    try:
        path = own()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def write(rates: Rates, path: Path) -> None:
    """Write a table, which is read from now on."""
    write_whole(rates.to_json(), path)
    forget()


def write_whole(table: dict[str, Any], path: Path) -> None:
    """Write a table at once or not at all: other processes may be reading it."""
    files.write_whole(path, json.dumps(table, indent=1) + "\n")


def forget() -> None:
    """Read tables anew."""
    _known.cache_clear()


def _read(path: Path) -> Rates:
    try:
        return Rates.from_json(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a table of rates ({error!r}); remove it, or run meshflash calibrate") from error
