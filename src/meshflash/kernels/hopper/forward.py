"""Attention forward in Gluon for Hopper: one warp copies, two or three groups of warps compute 64 queries each.

A group starts the scores of a block, then the product of the block before with its values, and works on exponentials
while the second runs. It lets blocks go by that its own rows do not see, where a tile has a single run of them.
Programs stay: each takes a tile of queries and a head, the heaviest first, from a counter, in sections of heads whose
keys fit the cache. Equal tiles are dealt by turns, and those of the last round may be in parts, by keys. What was
measured, and why it is so: docs/kernels.md.
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
    LEAST,
    LN2,
    LOG2E,
    MEETING,
    along,
    arrive,
    barriers,
    copy_block,
    copy_keys,
    exponentials,
    following,
    meet,
    next_block,
    run_of,
    store_block,
    tanh,
    tell,
    tile_of,
    told,
    visible_by_sides,
)


@gluon.jit
def _work(number, tiles, heads, section, uncut, PARTS: gl.constexpr):
    """The tile and the head of a piece of work: sections of heads one after another, in each the tiles in order.

    With PARTS a section is one head. Pieces behind the `uncut` ones are parts of tiles of the last head, which the
    table has behind all tiles.
    """
    if PARTS:
        head = number // tiles
        tile = gl.where(number < uncut, number - head * tiles, number - uncut + tiles)
        head = gl.minimum(head, heads - 1)
    else:
        each = section * tiles
        nth = number // each
        rest = number - nth * each
        width = gl.minimum(section, heads - nth * section)
        tile, head = rest // width, nth * section + rest % width
    return tile, head


@gluon.jit
def _copy(q, k, v, carry, q_room, k_room, v_room, o_room, q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full,
          o_empty, next_room, next_full, next_empty, COUNTER, TILES, RUNS, tiles, heads, section, uncut,
          work, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
          GROUPS: gl.constexpr, SINGLE: gl.constexpr, WHOLE: gl.constexpr, DYNAMIC: gl.constexpr,
          CARRY_BLOCKS: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """The warp that copies: queries of each tile, then keys and values block by block, and last what is carried."""
    copied = 0
    done = 0
    number = gl.program_id(0)
    while number < work:
        next_number = following(COUNTER, number, work, DYNAMIC)  # asked for a tile ahead of its use
        tile, head = _work(number, tiles, heads, section, uncut, PARTS)
        batch, row, _, _, _, run, turns = tile_of(TILES, tile, SINGLE)
        key_head = head // GROUP
        begin, blocks, limit, least, most = run_of(RUNS, run)
        for w in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(w), (done & 1) ^ 1)
            mbarrier.expect(q_full.index(w), ROWS * D * 2)
            copy_block(q, [batch, head, row + w * ROWS, 0], q_full.index(w), q_room.index(w))
        left = 0
        for turn in range(turns):
            run, left, begin, blocks, limit, least, most, _fresh, block = next_block(
                turn, run, left, begin, blocks, limit, least, most, RUNS, BLOCK_N, SINGLE, WHOLE
            )
            copy_keys(
                k, v, k_room, v_room, k_full, k_empty, v_full, v_empty, batch, key_head, block, copied,
                BLOCK_N, D, STAGES
            )  # fmt: skip
            copied += 1
        if CARRY_BLOCKS:
            for w in gl.static_range(GROUPS):
                mbarrier.wait(o_empty.index(w), done & 1)
                mbarrier.expect(o_full.index(w), ROWS * D * 4)
                copy_block(carry, [batch, head, row + w * ROWS, 0], o_full.index(w), o_room.index(w))
        if DYNAMIC:
            tell(next_room, next_full.index(0), next_empty.index(0), next_number, done)
        done += 1
        number = next_number


@gluon.jit
def _weigh(s, top, sums, scale, full, phase, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, OF_ROWS: gl.constexpr):
    """Weights of a block's scores, what older sums decay by, the new maximum, and the sums, still one for each lane.

    Sums begin with the older ones, so that what these decay by is there first: the product so far is scaled by it in
    the shadow of the exponentials. Added last, ptxas would compute it last, and scale after all of them.
    """
    # over registers first, in two chains for each row: half as long as one
    most = gl.max(gl.max(gl.reshape(s, [ROWS, BLOCK_N // 8, 8]), 1), 1)
    most = gl.convert_layout(most, OF_ROWS) * scale
    new_top = gl.maximum(top, most)
    decay = gl.exp2(top - new_top)
    p = exponentials(s * scale - new_top[:, None], full, phase, ROWS, BLOCK_N)
    wide = gl.reshape(p, [ROWS, BLOCK_N // 8, 8])
    layout: gl.constexpr = wide.type.layout
    first = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) == 0
    older = sums * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None]
    sums = gl.sum(gl.where(first[None, :][:, :, None], wide + older[:, None, :], wide), 1)
    return p, decay, new_top, sums


@gluon.jit
def _useful(rows, lowest, highest, begin, turns, least, most, WHICH: gl.constexpr, ROWS: gl.constexpr,
            BLOCK_N: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr):  # fmt: skip
    """Turns of a single run: (those before a group's rows see anything, those in which they may, those after).

    One turn is theirs at least, for rows that see nothing are written too; of a group without rows it is the last one.
    """
    before = 0
    after = 0
    if UPPER:  # blocks come last one first
        before = gl.maximum(turns - 1 - (gl.maximum(highest + most, begin) - begin) // BLOCK_N, 0)
    if WHICH > 0:
        before = gl.where(rows > WHICH * ROWS, before, turns - 1)
    if LOWER and WHICH * ROWS >= BLOCK_N:  # a run begins where the tile's first row sees something
        after = gl.minimum((gl.maximum(lowest + least, begin) - begin) // BLOCK_N, turns - 1 - before)
    return before, turns - before - after, after


@gluon.jit
def _pass_by(turns, used, k_full, k_empty, v_full, v_empty, STAGES: gl.constexpr, WHICH: gl.constexpr,
             GROUPS: gl.constexpr, BY_TURNS: gl.constexpr):  # fmt: skip
    """Let so many blocks go by; each is waited for, else a group could arrive twice where others have not yet."""
    for _ in range(turns):
        stage = used % STAGES
        phase = (used // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        if BY_TURNS:
            meet(MEETING + WHICH)
            arrive(MEETING + (WHICH + 1) % GROUPS)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        used += 1
    return used


@gluon.jit
def _compute(o, OUT, LSE, PART, PART_LSE, CARRY, CARRY_LSE, SINKS, o_room, q_room, k_room, v_room, q_full, q_empty,
             k_full, k_empty, v_full, v_empty, o_full, o_empty, next_room, next_full, next_empty, TILES, RUNS, tiles,
             heads, section, uncut, work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h, l_t, c_b, c_t, c_h, cl_b, cl_h,
             cl_t, WHICH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
             D: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, SINGLE: gl.constexpr, WHOLE: gl.constexpr,
             DYNAMIC: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr, ONCE: gl.constexpr, SOFTCAP: gl.constexpr,
             HAS_CARRY: gl.constexpr, HAS_SINKS: gl.constexpr, BY_BLOCKS: gl.constexpr, CARRY_BLOCKS: gl.constexpr,
             BY_TURNS: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """A group of warps that computes: 64 rows of each tile."""
    DTYPE: gl.constexpr = q_room.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    q = q_room.index(WHICH).reshape([ROWS, D])
    m = WHICH * ROWS + gl.arange(0, ROWS, layout=OF_ROWS)
    used = 0
    done = 0
    number = gl.program_id(0)
    if BY_TURNS and WHICH == GROUPS - 1:
        arrive(MEETING)  # the first turn is the first group's
    while number < work:
        tile, head = _work(number, tiles, heads, section, uncut, PARTS)
        batch, row, rows, first, step, run, turns = tile_of(TILES, tile, SINGLE)
        begin, blocks, limit, least, most = run_of(RUNS, run)
        lowest = first + step * (WHICH * ROWS)
        highest = first + step * (gl.minimum(rows, (WHICH + 1) * ROWS) - 1)
        if SINGLE:
            skipped, turns, after = _useful(
                rows, lowest, highest, begin, turns, least, most, WHICH, ROWS, BLOCK_N, LOWER, UPPER
            )
            used = _pass_by(skipped, used, k_full, k_empty, v_full, v_empty, STAGES, WHICH, GROUPS, BY_TURNS)
            blocks -= skipped
        positions = first + step * m
        top = gl.full([ROWS], LEAST, gl.float32, OF_ROWS)
        sums = gl.sum(gl.reshape(zero, [ROWS, BLOCK_N // 8, 8]), 1)
        acc = gl.zeros([ROWS, D], gl.float32, O)
        left = 0
        # the first block
        run, left, begin, blocks, limit, least, most, fresh, block = next_block(
            0, run, left, begin, blocks, limit, least, most, RUNS, BLOCK_N, SINGLE, WHOLE
        )
        mbarrier.wait(q_full.index(WHICH), done & 1)
        stage = used % STAGES
        mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
        if BY_TURNS:
            meet(MEETING + WHICH)
        s = warpgroup_mma(
            q, k_room.index(stage).reshape([BLOCK_N, D]).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if BY_TURNS:
            arrive(MEETING + (WHICH + 1) % GROUPS)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        if SOFTCAP:
            s = tanh(s * inner_scale)
        if LOWER or UPPER:
            s = visible_by_sides(
                s, positions, lowest, highest, fresh, block, least, most, ROWS, BLOCK_N, LOWER, UPPER, WHOLE, S
            )
        p, _decay, top, sums = _weigh(
            s, top, sums, scale, v_full.index(stage), (used // STAGES) & 1, ROWS, BLOCK_N, OF_ROWS
        )
        weights = gl.convert_layout(p.to(DTYPE), P)
        used += 1
        if CARRY_BLOCKS:
            tma.store_wait(pendings=0)  # the results of the tile before were read; there is room for what is carried
            mbarrier.arrive(o_empty.index(WHICH), count=1)
        # one loop, with the mask in a branch: two loops would carry the packed weights in other registers
        for turn in range(1, turns):
            run, left, begin, blocks, limit, least, most, fresh, block = next_block(
                turn, run, left, begin, blocks, limit, least, most, RUNS, BLOCK_N, SINGLE, WHOLE
            )
            stage = used % STAGES
            before = (used - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
            if BY_TURNS:
                meet(MEETING + WHICH)
            s = warpgroup_mma(
                q, k_room.index(stage).reshape([BLOCK_N, D]).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            moving = warpgroup_mma(weights, v_room.index(before).reshape([BLOCK_N, D]), acc, is_async=True)
            if BY_TURNS:
                arrive(MEETING + (WHICH + 1) % GROUPS)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            if SOFTCAP:
                s = tanh(s * inner_scale)
            if (LOWER or UPPER) and not ONCE:
                s = visible_by_sides(
                    s, positions, lowest, highest, fresh, block, least, most, ROWS, BLOCK_N, LOWER, UPPER, WHOLE, S
                )
            p, decay, top, sums = _weigh(
                s, top, sums, scale, v_full.index(stage), (used // STAGES) & 1, ROWS, BLOCK_N, OF_ROWS
            )
            # the weights that the product reads from registers must live until it is done
            acc, weights, p = warpgroup_mma_wait(num_outstanding=0, deps=(moving, weights, p))
            mbarrier.arrive(v_empty.index(before), count=1)
            weights = gl.convert_layout(p.to(DTYPE), P)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, O))[:, None]
            used += 1
        mbarrier.arrive(q_empty.index(WHICH), count=1)  # the next queries come under what follows
        b = batch.to(gl.int64)
        h = head.to(gl.int64)
        stored = rows
        if PARTS:  # theirs go elsewhere, and are joined with what is carried: it is copied here too, but weighs 0
            stored = gl.where(number < uncut, rows, 0)
        there = m < stored
        if HAS_CARRY:  # on its way under the last product
            old_lse = gl.load(CARRY_LSE + b * cl_b + h * cl_h + (row + m).to(gl.int64) * cl_t, mask=there, other=-INF)
        before = (used - 1) % STAGES
        moving = warpgroup_mma(weights, v_room.index(before).reshape([BLOCK_N, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(moving,))  # at once: nothing can take the weights' registers
        mbarrier.arrive(v_empty.index(before), count=1)
        if SINGLE:
            used = _pass_by(after, used, k_full, k_empty, v_full, v_empty, STAGES, WHICH, GROUPS, BY_TURNS)
        # what was carried, the sink, and the division
        total = gl.convert_layout(gl.sum(sums, 1), OF_ROWS)
        LEFT: gl.constexpr = O if BY_BLOCKS else along(D)
        if HAS_CARRY:
            acc = gl.convert_layout(acc, LEFT)
        OF_ROWS_LEFT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        rows_o = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LEFT))
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, LEFT))
        there_o = (rows_o < stored)[:, None]
        if HAS_CARRY:
            old_top = old_lse * LOG2E
            reference = gl.maximum(top, old_top)
            decay = gl.exp2(top - reference)
            weight = gl.exp2(old_top - reference)
            if CARRY_BLOCKS:
                mbarrier.wait(o_full.index(WHICH), done & 1)
                old = o_room.index(WHICH).reshape([ROWS, D]).load(O)
            else:
                at = (row + rows_o).to(gl.int64)[:, None] * c_t + columns[None, :]
                old = gl.load(CARRY + b * c_b + h * c_h + at, mask=there_o, other=0.0)
            acc = acc * gl.convert_layout(decay, OF_ROWS_LEFT)[:, None]
            acc += old * gl.convert_layout(weight, OF_ROWS_LEFT)[:, None]
            total = total * decay + weight
            top = reference
        if HAS_SINKS:
            sink = gl.load(SINKS + head).to(gl.float32) * LOG2E
            reference = gl.maximum(top, sink)
            decay = gl.exp2(top - reference)
            acc = acc * gl.convert_layout(decay, OF_ROWS_LEFT)[:, None]
            total = total * decay + gl.exp2(sink - reference)
            top = reference
        empty = total == 0.0
        total = gl.where(empty, 1.0, total)
        lse = gl.where(empty, -INF, (top + gl.log2(total)) * LN2)
        acc = acc * gl.convert_layout(gl.where(empty, 0.0, 1.0 / total), OF_ROWS_LEFT)[:, None]
        if PARTS:
            if number >= uncut:
                base = (number - uncut) * (GROUPS * ROWS)
                gl.store(PART + (base + rows_o)[:, None] * D + columns[None, :], gl.convert_layout(acc, LEFT))
                gl.store(PART_LSE + base + m, lse)
        if BY_BLOCKS:
            if stored > WHICH * ROWS:
                if not CARRY_BLOCKS:
                    tma.store_wait(pendings=0)  # those of the tile before were read; all threads are told
                o_room.index(WHICH).reshape([ROWS, D]).store(acc.to(o.dtype))
                fence_async_shared()
                store_block(o, [batch, head, row + WHICH * ROWS, 0], o_room.index(WHICH))
        else:
            at = (row + rows_o).to(gl.int64)[:, None] * o_t + columns[None, :]
            left = gl.convert_layout(acc.to(OUT.dtype.element_ty), LEFT)
            gl.store(OUT + b * o_b + h * o_h + at, left, mask=there_o)
        gl.store(LSE + b * l_b + h * l_h + (row + m).to(gl.int64) * l_t, lse, mask=there)
        if DYNAMIC:
            number = told(next_room, next_full.index(0), next_empty.index(0), done)
        else:
            number = number + gl.num_programs(0)
        done += 1
    if BY_BLOCKS:
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["tiles", "heads", "section", "uncut", "work"])
def forward(q, k, v, o, carry, OUT, LSE, PART, PART_LSE, CARRY, CARRY_LSE, SINKS, COUNTER, TILES, RUNS, tiles, heads,
            section, uncut, work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h, l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t,
            GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            GROUPS: gl.constexpr, SINGLE: gl.constexpr, WHOLE: gl.constexpr, DYNAMIC: gl.constexpr, LOWER: gl.constexpr,
            UPPER: gl.constexpr, ONCE: gl.constexpr, SOFTCAP: gl.constexpr, HAS_CARRY: gl.constexpr,
            HAS_SINKS: gl.constexpr, BY_BLOCKS: gl.constexpr, CARRY_BLOCKS: gl.constexpr, BY_TURNS: gl.constexpr,
            PARTS: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """(out, lse) of all tiles and heads.

    `scale` is of scores in base 2; with SOFTCAP that of the cap, and `inner_scale` the one inside of it. BY_BLOCKS,
    each group has 64 rows of a tile or none, and results are stored by the descriptor `o`. With CARRY_BLOCKS what is
    carried, as wide as the results, comes by the descriptor `carry`, to where they leave from. BY_TURNS, groups start
    the products of a block one after another. ONCE, a band cuts the first block of a group's rows at most. With PARTS,
    pieces of work behind the `uncut` ones store results of their own, (PART, PART_LSE), a tile's rows for each.
    """
    plain: gl.constexpr = SINGLE and WHOLE and not (DYNAMIC or LOWER or UPPER or HAS_SINKS)
    gl.static_assert(plain or not PARTS, "tiles in parts are alike, see all of their keys, and have no sinks")
    DTYPE: gl.constexpr = q.dtype
    FIRST: gl.constexpr = 0  # literals in a tuple of arguments lose that they are constants
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    q_room = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, D], q.layout)
    k_room = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    v_room = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], v.layout)
    o_room = q_room  # where it is not used
    if BY_BLOCKS:
        o_room = gl.allocate_shared_memory(o.dtype, [GROUPS, 1, 1, ROWS, D], o.layout)
    next_room = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(GROUPS, 1), barriers(GROUPS, 1)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, GROUPS)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, GROUPS)
    o_full, o_empty = barriers(GROUPS, 1), barriers(GROUPS, 1)
    next_full, next_empty = barriers(1, 1), barriers(1, GROUPS)
    fence_async_shared()
    # constants that go by a name for a tuple would lose that they are constants
    if GROUPS == 2:
        gl.warp_specialize([
            (_compute, (o, OUT, LSE, PART, PART_LSE, CARRY, CARRY_LSE, SINKS, o_room, q_room, k_room, v_room, q_full,
                        q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, next_room, next_full, next_empty,
                        TILES, RUNS, tiles, heads, section, uncut, work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h,
                        l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, FIRST, GROUP, ROWS, BLOCK_N, D, STAGES, GROUPS, SINGLE,
                        WHOLE, DYNAMIC, LOWER, UPPER, ONCE, SOFTCAP, HAS_CARRY, HAS_SINKS, BY_BLOCKS, CARRY_BLOCKS,
                        BY_TURNS, PARTS)),
            (_compute, (o, OUT, LSE, PART, PART_LSE, CARRY, CARRY_LSE, SINKS, o_room, q_room, k_room, v_room, q_full,
                        q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, next_room, next_full, next_empty,
                        TILES, RUNS, tiles, heads, section, uncut, work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h,
                        l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, SECOND, GROUP, ROWS, BLOCK_N, D, STAGES, GROUPS, SINGLE,
                        WHOLE, DYNAMIC, LOWER, UPPER, ONCE, SOFTCAP, HAS_CARRY, HAS_SINKS, BY_BLOCKS, CARRY_BLOCKS,
                        BY_TURNS, PARTS)),
            (_copy, (q, k, v, carry, q_room, k_room, v_room, o_room, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                     o_full, o_empty, next_room, next_full, next_empty, COUNTER, TILES, RUNS, tiles, heads, section,
                     uncut, work, GROUP, ROWS, BLOCK_N, D, STAGES, GROUPS, SINGLE, WHOLE, DYNAMIC, CARRY_BLOCKS,
                     PARTS)),
        ], [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (o, OUT, LSE, PART, PART_LSE, CARRY, CARRY_LSE, SINKS, o_room, q_room, k_room, v_room, q_full,
                        q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, next_room, next_full, next_empty,
                        TILES, RUNS, tiles, heads, section, uncut, work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h,
                        l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, FIRST, GROUP, ROWS, BLOCK_N, D, STAGES, GROUPS, SINGLE,
                        WHOLE, DYNAMIC, LOWER, UPPER, ONCE, SOFTCAP, HAS_CARRY, HAS_SINKS, BY_BLOCKS, CARRY_BLOCKS,
                        BY_TURNS, PARTS)),
            (_compute, (o, OUT, LSE, PART, PART_LSE, CARRY, CARRY_LSE, SINKS, o_room, q_room, k_room, v_room, q_full,
                        q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, next_room, next_full, next_empty,
                        TILES, RUNS, tiles, heads, section, uncut, work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h,
                        l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, SECOND, GROUP, ROWS, BLOCK_N, D, STAGES, GROUPS, SINGLE,
                        WHOLE, DYNAMIC, LOWER, UPPER, ONCE, SOFTCAP, HAS_CARRY, HAS_SINKS, BY_BLOCKS, CARRY_BLOCKS,
                        BY_TURNS, PARTS)),
            (_compute, (o, OUT, LSE, PART, PART_LSE, CARRY, CARRY_LSE, SINKS, o_room, q_room, k_room, v_room, q_full,
                        q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty, next_room, next_full, next_empty,
                        TILES, RUNS, tiles, heads, section, uncut, work, scale, inner_scale, o_b, o_t, o_h, l_b, l_h,
                        l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, THIRD, GROUP, ROWS, BLOCK_N, D, STAGES, GROUPS, SINGLE,
                        WHOLE, DYNAMIC, LOWER, UPPER, ONCE, SOFTCAP, HAS_CARRY, HAS_SINKS, BY_BLOCKS, CARRY_BLOCKS,
                        BY_TURNS, PARTS)),
            (_copy, (q, k, v, carry, q_room, k_room, v_room, o_room, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                     o_full, o_empty, next_room, next_full, next_empty, COUNTER, TILES, RUNS, tiles, heads, section,
                     uncut, work, GROUP, ROWS, BLOCK_N, D, STAGES, GROUPS, SINGLE, WHOLE, DYNAMIC, CARRY_BLOCKS,
                     PARTS)),
        ], [4, 4, 1], [COMPUTE_REGISTERS, COMPUTE_REGISTERS, COPY_REGISTERS])  # fmt: skip
