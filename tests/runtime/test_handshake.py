"""The host handshake: payloads of all ranks, few calls of the store, errors that name absent ranks, waits that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as _distributed

from benchmarks.counting_store import CountingStore, MemoryStore
from meshflash.comm.handshake import DisagreementError
from meshflash.engine.agreement import Agreement, MissingRankError
from meshflash.runtime import handshake as module
from meshflash.runtime.handshake import AbsentRanksError, DepartedRankError, Handshake
from meshflash.runtime.liveness import Liveness, LostRankError
from meshflash.runtime.store import BoundedStore, StoreError

dist: Any = _distributed  # torch's stubs do not declare all that this module exports


@pytest.fixture
def store():
    """Return a store on a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def handshakes(store, world, prefix="a"):
    """Return one handshake for each rank, all over the same store."""
    return [Handshake(BoundedStore(store, lambda: 5.0), prefix, rank, world) for rank in range(world)]


def on_all(function, sides):
    """Call a function for all ranks at the same time; return its results, or the exceptions that it raised."""

    def call(side):
        try:
            return function(side)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(sides)) as pool:
        return list(pool.map(call, sides))


def gather_all(sides, seconds=5.0):
    """Run one exchange on all ranks at the same time."""
    return on_all(lambda side: side.all_gather({"rank": side.rank, "pair": (1, 2)}, seconds), sides)


def test_all_ranks_get_the_same_payloads_and_old_keys_are_deleted(store):
    sides = handshakes(store, 3)
    want = [{"rank": rank, "pair": [1, 2]} for rank in range(3)]
    for number in range(4):
        assert gather_all(sides) == [want] * 3
        assert [side.next_number for side in sides] == [number + 1] * 3
    # Three keys of an exchange stand for all ranks; rank 0 deletes those of the exchanges before the last one.
    keys = [[f"a/{number}/{name}" for name in ("payloads", "come", "outcome")] for number in range(4)]
    assert [[store.check([key]) for key in one] for one in keys] == [[False] * 3] * 3 + [[True] * 3]


def test_keys_of_failed_exchanges_are_deleted_after_the_next_answer(store):
    sides = handshakes(store, 2)
    sides[1].leave("no")
    assert isinstance(gather_all(sides[:1])[0], DepartedRankError)
    assert store.check(["a/0/outcome"])
    gather_all(sides)
    assert not any(store.check([f"a/0/{name}"]) for name in ("payloads", "come", "outcome"))


def test_long_payloads_arrive_unchanged(store):
    texts = [f"{rank}\n{'ä  ' * 2000}\u2028" for rank in range(3)]
    assert on_all(lambda side: side.all_gather(texts[side.rank], 5.0), handshakes(store, 3)) == [texts] * 3


def ranks_without_libuv(*knows):
    """Return handshakes over a store without libuv, whose compare_set wakes no client; some ranks know that."""
    limit = timedelta(seconds=10)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit, use_libuv=False)
    clients = [dist.TCPStore("127.0.0.1", host.port, timeout=limit, use_libuv=not known) for known in knows]
    sides = [Handshake(BoundedStore(one, lambda: 5.0), "a", rank, len(knows)) for rank, one in enumerate(clients)]
    return host, sides


@pytest.mark.parametrize("knows", [(True, True, True), (True, False, False)], ids=["all know", "its host knows"])
def test_store_without_libuv_wakes_waiting_ranks_at_once(knows):
    host, sides = ranks_without_libuv(*knows)
    begin = time.monotonic()
    for last in (2, 1, 0):
        with ThreadPoolExecutor(2) as pool:
            early = [pool.submit(side.all_gather, side.rank, 60.0) for side in sides if side.rank != last]
            time.sleep(0.2)
            assert sides[last].all_gather(last, 60.0) == [0, 1, 2]
            assert [each.result() for each in early] == [[0, 1, 2]] * 2
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(side.all_gather, side.rank, 60.0) for side in sides[1:]]
        time.sleep(0.2)
        sides[0].leave("no")
        assert all(isinstance(each.exception(), DepartedRankError) for each in waits)
    assert time.monotonic() - begin < 10
    assert not host.check(["a/0/outcome"])


def test_store_without_libuv_that_no_rank_knows_of_costs_one_timeout():
    host, sides = ranks_without_libuv(False, False)
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(sides[0].all_gather, 0, 0.5)
            time.sleep(0.2)
            assert sides[1].all_gather(1, 0.5) == early.result() == [0, 1]
    with pytest.raises(AbsentRanksError):  # its own outcome ends its wait as well
        sides[0].all_gather(0, 0.2)
    assert isinstance(gather_all(sides[1:])[0], AbsentRanksError)
    assert len(gather_all(sides, 0.5)[0]) == 2
    assert host.check(["a/3/outcome"])


