"""The rendezvous: how the ranks of a job find the store that rank 0 hosts.

Each rank knows only its own place (rank, world size, launcher). Which host and port the store has, it learns from the
first of these sources that applies:

1. torchrun: the store of torchrun's agent, at MASTER_ADDR:MASTER_PORT. Rank 0 hosts nothing.
2. MASTER_ADDR, and MASTER_PORT or 29500: rank 0 listens there, the other ranks connect there.
3. All ranks on one node: rank 0 listens on 127.0.0.1 at a free port and writes the port to a file. The file's name is
   a digest of the launcher's name for the job, so that jobs side by side do not find each other.
4. mpi4py: rank 0 listens at a free port and broadcasts address and port.
5. Slurm: the first host of the node list, at a port computed from the job's number.

MPI is not started if all ranks are on one node: it is not needed, and an MPI that does not fit the launcher ends the
process. `listen.py` decides to which interface a store binds, `guard.py` which ranks may join.

Every wait ends within the timeout of `init`. torch's and MPI's blocking calls run in a worker thread (`run_within`),
so that Ctrl-C ends a rank that waits.
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
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed as dist

from meshflash.runtime.guard import DIGEST_KEY, TokenError, check_token, given_token, guarded, new_token, token_digest
from meshflash.runtime.hosts import boot, hosts_of, is_loopback, reachable_address
from meshflash.runtime.launchers import OF_MPI, LaunchError, Place
from meshflash.runtime.listen import listener
from meshflash.runtime.log import log
from meshflash.runtime.store import run_within

#: Seconds beyond the timeout after which a rank gives up a call of torch that should have timed out by itself.
GRACE_SECONDS = 2.0
#: Seconds that a rank tries one store before it looks again for a better one: a port or a file may be of an old job.
RETRY_SECONDS = 5.0
#: Seconds between two looks at a key: the first pause, which doubles up to the longest one. Ranks that come together
#: look a few times; thousands of ranks that wait for a late one look twice a second each, which one store can answer.
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.01, 0.5
#: The key under which rank 0 announces the prefix of a job of torchrun.
PREFIX_KEY = "meshflash/prefix"
#: torch's own default for MASTER_PORT.
DEFAULT_PORT = 29500
#: Ports that Slurm jobs choose from by their number: below those that Linux hands out by itself (from 32768).
SLURM_PORTS = range(15000, 30000)
#: Programs that start ranks, by the 15 characters that /proc keeps; all ranks of a job on a node descend from one.
STARTERS = (
    *("mpiexec", "mpirun", "mpiexec.hydra", "hydra_pmi_proxy", "pmi_proxy", "prterun", "prted", "orterun", "orted"),
    *("mpispawn", "slurmstepd", "palsd", "jsmd"),
)
ADVICE = "set MASTER_ADDR to a name or address of rank 0's host that all others reach, and MASTER_PORT to a free port"


class Rendezvous:
    """The store that all ranks of a job share, and its address. Made by `open_rendezvous`.

    A store may outlive a rendezvous: torchrun's does. So all keys of one rendezvous lie below `meshflash/<number>`.
    """

    def __init__(self, store: Any, address: str, number: int = 1) -> None:
        """Take a store that all ranks have found.

        Args:
            store: The store, already below the prefix that the job's token guards.
            address: Host and port of the store.
            number: Counts the rendezvous of this process, from 1. All ranks count alike.
        """
        self.store, self.address = dist.PrefixStore(f"meshflash/{number}", store), address

    def depart(self, rank: int, world_size: int) -> None:
        """Let rank 0, which may host the store, end after the others; wait for them no longer than GRACE_SECONDS.

        Each rank adds one to the counter `bye`. Rank 0 polls it until it has reached the number of ranks.

        Args:
            rank: This rank.
            world_size: The number of ranks.
        """

        def count_departures() -> None:
            departed = int(self.store.add("bye", 1))
            if rank == 0 and departed < world_size:
                any(int(self.store.add("bye", 0)) == world_size for _ in _polls(time.monotonic() + GRACE_SECONDS))

        # The store may be gone already, or its process stopped: this rank ends all the same.
        with contextlib.suppress(RuntimeError, TimeoutError):
            run_within(2 * GRACE_SECONDS, count_departures, "")


def open_rendezvous(place: Place, timeout: float, number: int = 1) -> Rendezvous:
    """Find the store of all ranks, and return it; LaunchError if this rank does not find it within the timeout.

    Args:
        place: This process among the ranks of its job.
        timeout: Seconds to look for the store, and afterwards to wait for a key in it.
        number: Counts the rendezvous of this process, from 1. All ranks count alike.
    """
    try:
        store, address = run_within(
            timeout + 2 * GRACE_SECONDS, partial(_find_store, place, timeout, number), timeout_message=""
        )
    except TimeoutError:
        host = os.environ.get("MASTER_ADDR", "rank 0's host")
        raise LaunchError(
            f"rank {place.rank} of {place.world_size}: the store at {host} accepts connections and does not answer "
            f"within {timeout:g} s; the process that hosts it (rank 0, or torchrun) may be stopped"
        ) from None
    return Rendezvous(store, address, number)


#: A store of torch, and its address "host:port".
Store = tuple[Any, str]


def _find_store(place: Place, timeout: float, number: int) -> Store:
    """Go through the sources of the module's docstring, in that order."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    limit = timedelta(seconds=timeout)
    if place.launcher == "torchrun":
        where = f"{address}:{port}"
        with _explaining(place, where, timeout):
            store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=limit))
            store = _check_torchrun_token(place, store, where, timeout)
            prefix = _agree_on_prefix(place, store, timeout)
        return dist.PrefixStore(prefix, store), where
    if address:
        return _at_master_address(place, address, port, timeout, number)
    if place.one_node:
        return _on_one_node(place, timeout, number)
    found: Store | None = None
    if place.launcher in OF_MPI:
        with _explaining(place, "MPI", timeout):
            found = run_within(
                timeout + GRACE_SECONDS, partial(_by_mpi, place, timeout), "MPI did not bring all ranks together"
            )
    if found is not None:
        return found
    if place.launcher == "Slurm":
        hosts = hosts_of(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))
        if hosts:
            # All ranks compute the same port without talking; jobs of different numbers rarely share one.
            own = SLURM_PORTS[zlib.crc32(place.job.encode()) % len(SLURM_PORTS)]
            return _at_master_address(place, hosts[0], port or str(own), timeout, number)
    raise LaunchError(
        f"rank {place.rank} of {place.world_size}, started by {place.launcher}, does not know where rank 0 is: "
        f"{ADVICE}; or install mpi4py, which finds it"
    )


