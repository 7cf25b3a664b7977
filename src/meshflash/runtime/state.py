"""The state of this process that lasts until `shutdown`: one table for all modules, which keep none of their own.

It holds what `init` made, the contexts of process groups, scratch memory, and what else a module makes on first use and
shares between calls. `shutdown` empties it. A forked child starts with an empty table: connections and threads are its
parent's.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any, TypeVar

T = TypeVar("T")
#: The kind of an object, and what tells objects of this kind apart.
Key = tuple[Hashable, ...]


class ProcessState:
    """Objects by key, from their first use until `shutdown`. `state` is the only one of a process."""

    def __init__(self) -> None:
        self._objects: dict[Key, Any] = {}
        #: Held to change the table, never to read it: threads call at the same time. Hold it to change several objects.
        self.lock = threading.RLock()
        #: What a forked child has of its parent, and never frees: that would close the parent's connections, or wait
        #: for threads that do not exist here.
        self._inherited: list[Any] = []
        self._inherited_groups: tuple[Any, ...] = ()

    def find(self, *key: Hashable) -> Any:
        """Return an object, or None.

        Args:
            key: The kind of the object, and what tells it apart.
        """
        return self._objects.get(key)

    def get(self, make: Callable[[], T], *key: Hashable) -> T:
        """Return an object, made on first use; threads that ask at the same time get the same one.

        Args:
            make: Makes the object.
            key: The kind of the object, and what tells it apart.
        """
        found: T | None = self._objects.get(key)
        if found is None:
            with self.lock:
                found = self._objects.get(key)
                if found is None:
                    found = self._objects[key] = make()
        return found

    def put(self, value: Any, *key: Hashable) -> None:
        """Set an object.

        Args:
            value: The object. One with a method `close` is closed by `clear`.
            key: The kind of the object, and what tells it apart.
        """
        with self.lock:
            self._objects[key] = value

    def pop(self, *key: Hashable) -> Any:
        """Remove an object and return it, or None.

        Args:
            key: The kind of the object, and what tells it apart.
        """
        with self.lock:
            return self._objects.pop(key, None)

    def all_of(self, kind: Hashable) -> dict[Key, Any]:
        """Return all objects of a kind, the oldest first.

        Args:
            kind: The first part of their keys.
        """
        with self.lock:
            return {key: value for key, value in self._objects.items() if key[0] == kind}

    def clear(self) -> None:
        """Remove all objects, the newest first, and close those that can be closed."""
        with self.lock:
            objects, self._objects = list(self._objects.values()), {}
        with ExitStack() as steps:  # runs them in the reverse order, and the rest also if one of them fails
            for value in objects:
                if hasattr(value, "close"):
                    steps.callback(value.close)

    def is_inherited(self, group: Any) -> bool:
        """Return whether a process group was made before this process was forked from the one that made it.

        Args:
            group: A process group of torch.
        """
        return bool(self._inherited_groups) and any(group is other for other in self._inherited_groups)

    def begin_child(self) -> None:
        """Start afresh in a forked child."""
        self.lock = threading.RLock()  # another thread of the parent may hold the old one
        self._inherited.append(self._objects)
        self._objects = {}
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        world = getattr(c10d, "_world", None)
        self._inherited_groups = () if world is None else tuple(world.pg_map)


#: The state of this process.
state = ProcessState()
os.register_at_fork(after_in_child=state.begin_child)


class ForkedGroupError(RuntimeError):
    """A forked child cannot use the process groups of its parent."""


def refuse_inherited(group: Any) -> None:
    """Raise ForkedGroupError for a process group that a forked child has from its parent.

    Parent and child would read messages from the same connections, and both would lose some.

    Args:
        group: A process group of torch.
    """
    if state.is_inherited(group):
        raise ForkedGroupError(
            f"process {os.getpid()} was forked from process {os.getppid()} after that made this process group, and "
            "shares its connections: a call would break the calls of the parent. Start processes with the method "
            '"spawn" or "forkserver" (multiprocessing.get_context), or fork before the process group is made; '
            "flash_attention runs in a forked child"
        )
