"""How the kernels in Gluon walk a worklist: their own code for blocks and masks, with numbers for tensors.

There is no interpreter for Gluon: test_simulated.py plays a whole backward, and kernels run on a GPU in
test_hopper_gpu.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshflash import Layout, Mask
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Grads
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.triton.block_tables import make_run_tables

common = pytest.importorskip("meshflash.kernels.hopper.common")
simulated = pytest.importorskip("kernels.hopper.simulated")

CAUSAL = Mask.causal()
TOKENS = 700
WHOLE = ((range(TOKENS),), (range(TOKENS),))


def ranges_of(layout: Layout, q: int, k: int):
    return tuple(layout.ranges[q]), tuple(layout.ranges[k])


#: A short one first, and some that lie in one block with others.
LENGTHS = [5, 63, 1, 64, 200, 128, 239]
ZIGZAG, STRIPED = Layout.zigzag(TOKENS, 2), Layout.striped(TOKENS, 2)
WORK = {
    "full": (Mask.full(), *WHOLE),
    "causal": (CAUSAL, *WHOLE),
    "even": (CAUSAL, (range(512),), (range(512),)),
    "one short of blocks": (Mask.full(), (range(511),), (range(511),)),
    "documents, one short of blocks": (Mask.documents([383, 129, 188]), *WHOLE),
    "window": (CAUSAL & Mask.window(150, 0), *WHOLE),
    "both sides": (Mask.window(100, 60), *WHOLE),
    "more keys": (CAUSAL, (range(400, 700),), (range(700),)),
    "more queries": (CAUSAL, (range(700),), (range(100, 400),)),
    "documents": (CAUSAL & Mask.documents([300, 1, 0, 199, 200]), *WHOLE),
    "short documents": (CAUSAL & Mask.documents(LENGTHS), *WHOLE),
    "short and whole documents": (Mask.documents(LENGTHS), *WHOLE),
    "documents, window": (CAUSAL & Mask.window(40, 0) & Mask.documents(LENGTHS), *WHOLE),
    "documents, both sides": (Mask.window(30, 50) & Mask.documents(LENGTHS), *WHOLE),
    "documents, other keys": (Mask.documents([300, 400], k_lengths=[5, 695]), *WHOLE),
    "documents, zigzag": (CAUSAL & Mask.documents(LENGTHS), *ranges_of(ZIGZAG, 0, 0)),
    "documents, striped": (CAUSAL & Mask.documents(LENGTHS), *ranges_of(STRIPED, 1, 1)),
    "mostly short documents": (CAUSAL & Mask.documents([100] * 4 + [300]), *WHOLE),
    "no keys": (Mask.documents([300, 400], k_lengths=[0, 700]), *WHOLE),
    "padding": (CAUSAL & Mask.documents([400, 237], pad=True), *WHOLE),
    "padding, whole blocks": (CAUSAL & Mask.documents([397, 243], pad=True), *WHOLE),
    "padding, a short document": (CAUSAL & Mask.documents([[640, 5], [325, 320]], pad=True), *WHOLE),
    "documents by row": (CAUSAL & Mask.documents([[5, 395, 300], [700], [130, 1, 569]]), *WHOLE),
    "padding by row": (CAUSAL & Mask.documents([[400, 300], [397, 242]], pad=True), *WHOLE),
    "first keys": (CAUSAL & (Mask.window(64, 0) | Mask.first(130)), *WHOLE),
    "zigzag, own": (CAUSAL, *ranges_of(ZIGZAG, 0, 0)),
    "zigzag, other": (CAUSAL, *ranges_of(ZIGZAG, 1, 0)),
    "striped": (CAUSAL, *ranges_of(STRIPED, 1, 1)),
    "striped, other": (CAUSAL & Mask.window(301, 0), *ranges_of(STRIPED, 1, 0)),
    "striped, other way": (CAUSAL, *ranges_of(STRIPED, 0, 1)),
}


@pytest.fixture(autouse=True)
def numbers(monkeypatch):
    """The code's own names, for numbers."""
    return simulated.with_numbers(monkeypatch)


