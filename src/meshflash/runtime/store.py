"""Calls to torch's key-value store that always end: in time, on Ctrl-C, and with an error that names the store.

torch's own client blocks for ever when the process that hosts the store is stopped (SIGSTOP, a debugger). While it
waits it keeps other threads out of its connection, and no signal interrupts it. So each `BoundedStore` opens a
connection of its own and runs every call in a worker thread; the calling thread waits for that worker with a timeout.

A rank waits for a key inside the store's server (`BoundedStore.begin_read`): one request, however long it takes. Such a
request ends only when the key exists. A caller that gives up therefore writes the key itself, by another connection;
`Handshake` does so by telling all ranks why it left. Short timeouts of torch's client would end the request as well,
but torch prints two warnings for each of them. Polling would need many requests of every rank.
"""

from __future__ import annotations

import atexit
import copy
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from meshflash.runtime.liveness import LostRankError

#: Seconds between two calls of a waiting caller's `watch`, and between two looks whether the interpreter exits.
WATCH_SECONDS = 0.5
#: Seconds that the interpreter waits for the worker threads at exit; longer than WATCH_SECONDS, so that they notice it.
EXIT_SECONDS = 1.5
#: The timeout of torch's own client. No wait should reach it: callers have timeouts of their own, which print nothing.
NEVER = timedelta(days=1)

#: Registry of worker threads, which the interpreter joins at exit; those that have ended remove themselves.
_threads: set[threading.Thread] = set()
_exiting = threading.Event()


class StoreError(LostRankError):
    """The store did not answer in time, or is gone; the message says where it was."""


class NotYetError(TimeoutError):
    """A worker has no result yet; its caller may wait again, or give up."""


class Worker:
    """A blocking call in a thread of its own, for which a caller waits as long as it likes. `run_within` makes one."""

    def __init__(self, function: Callable[[], Any]) -> None:
        """Start the call.

        Args:
            function: The blocking call. It may outlive the caller, so it must not touch state that the caller reuses.
        """
        self._function = function
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        start_thread(self._work, "meshflash store")

    def _work(self) -> None:
        try:
            self._results.put((self._function(), None))
        except BaseException as error:
            self._results.put((None, error))

    def result(self, seconds: float, watch: Callable[[], None] | None = None) -> Any:
        """Return the result of the call, or raise its exception; raise NotYetError after `seconds`.

        After a NotYetError, or an exception of `watch`, the caller may wait again.

        Args:
            seconds: The longest time that the caller waits.
            watch: A function that the caller runs every half second while it waits. It ends the wait by raising.
        """
        deadline = time.monotonic() + seconds
        while True:
            remaining = deadline - time.monotonic()
            try:
                found, error = self._results.get(timeout=max(0.0, min(WATCH_SECONDS, remaining)))
                break
            except queue.Empty:
                # If the interpreter exits, this caller is a worker itself, whose own caller has left.
                if remaining <= 0 or _exiting.is_set():
                    raise NotYetError from None
                if watch is not None:
                    watch()
        if error is not None:
            raise error
        return found


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
    try:
        return Worker(function).result(seconds, watch)
    except NotYetError:
        raise TimeoutError(timeout_message) from None


