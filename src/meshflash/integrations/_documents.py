"""Packed documents as a rule, from the id of each token's document."""

from __future__ import annotations

import torch
from torch import Tensor

from meshflash.core.mask import Mask


def documents(ids: Tensor, single: int | None = None) -> Mask:
    """Return the mask of documents whose tokens follow each other and have the same id.

    Args:
        ids: The id of each token, `[batch, tokens]`.
        single: Each token with this id is a document of its own. None means that no id is special.

    >>> documents(torch.tensor([[0, 0, 1, 1, 1]])) == Mask.documents([2, 3])
    True
    """
    rows: list[list[int]] = []
    for row in ids.cpu():
        begins = torch.ones(len(row), dtype=torch.bool)
        begins[1:] = row[1:] != row[:-1]
        if single is not None:
            begins |= row == single
        cuts = torch.cat([begins.nonzero()[:, 0], torch.tensor([len(row)])])
        rows.append(cuts.diff().tolist())
    if all(row == rows[0] for row in rows):
        return Mask.documents(rows[0])
    most = max(map(len, rows))
    return Mask.documents([row + [0] * (most - len(row)) for row in rows])


def documents_of_positions(positions: Tensor) -> Mask | None:
    """Return the mask of documents of which each begins where positions do not go on, or None if there is one.

    Args:
        positions: The position of each token in its document, `[batch, tokens]`.

    >>> documents_of_positions(torch.tensor([[0, 1, 0, 1, 2]])) == Mask.documents([2, 3])
    True
    """
    ids = (positions[:, 1:] != positions[:, :-1] + 1).cumsum(1)
    return documents(torch.nn.functional.pad(ids, (1, 0))) if bool(ids.any()) else None
