"""What a host handshake costs: seconds over a real TCPStore, and calls of the store counted for thousands of ranks.

Ranks are threads of a few processes. Each has connections of its own and runs the code of a real rank: `Agreement` for
calls of `attention`, `Handshake.all_gather` for the exchange of `init`. Only process groups are missing.
"""

from __future__ import annotations

import copy
import multiprocessing
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

from torch import distributed as _distributed

from benchmarks.counting_store import CountingStore, MemoryStore, Traffic
from benchmarks.protocol import Rows, one_table
from meshflash.bench.columns import Column, optional
from meshflash.bench.measure import Say
from meshflash.comm.handshake import DisagreementError
from meshflash.engine.agreement import Agreement
from meshflash.runtime import handshake
from meshflash.runtime.devices import RankInfo
from meshflash.runtime.handshake import Handshake
from meshflash.runtime.liveness import Liveness
from meshflash.runtime.store import BoundedStore, PendingRead, Worker
from meshflash.runtime.world import write_rank_info

dist: Any = _distributed  # torch's stubs do not declare all that this module exports

#: The exchanges that are measured, in this order.
INIT, FIRST, NEW = "init", "first call", "new call"
#: The stores: a real TCPStore, or a MemoryStore.
TCP, MEMORY = "TCP", "memory"
#: Processes over which the threads of ranks are spread.
PROCESSES = 4
#: Seconds between an order and the moment at which all ranks begin: all threads must have woken up by then.
LEAD_SECONDS = 0.5
#: Seconds after which a rank gives up.
TIMEOUT_SECONDS = 120.0
#: Bytes of the stack of a thread: thousands of threads must fit into memory.
STACK_BYTES = 2**18
#: The fields of a call of `attention` over a packed sequence, as long as the engine's.
FIELDS = {
    "schedule": "zigzag",
    "scale": 0.08838834764831845,
    "softcap": 0.0,
    "dropout": 0.0,
    "q_offset": 0,
    "batch_offset": 0,
    "head_offset": 0,
    "kernel": "auto",
    "transport": "auto",
    "deterministic": False,
    "reduce_dtype": "",
    "version": "0.1.0",
    "layout": "zigzag 16777216 4096",
    "key layout": "zigzag 16777216 4096",
    "return_lse": False,
    "mask": "causal & documents(1000)",
    "mask's documents": ["integers [1001] " + 64 * "0"],
    "batch": 1,
    "heads": 32,
    "key heads": 8,
    "dim": 128,
    "value dim": 128,
    "dtype": "torch.bfloat16",
    "device": "cuda",
    "seed": 0,
    "alibi_slopes": "none",
    "sink_logits": "none",
    "autograd": "records the call",
    "groups": ["mesh"],
}


@dataclass(frozen=True)
class HandshakeRow:
    """One exchange of all ranks.

    `calls` and `bytes` are the most of any rank but rank 0, calls of torch's store and bytes of keys and values.
    `seconds` is None where they were only counted, in memory.
    """

    exchange: str
    clients: int
    store: str
    processes: int
    rounds: int
    seconds: float | None
    max_seconds: float | None
    calls: int
    rank_0_calls: int
    all_calls: int
    sent_bytes: int
    received_bytes: int


class InlineStore(BoundedStore):
    """A client that calls the store in its caller's thread: a worker for each of thousands of ranks is too much."""

    def _call(self, function: Callable[[], Any]) -> Any:
        return function()

    def begin_read(self, key: str) -> PendingRead:
        """Return a read that waits only in `result`."""
        return PendingRead(_InlineWorker(partial(self._store.get, key)), lambda error: None)


class _InlineWorker(Worker):
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def result(self, seconds: float, watch: Callable[[], None] | None = None) -> Any:
        return self._function()


