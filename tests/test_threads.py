"""Calls from several threads of one process: on a single device, and over process groups."""

import functools
import random
import sys
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import distributed as dist

from meshflash import Mask, attention, flash_attention
from meshflash.engine import cache as cache_module
from meshflash.engine import explain
from meshflash.engine.group_context import group_context
from meshflash.kernels import registry
from meshflash.kernels.registry import record_kernels

CAUSAL = Mask.causal()


def run_in_threads(functions):
    """Run functions concurrently; return their results in order, or raise the first error."""
    results, errors = [None] * len(functions), []

    def work(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_eight_threads_may_call_flash_attention_with_changing_shapes(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_ENTRIES", 8)  # so that entries come and go all the time
    x = torch.randn(1, 64, 2, 8)
    want = {n: flash_attention(x[:, :n], x[:, :n], x[:, :n], mask=CAUSAL) for n in range(1, 65)}

    def call_repeatedly(seed):
        draw = random.Random(seed)
        for _ in range(150):
            n = draw.randrange(1, 65)
            got = flash_attention(x[:, :n], x[:, :n], x[:, :n], mask=CAUSAL)
            assert torch.allclose(got, want[n], atol=1e-6)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads often, also while one of them changes the cache
    try:
        run_in_threads([lambda seed=seed: call_repeatedly(seed) for seed in range(8)])
    finally:
        sys.setswitchinterval(interval)


def test_threads_that_record_kernels_leave_no_log_open():
    start = threading.Barrier(4)

    def record_repeatedly():
        start.wait(10)
        for _ in range(4000):
            with record_kernels() as log:
                pass
            assert log == []

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ExitStack() as others:
            for _ in range(200):  # many open logs, so that threads change the registry while another one reads it
                others.enter_context(record_kernels())
            run_in_threads([record_repeatedly] * 4)
    finally:
        sys.setswitchinterval(interval)
    x = torch.randn(1, 4, 1, 8)
    with record_kernels() as log:
        flash_attention(x, x, x)
    assert len(log) == 1
    assert not registry.open_logs


SPECS: dict[str, list[dict[str, Any]]] = {
    "equal": [dict(mask=CAUSAL)] * 6,
    "different": [
        *(dict(mask=CAUSAL), dict(mask=Mask.window(3, 0)), dict(mask=CAUSAL, scale=0.5)),
        *(dict(mask=CAUSAL & Mask.documents([5, 3])), dict(mask=None), dict(mask=CAUSAL, softcap=2.0)),
    ],
}


def output_and_gradient(call, x, **options):
    """Return the output of a self-attention, and the gradient of its sum."""
    x = x.clone().requires_grad_()
    out = call(x, x, x, **options)
    return out.detach(), torch.autograd.grad(out.sum(), x)[0]


@pytest.mark.parametrize("specs", SPECS)
def test_threads_may_call_flash_attention_and_attention_at_the_same_time(specs):
    cache_module.cache.clear()  # so that threads compile the same call at the same time
    x = torch.randn(1, 8, 2, 8, dtype=torch.float64)
    start = threading.Barrier(2 * len(SPECS[specs]))

    def call_repeatedly(call, options):
        start.wait(10)
        return [output_and_gradient(call, x, **options) for _ in range(20)]

    calls = [(call, options) for options in SPECS[specs] for call in (flash_attention, attention)]
    found = run_in_threads([functools.partial(call_repeatedly, *given) for given in calls])
    for (_, options), results in zip(calls, found, strict=True):
        want = output_and_gradient(flash_attention, x, kernel="reference", **options)
        for got in results:
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, want, strict=True))


def attend_over_ranks_and_alone(rank, world, group, specs):
    """Call attention over the group in one thread, and flash_attention in two others, by the same specs."""
    x = torch.randn(1, 8, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = [output_and_gradient(flash_attention, x, kernel="reference", **options) for options in specs]
    mine = slice(4 * rank, 4 * rank + 4)

    def over_ranks():
        for (out, gradient), options in [*zip(want, specs, strict=True)] * 3:
            got = output_and_gradient(attention, x[:, mine], mesh=group, schedule="ring", **options)
            assert torch.allclose(got[0], out[:, mine], atol=1e-12)
            assert torch.allclose(got[1], gradient[:, mine], atol=1e-12)

    def alone():
        for expected, options in [*zip(want, specs, strict=True)] * 10:
            got = output_and_gradient(flash_attention, x, **options)
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, expected, strict=True))

    run_in_threads([over_ranks, alone, alone])


