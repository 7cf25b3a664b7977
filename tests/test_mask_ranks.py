"""Ranks may write equal masks differently; they agree in the first call and in later calls."""

from __future__ import annotations

import pytest
import torch

from meshflash import Mask, attention, flash_attention

DOCUMENTS = [3, 5]


def spelled_mask(spelling):
    """Return the same mask in one of four spellings."""
    causal, window, documents = Mask.causal(), Mask.window(4, 0), Mask.documents(DOCUMENTS)
    return [
        documents & window,
        window & documents & causal & Mask.full(),
        documents & (window | Mask.window(2, 0)) & Mask.documents([3, 0, 5]),
        Mask.from_cu_seqlens(torch.tensor([0, 3, 8])) & causal & window,
    ][spelling]


def spelled_slices(spelling):
    """Return the same mask of slices in one of four spellings."""
    spans = [(1, 3), (4, 8)]
    return [
        Mask.causal() | Mask.slices(spans, spans),
        Mask.slices(spans[::-1], spans[::-1]) | Mask.causal(),
        Mask.slices([*spans, (5, 5)], [*spans, (0, 8)]) | Mask.causal(),
        Mask.causal() | Mask.slices(torch.tensor(spans), spans, ["full", "full"]),
    ][spelling]


def check_different_spellings(rank, world, group, spelled):
    """Call attention with another spelling of the mask on each rank; assert that results match."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 2, 8, generator=generator, dtype=torch.float64)
    want = flash_attention(x, x, x, mask=spelled(0))
    local = x.chunk(world, dim=1)[rank]
    # If a spelling counted as a new mask, its rank would start a handshake and wait for the other rank forever.
    for repeat in range(4):
        out = attention(local, local, local, mask=spelled((rank * repeat) % 4), schedule="ring")
        assert torch.allclose(out, want.chunk(world, dim=1)[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spelled", [spelled_mask, spelled_slices])
def test_ranks_agree_on_equal_masks_written_differently(pool, spelled):
    pool.run(2, check_different_spellings, spelled)