def start_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread that the interpreter joins at exit, for at most EXIT_SECONDS."""

    def work() -> None:
        try:
            target()
        finally:
            _threads.discard(thread)

    thread = threading.Thread(target=work, daemon=True, name=name)
    _threads.add(thread)
    thread.start()


def _join_threads() -> None:
    """End our threads before the interpreter ends.

    A thread that returns from torch's C++ into a finalizing interpreter is unwound through frames that allow no
    exception: the process would abort with "terminate called without an active exception".
    """
    _exiting.set()
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in list(_threads):
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
        self._given = self._store = store
        self._store = self._call(store.clone)
        if self._store is not store:  # a store in memory is its own clone, and its timeout is not ours
            self._store.set_timeout(NEVER)
        #: Whether `compare_set` wakes clients that wait for its key, as far as this client knows: that of a TCPStore
        #: without libuv does not. A client made without the option `use_libuv` takes any server for one with libuv.
        self.wakes_waiting = bool(getattr(_innermost(store), "libuvBackend", True))

    def spare(self, seconds: float) -> BoundedStore:
        """Return a client for calls while this one waits in `begin_read`: it uses the connection of the given store.

        A new connection would be free for certain, but may take seconds: torch looks up the names of hosts for it.

        Args:
            seconds: The longest time of a call.
        """
        other = copy.copy(self)
        other._store, other._timeout, other._watch = self._given, lambda: seconds, None
        return other

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key, which exists from then on."""
        self._call(partial(self._store.append, key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return bytes(self._call(partial(self._store.get, key)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._call(partial(self._store.add, key, amount)))

    def set_once(self, key: str, value: bytes, wake: bool = False) -> bytes:
        """Set a key unless it exists, and return the value that it has then: the first one counts for all ranks.

        Args:
            key: The key.
            value: The value that it gets if it does not exist.
            wake: Wake waiting clients by one more call, which servers without libuv need; by default only where this
                client knows that its server is one.
        """
        found = bytes(self._call(partial(self._store.compare_set, key, b"", value)))
        if found == value and (wake or not self.wakes_waiting):
            self.set(key, found)
        return found

    def set(self, key: str, value: bytes) -> None:
        """Set a key, and wake all clients that wait for it."""
        self._call(partial(self._store.set, key, value))

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._call(partial(self._store.delete_key, key))

    def begin_read(self, key: str) -> PendingRead:
        """Begin to wait inside the store until a key exists, and to read it.

        Until then this client can do nothing else; `spare` returns another one.

        Args:
            key: The key to wait for.
        """
        if self._broken:
            raise StoreError(self._broken)

        def read() -> bytes:
            while True:
                try:
                    return bytes(self._store.get(key))
                except RuntimeError as error:
                    # A store in memory keeps its own timeout. A lost connection is no timeout.
                    if "timeout" not in _first_line(error).lower() or _exiting.is_set():
                        raise

        return PendingRead(Worker(read), self._rename, self._watch)

    def _call(self, function: Callable[[], Any]) -> Any:
        if self._broken:
            raise StoreError(self._broken)
        limit = self._timeout()
        try:
            return run_within(limit, function, "", self._watch)
        except TimeoutError:
            # The worker thread still waits for an answer on this connection: a later answer would be taken for that
            # of another request. The client is unusable from now on.
            self._broken = f"the store at {self.address} did not answer within {limit:g} s: its process may be stopped"
            raise StoreError(self._broken) from None
        except RuntimeError as error:
            self._rename(error)
            raise

    def _rename(self, error: RuntimeError) -> None:
        """Raise StoreError for an error of torch's client; other errors are the caller's own, such as its `watch`'s."""
        if not isinstance(error, StoreError) and _is_raised_by_torch(error):
            self._broken = f"the store at {self.address} is gone ({_first_line(error)}): its process may have ended"
            raise StoreError(self._broken) from error


class PendingRead:
    """A wait for a key inside the store, which ends when the key exists. `BoundedStore.begin_read` makes it."""

    def __init__(
        self, worker: Worker, rename: Callable[[RuntimeError], None], watch: Callable[[], None] | None = None
    ) -> None:
        self._worker, self._rename, self._watch = worker, rename, watch

    def result(self, seconds: float, watch: Callable[[], None] | None = None) -> bytes:
        """Return the value; NotYetError after `seconds`, StoreError if the store is gone. It may be called again.

        Args:
            seconds: The longest time that the caller waits.
            watch: A function that the caller runs every half second while it waits, rather than the client's own. It
                ends the wait by raising.
        """
        try:
            return bytes(self._worker.result(seconds, watch or self._watch))
        except RuntimeError as error:
            self._rename(error)
            raise


def _is_raised_by_torch(error: RuntimeError) -> bool:
    """Return whether a store raised an error, rather than the caller's own `watch`."""
    return type(error) is RuntimeError or type(error).__module__.startswith("torch")


def _first_line(error: BaseException) -> str:
    """Return the first line of torch's message; a stack of C++ frames may follow."""
    return (str(error).strip().splitlines() or [""])[0]


def store_address(store: Any) -> str:
    """Return where a store is: host and port, the path of a file, or the name of its class.

    >>> from torch.distributed import HashStore, PrefixStore
    >>> store_address(PrefixStore("a", HashStore()))
    'HashStore'
    """
    store = _innermost(store)
    if hasattr(store, "host"):
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", type(store).__name__))


def _innermost(store: Any) -> Any:
    """Return the store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
