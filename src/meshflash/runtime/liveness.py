"""Liveness: find out which rank failed first, and notify all ranks before any of them raises.

A rank that loses a connection cannot tell a peer that died from a peer that left because a third rank had died. So
each rank runs a thread that answers probes, whatever its main thread waits for:

- Each process listens at a port of its own. Its address (host, port, random token, host name, pid) reaches the peers
  through the store: in the `RankInfo` of `init`, and in the first handshake of a process group.
- A probe is one TCP connection: one line of JSON {token, scope} there, one line {status, cause} back. A message
  {token, scope, cause} is a probe that also tells the cause. A connection without the right token gets no answer.
- A probe has three outcomes: the process has ended (connection refused), it is stopped or unreachable (no answer
  within PROBE_SECONDS), or it answers which call it is in.
- The first cause wins. A rank that finds a cause (`find`, `find_ended`) or fails itself sends the cause to all peers
  before it raises (`blame`). A rank that knows a cause reports that one, whatever it has seen itself.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshflash.runtime.hosts import host_name, is_loopback, reachable_address

#: Seconds that a rank has to answer a probe. Its thread needs the GIL, which it gets late on a loaded host.
PROBE_SECONDS = 4.0
#: The scope of causes that concern the whole job.
JOB = "job"
#: Ranks that are probed at the same time.
MAX_PARALLEL_PROBES = 32
#: Bytes of a message, and characters of a text in it, at most.
MAX_MESSAGE_BYTES, MAX_TEXT = 4096, 500
#: How a rank was lost, the most certain first.
ENDED, STOPPED = "was lost: its process has ended", "was lost: its process is stopped"
SILENT = "was lost: its process does not answer"
_BY_CERTAINTY = (ENDED, STOPPED, SILENT)
#: States in /proc/<pid>/stat of a process that has ended: none, zombie, dead.
_ENDED_STATES = ("", "Z", "X")


@dataclass(frozen=True)
class Address:
    """The address at which a rank answers probes (host, port), the token it requires, and its process (node, pid)."""

    host: str
    port: int
    token: str
    node: str
    pid: int

    @staticmethod
    def read(given: Any) -> Address | None:
        """Return an address from what `Liveness.address` wrote; None for anything else."""
        try:
            host, port, token, node, pid = given
            return Address(str(host), int(port), str(token), str(node), int(pid))
        except (TypeError, ValueError):
            return None


class LostRankError(RuntimeError):
    """A rank was lost, or did not answer in time. The message names it; `ranks` are the ranks that it may be."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Cause:
    """The rank that failed first, and how."""

    rank: int
    reason: str
    #: Whether the rank still answers probes, and is told the cause as well.
    answers: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


@dataclass(frozen=True)
class Status:
    """The activity of a rank in a process group: a text, the passes begun, and the direction of the last pass."""

    doing: str = "has made no call yet"
    passes: int = 0
    direction: str = ""


