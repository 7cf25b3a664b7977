"""Device-side heap calls: put, get, signal, wait and atomics, interpreted across processes, on a GPU, and as PTX.

Run as a script, this file cross-compiles its kernels for another GPU.
"""

from __future__ import annotations

import json
import os
import re
import signal as signals
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if __name__ == "__main__" and sys.argv[1].startswith("gfx"):
    torch.version.hip = "6"  # device.py reads it on import

import triton
import triton.language as tl
from torch import distributed as _distributed

from cross import TARGETS, missing_tool
from meshflash.comm.heap import shared_files
from meshflash.comm.heap.api import open_heap
from meshflash.comm.heap.device import (
    arrive,
    atomic_add,
    atomic_cas,
    atomic_exchange,
    get,
    get_rows,
    put,
    put_rows,
    signal,
    wait,
)
from meshflash.comm.transports.contract import TransportError
from meshflash.kernels.triton.common import INTERPRETED
from meshflash.runtime import mps
from meshflash.runtime.devices import take_device
from meshflash.runtime.processes import RankError, run_ranks

ROOT = Path(__file__).parents[2]
WORDS = 32
dist = _distributed
interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton is not interpreted, and these tensors are on the CPU")


@triton.jit(do_not_specialize=["rank", "first", "rounds"])
def exchange_messages(
    inbox, flags, wrong, bases, status, rank, first, rounds, WORLD: tl.constexpr, WORDS: tl.constexpr
):
    """Send a message from every rank to every other in each round, and check it; inboxes are double-buffered.

    A rank sends message n + 2 after it has received n + 1 from the peer, which has then read message n.
    """
    words = tl.arange(0, WORDS)
    off = tl.zeros((WORDS,), tl.int32)
    for n in range(first, first + rounds):
        here = inbox + (n % 2) * (WORLD * WORDS) + words
        for peer in range(WORLD):
            if peer != rank:
                put(here + rank * WORDS, words + (n * 100 + rank), bases, rank, peer)
                signal(flags + rank, n, bases, rank, peer)
        for peer in range(WORLD):
            if peer != rank:
                wait(flags + peer, n, status, peer, n)
                off += (tl.load(here + peer * WORDS) != words + (n * 100 + peer)).to(tl.int32)
    tl.store(wrong + words, tl.load(wrong + words) + off)


