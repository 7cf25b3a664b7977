"""The symmetric-memory transport on fake heaps and streams: programs run in the heap, and peers pull from it."""

from __future__ import annotations

import time

import pytest
import torch

from comm.fake_streams import FakeHeaps, HostStreams, as_streams
from hub import in_threads, run_rank
from meshflash import Mask
from meshflash.check.oracle import Case, check
from meshflash.check.spread import Item, whole
from meshflash.comm.transports import symmetric
from meshflash.comm.transports.symmetric import Symmetric
from meshflash.comm.transports.throttled import Throttled
from meshflash.schedules.registry import schedule_variants

CAUSAL = Mask.causal()
DEVICE = torch.device("cpu")


def transport(heaps, rank, groups=("far",)):
    """Return a rank's symmetric transport on fake heaps and streams."""
    streams = HostStreams(max_delay_seconds=0.001)
    made = Symmetric(None, rank, heaps.world, DEVICE, 20.0, heaps.maker(rank, streams), as_streams(streams))
    for name in groups:
        made.add(name, None)
    return made


@pytest.mark.parametrize("schedule", schedule_variants(4))
def test_every_schedule_runs_in_symmetric_memory(schedule):
    for case in (
        Case(CAUSAL, batch=1, tokens=21, heads=4, kv_heads=2, dim=8),
        Case(CAUSAL & Mask.window(5, 0), batch=2, tokens=18, heads=4, kv_heads=2, dim=8, value_dim=16, sinks=True),
    ):
        item, heaps = Item(case, schedule, 4), FakeHeaps(4)
        leaves = case.inputs(item.dtype)

        def rank(me, hub, item=item, heaps=heaps, leaves=leaves):
            mover = transport(heaps, me)
            made = run_rank(item, leaves, me, mover, times=3)
            assert mover.counters.received_bytes > 0 or me == 0
            return made

        check(whole(item, in_threads(4, rank)), case, leaves)


def test_pull_waits_for_ready_and_sender_waits_for_done():
    heaps = FakeHeaps(2)

    def rank(me, hub):
        mover = transport(heaps, me)
        memory, got = mover.arena(64).memory, []
        target = torch.zeros(4)
        for n in range(20):
            sent = memory[16:32].view(torch.float32)
            sent.fill_(10 * n + me)
            mover.wait(mover.pull("mesh", [(1 - me, sent)], [(1 - me, target)], [16]))
            got.append(target.clone())
            memory.fill_(0xFF)  # after DONE no peer reads it any more
        assert [x.tolist() for x in got] == [[10 * n + 1 - me] * 4 for n in range(20)]
        assert mover.counters.received == {("mesh", 1 - me): 20 * 16}

    in_threads(2, rank)


def test_throttled_transport_delays_pulls_from_symmetric_memory():
    heaps, case = FakeHeaps(2), Case(CAUSAL, batch=1, tokens=9, heads=2, dim=8)
    item, leaves = Item(case, "ring", 2), case.inputs(torch.float32)

    def rank(me, hub):
        slow = Throttled(transport(heaps, me), DEVICE, 1e5)
        begin = time.monotonic()
        made = run_rank(item, leaves, me, slow)
        assert time.monotonic() - begin > slow.counters.received_bytes / 1e5
        return made

    check(whole(item, in_threads(2, rank)), case, leaves)


def test_each_group_and_copies_need_an_sm():
    assert transport(FakeHeaps(1), 0, groups=()).sm_margin == 2
    assert transport(FakeHeaps(1), 0, groups=("far",)).sm_margin == 3


def test_heap_grows_on_all_ranks_and_replaces_the_old_one(monkeypatch):
    heaps = FakeHeaps(2)
    monkeypatch.setattr(symmetric, "GRANULARITY_BYTES", 64)

    def rank(me, hub):
        mover = transport(heaps, me)
        first = mover.arena(100)
        assert mover.arena(90) is first
        assert (first.bytes, mover.held_bytes) == (128, 128)
        assert (mover.arena(140).bytes, mover.held_bytes) == (192, 192)
        assert (mover.arena(1000).bytes, mover.held_bytes) == (1024, 1024)
        mover.close()
        assert mover.held_bytes == 0

    in_threads(2, rank)


def test_heap_of_a_captured_graph_is_kept(monkeypatch):
    heaps = FakeHeaps(1)
    monkeypatch.setattr(symmetric, "GRANULARITY_BYTES", 64)
    mover = transport(heaps, 0)
    mover.arena(100)
    with monkeypatch.context() as patch:
        patch.setattr(symmetric, "capturing", lambda device: True)
        mover.arena(90)
        mover.arena(80)
        with pytest.raises(RuntimeError, match="run this call once, with its backward, before a graph is captured"):
            mover.arena(200)
    mover.arena(200)
    assert mover.held_bytes == 128 + 256


def test_symmetric_transport_refuses_exchange_and_collective():
    mover = transport(FakeHeaps(1), 0)
    with pytest.raises(RuntimeError, match="moves messages by pull"):
        mover.exchange("mesh", [], [])
    with pytest.raises(RuntimeError, match="moves messages by pull"):
        mover.collective("all_gather", "mesh", torch.zeros(1), torch.zeros(1))


class StreamTimer:
    """Marks the time at which a stream comes to the mark."""

    def __init__(self, streams):
        self._streams, self.moves = streams, []

    def mark(self):
        found = []
        self._streams.current_stream().submit(lambda: found.append(time.monotonic()))
        return found

    def moved(self, begin, end):
        self.moves.append((begin, end))


def test_messages_are_timed_from_when_the_sender_is_ready():
    """Rank 1 posts late: rank 0's message begins only then."""
    heaps, late = FakeHeaps(2), 0.3

    def rank(me, hub):
        mover = transport(heaps, me)
        memory, target = mover.arena(64).memory, torch.zeros(4)
        time.sleep(late * me)
        timer = mover.timer = StreamTimer(mover._streams)
        posted = time.monotonic()
        mover.wait(mover.pull("mesh", [(1 - me, memory[16:32].view(torch.float32))], [(1 - me, target)], [16]))
        mover._streams.synchronize()
        (((begin,), (end,)),) = timer.moves
        assert posted <= begin <= end
        return begin - posted

    waited, _ = in_threads(2, rank)
    assert waited > 0.8 * late


def test_a_rank_that_only_sends_times_no_message():
    heaps = FakeHeaps(2)

    def rank(me, hub):
        mover = transport(heaps, me)
        memory, target = mover.arena(64).memory, torch.zeros(4)
        timer = mover.timer = StreamTimer(mover._streams)
        sends = [] if me else [(1, memory[16:32].view(torch.float32))]
        recvs = [(0, target)] if me else []
        mover.wait(mover.pull("mesh", sends, recvs, [16] * me))
        return len(timer.moves)

    assert in_threads(2, rank) == [0, 1]
