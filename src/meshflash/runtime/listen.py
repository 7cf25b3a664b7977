"""Choose the interface that rank 0's store listens on: only the one that the other ranks use, if it is known.

torch itself binds its store to all interfaces. Here rank 0 binds a socket and hands it to torch.
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

#: The variable that overrides the address: an address of this host, or 0.0.0.0 for all interfaces.
LISTEN = "MESHFLASH_LISTEN"
#: The `--rdzv-backend` name of the rendezvous in `torchrun.py`, whose store listens only on the loopback interface.
LOOPBACK_RENDEZVOUS = "meshflash-loopback"
#: The name of the loopback interface, for gloo and NCCL.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def listener(address: str, port: int, one_node: bool) -> socket.socket | None:
    """Bind a socket to the address by which ranks reach rank 0; None if the store must listen on all interfaces.

    Args:
        address: The name or address of this host that the other ranks use, as in MASTER_ADDR.
        port: The port to bind to; 0 for a free one.
        one_node: Whether all ranks are known to be on this host.

    Raises:
        OSError: The port is taken.
        LaunchError: MESHFLASH_LISTEN names no address of this host.
    """
    requested = os.environ.get(LISTEN, "")
    host, reason = (requested, "") if requested else bind_address(address, one_node)
    if reason:
        log.info("rank 0's store listens on all interfaces: %s", reason)
        return None
    bound = _bind(host, port)
    if bound is None:
        raise LaunchError(f"{LISTEN}={host!r}: expected an address of this host, or 0.0.0.0 for all interfaces")
    if host in ("0.0.0.0", "::"):
        log.info("rank 0's store listens on all interfaces, as %s says", f"{LISTEN}={host}" if requested else host)
    return bound


def bind_address(address: str, one_node: bool) -> tuple[str, str]:
    """Return the address of this host to bind to, or an empty text and the reason why it is not known.

    Args:
        address: The name or address of this host that the other ranks use.
        one_node: Whether all ranks are known to be on this host.

    >>> bind_address("127.0.0.1", False), bind_address("localhost", False)
    (('127.0.0.1', ''), ('127.0.0.1', ''))
    """
    if address == "localhost":  # ::1 as well would need a second socket, and torch takes one
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
    """Describe what would listen where if this process called `init` now: pairs of a service and a text.

    Args:
        place: This process among the ranks of its job, as its launcher started it.

    >>> plan(Place("single"))
    [('store', 'none: a single rank opens no port'), ('liveness', 'none'), ('gloo', 'none'), ('nccl', 'none')]
    """
    if place.world_size == 1:
        return [
            ("store", "none: a single rank opens no port"),
            *((name, "none") for name in ("liveness", "gloo", "nccl")),
        ]
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    requested, local = os.environ.get(LISTEN, ""), is_loopback(address) or address == "localhost"
    if place.launcher == "torchrun":
        store = f"torchrun's, {address}:{port}: on all interfaces, unless meshflash launch or --nproc started it"
    elif address and place.rank:
        store = f"on rank 0's host, {address}:{port or 29500}"
    elif address:
        host, reason = (requested, "") if requested else bind_address(address, place.one_node)
        store = f"all interfaces, port {port or 29500}: {reason}" if reason else f"{host}:{port or 29500}"
    elif place.one_node:
        store, local = f"{requested or '127.0.0.1'}, a port that the system chooses", True
    else:
        store = "rank 0's address on the route to the other hosts, a free port or one computed from Slurm's job number"
    liveness = "127.0.0.1" if local else "the address on the route to the store"
    services = [("store", store), ("liveness", f"{liveness}, a port that the system chooses")]
    gloo = LOOPBACK if local else "the interface of this host's name, or the one that leads to rank 0"
    nccl = "the interfaces that NCCL finds; see NCCL_SOCKET_IFNAME"
    for name, variable, default in (("gloo", "GLOO_SOCKET_IFNAME", gloo), ("nccl", "NCCL_SOCKET_IFNAME", nccl)):
        given = os.environ.get(variable)
        services.append((name, f"{given}, as {variable} says" if given else default))
    return services


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_own(address: str) -> bool:
    bound = _bind(address, 0)
    if bound is None:
        return False
    bound.close()
    return True


def _bind(address: str, port: int) -> socket.socket | None:
    """Bind a socket to an address; None if this host does not have it, OSError if the port is taken."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError:
        return None
    try:
        # As torch does: old connections to the port may linger. On Windows two stores would share the port.
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        return None
    return bound