def test_file_store_exchanges_and_ends_waits(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 8)
    sides = handshakes(dist.PrefixStore("group", store), 8)
    want = [{"rank": rank, "pair": [1, 2]} for rank in range(8)]
    for _ in range(3):
        assert gather_all(sides) == [want] * 8
    errors = gather_all(sides[:-1], 0.5)
    assert all(isinstance(error, AbsentRanksError) and error.ranks == (7,) for error in errors)


def test_handshakes_of_different_prefixes_do_not_mix(store):
    first, second = handshakes(store, 2, "a"), handshakes(store, 2, "b")
    first[1].leave("of a")
    with pytest.raises(AbsentRanksError) as absent:
        second[0].all_gather("of b", 0.2)
    assert absent.value.ranks == (1,)


def test_all_absent_ranks_are_named_after_the_timeout_also_by_a_late_one(store):
    sides = handshakes(store, 4)
    begin = time.monotonic()
    errors = on_all(lambda side: side.all_gather("here", 0.3), [sides[0], sides[2]])
    assert time.monotonic() - begin < 3
    for error in [*errors, *gather_all(sides[3:])]:
        assert isinstance(error, AbsentRanksError)
        assert str(error) == "rank 1, 3 did not come to exchange 0"
        assert error.ranks == (1, 3)
    # A failed exchange takes its number: its outcome tells late ranks why, and the next exchange may succeed.
    gather_all(sides[1:2])
    assert gather_all(sides)[0][3] == {"rank": 3, "pair": [1, 2]}


def test_ranks_that_all_came_answer_themselves_if_the_last_one_is_lost_before_its_answer(store, monkeypatch):
    sides = handshakes(store, 3)
    lost = Handshake._end

    def end(self, number, outcome, store=None, wake=False):
        if self.rank == 2:
            raise SystemExit  # after its payload, before its answer
        return lost(self, number, outcome, store, wake)

    monkeypatch.setattr(Handshake, "_end", end)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(side.all_gather, side.rank, 1.0) for side in sides[:2]]
        time.sleep(0.3)
        with pytest.raises(SystemExit):
            sides[2].all_gather(2, 1.0)
        assert [each.result() for each in others] == [[0, 1, 2]] * 2


def test_answer_that_is_there_already_is_read_even_after_the_deadline(store):
    sides = handshakes(store, 2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sides[1].all_gather, "early", 5.0)
        time.sleep(0.2)
        assert sides[0].all_gather("late", -1.0) == first.result() == ["late", "early"]


def test_rank_that_leaves_ends_the_exchange_of_all_at_once(store):
    sides = handshakes(store, 3)
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(sides[0].all_gather, "here", 60.0)
        sides[1].leave({"why": "no memory"})
        with pytest.raises(DepartedRankError, match="rank 1 left exchange 0") as departed:
            waits.result()
    assert time.monotonic() - begin < 5
    assert departed.value.ranks == (1,)
    assert departed.value.reason == {"why": "no memory"}


def test_watch_ends_the_wait_for_a_rank_that_has_ended_on_all_ranks(store):
    """The watch of one rank sees the end; the other ranks, which see nothing, get the same reason."""
    watched = []

    def watch():
        watched.append(1)
        raise LostRankError("rank 1 has ended", (1,))

    sides = handshakes(store, 3)
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(sides[2].all_gather, "here", 60.0)
        with pytest.raises(LostRankError, match=r"^rank 1 has ended$"):
            sides[0].all_gather("here", 60.0, watch)
        with pytest.raises(DepartedRankError) as departed:
            other.result()
    assert departed.value.reason == {"lost": "rank 1 has ended", "ranks": [1]}
    assert watched == [1]
    assert time.monotonic() - begin < 5


def test_watch_of_the_client_ends_a_wait_that_has_none_of_its_own(store):
    def watch():
        raise LostRankError("rank 0 hosted the store", (0,))

    with pytest.raises(LostRankError, match="hosted the store"):
        Handshake(BoundedStore(store, lambda: 5.0, watch), "a", 1, 2).all_gather("here", 60.0)


def test_reason_of_a_rank_counts_more_than_its_end(store):
    sides = handshakes(store, 2)

    def watch():
        sides[1].leave("no memory")  # and then it ended
        raise LostRankError("rank 1 has ended", (1,))

    with pytest.raises(DepartedRankError, match="no memory"):
        sides[0].all_gather("here", 60.0, watch)


def interrupt_after(seconds):
    """Send Ctrl-C to the main thread after some seconds; return the timer."""
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    return timer


