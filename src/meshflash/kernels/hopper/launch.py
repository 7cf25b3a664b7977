"""Launch the Gluon kernels: which calls they support, their configurations, descriptors and float32 sums of dQ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshflash.kernels.contract import HALF, Features, Grads, Inputs, KernelRequest, Outputs, Rows
from meshflash.kernels.hopper.support import Off, kernels_off
from meshflash.kernels.launches import Launcher
from meshflash.kernels.triton.block_tables import WG_ROWS, TileTable
from meshflash.kernels.triton.launch import MIN_SCALE, tma_aligned, tma_strides

#: Bytes of K and V, of all batch rows, that the CTAs of a forward work on at a time: they stay in the L2 cache.
L2_KV_BYTES = 32 << 20
LOG2E = 1.4426950408889634
#: The mean number of queries that a tile of keys loops over, from which on the backward spreads the query heads of a
#: KV head over CTAs of their own. These add to the same dK and dV, and each has a prologue and an epilogue. Measured on
#: an H200: docs/dev/kernels.md.
MIN_QUERIES_TO_SPREAD = 6144
#: The most blocks of the longest CTA, over an even share of all blocks, up to which heads are not spread. Measured like
#: the number above.
MAX_IMBALANCE = 0.75
#: The smallest softcap of a backward: the slope of the cap is recovered from P, less exactly the flatter the cap is.
MIN_SOFTCAP = 0.05


@dataclass(frozen=True)
class ForwardConfig:
    """The configuration of a forward: consumer warpgroups, stages of K and V, and registers a thread.

    With `pingpong`, warpgroups issue their wgmmas one after another. `rows` are the queries of a warpgroup, `block_n`
    the keys of a block.
    """

    num_consumer_wgs: int
    stages: int
    consumer_regs: int
    producer_regs: int
    pingpong: bool = False
    rows: int = 64
    block_n: int = 128

    @property
    def block_m(self) -> int:
        """The number of queries of a tile."""
        return self.rows * self.num_consumer_wgs


@dataclass(frozen=True)
class BackwardConfig:
    """The configuration of a backward: queries and keys of a block, stages of Q and dO, and registers a thread.

    With `prefetch_s`, S of the next block starts before this block is done. CTA n begins `n * rotate` blocks further.
    From `min_keys_for_tiled_dq` keys on, which a query sees on average, dQ goes to tiles of its own and is added to the
    caller's sums once: that costs 16 bytes of traffic for each element, and adding in rows costs more with each block.
    A softcap needs registers: without `supports_softcap` the portable kernel serves it, at dim 64 twice as fast. With
    `tma_reduce_dkdv`, TMA adds dK and dV of full tiles to sums, in place of atomics.
    """

    block_m: int
    prefetch_s: bool
    rotate: int
    min_keys_for_tiled_dq: int
    supports_softcap: bool
    tma_reduce_dkdv: bool
    stages: int = 2
    block_n: int = 128
    consumer_regs: int = 240
    producer_regs: int = 24


@dataclass(frozen=True)
class BackwardDqConfig:
    """The configuration of the pass for dQ alone: stages of K and V, queries of a warpgroup, keys of a block."""

    stages: int
    rows: int = 64
    block_n: int = 128
    consumer_regs: int = 240
    producer_regs: int = 24

    @property
    def block_m(self) -> int:
        """The number of queries of a tile."""
        return 2 * self.rows


#: Head dim -> configuration, measured on an H200: docs/dev/kernels.md.
FORWARD = {64: ForwardConfig(3, 3, 160, 32, pingpong=True), 128: ForwardConfig(2, 2, 240, 24)}
BACKWARD = {
    64: BackwardConfig(
        128, prefetch_s=True, rotate=5, min_keys_for_tiled_dq=4096, supports_softcap=False, tma_reduce_dkdv=False
    ),
    128: BackwardConfig(
        64, prefetch_s=False, rotate=0, min_keys_for_tiled_dq=8000, supports_softcap=True, tma_reduce_dkdv=True
    ),
}
BACKWARD_DQ = {64: BackwardDqConfig(3), 128: BackwardDqConfig(2)}


def forward_config(x: Inputs) -> ForwardConfig | None:
    """Return the configuration of a forward on these inputs, or None where the portable kernel must serve it."""
    return FORWARD.get(x.q_BTHD.shape[-1]) if _serves(x) else None


def backward_config(x: Inputs, rows: Rows, grads: Grads, deterministic: bool) -> BackwardConfig | None:
    """Return the configuration of a backward on these inputs, or None where the portable kernel must serve it.

    A deterministic backward has a second pass, of the configuration in `BACKWARD_DQ`.
    """
    dim = x.q_BTHD.shape[-1]
    if not _serves(x, rows.dout_BTHE) or not _supports_softcap(x.features, dim):
        return None
    if grads.add_dq and not deterministic and not tma_aligned(grads.dq_BTHD):
        return None
    return BACKWARD[dim]


def unsupported_reason(request: KernelRequest) -> str | None:
    """Return what about a call the Gluon kernels do not support, or None.

    The alignment of tensors is not known here: where TMA cannot address one, the portable kernel serves the call.
    """
    if request.device.type == "cpu":
        return "the device cpu; it runs on Hopper GPUs"
    if reason := _unsupported_request(request):
        return reason
    off = kernels_off(request.device)
    return f"this machine ({off})" if off else None


def off_reason(request: KernelRequest) -> Off | None:
    """Return why the kernels are off on a GPU although they support a call, or None."""
    if request.device.type != "cuda" or _unsupported_request(request):
        return None
    return kernels_off(request.device)


def _unsupported_request(request: KernelRequest) -> str | None:
    features, dim = request.features, request.head_dim
    reason = _unsupported_call(features, request.dtype, dim, request.value_dim)
    if reason is None and request.direction == "backward" and not _supports_softcap(features, dim):
        return f"a softcap of {features.softcap} in the backward at head dim {dim}"
    return reason


def _supports_softcap(features: Features, dim: int) -> bool:
    return not features.softcap or (BACKWARD[dim].supports_softcap and features.softcap >= MIN_SOFTCAP)


def _serves(x: Inputs, *others: Tensor) -> bool:
    q = x.q_BTHD
    if _unsupported_call(x.features, q.dtype, q.shape[-1], x.v_BSKE.shape[-1]) or kernels_off(q.device):
        return False
    return all(y.dtype == q.dtype and tma_aligned(y) for y in (q, x.k_BSKD, x.v_BSKE, *others))


def _unsupported_call(features: Features, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    if dtype not in HALF:
        return f"{dtype}; it takes float16 and bfloat16"
    if dim not in FORWARD:
        return f"a head dim of {dim}; it takes {' and '.join(map(str, FORWARD))}"
    if value_dim != dim:
        return f"a value dim of {value_dim} with a head dim of {dim}"
    if features.scale < MIN_SCALE:
        return "a scale of 0 or below"
    if features.dropout:
        return "dropout"
    return None if features.alibi_slopes_BH is None else "ALiBi"


def forward(
    launcher: Launcher, x: Inputs, outputs: Outputs, carry: Outputs | None, config: ForwardConfig, tables: TileTable
) -> None:
    """Run the Gluon forward over a table of query tiles: (out, lse) into `outputs`; a `carry` is continued."""
    from meshflash.kernels.hopper.forward import forward as kernel

    (out, lse), features, q, k = outputs, x.features, x.q_BTHD, x.k_BSKD
    carried, carried_lse = outputs if carry is None else carry
    heads, gqa_ratio = q.shape[2], q.shape[2] // k.shape[2]
    # tiles of different work go to whichever CTA is free; equal ones round-robin, without a counter
    dynamic = tables.lower or tables.upper or not tables.single_run
    kv_bytes = 4 * k.shape[0] * k.shape[1] * k.shape[3]  # of one KV head: K and V in half precision
    section_heads = min(heads, gqa_ratio * max(1, L2_KV_BYTES // max(1, kv_bytes))) if dynamic else 1
    num_work = num_full_tiles = len(tables) * heads
    _, scale, inner_scale = _scales(features)
    sinks = features.sink_logits_H
    ctas = max(1, num_sms(q.device) - x.sm_margin)
    walked_tables, tail, partial = tables, None, (out, lse)
    if sinks is None:
        from meshflash.kernels.hopper.split_kv import combine_splits, split_tail_wave

        tail = split_tail_wave(tables, heads, ctas, config.block_n, appended=True)
    if tail:
        walked_tables, pieces = tail.tables, tail.num_splits * tail.num_tiles
        num_full_tiles -= tail.num_tiles
        num_work = num_full_tiles + pieces
        partial_out = launcher.empty(pieces, config.block_m, q.shape[3], like=lse, dtype=lse.dtype)
        partial = partial_out, launcher.empty(pieces, config.block_m, like=lse, dtype=lse.dtype)
    q_descriptor = _rows_descriptor(q, config.rows)
    tma_store = tables.tile_aligned and config.rows == WG_ROWS and tma_aligned(out)
    carry_fits = carry is not None and carried.dtype == out.dtype == torch.float32 and tma_aligned(carried)
    tma_carry = tma_store and carry_fits
    out_descriptor = _rows_descriptor(out, config.rows) if tma_store else q_descriptor
    carry_descriptor = _rows_descriptor(carried, config.rows) if tma_carry else out_descriptor
    counter = _counter(q.device) if dynamic else walked_tables.tiles
    launcher.keep(counter, walked_tables.tiles, walked_tables.spans)
    launcher.launch(
        kernel,
        (min(num_work, ctas),),
        *(q_descriptor, _rows_descriptor(k, config.block_n), _rows_descriptor(x.v_BSKE, config.block_n)),
        *(out_descriptor, carry_descriptor, out, lse, *partial, carried, carried_lse),
        lse if sinks is None else sinks.contiguous(),
        *(counter, walked_tables.tiles, walked_tables.spans),
        *(len(tables), heads, section_heads),
        *(num_full_tiles, num_work, scale, inner_scale),
        *(*out.stride()[:3], *lse.stride(), *carried.stride()[:3], *carried_lse.stride()),
        GQA_RATIO=gqa_ratio,
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        D=q.shape[3],
        STAGES=config.stages,
        NUM_CONSUMER_WGS=config.num_consumer_wgs,
        SINGLE_RUN=tables.single_run,
        EXACT_BEGIN=tables.exact_begin,
        DYNAMIC=dynamic,
        LOWER=tables.lower,
        UPPER=tables.upper,
        MASK_FIRST_ONLY=tables.masks_first_only,
        SOFTCAP=features.softcap > 0,
        HAS_CARRY=carry is not None,
        HAS_SINKS=sinks is not None,
        TMA_STORE=tma_store,
        TMA_CARRY=tma_carry,
        PINGPONG=config.pingpong,
        SPLIT_KV=tail is not None,
        CONSUMER_REGS=config.consumer_regs,
        PRODUCER_REGS=config.producer_regs,
        num_warps=4,
    )
    if tail:
        combine_splits(launcher, tail, partial, outputs, carry)


class DqSums:
    """Float32 sums of dQ that the CTAs of a backward add to: in tiles, in the order of registers, or in rows.

    `rows` is the buffer that the portable kernel adds to, where it serves some of the tiles; it is never in tiles then.
    `target` is the buffer that the Gluon kernel adds to: `rows`, unless `add_in_tiles` is called. Without `zeroed`,
    tiles are left to `bwd_preprocess_out`, which fills them with zeros.
    """

    def __init__(
        self, launcher: Launcher, q: Tensor, grads: Grads, tiled: bool, block_m: int, zeroed: bool = True
    ) -> None:
        self._launcher = launcher
        self.q, self.grads, self.tiled, self.block_m = q, grads, tiled, block_m
        self.tiles_per_head = -(-q.shape[1] // block_m)
        self.zeroed = zeroed or not tiled
        if tiled:
            self.rows = self._make_tiles(zeroed)
        else:
            self.rows = grads.dq_BTHD if grads.add_dq else launcher.zeros(*q.shape, like=q)
        self.target = self.rows

    def add_in_tiles(self) -> None:
        """Let the Gluon kernel add to tiles beside the caller's sums; `finalize` adds these to the caller's."""
        assert self.grads.add_dq, "only the caller's sums have tiles beside them"
        self.tiled, self.target = True, self._make_tiles(zeroed=True)

    def _make_tiles(self, zeroed: bool) -> Tensor:
        batch, _, heads, dim = self.q.shape
        elements = batch * heads * self.tiles_per_head * self.block_m * dim
        if zeroed:
            return self._launcher.zeros(elements, like=self.q)
        return self._launcher.empty(elements, like=self.q, dtype=torch.float32)

    def make_descriptor(self, head: int) -> Any:
        """Return the TMA descriptor by which the kernel adds to the sums, from a head on."""
        from triton.experimental.gluon.language import NVMMASharedLayout

        if not self.tiled:
            return _rows_descriptor(self.target[:, :, head:], 64, 64)
        from_head = self.target[head * self.tiles_per_head * self.block_m * self.q.shape[3] :]
        return descriptor(from_head.view(-1, 256), [16, 256], NVMMASharedLayout(0, 32, rank=2))

    def finalize(self, scale: float) -> None:
        """Write the gradients from the sums, where these are not the same tensor."""
        dq = self.grads.dq_BTHD
        if not self.tiled:
            if self.rows is not dq:
                self._launcher.copy(dq, self.rows)
            return
        from meshflash.kernels.hopper.backward_preprocess import gather_dq

        batch, tokens, heads, dim = self.q.shape
        self._launcher.launch(
            gather_dq,
            (self.tiles_per_head * batch * heads,),
            *(self.target, dq, tokens, self.tiles_per_head, heads, scale, *dq.stride()[:3]),
            BLOCK_M=self.block_m,
            D=dim,
            ACCUMULATE=self.grads.add_dq,
        )


def backward(
    launcher: Launcher, x: Inputs, rows: Rows, grads: Grads, sums: DqSums | None, config: BackwardConfig,
    tables: TileTable,
) -> None:  # fmt: skip
    """Run the Gluon backward over a table of key tiles: (dK, dV) into `grads`, and dQ into `sums` unless None."""
    lse = rows.lse_BHT
    batch, tokens, heads, _ = x.q_BTHD.shape
    if sums and grads.add_dq and tables.on_grid and _mean_keys_per_query(x) >= config.min_keys_for_tiled_dq:
        sums.add_in_tiles()
    padded_tokens = -(-tokens // 4) * 4  # TMA needs lines at multiples of 16 bytes: four float32
    shifts = 1 if tables.aligned else 4
    lse_delta = launcher.empty(2, batch * heads * shifts, padded_tokens, like=lse, dtype=lse.dtype)
    dk, dv, accumulate = grads.dk_BSKD, grads.dv_BSKE, grads.add_dkv
    heads_per_cta, ctas_per_kv_head = heads // x.k_BSKD.shape[2], 1
    num_ctas = len(tables) * heads // heads_per_cta
    if sums and heads_per_cta > 1 and spreads_heads(tables, config, num_ctas, num_sms(lse.device)):
        heads_per_cta, ctas_per_kv_head = 1, heads_per_cta
    num_work = len(tables) * heads // heads_per_cta
    tail = None
    if sums:  # splits add to dK and dV in any order, so a deterministic backward has none
        from meshflash.kernels.hopper.split_kv import finalize_splits, split_tail_wave

        tail = split_tail_wave(tables, heads // heads_per_cta, num_sms(lse.device), config.block_m, heads_per_cta)
        num_work -= tail.num_tiles if tail else 0
    _launch_preprocess(launcher, rows, lse_delta, padded_tokens, shifts, sums)
    if ctas_per_kv_head > 1 and not accumulate:
        dk, dv = launcher.zeros(2, *dk.shape, like=dk).unbind()  # one fill, because short calls are bound by the host
        accumulate = True
    loops = _Loops(heads, heads_per_cta, ctas_per_kv_head)
    tensors = _BackwardTensors(x.q_BTHD, x.k_BSKD, x.v_BSKE, rows.dout_BTHE, lse_delta, dk, dv)
    _launch_backward(launcher, x.features, tensors, accumulate, sums, config, tables, num_work, loops)
    if tail:
        k, v, dk_part, dv_part = (tail.slice_rows(y) for y in (x.k_BSKD, x.v_BSKE, dk, dv))
        if not accumulate:
            dk_part, dv_part = (launcher.zeros(*y.shape, like=y) for y in (dk_part, dv_part))
        q, dout = (y[:, :, -heads_per_cta:] for y in (x.q_BTHD, rows.dout_BTHE))
        tensors = _BackwardTensors(q, k, v, dout, lse_delta, dk_part, dv_part)
        num_work = len(tail.tables)
        _launch_backward(launcher, x.features, tensors, True, sums, config, tail.tables, num_work, loops)
        if not accumulate:
            finalize_splits(launcher, tail, (dk_part, dv_part), (dk, dv), config.block_n)
    if dk is not grads.dk_BSKD:  # tiles left to the portable kernel are 0 here; it writes them later
        launcher.copy(grads.dk_BSKD, dk)
        launcher.copy(grads.dv_BSKE, dv)


def _launch_preprocess(
    launcher: Launcher, rows: Rows, lse_delta: Tensor, padded_tokens: int, shifts: int, sums: DqSums | None
) -> None:
    """Write lse and delta as TMA loads them; where delta is not given, compute it, and fill the sums with zeros."""
    from meshflash.kernels.hopper import backward_preprocess as kernels

    lse, (batch, tokens, heads, dim) = rows.lse_BHT, rows.dout_BTHE.shape
    sizes = (tokens, padded_tokens, heads)
    if rows.delta is not None:
        assert sums is None or sums.zeroed, "only the kernel that computes delta fills sums with zeros"
        launcher.launch(
            kernels.bwd_preprocess,
            (batch * heads, -(-padded_tokens // kernels.PREPROCESS_ROWS)),
            *(lse, rows.delta, *lse_delta, *sizes, *lse.stride(), *rows.delta.stride()),
            ROWS=kernels.PREPROCESS_ROWS,
            SHIFTS=shifts,
        )
        return
    out, dout = rows.out_BTHE, rows.dout_BTHE
    zeroed = sums is None or sums.zeroed
    sum_rows = 0 if sums is None or zeroed else sums.tiles_per_head * sums.block_m
    launcher.launch(
        kernels.bwd_preprocess_out,
        (batch * heads, -(-max(padded_tokens, sum_rows) // kernels.PREPROCESS_OUT_ROWS)),
        *(lse, out, dout, *lse_delta, lse if sums is None or zeroed else sums.target),
        *(tokens, padded_tokens, sum_rows, heads),
        *(*lse.stride(), *out.stride()[:3], *dout.stride()[:3]),
        ROWS=kernels.PREPROCESS_OUT_ROWS,
        SHIFTS=shifts,
        D=dim,
        ZERO_SUMS=not zeroed,
    )


class _Loops(NamedTuple):
    """How heads are divided: a CTA loops over `heads_per_cta` heads, and `ctas_per_kv_head` CTAs share a KV head."""

    heads: int
    heads_per_cta: int
    ctas_per_kv_head: int


class _BackwardTensors(NamedTuple):
    """The tensors of one launch of the backward. q and dout may be the last heads; `lse_delta` is that of all."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse_delta: Tensor
    dk: Tensor
    dv: Tensor


