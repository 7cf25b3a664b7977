"""The cache of the engine: compiled calls by what identifies them, bounded, in one table for each process group."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

#: The number of entries of a table. A full table drops its oldest entry.
MAX_ENTRIES = 256


class Cache:
    """Compiled calls in bounded tables: one for a single device (scope None), and one for each process group.

    A table drops its oldest entry, not the least recently used one. Ranks agree on each new call over a group, so all
    of them must drop the same entry. Calls on a single device differ between ranks and have a table of their own.
    """

    def __init__(self) -> None:
        self._tables: dict[Any, dict[Any, Any]] = {None: {}}
        self._inherited: list[Any] = []
        #: Held to change a table, never to read one: threads call at the same time.
        self._lock = threading.Lock()

    def get(self, key: Any, scope: Any = None) -> Any:
        """Return an entry, or None if there is none.

        Args:
            key: What identifies the call.
            scope: The context of the process group, or None on a single device.
        """
        table = self._tables.get(scope)
        return None if table is None else table.get(key)

    def put(self, key: Any, entry: Any, scope: Any = None) -> None:
        """Add an entry, and drop the oldest one of a full table.

        Args:
            key: What identifies the call.
            entry: An executable, or a spec whose executable is in the table of its group.
            scope: The context of the process group, or None on a single device.
        """
        with self._lock:
            table = self._tables.setdefault(scope, {})
            if key not in table and len(table) >= MAX_ENTRIES:
                _retire(scope, [table.pop(next(iter(table)))])
            table[key] = entry

    def newest(self, scope: Any = None) -> Any:
        """Return the entry that was added last.

        Args:
            scope: The context of the process group, or None on a single device.
        """
        return list(self._tables[scope].values())[-1]

    def entries(self) -> list[Any]:
        """Return the entries of all tables, each once."""
        with self._lock:
            found = {id(entry): entry for table in self._tables.values() for entry in table.values()}
        return list(found.values())

    def size(self, scope: Any = None) -> int:
        """Return how many entries a table has.

        Args:
            scope: The context of the process group, or None on a single device.
        """
        return len(self._tables.get(scope, ()))

    def drop(self, scope: Any) -> None:
        """Drop all entries of a table.

        Args:
            scope: The context of the process group, or None for calls on a single device.
        """
        with self._lock:
            _retire(scope, self._tables.pop(scope, {}).values())

    def clear(self) -> None:
        """Drop the entries of all tables."""
        with self._lock:
            dropped, self._tables = self._tables, {None: {}}
            for scope, table in dropped.items():
                _retire(scope, table.values())

    def begin_child(self) -> None:
        """Start afresh in a forked child: process groups are its parent's, and so may be who holds the lock."""
        self._lock = threading.Lock()
        # Keep the parent's entries: to free what they hold of a device or a connection is for the parent to do.
        self._inherited.append(self._tables)
        self._tables = {None: {}}


def _retire(scope: Any, entries: Iterable[Any]) -> None:
    """Tell executables over a process group that the group's table has dropped them: callers may hold them, too."""
    if scope is not None:
        for entry in entries:
            entry.is_dropped = True


#: The one cache of the engine.
cache = Cache()
os.register_at_fork(after_in_child=cache.begin_child)
