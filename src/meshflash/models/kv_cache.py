"""The KV cache of generation, and sampling of the next token.

Each rank fills the cache with the keys and values of its own prompt tokens. `KVCache.gather` then gives every rank the
whole cache, and each rank attends to new tokens by itself. This is simple, but every rank holds the whole sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshflash.api import flash_attention
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.sharding import unshard


class KVCache:
    """The keys and values `[batch, tokens, kv heads, dim]` of each attention module; made by `generate`.

    Args:
        capacity: The number of tokens that can follow the prompt.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: The number of cached tokens; 0 until `gather`.
        self.tokens = 0
        self._buffers: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def store(self, module: nn.Module, k: Tensor, v: Tensor) -> None:
        """Store this rank's keys and values of the prompt."""
        self._buffers[module] = (k.detach(), v.detach())

    def gather(self, layout: Layout | None, mesh: Any) -> None:
        """Gather the keys and values of all ranks in sequence order; from now on `attend` uses the cache.

        Args:
            layout: Which tokens each rank has stored.
            mesh: The ranks that share the prompt.
        """
        for module, stored in self._buffers.items():
            full = [x if layout is None or layout.world == 1 else unshard(x, layout, mesh) for x in stored]
            self.tokens = full[0].shape[1]
            buffers = [x.new_empty(x.shape[0], self.tokens + self.capacity, *x.shape[2:]) for x in full]
            for buffer, x in zip(buffers, full, strict=True):
                buffer[:, : self.tokens] = x
            self._buffers[module] = (buffers[0], buffers[1])

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """Append keys and values of new tokens, and return their attention to all cached tokens on this device."""
        end = self.tokens + k.shape[1]
        buffers = self._buffers[module]
        if end > buffers[0].shape[1]:
            raise ValueError(
                f"cache: it has room for {buffers[0].shape[1] - self.tokens} more tokens; make one with more capacity"
            )
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[:, self.tokens : end] = new
        keys, values = (buffer[:, :end] for buffer in buffers)
        return flash_attention(q, keys, values, mask=mask, q_offset=self.tokens)

    def advance(self, tokens: int) -> None:
        """Count new tokens as cached, once all attention modules have appended them."""
        self.tokens += tokens


@torch.no_grad()
def sample_token(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: Any) -> Tensor:
    """Return the next token of each row of logits `[batch, vocabulary]`.

    Args:
        logits: The logits of the last token.
        temperature: The softmax temperature; 0 takes the most likely token.
        top_k: Sample from the k most likely tokens only.
        top_p: Sample from the smallest set of most likely tokens with at least this probability.
        generator: The generator of random numbers on the CPU.

    >>> sample_token(torch.tensor([[0.0, 3.0, 1.0]]), 0.0, None, None, None).tolist()
    [1]
    """
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    order = logits.sort(dim=-1, descending=True)
    p = order.values.softmax(-1)
    dropped = torch.zeros_like(p, dtype=torch.bool)
    if top_p is not None:
        dropped |= p.cumsum(-1) - p >= top_p
    if top_k is not None:
        dropped[:, top_k:] = True
    drawn = torch.multinomial(p.masked_fill(dropped, 0.0).cpu(), 1, generator=generator).to(logits.device)
    return order.indices.gather(-1, drawn)[:, 0]
