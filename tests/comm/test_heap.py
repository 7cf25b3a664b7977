"""Symmetric heaps: allocation, views, barriers, cleanup, and errors that name missing ranks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from meshflash.comm.handshake import DisagreementError, StoreBarrier
from meshflash.comm.heap import gpu, shared_files
from meshflash.comm.heap.allocator import BlockAllocator
from meshflash.comm.heap.api import ALIGN, open_heap
from meshflash.comm.transports.contract import TransportError
from meshflash.runtime.devices import take_device
from meshflash.runtime.mps import missing, mps
from meshflash.runtime.parent import alive
from meshflash.runtime.processes import run_ranks


def open_local_heap(world=2, size=4096):
    return open_heap(world, bytes=size, device="cpu", timeout=1)


def leftover_files():
    return sorted(path.name for path in shared_files.folder().glob(f"{shared_files.PREFIX}*-{os.getpid()}"))


def test_allocated_blocks_never_overlap_and_free_ranges_merge():
    chance = random.Random(0)
    allocator = BlockAllocator(10_000)
    taken: dict[int, int] = {}
    refused = 0
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            offset = chance.choice(sorted(taken))
            allocator.release(offset)
            del taken[offset]
        else:
            size, align = chance.randint(1, 900), chance.choice([16, 64, 256])
            found = allocator.allocate(size, align)
            if found is None:
                refused += 1
                continue
            assert found % align == 0
            assert found + size <= 10_000
            assert all(found + size <= other or other + length <= found for other, length in taken.items())
            taken[found] = size
        assert allocator.used == sum(taken.values())
    assert refused
    for offset in taken:
        allocator.release(offset)
    assert allocator.largest == 10_000


def test_tensor_has_the_same_offset_on_every_rank():
    with open_local_heap(3) as heap:
        first, second = heap.allocate((3, 5), torch.bfloat16, name="first"), heap.allocate(7, torch.int64, align=16)
        heap.barrier()
        assert second.shape == (7,)
        assert second.dtype == torch.int64
        bases = heap.bases.tolist()
        for rank in heap.local_ranks:
            assert first.peer(rank).data_ptr() == bases[rank]
            assert bases[rank] % ALIGN == 0
            assert second.peer(rank).data_ptr() - bases[rank] == 32
            assert not first.peer(rank).any()
        part = second.view(7, 1)[2:4]
        part.peer(2).fill_(9)
        with heap.as_rank(2):
            assert second.local.tolist() == [0, 0, 9, 9, 0, 0, 0]
            assert part.bases is heap.bases
        assert not second.local.any()
        assert "first [3, 5] bfloat16, rank 0 of 3" in repr(first)
        first.free()
        second.free()


def test_freed_memory_is_available_and_zeroed_after_a_barrier():
    with open_local_heap(size=1024) as heap:
        x = heap.allocate(256, torch.int32)
        x.local.fill_(5)
        heap.free(x)
        with pytest.raises(
            ValueError, match=r"1,024 bytes requested.*1 freed ones become available at the next barrier"
        ):
            heap.allocate(256, torch.int32)
        heap.barrier()
        assert heap.usage.used == 0
        y = heap.allocate(256, torch.int32)
        assert not y.local.any()
        usage = heap.usage
        assert (usage.bytes, usage.used, usage.peak, usage.largest, usage.allocations) == (1024, 1024, 1024, 0, 1)
        y.free()


def test_misuse_raises_with_a_remedy():
    with open_local_heap() as heap:
        x = heap.allocate((4, 4), name="x")
        with pytest.raises(RuntimeError, match=r"x \[4, 4\] float32: call heap.barrier\(\) between allocate and peer"):
            x.peer(1)
        heap.barrier()
        with pytest.raises(ValueError, match="expected a rank from 0 to 1"):
            x.peer(2)
        with pytest.raises(ValueError, match="take slices"):
            x[[0, 1]]
        with pytest.raises(ValueError, match="this is a view"):
            x[1:].free()
        with pytest.raises(ValueError, match="a power of 2 from 8 to 256"):
            heap.allocate(3, torch.int64, align=4)
        with pytest.raises(ValueError, match=r"takes a larger number"):
            heap.allocate(10_000)
        with pytest.raises(ValueError, match="from 0 to 1"), heap.as_rank(2):
            pass
        x.free()
        with pytest.raises(ValueError, match="free already"):
            x.free()
        with pytest.raises(RuntimeError, match="was freed"):
            x.local  # noqa: B018 - it is the reading that raises
    with pytest.raises(RuntimeError, match="closed"):
        heap.allocate(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(group=2, kind="remote"), "expected one of symmetric, shared, local"),
        (dict(group=None, kind="local"), "give their number"),
        (dict(group=2, kind="shared"), "expected a process group"),
        (dict(group=None), "there is no process group"),
        (dict(group=2, bytes=0), "expected a number >= 1"),
        (dict(group=2, timeout=0), "seconds > 0"),
    ],
)
def test_invalid_arguments_of_open_heap_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        open_heap(**{"bytes": 4096, "device": "cpu", **arguments})


def test_closing_with_live_allocations_warns():
    heap = open_local_heap()
    heap.allocate((2, 3), name="partials")
    heap.allocate(8, torch.int32).free()
    with pytest.warns(RuntimeWarning, match=r"1 allocations that were not freed: partials \[2, 3\] float32"):
        heap.close()
    heap.close()  # closing twice is allowed
    with pytest.warns(RuntimeWarning, match="not freed"), open_local_heap() as heap:
        heap.allocate(1)
    with warnings.catch_warnings():  # after an error, live allocations are expected and must not warn
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="larger number"), open_local_heap() as heap:
            heap.allocate(10_000, name=heap.allocate(1)._allocation.text)


def write_to_all_peers(rank, world, group):
    """Write to all peers and check their writes; the heap's files are already unlinked."""
    with open_heap(group, bytes=8192, device="cpu", timeout=20) as heap:
        assert heap.kind == "shared"
        assert leftover_files() == []
        x = heap.allocate((world, 4), torch.int64)
        heap.barrier()
        for peer in range(world):
            x.peer(peer)[rank] = torch.arange(4) + 10 * rank + 100 * peer
        heap.barrier()
        assert x.local.tolist() == [[100 * rank + 10 * writer + n for n in range(4)] for writer in range(world)]
        view = x[:1].local
        x.free()
        for n in range(20):  # freed offsets are reused, the same on all ranks
            y = heap.allocate(64 + n)
            heap.barrier()
            y.peer((rank + 1) % world).fill_(n)
            heap.barrier()
            assert bool((y.local == n).all())
            y.free()
        used = heap.usage.peak
    assert view[0, 0] is not None  # the view keeps the memory mapped after close
    return used


