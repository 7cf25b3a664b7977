"""Calls to torch's key-value store that always end: in time, on Ctrl-C, and with an error that says where it is.

torch's client blocks for ever where the process that hosts the store is stopped, keeps other threads of this process
out while it waits, and cannot be interrupted. Here each client has a connection of its own, and each call runs in a
thread that the caller waits for.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from meshflash.runtime.liveness import LostRankError

#: Seconds between two looks at a key: from the first, doubling, to the last.
FIRST_POLL, LAST_POLL = 0.001, 0.05
#: Seconds after which the caller of a wait looks around, beyond its time that a wait gets to end by itself, and that
#: threads get to end at exit.
LOOK, GRACE, ENDING = 0.5, 2.0, 1.0

_threads: list[threading.Thread] = []
_ending = threading.Event()


class StoreError(LostRankError):
    """The store did not answer, or is gone; the message says where it was."""


def within(seconds: float, make: Callable[[], Any], otherwise: str, look: Callable[[], None] | None = None) -> Any:
    """Return what `make` returns, or raise TimeoutError with the text `otherwise` once `seconds` have passed.

    `make` runs in a thread: torch and MPI may block for ever, and cannot be interrupted. The caller can be, and calls
    `look`, which may raise, while it waits.
    """
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            made.put((make(), None))
        except BaseException as error:
            made.put((None, error))

    start_thread(work, "meshflash store")
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            found, error = made.get(timeout=max(0.0, left if look is None else min(LOOK, left)))
            break
        except queue.Empty:
            if left <= 0:
                raise TimeoutError(otherwise) from None
            if look is not None:
                look()
    if error is not None:
        raise error
    return found


def start_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread that the end of the interpreter waits for, as long as ENDING."""
    thread = threading.Thread(target=target, daemon=True, name=name)
    _threads[:] = [*(other for other in _threads if other.is_alive()), thread]
    thread.start()


def _join_threads() -> None:
    """End our threads before the interpreter ends.

    A thread that returns from torch's C++ into an interpreter that is ending is unwound through frames that allow no
    exception: the process would abort with "terminate called without an active exception".
    """
    _ending.set()
    deadline = time.monotonic() + ENDING
    for thread in [thread for thread in _threads if thread.is_alive()]:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_join_threads)


class BoundedStore:
    """A client of a job's store; every call ends within `timeout()` seconds, by StoreError where it must."""

    def __init__(self, store: Any, timeout: Callable[[], float], look: Callable[[], None] | None = None) -> None:
        """Connect once more to where `store` is. Whoever waits calls `look`, which may raise, every half second."""
        self.where = where(store)
        self._timeout, self._look = timeout, look
        self._broken = ""
        self._store = store
        self._store = self._call(store.clone)

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(partial(self._store.set, key, value))

    def get(self, key: str) -> str:
        """Return the value of a key that is there."""
        return bytes(self._call(partial(self._store.get, key))).decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return int(self._call(partial(self._store.add, key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are there."""
        return bool(self._call(partial(self._store.check, list(keys))))

    def delete(self, key: str) -> None:
        """Forget a key."""
        self._call(partial(self._store.delete_key, key))

    def wait(self, keys: Sequence[str], seconds: float, look: Callable[[], None] | None = None) -> bool:
        """Wait until all of these keys are there; whether they were in time.

        The caller calls `look`, which may raise, every half second.
        """
        given_up = threading.Event()
        deadline = time.monotonic() + seconds

        def poll() -> bool:
            pause = FIRST_POLL
            while not self._store.check(list(keys)):
                if given_up.is_set() or _ending.is_set() or time.monotonic() > deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, LAST_POLL)
            return True

        try:
            return bool(self._call(poll, seconds, look))
        finally:
            given_up.set()

    def _call(
        self, make: Callable[[], Any], seconds: float | None = None, look: Callable[[], None] | None = None
    ) -> Any:
        if self._broken:
            raise StoreError(self._broken)
        limit = self._timeout() if seconds is None else seconds
        try:
            return within(limit if seconds is None else limit + GRACE, make, "", look or self._look)
        except TimeoutError:
            # its connection stays with the thread that waits for an answer
            self._broken = f"the store at {self.where} did not answer within {limit:g} s: its process may be stopped"
        except RuntimeError as error:
            if isinstance(error, StoreError) or not _of_torch(error):
                raise
            reason = str(error).strip().splitlines()[0]
            self._broken = f"the store at {self.where} is gone ({reason}): its process may have ended"
        raise StoreError(self._broken)


def _of_torch(error: RuntimeError) -> bool:
    """Whether a store raised it, and not the caller's own `look`."""
    return type(error) is RuntimeError or type(error).__module__.startswith("torch")


def where(store: Any) -> str:
    """Say where a store is: an address, a file, or its kind.

    >>> from torch.distributed import HashStore, PrefixStore
    >>> where(PrefixStore("a", HashStore()))
    'HashStore'
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host"):
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", type(store).__name__))
