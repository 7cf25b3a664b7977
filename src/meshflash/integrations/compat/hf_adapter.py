"""ring-flash-attention's adapter for Transformers: its two functions, and what they register with Transformers.

Every rank holds one contiguous chunk of packed documents and calls the model with it. Nothing is patched: an attention
function and a mask function are registered by name. The mask function returns the rule and the ranks, and the model
hands them to its layers, so that layers which run again in a backward need nothing global.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.engine.group_context import group_context
from meshflash.groups import group_of

#: The names under which Transformers finds the functions. It accepts the second only if flash-attn is installed.
NAMES = ("ring_attn", "flash_attention_2")


@dataclass(frozen=True)
class _Batch:
    """What `update_ring_flash_attn_params` said of the next forward.

    Args:
        lengths: The lengths of the documents of the whole sequence.
        layout: One contiguous chunk for each rank.
    """

    lengths: tuple[int, ...]
    layout: Layout


@dataclass
class _Adapter:
    """The state of the process, as in the original: what is registered is global, and so is the next batch.

    Args:
        group: The process group of `substitute_hf_flash_attn`.
        schedule: The schedule of attention over its ranks.
        batch: The batch of the next forward.
    """

    group: Any
    schedule: str
    batch: _Batch | None = None


_adapter: _Adapter | None = None


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int) -> None:
    """Let Transformers models attend over the ranks of a group, each of which holds a chunk of packed documents.

    It registers the attention implementation "ring_attn", and the same as "flash_attention_2". Create models with
    `attn_implementation="ring_attn"`, or call `model.set_attn_implementation("ring_attn")`. Transformers refuses
    "flash_attention_2" at construction where flash-attn is not installed; where it is, scripts need no change.

    Gradients are each rank's own: on every rank, the gradient of the sum of the losses of all ranks through that
    rank's tokens. Their sum over ranks is the gradient of that sum, so divide each rank's summed loss by the number of
    labels of all ranks and sum gradients; where DDP or FSDP averages them, multiply the loss by the number of ranks.

    Args:
        process_group: The ranks that share a sequence. None means the default group.
        heads_k_stride: The number of key heads that are gathered at a time.
    """
    global _adapter
    from meshflash.integrations.transformers.release import check_release  # says what to install

    import transformers  # isort: skip

    check_release(transformers.__version__)
    group_of(process_group)  # raises for what is no group of this rank
    if isinstance(heads_k_stride, bool) or not isinstance(heads_k_stride, int) or heads_k_stride < 1:
        raise ValueError(f"heads_k_stride={heads_k_stride!r}: expected a number of key heads, at least 1")
    for name in NAMES:
        transformers.AttentionInterface.register(name, _attend)
        transformers.AttentionMaskInterface.register(name, _make_mask)
    _adapter = _Adapter(process_group, f"allgather(head_stride={heads_k_stride})")


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any) -> None:
    """Say which documents the next forwards are of. Call it on every rank before a forward with other documents.

    Rank r then calls the model with its own chunk of `input_ids` and `position_ids`, `[1, tokens]`: part r of
    `torch.tensor_split(x, world_size, dim=1)`. The number of tokens need not divide by the number of ranks.

    Args:
        cu_seqlens: The cumulative document lengths of the whole sequence, from 0.
        process_group: The process group that `substitute_hf_flash_attn` got.
    """
    if _adapter is None:
        raise ValueError("update_ring_flash_attn_params: call substitute_hf_flash_attn(process_group, 1) first")
    name, _, world = group_of(process_group)
    if name != group_of(_adapter.group)[0]:
        raise ValueError("process_group: expected the group that substitute_hf_flash_attn got")
    cuts = cu_seqlens.tolist()
    if len(cuts) < 2 or cuts[0] != 0 or cuts != sorted(cuts):
        raise ValueError(f"cu_seqlens: expected cumulative lengths from 0, such as [0, 3, 8]; got {cuts[:4]}")
    lengths = tuple(b - a for a, b in pairwise(cuts) if b > a)
    _adapter.batch = _Batch(lengths, Layout.contiguous(cuts[-1], world))


def _make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Any:
    """Return the mask of a model's layers over the whole sequence, as `AttentionMaskInterface` asks for it."""
    from meshflash.integrations.transformers.attention import Sequence, SequenceMask
    from meshflash.integrations.transformers.masks import Tokens, translate

    assert _adapter is not None
    try:
        batch = _adapter.batch
        if batch is None:
            raise ValueError("call update_ring_flash_attn_params(cu_seqlens, process_group) before the forward")
        if batch_size != 1:
            raise ValueError(f"expected a batch of one row with packed documents, got {batch_size} rows")
        if isinstance(q_offset, Tensor) or q_offset or kv_offset or kv_length != q_length:
            raise ValueError("keys of a cache are not supported; pass use_cache=False")
        _, rank, world = group_of(_adapter.group)
        if q_length != batch.layout.lengths[rank]:
            raise ValueError(
                f"{q_length} tokens on rank {rank}, but cu_seqlens gives it {batch.layout.lengths[rank]} of "
                f"{batch.layout.tokens}: pass its part of torch.tensor_split(x, {world}, dim=1)"
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask: padding is not supported; leave it out, or make it a document")
        rule = translate(mask_function, Tokens(q_length, kv_length, local=True))
    except ValueError as error:
        raise _told(error) from None
    return SequenceMask(
        rule & Mask.documents(list(batch.lengths)), Sequence(_adapter.group, batch.layout, _adapter.schedule)
    )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the ranks, as `AttentionInterface` asks for it."""
    from meshflash.integrations.transformers.attention import SequenceMask, mesh_attention

    name = type(module).__name__
    if not torch.compiler.is_compiling():
        try:
            if not isinstance(attention_mask, SequenceMask):
                raise ValueError(
                    f"{name} got no mask from its model, or one that was made before substitute_hf_flash_attn; this "
                    "model is not supported"
                )
            if dropout:
                raise ValueError(
                    f"attention dropout of {name} is {dropout}: set it to 0, or use "
                    "meshflash.integrations.transformers.context_parallel, which drops as one device does"
                )
            if query.shape[2] != key.shape[2]:
                raise ValueError(f"{name} has {query.shape[2]} queries and {key.shape[2]} keys; it is not supported")
            if getattr(module, "layer_idx", None) == 0:
                _check_positions(arguments.get("position_ids"), attention_mask)
        except ValueError as error:
            raise _told(error) from None
    return mesh_attention(module, query, key, value, attention_mask, dropout=dropout, **arguments)


def _check_positions(position_ids: Tensor | None, mask: Any) -> None:
    """Raise ValueError if a chunk that begins inside a document has the positions that Transformers makes up: 0, 1, ...

    Args:
        position_ids: The positions of this rank's tokens, if the model hands them to its layers.
        mask: The `SequenceMask`.
    """
    _, rank, _ = group_of(mask.queries.mesh)
    held = mask.queries.layout.ranges[rank]
    if position_ids is None or position_ids.shape[-1] < 2 or not held or held[0].start == 0:
        return
    first = held[0].start
    if not mask.rule.visible(first, first - 1):  # a document begins here
        return
    made_up = torch.arange(position_ids.shape[-1], device=position_ids.device).expand_as(position_ids)
    if torch.equal(position_ids, made_up):
        raise ValueError(
            f"position_ids: rank {rank} begins inside a document, at token {first} of the sequence, but its positions "
            "count from 0; pass its part of the positions of the whole sequence"
        )


def _told(error: ValueError) -> ValueError:
    """Return an error with the names of the functions, after the other ranks were told of it."""
    assert _adapter is not None
    said = ValueError(f"substitute_hf_flash_attn: {error}")
    group, _, world = group_of(_adapter.group)
    if world > 1 and not torch.compiler.is_compiling():
        group_context(group).broadcast_error(said)
    return said
