"""Who failed first: each rank answers probes from a thread of its own, whatever its main thread waits for.

A rank that loses a connection cannot tell a peer that died from one that merely left because another rank had died.
So a rank that finds the cause tells all ranks before it raises, and a rank that is told of a cause reports that one.
A probe tells a process that has ended (connection refused) from one that is stopped (no answer) and from one that is
in another call (its answer says in which).
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

#: Seconds that a rank has to answer a probe. Its thread needs the interpreter, which a loaded host gives it late.
ANSWER = 4.0
#: The scope of causes that concern the whole job.
JOB = "job"
#: Ranks that are probed at a time, bytes that a message has at most, and letters of a text in it.
AT_A_TIME, MOST, MOST_TEXT = 32, 4096, 500
#: How a rank was lost, the surest first.
ENDED, STOPPED = "was lost: its process has ended", "was lost: its process is stopped"
SILENT = "was lost: its process does not answer"
_PROOF = (ENDED, STOPPED, SILENT)
#: States of a process that has ended, as the system writes them; empty where it is not there any more.
_GONE = ("", "Z", "X")


@dataclass(frozen=True)
class Address:
    """Where a rank answers probes, the word that it answers to, and its process on its host."""

    host: str
    port: int
    token: str
    node: str
    pid: int

    @staticmethod
    def read(given: Any) -> Address | None:
        """An address as `Liveness.address` wrote it; None for anything else."""
        try:
            host, port, token, node, pid = given
            return Address(str(host), int(port), str(token), str(node), int(pid))
        except (TypeError, ValueError):
            return None


class LostRankError(RuntimeError):
    """A rank was lost, or did not answer in time; the message names it, and `ranks` are those it may be."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Cause:
    """The rank that failed first, and how."""

    rank: int
    reason: str
    #: Whether the rank itself still answers, and is to be told as well.
    answers: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


@dataclass(frozen=True)
class Status:
    """What a rank does in a process group: in words, the passes that it has begun, and the direction of the last."""

    doing: str = "has made no call yet"
    passes: int = 0
    direction: str = ""