class Rank:
    """One rank of the benchmark: its connection, and its side of each exchange."""

    def __init__(
        self, client: type[BoundedStore], store: CountingStore, rank: int, world: int, liveness: Liveness
    ) -> None:
        """Connect as `init` and `GroupContext` do.

        Args:
            client: The class of clients.
            store: This rank's own client of the store.
            rank: This rank.
            world: The number of ranks.
            liveness: Looks for lost processes; one for all ranks of a process.
        """
        self.rank, self.traffic = rank, store.traffic
        liveness = copy.copy(liveness)  # each rank has an address of its own, which does not compress
        liveness.address = ("10.0.0.1", rank % 65536, secrets.token_hex(16), f"node{rank // 8:04d}", rank)
        bounded = client(store, lambda: TIMEOUT_SECONDS)
        self._info = Handshake(bounded, "info", rank, world)
        self._agreement = Agreement(Handshake(bounded, "calls", rank, world), range(world), liveness, "benchmark")
        cores, near = tuple(range(64)), tuple(range(8 * (rank % 8), 8 * (rank % 8) + 8))
        device = f"GPU-{secrets.token_hex(16)}"
        info = RankInfo(f"node{rank // 8:04d}", "cuda", device, ("nccl", "gloo"), cores, near, liveness.address)
        self._payload = write_rank_info(info)
        self._number, self._world = 0, world

    def run(self, exchange: str, begin_at: float) -> tuple[int, float, Traffic]:
        """Take part in an exchange that begins at a moment of `time.monotonic`; return rank, end and traffic."""
        self.traffic.clear()
        self._number += 1
        time.sleep(max(0.0, begin_at - time.monotonic()))
        if exchange == INIT:
            gathered = self._info.all_gather(self._payload, TIMEOUT_SECONDS)
            assert len(gathered) == self._world, f"{len(gathered)} payloads of {self._world} ranks"
        else:
            self._agreement.agree(FIELDS | {"scale": 1.0 / self._number})
        return self.rank, time.monotonic(), Traffic(self.traffic.calls.copy(), self.traffic.sent, self.traffic.received)

    def disagree(self, odd: int) -> str:
        """Call with another scale on one rank; return the message of the error."""
        try:
            self._agreement.agree(FIELDS | {"scale": 2.0 if self.rank == odd else 1.0})
        except DisagreementError as error:
            return str(error)
        return ""


class _Ranks:
    """Some ranks as threads of this process."""

    def __init__(
        self, connect: Callable[[], Any], ranks: Sequence[int], world: int, client: type[BoundedStore] = BoundedStore
    ) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            self._pool = ThreadPoolExecutor(len(ranks))
            self.liveness = Liveness("127.0.0.1")
            make = lambda rank: Rank(client, CountingStore(connect()), rank, world, self.liveness)  # noqa: E731
            self._ranks = list(self._pool.map(make, ranks))
        finally:
            threading.stack_size(before)

    def run(self, exchange: str, begin_at: float) -> list[tuple[int, float, Traffic]]:
        return list(self._pool.map(lambda rank: rank.run(exchange, begin_at), self._ranks))

    def disagree(self, odd: int) -> list[str]:
        return list(self._pool.map(lambda rank: rank.disagree(odd), self._ranks))

    def close(self) -> None:
        self._pool.shutdown()
        self.liveness.close()


def _serve(pipe: Any, port: int, ranks: Sequence[int], world: int) -> None:
    """Run some ranks in a process of their own, as the orders in a pipe say; an empty order ends it."""
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    own = _Ranks(lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit), ranks, world)
    pipe.send("connected")
    while order := pipe.recv():
        name, *arguments = order
        pipe.send(getattr(own, name)(*arguments))
    own.close()


def run(clients: Sequence[int], counted: Sequence[int], rounds: int, say: Say) -> Iterator[list[HandshakeRow]]:
    """Yield the rows of each number of ranks; AssertionError if a disagreement of one rank is not named by all.

    Args:
        clients: Numbers of ranks that exchange over a real TCPStore, and are timed.
        counted: Numbers of ranks that exchange over a store in memory, whose calls are only counted.
        rounds: The number of timed handshakes of new kinds of calls.
        say: A function that is called with progress messages.
    """
    for world in clients:
        say(f"{world:,} clients connect")
        yield _over_tcp(world, rounds, say)
    for world in counted:
        say(f"{world:,} ranks in memory")
        yield _in_memory(world)


def _over_tcp(world: int, rounds: int, say: Say) -> list[HandshakeRow]:
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    number = min(PROCESSES, world)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # import torch once
    pipes, processes = [], []
    try:
        for n in range(number):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, store.port, range(n, world, number), world))
            process.start()
            theirs.close()
            pipes.append(pipe)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()  # all ranks of a process have connected

        def order(name: str, *arguments: Any) -> list[Any]:
            for pipe in pipes:
                pipe.send((name, *arguments))
            return [one for pipe in pipes for one in pipe.recv()]

        rows = _measure(order, world, TCP, number, rounds, say)
        for pipe in pipes:
            pipe.send(())
        return rows
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()


