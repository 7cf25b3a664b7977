"""Fake streams and heaps: each stream is a thread that runs its work late, which exposes missing synchronization."""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshflash.comm.stream_memory import StreamSignals
from meshflash.comm.transports.symmetric import MAX_CHANNELS


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


class FakeStreamMemory:
    """Stream memory operations on words of this process: a stream does them when its turn comes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def write(self, stream: FakeStream, address: int, value: int) -> None:
        def write() -> None:
            with self._changed:
                ctypes.c_int32.from_address(address).value = value
                self._changed.notify_all()

        stream.submit(write)

    def wait(self, stream: FakeStream, address: int, value: int) -> None:
        word = ctypes.c_int32.from_address(address)

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: word.value >= value, 20), "a signal was not set within 20 s"

        stream.submit(wait)


class FakeHeaps:
    """The heaps and signals of ranks that are threads of this process."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.made: dict[int, dict[int, Tensor]] = {}
        self._operations = FakeStreamMemory()
        self._words: dict[int, dict[int, Tensor]] = {}
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(world)

    def maker(self, rank: int) -> Any:
        """Return a factory that makes a rank's heap for a transport."""

        def make(count: int, group: Any, device: torch.device, timeout: float) -> Any:
            with self._lock:
                memories, words = self.made.setdefault(count, {}), self._words.setdefault(count, {})
                memories[rank] = torch.full((count,), 0xFF, dtype=torch.uint8)
                words[rank] = torch.zeros(MAX_CHANNELS, self.world, dtype=torch.int32)
            self._barrier.wait(20)
            signals = StreamSignals(self._operations, [words[peer] for peer in range(self.world)], rank)
            return FakeHeap(memories, rank, signals)

        return make


class FakeHeap:
    """The heap of one rank, which `FakeHeaps.maker` makes."""

    has_timeout = False

    def __init__(self, memories: dict[int, Tensor], rank: int, signals: StreamSignals) -> None:
        self._memories, self.memory = memories, memories[rank]
        self.put, self.take, self.release = signals.put, signals.take, signals.release

    def of(self, rank: int) -> Tensor:
        return self._memories[rank]
