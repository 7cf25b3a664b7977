"""Device functions that the Gluon kernels share: tiles and runs of blocks, masks, barriers.

Gluon is Triton's lower level: code states register layouts, shared-memory layouts and barriers. These kernels need
NVIDIA's Hopper (sm_90) and Triton 3.6 or later; there is no interpreter for Gluon.

A tile is the block of rows that a CTA computes: queries in the forward, keys in the backward. It loops over the
rows of the other side in blocks. A run is a range of consecutive blocks of one span; a tile has one run or several.
A band gives the visible rows of the other side: those at `position + band_lo` to `position + band_hi`, in rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from meshflash.kernels.hopper.gluon_compat import copy_block

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
#: Initial value of a row's maximum. It is finite, so that a row that sees nothing computes no inf - inf, which is NaN.
MIN_ROW_MAX = gl.constexpr(-1e30)
#: 2^-126, the smallest normal float32: instructions with .ftz treat smaller numbers as 0.
MIN_NORMAL = gl.constexpr(2.0**-126)
#: The first of the 16 named barriers of a CTA (PTX `bar.sync`) that these kernels use. Triton allocates barriers from 0
#: on, one for each warp partition. The backward uses four from here on, the forward one for each consumer warpgroup.
NAMED_BARRIER = gl.constexpr(8)


@gluon.constexpr_function
def store_layout(dim):
    """Return a register layout of 64 rows with four neighbouring columns a thread; wgmma accumulators have two.

    Stores to global memory then fill whole sectors of 32 bytes. The layout swaps one bit of the lane with one bit of
    the register index, which Triton converts by warp shuffles. Swapping two bits would go through shared memory, and
    cost registers in the main loop.
    """
    registers = [[0, 1], [0, 2], [8, 0], *([0, bit] for bit in (16, 32, 64) if bit < dim)]
    return gl.DistributedLinearLayout(
        registers, [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, dim]
    )


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate NUMBER mbarriers; a phase of each completes after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(NUMBER):
        mbarrier.init(made.index(n), count=ARRIVALS)
    return made


@gluon.jit
def buffer_rows(smem, index, ROWS: gl.constexpr, D: gl.constexpr, HIDE_INDEX: gl.constexpr = True):
    """Return one of several buffers in shared memory as [ROWS, D]; its wgmma descriptors are computed at this place.

    Without HIDE_INDEX the compiler chooses the place.

    The compiler computes the descriptors of a buffer that a loop does not change, or uses twice, only once. They then
    stay in registers: about two dozen in the backward, which ptxas spills. Triton up to 3.8 builds a descriptor by one
    addition, which ptxas repeats where registers run out. Triton 3.9 takes three instructions, which it does not
    repeat. So the index gets a 0 from inline assembly, which the compiler can neither see nor move.
    """
    if HIDE_INDEX:
        index += gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return smem.index(index).reshape([ROWS, D])


@gluon.jit
def bar_sync(barrier):
    """Wait at a named barrier until one other warpgroup has arrived; Gluon has no barrier across warp partitions."""
    _named_barrier(barrier, "bar.sync $1, $2; mov.u32 $0, $1;")


@gluon.jit
def bar_arrive(barrier):
    """Arrive at a named barrier where one other warpgroup waits, without waiting."""
    _named_barrier(barrier, "bar.arrive $1, $2; mov.u32 $0, $1;")


@gluon.jit
def _named_barrier(barrier, ASM: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    barrier = gl.full([128], barrier, gl.int32, layout)
    threads = gl.full([128], 256, gl.int32, layout)  # two warpgroups of 128 threads
    gl.inline_asm_elementwise(ASM, "=r,r,r", [barrier, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_work_id(COUNTER, index, num_work, DYNAMIC: gl.constexpr):
    """Return the next work item of this persistent CTA: from a global counter, or round-robin after `index`.

    CTAs increment the counter once for each work item, so the last increment is known: it resets the counter to 0.
    """
    if DYNAMIC:
        taken = gl.atomic_add(COUNTER, 1, sem="relaxed")  # relaxed: no data is published through it
        if taken == num_work - 1:  # the next launch on this stream finds it at 0, without a memset
            gl.store(COUNTER, 0)
        index = taken
    return index + gl.num_programs(0)


@gluon.jit
def publish_work(smem, full, empty, index, num_done):
    """Publish the next work item to the consumer warpgroups; called by the producer warp.

    `empty` protects the slot from being overwritten before all consumers have read it, `full` from being read early.
    """
    mbarrier.wait(empty, (num_done & 1) ^ 1)
    smem.store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full, count=1)


@gluon.jit
def receive_work(smem, full, empty, num_done):
    """Return the next work item that the producer warp has published; called by a consumer warpgroup."""
    mbarrier.wait(full, num_done & 1)
    index = gl.max(smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)  # a reduction of one element: to a scalar
    mbarrier.arrive(empty, count=1)
    return index


@gluon.jit
def load_kv_block(k, v, smem_k, smem_v, k_full, k_empty, v_full, v_empty, batch, head, block, kv_loaded,
                  BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Start the TMA loads of one block of K and V into the next stage of the ring; called by the producer warp.

    `kv_loaded` counts the blocks loaded so far: stage and mbarrier phase follow from it. Each load waits until all
    consumers have released the stage (`*_empty`), and completes on `*_full`. K and V have mbarriers of their own, so
    that S = Q K^T may start before V has arrived.
    """
    stage = kv_loaded % STAGES
    phase = ((kv_loaded // STAGES) & 1) ^ 1
    mbarrier.wait(k_empty.index(stage), phase)
    mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
    copy_block(k, [batch, head, block, 0], k_full.index(stage), smem_k.index(stage))
    mbarrier.wait(v_empty.index(stage), phase)
    mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
    copy_block(v, [batch, head, block, 0], v_full.index(stage), smem_v.index(stage))


@gluon.jit
def load_tile(TILES, index, SINGLE_RUN: gl.constexpr):
    """Load a tile: batch row, first row, rows, first position, position step, first run, number of blocks to loop over.

    With SINGLE_RUN every tile has one run, of the tile's own index: its load need not wait for that of the tile.
    """
    at = TILES + index * 7
    batch, row, rows = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    run = index
    if not SINGLE_RUN:
        run = gl.load(at + 5)
    return batch, row, rows, gl.load(at + 3), gl.load(at + 4), run, gl.load(at + 6)


@gluon.jit
def load_run(RUNS, index):
    """Load a run of blocks: first row, number of blocks, the row past the last, and the limits of its band."""
    at = RUNS + index * 5
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def block_start(run_begin, run_block, run_end, SIZE: gl.constexpr, EXACT_BEGIN: gl.constexpr, CLIPPED: gl.constexpr):
    """Return (first_new, block): the first row that a run's block contributes, and the row at which its load begins.

    The last block begins earlier where the run's rows end, so that nothing outside of the run is read. Its rows before
    `first_new` were part of the previous block, and are masked. Where runs are CLIPPED, blocks begin at multiples of
    their size instead: the first one may have rows before the run's own, and the last one rows after them. EXACT_BEGIN
    says that no block has rows before its own.
    """
    first_new = run_begin + run_block * SIZE
    block = first_new
    if not EXACT_BEGIN:
        if CLIPPED:
            first_new = run_begin
            block = (run_begin & -SIZE) + run_block * SIZE
        else:
            block = gl.minimum(first_new, run_end - SIZE)
    return first_new, block


@gluon.jit
def next_block(n_block, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, SIZE: gl.constexpr,
               SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr, CLIPPED: gl.constexpr = False):  # fmt: skip
    """Advance to the next block: return the run, the block's index in it, the run's fields, and (first_new, block).

    Blocks of a run are walked from the last to the first, so that the blocks that a causal mask crosses come first.
    """
    if SINGLE_RUN:
        run_block = blocks - 1 - n_block
    else:
        run_block -= 1
        if run_block < 0:
            if n_block > 0:
                run += 1
                run_begin, blocks, run_end, band_lo, band_hi = load_run(RUNS, run)
            run_block = blocks - 1
    first_new, block = block_start(run_begin, run_block, run_end, SIZE, EXACT_BEGIN, CLIPPED)
    return run, run_block, run_begin, blocks, run_end, band_lo, band_hi, first_new, block


@gluon.jit
def rotate_block(index, num_blocks, ROTATE: gl.constexpr):
    """Rotate the order of blocks by CTA, so that CTAs do not add to the same rows of dQ at the same time."""
    if ROTATE:
        index += (gl.program_id(0) * ROTATE) % num_blocks
        index = gl.where(index >= num_blocks, index - num_blocks, index)
    return index


@gluon.jit
def num_unmasked_blocks(rows, run_begin, num_blocks, band_lo, SIZE: gl.constexpr, KEYS: gl.constexpr):
    """Return how many blocks of queries precede those that the lower side of a band crosses, in the order of the walk.

    Blocks of the single run are walked from the last to the first, and keys are counted from 0. A tile of fewer than
    KEYS keys needs a mask in every block.
    """
    cut = gl.maximum(rows - 1 + band_lo - run_begin + SIZE - 1, 0) // SIZE
    return gl.where(rows < KEYS, 0, num_blocks - gl.minimum(cut, num_blocks))


@gluon.jit
def begin_gqa_loop(first_head, blocks, num_blocks, HEADS_PER_CTA: gl.constexpr, SINGLE_RUN: gl.constexpr,
                   ROTATE: gl.constexpr):  # fmt: skip
    """Return the initial state of `next_gqa_block`: (head, run_block, head_end).

    `run_block` is the index of a block in its run, and `head_end` the index of the first block of the next head.
    """
    head = first_head
    run_block = 0
    if HEADS_PER_CTA > 1:
        if SINGLE_RUN:
            run_block = blocks
            if ROTATE:
                run_block -= (gl.program_id(0) * ROTATE) % num_blocks
        else:
            head -= 1
    return head, run_block, 0


@gluon.jit
def next_gqa_block(index, head, head_end, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS,
                   first_head, first_run, num_blocks, SIZE: gl.constexpr, HEADS_PER_CTA: gl.constexpr,
                   SINGLE_RUN: gl.constexpr, EXACT_BEGIN: gl.constexpr, CLIPPED: gl.constexpr,
                   ROTATE: gl.constexpr):  # fmt: skip
    """Advance to the next block in one flat loop over the query heads of a KV head and the blocks of each.

    Returns what `next_block` returns, preceded by the head and the index at which it ends. Under ROTATE the blocks
    that the first head skipped come after the last head.
    """
    if HEADS_PER_CTA == 1:
        n_block = rotate_block(index, num_blocks, ROTATE)
        run, run_block, run_begin, blocks, run_end, band_lo, band_hi, first_new, block = next_block(
            n_block, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, RUNS, SIZE, SINGLE_RUN, EXACT_BEGIN,
            CLIPPED
        )  # fmt: skip
    else:
        run_block -= 1
        if SINGLE_RUN:
            over = run_block < 0
            run_block = gl.where(over, blocks - 1, run_block)
            head = gl.where(over, head + 1, head)
            if ROTATE:
                head = gl.where(head == first_head + HEADS_PER_CTA, first_head, head)
        elif run_block < 0:
            run += 1
            if index == head_end:
                run = first_run
                head += 1
                head_end += num_blocks
            run_begin, blocks, run_end, band_lo, band_hi = load_run(RUNS, run)
            run_block = blocks - 1
        first_new, block = block_start(run_begin, run_block, run_end, SIZE, EXACT_BEGIN, CLIPPED)
    return head, head_end, run, run_block, run_begin, blocks, run_end, band_lo, band_hi, first_new, block


@gluon.jit
def crosses_upper(first_pos, band_hi, block, SIZE: gl.constexpr):
    """Whether the upper side of the band crosses a block: the row at `first_pos` does not see the block's last row."""
    return first_pos + band_hi < block + SIZE - 1


@gluon.jit
def crosses_lower(last, band_lo, first_new, block, EXACT_BEGIN: gl.constexpr):
    """Whether the lower side of the band crosses a block, or the block has rows that an earlier one contributed."""
    found = last + band_lo > block
    if not EXACT_BEGIN:
        found = found | (first_new > block)
    return found


@gluon.jit
def crosses_end(block, run_end, SIZE: gl.constexpr):
    """Whether a block reaches beyond the end of its run."""
    return block > run_end - SIZE


@gluon.jit
def mask_scores(x, positions, first_pos, last, first_new, block, band_lo, band_hi, ROWS: gl.constexpr,
                SIZE: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr, EXACT_BEGIN: gl.constexpr,
                LAYOUT: gl.constexpr, run_end=0, CLIPPED: gl.constexpr = False):  # fmt: skip
    """Set scores to -inf where a row does not see a column; rows are at positions from `first_pos` to `last`.

    One branch covers all sides: where one of them crosses the block, all are applied.
    """
    cut = False
    if UPPER:
        cut = crosses_upper(first_pos, band_hi, block, SIZE)
    if LOWER:
        cut = cut | crosses_lower(last, band_lo, first_new, block, EXACT_BEGIN)
    if CLIPPED:
        cut = cut | crosses_end(block, run_end, SIZE)
    if LOWER or UPPER or CLIPPED:
        if cut:
            if UPPER:
                x = _mask_columns(x, positions + (band_hi - block), ROWS, SIZE, True, LAYOUT)
            if LOWER:
                low = positions + (band_lo - block)
                if not EXACT_BEGIN:
                    low = gl.maximum(low, first_new - block)
                x = _mask_columns(x, low, ROWS, SIZE, False, LAYOUT)
            if CLIPPED:
                x = _mask_columns(x, gl.zeros_like(positions) + (run_end - block - 1), ROWS, SIZE, True, LAYOUT)
    return x


@gluon.jit
def mask_scores_by_side(x, positions, first_pos, last, first_new, block, band_lo, band_hi, ROWS: gl.constexpr,
                        SIZE: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr, EXACT_BEGIN: gl.constexpr,
                        LAYOUT: gl.constexpr):  # fmt: skip
    """As `mask_scores`, with a branch for each side: fewer comparisons, because both sides rarely cross one block.

    Two branches need more registers than one; the loop of the backward has none to spare.
    """
    x = mask_scores(
        x, positions, first_pos, last, first_new, block, band_lo, band_hi, ROWS, SIZE, False, UPPER, EXACT_BEGIN, LAYOUT
    )
    return mask_scores(
        x, positions, first_pos, last, first_new, block, band_lo, band_hi, ROWS, SIZE, LOWER, False, EXACT_BEGIN, LAYOUT
    )


@gluon.jit
def _mask_columns(x, bound, ROWS: gl.constexpr, SIZE: gl.constexpr, ABOVE: gl.constexpr, LAYOUT: gl.constexpr):
    """Set scores to -inf in columns ABOVE the bound of their row, or below it.

    A column is 8 * j + c, where j follows from the register and c from the lane. Compared with `bound - c`, 8 * j is an
    immediate operand: no register holds column indices.
    """
    wide = gl.reshape(x, [ROWS, SIZE // 8, 8])
    layout: gl.constexpr = wide.type.layout
    j = gl.arange(0, SIZE // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * 8
    c = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    bound = gl.convert_layout(bound, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    own = bound[:, None][:, :, None] - c[None, :][:, None, :]
    if ABOVE:
        seen = j[None, :][:, :, None] <= own
    else:
        seen = j[None, :][:, :, None] >= own
    return gl.convert_layout(gl.reshape(gl.where(seen, wide, -INF), [ROWS, SIZE]), LAYOUT)


@gluon.jit
def exp2_around_wait(x, full, phase, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """Compute exp2 of a tile, with an mbarrier wait after the first eighth of its columns.

    ptxas would sink all exponentials below the next wgmma wait. The mbarrier wait ends a basic block, across which
    ptxas moves nothing: an eighth is computed before it, and the rest after it, overlapped with what else is ready.
    An eighth was fastest on an H200; docs/dev/kernels.md has the other fractions.
    """
    LAYOUT: gl.constexpr = x.type.layout
    x, fourth = split_columns(x, ROWS, SIZE)
    x, third = split_columns(x, ROWS, SIZE // 2)
    x, second = split_columns(x, ROWS, SIZE // 4)
    first = gl.exp2(x)
    mbarrier.wait(full, phase)
    x = _join_columns(first, gl.exp2(second), ROWS, SIZE // 4)
    x = _join_columns(x, gl.exp2(third), ROWS, SIZE // 2)
    return gl.convert_layout(_join_columns(x, gl.exp2(fourth), ROWS, SIZE), LAYOUT)


@gluon.jit
def split_columns(x, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """Return the left and the right half of the columns of a tile."""
    return gl.reshape(x, [ROWS, 2, SIZE // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _join_columns(first, second, ROWS: gl.constexpr, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = first.type.layout
    return gl.reshape(gl.join(first, gl.convert_layout(second, LAYOUT)).permute((0, 2, 1)), [ROWS, SIZE])


@gluon.jit
def tanh(x):
    """Compute tanh by exp2; near 0, where that cancels, by its Taylor series."""
    e = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    return gl.where(gl.abs(x) < 0.1, near, gl.where(x < 0, -t, t))


@gluon.jit
def softcap_slope(p, lse, scale2):
    """Return the derivative of the softcap, 1 - tanh^2, recovered from P: no register holds tanh until then.

    P = 2^(scale2 * tanh - lse), so tanh = (log2(P) + lse) / scale2. Where P is 0, or nearly so, the gradient is 0 too,
    whatever the slope. `lg2.approx.ftz` treats P below 2^-126 as 0; `gl.log2` does not, and needs more registers.
    """
    log = gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [p], dtype=gl.float32, is_pure=True, pack=1)
    t = (log + lse) * (1.0 / scale2)
    return gl.where(p >= MIN_NORMAL, 1.0 - t * t, 0.0)
