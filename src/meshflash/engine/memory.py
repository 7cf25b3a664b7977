"""Scratch memory: one flat piece for each call that runs at a time, kept for the next one.

A call asks for as many bytes as its program's scratch takes, and gives them back. What autograd saves and
what the caller gets are never from here.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from meshflash.comm.transports.contract import Arena

#: Where a tensor in an arena may begin: what the widest loads and device copies want.
ALIGNMENT = 256


@dataclass
class Usage:
    """What the pool did: bytes that calls hold now and at most, and how often it had to allocate."""

    live: int = 0
    peak: int = 0
    allocations: int = 0


class Pool:
    """Arenas of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.usage = Usage()
        self._free: list[Arena] = []
        self._lock = threading.Lock()

    def take(self, wanted: int, used: int) -> Arena:
        """An arena of at least so many bytes, of which the call uses so many."""
        with self._lock:
            self.usage.live += used
            self.usage.peak = max(self.usage.peak, self.usage.live)
            large_enough = [arena for arena in self._free if arena.bytes >= wanted]
            if large_enough:
                arena = min(large_enough, key=lambda arena: arena.bytes)
                self._free.remove(arena)
                return arena
            if self._free:  # one that is too small gives way to a larger one
                self._free.remove(max(self._free, key=lambda arena: arena.bytes))
            self.usage.allocations += 1
            with torch.inference_mode(False):  # a later call may record gradients in the same memory
                return Arena(torch.empty(max(wanted, 1), dtype=torch.uint8, device=self.device))

    def give_back(self, arena: Arena, used: int) -> None:
        """For the next call."""
        with self._lock:
            self.usage.live -= used
            self._free.append(arena)

    def drop(self, used: int) -> None:
        """Forget an arena that a failed call held: a late message may still be written to it."""
        with self._lock:
            self.usage.live -= used

    def clear(self) -> None:
        """Free what no call holds."""
        with self._lock:
            self._free.clear()


_pools: dict[tuple[torch.device, int], Pool] = {}


def pool(device: torch.device) -> Pool:
    """The pool of a device and its current stream: on another stream a kernel may still use what was given back."""
    key = (device, _stream(device))
    found = _pools.get(key)
    if found is None:
        found = _pools.setdefault(key, Pool(device))
    return found


def _stream(device: torch.device) -> int:
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None:
        return 0
    return int(getattr(module.current_stream(device), f"{device.type}_stream", 0))


def release() -> None:
    """Free all scratch that no call holds."""
    for found in list(_pools.values()):
        found.clear()
