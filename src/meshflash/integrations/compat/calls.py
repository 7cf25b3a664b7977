"""What the drop-in names share: FlashAttention's way to call, over the ranks of a group.

Each name takes this rank's share, `[batch, tokens, heads, dim]`, or packed `[tokens, heads, dim]` with the local
`cu_seqlens`. What others accept and ignore works here (windows, ALiBi, deterministic), or raises (dropout without a
seed that all ranks share).
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
#: For q, k and v; for k and v in one tensor; for all three in one.
Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
#: The ranges of one document that a rank holds: from its first position, local length, rank and world.
Held = Callable[[int, int, int, int], list[range]]


def mask_of(causal: bool, window_size: Window, documents: list[int] | None = None) -> Mask:
    """The mask of FlashAttention's arguments: -1 is no limit, and causal looks at nothing ahead.

    >>> mask_of(True, (4, -1))
    window(4, 0)
    """
    left, right = (None if side < 0 else side for side in window_size)
    masks = [Mask.causal()] if causal else []
    if left is not None or right is not None:
        masks.append(Mask.window(left, right))
    if documents is not None:
        masks.append(Mask.documents(documents))
    mask = masks[0] if masks else Mask.full()
    for more in masks[1:]:
        mask = mask & more
    return mask


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
    """The output, or with `return_attn_probs` (output, LSE, None), as FlashAttention returns them."""
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p}: ranks would drop other pairs each, for these names have no seed; call "
            "meshflash.attention(..., dropout=, seed=) with a seed that all ranks share"
        )
    out, lse = attention(
        q, k, v, mesh=group, layout=layout, k_layout=k_layout, schedule=schedule, mask=mask, scale=softmax_scale,
        softcap=softcap or None, alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def check_lengths(q: Tensor, k: Tensor, mask: Mask, alibi_slopes: Tensor | None) -> None:
    """ValueError where positions matter, and queries and keys have other ones: others align their ends, or nothing."""
    tokens, k_tokens = q.shape[-3], k.shape[-3]
    if tokens != k_tokens and (mask != Mask.full() or alibi_slopes is not None):
        raise ValueError(
            f"q has {tokens} tokens and k {k_tokens}, and nothing says which positions they are; call "
            "meshflash.attention(..., layout=, k_layout=, q_offset=)"
        )


def dense(name: str, schedule: str) -> Functions:
    """The functions of a schedule for q, k and v, for k and v in one tensor, and for all three in one."""

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


def varlen(name: str, schedule: str, held: Held) -> Functions:
    """The same for packed documents, of each of which every rank holds as many tokens."""

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
                tuple(r for begin, n in zip(cuts, lengths, strict=False) for r in held(begin * world, n, rank, world))
                for rank in range(world)
            )
        )
        mask = mask_of(causal, window_size, [n * world for n in lengths])
        return call(q, k, v, mask, schedule, layout, dropout_p, softmax_scale, alibi_slopes, deterministic,
                    return_attn_probs, group)  # fmt: skip

    return forms(f"{name}_varlen_", func)


def forms(name: str, func: Callable[..., Any]) -> Functions:
    """A function of q, k and v, and the same for tensors that hold two or all three of them, by their names."""

    def kvpacked(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Any:
        return func(q, *kv.unbind(-3), *arguments, **named)

    def qkvpacked(qkv: Tensor, *arguments: Any, **named: Any) -> Any:
        return func(*qkv.unbind(-3), *arguments, **named)

    for function, form in ((func, ""), (kvpacked, "kvpacked_"), (qkvpacked, "qkvpacked_")):
        function.__name__ = function.__qualname__ = f"{name}{form}func"
        function.__doc__ = f"`{function.__name__}` by meshflash, over the ranks of a group."
    return func, kvpacked, qkvpacked
