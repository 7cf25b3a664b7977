"""The exchange between the ranks of a checkpoint: slow work never times out, and lost ranks are named."""

from __future__ import annotations

import os
import time

import pytest

from meshflash.train.checkpoint_ranks import LostRankError, Ranks


def slow_and_silent(rank, world, group):
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
            time.sleep(3.0)  # as one that was stopped
            return found, slow, "", 0.0
        begin = time.monotonic()
        with pytest.raises(LostRankError) as error:
            ranks.exchange(rank)
        return found, slow, str(error.value), time.monotonic() - begin
    finally:
        del os.environ["MESHFLASH_TIMEOUT"]


def test_slow_ranks_are_awaited_and_stopped_ranks_are_named(pool):
    for rank, (found, slow, message, seconds) in enumerate(pool.run(3, slow_and_silent)):
        assert found == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert slow > 2.0
        if rank != 2:
            assert message.startswith("rank 2 was lost or did not answer within 1 s")
            assert seconds < 2.9


def one_fails(rank, world, group):
    def work():
        if rank == 1:
            raise OSError("stale file handle")
        return rank

    with pytest.raises(RuntimeError, match=r"rank 1 .*stale file handle"):
        Ranks(None).gather(work)


def test_work_that_fails_on_one_rank_fails_on_all(pool):
    pool.run(2, one_fails)
