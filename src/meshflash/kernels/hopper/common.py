"""What the kernels in Gluon share: tiles by number, runs of blocks, limits of a band, and names of several Tritons.

Gluon says where every number lies: in which thread's registers, in which layout of shared memory, behind which
barrier. It runs on NVIDIA's Hopper, sm_90, from Triton 3.6 on; there is no interpreter for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
#: What a maximum is at least, so that rows that see nothing have no inf - inf.
LEAST = gl.constexpr(-1e30)
#: The least number that the hardware does not take for 0 where it may: 2^-126.
LEAST_NORMAL = gl.constexpr(2.0**-126)
#: The first of the hardware's 16 barriers that groups meet at, of which the backward takes four and the forward one for
#: each group: Triton takes those from 0 on, for each group one.
MEETING = gl.constexpr(8)

#: A block of global memory to shared memory, by a descriptor, on a barrier; renamed in Triton 3.8.
copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: And back.
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

if hasattr(tma, "async_atomic_add"):
    #: A block of shared memory added to global memory.
    add_block = tma.async_atomic_add
else:  # 3.6 and 3.7 have it without a name in Python
    from triton._C.libtriton import ir as _ir

    @_core.builtin
    def add_block(descriptor, coordinates, source, _semantic=None):
        """A block of shared memory added to global memory."""
        at = _semantic._convert_to_ir_values(coordinates, require_i64=False)
        kind = _ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, at, source.handle)


@gluon.constexpr_function
def along(dim):
    """A layout of 64 rows whose threads have four neighbours of a row, where those of a product have two.

    Pieces of 32 bytes are stored whole then. One bit of a lane's number changes places with one of a register's, which
    Triton does by shuffles; two of them would go by shared memory, and cost registers in the loop before.
    """
    registers = [[0, 1], [0, 2], [8, 0], *([0, bit] for bit in (16, 32, 64) if bit < dim)]
    return gl.DistributedLinearLayout(
        registers, [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, dim]
    )


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each open after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(NUMBER):
        mbarrier.init(made.index(n), count=ARRIVALS)
    return made


@gluon.jit
def meet(barrier):
    """Wait at a barrier of the hardware for one other group: Gluon has no barrier over several."""
    _at_barrier(barrier, "bar.sync $1, $2; mov.u32 $0, $1;")


@gluon.jit
def arrive(barrier):
    """Arrive at a barrier of the hardware where one other group waits, and go on."""
    _at_barrier(barrier, "bar.arrive $1, $2; mov.u32 $0, $1;")


@gluon.jit
def _at_barrier(barrier, ASM: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    barrier = gl.full([128], barrier, gl.int32, layout)
    threads = gl.full([128], 256, gl.int32, layout)
    gl.inline_asm_elementwise(ASM, "=r,r,r", [barrier, threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def following(COUNTER, number, work, DYNAMIC: gl.constexpr):
    """The piece of work after this one: from a counter, or one from each program in turn.

    Programs ask once for each piece, so that the last ask is known, and leaves the counter at 0.
    """
    if DYNAMIC:
        asked = gl.atomic_add(COUNTER, 1, sem="relaxed")  # no data is handed over with it
        if asked == work - 1:
            gl.store(COUNTER, 0)
        number = asked
    return number + gl.num_programs(0)


@gluon.jit
def tell(room, full, empty, number, done):
    """Tell all groups which piece of work is next; by the warp that copies."""
    mbarrier.wait(empty, (done & 1) ^ 1)
    room.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full, count=1)


@gluon.jit
def told(room, full, empty, done):
    """Which piece of work is next."""
    mbarrier.wait(full, done & 1)
    number = gl.max(room.load(gl.BlockedLayout([1], [32], [4], [0])), 0)  # of one
    mbarrier.arrive(empty, count=1)
    return number


@gluon.jit
def copy_keys(k, v, k_room, v_room, k_full, k_empty, v_full, v_empty, batch, head, block, copied,
              BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Keys and values of a block, into the stage whose turn it is; by the warp that copies."""
    stage = copied % STAGES
    phase = ((copied // STAGES) & 1) ^ 1
    mbarrier.wait(k_empty.index(stage), phase)
    mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
    copy_block(k, [batch, head, block, 0], k_full.index(stage), k_room.index(stage))
    mbarrier.wait(v_empty.index(stage), phase)
    mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
    copy_block(v, [batch, head, block, 0], v_full.index(stage), v_room.index(stage))


@gluon.jit
def tile_of(TILES, number, SINGLE: gl.constexpr):
    """A block of the worklist: batch row, first row, rows, first position, step, first run, turns."""
    at = TILES + number * 7
    batch, row, rows = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    run = number
    if not SINGLE:
        run = gl.load(at + 5)
    return batch, row, rows, gl.load(at + 3), gl.load(at + 4), run, gl.load(at + 6)


@gluon.jit
def run_of(RUNS, number):
    """A run of blocks: first row, blocks, the row past the last, and how far a visible row may lie."""
    at = RUNS + number * 5
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def block_of(begin, left, limit, SIZE: gl.constexpr, WHOLE: gl.constexpr, CLIPPED: gl.constexpr):
    """Of a run's block its first new row, and where it begins.

    The last one begins earlier where the run's rows end, so that nothing outside is read; its rows before the new ones
    were in another block. Where runs are CLIPPED, blocks begin at multiples of their size: rows of the first one may
    come before the run's own, and those of the last one after them. WHOLE says that no block has rows before its own.
    """
    fresh = begin + left * SIZE
    block = fresh
    if not WHOLE:
        if CLIPPED:
            fresh = begin
            block = (begin & -SIZE) + left * SIZE
        else:
            block = gl.minimum(fresh, limit - SIZE)
    return fresh, block


@gluon.jit
def next_block(turn, run, left, begin, blocks, limit, least, most, RUNS, SIZE: gl.constexpr, SINGLE: gl.constexpr,
               WHOLE: gl.constexpr, CLIPPED: gl.constexpr = False):  # fmt: skip
    """One block further: (run, blocks left of it, its numbers), and the block as `block_of` has it.

    Blocks of a run come last one first: those that a band cuts are the last.
    """
    if SINGLE:
        left = blocks - 1 - turn
    else:
        left -= 1
        if left < 0:
            if turn > 0:
                run += 1
                begin, blocks, limit, least, most = run_of(RUNS, run)
            left = blocks - 1
    fresh, block = block_of(begin, left, limit, SIZE, WHOLE, CLIPPED)
    return run, left, begin, blocks, limit, least, most, fresh, block


@gluon.jit
def rotated(number, turns, ROTATE: gl.constexpr):
    """Which block is met: programs begin at others, so that they do not add to the same rows of dQ at once."""
    if ROTATE:
        number += (gl.program_id(0) * ROTATE) % turns
        number = gl.where(number >= turns, number - turns, number)
    return number


@gluon.jit
def clear_turns(rows, begin, turns, least, SIZE: gl.constexpr, KEYS: gl.constexpr):
    """How many blocks of a single run of queries are met before those in which some see only some of a tile's keys.

    Blocks come last one first, and keys are counted from 0. Where a tile has fewer, some are hidden in all blocks.
    """
    cut = gl.maximum(rows - 1 + least - begin + SIZE - 1, 0) // SIZE
    return gl.where(rows < KEYS, 0, turns - gl.minimum(cut, turns))


@gluon.jit
def before_group(first_head, blocks, turns, GROUP: gl.constexpr, SINGLE: gl.constexpr, ROTATE: gl.constexpr):
    """What `next_in_group` begins with: (head, blocks left, the turn at which the head ends)."""
    head = first_head
    left = 0
    if GROUP > 1:
        if SINGLE:
            left = blocks
            if ROTATE:
                left -= (gl.program_id(0) * ROTATE) % turns
        else:
            head -= 1
    return head, left, 0


@gluon.jit
def next_in_group(number, head, ends, run, left, begin, blocks, limit, least, most, RUNS, first_head, first_run, turns,
                  SIZE: gl.constexpr, GROUP: gl.constexpr, SINGLE: gl.constexpr, WHOLE: gl.constexpr,
                  CLIPPED: gl.constexpr, ROTATE: gl.constexpr):  # fmt: skip
    """One block further, in one loop over the heads of a group and the blocks of each: as `next_block`, and the head.

    A head begins where the one before ends. Where programs begin at other blocks (ROTATE), the blocks that the first
    head is short of come after the last head.
    """
    if GROUP == 1:
        turn = rotated(number, turns, ROTATE)
        run, left, begin, blocks, limit, least, most, fresh, block = next_block(
            turn, run, left, begin, blocks, limit, least, most, RUNS, SIZE, SINGLE, WHOLE, CLIPPED
        )
    else:
        left -= 1
        if SINGLE:
            over = left < 0
            left = gl.where(over, blocks - 1, left)
            head = gl.where(over, head + 1, head)
            if ROTATE:
                head = gl.where(head == first_head + GROUP, first_head, head)
        elif left < 0:
            run += 1
            if number == ends:
                run = first_run
                head += 1
                ends += turns
            begin, blocks, limit, least, most = run_of(RUNS, run)
            left = blocks - 1
        fresh, block = block_of(begin, left, limit, SIZE, WHOLE, CLIPPED)
    return head, ends, run, left, begin, blocks, limit, least, most, fresh, block


@gluon.jit
def cut_above(first, most, block, SIZE: gl.constexpr):
    """Whether some row from a position on does not see the last of a block."""
    return first + most < block + SIZE - 1


@gluon.jit
def cut_below(last, least, fresh, block, WHOLE: gl.constexpr):
    """Whether some row up to a position does not see the first of a block, or that is not new."""
    found = last + least > block
    if not WHOLE:
        found = found | (fresh > block)
    return found


@gluon.jit
def cut_beyond(block, limit, SIZE: gl.constexpr):
    """Whether a block reaches beyond the limit."""
    return block > limit - SIZE


@gluon.jit
def visible(x, positions, first, last, fresh, block, least, most, ROWS: gl.constexpr, SIZE: gl.constexpr,
            LOWER: gl.constexpr, UPPER: gl.constexpr, WHOLE: gl.constexpr, LAYOUT: gl.constexpr, limit=0,
            CLIPPED: gl.constexpr = False):  # fmt: skip
    """A tile of scores where its row sees its column, and -inf elsewhere; rows are at positions from first to last.

    All sides hide where one of them cuts the block, in one branch.
    """
    cut = False
    if UPPER:
        cut = cut_above(first, most, block, SIZE)
    if LOWER:
        cut = cut | cut_below(last, least, fresh, block, WHOLE)
    if CLIPPED:
        cut = cut | cut_beyond(block, limit, SIZE)
    if LOWER or UPPER or CLIPPED:
        if cut:
            if UPPER:
                x = _hidden(x, positions + (most - block), ROWS, SIZE, True, LAYOUT)
            if LOWER:
                low = positions + (least - block)
                if not WHOLE:
                    low = gl.maximum(low, fresh - block)
                x = _hidden(x, low, ROWS, SIZE, False, LAYOUT)
            if CLIPPED:
                x = _hidden(x, gl.zeros_like(positions) + (limit - block - 1), ROWS, SIZE, True, LAYOUT)
    return x


@gluon.jit
def visible_by_sides(x, positions, first, last, fresh, block, least, most, ROWS: gl.constexpr, SIZE: gl.constexpr,
                     LOWER: gl.constexpr, UPPER: gl.constexpr, WHOLE: gl.constexpr,
                     LAYOUT: gl.constexpr):  # fmt: skip
    """As `visible`, each side in a branch of its own: less to compare, for few blocks are cut by two.

    A branch for each takes registers, which a loop may not have.
    """
    x = visible(x, positions, first, last, fresh, block, least, most, ROWS, SIZE, False, UPPER, WHOLE, LAYOUT)
    return visible(x, positions, first, last, fresh, block, least, most, ROWS, SIZE, LOWER, False, WHOLE, LAYOUT)


@gluon.jit
def _hidden(x, bound, ROWS: gl.constexpr, SIZE: gl.constexpr, ABOVE: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile of scores, -inf in columns ABOVE the bound of their row, or below it.

    Column = 8 * j + c, where j is the number of a register and c of a lane: what is compared with j is an immediate,
    and nothing is kept for each column.
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
def exponentials(x, full, phase, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """exp2 of a tile, with a wait for a barrier behind the first eighth of it.

    The wait ends a basic block, over which ptxas moves nothing. So that eighth is computed before the wait for a
    product that comes next, and the rest behind it, among what can be done there.
    """
    LAYOUT: gl.constexpr = x.type.layout
    x, fourth = halves(x, ROWS, SIZE)
    x, third = halves(x, ROWS, SIZE // 2)
    x, second = halves(x, ROWS, SIZE // 4)
    first = gl.exp2(x)
    mbarrier.wait(full, phase)
    x = _joined(first, gl.exp2(second), ROWS, SIZE // 4)
    x = _joined(x, gl.exp2(third), ROWS, SIZE // 2)
    return gl.convert_layout(_joined(x, gl.exp2(fourth), ROWS, SIZE), LAYOUT)


@gluon.jit
def halves(x, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """The first columns of a tile, and the others."""
    return gl.reshape(x, [ROWS, 2, SIZE // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _joined(first, second, ROWS: gl.constexpr, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = first.type.layout
    return gl.reshape(gl.join(first, gl.convert_layout(second, LAYOUT)).permute((0, 2, 1)), [ROWS, SIZE])


@gluon.jit
def tanh(x):
    """By exp2; near 0, where that cancels, by its series."""
    e = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    return gl.where(gl.abs(x) < 0.1, near, gl.where(x < 0, -t, t))


@gluon.jit
def uncapped(p, lse, scale2):
    """What a cap leaves of a score's gradient, 1 - tanh^2, from its weight: nothing is kept for it.

    A weight is 2^(scale2 * tanh - lse); where it is 0, or nearly, so is the gradient, whatever the cap leaves of it.
    The hardware's own logarithm takes weights below 2^-126 for 0; `gl.log2` does not, and takes registers for it.
    """
    log = gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [p], dtype=gl.float32, is_pure=True, pack=1)
    t = (log + lse) * (1.0 / scale2)
    return gl.where(p >= LEAST_NORMAL, 1.0 - t * t, 0.0)