@pytest.mark.parametrize("world", [1, 2, 4])
def test_writes_to_a_shared_heap_reach_all_processes(pool, world):
    assert len(set(pool.run(world, write_to_all_peers))) == 1


def allocate_different_shapes(heap):
    """Allocate another shape on each rank."""
    heap.allocate(4, name="flags")
    heap.barrier()
    heap.allocate((2, 2 + heap.rank), torch.bfloat16, name="x")
    heap.barrier()


def free_on_one_rank(heap):
    """Free a tensor on rank 1 only."""
    x = heap.allocate(4, name="flags")
    if heap.rank:
        x.free()
    heap.barrier()


def leave_on_one_rank(heap):
    """Leave the heap by an error on rank 1 only."""
    if heap.rank:
        raise ZeroDivisionError("of rank 1")
    heap.barrier()


def raised_by(group, error, body):
    """Return the message of the error that `body` raises inside a heap."""
    with pytest.raises(error) as raised, open_heap(group, bytes=8192, device="cpu", timeout=20) as heap:
        body(heap)
    return str(raised.value)


def provoke_failures(rank, world, group):
    """Provoke failures between ranks, one after another; each time all ranks raise."""
    messages = {
        "shapes": raised_by(group, DisagreementError, allocate_different_shapes),
        "free": raised_by(group, DisagreementError, free_on_one_rank),
        "left": raised_by(group, ZeroDivisionError if rank else TransportError, leave_on_one_rank),
    }
    heap = open_heap(group, bytes=8192, device="cpu", timeout=1)
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(TransportError) as timed_out:
            heap.barrier()
        messages["late"] = str(timed_out.value)
    messages["seconds"] = time.monotonic() - begin
    heap.close()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank:
        os.posix_fallocate, kept = full, os.posix_fallocate
    with pytest.raises(ValueError if rank else TransportError) as no_space:
        open_heap(group, bytes=8192, device="cpu", timeout=20)
    if rank:
        os.posix_fallocate = kept
    messages["space"] = str(no_space.value)
    assert leftover_files() == []
    return messages


