"""A heap on GPUs of one host, also of several ranks on one GPU: torch's symmetric memory, or HIP's fine-grained memory.

On AMD GPUs what a kernel writes is seen by a kernel that runs at the same time elsewhere only in fine-grained memory,
which torch does not give. HIP does, and is called by ctypes: nothing is built.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from meshflash.comm.handshake import Meeting
from meshflash.comm.heap.contract import Heap
from meshflash.comm.transports.symmetric import TorchHeap
from meshflash.runtime.devices import current, symmetric_memory


class SymmetricHeap(Heap):
    """A heap in the memory of GPUs."""

    kind = "symmetric"

    def __init__(self, group: Any, count: int, device: torch.device, timeout: float) -> None:
        if not symmetric_memory(device.type):
            raise ValueError(
                f"kind='symmetric': this torch has no symmetric memory on {device.type}; use kind='shared' for ranks "
                "on CPUs, kind='local' for ranks that one process plays"
            )
        meeting = Meeting(group, timeout)
        if meeting.hosts > 1:
            raise ValueError(
                f"kind='symmetric': the ranks are on {meeting.hosts} hosts; a heap is of ranks of one host"
            )
        self._module: Any = torch.get_device_module(device)
        self._owner: Any
        with self._module.device(device):
            if torch.version.hip is None:
                self._owner = TorchHeap(count, group, device, timeout)
                memories = [self._owner.of(rank) for rank in range(meeting.world)]
            else:
                self._owner = FineGrained(hip(), count, meeting)
                memories = self._owner.memories
            memories[meeting.rank].zero_()
            self._module.synchronize(device)
        meeting.all("zeroed")
        super().__init__(memories, meeting.rank, device, timeout, meeting)

    def _finish(self) -> None:
        self._module.synchronize(self.device)

    def _release(self) -> None:
        if self._closed:
            return
        self._finish()
        super()._release()
        self._owner = None


def hip() -> Any:
    """HIP's runtime, which torch has loaded."""
    try:
        return ctypes.CDLL("libamdhip64.so")
    except OSError as error:
        raise ValueError(
            f"kind='symmetric' needs HIP's runtime on AMD GPUs ({error}); add ROCm's lib folder to LD_LIBRARY_PATH"
        ) from error


class _Handle(ctypes.Structure):
    """A piece of memory by which another process finds it."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class FineGrained:
    """Fine-grained memory of all ranks: ours by HIP's allocator, the others' by its handles."""

    #: hipDeviceMallocFinegrained, hipIpcMemLazyEnablePeerAccess.
    FINE, LAZY = 1, 1

    def __init__(self, library: Any, count: int, meeting: Meeting) -> None:
        self._library = library
        self._own, self._opened = ctypes.c_void_p(), list[ctypes.c_void_p]()

        def allocate() -> str:
            handle = _Handle()
            self._call(
                "hipExtMallocWithFlags", ctypes.byref(self._own), ctypes.c_size_t(count), ctypes.c_uint(self.FINE)
            )
            self._call("hipIpcGetMemHandle", ctypes.byref(handle), self._own)
            return bytes(handle).hex()

        def open_all(handles: list[str]) -> None:
            for rank, text in enumerate(handles):
                address = self._own
                if rank != meeting.rank:
                    address = ctypes.c_void_p()
                    handle = _Handle.from_buffer_copy(bytes.fromhex(text))
                    self._call("hipIpcOpenMemHandle", ctypes.byref(address), handle, ctypes.c_uint(self.LAZY))
                    self._opened.append(address)
                self.memories.append(_bytes_at(address.value or 0, count))

        self.memories: list[Tensor] = []
        handles = meeting.share(allocate)
        meeting.share(lambda: open_all(handles))

    def __del__(self) -> None:
        for address in self._opened:
            self._library.hipIpcCloseMemHandle(address)
        if self._own:
            self._library.hipFree(self._own)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} gave error {code}; see hipError_t in HIP's documentation")


class _Bytes:
    """Memory of a device by its address, as torch reads it."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None, "stream": None
        }  # fmt: skip


def _bytes_at(address: int, count: int) -> Tensor:
    return torch.as_tensor(_Bytes(address, count), device=current())