def dense(name: str):
    """Which rows of keys each row of queries sees, in each batch row."""
    mask, q, k = WORK[name]
    i, j = (np.concatenate([np.asarray(part) for part in ranges]) for ranges in (q, k))
    rows = range(mask.batch_rows or 1)
    return np.stack([np.asarray(mask.visible(i[:, None], j[None, :], batch=row), bool) for row in rows])


def walk(tables, size, other, by_key):
    """For each tile its batch row, first row, rows, and of every block where it begins and what is seen of it."""
    spans = tables.spans.numpy()
    for tile in tables.tiles.numpy():
        batch, row, rows, first, step, run, turns = map(int, tile)
        missing = size - rows if by_key else 0
        n = np.arange(size)
        positions = first + step * (n - missing)
        state = (run, 0, *common.load_run(spans, run))
        blocks = []
        for turn in range(turns):
            *state, fresh, block = common.next_block(
                turn, *state, spans, other, tables.single_run, tables.exact_begin, tables.clipped
            )
            *_, limit, least, most = state
            columns = np.arange(other)[None, :]
            seen = np.ones((size, other), bool)
            for part in range(0, size, 64):  # each group of warps decides by itself, for each side
                here = positions[part : part + 64, None]
                lowest, highest = first + step * (part - missing), first + step * (part + 63 - missing)
                low = here + least if tables.exact_begin else np.maximum(here + least, fresh)
                sides = {
                    "lower": (
                        columns >= low - block,
                        common.crosses_lower.fn(highest, least, fresh, block, tables.exact_begin),
                    ),
                    "upper": (columns <= here + most - block, common.crosses_upper.fn(lowest, most, block, other)),
                    "clipped": (here * 0 + columns < limit - block, common.crosses_end.fn(block, limit, other)),
                }
                for side, (inside, cut) in sides.items():
                    if getattr(tables, side) and cut:
                        seen[part : part + 64] &= inside
                    elif getattr(tables, side):
                        assert inside[: max(0, rows - part) if not by_key else 64].all(), side
            blocks.append((block, seen & (n >= missing)[:, None]))
        yield batch, row - missing, rows, missing, blocks


def left_to_the_rest(left, mine):
    """Every row is in a tile of the one or the other."""
    for batch, row, rows, *_ in left.tiles.tolist():
        assert not mine[batch, row : row + rows].any()
        mine[batch, row : row + rows] = True
    assert mine.all()


