"""Offload saved activations to pinned host memory, with copies that overlap compute.

All tensors that one call of a block saves form a unit, `BlockActivations`. Device-to-host copies run while the block
computes, and the device memory is free when the next block begins. The backward of a block prefetches the activations
of the block before it. The host never waits for the device: streams wait for events, in an order that frees memory as
early as possible.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from meshflash.comm.streams import DeviceStreams, MakeStreams, Streams
from meshflash.engine.op import PLAIN
from meshflash.runtime.devices import CPU
from meshflash.runtime.oom import free_bytes
from meshflash.runtime.state import state

#: Bytes: smaller tensors stay on the device, since a copy costs more than the memory is worth.
MIN_OFFLOAD_BYTES = 1024
#: Bytes of host memory that offloading leaves free for other users of the host.
HOST_RESERVE_BYTES = 2 << 30
#: Bytes of the largest single host buffer. torch pins powers of two, so larger buffers would waste up to half.
CHUNK_BYTES = 256 << 20


@dataclass
class Usage:
    """Counters of an `OffloadStore`, for tests and reports.

    `live_bytes` are on the host now and `peak_bytes` at most. `num_allocations` counts new host buffers. `num_fetched`
    counts tensors copied back, and `num_prefetched` those whose copy began before the backward of their block.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    num_allocations: int = 0
    num_fetched: int = 0
    num_prefetched: int = 0


class SynchronousStreams:
    """Streams of a device without streams (the CPU): every operation is complete when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_stream(self) -> Any:
        """Return None: there is a single order of operations."""

    def new_stream(self) -> Any:
        """Return None, as `current_stream`."""

    def record_event(self, stream: Any) -> Any:
        """Return None: all work is complete, so no event is needed."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Return at once: every event has completed."""

    def stream_context(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy synchronously."""
        target.copy_(source)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Return at once: no stream uses the tensor after this call."""

    def allocate_pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return pageable memory; nothing reads it asynchronously."""
        return torch.empty(count, dtype=dtype)


def _device_streams(device: torch.device) -> Any:
    return SynchronousStreams(device) if device.type == CPU else DeviceStreams(device)


#: Makes the streams of a device; tests replace it.
make_streams: MakeStreams = _device_streams


class OffloadedTensor:
    """A tensor whose values are on the host or on their way there; made by `OffloadStore.offload`."""

    #: The event of the last copy to or from the host buffers.
    _last: Any = None
    #: The device tensor until its memory is released.
    _source: Tensor | None = None
    #: The device tensor that a fetch fills, until `value` hands it out.
    _fetched: Tensor | None = None
    _host: Sequence[Tensor] = ()

    def __init__(self, store: OffloadStore, tensor: Tensor) -> None:
        self._store, self._stream = store, store.streams.current_stream()
        self.origin = TensorWeakRef(tensor)
        source = tensor.detach()
        like = torch.empty_like(source, device="meta")
        if like.stride() != source.stride():  # gaps or overlapping memory: pack it on the stream that made it
            source = torch.empty_like(source).copy_(source)
        self._shape, self._stride, self._dtype = like.shape, like.stride(), like.dtype
        self.bytes, self.version = source.nbytes, tensor._version
        self._source_version = source._version
        self._host, before = store.allocate(self.bytes)
        self._last = store.copy(store.out, self._stream, self._pairs(source, out=True), before)
        self._source = source

    def release_device_memory(self) -> None:
        """Drop the device tensor. Its stream first waits for the copy, so the memory's next user comes after it."""
        if self._source is None:
            return
        if self._source._version != self._source_version:
            raise RuntimeError(
                "offload: a block's input was changed in place after the block had read it; change a copy of it"
            )
        self._store.streams.wait_event(self._stream, self._last)
        self._source = None

    def fetch(self) -> bool:
        """Start the host-to-device copy; return whether one was needed."""
        if self._source is not None or self._fetched is not None:
            return False
        store = self._store
        self._stream = store.streams.current_stream()
        self._fetched = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=store.device)
        self._last = store.copy(store.back, self._stream, self._pairs(self._fetched, out=False), [self._last])
        store.usage.num_fetched += 1
        return True

    def value(self) -> Tensor:
        """Return the tensor on its device, ready for the next operation of the caller's stream."""
        if self._source is not None:
            return self._source.detach()
        self.fetch()
        assert self._fetched is not None
        streams, stream = self._store.streams, self._stream
        for waiting in (stream, streams.current_stream()):
            streams.wait_event(waiting, self._last)
        if streams.current_stream() != stream:
            streams.record_stream(self._fetched, streams.current_stream())
        fetched, self._fetched = self._fetched, None
        return fetched

    def _pairs(self, tensor: Tensor, out: bool) -> list[tuple[Tensor, Tensor]]:
        """Return (target, source) pairs between the bytes of a gap-free tensor and the host buffers."""
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        found = [(buffer[: len(part)], part) for buffer, part in zip(self._host, flat.split(CHUNK_BYTES), strict=True)]
        return found if out else [(part, buffer) for buffer, part in found]

    def __del__(self) -> None:
        if not self._host or sys.is_finalizing():
            return
        if self._source is not None or self._fetched is not None:  # a copy may still read or write this memory
            self._store.streams.wait_event(self._stream, self._last)
        self._store.free(self._host, self.bytes, self._last)


