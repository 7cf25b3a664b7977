"""Dropout by position: one counter-based random word for each (seed, batch row, head, query, key).

The generator is Philox 4x32 with 10 rounds, keyed by the seed, with the counter (key position, query position, global
head, global batch row). Its first word decides. So every kernel keeps the same pairs, on any split of the sequence.
"""

from __future__ import annotations

from torch import Tensor

#: Philox 4x32-10 as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and in cuRAND.
_ROUNDS = 10
_LOW_32_BITS = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
#: Added to the two key words after each round: the golden ratio and the square root of 3 less 1, as 32-bit fractions.
_WEYL_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def keep(seed: int, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, probability: float) -> Tensor:
    """Return which (query, key) pairs are kept, as booleans. The int64 indices broadcast.

    Args:
        seed: The 64-bit seed.
        batch: The global batch row.
        head: The global query head.
        query: The position of the query.
        key: The position of the key.
        probability: The probability that a pair is dropped.
    """
    return philox(seed, key, query, head, batch) >= threshold(probability)


def threshold(probability: float) -> int:
    """Return the 32-bit threshold: a pair is dropped if its random word is below it.

    Args:
        probability: The probability that a pair is dropped.
    """
    return round(probability * 2**32)


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """Return the first 32-bit word of Philox 4x32-10, as int64.

    Args:
        seed: The 64-bit seed, which is the key of the generator.
        c0: The lowest 32-bit word of the counter, as int64.
        c1: The second word of the counter.
        c2: The third word of the counter.
        c3: The highest word of the counter.

    >>> import torch
    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> hex(philox(0, zero, zero, zero, zero).item())
    '0x6627e8d5'
    """
    k0, k1 = seed & _LOW_32_BITS, (seed >> 32) & _LOW_32_BITS
    for _ in range(_ROUNDS):
        # torch has no unsigned 64-bit multiply. The signed one wraps, but the bits of both 32-bit halves are right;
        # the mask removes the sign bits that the arithmetic shift brings in.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _LOW_32_BITS) ^ c1 ^ k0, p1 & _LOW_32_BITS
        c2, c3 = ((p0 >> 32) & _LOW_32_BITS) ^ c3 ^ k1, p0 & _LOW_32_BITS
        k0, k1 = (k0 + _WEYL_INCREMENTS[0]) & _LOW_32_BITS, (k1 + _WEYL_INCREMENTS[1]) & _LOW_32_BITS
    return c0
