"""FlexAttention's block masks as masks of slices: the same pairs as `mask_mod`, the same attention, and refusals."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from meshflash import Mask, flash_attention
from meshflash.core.mask import Slices
from meshflash.core.slices import KINDS

DOCUMENT = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 300, 51, 149]))
LENGTHS = torch.tensor([300, 600])


def causal(b, h, i, j):
    return i >= j


def document_causal(b, h, i, j):
    return (DOCUMENT[i] == DOCUMENT[j]) & (i >= j)


def padding(b, h, i, j):
    return (j < LENGTHS[b]) & (i >= j)


#: For each name: the function, batch rows, queries, keys, block size, and the slices that the mask takes at most.
MASKS: dict[str, tuple[Any, int | None, int, int, Any, int]] = {
    "full": (lambda b, h, i, j: (i >= 0) & (j >= 0), None, 300, 500, 128, 1),
    "causal": (causal, None, 500, 500, 128, 1),
    "causal, more keys": (causal, None, 300, 700, 128, 1),
    "causal, more queries": (causal, None, 700, 300, 128, 2),
    "blocks of other sizes": (causal, None, 500, 500, (64, 32), 1),
    "window": (lambda b, h, i, j: (i >= j) & (i - j <= 100), None, 1000, 1000, 128, 2),
    "both sides": (lambda b, h, i, j: (i - j).abs() <= 70, None, 600, 600, 128, 3),
    "documents": (document_causal, None, 600, 600, 128, 4),
    "prefix": (lambda b, h, i, j: (i >= j) | (j < 70), None, 600, 600, 128, 2),
    "sink tokens": (lambda b, h, i, j: (i >= j) & ((i - j < 50) | (j < 3)), None, 400, 400, 128, 4),
    "block-causal": (lambda b, h, i, j: i // 100 >= j // 100, None, 640, 640, 128, 7),
    "frames": (lambda b, h, i, j: (i // 90 >= j // 90) & (i // 90 - j // 90 < 3), None, 630, 630, 128, 7),
    "padding by row": (padding, 2, 600, 600, 128, 4),
    "nothing": (lambda b, h, i, j: i < -j, None, 200, 200, 128, 0),
}


def table(mask: Mask) -> list[list[int]]:
    """Return the slices of a mask."""
    assert isinstance(mask, Slices)
    found: list[list[int]] = mask.table.tolist()
    return found


@pytest.mark.parametrize("name", MASKS)
def test_slices_show_the_pairs_of_the_block_mask(name):
    function, batch, q_tokens, k_tokens, size, most = MASKS[name]
    block_mask = create_block_mask(function, batch, None, q_tokens, k_tokens, device="cpu", BLOCK_SIZE=size)
    mask = Mask.from_block_mask(block_mask)
    assert len(table(mask)) <= most
    assert mask.batch_rows == batch
    i, j = torch.arange(q_tokens)[:, None], torch.arange(k_tokens)[None, :]
    for row in range(batch or 1):
        want = torch.broadcast_to(function(torch.tensor(row), torch.tensor(0), i, j), (q_tokens, k_tokens))
        assert (mask.visible(i.numpy(), j.numpy(), batch=row) == want.numpy()).all()
    mask.check(q_tokens, k_tokens, batch or 1)


def test_every_kind_comes_back_as_itself():
    for kind in KINDS:
        mask = Mask.slices([(30, 120)], [(10, 180)], kind)
        shown = torch.from_numpy(mask.visible(torch.arange(150)[:, None].numpy(), torch.arange(200)[None, :].numpy()))
        mask_mod = partial(lambda shown, b, h, i, j: shown[i, j], shown)
        block_mask = create_block_mask(mask_mod, None, None, 150, 200, device="cpu", BLOCK_SIZE=32)
        assert table(Mask.from_block_mask(block_mask)) == table(mask)


def test_attention_matches_flex_attention():
    block_mask = create_block_mask(document_causal, None, None, 600, 600, device="cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 600, 2, 16, generator=generator) for _ in range(3))
    out = flash_attention(q, k, v, mask=Mask.from_block_mask(block_mask))
    want = flex_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=block_mask)
    assert isinstance(want, torch.Tensor)
    assert torch.allclose(out, want.transpose(1, 2), rtol=0, atol=2e-6)


def test_ranges_may_be_tensors():
    ranges = torch.tensor([[0, 2], [3, 7]])
    assert Mask.slices(ranges, ranges.int()) == Mask.slices([(0, 2), (3, 7)], [(0, 2), (3, 7)])
    for wrong in (ranges.float().requires_grad_(), ranges.to("meta")):
        with pytest.raises(ValueError, match=re.escape("slices(q_ranges): expected pairs [begin, end]")):
            Mask.slices(wrong, ranges)


def test_compiled_calls_take_slices_as_a_tensor():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16, generator=generator, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda mask: flash_attention(q, k, v, mask=mask), fullgraph=True)
    for spans in ([(2, 9), (12, 20)], [(3, 8), (20, 40)]):
        mask = Mask.causal() | Mask.slices(spans, spans)
        out, want = compiled(mask), flash_attention(q, k, v, mask=mask)
        assert torch.equal(out, want)
        for got, gradient in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want)), strict=True):
            assert torch.equal(got, gradient)


def test_slices_combine_inside_compiled_functions():
    a, b = (Mask.slices([(n, n + 9)], [(0, 40)]) for n in (3, 20))
    q = torch.randn(1, 40, 2, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda q: flash_attention(q, q, q, mask=(a | b) & Mask.causal()), fullgraph=True)
    assert torch.equal(compiled(q), flash_attention(q, q, q, mask=(a | b) & Mask.causal()))


def test_masks_that_are_no_slices_are_refused():
    ragged = create_block_mask(lambda b, h, i, j: (i * j) % 3 == 0, None, None, 600, 600, device="cpu")
    with pytest.raises(
        ValueError, match=re.escape("from_block_mask(block_mask): the mask takes more than 4,096 slices")
    ):
        Mask.from_block_mask(ragged)
    by_head = create_block_mask(lambda b, h, i, j: i - j <= h, None, 3, 256, 256, device="cpu")
    with pytest.raises(ValueError, match="a mask for each of 3 heads"):
        Mask.from_block_mask(by_head)
    with pytest.raises(ValueError, match="expected a BlockMask of FlexAttention, got Tensor without kv_num_blocks"):
        Mask.from_block_mask(torch.ones(3, 3))


def test_mask_mod_is_evaluated_pair_by_pair():
    position = torch.arange(300) // 7
    table_of_pairs = torch.rand(300, 300, generator=torch.Generator().manual_seed(0)) < 2
    for mask_mod in (
        lambda b, h, i, j: (position[i] - position[j]).abs().sum() <= 3,
        lambda b, h, i, j: torch.stack([i >= j, i - j < 50]).all(dim=0),
        lambda b, h, i, j: table_of_pairs[i][j] & (i >= j),
        lambda b, h, i, j: i * 10000019 <= 10000019 * 200,
    ):
        mask = Mask.from_block_mask(create_block_mask(mask_mod, None, None, 300, 300, device="cpu"))
        shown = create_mask(mask_mod, None, None, 300, 300, device="cpu")[0, 0]
        assert (
            mask.visible(torch.arange(300)[:, None].numpy(), torch.arange(300)[None, :].numpy()) == shown.numpy()
        ).all()


def test_block_masks_serve_sequences_of_their_lengths_only():
    mask = Mask.from_block_mask(create_block_mask(causal, None, None, 300, 200, device="cpu"))
    mask.check(300, 200, 1)
    mask.check(100, 200, 1, q_offset=200)
    for q_tokens, k_tokens in ((600, 200), (300, 300), (299, 200)):
        with pytest.raises(ValueError, match="a mask of 300 queries and 200 keys, positions end at"):
            (Mask.causal() | mask).check(q_tokens, k_tokens, 1)
    assert Mask.unpack(*mask.pack()) == mask
    by_row = Mask.from_block_mask(create_block_mask(padding, 2, None, 600, 600, device="cpu"))
    with pytest.raises(
        ValueError, match=r"from_block_mask\(block_mask\): 2 rows of slices for a batch of 3; create it"
    ):
        by_row.check(600, 600, 3)


def test_block_masks_without_all_of_their_blocks_are_refused():
    block_mask = create_block_mask(causal, None, None, 600, 600, device="cpu")
    block_mask.kv_num_blocks = block_mask.kv_num_blocks[:, :, :2]
    with pytest.raises(ValueError, match=r"kv_num_blocks has the shape \[1, 1, 2\]; expected .* its 600 queries"):
        Mask.from_block_mask(block_mask)


def test_block_mask_of_full_blocks_only():
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, seq_lengths=(64, 64))
    want = Mask.slices([(0, 32), (32, 64)], [(0, 32), (0, 64)])
    assert table(Mask.from_block_mask(block_mask)) == table(want)
