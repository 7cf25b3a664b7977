"""Base of the vendor kernels, which compute full or causal rectangles of queries and keys, and nothing else.

A worklist is cut into rectangles. Where rows take part in several, their partial results are merged here, in the
accumulator's dtype. Every row of a rectangle sees a key, so it does not matter what LSE a vendor kernel returns for
rows that see none (some return +inf, others -inf).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from meshflash.core.tiles import Rectangle
from meshflash.kernels.contract import (
    Grads,
    Inputs,
    Kernel,
    KernelRequest,
    Launch,
    Outputs,
    Rows,
    accumulator_dtype,
    new_outputs,
)
from meshflash.kernels.merge import add_sinks_, merge_


class Rectangles(Kernel):
    """A vendor kernel, called for one rectangle at a time; subclasses wrap one library each."""

    #: How the kernel aligns the causal diagonal of a rectangle that is not square. True: to the top left, so that the
    #: first query sees only the first key. False: to the bottom right; such rectangles are then cut into square ones.
    causal_from_top_left = True
    #: Whether `attend` is a torch op with a derivative, which `gradients` calls.
    op_has_derivative = False
    reads_delta = False

    @abstractmethod
    def attend(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, causal: bool, scale: float) -> Outputs:
        """Return (out_BTHE, lse_BHT) of a rectangle."""

    @abstractmethod
    def gradients(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, rows: Rows, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of a rectangle, given the rows' results over all keys."""

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        for name, is_requested in (
            ("softcap", bool(request.features.softcap)),
            ("ALiBi", request.features.alibi_slopes_BH is not None),
            ("dropout by position", bool(request.features.dropout)),
            ("gradients through the LSE", request.lse_gradient),
        ):
            if is_requested:
                return name
        if request.work.rectangles is None:
            return "windows, and positions that step differently in queries and keys"
        if request.features.scale <= 0 and any(r.causal for r in request.work.rectangles):
            return "a scale of 0 or below with a causal mask, for it masks before it scales"
        return None

    def has_torch_autograd(self, x: Inputs) -> bool:
        if not self.op_has_derivative or x.work.rectangles is None or x.features.sink_logits_H is not None:
            return False
        return self._whole(x) is not None

    def launches(self, request: KernelRequest) -> tuple[Launch, ...]:
        return tuple(_launch(r) for r in self._cut(request.work.rectangles))

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        sinks = x.features.sink_logits_H
        if outputs is None and carry is None and sinks is None and (r := self._whole(x)) is not None:
            q, k, v = _dense(x.q_BTHD), _dense(x.k_BSKD), _dense(x.v_BSKE)
            out, lse = self.attend(q, k, v, r.causal, x.features.scale)
            return out.contiguous(), lse.contiguous()
        rectangles = self._cut(x.work.rectangles)
        whole = carry is None and _alone(x, rectangles) and _all(rectangles[0].q, x.q_BTHD)
        out_BTHE, lse_BHT = outputs or new_outputs(x.q_BTHD, x.v_BSKE)
        once = carry is None and sinks is None and x.work.disjoint and rectangles is x.work.rectangles
        total = out_BTHE
        if not once and out_BTHE.dtype != lse_BHT.dtype:
            total = torch.empty_like(out_BTHE, dtype=lse_BHT.dtype)
        if carry is not None:
            total.copy_(carry[0])
            lse_BHT.copy_(carry[1])
        elif not whole:
            total.zero_()
            lse_BHT.fill_(-torch.inf)
        for n, r in enumerate(rectangles):
            out, lse = self._forward(x, r)
            out_rows, lse_rows = total[_batch(r), r.q], lse_BHT[_batch(r), :, r.q]
            if once or (whole and not n):
                out_rows.copy_(out)
                lse_rows.copy_(lse)
            else:
                merge_(out_rows, lse_rows, out, lse)
        if sinks is not None:
            add_sinks_(total, lse_BHT, sinks)
        if total is not out_BTHE:
            out_BTHE.copy_(total)
        return out_BTHE, lse_BHT

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        rectangles = self._cut(x.work.rectangles)
        if grads is None and self._whole(x) is not None:
            dq, dk, dv = (part.contiguous() for part in self._backward(x, rows, rectangles[0]))
            return Grads(dq, dk, dv)
        grads = grads or Grads.like(x.q_BTHD, x.k_BSKD, x.v_BSKE)
        targets = ((grads.dq_BTHD, grads.add_dq), (grads.dk_BSKD, grads.add_dkv), (grads.dv_BSKE, grads.add_dkv))
        dtype = accumulator_dtype(x.q_BTHD.dtype)
        disjoint = x.work.disjoint and rectangles is x.work.rectangles
        sums = []
        for target, add in targets:
            once = add or target.dtype == dtype or disjoint
            sums.append(target if once else torch.empty_like(target, dtype=dtype))
            if not add:
                sums[-1].zero_()
        for r in rectangles:
            for total, part, place in zip(sums, self._backward(x, rows, r), (r.q, r.k, r.k), strict=True):
                total[_batch(r), place] += part
        for (target, _), total in zip(targets, sums, strict=True):
            if target is not total:
                target.copy_(total)
        return grads

    def _whole(self, x: Inputs) -> Rectangle | None:
        """Return the one rectangle that this kernel supports and that is the whole call, or None."""
        rectangles = x.work.rectangles
        if rectangles is None or len(rectangles) != 1:
            return None
        (r,) = rectangles
        is_whole = _alone(x, rectangles) and _all(r.q, x.q_BTHD) and _all(r.k, x.k_BSKD)
        return r if is_whole and (self.causal_from_top_left or _square(r)) else None

    def _cut(self, rectangles: tuple[Rectangle, ...] | None) -> tuple[Rectangle, ...]:
        """Cut rectangles into those that this kernel supports."""
        assert rectangles is not None
        if self.causal_from_top_left or all(_square(r) for r in rectangles):
            return rectangles
        return tuple(chain.from_iterable([r] if _square(r) else _squared(r) for r in rectangles))

    def _forward(self, x: Inputs, r: Rectangle) -> Outputs:
        q, k, v = _rows(x.q_BTHD, r, r.q), _rows(x.k_BSKD, r, r.k), _rows(x.v_BSKE, r, r.k)
        return self.attend(q, k, v, r.causal, x.features.scale)

    def _backward(self, x: Inputs, rows: Rows, r: Rectangle) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _rows(x.q_BTHD, r, r.q), _rows(x.k_BSKD, r, r.k), _rows(x.v_BSKE, r, r.k)
        out, dout = _rows(rows.out_BTHE, r, r.q), _rows(rows.dout_BTHE, r, r.q)
        lse = rows.lse_BHT if r.batch < 0 and _all(r.q, x.q_BTHD) else rows.lse_BHT[_batch(r), :, r.q]
        these = Rows(out, dout, lse, None)
        return self.gradients(q, k, v, these, r.causal, x.features.scale)


