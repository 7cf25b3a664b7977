"""How ranks find each other: a store that rank 0 holds, and everybody knows where.

The first of these that applies: torchrun's own store; MASTER_ADDR and MASTER_PORT; on one node a file that names the
port, found by what the launcher calls the job, so that jobs side by side do not meet; mpi4py, which broadcasts rank
0's address; the first host of Slurm's node list. MPI is not started where all ranks are on one node: it is not needed,
and one that does not fit the launcher ends the process. What a store binds to is in `listen.py`, who may join in
`guard.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import tempfile
import time
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed as _distributed

from meshflash.runtime.guard import PUBLISHED, TokenError, check_token, given_token, guarded, new_token, published
from meshflash.runtime.hosts import boot, hosts_of, is_loopback, reachable_address
from meshflash.runtime.launchers import OF_MPI, LaunchError, Place
from meshflash.runtime.listen import listener
from meshflash.runtime.log import log
from meshflash.runtime.store import within

dist: Any = _distributed  # torch does not declare all that it exports here

#: Seconds beyond the timeout after which a rank does not wait for torch to notice it.
GRACE = 2.0
#: Seconds that a rank gives a store which a file names, before it reads the file again.
SHORT = 5.0
#: What torch takes where nothing else is said.
PORT = 29500
#: Ports that jobs of Slurm's choose from by their number: below those that systems hand out by themselves.
PORTS = range(15000, 30000)
#: Programs that start ranks, in the 15 letters that the system keeps; all ranks of a job on a node descend from one.
STARTERS = (
    *("mpiexec", "mpirun", "mpiexec.hydra", "hydra_pmi_proxy", "pmi_proxy", "prterun", "prted", "orterun", "orted"),
    *("mpispawn", "slurmstepd", "palsd", "jsmd"),
)
ADVICE = "set MASTER_ADDR to a name or address of rank 0's host that all others reach, and MASTER_PORT to a free port"


class Meeting:
    """A store, and where it is. What was said at an earlier meeting, in a store that is still there, is kept apart."""

    def __init__(self, store: Any, where: str, number: int = 1) -> None:
        self.store, self.where = dist.PrefixStore(f"meshflash/{number}", store), where

    def gather(self, world_size: int, timeout: float) -> None:
        """Wait until all ranks have come here."""
        if int(self.store.add("come", 1)) == world_size:
            self.store.set("all", "1")
        self.store.wait(["all"], timedelta(seconds=timeout))

    def part(self, rank: int, world_size: int) -> None:
        """Rank 0, which holds the store, leaves last, unless others take long."""

        def wave() -> None:
            come = int(self.store.add("bye", 1))
            deadline = time.monotonic() + GRACE
            while rank == 0 and come < world_size and time.monotonic() < deadline:
                time.sleep(0.01)
                come = int(self.store.add("bye", 0))

        with contextlib.suppress(RuntimeError, TimeoutError):  # it is gone already, or its process is stopped
            within(2 * GRACE, wave, "")


def meet(place: Place, timeout: float, number: int = 1) -> Meeting:
    """The store of all ranks; LaunchError, within the timeout, where this one does not find it.

    `number` says the how manieth meeting of this process it is.
    """
    try:
        store, where = within(timeout + 2 * GRACE, partial(_found, place, timeout, number), "")
    except TimeoutError:
        address = os.environ.get("MASTER_ADDR", "rank 0's host")
        raise LaunchError(
            f"rank {place.rank} of {place.world_size}: the store at {address} accepts connections and does not answer "
            f"within {timeout:g} s; the process that hosts it (rank 0, or torchrun) may be stopped"
        ) from None
    return Meeting(store, where, number)


#: A store, and where it is.
Store = tuple[Any, str]


def _found(place: Place, timeout: float, number: int) -> Store:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    limit = timedelta(seconds=timeout)
    if place.launcher == "torchrun":
        where = f"{address}:{port}"
        with _explained(place, where, timeout):
            store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=limit))
            store = _admitted(place, store, where, timeout)
            turn = _agreed(place, store, timeout)
        return dist.PrefixStore(turn, store), where
    if address:
        return _given(place, address, port, timeout, number)
    if place.one_node:
        return _on_one_node(place, timeout, number)
    found: Store | None = None
    if place.launcher in OF_MPI:
        with _explained(place, "MPI", timeout):
            found = within(timeout + GRACE, partial(_by_mpi, place, timeout), "MPI did not bring all ranks together")
    if found is not None:
        return found
    if place.launcher == "Slurm":
        hosts = hosts_of(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))
        if hosts:
            own = PORTS[zlib.crc32(place.job.encode()) % len(PORTS)]
            return _given(place, hosts[0], port or str(own), timeout, number)
    raise LaunchError(
        f"rank {place.rank} of {place.world_size}, started by {place.launcher}, does not know where rank 0 is: "
        f"{ADVICE}; or install mpi4py, which tells"
    )


def _admitted(place: Place, store: Any, where: str, timeout: float) -> Any:
    """Return the part of torchrun's store that the job's token guards, once this rank's is known to be rank 0's."""
    token = given_token()
    if place.rank == 0:
        store.set(PUBLISHED, published(token))
        return guarded(store, token)
    deadline = time.monotonic() + timeout
    while not store.check([PUBLISHED]):
        if time.monotonic() > deadline:
            raise LaunchError(f"rank {place.rank} of {place.world_size}: rank 0 did not come within {timeout:g} s")
        time.sleep(0.01)
    check_token(_text(store, PUBLISHED), token, place.rank, where)
    return guarded(store, token)


def _text(store: Any, key: str) -> str:
    return bytes(store.get(key)).decode(errors="replace")


def _agreed(place: Place, store: Any, timeout: float) -> str:
    """A word that these very ranks share: torchrun's store outlives those that it started before, and what they said.

    Nothing that torchrun tells them would do: each node counts the starts by itself. Rank 0 says a new word, the others
    answer with words of their own, and it repeats those: a rank that does not find its own has heard an old one.
    """
    deadline, others = time.monotonic() + timeout, range(1, place.world_size)
    if place.rank == 0:
        word = secrets.token_hex(8)
        store.set("meshflash/word", word)
        answers = [f"meshflash/{word}/{rank}" for rank in others]
        while absent := [str(rank) for rank, key in zip(others, answers, strict=True) if not store.check([key])]:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {', '.join(absent)} of {place.world_size} did not come within {timeout:g} s; look at the "
                    "first error of those ranks"
                )
            time.sleep(0.01)
        store.set(f"meshflash/{word}/all", json.dumps([store.get(key).decode() for key in answers]))
        return word
    mine = secrets.token_hex(8)
    while time.monotonic() < deadline:
        if store.check(["meshflash/word"]):
            word = store.get("meshflash/word").decode()
            store.set(f"meshflash/{word}/{place.rank}", mine)
            if store.check([f"meshflash/{word}/all"]) and mine in json.loads(store.get(f"meshflash/{word}/all")):
                return word
        time.sleep(0.01)
    raise LaunchError(f"rank {place.rank} of {place.world_size}: rank 0 did not come within {timeout:g} s")


def _given(place: Place, address: str, port: str, timeout: float, number: int) -> Store:
    """The store at an address, once rank 0 has opened it for this meeting."""
    if port and not (re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) < 2**16):
        raise LaunchError(f"MASTER_PORT={port!r}: expected a number from 1 to 65535")
    token, key, refused = given_token(), f"meshflash/open/{number}", 0.0
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        store, where = _at(place, address, int(port or PORT), timeout, left)
        store.set_timeout(timedelta(seconds=timeout))
        own, short = guarded(store, token), timedelta(seconds=min(SHORT, left))
        if place.rank == 0:
            store.set(PUBLISHED, published(token))
            own.set(key, "1")
            return own, where
        try:
            store.wait([PUBLISHED], short)
            check_token(_text(store, PUBLISHED), token, place.rank, where)
            own.wait([key], short)
            return own, where
        except TokenError:
            # It may be the last job's rank 0, which is about to leave the port to ours: look again for a while.
            refused = refused or time.monotonic()
            if time.monotonic() - refused > SHORT:
                raise
            time.sleep(0.5)
        except RuntimeError:  # the store of an earlier meeting, which is about to close
            time.sleep(0.1)
    raise LaunchError(
        f"rank {place.rank} of {place.world_size}: what answers at {address}:{port or PORT} is not rank 0 of this job; "
        f"{ADVICE}"
    )


def _at(place: Place, address: str, port: int, timeout: float, left: float | None = None) -> Store:
    """The store at an address, waited for as long as is left of the timeout: an error tells the whole of it."""
    where, left = f"{address}:{port}", timeout if left is None else left
    with _explained(place, where, timeout):
        if place.rank == 0:
            make = partial(_hosted, place, address, port, left)
        else:
            make = partial(dist.TCPStore, address, port, **_options(place, left))
        try:
            return within(left + GRACE, make, ""), where
        except TimeoutError:
            raise RuntimeError(_silence(address, port)) from None


def _options(place: Place, left: float) -> dict[str, Any]:
    return {"world_size": place.world_size, "timeout": timedelta(seconds=left), "wait_for_workers": False}


def _hosted(place: Place, address: str, port: int, left: float) -> Any:
    """Start the store that rank 0 hosts, at the address that the others use and no other, where that can be known."""
    try:
        bound = listener(address, port, place.one_node)
    except OSError as error:
        raise RuntimeError(error.strerror or str(error)) from error
    options = _options(place, left) | {"is_master": True}
    if bound is not None:
        host, port = bound.getsockname()[:2]
        address = address if host in ("0.0.0.0", "::") else host
        options["master_listen_fd"] = bound.detach()  # the store closes it
    try:
        # The other server of torch reads from one client at a time: half a message would hold up all ranks.
        return dist.TCPStore(address, port, use_libuv=True, **options)
    except RuntimeError as error:
        if "without libuv" not in str(error):
            raise
        log.warning("torch is built without libuv: any client that sends half a message to the store blocks the job")
        return dist.TCPStore(address, port, use_libuv=False, **options)


def _silence(address: str, port: int) -> str:
    """Why nothing came of an address."""
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError as error:
        return str(error)
    return "somebody listens there, and does not answer"


class _explained:  # noqa: N801 - a context manager, named as it reads
    """Torch's error as one that says where a rank looked, and what to set."""

    def __init__(self, place: Place, where: str, timeout: float) -> None:
        self.place, self.where, self.timeout = place, where, timeout

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, RuntimeError | TimeoutError) or isinstance(error, LaunchError):
            return
        reason = str(error).strip().splitlines()[0]
        what = "cannot hold the store" if self.place.rank == 0 else f"found no rank 0 within {self.timeout:g} s"
        raise LaunchError(
            f"rank {self.place.rank} of {self.place.world_size} {what} at {self.where} ({reason}); {ADVICE}"
        ) from error


