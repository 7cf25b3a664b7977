"""torchtitan: an inner attention over ranks, and the cut of a trainer's inputs.

torchtitan sums the loss of each rank's tokens and divides by the number of all labels, and its FSDP sums gradients. So
ranks that share a sequence are no replicas here: each has the loss of its own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.module import Module

from meshflash.api import attention, flash_attention
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.integrations._documents import documents_of_positions
from meshflash.parallel.step import resolve_layout
from meshflash.sharding import shard

#: Arguments of an inner attention that the rule says too.
IMPLIED = ("enable_gqa", "is_causal")


@dataclass(frozen=True)
class SequenceMask:
    """The `attention_masks` of a model's layers.

    Args:
        rule: The keys that each query may see.
        mesh: The ranks that share the sequence; None is one device.
        layout: The positions of each rank.
        schedule: The schedule of attention.
    """

    rule: Mask
    mesh: Any
    layout: Layout
    schedule: str


class MeshAttention(Module):
    """The inner attention of torchtitan's models over ranks. Set `inner_attention=MeshAttention.Config()`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        """It has no options: masks and ranks come with the inputs."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Return the attention of this rank's queries to all keys.

        Args:
            q_BLNH: This rank's queries.
            k_BLNH: This rank's keys.
            v_BLNH: This rank's values.
            attention_masks: What `shard_inputs` gave.
            scale: The factor that multiplies scores.
            arguments: What else a model passes; what is not known is refused.
        """
        unknown = sorted(name for name, x in arguments.items() if x is not None and name not in IMPLIED)
        if unknown:
            raise ValueError(f"MeshAttention: {', '.join(unknown)} is not supported")
        if not isinstance(attention_masks, SequenceMask):
            raise ValueError("MeshAttention: attention_masks must be those of shard_inputs")
        rule, mesh = attention_masks.rule, attention_masks.mesh
        if mesh is None:
            return flash_attention(q_BLNH, k_BLNH, v_BLNH, mask=rule, scale=scale)
        where: dict[str, Any] = dict(mesh=mesh, layout=attention_masks.layout, schedule=attention_masks.schedule)
        return attention(q_BLNH, k_BLNH, v_BLNH, mask=rule, scale=scale, **where)


def shard_inputs(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: Mapping[str, Any],
    mesh: Any,
    *,
    layout: Layout | str = "auto",
    schedule: str = "auto",
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return this rank's part of what a trainer's `post_dataloading_process` returns, and the mask of the layers.

    Args:
        inputs: Token ids, `[batch, tokens]`.
        labels: Labels, `[batch, tokens]`.
        extra_kwargs: The other arguments of the model: positions, which begin again with each document.
        mesh: The ranks that share the sequence: a DeviceMesh of one dimension. None is one device.
        layout: The layout, or its name. "auto" asks `Layout.auto`: zigzag, or balanced for packed documents.
        schedule: The schedule of attention.
    """
    extra = dict(extra_kwargs)
    positions = extra.pop("positions", None)
    unknown = sorted(name for name, x in extra.items() if x is not None)
    if unknown:
        raise ValueError(f"shard_inputs: {', '.join(unknown)} is not supported beside positions")
    tokens = inputs.shape[1]
    packed = None if positions is None else documents_of_positions(positions)
    rule = Mask.causal() if packed is None else packed & Mask.causal()
    own = resolve_layout(layout, rule, tokens, 1 if mesh is None else mesh.size())
    masks = SequenceMask(rule, mesh, own, schedule)
    if positions is None:  # a model without positions would count this rank's tokens
        positions = torch.arange(tokens, device=inputs.device)[None].expand_as(inputs)
    if mesh is None:
        return inputs, labels, dict(positions=positions, attention_masks=masks)
    inputs, labels, positions = (shard(x, own, mesh).contiguous() for x in (inputs, labels, positions))
    return inputs, labels, dict(positions=positions, attention_masks=masks)
