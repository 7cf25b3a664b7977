"""Descriptions of machines: memory, links by level, and the rates of attention kernels. Each number has a source.

A description is a TOML file. `machines/` has those that ship; a path names one of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshflash.core.program import Direction
from meshflash.core.reading import read_object, read_toml
from meshflash.kernels.rate_curves import Rate, RateCurves

#: The folder of the descriptions that meshflash ships.
SHIPPED = Path(__file__).parent / "machines"
#: The folder of the tables of measured kernels that meshflash ships.
TABLES = Path(__file__).parents[1] / "kernels" / "measured"
#: The kernel of rates that a description lists itself.
PUBLISHED = "published"
#: Numbers of a description are below this.
MOST = 1e15


@dataclass(frozen=True)
class Link:
    """An interconnect level, such as NVLink within a node.

    Attributes:
        name: What connects ranks at this level.
        ranks: How many neighbouring ranks the level connects; None for any number.
        bytes_per_second: The bandwidth of a rank in each direction, as far as programs reach it.
        latency: The seconds of a message besides its bytes.
        source: Where the numbers come from.
    """

    name: str
    ranks: int | None
    bytes_per_second: float
    latency: float
    source: str

    def connects(self, rank: int, peer: int) -> bool:
        """Return whether the level connects two ranks.

        Args:
            rank: A rank.
            peer: Another rank.
        """
        return self.ranks is None or rank // self.ranks == peer // self.ranks


@dataclass(frozen=True)
class Machine:
    """A machine whose ranks are alike; `load` reads one.

    Attributes:
        name: The name of its file.
        title: What it is, in words.
        memory_bytes: The memory of a rank.
        memory_bytes_per_second: The bandwidth of that memory.
        overhead_seconds: The seconds of a step besides its work.
        links: The interconnect levels, from the innermost one.
        kernels: The kernels that may run, each with the head dims that it serves; none listed means any.
        curves: The rates of the kernels.
        sources: Where the numbers come from, by table of the file.
    """

    name: str
    title: str
    memory_bytes: float
    memory_bytes_per_second: float
    overhead_seconds: float
    links: tuple[Link, ...]
    kernels: Mapping[str, tuple[int, ...]] = field(compare=False)
    curves: RateCurves = field(compare=False)
    sources: Mapping[str, str] = field(compare=False)

    def link(self, rank: int, peer: int) -> Link:
        """Return the innermost level that connects two ranks.

        Args:
            rank: A rank.
            peer: Another rank.
        """
        return next(link for link in self.links if link.connects(rank, peer))

    def tflops(self, direction: Direction, causal: bool, dim: int, tokens: int, gqa: bool) -> float:
        """Return the rate of the fastest kernel that serves a head dim, which may be padded to a measured one.

        Where causal calls were not measured at that head dim, the rate is that of full ones.

        Args:
            direction: The pass.
            causal: Whether a part of the pairs is masked.
            dim: The head dim.
            tokens: The sequence length of a causal or full call with as many keys for each query.
            gqa: Whether query heads share KV heads.
        """
        rates = [rate for kernel in self.kernels if (rate := self._tflops(kernel, direction, causal, dim, tokens, gqa))]
        if not rates:
            raise ValueError(f"{self.name}: no {direction} rates at head dim {dim}; list them under kernels.rates")
        return max(rates)

    def _tflops(self, kernel: str, direction: Direction, causal: bool, dim: int, tokens: int, gqa: bool) -> float:
        """Return the rate of a kernel, or 0 where it does not serve the head dim."""
        if self.kernels[kernel] and dim not in self.kernels[kernel]:
            return 0.0
        measured = {way: self.curves.head_dims(kernel, direction, way) for way in (False, True)}
        wider = min((d for dims in measured.values() for d in dims if d >= dim), default=0)
        way = causal if wider in measured[causal] else not causal
        rate = self.curves.tflops(kernel, direction, way, wider, tokens) if wider else None
        return (rate or 0.0) * (self.curves.factor("gqa", kernel, direction, wider, tokens) if gqa else 1.0)


def names() -> list[str]:
    """Return the names of the machines that ship."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load(name: str, per_node: int | None = None) -> Machine:
    """Return a machine by its name, or from a TOML file of your own.

    Args:
        name: One of `names`, or the path of a file that ends in .toml.
        per_node: How many ranks the innermost link connects, if not as the file says.

    >>> load("h200").links[0].name
    'NVLink 4'
    >>> load("h20")
    Traceback (most recent call last):
    ValueError: machine 'h20': expected one of h100, h200, or a path that ends in .toml; did you mean h200?
    """
    if name.endswith(".toml"):
        path = Path(name)
    elif name in names():
        path = SHIPPED / f"{name}.toml"
    else:
        near = get_close_matches(name, names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"machine {name!r}: expected one of {', '.join(names())}, or a path that ends in .toml{hint}")
    table = _Table(read_toml(path), f"{path}: ")
    memory, steps, kernels = (table.table(key) for key in ("memory", "steps", "kernels"))
    links = tuple(_link(each) for each in table.tables("links"))
    title = table.string("title")
    if per_node is not None:
        if per_node < 1 or len(links) < 2:
            raise ValueError(f"per_node={per_node}: expected at least 1, and a machine with links between nodes")
        links = (replace(links[0], ranks=per_node), *links[1:])
        title += f", here {per_node} a node"
    _check_levels(links, f"{path}: links")
    served, rates = _rates(kernels, path)
    machine = Machine(
        path.stem,
        title,
        memory.number("gb") * 1e9,
        memory.number("gb_per_s") * 1e9,
        steps.number("us") * 1e-6,
        links,
        served,
        RateCurves(rates),
        {key: each.string("source") for key, each in (("memory", memory), ("steps", steps), ("kernels", kernels))},
    )
    for each in (table, memory, steps, kernels):
        each.done()
    return machine


