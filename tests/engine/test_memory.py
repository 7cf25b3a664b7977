"""The pool of scratch memory: arenas grow, are reused, and are never shared by concurrent calls."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch

from hub import prepare
from meshflash import Mask
from meshflash.check.oracle import Case
from meshflash.check.spread import Item
from meshflash.comm.transports.contract import TransportError
from meshflash.comm.transports.loopback import Hub
from meshflash.core.program import KINDS, Slice
from meshflash.engine.memory import ALIGNMENT, Pool, pool

CPU = torch.device("cpu")


def test_returned_arena_is_reused():
    memory = Pool(CPU)
    first = memory.take(1000, 900)
    memory.give_back(first, 900)
    assert memory.take(1000, 900) is first
    assert memory.usage.allocations == 1
    assert first.bytes == 1000


def test_call_takes_the_smallest_free_arena_that_fits():
    memory = Pool(CPU)
    small, large = memory.take(100, 100), memory.take(1000, 1000)
    memory.give_back(large, 1000)
    memory.give_back(small, 100)
    assert memory.take(50, 50) is small
    assert memory.take(60, 60) is large
    assert memory.usage.allocations == 2


def test_larger_arena_replaces_one_that_is_too_small():
    memory = Pool(CPU)
    memory.give_back(memory.take(100, 100), 100)
    larger = memory.take(200, 200)
    assert larger.bytes == 200
    memory.give_back(larger, 200)
    assert memory.take(10, 10) is larger
    assert memory.usage.allocations == 2
    other = memory.take(10, 10)  # the small arena was freed
    assert other is not larger
    assert memory.usage.allocations == 3


def test_growing_sizes_leave_one_arena():
    memory = Pool(CPU)
    for size in range(1, 50):
        memory.give_back(memory.take(size, size), size)
    assert len(memory._free) == 1
    assert memory.usage.allocations == 49
    for size in range(1, 50):
        memory.give_back(memory.take(size, size), size)
    assert memory.usage.allocations == 49


def test_concurrent_calls_have_separate_arenas():
    memory = Pool(CPU)
    arenas = [memory.take(10, 8) for _ in range(3)]
    assert len({id(arena) for arena in arenas}) == len({arena.memory.data_ptr() for arena in arenas}) == 3
    assert (memory.usage.live, memory.usage.peak) == (24, 24)
    for arena in arenas:
        memory.give_back(arena, 8)
    assert (memory.usage.live, memory.usage.peak) == (0, 24)
    assert {id(memory.take(10, 8)) for _ in range(3)} == {id(arena) for arena in arenas}
    assert memory.usage.allocations == 3


def test_dropped_arena_is_not_reused():
    memory = Pool(CPU)
    arena = memory.take(10, 10)
    memory.drop(10)
    assert memory.usage.live == 0
    assert memory.take(10, 10) is not arena


def test_clear_frees_only_arenas_that_no_call_holds():
    memory = Pool(CPU)
    held, free = memory.take(10, 10), memory.take(10, 10)
    memory.give_back(free, 10)
    memory.clear()
    assert memory.take(10, 10) is not free
    memory.give_back(held, 10)
    assert memory.take(10, 10) is held


def test_arena_of_zero_bytes_is_reused():
    memory = Pool(CPU)
    arena = memory.take(0, 0)
    assert arena.memory.device == CPU
    memory.give_back(arena, 0)
    assert memory.take(0, 0) is arena


def test_each_device_has_one_pool():
    assert pool(CPU) is pool(torch.device("cpu"))
    assert pool(torch.device("meta")) is not pool(CPU)
    assert pool(torch.device("meta")).device.type == "meta"


def test_threads_never_hold_the_same_arena():
    memory, held, wrong = Pool(CPU), set(), []

    def work() -> None:
        for size in range(1, 200):
            arena = memory.take(size, size)
            if id(arena) in held:
                wrong.append(arena)
            held.add(id(arena))
            time.sleep(0)
            held.remove(id(arena))
            memory.give_back(arena, size)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.usage.live == 0
    assert len(memory._free) <= 8


def test_failed_call_drops_its_arena():
    item = Item(Case(Mask.causal(), tokens=16), "ring", 2)
    memory = pool(CPU)
    memory.clear()
    alone = Hub(2, timeout=0.01).transport(1)
    leaves = item.case.inputs(torch.float32)
    q, k, v = (x.detach()[:, 8:] for x in leaves.values())
    tensors = [q, k, v, torch.zeros_like(q), torch.zeros(2, 2, 8)]
    prepared = prepare(item, 1)
    for _ in range(2):
        with pytest.raises(TransportError, match=r"rank 0 did not send within 0.01 s"):
            prepared.run("forward", tensors, item.case.features(leaves), alone)
        assert memory.usage.live == 0
        assert not memory._free


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placed_buffers_are_aligned_and_do_not_overlap(dtype):
    for schedule in ("zigzag", "allgather(head_stride=1)"):
        item = Item(Case(Mask.causal(), batch=3, tokens=37, heads=6, kv_heads=2, dim=24), schedule, 3, dtype)
        for direction in ("forward", "backward"):
            placement = prepare(item, 1)._placement(direction, False)
            pieces = sorted(placement._pieces.values(), key=lambda piece: piece.begin)
            assert pieces
            assert all(piece.begin % ALIGNMENT == 0 for piece in pieces)
            assert all(a.begin + a.bytes <= b.begin for a, b in pairwise(pieces))
            assert pieces[-1].begin + pieces[-1].bytes <= placement.bytes
            assert placement.used == sum(piece.bytes for piece in pieces)
            assert placement.used == placement.program.scratch_bytes(placement.setting.sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_description_of_saved_buffers_matches_their_views(dtype):
    item = Item(Case(Mask.causal(), batch=3, tokens=21, heads=4, kv_heads=2, dim=8, value_dim=24), "ulysses", 2, dtype)
    placement = prepare(item, 1)._placement("forward", lse_gradient=False)
    memory = torch.randint(0, 256, (placement.saved,), dtype=torch.uint8)
    saved = [buffer for buffer in placement.program.buffers if buffer.role == "saved"]
    assert len(saved) == 3
    for buffer in saved:
        for rows, heads in (((0, buffer.rows), (0, buffer.heads)), ((2, 7), (0, buffer.heads)), ((3, 4), (0, 1))):
            place = Slice(buffer.name, rows, heads)
            for field in KINDS[buffer.kind]:
                views = [(placement.view(memory, place, field), False)]
                if heads == (0, buffer.heads):
                    views.append((placement.message(memory, buffer.name, field, place), True))
                for want, flat in views:
                    kind, size, stride, offset = placement.strided(place, field, flat)
                    got = memory.view(kind).as_strided(size, stride, offset)
                    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
                    assert got.stride() == want.stride()
