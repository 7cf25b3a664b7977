"""What a backward will need, in the host's memory meanwhile: copied off and brought back beside what is computed.

Tensors of one block's call belong together. They are copied off while the block computes, and their memory on the
device is free when the next block begins. The backward of a block brings back those of the block before it. Nothing
makes the host wait for the device: streams wait for each other, in an order that frees memory as early as it can be.
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

from meshflash import job
from meshflash.comm.streams import DeviceStreams, MakeStreams, Streams
from meshflash.engine.op import PLAIN
from meshflash.runtime.devices import CPU
from meshflash.runtime.oom import free_bytes

#: Bytes of a tensor that is worth a copy.
SMALLEST = 1024
#: Bytes of the host's memory that are left to others.
RESERVE = 2 << 30
#: The most bytes of one piece of the host's memory: torch pins powers of two, and larger ones would waste up to half.
PIECE = 256 << 20


@dataclass
class Usage:
    """Bytes that wait on the host now and at most, how often memory was allocated there, and tensors brought back.

    `ahead` counts those of them that were on their way before their block's backward began.
    """

    live: int = 0
    peak: int = 0
    allocations: int = 0
    brought: int = 0
    ahead: int = 0


class AtOnce:
    """Streams of a device that has none: what is given is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Any:
        """None: there is one order of things."""

    def new(self) -> Any:
        """The same."""

    def mark(self, stream: Any) -> Any:
        """Nothing is left to wait for."""

    def after(self, stream: Any, event: Any) -> None:
        """It has come."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Where work goes anyway."""
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, now."""
        target.copy_(source)

    def use(self, tensor: Tensor, stream: Any) -> None:
        """It is not used later than now."""

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.empty(count, dtype=dtype)


def _device_streams(device: torch.device) -> Any:
    return AtOnce(device) if device.type == CPU else DeviceStreams(device)


#: Makes the streams of a device; tests put others in its place.
make_streams: MakeStreams = _device_streams


class Kept:
    """A tensor whose values are on the host, or on their way there."""

    #: Of the last copy to or from the host's memory.
    _last: Any = None
    _source: Tensor | None = None
    _here: Tensor | None = None
    _host: Sequence[Tensor] = ()

    def __init__(self, store: Store, tensor: Tensor) -> None:
        self._store, self._home = store, store.streams.current()
        self.origin = TensorWeakRef(tensor)
        source = tensor.detach()
        like = torch.empty_like(source, device="meta")
        if like.stride() != source.stride():  # with gaps, or the same memory twice: packed by whoever made it
            source = torch.empty_like(source).copy_(source)
        self._shape, self._stride, self._dtype = like.shape, like.stride(), like.dtype
        self.bytes, self.version = source.nbytes, tensor._version
        self._changes = source._version
        self._host, before = store.take(self.bytes)
        self._last = store.copy(store.out, self._home, self._pairs(source, out=True), before)
        self._source = source

    def let_go(self) -> None:
        """Free its memory on the device: whoever gets it next comes after the copy."""
        if self._source is None:
            return
        if self._source._version != self._changes:
            raise RuntimeError(
                "offload: a block's input was changed in place after the block had read it; change a copy of it"
            )
        self._store.streams.after(self._home, self._last)
        self._source = None

    def fetch(self) -> bool:
        """Begin to bring it back, unless it is here or on its way; whether that was to be done."""
        if self._source is not None or self._here is not None:
            return False
        store = self._store
        self._home = store.streams.current()
        self._here = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=store.device)
        self._last = store.copy(store.back, self._home, self._pairs(self._here, out=False), [self._last])
        store.usage.brought += 1
        return True

    def value(self) -> Tensor:
        """The tensor on its device, for what the caller's stream does next."""
        if self._source is not None:
            return self._source.detach()
        self.fetch()
        assert self._here is not None
        streams, home = self._store.streams, self._home
        for stream in (home, streams.current()):
            streams.after(stream, self._last)
        if streams.current() != home:
            streams.use(self._here, streams.current())
        here, self._here = self._here, None
        return here

    def _pairs(self, tensor: Tensor, out: bool) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of the bytes of a tensor without gaps and their pieces on the host."""
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        found = [(room[: len(part)], part) for room, part in zip(self._host, flat.split(PIECE), strict=True)]
        return found if out else [(part, room) for room, part in found]

    def __del__(self) -> None:
        if not self._host or sys.is_finalizing():
            return
        if self._source is not None or self._here is not None:  # memory that a copy may still read or write
            self._store.streams.after(self._home, self._last)
        self._store.give_back(self._host, self.bytes, self._last)


class Call:
    """The tensors of one call of a block."""

    def __init__(self, store: Store, before: Call | None) -> None:
        self.store = store
        self._kept: list[Kept] = []
        self._before = None if before is None else weakref.ref(before)
        self._begun = False

    def keep(self, x: Any) -> Any:
        """What stands for a value until the backward: a tensor of the store's device goes to the host."""
        if type(x) not in PLAIN or x.device != self.store.device or x.nbytes < SMALLEST or x.layout != torch.strided:
            return x
        with self.store.lock, torch.no_grad():
            kept = self.store.keep(x)
            self._kept.append(kept)
        return kept

    def recall(self, x: Any) -> Any:
        """The value that something stands for. The first asked of a call begins to bring those of the call before."""
        if not isinstance(x, Kept):
            return x
        with self.store.lock, torch.no_grad():
            if not self._begun:
                self._begun = True
                self.fetch()
                before = None if self._before is None else self._before()
                self.store.usage.ahead += 0 if before is None else before.fetch()
            return x.value()

    def fetch(self) -> int:
        """Begin to bring all of it back; how many tensors that are."""
        return sum(kept.fetch() for kept in self._kept)

    def let_go(self) -> None:
        """Free the memory of all of it on the device."""
        for kept in self._kept:
            kept.let_go()


