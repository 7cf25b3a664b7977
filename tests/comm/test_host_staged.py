"""Host-staged and throttled transports on fake streams, and the choice of a transport."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm.fake_streams import FakeStreams, as_streams
from hub import in_threads
from meshflash.comm.transports.choice import Where, check, choose, missing
from meshflash.comm.transports.contract import TransportError
from meshflash.comm.transports.host_staged import HostStaged
from meshflash.comm.transports.loopback import Hub, Loopback
from meshflash.comm.transports.throttled import Throttled

DEVICE = torch.device("meta")  # any device other than the CPU
CPU = torch.device("cpu")


def staged(below, streams, timeout=20.0):
    return HostStaged(below, DEVICE, timeout, as_streams(streams))


@pytest.mark.parametrize("num_messages", [1, 6])
def test_messages_are_ordered_after_producers_and_before_consumers(num_messages):
    """A ring of ranks whose streams run late: every value arrives, and no buffer changes under a reader."""

    def rank(me, below):
        streams = FakeStreams()
        mover = staged(below, streams)
        world = mover.world("mesh")
        sent, received, seen = torch.zeros(5), torch.zeros(5), []
        for n in range(num_messages):
            streams.current_stream().submit(partial(sent.fill_, 10 * n + me))
            handle = mover.exchange("mesh", [((me + 1) % world, sent)], [((me - 1) % world, received)])
            mover.wait(handle)
            streams.current_stream().submit(lambda: seen.append(received.clone()))
        streams.synchronize()
        mover.close()
        before = (me - 1) % world
        assert [x.tolist() for x in seen] == [[10 * n + before] * 5 for n in range(num_messages)]
        assert mover.counters.received == {("mesh", before): 20 * num_messages}

    in_threads(3, rank)


def test_posts_start_in_order_and_can_be_waited_for_in_any_order():
    def rank(me, below):
        streams = FakeStreams()
        mover = staged(below, streams)
        sent, got = [torch.full((3,), float(10 * n + me)) for n in range(4)], [torch.zeros(3) for _ in range(4)]
        handles = [mover.exchange("mesh", [(1 - me, x)], [(1 - me, y)]) for x, y in zip(sent, got, strict=True)]
        for handle in reversed(handles):
            mover.wait(handle)
        streams.synchronize()
        assert [x[0].item() for x in got] == [10 * n + 1 - me for n in range(4)]

    in_threads(2, rank)


def test_collectives_are_staged_through_the_host():
    def rank(me, below):
        streams = FakeStreams()
        mover = staged(below, streams)
        source, target = torch.full((2,), float(me)), torch.zeros(6)
        mover.wait(mover.collective("all_gather", "mesh", source, target))
        streams.synchronize()
        assert target.tolist() == [0, 0, 1, 1, 2, 2]
        source, target = torch.arange(3.0) + 10 * me, torch.zeros(3)
        mover.wait(mover.collective("all_to_all", "mesh", source, target))
        streams.synchronize()
        assert target.tolist() == [me, 10 + me, 20 + me]

    in_threads(3, rank)


def test_transport_below_sees_only_host_memory():
    seen: list[torch.Tensor] = []

    class Watching(Loopback):
        def _exchange(self, group, sends, recvs):
            seen.extend(tensor for _, tensor in (*sends, *recvs))

    streams = FakeStreams()
    mover = staged(Watching(0, 2), streams)
    a, b = torch.zeros(3), torch.zeros(3)
    mover.wait(mover.exchange("mesh", [(1, a)], [(1, b)]))
    assert len(seen) == 2
    assert all(tensor.data_ptr() not in (a.data_ptr(), b.data_ptr()) for tensor in seen)


def test_pinned_buffer_is_reused_after_its_copy():
    made: list[int] = []

    class Counting(FakeStreams):
        def allocate_pinned(self, count, dtype):
            made.append(count)
            return super().allocate_pinned(count, dtype)

    streams = Counting()
    mover = staged(Loopback(0, 2), streams)
    for _ in range(5):
        mover.wait(mover.exchange("mesh", [(1, torch.zeros(3))], [(1, torch.zeros(3))]))
        streams.synchronize()
    assert len(made) == 2


def test_error_of_the_transport_below_is_raised_in_wait():
    class Broken(Loopback):
        def wait(self, handle):
            raise TransportError("rank 1 was lost")

    mover = staged(Broken(0, 2), FakeStreams())
    handle = mover.exchange("mesh", [(1, torch.zeros(3))], [])
    with pytest.raises(TransportError, match="rank 1 was lost"):
        mover.wait(handle)


def test_missing_message_ends_the_wait_at_the_timeout():
    hub = Hub(2, timeout=5.0)
    mover = staged(hub.transport(0), FakeStreams(), timeout=0.2)
    handle = mover.exchange("mesh", [], [(1, torch.zeros(3))])
    with pytest.raises(TransportError, match=r"did not arrive within 0.2 s"):
        mover.wait(handle)


def test_close_ends_the_transport_threads():
    before = threading.active_count()
    mover = staged(Loopback(0, 2), FakeStreams())
    own = mover._threads
    mover.close()
    assert not any(thread.is_alive() for thread in own)
    assert threading.active_count() <= before + 3  # the fake streams have threads too


def test_transport_threads_end_with_the_interpreter():
    """A failed call drops its transport without closing it, and must not keep the process alive."""
    code = """if True:
        import atexit
        from comm.test_host_staged import *
        mover = None
        atexit.register(lambda: print(*(thread.is_alive() for thread in mover._threads)))  # runs last
        mover = staged(Loopback(0, 2), FakeStreams())
    """
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True
    )
    assert done.stdout.decode().split() == ["False", "False"], done.stderr.decode()


class Clock:
    """A clock that advances only in sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of the throttled transport by one that advances only in sleep."""
    made = Clock()
    monkeypatch.setattr("meshflash.comm.transports.throttled.time", made)
    return made


def test_throttled_link_serializes_posts_at_its_bandwidth(clock):
    mover = Throttled(Loopback(0, 2), CPU, bytes_per_second=1e6, latency=0.01)
    message = torch.zeros(5000)  # 20 ms
    handles = [mover.exchange("mesh", [(1, message)], [(1, message)]) for _ in range(2)]
    mover.wait(handles[0])
    assert clock.now == pytest.approx(100.03)
    mover.wait(handles[1])
    assert clock.now == pytest.approx(100.06)
    assert mover.counters.received["mesh", 1] == 2 * message.nbytes
    assert mover.name == "loopback at 0.001 GB/s and 10000 us"


def test_throttled_transfer_overlaps_with_compute(clock):
    mover = Throttled(Loopback(0, 2), CPU, bytes_per_second=1e6)
    handle = mover.exchange("mesh", [(1, torch.zeros(5000))], [])
    clock.now += 0.05
    mover.wait(handle)
    assert clock.now == 100.05


def test_each_group_has_its_own_throttled_link(clock):
    mover = Throttled(Loopback(0, 2), CPU, bytes_per_second=1e6)
    for handle in [mover.exchange(group, [(1, torch.zeros(5000))], []) for group in ("mesh", "far")]:
        mover.wait(handle)
    assert clock.now == pytest.approx(100.02)


def test_throttled_device_waits_in_streams_and_not_on_the_host():
    streams = FakeStreams(max_delay_seconds=0.0)
    mover = Throttled(Loopback(0, 4), DEVICE, bytes_per_second=1e6, latency=0.02, streams=as_streams(streams))
    assert mover.sm_margin == 1  # the kernel that sleeps
    message = torch.zeros(2500)  # 10 ms
    streams.gate.clear()
    found: list[tuple[Any, Any]] = []
    marks: Any = SimpleNamespace(mark=streams.current_stream, moved=lambda begin, end: found.append((begin, end)))
    mover.timer = marks
    mover.wait(mover.exchange("mesh", [(1, message)], []))
    link: Any = mover._link
    assert found == [(link._links["mesh"],) * 2], "both marks are in the stream of the link"
    mover.timer = None
    assert streams.sleeping
    streams.gate.set()
    streams.synchronize()
    assert not streams.sleeping
    mover.wait(mover.collective("all_gather", "mesh", message, torch.zeros(10000)))
    mover.wait(mover.collective("all_to_all", "mesh", message, message))
    assert [round(n, 4) for n in streams.delays] == [0.03, 0.05, 0.0275]


def test_unknown_transport_name_is_refused():
    check("auto")
    check("throttled(host_staged, 400, 10)")
    for wrong in (
        "nccl",
        "throttled(auto)",
        "throttled(carrier, 1, 2)",
        "throttled(auto, e, 2)",
        "throttled(auto, -1, 2)",
        "",
    ):
        with pytest.raises(
            ValueError, match=r"expected one of auto, process_group, symmetric, host_staged, or throttled\("
        ):
            check(wrong)
    with pytest.raises(ValueError, match="expected bytes a second > 0"):
        Throttled(Loopback(0, 2), CPU, 0.0)


def choose_over_gloo(rank, world, group):
    """Choose transports for CPU tensors, and check that unsupported ones are refused."""
    found = choose("auto", {"mesh": group}, CPU, 5.0)
    throttled = choose("throttled(process_group, 2, 5)", {"mesh": group}, CPU, 5.0)
    with pytest.raises(ValueError, match=r"transport='host_staged' cannot .*: tensors are on the host already"):
        choose("host_staged", {"mesh": group}, CPU, 5.0)
    with pytest.raises(ValueError, match=r"transport='process_group' cannot .*gloo cannot move tensors on cuda; init"):
        choose("process_group", {"mesh": group}, torch.device("cuda"), 5.0)
    return found.name, throttled.name


def test_gloo_refuses_device_tensors(pool):
    assert pool.run(2, choose_over_gloo) == [("gloo", "gloo at 2 GB/s and 5 us")] * 2


def locations(*devices, hosts=None):
    return [Where(host, f"{host}", device) for host, device in zip(hosts or ["a"] * len(devices), devices, strict=True)]


def choose_over_gpus(rank, world, group):
    """Check the reasons against each transport, for GPUs that ranks share or not."""
    cuda, groups = torch.device("cuda"), {"mesh": group}
    apart, shared = locations("0", "1"), locations("0", "0")
    assert missing("symmetric", groups, cuda, apart) is None
    assert missing("symmetric", groups, cuda, locations("0", "0", hosts=["a", "b"])) == "ranks are on 2 hosts"
    assert missing("symmetric", groups, torch.device("xpu"), apart) == "this torch has no symmetric memory for xpu"
    assert missing("host_staged", groups, cuda, shared) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshflash.comm.transports.choice.cannot_move", lambda group, device: None)  # as with NCCL
        assert missing("process_group", groups, cuda, apart) is None
        assert missing("process_group", groups, cuda, shared) == "ranks share a device, which its backend refuses"
        separate_hosts = [Where("a", str(n), "0") for n in range(2)]  # as NCCL_HOSTID declares
        assert missing("process_group", groups, cuda, separate_hosts) is None
    assert Where.here(CPU).device == "cpu"


def test_transport_choice_depends_on_where_the_devices_are(pool):
    pool.run(2, choose_over_gpus)