class Liveness:
    """This process as its peers see it: it answers their probes, and remembers the first cause it hears of.

    Causes are kept by scope, the process group that a rank failed in: another group may go on without that rank.
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
        self.address = (address, port, self.token, host_name(), os.getpid())
        self._thread = threading.Thread(target=self._serve, daemon=True, name="meshflash liveness")
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a cause is known, in any scope."""
        return bool(self._causes)

    def cause(self, scope: str) -> Cause | None:
        """The first cause that this rank has found or heard of."""
        return self._causes.get(scope)

    def know(self, peers: Mapping[int, Any]) -> None:
        """Remember where other ranks answer."""
        for rank, given in peers.items():
            address = Address.read(given)
            if address is not None and (address.node == host_name() or not is_loopback(address.host)):
                self.peers[rank] = address

    def find(self, scope: str, ranks: Iterable[int]) -> tuple[Cause | None, dict[int, Status]]:
        """Probe these ranks; the first cause if one is known, and what those that answered are doing.

        A cause that this rank finds by itself is told to all ranks before this returns.
        """
        if scope in self._causes:
            return self._causes[scope], {}
        ranks = [rank for rank in ranks if rank in self.peers and self.peers[rank].token != self.token]
        answers: dict[int, Status] = {}
        lost: list[Cause] = []
        for rank, answer in self._ask_all(ranks, {"scope": scope}):
            if isinstance(answer, str):
                lost.append(Cause(rank, answer))
            elif answer.get("cause"):
                self._hear(scope, answer["cause"])
            else:
                answers[rank] = _status(answer.get("status"))
        if scope not in self._causes and lost:
            self.blame(scope, min(lost, key=lambda cause: _PROOF.index(cause.reason) if cause.reason in _PROOF else 9))
        return self._causes.get(scope), answers

    def find_ended(self, scope: str, rank: int) -> Cause | None:
        """The cause where it is certain that a rank's process has ended: it was one of this host, and is gone.

        A process that merely does not answer a probe may be busy, and one of another host behind a firewall.
        """
        address = self.peers.get(rank)
        if address is None or address.node != host_name() or _state(address) not in _GONE:
            return None
        return self.blame(scope, Cause(rank, ENDED))

    def blame(self, scope: str, cause: Cause) -> Cause:
        """Take this for the cause unless another is known, and tell all ranks; the cause that is known now."""
        with self._lock:
            known = self._causes.setdefault(scope, cause)
        if known is cause:
            others = [
                rank
                for rank, peer in self.peers.items()
                if peer.token != self.token and (rank != cause.rank or cause.answers)
            ]
            for _ in self._ask_all(others, {"scope": scope, "cause": [cause.rank, cause.reason]}):
                pass  # one that does not hear it has been lost, or will find the cause by itself
        return known

    def reset(self) -> None:
        """Forget all peers, causes and calls: this process joins another job, or none."""
        with self._lock:
            self.peers = {}
            self._causes.clear()
            self.status.clear()

    def clear(self, scope: str) -> None:
        """Forget the cause: a new process group goes by this name."""
        with self._lock:
            self._causes.pop(scope, None)

    def close(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):  # where nobody is connected some systems refuse it
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _hear(self, scope: str, given: Any) -> None:
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
        if not isinstance(given, dict) or not hmac.compare_digest(str(given.get("token", "")), self.token):
            return
        scope = str(given.get("scope", ""))
        if given.get("cause"):
            self._hear(scope, given["cause"])
        cause = self._causes.get(scope)
        status = self.status.get(scope, Status())
        answer = {
            "status": [status.doing[:MOST_TEXT], status.passes, status.direction],
            "cause": [cause.rank, cause.reason[:MOST_TEXT]] if cause else None,
        }
        connection.sendall(json.dumps(answer).encode() + b"\n")

    def _ask_all(self, ranks: Sequence[int], message: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """What each of these ranks answers; or, as text, how it was lost."""
        if not ranks:
            return
        with ThreadPoolExecutor(max_workers=min(AT_A_TIME, len(ranks))) as pool:
            yield from zip(ranks, pool.map(lambda rank: self._ask(rank, message), ranks), strict=True)

    def _ask(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | str:
        address = self.peers[rank]
        try:
            with socket.create_connection((address.host, address.port), ANSWER) as connection:
                connection.sendall(json.dumps({"token": address.token, **message}).encode() + b"\n")
                answer = _receive(connection)
                return answer if isinstance(answer, dict) else {}
        except (OSError, ValueError) as error:
            return _how_lost(address, error)


def _how_lost(address: Address, error: Exception) -> str:
    """Say how a rank was lost that did not answer a probe."""
    if address.node == host_name():
        state = _state(address)
        if state in _GONE:
            return ENDED
        if state in ("T", "t"):
            return STOPPED
    if isinstance(error, ConnectionError | ValueError):  # nobody listens at its port any more, or somebody else
        return ENDED
    return SILENT if isinstance(error, TimeoutError) else f"was lost: it cannot be reached ({error})"


def _status(given: Any) -> Status:
    try:
        doing, passes, direction = given
        return Status(str(doing), int(passes), str(direction))
    except (TypeError, ValueError):
        return Status()


def _receive(connection: socket.socket) -> Any:
    """One line of JSON; ValueError for anything else, or nothing."""
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(MOST)
        data += more
        if not more or len(data) > MOST:
            raise ValueError("no answer")
    return json.loads(data)


def _state(address: Address) -> str:
    """The state of a process of this host, as the system writes it; empty where it is not there, or elsewhere."""
    if address.node != host_name():
        return ""
    try:
        return Path(f"/proc/{address.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise LostRankError that names the rank that failed first, whichever collective of this rank noticed it.

    torch's own collectives, such as those of DDP and `fully_shard`, name a connection at best, and often that of a
    survivor which is leaving. An error of this rank itself passes as it is, after all other ranks were told.
    """
    try:
        yield
    except BaseException as error:
        here = _here
        if here is None or not here.peers:
            raise
        if _may_be_of_a_peer(error):
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


def _may_be_of_a_peer(error: BaseException) -> bool:
    """Whether an error may follow from the loss of another rank: torch raises plain RuntimeErrors then."""
    kind = type(error)
    if not isinstance(error, RuntimeError) or kind.__name__ == "OutOfMemoryError":
        return False
    return isinstance(error, LostRankError) or kind is RuntimeError or kind.__module__.startswith("torch")


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:MOST_TEXT] if text else type(error).__name__


def listen_host(store: str) -> str:
    """The address of this host that the ranks of a store at `store` reach: loopback for a store on loopback.

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


_here: Liveness | None = None
_lock = threading.Lock()


def liveness(host: str = "127.0.0.1") -> Liveness:
    """The one of this process, made on first use; `host` is the address that others reach."""
    global _here
    with _lock:
        if _here is None or _here.address[4] != os.getpid():
            _here = Liveness(host)
        return _here


def forget_job() -> None:
    """Forget the ranks of a job that is over, and how it failed."""
    if _here is not None:
        _here.reset()


def knows_of_failure() -> bool:
    """Whether this process has found, or was told of, a rank that failed: then nobody is waited for any more."""
    return _here is not None and _here.failed


def close() -> None:
    """End the thread that answers."""
    global _here
    with _lock:
        if _here is not None and _here.address[4] == os.getpid():
            _here.close()
        _here = None


atexit.register(close)
