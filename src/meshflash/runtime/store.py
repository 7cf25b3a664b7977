"""Calls to torch's key-value store that always end: in time, on Ctrl-C, and with an error that names the store.

torch's own client blocks for ever when the process that hosts the store is stopped (SIGSTOP, a debugger). While it
waits it keeps other threads out of its connection, and no signal interrupts it. So each `BoundedStore` opens a
connection of its own and runs every call in a worker thread; the calling thread waits for that worker with a timeout.
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

#: Seconds between two checks for a key: the first pause, which doubles up to the longest one.
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.001, 0.05
#: Seconds between two calls of a waiting caller's `watch`.
WATCH_SECONDS = 0.5
#: Seconds beyond its deadline that a polling thread gets to return by itself, before the store counts as stopped.
GRACE_SECONDS = 2.0
#: Seconds that the interpreter waits for the worker threads at exit.
EXIT_SECONDS = 1.0

#: Registry of worker threads, which the interpreter joins at exit; those that have ended are removed.
_threads: list[threading.Thread] = []
_exiting = threading.Event()


class StoreError(LostRankError):
    """The store did not answer in time, or is gone; the message says where it was."""


def run_within(
    seconds: float, function: Callable[[], Any], timeout_message: str, watch: Callable[[], None] | None = None
) -> Any:
    """Run a function in a worker thread and return its result; raise TimeoutError after `seconds`.

    torch and MPI may block for ever and ignore signals; the calling thread stays interruptible. A worker that is
    given up keeps running until its blocking call returns, so `function` must not touch state that the caller reuses.

    Args:
        seconds: The longest time that the caller waits.
        function: The blocking call. Its exception is raised in the calling thread.
        timeout_message: The text of the TimeoutError.
        watch: A function that the caller runs every half second while it waits. It ends the wait by raising.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    start_thread(work, "meshflash store")
    deadline = time.monotonic() + seconds
    while True:
        remaining = deadline - time.monotonic()
        try:
            found, error = results.get(timeout=max(0.0, remaining if watch is None else min(WATCH_SECONDS, remaining)))
            break
        except queue.Empty:
            if remaining <= 0:
                raise TimeoutError(timeout_message) from None
            if watch is not None:
                watch()
    if error is not None:
        raise error
    return found


def start_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread that the interpreter joins at exit, for at most EXIT_SECONDS."""
    thread = threading.Thread(target=target, daemon=True, name=name)
    _threads[:] = [*(other for other in _threads if other.is_alive()), thread]
    thread.start()


def _join_threads() -> None:
    """End our threads before the interpreter ends.

    A thread that returns from torch's C++ into a finalizing interpreter is unwound through frames that allow no
    exception: the process would abort with "terminate called without an active exception".
    """
    _exiting.set()
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in [thread for thread in _threads if thread.is_alive()]:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_join_threads)


class BoundedStore:
    """A client of a job's store whose calls all end, by StoreError if they must.

    `init`, every `GroupContext` and every symmetric heap make one each.
    """

    def __init__(self, store: Any, timeout: Callable[[], float], watch: Callable[[], None] | None = None) -> None:
        """Open one more connection to a store.

        Args:
            store: A torch store. Its own connection stays free for other callers.
            timeout: Returns the longest time of a call, in seconds; read before each call.
            watch: A function that every waiting caller runs each half second; it ends the wait by raising.
        """
        self.address = store_address(store)
        self._timeout, self._watch = timeout, watch
        self._broken = ""
        self._store = store
        self._store = self._call(store.clone)

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(partial(self._store.set, key, value))

    def get(self, key: str) -> str:
        """Return the value of a key that exists."""
        return bytes(self._call(partial(self._store.get, key))).decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._call(partial(self._store.add, key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys exist."""
        return bool(self._call(partial(self._store.check, list(keys))))

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._call(partial(self._store.delete_key, key))

    def wait(self, keys: Sequence[str], seconds: float, watch: Callable[[], None] | None = None) -> bool:
        """Wait until all of these keys exist, and return whether they did within `seconds`.

        Args:
            keys: The keys to wait for.
            seconds: The longest wait.
            watch: Replaces the store's own `watch` during this wait.
        """
        given_up = threading.Event()
        deadline = time.monotonic() + seconds

        # Poll instead of calling the store's blocking wait: this thread must notice that the caller has given up, or
        # that the interpreter exits, and no signal reaches it.
        def poll() -> bool:
            pause = FIRST_POLL_SECONDS
            while not self._store.check(list(keys)):
                if given_up.is_set() or _exiting.is_set() or time.monotonic() > deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_SECONDS)
            return True

        try:
            return bool(self._call(poll, seconds, watch))
        finally:
            given_up.set()

    def _call(
        self, function: Callable[[], Any], seconds: float | None = None, watch: Callable[[], None] | None = None
    ) -> Any:
        if self._broken:
            raise StoreError(self._broken)
        limit = self._timeout() if seconds is None else seconds
        try:
            return run_within(limit if seconds is None else limit + GRACE_SECONDS, function, "", watch or self._watch)
        except TimeoutError:
            # The worker thread still waits for an answer on this connection: a later answer would be taken for that
            # of another request. The client is unusable from now on.
            self._broken = f"the store at {self.address} did not answer within {limit:g} s: its process may be stopped"
        except RuntimeError as error:
            if isinstance(error, StoreError) or not _is_raised_by_torch(error):
                raise
            reason = str(error).strip().splitlines()[0]
            self._broken = f"the store at {self.address} is gone ({reason}): its process may have ended"
        raise StoreError(self._broken)


def _is_raised_by_torch(error: RuntimeError) -> bool:
    """Return whether a store raised an error, rather than the caller's own `watch`."""
    return type(error) is RuntimeError or type(error).__module__.startswith("torch")


def store_address(store: Any) -> str:
    """Return where a store is: host and port, the path of a file, or the name of its class.

    >>> from torch.distributed import HashStore, PrefixStore
    >>> store_address(PrefixStore("a", HashStore()))
    'HashStore'
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host"):
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", type(store).__name__))