def spreads_heads(tables: TileTable, config: BackwardConfig, num_ctas: int, num_sms: int) -> bool:
    """Return whether the query heads of a KV head have CTAs of their own, which add to the same dK and dV.

    They have where a CTA loops over many queries, and where there are so few CTAs that SMs would wait for the longest.

    Args:
        tables: The tiles of keys.
        config: The configuration of the launch.
        num_ctas: The number of CTAs if each loops over all query heads of a KV head.
        num_sms: The number of CTAs that run at a time.
    """
    if tables.mean_blocks * config.block_m >= MIN_QUERIES_TO_SPREAD:
        return True
    return tables.max_blocks * num_sms > MAX_IMBALANCE * tables.mean_blocks * num_ctas


def _launch_backward(
    launcher: Launcher, features: Features, tensors: _BackwardTensors, accumulate: bool, sums: DqSums | None,
    config: BackwardConfig, tables: TileTable, num_work: int, loops: _Loops,
) -> None:  # fmt: skip
    """Launch the Gluon backward over the first `num_work` tiles, ordered by group of heads and then by tile.

    `sums` are those of all heads.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout

    from meshflash.kernels.hopper.backward import backward as kernel
    from meshflash.kernels.hopper.gluon_compat import DEFAULT_REGISTER_ALLOCATION

    q, k, v, dout, lse_delta, dk, dv = tensors
    heads, heads_per_cta, ctas_per_kv_head = loops
    first_head = heads - q.shape[2]
    shifts = 1 if tables.aligned else 4
    flat = NVMMASharedLayout(0, 32, rank=2)
    lse_delta_descriptors = [descriptor(y[first_head * shifts :], [1, config.block_m], flat) for y in lse_delta]
    aligned = tma_aligned(dk) and tma_aligned(dv)
    tma_reduce_dkdv = (
        accumulate and sums is not None and config.tma_reduce_dkdv and not tables.partial_tiles and aligned
    )
    dkdv_sums = [_rows_descriptor(y, 64, 64) for y in (dk, dv)] if tma_reduce_dkdv else lse_delta_descriptors
    # at dim 64 the simpler allocation is 2% faster, except where it spills: in masked loops over heads
    loops_over_heads = heads_per_cta > 1 and (tables.lower or tables.upper)
    options = DEFAULT_REGISTER_ALLOCATION if q.shape[3] == 128 or loops_over_heads else {}
    launcher.keep(tables.tiles, tables.spans)
    launcher.launch(
        kernel,
        (len(tables), q.shape[2] // heads_per_cta),
        *(_rows_descriptor(q, config.block_m), *(_rows_descriptor(y, config.block_n // 2) for y in (k, v))),
        *(_rows_descriptor(dout, config.block_m), *lse_delta_descriptors),
        sums.make_descriptor(first_head) if sums else lse_delta_descriptors[0],
        *(*dkdv_sums, dk, dv, tables.tiles, tables.spans),
        *(num_work, heads, sums.tiles_per_head if sums else 0),
        *(*_scales(features), *dk.stride()[:3], *dv.stride()[:3]),
        HEADS_PER_CTA=heads_per_cta,
        CTAS_PER_KV_HEAD=ctas_per_kv_head,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        D=q.shape[3],
        STAGES=config.stages,
        SINGLE_RUN=tables.single_run,
        EXACT_BEGIN=tables.exact_begin,
        CLIPPED=tables.clipped,
        SPLIT_MASKED_LOOP=tables.splits_masked_loop and not config.rotate,
        LOWER=tables.lower,
        UPPER=tables.upper,
        SOFTCAP=features.softcap > 0,
        PARTIAL_TILES=tables.partial_tiles,
        ACCUMULATE=accumulate,
        TMA_REDUCE_DKDV=tma_reduce_dkdv,
        COMPUTE_DQ=sums is not None,
        DQ_TILED=sums is not None and sums.tiled,
        SHIFTED_LSE=shifts > 1,
        ROTATE=config.rotate if sums and tables.single_run else 0,
        PREFETCH_S=config.prefetch_s,
        CONSUMER_REGS=config.consumer_regs,
        PRODUCER_REGS=config.producer_regs,
        num_warps=4,
        **options,
    )


def _mean_keys_per_query(x: Inputs) -> float:
    """Return the mean number of keys that a query sees."""
    return x.work.pairs / (x.work.mask.batch_rows or 1) / x.q_BTHD.shape[1]


def backward_dq(
    launcher: Launcher, x: Inputs, rows: Rows, grads: Grads, config: BackwardDqConfig, tables: TileTable
) -> None:
    """Run the deterministic Gluon pass over a table of query tiles: dQ into `grads`."""
    from meshflash.kernels.hopper.backward_dq import bwd_dq as kernel

    q, lse, delta, dq = x.q_BTHD, rows.lse_BHT, rows.delta_BHT, grads.dq_BTHD
    launcher.keep(tables.tiles, tables.spans)
    launcher.launch(
        kernel,
        (len(tables), q.shape[2]),
        *(_rows_descriptor(q, config.rows), *(_rows_descriptor(y, config.block_n) for y in (x.k_BSKD, x.v_BSKE))),
        *(_rows_descriptor(rows.dout_BTHE, config.rows), lse, delta, dq, tables.tiles, tables.spans),
        *(*_scales(x.features), *lse.stride(), *delta.stride(), *dq.stride()[:3]),
        GQA_RATIO=q.shape[2] // x.k_BSKD.shape[2],
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        D=q.shape[3],
        STAGES=config.stages,
        SINGLE_RUN=tables.single_run,
        EXACT_BEGIN=tables.exact_begin,
        LOWER=tables.lower,
        UPPER=tables.upper,
        SOFTCAP=x.features.softcap > 0,
        ACCUMULATE=grads.add_dq,
        CONSUMER_REGS=config.consumer_regs,
        PRODUCER_REGS=config.producer_regs,
        num_warps=4,
    )


def _scales(features: Features) -> tuple[float, float, float]:
    """(scale, scale of base-2 scores, scale inside of tanh); with a softcap the second is that of capped scores."""
    scale, softcap = features.scale, features.softcap
    return (scale, softcap * LOG2E, scale / softcap) if softcap else (scale, scale * LOG2E, 0.0)


def _rows_descriptor(x_BTHD: Tensor, rows: int, columns: int | None = None) -> Any:
    """A TMA descriptor of a tensor, whose blocks are rows of one head."""
    x_BHTD = x_BTHD.permute(0, 2, 1, 3)
    return descriptor(x_BHTD, [1, 1, rows, columns or x_BTHD.shape[3]])


def descriptor(x: Tensor, block: list[int], layout: Any = None) -> Any:
    """Return a TMA descriptor of a tensor; blocks have a shared-memory layout, by default that of wgmma operands."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    layout = layout or gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), tma_strides(x), block, layout)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """Return a tile counter that is 0: one per stream, because launches of one stream do not overlap.

    The kernel's last CTA sets it back to 0. A captured graph gets its own counter: it may run beside others.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]


@cache
def num_sms(device: torch.device) -> int:
    """Return how many SMs a GPU has: as many persistent CTAs run on it."""
    return torch.cuda.get_device_properties(device).multi_processor_count
