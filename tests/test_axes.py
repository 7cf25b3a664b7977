"""Swapped axes: `[batch, heads, tokens, dim]` instead of `[batch, tokens, heads, dim]` raises or warns once."""

from __future__ import annotations

import logging

import pytest
import torch

from meshflash import Layout, Mask, attention, flash_attention, shard
from meshflash.engine.cache import cache
from meshflash.integrations.sdpa import scaled_dot_product_attention
from meshflash.runtime.state import state

HINT = r"transpose\(1, 2\), or call meshflash\.integrations\.sdpa"


def zeros(tokens, heads, batch=1):
    """Return zeros of shape `[batch, tokens, heads, 8]`."""
    return torch.zeros(batch, tokens, heads, 8)


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Return a function that lists the warnings so far; no earlier call counts as warned."""
    state.pop("warned of swapped axes")
    cache.clear()
    monkeypatch.setattr(logging.getLogger("meshflash"), "propagate", True)
    with caplog.at_level("WARNING", "meshflash"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("call", [flash_attention, attention])
def test_too_many_key_heads_are_refused_as_swapped_axes(call):
    x = zeros(8, 1024)
    with pytest.raises(ValueError, match=rf"q \[1, 8, 1024, 8\]: 1024 heads and 8 tokens\. .*{HINT}"):
        call(x, x, x)
    with pytest.raises(ValueError, match=HINT):  # packed inputs with two key heads
        call(x[0], x[0, :2], x[0, :2])


def test_swapped_axes_with_other_key_length_name_the_order_of_axes():
    with pytest.raises(ValueError, match=rf"77 heads in k do not divide 100 heads in q.*{HINT}"):
        flash_attention(zeros(8, 100), zeros(8, 77), zeros(8, 77))
    with pytest.raises(ValueError, match=rf"100 heads in k do not divide 1 heads in q.*{HINT}"):  # decoding
        flash_attention(zeros(8, 1), zeros(2, 100), zeros(2, 100))


@pytest.mark.parametrize("call", [flash_attention, attention])
def test_documents_that_match_the_third_axis_are_refused(call):
    x = zeros(8, 20)
    with pytest.raises(ValueError, match=rf"documents have 20 tokens, by the third size of q.*{HINT}"):
        call(x, x, x, mask=Mask.causal() & Mask.documents([15, 5]))
    with pytest.raises(ValueError, match="19 tokens in the documents, 8 in the sequence"):
        call(x, x, x, mask=Mask.documents([15, 4]))


def test_layout_that_matches_the_third_axis_is_refused():
    x = zeros(8, 20)
    with pytest.raises(ValueError, match=rf"q has 8 tokens, its layout gives rank 0 20, the third size of q.*{HINT}"):
        attention(x, x, x, layout=Layout.zigzag(20, 1))


def check_every_rank_refuses(rank, world, group):
    """Assert that every rank refuses swapped axes, and accepts as many heads as tokens."""
    x = zeros(4, 10)
    with pytest.raises(ValueError, match=rf"documents have 20 tokens over 2 ranks, .*{HINT}"):
        attention(x, x, x, mask=Mask.documents([15, 5]))
    with pytest.raises(ValueError, match=rf"q has 4 tokens, its layout gives rank {rank} 10, .*{HINT}"):
        attention(x, x, x, layout=Layout.contiguous(20, world))
    # Axes in the right order, with as many heads as the sequence has tokens, are accepted.
    whole = torch.randn(1, 6, 6, 8)
    local = shard(whole, Layout.contiguous(6, world))
    attention(local, local, local, layout=Layout.contiguous(6, world), mask=Mask.documents([2, 4]))
    attention(local, local, local, mask=Mask.documents([2, 4]))


def test_all_ranks_refuse_swapped_axes(pool):
    pool.run(2, check_every_rank_refuses)


def test_suspicious_axes_warn_once(warnings):
    for heads in (64, 128, 200):
        x = zeros(8, heads)
        flash_attention(x, x, x)
        attention(x, x, x)
    flash_attention(x, x[:, :2], x[:, :2])
    assert len(warnings()) == 1
    assert "[1, 8, 64, 8]" in warnings()[0]
    assert "meshflash.integrations.sdpa" in warnings()[0]


def test_right_axes_do_not_warn(warnings):
    for tokens, heads, k_tokens, kv_heads in (
        (1, 128, 300, 128),  # decoding
        (1, 1024, 300, 1024),  # decoding with the batch folded into the heads
        (1, 128, 1, 128),  # the first token
        (16, 128, 16, 8),  # a short prompt, GQA
        (16, 128, 400, 128),  # a short prompt after a cached prefix
        (5, 32, 5, 32),  # a short prompt
        (2, 16, 2, 16),
        (300, 512, 300, 1),  # MQA
        (0, 64, 0, 64),
    ):
        k = zeros(k_tokens, kv_heads)
        flash_attention(zeros(tokens, heads), k, k)
    x = torch.zeros(1, 8, 6, 8)
    scaled_dot_product_attention(x, x, x)
    flash_attention(zeros(8, 20), zeros(8, 20), zeros(8, 20), mask=Mask.documents([3, 5]))
    flash_attention(zeros(2, 10), zeros(10, 10), zeros(10, 10), mask=Mask.documents([5, 5]), q_offset=8)
    assert not warnings()


@pytest.mark.parametrize("call", [flash_attention, attention])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(causal=True), r"unexpected keyword argument 'causal'; write mask=Mask\.causal\(\)"),
        (dict(is_causal=True), r"unexpected keyword argument 'is_causal'; write mask=Mask\.causal\(\)"),
        (dict(dropout_p=0.1), r"unexpected keyword argument 'dropout_p'; write dropout="),
        (dict(moon=1), r"unexpected keyword argument 'moon'$"),
    ],
)
def test_arguments_of_other_libraries_name_their_replacement(call, given, message):
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got an {message}"):
        call(zeros(5, 2), zeros(5, 2), zeros(5, 2), **given)
