"""A transport that emulates a link of given bandwidth and latency, to measure overlap on one machine.

The posts of a group take place one after another. Each takes the latency, plus the time for the bytes it sends or for
the bytes it receives, whichever is longer. A post is complete when that time has passed and the inner transport is
done. On a device the time passes in a stream of its own, and no host thread waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshflash.comm.streams import DeviceStreams, MakeStreams
from meshflash.comm.transports.contract import (
    Arena,
    Collective,
    Message,
    MessageTimer,
    StackedTransport,
    Transport,
)


class Throttled(StackedTransport):
    """Another transport, slowed down. Made by `choose` for throttled(name, GB a second, microseconds)."""

    def __init__(
        self,
        inner: Transport,
        device: torch.device,
        bytes_per_second: float,
        latency: float = 0.0,
        streams: MakeStreams = DeviceStreams,
    ) -> None:
        if not bytes_per_second > 0 or not latency >= 0:
            raise ValueError(f"Throttled({bytes_per_second}, {latency}): expected bytes a second > 0, seconds >= 0")
        super().__init__(inner)
        self.bytes_per_second, self.latency = bytes_per_second, latency
        self.name = f"{inner.name} at {bytes_per_second / 1e9:g} GB/s and {latency * 1e6:g} us"
        self.reads_peers, self.capture_unsupported_reason = inner.reads_peers, inner.capture_unsupported_reason
        self._link = _HostLink() if device.type == "cpu" else _DeviceLink(streams(device))

    def close(self) -> None:
        self.inner.close()

    def wait(self, handle: Any) -> None:
        inner, passed = handle
        self.inner.wait(inner)
        self._link.wait(passed)

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        moved = max(sum(tensor.nbytes for _, tensor in side) for side in (sends, recvs))
        return self.inner._exchange(group, sends, recvs), self._begin(group, moved)

    @property
    def sm_margin(self) -> int:
        """One more than the inner transport needs, on a device: its delay is a kernel."""
        return self.inner.sm_margin + isinstance(self._link, _DeviceLink)

    @property
    def held_bytes(self) -> int:
        return self.inner.held_bytes

    def arena(self, min_bytes: int) -> Arena:
        return self.inner.arena(min_bytes)

    def _pull(self, group: str, sends: Sequence[Message], recvs: Sequence[Message], offsets: Sequence[int]) -> Any:
        moved = max(sum(tensor.nbytes for _, tensor in side) for side in (sends, recvs))
        return self.inner._pull(group, sends, recvs, offsets), self._begin(group, moved)

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> Any:
        world = self.world(group)
        moved = source.nbytes * (world - 1) if form == "all_gather" else source.nbytes * (world - 1) // world
        return self.inner._collective(form, group, source, target), self._begin(group, moved)

    def _begin(self, group: str, moved: int) -> Any:
        return self._link.begin(group, self.latency + moved / self.bytes_per_second, self.timer)


class _HostLink:
    """A link whose time passes for the thread that waits."""

    def __init__(self) -> None:
        self._free: dict[str, float] = {}

    def begin(self, group: str, seconds: float, _: MessageTimer | None) -> float:
        self._free[group] = max(time.monotonic(), self._free.get(group, 0.0)) + seconds
        return self._free[group]

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))


class _DeviceLink:
    """A link whose time passes in a stream for each group, from when the caller's stream reaches a post."""

    def __init__(self, streams: Any) -> None:
        self._streams = streams
        self._links: dict[str, Any] = {}

    def begin(self, group: str, seconds: float, timer: MessageTimer | None) -> Any:
        if group not in self._links:
            self._links[group] = self._streams.new_stream()
        link = self._links[group]
        self._streams.wait_event(link, self._streams.record_event(self._streams.current_stream()))
        with self._streams.stream_context(link):
            begin = timer.mark() if timer else None
            self._streams.delay(link, seconds)
            if timer:
                timer.moved(begin, timer.mark())
        return self._streams.record_event(link)

    def wait(self, event: Any) -> None:
        self._streams.wait_event(self._streams.current_stream(), event)
