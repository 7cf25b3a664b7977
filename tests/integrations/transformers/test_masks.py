"""Mask functions of Transformers become rules, or are refused by name."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import masking_utils

from meshflash import Mask
from meshflash.integrations.transformers import masks
from meshflash.integrations.transformers.masks import Tokens, padding, translate

TOKENS = Tokens(23, 23)
POSITIONS = torch.tensor([[*range(9), *range(14)], [*range(5), *range(18)]])
PACKED: Any = masking_utils.find_packed_sequence_indices(POSITIONS)
NO_PADDING = torch.zeros(2, dtype=torch.long)
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, *[-1] * 10, 1, 1, 1, 1, *[-1] * 4], [2, 2, *[-1] * 21]])


def _pairs(function, rows=2, tokens=23):
    """Return which pairs a mask function allows, `[rows, queries, keys]`."""
    axes = torch.meshgrid(torch.arange(rows), torch.arange(tokens), torch.arange(tokens), indexing="ij")
    return torch.as_tensor(function(axes[0], axes[0] * 0, axes[1], axes[2])).expand(rows, tokens, tokens).numpy()


def _visible(mask, rows=2, tokens=23):
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None]
    return np.stack([np.broadcast_to(mask.visible(i, j, batch=b), (tokens, tokens)) for b in range(rows)])


CAUSAL = masking_utils.causal_mask_function
FUNCTIONS = {
    "causal": CAUSAL,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(5),
    "bidirectional window": masking_utils.sliding_window_bidirectional_mask_function(4),
    "chunks": masking_utils.chunked_causal_mask_function(6, NO_PADDING),
    "chunks behind padding": masking_utils.chunked_causal_mask_function(6, torch.tensor([0, 3])),
    "packed": masking_utils.and_masks(CAUSAL, masking_utils.packed_sequence_mask_function(PACKED)),
    "images": masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(BLOCKS)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rule_allows_the_pairs_of_the_function(name):
    mask = translate(FUNCTIONS[name], TOKENS)
    assert np.array_equal(_visible(mask), _pairs(FUNCTIONS[name]))


def test_packed_documents_of_the_newest_release_become_a_rule():
    if not hasattr(masking_utils, "packed_sequence_compatibility_function"):
        pytest.skip("this release has only the older function")
    function = masking_utils.packed_sequence_compatibility_function(FUNCTIONS["window"], POSITIONS, PACKED)
    assert np.array_equal(_visible(translate(function, TOKENS)), _pairs(function))
    chunks = masking_utils.packed_sequence_compatibility_function(FUNCTIONS["chunks"], POSITIONS, PACKED)
    with pytest.raises(ValueError, match="chunks or blocks inside packed documents are not supported"):
        translate(chunks, TOKENS)


def test_unknown_function_is_refused_by_name():
    def every_other_key(batch, head, q, k):
        return k % 2 == 0

    for function in (every_other_key, masking_utils.and_masks(CAUSAL, every_other_key)):
        with pytest.raises(ValueError, match=r"every_other_key is not a mask function that meshflash knows"):
            translate(function, TOKENS)


@pytest.mark.parametrize("name", ["window", "packed", "images", "chunks"])
def test_function_that_computes_something_else_is_refused(monkeypatch, name):
    """As a new release of Transformers that means another thing by a name."""
    right = masks._translate

    def wrong(function, tokens):
        mask = right(function, tokens)
        return mask & Mask.window(3, 0) if name == "window" else Mask.causal()

    monkeypatch.setattr(masks, "_translate", wrong)
    with pytest.raises(ValueError, match=r"this version of Transformers is not .* use a tested version"):
        translate(FUNCTIONS[name], TOKENS)


def test_what_counts_tokens_is_refused_for_a_part_of_the_sequence():
    local = Tokens(23, 23, local=True)
    for name in ("chunks", "images"):
        with pytest.raises(ValueError, match='pass cut="layers"'):
            translate(FUNCTIONS[name], local)
    assert translate(FUNCTIONS["packed"], local) == Mask.causal()  # documents are known from the whole batch


def test_padded_keys_are_hidden_from_every_query():
    counts = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
    rule = padding(counts)
    assert rule is not None
    hidden = np.broadcast_to(counts.bool().numpy()[:, None], (3, 5, 5))
    assert np.array_equal(_visible(rule, rows=3, tokens=5), hidden)
    assert np.array_equal(_visible(rule & Mask.causal(), rows=3, tokens=5), hidden & np.tri(5, dtype=bool))
    cross = padding(counts, queries=3)
    assert cross is not None
    i, j = np.arange(3)[:, None], np.arange(5)[None]
    for b in range(3):
        assert np.array_equal(cross.visible(i, j, batch=b), hidden[b, :3])
    assert padding(torch.ones(2, 5)) is None
    assert padding(None) is None


def test_padding_between_tokens_and_masks_of_pairs_are_refused():
    with pytest.raises(ValueError, match="row 1 has padding between tokens"):
        padding(torch.tensor([[1, 1, 1], [1, 0, 1]]))
    with pytest.raises(ValueError, match=r"expected \[batch, tokens\] or None"):
        padding(torch.ones(2, 1, 5, 5))
