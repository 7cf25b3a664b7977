"""Fused GEMM + collective kernels in Triton: tiles are sent as they are done, or computed as rows arrive.

Six kernels make up all collectives:

- `send` computes tiles, or reads tiles of an existing matrix, and stores them to peers.
- `send_split_tiles` adds and sends the split tiles that `hopper_all_scatter.send` left as partial sums.
- `reduce_tiles` waits for a tile's contribution from every rank and adds them in rank order, in float32.
- `gemm_gathered` computes tiles of A B as the rows of A arrive.
- `wait_all` waits for everything that a call brings to this rank.
- `wait_for_start` delays kernels on a side stream until the GEMM they wait on is resident.

Progress: `send` waits only for tiles of its own rank, and every rank launches it first. So no order of CTAs, and no
order in which one process launches the ranks it emulates, makes all of them wait for each other.

Flags: a flag is set to the call's epoch or counted up by it, and is never reset, so no reset races with the next
signal. If a peer does not signal in time, its elements become NaN and the heap's status names the rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.comm.heap.device import block_pointers, clock, device_function, put, signal, translate, wait
from meshflash.gemm.distributed import tiles as distributed_tiles
from meshflash.gemm.kernels.stream_k import ctas_of_tile, halves, sum_partials, swizzle_tile, tile_sum
from meshflash.kernels.triton.common import INTERPRETED as _INTERPRETED

section_of = device_function(distributed_tiles.section_of)
peer_of = device_function(distributed_tiles.peer_of)
reducer_of_tile = device_function(distributed_tiles.reducer_of_tile)

_HAS_ASYNC_PROXY = tl.constexpr(not _INTERPRETED)
#: Ranks that one store signals: one per lane of a warp.
_LANES = tl.constexpr(32)


@device_function
def _flag_on_all_ranks(flag, BASES, rank, first, WORLD: tl.constexpr):
    """Return pointers to one flag of ours on ranks first .. first + 31, and a mask of the ranks that exist.

    Each lane signals one rank, so the round trips overlap. The flag lies at the same offset in each rank's heap.
    """
    peers = first + tl.arange(0, _LANES)
    BYTES: tl.constexpr = flag.dtype.element_ty.primitive_bitwidth // 8
    exists = peers < WORLD
    distance = (tl.load(BASES + peers, mask=exists, other=0) - tl.load(BASES + rank)) // BYTES
    return flag + distance, exists


@device_function
def _signal_all(flag, epoch, BASES, rank, WORLD: tl.constexpr):
    """Set a flag on all ranks to an epoch: `signal` for every rank."""
    tl.debug_barrier()  # all threads of the CTA have stored before one of them signals
    for first in tl.static_range(0, WORLD, _LANES):
        flags, exists = _flag_on_all_ranks(flag, BASES, rank, first, WORLD)
        values = tl.zeros((_LANES,), flag.dtype.element_ty) + epoch
        tl.atomic_xchg(flags, values, mask=exists, sem="release", scope="sys")


@device_function
def _arrive_all(flag, BASES, rank, WORLD: tl.constexpr, COUNT: tl.constexpr):
    """Add COUNT to a flag on all ranks: `arrive` for every rank."""
    tl.debug_barrier()  # all threads of the CTA have stored before one of them signals
    for first in tl.static_range(0, WORLD, _LANES):
        flags, exists = _flag_on_all_ranks(flag, BASES, rank, first, WORLD)
        counts = tl.full((_LANES,), COUNT, flag.dtype.element_ty)
        tl.atomic_add(flags, counts, mask=exists, sem="release", scope="sys")


@device_function
def _announce_start(BEGUN, epoch, BASES, rank, WORLD: tl.constexpr):
    """Signal all ranks that this rank has begun a call, and so has read everything that earlier calls brought.

    BEGUN[r] is the epoch that rank r has begun; BEGUN[WORLD] counts the CTAs of this launch. The last CTA to start
    makes the announcement: from then on all CTAs are resident, so a kernel that waits for the flag takes no SM from
    them.
    """
    if tl.atomic_add(BEGUN + WORLD, 1) == tl.num_programs(0) - 1:
        tl.store(BEGUN + WORLD, 0)
        _signal_all(BEGUN + rank, epoch, BASES, rank, WORLD)


@device_function
def _wait_all_started(BEGUN, epoch, STATUS, WORLD: tl.constexpr):
    """Wait until all ranks have begun this call: the buffers of the previous call are then free for the next one."""
    for peer in range(WORLD):
        wait(BEGUN + peer, epoch, STATUS, peer, epoch)


@device_function
def _put_rows(
    values, INTO, into_m, m, n, M, N, BASES, rank,
    WORLD: tl.constexpr, PUT: tl.constexpr,
):  # fmt: skip
    """Store a block at row m and column n of a matrix: on all ranks, on all other ranks, or only on this one."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    at, inside = block_pointers(INTO + tl.cast(m, tl.int64) * into_m + n, into_m, M - m, N - n, ROWS, COLUMNS)
    rounded = values.to(INTO.dtype.element_ty)
    if PUT == "self":
        tl.store(at, rounded, mask=inside)
    else:
        for step in tl.static_range(WORLD):
            if PUT == "all" or step < WORLD - 1:  # the last peer is this rank
                put(at, rounded, BASES, rank, peer_of(step, rank, WORLD), inside)


