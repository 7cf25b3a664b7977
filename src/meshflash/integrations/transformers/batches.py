"""Cut a batch of a decoder-only model: every rank gets its tokens of the ids, positions and labels.

Labels are shifted before the cut, so that a token's label is there whichever rank holds the next token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.integrations._documents import documents, documents_of_positions
from meshflash.integrations.transformers.attention import Sequence, sequence_of
from meshflash.integrations.transformers.masks import padding
from meshflash.parallel.loss import IGNORE_INDEX
from meshflash.sharding import shard

#: The key of a cut batch that holds its `BatchShard`.
KEY = "mesh_shard"
#: What is cut along its dimension 1.
TOKEN_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "labels", "shift_labels", "token_type_ids")
#: Arguments that describe packed documents to other kernels; position ids do so too.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class BatchShard:
    """What a rank knows of the whole batch beside its own tokens.

    Args:
        sequence: The ranks and the layout.
        documents: The documents, where the batch has packed documents or padding.
        positions: The position ids of all tokens, `[1 or batch, tokens]`.
    """

    sequence: Sequence
    documents: Mask | None
    positions: Tensor


def shard_batch(
    batch: Mapping[str, Any], mesh: Any, *, layout: Layout | str = "auto", schedule: str = "auto"
) -> dict[str, Any]:
    """Return this rank's part of a whole batch for a causal language model, to call a `context_parallel` model with.

    The label of a token is the next token's. The layout and the schedule of the batch are those of the call.

    Args:
        batch: The keyword arguments of the model, the same on all ranks: `input_ids` or `inputs_embeds`, and what else
            the model takes, such as `attention_mask`, `position_ids`, `labels` and `num_items_in_batch`.
        mesh: The ranks that share the sequence: a DeviceMesh of one dimension, or a process group.
        layout: The layout, or its name. "auto" asks `Layout.auto`: zigzag, or balanced for packed documents.
        schedule: The schedule of attention over the ranks.
    """
    local = dict(batch)
    ids = local.get("input_ids") if local.get("input_ids") is not None else local.get("inputs_embeds")
    if ids is None:
        raise ValueError("shard_batch: expected input_ids or inputs_embeds in the batch")
    rows, tokens = ids.shape[:2]
    _check_lengths(local, rows, tokens)
    attention_mask, positions = local.get("attention_mask"), local.get("position_ids")
    hidden, packed = padding(attention_mask), packed_documents(local, rows)
    for name in PACKING:
        local.pop(name, None)
    if hidden is not None and packed is not None:
        packed = None  # Transformers does not look for packed positions beside an attention mask
    if positions is None:
        positions = torch.arange(tokens, device=ids.device)[None]
    sequence = sequence_of(mesh, layout, schedule, tokens, packed)
    if local.get("labels") is not None or local.get("shift_labels") is not None:
        if local.get("shift_labels") is None:
            local["shift_labels"] = shifted(local["labels"])
        check_padded_labels(local["shift_labels"], attention_mask)
        if local.get("num_items_in_batch") is None:
            local["num_items_in_batch"] = (local["shift_labels"] != IGNORE_INDEX).sum().clamp(min=1)
    for name in TOKEN_INPUTS:
        if local.get(name) is not None:
            local[name] = shard(local[name], sequence.layout, mesh).contiguous()
    local["position_ids"] = shard(positions, sequence.layout, mesh, dim=-1)
    local[KEY] = BatchShard(sequence, hidden if packed is None else packed, positions)
    return local


def shifted(labels: Tensor) -> Tensor:
    """Return for each token the label of the next one.

    Args:
        labels: The labels, `[batch, tokens]`.
    """
    return nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]


def _check_lengths(batch: Mapping[str, Any], rows: int, tokens: int) -> None:
    for name in (*TOKEN_INPUTS, "position_ids"):
        x = batch.get(name)
        if x is None or (name == "attention_mask" and x.ndim != 2):
            continue
        if name == "position_ids" and x.ndim != 2:
            raise ValueError(f'position_ids: {list(x.shape)} is not supported here; pass cut="layers"')
        if x.shape[1] != tokens or (x.shape[0] != rows and not (name == "position_ids" and x.shape[0] == 1)):
            raise ValueError(f"{name}: expected {rows} rows of {tokens} tokens, as the ids; got {list(x.shape[:2])}")


def packed_documents(batch: Mapping[str, Any], rows: int) -> Mask | None:
    """Return the packed documents that cumulative lengths, position ids or ids of documents describe, or None.

    Args:
        batch: The whole batch.
        rows: The number of batch rows.
    """
    cuts, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if cuts is not None:
        if rows != 1:
            raise ValueError(f"cu_seq_lens_q: expected a batch of one row, got {rows} rows")
        return Mask.from_cu_seqlens(cuts.cpu())
    if batch.get("attention_mask") is not None:
        return None
    if positions is None and batch.get("seq_idx") is not None:
        return documents(batch["seq_idx"].expand(rows, -1))
    if positions is None or positions.ndim != 2:
        return None
    return documents_of_positions(positions.expand(rows, -1))


def check_padded_labels(labels: Tensor, attention_mask: Tensor | None) -> None:
    """Raise ValueError if padding on the left has to predict a token: it sees nothing, so that nothing is defined.

    Args:
        labels: The label that each token predicts, `[batch, tokens]`.
        attention_mask: Whether each token counts, or None.
    """
    if attention_mask is None or attention_mask.ndim != 2 or attention_mask.shape != labels.shape:
        return
    bad = (labels != IGNORE_INDEX) & (attention_mask.bool().cumsum(1) == 0)
    if bool(bad.any()):
        row, token = bad.nonzero()[0].tolist()
        raise ValueError(
            f"labels: row {row} has a label that token {token}, which is padding, would predict; set it to "
            f"{IGNORE_INDEX}. Of a sequence behind padding this is the label of the first token"
        )
