"""Products that talk, in Triton: tiles are put to other ranks as they are done, or multiplied as they arrive.

Five kernels make all collectives. `send` multiplies, or reads a matrix that is there, and puts tiles to peers;
`send_sums` puts those that `gluon_send` left in parts. `receive` waits for the parts of a tile and adds them in the
order of ranks, in float32. `gathered` multiplies rows as they come. `finish` waits for all that a call is to bring.
`send` waits for nobody but its own rank's products, and is started first: so there is no order of programs, or of ranks
that a process plays, in which all wait. `all_begun` holds those back that wait beside it, until it has its
multiprocessors.

A number that a peer did not send in time is NaN, and the status says whose it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.comm.heap.device import block, clock, device, put, signal, translate, wait
from meshflash.gemm.distributed import tiles as distributed_tiles
from meshflash.gemm.kernels.stream_k import halves, inner, owners_of, place_of, sum_of_parts, tile_sum
from meshflash.kernels.triton.common import INTERPRETED as _INTERPRETED

section_of = inner(distributed_tiles.section_of)
peer_of = inner(distributed_tiles.peer_of)
owner_of = inner(distributed_tiles.owner_of)

_PROXIES = tl.constexpr(not _INTERPRETED)
#: Ranks that are told at once.
_LANES = tl.constexpr(32)


@device
def _everywhere(flag, BASES, rank, first, WORLD: tl.constexpr):
    """A flag of ours at all ranks from the first on, a warp's worth, and which of them there are.

    Each thread tells one: they do not wait for each other's answers.
    """
    peers = first + tl.arange(0, _LANES)
    WIDTH: tl.constexpr = flag.dtype.element_ty.primitive_bitwidth // 8
    there = peers < WORLD
    apart = (tl.load(BASES + peers, mask=there, other=0) - tl.load(BASES + rank)) // WIDTH
    return flag + apart, there


@device
def _signal_all(flag, epoch, BASES, rank, WORLD: tl.constexpr):
    """As `signal`, to all ranks."""
    tl.debug_barrier()
    for first in tl.static_range(0, WORLD, _LANES):
        flags, there = _everywhere(flag, BASES, rank, first, WORLD)
        values = tl.zeros((_LANES,), flag.dtype.element_ty) + epoch
        tl.atomic_xchg(flags, values, mask=there, sem="release", scope="sys")


@device
def _arrive_all(flag, BASES, rank, WORLD: tl.constexpr, COUNT: tl.constexpr):
    """As `arrive`, at all ranks."""
    tl.debug_barrier()
    for first in tl.static_range(0, WORLD, _LANES):
        flags, there = _everywhere(flag, BASES, rank, first, WORLD)
        counts = tl.full((_LANES,), COUNT, flag.dtype.element_ty)
        tl.atomic_add(flags, counts, mask=there, sem="release", scope="sys")


@device
def _begin(BEGUN, epoch, BASES, rank, WORLD: tl.constexpr):
    """Tell all ranks that this one has begun a call, and is done with all that earlier ones brought.

    The last program to start does: whoever has heard it takes no multiprocessor from those that it waits for.
    """
    if tl.atomic_add(BEGUN + WORLD, 1) == tl.num_programs(0) - 1:
        tl.store(BEGUN + WORLD, 0)
        _signal_all(BEGUN + rank, epoch, BASES, rank, WORLD)


@device
def _end(BEGUN, epoch, STATUS, WORLD: tl.constexpr):
    """All ranks have begun this call: what the last one brought them may be overwritten by the next."""
    for peer in range(WORLD):
        wait(BEGUN + peer, epoch, STATUS, peer, epoch)


@device
def _put_rows(
    values, INTO, into_m, m, n, M, N, BASES, rank,
    WORLD: tl.constexpr, PUT: tl.constexpr,
):  # fmt: skip
    """Put a block at row m and column n of a matrix: to all, to all others, or only to ourselves."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    at, there = block(INTO + tl.cast(m, tl.int64) * into_m + n, into_m, M - m, N - n, ROWS, COLUMNS)
    rounded = values.to(INTO.dtype.element_ty)
    if PUT == "self":
        tl.store(at, rounded, mask=there)
    else:
        for turn in tl.static_range(WORLD):
            if PUT == "all" or turn < WORLD - 1:
                put(at, rounded, BASES, rank, peer_of(turn, rank, WORLD), there)


