"""FlashAttention-2 in plain PyTorch: blocks of queries against blocks of keys, O(T) memory.

Runs on any device and in any dtype, with every feature of the contract. It walks the worklist on the
host and masks only the blocks that a band crosses. The fallback where no faster kernel can serve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshflash.core.lengths import UNBOUNDED
from meshflash.core.tiles import Worklist
from meshflash.kernels import dropout
from meshflash.kernels.contract import (
    Features,
    Grads,
    Inputs,
    Kernel,
    KernelRequest,
    Outputs,
    Rows,
    accumulator_dtype,
    new_outputs,
)

#: Scores in one block of queries x keys, over batch and heads. Measured on two Neoverse-N1 cores, where 2**20 was 10%
#: slower for causal masks, and 2**22 for 32 heads.
BLOCK_ELEMENTS = 2**21
MIN_BLOCK, MAX_BLOCK = 64, 1024


@dataclass(frozen=True)
class _Block:
    """A block of query rows, and the key blocks they see."""

    batch: slice
    q: slice
    i: range
    keys: list[_Keys]


@dataclass(frozen=True)
class _Keys:
    """A block of key rows at affine positions, and its band; `crossed` says whether the block needs a mask."""

    k: slice
    j: range
    lo: int
    hi: int
    crossed: bool


class Tiled(Kernel):
    """FlashAttention-2 in plain PyTorch."""

    name = "tiled"
    summary = "FlashAttention-2 in plain PyTorch: any device, any dtype, every feature"

    def __init__(self, block_size: int | None = None) -> None:
        self.block_size = block_size

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return None

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        out_BTHE, lse_BHT = outputs or new_outputs(x.q_BTHD, x.v_BSKE)
        q_BTHD, k_BSKD, v_BSKE, features = x.q_BTHD, x.k_BSKD, x.v_BSKE, x.features
        kv_heads = k_BSKD.shape[2]
        for block in _blocks(x.work, self._size(x)):
            q = _by_head(q_BTHD[block.batch, block.q], kv_heads) * features.scale
            shape = (*q.shape[:-1], v_BSKE.shape[-1])
            if carry is None:
                acc = q.new_zeros(shape)
                row_max = q.new_full(shape[:-1], -torch.inf)
                row_sum = torch.zeros_like(row_max)
            else:
                # a carried (out, lse) is a running softmax whose maximum is lse and whose sum is 1
                acc = _by_head(carry[0][block.batch, block.q], kv_heads)
                row_max = carry[1][block.batch, :, block.q].reshape(shape[:-1]).to(acc.dtype)
                row_sum = (row_max > -torch.inf).to(acc.dtype)
            for keys in block.keys:
                k, v = (_by_head(y[block.batch, keys.k], kv_heads) for y in (k_BSKD, v_BSKE))
                s, _ = _scores(q, k, block, keys, features, kv_heads)
                new_max = torch.maximum(row_max, s.amax(dim=-1))
                reference = new_max.masked_fill(new_max == -torch.inf, 0.0)
                p = s.sub_(reference[..., None]).exp_()
                alpha = torch.exp(row_max - reference)
                row_sum = row_sum * alpha + p.sum(dim=-1)
                if features.dropout:
                    p.mul_(_keep(p, block, keys, features, kv_heads))
                acc.mul_(alpha[..., None]).add_(p @ v)
                row_max = new_max
            if features.sink_logits_H is not None:
                sink = _sinks(features.sink_logits_H, row_max, kv_heads)
                new_max = torch.maximum(row_max, sink)
                reference = new_max.masked_fill(new_max == -torch.inf, 0.0)
                alpha = torch.exp(row_max - reference)
                row_sum = row_sum * alpha + torch.exp(sink - reference)
                acc.mul_(alpha[..., None])
                row_max = new_max
            acc.div_(row_sum.masked_fill(row_sum == 0, 1.0)[..., None])
            out_BTHE[block.batch, block.q] = _by_token(acc, block).to(out_BTHE.dtype)
            lse = (row_max + torch.log(row_sum)).to(lse_BHT.dtype)
            lse_BHT[block.batch, :, block.q] = lse.view(lse.shape[0], -1, len(block.i))
        return out_BTHE, lse_BHT

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        grads = grads or Grads.like(x.q_BTHD, x.k_BSKD, x.v_BSKE)
        q_BTHD, k_BSKD, v_BSKE, features = x.q_BTHD, x.k_BSKD, x.v_BSKE, x.features
        kv_heads = k_BSKD.shape[2]
        dtype = accumulator_dtype(q_BTHD.dtype)
        dk_sum, dv_sum = (
            grad if grads.add_dkv else torch.zeros_like(grad, dtype=dtype) for grad in (grads.dk_BSKD, grads.dv_BSKE)
        )
        for block in _blocks(x.work, self._size(x)):
            q = _by_head(q_BTHD[block.batch, block.q], kv_heads) * features.scale
            dout = _by_head(rows.dout_BTHE[block.batch, block.q], kv_heads)
            lse, delta = (
                y[block.batch, :, block.q].reshape(q.shape[:-1]).to(dtype) for y in (rows.lse_BHT, rows.delta_BHT)
            )
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # rows that see nothing: p = exp(-inf) = 0
            dq = torch.zeros_like(q)
            for keys in block.keys:
                k, v = (_by_head(y[block.batch, keys.k], kv_heads) for y in (k_BSKD, v_BSKE))
                s, slope = _scores(q, k, block, keys, features, kv_heads)
                p = s.sub_(lse[..., None]).exp_()
                dp = dout @ v.mT
                if features.dropout:
                    keep = _keep(p, block, keys, features, kv_heads)
                    dp.mul_(keep)
                    dv = (p * keep).mT @ dout
                else:
                    dv = p.mT @ dout
                ds = dp.sub_(delta[..., None]).mul_(p)
                if slope is not None:
                    ds.mul_(slope)
                dq.add_(ds @ k)
                dv_sum[block.batch, keys.k] += dv.transpose(1, 2)
                dk_sum[block.batch, keys.k] += (ds.mT @ q).transpose(1, 2)
            dq_rows = grads.dq_BTHD[block.batch, block.q]
            dq = _by_token(dq, block) * features.scale
            dq_rows.copy_(dq_rows + dq if grads.add_dq else dq)
        if not grads.add_dkv:
            grads.dk_BSKD.copy_(dk_sum)
            grads.dv_BSKE.copy_(dv_sum)
        return grads

    def _size(self, x: Inputs) -> int:
        """The rows of a block: a power of two, no wider than the widest band, because masked pairs are wasted work."""
        if self.block_size is not None:
            return self.block_size
        size = math.isqrt(BLOCK_ELEMENTS // max(1, x.q_BTHD.shape[0] * x.q_BTHD.shape[2]))
        spans = x.work.by_query.spans
        widest = int(np.minimum(spans[:, 1], spans[:, 5].astype(np.int64) - spans[:, 4]).max(initial=1))
        size = min(1 << max(size, 1).bit_length() - 1, 1 << (widest - 1).bit_length())
        return min(MAX_BLOCK, max(MIN_BLOCK, size))


def _blocks(work: Worklist, size: int) -> Iterator[_Block]:
    """Cut the worklist into blocks of at most size x size; blocks outside of the band are left out."""
    table = work.by_query
    spans = table.spans.tolist()
    for s, (batch, row, rows, position, step) in enumerate(table.segments.tolist()):
        which = slice(None) if batch < 0 else slice(batch, batch + 1)
        mine = spans[table.indptr[s] : table.indptr[s + 1]]
        for begin in range(0, rows, size):
            i = range(position, position + step * rows, step)[begin : begin + size]
            keys = [keys for span in mine for keys in _key_blocks(span, i, size)]
            yield _Block(which, slice(row + begin, row + begin + len(i)), i, keys)


def _key_blocks(span: list[int], i: range, size: int) -> Iterator[_Keys]:
    row, rows, position, step, lo, hi = span
    bounded = lo > -UNBOUNDED or hi < UNBOUNDED
    first = max(0, -((position - (i[0] + lo)) // step)) if bounded else 0
    end = min(rows, (i[-1] + hi - position) // step + 1) if bounded else rows
    for begin in range(first, end, size):
        j = range(position, position + step * end, step)[begin : begin + size]
        crossed = bounded and (j[0] - i[-1] < lo or j[-1] - i[0] > hi)
        yield _Keys(slice(row + begin, row + begin + len(j)), j, lo, hi, crossed)


def _by_head(x_BTHD: Tensor, kv_heads: int) -> Tensor:
    """`[B, K, G * T, D]`, contiguous, in the accumulator's dtype."""
    x = x_BTHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return x.to(accumulator_dtype(x.dtype), memory_format=torch.contiguous_format, copy=True).flatten(2, 3)