def test_all_ranks_raise_when_one_fails(pool):
    zero, one = pool.run(2, provoke_failures)
    assert zero["shapes"] == one["shapes"]
    assert "in call 1 of the heap: rank 0 called allocate x [2, 2] bfloat16, rank 1 allocate x [2, 3]" in zero["shapes"]
    assert "rank 0 called nothing, rank 1 free flags [4] float32; all ranks must allocate" in zero["free"]
    assert zero["left"] == "rank 1 left the heap by ZeroDivisionError: of rank 1"
    assert "rank 1 did not come to exchange 3 of the heap's ranks within 1 s" in zero["late"]
    assert zero["seconds"] < 5
    assert "bytes left, and this rank's heap needs 8,192; ask for fewer bytes" in one["space"]
    assert zero["space"].startswith("rank 1 raised ValueError: /dev/shm has")


def test_sweep_removes_only_files_of_dead_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "folder", lambda: tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not alive(ended.pid)
    zombie = subprocess.Popen(["true"])  # ended, and not reaped yet
    deadline = time.monotonic() + 10
    while alive(zombie.pid):
        assert time.monotonic() < deadline
    for name in ("a-0", "b-1"):
        (tmp_path / f"{shared_files.PREFIX}{name}-{ended.pid}").touch()
    (tmp_path / f"{shared_files.PREFIX}c-0-{zombie.pid}").touch()
    kept = [f"{shared_files.PREFIX}d-0-{os.getpid()}", f"{shared_files.PREFIX}notes", f"other-0-{ended.pid}"]
    for name in kept:
        (tmp_path / name).touch()
    locked = tmp_path / f"{shared_files.PREFIX}e-0-{ended.pid}"  # a living process in another container has this id
    with locked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        swept = shared_files.sweep()
        assert {name.removeprefix(shared_files.PREFIX)[0] for name in swept} == {"a", "b", "c"}
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, locked.name])
    assert shared_files.sweep() == [locked.name]
    zombie.wait()


class TwoRanks(StoreBarrier):
    """A rendezvous of two ranks on one host; the other rank sends the same payload as this one."""

    def __init__(self):
        self.rank, self.world = 0, 2

    def all_gather_result(self, make):
        made = make()
        return [made, made]


