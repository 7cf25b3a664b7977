"""Descriptions of machines: memory, links by level, and the rates of attention kernels. Each number has a source.

A description is a TOML file. `machines/` has those that ship; a path names one of your own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
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


@dataclass(frozen=True)
class Link:
    """A level of links between ranks, such as NVLink within a node.

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

    def connects(self, one: int, other: int) -> bool:
        """Return whether the level connects two ranks.

        Args:
            one: A rank.
            other: Another rank.
        """
        return self.ranks is None or one // self.ranks == other // self.ranks


@dataclass(frozen=True)
class Machine:
    """A machine whose ranks are alike; `load` reads one.

    Attributes:
        name: The name of its file.
        title: What it is, in words.
        memory_bytes: The memory of a rank.
        memory_bytes_per_second: The bandwidth of that memory.
        step_seconds: The seconds of a step besides its work.
        links: The levels of links, from the innermost one.
        kernels: The kernels that may run, by their names in `curves`.
        curves: The rates of the kernels.
        sources: Where the numbers come from, by table of the file.
    """

    name: str
    title: str
    memory_bytes: float
    memory_bytes_per_second: float
    step_seconds: float
    links: tuple[Link, ...]
    kernels: tuple[str, ...]
    curves: RateCurves = field(compare=False)
    sources: Mapping[str, str] = field(compare=False)

    def link(self, one: int, other: int) -> Link:
        """Return the innermost level that connects two ranks; ValueError if none does.

        Args:
            one: A rank.
            other: Another rank.
        """
        for link in self.links:
            if link.connects(one, other):
                return link
        raise ValueError(f"{self.name}: no link connects ranks {one} and {other}; leave out `ranks` of the last link")

    def tflops(self, direction: Direction, causal: bool, dim: int, tokens: int, gqa: bool) -> float:
        """Return the rate of the fastest kernel; where causal calls were not measured, that of full ones.

        Args:
            direction: The pass.
            causal: Whether a part of the pairs is masked.
            dim: The head dim.
            tokens: The number of tokens of a square call with as much work for each query.
            gqa: Whether query heads share KV heads.
        """
        found = []
        for kernel in self.kernels:
            rate = self.curves.tflops(kernel, direction, causal, dim, tokens)
            if rate is None and causal:
                rate = self.curves.tflops(kernel, direction, False, dim, tokens)
            if rate is not None:
                found.append(rate * (self.curves.factor("gqa", kernel, direction, dim, tokens) if gqa else 1.0))
        if not found:
            raise ValueError(f"{self.name}: no rates of a {direction}; list them under kernels.rates")
        return max(found)


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
    if not links:
        raise ValueError(f"{path}: links: expected at least one")
    if per_node is not None:
        if per_node < 1:
            raise ValueError(f"per_node={per_node}: expected at least 1")
        links = (Link(links[0].name, per_node, *_numbers(links[0])), *links[1:])
    used, rates = _rates(kernels)
    machine = Machine(
        path.stem,
        table.text("title"),
        memory.number("gb") * 1e9,
        memory.number("gb_per_s") * 1e9,
        steps.number("us") * 1e-6,
        links,
        used,
        RateCurves(rates),
        {key: each.text("source") for key, each in (("memory", memory), ("steps", steps), ("kernels", kernels))},
    )
    for each in (table, memory, steps, kernels):
        each.done()
    return machine


def _link(table: _Table) -> Link:
    ranks = table.number("ranks", None)
    link = Link(
        table.text("name"),
        None if ranks is None else int(ranks),
        table.number("gb_per_s") * 1e9 * table.number("efficiency", 1.0),
        table.number("latency_us") * 1e-6,
        table.text("source"),
    )
    table.done()
    return link


def _numbers(link: Link) -> tuple[float, float, str]:
    return link.bytes_per_second, link.latency, link.source


def _rates(table: _Table) -> tuple[tuple[str, ...], list[Rate]]:
    """Return the kernels that may run, and all rates: those of a measured table, or those of the file."""
    measured = table.text("table", "")
    if measured:
        path = TABLES / f"{measured}.json" if Path(measured).name == measured else Path(measured)
        rows = read_object(path, "a table of `meshflash calibrate`").get("rates", [])
        rates = [Rate.from_json(row) for row in rows]
        present = dict.fromkeys(rate.kernel for rate in rates)
        used = table.texts("use", tuple(present))
        for kernel in used:
            if kernel not in present:
                raise ValueError(f"{table.where}use: {kernel!r} is not in {path.name}, which has {', '.join(present)}")
        return used, rates
    rates = []
    for row in table.tables("rates"):
        tokens, tflops = row.raw("tokens"), row.raw("tflops")
        if not (isinstance(tokens, list) and isinstance(tflops, list) and len(tokens) == len(tflops) > 0):
            raise ValueError(f"{row.where}tokens and tflops: expected two lists of as many numbers")
        common = {"kernel": PUBLISHED, "pass": row.text("pass"), "mask": row.text("mask")}
        common |= {"head_dim": row.raw("head_dim")}
        if common["pass"] not in ("forward", "backward") or common["mask"] not in ("causal", "full"):
            raise ValueError(f"{row.where}pass or mask: expected forward or backward, and causal or full")
        row.done()
        try:
            rates += [Rate.from_json(common | {"tokens": t, "tflops": x}) for t, x in zip(tokens, tflops, strict=True)]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{row.where}{error}") from None
    return (PUBLISHED,), rates


class _Table:
    """A table of a TOML file, whose keys must all be known: errors name the key, and the nearest valid one."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where.rstrip('. :')}: expected a table")
        self.where, self._data = where, data
        self._asked: list[str] = []

    def raw(self, key: str) -> Any:
        """Return the value of a key that must be there."""
        self._asked.append(key)
        if key not in self._data:
            raise ValueError(f"{self.where}{key}: missing{self._hint(key)}")
        return self._data[key]

    def number(self, key: str, default: Any = ...) -> Any:
        """Return a number > 0, or the default."""
        if key not in self._data and default is not ...:
            self._asked.append(key)
            return default
        value = self.raw(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{self.where}{key}={value!r}: expected a number > 0")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text, or the default."""
        if key not in self._data and default is not None:
            self._asked.append(key)
            return default
        value = self.raw(key)
        if not isinstance(value, str):
            raise ValueError(f"{self.where}{key}={value!r}: expected a text")
        return value

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return a list of texts, or the default."""
        self._asked.append(key)
        value = self._data.get(key, list(default))
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{self.where}{key}={value!r}: expected a list of texts")
        return tuple(value)

    def table(self, key: str) -> _Table:
        """Return a table of this table."""
        return _Table(self.raw(key), f"{self.where}{key}.")

    def tables(self, key: str) -> list[_Table]:
        """Return a list of tables."""
        value = self.raw(key)
        if not isinstance(value, list):
            raise ValueError(f"{self.where}{key}: expected tables, each as [[{key}]]")
        return [_Table(each, f"{self.where}{key}[{n}].") for n, each in enumerate(value)]

    def done(self) -> None:
        """Raise ValueError for a key that nobody asked for."""
        for key in self._data:
            if key not in self._asked:
                near = get_close_matches(key, self._asked, 1)
                hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(self._asked)}"
                raise ValueError(f"{self.where}{key}: there is no such key; {hint}")

    def _hint(self, key: str) -> str:
        near = get_close_matches(key, self._data, 1)
        return f"; there is {near[0]}" if near else ""
