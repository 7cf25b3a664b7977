"""A device's streams, as transports need them: what runs after what, without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """Streams of one device; `Event`s are marks in them."""

    def current(self) -> Any:
        """The stream that the caller's work goes to."""

    def new(self) -> Any:
        """One more stream."""

    def mark(self, stream: Any) -> Any:
        """An event behind all that was given to a stream so far."""

    def after(self, stream: Any, event: Any) -> None:
        """Let what is given to a stream from now on begin after an event."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give work to a stream."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the stream that work goes to, without waiting."""

    def delay(self, stream: Any, seconds: float) -> None:
        """Let a stream do nothing for a while."""

    def use(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from others until a stream has done what was given to it so far."""

    def reached(self, event: Any) -> bool:
        """Whether an event has come."""

    def wait(self, event: Any) -> None:
        """Let this thread wait for an event."""

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device copies from and to by itself."""

    def finish(self) -> None:
        """Let this thread wait until the device has done all that it was given."""


class DeviceStreams:
    """The streams of an accelerator, by torch's module of its kind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._cycles_per_second = 0.0

    def current(self) -> Any:
        """The stream that the caller's work goes to."""
        return self._module.current_stream(self.device)

    def new(self) -> Any:
        """One more stream, of high priority: what moves must not queue behind what computes."""
        return self._module.Stream(self.device, priority=-1)

    def mark(self, stream: Any) -> Any:
        """An event behind all that was given to a stream so far."""
        return stream.record_event()

    def after(self, stream: Any, event: Any) -> None:
        """Let what is given to a stream from now on begin after an event."""
        stream.wait_event(event)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give work to a stream."""
        made: AbstractContextManager[Any] = self._module.stream(stream)
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the stream that work goes to, without waiting."""
        target.copy_(source, non_blocking=True)

    def delay(self, stream: Any, seconds: float) -> None:
        """Let a stream do nothing for a while."""
        if not self._cycles_per_second:
            self._cycles_per_second = self._measured(10_000_000)
        with self.on(stream):
            self._module._sleep(int(seconds * self._cycles_per_second))

    def _measured(self, cycles: int) -> float:
        """How many cycles of its sleep the device does in a second; it is waited for, once."""
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        stream = self.new()
        with self.on(stream):
            self._module._sleep(cycles)
            begin.record(stream)
            self._module._sleep(cycles)
            end.record(stream)
        end.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e-3)

    def use(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from others until a stream has done what was given to it so far."""
        tensor.record_stream(stream)

    def reached(self, event: Any) -> bool:
        """Whether an event has come."""
        return bool(event.query())

    def wait(self, event: Any) -> None:
        """Let this thread wait for an event."""
        event.synchronize()

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device copies from and to by itself."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def finish(self) -> None:
        """Let this thread wait until the device has done all that it was given."""
        self._module.synchronize(self.device)


def capturing(device: torch.device) -> bool:
    """Whether what is given to the device's current stream goes into a graph that is being captured."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return bool(getattr(module, "is_current_stream_capturing", bool)())


#: Makes the streams of a device; tests put others in its place.
MakeStreams = Callable[[torch.device], Streams]