@pytest.mark.parametrize("specs", SPECS)
def test_one_thread_may_attend_over_ranks_while_others_attend_alone(pool, specs):
    pool.run(2, attend_over_ranks_and_alone, SPECS[specs])


def alternate_between_groups(rank, world, group, in_threads):
    """Use a group of two ranks and a group of all three, call by call or in two threads at once."""
    two, three = groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
    mine = [mesh for mesh in groups if rank < 2 or mesh is three]

    def call_and_check(mesh, scale):
        x = torch.randn(1, 4, 6, 8, requires_grad=True)
        schedule = "ulysses" if mesh is two else "zigzag"
        out = attention(x, x, x, mesh=mesh, schedule=schedule, mask=CAUSAL, scale=scale, verify=True)
        out.sum().backward()
        return dist.get_world_size(mesh)

    def call_often(mesh):
        return [call_and_check(mesh, scale) for scale in (0.1, 0.2, 0.1)]

    if in_threads:
        return run_in_threads([functools.partial(call_often, mesh) for mesh in mine])
    return [call_and_check(mesh, scale) for scale in (0.1, 0.2, 0.1) for mesh in mine]


@pytest.mark.parametrize("in_threads", [False, True])
def test_groups_of_two_and_of_three_ranks_are_used_at_once(pool, in_threads):
    found = pool.run(3, alternate_between_groups, in_threads)
    both = [[2] * 3, [3] * 3] if in_threads else [2, 3] * 3
    assert found == [both, both, [[3] * 3] if in_threads else [3] * 3]


def use_two_groups(rank, world, group, schedules):
    """Call attention in two threads, each over its own group, started in another order on odd ranks."""
    groups = [dist.new_group(list(range(world))) for _ in schedules]
    ordered = groups if rank % 2 == 0 else groups[::-1]  # threads start in a different order on odd ranks

    def call_and_check(mesh):
        schedule = schedules[groups.index(mesh)]
        for tokens in (4, 6, 8, 4):
            x = torch.randn(1, tokens, 4, 8, requires_grad=True)
            out = attention(x, x, x, mesh=mesh, schedule=schedule, mask=CAUSAL, verify=True)
            out.sum().backward()
            assert x.grad is not None
            assert torch.isfinite(x.grad).all()

    run_in_threads([lambda mesh=mesh: call_and_check(mesh) for mesh in ordered])


@pytest.mark.parametrize(
    "schedules", [("zigzag", "zigzag"), ("ulysses", "ringx1"), ("allgather", "double_ring(inner=2)")]
)
def test_two_threads_of_a_rank_may_use_two_groups(pool, schedules):
    pool.run(4 if "inner" in schedules[1] else 2, use_two_groups, schedules)


def use_one_group(rank, world, group):
    """Call attention in a second thread while the first uses the group; return the error."""
    inside, refused = threading.Event(), []
    context = group_context(group.group_name)

    def second():
        inside.wait(5)
        x = torch.randn(1, 4, 2, 8)
        try:
            attention(x, x, x, schedule="ring")
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    with context.in_use():  # the first thread is inside a call
        inside.set()
        thread.join()
    return refused


def test_two_threads_that_use_one_group_are_refused(pool):
    for refused in pool.run(2, use_one_group):
        assert len(refused) == 1
        assert "two threads call attention over one process group" in refused[0]
        assert "new_group" in refused[0]


def explained(rank, world, group):
    schedules = []

    def second():
        schedules.append(attention(*[torch.randn(1, 4, 2, 8)] * 3, schedule="zigzag", return_plan=True)[1].schedule)

    def meanwhile(*given):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        return explain_call(*given)

    explain_call, explain._explain = explain._explain, meanwhile
    try:
        plan = attention(*[torch.randn(1, 4, 2, 8)] * 3, schedule="ring", return_plan=True)[1]
    finally:
        explain._explain = explain_call
    return plan.schedule, *schedules


def test_concurrent_calls_return_their_own_plans(pool):
    """Another thread calls between a call and the reading of its plan."""
    assert pool.run(2, explained) == [("ring", "zigzag")] * 2