@device
def _put_slot(
    values, INTO, slot, row, column, owner, BASES, rank,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WORLD: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Put a part of a tile, from a row and column on, into a slot of an inbox: that of one rank, or of all."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    inside = (row + tl.arange(0, ROWS))[:, None] * WIDTH + (column + tl.arange(0, COLUMNS))[None, :]
    at = INTO + tl.cast(slot, tl.int64) * (HEIGHT * WIDTH) + inside
    rounded = values.to(INTO.dtype.element_ty)
    if TO == "owner":
        put(at, rounded, BASES, rank, owner)
    else:
        for turn in tl.static_range(WORLD):
            put(at, rounded, BASES, rank, peer_of(turn, rank, WORLD))


@device
def _put_part(
    values, row, column, INTO, into_m, m0, n0, M, N, slot, owner, BASES, rank,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WORLD: tl.constexpr, TO: tl.constexpr, PUT: tl.constexpr,
):  # fmt: skip
    """Put a part of a tile, from a row and column of it on, to where the tile goes."""
    if TO == "matrix":
        _put_rows(values, INTO, into_m, m0 + row, n0 + column, M, N, BASES, rank, WORLD, PUT)
    else:
        _put_slot(values, INTO, slot, row, column, owner, BASES, rank, HEIGHT, WIDTH, WORLD, TO)


@triton.jit(do_not_specialize=["rank", "epoch", "rows", "places"])
def send(
    A, B, INTO, FLAGS, READY, BEGUN, FIRSTS, TIMES, BASES, STATUS, rank, epoch,
    N, K, a_m, a_k, b_k, b_n, into_m, rows, places,
    WORLD: tl.constexpr, SECTIONS: tl.constexpr, TO: tl.constexpr, PUT: tl.constexpr, FLAG: tl.constexpr,
    PIECES: tl.constexpr, MULTIPLY: tl.constexpr, HELD: tl.constexpr, TIMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Put the tiles of A B, or of A itself where it does not MULTIPLY, ROWS at a time, to other ranks.

    TO is where: "matrix", the tile's place in a matrix, on the ranks that PUT says ("all", "others", "self"); "all" or
    "owner", this rank's slot for the tile in the inboxes of all ranks, or of the one that adds it up. FLAG is what is
    raised then: "source", a count of all that this rank sends, PIECES for a tile; "row", of each row of tiles; "tile",
    this rank's own flag of the tile; "slot", that of the slot, where it was put. HELD waits for this rank's own flag
    first. Rows come in SECTIONS of `rows` rows of tiles, which begin at FIRSTS; a section may have fewer.
    """
    program = tl.program_id(0)
    if not HELD:
        _begin(BEGUN, epoch, BASES, rank, WORLD)
    columns = tl.cdiv(N, BLOCK_N)
    each = rows * columns
    for turn in range(program, SECTIONS * each, tl.num_programs(0)):
        section = section_of(turn // each, rank + 1, SECTIONS)  # one's own comes last
        tile = turn % each
        row, column = place_of(tile, rows, columns, GROUP)
        end = tl.load(FIRSTS + section + 1)
        m0 = tl.load(FIRSTS + section) + row * BLOCK_M
        n0 = column * BLOCK_N
        if m0 < end:
            if HELD:
                wait(READY + tile, epoch, STATUS, rank, epoch)
            owner, place = owner_of(section, tile, WORLD, SECTIONS)
            if TO == "all":
                place = tile
            slot = rank * places + place
            if MULTIPLY:
                acc = tile_sum(
                    A, B, m0, n0, 0, tl.cdiv(K, BLOCK_K), end, N, K, a_m, a_k, b_k, b_n, BLOCK_M, BLOCK_N, BLOCK_K,
                    DESCRIPTORS, A_TURNED, B_TURNED, WIDE, PRECISION, INTERPRETED,
                )  # fmt: skip
            if TIMED and not HELD:
                tl.store(TIMES + (section * each + tile) * 3, clock())
            if MULTIPLY:
                left, right = halves(acc)
                _put_part(
                    left, 0, 0, INTO, into_m, m0, n0, end, N, slot, owner, BASES, rank,
                    BLOCK_M, BLOCK_N, WORLD, TO, PUT,
                )  # fmt: skip
                _put_part(
                    right, 0, BLOCK_N // 2, INTO, into_m, m0, n0, end, N, slot, owner, BASES, rank,
                    BLOCK_M, BLOCK_N, WORLD, TO, PUT,
                )  # fmt: skip
            else:  # as it is loaded, so that no number goes from thread to thread
                n = n0 + tl.arange(0, BLOCK_N)[None, :]
                for j in range(0, BLOCK_M, ROWS):
                    m = m0 + j + tl.arange(0, ROWS)[:, None]
                    at = A + (m.to(tl.int64) * a_m + n.to(tl.int64) * a_k)
                    some = tl.load(at, mask=(m < end) & (n < N), other=0.0)
                    _put_part(
                        some, j, 0, INTO, into_m, m0, n0, end, N, slot, owner, BASES, rank,
                        BLOCK_M, BLOCK_N, WORLD, TO, PUT,
                    )  # fmt: skip
            if TO == "matrix":
                if FLAG == "tile":
                    signal(READY + tile, epoch, BASES, rank, rank)
                else:
                    flag = FLAGS + rank
                    if FLAG == "row":
                        flag = FLAGS + rank * rows + row
                    _arrive_all(flag, BASES, rank, WORLD, PIECES)
            elif TO == "owner":
                signal(FLAGS + slot, epoch, BASES, rank, owner)
            else:
                _signal_all(FLAGS + slot, epoch, BASES, rank, WORLD)
            if TIMED and FLAG != "tile":
                tl.store(TIMES + (section * each + tile) * 3 + 1, clock())


@triton.jit(do_not_specialize=["rank", "steps", "crew", "slices", "rows"])
def send_sums(
    PARTIALS, INTO, ARRIVED, TIMES, BASES, rank, M, N, into_m, rows, steps, crew, slices,
    WORLD: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, TIMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Put tiles in parts to the matrix of every rank: a piece of ROWS rows for each program, which is one arrival."""
    tile = tl.program_id(0)
    row0 = tl.program_id(1) * ROWS
    first, last = owners_of(tile, steps, crew, slices, False)
    if first < last:  # else one program had all of it, and has sent it
        if TIMED:
            tl.store(TIMES + tile * 3, clock())
        total = sum_of_parts(PARTIALS, row0, first, last, BLOCK_M, BLOCK_N, SLOTS, ROWS, AT_ONCE)
        row, column = place_of(tile, rows, tl.cdiv(N, BLOCK_N), GROUP)
        _put_rows(total, INTO, into_m, row * BLOCK_M + row0, column * BLOCK_N, M, N, BASES, rank, WORLD, "all")
        _arrive_all(ARRIVED + rank, BASES, rank, WORLD, 1)
        if TIMED:
            tl.store(TIMES + tile * 3 + 1, clock())


@triton.jit(do_not_specialize=["rank", "epoch", "rows", "places"])
def receive(
    INBOX, OUT, FLAGS, ARRIVED, BEGUN, TIMES, BASES, STATUS, rank, epoch, M, N, out_m, rows, places,
    WORLD: tl.constexpr, STRIDE: tl.constexpr, SPREAD: tl.constexpr, TIMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up tiles whose parts came from all ranks, in the order of ranks, and store them, or put them to all.

    This rank has every STRIDE-th tile: one of as many as there are ranks, or all of its rows.
    """
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    program = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    r = tl.arange(0, BLOCK_M)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    own = places
    if STRIDE > 1:
        own = tl.cdiv(tl.maximum(rows * columns - rank, 0), STRIDE)
    for place in range(program, own, tl.num_programs(0)):
        tile = place
        if STRIDE > 1:
            tile = place * STRIDE + rank
        row, column = place_of(tile, rows, columns, GROUP)
        m0 = row * BLOCK_M
        if m0 < M:
            missing = 0
            for peer in range(WORLD):
                missing += tl.where(wait(FLAGS + peer * places + place, epoch, STATUS, peer, epoch), 0, 1)
            if TIMED:
                tl.store(TIMES + tile * 3 + 2, clock())
            for j in range(0, BLOCK_N, COLUMNS):
                at = INBOX + tl.cast(place, tl.int64) * SIZE + (r * BLOCK_N + (c + j))
                total = tl.load(at, cache_modifier=".cg").to(tl.float32)
                for peer in range(1, WORLD):
                    total += tl.load(at + tl.cast(peer, tl.int64) * places * SIZE, cache_modifier=".cg").to(tl.float32)
                total = tl.where(missing == 0, total, float("nan"))
                n0 = column * BLOCK_N + j
                if SPREAD:
                    _put_rows(total, OUT, out_m, m0, n0, M, N, BASES, rank, WORLD, "all")
                else:
                    _put_rows(total, OUT, out_m, m0, n0, M, N, BASES, rank, WORLD, "self")
            if SPREAD:
                _arrive_all(ARRIVED + rank, BASES, rank, WORLD, 1)
    if program == 0:
        _end(BEGUN, epoch, STATUS, WORLD)


@device
def _in_sight():
    """What a wait brought is there for copies by descriptors too, which go another way to memory."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rank", "epoch", "rows", "chunks"])
def gathered(
    A, B, OUT, ARRIVED, BEGUN, FIRSTS, TIMES, BASES, STATUS, rank, epoch,
    N, K, a_m, b_k, b_n, out_m, rows, chunks,
    WORLD: tl.constexpr, FETCH: tl.constexpr, TIMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, B_TURNED: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """OUT = A B, where A's rows come from all ranks, section by section, our own first.

    A tile waits for its row of tiles: `chunks` parts of it that its rank puts to us, or with FETCH puts at home,
    where we read them. A is a matrix then, of which descriptors are made here.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.cdiv(N, BLOCK_N)
    each = rows * columns
    M = tl.load(FIRSTS + WORLD)
    for turn in range(WORLD):
        section = section_of(turn, rank, WORLD)
        a = A
        if FETCH:
            a = translate(A, BASES, rank, section)
            if DESCRIPTORS:
                a = tl.make_tensor_descriptor(a, [M, K], [a_m, 1], [BLOCK_M, BLOCK_K])
        # a program goes on in a section where it was in the last one
        for tile in range((program + turn * (programs - each % programs)) % programs, each, programs):
            row, column = place_of(tile, rows, columns, GROUP)
            end = tl.load(FIRSTS + section + 1)
            m0 = tl.load(FIRSTS + section) + row * BLOCK_M
            n0 = column * BLOCK_N
            if m0 < end:
                wanted = tl.cast(chunks, tl.int64) * epoch
                came = wait(ARRIVED + section * rows + row, wanted, STATUS, section, epoch)
                if TIMED:
                    tl.store(TIMES + (section * each + tile) * 3 + 2, clock())
                if DESCRIPTORS and _PROXIES:
                    _in_sight()
                acc = tile_sum(
                    a, B, m0, n0, 0, tl.cdiv(K, BLOCK_K), end, N, K, a_m, 1, b_k, b_n, BLOCK_M, BLOCK_N, BLOCK_K,
                    DESCRIPTORS, False, B_TURNED, WIDE, PRECISION, INTERPRETED,
                )  # fmt: skip
                acc = tl.where(came, acc, float("nan"))
                if TIMED:
                    tl.store(TIMES + (section * each + tile) * 3, clock())
                left, right = halves(acc)
                _put_rows(left, OUT, out_m, m0, n0, end, N, BASES, rank, WORLD, "self")
                _put_rows(right, OUT, out_m, m0, n0 + BLOCK_N // 2, end, N, BASES, rank, WORLD, "self")
    if program == 0:
        _end(BEGUN, epoch, STATUS, WORLD)


@triton.jit(do_not_specialize=["epoch", "flags", "each", "numbers"])
def finish(OUT, ARRIVED, WANTED, BEGUN, STATUS, epoch, flags, each, numbers, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Wait for what all ranks put into a matrix: counts of `each` flags a rank, of which each call brings WANTED.

    Where one does not come, the matrix is NaN.
    """
    program = tl.program_id(0)
    missing = 0
    for flag in range(program, flags, tl.num_programs(0)):
        wanted = tl.load(WANTED + flag) * epoch
        missing += tl.where(wait(ARRIVED + flag, wanted, STATUS, flag // each, epoch), 0, 1)
    if missing > 0:
        for first in range(0, numbers, BLOCK):
            at = first + tl.arange(0, BLOCK)
            nothing = tl.full((BLOCK,), float("nan"), tl.float32)
            tl.store(OUT + at, nothing.to(OUT.dtype.element_ty), mask=at < numbers)
    if program == 0:
        _end(BEGUN, epoch, STATUS, WORLD)


@triton.jit(do_not_specialize=["epoch"])
def all_begun(BEGUN, STATUS, epoch, WORLD: tl.constexpr):
    """Wait until all programs that began the call run, on all ranks."""
    _end(BEGUN, epoch, STATUS, WORLD)
