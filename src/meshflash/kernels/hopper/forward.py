"""Warp-specialized persistent forward in Gluon: one TMA producer warp, two or three consumer warpgroups of 64 queries.

For each block of keys, a consumer warpgroup issues S = Q K^T of this block, then O += P V of the block before, and
computes the softmax of S while the second wgmma runs. Where a tile has a single run, it skips blocks that its own rows
do not see.

CTAs are persistent. Each takes a tile of queries and a head, the heaviest first, from a global counter, in sections of
heads whose K and V fit the L2 cache. Tiles of equal work go round-robin instead, and those of the tail wave may be
split along the keys (split-KV). docs/dev/kernels.md says what was measured, and why it is so.

Barriers: `x_full` completes when TMA has filled a buffer of x, and consumers wait for it. Consumers arrive on `x_empty`
when they no longer read the buffer, and the producer waits for it before the next load.
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
    LN2,
    LOG2E,
    MIN_ROW_MAX,
    NAMED_BARRIER,
    bar_arrive,
    bar_sync,
    barriers,
    exp2_around_wait,
    load_kv_block,
    load_run,
    load_tile,
    mask_scores_by_side,
    next_block,
    next_work_id,
    publish_work,
    receive_work,
    store_layout,
    tanh,
)
from meshflash.kernels.hopper.gluon_compat import copy_block, store_block


@gluon.jit
def _locate_tile(work_id, tiles, heads, section_heads, num_full_tiles, SPLIT_KV: gl.constexpr):
    """Return the tile and the head of a work item.

    Sections of `section_heads` heads come one after another; within a section all heads of a tile come before the next
    tile. With SPLIT_KV a section is one head. Work items from `num_full_tiles` on are splits of tiles of the last head,
    which the table holds behind all tiles.
    """
    if SPLIT_KV:
        head = work_id // tiles
        tile = gl.where(work_id < num_full_tiles, work_id - head * tiles, work_id - num_full_tiles + tiles)
        head = gl.minimum(head, heads - 1)
    else:
        section_work = section_heads * tiles
        section_id = work_id // section_work
        rest_id = work_id - section_id * section_work
        heads_here = gl.minimum(section_heads, heads - section_id * section_heads)
        tile, head = rest_id // heads_here, section_id * section_heads + rest_id % heads_here
    return tile, head


@gluon.jit
def _producer(q, k, v, carry, smem_q, smem_k, smem_v, smem_o, q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full,
              o_empty, smem_next, next_full, next_empty, COUNTER, TILES, RUNS, tiles, heads, section_heads,
              num_full_tiles, num_work, GQA_RATIO: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
              D: gl.constexpr, STAGES: gl.constexpr, NUM_CONSUMER_WGS: gl.constexpr, SINGLE_RUN: gl.constexpr,
              EXACT_BEGIN: gl.constexpr, DYNAMIC: gl.constexpr, TMA_CARRY: gl.constexpr,
              SPLIT_KV: gl.constexpr):  # fmt: skip
    """TMA producer warp: load Q of each tile, then K and V block by block, then the (out, lse) that is carried in."""
    kv_loaded = 0
    num_done = 0
    work_id = gl.program_id(0)
    while work_id < num_work:
        next_id = next_work_id(COUNTER, work_id, num_work, DYNAMIC)  # one tile ahead: it hides the atomic's latency
        tile, head = _locate_tile(work_id, tiles, heads, section_heads, num_full_tiles, SPLIT_KV)
        batch, row, _, _, _, run, num_n_blocks = load_tile(TILES, tile, SINGLE_RUN)
        key_head = head // GQA_RATIO
        run_begin, blocks, run_end, band_lo, band_hi = load_run(RUNS, run)
        # Each warpgroup has a Q buffer and mbarriers of its own: a fast one gets its next Q while others still compute.
        for w in gl.static_range(NUM_CONSUMER_WGS):
            # Phases alternate by tile. A new mbarrier counts as having completed the phase before its first, so the
            # wait of the first tile, for parity 1, passes at once.
            mbarrier.wait(q_empty.index(w), (num_done & 1) ^ 1)
            mbarrier.expect(q_full.index(w), ROWS * D * 2)  # bytes, in half precision
            copy_block(q, [batch, head, row + w * ROWS, 0], q_full.index(w), smem_q.index(w))
        run_block = 0
        for n_block in range(num_n_blocks):
            run, run_block, run_begin, blocks, run_end, band_lo, band_hi, _first_new, block = next_block(
                n_block, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, BLOCK_N, SINGLE_RUN,
                EXACT_BEGIN
            )  # fmt: skip
            load_kv_block(
                k, v, smem_k, smem_v, k_full, k_empty, v_full, v_empty, batch, key_head, block, kv_loaded,
                BLOCK_N, D, STAGES
            )  # fmt: skip
            kv_loaded += 1
        if TMA_CARRY:  # into the output's buffer, once the consumer says that the previous results have left it
            for w in gl.static_range(NUM_CONSUMER_WGS):
                mbarrier.wait(o_empty.index(w), num_done & 1)
                mbarrier.expect(o_full.index(w), ROWS * D * 4)  # bytes: the carry is float32
                copy_block(carry, [batch, head, row + w * ROWS, 0], o_full.index(w), smem_o.index(w))
        if DYNAMIC:  # consumers cannot read the counter themselves: each would take a work item of its own
            publish_work(smem_next, next_full.index(0), next_empty.index(0), next_id, num_done)
        num_done += 1
        work_id = next_id


@gluon.jit
def _online_softmax(s, row_max, lane_sums, scale, full, phase, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
                    ROW_LAYOUT: gl.constexpr):  # fmt: skip
    """One step of the online softmax: return P, the factor alpha for older sums, the new row maximum, and the row sums.

    Row sums stay one for each lane; they are reduced once, after the last block. The sum of a block begins with the
    older sums, so alpha is needed first, and O is scaled by it while the exponentials run. With the older sums added
    last, ptxas would compute alpha last, and scale O after all exponentials.
    """
    # reduce over registers first: two chains for each row, half as long as one
    block_max = gl.max(gl.max(gl.reshape(s, [ROWS, BLOCK_N // 8, 8]), 1), 1)
    block_max = gl.convert_layout(block_max, ROW_LAYOUT) * scale
    new_max = gl.maximum(row_max, block_max)
    alpha = gl.exp2(row_max - new_max)
    p = exp2_around_wait(s * scale - new_max[:, None], full, phase, ROWS, BLOCK_N)
    p_by_lane = gl.reshape(p, [ROWS, BLOCK_N // 8, 8])
    layout: gl.constexpr = p_by_lane.type.layout
    is_first_column = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) == 0
    older_sums = lane_sums * gl.convert_layout(alpha, gl.SliceLayout(1, lane_sums.type.layout))[:, None]
    p_by_lane = gl.where(is_first_column[None, :][:, :, None], p_by_lane + older_sums[:, None, :], p_by_lane)
    lane_sums = gl.sum(p_by_lane, 1)
    return p, alpha, new_max, lane_sums


@gluon.jit
def _visible_blocks(rows, min_pos, max_pos, run_begin, num_n_blocks, band_lo, band_hi, WG_ID: gl.constexpr,
                    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr):  # fmt: skip
    """Split the blocks of a single run for one warpgroup: (skipped before, visible to its rows, skipped after).

    At least one block counts as visible, because rows that see nothing are written too. A warpgroup without rows takes
    the last block.
    """
    before = 0
    after = 0
    if UPPER:  # blocks are walked from the last to the first
        before = gl.maximum(num_n_blocks - 1 - (gl.maximum(max_pos + band_hi, run_begin) - run_begin) // BLOCK_N, 0)
    if WG_ID > 0:
        before = gl.where(rows > WG_ID * ROWS, before, num_n_blocks - 1)
    if LOWER and WG_ID * ROWS >= BLOCK_N:  # for others nothing: a run begins where its first row sees
        after = gl.minimum((gl.maximum(min_pos + band_lo, run_begin) - run_begin) // BLOCK_N, num_n_blocks - 1 - before)
    return before, num_n_blocks - before - after, after


@gluon.jit
def _skip_blocks(num_n_blocks, kv_count, k_full, k_empty, v_full, v_empty, STAGES: gl.constexpr, WG_ID: gl.constexpr,
                 NUM_CONSUMER_WGS: gl.constexpr, PINGPONG: gl.constexpr):  # fmt: skip
    """Release blocks that this warpgroup does not read, and return the new count of consumed blocks.

    It waits for each block first. Without the wait it could arrive twice on an `empty` mbarrier in one phase, in place
    of a warpgroup that still reads the buffer. Under PINGPONG it also releases the barrier of the next warpgroup, which
    would wait forever otherwise.
    """
    for _ in range(num_n_blocks):
        stage = kv_count % STAGES
        phase = (kv_count // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        if PINGPONG:
            bar_sync(NAMED_BARRIER + WG_ID)
            bar_arrive(NAMED_BARRIER + (WG_ID + 1) % NUM_CONSUMER_WGS)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        kv_count += 1
    return kv_count


@gluon.jit
def _consumer(o, OUT, LSE, PARTIAL_OUT, PARTIAL_LSE, CARRY, CARRY_LSE, SINKS, smem_o, smem_q, smem_k, smem_v, q_full,
              q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, smem_next, next_full, next_empty, TILES, RUNS,
              tiles, heads, section_heads, num_full_tiles, num_work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h,
              l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, WG_ID: gl.constexpr, GQA_RATIO: gl.constexpr, ROWS: gl.constexpr,
              BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, NUM_CONSUMER_WGS: gl.constexpr,
              SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr, DYNAMIC: gl.constexpr, LOWER: gl.constexpr,
              UPPER: gl.constexpr, MASK_FIRST_ONLY: gl.constexpr, SOFTCAP: gl.constexpr, HAS_CARRY: gl.constexpr,
              HAS_SINKS: gl.constexpr, TMA_STORE: gl.constexpr, TMA_CARRY: gl.constexpr, PINGPONG: gl.constexpr,
              SPLIT_KV: gl.constexpr):  # fmt: skip
    """Consumer warpgroup WG_ID: 64 rows of each tile.

    Under PINGPONG, warpgroups issue the wgmmas of a block one after another: each waits at its named barrier, issues,
    and then releases the barrier of the next one. So one computes exponentials while another uses the tensor cores.
    """
    DTYPE: gl.constexpr = smem_q.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    q = smem_q.index(WG_ID).reshape([ROWS, D])
    m = WG_ID * ROWS + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    kv_count = 0
    num_done = 0
    work_id = gl.program_id(0)
    if PINGPONG and WG_ID == NUM_CONSUMER_WGS - 1:
        bar_arrive(NAMED_BARRIER)  # warpgroup 0 goes first: release its barrier, which no wgmma has yet
    while work_id < num_work:
        tile, head = _locate_tile(work_id, tiles, heads, section_heads, num_full_tiles, SPLIT_KV)
        batch, row, rows, first_pos, pos_step, run, num_n_blocks = load_tile(TILES, tile, SINGLE_RUN)
        run_begin, blocks, run_end, band_lo, band_hi = load_run(RUNS, run)
        min_pos = first_pos + pos_step * (WG_ID * ROWS)
        max_pos = first_pos + pos_step * (gl.minimum(rows, (WG_ID + 1) * ROWS) - 1)
        if SINGLE_RUN:
            skipped, num_n_blocks, after = _visible_blocks(
                rows, min_pos, max_pos, run_begin, num_n_blocks, band_lo, band_hi, WG_ID, ROWS, BLOCK_N, LOWER, UPPER
            )
            kv_count = _skip_blocks(
                skipped, kv_count, k_full, k_empty, v_full, v_empty, STAGES, WG_ID, NUM_CONSUMER_WGS, PINGPONG
            )
            blocks -= skipped
        positions = first_pos + pos_step * m
        # state of the online softmax: row maxima and sums so far, and O relative to these maxima
        row_max = gl.full([ROWS], MIN_ROW_MAX, gl.float32, ROW_LAYOUT)
        lane_sums = gl.sum(gl.reshape(zero, [ROWS, BLOCK_N // 8, 8]), 1)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        run_block = 0
        # first block, the prologue of the pipeline: S and softmax, but no P V of a block before
        run, run_block, run_begin, blocks, run_end, band_lo, band_hi, first_new, block = next_block(
            0, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, BLOCK_N, SINGLE_RUN, EXACT_BEGIN
        )
        mbarrier.wait(q_full.index(WG_ID), num_done & 1)
        stage = kv_count % STAGES
        mbarrier.wait(k_full.index(stage), (kv_count // STAGES) & 1)
        if PINGPONG:
            bar_sync(NAMED_BARRIER + WG_ID)
        s = warpgroup_mma(
            q, smem_k.index(stage).reshape([BLOCK_N, D]).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if PINGPONG:
            bar_arrive(NAMED_BARRIER + (WG_ID + 1) % NUM_CONSUMER_WGS)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        if SOFTCAP:
            s = tanh(s * inner_scale)
        if LOWER or UPPER:
            s = mask_scores_by_side(
                s, positions, min_pos, max_pos, first_new, block, band_lo, band_hi, ROWS, BLOCK_N, LOWER, UPPER,
                EXACT_BEGIN, S_LAYOUT
            )  # fmt: skip
        p, _alpha, row_max, lane_sums = _online_softmax(
            s, row_max, lane_sums, scale, v_full.index(stage), (kv_count // STAGES) & 1, ROWS, BLOCK_N, ROW_LAYOUT
        )
        p_frag = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
        kv_count += 1
        if TMA_CARRY:
            tma.store_wait(pendings=0)  # TMA has read the previous tile's results: the buffer may take the carry
            mbarrier.arrive(o_empty.index(WG_ID), count=1)
        # main loop, one for masked and unmasked blocks: two loops would hold P in different registers, and move it
        for n_block in range(1, num_n_blocks):
            run, run_block, run_begin, blocks, run_end, band_lo, band_hi, first_new, block = next_block(
                n_block, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, BLOCK_N, SINGLE_RUN,
                EXACT_BEGIN
            )  # fmt: skip
            stage = kv_count % STAGES
            before = (kv_count - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (kv_count // STAGES) & 1)
            if PINGPONG:
                bar_sync(NAMED_BARRIER + WG_ID)
            s = warpgroup_mma(
                q, smem_k.index(stage).reshape([BLOCK_N, D]).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            # P V of the block before queues behind S, and runs while this warpgroup computes the softmax of S
            acc_async = warpgroup_mma(p_frag, smem_v.index(before).reshape([BLOCK_N, D]), acc, is_async=True)
            if PINGPONG:
                bar_arrive(NAMED_BARRIER + (WG_ID + 1) % NUM_CONSUMER_WGS)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            if SOFTCAP:
                s = tanh(s * inner_scale)
            if (LOWER or UPPER) and not MASK_FIRST_ONLY:
                s = mask_scores_by_side(
                    s, positions, min_pos, max_pos, first_new, block, band_lo, band_hi, ROWS, BLOCK_N, LOWER, UPPER,
                    EXACT_BEGIN, S_LAYOUT
                )  # fmt: skip
            p, alpha, row_max, lane_sums = _online_softmax(
                s, row_max, lane_sums, scale, v_full.index(stage), (kv_count // STAGES) & 1, ROWS, BLOCK_N, ROW_LAYOUT
            )
            # wgmma reads P from registers: they must stay live until it completes, hence p_frag among the deps
            acc, p_frag, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_async, p_frag, p))
            mbarrier.arrive(v_empty.index(before), count=1)
            p_frag = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            kv_count += 1
        mbarrier.arrive(q_empty.index(WG_ID), count=1)  # no more S of this tile: the next Q may load
        b = batch.to(gl.int64)
        h = head.to(gl.int64)
        stored_rows = rows
        if SPLIT_KV:  # splits store partial results elsewhere; `combine` adds the carry, so its weight is 0 here
            stored_rows = gl.where(work_id < num_full_tiles, rows, 0)
        in_range = m < stored_rows
        if HAS_CARRY:  # this load overlaps with the last P V
            lse_at = CARRY_LSE + b * cl_b + h * cl_h + (row + m).to(gl.int64) * cl_t
            old_lse = gl.load(lse_at, mask=in_range, other=-INF)
        before = (kv_count - 1) % STAGES
        acc_async = warpgroup_mma(p_frag, smem_v.index(before).reshape([BLOCK_N, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_async,))  # at once: P's registers stay
        mbarrier.arrive(v_empty.index(before), count=1)
        if SINGLE_RUN:
            kv_count = _skip_blocks(
                after, kv_count, k_full, k_empty, v_full, v_empty, STAGES, WG_ID, NUM_CONSUMER_WGS, PINGPONG
            )
        # epilogue: reduce the row sums over lanes, merge the carry and the sink, and normalize
        row_sum = gl.convert_layout(gl.sum(lane_sums, 1), ROW_LAYOUT)
        OUT_LAYOUT: gl.constexpr = O_LAYOUT if TMA_STORE else store_layout(D)
        if HAS_CARRY:
            acc = gl.convert_layout(acc, OUT_LAYOUT)
        OUT_ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        rows_o = WG_ID * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT_LAYOUT))
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, OUT_LAYOUT))
        in_range_o = (rows_o < stored_rows)[:, None]
        if HAS_CARRY:
            old_max = old_lse * LOG2E
            new_max = gl.maximum(row_max, old_max)
            alpha = gl.exp2(row_max - new_max)
            weight = gl.exp2(old_max - new_max)
            # out = (acc * 2^(row_max - new_max) + old * 2^(old_max - new_max)) / the sum of both weights: the carry is
            # normalized, so its weight counts as its row sum
            if TMA_CARRY:
                mbarrier.wait(o_full.index(WG_ID), num_done & 1)
                old = smem_o.index(WG_ID).reshape([ROWS, D]).load(O_LAYOUT)
            else:
                at = (row + rows_o).to(gl.int64)[:, None] * c_t + columns[None, :]
                old = gl.load(CARRY + b * c_b + h * c_h + at, mask=in_range_o, other=0.0)
            acc = acc * gl.convert_layout(alpha, OUT_ROW_LAYOUT)[:, None]
            acc += old * gl.convert_layout(weight, OUT_ROW_LAYOUT)[:, None]
            row_sum = row_sum * alpha + weight
            row_max = new_max
        if HAS_SINKS:
            sink = gl.load(SINKS + head).to(gl.float32) * LOG2E
            new_max = gl.maximum(row_max, sink)
            alpha = gl.exp2(row_max - new_max)
            acc = acc * gl.convert_layout(alpha, OUT_ROW_LAYOUT)[:, None]
            row_sum = row_sum * alpha + gl.exp2(sink - new_max)
            row_max = new_max
        # Rows that see no key get out = 0 and LSE = -inf, and never NaN.
        empty = row_sum == 0.0
        row_sum = gl.where(empty, 1.0, row_sum)
        lse = gl.where(empty, -INF, (row_max + gl.log2(row_sum)) * LN2)
        acc = acc * gl.convert_layout(gl.where(empty, 0.0, 1.0 / row_sum), OUT_ROW_LAYOUT)[:, None]
        if SPLIT_KV:
            if work_id >= num_full_tiles:
                base = (work_id - num_full_tiles) * (NUM_CONSUMER_WGS * ROWS)
                partial_at = PARTIAL_OUT + (base + rows_o)[:, None] * D + columns[None, :]
                gl.store(partial_at, gl.convert_layout(acc, OUT_LAYOUT))
                gl.store(PARTIAL_LSE + base + m, lse)
        if TMA_STORE:
            if stored_rows > WG_ID * ROWS:
                if not TMA_CARRY:
                    tma.store_wait(pendings=0)  # TMA has read the previous tile's results; also syncs the threads
                smem_o.index(WG_ID).reshape([ROWS, D]).store(acc.to(o.dtype))
                fence_async_shared()  # TMA reads through the async proxy, which does not see these stores otherwise
                store_block(o, [batch, head, row + WG_ID * ROWS, 0], smem_o.index(WG_ID))
        else:
            at = (row + rows_o).to(gl.int64)[:, None] * o_t + columns[None, :]
            result = gl.convert_layout(acc.to(OUT.dtype.element_ty), OUT_LAYOUT)
            gl.store(OUT + b * o_b + h * o_h + at, result, mask=in_range_o)
        gl.store(LSE + b * l_b + h * l_h + (row + m).to(gl.int64) * l_t, lse, mask=in_range)
        if DYNAMIC:
            work_id = receive_work(smem_next, next_full.index(0), next_empty.index(0), num_done)
        else:
            work_id = work_id + gl.num_programs(0)
        num_done += 1
    if TMA_STORE:  # the CTA must not end, and free its shared memory, while TMA still reads the last results
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["tiles", "heads", "section_heads", "num_full_tiles", "num_work"])
def forward(q, k, v, o, carry, OUT, LSE, PARTIAL_OUT, PARTIAL_LSE, CARRY, CARRY_LSE, SINKS, COUNTER, TILES, RUNS, tiles,
            heads, section_heads, num_full_tiles, num_work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h, l_t, c_b,
            c_t, c_h, cl_b, cl_h, cl_t, GQA_RATIO: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
            D: gl.constexpr, STAGES: gl.constexpr, NUM_CONSUMER_WGS: gl.constexpr, SINGLE_RUN: gl.constexpr,
            EXACT_BEGIN: gl.constexpr, DYNAMIC: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr,
            MASK_FIRST_ONLY: gl.constexpr, SOFTCAP: gl.constexpr, HAS_CARRY: gl.constexpr,
            HAS_SINKS: gl.constexpr, TMA_STORE: gl.constexpr, TMA_CARRY: gl.constexpr, PINGPONG: gl.constexpr,
            SPLIT_KV: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr):  # fmt: skip
    """Compute (out, lse) of all tiles and heads.

    `scale` turns q.k into base-2 scores; with SOFTCAP it is that of the capped scores, and `inner_scale` the one inside
    of tanh. With TMA_STORE, each warpgroup has 64 rows of a tile or none, and TMA stores results by the descriptor `o`.
    With TMA_CARRY, TMA also loads the carry, by the descriptor `carry`, into the buffer that results leave from.
    MASK_FIRST_ONLY: a band crosses at most the first block of a warpgroup's rows, so the main loop has no mask. With
    SPLIT_KV, work items from `num_full_tiles` on store partial results of their own, (PARTIAL_OUT, PARTIAL_LSE).
    """
    plain: gl.constexpr = SINGLE_RUN and EXACT_BEGIN and not (DYNAMIC or LOWER or UPPER or HAS_SINKS)
    gl.static_assert(plain or not SPLIT_KV, "split tiles have equal work, no mask and no sinks")
    DTYPE: gl.constexpr = q.dtype
    WG0: gl.constexpr = 0  # a literal in an argument tuple would not be a constexpr
    WG1: gl.constexpr = 1
    WG2: gl.constexpr = 2
    smem_q = gl.allocate_shared_memory(DTYPE, [NUM_CONSUMER_WGS, 1, 1, ROWS, D], q.layout)
    smem_k = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    smem_v = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], v.layout)
    smem_o = smem_q  # a placeholder: without TMA_STORE nothing uses it
    if TMA_STORE:
        smem_o = gl.allocate_shared_memory(o.dtype, [NUM_CONSUMER_WGS, 1, 1, ROWS, D], o.layout)
    smem_next = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(NUM_CONSUMER_WGS, 1), barriers(NUM_CONSUMER_WGS, 1)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, NUM_CONSUMER_WGS)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, NUM_CONSUMER_WGS)
    # Placeholders, not idle mbarriers: Triton gives the memory of an mbarrier that nothing uses to scratch data, and
    # the GPU writes the mbarrier's state back over it after a preemption (seen on an H200 shared by time slicing).
    o_full, o_empty, next_full, next_empty = q_full, q_empty, q_full, q_empty
    if TMA_CARRY:
        o_full, o_empty = barriers(NUM_CONSUMER_WGS, 1), barriers(NUM_CONSUMER_WGS, 1)
    if DYNAMIC:
        next_full, next_empty = barriers(1, 1), barriers(1, NUM_CONSUMER_WGS)
    fence_async_shared()
    # argument lists stay spelled out: constexprs in a tuple that has a name would become runtime values
    if NUM_CONSUMER_WGS == 2:
        gl.warp_specialize([
            (_consumer, (o, OUT, LSE, PARTIAL_OUT, PARTIAL_LSE, CARRY, CARRY_LSE, SINKS, smem_o, smem_q, smem_k, smem_v,
                         q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, smem_next, next_full,
                         next_empty, TILES, RUNS, tiles, heads, section_heads, num_full_tiles, num_work, scale,
                         inner_scale, o_b, o_t, o_h, l_b, l_h, l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, WG0, GQA_RATIO,
                         ROWS, BLOCK_N, D, STAGES, NUM_CONSUMER_WGS, SINGLE_RUN, EXACT_BEGIN, DYNAMIC, LOWER, UPPER,
                         MASK_FIRST_ONLY, SOFTCAP, HAS_CARRY, HAS_SINKS, TMA_STORE, TMA_CARRY, PINGPONG, SPLIT_KV)),
            (_consumer, (o, OUT, LSE, PARTIAL_OUT, PARTIAL_LSE, CARRY, CARRY_LSE, SINKS, smem_o, smem_q, smem_k, smem_v,
                         q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, smem_next, next_full,
                         next_empty, TILES, RUNS, tiles, heads, section_heads, num_full_tiles, num_work, scale,
                         inner_scale, o_b, o_t, o_h, l_b, l_h, l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, WG1, GQA_RATIO,
                         ROWS, BLOCK_N, D, STAGES, NUM_CONSUMER_WGS, SINGLE_RUN, EXACT_BEGIN, DYNAMIC, LOWER, UPPER,
                         MASK_FIRST_ONLY, SOFTCAP, HAS_CARRY, HAS_SINKS, TMA_STORE, TMA_CARRY, PINGPONG, SPLIT_KV)),
            (_producer, (q, k, v, carry, smem_q, smem_k, smem_v, smem_o, q_full, q_empty, k_full, k_empty, v_full,
                         v_empty, o_full, o_empty, smem_next, next_full, next_empty, COUNTER, TILES, RUNS, tiles, heads,
                         section_heads, num_full_tiles, num_work, GQA_RATIO, ROWS, BLOCK_N, D, STAGES, NUM_CONSUMER_WGS,
                         SINGLE_RUN, EXACT_BEGIN, DYNAMIC, TMA_CARRY, SPLIT_KV)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (o, OUT, LSE, PARTIAL_OUT, PARTIAL_LSE, CARRY, CARRY_LSE, SINKS, smem_o, smem_q, smem_k, smem_v,
                         q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, smem_next, next_full,
                         next_empty, TILES, RUNS, tiles, heads, section_heads, num_full_tiles, num_work, scale,
                         inner_scale, o_b, o_t, o_h, l_b, l_h, l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, WG0, GQA_RATIO,
                         ROWS, BLOCK_N, D, STAGES, NUM_CONSUMER_WGS, SINGLE_RUN, EXACT_BEGIN, DYNAMIC, LOWER, UPPER,
                         MASK_FIRST_ONLY, SOFTCAP, HAS_CARRY, HAS_SINKS, TMA_STORE, TMA_CARRY, PINGPONG, SPLIT_KV)),
            (_consumer, (o, OUT, LSE, PARTIAL_OUT, PARTIAL_LSE, CARRY, CARRY_LSE, SINKS, smem_o, smem_q, smem_k, smem_v,
                         q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, smem_next, next_full,
                         next_empty, TILES, RUNS, tiles, heads, section_heads, num_full_tiles, num_work, scale,
                         inner_scale, o_b, o_t, o_h, l_b, l_h, l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, WG1, GQA_RATIO,
                         ROWS, BLOCK_N, D, STAGES, NUM_CONSUMER_WGS, SINGLE_RUN, EXACT_BEGIN, DYNAMIC, LOWER, UPPER,
                         MASK_FIRST_ONLY, SOFTCAP, HAS_CARRY, HAS_SINKS, TMA_STORE, TMA_CARRY, PINGPONG, SPLIT_KV)),
            (_consumer, (o, OUT, LSE, PARTIAL_OUT, PARTIAL_LSE, CARRY, CARRY_LSE, SINKS, smem_o, smem_q, smem_k, smem_v,
                         q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, smem_next, next_full,
                         next_empty, TILES, RUNS, tiles, heads, section_heads, num_full_tiles, num_work, scale,
                         inner_scale, o_b, o_t, o_h, l_b, l_h, l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, WG2, GQA_RATIO,
                         ROWS, BLOCK_N, D, STAGES, NUM_CONSUMER_WGS, SINGLE_RUN, EXACT_BEGIN, DYNAMIC, LOWER, UPPER,
                         MASK_FIRST_ONLY, SOFTCAP, HAS_CARRY, HAS_SINKS, TMA_STORE, TMA_CARRY, PINGPONG, SPLIT_KV)),
            (_producer, (q, k, v, carry, smem_q, smem_k, smem_v, smem_o, q_full, q_empty, k_full, k_empty, v_full,
                         v_empty, o_full, o_empty, smem_next, next_full, next_empty, COUNTER, TILES, RUNS, tiles, heads,
                         section_heads, num_full_tiles, num_work, GQA_RATIO, ROWS, BLOCK_N, D, STAGES, NUM_CONSUMER_WGS,
                         SINGLE_RUN, EXACT_BEGIN, DYNAMIC, TMA_CARRY, SPLIT_KV)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