def _in_memory(world: int) -> list[HandshakeRow]:
    shared, before = MemoryStore(), sys.getswitchinterval()
    # A thread that waits for Python's lock asks for it once in an interval; thousands of them would do little else.
    sys.setswitchinterval(10.0)
    try:
        ranks = _Ranks(lambda: shared, range(world), world, InlineStore)
        # Each rank would decode the payloads of all others, which takes minutes and no call of the store.
        ranks.liveness.know = lambda peers: None  # type: ignore[method-assign]
        decode = handshake._decode
        handshake._decode = lru_cache(1)(decode)
        try:
            order = lambda name, *arguments: getattr(ranks, name)(*arguments)  # noqa: E731
            return _measure(order, world, MEMORY, 1, 1, lambda _: None)
        finally:
            handshake._decode = decode
            ranks.close()
    finally:
        sys.setswitchinterval(before)


def _measure(
    order: Callable[..., list[Any]], world: int, store: str, processes: int, rounds: int, say: Say
) -> list[HandshakeRow]:
    rows = []
    for exchange, number in ((INIT, 1), (FIRST, 1), (NEW, rounds)):
        seconds, found = [], []
        for n in range(number):
            say(f"{world:,} clients, {exchange}: round {n + 1} of {number}")
            begin_at = time.monotonic() + LEAD_SECONDS
            found = order("run", exchange, begin_at)
            seconds.append(max(end for _, end, _ in found) - begin_at)
        rows.append(_row(exchange, world, store, processes, seconds, {rank: traffic for rank, _, traffic in found}))
    odd = world // 2
    messages = set(order("disagree", odd))
    (message,) = messages  # all ranks have the same
    assert message.startswith(f"ranks disagree in scale: rank 0 has 1.0, rank {odd} has 2.0"), message
    return rows


def _row(
    exchange: str, world: int, store: str, processes: int, seconds: Sequence[float], traffics: dict[int, Traffic]
) -> HandshakeRow:
    others = [traffic for rank, traffic in traffics.items() if rank]
    timed = store == TCP  # threads of one process take turns: their time says nothing
    return HandshakeRow(
        exchange=exchange,
        clients=world,
        store=store,
        processes=processes,
        rounds=len(seconds),
        seconds=statistics.median(seconds) if timed else None,
        max_seconds=max(seconds) if timed else None,
        calls=max(traffic.num_calls for traffic in others),
        rank_0_calls=traffics[0].num_calls,
        all_calls=sum(traffic.num_calls for traffic in traffics.values()),
        # The rank that answers reads and writes more; the median is what a rank pays.
        sent_bytes=int(statistics.median(traffic.sent for traffic in others)),
        received_bytes=int(statistics.median(traffic.received for traffic in others)),
    )


COLUMNS = (
    Column("clients", lambda row: f"{row['clients']:,}", is_text=True, once=True),
    Column("store", "store", is_text=True, once=True),
    Column("exchange", "exchange", is_text=True),
    Column("seconds", optional("seconds", "{:.2f}")),
    Column("calls\na rank", "calls"),
    Column("calls of\nrank 0", "rank_0_calls"),
    Column("calls\nin all", lambda row: f"{row['all_calls']:,}"),
    Column("sent\n(B)", lambda row: f"{row['sent_bytes']:,}"),
    Column("received\n(B)", lambda row: f"{row['received_bytes']:,}"),
)
CAPTION = (
    "seconds: until the last rank has the answer, median of rounds; calls: of torch's store, the most of any rank but "
    "rank 0; bytes: keys and values, median of ranks; init: what ranks know of themselves; first call: also addresses "
    "for probes; new call: a kind of call that ranks have not made before"
)


def title(rows: Rows) -> str:
    """Return what was measured, in words."""
    processes = max(row["processes"] for row in rows)
    return f"host handshakes over torch's store, ranks as threads of {processes} process{'es' * (processes > 1)}"


BENCHMARK = one_table("handshake", {"exchange", "clients", "calls", "rank_0_calls"}, COLUMNS, title, "clients", CAPTION)