def _alone(x: Inputs, rectangles: tuple[Rectangle, ...]) -> bool:
    """Whether there is one rectangle, and it covers every batch row."""
    return len(rectangles) == 1 and (rectangles[0].batch < 0 or x.q_BTHD.shape[0] == 1)


def _batch(r: Rectangle) -> slice:
    return slice(None) if r.batch < 0 else slice(r.batch, r.batch + 1)


def _rows(x_BTHD: Tensor, r: Rectangle, rows: slice) -> Tensor:
    """Return a rectangle's rows of a tensor, with contiguous rows, which vendor kernels rely on.

    Expanded tensors are copied: BLAS sums them in another order, with an error that grows with the row.
    """
    x_BTHD = _dense(x_BTHD)
    return x_BTHD if r.batch < 0 and _all(rows, x_BTHD) else x_BTHD[_batch(r), rows]


def _dense(x_BTHD: Tensor) -> Tensor:
    """Return a tensor with contiguous rows that is not expanded; others are copied."""
    strides = x_BTHD.stride()
    return x_BTHD.contiguous() if strides[-1] != 1 or 0 in strides else x_BTHD


def _all(rows: slice, x_BTHD: Tensor) -> bool:
    return rows.stop - rows.start == x_BTHD.shape[1]


def _sizes(r: Rectangle) -> tuple[int, int]:
    return r.q.stop - r.q.start, r.k.stop - r.k.start


def _square(r: Rectangle) -> bool:
    q, k = _sizes(r)
    return not r.causal or q == k


def _squared(r: Rectangle) -> Iterable[Rectangle]:
    """Cut a causal rectangle into a square one and, where it has more queries than keys, a full one below it."""
    q, k = _sizes(r)
    side = min(q, k)
    middle = r.q.start + side
    yield Rectangle(r.batch, slice(r.q.start, middle), slice(r.k.start, r.k.start + side), r.causal)
    if q > k:
        yield Rectangle(r.batch, slice(middle, r.q.stop), r.k, False)


def _launch(r: Rectangle) -> Launch:
    q, k = _sizes(r)
    short = min(q, k)
    pairs = short * (short + 1) / 2 + float(q - short) * k if r.causal else float(q) * k
    return Launch(pairs, k, r.causal, every_batch_row=r.batch < 0)