@device_function
def _put_slot(
    values, INTO, slot, row, column, owner, BASES, rank,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WORLD: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Store a block of a tile into a slot of the inbox of the reducing rank, or of all ranks."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    inside = (row + tl.arange(0, ROWS))[:, None] * WIDTH + (column + tl.arange(0, COLUMNS))[None, :]
    at = INTO + tl.cast(slot, tl.int64) * (HEIGHT * WIDTH) + inside
    rounded = values.to(INTO.dtype.element_ty)
    if TO == "owner":
        put(at, rounded, BASES, rank, owner)
    else:
        for step in tl.static_range(WORLD):
            put(at, rounded, BASES, rank, peer_of(step, rank, WORLD))


@device_function
def _put_part(
    values, row, column, INTO, into_m, m0, n0, M, N, slot, owner, BASES, rank,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WORLD: tl.constexpr, TO: tl.constexpr, PUT: tl.constexpr,
):  # fmt: skip
    """Store a block of a tile, at a row and column inside it, to the tile's destination."""
    if TO == "matrix":
        _put_rows(values, INTO, into_m, m0 + row, n0 + column, M, N, BASES, rank, WORLD, PUT)
    else:
        _put_slot(values, INTO, slot, row, column, owner, BASES, rank, HEIGHT, WIDTH, WORLD, TO)


@triton.jit(do_not_specialize=["rank", "epoch", "tiles_m", "num_slots"])
def send(
    A, B, INTO, FLAGS, READY, BEGUN, SECTION_STARTS, TIMES, BASES, STATUS, rank, epoch,
    N, K, a_m, a_k, b_k, b_n, into_m, tiles_m, num_slots,
    WORLD: tl.constexpr, SECTIONS: tl.constexpr, TO: tl.constexpr, PUT: tl.constexpr, FLAG: tl.constexpr,
    ARRIVALS: tl.constexpr, MULTIPLY: tl.constexpr, WAIT_READY: tl.constexpr, TIMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, L2_SWIZZLE: tl.constexpr, ROWS: tl.constexpr,
    USE_TMA: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store the tiles of A B to other ranks; without MULTIPLY the tiles of A itself, ROWS rows at a time.

    TO is the destination:
      "matrix"  the tile's place in a matrix, on the ranks that PUT selects ("all", "others" or "self");
      "all"     this rank's slot for the tile in the inbox of every rank (one-shot all-reduce);
      "owner"   the same slot, but only on the rank that reduces the tile.
    FLAG is raised when the tile is stored:
      "source"  adds ARRIVALS to a counter of everything this rank sends, on all ranks;
      "row"     adds ARRIVALS to a counter of the tile's row of tiles, on all ranks;
      "tile"    sets this rank's own READY flag of the tile, for a second `send` that runs on the comm SMs;
      "slot"    sets the flag of the inbox slot, on the ranks that hold it.
    With WAIT_READY a tile waits for its READY flag first. Rows come in SECTIONS of at most `tiles_m` rows of tiles,
    which begin at SECTION_STARTS.
    """
    cta = tl.program_id(0)
    if not WAIT_READY:
        _announce_start(BEGUN, epoch, BASES, rank, WORLD)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    for item in range(cta, SECTIONS * tiles, tl.num_programs(0)):
        # peers wait for their sections, so they come first; this rank's own section comes last
        section = section_of(item // tiles, rank + 1, SECTIONS)
        tile = item % tiles
        row, column = swizzle_tile(tile, tiles_m, tiles_n, L2_SWIZZLE)
        end = tl.load(SECTION_STARTS + section + 1)
        m0 = tl.load(SECTION_STARTS + section) + row * BLOCK_M
        n0 = column * BLOCK_N
        if m0 < end:  # sections may have fewer rows of tiles than tiles_m
            if WAIT_READY:
                wait(READY + tile, epoch, STATUS, rank, epoch)
            owner, tile_slot = reducer_of_tile(section, tile, WORLD, SECTIONS)
            if TO == "all":
                tile_slot = tile
            slot = rank * num_slots + tile_slot  # inboxes hold one row of slots for each sending rank
            if MULTIPLY:
                acc = tile_sum(
                    A, B, m0, n0, 0, tl.cdiv(K, BLOCK_K), end, N, K, a_m, a_k, b_k, b_n, BLOCK_M, BLOCK_N, BLOCK_K,
                    USE_TMA, A_TRANSPOSED, B_TRANSPOSED, INT64_OFFSETS, PRECISION, INTERPRETED,
                )  # fmt: skip
            if TIMED and not WAIT_READY:
                tl.store(TIMES + (section * tiles + tile) * 3, clock())
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
            else:  # strips of ROWS rows in the layout of the load: no shuffle between threads
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
                        flag = FLAGS + rank * tiles_m + row
                    _arrive_all(flag, BASES, rank, WORLD, ARRIVALS)
            elif TO == "owner":
                signal(FLAGS + slot, epoch, BASES, rank, owner)
            else:
                _signal_all(FLAGS + slot, epoch, BASES, rank, WORLD)
            if TIMED and FLAG != "tile":
                tl.store(TIMES + (section * tiles + tile) * 3 + 1, clock())


@triton.jit(do_not_specialize=["rank", "iters_per_tile", "ctas_per_group", "iters_per_group", "tiles_m"])
def send_split_tiles(
    PARTIALS, INTO, ARRIVED, TIMES, BASES, rank, M, N, into_m, tiles_m, iters_per_tile, ctas_per_group, iters_per_group,
    WORLD: tl.constexpr, PARTIALS_PER_CTA: tl.constexpr, ROWS: tl.constexpr, LOADS_IN_FLIGHT: tl.constexpr,
    TIMED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, L2_SWIZZLE: tl.constexpr,
):  # fmt: skip
    """Add split tiles and store them to the matrix of every rank; each CTA has ROWS rows, which count as one arrival.

    The partial sums are those of `hopper_all_scatter.send`, added in CTA order. The grid is (split tiles, ARRIVALS).
    """
    tile = tl.program_id(0)
    row0 = tl.program_id(1) * ROWS
    first, last = ctas_of_tile(tile, iters_per_tile, ctas_per_group, iters_per_group, False)
    if first < last:  # a tile that one CTA has completed alone was sent by that CTA
        if TIMED:
            tl.store(TIMES + tile * 3, clock())
        total = sum_partials(PARTIALS, row0, first, last, BLOCK_M, BLOCK_N, PARTIALS_PER_CTA, ROWS, LOADS_IN_FLIGHT)
        row, column = swizzle_tile(tile, tiles_m, tl.cdiv(N, BLOCK_N), L2_SWIZZLE)
        _put_rows(total, INTO, into_m, row * BLOCK_M + row0, column * BLOCK_N, M, N, BASES, rank, WORLD, "all")
        _arrive_all(ARRIVED + rank, BASES, rank, WORLD, 1)
        if TIMED:
            tl.store(TIMES + tile * 3 + 1, clock())


@triton.jit(do_not_specialize=["rank", "epoch", "tiles_m", "num_slots"])
def reduce_tiles(
    INBOX, OUT, FLAGS, ARRIVED, BEGUN, TIMES, BASES, STATUS, rank, epoch, M, N, out_m, tiles_m, num_slots,
    WORLD: tl.constexpr, STRIDE: tl.constexpr, BROADCAST: tl.constexpr, TIMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, L2_SWIZZLE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reduce the tiles of this rank from the contributions of all ranks, and store them, here or on all ranks.

    Contributions are added in rank order in float32, so every rank gets the same bits whichever rank reduces. With
    STRIDE > 1 (two-shot all-reduce) this rank reduces every STRIDE-th tile and BROADCAST stores the sums to all ranks;
    with STRIDE 1 it reduces all tiles it received (one-shot all-reduce, reduce-scatter). Every CTA waits for the flag
    of a slot before it reads the slot; CTA 0 also waits until all ranks have begun this call.
    """
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    cta = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    r = tl.arange(0, BLOCK_M)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    num_own = num_slots
    if STRIDE > 1:
        num_own = tl.cdiv(tl.maximum(tiles_m * tiles_n - rank, 0), STRIDE)
    for tile_slot in range(cta, num_own, tl.num_programs(0)):
        tile = tile_slot
        if STRIDE > 1:
            tile = tile_slot * STRIDE + rank
        row, column = swizzle_tile(tile, tiles_m, tiles_n, L2_SWIZZLE)
        m0 = row * BLOCK_M
        if m0 < M:
            missing = 0
            for peer in range(WORLD):
                missing += tl.where(wait(FLAGS + peer * num_slots + tile_slot, epoch, STATUS, peer, epoch), 0, 1)
            if TIMED:
                tl.store(TIMES + tile * 3 + 2, clock())
            for j in range(0, BLOCK_N, COLUMNS):
                # .cg skips L1, which is not coherent with the stores of peers
                at = INBOX + tl.cast(tile_slot, tl.int64) * SIZE + (r * BLOCK_N + (c + j))
                total = tl.load(at, cache_modifier=".cg").to(tl.float32)
                for peer in range(1, WORLD):
                    theirs = at + tl.cast(peer, tl.int64) * num_slots * SIZE
                    total += tl.load(theirs, cache_modifier=".cg").to(tl.float32)
                total = tl.where(missing == 0, total, float("nan"))
                n0 = column * BLOCK_N + j
                if BROADCAST:
                    _put_rows(total, OUT, out_m, m0, n0, M, N, BASES, rank, WORLD, "all")
                else:
                    _put_rows(total, OUT, out_m, m0, n0, M, N, BASES, rank, WORLD, "self")
            if BROADCAST:
                _arrive_all(ARRIVED + rank, BASES, rank, WORLD, 1)
    if cta == 0:
        _wait_all_started(BEGUN, epoch, STATUS, WORLD)


@device_function
def _fence_async_proxy():
    """Make data that a wait has acquired visible to TMA loads, which go through the async proxy."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rank", "epoch", "tiles_m", "chunks_per_row"])
def gemm_gathered(
    A, B, OUT, ARRIVED, BEGUN, SECTION_STARTS, TIMES, BASES, STATUS, rank, epoch,
    N, K, a_m, b_k, b_n, out_m, tiles_m, chunks_per_row,
    WORLD: tl.constexpr, READ_PEER: tl.constexpr, TIMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, L2_SWIZZLE: tl.constexpr,
    USE_TMA: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute OUT = A B, where the rows of A come from all ranks, one section per rank, this rank's own first.

    A tile waits until its row of tiles of A is complete: `chunks_per_row` arrivals of the rank that owns it. That rank
    stores the rows into our heap; with READ_PEER it stores them into its own heap and we read them there. A is then a
    pointer, and the kernel makes TMA descriptors of the peers' matrices itself.
    """
    cta = tl.program_id(0)
    num_ctas = tl.num_programs(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    M = tl.load(SECTION_STARTS + WORLD)
    for step in range(WORLD):
        section = section_of(step, rank, WORLD)
        a = A
        if READ_PEER:
            a = translate(A, BASES, rank, section)
            if USE_TMA:
                a = tl.make_tensor_descriptor(a, [M, K], [a_m, 1], [BLOCK_M, BLOCK_K])
        # continue the round-robin of the previous section, so that the first CTAs do not get all remainders
        for tile in range((cta + step * (num_ctas - tiles % num_ctas)) % num_ctas, tiles, num_ctas):
            row, column = swizzle_tile(tile, tiles_m, tiles_n, L2_SWIZZLE)
            end = tl.load(SECTION_STARTS + section + 1)
            m0 = tl.load(SECTION_STARTS + section) + row * BLOCK_M
            n0 = column * BLOCK_N
            if m0 < end:
                expected = tl.cast(chunks_per_row, tl.int64) * epoch  # counters grow from call to call
                has_arrived = wait(ARRIVED + section * tiles_m + row, expected, STATUS, section, epoch)
                if TIMED:
                    tl.store(TIMES + (section * tiles + tile) * 3 + 2, clock())
                if USE_TMA and _HAS_ASYNC_PROXY:
                    _fence_async_proxy()
                acc = tile_sum(
                    a, B, m0, n0, 0, tl.cdiv(K, BLOCK_K), end, N, K, a_m, 1, b_k, b_n, BLOCK_M, BLOCK_N, BLOCK_K,
                    USE_TMA, False, B_TRANSPOSED, INT64_OFFSETS, PRECISION, INTERPRETED,
                )  # fmt: skip
                acc = tl.where(has_arrived, acc, float("nan"))  # no silent garbage where a rank was lost
                if TIMED:
                    tl.store(TIMES + (section * tiles + tile) * 3, clock())
                left, right = halves(acc)
                _put_rows(left, OUT, out_m, m0, n0, end, N, BASES, rank, WORLD, "self")
                _put_rows(right, OUT, out_m, m0, n0 + BLOCK_N // 2, end, N, BASES, rank, WORLD, "self")
    if cta == 0:
        _wait_all_started(BEGUN, epoch, STATUS, WORLD)


@triton.jit(do_not_specialize=["epoch", "flags", "flags_per_rank", "num_elements"])
def wait_all(
    OUT, ARRIVED, EXPECTED, BEGUN, STATUS, epoch, flags, flags_per_rank, num_elements,
    WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait for everything that all ranks store into a matrix in this call.

    Each rank has `flags_per_rank` counters, and each call adds EXPECTED to them. If one does not arrive in time, the
    whole matrix is set to NaN.
    """
    cta = tl.program_id(0)
    missing = 0
    for flag in range(cta, flags, tl.num_programs(0)):
        expected = tl.load(EXPECTED + flag) * epoch
        missing += tl.where(wait(ARRIVED + flag, expected, STATUS, flag // flags_per_rank, epoch), 0, 1)
    if missing > 0:
        for first in range(0, num_elements, BLOCK):
            at = first + tl.arange(0, BLOCK)
            nan = tl.full((BLOCK,), float("nan"), tl.float32)
            tl.store(OUT + at, nan.to(OUT.dtype.element_ty), mask=at < num_elements)
    if cta == 0:
        _wait_all_started(BEGUN, epoch, STATUS, WORLD)


@triton.jit(do_not_specialize=["epoch"])
def wait_for_start(BEGUN, STATUS, epoch, WORLD: tl.constexpr):
    """Wait until all CTAs of the call's first kernel are resident, on all ranks.

    Kernels on a side stream launch after this one: started earlier, their CTAs could occupy the SMs of the GEMM they
    wait on, and neither would make progress.
    """
    _wait_all_started(BEGUN, epoch, STATUS, WORLD)
