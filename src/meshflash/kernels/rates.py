"""Measured rates of each kernel on a device, and the time they predict for a call.

Tables lie beside this file under `measured/`, one for each device that was measured; `meshflash calibrate`
writes one for the device at hand into the user's own folder, which goes first. A device without a table takes
that of one of the same architecture. Nothing is ever measured in a call.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from meshflash.core import files
from meshflash.core.reading import read_json
from meshflash.kernels.contract import KernelRequest, Launch
from meshflash.kernels.rate_curves import BACKWARD, Rate, RateCurves, Variant

#: The folder of the tables that meshflash ships.
SHIPPED = Path(__file__).parent / "measured"
#: Layers whose predicted times differ by less than this factor take about as long: host time is noisy.
SIMILAR = 1.05
#: FLOPs of the other GEMMs of a transformer layer in a forward, for each token and over the square of the width (heads
#: times head dim): four projections, and an MLP of four times the width. A backward has twice as many.
LAYER_FLOPS = 24.0
#: The host's time for the rest of a layer in one pass, in seconds: about twelve launches of eager torch, 10 us each.
LAYER_HOST = 120e-6


class Predicted(NamedTuple):
    """The predicted time of one call, in seconds; `Rates.predict` makes it.

    A call is part of a transformer layer, where the host runs ahead of the device while that computes the layer's other
    GEMMs. So the host's time counts only in layers that it takes longer for than the device: short ones. A step of a
    schedule stands alone, because a layer may have many of them.

    Args:
        device: The time that the device computes.
        host: The time that the host takes to launch it.
        layer_device: The time of the device for the rest of the layer.
        layer_host: The time of the host for the rest of the layer.
    """

    device: float
    host: float
    layer_device: float = 0.0
    layer_host: float = 0.0

    def cost(self, more_host: float = 0.0) -> Cost:
        """Return what kernels compare for this call.

        Args:
            more_host: More time of the host for this call.
        """
        return Cost(max(self.device + self.layer_device, self.host + more_host + self.layer_host), self.device)


class Cost(NamedTuple):
    """The seconds by which kernels compare: of a layer, and of the device for its attention; `cheapest` takes many."""

    layer: float
    device: float


K = TypeVar("K")


def cheapest(costs: Mapping[K, Cost]) -> K:
    """Return the key of the shortest layer; of layers that take about as long, the one with the least device time.

    Args:
        costs: The cost of each kernel, or of each pair of kernels.
    """
    longest = SIMILAR * min(cost.layer for cost in costs.values())
    return min((key for key, cost in costs.items() if cost.layer <= longest), key=lambda key: costs[key].device)


@dataclass(frozen=True, eq=False)
class Rates:
    """The measured rates of a device; `meshflash calibrate` writes them, and `known` reads them.

    Args:
        device: The name of the device.
        architecture: The architecture of the device, such as "sm_90".
        rates: The measured rates.
        host_us: The host time of a call, in microseconds, by kernel and pass.
        measured_with: The versions of the software that was measured.
        configs: The fastest configurations of the portable Triton kernels, if they were tuned.
    """

    device: str
    architecture: str
    rates: tuple[Rate, ...]
    host_us: dict[str, dict[str, float]]
    measured_with: dict[str, str] = field(default_factory=dict)
    configs: dict[str, list[int]] = field(default_factory=dict)

    def predict(self, kernel: str, request: KernelRequest, launches: Iterable[Launch]) -> Predicted | None:
        """Predict the time of a call; None if the kernel was not measured.

        Args:
            kernel: The name of the kernel.
            request: The call, without its tensors.
            launches: The launches of the call, as `Kernel.launches` gives them.
        """
        device = host = 0.0
        for launch in launches:
            rate = self._curves.tflops(kernel, request.direction, launch.causal, request.head_dim, launch.keys)
            if rate is None:
                return None
            for variant in _variants(request):
                rate *= self._curves.factor(variant, kernel, request.direction, request.head_dim, launch.keys)
            rows = request.batch if launch.every_batch_row else 1
            device += 2.0 * (request.head_dim + request.value_dim) * launch.pairs * rows * request.heads / (rate * 1e12)
            host += self.host_us.get(kernel, {}).get(request.direction, 0.0) * 1e-6
        is_backward = request.direction == "backward"
        device *= BACKWARD if is_backward else 1.0
        if request.is_step:
            return Predicted(device, host)
        rows = request.batch * sum(map(len, request.work.q_ranges))
        flops = LAYER_FLOPS * rows * (request.heads * request.head_dim) ** 2 * (2.0 if is_backward else 1.0)
        return Predicted(device, host, flops / (self._best_tflops * 1e12), LAYER_HOST)

    @cached_property
    def _curves(self) -> RateCurves:
        return RateCurves(self.rates)

    @cached_property
    def _best_tflops(self) -> float:
        """The highest rate of all, which is about that of a large GEMM."""
        return max(rate.tflops for rate in self.rates)

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON data."""
        return {
            "device": self.device,
            "architecture": self.architecture,
            "measured_with": self.measured_with,
            "host_us": self.host_us,
            "configs": self.configs,
            "rates": [rate.to_json() for rate in self.rates],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Rates:
        """Return the table of JSON data; ValueError or KeyError if it is malformed.

        Args:
            data: What `to_json` returned.
        """
        rates = tuple(map(Rate.from_json, data["rates"]))
        about, host = (str(data["device"]), str(data["architecture"])), dict(data["host_us"])
        if not rates:
            raise ValueError("no rates")
        if not all(us >= 0 for by_pass in host.values() for us in by_pass.values()):
            raise ValueError("host times must be numbers >= 0")
        if not all(_is_config(numbers) for numbers in data.get("configs", {}).values()):
            raise ValueError("configurations must be four numbers > 0, and one >= 0 or none")
        return Rates(*about, rates, host, data.get("measured_with", {}), data.get("configs", {}))


def _variants(request: KernelRequest) -> list[Variant]:
    """Return what is special in a call; whatever a vendor kernel launches several times for counts as documents."""
    rectangles = request.work.rectangles
    found: list[Variant] = ["gqa"] if request.gqa else []
    return [*found, "documents"] if rectangles is not None and len(rectangles) > 1 else found


def _is_config(numbers: list[int]) -> bool:
    return len(numbers) in (4, 5) and min(numbers[:4]) > 0 and min(numbers) >= 0


@dataclass(frozen=True)
class Known:
    """A table of rates, and where it comes from; `known` makes it.

    Args:
        rates: The table.
        source: A phrase for people, such as "the table of NVIDIA H200".
    """

    rates: Rates
    source: str


def known(device: torch.device) -> Known | None:
    """Return the table for a device: the user's own, the shipped one, or one of the same architecture.

    Args:
        device: A device; only GPUs have tables.
    """
    if device.type != "cuda":
        return None
    return _known(*identity(device))


@cache
def identity(device: torch.device) -> tuple[str, str]:
    """Return the name of a device and its architecture, as tables spell them.

    Args:
        device: A GPU.
    """
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "").partition(":")[0] if torch.version.hip else ""
    return properties.name, name or f"sm_{properties.major}{properties.minor}"