@triton.jit
def copy_rows_and_use_atomics(
    far, near, back, total, bases, rank, peer, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Copy a block of rows to a peer and back, and use each atomic."""
    put_rows(far, columns, near, columns, rows, columns, bases, rank, peer, ROWS, COLS)
    get_rows(back, columns, far, columns, rows, columns, bases, rank, peer, ROWS, COLS)
    was = atomic_add(total, 5, bases, rank, peer)
    seen = atomic_exchange(total + 1, was + 7, bases, rank, peer)
    atomic_cas(total + 2, seen, 9, bases, rank, peer)
    atomic_cas(total + 2, 1, 11, bases, rank, peer)
    arrive(total + 3, 2, bases, rank, peer)


@triton.jit
def add_many_times(counters, bases, rank, rounds, LANES: tl.constexpr):
    """Add to a counter of rank 0 as fast as possible: the interpreter adds lanes without Python in between."""
    same = tl.zeros((LANES,), tl.int32)
    for _ in range(rounds):
        atomic_add(counters + same, 1, bases, rank, 0, "relaxed")


@triton.jit
def put_without_signal(inbox, bases, rank, peer, WORDS: tl.constexpr):
    """Put a message without a signal."""
    words = tl.arange(0, WORDS)
    put(inbox + words, words, bases, rank, peer)


@triton.jit(do_not_specialize=["first", "second", "epoch"])
def wait_for_two_ranks(flags, came, status, first, second, epoch):
    """Wait for two ranks, one after the other."""
    tl.store(came, wait(flags + first, epoch, status, first, 7).to(tl.int32))
    tl.store(came + 1, wait(flags + second, epoch, status, second, 8).to(tl.int32))


@triton.jit
def use_each_function(inbox, flag, source, total, bases, status, rank, peer, epoch, rows, COLS: tl.constexpr):
    """Use each device function once; tests check the order of operations in its assembly."""
    put_rows(inbox, COLS, source, COLS, rows, COLS, bases, rank, peer, 16, COLS)
    signal(flag, epoch, bases, rank, peer)
    wait(flag, epoch, status, peer, epoch)
    get_rows(source, COLS, inbox, COLS, rows, COLS, bases, rank, peer, 16, COLS)
    arrive(flag, 1, bases, rank, peer)
    total_of = atomic_add(total, 1, bases, rank, peer)
    atomic_exchange(total, total_of, bases, rank, peer)
    atomic_cas(total, 1, 2, bases, rank, peer)
    tl.store(total, get(total, bases, rank, peer))


def count_wrong_words(heap, device, rounds, launches):
    """Return the number of wrong words after several launches of many rounds of messages."""
    world = heap.world
    inbox = heap.allocate((2, world, WORDS), torch.int32, name="inbox")
    flags = heap.allocate(world, torch.int32, name="flags")
    wrong = [torch.zeros(WORDS, dtype=torch.int32, device=device) for _ in heap.local_ranks]
    heap.barrier()
    for launch in range(launches):
        for number, rank in enumerate(heap.local_ranks):
            with heap.as_rank(rank):
                given = inbox.local, flags.local, wrong[number], heap.bases, heap.status, rank
                exchange_messages[(1,)](*given, 1 + launch * rounds, rounds, WORLD=world, WORDS=WORDS)
    heap.barrier()
    assert all(n in (0, rounds * launches) for n in flags.local.tolist())
    inbox.free()
    flags.free()
    return sum(int(each.sum()) for each in wrong)


def exchange_across_processes(rank, world, group, rounds):
    """Exchange messages and use atomics between real processes on the CPU; return the number of wrong words."""
    with open_heap(group, bytes=2**16, device="cpu", timeout=30) as heap:
        wrong = count_wrong_words(heap, "cpu", rounds // 2, 2)
        for dtype in (torch.int32, torch.int64):
            counter = heap.allocate(1, dtype)
            heap.barrier()
            add_many_times[(1,)](counter.local, heap.bases, rank, 20, LANES=1024)
            heap.barrier()
            assert counter.peer(0).item() == world * 20 * 1024
            counter.free()
    return wrong


@interpreted
@pytest.mark.parametrize(("world", "rounds"), [(2, 1000), (4, 40)])
def test_messages_between_processes_arrive_complete(pool, world, rounds):
    """Exact counters show that the interpreter's atomics work across processes, not just threads."""
    assert pool.run(world, exchange_across_processes, rounds) == [0] * world


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("counted", [torch.int32, torch.int64])
def test_row_copies_and_atomics_reach_only_the_peer(dtype, counted):
    with open_heap(3, bytes=2**16, device="cpu") as heap:
        far, total = heap.allocate((8, 24), dtype), heap.allocate(4, counted)
        heap.barrier()
        near = torch.arange(8 * 24).view(8, 24).to(dtype)
        back = torch.full((8, 24), -1, dtype=dtype)
        total.peer(2).copy_(torch.tensor([3, 4, 4, 0]))
        with heap.as_rank(1):
            copy_rows_and_use_atomics[(1,)](
                far.local, near, back, total.local, heap.bases, 1, 2, 5, 24, ROWS=8, COLS=32
            )
        assert not far.peer(0).any()
        assert not far.peer(1).any()
        assert torch.equal(far.peer(2)[:5], near[:5])
        assert not far.peer(2)[5:].any()
        assert torch.equal(back[:5], near[:5])
        assert bool((back[5:] == -1).all())
        assert [total.peer(rank).tolist() for rank in range(3)] == [[0] * 4, [0] * 4, [8, 10, 9, 2]]
        far.free()
        total.free()


@interpreted
def test_wait_that_times_out_raises_and_names_rank_and_step():
    with open_heap(4, bytes=4096, device="cpu", timeout=2) as heap:
        flags = heap.allocate(4, torch.int64)
        came = torch.full((2,), -1, dtype=torch.int32)
        heap.barrier()
        flags.peer(1)[2:] = 2**40
        with heap.as_rank(1):
            wait_for_two_ranks[(1,)](flags.local, came, heap.status, 2, 3, 2**40)
            heap.check()
            assert came.tolist() == [1, 1]
            begin = time.monotonic()
            wait_for_two_ranks[(1,)](
                flags.local, came, heap.status, 2, 3, 2**40 + 1
            )  # the first wait times out, so the second does not wait
            seconds = time.monotonic() - begin
        assert came.tolist() == [0, 0]
        assert 2 <= seconds < 3.8
        with pytest.raises(TransportError) as raised:
            heap.check()
        text = f"rank 1 waited 2 s in step 7 for rank 2, whose signal stands at {2**40} and was to reach {2**40 + 1}"
        assert str(raised.value) == text
        with pytest.raises(TransportError, match="in step 7 for rank 2"):
            heap.barrier()
        flags.free()
        heap.close()


def kill_rank_1_after_its_put(rank, world, report, folder):
    """Kill rank 1 between put and signal; it leaves a heap file behind, as if it were opening a heap.

    The files are in a folder of this test, so that heaps of other tests cannot sweep them first.
    """
    vars(shared_files)["folder"] = lambda: folder
    heap = open_heap(bytes=2**16, device="cpu", timeout=1.5)
    inbox, flags = heap.allocate(WORDS, torch.int32), heap.allocate(world, torch.int32)
    came = torch.zeros(2, dtype=torch.int32)
    heap.barrier()
    left = shared_files.folder() / f"{shared_files.PREFIX}killed-1-{os.getpid()}"
    assert heap._barrier is not None
    lefts = heap._barrier.all_gather(left.name)
    if rank == 1:
        left.write_bytes(b"1")
        put_without_signal[(1,)](inbox.local, heap.bases, rank, 0, WORDS=WORDS)
        os.kill(os.getpid(), signals.SIGKILL)
    begin = time.monotonic()
    wait_for_two_ranks[(1,)](flags.local, came, heap.status, 1, 1, 1)
    with pytest.raises(TransportError) as raised:
        heap.check()
    there = (shared_files.folder() / lefts[1]).exists()
    survivors = dist.new_group([0, 2], use_local_synchronization=True)
    with open_heap(survivors, bytes=2**16, device="cpu", timeout=10) as launches:
        gone = not (shared_files.folder() / lefts[1]).exists()
        x = launches.allocate(1)
        launches.barrier()
        x.peer(1 - launches.rank).fill_(3)
        launches.barrier()
        alive = float(x.local)
        x.free()
    report((rank, str(raised.value), time.monotonic() - begin, inbox.local.tolist(), there, gone, alive))


@interpreted
def test_killed_peer_raises_within_seconds_and_its_file_is_swept(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # new processes import this file as tests.comm.test_device
    reports: list[Any] = []
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        run_ranks(3, kill_rank_1_after_its_put, tmp_path, timeout=60, listen=reports.append)
    assert sorted(report[0] for report in reports) == [0, 2]
    for rank, text, seconds, inbox, _, gone, alive in reports:
        waited = f"rank {rank} waited 1.5 s in step 7 for rank 1, whose signal stands at 0 and was to reach 1; process"
        assert text.startswith(waited)
        assert text.endswith("of rank 1 has ended")
        assert seconds < 10
        assert inbox == (list(range(WORDS)) if rank == 0 else [0] * WORDS)  # the put itself had arrived
        assert gone
        assert alive == 3
    assert any(there for *_, there, _, _ in reports)


def compile_assembly(target):
    """Return the assembly of `use_each_function`, compiled in a process without the interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-P", __file__, target, str(Path(folder, "out.json"))]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return json.loads(Path(folder, "out.json").read_text())


def write_assembly(target, into):
    """Compile for a target and write the assembly as JSON."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wanted = TARGETS[target]
    kinds = dict.fromkeys(("inbox", "source"), "*fp16") | {"flag": "*i32"} | dict.fromkeys(("total", "bases"), "*i64")
    kinds |= {"status": "*i64"} | dict.fromkeys(("rank", "peer", "epoch", "rows"), "i32") | {"COLS": "constexpr"}
    names = use_each_function.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("inbox", "source", "bases", "status")}
    source = ASTSource(use_each_function, {name: kinds[name] for name in names}, {(names.index("COLS"),): 64}, aligned)
    made = triton.compile(source, target=GPUTarget(wanted.backend, wanted.arch, wanted.warp))
    Path(into).write_text(json.dumps(made.asm["ptx" if wanted.backend == "cuda" else "amdgcn"]))


def find_in_order(assembly, *patterns):
    """Find the patterns in this order and return their lines; AssertionError if one is missing."""
    at, found = 0, list[str]()
    lines = assembly.splitlines()
    for pattern in patterns:
        at = next((n for n in range(at, len(lines)) if re.search(pattern, lines[n])), -1) + 1
        assert at, f"no {pattern} after {found}"
        found.append(lines[at - 1])
    return found


def test_ptx_orders_stores_flags_and_loads():
    if missing_tool("sm_90"):
        pytest.skip(f"this machine has no {missing_tool('sm_90')}")
    ptx = compile_assembly("sm_90")
    # all threads store, vectorized, before one of them signals; no thread loads before the waiting one
    find_in_order(
        ptx,
        r"st\.global\.v4\.b32",
        r"bar\.sync",
        r"atom\.global\.sys\.release\.exch\.b32",
        r"(ld|atom)\.global\.sys\.acquire",  # Triton turns an atomic add of 0 into a load
        r"bar\.sync",
        r"globaltimer",
        r"(ld|atom)\.global\.sys\.acquire",
        r"bar\.sync",
        r"ld\.global\.v4\.b32",
        r"bar\.sync",
        r"(atom|red)\.global\.sys\.release\.add\.u32",  # a reduction from Triton 3.9 on: nobody reads its result
        r"atom\.global\.sys\.acq_rel\.add\.u64",
        r"atom\.global\.sys\.acq_rel\.exch\.b64",
        r"atom\.global\.acq_rel\.sys\.cas\.b64",
    )
    polls = [line for line in ptx.splitlines() if re.search(r"(ld|atom)\.global\.sys\.", line) and "acq" in line]
    assert len([line for line in polls if ".acquire." in line]) == 2
    assert not re.search(
        r"(ld|atom)\.global\.(sys\.)?relaxed.*(u32|b32)", ptx
    )  # flags are never polled or set with relaxed order


def test_cdna_assembly_writes_back_and_invalidates_caches():
    if missing_tool("gfx942"):
        pytest.skip(f"this machine has no {missing_tool('gfx942')}")
    assembly = compile_assembly("gfx942")
    # a release writes caches back and an acquire invalidates them, at system scope
    find_in_order(assembly, r"s_barrier", r"buffer_wbl2 sc0 sc1", r"global_atomic_swap", r"buffer_inv sc0 sc1")
    find_in_order(assembly, r"s_memrealtime")


@pytest.mark.slow
def test_messages_example_runs_without_wrong_words():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "examples/messages.py"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"rank \d .*: 100 messages of 64 words there and back, 0 words wrong", run.stdout)) == 2