class BlockActivations:
    """The tensors that one call of a block saves; made by `OffloadStore.begin_block`."""

    def __init__(self, store: OffloadStore, previous: BlockActivations | None) -> None:
        self.store = store
        self._tensors: list[OffloadedTensor] = []
        self._previous = None if previous is None else weakref.ref(previous)
        self._backward_started = False

    def offload(self, x: Any) -> Any:
        """Offload a plain tensor on the store's device and return its handle; return anything else unchanged."""
        plain = type(x) in PLAIN and x.device == self.store.device and x.layout == torch.strided
        if not plain or x.nbytes < MIN_OFFLOAD_BYTES:
            return x
        with self.store.lock, torch.no_grad():
            handle = self.store.offload(x)
            self._tensors.append(handle)
        return handle

    def load(self, x: Any) -> Any:
        """Return the tensor of a handle. The first load also prefetches the previous block's activations."""
        if not isinstance(x, OffloadedTensor):
            return x
        with self.store.lock, torch.no_grad():
            if not self._backward_started:
                self._backward_started = True
                self.fetch()
                previous = None if self._previous is None else self._previous()
                self.store.usage.num_prefetched += 0 if previous is None else previous.fetch()
            return x.value()

    def fetch(self) -> int:
        """Start copying all tensors back; return how many copies were started."""
        return sum(tensor.fetch() for tensor in self._tensors)

    def release_device_memory(self) -> None:
        """Drop the device copies of all tensors."""
        for tensor in self._tensors:
            tensor.release_device_memory()