class Liveness:
    """This process's side of the liveness protocol: it answers probes and remembers the first cause.

    `liveness()` makes one for each process. Causes are kept by scope, which is the process group that a rank failed in,
    or JOB: another group may go on without that rank.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self.token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._causes: dict[str, Cause] = {}
        #: The addresses of other ranks, by their number in the whole job.
        self.peers: dict[int, Address] = {}
        #: What this rank is doing, by scope.
        self.status: dict[str, Status] = {}
        address, port = self._listener.getsockname()[:2]
        self._node = host_name()  # kept: it reads a file, and handshakes compare it with the nodes of all ranks
        self.address = (address, port, self.token, self._node, os.getpid())
        self._thread = threading.Thread(target=self._serve, daemon=True, name="meshflash liveness")
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a cause is known in any scope."""
        return bool(self._causes)

    def cause(self, scope: str) -> Cause | None:
        """Return the first cause that this rank has found or was told; None if it knows of none."""
        return self._causes.get(scope)

    def know(self, peers: Mapping[int, Any]) -> None:
        """Remember where other ranks answer probes.

        Args:
            peers: Addresses as `Liveness.address` wrote them, by rank in the whole job.
        """
        for rank, given in peers.items():
            address = Address.read(given)
            # A loopback address of another host would lead to a process of this one.
            if address is not None and (address.node == self._node or not is_loopback(address.host)):
                self.peers[rank] = address

    def find(self, scope: str, ranks: Iterable[int]) -> tuple[Cause | None, dict[int, Status]]:
        """Probe ranks. Return the first cause, if one is known now, and the status of each rank that answered.

        A cause that this rank finds by itself is sent to all ranks before this returns.

        Args:
            scope: The process group that the cause concerns, or JOB.
            ranks: The ranks to probe, as the whole job numbers them. Ranks without a known address are skipped.
        """
        if scope in self._causes:
            return self._causes[scope], {}
        ranks = [rank for rank in ranks if rank in self.peers and self.peers[rank].token != self.token]
        answers: dict[int, Status] = {}
        lost: list[Cause] = []
        for rank, answer in self._probe_all(ranks, {"scope": scope}):
            if isinstance(answer, str):
                lost.append(Cause(rank, answer))
            elif answer.get("cause"):
                self._record(scope, answer["cause"])
            else:
                answers[rank] = _status(answer.get("status"))
        # A peer that knows the cause has told it. Otherwise blame the rank whose loss is most certain: a rank that
        # is merely silent may be busy.
        if scope not in self._causes and lost:
            self.blame(scope, min(lost, key=_uncertainty))
        return self._causes.get(scope), answers

    def find_ended(self, scope: str, rank: int) -> Cause | None:
        """Blame a rank if its process has certainly ended: it ran on this host, and is gone. Return the cause or None.

        Only the process table is proof. A process that does not answer a probe may be busy, and one of another host
        may be behind a firewall.

        Args:
            scope: The process group that the cause concerns, or JOB.
            rank: The rank to look at, as the whole job numbers it.
        """
        address = self.peers.get(rank)
        if address is None or address.node != self._node or _state(address) not in _ENDED_STATES:
            return None
        return self.blame(scope, Cause(rank, ENDED))

    def blame(self, scope: str, cause: Cause) -> Cause:
        """Record a cause and send it to all ranks, unless an earlier cause is known. Return the one that counts.

        Args:
            scope: The process group that the cause concerns, or JOB.
            cause: The rank that failed, and how.
        """
        with self._lock:
            known = self._causes.setdefault(scope, cause)
        if known is cause:
            others = [
                rank
                for rank, peer in self.peers.items()
                if peer.token != self.token and (rank != cause.rank or cause.answers)
            ]
            for _ in self._probe_all(others, {"scope": scope, "cause": [cause.rank, cause.reason]}):
                pass  # a rank that cannot be told is lost, or will find the cause by itself
        return known

    def reset(self) -> None:
        """Forget all peers, causes and statuses: this process joins another job, or none."""
        with self._lock:
            self.peers = {}
            self._causes.clear()
            self.status.clear()

    def clear(self, scope: str) -> None:
        """Forget the cause of a scope: a new process group has this name."""
        with self._lock:
            self._causes.pop(scope, None)

    def close(self) -> None:
        """Stop answering probes."""
        with contextlib.suppress(OSError):  # some systems refuse it while no client is connected
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _record(self, scope: str, given: Any) -> None:
        try:
            rank, reason = given
            cause = Cause(int(rank), str(reason))
        except (TypeError, ValueError):
            return
        with self._lock:
            self._causes.setdefault(scope, cause)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                with connection:
                    connection.settimeout(1.0)
                    self._answer(connection)
            except (OSError, ValueError):
                continue

    def _answer(self, connection: socket.socket) -> None:
        given = _receive(connection)
        # Compare in constant time, and answer nothing to a stranger: not even that the token is wrong.
        if not isinstance(given, dict) or not hmac.compare_digest(str(given.get("token", "")), self.token):
            return
        scope = str(given.get("scope", ""))
        if given.get("cause"):
            self._record(scope, given["cause"])
        cause = self._causes.get(scope)
        status = self.status.get(scope, Status())
        answer = {
            "status": [status.doing[:MAX_TEXT], status.passes, status.direction],
            "cause": [cause.rank, cause.reason[:MAX_TEXT]] if cause else None,
        }
        connection.sendall(json.dumps(answer).encode() + b"\n")

    def _probe_all(self, ranks: Sequence[int], message: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """Yield each rank with its answer; or with a text that says how it was lost."""
        if not ranks:
            return
        with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL_PROBES, len(ranks))) as pool:
            yield from zip(ranks, pool.map(lambda rank: self._probe(rank, message), ranks), strict=True)

    def _probe(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | str:
        address = self.peers[rank]
        try:
            with socket.create_connection((address.host, address.port), PROBE_SECONDS) as connection:
                connection.sendall(json.dumps({"token": address.token, **message}).encode() + b"\n")
                answer = _receive(connection)
                return answer if isinstance(answer, dict) else {}
        except (OSError, ValueError) as error:
            return _how_lost(address, error)


def _how_lost(address: Address, error: Exception) -> str:
    """Return how a rank was lost that did not answer a probe."""
    if address.node == host_name():
        state = _state(address)
        if state in _ENDED_STATES:
            return ENDED
        if state in ("T", "t"):
            return STOPPED
    if isinstance(error, ConnectionError | ValueError):  # its port is closed, or another process has it
        return ENDED
    return SILENT if isinstance(error, TimeoutError) else f"was lost: it cannot be reached ({error})"


def _uncertainty(cause: Cause) -> int:
    """Return how uncertain a loss is: 0 for a process that has ended, most for one that cannot be reached."""
    return _BY_CERTAINTY.index(cause.reason) if cause.reason in _BY_CERTAINTY else len(_BY_CERTAINTY)


def _status(given: Any) -> Status:
    try:
        doing, passes, direction = given
        return Status(str(doing), int(passes), str(direction))
    except (TypeError, ValueError):
        return Status()


def _receive(connection: socket.socket) -> Any:
    """Return one line of JSON; ValueError for anything else."""
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(MAX_MESSAGE_BYTES)
        data += more
        if not more or len(data) > MAX_MESSAGE_BYTES:
            raise ValueError("no answer")
    return json.loads(data)


def _state(address: Address) -> str:
    """Return the state of a process of this host, as /proc writes it; empty if it is gone or on another host."""
    if address.node != host_name():
        return ""
    try:
        return Path(f"/proc/{address.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise LostRankError that names the rank that failed first, for errors of any collective in the block.

    torch's own collectives, such as those of DDP and `fully_shard`, name a connection at best, and often that of a
    survivor which is leaving. An error of this rank itself passes unchanged, after all other ranks were told.
    """
    try:
        yield
    except BaseException as error:
        here = _here
        if here is None or not here.peers:
            raise
        if _may_follow_from_a_peer(error):
            cause, _ = here.find(JOB, error.ranks if isinstance(error, LostRankError) else ())
            if cause is None:
                cause, _ = here.find(JOB, list(here.peers))
            if cause is None:
                raise
            seen = "" if isinstance(error, LostRankError) else f" (this rank saw {one_line(error)})"
            raise LostRankError(f"{cause}; look at its output first{seen}", (cause.rank,)) from error
        mine = next((rank for rank, peer in here.peers.items() if peer.token == here.token), None)
        if mine is not None:
            here.blame(JOB, Cause(mine, f"raised {one_line(error)}"))
        raise


def _may_follow_from_a_peer(error: BaseException) -> bool:
    """Return whether an error may follow from the loss of another rank: torch raises plain RuntimeErrors then."""
    kind = type(error)
    if not isinstance(error, RuntimeError) or kind.__name__ == "OutOfMemoryError":
        return False
    return isinstance(error, LostRankError) or kind is RuntimeError or kind.__module__.startswith("torch")


def one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text, short enough for a probe."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:MAX_TEXT] if text else type(error).__name__


def listen_host(store: str) -> str:
    """Return the address of this host that the ranks of a store can reach: loopback for a store on loopback.

    Args:
        store: The address of the store, "host:port", or the path of a file store.

    >>> listen_host("localhost:29500"), listen_host("/tmp/store")
    ('127.0.0.1', '127.0.0.1')
    """
    host = store.rpartition(":")[0]
    if not host or host == "localhost" or is_loopback(host):
        return "127.0.0.1"
    try:
        return reachable_address(host)
    except ValueError:
        return "127.0.0.1"


#: Of the process, and not of a job: after `shutdown` it still answers that this process lives.
_here: Liveness | None = None
_lock = threading.Lock()


def liveness(host: str = "127.0.0.1") -> Liveness:
    """Return the Liveness of this process, made on first use and anew after a fork.

    Args:
        host: The address of this host that peers reach; it counts on first use only.
    """
    global _here
    with _lock:
        if _here is None or _here.address[4] != os.getpid():
            _here = Liveness(host)
        return _here


def forget_job() -> None:
    """Forget the peers and causes of a job that is over."""
    if _here is not None:
        _here.reset()


def knows_of_failure() -> bool:
    """Return whether this process has found, or was told of, a rank that failed: then it waits for no other rank."""
    return _here is not None and _here.failed


def close() -> None:
    """End the thread that answers probes."""
    global _here
    with _lock:
        if _here is not None and _here.address[4] == os.getpid():
            _here.close()
        _here = None


def _begin_child() -> None:
    """Renew the lock in a forked child: another thread of the parent may hold it."""
    global _lock
    _lock = threading.Lock()


atexit.register(close)
os.register_at_fork(after_in_child=_begin_child)
