"""Names of ring-flash-attention: ring, zigzag and stripe, dense and varlen, llama3's all-gather, and for Transformers.

>>> from meshflash.integrations.compat.ring_flash_attn import zigzag_ring_flash_attn_func
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshflash.core.layout import Layout
from meshflash.groups import group_of
from meshflash.integrations.compat.calls import Window, call, dense, forms, mask_of, varlen
from meshflash.integrations.compat.hf_adapter import substitute_hf_flash_attn as substitute_hf_flash_attn
from meshflash.integrations.compat.hf_adapter import update_ring_flash_attn_params as update_ring_flash_attn_params


def _contiguous(first: int, n: int, rank: int, world: int) -> list[range]:
    return [range(first + rank * n, first + (rank + 1) * n)] if n else []


def _zigzag(first: int, n: int, rank: int, world: int) -> list[range]:
    if n % 2:
        raise ValueError(f"cu_seqlens: {n} tokens of a document on each rank are odd; zigzag needs two equal chunks")
    half = n // 2
    pieces = (first + rank * half, first + (2 * world - 1 - rank) * half)
    return [range(begin, begin + half) for begin in pieces] if n else []


def _striped(first: int, n: int, rank: int, world: int) -> list[range]:
    return [range(first + rank, first + n * world, world)] if n else []


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = dense("ring_flash_attn", "ring")
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = dense(
    "zigzag_ring_flash_attn", "zigzag"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = dense(
    "stripe_flash_attn", "striped"
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = varlen(
    "ring_flash_attn", "ring", _contiguous
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = varlen("zigzag_ring_flash_attn", "zigzag", _zigzag)
stripe_flash_attn_varlen_func, stripe_flash_attn_varlen_kvpacked_func, stripe_flash_attn_varlen_qkvpacked_func = varlen(
    "stripe_flash_attn", "striped", _striped
)

#: Attribute of a prepared `cu_seqlens_q` that holds the document lengths of the whole sequence. The original recomputes
#: them from gathered keys; here the mask needs them.
_DOCUMENTS = "_meshflash_documents"


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return this rank's part of packed documents, for `llama3_flash_attn_varlen_func`.

    Args:
        cu_seqlens: The cumulative document lengths of the whole sequence.
        causal: Whether the mask is causal: later keys are then left out.
        rank: The number of this rank, from 0.
        world_size: The number of ranks; it must divide the number of tokens.

    Returns:
        `(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)`. Pass the very tensor `cu_seqlens_q`
        on: it carries the document lengths of the whole sequence.

    >>> cuts = torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> q, k, longest_q, longest_k, keys = llama3_flash_attn_prepare_cu_seqlens(cuts, True, rank=1, world_size=2)
    >>> q.tolist(), k.tolist(), longest_q, longest_k, keys
    ([0, 4], [0, 5], 4, 5, slice(3, 8, None))
    """
    cuts = cu_seqlens.tolist()
    total = cuts[-1]
    if total % world_size:
        raise ValueError(
            f"cu_seqlens: {total} tokens do not divide by {world_size} ranks; meshflash.attention takes any length"
        )
    begin, end = (n * total // world_size for n in (rank, rank + 1))
    mine = [(a, b) for a, b in pairwise(cuts) if a < end and b > begin]
    q_cuts = [0, *(min(b, end) - begin for _, b in mine)]
    last = end if causal else mine[-1][1]
    first = mine[0][0]
    k_cuts = [0, *(min(b, last) - first for _, b in mine)]
    made = [torch.tensor(part, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for part in (q_cuts, k_cuts)]
    setattr(made[0], _DOCUMENTS, [b - a for a, b in pairwise(cuts)])
    longest = [max(b - a for a, b in pairwise(part)) for part in (q_cuts, k_cuts)]
    return made[0], made[1], longest[0], longest[1], slice(first, last)


def _llama3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    documents = getattr(cu_seqlens_q, _DOCUMENTS, None)
    if documents is None:
        raise ValueError(
            "cu_seqlens_q: it lacks the document lengths of the whole sequence; pass the very tensor that "
            "llama3_flash_attn_prepare_cu_seqlens of this module returned, or call "
            "meshflash.attention(..., mask=Mask.documents(lengths), schedule='allgather')"
        )
    layout = Layout.contiguous(sum(documents), group_of(group)[2])
    mask, schedule = mask_of(causal, window_size, documents), f"allgather(head_stride={heads_k_stride})"
    return call(q, k, v, mask, schedule, layout, dropout_p, softmax_scale, alibi_slopes, deterministic,
                return_attn_probs, group)  # fmt: skip


(
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = forms("llama3_flash_attn_varlen_", _llama3)
