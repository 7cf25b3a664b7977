"""Calls from several threads of one process: on a single device, and over process groups."""

import random
import sys
import threading

import pytest
import torch
from torch import distributed as dist

from meshflash import Mask, api, attention, flash_attention
from meshflash.engine import fast_path
from meshflash.engine.group_context import group_context

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
    monkeypatch.setattr(fast_path, "_MOST", 8)  # a small cache, so that entries are evicted all the time
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


def call_during_explain(rank, world, group):
    """Call attention in a second thread while the first builds its plan; return schedule and number of errors."""
    refused = []

    def second():
        try:
            attention(*[torch.randn(1, 4, 2, 8)] * 3, schedule="zigzag")
        except RuntimeError as error:
            refused.append(str(error))

    def explain_after_second_call(*given):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        return explain(*given)

    explain, api.explain = api.explain, explain_after_second_call
    try:
        plan = attention(*[torch.randn(1, 4, 2, 8)] * 3, schedule="ring", return_plan=True)[1]
    finally:
        api.explain = explain
    return plan.schedule, len(refused)


def test_concurrent_calls_return_their_own_plans(pool):
    """A second thread is refused between a call and the construction of its plan."""
    assert pool.run(2, call_during_explain) == [("ring", 1)] * 2