@pytest.fixture
def interruptible():
    """Let Ctrl-C raise KeyboardInterrupt, as in a script."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_ends_the_wait_within_two_seconds(store, interruptible):
    sides = handshakes(store, 3)
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(sides[1].all_gather, "here", 60.0)
        timer = interrupt_after(0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                sides[0].all_gather("here", 60.0)
            assert time.monotonic() - begin < 2.3
        finally:
            timer.cancel()
        # The others are told, and wait no longer than the interrupted rank.
        with pytest.raises(DepartedRankError) as departed:
            other.result()
    assert time.monotonic() - begin < 5
    assert departed.value.reason == {"raised": "KeyboardInterrupt"}


def test_exit_of_the_interpreter_during_a_wait_does_not_blame_ranks_that_are_still_to_come(store, monkeypatch):
    sides = handshakes(store, 3)
    with monkeypatch.context() as patch:
        exiting = threading.Event()
        exiting.set()
        patch.setattr("meshflash.runtime.store._exiting", exiting)
        with pytest.raises(RuntimeError, match="interpreter of this rank exits"):
            sides[0].all_gather("here", 60.0)
    for error in gather_all(sides[1:], 60.0):
        assert isinstance(error, DepartedRankError)
        assert error.ranks == (0,)
        assert error.reason == {"raised": "RuntimeError: the interpreter of this rank exits"}


HOST = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host():
    """Start a process that hosts a store; return the process and a client."""
    process = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        yield process, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()


def test_stopped_store_ends_the_wait_in_time(host, interruptible):
    process, store = host
    first, second = handshakes(store, 2, "a")[0], handshakes(store, 2, "b")[0]
    timer = threading.Timer(0.3, os.kill, (process.pid, signal.SIGSTOP))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(StoreError, match=r"did not answer within 4 s: its process may be stopped"):
        first.all_gather("here", 1.0)
    assert time.monotonic() - begin < 1.0 + module.ROLL_CALL_SECONDS + 2.0
    # Ctrl-C ends a rank that waits for a stopped store, too.
    timer = interrupt_after(0.3)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        second.all_gather("here", 60.0)
    assert time.monotonic() - begin < 2.3


def test_killed_store_ends_the_wait_at_once(host):
    process, store = host
    threading.Timer(0.3, process.kill).start()
    begin = time.monotonic()
    with pytest.raises(StoreError, match="is gone"):
        handshakes(store, 2)[0].all_gather("here", 60.0)
    assert time.monotonic() - begin < 5


def test_waiting_prints_no_warnings_of_torch(tmp_path):
    """torch's client prints two lines whenever a wait of its own times out."""
    script = tmp_path / "wait.py"
    script.write_text(
        "from datetime import timedelta\n"
        "from torch.distributed import TCPStore\n"
        "from meshflash.runtime.handshake import AbsentRanksError, Handshake\n"
        "from meshflash.runtime.store import BoundedStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))\n"
        "try:\n"
        "    Handshake(BoundedStore(store, lambda: 5.0), 'a', 0, 2).barrier(2.0)\n"
        "except AbsentRanksError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "rank 1 did not come to exchange 0\n", "")


def counted_ranks(world, make=MemoryStore):
    """Return the handshakes of ranks over one store in memory, and the traffic of each."""
    shared = make()
    stores = [CountingStore(shared) for _ in range(world)]
    sides = [Handshake(BoundedStore(store, lambda: 20.0), "a", rank, world) for rank, store in enumerate(stores)]
    traffics = [store.traffic for store in stores]
    for traffic in traffics:
        traffic.clear()
    return sides, traffics, shared


@pytest.fixture(scope="module")
def here():
    """Return a Liveness for all ranks of a test."""
    found = Liveness("127.0.0.1")
    yield found
    found.close()


def agree_all(agreements, fields, odd=None, other=None):
    """Let all ranks agree at the same time, one of them with other fields; return None or the error of each."""
    each = [fields | (other or {} if rank == odd else {}) for rank in range(len(agreements))]
    return on_all(lambda rank: agreements[rank].agree(each[rank]), range(len(agreements)))


@pytest.mark.parametrize(("world", "make"), [(2, dist.HashStore), (16, dist.HashStore), (64, MemoryStore)])
def test_new_kind_of_call_takes_at_most_four_calls_of_the_store_a_rank(world, make, here):
    sides, traffics, shared = counted_ranks(world, make)
    agreements = [Agreement(side, range(world), here, "test/1") for side in sides]
    assert agree_all(agreements, {"scale": 0.0}) == [None] * world
    for number in range(1, 4):
        for traffic in traffics:
            traffic.clear()
        assert agree_all(agreements, {"scale": 1.0 / number, "mask": "causal"}) == [None] * world
        assert max(traffic.num_calls for traffic in traffics[1:]) <= 4
        assert max(traffic.num_requests for traffic in traffics[1:]) <= 5  # 4 but for the last rank to come
        assert traffics[0].num_calls <= 4 + 3  # and the keys of the exchange before
        assert sum(traffic.num_calls for traffic in traffics) == 3 * world + 1 + 3
        names = {"append": 1, "add": 1, "get": 1}
        assert sum(dict(traffic.calls) == names for traffic in traffics) >= world - 2
    assert shared.num_keys() <= 3 + 1  # HashStore counts one more of its own


@pytest.mark.parametrize("world", [2, 16, 64])
def test_all_gather_takes_at_most_four_calls_of_the_store_a_rank(world):
    sides, traffics, _ = counted_ranks(world)
    want = [{"rank": rank, "pair": [1, 2]} for rank in range(world)]
    assert gather_all(sides, 20.0) == [want] * world
    assert max(traffic.num_calls for traffic in traffics) <= 4
    assert sum(traffic.num_calls for traffic in traffics) == 3 * world + 1
    size = len(str(want))
    assert all(traffic.received < 3 * size for traffic in traffics)  # one combined value a rank


def test_waiting_for_a_late_rank_takes_no_more_calls():
    sides, traffics, _ = counted_ranks(4)
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(side.all_gather, side.rank, 20.0) for side in sides[:3]]
        time.sleep(1.5)
        assert sides[3].all_gather(3, 20.0) == [0, 1, 2, 3]
        assert [each.result() for each in early] == [[0, 1, 2, 3]] * 3
    assert [traffic.num_calls for traffic in traffics] == [3, 3, 3, 4]


