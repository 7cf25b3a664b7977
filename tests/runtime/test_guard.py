"""The store of rank 0: its listening addresses, the tokens that admit ranks, and stray clients."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed as _distributed

from meshflash.runtime import guard, listen, rendezvous
from meshflash.runtime.handshake import Handshake
from meshflash.runtime.launchers import LaunchError, Place
from meshflash.runtime.log import log
from meshflash.runtime.store import BoundedStore
from runtime import jobs
from runtime.jobs import check, free_port, reports_in, run, start_ranks, wait_for

dist = _distributed
TOKEN = "0123456789abcdef" * 2
#: The first bytes that a client of torch's store sends, and the kinds of its messages.
HELLO = b"\0" + struct.pack("<I", 0x3C85F7CE)
MESSAGES = range(24)


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    """Remove the variables of launchers."""
    for name in list(os.environ):
        if name.startswith(jobs.RANK_VARIABLES):
            monkeypatch.delenv(name)


def place(rank, world_size=2):
    """Return the place of a rank on a single node."""
    return Place("variables", rank, world_size, rank, world_size)


def listening(port):
    """Return the addresses at which a port of this machine is open, as /proc writes them."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                found.append(address)
    return found


def is_on_loopback(port):
    """Is a port open on the loopback interface only?"""
    return listening(port) == ["0100007F"]


def own_address():
    """Return an address of this machine other than loopback; skip the test if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has only a loopback interface")
        return str(probe.getsockname()[0])


def test_store_listens_only_at_the_address_of_master_addr(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    for address in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", address)
        opened = rendezvous.open_rendezvous(place(0), 10.0)
        assert is_on_loopback(port)
        other = rendezvous.open_rendezvous(place(1), 10.0)
        other.store.set("a", "b")
        assert opened.store.get("a") == b"b"
        del opened, other


def test_store_listens_at_the_address_of_an_interface(monkeypatch):
    address, port = own_address(), free_port()
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    opened = rendezvous.open_rendezvous(Place("variables", 0, 4, 0, 2), 10.0)
    assert listening(port) == [f"{struct.unpack('<I', socket.inet_aton(address))[0]:08X}"]
    del opened


def test_store_at_a_free_port_listens_on_loopback(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda rank: rendezvous.open_rendezvous(Place("MPICH", rank, 2, rank, 2, None, "job"), 10.0), (0, 1)
        )
    assert is_on_loopback(int(first.address.rpartition(":")[2]))
    assert first.address == second.address


@pytest.mark.parametrize(
    ("address", "one_node", "reason"),
    [
        ("203.0.113.7", False, "203.0.113.7 is no address of this host"),
        ("no.such.host.invalid", False, "no.such.host.invalid does not resolve here"),
        ("node1", False, "node1 is a loopback address here, and ranks may be on other hosts"),
        ("both", True, "both stands for 127.0.0.1, 127.0.0.2 here"),
        ("node1", True, ""),
    ],
)
def test_store_listens_on_all_interfaces_if_its_address_is_unknown(address, one_node, reason, monkeypatch, caplog):
    names = {"node1": ["127.0.1.1"], "both": ["127.0.0.1", "127.0.0.2"]}
    resolve = socket.getaddrinfo

    def resolve_fake_names(host, port, *args, **more):
        return [info for one in names.get(host, [host]) for info in resolve(one, port, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_fake_names)
    why = listen.bind_address(address, one_node)[1]
    assert why.startswith(reason)
    assert bool(why) == bool(reason)
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level(logging.INFO, logger="meshflash"):
        bound = listen.listener(address, 0, one_node)
    if reason:
        assert bound is None
        assert "rank 0's store listens on all interfaces: " + reason in caplog.text
    else:
        assert bound is not None
        assert bound.getsockname()[0] == "127.0.1.1"
        bound.close()


def test_meshflash_listen_overrides_the_address(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("MESHFLASH_LISTEN", "0.0.0.0")
    opened = rendezvous.open_rendezvous(place(0), 10.0)
    assert listening(port) == ["00000000"]
    del opened
    monkeypatch.setenv("MESHFLASH_LISTEN", "203.0.113.7")
    with pytest.raises(LaunchError, match=r"MESHFLASH_LISTEN='203.0.113.7': expected an address of this host"):
        rendezvous.open_rendezvous(place(0), 10.0)


def test_ranks_with_the_same_token_share_keys_below_its_prefix(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("MESHFLASH_TOKEN", TOKEN)
    first, second = (rendezvous.open_rendezvous(place(rank), 10.0) for rank in range(2))
    first.store.set("address", "here")
    assert second.store.get("address") == b"here"
    stray = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=5))
    assert not stray.check(["meshflash/1/address"])
    stray.set("meshflash/1/address", "elsewhere")
    stray.delete_key("meshflash/1/address")
    assert second.store.get("address") == b"here"
    keys = [key.lstrip("/") for key in stray.list_keys()] if hasattr(stray, "list_keys") else []
    assert all(key == guard.DIGEST_KEY or key.startswith("meshflash-") for key in keys), keys
    assert not any(TOKEN in key or TOKEN.encode() in stray.get(key) for key in keys)


@pytest.mark.parametrize(
    ("token_of_rank_0", "token_of_rank_1", "message"),
    [
        (TOKEN, "x" * 16, "rank 1 has another MESHFLASH_TOKEN than rank 0 at 127.0.0.1:"),
        (TOKEN, "", "rank 1 has no MESHFLASH_TOKEN, and rank 0 at .* has one: set the same one on all ranks"),
        ("", TOKEN, "rank 1 has a MESHFLASH_TOKEN, and rank 0 at .* has none"),
    ],
)
def test_rank_with_another_token_is_refused_before_the_timeout(token_of_rank_0, token_of_rank_1, message, monkeypatch):
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.5)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("MESHFLASH_TOKEN", token_of_rank_0)
    first = rendezvous.open_rendezvous(place(0), 60.0)
    monkeypatch.setenv("MESHFLASH_TOKEN", token_of_rank_1)
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=message):
        rendezvous.open_rendezvous(place(1), 60.0)
    assert time.monotonic() - begin < 20
    del first


def test_rank_retries_while_the_previous_job_frees_the_port(monkeypatch):
    """Rank 0 of the previous job leaves last, so that it may still hold the port."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    old = rendezvous.open_rendezvous(place(0), 30.0)
    monkeypatch.setenv("MESHFLASH_TOKEN", TOKEN)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(rendezvous.open_rendezvous, place(1), 30.0)
        time.sleep(0.7)
        del old
        first = rendezvous.open_rendezvous(place(0), 30.0)
        first.store.set("a", "new")
        assert later.result().store.get("a") == b"new"


