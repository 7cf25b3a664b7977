"""Passes over rows of attention results in Triton: merging two, the gradient of that, and a backward's delta.

Each reads and writes every number once. An instance has a block of the rows of one head; tensors may have
any strides. Sums are in float32. What an empty part's `out` holds, NaN included, never reaches a result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshflash.kernels.triton.common import INF, LN2, LOG2E

#: Numbers of each tensor that an instance of WARPS warps holds, and rows at most: no target spills at them (sm_80,
#: sm_90, sm_100, gfx942; twice the numbers does on sm_80). Not timed.
NUMBERS, ROWS, WARPS = 2048, 128, 4
#: Interpreted, small blocks show every edge at small shapes.
INTERPRETED_ROWS = 16


@triton.jit
def _place(tokens, heads, E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr):
    """(batch row, head, rows, columns, which rows are there, which numbers) of this instance, in 64 bits.

    Heads come first, then blocks of rows: neighbours in memory are worked on at the same time.
    """
    index = tl.program_id(0)
    head = index % heads
    index = index // heads
    blocks = tl.cdiv(tokens, BLOCK)
    t = (index % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EP).to(tl.int64)
    there = t < tokens
    return (index // blocks).to(tl.int64), head.to(tl.int64), t, e, there, there[:, None] & (e[None, :] < E)


@triton.jit
def _rows(X, x_b, x_t, x_h, x_e, b, t, h, e, numbers):
    """A block of rows, in float32."""
    at = X + b * x_b + h * x_h + t[:, None] * x_t + e[None, :] * x_e
    return tl.load(at, mask=numbers, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(X, x_b, x_t, x_h, x_e, b, t, h, e, numbers, value):
    at = X + b * x_b + h * x_h + t[:, None] * x_t + e[None, :] * x_e
    tl.store(at, value.to(X.dtype.element_ty), mask=numbers)


@triton.jit(do_not_specialize=["l_b", "l_h", "ol_b", "ol_h", "il_b", "il_h", "tokens", "heads"])
def _merge(
    OUT, LSE, OTHER, OTHER_LSE, INTO, INTO_LSE,
    o_b, o_t, o_h, o_e, l_b, l_h, l_t, ot_b, ot_t, ot_h, ot_e, ol_b, ol_h, ol_t,
    i_b, i_t, i_h, i_e, il_b, il_h, il_t, tokens, heads,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, HAS_OTHER: tl.constexpr,
):  # fmt: skip
    b, h, t, e, there, numbers = _place(tokens, heads, E, EP, BLOCK)
    lse = tl.load(LSE + b * l_b + h * l_h + t * l_t, mask=there, other=-INF)
    other_lse = tl.load(OTHER_LSE + b * ol_b + h * ol_h + t * ol_t, mask=there, other=-INF)
    out = _rows(OUT, o_b, o_t, o_h, o_e, b, t, h, e, numbers)
    top = tl.maximum(lse, other_lse)
    empty = top == -INF
    reference = tl.where(empty, 0.0, top)
    mine = tl.math.exp2((lse - reference) * LOG2E)
    theirs = tl.math.exp2((other_lse - reference) * LOG2E)
    total = tl.where(empty, 1.0, mine + theirs)
    merged = tl.where((lse == -INF)[:, None], 0.0, out) * (mine / total)[:, None]
    if HAS_OTHER:
        other = _rows(OTHER, ot_b, ot_t, ot_h, ot_e, b, t, h, e, numbers)
        merged += tl.where((other_lse == -INF)[:, None], 0.0, other) * (theirs / total)[:, None]
    _store_rows(INTO, i_b, i_t, i_h, i_e, b, t, h, e, numbers, merged)
    merged_lse = tl.where(empty, -INF, reference + tl.math.log2(total) * LN2)
    tl.store(INTO_LSE + b * il_b + h * il_h + t * il_t, merged_lse, mask=there)


@triton.jit(do_not_specialize=["dl_b", "dl_h", "pl_b", "pl_h", "l_b", "l_h", "dpl_b", "dpl_h", "tokens", "heads"])
def _merge_gradient(
    DOUT, DLSE, PART, PART_LSE, OUT, LSE, DPART, DPART_LSE,
    do_b, do_t, do_h, do_e, dl_b, dl_h, dl_t, p_b, p_t, p_h, p_e, pl_b, pl_h, pl_t,
    o_b, o_t, o_h, o_e, l_b, l_h, l_t, dp_b, dp_t, dp_h, dp_e, dpl_b, dpl_h, dpl_t, tokens, heads,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, HAS_DOUT: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    b, h, t, e, there, numbers = _place(tokens, heads, E, EP, BLOCK)
    part_lse = tl.load(PART_LSE + b * pl_b + h * pl_h + t * pl_t, mask=there, other=-INF)
    lse = tl.load(LSE + b * l_b + h * l_h + t * l_t, mask=there, other=-INF)
    empty = part_lse == -INF
    weight = tl.math.exp2((part_lse - tl.where(empty, 0.0, lse)) * LOG2E)
    inner = tl.zeros([BLOCK], tl.float32)
    if HAS_DOUT:
        dout = _rows(DOUT, do_b, do_t, do_h, do_e, b, t, h, e, numbers)
        part = _rows(PART, p_b, p_t, p_h, p_e, b, t, h, e, numbers)
        out = _rows(OUT, o_b, o_t, o_h, o_e, b, t, h, e, numbers)
        inner = tl.sum(dout * (part - out), 1)
        dpart = tl.where(empty[:, None], 0.0, weight[:, None] * dout)
        _store_rows(DPART, dp_b, dp_t, dp_h, dp_e, b, t, h, e, numbers, dpart)
    if HAS_DLSE:
        inner += tl.load(DLSE + b * dl_b + h * dl_h + t * dl_t, mask=there, other=0.0).to(tl.float32)
    dpart_lse = tl.where(empty, 0.0, weight * inner)
    tl.store(DPART_LSE + b * dpl_b + h * dpl_h + t * dpl_t, dpart_lse, mask=there)


@triton.jit(do_not_specialize=["l_b", "l_h", "dl_b", "dl_h", "de_b", "de_h", "tokens", "heads"])
def _delta(
    OUT, DOUT, LSE, DLSE, DELTA,
    o_b, o_t, o_h, o_e, do_b, do_t, do_h, do_e, l_b, l_h, l_t, dl_b, dl_h, dl_t, de_b, de_h, de_t, tokens, heads,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    b, h, t, e, there, numbers = _place(tokens, heads, E, EP, BLOCK)
    out = _rows(OUT, o_b, o_t, o_h, o_e, b, t, h, e, numbers)
    dout = _rows(DOUT, do_b, do_t, do_h, do_e, b, t, h, e, numbers)
    delta = tl.sum(dout * out, 1)
    if HAS_DLSE:
        lse = tl.load(LSE + b * l_b + h * l_h + t * l_t, mask=there, other=-INF)
        dlse = tl.load(DLSE + b * dl_b + h * dl_h + t * dl_t, mask=there, other=0.0).to(tl.float32)
        delta = tl.where(lse == -INF, 0.0, delta - dlse)
    tl.store(DELTA + b * de_b + h * de_h + t * de_t, delta, mask=there)


def merge(
    out_BTHE: Tensor,
    lse_BHT: Tensor,
    other_BTHE: Tensor | None,
    other_lse_BHT: Tensor,
    into_BTHE: Tensor,
    into_lse_BHT: Tensor,
) -> None:
    """Write two results over different keys as one, in the dtype of `into`, which may be either of them.

    Without `other` there is only its weight, as for a sink.
    """
    other = out_BTHE if other_BTHE is None else other_BTHE
    given = (out_BTHE, lse_BHT, other, other_lse_BHT, into_BTHE, into_lse_BHT)
    _launch(_merge, into_BTHE, given, HAS_OTHER=other_BTHE is not None)


def merge_gradient(
    dout_BTHE: Tensor | None,
    dlse_BHT: Tensor | None,
    part_BTHE: Tensor,
    part_lse_BHT: Tensor,
    out_BTHE: Tensor,
    lse_BHT: Tensor,
    dpart_BTHE: Tensor,
    dpart_lse_BHT: Tensor,
) -> None:
    """Write the gradients of one part of the merged (out, lse); that of its out only where there is a dout."""
    dout = part_BTHE if dout_BTHE is None else dout_BTHE
    dlse = part_lse_BHT if dlse_BHT is None else dlse_BHT
    given = (dout, dlse, part_BTHE, part_lse_BHT, out_BTHE, lse_BHT, dpart_BTHE, dpart_lse_BHT)
    has = dict(HAS_DOUT=dout_BTHE is not None, HAS_DLSE=dlse_BHT is not None)
    _launch(_merge_gradient, part_BTHE, given, **has)


def delta(out_BTHE: Tensor, dout_BTHE: Tensor, lse_BHT: Tensor, dlse_BHT: Tensor | None, delta_BHT: Tensor) -> None:
    """Write sum(dout * out), less dlse where there is one, and 0 there in empty rows."""
    dlse = lse_BHT if dlse_BHT is None else dlse_BHT
    _launch(_delta, out_BTHE, (out_BTHE, dout_BTHE, lse_BHT, dlse, delta_BHT), HAS_DLSE=dlse_BHT is not None)


def _launch(kernel: Any, like_BTHE: Tensor, tensors: tuple[Tensor, ...], **constants: bool) -> None:
    """One instance for each block of rows and head, on the device of the tensors."""
    batch, tokens, heads, dim = like_BTHE.shape
    if not batch * tokens * heads:
        return
    width = triton.next_power_of_2(dim)
    rows = min(ROWS if like_BTHE.is_cuda else INTERPRETED_ROWS, max(1, NUMBERS // width))
    rows = min(rows, triton.next_power_of_2(tokens))
    strides = [stride for x in tensors for stride in x.stride()]
    with torch.cuda.device_of(like_BTHE):
        kernel[(triton.cdiv(tokens, rows) * heads * batch,)](
            *tensors, *strides, tokens, heads, E=dim, EP=width, BLOCK=rows, num_warps=WARPS, **constants
        )
