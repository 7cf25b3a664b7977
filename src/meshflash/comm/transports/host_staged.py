"""Host staging: move a device's tensors over a group that moves only host tensors, through pinned memory.

A message is copied to the host in a stream of its own, after the work that produced it. A sender thread waits for the
copy and posts the message. A receiver thread waits for arriving messages and enqueues their copies to the device. The
caller's thread waits only for messages, in `wait`, and never for the device; its stream waits for the copies.

The inner transport sees host memory only: gloo would crash the process on a device pointer.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshflash.comm.streams import DeviceStreams, MakeStreams
from meshflash.comm.transports.contract import Collective, Message, StackedTransport, Transport, TransportError

#: Seconds that the threads get to finish pending messages at `close`.
CLOSE_SECONDS = 5.0
#: Posts host messages (outgoing, incoming) to the inner transport, and returns its handle.
Begin = Callable[[list[Tensor], list[Tensor]], Any]


@dataclass(eq=False)
class _Job:
    """One post, which passes from the caller to the sender thread and then to the receiver thread; also its handle."""

    begin: Begin
    #: Tensors on the device, and their pinned buffers on the host.
    sources: list[Tensor]
    targets: list[Tensor]
    outgoing: list[Tensor]
    incoming: list[Tensor]
    #: Event: the caller's stream has produced the sources, and has finished to read the targets.
    made: Any
    #: Event: the sources are on the host.
    copied: Any
    #: The handle of the inner transport.
    handle: Any = None
    #: Event: the targets are on the device.
    arrived: Any = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class HostStaged(StackedTransport):
    """Moves a device's tensors over a transport of host tensors. Made by `choose`."""

    capture_unsupported_reason = "it moves messages by threads of the host"

    def __init__(
        self, inner: Transport, device: torch.device, timeout: float, streams: MakeStreams = DeviceStreams
    ) -> None:
        super().__init__(inner)
        self.device, self.timeout = device, timeout
        self.name = f"{inner.name}, through the host"
        self._streams = streams(device)
        self._out, self._in = self._streams.new_stream(), self._streams.new_stream()
        self._memory = _Pinned(self._streams)
        self._posts: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=loop, daemon=True, name=f"meshflash {name}")
            for loop, name in ((self._begin_all, "sends"), (self._finish_all, "receives"))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread in torch's C++ must not outlive the interpreter

    def close(self) -> None:
        """End the threads, after pending messages have finished or CLOSE_SECONDS have passed."""
        atexit.unregister(self.close)
        self._posts.put(None)
        for thread in self._threads:
            thread.join(min(self.timeout, CLOSE_SECONDS))

    def wait(self, handle: _Job) -> None:
        """Wait for the messages; the caller's stream waits for their copies."""
        if not handle.done.wait(self.timeout):
            raise TransportError(f"a message did not arrive within {self.timeout:g} s")
        if handle.error is not None:
            raise handle.error
        self._streams.wait_event(self._streams.current_stream(), handle.arrived)

    def _exchange(self, group: str, sends: Sequence[Message], recvs: Sequence[Message]) -> _Job:
        peers, sources = [peer for peer, _ in sends], [peer for peer, _ in recvs]

        def begin(outgoing: list[Tensor], incoming: list[Tensor]) -> Any:
            pairs = (zip(peers, outgoing, strict=True), zip(sources, incoming, strict=True))
            return self.inner._exchange(group, *map(list, pairs))

        return self._post(begin, [tensor for _, tensor in sends], [tensor for _, tensor in recvs])

    def _collective(self, form: Collective, group: str, source: Tensor, target: Tensor) -> _Job:
        def begin(outgoing: list[Tensor], incoming: list[Tensor]) -> Any:
            return self.inner._collective(form, group, outgoing[0], incoming[0])

        return self._post(begin, [source], [target])

    def _post(self, begin: Begin, sources: list[Tensor], targets: list[Tensor]) -> _Job:
        """Enqueue the copies to the host after the caller's stream, and hand the post to the sender thread."""
        streams = self._streams
        made = streams.record_event(streams.current_stream())
        outgoing, incoming = ([self._memory.take(x) for x in side] for side in (sources, targets))
        streams.wait_event(self._out, made)
        with streams.stream_context(self._out):
            for host, tensor in zip(outgoing, sources, strict=True):
                streams.copy(host, tensor)
                streams.record_stream(tensor, self._out)
        job = _Job(begin, sources, targets, outgoing, incoming, made, streams.record_event(self._out))
        self._posts.put(job)
        return job

    def _begin_all(self) -> None:
        """Sender thread: post messages in order, each as soon as its data is on the host."""
        while (job := self._posts.get()) is not None:
            try:
                self._streams.synchronize_event(job.copied)
                job.handle = job.begin(job.outgoing, job.incoming)
            except BaseException as error:
                job.error = error
            self._begun.put(job)
        self._begun.put(None)

    def _finish_all(self) -> None:
        """Receiver thread: wait for messages in order, and enqueue their copies to the device."""
        while (job := self._begun.get()) is not None:
            try:
                if job.error is None:
                    self.inner.wait(job.handle)
                    self._take_in(job)
            except BaseException as error:
                job.error = error
            job.done.set()

    def _take_in(self, job: _Job) -> None:
        streams = self._streams
        streams.wait_event(self._in, job.made)  # earlier work of the caller may still read the targets
        with streams.stream_context(self._in):
            for tensor, host in zip(job.targets, job.incoming, strict=True):
                streams.copy(tensor, host)
                streams.record_stream(tensor, self._in)
        job.arrived = streams.record_event(self._in)
        for host in (*job.outgoing, *job.incoming):
            self._memory.give_back(host, job.arrived)


class _Pinned:
    """A pool of pinned buffers by size and dtype: allocating one takes long. A buffer is free once its copy is over."""

    def __init__(self, streams: Any) -> None:
        self._streams = streams
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, Any]]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer for a message like this tensor."""
        key = (like.numel(), like.dtype)
        with self._lock:
            for n, (host, event) in enumerate(self._free[key]):
                if self._streams.query_event(event):
                    del self._free[key][n]
                    return host
        return self._streams.allocate_pinned(*key)

    def give_back(self, host: Tensor, event: Any) -> None:
        """Return a buffer to the pool; it is free after this event."""
        with self._lock:
            self._free[host.numel(), host.dtype].append((host, event))
