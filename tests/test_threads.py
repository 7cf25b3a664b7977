"""Several threads of one process: calls on one device, and over process groups."""

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
    """Run functions at the same time; their results, or the first error of any."""
    results, errors = [None] * len(functions), []

    def work(number):
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_eight_threads_may_call_flash_attention_with_changing_shapes(monkeypatch):
    monkeypatch.setattr(fast_path, "_MOST", 8)  # so that entries come and go all the time
    x = torch.randn(1, 64, 2, 8)
    want = {n: flash_attention(x[:, :n], x[:, :n], x[:, :n], mask=CAUSAL) for n in range(1, 65)}

    def many(seed):
        draw = random.Random(seed)
        for _ in range(150):
            n = draw.randrange(1, 65)
            got = flash_attention(x[:, :n], x[:, :n], x[:, :n], mask=CAUSAL)
            assert torch.allclose(got, want[n], atol=1e-6)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns within a statement that changes the cache
    try:
        run_in_threads([lambda seed=seed: many(seed) for seed in range(8)])
    finally:
        sys.setswitchinterval(interval)


def two_groups(rank, world, group, schedules):
    groups = [dist.new_group(list(range(world))) for _ in schedules]
    own = groups if rank % 2 == 0 else groups[::-1]  # threads of different ranks start in another order

    def drive(mesh):
        schedule = schedules[groups.index(mesh)]
        for tokens in (4, 6, 8, 4):
            x = torch.randn(1, tokens, 4, 8, requires_grad=True)
            out = attention(x, x, x, mesh=mesh, schedule=schedule, mask=CAUSAL, verify=True)
            out.sum().backward()
            assert x.grad is not None
            assert torch.isfinite(x.grad).all()

    run_in_threads([lambda mesh=mesh: drive(mesh) for mesh in own])


@pytest.mark.parametrize(
    "schedules", [("zigzag", "zigzag"), ("ulysses", "ringx1"), ("allgather", "double_ring(inner=2)")]
)
def test_two_threads_of_a_rank_may_use_two_groups(pool, schedules):
    pool.run(4 if "inner" in schedules[1] else 2, two_groups, schedules)


def one_group(rank, world, group):
    inside, refused = threading.Event(), []
    here = group_context(group.group_name)

    def second():
        inside.wait(5)
        x = torch.randn(1, 4, 2, 8)
        try:
            attention(x, x, x, schedule="ring")
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    with here.in_use():  # as a call of the first thread that is under way
        inside.set()
        thread.join()
    return refused


def test_two_threads_that_use_one_group_are_refused(pool):
    for refused in pool.run(2, one_group):
        assert len(refused) == 1
        assert "two threads call attention over one process group" in refused[0]
        assert "new_group" in refused[0]


def explained(rank, world, group):
    refused = []

    def second():
        try:
            attention(*[torch.randn(1, 4, 2, 8)] * 3, schedule="zigzag")
        except RuntimeError as error:
            refused.append(str(error))

    def meanwhile(*given):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        return explain(*given)

    explain, api.explain = api.explain, meanwhile
    try:
        plan = attention(*[torch.randn(1, 4, 2, 8)] * 3, schedule="ring", return_plan=True)[1]
    finally:
        api.explain = explain
    return plan.schedule, len(refused)


def test_concurrent_calls_return_their_own_plans(pool):
    """No other thread can call between a call and the reading of its plan."""
    assert pool.run(2, explained) == [("ring", 1)] * 2