def test_symmetric_memory_is_zeroed_before_any_rank_uses_it(monkeypatch):
    """Host memory stands in for torch's symmetric memory; the test marked gpu uses the real one."""
    events: list[str] = []
    memories = [torch.full((8192,), 7, dtype=torch.uint8) for _ in range(2)]
    offsets = [-memory.data_ptr() % ALIGN for memory in memories]

    class Fake(TwoRanks):
        def __init__(self, group, seconds):
            super().__init__()
            self._processes, self._global_ranks = [{"host": "a"}, {"host": group}], [0, 1]

        def all_gather(self, payload):
            events.append(str(payload))
            return [payload, payload]

    def make_heap(count, group, device, timeout):
        return SimpleNamespace(of=lambda rank: memories[rank][offsets[rank] :][:count])

    streams = SimpleNamespace(device=lambda device: nullcontext(), synchronize=lambda device: events.append("finished"))
    monkeypatch.setattr(gpu, "symmetric_memory", lambda kind: True)
    monkeypatch.setattr(gpu, "StoreBarrier", Fake)
    monkeypatch.setattr(gpu, "TorchHeap", make_heap)
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    with pytest.raises(ValueError, match="the ranks are on 2 hosts"):
        gpu.SymmetricHeap("b", 4096, torch.device("cpu"), 1)
    heap = gpu.SymmetricHeap("a", 4096, torch.device("cpu"), 1)
    assert events == ["finished", "zeroed"]
    assert not heap.allocate(1000).local.any()
    assert heap._memories[0].sum() == 0
    assert heap._memories[1].sum() == 7 * 4096  # the other rank zeroes its own memory
    with pytest.warns(RuntimeWarning, match="rank 0: the heap was closed with 1 allocations"):
        heap.close()
    assert events[2:] == ["finished"]


def test_fine_grained_memory_is_allocated_opened_and_freed(monkeypatch):
    calls: list[Any] = []
    memory = ctypes.create_string_buffer(64)

    def malloc(pointer, size, flags):
        calls.append(("malloc", size.value, flags.value))
        pointer._obj.value = ctypes.addressof(memory)
        return 0

    def get_handle(into, pointer):
        into._obj.reserved = b"where it is"
        return 0

    def open_handle(pointer, handle, flags):
        calls.append(("open", handle.reserved, flags.value))
        pointer._obj.value = ctypes.addressof(memory) + 32
        return 0

    library = SimpleNamespace(
        hipExtMallocWithFlags=malloc,
        hipIpcGetMemHandle=get_handle,
        hipIpcOpenMemHandle=open_handle,
        hipIpcCloseMemHandle=lambda pointer: calls.append(("close", pointer.value - ctypes.addressof(memory))),
        hipFree=lambda pointer: calls.append(("free", pointer.value - ctypes.addressof(memory))),
    )
    monkeypatch.setattr(gpu, "_tensor_at", lambda address, num_bytes: address - ctypes.addressof(memory))
    found = gpu.FineGrainedMemory(library, 32, TwoRanks())
    assert found.memories == [0, 32]
    del found
    assert calls == [("malloc", 32, 1), ("open", b"where it is", 1), ("close", 32), ("free", 0)]
    library.hipIpcOpenMemHandle = lambda *_: 17
    with pytest.raises(RuntimeError, match="hipIpcOpenMemHandle gave error 17"):
        gpu.FineGrainedMemory(library, 32, TwoRanks())


def write_to_all_peers_on_one_gpu(rank, world, report):
    """Write to the heaps of all ranks of one GPU."""
    device = take_device("cuda", rank)
    with open_heap(bytes=2**16, device=device, timeout=30) as heap:
        assert heap.kind == "symmetric"
        x = heap.allocate((world, 4), torch.int64)
        heap.barrier()
        for peer in range(world):
            x.peer(peer)[rank] = torch.arange(4, device=device) + 10 * rank + 100 * peer
        heap.barrier()
        assert x.local.tolist() == [[100 * rank + 10 * writer + n for n in range(4)] for writer in range(world)]
        assert x.peer(rank).data_ptr() == x.local.data_ptr()
        x.free()
        heap.allocate((2, 3 + rank))
        with pytest.raises(DisagreementError, match="allocate"):
            heap.barrier()
        heap.close()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_writes_to_a_symmetric_heap_reach_all_ranks_of_one_gpu(world):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    run_ranks(world, write_to_all_peers_on_one_gpu, timeout=120)
    if missing() is None:
        with mps():
            run_ranks(world, write_to_all_peers_on_one_gpu, timeout=120)
