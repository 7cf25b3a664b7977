"""Text from a GPT: the prompt is read over the mesh, then token after token is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as _distributed
from torch.distributed.device_mesh import DeviceMesh

from meshflash.core.mask import Mask
from meshflash.models.cache import Cache, choose
from meshflash.parallel.mesh import size
from meshflash.parallel.step import named_layout
from meshflash.sharding import shard

dist: Any = _distributed  # torch does not declare all that it exports here


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    mesh: DeviceMesh,
    *,
    tokens: int = 32,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    layout: str = "zigzag",
) -> Iterator[Tensor]:
    """The next `tokens` ids of each row of `[batch, tokens]` ids, one `[batch]` at a time; all ranks yield the same.

    Args:
        model: a GPT as `parallelize` laid it on the mesh.
        prompt: whole, the same on all ranks.
        mesh: its ranks of cp share the prompt.
        tokens: how many at most.
        temperature: 0 takes the likeliest; else one is drawn, the more evenly the higher.
        top_k: of so many likeliest only.
        top_p: of the likeliest that have so much of the probability together.
        seed: of what is drawn.
        stop: ends when all rows have had this id.
        layout: how the prompt is spread.
    """
    if prompt.ndim != 2 or not prompt.shape[1]:
        raise ValueError(f"prompt: expected [batch, tokens] of at least one token; got {list(prompt.shape)}")
    ranks, length = size(mesh, "cp"), prompt.shape[1]
    spread = named_layout(layout, Mask.causal(), length, ranks)
    here = mesh.get_local_rank("cp")
    owner = next(rank for rank in range(ranks) if length - 1 in spread.positions(rank))
    at = [int((spread.positions(here) == length - 1).argmax())] if here == owner else []
    cache, generator = Cache(tokens), torch.Generator().manual_seed(seed)
    logits = model(shard(prompt, spread, mesh["cp"]), layout=spread, at=at, cache=cache)
    cache.gather(spread, mesh["cp"])
    logits = _from(logits, owner, prompt, mesh)
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for n in range(tokens):
        chosen = choose(logits, temperature, top_k, top_p, generator)
        dist.broadcast(chosen, 0)  # ranks round otherwise in the last digit
        yield chosen
        if stop is not None:
            ended |= chosen == stop
            if bool(ended.all()):
                return
        if n + 1 < tokens:
            logits = model(chosen[:, None], at=[0], cache=cache)[:, 0]
            cache.advance(1)


def _from(logits: Tensor, owner: int, prompt: Tensor, mesh: DeviceMesh) -> Tensor:
    """The logits of the last token on all ranks of cp, from the one that has it."""
    if size(mesh, "cp") == 1:
        return logits[:, 0]
    found = logits[:, 0].contiguous() if logits.shape[1] else logits.new_empty(len(prompt), logits.shape[-1])
    group = mesh["cp"].get_group()
    dist.broadcast(found, dist.get_global_rank(group, owner), group=group)
    return found
