"""Streams and events of a device for transports: they order work on the device without blocking the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from meshflash.runtime.devices import CPU, TRITON


class Streams(Protocol):
    """The streams of one device. Tests replace `DeviceStreams` by a fake with these methods."""

    def current_stream(self) -> Any:
        """Return the stream that the caller's work is enqueued on."""

    def new_stream(self) -> Any:
        """Return a new stream."""

    def record_event(self, stream: Any) -> Any:
        """Record an event after all work enqueued on a stream so far, and return it."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Let work enqueued on a stream from now on start after an event."""

    def stream_context(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one in the block."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy on the current stream."""

    def delay(self, stream: Any, seconds: float) -> None:
        """Let a stream sleep for some seconds."""

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep the allocator from reusing a tensor's memory until the work enqueued on a stream so far is done."""

    def query_event(self, event: Any) -> bool:
        """Return whether an event has completed."""

    def synchronize_event(self, event: Any) -> None:
        """Block this thread until an event has completed."""

    def allocate_pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return pinned host memory, which the device copies from and to asynchronously."""

    def synchronize(self) -> None:
        """Block this thread until all work of the device is done."""


class DeviceStreams(Streams):
    """The streams of an accelerator, by torch's module of its kind. Made by transports."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        #: torch looks up the index of a device each time it is given one without.
        self._index: Any = self._module.current_device() if device.index is None else device.index
        self._cycles_per_second = 0.0

    def current_stream(self) -> Any:
        """Return the stream that the caller's work is enqueued on."""
        return self._module.current_stream(self._index)

    def new_stream(self) -> Any:
        """Return a new stream of high priority: messages must not queue behind kernels."""
        return self._module.Stream(self.device, priority=-1)

    def record_event(self, stream: Any) -> Any:
        """Record an event after all work enqueued on a stream so far, and return it."""
        return stream.record_event()

    def wait_event(self, stream: Any, event: Any) -> None:
        """Let work enqueued on a stream from now on start after an event."""
        stream.wait_event(event)

    def stream_context(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one in the block."""
        if self._module.current_device() == self._index:
            return _CurrentStream(self, stream)
        made: AbstractContextManager[Any] = self._module.stream(stream)
        return made

    def set_stream(self, stream: Any) -> None:
        """Make a stream of this device the current one. The device is the current one already."""
        self._module.set_stream(stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def delay(self, stream: Any, seconds: float) -> None:
        if not self._cycles_per_second:
            self._cycles_per_second = self._measure(10_000_000)
        with self.stream_context(stream):
            self._module._sleep(int(seconds * self._cycles_per_second))

    def _measure(self, cycles: int) -> float:
        """Return the sleep cycles of the device in a second. It blocks the host, once."""
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        stream = self.new_stream()
        with self.stream_context(stream):
            self._module._sleep(cycles)
            begin.record(stream)
            self._module._sleep(cycles)
            end.record(stream)
        end.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e-3)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep the allocator from reusing a tensor's memory until the work enqueued on a stream so far is done."""
        tensor.record_stream(stream)

    def query_event(self, event: Any) -> bool:
        """Return whether an event has completed."""
        return bool(event.query())

    def synchronize_event(self, event: Any) -> None:
        """Block this thread until an event has completed."""
        event.synchronize()

    def allocate_pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return pinned host memory, which the device copies from and to asynchronously."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        """Block this thread until all work of the device is done."""
        self._module.synchronize(self.device)


class _CurrentStream(AbstractContextManager[None]):
    """A stream as the current one in a block, on the current device: torch's own context looks up devices each time."""

    def __init__(self, streams: DeviceStreams, stream: Any) -> None:
        self._streams, self._stream = streams, stream

    def __enter__(self) -> None:
        self._before = self._streams.current_stream()
        self._streams.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        self._streams.set_stream(self._before)


def capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is captured into a graph.

    Args:
        device: A device; a CPU captures no graphs.
    """
    if device.type == CPU:
        return False
    if device.type == TRITON:  # torch.get_device_module takes longer than the question
        return torch.cuda.is_current_stream_capturing()
    return bool(getattr(torch.get_device_module(device), "is_current_stream_capturing", bool)())


#: Makes the streams of a device; tests pass a fake.
MakeStreams = Callable[[torch.device], Streams]
