"""Document lengths as users give them: lists, arrays or tensors, checked, and read only when they are needed.

`name` is the call and the argument that an error message names, such as "documents(lengths)".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: "No limit" in bands and intervals. Positions stay below it, and the sum of two such values fits int32.
UNBOUNDED = 2**30

_NUMPY = (np.ndarray, np.generic)
_INTEGERS = (int, np.integer)


def as_integer(value: Any, name: str) -> int:
    """Return a Python integer, or raise ValueError with the name of the argument."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    return int(value)


def is_tensor(value: Any) -> bool:
    """Whether this is a tensor of some framework: reading it may copy from a device, so it is read late."""
    return hasattr(value, "shape") and hasattr(value, "device") and not isinstance(value, _NUMPY)


def counts(lengths: Any) -> Any:
    """Return the number of documents, for each row if rows have their own; reads only the shape."""
    if hasattr(lengths, "shape"):
        return [lengths.shape[1]] * lengths.shape[0] if len(lengths.shape) == 2 else lengths.shape
    try:
        rows = list(lengths)
    except TypeError:
        return ()
    return [len(row) for row in rows] if rows and all(np.ndim(row) for row in rows) else (len(rows),)


def as_lengths(lengths: Any, name: str) -> Any:
    """Return lengths as a checked array, short rows padded by 0; a tensor is copied, so later writes do not matter."""
    if is_tensor(lengths):
        return lengths + 0
    if isinstance(lengths, np.ndarray) and np.issubdtype(lengths.dtype, np.integer):
        return on_host(lengths.copy(), name)
    if isinstance(lengths, (list, tuple)) and set(map(type, lengths)) == {int}:  # the usual case, and much faster
        return on_host(np.array(lengths), name)
    try:
        rows = [row if isinstance(row, _INTEGERS) or np.ndim(row) == 0 else list(row) for row in lengths]
        if rows and all(isinstance(row, list) for row in rows):
            width = max(len(row) for row in rows)
            rows = [row + [0] * (width - len(row)) for row in rows]
        array = np.asarray(rows)
    except (TypeError, ValueError) as error:
        raise _not_lengths(name, lengths) from error
    return on_host(array, name)


def as_cumulative(cumulative: Any, name: str) -> Any:
    """Return cumulative lengths as a checked array; a tensor is copied, so that later writes do not matter."""
    if is_tensor(cumulative):
        if len(cumulative.shape) != 1:
            raise ValueError(f"{name}: expected one dimension, got shape {list(cumulative.shape)}")
        return cumulative + 0
    cumulative = np.array(cumulative)
    from_cumulative(cumulative, name)
    return cumulative


def from_cumulative(cumulative: Any, name: str) -> Array:
    """Return the lengths for cumulative lengths; reads a tensor."""
    host = _read(cumulative, name)
    if host.ndim != 1 or not len(host) or host[0] != 0:
        raise ValueError(f"{name}: expected [0, n1, n1 + n2, ...], got {host!r}")
    return on_host(np.diff(on_host(host, name)), name)


def on_host(lengths: Any, name: str) -> Array:
    """Return lengths as a checked int64 array on the host; reads a tensor."""
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
    """Return the first position of the document of each position; padding counts as a last document."""
    return cuts[np.searchsorted(cuts, positions, "right") - 1]


def _read(lengths: Any, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(lengths.cpu().numpy() if is_tensor(lengths) else lengths)
    except TypeError as error:
        raise _not_lengths(name, lengths) from error


def _not_lengths(name: str, lengths: Any) -> ValueError:
    return ValueError(f"{name}: expected a list of integers, or a list of integers for each row; got {lengths!r}")
