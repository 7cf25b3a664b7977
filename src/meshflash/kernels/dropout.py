"""Dropout by position: one counter-based bit for each (seed, batch row, head, query, key).

The counter is Philox 4x32 with 10 rounds, keyed by the seed, over (key position, query position,
global head, global batch row); its first word decides. So the same pairs are kept in any kernel and
on any split of the sequence.
"""

from __future__ import annotations

from torch import Tensor

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def keep(seed: int, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, probability: float) -> Tensor:
    """Which pairs are kept when each is dropped with this probability; int64 indices, broadcast together."""
    return philox(seed, key, query, head, batch) >= threshold(probability)


def threshold(probability: float) -> int:
    """A pair is dropped where its random word lies below this."""
    return round(probability * 2**32)


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """The first 32-bit word of Philox 4x32-10 at these counters, as int64.

    >>> import torch
    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> hex(philox(0, zero, zero, zero, zero).item())
    '0x6627e8d5'
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # int64 products wrap, but the bits of both 32-bit halves are right
        p0, p1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0
