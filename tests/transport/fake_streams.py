"""Streams of a device that is not there: each is a thread that takes its time, so that what is not ordered shows."""

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
    """Does what it is given, in order, each a little later."""

    def __init__(self, slow: float) -> None:
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._draw, self._slow = random.Random(7), slow
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(self._draw.random() * self._slow)
            work()


class FakeStreams:
    """The streams of one rank. Work on tensors is given to the stream that is current in a thread."""

    def __init__(self, slow: float = 0.003) -> None:
        self._slow = slow
        self.main = FakeStream(slow)
        self._here = threading.local()
        self.delays: list[float] = []

    def current(self) -> FakeStream:
        return getattr(self._here, "stream", self.main)

    def new(self) -> FakeStream:
        return FakeStream(self._slow)

    def mark(self, stream: FakeStream) -> threading.Event:
        event = threading.Event()
        stream.give(event.set)
        return event

    def after(self, stream: FakeStream, event: threading.Event) -> None:
        stream.give(lambda: _come(event))

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._here.stream = self.current(), stream
        yield
        self._here.stream = before

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.current().give(lambda: _copy(target, source))

    def delay(self, stream: FakeStream, seconds: float) -> None:
        self.delays.append(seconds)
        stream.give(lambda: time.sleep(seconds))

    def use(self, tensor: Tensor, stream: FakeStream) -> None:
        pass

    def reached(self, event: threading.Event) -> bool:
        return event.is_set()

    def wait(self, event: threading.Event) -> None:
        _come(event)

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), torch.nan, dtype=dtype)

    def synchronize(self) -> None:
        """For tests: the caller's work is done."""
        _come(self.mark(self.main))


def _come(event: threading.Event) -> None:
    assert event.wait(20), "an event never came"


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def as_streams(made: FakeStreams) -> Any:
    """What a transport makes its streams by."""
    return lambda device: made
