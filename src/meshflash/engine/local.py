"""Attention on one device: the worklist, the choice of a kernel, and what a backward does besides it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from meshflash.core import tiles
from meshflash.core.layout import Layout
from meshflash.core.lengths import UNBOUNDED
from meshflash.core.mask import Mask
from meshflash.core.program import Ranges
from meshflash.core.tiles import Worklist, worklist
from meshflash.kernels.contract import Features, Inputs, KernelRequest, Pass, Rows
from meshflash.kernels.launches import Launches
from meshflash.kernels.merge import delta
from meshflash.kernels.registry import Choice, choose, find, refusal

#: Positions stay below this, so that no sum of one with the limit of a band passes 31 bits.
LAST = UNBOUNDED - 2**16


def inputs(
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    v_BSKE: Tensor,
    mask: Mask,
    features: Features,
    q_offset: int = 0,
    shard: tuple[Layout, int] | None = None,
) -> Inputs:
    """What a kernel takes, for queries from position q_offset on and keys from 0 on.

    The queries may be a rank's shard of a longer sequence: then they are where its layout has them.
    """
    reads_positions = features.alibi_slopes_BH is not None or features.dropout > 0
    tokens = q_BTHD.shape[1]
    held: Ranges = (range(tokens),)
    if shard:
        layout, rank = shard
        if tokens != layout.lengths[rank]:
            raise ValueError(f"q has {tokens} tokens, its layout gives rank {rank} {layout.lengths[rank]}")
        held, tokens = layout.ranges[rank], layout.tokens
    work = _work(mask, held, tokens, k_BSKD.shape[1], q_BTHD.shape[0], q_offset, reads_positions)
    return Inputs(q_BTHD, k_BSKD, v_BSKE, work, features)


@lru_cache(maxsize=256)
def _work(
    mask: Mask, held: Ranges, q_tokens: int, k_tokens: int, batch: int, q_offset: int, reads_positions: bool
) -> Worklist:
    """The tiles of queries that stand where `held` says, of so many in all."""
    mask.check(q_tokens, k_tokens, batch, q_offset)
    if q_offset + q_tokens > LAST or k_tokens > LAST:
        raise ValueError(f"q_offset={q_offset}: positions up to {LAST:,} are served; got {q_offset + q_tokens:,}")
    q_ranges = tuple(range(r.start + q_offset, r.stop + q_offset, r.step) for r in held)
    return worklist(mask, q_ranges, (range(k_tokens),), reads_positions)


def forget_worklists() -> None:
    """Drop all cached worklists: kernels keep tables on their device for as long as a worklist exists."""
    _work.cache_clear()
    tiles.forget_worklists()


def rows_of(
    out_BTHE: Tensor,
    lse_BHT: Tensor,
    dout_BTHE: Tensor | None,
    dlse_BHT: Tensor | None,
    with_delta: bool = True,
    launches: Launches | None = None,
) -> Rows:
    """What a backward knows of its query rows, from the gradients of out and lse, either of which may be None."""
    dout = torch.zeros_like(out_BTHE) if dout_BTHE is None else dout_BTHE
    return Rows(out_BTHE, dout, lse_BHT, delta(out_BTHE, dout, lse_BHT, dlse_BHT, launches) if with_delta else None)


def sink_gradient(sink_logits_H: Tensor | None, rows: Rows) -> Tensor | None:
    """These rows' share of the gradient of the sink logits."""
    if sink_logits_H is None:
        return None
    weight = torch.exp(sink_logits_H.to(rows.lse_BHT.dtype)[None, :, None] - rows.lse_BHT)
    weight = weight.masked_fill(rows.lse_BHT == -torch.inf, 0.0)
    return -(weight * rows.delta_BHT).sum(dim=(0, 2)).to(sink_logits_H.dtype)


def kernel_request(
    x: Inputs, direction: Pass, deterministic: bool = False, lse_gradient: bool = False
) -> KernelRequest:
    """Return the request of a call to the kernels."""
    q_BTHD = x.q_BTHD
    batch, _, heads, dim = q_BTHD.shape
    return KernelRequest(
        direction=direction,
        device=q_BTHD.device,
        dtype=q_BTHD.dtype,
        head_dim=dim,
        value_dim=x.v_BSKE.shape[-1],
        work=x.work,
        features=x.features,
        lse_gradient=lse_gradient,
        deterministic=deterministic,
        batch=batch,
        heads=heads,
        gqa=heads > x.k_BSKD.shape[2],
    )


def choice(x: Inputs, name: str, direction: Pass, deterministic: bool, lse_gradient: bool = False) -> Choice:
    """Which kernel does it, and why."""
    return choose(name, kernel_request(x, direction, deterministic, lse_gradient))


def choices(x: Inputs, name: str, deterministic: bool) -> tuple[Choice, Choice] | None:
    """The kernel of this name for the forward and for the backward; None where it does not support one of them."""
    requests = [kernel_request(x, direction, deterministic) for direction in ("forward", "backward")]
    if any(refusal(find(name), request) for request in requests):
        return None
    forward, backward = (choose(name, request) for request in requests)
    return forward, backward