@pytest.mark.parametrize("value", ["long" * 500, 7], ids=["digest", "text"])
def test_disagreement_of_64_ranks_names_rank_and_field(here, value):
    sides, traffics, _ = counted_ranks(64)
    agreements = [Agreement(side, [100 + rank for rank in range(64)], here, "test/2") for side in sides]
    fields = {"scale": 0.5, "layout": "long" * 499 + "x", "heads": 8}
    errors = agree_all(agreements, fields, 41, {"layout": value})
    assert len({str(error) for error in errors}) == 1
    assert all(type(error) is DisagreementError for error in errors)
    assert str(errors[0]).startswith('ranks disagree in layout: rank 100 has "longlong')
    assert f", rank 141 has {7 if value == 7 else chr(34) + 'long'}" in str(errors[0])
    assert max(traffic.num_calls for traffic in traffics) <= 4
    assert agree_all(agreements, fields) == [None] * 64  # the next call works


def test_absent_ranks_of_64_are_named_by_all_others(here, monkeypatch):
    monkeypatch.setenv("MESHFLASH_TIMEOUT", "1")
    sides, traffics, _ = counted_ranks(64)
    absent = (0, 17, 40)
    agreements = [Agreement(side, range(64), here, "test/3") for side in sides if side.rank not in absent]
    begin = time.monotonic()
    errors = on_all(lambda agreement: agreement.agree({"scale": 0.5}), agreements)
    assert time.monotonic() - begin < 10
    assert all(type(error) is MissingRankError for error in errors)
    assert {str(error).partition(".")[0] for error in errors} == {
        "rank 0, 17, 40 did not come to handshake 0 within 1 s"
    }
    assert max(traffic.num_calls for traffic in traffics) <= 5  # those that find out who is absent


def test_rank_interrupted_after_the_first_answer_joins_the_next_agreement(here, monkeypatch):
    sides, _, _ = counted_ranks(3)
    agreements = [Agreement(side, range(3), here, "test/5") for side in sides]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        others = [pool.submit(agreement.agree, {"scale": 0.5}) for agreement in agreements[1:]]
        time.sleep(0.2)
        patch.setattr(sides[0], "_discard_before", interrupt)  # rank 0 alone does it, once there is an answer
        with pytest.raises(KeyboardInterrupt):
            agreements[0].agree({"scale": 0.5})
        assert [each.result() for each in others] == [None] * 2
    for number in range(2):
        assert agree_all(agreements, {"scale": 0.25 / (number + 1)}) == [None] * 3


def test_error_before_the_handshake_reaches_63_others(here):
    sides, traffics, _ = counted_ranks(64)
    agreements = [Agreement(side, range(64), here, "test/4") for side in sides]
    agreements[5].broadcast_error(ValueError("q has 5 tokens"))
    errors = on_all(lambda agreement: agreement.agree({"scale": 0.5}), agreements[:5] + agreements[6:])
    assert {str(error) for error in errors} == {"rank 5 raised: q has 5 tokens"}
    assert traffics[5].num_calls == 1
