"""`shutdown` leaves nothing behind, whoever made the process group, and the process can join another job."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import distributed

from meshflash import Mask, attention, flash_attention, init, shutdown
from meshflash.comm.heap.contract import Heap
from meshflash.comm.transports.contract import Arena, Transport
from meshflash.core.tiles import Worklist
from meshflash.engine import group_context
from meshflash.engine.cache import cache
from meshflash.engine.executable import Executable
from meshflash.engine.group_context import GroupContext
from meshflash.engine.memory import Pool
from meshflash.gemm.distributed.exchange import Exchange
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.vendor import gpu
from meshflash.parallel.offload import OffloadStore, offload_store
from meshflash.runtime import world as runtime_world
from meshflash.runtime.state import state
from meshflash.runtime.world import current_job
from runtime.jobs import free_port

CAUSAL = Mask.causal()
#: What must not outlive `shutdown`.
OWNED = (GroupContext, Transport, Heap, Arena, Pool, Executable, Exchange, OffloadStore, Worklist)


def call_everything(group=None):
    """Run forward and backward over a group by two schedules, and on this device alone."""
    for schedule in ("zigzag", "ulysses"):
        x = torch.randn(1, 8, 4, 8, requires_grad=True)
        attention(x, x, x, mesh=group, mask=CAUSAL, schedule=schedule).sum().backward()
    flash_attention(x, x, x, mask=CAUSAL).sum().backward()
    offload_store(x.device)


def survivors():
    """Return the types of what still exists of OWNED."""
    gc.collect()
    return sorted({type(found).__name__ for found in gc.get_objects() if isinstance(found, OWNED)})


@contextmanager
def fresh_process():
    """Leave the worker's group, and what earlier tests left in the worker."""
    distributed.destroy_process_group()
    shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHFLASH_BIND", "0")  # or later tests would run on fewer cores
        yield


@contextmanager
def started_as(rank, world, port):
    """Set the variables by which a launcher tells a process its rank; those of a single process are none."""
    names = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(names, ("127.0.0.1", port, rank, world, rank), strict=True):
            if world > 1:
                patch.setenv(name, str(value))
        yield


def shut_down_with_adopted_group(rank, world, group, folder):
    """Shut down over a group that the caller made; return what is left after it."""
    with fresh_process():
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        other = distributed.new_group([0, 1])
        assert not init().own
        call_everything()
        call_everything(other)
        duplicate = weakref.ref(group_context._duplicate_group(other, "second"))
        assert duplicate() in distributed.distributed_c10d._world.pg_names
        before = survivors()
        shutdown()
        left = survivors()
        assert duplicate() is None
        assert distributed.is_initialized()
        assert other in distributed.distributed_c10d._world.pg_names
        call_everything(other)  # the caller's groups stay usable
        shutdown()
        groups = [weakref.ref(distributed.group.WORLD), weakref.ref(other)]
        distributed.destroy_process_group()
        del other
        gc.collect()
        assert [reference() for reference in groups] == [None, None]
        return before, left


def test_shutdown_leaves_nothing_behind_of_calls_over_a_group_of_the_caller(pool, tmp_path):
    for before, left in pool.run(2, shut_down_with_adopted_group, tmp_path):
        assert {"GroupContext", "ProcessGroupTransport", "Arena", "Pool", "MeshExecutable", "LocalExecutable"} <= set(
            before
        )
        assert left == []


def shut_down_with_own_group(rank, world, group, ports):
    """Join three worlds in turn, of two ranks, of one, and of two with swapped ranks; return each and what it left."""
    found = []
    with fresh_process():
        for port, size, number in ((ports[0], world, rank), (0, 1, 0), (ports[1], world, world - 1 - rank)):
            with started_as(number, size, port), init(timeout=30) as here:
                assert here.own
                made = weakref.ref(distributed.group.WORLD) if size > 1 else lambda: None
                call_everything()
            found.append((here.rank, here.world_size, survivors(), made()))
            assert current_job() is None
            assert not distributed.is_initialized()
    return found


def test_shutdown_leaves_nothing_behind_of_a_group_that_init_made_and_another_world_may_follow(pool):
    found = pool.run(2, shut_down_with_own_group, (free_port(), free_port()))
    for rank in range(2):
        assert found[rank] == [(rank, 2, [], None), (0, 1, [], None), (1 - rank, 2, [], None)]


def run_backward_after_shutdown(rank, world, group):
    """Shut down between a forward and its backward; the graph keeps no group alive, and its backward is refused."""
    own = distributed.new_group([0, 1])
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    out = attention(x, x, x, mesh=own, schedule="ring")
    shutdown()
    reference = weakref.ref(own)
    distributed.destroy_process_group(own)
    del own
    gc.collect()
    assert reference() is None
    with pytest.raises(RuntimeError, match=r"shutdown\(\) was called since its forward: run backward before"):
        out.sum().backward()
    assert survivors() == ["GroupContext", "MeshExecutable", "Worklist"]  # those of the graph
    del out
    assert survivors() == []


def test_backward_after_shutdown_is_refused(pool):
    pool.run(2, run_backward_after_shutdown)


def test_shutdown_completes_although_one_of_its_steps_fails(monkeypatch):
    def fail():
        raise OSError("no more")

    init()
    monkeypatch.setattr(runtime_world, "on_end", [fail, *runtime_world.on_end])
    flash_attention(*[torch.randn(1, 4, 1, 8)] * 3)
    assert cache.size() > 0
    with pytest.raises(OSError, match="no more"):
        shutdown()
    assert cache.size() == 0
    assert current_job() is None


def test_shutdown_frees_the_memory_that_kernels_keep_on_a_device():
    cpu = torch.device("cpu")
    kept = [weakref.ref(x) for x in gpu._no_dropout(cpu)]
    hopper_launch._counters[cpu, 0] = torch.zeros(1)
    kept.append(weakref.ref(hopper_launch._counters[cpu, 0]))
    shutdown()
    assert [reference() for reference in kept] == [None] * 3


def test_threads_that_ask_for_an_object_of_the_state_get_the_same_one():
    inside, made = threading.Barrier(8), []

    def make_slowly():
        time.sleep(0.05)
        return object()

    def ask():
        inside.wait(10)
        made.append(state.get(make_slowly, "made in a test"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(map(id, made))) == 1
    assert state.pop("made in a test") is made[0]


def test_state_closes_its_objects_newest_first():
    closed: list[str] = []

    class Closes:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    for name in ("first", "second"):
        state.put(Closes(name), "made in a test", name)
    state.put(object(), "made in a test", "without close")
    shutdown()
    assert closed == ["second", "first"]
    assert not state.all_of("made in a test")