@pytest.mark.parametrize(("size", "other"), [(128, 128), (192, 128)])
@pytest.mark.parametrize("name", WORK)
def test_forward_tables_cover_every_visible_pair_once(name, size, other):
    want = dense(name)
    served, left = make_run_tables(worklist(*WORK[name]), False, size, other, 64, len(want), torch.device("cpu"))
    got = np.zeros(want.shape, int)
    mine = np.zeros(want.shape[:2], bool)
    for batch, row, rows, _, blocks in walk(served, size, other, by_key=False):
        mine[batch, row : row + rows] = True
        for block, seen in blocks:
            assert 0 <= block <= want.shape[2] - other  # nothing outside is read
            got[batch, row : row + rows, block : block + other] += seen[:rows]
    assert (got[mine] == want[mine]).all()
    left_to_the_rest(left, mine)
    if name in ("full", "causal", "even", "window", "more keys", "striped"):
        assert len(served) == -(-want.shape[1] // size)


@pytest.mark.parametrize("other", [64, 128])
@pytest.mark.parametrize("name", WORK)
def test_backward_tables_cover_every_visible_pair_once(name, other):
    want = dense(name).swapaxes(1, 2)
    served, left = make_run_tables(worklist(*WORK[name]), True, 128, other, 64, len(want), torch.device("cpu"), True)
    got = np.zeros(want.shape, int)
    mine = np.zeros(want.shape[:2], bool)
    for batch, row, rows, missing, blocks in walk(served, 128, other, by_key=True):
        assert row >= 0  # keys are read from where this begins
        assert bool(missing) <= served.partial_tiles
        mine[batch, row + missing : row + missing + rows] = True
        for block, seen in blocks:
            assert 0 <= block <= want.shape[2] - other
            assert not served.on_grid or block % other == 0
            got[batch, row : row + 128, block : block + other] += seen
    assert (got[mine] == want[mine]).all()
    left_to_the_rest(left, mine)
    assert served.on_grid == (name == "even" or not len(served))
    assert not served.clipped
    if name in ("full", "causal", "even", "window"):
        assert len(served) == -(-want.shape[1] // 128)


#: Work with rows of queries that see nothing, in one block with others.
GAPS = ("more queries", "striped, other way", "no keys", "padding", "padding by row", "padding, a short document")

#: Work with runs that begin within a block, where no band hides the rows before.
BEGINS_WITHIN = (
    "short and whole documents",
    "documents, one short of blocks",
    "documents, both sides",
    "documents, other keys",
    "zigzag, own",
)


@pytest.mark.parametrize("other", [64, 128])
@pytest.mark.parametrize("name", WORK)
def test_backward_tables_on_a_grid_cover_every_visible_pair_once(name, other):
    want = dense(name).swapaxes(1, 2)
    batch_rows, keys, queries = want.shape
    work = worklist(*WORK[name])
    served, left = make_run_tables(work, True, 128, other, 64, batch_rows, torch.device("cpu"), True, True)
    if name in GAPS:
        old, _ = make_run_tables(work, True, 128, other, 64, batch_rows, torch.device("cpu"), True)
        assert (served.on_grid, served.clipped) == (False, False)
        assert torch.equal(served.tiles, old.tiles)
        assert torch.equal(served.spans, old.spans)
        return
    assert served.on_grid
    assert served.aligned
    got = np.zeros((batch_rows, 128 + keys, queries + other), int)  # rows before the first, and after the last
    mine = np.zeros((batch_rows, keys), bool)
    for batch, row, _, missing, blocks in walk(served, 128, other, by_key=True):
        assert want[batch, max(0, row) : row + 128].any(axis=1).all()  # what nobody sees may be NaN, and is not read
        mine[batch, row + missing : row + 128] = True
        for block, seen in blocks:
            assert block % other == 0
            assert want[batch, :, block : block + other].any(axis=0).all()
            got[batch, 128 + row : 256 + row, block : block + other] += seen
    assert served.exact_begin == (name not in BEGINS_WITHIN)
    assert not got[:, :128].any()
    assert (got[:, 128:, :queries][mine] == want[mine]).all()
    left_to_the_rest(left, mine)


@pytest.mark.parametrize("rotate", [0, 5])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("name", WORK)
def test_query_heads_of_a_kv_head_walk_the_same_blocks(name, grid, group, rotate, numbers):
    """One loop over heads and blocks: each head meets what a walk of its own would, and none is left or met twice."""
    served, _ = make_run_tables(worklist(*WORK[name]), True, 128, 64, 64, 1, torch.device("cpu"), True, grid)
    rotate *= served.single_run  # as it is launched
    spans, first_head = served.spans.numpy(), 3 * group
    for program, tile in enumerate(served.tiles.tolist()):
        *_, run, turns = tile
        vars(numbers)["program_id"] = lambda axis, program=program: program
        alone, state = [], (run, 0, *common.load_run(spans, run))
        for turn in range(turns):
            *state, fresh, block = common.next_block(
                turn, *state, spans, 64, served.single_run, served.exact_begin, served.clipped
            )
            alone.append((*state[-2:], fresh, block))
        start = common.load_run(spans, run)
        head, left, ends = common.begin_gqa_loop(first_head, start[1], turns, group, served.single_run, rotate)
        state, met = (head, ends, run, left, *start), []
        for number in range(turns * group):
            *state, fresh, block = common.next_gqa_block(
                *(number, *state, spans, first_head, run, turns, 64, group, served.single_run, served.exact_begin),
                *(served.clipped, rotate),
            )
            met.append((state[0], *state[-2:], fresh, block))
        want = [(first_head + g, *block) for g in range(group) for block in alone]
        skipped = program * rotate % turns
        assert met == want[skipped:] + want[:skipped]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_gather_dq_converts_tiles_to_rows(dim, given):
    """In the order in which `_compute` stores a part: each half of a block is 64 x 64, by rows at dim 64."""
    size, scale, (batch, tokens, heads) = hopper_launch.BACKWARD[dim].block_m, 0.5, (2, 300, 3)
    tiles = -(-tokens // size)
    wide = torch.randn(batch, tiles * size, heads, dim)
    parts = wide.view(batch, tiles, size // 64, 64, heads, dim // 64, 64).permute(0, 4, 1, 2, 5, 3, 6)
    ordered = parts.reshape(-1, 4, 2, 8, 8, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)
    q = torch.empty(batch, tokens, heads, dim, dtype=torch.bfloat16)
    dq = torch.ones(q.shape) if given else torch.full(q.shape, torch.nan)
    sums = hopper_launch.DqSums(q, Grads(dq, q, q, add_dq=given), not given, size)
    if given:
        assert sums.rows is dq
        sums.add_in_tiles()
        assert sums.rows is dq, "what the ordinary kernel adds to"
    assert not sums.target.any()
    sums.target.copy_(ordered.flatten())
    sums.finalize(scale)
    torch.testing.assert_close(dq, wide[:, :tokens] * scale + given)


def test_runs_are_full_blocks_inside_their_spans():
    mask = CAUSAL & Mask.documents([40, 10, 61])
    for by_key in (False, True):
        work = worklist(mask, (range(111),), (range(111),))
        served, rest = make_run_tables(work, by_key, 32, 16, 8, 1, torch.device("cpu"))
        assert {row for _, row, *_ in rest.tiles.tolist()} == {40, 48}, "the document that is shorter than a block"
        assert all(rows <= 8 for _, _, rows, *_ in rest.tiles.tolist())
        spans = served.spans.tolist()
        for _, row, _, _, _, first, turns in served.tiles.tolist():
            begin, count, limit, *_ = spans[first]
            document = (0, 40) if row < 40 else (50, 111)
            assert document[0] <= begin < limit == document[1]
            assert count == turns
        assert served.lower  # a last block overlaps, and seen from keys the diagonal is below


def test_first_forward_tile_is_the_short_one():
    served, _ = make_run_tables(
        worklist(CAUSAL, (range(448),), (range(448),)), False, 192, 64, 64, 1, torch.device("cpu")
    )
    assert sorted((row, rows) for _, row, rows, *_ in served.tiles.tolist()) == [(0, 64), (64, 192), (256, 192)]


def test_bands_over_different_position_steps_go_to_the_portable_kernel():
    def served(mask, step):
        work = worklist(mask, (range(0, 256, 4),), (range(1, 256, step),))
        mine, rest = make_run_tables(work, False, 32, 16, 32, 1, torch.device("cpu"))
        return bool(len(mine)), bool(len(rest))

    assert served(CAUSAL, 4) == (True, False)
    assert served(CAUSAL, 2) == (False, True)
    assert served(Mask.full(), 2) == (True, False)


@pytest.mark.parametrize(("tiles", "heads", "section"), [(5, 6, 6), (5, 7, 3), (3, 8, 1), (1, 4, 4)])
def test_every_tile_of_every_head_is_one_work_item(tiles, heads, section, monkeypatch):
    forward = pytest.importorskip("meshflash.kernels.hopper.forward")
    monkeypatch.setattr(forward, "gl", SimpleNamespace(minimum=min))
    work = tiles * heads
    pieces = [forward._locate_tile.fn(number, tiles, heads, section, work, False) for number in range(work)]
    assert sorted(pieces) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    assert [head // section for _, head in pieces] == sorted(head // section for _, head in pieces)


def test_splits_of_the_tail_wave_are_the_last_work_items(monkeypatch):
    forward = pytest.importorskip("meshflash.kernels.hopper.forward")
    monkeypatch.setattr(forward, "gl", SimpleNamespace(minimum=min, where=lambda c, x, y: x if c else y))
    tiles, heads, left, parts = 5, 3, 2, 4
    whole = tiles * heads - left
    pieces = [forward._locate_tile.fn(number, tiles, heads, 1, whole, True) for number in range(whole + left * parts)]
    assert pieces[:whole] == [(n % tiles, n // tiles) for n in range(whole)]
    assert pieces[whole:] == [(tiles + n, heads - 1) for n in range(left * parts)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("tokens", "mask", "spread"),
    [
        (4096, CAUSAL, False),
        (4096, Mask.full(), False),
        (16384, CAUSAL, True),  # 8,256 queries on average
        (16384, Mask.full(), True),
        (65536, CAUSAL & Mask.window(4096, 0), False),
        (65536, CAUSAL & Mask.documents([4096] * 16), False),
    ],
)
def test_query_heads_are_spread_over_ctas_where_tiles_meet_many_queries(dim, tokens, mask, spread):
    config = hopper_launch.BACKWARD[dim]
    work = worklist(mask, (range(tokens),), (range(tokens),))
    tables, rest = make_run_tables(work, True, 128, config.block_m, 128, 1, torch.device("cpu"), filled=True, grid=True)
    assert not len(rest)
    assert hopper_launch.spreads_heads(tables, config) == spread


MASKS = [CAUSAL, Mask.full(), *(Mask.window(*width) for width in ((0, 0), (100, 0), (200, 30), (30, 200), (128, 128)))]


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        *((range(tokens), range(tokens)) for tokens in (193, 320, 515, 1000)),
        *((range(65, 65 + rows), range(700)) for rows in (1, 64, 129, 191, 193)),
        (range(576), range(150, 551)),
    ],
)
def test_warpgroups_skip_only_blocks_that_their_rows_do_not_see(queries, keys, groups, numbers, monkeypatch):
    forward = pytest.importorskip("meshflash.kernels.hopper.forward")
    monkeypatch.setattr(forward, "gl", numbers)
    rows_each, size, skipped = 64, 128, 0
    for mask in MASKS:
        work = worklist(mask, (queries,), (keys,))
        served, _ = make_run_tables(work, False, rows_each * groups, size, 64, 1, torch.device("cpu"))
        assert served.single_run
        for tile, run in zip(served.tiles.numpy(), served.spans.numpy(), strict=True):
            _, _, rows, first, step, _, turns = tile
            begin, blocks, limit, least, most = run
            for which in range(groups):
                end = min(rows, (which + 1) * rows_each)
                lowest, highest = (np.int32(first + step * row) for row in (which * rows_each, end - 1))
                with np.errstate(over="raise"):  # as numbers of 32 bits
                    before, own, after = forward._visible_blocks.fn(
                        rows,
                        lowest,
                        highest,
                        begin,
                        turns,
                        least,
                        most,
                        which,
                        rows_each,
                        size,
                        served.lower,
                        served.upper,
                    )
                assert before + own + after == turns
                assert own >= 1
                at = np.arange(which * rows_each, end, dtype=np.int64)[:, None]
                for turn in (*range(before), *range(before + own, turns)):
                    fresh = begin + (blocks - 1 - turn) * size
                    met = np.arange(fresh, min(fresh + size, limit), dtype=np.int64)
                    assert not ((met >= at + least) & (met <= at + most)).any()
                    skipped += 1
                assert rows > which * rows_each or own == 1  # a group without rows
    assert skipped > 0 or groups == 2


def hidden(met, at, least, most):
    """Whether some of the rows at these places do not see some of those that are met."""
    return ((met < at[:, None] + least) | (met > at[:, None] + most)).any()


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(
    ("mask", "queries", "keys", "once"),
    [
        (Mask.full(), range(1024), range(1024), True),
        (CAUSAL, range(1024), range(1024), True),
        (CAUSAL, range(640), range(1024), True),
        (CAUSAL, range(512, 1024), range(1024), True),
        (CAUSAL, range(545, 1024), range(1024), True),
        (CAUSAL, range(1, 1025), range(1024), False),
        (CAUSAL, range(700), range(700), False),  # a last block begins earlier
        (CAUSAL & Mask.window(300, 0), range(1024), range(1024), False),
        (CAUSAL & Mask.documents([512, 256, 256]), range(1024), range(1024), True),
        (CAUSAL & Mask.documents([448, 576]), range(1024), range(1024), False),
        (CAUSAL & Mask.first(128) | Mask.window(0, 0), range(1024), range(1024), False),
    ],
)
def test_masks_first_only_means_that_later_blocks_need_no_mask(mask, queries, keys, once, groups, numbers, monkeypatch):
    forward = pytest.importorskip("meshflash.kernels.hopper.forward")
    monkeypatch.setattr(forward, "gl", numbers)
    served, _ = make_run_tables(
        worklist(mask, (queries,), (keys,)), False, 64 * groups, 128, 64, 1, torch.device("cpu")
    )
    assert served.masks_first_only == once
    if not once:
        return
    for tile, run in zip(served.tiles.tolist(), served.spans.tolist(), strict=True):
        _, _, rows, first, step, _, turns = tile
        begin, blocks, _, least, most = run
        for which in range(-(-rows // 64)):
            at = first + step * np.arange(which * 64, min(rows, (which + 1) * 64))
            limits = at[0], at[-1], begin, turns, least, most
            before, own, _ = forward._visible_blocks.fn(rows, *limits, which, 64, 128, served.lower, served.upper)
            for turn in range(before + 1, before + own):
                met = begin + (blocks - 1 - turn) * 128 + np.arange(128)
                assert not hidden(met, at, least, most)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", WORK)
def test_masked_blocks_come_last_where_the_masked_loop_is_split(name, size):
    served, _ = make_run_tables(worklist(*WORK[name]), True, 128, size, 64, 1, torch.device("cpu"), True, True)
    if name in ("causal", "even", "more keys", "striped"):
        assert served.splits_masked_loop
    if name in ("full", "window", "both sides", "documents", "first keys"):
        assert not served.splits_masked_loop
    if not served.splits_masked_loop:
        return
    cleared = 0
    spans = served.spans.numpy()
    for tile, run in zip(served.tiles.tolist(), served.spans.tolist(), strict=True):
        _, _, rows, first, step, number, turns = tile
        begin, _, _, least, most = run
        state = number, 0, *common.load_run(spans, number)
        for turn in range(turns):  # as the warp that copies has them
            *state, _, block = common.next_block(
                turn, *state, spans, size, served.single_run, served.exact_begin, served.clipped
            )
            assert block == begin + (turns - 1 - turn) * size
        clear = common.num_unmasked_blocks.fn(rows, begin, turns, least, size, 128)
        assert clear == 0 or rows == 128
        for turn in range(clear):
            met = begin + (turns - 1 - turn) * size + np.arange(size)
            assert not hidden(met, first + step * np.arange(rows), least, most)
        if rows == 128 and clear < turns:
            met = begin + (turns - 1 - clear) * size + np.arange(size)
            assert hidden(met, first + step * np.arange(rows), least, most)
        cleared += clear
    assert cleared > 0
