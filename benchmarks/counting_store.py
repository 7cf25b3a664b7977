"""Stores that count what their clients do: one around any store of torch, and one in memory for thousands of ranks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

#: Requests that torch's TCPStore sends for a call, where that is not one: it waits for a key before it reads it.
REQUESTS = {"get": 2, "multi_get": 2, "set_timeout": 0}


@dataclass
class Traffic:
    """The calls of one rank by name, and the bytes of keys and values that it sent and received."""

    calls: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0

    @property
    def num_calls(self) -> int:
        """The calls of the store."""
        return self.calls.total()

    @property
    def num_requests(self) -> int:
        """The requests that a TCPStore sends for these calls."""
        return sum(number * REQUESTS.get(name, 1) for name, number in self.calls.items())

    def clear(self) -> None:
        """Begin to count anew."""
        self.calls.clear()
        self.sent = self.received = 0


class CountingStore:
    """A client of a store that counts its calls; a clone counts into the same traffic."""

    def __init__(self, store: Any, traffic: Traffic | None = None) -> None:
        """Wrap a store.

        Args:
            store: A store of torch, or a MemoryStore.
            traffic: Where to count; by default a new one.
        """
        self.store = store
        self.traffic = Traffic() if traffic is None else traffic

    def clone(self) -> CountingStore:
        """Open one more connection. That is no call: a rank makes it once for each process group."""
        return CountingStore(self.store.clone(), self.traffic)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of this client, without a message."""
        self.store.set_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.store, name)
        if not callable(function):
            return function  # host and port

        def call(*arguments: Any) -> Any:
            self.traffic.calls[name] += 1
            self.traffic.sent += sum(_size(one) for one in arguments)
            found = function(*arguments)
            self.traffic.received += _size(found)
            return found

        return call


class MemoryStore:
    """A store of one process, which wakes only the threads that wait for a key. torch's HashStore wakes all of them."""

    def __init__(self) -> None:
        """Make an empty store."""
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._appended: dict[str, bytearray] = {}  # joined when they are read
        self._awaited: dict[str, threading.Event] = {}

    def clone(self) -> MemoryStore:
        """Return this store: it has no connections."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore it: waits of this store are as long as their callers."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        with self._lock:
            self._put(key, _bytes(value))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        with self._lock:
            self._appended.setdefault(key, bytearray(self._values.get(key, b""))).extend(_bytes(value))
            self._put(key, b"")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        with self._lock:
            found = int(self._values.get(key, b"0")) + amount
            self._put(key, str(found).encode())
            return found

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or none where none is expected; return its value."""
        with self._lock:
            if self._values.get(key, b"") == _bytes(expected):
                self._put(key, _bytes(value))
            return self._values.get(key, _bytes(expected))

    def get(self, key: str) -> bytes:
        """Wait until a key exists, and return its value."""
        with self._lock:
            if key in self._values:
                return bytes(self._appended.get(key, self._values[key]))
            there = self._awaited.setdefault(key, threading.Event())
        there.wait()
        return bytes(self._appended.get(key, self._values[key]))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys exist, and return their values."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        with self._lock:
            self._appended.pop(key, None)
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        there = self._awaited.pop(key, None)
        if there is not None:
            there.set()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _size(value: Any) -> int:
    """Return the bytes of a key or value; 8 for a number, and 0 for nothing."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_size, value))
    return 0 if value is None else 8