def _link(table: _Table) -> Link:
    efficiency = table.number("efficiency", 1.0)
    if efficiency > 1:
        raise ValueError(f"{table.where}efficiency={efficiency}: expected a number from 0 to 1")
    link = Link(
        table.string("name"),
        table.whole("ranks") if table.has("ranks") else None,
        table.number("gb_per_s") * 1e9 * efficiency,
        table.number("latency_us") * 1e-6,
        table.string("source"),
    )
    table.done()
    return link


def _check_levels(links: tuple[Link, ...], where: str) -> None:
    """Raise ValueError unless each level connects more ranks than the one before, and the last one all."""
    inner = [link.ranks for link in links[:-1]]
    if not links or links[-1].ranks is not None or None in inner:
        raise ValueError(f"{where}: expected `ranks` in all but the last one, which connects all ranks")
    sizes = [ranks for ranks in inner if ranks is not None]
    if any(outer % each or outer == each for each, outer in pairwise(sizes)):
        raise ValueError(f"{where}: expected each level to connect several of the groups of the level before")


def _rates(table: _Table, file: Path) -> tuple[dict[str, tuple[int, ...]], list[Rate]]:
    """Return the kernels that may run with their head dims, and all rates: of a measured table, or of the file."""
    if not table.has("table"):
        rates = [rate for row in table.tables("rates") for rate in _published(row)]
        return {PUBLISHED: ()}, rates
    measured = table.string("table")
    path = file.parent / measured if measured.endswith(".json") else TABLES / f"{measured}.json"
    try:
        rates = [Rate.from_json(row) for row in read_object(path, "a table of `meshflash calibrate`")["rates"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a table of `meshflash calibrate` ({error!r})") from None
    present = dict.fromkeys(rate.kernel for rate in rates)
    used = table.table("use") if table.has("use") else None
    served: dict[str, tuple[int, ...]] = dict.fromkeys(present, ())
    if used is not None:
        served = {kernel: used.dims(kernel) for kernel in used.names()}
    for kernel in served:
        if kernel not in present:
            raise ValueError(f"{table.where}use.{kernel}: not in {path.name}, which has {', '.join(present)}")
    if not served:
        raise ValueError(f"{table.where}use: expected at least one kernel")
    return served, rates


def _published(row: _Table) -> list[Rate]:
    """Return the rates of a table of the file, one for each length."""
    tokens, tflops = row.raw("tokens"), row.raw("tflops")
    if not (isinstance(tokens, list) and isinstance(tflops, list) and len(tokens) == len(tflops) > 0):
        raise ValueError(f"{row.where}tokens and tflops: expected two lists of equal length")
    common = {key: row.raw(key) for key in ("pass", "mask", "head_dim")} | {"kernel": PUBLISHED}
    row.done()
    try:
        return [Rate.from_json(common | {"tokens": t, "tflops": x}) for t, x in zip(tokens, tflops, strict=True)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{row.where}{error}") from None


class _Table:
    """A table of a TOML file, whose keys must all be known: errors name the key, and the nearest valid one."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where.rstrip('. :')}: expected a table")
        self.where, self._data = where, data
        self._known: list[str] = []

    def names(self) -> list[str]:
        """Return all keys."""
        return list(self._data)

    def has(self, key: str) -> bool:
        """Return whether a key that may be left out is there."""
        self._known.append(key)
        return key in self._data

    def raw(self, key: str) -> Any:
        """Return the value of a key that must be there."""
        self._known.append(key)
        if key not in self._data:
            near = get_close_matches(key, self._data, 1)
            raise ValueError(f"{self.where}{key}: missing{f'; there is {near[0]}' if near else ''}")
        return self._data[key]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number > 0; without one the default, if there is any."""
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        if type(value) not in (int, float) or not 0 < value < MOST:
            raise ValueError(f"{self.where}{key}={str(value)[:40]}: expected a number > 0, below {MOST:g}")
        return float(value)

    def whole(self, key: str) -> int:
        """Return a whole number > 0."""
        value = self.raw(key)
        if type(value) is not int or not 0 < value < MOST:
            raise ValueError(f"{self.where}{key}={str(value)[:40]}: expected a whole number > 0")
        return value

    def string(self, key: str) -> str:
        """Return a string."""
        value = self.raw(key)
        if not isinstance(value, str):
            raise ValueError(f"{self.where}{key}={str(value)[:40]}: expected a string")
        return value

    def dims(self, key: str) -> tuple[int, ...]:
        """Return a list of head dims, which may be empty."""
        value = self.raw(key)
        if not isinstance(value, list) or not all(type(each) is int and each > 0 for each in value):
            raise ValueError(f"{self.where}{key}={str(value)[:40]}: expected a list of head dims, or [] for any")
        return tuple(value)

    def table(self, key: str) -> _Table:
        """Return a table of this table."""
        return _Table(self.raw(key), f"{self.where}{key}.")

    def tables(self, key: str) -> list[_Table]:
        """Return a list of tables."""
        value = self.raw(key)
        if not isinstance(value, list) or not value:
            raise ValueError(f"{self.where}{key}: expected tables, each as [[{key}]]")
        return [_Table(each, f"{self.where}{key}[{n}].") for n, each in enumerate(value)]

    def done(self) -> None:
        """Raise ValueError for an unknown key."""
        for key in self._data:
            if key not in self._known:
                near = get_close_matches(key, self._known, 1)
                hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(self._known)}"
                raise ValueError(f"{self.where}{key}: unknown key; {hint}")
