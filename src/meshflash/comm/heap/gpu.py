"""A heap in the memory of the GPUs of one host: torch's symmetric memory, or HIP's fine-grained memory on AMD GPUs.

Several ranks may share a GPU. On AMD GPUs, writes of a running kernel become visible to a kernel on another device only
in fine-grained memory. torch does not allocate such memory, so HIP's runtime is called through ctypes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from meshflash.comm.handshake import StoreBarrier
from meshflash.comm.heap.contract import Heap
from meshflash.comm.transports.symmetric import TorchHeap
from meshflash.runtime.devices import current, symmetric_memory


class SymmetricHeap(Heap):
    """A heap in GPU memory; `open_heap` makes it for process groups on GPUs."""

    kind = "symmetric"

    def __init__(self, group: Any, num_bytes: int, device: torch.device, timeout: float) -> None:
        if not symmetric_memory(device.type):
            raise ValueError(
                f"kind='symmetric': this torch has no symmetric memory on {device.type}; use kind='shared' for ranks "
                "on CPUs, kind='local' for ranks that one process emulates"
            )
        barrier = StoreBarrier(group, timeout)
        if barrier.hosts > 1:
            raise ValueError(
                f"kind='symmetric': the ranks are on {barrier.hosts} hosts; all ranks of a heap must be on one host"
            )
        self._module: Any = torch.get_device_module(device)
        self._owner: Any
        with self._module.device(device):
            if torch.version.hip is None:
                self._owner = TorchHeap(num_bytes, group, device, timeout)
                memories = [self._owner.of(rank) for rank in range(barrier.world)]
            else:
                self._owner = FineGrainedMemory(load_hip(), num_bytes, barrier)
                memories = self._owner.memories
            memories[barrier.rank].zero_()
            self._module.synchronize(device)
        barrier.all_gather("zeroed")  # a peer that wrote earlier would see its data overwritten with zeros
        super().__init__(memories, barrier.rank, device, timeout, barrier)

    def _finish(self) -> None:
        self._module.synchronize(self.device)

    def _release(self) -> None:
        if self._closed:
            return
        self._finish()
        super()._release()
        self._owner = None


def load_hip() -> Any:
    """Return HIP's runtime library, which torch has loaded already."""
    try:
        return ctypes.CDLL("libamdhip64.so")
    except OSError as error:
        raise ValueError(
            f"kind='symmetric' needs HIP's runtime on AMD GPUs ({error}); add ROCm's lib folder to LD_LIBRARY_PATH"
        ) from error


class _Handle(ctypes.Structure):
    """hipIpcMemHandle_t: names device memory to another process."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class FineGrainedMemory:
    """Fine-grained memory of all ranks: allocated here, and opened from the IPC handles of the peers."""

    #: Values of hipDeviceMallocFinegrained and hipIpcMemLazyEnablePeerAccess.
    FINE_GRAINED, LAZY_PEER_ACCESS = 1, 1

    def __init__(self, library: Any, num_bytes: int, barrier: StoreBarrier) -> None:
        self._library = library
        self._own, self._opened = ctypes.c_void_p(), list[ctypes.c_void_p]()

        def allocate() -> str:
            handle = _Handle()
            size, flags = ctypes.c_size_t(num_bytes), ctypes.c_uint(self.FINE_GRAINED)
            self._call("hipExtMallocWithFlags", ctypes.byref(self._own), size, flags)
            self._call("hipIpcGetMemHandle", ctypes.byref(handle), self._own)
            return bytes(handle).hex()

        def open_all(handles: list[str]) -> None:
            for rank, text in enumerate(handles):
                address = self._own
                if rank != barrier.rank:
                    address = ctypes.c_void_p()
                    handle = _Handle.from_buffer_copy(bytes.fromhex(text))
                    flags = ctypes.c_uint(self.LAZY_PEER_ACCESS)
                    self._call("hipIpcOpenMemHandle", ctypes.byref(address), handle, flags)
                    self._opened.append(address)
                self.memories.append(_tensor_at(address.value or 0, num_bytes))

        self.memories: list[Tensor] = []
        handles = barrier.all_gather_result(allocate)
        barrier.all_gather_result(lambda: open_all(handles))

    def __del__(self) -> None:
        for address in self._opened:
            self._library.hipIpcCloseMemHandle(address)
        if self._own:
            self._library.hipFree(self._own)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} gave error {code}; see hipError_t in HIP's documentation")


class _DeviceBytes:
    """Device memory at an address, in the form that torch.as_tensor accepts."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
            "stream": None,
        }  # fmt: skip


def _tensor_at(address: int, num_bytes: int) -> Tensor:
    return torch.as_tensor(_DeviceBytes(address, num_bytes), device=current())