class Store:
    """What blocks keep of one device's tensors, the streams that move it, and memory of the host to use again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.usage = Usage()
        self.lock = threading.RLock()
        self.streams: Streams = make_streams(device)
        self.out, self.back = self.streams.new(), self.streams.new()
        self._known: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[Call] | None = None
        self._free: defaultdict[int, list[tuple[Tensor, Any]]] = defaultdict(list)

    def call(self) -> Call:
        """One more call of a block. What the one before it kept leaves the device now."""
        with self.lock:
            latest = None if self._latest is None else self._latest()
            if latest is not None:
                latest.let_go()
            made = Call(self, latest)
            self._latest = weakref.ref(made)
        return made

    def keep(self, tensor: Tensor) -> Kept:
        """A tensor on the host, once for all that keep it."""
        found = self._known.get(id(tensor))
        if found is None or found.origin() is not tensor or found.version != tensor._version:
            found = self._known[id(tensor)] = Kept(self, tensor)
        return found

    def copy(self, stream: Any, home: Any, pairs: Iterable[tuple[Tensor, Tensor]], before: Iterable[Any]) -> Any:
        """Copy on a stream, behind what `home` has to do and other events; the event behind the copies."""
        streams = self.streams
        streams.after(stream, streams.mark(home))
        for event in before:
            if event is not None:
                streams.after(stream, event)
        with streams.on(stream):
            for target, source in pairs:
                streams.copy(target, source)
        return streams.mark(stream)

    def take(self, size: int) -> tuple[list[Tensor], list[Any]]:
        """Memory of the host in pieces, and the events that what they held before is done with.

        Sizes are powers of two, and the same for most: other lengths find memory to use again.
        """
        rooms = [PIECE] * (size // PIECE)
        if rest := size % PIECE:
            rooms.append(1 << (rest - 1).bit_length())
        pieces: list[Tensor] = []
        events: list[Any] = []
        try:
            for room in rooms:
                piece, event = self._free[room].pop() if self._free[room] else (self._pin(room), None)
                pieces.append(piece)
                events.append(event)
        except BaseException:
            for piece, event in zip(pieces, events, strict=True):
                self._free[piece.nbytes].append((piece, event))
            raise
        self.usage.live += size
        self.usage.peak = max(self.usage.peak, self.usage.live)
        return pieces, events

    def _pin(self, room: int) -> Tensor:
        """New memory of the host. Where it would run out, the system would end the process without a word."""
        needed = room + (RESERVE if room == PIECE else room)
        free = free_bytes()
        if free is not None and free < needed:
            self.clear()
            _empty_cache()
            free = free_bytes()
        if free is not None and free < needed:
            raise torch.OutOfMemoryError(
                f"offload: {room / 2**30:.1f} GiB more of the host's memory are needed for what backwards will need, "
                f"and {free / 2**30:.1f} GiB are free; take shorter sequences, more ranks, or no offload_activations"
            )
        self.usage.allocations += 1
        return self.streams.pinned(room, torch.uint8)

    def give_back(self, host: Sequence[Tensor], size: int, event: Any) -> None:
        """For the next that needs some; an event says when copies from and to it are done."""
        with self.lock:
            self.usage.live -= size
            for piece in host:
                self._free[piece.nbytes].append((piece, event))

    def clear(self) -> None:
        """Free what nothing waits in."""
        self._free.clear()


_stores: dict[torch.device, Store] = {}


def store_of(device: torch.device) -> Store:
    """The store of a device."""
    found = _stores.get(device)
    if found is None:
        found = _stores.setdefault(device, Store(device))
    return found


def release() -> None:
    """Free the host's memory that nothing waits in; `shutdown` calls it."""
    for store in _stores.values():
        store.clear()
    _stores.clear()
    _empty_cache()


def _empty_cache() -> None:
    """Give the system what torch keeps of pinned memory."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.accelerator.is_available():
        empty()


job.world.on_end.append(release)
