"""A Llama-style decoder: RMSNorm, rotary positions, grouped heads, gated MLPs, on any mesh, layout and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.models.cache import Cache
from meshflash.models.layers import (
    Attention,
    Context,
    GatedMLP,
    RopeScaling,
    check_division,
    frequencies,
    init_weights,
    rotations,
    sharing_ranks,
    token_positions,
)
from meshflash.parallel.loss import check_gathered, cross_entropy_sum


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `tied` shares the weights of the embedding with the head's."""

    vocabulary: int = 256
    layers: int = 2
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 128
    head_dim: int | None = None
    tokens: int = 2048
    theta: float = 500_000.0
    scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "dim", "heads", "kv_heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.head_dim is None:
            if self.dim % self.heads:
                raise ValueError(f"dim={self.dim}: {self.heads} heads do not divide it; say head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: it must divide the {self.heads} heads")
        assert self.head_dim is not None
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: expected an even one, for positions turn pairs of dims")

    @property
    def weights(self) -> int:
        """How many numbers are learnt.

        >>> GPTConfig().weights
        106816
        """
        assert self.head_dim is not None
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        block = attention + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + self.dim + self.vocabulary * self.dim * (1 if self.tied else 2)

    def flops(self, tokens: int) -> float:
        """Of a training step with one causal sequence, what is computed again not counted."""
        assert self.head_dim is not None
        looked_up = 0 if self.tied else self.vocabulary * self.dim
        attention = 4 * tokens * tokens / 2 * self.heads * self.head_dim * self.layers
        return 6.0 * (self.weights - looked_up) * tokens + 3.5 * attention


def resized(config: GPTConfig, changes: Mapping[str, Any]) -> GPTConfig:
    """The same with other sizes; the dim of a head follows from them unless it is said.

    >>> resized(GPTConfig(dim=64, heads=4), {"heads": 8}).head_dim
    8
    """
    follows = {"head_dim": None} if changes.keys() & {"dim", "heads"} else {}
    return replace(config, **{**follows, **changes})


def tiny(**changes: Any) -> GPTConfig:
    """A model for tests and demos."""
    return resized(GPTConfig(), changes)


def gpt_125m(**changes: Any) -> GPTConfig:
    """The size of GPT-2's smallest, with Llama's layers."""
    sizes = GPTConfig(50304, 12, 768, 12, 12, 2048, tokens=2048, theta=10_000.0, tied=True)
    return resized(sizes, changes)


def llama3_2_1b(**changes: Any) -> GPTConfig:
    """Llama 3.2 of 1.24 billion weights."""
    sizes = GPTConfig(128256, 16, 2048, 32, 8, 8192, tokens=131072, scaling=RopeScaling(factor=32.0), tied=True)
    return resized(sizes, changes)


def llama3_8b(**changes: Any) -> GPTConfig:
    """Llama 3 of 8 billion weights."""
    return resized(GPTConfig(128256, 32, 4096, 32, 8, 14336, tokens=8192), changes)


def llama3_8b_1m(**changes: Any) -> GPTConfig:
    """Llama 3 of 8 billion weights for a million tokens, by slower rotations."""
    return resized(llama3_8b(tokens=1_048_576, theta=2_804_339_835.0), changes)


PRESETS = {
    "tiny": tiny,
    "125m": gpt_125m,
    "llama3.2-1b": llama3_2_1b,
    "llama3-8b": llama3_8b,
    "llama3-8b-1m": llama3_8b_1m,
}


class Block(nn.Module):
    """Attention, then the MLP, each on a norm of what it adds to."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config.dim, config.heads, config.kv_heads, config.head_dim)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = GatedMLP(config.dim, config.hidden)

    def forward(self, x_BTE: Tensor, context: Context) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), context)
        out: Tensor = x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))
        return out


class GPT(nn.Module):
    """A decoder over token ids; modules have the names of Hugging Face's Llama.

    Where one rank cannot hold it: build it under `torch.device("meta")`, `parallelize` it, `to_empty(device=...)` and
    `init_weights()`.

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
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits `[batch, tokens, vocabulary]`; with labels the *sum* of their losses, without ever holding all logits.

        Args:
            tokens: this rank's, `[batch, tokens]`.
            labels: of each of them the next token, made before the sequence was spread (`next_tokens`); -100 where
                there is none.
            mask: over the whole sequence, causal by default; positions count within its documents.
            layout: which tokens of the sequence these are, where ranks share it.
            at: logits of these of the tokens only, by their places here.
            cache: keys and values of tokens before, which are seen too; the first call fills it. See `generate`.
        """
        mask = Mask.causal() if mask is None else mask
        _, rank, ranks = sharing_ranks(self)
        before = 0 if cache is None else cache.tokens
        if layout is None and ranks > 1 and not before:
            raise ValueError(
                f"layout: say which tokens these are, as {ranks} ranks share the sequence; see spread_batch"
            )
        if not tokens.numel() and isinstance(self.embed_tokens.weight, DTensor):
            raise ValueError(
                "tokens: this rank has none, and torch divides no empty tensors over tp; take a smaller cp"
            )
        x_BTE = self.embed_tokens(tokens)
        if before:
            positions = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        else:
            positions = token_positions(tokens.shape[1], mask, layout, rank, tokens.device)
        assert self.config.head_dim is not None
        turning = frequencies(self.config.head_dim, self.config.theta, self.config.scaling)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        context = Context(mask, layout, *rotations(positions, turning, wide), cache)
        for block in self.layers:
            x_BTE = block(x_BTE, context)
        x_BTE = self.norm(x_BTE)
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if labels is not None:
            return cross_entropy_sum(x_BTE, weight, labels)
        return _logits(x_BTE if at is None else x_BTE[:, list(at)], weight)

    def init_weights(self, seed: int = 0) -> None:
        """Draw all weights, the same on any mesh."""
        deep = 0.02 / (2 * self.config.layers) ** 0.5

        def spread(name: str, shape: torch.Size) -> float | None:
            if len(shape) == 1:
                return None
            return deep if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02

        init_weights(self, seed, spread)

    def tensor_plan(self, tp: int) -> dict[str, ParallelStyle]:
        """How torch divides the model over `tp` ranks: heads, hidden units, and the rows of the vocabulary."""
        check_division("key heads", self.config.kv_heads, tp)
        check_division("hidden units", self.config.hidden, tp)
        if -(-self.config.vocabulary // tp) * (tp - 1) >= self.config.vocabulary:
            raise ValueError(f"tp={tp}: a rank would have none of the {self.config.vocabulary} words; take a smaller")
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
    if not x.numel():  # torch divides no empty tensors; all ranks of tp are here
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    whole = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
    logits: Any = functional.linear(whole, weight)
    found: Tensor = logits.full_tensor()
    return found
