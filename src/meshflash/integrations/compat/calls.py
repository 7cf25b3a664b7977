"""Shared code of the drop-in names: FlashAttention's signature over the ranks of a group.

Each function takes this rank's tokens, `[batch, tokens, heads, dim]`, or packed `[tokens, heads, dim]` with the local
`cu_seqlens`. Arguments that the originals accept and ignore either work here (windows, ALiBi, deterministic) or raise
(dropout, which needs a seed that all ranks share).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor

from meshflash.api import attention
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.groups import group_of

Window = tuple[int, int]
#: The three forms of a function: for q, k and v; for k and v in one tensor; for all three in one tensor.
Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
#: Returns the ranges of one document that a rank holds, from its first position, local length, rank and world size.
DocumentRanges = Callable[[int, int, int, int], list[range]]


def mask_of(causal: bool, window_size: Window, documents: list[int] | None = None) -> Mask:
    """Return the mask for FlashAttention's arguments; -1 means no limit on that side of the window.

    >>> mask_of(True, (4, -1))
    window(4, 0)
    """
    left, right = (None if side < 0 else side for side in window_size)
    mask = (Mask.causal() if causal else Mask.full()) & Mask.window(left, right)
    return mask if documents is None else mask & Mask.documents(documents)


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    schedule: str,
    layout: Layout | None,
    dropout_p: float,
    softmax_scale: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    group: Any,
    softcap: float = 0.0,
    k_layout: Layout | None = None,
) -> Any:
    """Call `attention`; return the output, or (output, LSE, None) with `return_attn_probs`, as FlashAttention does."""
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p}: this function has no seed, so each rank would drop different pairs; call "
            "meshflash.attention(..., dropout=, seed=) with the same seed on all ranks"
        )
    out, lse = attention(
        q, k, v, mesh=group, layout=layout, k_layout=k_layout, schedule=schedule, mask=mask, scale=softmax_scale,
        softcap=softcap or None, alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def check_lengths(q: Tensor, k: Tensor, mask: Mask, alibi_slopes: Tensor | None) -> None:
    """Raise ValueError if positions matter and q and k differ in length: the originals do not define an alignment."""
    tokens, k_tokens = q.shape[-3], k.shape[-3]
    if tokens != k_tokens and (mask != Mask.full() or alibi_slopes is not None):
        raise ValueError(
            f"q has {tokens} tokens, k has {k_tokens}, and their positions are not defined; call "
            "meshflash.attention(..., layout=, k_layout=, q_offset=)"
        )


def dense(name: str, schedule: str) -> Functions:
    """Return the three forms of a function that runs `schedule` on its default layout."""

    def func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
    ) -> Any:  # fmt: skip
        mask = mask_of(causal, window_size)
        check_lengths(q, k, mask, alibi_slopes)
        return call(q, k, v, mask, schedule, None, dropout_p, softmax_scale, alibi_slopes, deterministic,
                    return_attn_probs, group)  # fmt: skip

    return forms(f"{name}_", func)


def varlen(name: str, schedule: str, ranges_of: DocumentRanges) -> Functions:
    """Return the three forms of a function for packed documents; all ranks hold equally many tokens of each."""

    def func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
        group: Any = None,
    ) -> Any:  # fmt: skip
        _, _, world = group_of(group)
        cuts = cu_seqlens.tolist()
        lengths = [end - begin for begin, end in pairwise(cuts)]
        layout = Layout(
            tuple(
                tuple(
                    r for begin, n in zip(cuts, lengths, strict=False) for r in ranges_of(begin * world, n, rank, world)
                )
                for rank in range(world)
            )
        )
        mask = mask_of(causal, window_size, [n * world for n in lengths])
        return call(q, k, v, mask, schedule, layout, dropout_p, softmax_scale, alibi_slopes, deterministic,
                    return_attn_probs, group)  # fmt: skip

    return forms(f"{name}_varlen_", func)


def forms(name: str, func: Callable[..., Any]) -> Functions:
    """Return a function of q, k and v with its kvpacked and qkvpacked forms, all named as in the original."""

    def kvpacked(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Any:
        return func(q, *kv.unbind(-3), *arguments, **named)

    def qkvpacked(qkv: Tensor, *arguments: Any, **named: Any) -> Any:
        return func(*qkv.unbind(-3), *arguments, **named)

    for function, form in ((func, ""), (kvpacked, "kvpacked_"), (qkvpacked, "qkvpacked_")):
        function.__name__ = function.__qualname__ = f"{name}{form}func"
        function.__doc__ = f"Compute `{function.__name__}` with meshflash, over the ranks of a group."
    return func, kvpacked, qkvpacked