def exchange_on_gpu_and_lose_rank_1(rank, world, report, rounds):
    """Exchange messages between ranks of one GPU; then rank 1 leaves silently, and the others report its name."""
    device = take_device("cuda", rank)
    heap = open_heap(bytes=2**20, device=device, timeout=20)
    count_wrong_words(heap, device, 2, 1)  # compile before timing
    begin = time.monotonic()
    wrong = count_wrong_words(heap, device, rounds // 2, 2)
    report(("messages", rank, wrong, (time.monotonic() - begin) / rounds))
    heap.barrier()
    heap.close()
    heap = open_heap(bytes=2**20, device=device, timeout=4)
    flags, came = heap.allocate(world, torch.int32), torch.zeros(2, dtype=torch.int32, device=device)
    wait_for_two_ranks[(1,)](flags.local, came, heap.status, 0, 0, 0)  # compile before timing
    heap.barrier()
    if rank == 1:
        return
    begin = time.monotonic()
    wait_for_two_ranks[(1,)](flags.local, came, heap.status, 1, 1, 1)
    with pytest.raises(TransportError) as raised:
        heap.check()
    report(("lost", rank, str(raised.value), time.monotonic() - begin))


def check_exchange_on_gpu(world, rounds):
    """Run ranks on one GPU; check that all messages arrived and that the lost rank is named in time."""
    reports: list[Any] = []
    with suppress(RankError):  # rank 1 waits at the end for the others, or they for it
        run_ranks(world, exchange_on_gpu_and_lose_rank_1, rounds, timeout=200, listen=reports.append)
    print(*reports, sep="\n")
    assert [each[2] for each in reports if each[0] == "messages"] == [0] * world
    lost = [each for each in reports if each[0] == "lost"]
    assert len(lost) == world - 1
    for _, rank, text, seconds in lost:
        assert text.startswith(
            f"rank {rank} waited 4 s in step 7 for rank 1, whose signal stands at 0 and was to reach 1"
        )
        assert seconds < 4 + 4


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("with_mps", [pytest.param(False, marks=gpu), pytest.param(True, marks=gpu)])
@pytest.mark.parametrize("world", [2, 4])
def test_messages_between_ranks_of_one_gpu_arrive_and_a_lost_rank_is_named(world, with_mps):
    if not with_mps:
        check_exchange_on_gpu(world, 1000 if world == 2 else 100)
        return
    if mps.missing():
        pytest.skip(str(mps.missing()))
    with mps.mps():
        check_exchange_on_gpu(world, 1000)


@pytest.mark.parametrize("world", [pytest.param(2, marks=gpu), pytest.param(4, marks=gpu)])
def test_messages_between_ranks_emulated_in_one_process_on_a_gpu_arrive(world):
    with open_heap(world, bytes=2**20, device="cuda", timeout=20) as heap:
        count_wrong_words(heap, "cuda", 1, 1)  # compile before ranks wait for each other
        assert count_wrong_words(heap, "cuda", 500, 2) == 0


if __name__ == "__main__":
    write_assembly(*sys.argv[1:])
