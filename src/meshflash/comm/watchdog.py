"""A watchdog for streams that wait for messages: it ends waits for a rank that was lost, or that does not answer.

A stream that waits for a word of memory has no timeout. The watchdog is a thread of the host that looks at the events
around each post. Where a post has begun and does not end in time, or a peer's process has ended, it keeps the error for
the next call and releases the stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from meshflash.comm.streams import Streams
from meshflash.comm.transports.contract import TransportError
from meshflash.runtime.log import log

#: Seconds between two looks at the events.
POLL_SECONDS = 0.05
#: Seconds that a post waits before its peers' processes are looked for.
PROBE_SECONDS = 1.0


class _Post(NamedTuple):
    """A post under way: events before and after it, and the peers that it waits for."""

    ready: Any
    done: Any
    peers: tuple[int, ...]


class Watchdog:
    """Watches the posts of one transport, which belong to channels: those of a channel follow one another.

    Args:
        streams: The streams of the device.
        timeout: Seconds that a post may take once it has begun.
        has_ended: Returns whether the process of a rank has certainly ended.
        release: Ends all waits of this rank's streams that have begun, for these ranks. It is called until all posts
            are done.
    """

    def __init__(
        self,
        streams: Streams,
        timeout: float,
        has_ended: Callable[[int], bool],
        release: Callable[[Sequence[int]], None],
    ) -> None:
        self._streams, self._timeout, self._has_ended, self._release = streams, timeout, has_ended, release
        self._posts: dict[str, deque[_Post]] = {}
        #: When the first post of a channel was first seen to have begun.
        self._begun: dict[str, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: TransportError | None = None

    def check(self) -> None:
        """Raise TransportError if a peer was lost."""
        if self._error is not None:
            raise self._error

    def watch(self, channel: str, ready: Any, done: Any, peers: Sequence[int]) -> None:
        """Watch a post.

        Args:
            channel: The name of the channel. A post begins when the one before is done.
            ready: An event that comes before the post.
            done: The event after the post.
            peers: The ranks that it waits for.
        """
        with self._changed:
            self._posts.setdefault(channel, deque()).append(_Post(ready, done, tuple(peers)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="meshflash watchdog")
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(self._posts.values()))
                if self._closed:
                    return
            time.sleep(POLL_SECONDS)
            for channel in list(self._posts):
                self._look(channel)
            if self._error is not None and any(self._posts.values()):
                self._release(self._error.ranks)

    def _look(self, channel: str) -> None:
        """Drop the posts of a channel that are done, and see how long the first of the others takes."""
        posts = self._posts[channel]
        while posts and self._streams.query_event(posts[0].done):
            with self._changed:
                posts.popleft()
            self._begun.pop(channel, None)
        if not posts or self._error is not None or not self._streams.query_event(posts[0].ready):
            return
        waited = time.monotonic() - self._begun.setdefault(channel, time.monotonic())
        peers = posts[0].peers
        ended = [peer for peer in peers if waited > PROBE_SECONDS and self._has_ended(peer)]
        named = " or ".join(f"rank {peer}" for peer in ended or peers)
        if ended:
            self._fail(f"{named} was lost: its process has ended", ended)
        elif waited > self._timeout:
            self._fail(f"{named} was lost or did not answer within {self._timeout:g} s", peers)

    def _fail(self, text: str, peers: Sequence[int]) -> None:
        log.error("%s; what this call received is NaN", text)
        self._error = TransportError(f"{text}; look at its output first", peers)
