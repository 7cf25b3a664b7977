"""Signals that streams set and wait for: the calls of the CUDA driver, and the order of signals between ranks."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm.fake_streams import FakeStreamMemory, FakeStreams
from meshflash.comm import stream_memory as module
from meshflash.comm.stream_memory import CLEAR, RELEASED, SET, CudaStreamMemory, StreamSignals, stream_memory

STREAM = SimpleNamespace(cuda_stream=77)


class FakeFunction:
    """A function of a C library: it checks arguments against `argtypes`, as ctypes does, and notes them."""

    def __init__(self, calls: list[Any], name: str, status: int = 0) -> None:
        self._calls, self._name, self.status, self.argtypes = calls, name, status, ()

    def __call__(self, *arguments: Any) -> int:
        kinds: Any = self.argtypes
        values = [kind(x).value for kind, x in zip(kinds, arguments, strict=True)]
        self._calls.append((self._name, *values))
        return self.status


class FakeDriver:
    """libcuda as far as stream memory operations need it."""

    def __init__(self, allowed: int = 1, status: int = 0) -> None:
        self.calls: list[Any] = []
        self.allowed, self.status = allowed, status
        self.cuStreamWriteValue32_v2 = FakeFunction(self.calls, "write")
        self.cuStreamWaitValue32_v2 = FakeFunction(self.calls, "wait")

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 + index
        return self.status

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: Any) -> int:
        assert (attribute, device.value) == (122, 13)
        found._obj.value = self.allowed
        return 0


def test_operations_of_cuda_name_stream_address_value_and_flags():
    driver = FakeDriver()
    memory = CudaStreamMemory(driver)
    memory.write(STREAM, 2**40 + 4, 1)
    memory.wait(STREAM, 2**40 + 8, 5)
    # a write makes earlier writes visible (0), and a wait is for a value or a greater one (0)
    assert driver.calls == [("write", 77, 2**40 + 4, 1, 0), ("wait", 77, 2**40 + 8, 5, 0)]


def test_an_error_of_the_driver_is_raised():
    driver = FakeDriver()
    memory = CudaStreamMemory(driver)
    driver.cuStreamWaitValue32_v2.status = 801
    with pytest.raises(RuntimeError, match="gave CUDA error 801"):
        memory.wait(STREAM, 4096, 1)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (FakeDriver(), None),
        (FakeDriver(allowed=0), "the CUDA driver does not allow stream memory operations on this GPU"),
        (FakeDriver(status=100), "the CUDA driver gave error 100"),
    ],
)
def test_a_driver_that_does_not_allow_it_is_refused_with_a_reason(driver, reason):
    assert CudaStreamMemory(driver).unsupported_reason(3) == reason


@pytest.mark.parametrize(
    ("device", "hip", "library", "reason"),
    [
        ("cpu", None, FakeDriver(), "no stream memory operations are known for cpu"),
        ("cuda:3", "6.4", FakeDriver(), "HIP waits only for signal memory"),
        ("cuda:3", None, OSError("no libcuda"), r"the CUDA driver has no stream memory operations \(no libcuda\)"),
        ("cuda:3", None, SimpleNamespace(), "the CUDA driver has no stream memory operations"),
        ("cuda:3", None, FakeDriver(allowed=0), "does not allow"),
        ("cuda:3", None, FakeDriver(), ""),
    ],
)
def test_where_streams_cannot_wait_there_is_a_reason(device, hip, library, reason, monkeypatch):
    def load(name: str) -> Any:
        if isinstance(library, Exception):
            raise library
        return library

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(module, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": load}))
    found, why = stream_memory.__wrapped__(torch.device(device))
    assert (found is None) == bool(reason)
    assert re.search(reason, why)


def test_each_channel_and_sender_has_a_signal_of_its_own():
    streams, memory = FakeStreams(max_delay_seconds=0.0), FakeStreamMemory()
    words = [torch.zeros(4, 3, dtype=torch.int32) for _ in range(3)]
    signals = [StreamSignals(memory, words, rank) for rank in range(3)]
    stream = streams.current_stream()
    signals[2].put(stream, 0, 1)
    signals[1].put(stream, 0, 3)
    streams.synchronize()
    assert words[0].nonzero().tolist() == [[1, 2], [3, 1]]
    assert not words[1].any()
    signals[0].take(stream, 2, 1)
    signals[0].take(stream, 1, 3)
    streams.synchronize()
    assert (words[0] == CLEAR).all()


def test_a_release_ends_waits_for_any_channel_and_sender():
    streams, memory = FakeStreams(max_delay_seconds=0.0), FakeStreamMemory()
    words = [torch.zeros(4, 2, dtype=torch.int32) for _ in range(2)]
    signals = StreamSignals(memory, words, 0)
    waiting, other = streams.new_stream(), streams.new_stream()
    signals.take(waiting, 1, 3)
    end = streams.record_event(waiting)
    assert not end.wait(0.05)
    signals.release(other)
    assert end.wait(5)
    assert not words[1].any(), "only signals of the rank itself are released"
    assert words[0][3, 1] == CLEAR
    assert words[0][2, 0] == RELEASED > SET
