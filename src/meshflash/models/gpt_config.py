"""Sizes and presets of `GPT`. Nothing here imports torch, so a command line can read and print them at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies for sequences longer than those of pretraining.

    Frequencies below `low_freq_factor` rotations over `original_tokens` are divided by `factor`, frequencies above
    `high_freq_factor` rotations stay, and those between are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 8192


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Attributes:
        vocabulary: The number of token ids.
        layers: The number of blocks.
        dim: The size of the residual stream.
        heads: The number of query heads.
        kv_heads: The number of key and value heads; it divides `heads`.
        hidden: The hidden units of each MLP.
        head_dim: The size of a head; by default `dim / heads`.
        tokens: The longest sequence that the model is meant for; nothing enforces it.
        theta: The base of the rotary frequencies.
        scaling: How rotary frequencies are scaled for long sequences.
        norm_eps: The epsilon of RMSNorm.
        tied: Whether the head shares the weights of the embedding.
    """

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
                raise ValueError(f"dim={self.dim}: {self.heads} heads do not divide it; set head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: it must divide the {self.heads} heads")
        assert self.head_dim is not None
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: expected an even number, because RoPE rotates pairs of dims")

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters.

        >>> GPTConfig().num_parameters
        106816
        """
        assert self.head_dim is not None
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        block = attention + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + self.dim + self.vocabulary * self.dim * (1 if self.tied else 2)

    def flops(self, tokens: int) -> float:
        """Return the FLOPs of a training step on one causal sequence, without recomputation.

        6 FLOPs per parameter and token; a causal attention forward takes 2 n^2 d per head, its backward 2.5 times that.

        Args:
            tokens: The length of the sequence.
        """
        assert self.head_dim is not None
        embedding = 0 if self.tied else self.vocabulary * self.dim  # a lookup, not a GEMM
        attention = 4 * tokens * tokens / 2 * self.heads * self.head_dim * self.layers
        return 6.0 * (self.num_parameters - embedding) * tokens + 3.5 * attention


def resized(config: GPTConfig, changes: Mapping[str, Any]) -> GPTConfig:
    """Return a config with other sizes; `head_dim` is derived again unless it is given.

    Args:
        config: The sizes to start from.
        changes: The fields to change.

    >>> resized(GPTConfig(dim=64, heads=4), {"heads": 8}).head_dim
    8
    """
    derived = {"head_dim": None} if changes.keys() & {"dim", "heads"} else {}
    return replace(config, **{**derived, **changes})


def tiny(**changes: Any) -> GPTConfig:
    """Return a model for tests and demos."""
    return resized(GPTConfig(), changes)


def gpt_125m(**changes: Any) -> GPTConfig:
    """Return the size of GPT-2 small with Llama's layers."""
    sizes = GPTConfig(50304, 12, 768, 12, 12, 2048, tokens=2048, theta=10_000.0, tied=True)
    return resized(sizes, changes)


def llama3_2_1b(**changes: Any) -> GPTConfig:
    """Return Llama 3.2 1B: 1.24 billion parameters."""
    sizes = GPTConfig(128256, 16, 2048, 32, 8, 8192, tokens=131072, scaling=RopeScaling(factor=32.0), tied=True)
    return resized(sizes, changes)


def llama3_8b(**changes: Any) -> GPTConfig:
    """Return Llama 3 8B."""
    return resized(GPTConfig(128256, 32, 4096, 32, 8, 14336, tokens=8192), changes)


def llama3_8b_1m(**changes: Any) -> GPTConfig:
    """Return Llama 3 8B for a million tokens, with a larger rotary base."""
    return resized(llama3_8b(tokens=1_048_576, theta=2_804_339_835.0), changes)


PRESETS = {
    "tiny": tiny,
    "125m": gpt_125m,
    "llama3.2-1b": llama3_2_1b,
    "llama3-8b": llama3_8b,
    "llama3-8b-1m": llama3_8b_1m,
}
