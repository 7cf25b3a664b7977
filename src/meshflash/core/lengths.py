"""Document lengths as users give them: lists, arrays or tensors, checked, and read only when they are needed.

`name` is what an error calls them: the call and its argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]

#: Stands for "no limit" in bands and intervals; a position stays below it, and a sum of two fits int32.
UNBOUNDED = 2**30

_NUMPY = (np.ndarray, np.generic)
_INTEGERS = (int, np.integer)


def as_integer(value: Any, name: str) -> int:
    """A Python integer, or ValueError with the name of the argument."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    return int(value)


def is_tensor(value: Any) -> bool:
    """Whether this is an array of some framework, which is not to be read before it is used."""
    return hasattr(value, "shape") and hasattr(value, "device") and not isinstance(value, _NUMPY)


def counts(lengths: Any) -> Any:
    """How many documents there are, in each row where rows have their own; from the shape alone."""
    if hasattr(lengths, "shape"):
        return [lengths.shape[1]] * lengths.shape[0] if len(lengths.shape) == 2 else lengths.shape
    try:
        rows = list(lengths)
    except TypeError:
        return ()
    return [len(row) for row in rows] if rows and all(np.ndim(row) for row in rows) else (len(rows),)


def as_lengths(lengths: Any, name: str) -> Any:
    """Lengths as a checked array, rows filled up with 0; a tensor as a copy, which no later change reaches."""
    if is_tensor(lengths):
        return lengths + 0
    try:
        rows = [row if np.ndim(row) == 0 else list(row) for row in lengths]
        if rows and all(isinstance(row, list) for row in rows):
            width = max(len(row) for row in rows)
            rows = [row + [0] * (width - len(row)) for row in rows]
        array = np.asarray(rows)
    except (TypeError, ValueError) as error:
        raise _not_lengths(name, lengths) from error
    return on_host(array, name)


def as_cumulative(cumulative: Any, name: str) -> Any:
    """Cumulative lengths as a checked array; a tensor as a copy, which no later change reaches."""
    if is_tensor(cumulative):
        if len(cumulative.shape) != 1:
            raise ValueError(f"{name}: expected one dimension, got shape {list(cumulative.shape)}")
        return cumulative + 0
    cumulative = np.array(cumulative)
    from_cumulative(cumulative, name)
    return cumulative


def from_cumulative(cumulative: Any, name: str) -> Array:
    """The lengths between cumulative ones; reads a tensor."""
    host = _read(cumulative, name)
    if host.ndim != 1 or not len(host) or host[0] != 0:
        raise ValueError(f"{name}: expected [0, n1, n1 + n2, ...], got {host!r}")
    return on_host(np.diff(on_host(host, name)), name)


def on_host(lengths: Any, name: str) -> Array:
    """Lengths as a checked array of int64; reads a tensor."""
    array = _read(lengths, name)
    if array.size == 0:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise _not_lengths(name, lengths)
    if array.min(initial=0) < 0:
        raise ValueError(f"{name}: lengths must be >= 0, got {array.min()}")
    if array.max(initial=0) > UNBOUNDED:
        raise ValueError(f"{name}: lengths must be at most {UNBOUNDED}, got {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int64)


def starts(cuts: Array, positions: Array) -> Array:
    """Where the document of each position begins; padding counts as a last document."""
    return cuts[np.searchsorted(cuts, positions, "right") - 1]


def _read(lengths: Any, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(lengths.cpu().numpy() if is_tensor(lengths) else lengths)
    except TypeError as error:
        raise _not_lengths(name, lengths) from error


def _not_lengths(name: str, lengths: Any) -> ValueError:
    return ValueError(f"{name}: expected a list of integers, or a list of them for each row; got {lengths!r}")
