"""Fake streams and heaps: each stream is a thread that runs its work late, which exposes missing synchronization."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class FakeStream:
    """A stream of one rank: it runs submitted functions in order, each after a short random delay."""

    def __init__(self, max_delay_seconds: float) -> None:
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._draw, self._max_delay_seconds = random.Random(7), max_delay_seconds
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(self._draw.random() * self._max_delay_seconds)
            work()


class FakeStreams:
    """The streams of one rank, in place of a transport's. Work goes to the calling thread's current stream."""

    def __init__(self, max_delay_seconds: float = 0.003) -> None:
        self._max_delay_seconds = max_delay_seconds
        self.main = FakeStream(max_delay_seconds)
        self._all = [self.main]
        self._here = threading.local()
        self.delays: list[float] = []
        self.sleeping = 0
        #: Streams that were told to delay continue when it is set.
        self.gate = threading.Event()
        self.gate.set()

    def current_stream(self) -> FakeStream:
        return getattr(self._here, "stream", self.main)

    def new_stream(self) -> FakeStream:
        self._all.append(FakeStream(self._max_delay_seconds))
        return self._all[-1]

    def record_event(self, stream: FakeStream) -> threading.Event:
        event = threading.Event()
        stream.submit(event.set)
        return event

    def wait_event(self, stream: FakeStream, event: threading.Event) -> None:
        stream.submit(lambda: _wait_for(event))

    @contextmanager
    def stream_context(self, stream: FakeStream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        yield
        self._here.stream = before

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.current_stream().submit(lambda: _copy(target, source))

    def delay(self, stream: FakeStream, seconds: float) -> None:
        self.delays.append(seconds)
        self.sleeping += 1
        stream.submit(lambda: self._sleep(seconds))

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        _wait_for(self.gate)
        self.sleeping -= 1

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        pass

    def query_event(self, event: threading.Event) -> bool:
        return event.is_set()

    def synchronize_event(self, event: threading.Event) -> None:
        _wait_for(event)

    def allocate_pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), torch.nan, dtype=dtype)

    def synchronize(self) -> None:
        for stream in self._all:
            _wait_for(self.record_event(stream))


def _wait_for(event: threading.Event) -> None:
    assert event.wait(20), "the event was not set within 20 s"


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def as_streams(made: FakeStreams) -> Any:
    """Return a factory that gives a transport these streams."""
    return lambda device: made


class HostStreams(FakeStreams):
    """The caller's stream is the calling thread: it runs work at once, and blocks where a stream would wait."""

    def record_event(self, stream: FakeStream) -> threading.Event:
        if stream is not self.main:
            return super().record_event(stream)
        event = threading.Event()
        event.set()
        return event

    def wait_event(self, stream: FakeStream, event: threading.Event) -> None:
        if stream is self.main:
            _wait_for(event)
        else:
            super().wait_event(stream, event)


class FakeHeaps:
    """The heaps and signals of ranks that are threads of this process."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.made: dict[int, dict[int, Tensor]] = {}
        self._marks: dict[Any, threading.Event] = {}
        self._condition = threading.Condition()
        self._barrier = threading.Barrier(world)

    def maker(self, rank: int, streams: FakeStreams) -> Any:
        """Return a factory that makes a rank's heap for a transport."""

        def make(count: int, group: Any, device: torch.device, timeout: float) -> Any:
            with self._condition:
                memories = self.made.setdefault(count, {})
                memories[rank] = torch.full((count,), 0xFF, dtype=torch.uint8)
            self._barrier.wait(20)
            return FakeHeap(self, rank, memories, streams)

        return make

    def change(self, key: Any, to: bool) -> None:
        """Wait until a signal is clear and set it, or wait until it is set and clear it."""
        with self._condition:
            changed = self._condition.wait_for(lambda: (key in self._marks) != to, 20)
            assert changed, f"no rank changed signal {key} within 20 s"
            if to:
                self._marks[key] = threading.Event()
            else:
                del self._marks[key]
            self._condition.notify_all()


class FakeHeap:
    """The heap of one rank, which `FakeHeaps.maker` makes."""

    def __init__(self, heaps: FakeHeaps, rank: int, memories: dict[int, Tensor], streams: FakeStreams) -> None:
        self._heaps, self._rank, self._memories, self._streams = heaps, rank, memories, streams
        self.memory = memories[rank]

    def of(self, rank: int) -> Tensor:
        return self._memories[rank]

    def put(self, rank: int, channel: int) -> None:
        key = (self._rank, rank, channel)
        self._streams.current_stream().submit(lambda: self._heaps.change(key, to=True))

    def take(self, rank: int, channel: int) -> None:
        key = (rank, self._rank, channel)
        self._streams.current_stream().submit(lambda: self._heaps.change(key, to=False))