def _check_torchrun_token(place: Place, store: Any, where: str, timeout: float) -> Any:
    """Compare this rank's token with rank 0's, and return the part of torchrun's store that the token guards.

    Rank 0 writes a digest of its token under DIGEST_KEY; the other ranks wait for it, within the timeout.
    """
    token = given_token()
    if place.rank == 0:
        store.set(DIGEST_KEY, token_digest(token))
        return guarded(store, token)
    if not any(store.check([DIGEST_KEY]) for _ in _polls(time.monotonic() + timeout)):
        raise LaunchError(f"rank {place.rank} of {place.world_size}: rank 0 did not come within {timeout:g} s")
    check_token(_read_text(store, DIGEST_KEY), token, place.rank, where)
    return guarded(store, token)


def _polls(deadline: float) -> Iterator[None]:
    """Yield at once and after growing pauses, until the deadline on the clock `time.monotonic` has passed.

    These waits come before the handshakes, which wait inside the store instead (`runtime/store.py`): a rank that gives
    up there tells all others, and here it does not know yet who they are.
    """
    pause = FIRST_POLL_SECONDS
    while True:
        yield
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, LONGEST_POLL_SECONDS)


def _read_text(store: Any, key: str) -> str:
    return bytes(store.get(key)).decode(errors="replace")


