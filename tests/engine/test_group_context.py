"""Group contexts: those of destroyed groups are dropped, and a rank refuses calls after an error."""

import gc
import time
import weakref

import pytest
import torch
from torch import distributed

from meshflash import Layout, Mask, attention, register_schedule, unregister_schedule
from meshflash.engine import executable, group_context
from meshflash.schedules import allgather, ring

CAUSAL = Mask.causal()


def call(tokens=4, **options):
    x = torch.randn(1, tokens, 2, 8)
    return attention(x, x, x, mask=CAUSAL, schedule=options.pop("schedule", "ring"), **options)


def fail_inside_a_call(rank, world, group):
    """Fail on rank 1 inside a call; later calls on it are refused."""
    call()
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                executable.MeshExecutable, "run", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no memory"))
            )
            with pytest.raises(MemoryError):
                call()
        with pytest.raises(RuntimeError, match=r"left an earlier call .*no memory.*make a new process group"):
            call()


def test_rank_that_left_a_call_by_an_error_refuses_later_calls(pool):
    pool.run(2, fail_inside_a_call)


def call_with_unsupported_kernel_on_one_rank(rank, world, group):
    """Request a kernel that only one rank does not support."""
    layout = Layout(((range(3),), (range(3, 8),)))
    x = torch.randn(1, layout.lengths[rank], 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="vendor"):
        attention(x, x, x, mask=CAUSAL, layout=layout, schedule="ring", kernel="vendor")


def test_kernel_that_one_rank_lacks_is_refused_on_all_ranks(pool):
    pool.run(2, call_with_unsupported_kernel_on_one_rank)


def call_with_wrong_shape_on_one_rank(rank, world, group):
    """Give a wrong shape on rank 0 only."""
    x = torch.randn(1, 4, 2, 8)
    y = x if rank else x[:, :3]
    with pytest.raises(ValueError, match="k has 3 tokens"):
        attention(x, y, y, layout=Layout.contiguous(8, 2))


def test_error_before_the_handshake_reaches_the_other_ranks(pool):
    pool.run(2, call_with_wrong_shape_on_one_rank, timeout=30.0)


def make_groups_on_one_store(rank, world, group):
    # Only meshflash's own keys share the store: gloo itself may read a peer's old address from one.
    """Make two groups, one after another, whose handshakes share one store."""
    store = distributed.distributed_c10d._get_default_store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed.distributed_c10d, "_get_process_group_store", lambda _: store)
        for scale in (1.0, 2.0):
            own = distributed.new_group([0, 1])
            time.sleep(0.2 * rank)  # the store still has an old payload of rank 1, which rank 0 must not read
            call(mesh=own, scale=scale)
            call(mesh=own, scale=scale)
            distributed.destroy_process_group(own)


def test_keys_of_an_earlier_group_are_not_read(pool):
    pool.run(2, make_groups_on_one_store)


def say_late_where_devices_are(rank, world, group):
    """Let rank 1 come only after rank 0 has given up; both get the same error, and then try again."""
    context, device = group_context.group_context(group.group_name), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHFLASH_TIMEOUT", "0.5")
        if rank == 1:
            distributed.barrier()
        with pytest.raises(group_context.MissingRankError, match=r"^rank 1 did not say within 0.5 s where its device"):
            context._gather_devices(device)
        if rank == 0:
            distributed.barrier()
        patch.setenv("MESHFLASH_TIMEOUT", "30")
        found = context._gather_devices(device)
        assert context._gather_devices(device) == found
        return len(found)


def test_ranks_may_say_again_where_their_devices_are_after_one_was_late(pool):
    assert pool.run(2, say_late_where_devices_are) == [2, 2]


def make_and_destroy_groups(rank, world, group):
    """Make and destroy several groups; return the number of contexts left."""
    for _ in range(3):
        own = distributed.new_group([0, 1])
        call(mesh=own)
        distributed.destroy_process_group(own)
    own = distributed.new_group([0, 1])
    call(mesh=own)
    return len(group_context.open_contexts())


def test_contexts_of_destroyed_groups_are_dropped(pool):
    assert pool.run(2, make_and_destroy_groups) == [1, 1]


def call_and_drop_the_graph(rank, world, group):
    """Drop all tensors of a call; its autograd graph is freed."""

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    weight = torch.ones(2, requires_grad=True)
    sinks = Seen.apply(weight)
    node = weakref.ref(sinks)
    call(sink_logits=sinks).sum().backward()
    del sinks
    gc.collect()
    assert node() is None


def test_bound_program_keeps_no_reference_to_the_autograd_graph(pool):
    pool.run(2, call_and_drop_the_graph)


def run_reregistered_schedule(rank, world, group):
    """Register two schedules under one name, one after another; return the steps of both."""
    steps = []
    for family in (ring, allgather):
        register_schedule("mine", family.forward, family.backward, options={"head_stride": 0})
        plan = call(schedule="mine", return_plan=True)[1]
        steps.append([str(step).split()[0] for step in plan.program.steps])
        unregister_schedule("mine")
    return steps


def test_reregistered_schedule_name_runs_the_new_schedule(pool):
    first, second = pool.run(2, run_reregistered_schedule)[1]
    assert "finish" in first
    assert "finish" not in second


def test_compiled_calls_on_a_single_device_raise_the_errors_of_eager_calls():
    compiled = torch.compile(attention, backend="aot_eager")
    x = torch.randn(1, 9, 1, 8)
    with pytest.raises(ValueError, match="on one rank positions must be in order"):
        compiled(x, x, x, layout=Layout(((range(5, 9), range(5)),)))
    with pytest.raises(ValueError, match="expected one of auto"):
        compiled(x, x, x, schedule="nonsense")
