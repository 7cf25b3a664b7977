"""Names and addresses of hosts: Slurm's node lists, and the address of this host that other hosts reach."""

from __future__ import annotations

import re
import socket
from pathlib import Path


def hosts_of(text: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it.

    Args:
        text: Names with ranges in brackets, separated by commas.

    >>> hosts_of("gpu[001-003,7],login,rack[1-2]node[1-2]")
    ['gpu001', 'gpu002', 'gpu003', 'gpu7', 'login', 'rack1node1', 'rack1node2', 'rack2node1', 'rack2node2']
    """
    return [host for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text) for host in _expand(part)]


def _expand(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    out = []
    for piece in match[1].split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            out += _expand(f"{part[: match.start()]}{number:0{len(first)}d}{part[match.end() :]}")
    return out


def tasks_on(text: str, node: int) -> int | None:
    """Return how many ranks a node has; None if Slurm's list ends before it.

    Args:
        text: The ranks of all nodes as Slurm writes them, such as 4(x2),3.
        node: The number of the node.

    >>> [tasks_on("4(x2),3", node) for node in range(4)]
    [4, 4, 3, None]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def reachable_address(other: str) -> str:
    """Return the address of this host on the route to another; ValueError if there is no route.

    Args:
        other: A name or an address of the other host.

    >>> reachable_address("127.0.0.1")
    '127.0.0.1'
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: a UDP connect only looks up the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"this host has no route to {other!r}: {error}") from error


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; empty if none is found.

    Args:
        address: An IPv4 address of this host.

    >>> interface_of("127.0.0.1") in ("lo", "lo0", "")
    True
    """
    try:
        import fcntl
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name[:15].encode())
                try:
                    found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                except OSError:  # an interface without an address
                    continue
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    except (ImportError, OSError):
        pass
    return ""


def boot() -> str:
    """Return the boot id of this host, which tells hosts of the same name apart; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_name() -> str:
    """Return a name of this host that no other host has: the hostname and the boot id."""
    return f"{socket.gethostname()} {boot()}".strip()


def is_loopback(address: str) -> bool:
    """Return whether an address reaches only the host itself.

    Args:
        address: A numeric address.
    """
    return address == "::1" or address.startswith("127.")
