"""Pools of scratch memory: one arena for each call that runs at a time, reused by later calls.

A call takes an arena of as many bytes as the scratch of its program needs, and gives it back. Results and tensors that
autograd saves never come from a pool. `shutdown` frees all pools.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from meshflash.comm.transports.contract import Arena
from meshflash.runtime.state import state

#: The alignment of tensors in an arena, in bytes: enough for the widest loads and device copies.
ALIGNMENT = 256


@dataclass
class Usage:
    """Counters of a pool, in bytes and allocations. Each `Pool` has one.

    Args:
        live: The bytes that running calls use.
        peak: The most bytes that running calls used at a time.
        allocations: How often the pool allocated an arena.
    """

    live: int = 0
    peak: int = 0
    allocations: int = 0


class Pool:
    """The free arenas of one device and stream, and their counters. `pool` makes one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.usage = Usage()
        self._free: list[Arena] = []
        self._lock = threading.Lock()

    def take(self, wanted: int, used: int) -> Arena:
        """Return the smallest free arena that is large enough, or a new one.

        Args:
            wanted: The bytes that the arena must have.
            used: The bytes that the call uses of them, without padding; only for the counters.
        """
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
        """Return an arena to the pool, for later calls.

        Args:
            arena: The arena that `take` returned.
            used: The bytes that the call used, as given to `take`.
        """
        with self._lock:
            self.usage.live -= used
            self._free.append(arena)

    def drop(self, used: int) -> None:
        """Give up the arena of a failed call without reusing it: a late message may still be written to it.

        Args:
            used: The bytes that the call used, as given to `take`.
        """
        with self._lock:
            self.usage.live -= used

    def clear(self) -> None:
        """Free the arenas that no call holds."""
        with self._lock:
            self._free.clear()


def pool(device: torch.device) -> Pool:
    """Return the pool of a device and its current stream; `shutdown` frees it.

    Streams have pools of their own: a kernel on one stream may still use an arena that its call gave back.

    Args:
        device: The device of the scratch.
    """
    return state.get(lambda: Pool(device), "scratch", device, _stream(device))


def _stream(device: torch.device) -> int:
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None:
        return 0
    return int(getattr(module.current_stream(device), f"{device.type}_stream", 0))
