"""The transport contract on gloo and on the in-process hub, and the special behaviour of each transport."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as _distributed

from hub import in_threads
from meshflash.comm.transports.contract import Transport, TransportError
from meshflash.comm.transports.loopback import Hub, Loopback
from meshflash.comm.transports.process_group import NCCL_SMS, ProcessGroupTransport, backend_of, nccl_ctas

dist: Any = _distributed  # torch's stubs do not declare all that this module exports

CPU = torch.device("cpu")


def elements(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def nan_buffer(n: int) -> torch.Tensor:
    return torch.full((n,), torch.nan)


def check_message_order(mover: Transport, rank: int, world: int) -> None:
    """Messages between two ranks arrive in the order of their posts, in whichever order handles are waited for."""
    after, before = (rank + 1) % world, (rank - 1) % world
    buffers = [nan_buffer(n + 1) for n in range(6)]
    handles = [
        mover.exchange("mesh", [(after, torch.full((n + 1,), 10.0 * rank + n))], [(before, buffers[n])])
        for n in range(6)
    ]
    for n in (3, 0, 5, 1, 2, 4):
        mover.wait(handles[n])
        assert torch.equal(buffers[n], torch.full((n + 1,), 10.0 * before + n))


def check_exchange_with_all_ranks(mover: Transport, rank: int, world: int) -> None:
    """One exchange with all ranks, this one included, with several messages to each."""
    peers = range(world)
    buffers = {(peer, n): nan_buffer(n + 2) for peer in peers for n in range(3)}
    sends = [(peer, torch.full((n + 2,), 100.0 * rank + 10 * peer + n)) for peer in peers for n in range(3)]
    recvs = [(peer, buffer) for (peer, _), buffer in buffers.items()]
    mover.wait(mover.exchange("mesh", sends, recvs))
    for (peer, n), buffer in buffers.items():
        assert torch.equal(buffer, torch.full((n + 2,), 100.0 * peer + 10 * rank + n))


def check_empty_and_one_way_messages(mover: Transport, rank: int, world: int) -> None:
    """Empty exchanges, empty messages and one-way messages work."""
    mover.wait(mover.exchange("mesh", [], []))
    buffer = nan_buffer(2)
    if rank == 0:
        mover.wait(mover.exchange("mesh", [(world - 1, elements(1, 2))], []))
    elif rank == world - 1:
        mover.wait(mover.exchange("mesh", [], [(0, buffer)]))
        assert buffer.tolist() == [1, 2]


def check_messages_to_self(mover: Transport, rank: int, world: int) -> None:
    """A message to this rank itself arrives at once, and is not counted."""
    mover.counters.clear()
    buffers = [nan_buffer(2), nan_buffer(3)]
    handle = mover.exchange(
        "mesh", [(rank, elements(1, 2)), (rank, elements(3, 4, 5))], [(rank, buffer) for buffer in buffers]
    )
    assert [buffer.tolist() for buffer in buffers] == [[1, 2], [3, 4, 5]]
    mover.wait(handle)
    assert mover.counters.received_bytes == 0
    assert mover.counters.calls == {"exchange": 1}


def check_collectives(mover: Transport, rank: int, world: int) -> None:
    """all_gather sends every source to all ranks in order; all_to_all sends its n-th part to rank n."""
    target = nan_buffer(2 * world)
    mover.wait(mover.collective("all_gather", "mesh", elements(rank, -rank), target))
    assert target.tolist() == [sign * peer for peer in range(world) for sign in (1, -1)]
    source = torch.tensor([[10 * rank + peer, 0.5] for peer in range(world)]).flatten()
    target = nan_buffer(2 * world)
    mover.wait(mover.collective("all_to_all", "mesh", source, target))
    assert target.reshape(world, 2).tolist() == [[10 * peer + rank, 0.5] for peer in range(world)]


def check_concurrent_operations(mover: Transport, rank: int, world: int) -> None:
    """Collectives and exchanges can be in flight at the same time."""
    gathered, got = nan_buffer(world), nan_buffer(1)
    first = mover.collective("all_gather", "mesh", elements(rank), gathered)
    second = mover.exchange("mesh", [((rank + 1) % world, elements(rank))], [((rank - 1) % world, got)])
    third_target = nan_buffer(world)
    third = mover.collective("all_gather", "mesh", elements(-rank), third_target)
    for handle in (third, second, first):
        mover.wait(handle)
    assert gathered.tolist() == list(range(world))
    assert third_target.tolist() == [-peer for peer in range(world)]
    assert got.tolist() == [(rank - 1) % world]


def check_dtypes(mover: Transport, rank: int, world: int) -> None:
    """Bits arrive unchanged in every dtype."""
    after, before = (rank + 1) % world, (rank - 1) % world
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = torch.arange(5, dtype=dtype) / 3
        buffer = torch.zeros(5, dtype=dtype)
        mover.wait(mover.exchange("mesh", [(after, x * (rank + 1))], [(before, buffer)]))
        assert torch.equal(buffer, x * (before + 1))
        gathered = torch.zeros(5 * world, dtype=dtype)
        mover.wait(mover.collective("all_gather", "mesh", x, gathered))
        assert torch.equal(gathered, x.repeat(world))


def check_counters(mover: Transport, rank: int, world: int) -> None:
    """Counters hold the bytes that moved between ranks, by peer."""
    mover.counters.clear()
    after, before = (rank + 1) % world, (rank - 1) % world
    sends, recvs = [(after, nan_buffer(3)), (rank, nan_buffer(9))], [(before, nan_buffer(3)), (rank, nan_buffer(9))]
    mover.wait(mover.exchange("mesh", sends, recvs))
    mover.wait(mover.exchange("mesh", sends[:1], recvs[:1]))
    assert mover.counters.received == {("mesh", before): 24}
    assert mover.counters.sent == {("mesh", after): 24}
    mover.wait(mover.collective("all_gather", "mesh", nan_buffer(2), nan_buffer(2 * world)))
    mover.wait(mover.collective("all_to_all", "mesh", nan_buffer(5 * world), nan_buffer(5 * world)))
    others = [peer for peer in range(world) if peer != rank]
    assert mover.counters.received == {("mesh", peer): 28 + 24 * (peer == before) for peer in others}
    assert mover.counters.sent == {("mesh", peer): 28 + 24 * (peer == after) for peer in others}
    assert mover.counters.received_bytes == 28 * len(others) + 24
    assert mover.counters.calls == {"exchange": 2, "all_gather": 1, "all_to_all": 1}
    mover.counters.clear()
    assert mover.counters.received_bytes == 0


CONTRACT = (
    check_message_order,
    check_exchange_with_all_ranks,
    check_empty_and_one_way_messages,
    check_messages_to_self,
    check_collectives,
    check_concurrent_operations,
    check_dtypes,
    check_counters,
)


def check_contract_on_gloo(rank: int, world: int, group: Any) -> None:
    """Run all contract checks over gloo on this rank."""
    mover = ProcessGroupTransport({"mesh": group}, CPU, timeout=20.0)
    assert (mover.name, mover.rank("mesh"), mover.world("mesh")) == ("gloo", rank, world)
    for check in CONTRACT:
        check(mover, rank, world)
        dist.barrier(group)


@pytest.mark.parametrize("world", [2, 4])
def test_gloo_transport_fulfils_the_contract(pool, world):
    pool.run(world, check_contract_on_gloo)


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("check", CONTRACT)
def test_hub_transport_fulfils_the_contract(check, world):
    in_threads(world, lambda rank, mover: check(mover, rank, world), timeout=10.0)


def exchange_in_subgroups(rank: int, world: int, group: Any) -> None:
    """Exchange in a pair and in the whole mesh at the same time; ranks count within their group."""
    pairs = [dist.new_group([0, 3]), dist.new_group([2, 1])]
    own = pairs[0] if rank in (0, 3) else pairs[1]
    mover = ProcessGroupTransport({"mesh": group, "pair": own}, CPU, timeout=20.0)
    me, other = mover.rank("pair"), 1 - mover.rank("pair")
    assert mover.world("pair") == 2
    got, around = nan_buffer(1), nan_buffer(1)
    one = mover.exchange("pair", [(other, elements(rank))], [(other, got)])
    two = mover.exchange("mesh", [((rank + 1) % 4, elements(10 + rank))], [((rank - 1) % 4, around)])
    mover.wait(two)
    mover.wait(one)
    assert got.tolist() == [3 - rank]
    assert around.tolist() == [10 + (rank - 1) % 4]
    assert mover.counters.received == {("pair", other): 4, ("mesh", (rank - 1) % 4): 4}
    gathered = nan_buffer(2)
    mover.wait(mover.collective("all_gather", "pair", elements(rank), gathered))
    assert gathered[me] == rank
    assert gathered.sum() == 3


def test_ranks_are_numbered_within_the_group(pool):
    pool.run(4, exchange_in_subgroups)


def wait_for_silent_rank_1(rank: int, world: int, group: Any, form: str) -> tuple[str, float]:
    """Wait on rank 0 for rank 1, which does nothing; return the error message and the seconds waited."""
    mover = ProcessGroupTransport({"mesh": group}, CPU, timeout=0.5)
    check_exchange_with_all_ranks(mover, rank, world)
    dist.barrier(group)
    if rank == 1:
        return "", 0.0
    began = time.monotonic()
    if form == "recv":
        handle = mover.exchange("mesh", [], [(1, nan_buffer(3))])
    elif form == "send":
        handle = mover.exchange("mesh", [(1, nan_buffer(3))], [])
    else:
        handle = mover.collective("all_gather", "mesh", nan_buffer(2), nan_buffer(2 * world))
    with pytest.raises(TransportError) as error:
        mover.wait(handle)
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("form", ["recv", "send", "all_gather"])
def test_silent_peer_is_named_within_the_timeout(pool, form):
    message, waited = pool.run(2, wait_for_silent_rank_1, form)[0]
    assert message.startswith("rank 1 was lost or did not answer within 0.5 s (")
    assert message.endswith("ended, or called attention with other arguments; look at its output first")
    assert waited < 10


def exchange_with_lost_rank_1(rank: int, world: int, group: Any) -> list[str]:
    """Exchange three times with rank 1 after it has left; return the error messages."""
    pair = dist.new_group([0, 1])
    mover = ProcessGroupTransport({"mesh": pair}, CPU, timeout=10.0)
    check_exchange_with_all_ranks(mover, rank, world)
    dist.barrier(group)
    if rank == 1:
        del mover
        dist.destroy_process_group(pair)
        dist.barrier(group)
        return []
    dist.barrier(group)
    began = time.monotonic()
    messages = []
    for _ in range(3):
        with pytest.raises(TransportError) as error:
            mover.wait(mover.exchange("mesh", [(1, nan_buffer(3))], [(1, nan_buffer(3))]))
        messages.append(str(error.value))
    assert time.monotonic() - began < 5
    return messages


def test_lost_peer_is_named(pool):
    messages = pool.run(2, exchange_with_lost_rank_1)[0]
    assert len(messages) == 3
    assert all(text.startswith("rank 1 was lost") for text in messages)


def check_refused_devices(rank: int, world: int, group: Any) -> None:
    """Check that devices without a backend in the group are refused."""
    with pytest.raises(ValueError, match=r'gloo cannot move tensors on cuda; .* such as "cpu:gloo,cuda:nccl"'):
        ProcessGroupTransport({"mesh": group}, torch.device("cuda"), 1.0)
    with pytest.raises(ValueError, match=r"group mesh: the process group has no backend for xla"):
        ProcessGroupTransport({"mesh": group}, torch.device("xla"), 1.0)
    assert backend_of(group, CPU) == "gloo"
    only_host = dist.new_group(backend="cpu:gloo")
    assert backend_of(only_host, CPU) == "gloo"
    assert backend_of(only_host, torch.device("cuda")) is None
    with pytest.raises(ValueError, match=r"group mesh: the process group has no backend for cuda"):
        ProcessGroupTransport({"mesh": only_host}, torch.device("cuda"), 1.0)


def test_tensors_that_the_backend_cannot_move_are_refused(pool):
    pool.run(2, check_refused_devices)


def test_hub_names_the_rank_that_did_not_send():
    mover = Hub(2, timeout=0.01).transport(0)
    with pytest.raises(TransportError, match=r"rank 1 did not send within 0.01 s"):
        mover.wait(mover.exchange("mesh", [], [(1, nan_buffer(1))]))


def test_hub_copies_messages():
    hub = Hub(2)
    x, buffer = elements(1, 2), nan_buffer(2)
    hub.transport(0).exchange("mesh", [(1, x)], [])
    x.zero_()
    mover = hub.transport(1)
    mover.wait(mover.exchange("mesh", [], [(0, buffer)]))
    assert buffer.tolist() == [1, 2]


def test_loopback_counts_messages_without_delivering_them():
    mover = Loopback(1, 3)
    assert (mover.name, mover.rank("mesh"), mover.world("mesh")) == ("loopback", 1, 3)
    buffer = nan_buffer(2)
    mover.wait(mover.exchange("mesh", [(2, elements(1, 2))], [(0, buffer)]))
    assert buffer.isnan().all()
    mover.wait(mover.collective("all_gather", "mesh", elements(1), nan_buffer(3)))
    mover.wait(mover.collective("all_to_all", "mesh", nan_buffer(6), nan_buffer(6)))
    assert mover.counters.received == {("mesh", 0): 8 + 4 + 8, ("mesh", 2): 4 + 8}
    assert mover.counters.sent == {("mesh", 2): 8 + 4 + 8, ("mesh", 0): 4 + 8}
    check_messages_to_self(mover, 1, 3)


def test_message_to_self_needs_a_receive():
    with pytest.raises(ValueError, match="zip"):
        Loopback(0, 2).exchange("mesh", [(0, elements(1))], [])


@pytest.mark.parametrize(
    ("max_ctas", "variables", "expected"),
    [
        (-(2**31), {}, NCCL_SMS),  # as NCCL writes "not set"
        (4, {}, 4),
        (-(2**31), {"NCCL_MAX_CTAS": "6"}, 6),
        (12, {"NCCL_MAX_CTAS": "16", "NCCL_MAX_NCHANNELS": "3"}, 3),
        (12, {"NCCL_MAX_NCHANNELS": "many"}, 12),
    ],
)
def test_nccl_needs_the_sms_that_its_ctas_are_limited_to(max_ctas, variables, expected, monkeypatch):
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    backend = SimpleNamespace(options=SimpleNamespace(config=SimpleNamespace(max_ctas=max_ctas)))
    group = SimpleNamespace(_get_backend=lambda device: backend)
    assert nccl_ctas(group, torch.device("cuda")) == expected


def test_messages_of_gloo_need_no_sms(pool):
    assert pool.run(2, sm_margin_of_gloo) == [0, 0]


def sm_margin_of_gloo(rank: int, world: int, group: Any) -> int:
    return ProcessGroupTransport({"mesh": group}, CPU, timeout=20.0).sm_margin
