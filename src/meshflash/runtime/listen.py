"""Where rank 0's store listens: at the address that the other ranks use, and at no other where that can be known.

torch itself binds its store to all interfaces. Here rank 0 binds a socket of its own and hands it over.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys

from meshflash.runtime.hosts import is_loopback
from meshflash.runtime.launchers import LaunchError, Place
from meshflash.runtime.log import log

#: The variable that overrides the address: one of this host, or 0.0.0.0 for all.
LISTEN = "MESHFLASH_LISTEN"
#: What `--rdzv-backend` calls the rendezvous of `torchrun.py`, whose store listens on the loopback alone.
LOOPBACK_RENDEZVOUS = "meshflash-loopback"
#: The loopback interface, for gloo and NCCL.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def listener(address: str, port: int, one_node: bool) -> socket.socket | None:
    """Bind a socket to the address by which ranks reach rank 0; None where the store must listen on all interfaces.

    OSError where the port is taken, LaunchError where MESHFLASH_LISTEN names no address of this host.

    Args:
        address: a name or an address, as in MASTER_ADDR.
        port: to bind to; 0 for one that the system chooses.
        one_node: whether all ranks are known to be on this host.
    """
    asked = os.environ.get(LISTEN, "")
    host, reason = (asked, "") if asked else bind_address(address, one_node)
    if reason:
        log.info("rank 0's store listens on all interfaces: %s", reason)
        return None
    bound = _bound(host, port)
    if bound is None:
        raise LaunchError(f"{LISTEN}={host!r}: expected an address of this host, or 0.0.0.0 for all interfaces")
    if host in ("0.0.0.0", "::"):
        log.info("rank 0's store listens on all interfaces, as %s says", f"{LISTEN}={host}" if asked else host)
    return bound


def bind_address(address: str, one_node: bool) -> tuple[str, str]:
    """Return the address of this host that a name or an address stands for, or an empty one and why there is none.

    >>> bind_address("127.0.0.1", False), bind_address("localhost", False)
    (('127.0.0.1', ''), ('127.0.0.1', ''))
    """
    if address == "localhost":  # binding ::1 as well would take a second socket
        return "127.0.0.1", ""
    try:
        found = list(dict.fromkeys(info[4][0] for info in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)))
    except OSError as error:
        return "", f"{address} does not resolve here ({error})"
    own = [str(one) for one in found if _is_own(str(one))]
    if not own:
        return "", f"{address} is no address of this host, as behind NAT or in a container"
    # Many systems map their own name to 127.0.1.1, which other hosts do not reach.
    if not one_node and is_loopback(own[0]) and not _is_numeric(address):
        return "", f"{address} is a loopback address here, and ranks may be on other hosts"
    if len(own) > 1:
        return "", f"{address} stands for {', '.join(own)} here, and ranks may use any of them"
    return own[0], ""


def plan(place: Place) -> list[tuple[str, str]]:
    """Describe what would listen where once this process, as its launcher started it, calls `init`.

    >>> plan(Place("single"))
    [('store', 'none: a single rank opens no port'), ('liveness', 'none'), ('gloo', 'none'), ('nccl', 'none')]
    """
    if place.world_size == 1:
        return [
            ("store", "none: a single rank opens no port"),
            *((name, "none") for name in ("liveness", "gloo", "nccl")),
        ]
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    asked, local = os.environ.get(LISTEN, ""), is_loopback(address) or address == "localhost"
    if place.launcher == "torchrun":
        store = f"torchrun's, {address}:{port}: on all interfaces, unless meshflash launch or --nproc started it"
    elif address and place.rank:
        store = f"on rank 0's host, {address}:{port or 29500}"
    elif address:
        host, reason = (asked, "") if asked else bind_address(address, place.one_node)
        store = f"all interfaces, port {port or 29500}: {reason}" if reason else f"{host}:{port or 29500}"
    elif place.one_node:
        store, local = f"{asked or '127.0.0.1'}, a port that the system chooses", True
    else:
        store = (
            "rank 0's address on the way to the other hosts, a port that the system chooses or Slurm's job number gives"
        )
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    way = LOOPBACK if local else "the interface of this host's name, or the one that leads to rank 0"
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    return [
        ("store", store),
        (
            "liveness",
            f"{'127.0.0.1' if local else 'the address that leads to the store'}, a port that the system chooses",
        ),
        ("gloo", f"{gloo}, as GLOO_SOCKET_IFNAME says" if gloo else way),
        (
            "nccl",
            f"{nccl}, as NCCL_SOCKET_IFNAME says" if nccl else "the interfaces that NCCL finds; see NCCL_SOCKET_IFNAME",
        ),
    ]


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_own(address: str) -> bool:
    bound = _bound(address, 0)
    if bound is None:
        return False
    bound.close()
    return True


def _bound(address: str, port: int) -> socket.socket | None:
    """Bind a socket to an address; None where this host does not have it, OSError where the port is taken."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError:
        return None
    try:
        if os.name == "posix":  # as torch does: connections to the port may linger; on Windows it would share the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        return None
    return bound
