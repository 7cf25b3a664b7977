"""Losses that use different results on different ranks, so that an upstream gradient is None on some ranks only."""

import contextlib
import itertools

import pytest
import torch
from torch import distributed as dist

from meshflash import DisagreementError, Mask, attention, flash_attention
from meshflash.schedules.registry import default_layout, schedule_variants

TOKENS, HEADS = 21, 4
#: The results that the loss of a rank uses. A pattern holds one of these for each rank.
READS = ("out", "lse", "both")


def whole(seed=0):
    """Return (q, k, v), upstream gradients of output and LSE, and sink logits, for the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, TOKENS, HEADS, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    dout = torch.randn(1, TOKENS, HEADS, 8, generator=generator, dtype=torch.float64)
    dlse = torch.randn(1, HEADS, TOKENS, generator=generator, dtype=torch.float64)
    sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    return (q, k, v), dout, dlse, sinks


def loss(reads, out, lse, dout, dlse):
    """Return the loss of one rank, which uses the output, the LSE or both."""
    terms = [(out * dout).sum()] if reads in ("out", "both") else []
    return sum(terms + ([(lse * dlse).sum()] if reads in ("lse", "both") else []))


def expected_gradients(pattern, layout, sinks):
    """Return single-device gradients of the sum of all ranks' losses."""
    tensors, dout, dlse, logits = whole()
    leaves = [x.clone().requires_grad_() for x in (*tensors, *([logits] if sinks else []))]
    out, lse = flash_attention(
        *leaves[:3], mask=Mask.causal(), kernel="reference", sink_logits=leaves[3] if sinks else None, return_lse=True
    )
    total = out.new_zeros(())
    for rank, reads in enumerate(pattern):
        rows = torch.from_numpy(layout.positions(rank))
        total = total + loss(reads, out[:, rows], lse[:, :, rows], dout[:, rows], dlse[:, :, rows])
    return torch.autograd.grad(total, leaves)


def largest_errors(rank, world, group, schedule, patterns, sinks, frozen):
    """Return the largest gradient error of this rank for each pattern; `frozen` ranks do not learn the sinks."""
    layout = default_layout(schedule)(TOKENS, world)
    rows = torch.from_numpy(layout.positions(rank))
    worst = {}
    for pattern in patterns:
        tensors, dout, dlse, logits = whole()
        q, k, v = (x[:, rows].clone().requires_grad_() for x in tensors)
        given = logits.clone().requires_grad_(rank not in frozen) if sinks else None
        out, lse = attention(
            q, k, v, layout=layout, schedule=schedule, mask=Mask.causal(), sink_logits=given, return_lse=True
        )
        loss(pattern[rank], out, lse, dout[:, rows], dlse[:, :, rows]).backward()
        want = expected_gradients(pattern, layout, sinks)
        errors = [float((x.grad - y[:, rows]).abs().max()) for x, y in zip((q, k, v), want[:3], strict=True)]
        if given is not None and not frozen:
            share = given.grad.clone()
            dist.all_reduce(share)
            errors.append(float((share - want[3]).abs().max()))
        worst[pattern] = max(errors)
    return worst


@pytest.mark.parametrize("schedule", schedule_variants(2))
def test_ranks_may_use_different_results_in_their_losses(pool, schedule):
    patterns = list(itertools.product(READS, repeat=2))
    for errors in pool.run(2, largest_errors, schedule, patterns, False, ()):
        assert {pattern: error for pattern, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("schedule", schedule_variants(4))
def test_one_of_four_ranks_may_use_the_lse(pool, schedule):
    patterns = [("out",) * n + ("both",) + ("out",) * (3 - n) for n in range(4)]
    for errors in pool.run(4, largest_errors, schedule, patterns, False, ()):
        assert {pattern: error for pattern, error in errors.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("frozen", [(), (1,)], ids=["learned", "frozen on one rank"])
@pytest.mark.parametrize("schedule", schedule_variants(2))
def test_sink_logit_gradients_are_correct_with_different_losses_per_rank(pool, schedule, frozen):
    patterns = [("both", "out"), ("out", "lse")]
    for errors in pool.run(2, largest_errors, schedule, patterns, True, frozen):
        assert {pattern: error for pattern, error in errors.items() if not error < 1e-12} == {}


def check_one_rank_without_autograd(rank, world, group, schedule):
    """Assert that a call raises if rank 1 records no gradients."""
    layout = default_layout(schedule)(TOKENS, world)
    rows = torch.from_numpy(layout.positions(rank))
    q, k, v = (x[:, rows].clone().requires_grad_(rank != 1) for x in whole()[0])
    with pytest.raises(DisagreementError, match=r"autograd.*rank 0 has .*records.*rank 1 has .*no_grad"):
        attention(q, k, v, layout=layout, schedule=schedule)


@pytest.mark.parametrize("schedule", schedule_variants(2))
def test_rank_without_autograd_is_named_on_all_ranks(pool, schedule):
    pool.run(2, check_one_rank_without_autograd, schedule)


def check_dispatch_mode_on_one_rank(rank, world, group):
    """Count FLOPs on rank 0 only; forward and backward must still run on both ranks."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    with FlopCounterMode(display=False) if rank == 0 else contextlib.nullcontext():
        attention(x, x, x, schedule="zigzag").sum().backward()
    attention(x, x, x, schedule="zigzag").sum().backward()


def test_dispatch_mode_on_one_rank_does_not_affect_the_others(pool):
    pool.run(2, check_dispatch_mode_on_one_rank)
