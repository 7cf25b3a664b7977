"""dQ alone in Gluon, without sums in global memory: the second pass of a deterministic backward.

Warp-specialized: one TMA producer warp, two consumer warpgroups of 64 queries each. A warpgroup starts S of the next
block of keys beside dQ += dS K of this one, whose dS comes from registers. Each dQ is summed by one warpgroup, in the
order of the blocks, so two runs give the same bits.

Barriers: `q_full` completes when TMA has loaded Q and dO of the tile; `k_full`/`k_empty` and `v_full`/`v_empty` protect
the stages of K and V.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meshflash.kernels.hopper.common import (
    INF,
    LOG2E,
    barriers,
    load_kv_block,
    load_run,
    load_tile,
    mask_scores_by_side,
    next_block,
    softcap_slope,
    store_layout,
    tanh,
)
from meshflash.kernels.hopper.gluon_compat import copy_block


@gluon.jit
def _producer(q, k, v, dout, smem_q, smem_k, smem_v, smem_dout, q_full, k_full, k_empty, v_full, v_empty, TILES, RUNS,
              GQA_RATIO: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr):  # fmt: skip
    """TMA producer warp: load Q and dO once, then K and V block by block."""
    batch, row, _, _, _, run, num_n_blocks = load_tile(TILES, gl.program_id(0), SINGLE_RUN)
    head = gl.program_id(1)
    key_head = head // GQA_RATIO
    run_begin, blocks, run_end, band_lo, band_hi = load_run(RUNS, run)
    mbarrier.expect(q_full.index(0), 4 * ROWS * D * 2)  # bytes: Q and dO of two warpgroups, in half precision
    for w in gl.static_range(2):
        copy_block(q, [batch, head, row + w * ROWS, 0], q_full.index(0), smem_q.index(w))
        copy_block(dout, [batch, head, row + w * ROWS, 0], q_full.index(0), smem_dout.index(w))
    run_block = 0
    block = 0
    for n_block in range(num_n_blocks):
        run, run_block, run_begin, blocks, run_end, band_lo, band_hi, _first_new, block = next_block(
            n_block, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, BLOCK_N, SINGLE_RUN,
            EXACT_BEGIN
        )  # fmt: skip
        load_kv_block(
            k, v, smem_k, smem_v, k_full, k_empty, v_full, v_empty, batch, key_head, block, n_block, BLOCK_N, D, STAGES
        )
    # The last iteration of the consumers starts S of one block too many: its mbarrier must complete, or they hang.
    # Load the last block again; nothing reads that S.
    stage = num_n_blocks % STAGES
    mbarrier.wait(k_empty.index(stage), ((num_n_blocks // STAGES) & 1) ^ 1)
    mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
    copy_block(k, [batch, key_head, block, 0], k_full.index(stage), smem_k.index(stage))


@gluon.jit
def _consumer(LSE, DELTA, DQ, smem_q, smem_k, smem_v, smem_dout, q_full, k_full, k_empty, v_full, v_empty, TILES, RUNS,
              scale, scale2, inner_scale, l_b, l_h, l_t, d_b, d_h, d_t, dq_b, dq_t, dq_h, WG_ID: gl.constexpr,
              ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
              SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr,
              SOFTCAP: gl.constexpr, ACCUMULATE: gl.constexpr):  # fmt: skip
    """Consumer warpgroup WG_ID: dQ of 64 queries."""
    DTYPE: gl.constexpr = smem_q.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    batch, row, rows, first_pos, pos_step, run, num_n_blocks = load_tile(TILES, gl.program_id(0), SINGLE_RUN)
    b = batch.to(gl.int64)
    h = gl.program_id(1).to(gl.int64)
    run_begin, blocks, run_end, band_lo, band_hi = load_run(RUNS, run)
    m = WG_ID * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    at = (row + m).to(gl.int64)
    lse = gl.load(LSE + b * l_b + h * l_h + at * l_t, mask=m < rows, other=-INF)
    lse = gl.where(lse == -INF, INF, lse * LOG2E)  # P = 0 in rows that see nothing, or are not there
    delta = gl.load(DELTA + b * d_b + h * d_h + at * d_t, mask=m < rows, other=0.0)
    min_pos = first_pos + pos_step * (WG_ID * ROWS)
    max_pos = min_pos + pos_step * (ROWS - 1)
    positions = first_pos + pos_step * m
    q = smem_q.index(WG_ID).reshape([ROWS, D])
    dout = smem_dout.index(WG_ID).reshape([ROWS, D])
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    dq = gl.zeros([ROWS, D], gl.float32, DQ_LAYOUT)
    # prologue of the pipeline: S of the first block, which no earlier iteration has started
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, smem_k.index(0).reshape([BLOCK_N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    run_block = 0
    # Each iteration has S of its block already. It computes P and dS, adds to dQ, and starts S of the next block.
    for n_block in range(num_n_blocks):
        run, run_block, run_begin, blocks, run_end, band_lo, band_hi, first_new, block = next_block(
            n_block, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, BLOCK_N, SINGLE_RUN,
            EXACT_BEGIN
        )  # fmt: skip
        stage = n_block % STAGES
        mbarrier.wait(v_full.index(stage), (n_block // STAGES) & 1)
        v = smem_v.index(stage).reshape([BLOCK_N, D])
        # dP runs while this warpgroup computes P from the scores that the previous iteration started
        dp = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        if SOFTCAP:
            s = tanh(s * inner_scale)
        if LOWER or UPPER:
            s = mask_scores_by_side(
                s, positions, min_pos, max_pos, first_new, block, band_lo, band_hi, ROWS, BLOCK_N, LOWER, UPPER,
                EXACT_BEGIN, S_LAYOUT
            )  # fmt: skip
        p = gl.exp2(s * scale2 - lse[:, None])  # normalized: the LSE is that of all keys
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        mbarrier.arrive(v_empty.index(stage), count=1)  # dP was the only reader of V
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * softcap_slope(p, lse[:, None], scale2)
        ds = gl.convert_layout(ds.to(DTYPE), A_LAYOUT)
        dq_async = warpgroup_mma(ds, smem_k.index(stage).reshape([BLOCK_N, D]), dq, is_async=True)
        next_stage = (n_block + 1) % STAGES
        mbarrier.wait(k_full.index(next_stage), ((n_block + 1) // STAGES) & 1)
        k = smem_k.index(next_stage).reshape([BLOCK_N, D])
        # S of the next block queues behind dQ, so the tensor cores stay busy; its wait is the last of the loop
        s_async = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        # wgmma reads dS from registers: they must stay live until it completes, hence ds among the deps
        dq, ds = warpgroup_mma_wait(num_outstanding=1, deps=(dq_async, ds))
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s_async,))
    STORE_LAYOUT: gl.constexpr = store_layout(D)
    rows_out = WG_ID * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE_LAYOUT))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, STORE_LAYOUT))
    in_range = (rows_out < rows)[:, None]
    into = DQ + b * dq_b + h * dq_h + (row + rows_out).to(gl.int64)[:, None] * dq_t + columns[None, :]
    dq = dq * scale  # dS is the gradient of scale * q.k
    if ACCUMULATE:  # this warpgroup alone writes these rows: no atomics, so the sums keep their order
        dq = gl.convert_layout(dq, STORE_LAYOUT) + gl.load(into, mask=in_range, other=0.0)
        gl.store(into, dq.to(DQ.dtype.element_ty), mask=in_range)
    else:
        gl.store(into, gl.convert_layout(dq.to(DQ.dtype.element_ty), STORE_LAYOUT), mask=in_range)


@gluon.jit
def bwd_dq(q, k, v, dout, LSE, DELTA, DQ, TILES, RUNS, scale, scale2, inner_scale, l_b, l_h, l_t, d_b, d_h, d_t, dq_b,
           dq_t, dq_h, GQA_RATIO: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
           STAGES: gl.constexpr, SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr, LOWER: gl.constexpr,
           UPPER: gl.constexpr, SOFTCAP: gl.constexpr, ACCUMULATE: gl.constexpr, CONSUMER_REGS: gl.constexpr,
           PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """Compute dQ of one tile of queries and one head; `scale2` and `inner_scale` are those of `backward`."""
    DTYPE: gl.constexpr = q.dtype
    WG0: gl.constexpr = 0
    WG1: gl.constexpr = 1
    smem_q = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], q.layout)
    smem_dout = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], dout.layout)
    smem_k = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    smem_v = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], v.layout)
    q_full = barriers(1, 1)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (LSE, DELTA, DQ, smem_q, smem_k, smem_v, smem_dout, q_full, k_full, k_empty, v_full, v_empty, TILES,
                     RUNS, scale, scale2, inner_scale, l_b, l_h, l_t, d_b, d_h, d_t, dq_b, dq_t, dq_h, WG0, ROWS,
                     BLOCK_N, D, STAGES, SINGLE_RUN, EXACT_BEGIN, LOWER, UPPER, SOFTCAP, ACCUMULATE)),
        (_consumer, (LSE, DELTA, DQ, smem_q, smem_k, smem_v, smem_dout, q_full, k_full, k_empty, v_full, v_empty, TILES,
                     RUNS, scale, scale2, inner_scale, l_b, l_h, l_t, d_b, d_h, d_t, dq_b, dq_t, dq_h, WG1, ROWS,
                     BLOCK_N, D, STAGES, SINGLE_RUN, EXACT_BEGIN, LOWER, UPPER, SOFTCAP, ACCUMULATE)),
        (_producer, (q, k, v, dout, smem_q, smem_k, smem_v, smem_dout, q_full, k_full, k_empty, v_full, v_empty, TILES,
                     RUNS, GQA_RATIO, ROWS, BLOCK_N, D, STAGES, SINGLE_RUN, EXACT_BEGIN)),
    ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
