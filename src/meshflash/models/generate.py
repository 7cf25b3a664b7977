"""Autoregressive generation with a GPT: prefill over the mesh, then one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshflash.core.mask import Mask
from meshflash.models.kv_cache import KVCache, sample_token
from meshflash.parallel.mesh import size
from meshflash.parallel.step import resolve_layout
from meshflash.sharding import shard


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
    """Yield the next token ids of each prompt, one `[batch]` at a time; all ranks yield the same.

    Args:
        model: A GPT of `parallelize` on the mesh.
        prompt: The prompts, `[batch, tokens]`, whole and the same on all ranks.
        mesh: A mesh of `init_mesh`; its ranks of cp share the prompt.
        tokens: The most tokens to generate.
        temperature: The softmax temperature; 0 takes the most likely token.
        top_k: Sample from the k most likely tokens only.
        top_p: Sample from the smallest set of most likely tokens with at least this probability.
        seed: The seed of sampling.
        stop: The id that ends a row; generation ends when all rows have had it.
        layout: The layout of the prompt over cp.
    """
    if prompt.ndim != 2 or not prompt.shape[1]:
        raise ValueError(f"prompt: expected [batch, tokens] of at least one token; got {list(prompt.shape)}")
    ranks, length = size(mesh, "cp"), prompt.shape[1]
    sharded = resolve_layout(layout, Mask.causal(), length, ranks)
    here = mesh.get_local_rank("cp")
    owner = next(rank for rank in range(ranks) if length - 1 in sharded.positions(rank))
    at = [int((sharded.positions(here) == length - 1).argmax())] if here == owner else []
    cache, generator = KVCache(tokens), torch.Generator().manual_seed(seed)
    logits = model(shard(prompt, sharded, mesh["cp"]), layout=sharded, at=at, cache=cache)
    cache.gather(sharded, mesh["cp"])
    logits = _broadcast_logits(logits, owner, prompt, mesh)
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for n in range(tokens):
        chosen = sample_token(logits, temperature, top_k, top_p, generator)
        dist.broadcast(chosen, 0)  # logits may differ between ranks in the last bits, and ties break differently
        yield chosen
        if stop is not None:
            ended |= chosen == stop
            if bool(ended.all()):
                return
        if n + 1 < tokens:
            logits = model(chosen[:, None], at=[0], cache=cache)[:, 0]
            cache.advance(1)


def _broadcast_logits(logits: Tensor, owner: int, prompt: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the logits of the last token on all ranks of cp; `owner` is the rank that has computed them."""
    if size(mesh, "cp") == 1:
        return logits[:, 0]
    found = logits[:, 0].contiguous() if logits.shape[1] else logits.new_empty(len(prompt), logits.shape[-1])
    group = mesh["cp"].get_group()
    dist.broadcast(found, dist.get_global_rank(group, owner), group=group)
    return found
