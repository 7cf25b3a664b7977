"""Warp-specialized backward in Gluon: one TMA producer warp, two consumer warpgroups of 64 of a tile's 128 keys each.

S^T = K Q^T has keys as rows, so P and dS go from registers straight into the wgmmas of dV and dK. dS also goes to
shared memory, where both warpgroups read all of it: each computes half of dQ over all 128 keys, and TMA adds that half
to float32 sums in global memory. The order of those additions changes from run to run, and so does that of dK and dV
where several CTAs add to them: this kernel is not deterministic, unless it leaves dQ to `backward_dq.py`.

With DEFER_DQ, dQ lags one block behind: a warpgroup multiplies the dS that the other one stored a block ago, so
neither waits for the other, and one computes exponentials while the other uses the tensor cores.

Barriers: `kv_full` completes when TMA has loaded K and V of the tile. `q_full`/`q_empty` protect the stages of Q and
lse, `dout_full`/`dout_empty` those of dO and delta. Four named barriers order dS between the two warpgroups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meshflash.kernels.hopper.common import (
    INF,
    NAMED_BARRIER,
    bar_arrive,
    bar_sync,
    barriers,
    begin_gqa_loop,
    block_start,
    buffer_rows,
    exp2_around_wait,
    load_run,
    load_tile,
    mask_scores,
    next_gqa_block,
    num_unmasked_blocks,
    softcap_slope,
    split_columns,
    store_layout,
    tanh,
)
from meshflash.kernels.hopper.gluon_compat import PACKS_DESCRIPTORS, add_block, copy_block, reinterpret


@gluon.constexpr_function
def hides_index(operand, dim, lower, upper, clipped, softcap, single_run, heads_per_cta, partial_tiles, accumulate):
    """Return whether `buffer_rows` hides the index of an operand of the main loop: "k, v", "q, dout" or "k of dq".

    Hidden indices prevent spills where registers are short; elsewhere most of them cost speed, by operand, mask and
    version of Triton (`PACKS_DESCRIPTORS`). docs/dev/kernels.md has the measurements behind each line.
    """
    masked = lower or upper
    loops_over_heads = masked and heads_per_cta > 1
    adds = partial_tiles or accumulate
    if dim == 64:
        if clipped or (masked and not single_run):
            return True
        if loops_over_heads:
            return not PACKS_DESCRIPTORS
        is_causal = lower and not upper and not adds
        return operand == ("q, dout" if is_causal else "k of dq")
    if clipped:
        return True
    if PACKS_DESCRIPTORS and softcap:
        return loops_over_heads or operand == "q, dout"
    if loops_over_heads:
        return operand != "k of dq" or (PACKS_DESCRIPTORS and adds)
    return operand == "q, dout" and PACKS_DESCRIPTORS and not masked and (adds or heads_per_cta > 1)


@gluon.constexpr_function
def starts_dv_first(defer_dq, dim, accumulate):
    """Return whether the wgmmas of dV start before dS is computed, not after it.

    After it, ptxas schedules the exponentials, dS and their conversions together. Measured in docs/dev/kernels.md.
    """
    return not defer_dq or (PACKS_DESCRIPTORS and dim == 128 and not accumulate)


@gluon.jit
def _producer(q, k, v, dout, lse, delta, smem_q, smem_k, smem_v, smem_dout, smem_lse, smem_delta, kv_full, q_full,
              q_empty, dout_full, dout_empty, TILES, RUNS, heads, HEADS_PER_CTA: gl.constexpr,
              CTAS_PER_KV_HEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
              STAGES: gl.constexpr, SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr, CLIPPED: gl.constexpr,
              SHIFTED_LSE: gl.constexpr, ROTATE: gl.constexpr, PREFETCH_S: gl.constexpr):  # fmt: skip
    """TMA producer warp: load K and V once, then Q, dO, lse and delta block by block.

    TMA loads must begin at multiples of 16 bytes, four float32 rows. Where blocks begin anywhere (SHIFTED_LSE), each
    row of lse and delta exists four times, shifted by 0 to 3 elements, and the copy that fits is read.
    """
    batch, row, rows, _, _, first_run, num_m_blocks = load_tile(TILES, gl.program_id(0), SINGLE_RUN)
    first_head = gl.program_id(1) * HEADS_PER_CTA
    key_head = gl.program_id(1) // CTAS_PER_KV_HEAD
    start = row + rows - BLOCK_N  # a tile of fewer keys begins earlier, and masks the keys before its own
    mbarrier.expect(kv_full.index(0), 2 * BLOCK_N * D * 2)  # bytes: K and V in half precision
    for w in gl.static_range(2):
        copy_block(k, [batch, key_head, start + w * (BLOCK_N // 2), 0], kv_full.index(0), smem_k.index(w))
        copy_block(v, [batch, key_head, start + w * (BLOCK_N // 2), 0], kv_full.index(0), smem_v.index(w))
    block = 0
    run = first_run
    run_begin, blocks, run_end, band_lo, band_hi = load_run(RUNS, run)
    head, run_block, head_end = begin_gqa_loop(first_head, blocks, num_m_blocks, HEADS_PER_CTA, SINGLE_RUN, ROTATE)
    q_loaded = 0
    for q_id in range(num_m_blocks * HEADS_PER_CTA):
        (
            head, head_end, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, _first_new, block
        ) = next_gqa_block(
            q_id, head, head_end, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, first_head,
            first_run, num_m_blocks, BLOCK_M, HEADS_PER_CTA, SINGLE_RUN, EXACT_BEGIN, CLIPPED, ROTATE
        )  # fmt: skip
        stage = q_loaded % STAGES
        phase = ((q_loaded // STAGES) & 1) ^ 1
        mbarrier.wait(q_empty.index(stage), phase)
        mbarrier.expect(
            q_full.index(stage), BLOCK_M * D * 2 + BLOCK_M * 4
        )  # bytes: Q in half precision, lse in float32
        copy_block(q, [batch, head, block, 0], q_full.index(stage), smem_q.index(stage))
        lse_row = batch * heads + head
        column = block
        if SHIFTED_LSE:
            lse_row = lse_row * 4 + block % 4
            column = block - block % 4
        copy_block(lse, [lse_row, column], q_full.index(stage), smem_lse.index(stage))
        mbarrier.wait(dout_empty.index(stage), phase)
        mbarrier.expect(dout_full.index(stage), BLOCK_M * D * 2 + BLOCK_M * 4)
        copy_block(dout, [batch, head, block, 0], dout_full.index(stage), smem_dout.index(stage))
        copy_block(delta, [lse_row, column], dout_full.index(stage), smem_delta.index(stage))
        q_loaded += 1
    if PREFETCH_S:  # the last iteration of the consumers starts S of one block too many, which reads this one
        stage = q_loaded % STAGES
        mbarrier.wait(q_empty.index(stage), ((q_loaded // STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), BLOCK_M * D * 2)
        copy_block(q, [batch, first_head, block, 0], q_full.index(stage), smem_q.index(stage))


@gluon.jit
def _signal_ds_stored(q_count, WG_ID: gl.constexpr):
    """Signal the other warpgroup: this one has stored dS of block `q_count`, and no longer reads the one before."""
    bar_arrive(NAMED_BARRIER + (q_count & 1) * 2 + 1 - WG_ID)


@gluon.jit
def _wait_ds_stored(q_count, WG_ID: gl.constexpr):
    """Wait until the other warpgroup has stored its dS of block `q_count`.

    Even and odd blocks have barriers of their own, because a warpgroup may run one block ahead of the other.
    """
    bar_sync(NAMED_BARRIER + (q_count & 1) * 2 + WG_ID)


@gluon.jit
def _ds_buffers(q_count, smem_ds):
    """Return the buffers of both warpgroups' dS of block `q_count`; even and odd blocks have buffers of their own."""
    return smem_ds.index((q_count & 1) * 2), smem_ds.index((q_count & 1) * 2 + 1)


