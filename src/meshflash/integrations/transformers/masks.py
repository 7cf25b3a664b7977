"""Translate the mask functions of Transformers to rules of `Mask`.

Transformers builds a mask from small functions of (batch row, head, query, key), combined by and / or. Each known one
becomes a `Mask` and is compared with the function on rows of pairs. One that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from meshflash.core.mask import Mask
from meshflash.integrations._documents import documents

#: The most queries whose pairs are compared with a mask function.
CHECKED_QUERIES = 24
#: The group of a token without one in `blockwise_overlay`.
NO_BLOCK = -1

MaskFunction = Callable[..., Any]


@dataclass(frozen=True)
class Tokens:
    """The tokens that a mask function is about.

    Args:
        queries: The number of queries.
        keys: The number of keys.
        local: Whether these are the tokens of one rank, so that nothing that was counted on them describes the
            whole sequence. Documents are then known from the whole batch.
    """

    queries: int
    keys: int
    local: bool = False


def translate(function: MaskFunction, tokens: Tokens) -> Mask:
    """Return the rule that a mask function of Transformers computes.

    Args:
        function: The mask function.
        tokens: The tokens that it is about.

    Raises:
        ValueError: The function is not known, or computes something else than its name says.
    """
    mask = _translate(function, tokens)
    if not tokens.local:
        _compare(function, mask, tokens)
    return mask


def _translate(function: MaskFunction, tokens: Tokens) -> Mask:
    from transformers import masking_utils

    if function is masking_utils.bidirectional_mask_function:
        return Mask.full()
    if function is masking_utils.causal_mask_function:
        return _band(function, Mask.causal(), tokens)
    is_theirs = getattr(function, "__module__", None) == masking_utils.__name__
    name = function.__qualname__.partition(".<locals>")[0] if is_theirs else ""
    values = _closure(function) if is_theirs else {}
    if name in ("and_masks", "or_masks"):
        parts = [_translate(part, tokens) for part in values["mask_functions"]]
        # one rank's positions may look packed where another's do not: parts that allow everything must not matter
        parts = [part for part in parts if name == "or_masks" or part != Mask.full()]
        return reduce(and_ if name == "and_masks" else or_, parts) if parts else Mask.full()
    if name == "sliding_window_overlay":
        return _band(function, Mask.window(values["sliding_window"] - 1, None), tokens)
    if name == "sliding_window_bidirectional_overlay":
        return _band(function, Mask.window(values["sliding_window"], values["sliding_window"]), tokens)
    if name == "packed_sequence_mask_function":
        return Mask.full() if tokens.local else documents(values["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":  # distances within a document stay the same
        inner = _translate(values["mask_function"], tokens)
        if inner.has_documents:
            raise ValueError(
                "mask: chunks or blocks inside packed documents are not supported; pass one document for each row"
            )
        return inner
    if name in ("blockwise_overlay", "chunked_overlay"):
        if tokens.local:
            raise ValueError(f'mask: {name} counts tokens of the whole sequence; pass cut="layers" to context_parallel')
        if name == "blockwise_overlay":
            return documents(values["block_sequence_ids"], single=NO_BLOCK)
        begins = values["left_padding"].reshape(-1, 1).cpu()
        return documents((torch.arange(tokens.keys)[None] - begins).div(values["chunk_size"], rounding_mode="floor"))
    raise ValueError(
        f"mask: {getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)} is not a mask "
        "function that meshflash knows. Use create_causal_mask, create_bidirectional_mask and the other functions of "
        "transformers.masking_utils without or_mask_function and and_mask_function"
    )


def padding(attention_mask: Tensor | None, queries: int | None = None) -> Mask | None:
    """Return the mask that hides padded keys from all queries, as on one device, or None if there is no padding.

    Args:
        attention_mask: Whether each key counts, `[batch, keys]`.
        queries: The number of queries; None is that of the keys.

    Raises:
        ValueError: Padding lies between tokens.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected [batch, tokens] or None, got {list(attention_mask.shape)}; masks of pairs are "
            "not supported"
        )
    counts = attention_mask.bool()
    if bool(counts.all()):
        return None
    begins = counts.clone()
    begins[:, 1:] &= ~counts[:, :-1]
    if int(begins.sum(1).max()) > 1:
        row = int(begins.sum(1).argmax())
        raise ValueError(
            f"attention_mask: row {row} has padding between tokens; only padding on the left or right is supported"
        )
    keys = counts.shape[1]
    seen, left = counts.sum(1).tolist(), counts.int().argmax(1).tolist()
    k_lengths = [[a, n, keys - a - n] for a, n in zip(left, seen, strict=True)]
    return Mask.documents([[0, keys if queries is None else queries, 0]] * len(counts), k_lengths=k_lengths)


def _closure(function: MaskFunction) -> dict[str, Any]:
    """Return the variables that a function took from the function that made it."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {variable: cell.cell_contents for variable, cell in cells}


def _band(function: MaskFunction, mask: Mask, tokens: Tokens) -> Mask:
    """Return a mask of distances, compared with its function if the function as a whole cannot be."""
    if tokens.local:
        _compare(function, mask, tokens)
    return mask


def _compare(function: MaskFunction, mask: Mask, tokens: Tokens) -> None:
    """Raise ValueError if the function allows other pairs, for all keys of some queries of each batch row."""
    keys, device = torch.arange(tokens.keys), _device(function)
    for row in range(mask.batch_rows or 1):
        for query in _sampled(tokens.queries, mask, row):
            index = torch.tensor(row, device=device)
            theirs = function(index, index * 0, torch.tensor(query, device=device), keys.to(device))
            ours = torch.from_numpy(mask.visible(query, keys.numpy(), batch=row))
            differs = torch.as_tensor(theirs).cpu().expand(tokens.keys) != ours
            if bool(differs.any()):
                raise ValueError(
                    f"mask: {function.__qualname__} of this version of Transformers is not {mask}: query {query} and "
                    f"key {int(differs.nonzero()[0])} of row {row} differ; use a tested version (docs/transformers.md)"
                )


def _sampled(queries: int, mask: Mask, row: int) -> list[int]:
    """Return some queries in order: the first and last ones, those around the ends of documents, and some between."""
    ends = (int(n) for node in mask.documents_nodes for n in node.q_cuts(row if node.rows is not None else 0))
    near = sorted({0, 1, queries - 2, queries - 1, *(end + d for end in ends for d in (-1, 0))})
    near = near[:: max(1, len(near) // CHECKED_QUERIES)]
    spread = range(0, queries, max(1, queries // CHECKED_QUERIES))
    return sorted(n for n in {*near, *spread} if 0 <= n < queries)


def _device(function: MaskFunction) -> torch.device:
    """Return the device of the tensors that a mask function, or one inside it, reads."""
    for value in _closure(function).values() if hasattr(function, "__code__") else ():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Tensor):
                return part.device
            if callable(part) and (device := _device(part)).type != "cpu":
                return device
    return torch.device("cpu")
