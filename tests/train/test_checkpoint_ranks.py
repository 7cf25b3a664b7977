"""The exchange between ranks that save a checkpoint: slow work does not time out, lost ranks are named."""

from __future__ import annotations

import os
import time

import pytest

from meshflash.train.checkpoint_ranks import LostRankError, Ranks


def gather_with_slow_and_stopped_ranks(rank, world, group):
    """Return results, time and error of an exchange in which rank 1 is slow and rank 2 then stops."""
    os.environ["MESHFLASH_TIMEOUT"] = "1"
    try:
        ranks = Ranks(None)
        begin = time.monotonic()

        def work():
            time.sleep(2.5 * (rank == 1))
            return {"rank": rank}

        found = ranks.gather(work)
        slow = time.monotonic() - begin
        if rank == 2:
            time.sleep(3.0)  # as a stopped rank does
            return found, slow, "", 0.0
        begin = time.monotonic()
        with pytest.raises(LostRankError) as error:
            ranks.exchange(rank)
        return found, slow, str(error.value), time.monotonic() - begin
    finally:
        del os.environ["MESHFLASH_TIMEOUT"]


def test_slow_ranks_are_awaited_and_stopped_ranks_are_named(pool):
    for rank, (found, slow, message, seconds) in enumerate(pool.run(3, gather_with_slow_and_stopped_ranks)):
        assert found == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert slow > 2.0
        if rank != 2:
            assert message.startswith("rank 2 was lost or did not answer within 1 s")
            assert seconds < 2.9


def gather_with_failing_rank(rank, world, group):
    """Assert that an error of rank 1 raises on all ranks."""

    def work():
        if rank == 1:
            raise OSError("stale file handle")
        return rank

    with pytest.raises(RuntimeError, match=r"rank 1 .*stale file handle"):
        Ranks(None).gather(work)


def test_work_that_fails_on_one_rank_fails_on_all(pool):
    pool.run(2, gather_with_failing_rank)