class OffloadStore:
    """The offloaded tensors of one device, its copy streams, and a free list of host buffers; see `offload_store`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.usage = Usage()
        self.lock = threading.RLock()
        self.streams: Streams = make_streams(device)
        self.out, self.back = self.streams.new_stream(), self.streams.new_stream()
        #: By the id of the original tensor: a tensor that two blocks save is offloaded once.
        self._known: weakref.WeakValueDictionary[int, OffloadedTensor] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[BlockActivations] | None = None
        #: Free host buffers by size in bytes, each with the event after which it may be overwritten.
        self._free: defaultdict[int, list[tuple[Tensor, Any]]] = defaultdict(list)

    def begin_block(self) -> BlockActivations:
        """Return a new unit for a block's call, and release the device memory of the call before it."""
        with self.lock:
            latest = None if self._latest is None else self._latest()
            if latest is not None:
                latest.release_device_memory()
            made = BlockActivations(self, latest)
            self._latest = weakref.ref(made)
        return made

    def offload(self, tensor: Tensor) -> OffloadedTensor:
        """Return the handle of a tensor; an unchanged tensor that is offloaded already keeps its handle."""
        found = self._known.get(id(tensor))
        if found is None or found.origin() is not tensor or found.version != tensor._version:
            found = self._known[id(tensor)] = OffloadedTensor(self, tensor)
        return found

    def copy(self, stream: Any, after: Any, pairs: Iterable[tuple[Tensor, Tensor]], before: Iterable[Any]) -> Any:
        """Copy (target, source) pairs on a stream and return the event behind them.

        The copies wait for all work given to the stream `after` so far, and for the events `before`.
        """
        streams = self.streams
        streams.wait_event(stream, streams.record_event(after))
        for event in before:
            if event is not None:
                streams.wait_event(stream, event)
        with streams.stream_context(stream):
            for target, source in pairs:
                streams.copy(target, source)
        return streams.record_event(stream)

    def allocate(self, size: int) -> tuple[list[Tensor], list[Any]]:
        """Return host buffers for `size` bytes, and the events after which they may be overwritten.

        Buffers are chunks of CHUNK_BYTES and one power of two for the rest, which tensors of other
        lengths can reuse.
        """
        sizes = [CHUNK_BYTES] * (size // CHUNK_BYTES)
        if rest := size % CHUNK_BYTES:
            sizes.append(1 << (rest - 1).bit_length())
        buffers: list[Tensor] = []
        events: list[Any] = []
        try:
            for each in sizes:
                buffer, event = self._free[each].pop() if self._free[each] else (self._pin(each), None)
                buffers.append(buffer)
                events.append(event)
        except BaseException:
            for buffer, event in zip(buffers, events, strict=True):
                self._free[buffer.nbytes].append((buffer, event))
            raise
        self.usage.live_bytes += size
        self.usage.peak_bytes = max(self.usage.peak_bytes, self.usage.live_bytes)
        return buffers, events

    def _pin(self, size: int) -> Tensor:
        """Return a new pinned buffer. Check free memory first: the kernel's OOM killer gives no error message."""
        needed = size + (HOST_RESERVE_BYTES if size == CHUNK_BYTES else size)
        free = free_bytes()
        if free is not None and free < needed:
            self.clear()
            _empty_cache()
            free = free_bytes()
        if free is not None and free < needed:
            raise torch.OutOfMemoryError(
                f"offload: {size / 2**30:.1f} GiB more of the host's memory are needed for offloaded activations, "
                f"and {free / 2**30:.1f} GiB are free; take shorter sequences, more ranks, or no offload_activations"
            )
        self.usage.num_allocations += 1
        return self.streams.allocate_pinned(size, torch.uint8)

    def free(self, host: Sequence[Tensor], size: int, event: Any) -> None:
        """Put host buffers on the free list; the event says when copies from and to them are complete."""
        with self.lock:
            self.usage.live_bytes -= size
            for buffer in host:
                self._free[buffer.nbytes].append((buffer, event))

    def clear(self) -> None:
        """Free all host buffers that hold no tensor."""
        self._free.clear()

    def close(self) -> None:
        """Free all host buffers that hold no tensor, and return them to the system."""
        self.clear()
        _empty_cache()


def offload_store(device: torch.device) -> OffloadStore:
    """Return the store of a device, made on first use. `shutdown` closes it."""
    return state.get(lambda: OffloadStore(device), _KIND, device)


#: The kind of offload stores in the state of the process.
_KIND = "offload store"


def release() -> None:
    """Close the stores of all devices: free their unused host buffers."""
    for key, store in state.all_of(_KIND).items():
        state.pop(*key)
        store.close()


def _empty_cache() -> None:
    """Return torch's cached pinned memory to the system."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.accelerator.is_available():
        empty()