def _on_one_node(place: Place, timeout: float, number: int) -> Store:
    """Rank 0 takes a free port and writes it where the others, who know the name of the job, look for it."""
    job = place.job or starter()
    if not job:
        raise LaunchError(
            f"rank {place.rank} of {place.world_size}, started by {place.launcher}, cannot tell its job from others on "
            f"this machine: set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port, the same for all ranks"
        )
    try:
        folder = _own_folder(Path(tempfile.gettempdir()) / f"meshflash-{os.getuid()}")
        file = folder / f"{_name(place, job, number)}.json"
        return _hold(place, file, timeout) if place.rank == 0 else _look(place, file, timeout)
    except OSError as error:
        raise LaunchError(f"ranks of a node meet by a file, and {error}: set TMPDIR, or {ADVICE}") from error


def _own_folder(path: Path) -> Path:
    """Make a folder that only this user reads and writes; OSError where another user has made it before."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is a link, or belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _hold(place: Place, file: Path, timeout: float) -> Store:
    """Host the store, and write to a file where it is and what guards it: a word that only readers of the file know.

    The word also tells the store from one that took the port of a job that died.
    """
    token, word = given_token(), new_token()
    store, _ = _at(place, "127.0.0.1", 0, timeout)
    store.set(PUBLISHED, published(word))
    own = guarded(store, word)
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({"port": store.port, "word": word, "guard": published(token)}))
    written.replace(file)
    try:
        deadline = time.monotonic() + timeout
        while (come := int(own.add("meshflash/come", 0))) < place.world_size - 1:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"only {come + 1} of {place.world_size} ranks came within {timeout:g} s; look at the others' output"
                )
            time.sleep(0.01)
    finally:
        file.unlink(missing_ok=True)
    return own, f"127.0.0.1:{store.port}"


def _look(place: Place, file: Path, timeout: float) -> Store:
    """Look for the file until it names a store that knows its word."""
    token, deadline = given_token(), time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            said = json.loads(file.read_text())
            socket.create_connection(("127.0.0.1", said["port"]), 1.0).close()
            left = max(0.1, min(SHORT, deadline - time.monotonic()))
            store, where = _at(place, "127.0.0.1", said["port"], timeout, left)
            check_token(_text(store, PUBLISHED), said["word"], place.rank, where)
            own, guard = guarded(store, said["word"]), said["guard"]
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # not there yet, or of a dead job
            log.debug("%s: %s", file, error)
            time.sleep(0.02)
            continue
        check_token(guard, token, place.rank, where)
        store.set_timeout(timedelta(seconds=timeout))
        own.add("meshflash/come", 1)
        return own, where
    raise LaunchError(
        f"rank {place.rank} of {place.world_size}: rank 0 did not come within {timeout:g} s, by {file}. Look at its "
        f"output first; or {ADVICE}"
    )


def _name(place: Place, job: str, number: int) -> str:
    return hashlib.sha256(f"{place.launcher} {job} {place.world_size} {number}".encode()).hexdigest()[:24]


def starter() -> str:
    """The process that started the ranks of this job on this node, by number and time; empty where none is known."""
    pid = os.getppid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        if name in STARTERS:
            return f"{pid}.{rest[19]}"
        pid = int(rest[1])
    return ""


def _by_mpi(place: Place, timeout: float) -> Store | None:
    """By mpi4py, where it is there and sees the same ranks."""
    comm = _communicator(place)
    if comm is None:
        return None
    said = comm.allgather((socket.gethostname(), boot()))
    hosts = [name for name, _ in said]
    store = address = None
    problem = secret = ""
    if place.rank == 0:
        try:
            secret = given_token() or new_token()
            others = [name for n, name in enumerate(hosts) if said[n] != said[0]]
            address = reachable_address(others[0]) if others else "127.0.0.1"
            if others and is_loopback(address):
                raise ValueError(f"this host reaches {others[0]!r} by {address} only")
            store, _ = _at(place, address, 0, timeout)
        except (ValueError, LaunchError) as error:
            problem = str(error)
    address, port, problem, secret = comm.bcast((address, store.port if store else 0, problem, secret))
    if problem:
        raise LaunchError(f"rank 0 has no address for the others: {problem}; {ADVICE}")
    found = store or _at(place, address, port, timeout)[0]
    return guarded(found, secret), f"{address}:{port}"


def _communicator(place: Place) -> Any:
    if place.launcher == "Slurm" and not any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK")):
        return None  # MPI would start alone, in each rank
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        log.debug("no mpi4py: %s", error)
        return None
    if MPI.COMM_WORLD.Get_size() != place.world_size:
        log.warning(
            "mpi4py sees %d ranks where %s started %d: it is built for another MPI, and is not asked",
            MPI.COMM_WORLD.Get_size(),
            place.launcher,
            place.world_size,
        )
        return None
    return MPI.COMM_WORLD