@gluon.jit
def _start_dq(ds_0, ds_1, smem_k, WG_ID: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
              HIDE_DQ_K: gl.constexpr):  # fmt: skip
    """Start the wgmmas of this warpgroup's half of dQ = dS K, once both warpgroups have stored dS of the block."""
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    k_0 = buffer_rows(smem_k, 0, ROWS, D, HIDE_DQ_K)
    k_1 = buffer_rows(smem_k, 1, ROWS, D, HIDE_DQ_K)
    if BLOCK_M == 128:  # warpgroups split dQ by rows, else by columns; each half is 64 x 64
        ds_0 = ds_0.slice(WG_ID * 64, 64, dim=1)
        ds_1 = ds_1.slice(WG_ID * 64, 64, dim=1)
    else:
        k_0 = k_0.slice(WG_ID * 64, 64, dim=1)
        k_1 = k_1.slice(WG_ID * 64, 64, dim=1)
    zero = gl.zeros([64, 64], gl.float32, DQ_LAYOUT)
    dq_async = warpgroup_mma(ds_0.permute((1, 0)), k_0, zero, use_acc=False, is_async=True)
    return warpgroup_mma(ds_1.permute((1, 0)), k_1, dq_async, is_async=True)


@gluon.jit
def _stage_dq(dq_half, smem, scale, DQ_TILED: gl.constexpr):
    """Store half of a block's dQ to the shared memory from which TMA adds it."""
    if DQ_TILED:  # in register order: 16-byte stores, and one contiguous piece of 16 KiB for TMA
        ordered = gl.reshape(dq_half, [4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
        smem.store(gl.reshape(ordered, [16, 256]))
    else:
        smem.reshape([64, 64]).store(dq_half * scale)


@gluon.jit
def _dq_position(batch, head, heads, block, q_tiles_per_head, BLOCK_M: gl.constexpr, DQ_TILED: gl.constexpr):
    """Return where the dQ of a block is added: (index of its tile, head), or (first row, head) if not DQ_TILED."""
    if DQ_TILED:
        dq_at = (batch * heads + head) * q_tiles_per_head + block // BLOCK_M, head
    else:
        dq_at = block, head
    return dq_at


@gluon.jit
def _reduce_add_dq(dq, smem, dq_at, batch, WG_ID: gl.constexpr, BLOCK_M: gl.constexpr, DQ_TILED: gl.constexpr):
    """Start the TMA reduce-add of this warpgroup's half of a block's dQ to the sums in global memory."""
    place, head = dq_at
    if DQ_TILED:
        add_block(dq, [(place * 2 + WG_ID) * 16, 0], smem)
    elif BLOCK_M == 128:
        add_block(dq, [batch, head, place + WG_ID * 64, 0], smem)
    else:
        add_block(dq, [batch, head, place, WG_ID * 64], smem)


@gluon.jit
def _reduce_add_rows(x, sums, smem, batch, head, row):
    """Add 64 rows of dK or dV to their sums by TMA, 64 of 128 columns at a time, through the buffer of dQ."""
    left_half, right_half = split_columns(x, 64, 128)
    _reduce_add_columns(left_half, sums, smem, batch, head, row, 0)
    _reduce_add_columns(right_half, sums, smem, batch, head, row, 64)


@gluon.jit
def _reduce_add_columns(x, sums, smem, batch, head, row, column):
    tma.store_wait(pendings=0)  # TMA has read what the buffer held; this also syncs the threads
    smem.reshape([64, 64]).store(x)
    fence_async_shared()
    add_block(sums, [batch, head, row, column], smem)


@gluon.jit
def _process_block(dk, dv, s, dq_at, q_count, head, first_new, block, run_end, band_lo, band_hi, dq, smem, mbarriers,
                   keys, scalars, WG_ID: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
                   STAGES: gl.constexpr, EXACT_BEGIN: gl.constexpr, CLIPPED: gl.constexpr, LOWER: gl.constexpr,
                   UPPER: gl.constexpr, SOFTCAP: gl.constexpr, PARTIAL_TILES: gl.constexpr, COMPUTE_DQ: gl.constexpr,
                   DQ_TILED: gl.constexpr, PREFETCH_S: gl.constexpr, DEFER_DQ: gl.constexpr, DV_FIRST: gl.constexpr,
                   HIDE_K_V: gl.constexpr, HIDE_Q_DO: gl.constexpr, HIDE_DQ_K: gl.constexpr):  # fmt: skip
    """Process one block of queries: add its part to dK and dV, and half of its dQ to the sums.

    `q_count` counts the blocks so far; the stage of the pipeline and the mbarrier phase follow from it. With DEFER_DQ
    the dQ is that of the block before, for the place `dq_at`: the other warpgroup has stored its dS already. Returns
    dK, dV, the scores of the next block (with PREFETCH_S), and the place of this block's dQ.
    """
    smem_q, smem_dout, smem_lse, smem_delta, smem_ds, smem_dq_wg = smem
    q_full, q_empty, dout_full, dout_empty = mbarriers
    smem_k, smem_v, n, positions, min_pos, max_pos, pad_rows = keys
    batch, heads, q_tiles_per_head, scale, scale2, inner_scale = scalars
    DTYPE: gl.constexpr = smem_q.dtype
    # lse and delta take BLOCK_M / 4 registers each: for a large block they are loaded only when they are used
    LOAD_LSE_LATE: gl.constexpr = BLOCK_M == 128
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DKV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DKV_LAYOUT, 2)
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    k = buffer_rows(smem_k, WG_ID, ROWS, D, HIDE_K_V)
    v = buffer_rows(smem_v, WG_ID, ROWS, D, HIDE_K_V)
    stage = q_count % STAGES
    phase = (q_count // STAGES) & 1
    q = smem_q.index(stage).reshape([BLOCK_M, D])
    dout = smem_dout.index(stage).reshape([BLOCK_M, D])
    if COMPUTE_DQ and not DEFER_DQ:  # addresses computed here, not between wgmmas, where it cost 5 to 8% at dim 128
        ds_0, ds_1 = _ds_buffers(q_count, smem_ds)
    # 1. S^T = K Q^T and dP^T = V dO^T. With PREFETCH_S the previous block has computed S already.
    if PREFETCH_S:
        mbarrier.wait(dout_full.index(stage), phase)
        dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        mbarrier.wait(q_full.index(stage), phase)
        s_async = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        if not LOAD_LSE_LATE:  # overlaps with the wgmma; after it, the whole warpgroup would wait for this load
            lse = smem_lse.index(stage).reshape([BLOCK_M]).load(COLUMN_LAYOUT)
        mbarrier.wait(dout_full.index(stage), phase)
        dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s_async,))
    # 2. P = 2^(S - lse), while dP is still computed
    if SOFTCAP:
        s = tanh(s * inner_scale)
    s = mask_scores(
        s, positions, min_pos, max_pos, first_new, block, band_lo, band_hi, ROWS, BLOCK_M, LOWER, UPPER,
        EXACT_BEGIN, S_LAYOUT, run_end, CLIPPED
    )  # fmt: skip
    if PARTIAL_TILES:  # hide keys before the tile's own, which fill up a tile of fewer than BLOCK_N keys
        if pad_rows > WG_ID * ROWS:
            s = gl.where((n >= pad_rows)[:, None], s, -INF)
    if LOAD_LSE_LATE or PREFETCH_S:
        lse = smem_lse.index(stage).reshape([BLOCK_M]).load(COLUMN_LAYOUT)
    scores = s * scale2 - lse[None, :]
    # the mbarrier has completed already; waiting for it again ends a basic block. With a mask this would spill
    if LOAD_LSE_LATE and not (LOWER or UPPER or CLIPPED):
        p = exp2_around_wait(scores, dout_full.index(stage), phase, ROWS, BLOCK_M)
    else:
        p = gl.exp2(scores)
    if not LOAD_LSE_LATE:
        delta = smem_delta.index(stage).reshape([BLOCK_M]).load(COLUMN_LAYOUT)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    p_frag = gl.convert_layout(p.to(DTYPE), A_LAYOUT)
    if LOAD_LSE_LATE:
        delta = smem_delta.index(stage).reshape([BLOCK_M]).load(COLUMN_LAYOUT)
    dout = buffer_rows(smem_dout, stage, BLOCK_M, D, HIDE_Q_DO)
    if DV_FIRST:
        dv_async = warpgroup_mma(p_frag, dout, dv, is_async=True)
    # 3. dS = P (dP - delta): from registers to dK, and through shared memory to the dQ of both warpgroups
    ds = p * (dp - delta[None, :])
    if SOFTCAP:
        ds = ds * softcap_slope(p, lse[None, :], scale2)
    ds = ds.to(DTYPE)
    if COMPUTE_DQ:
        if DEFER_DQ:  # after this wait the other warpgroup no longer reads the buffer that dS goes to
            dq_here = _dq_position(batch, head, heads, block, q_tiles_per_head, BLOCK_M, DQ_TILED)
            _wait_ds_stored(q_count - 1, WG_ID)
            smem_ds.index((q_count & 1) * 2 + WG_ID).store(ds)
        elif WG_ID == 0:
            ds_0.store(ds)
        else:
            ds_1.store(ds)
    ds_frag = gl.convert_layout(ds, A_LAYOUT)
    if not DV_FIRST:
        dv_async = warpgroup_mma(p_frag, dout, dv, is_async=True)
    if COMPUTE_DQ:
        if DEFER_DQ:
            ds_0, ds_1 = _ds_buffers(q_count - 1, smem_ds)
        else:
            fence_async_shared()
            bar_sync(NAMED_BARRIER)  # one barrier is enough: a warpgroup one block ahead writes the other buffer
        dq_async = _start_dq(ds_0, ds_1, smem_k, WG_ID, BLOCK_M, ROWS, D, HIDE_DQ_K)
    # 4. dV += P dO, dK += dS Q and this warpgroup's half of dQ. dV completes before dK starts: with three wgmmas in
    # flight ptxas serializes them all.
    dv, p_frag = warpgroup_mma_wait(num_outstanding=2 if COMPUTE_DQ else 0, deps=(dv_async, p_frag))
    q_rows = buffer_rows(smem_q, stage, BLOCK_M, D, HIDE_Q_DO)
    dk_async = warpgroup_mma(ds_frag, q_rows, dk, is_async=True)
    if COMPUTE_DQ:
        tma.store_wait(pendings=0)  # TMA has read the previous dQ; the arrive below syncs the threads
    mbarrier.arrive(dout_empty.index(stage), count=1)
    if PREFETCH_S:
        next_stage = (q_count + 1) % STAGES
        mbarrier.wait(q_full.index(next_stage), ((q_count + 1) // STAGES) & 1)
        s_async = warpgroup_mma(
            k, smem_q.index(next_stage).reshape([BLOCK_M, D]).permute((1, 0)), zero, use_acc=False, is_async=True
        )
    # 5. Hand the half of dQ to TMA. It adds in the background, and the buffer is free again when it has read it.
    if COMPUTE_DQ:
        dq_half = warpgroup_mma_wait(num_outstanding=2 if PREFETCH_S else 1, deps=(dq_async,))
        _stage_dq(dq_half, smem_dq_wg, scale, DQ_TILED)
        fence_async_shared()
        if DEFER_DQ:
            _reduce_add_dq(dq, smem_dq_wg, dq_at, batch, WG_ID, BLOCK_M, DQ_TILED)
            _signal_ds_stored(q_count, WG_ID)
            dq_at = dq_here
        else:
            dq_here = _dq_position(batch, head, heads, block, q_tiles_per_head, BLOCK_M, DQ_TILED)
            _reduce_add_dq(dq, smem_dq_wg, dq_here, batch, WG_ID, BLOCK_M, DQ_TILED)
    if PREFETCH_S:
        dk, ds_frag = warpgroup_mma_wait(num_outstanding=1, deps=(dk_async, ds_frag))
        mbarrier.arrive(q_empty.index(stage), count=1)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s_async,))
    else:
        dk, ds_frag = warpgroup_mma_wait(num_outstanding=0, deps=(dk_async, ds_frag))
        mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv, s, dq_at


