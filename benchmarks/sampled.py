"""An oracle for long sequences in plain torch: the output in every row, gradients in sampled blocks of rows.

It holds the scores of some rows at a time, and takes seconds on a GPU where `check.truth` takes much longer. It shares
no code with the kernels that it checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshflash.bench.cases import Case, Tensors
from meshflash.bench.check import MATRIX_BYTES, Truth
from meshflash.kernels.contract import HALF

#: Number of blocks whose gradients are checked, spread from the first row to the last, and rows of a block.
NUM_BLOCKS = 8
ROWS = 128


def sampled(case: Case, tensors: Tensors) -> Truth:
    """Return the output of a full or causal case and gradients of blocks: float32 for half precision, else float64."""
    assert case.mask in ("full", "causal")
    assert case.heads == case.kv_heads
    dtype = torch.float32 if case.torch_dtype in HALF else torch.float64
    blocks = _blocks(case.tokens)
    count = max(1, MATRIX_BYTES // (ROWS * case.tokens * dtype.itemsize))
    rows = []
    for row in range(case.batch):
        parts = []
        for first in range(0, case.heads, count):
            q, k, v, dout = (x.detach()[row, :, first : first + count].transpose(0, 1).to(dtype) for x in tensors)
            parts.append(_Heads.of(q, k, v, dout, case.mask == "causal").results(blocks))
        rows.append([torch.cat(heads).transpose(0, 1) for heads in zip(*parts, strict=True)])
    results = tuple(torch.stack(result) for result in zip(*rows, strict=True))
    name = str(dtype).removeprefix("torch.")
    return Truth(f"dense rows in {name}, gradients in {len(blocks)} blocks of rows", results, blocks)


@dataclass(frozen=True, eq=False)
class _Heads:
    """Some heads of one batch row, `[heads, tokens, dim]`; `q_HTD` is scaled."""

    q_HTD: Tensor
    k_HTD: Tensor
    v_HTD: Tensor
    dout_HTD: Tensor
    scale: float
    causal: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> _Heads:
        """Return these heads with scaled queries."""
        scale = q.shape[-1] ** -0.5
        return cls(q * scale, k.contiguous(), v.contiguous(), dout.contiguous(), scale, causal)

    def results(self, blocks: tuple[slice, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output, and the gradients of q, k and v in blocks."""
        out, lse_HT = self._forward()
        delta_HT = (out * self.dout_HTD).sum(-1)
        dq = [self._dq(block, lse_HT, delta_HT) for block in blocks]
        dkv = [self._dkv(block, lse_HT, delta_HT) for block in blocks]
        dk, dv = (torch.cat(each, dim=1) for each in zip(*dkv, strict=True))
        return out, torch.cat(dq, dim=1), dk, dv

    def _forward(self) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for rows in self._chunks():
            s_HRS, keys = self._scores(rows)
            max_HR1 = s_HRS.amax(-1, keepdim=True)
            p_HRS = s_HRS.sub_(max_HR1).exp_()
            sum_HR1 = p_HRS.sum(-1, keepdim=True)
            outs.append(p_HRS @ self.v_HTD[:, keys] / sum_HR1)
            lses.append((max_HR1 + sum_HR1.log()).squeeze(-1))
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1)

    def _dq(self, rows: slice, lse_HT: Tensor, delta_HT: Tensor) -> Tensor:
        """Return the gradient of these queries."""
        s_HRS, keys = self._scores(rows)
        p_HRS = s_HRS.sub_(lse_HT[:, rows, None]).exp_()
        dp_HRS = self.dout_HTD[:, rows] @ self.v_HTD[:, keys].mT
        return (dp_HRS.sub_(delta_HT[:, rows, None]).mul_(p_HRS) @ self.k_HTD[:, keys]) * self.scale

    def _dkv(self, rows: slice, lse_HT: Tensor, delta_HT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of these keys and values, from all queries that see them."""
        queries = slice(rows.start if self.causal else 0, None)
        s_HRT = self.k_HTD[:, rows] @ self.q_HTD[:, queries].mT
        if self.causal:
            count = rows.stop - rows.start
            s_HRT[..., :count].masked_fill_(_ones(count, s_HRT).tril_(-1), -torch.inf)
        p_HRT = s_HRT.sub_(lse_HT[:, None, queries]).exp_()
        dout_HTD = self.dout_HTD[:, queries]
        dp_HRT = self.v_HTD[:, rows] @ dout_HTD.mT
        ds_HRT = dp_HRT.sub_(delta_HT[:, None, queries]).mul_(p_HRT)
        return ds_HRT @ self.q_HTD[:, queries], p_HRT @ dout_HTD

    def _scores(self, rows: slice) -> tuple[Tensor, slice]:
        """Return the scores of these rows with all keys that one of them may see, and the slice of these keys."""
        keys = slice(0, rows.stop if self.causal else None)
        s_HRS = self.q_HTD[:, rows] @ self.k_HTD[:, keys].mT
        if self.causal:
            hidden = _ones(rows.stop - rows.start, s_HRS).triu_(1)
            s_HRS[..., rows.start :].masked_fill_(hidden, -torch.inf)
        return s_HRS, keys

    def _chunks(self) -> Iterator[slice]:
        """Yield slices over all rows whose scores fit MATRIX_BYTES."""
        heads, tokens, _ = self.q_HTD.shape
        fit = max(1, MATRIX_BYTES // (heads * tokens * self.q_HTD.itemsize))
        for first in range(0, tokens, fit):
            yield slice(first, min(first + fit, tokens))


def _blocks(tokens: int) -> tuple[slice, ...]:
    """Return evenly spaced blocks of rows: one at the beginning, one at the end."""
    count = min(ROWS, tokens)
    starts = sorted({round(n * (tokens - count) / (NUM_BLOCKS - 1)) for n in range(NUM_BLOCKS)})
    return tuple(slice(start, start + count) for start in starts)


def _ones(count: int, like: Tensor) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool, device=like.device)