def _by_token(x: Tensor, block: _Block) -> Tensor:
    """`[B, K, G * T, D]` back to `[B, T, H, D]`."""
    return x.unflatten(2, (-1, len(block.i))).flatten(1, 2).transpose(1, 2)


def _scores(
    q: Tensor, k: Tensor, block: _Block, keys: _Keys, features: Features, kv_heads: int
) -> tuple[Tensor, Tensor | None]:
    """Scores of scaled queries, -inf where masked, and the slope of the softcap; `[B, K, G * T, S]`."""
    s, slope = q @ k.mT, None
    if features.softcap:
        capped = s.div_(features.softcap).tanh_()
        slope = 1 - capped * capped
        s = capped * features.softcap
    tile = s.unflatten(2, (-1, len(block.i)))
    if features.alibi_slopes_BH is not None:
        slopes = features.alibi_slopes_BH[block.batch].to(s.dtype).unflatten(1, (kv_heads, -1))
        tile.addcmul_(slopes[..., None, None], _distance(block, keys, s.device).abs(), value=-1)
    if keys.crossed:
        distance = _distance(block, keys, s.device)
        tile.masked_fill_((distance < keys.lo) | (distance > keys.hi), -torch.inf)
    return s, slope


def _keep(p: Tensor, block: _Block, keys: _Keys, features: Features, kv_heads: int) -> Tensor:
    """Dropout's factor for one block: 0, or 1 / (1 - dropout)."""
    device = p.device
    heads = kv_heads * (p.shape[2] // len(block.i))
    first = (block.batch.start or 0) + features.batch_offset
    batch = torch.arange(first, first + p.shape[0], device=device)[:, None, None, None]
    head = torch.arange(heads, device=device)[None, :, None, None] + features.head_offset
    query, key = _range(block.i, device)[:, None], _range(keys.j, device)
    kept = dropout.keep(features.seed, batch, head, query, key, features.dropout)
    return kept.view(p.shape).to(p.dtype).div_(1 - features.dropout)


def _sinks(sink_logits_H: Tensor, like: Tensor, kv_heads: int) -> Tensor:
    """Each row's sink logit, `[1, K, G * T]`."""
    group = sink_logits_H.shape[0] // kv_heads
    sinks = sink_logits_H.to(like.dtype).reshape(1, kv_heads, group, 1)
    return sinks.expand(-1, -1, -1, like.shape[2] // group).flatten(2)


def _distance(block: _Block, keys: _Keys, device: torch.device) -> Tensor:
    """The distance j - i over the block."""
    return _range(keys.j, device) - _range(block.i, device)[:, None]


def _range(r: range, device: torch.device) -> Tensor:
    return torch.arange(r.start, r.stop, r.step, device=device)