def _agree_on_prefix(place: Place, store: Any, timeout: float) -> str:
    """Return a key prefix that only these very ranks share.

    torchrun's store outlives ranks that torchrun restarts, with all their keys, and each node counts restarts by
    itself: nothing in the environment tells a rank from its predecessor. So ranks prove that they run now:

    1. Rank 0 writes a fresh random prefix under PREFIX_KEY. If it replaces one, it writes an empty list under
       `meshflash/<old prefix>/all`, unless there is a list: ranks that wait for the old rank 0 then read anew.
    2. Each other rank writes a fresh random nonce under `meshflash/<prefix>/<rank>`.
    3. Rank 0 waits for all nonces and repeats them under `meshflash/<prefix>/all`.
    4. A rank that finds its own nonce there has read the prefix of the rank 0 that runs now, and deletes its nonce.
       Otherwise it has read an old prefix, and waits for another one.

    This cannot be a `Handshake`: that one needs a prefix which is new in the store, and this makes it.
    """
    deadline = time.monotonic() + timeout
    return (
        _announce_prefix(place, store, deadline, timeout)
        if place.rank == 0
        else _find_prefix(place, store, deadline, timeout)
    )


def _announce_prefix(place: Place, store: Any, deadline: float, timeout: float) -> str:
    """As rank 0, write a new prefix and return it once all other ranks have proved that they read it."""
    old = _read_text(store, PREFIX_KEY) if store.check([PREFIX_KEY]) else ""
    prefix = secrets.token_hex(8)
    store.set(PREFIX_KEY, prefix)
    if old:
        store.compare_set(f"meshflash/{old}/all", "", "[]")
    nonces = [f"meshflash/{prefix}/{rank}" for rank in range(1, place.world_size)]
    if not any(store.check(nonces) for _ in _polls(deadline)):
        absent = [str(rank) for rank, key in enumerate(nonces, 1) if not store.check([key])]
        raise LaunchError(
            f"rank {', '.join(absent)} of {place.world_size} did not come within {timeout:g} s; look at the first "
            "error of those ranks"
        )
    store.set(f"meshflash/{prefix}/all", json.dumps([bytes(nonce).decode() for nonce in store.multi_get(nonces)]))
    return prefix


def _find_prefix(place: Place, store: Any, deadline: float, timeout: float) -> str:
    """As another rank, return the prefix of the rank 0 that runs now."""
    nonce, prefix, is_old = secrets.token_hex(8), "", True
    for _ in _polls(deadline):
        if is_old:
            if not prefix and not store.check([PREFIX_KEY]):
                continue
            found = _read_text(store, PREFIX_KEY)
            if found == prefix:
                continue
            prefix, is_old = found, False
            store.set(f"meshflash/{prefix}/{place.rank}", nonce)
        if store.check([f"meshflash/{prefix}/all"]):
            is_old = nonce not in json.loads(store.get(f"meshflash/{prefix}/all"))
            store.delete_key(f"meshflash/{prefix}/{place.rank}")
            if not is_old:
                return prefix
    raise LaunchError(f"rank {place.rank} of {place.world_size}: rank 0 did not come within {timeout:g} s")


def _at_master_address(place: Place, address: str, port: str, timeout: float, number: int) -> Store:
    """Host the store at an address (rank 0), or connect to it once rank 0 has opened it for this rendezvous.

    Rank 0 writes a digest of its token under DIGEST_KEY, and then the key `meshflash/open/<number>`. The other ranks
    wait for both for at most RETRY_SECONDS, and then connect anew: the store that answers may be that of an earlier
    rendezvous, or of the last job on this port, which is about to close. All tries together end at the timeout.
    """
    if port and not (re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) < 2**16):
        raise LaunchError(f"MASTER_PORT={port!r}: expected a number from 1 to 65535")
    token, key, refused = given_token(), f"meshflash/open/{number}", 0.0
    deadline = time.monotonic() + timeout
    while (remaining := deadline - time.monotonic()) > 0:
        store, where = _connect(place, address, int(port or DEFAULT_PORT), timeout, remaining)
        store.set_timeout(timedelta(seconds=timeout))
        own, short = guarded(store, token), timedelta(seconds=min(RETRY_SECONDS, remaining))
        if place.rank == 0:
            store.set(DIGEST_KEY, token_digest(token))
            own.set(key, "1")
            return own, where
        try:
            store.wait([DIGEST_KEY], short)
            check_token(_read_text(store, DIGEST_KEY), token, place.rank, where)
            own.wait([key], short)
            return own, where
        except TokenError:
            # It may be the last job's rank 0, which is about to leave the port to ours: try again for a while.
            refused = refused or time.monotonic()
            if time.monotonic() - refused > RETRY_SECONDS:
                raise
            time.sleep(0.5)
        except RuntimeError:  # the store of an earlier rendezvous, which is about to close
            time.sleep(0.1)
    raise LaunchError(
        f"rank {place.rank} of {place.world_size}: what answers at {address}:{port or DEFAULT_PORT} is not rank 0 of "
        f"this job; {ADVICE}"
    )


