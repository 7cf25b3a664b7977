"""Row-wise passes over attention results in Triton: merge two partial results, its gradient, and a backward's delta.

Each reads and writes every element once. A CTA has a block of rows of one head; tensors may have any strides. Sums are
in float32. Whatever `out` of an empty row (LSE -inf) holds, NaN included, never reaches a result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from meshflash.kernels.launches import Launcher, Launches, run
from meshflash.kernels.triton.common import INF, LN2, LOG2E

#: The most elements of each tensor and the most rows that a CTA of WARPS warps holds. No target spills with them
#: (sm_80, sm_90, sm_100, gfx942); twice the elements spill on sm_80. Not timed.
MAX_ELEMENTS, MAX_ROWS, WARPS = 2048, 128, 4
#: Rows of a CTA under the interpreter: few, so that tests cover partial blocks at small shapes.
INTERPRETED_ROWS = 16


@triton.jit
def _locate_rows(tokens, heads, E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr):
    """Return (batch row, head, rows, columns, mask of rows, mask of elements) of this CTA, in 64 bits.

    CTAs go over heads first, then over blocks of rows, so that CTAs that run together read neighbouring memory.
    """
    index = tl.program_id(0)
    head = index % heads
    index = index // heads
    blocks = tl.cdiv(tokens, BLOCK)
    t = (index % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EP).to(tl.int64)
    in_range = t < tokens
    return (index // blocks).to(tl.int64), head.to(tl.int64), t, e, in_range, in_range[:, None] & (e[None, :] < E)


@triton.jit
def _load_rows(X, x_b, x_t, x_h, x_e, b, t, h, e, in_bounds):
    """Load a block of rows as float32."""
    at = X + b * x_b + h * x_h + t[:, None] * x_t + e[None, :] * x_e
    return tl.load(at, mask=in_bounds, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(X, x_b, x_t, x_h, x_e, b, t, h, e, in_bounds, value):
    at = X + b * x_b + h * x_h + t[:, None] * x_t + e[None, :] * x_e
    tl.store(at, value.to(X.dtype.element_ty), mask=in_bounds)


@triton.jit(do_not_specialize=["l_b", "l_h", "ol_b", "ol_h", "il_b", "il_h", "tokens", "heads"])
def _merge(
    OUT, LSE, OTHER, OTHER_LSE, INTO, INTO_LSE,
    o_b, o_t, o_h, o_e, l_b, l_h, l_t, ot_b, ot_t, ot_h, ot_e, ol_b, ol_h, ol_t,
    i_b, i_t, i_h, i_e, il_b, il_h, il_t, tokens, heads,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, HAS_OTHER: tl.constexpr,
):  # fmt: skip
    b, h, t, e, in_range, in_bounds = _locate_rows(tokens, heads, E, EP, BLOCK)
    lse = tl.load(LSE + b * l_b + h * l_h + t * l_t, mask=in_range, other=-INF)
    other_lse = tl.load(OTHER_LSE + b * ol_b + h * ol_h + t * ol_t, mask=in_range, other=-INF)
    out = _load_rows(OUT, o_b, o_t, o_h, o_e, b, t, h, e, in_bounds)
    new_max = tl.maximum(lse, other_lse)
    empty = new_max == -INF
    reference = tl.where(empty, 0.0, new_max)
    mine = tl.math.exp2((lse - reference) * LOG2E)
    theirs = tl.math.exp2((other_lse - reference) * LOG2E)
    row_sum = tl.where(empty, 1.0, mine + theirs)
    merged = tl.where((lse == -INF)[:, None], 0.0, out) * (mine / row_sum)[:, None]
    if HAS_OTHER:
        other = _load_rows(OTHER, ot_b, ot_t, ot_h, ot_e, b, t, h, e, in_bounds)
        merged += tl.where((other_lse == -INF)[:, None], 0.0, other) * (theirs / row_sum)[:, None]
    _store_rows(INTO, i_b, i_t, i_h, i_e, b, t, h, e, in_bounds, merged)
    merged_lse = tl.where(empty, -INF, reference + tl.math.log2(row_sum) * LN2)
    tl.store(INTO_LSE + b * il_b + h * il_h + t * il_t, merged_lse, mask=in_range)


@triton.jit(do_not_specialize=["dl_b", "dl_h", "pl_b", "pl_h", "l_b", "l_h", "dpl_b", "dpl_h", "tokens", "heads"])
def _merge_gradient(
    DOUT, DLSE, PARTIAL, PARTIAL_LSE, OUT, LSE, DPARTIAL, DPARTIAL_LSE,
    do_b, do_t, do_h, do_e, dl_b, dl_h, dl_t, p_b, p_t, p_h, p_e, pl_b, pl_h, pl_t,
    o_b, o_t, o_h, o_e, l_b, l_h, l_t, dp_b, dp_t, dp_h, dp_e, dpl_b, dpl_h, dpl_t, tokens, heads,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, HAS_DOUT: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    b, h, t, e, in_range, in_bounds = _locate_rows(tokens, heads, E, EP, BLOCK)
    partial_lse = tl.load(PARTIAL_LSE + b * pl_b + h * pl_h + t * pl_t, mask=in_range, other=-INF)
    lse = tl.load(LSE + b * l_b + h * l_h + t * l_t, mask=in_range, other=-INF)
    empty = partial_lse == -INF
    weight = tl.math.exp2((partial_lse - tl.where(empty, 0.0, lse)) * LOG2E)
    inner = tl.zeros([BLOCK], tl.float32)
    if HAS_DOUT:
        dout = _load_rows(DOUT, do_b, do_t, do_h, do_e, b, t, h, e, in_bounds)
        partial = _load_rows(PARTIAL, p_b, p_t, p_h, p_e, b, t, h, e, in_bounds)
        out = _load_rows(OUT, o_b, o_t, o_h, o_e, b, t, h, e, in_bounds)
        inner = tl.sum(dout * (partial - out), 1)
        dpartial = tl.where(empty[:, None], 0.0, weight[:, None] * dout)
        _store_rows(DPARTIAL, dp_b, dp_t, dp_h, dp_e, b, t, h, e, in_bounds, dpartial)
    if HAS_DLSE:
        inner += tl.load(DLSE + b * dl_b + h * dl_h + t * dl_t, mask=in_range, other=0.0).to(tl.float32)
    dpartial_lse = tl.where(empty, 0.0, weight * inner)
    tl.store(DPARTIAL_LSE + b * dpl_b + h * dpl_h + t * dpl_t, dpartial_lse, mask=in_range)


@triton.jit(do_not_specialize=["l_b", "l_h", "dl_b", "dl_h", "de_b", "de_h", "tokens", "heads"])
def _delta(
    OUT, DOUT, LSE, DLSE, DELTA,
    o_b, o_t, o_h, o_e, do_b, do_t, do_h, do_e, l_b, l_h, l_t, dl_b, dl_h, dl_t, de_b, de_h, de_t, tokens, heads,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    b, h, t, e, in_range, in_bounds = _locate_rows(tokens, heads, E, EP, BLOCK)
    out = _load_rows(OUT, o_b, o_t, o_h, o_e, b, t, h, e, in_bounds)
    dout = _load_rows(DOUT, do_b, do_t, do_h, do_e, b, t, h, e, in_bounds)
    delta = tl.sum(dout * out, 1)
    if HAS_DLSE:
        lse = tl.load(LSE + b * l_b + h * l_h + t * l_t, mask=in_range, other=-INF)
        dlse = tl.load(DLSE + b * dl_b + h * dl_h + t * dl_t, mask=in_range, other=0.0).to(tl.float32)
        delta = tl.where(lse == -INF, 0.0, delta - dlse)
    tl.store(DELTA + b * de_b + h * de_h + t * de_t, delta, mask=in_range)


def merge(
    out_BTHE: Tensor,
    lse_BHT: Tensor,
    other_BTHE: Tensor | None,
    other_lse_BHT: Tensor,
    into_BTHE: Tensor,
    into_lse_BHT: Tensor,
    launches: Launches | None = None,
) -> None:
    """Merge two partial results over different keys, in the dtype of `into`, which may be either of them.

    Args:
        out_BTHE: The first result's output.
        lse_BHT: The first result's LSE.
        other_BTHE: The second result's output; None means that it has a weight but no value, as a sink has.
        other_lse_BHT: The second result's LSE.
        into_BTHE: Where the merged output goes.
        into_lse_BHT: Where the merged LSE goes.
        launches: The recorded launches of merges of the same shapes, or None.
    """
    other = out_BTHE if other_BTHE is None else other_BTHE
    given = (out_BTHE, lse_BHT, other, other_lse_BHT, into_BTHE, into_lse_BHT)
    _run(launches, _merge, into_BTHE, given, HAS_OTHER=other_BTHE is not None)


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
    """Write the gradients of one partial result of a merge.

    Args:
        dout_BTHE: The gradient of the merged output, or None for 0.
        dlse_BHT: The gradient of the merged LSE, or None for 0; one of the two gradients is given.
        part_BTHE: The output of the partial result.
        part_lse_BHT: The LSE of the partial result.
        out_BTHE: The output of the merged result.
        lse_BHT: The LSE of the merged result.
        dpart_BTHE: Where the gradient of the partial output goes; without dout it is not written.
        dpart_lse_BHT: Where the gradient of the partial LSE goes.
    """
    dout = part_BTHE if dout_BTHE is None else dout_BTHE
    dlse = part_lse_BHT if dlse_BHT is None else dlse_BHT
    given = (dout, dlse, part_BTHE, part_lse_BHT, out_BTHE, lse_BHT, dpart_BTHE, dpart_lse_BHT)
    has = dict(HAS_DOUT=dout_BTHE is not None, HAS_DLSE=dlse_BHT is not None)
    _run(None, _merge_gradient, part_BTHE, given, **has)


def delta(
    out_BTHE: Tensor,
    dout_BTHE: Tensor,
    lse_BHT: Tensor,
    dlse_BHT: Tensor | None,
    delta_BHT: Tensor,
    launches: Launches | None = None,
) -> None:
    """Write delta of each row: sum(dout * out), minus dlse unless it is None; with dlse, 0 in rows that see nothing.

    Args:
        out_BTHE: The output.
        dout_BTHE: The gradient of the output.
        lse_BHT: The LSE.
        dlse_BHT: The gradient of the LSE, or None for 0.
        delta_BHT: Where delta goes.
        launches: The recorded launches of calls of the same shapes, or None.
    """
    dlse = lse_BHT if dlse_BHT is None else dlse_BHT
    tensors = (out_BTHE, dout_BTHE, lse_BHT, dlse, delta_BHT)
    _run(launches, _delta, out_BTHE, tensors, HAS_DLSE=dlse_BHT is not None)


def launch_delta(launcher: Launcher, out_BTHE: Tensor, dout_BTHE: Tensor, lse_BHT: Tensor, delta_BHT: Tensor) -> None:
    """Write delta of each row, sum(dout * out), as one of the launches of a call.

    Args:
        launcher: The launcher of the call.
        out_BTHE: The output.
        dout_BTHE: The gradient of the output.
        lse_BHT: The LSE.
        delta_BHT: Where delta goes.
    """
    _launch(_delta, out_BTHE, (out_BTHE, dout_BTHE, lse_BHT, lse_BHT, delta_BHT), {"HAS_DLSE": False}, launcher)


def _run(
    launches: Launches | None, kernel: Any, like_BTHE: Tensor, tensors: tuple[Tensor, ...], **constants: bool
) -> None:
    if like_BTHE.numel():
        launch = partial(_launch, kernel, like_BTHE, tensors, constants)
        run(launches, (kernel, *constants.values()), tensors, launch)


def _launch(
    kernel: Any, like_BTHE: Tensor, tensors: tuple[Tensor, ...], constants: dict[str, bool], launcher: Launcher
) -> None:
    """Launch one CTA for each block of rows and head."""
    batch, tokens, heads, dim = like_BTHE.shape
    if not like_BTHE.numel():
        return
    width = triton.next_power_of_2(dim)
    rows = min(MAX_ROWS if like_BTHE.is_cuda else INTERPRETED_ROWS, max(1, MAX_ELEMENTS // width))
    rows = min(rows, triton.next_power_of_2(tokens))
    strides = [stride for x in tensors for stride in x.stride()]
    launcher.launch(
        kernel,
        (triton.cdiv(tokens, rows) * heads * batch,),
        *(*tensors, *strides, tokens, heads),
        **dict(E=dim, EP=width, BLOCK=rows, num_warps=WARPS, **constants),
    )
