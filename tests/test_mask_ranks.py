"""Ranks that write the same mask in different ways agree, and go on agreeing in later calls."""

from __future__ import annotations

import torch

from meshflash import Mask, attention, flash_attention

DOCUMENTS = [3, 5]


def written(way):
    """One mask, written in several ways."""
    causal, window, documents = Mask.causal(), Mask.window(4, 0), Mask.documents(DOCUMENTS)
    return [
        documents & window,
        window & documents & causal & Mask.full(),
        documents & (window | Mask.window(2, 0)) & Mask.documents([3, 0, 5]),
        Mask.from_cu_seqlens(torch.tensor([0, 3, 8])) & causal & window,
    ][way]


def in_different_ways(rank, world, group):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 2, 8, generator=generator, dtype=torch.float64)
    want = flash_attention(x, x, x, mask=written(0))
    mine = x.chunk(world, dim=1)[rank]
    for turn in range(4):  # a rank to which one of them were new would wait for the others' handshake
        out = attention(mine, mine, mine, mask=written((rank * turn) % 4), schedule="ring")
        assert torch.allclose(out, want.chunk(world, dim=1)[rank], rtol=0, atol=1e-12)


def test_ranks_agree_on_equal_masks_written_differently(pool):
    pool.run(2, in_different_ways)
