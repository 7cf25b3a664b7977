"""Liveness probes between ranks: ended and silent processes, and the first cause, which reaches all ranks."""

import socket

import pytest

from meshflash.runtime import liveness as module
from meshflash.runtime.liveness import ENDED, SILENT, Cause, Liveness, LostRankError, Status, naming_lost_ranks

SCOPE = "mesh/1"


@pytest.fixture
def ranks():
    """Yield the liveness services of three ranks that know each other."""
    services = [Liveness("127.0.0.1") for _ in range(3)]
    for service in services:
        service.know({rank: other.address for rank, other in enumerate(services)})
    yield services
    for service in services:
        service.close()


def move_peer(service, rank, port):
    """Replace the address of a peer with a port on "another host"."""
    host, _, token, _, pid = service.peers[rank].host, 0, service.peers[rank].token, "", service.peers[rank].pid
    service.peers[rank] = module.Address(host, port, token, "another host", pid)


def test_probe_returns_the_status_of_ranks_that_answer(ranks):
    ranks[1].status[SCOPE] = Status("is in forward pass 3", 3, "forward")
    cause, answers = ranks[0].find(SCOPE, [0, 1, 2])
    assert cause is None
    assert answers == {1: Status("is in forward pass 3", 3, "forward"), 2: Status()}


def test_first_cause_reaches_all_ranks_and_wins(ranks):
    ranks[0].blame(SCOPE, Cause(2, "was lost"))
    assert ranks[1].cause(SCOPE) == Cause(2, "was lost")
    assert ranks[2].cause(SCOPE) is None  # the cause is not sent to the lost rank
    assert ranks[1].blame(SCOPE, Cause(0, "was lost")) == Cause(2, "was lost")
    assert ranks[1].cause("another group") is None
    ranks[0].blame("another group", Cause(2, "did not join", answers=True))
    assert ranks[2].cause("another group") == Cause(2, "did not join")


def test_ended_process_is_distinguished_from_a_silent_one(ranks, monkeypatch):
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        move_peer(ranks[0], 1, silent.getsockname()[1])
        move_peer(ranks[0], 2, closed.getsockname()[1])
        closed.close()
        cause, _ = ranks[0].find(SCOPE, [1, 2])
        assert cause == Cause(2, ENDED)  # the most certain loss is blamed
        cause, _ = ranks[0].find("another group", [1])
        assert cause == Cause(1, SILENT)
        assert (
            ranks[0].find_ended("a third group", 2) is None
        )  # this host's process table says nothing about another host


def test_probe_without_the_token_gets_no_answer(ranks):
    with socket.create_connection(ranks[0].address[:2], 5.0) as stranger:
        stranger.sendall(b'{"token": "guess", "scope": "mesh/1", "cause": [1, "was lost"]}\n')
        assert stranger.recv(100) == b""
    assert ranks[0].cause(SCOPE) is None


def test_long_reason_is_truncated_and_arrives(ranks):
    ranks[0].blame(SCOPE, Cause(0, f"raised {module.one_line(ValueError('x' * 9000))}"))
    assert ranks[1].cause(SCOPE).reason.startswith("raised ValueError: xxx")


def test_errors_of_collectives_name_the_rank_that_failed_first(ranks, monkeypatch):
    monkeypatch.setattr(module, "_here", ranks[1])
    ranks[0].blame(module.JOB, Cause(0, "raised ValueError: no labels"))
    with (
        pytest.raises(LostRankError, match=r"^rank 0 raised ValueError: no labels; .*Connection closed"),
        naming_lost_ranks(),
    ):
        raise RuntimeError("Connection closed by peer")
    ranks[1].reset()
    with pytest.raises(RuntimeError, match="my own"), naming_lost_ranks():
        raise RuntimeError("my own")


def test_error_of_this_rank_is_published_before_it_leaves(ranks, monkeypatch):
    monkeypatch.setattr(module, "_here", ranks[1])
    with pytest.raises(ValueError, match="no labels"), naming_lost_ranks():
        raise ValueError("no labels")
    assert ranks[0].cause(module.JOB) == Cause(1, "raised ValueError: no labels")
