"""Keys and values of tokens that a model has seen, for those that come after.

Over ranks each fills its own part; `gather` then gives every rank all of it, and new tokens are attended to by each for
itself. It is simple, and as large as the sequence on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshflash.api import flash_attention
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.sharding import unshard


class Cache:
    """Of each attention module its keys and values, `[batch, tokens, key heads, dim]`, with room for `room` more."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tokens = 0
        self._held: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(self, module: nn.Module, k: Tensor, v: Tensor) -> None:
        """This rank's keys and values of the first call."""
        self._held[module] = (k.detach(), v.detach())

    def gather(self, layout: Layout | None, mesh: Any) -> None:
        """All ranks' keys and values on each of them, in order; from now on the cache is used."""
        for module, kept in self._held.items():
            whole = [x if layout is None or layout.world == 1 else unshard(x, layout, mesh) for x in kept]
            self.tokens = whole[0].shape[1]
            room = [x.new_empty(x.shape[0], self.tokens + self.room, *x.shape[2:]) for x in whole]
            for x, all_of_it in zip(room, whole, strict=True):
                x[:, : self.tokens] = all_of_it
            self._held[module] = (room[0], room[1])

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """Attention of new tokens to all before and to themselves, on this device."""
        end = self.tokens + k.shape[1]
        held = self._held[module]
        if end > held[0].shape[1]:
            raise ValueError(f"cache: it has room for {held[0].shape[1] - self.tokens} more tokens; make a larger one")
        for x, new in zip(held, (k, v), strict=True):
            x[:, self.tokens : end] = new
        keys, values = (x[:, :end] for x in held)
        return flash_attention(q, keys, values, mask=mask, q_offset=self.tokens)

    def advance(self, tokens: int) -> None:
        """So many tokens were attended to by all modules."""
        self.tokens += tokens


@torch.no_grad()
def choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: Any) -> Tensor:
    """The next token of each row of logits `[batch, vocabulary]`: the likeliest, or one drawn.

    >>> choose(torch.tensor([[0.0, 3.0, 1.0]]), 0.0, None, None, None).tolist()
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
