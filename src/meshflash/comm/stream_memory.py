"""Words of memory that streams write and wait for by themselves: no kernel runs, so nothing waits for a free SM.

A persistent kernel holds every SM that it can get. A signal that is a kernel could neither be set nor be seen before it
ends. CUDA's stream memory operations are done by the GPU's front end instead. They have no timeout: `watchdog.py` ends
waits for a rank that was lost.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from meshflash.runtime.devices import TRITON

#: Bytes of a signal.
WORD = 4
#: Values of a signal: not set, and set. Waits take any greater value, too.
CLEAR, SET = 0, 1
#: A value that ends all waits, for ranks that were lost.
RELEASED = 2**30


class StreamMemory(Protocol):
    """Operations on words of 32 bits that a stream does in its order."""

    def write(self, stream: Any, address: int, value: int) -> None:
        """Write a word after all work of the stream so far, which other devices then see, too.

        Args:
            stream: The stream.
            address: The address of the word, on any device of this host that is mapped here.
            value: The value to write.
        """

    def wait(self, stream: Any, address: int, value: int) -> None:
        """Let all later work of the stream wait until a word has at least a value.

        Args:
            stream: The stream.
            address: The address of the word.
            value: The value to wait for.
        """


class CudaStreamMemory(StreamMemory):
    """The stream memory operations of the CUDA driver. `stream_memory` makes it."""

    #: CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes become visible first. CU_STREAM_WAIT_VALUE_GEQ.
    WRITE_DEFAULT, WAIT_GEQ = 0, 0
    #: CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, which drivers report together with those of 32 bits.
    CAN_USE = 122

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._write, self._wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

    def unsupported_reason(self, index: int) -> str | None:
        """Return why a device cannot do it; None if it can.

        Args:
            index: The number of the device among those that this process sees.
        """
        device, found = ctypes.c_int(), ctypes.c_int()
        status = self._driver.cuDeviceGet(ctypes.byref(device), index)
        status = status or self._driver.cuDeviceGetAttribute(ctypes.byref(found), self.CAN_USE, device)
        if status:
            return f"the CUDA driver gave error {status}"
        return None if found.value else "the CUDA driver does not allow stream memory operations on this GPU"

    def write(self, stream: Any, address: int, value: int) -> None:
        self._check(self._write(stream.cuda_stream, address, value, self.WRITE_DEFAULT))

    def wait(self, stream: Any, address: int, value: int) -> None:
        self._check(self._wait(stream.cuda_stream, address, value, self.WAIT_GEQ))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"a stream memory operation gave CUDA error {status}; see CUresult in CUDA's manual")


@cache
def stream_memory(device: torch.device) -> tuple[StreamMemory | None, str]:
    """Return the stream memory operations of a device and "", or None and why there are none.

    Args:
        device: The device, with its index.
    """
    if device.type != TRITON:
        return None, f"no stream memory operations are known for {device.type}"
    if torch.version.hip is not None:
        # hipStreamWaitValue32 takes memory from hipExtMallocWithFlags(hipMallocSignalMemory) only, 8 bytes at a time
        return None, "HIP waits only for signal memory, which lies outside of heaps that peers map"
    try:
        made = CudaStreamMemory(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        return None, f"the CUDA driver has no stream memory operations ({error})"
    reason = made.unsupported_reason(device.index or 0)
    return (None, reason) if reason else (made, "")


class StreamSignals:
    """Signals between ranks as words in their heaps: one for each channel and sender, at the receiver.

    A rank sets a signal only after the receiver has taken the one before: it has to learn that by a signal of another
    channel. So a signal is one write, and nobody waits before it.

    Args:
        memory: The operations of the device.
        words: The signals of each rank, as mapped here: int32, (channels, ranks).
        rank: This rank.
    """

    def __init__(self, memory: StreamMemory, words: list[Tensor], rank: int) -> None:
        self._memory, self._rank, self._world = memory, rank, len(words)
        self._bases = [x.data_ptr() for x in words]
        self._count = words[rank].numel()

    def put(self, stream: Any, rank: int, channel: int) -> None:
        """Set a signal at a rank, after all work of the stream so far.

        Args:
            stream: The stream.
            rank: The receiver.
            channel: The channel.
        """
        self._memory.write(stream, self._address(rank, channel, self._rank), SET)

    def take(self, stream: Any, rank: int, channel: int) -> None:
        """Let the stream wait for the signal of a rank, and clear it.

        Args:
            stream: The stream.
            rank: The sender.
            channel: The channel.
        """
        address = self._address(self._rank, channel, rank)
        self._memory.wait(stream, address, SET)
        self._memory.write(stream, address, CLEAR)

    def release(self, stream: Any) -> None:
        """End all waits of this rank that a stream has begun, by setting all of its signals.

        Args:
            stream: Another stream than those that wait.
        """
        for number in range(self._count):
            self._memory.write(stream, self._bases[self._rank] + number * WORD, RELEASED)

    def _address(self, at: int, channel: int, sender: int) -> int:
        return self._bases[at] + (channel * self._world + sender) * WORD