def test_tokens_are_compared_under_torchrun(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous.dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setenv("MESHFLASH_TOKEN", TOKEN)
    store.set(guard.DIGEST_KEY, guard.token_digest("another token, as long"))
    with pytest.raises(LaunchError, match="rank 1 has another MESHFLASH_TOKEN than rank 0"):
        rendezvous.open_rendezvous(Place("torchrun", 1, 2, 1, 2), 10.0)


def test_short_token_is_refused(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MESHFLASH_TOKEN", "secret")
    with pytest.raises(LaunchError, match="MESHFLASH_TOKEN has 6 characters: expected 16 or more"):
        rendezvous.open_rendezvous(place(0), 10.0)


def test_rendezvous_folder_must_belong_to_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    folder, other = tmp_path / f"meshflash-{os.getuid()}", tmp_path / "other"
    other.mkdir()
    folder.symlink_to(other)
    with pytest.raises(LaunchError, match=f"{folder} is a link, or belongs to another user: set TMPDIR"):
        rendezvous.open_rendezvous(Place("MPICH", 0, 2, 0, 2, None, "job"), 0.2)
    folder.unlink()
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(LaunchError, match="only 1 of 2 ranks came"):
        rendezvous.open_rendezvous(Place("MPICH", 0, 2, 0, 2, None, "job"), 1.5)  # opening the store counts, too
    assert folder.stat().st_mode & 0o777 == 0o700


def text(value):
    """Encode a string of the store's protocol."""
    return struct.pack("<Q", len(value)) + value


def garbage():
    """Yield garbage: other protocols, and store messages that are truncated, huge or invalid."""
    yield from (b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x00\xf1\x01\x00\x00\xed\x03\x03" + bytes(200))
    yield from (b"\xff" * 5000, bytes(5000), b"\0abcd", HELLO)
    for kind in MESSAGES:
        begin = HELLO + bytes([kind])
        yield from (begin, begin + b"\xff" * 64, begin + bytes(64), begin + struct.pack("<Q", 2**40) + b"a" * 64)
        yield begin + text(b"key") + struct.pack("<Q", 8 * 2**20) + b"a" * 64
        yield begin + struct.pack("<Q", 128 * 1024) + b"a" * 64
        yield HELLO + b"\1" + text(b"word") + text(b"no number") + bytes([kind]) + text(b"word") + bytes(8)


def send(port, message):
    """Send a message and return the open connection."""
    stray = socket.create_connection(("127.0.0.1", port), 5.0)
    with contextlib.suppress(OSError):  # the store may have closed it already
        stray.sendall(message)
    return stray


def test_garbage_messages_neither_end_nor_block_the_store(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("MESHFLASH_TOKEN", TOKEN)
    first, second = (rendezvous.open_rendezvous(place(rank), 10.0) for rank in range(2))
    with contextlib.ExitStack() as connections:
        for n, message in enumerate(garbage()):
            connections.enter_context(send(port, message))
            if n % 16 == 0:
                first.store.set("n", str(n))
                assert second.store.get("n") == str(n).encode()
        stores = [BoundedStore(opened.store, lambda: 5.0) for opened in (first, second)]
        with ThreadPoolExecutor(2) as pool:
            gathered = pool.map(lambda rank: Handshake(stores[rank], "info", rank, 2).all_gather(rank, 5.0), range(2))
            assert list(gathered) == [[0, 1], [0, 1]]


def connect_strays(port, stop, counts, max_connections):
    """Connect and send garbage until `stop` is set; keep every fourth connection open."""
    messages, held = list(garbage()), []
    while not stop.is_set() and counts["connected"] < max_connections:
        try:
            one = send(port, messages[counts["connected"] % len(messages)])
        except OSError:  # rank 0 does not listen yet, or has ended
            time.sleep(0.02)
            continue
        counts["connected"] += 1
        if counts["connected"] % 4:
            one.close()
        else:
            held.append(one)
    for one in held:
        one.close()


def test_stray_clients_neither_join_nor_end_a_job():
    """Stray clients connect from before rank 0 listens until the job has ended."""
    port, stop, counts = free_port(), threading.Event(), {"connected": 0}
    stray = threading.Thread(target=connect_strays, args=(port, stop, counts, 300), daemon=True)
    stray.start()
    try:
        found = [wait_for(rank, 120) for rank in start_ranks("attend", 2, 60, port, MESHFLASH_TOKEN=TOKEN)]
    finally:
        stop.set()
        stray.join(30)
    assert [job.code for job in found] == [0, 0], found[0].text + found[1].text
    check(jobs.FinishedJob(0, [one for job in found for one in job.reports], ""), 2, "variables")
    assert counts["connected"] > 20


@pytest.mark.slow
def test_a_thousand_stray_clients_neither_join_nor_end_a_job_of_four_ranks():
    """Stray clients connect from before rank 0 listens until attention has run; a quarter stays connected."""
    port, stop, counts = free_port(), threading.Event(), {"connected": 0}
    ranks = start_ranks("loop", 4, 60, port, MESHFLASH_TOKEN=TOKEN)
    stray = threading.Thread(target=connect_strays, args=(port, stop, counts, 1000), daemon=True)
    stray.start()
    try:
        for process in ranks:  # wait until each rank has run attention
            text = ""
            while not reports_in(text):
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, text
                text += line
        stray.join(120)
        assert counts["connected"] == 1000
        time.sleep(1.0)
        assert [process.poll() for process in ranks] == [None] * 4
    finally:
        stop.set()
        for process in ranks:
            process.kill()
            process.communicate()


#: A script that prints the open ports of its rank and of the launcher that started it.
LISTENER_SCRIPT = """
import json, os, pathlib, torch
from meshflash import attention, init

with init(timeout=60) as world:
    x = torch.ones(1, 16, 2, 8)
    attention(x, x, x, schedule="ring")
    torch.distributed.barrier()
    found = {}
    for pid in (os.getpid(), os.getppid()):
        links = [os.readlink(one) for one in pathlib.Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()]
        sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
        rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
        found[pid] = [row[1] for row in rows if row[3] == "0A" and row[9] in sockets]
    torch.distributed.barrier()
    report = {"listens": list(found.values()), "token": os.environ["MESHFLASH_TOKEN"]}
    os.write(1, f"report {json.dumps(report)}\\n".encode())
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_meshflash_launch_listens_only_on_loopback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LISTENER_SCRIPT)
    job = run([*jobs.PYTHON, "-m", "meshflash", "launch", "-n", "2", str(script)])
    assert job.code == 0, job.text
    assert len(job.reports) == 2
    assert len({one["token"] for one in job.reports}) == 1
    assert len(job.reports[0]["token"]) == 32
    for report in job.reports:
        own, launcher = report["listens"]
        assert own, "gloo listens somewhere"
        assert launcher, "the store listens somewhere"
        assert {address.partition(":")[0] for address in own + launcher} == {"0100007F"}
