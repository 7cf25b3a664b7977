"""Masks by name, for commands: `causal`, `window-512`, `documents-8`. Does not import torch, so `draw` starts fast."""

from __future__ import annotations

import numpy as np

from meshflash.core.mask import Mask

#: Standard deviation of the logarithm of lengths in `documents-lognormal-N`: a few long documents hold most tokens.
SIGMA = 1.0


def parse_mask(name: str, tokens: int) -> Mask:
    """Return the mask of this name for a sequence of `tokens` tokens.

    Names are full and causal, and these, which are causal too: window-N (N keys back), documents-N (N documents of
    equal length), documents-lognormal-N (lengths drawn from a lognormal distribution of mean N with a fixed seed; the
    last document is cut to fit).

    >>> parse_mask("window-4", 16)
    window(4, 0)
    """
    kind, _, number = name.rpartition("-")
    count = int(number) if number.isdigit() else 0
    if name == "full":
        return Mask.full()
    if name == "causal":
        return Mask.causal()
    if kind == "window" and count:
        return Mask.causal() & Mask.window(count, 0)
    if kind == "documents" and 0 < count <= tokens:
        return Mask.causal() & Mask.documents([tokens // count + (n < tokens % count) for n in range(count)])
    if kind == "documents-lognormal" and count:
        return Mask.causal() & Mask.documents(_lognormal(count, tokens))
    raise ValueError(
        f"mask {name!r}: expected full, causal, window-N, documents-N or documents-lognormal-N, such as window-512"
    )


def scaled_mask(name: str, tokens: int, real_tokens: int, scale: float) -> Mask:
    """Return the mask of a name for another number of tokens, with windows and documents of `scale` times their length.

    A window keeps at least one key, and a document at least one token.

    Args:
        name: The name, as for `parse_mask`.
        tokens: The number of tokens to build the mask for.
        real_tokens: The number of tokens that the name is meant for.
        scale: The length of windows and documents over that of the name.

    >>> scaled_mask("window-4096", 64, 65536, scale=64 / 65536)
    window(4, 0)
    >>> scaled_mask("documents-8", 64, 128, scale=1) == parse_mask("documents-4", 64)
    True
    """
    kind, _, number = name.rpartition("-")
    if number.isdigit() and kind in ("window", "documents-lognormal"):
        name = f"{kind}-{max(1, round(int(number) * scale))}"
    elif number.isdigit() and kind == "documents":
        name = f"{kind}-{min(tokens, max(1, round(int(number) * tokens / (real_tokens * scale))))}"
    return parse_mask(name, tokens)


def _lognormal(mean: int, tokens: int) -> list[int]:
    """Return document lengths that add up to `tokens`; `mean` is that of the distribution before rounding."""
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    left = tokens
    while left:
        drawn = generator.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA)
        lengths.append(min(left, max(1, round(drawn))))
        left -= lengths[-1]
    return lengths
