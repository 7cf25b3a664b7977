"""A Llama-style decoder (RMSNorm, RoPE, GQA, SwiGLU) on any mesh, layout and schedule.

Shapes in names: B batch, T tokens of this rank, E dim of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.models.gpt_config import PRESETS, GPTConfig, tiny
from meshflash.models.kv_cache import KVCache
from meshflash.models.layers import (
    Attention,
    Context,
    GatedMLP,
    check_divisible,
    init_weights,
    rotary_cos_sin,
    rotary_frequencies,
    sequence_group,
    token_positions,
)
from meshflash.parallel.loss import check_gathered, cross_entropy_sum

__all__ = ["GPT", "PRESETS", "Block", "GPTConfig", "tiny"]


class Block(nn.Module):
    """A pre-norm Transformer block: attention, then the MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config.dim, config.heads, config.kv_heads, config.head_dim)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = GatedMLP(config.dim, config.hidden)

    def forward(self, x_BTE: Tensor, context: Context) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), context)
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class GPT(nn.Module):
    """A decoder over token ids; its modules have the names of Hugging Face's Llama.

    If one rank cannot hold the model, build it under `torch.device("meta")`, then call `parallelize`,
    `to_empty(device=...)` and `init_weights()`.

    Args:
        config: The sizes of the model.
        seed: The seed of the initial weights.

    >>> model = GPT(tiny())
    >>> tokens = torch.randint(256, (1, 12))
    >>> model(tokens).shape
    torch.Size([1, 12, 256])
    >>> from meshflash.parallel import next_tokens
    >>> model(tokens, labels=next_tokens(tokens)).shape
    torch.Size([])
    """

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.dim, config.vocabulary, bias=False)
        if not self.embed_tokens.weight.is_meta:
            self.init_weights(seed)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        mask: Mask | None = None,
        layout: Layout | None = None,
        at: Sequence[int] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return logits `[batch, tokens, vocabulary]`; with labels the *sum* of their losses instead.

        The loss never materializes all logits.

        Args:
            tokens: The token ids of this rank, `[batch, tokens]`.
            labels: The label of each token, computed before the sequence was sharded (`next_tokens`); -100 is ignored.
            mask: The mask over the whole sequence, causal by default. Positions restart in each of its documents.
            layout: Which tokens of the sequence each rank holds; required if several ranks share it.
            at: Indices of the local tokens whose logits are returned; by default all.
            cache: The KV cache of earlier tokens, which the first call fills. See `generate`.
        """
        mask = Mask.causal() if mask is None else mask
        _, rank, ranks = sequence_group(self)
        before = 0 if cache is None else cache.tokens
        if layout is None and ranks > 1 and not before:
            raise ValueError(
                f"layout: {ranks} ranks share the sequence; give layout=, the tokens of each rank, as shard_batch does"
            )
        if not tokens.numel() and isinstance(self.embed_tokens.weight, DTensor):
            raise ValueError("tokens: this rank has none, and torch shards no empty tensors over tp; take a smaller cp")
        x_BTE = self.embed_tokens(tokens)
        if before:
            positions = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        else:
            positions = token_positions(tokens.shape[1], mask, layout, rank, tokens.device)
        assert self.config.head_dim is not None
        frequencies = rotary_frequencies(self.config.head_dim, self.config.theta, self.config.scaling)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        context = Context(mask, layout, *rotary_cos_sin(positions, frequencies, wide), cache)
        for block in self.layers:
            x_BTE = block(x_BTE, context)
        x_BTE = self.norm(x_BTE)
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if labels is not None:
            return cross_entropy_sum(x_BTE, weight, labels)
        return _logits(x_BTE if at is None else x_BTE[:, list(at)], weight)

    def init_weights(self, seed: int = 0) -> None:
        """Initialize all weights; the values are the same on any mesh.

        Standard deviation 0.02; projections into the residual stream are scaled by 1 / sqrt(2 layers), as in GPT-2.

        Args:
            seed: The seed of the random values.
        """
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5

        def std(name: str, shape: torch.Size) -> float | None:
            if len(shape) == 1:
                return None
            return residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02

        init_weights(self, seed, std)

    def tensor_plan(self, tp: int) -> dict[str, ParallelStyle]:
        """Return the plan for `parallelize_module` over `tp` ranks: heads, hidden units and the vocabulary are sharded.

        Args:
            tp: The number of tensor-parallel ranks.
        """
        check_divisible("KV heads", self.config.kv_heads, tp)
        check_divisible("hidden units", self.config.hidden, tp)
        if -(-self.config.vocabulary // tp) * (tp - 1) >= self.config.vocabulary:
            raise ValueError(
                f"tp={tp}: a rank would have none of the {self.config.vocabulary} rows of the vocabulary; "
                "take a smaller tp"
            )
        plan: dict[str, ParallelStyle] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"layers.*.{name}"] = RowwiseParallel()
        if self.lm_head is not None:
            plan["lm_head"] = ColwiseParallel()
        return plan


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return functional.linear(x, weight)
    check_gathered(weight)
    if not x.numel():  # torch shards no empty tensors; all ranks of tp take this branch together
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    whole = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
    logits: Any = functional.linear(whole, weight)
    return logits.full_tensor()
