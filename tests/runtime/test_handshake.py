"""The host handshake: payloads of all ranks, errors that name absent ranks, waits that a watch or Ctrl-C ends."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as _distributed

from meshflash.runtime.handshake import VERDICT, AbsentRanksError, Handshake
from meshflash.runtime.liveness import LostRankError
from meshflash.runtime.store import BoundedStore

dist: Any = _distributed  # torch's stubs do not declare all that this module exports


@pytest.fixture
def store():
    """Return a store on a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def handshakes(store, world, prefix="a"):
    """Return one handshake for each rank, all over the same store."""
    return [Handshake(BoundedStore(store, lambda: 5.0), prefix, rank, world) for rank in range(world)]


def gather_all(sides, seconds=5.0):
    """Run one exchange on all ranks at the same time."""
    with ThreadPoolExecutor(len(sides)) as pool:
        return list(pool.map(lambda side: side.all_gather({"rank": side.rank, "pair": (1, 2)}, seconds), sides))


def test_all_ranks_get_the_same_payloads_and_old_keys_are_deleted(store):
    sides = handshakes(store, 3)
    want = [{"rank": rank, "pair": [1, 2]} for rank in range(3)]
    for number in range(4):
        assert gather_all(sides) == [want] * 3
        assert [side.next_number for side in sides] == [number + 1] * 3
    assert [sides[0].is_posted(number, 1) for number in range(4)] == [False, False, False, True]


def test_handshakes_of_different_prefixes_do_not_mix(store):
    first, second = handshakes(store, 2, "a"), handshakes(store, 2, "b")
    first[1].post(0, "of a")
    with pytest.raises(AbsentRanksError) as absent:
        second[0].all_gather("of b", 0.2)
    assert absent.value.ranks == (1,)


def test_all_absent_ranks_are_named_after_the_timeout(store):
    sides = handshakes(store, 4)
    sides[2].post(0, "here")
    begin = time.monotonic()
    with pytest.raises(AbsentRanksError, match="rank 1, 3 did not come to exchange 0") as absent:
        sides[0].all_gather("here", 0.3)
    assert absent.value.ranks == (1, 3)
    assert time.monotonic() - begin < 3
    assert sides[0].next_number == 0  # the number stays, so that this rank can still post its reason to leave


def test_rank_0_is_named_when_only_its_verdict_is_missing(store):
    sides = handshakes(store, 2)
    for side in sides:
        side.post(side.begin(), "here")
    with pytest.raises(AbsentRanksError) as absent:
        sides[1].read(0, VERDICT, time.monotonic() + 0.2)
    assert absent.value.ranks == (0,)


def test_posted_payload_is_read_even_after_the_deadline(store):
    sides = handshakes(store, 2)
    sides[1].post(0, "late")
    assert sides[0].read(0, 1, time.monotonic() - 1.0) == "late"


def test_watch_ends_the_wait_for_a_rank_that_has_ended(store):
    watched = []

    def watch(rank):
        watched.append(rank)
        raise LostRankError(f"rank {rank} has ended", (rank,))

    begin = time.monotonic()
    with pytest.raises(LostRankError, match="rank 1 has ended"):
        handshakes(store, 2)[0].all_gather("here", 60.0, watch)
    assert watched == [1]
    assert time.monotonic() - begin < 5


def test_interrupt_ends_the_wait_within_two_seconds(store):
    side = handshakes(store, 2)[0]
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    begin = time.monotonic()
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            side.all_gather("here", 60.0)
        assert time.monotonic() - begin < 2.3
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
