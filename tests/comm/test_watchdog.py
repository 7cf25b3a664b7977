"""Streams that wait for a lost rank are released, and the next call raises an error that names the rank."""

from __future__ import annotations

import time

import pytest
import torch

from comm.fake_streams import FakeHeaps, HostStreams, as_streams
from hub import in_threads
from meshflash.comm import watchdog as module
from meshflash.comm.transports import symmetric
from meshflash.comm.transports.contract import TransportError
from meshflash.comm.transports.symmetric import Symmetric

DEVICE = torch.device("cpu")


def transport(heaps, rank, timeout):
    streams = HostStreams(max_delay_seconds=0.0)
    return Symmetric(None, rank, heaps.world, DEVICE, timeout, heaps.maker(rank), as_streams(streams))


def pull(mover, rank, target):
    """Exchange 4 floats with the next rank, and return the handle."""
    sent = mover.arena(64).memory[16:32].view(torch.float32)
    sent.fill_(float(rank))
    return mover.pull("mesh", [(1 - rank, sent)], [(1 - rank, target)], [16])


def lose(rank, mover, target):
    """Take part in one exchange; then rank 1 is lost, and rank 0 waits for it. Return rank 0's error and the handle."""
    mover.wait(pull(mover, rank, target))
    assert target.tolist() == [1.0 - rank] * 4
    if rank == 1:
        return None
    handle = pull(mover, rank, target)
    end = time.monotonic() + 20
    while not mover._streams.query_event(handle):
        assert time.monotonic() < end, "the stream was not released"
        time.sleep(0.01)
    with pytest.raises(TransportError) as waited:
        mover.wait(handle)
    with pytest.raises(TransportError) as posted:
        pull(mover, rank, target)
    assert str(waited.value) == str(posted.value)
    return waited.value


@pytest.mark.parametrize("ended", [False, True])
def test_streams_do_not_wait_for_ever_for_a_lost_rank(ended, monkeypatch, caplog):
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(Symmetric, "_has_ended", lambda self, rank: ended)
    heaps, targets = FakeHeaps(2), [torch.zeros(4), torch.zeros(4)]
    begin = time.monotonic()
    errors = in_threads(2, lambda me, hub: lose(me, transport(heaps, me, 30.0 if ended else 0.3), targets[me]))
    assert time.monotonic() - begin < 15
    reason = "was lost: its process has ended" if ended else "was lost or did not answer within 0.3 s"
    assert str(errors[0]) == f"rank 1 {reason}; look at its output first"
    assert errors[0].ranks == (1,)
    assert targets[0].isnan().all(), "what could not be received must not look like a result"
    assert f"rank 1 {reason}; what this call received is NaN" in caplog.text


def test_a_rank_that_is_late_but_in_time_is_waited_for(monkeypatch):
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.1)
    heaps = FakeHeaps(2)

    def rank(me, hub):
        mover, target = transport(heaps, me, 20.0), torch.zeros(4)
        mover.arena(64)
        time.sleep(0.7 * me)
        mover.wait(pull(mover, me, target))
        assert target.tolist() == [1.0 - me] * 4
        mover._watchdog.check()
        mover.close()
        assert not mover._watchdog._thread.is_alive()

    in_threads(2, rank)


def test_time_before_a_post_begins_does_not_count(monkeypatch):
    """A stream may be busy with earlier kernels for longer than a peer may take to answer."""
    heaps = FakeHeaps(2)

    def rank(me, hub):
        mover, target = transport(heaps, me, 0.4), torch.zeros(4)
        streams = mover._streams
        mover.arena(64)
        busy = streams.new_stream()
        with streams.stream_context(busy):
            busy.submit(lambda: time.sleep(1.0))
            handle = pull(mover, me, target)
        streams.synchronize_event(handle)
        mover.wait(handle)

    in_threads(2, rank)


def test_posts_of_a_capture_are_not_watched(monkeypatch):
    heaps = FakeHeaps(2)

    def make(me, hub):
        mover = transport(heaps, me, 0.2)
        mover.arena(64)
        return mover

    movers = in_threads(2, make)
    monkeypatch.setattr(symmetric, "capturing", lambda device: True)
    in_threads(2, lambda me, hub: movers[me].wait(pull(movers[me], me, torch.zeros(4))))
    assert all(mover._watchdog._thread is None for mover in movers)