@cache
def _known(name: str, architecture: str) -> Known | None:
    found = pick(name, architecture, partial(own_file, name), SHIPPED, _read)
    return Known(*found) if found else None


class Measured(Protocol):
    """A table of measurements on a device."""

    @property
    def device(self) -> str:
        """The name of the device."""

    @property
    def architecture(self) -> str:
        """The architecture, which similar devices share."""


M = TypeVar("M", bound=Measured)


def pick(
    name: str, architecture: str, own: Callable[[], Path], shipped: Path, read: Callable[[Path], M]
) -> tuple[M, str] | None:
    """Return the table of a device and a phrase that says where it comes from, or None.

    Args:
        name: The name of the device.
        architecture: The architecture of the device.
        own: Returns the path of the user's own table, which goes first.
        shipped: The folder of shipped tables.
        read: Reads a table.
    """
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
    """Return the path of the user's own table of a device: under MESHFLASH_RATES, or in the user's cache.

    Args:
        name: The name of the device.
    """
    folder = os.environ.get("MESHFLASH_RATES")
    if not folder:
        folder = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshflash")
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Path(folder) / f"{slug}.json"


def _there(own: Callable[[], Path]) -> Path | None:
    """Return the path of the user's own table, or None if there is none; the home folder may be unreadable."""
    try:
        path = own()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def write(rates: Rates, path: Path) -> None:
    """Write a table of rates, and use it from now on.

    Args:
        rates: The table.
        path: The file to write.
    """
    write_whole(rates.to_json(), path)
    forget()


def write_whole(table: dict[str, Any], path: Path) -> None:
    """Write a table atomically: other processes may be reading it.

    Args:
        table: The table as JSON data.
        path: The file to write.
    """
    files.write_whole(path, json.dumps(table, indent=1) + "\n")


def forget() -> None:
    """Drop cached tables, so that they are read again."""
    _known.cache_clear()


def _read(path: Path) -> Rates:
    try:
        return Rates.from_json(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a table of rates ({error!r}); remove it, or run meshflash calibrate") from error