def _connect(place: Place, address: str, port: int, timeout: float, remaining: float | None = None) -> Store:
    """Host the store at an address (rank 0), or connect to it, within the seconds that remain of the timeout.

    An error names the whole timeout: that is the number the user has set.
    """
    where, remaining = f"{address}:{port}", timeout if remaining is None else remaining
    with _explaining(place, where, timeout):
        if place.rank == 0:
            make = partial(_host_store, place, address, port, remaining)
        else:
            make = partial(dist.TCPStore, address, port, **_options(place, remaining))
        try:
            return run_within(remaining + GRACE_SECONDS, make, ""), where
        except TimeoutError:
            raise RuntimeError(_why_silent(address, port)) from None


def _options(place: Place, remaining: float) -> dict[str, Any]:
    return {"world_size": place.world_size, "timeout": timedelta(seconds=remaining), "wait_for_workers": False}


def _host_store(place: Place, address: str, port: int, remaining: float) -> Any:
    """Start the store that rank 0 hosts. Bind it to the address that the other ranks use, if that is known."""
    try:
        bound = listener(address, port, place.one_node)
    except OSError as error:
        raise RuntimeError(error.strerror or str(error)) from error
    options = _options(place, remaining) | {"is_master": True}
    if bound is not None:
        host, port = bound.getsockname()[:2]
        address = address if host in ("0.0.0.0", "::") else host
        options["master_listen_fd"] = bound.detach()  # the store closes it
    try:
        # torch's other server reads from one client at a time: half a message from any client would block all ranks.
        return dist.TCPStore(address, port, use_libuv=True, **options)
    except RuntimeError as error:
        if "without libuv" not in str(error):
            raise
        log.warning("torch is built without libuv: any client that sends half a message to the store blocks the job")
        return dist.TCPStore(address, port, use_libuv=False, **options)


def _why_silent(address: str, port: int) -> str:
    """Return why torch got no answer from an address."""
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError as error:
        return str(error)
    return "a process listens there, and does not answer"


@contextlib.contextmanager
def _explaining(place: Place, where: str, timeout: float) -> Iterator[None]:
    """Turn torch's errors into a LaunchError that says where this rank looked, and what to set."""
    try:
        yield
    except LaunchError:
        raise
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0]
        what = "cannot host the store" if place.rank == 0 else f"found no rank 0 within {timeout:g} s"
        raise LaunchError(f"rank {place.rank} of {place.world_size} {what} at {where} ({reason}); {ADVICE}") from error


def _on_one_node(place: Place, timeout: float, number: int) -> Store:
    """Let rank 0 take a free port and write it to a file that the other ranks know by the name of the job."""
    job = place.job or starter()
    if not job:
        raise LaunchError(
            f"rank {place.rank} of {place.world_size}, started by {place.launcher}, cannot tell its job from others on "
            f"this machine: set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port, the same for all ranks"
        )
    try:
        folder = _own_folder(Path(tempfile.gettempdir()) / f"meshflash-{os.getuid()}")
        file = folder / f"{_name(place, job, number)}.json"
        return _host_by_file(place, file, timeout) if place.rank == 0 else _find_by_file(place, file, timeout)
    except OSError as error:
        raise LaunchError(
            f"ranks of one node find each other by a file, and {error}: set TMPDIR, or {ADVICE}"
        ) from error