@gluon.jit
def _consumer(dq, dk_sums, dv_sums, DK, DV, smem_q, smem_k, smem_v, smem_dout, smem_lse, smem_delta, smem_ds, smem_dq,
              kv_full, q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, q_tiles_per_head, scale, scale2,
              inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, WG_ID: gl.constexpr, HEADS_PER_CTA: gl.constexpr,
              CTAS_PER_KV_HEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
              STAGES: gl.constexpr, SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr, CLIPPED: gl.constexpr,
              SPLIT_MASKED_LOOP: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr, SOFTCAP: gl.constexpr,
              PARTIAL_TILES: gl.constexpr, ACCUMULATE: gl.constexpr, TMA_REDUCE_DKDV: gl.constexpr,
              COMPUTE_DQ: gl.constexpr, DQ_TILED: gl.constexpr, ROTATE: gl.constexpr,
              PREFETCH_S: gl.constexpr):  # fmt: skip
    """Consumer warpgroup WG_ID: dK and dV of 64 keys over all blocks of queries, and half of each block's dQ."""
    ROWS: gl.constexpr = BLOCK_N // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DKV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    batch, row, rows, first_pos, pos_step, first_run, num_m_blocks = load_tile(TILES, gl.program_id(0), SINGLE_RUN)
    first_head = gl.program_id(1) * HEADS_PER_CTA
    key_head = gl.program_id(1) // CTAS_PER_KV_HEAD
    pad_rows = 0
    if PARTIAL_TILES:
        pad_rows = BLOCK_N - rows
    dk = gl.zeros([ROWS, D], gl.float32, DKV_LAYOUT)
    dv = gl.zeros([ROWS, D], gl.float32, DKV_LAYOUT)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    n = WG_ID * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    positions = first_pos + pos_step * (n - pad_rows)
    min_pos = first_pos + pos_step * (WG_ID * ROWS - pad_rows)
    max_pos = min_pos + pos_step * (ROWS - 1)
    mbarrier.wait(kv_full.index(0), 0)
    s = zero
    if PREFETCH_S:
        mbarrier.wait(q_full.index(0), 0)
        k = smem_k.index(WG_ID).reshape([ROWS, D])
        s = warpgroup_mma(k, smem_q.index(0).reshape([BLOCK_M, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    run = first_run
    run_begin, blocks, run_end, band_lo, band_hi = load_run(RUNS, run)
    head, run_block, head_end = begin_gqa_loop(first_head, blocks, num_m_blocks, HEADS_PER_CTA, SINGLE_RUN, ROTATE)
    smem = (smem_q, smem_dout, smem_lse, smem_delta, smem_ds, smem_dq.index(WG_ID))
    mbarriers = (q_full, q_empty, dout_full, dout_empty)
    keys = (smem_k, smem_v, n, positions, min_pos, max_pos, pad_rows)
    scalars = (batch, heads, q_tiles_per_head, scale, scale2, inner_scale)
    # DEFER_DQ needs registers: at dim 128 it is faster only where masked blocks have a loop of their own
    DEFER_DQ: gl.constexpr = BLOCK_M == 128 or (SPLIT_MASKED_LOOP and not SOFTCAP)
    DV_FIRST: gl.constexpr = starts_dv_first(DEFER_DQ, D, ACCUMULATE)
    HIDE_K_V: gl.constexpr = hides_index(
        "k, v", D, LOWER, UPPER, CLIPPED, SOFTCAP, SINGLE_RUN, HEADS_PER_CTA, PARTIAL_TILES, ACCUMULATE
    )
    HIDE_Q_DO: gl.constexpr = hides_index(
        "q, dout", D, LOWER, UPPER, CLIPPED, SOFTCAP, SINGLE_RUN, HEADS_PER_CTA, PARTIAL_TILES, ACCUMULATE
    )
    HIDE_DQ_K: gl.constexpr = hides_index(
        "k of dq", D, LOWER, UPPER, CLIPPED, SOFTCAP, SINGLE_RUN, HEADS_PER_CTA, PARTIAL_TILES, ACCUMULATE
    )
    dq_at = batch, key_head  # a placeholder of the right type: without DEFER_DQ nothing reads it
    if COMPUTE_DQ and DEFER_DQ:
        # prologue: store dS = 0 as that of a block before the first one; its dQ of 0 is added to a block of the run
        _, first_block = block_start(run_begin, 0, run_end, BLOCK_M, EXACT_BEGIN, CLIPPED)
        dq_at = _dq_position(batch, first_head, heads, first_block, q_tiles_per_head, BLOCK_M, DQ_TILED)
        smem_ds.index(2 + WG_ID).store(gl.zeros([ROWS, BLOCK_M], smem_q.dtype, S_LAYOUT))
        fence_async_shared()
        _signal_ds_stored(-1, WG_ID)
    if SPLIT_MASKED_LOOP:  # two loops: the first, with most of the blocks, has no branch for a mask
        num_unmasked = num_unmasked_blocks(rows, run_begin, num_m_blocks, band_lo, BLOCK_M, BLOCK_N)
        for gqa_head in range(HEADS_PER_CTA):
            head = first_head + gqa_head
            for m_block in range(num_unmasked):
                block = run_begin + (num_m_blocks - 1 - m_block) * BLOCK_M
                q_count = gqa_head * num_m_blocks + m_block
                dk, dv, s, dq_at = _process_block(
                    dk, dv, s, dq_at, q_count, head, block, block, run_end, band_lo, band_hi, dq, smem, mbarriers, keys,
                    scalars, WG_ID, BLOCK_M, ROWS, D, STAGES, EXACT_BEGIN, CLIPPED, False, False, SOFTCAP, False,
                    COMPUTE_DQ, DQ_TILED, PREFETCH_S, DEFER_DQ, DV_FIRST, HIDE_K_V, HIDE_Q_DO, HIDE_DQ_K
                )  # fmt: skip
            for m_block in range(num_unmasked, num_m_blocks):
                block = run_begin + (num_m_blocks - 1 - m_block) * BLOCK_M
                q_count = gqa_head * num_m_blocks + m_block
                dk, dv, s, dq_at = _process_block(
                    dk, dv, s, dq_at, q_count, head, block, block, run_end, band_lo, band_hi, dq, smem, mbarriers, keys,
                    scalars, WG_ID, BLOCK_M, ROWS, D, STAGES, EXACT_BEGIN, CLIPPED, LOWER, UPPER, SOFTCAP,
                    PARTIAL_TILES, COMPUTE_DQ, DQ_TILED, PREFETCH_S, DEFER_DQ, DV_FIRST, HIDE_K_V, HIDE_Q_DO, HIDE_DQ_K
                )  # fmt: skip
    else:
        for q_count in range(num_m_blocks * HEADS_PER_CTA):
            (
                head, head_end, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, first_new, block
            ) = next_gqa_block(
                q_count, head, head_end, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, first_head,
                first_run, num_m_blocks, BLOCK_M, HEADS_PER_CTA, SINGLE_RUN, EXACT_BEGIN, CLIPPED, ROTATE
            )  # fmt: skip
            dk, dv, s, dq_at = _process_block(
                dk, dv, s, dq_at, q_count, head, first_new, block, run_end, band_lo, band_hi, dq, smem, mbarriers, keys,
                scalars, WG_ID, BLOCK_M, ROWS, D, STAGES, EXACT_BEGIN, CLIPPED, LOWER, UPPER, SOFTCAP, PARTIAL_TILES,
                COMPUTE_DQ, DQ_TILED, PREFETCH_S, DEFER_DQ, DV_FIRST, HIDE_K_V, HIDE_Q_DO, HIDE_DQ_K
            )  # fmt: skip
    if COMPUTE_DQ and DEFER_DQ:  # epilogue: dQ of the last block
        _wait_ds_stored(num_m_blocks * HEADS_PER_CTA - 1, WG_ID)
        ds_0, ds_1 = _ds_buffers(num_m_blocks * HEADS_PER_CTA - 1, smem_ds)
        dq_async = _start_dq(ds_0, ds_1, smem_k, WG_ID, BLOCK_M, ROWS, D, HIDE_DQ_K)
        tma.store_wait(pendings=0)
        dq_half = warpgroup_mma_wait(num_outstanding=0, deps=(dq_async,))
        _stage_dq(dq_half, smem_dq.index(WG_ID), scale, DQ_TILED)
        fence_async_shared()
        _reduce_add_dq(dq, smem_dq.index(WG_ID), dq_at, batch, WG_ID, BLOCK_M, DQ_TILED)
    dk = dk * scale  # dS is the gradient of scale * q.k
    if TMA_REDUCE_DKDV:  # dQ needs its buffer no more: dK and dV leave through it
        smem = reinterpret(smem_dq, gl.float32, [2, 1, 1, 64, 64], dk_sums.layout).index(WG_ID)
        _reduce_add_rows(dk, dk_sums, smem, batch, key_head, row + WG_ID * ROWS)
        _reduce_add_rows(dv, dv_sums, smem, batch, key_head, row + WG_ID * ROWS)
    else:
        STORE_LAYOUT: gl.constexpr = store_layout(D)
        n_out = WG_ID * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE_LAYOUT))
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, STORE_LAYOUT))
        lse_row = (row + n_out - pad_rows).to(gl.int64)[:, None]
        in_range = (n_out >= pad_rows)[:, None]
        b = batch.to(gl.int64)
        h = key_head.to(gl.int64)
        dk_at = DK + b * dk_b + h * dk_h + lse_row * dk_t + columns[None, :]
        dv_at = DV + b * dv_b + h * dv_h + lse_row * dv_t + columns[None, :]
        if ACCUMULATE:  # atomics: several CTAs may add, and nothing here waits for the old values
            gl.atomic_add(dk_at, gl.convert_layout(dk, STORE_LAYOUT), mask=in_range, sem="relaxed")
            gl.atomic_add(dv_at, gl.convert_layout(dv, STORE_LAYOUT), mask=in_range, sem="relaxed")
        else:
            gl.store(dk_at, gl.convert_layout(dk.to(DK.dtype.element_ty), STORE_LAYOUT), mask=in_range)
            gl.store(dv_at, gl.convert_layout(dv.to(DV.dtype.element_ty), STORE_LAYOUT), mask=in_range)
    if COMPUTE_DQ:  # the CTA must not end, and free its shared memory, while TMA still reads from it
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_work", "heads", "q_tiles_per_head"])
def backward(q, k, v, dout, lse, delta, dq, dk_sums, dv_sums, DK, DV, TILES, RUNS, num_work, heads, q_tiles_per_head,
             scale, scale2, inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, HEADS_PER_CTA: gl.constexpr,
             CTAS_PER_KV_HEAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
             STAGES: gl.constexpr, SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr, CLIPPED: gl.constexpr,
             SPLIT_MASKED_LOOP: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr, SOFTCAP: gl.constexpr,
             PARTIAL_TILES: gl.constexpr, ACCUMULATE: gl.constexpr, TMA_REDUCE_DKDV: gl.constexpr,
             COMPUTE_DQ: gl.constexpr, DQ_TILED: gl.constexpr, SHIFTED_LSE: gl.constexpr, ROTATE: gl.constexpr,
             PREFETCH_S: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """Compute (dK, dV) of one tile of keys from HEADS_PER_CTA query heads, and with COMPUTE_DQ add its part of dQ.

    Of all tiles, ordered by group of heads and then by tile, it computes the first `num_work`. Where CTAS_PER_KV_HEAD
    CTAs share a KV head, they ACCUMULATE into the same sums: by atomics, or with TMA_REDUCE_DKDV by the descriptors
    `dk_sums` and `dv_sums`. `scale2` turns q.k into base-2 scores; with SOFTCAP it is that of the capped scores, and
    `inner_scale` the one inside of tanh. A tile of fewer than BLOCK_N keys begins earlier, even before the first row:
    keys before its own are masked. With SPLIT_MASKED_LOOP, the blocks of queries that a band crosses come last, in a
    loop of their own. DQ_TILED sums of dQ are not scaled, and lie in the register order that `gather_dq` reads.
    """
    gl.static_assert(
        CTAS_PER_KV_HEAD == 1 or (HEADS_PER_CTA == 1 and ACCUMULATE), "CTAs that share keys have a head each, and add"
    )
    gl.static_assert(
        not TMA_REDUCE_DKDV or (D == 128 and ACCUMULATE and COMPUTE_DQ and not PARTIAL_TILES),
        "TMA adds full tiles, through the buffer of dQ",
    )
    gl.static_assert(not (SPLIT_MASKED_LOOP and ROTATE), "split loops begin at the last block, as the producer does")
    if gl.program_id(1) * gl.num_programs(0) + gl.program_id(0) >= num_work:
        return
    DTYPE: gl.constexpr = q.dtype
    WG0: gl.constexpr = 0
    WG1: gl.constexpr = 1
    smem_q = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], q.layout)
    smem_dout = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], dout.layout)
    smem_k = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_N // 2, D], k.layout)
    smem_v = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_N // 2, D], v.layout)
    smem_lse = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse.layout)
    smem_delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N // 2, BLOCK_M], DTYPE)
    smem_ds = smem_q  # placeholders: without COMPUTE_DQ neither is used
    smem_dq = smem_q
    if COMPUTE_DQ:
        smem_ds = gl.allocate_shared_memory(DTYPE, [4, BLOCK_N // 2, BLOCK_M], DS_LAYOUT)
        if TMA_REDUCE_DKDV:  # allocated in the layout of dK and dV, which needs the larger alignment
            smem_dq = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], dk_sums.layout)
            if DQ_TILED:
                smem_dq = reinterpret(smem_dq, gl.float32, [2, 16, 256], dq.layout)
        elif DQ_TILED:
            smem_dq = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq.layout)
        else:
            smem_dq = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], dq.layout)
    kv_full = barriers(1, 1)
    q_full, q_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    dout_full, dout_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (dq, dk_sums, dv_sums, DK, DV, smem_q, smem_k, smem_v, smem_dout, smem_lse, smem_delta, smem_ds,
                     smem_dq, kv_full, q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, q_tiles_per_head,
                     scale, scale2, inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, WG0, HEADS_PER_CTA,
                     CTAS_PER_KV_HEAD, BLOCK_M, BLOCK_N, D, STAGES, SINGLE_RUN, EXACT_BEGIN, CLIPPED, SPLIT_MASKED_LOOP,
                     LOWER, UPPER, SOFTCAP, PARTIAL_TILES, ACCUMULATE, TMA_REDUCE_DKDV, COMPUTE_DQ, DQ_TILED, ROTATE,
                     PREFETCH_S)),
        (_consumer, (dq, dk_sums, dv_sums, DK, DV, smem_q, smem_k, smem_v, smem_dout, smem_lse, smem_delta, smem_ds,
                     smem_dq, kv_full, q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, q_tiles_per_head,
                     scale, scale2, inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, WG1, HEADS_PER_CTA,
                     CTAS_PER_KV_HEAD, BLOCK_M, BLOCK_N, D, STAGES, SINGLE_RUN, EXACT_BEGIN, CLIPPED, SPLIT_MASKED_LOOP,
                     LOWER, UPPER, SOFTCAP, PARTIAL_TILES, ACCUMULATE, TMA_REDUCE_DKDV, COMPUTE_DQ, DQ_TILED, ROTATE,
                     PREFETCH_S)),
        (_producer, (q, k, v, dout, lse, delta, smem_q, smem_k, smem_v, smem_dout, smem_lse, smem_delta, kv_full,
                     q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, HEADS_PER_CTA, CTAS_PER_KV_HEAD,
                     BLOCK_M, BLOCK_N, D, STAGES, SINGLE_RUN, EXACT_BEGIN, CLIPPED, SHIFTED_LSE, ROTATE, PREFETCH_S)),
    ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