def _own_folder(path: Path) -> Path:
    """Make a folder that only this user reads and writes; OSError if another user has made it before."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is a link, or belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _host_by_file(place: Place, file: Path, timeout: float) -> Store:
    """Host the store on 127.0.0.1, write a file that leads to it, and wait until all ranks have connected.

    The file holds the port, a fresh `token` that guards the keys, and a `digest` of the user's own token.
    Only this user can read it. The fresh token also tells this store from one that took the port of a dead job. Each
    rank that connects adds one to the counter `meshflash/come`; then the file is removed.
    """
    token, file_token = given_token(), new_token()
    store, _ = _connect(place, "127.0.0.1", 0, timeout)
    store.set(DIGEST_KEY, token_digest(file_token))
    own = guarded(store, file_token)
    # Write beside the file and rename: a rank that looks at this moment reads all of it, or nothing.
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({"port": store.port, "token": file_token, "digest": token_digest(token)}))
    written.replace(file)
    try:
        awaited = place.world_size - 1
        if not any(int(own.add("meshflash/come", 0)) == awaited for _ in _polls(time.monotonic() + timeout)):
            num_come = int(own.add("meshflash/come", 0)) + 1
            raise LaunchError(
                f"only {num_come} of {place.world_size} ranks came within {timeout:g} s; look at the others' output"
            )
    finally:
        file.unlink(missing_ok=True)
    return own, f"127.0.0.1:{store.port}"


def _find_by_file(place: Place, file: Path, timeout: float) -> Store:
    """Read the file again and again, until it leads to a store whose token is the file's or the timeout has passed."""
    token, deadline = given_token(), time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            content = json.loads(file.read_text())
            # A plain connection fails at once if no process listens; torch's client would try until its timeout.
            socket.create_connection(("127.0.0.1", content["port"]), 1.0).close()
            remaining = max(0.1, min(RETRY_SECONDS, deadline - time.monotonic()))
            store, where = _connect(place, "127.0.0.1", content["port"], timeout, remaining)
            check_token(_read_text(store, DIGEST_KEY), content["token"], place.rank, where)
            own, digest = guarded(store, content["token"]), content["digest"]
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            # Rank 0 has not written the file yet, or a dead job has left it.
            log.debug("%s: %s", file, error)
            time.sleep(0.02)
            continue
        check_token(digest, token, place.rank, where)
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
    """Return the process that started the ranks of this job on this node, as pid and start time; empty if unknown."""
    pid = os.getppid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        # "pid (name) state ppid ...": the name may hold spaces and brackets. Field 22 is the start time.
        name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        if name in STARTERS:
            return f"{pid}.{rest[19]}"
        pid = int(rest[1])
    return ""


def _by_mpi(place: Place, timeout: float) -> Store | None:
    """Host the store on rank 0 and broadcast its address by mpi4py; None if mpi4py cannot speak for these ranks.

    Every rank takes part in both collectives, also if rank 0 has failed: its problem travels with the broadcast.
    """
    comm = _communicator(place)
    if comm is None:
        return None
    hosts = comm.allgather((socket.gethostname(), boot()))
    store = address = None
    problem = token = ""
    if place.rank == 0:
        try:
            token = given_token() or new_token()
            others = [host for host in hosts if host != hosts[0]]
            address = reachable_address(others[0][0]) if others else "127.0.0.1"
            if others and is_loopback(address):
                raise ValueError(f"this host reaches {others[0][0]!r} by {address} only")
            store, _ = _connect(place, address, 0, timeout)
        except (ValueError, LaunchError) as error:
            problem = str(error)
    address, port, problem, token = comm.bcast((address, store.port if store else 0, problem, token))
    if problem:
        raise LaunchError(f"rank 0 has no address that the other hosts reach: {problem}; {ADVICE}")
    found = store or _connect(place, address, port, timeout)[0]
    return guarded(found, token), f"{address}:{port}"


def _communicator(place: Place) -> Any:
    """Return mpi4py's world communicator; None if mpi4py is missing or sees other ranks than the launcher."""
    if place.launcher == "Slurm" and not any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK")):
        return None  # without a process manager MPI would start each rank as a world of its own
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        log.debug("no mpi4py: %s", error)
        return None
    if MPI.COMM_WORLD.Get_size() != place.world_size:
        log.warning(
            "mpi4py sees %d ranks where %s started %d: it is built for another MPI, and is not used",
            MPI.COMM_WORLD.Get_size(),
            place.launcher,
            place.world_size,
        )
        return None
    return MPI.COMM_WORLD
