"""How the Hopper kernels walk a worklist: their own code for blocks and masks, called with Python ints.

Gluon has no interpreter. test_simulated.py simulates a whole backward; test_hopper_gpu.py and its neighbours run the
kernels on a GPU.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshflash import Layout, Mask
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Features, Grads, Inputs, Rows, new_outputs
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.hopper import split_kv
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.launches import Launcher
from meshflash.kernels.triton import kernel as triton_kernel
from meshflash.kernels.triton.block_tables import make_run_tables

common = pytest.importorskip("meshflash.kernels.hopper.common")
simulated = pytest.importorskip("kernels.hopper.simulated")

CAUSAL = Mask.causal()
TOKENS = 700
WHOLE = ((range(TOKENS),), (range(TOKENS),))


def ranges_of(layout: Layout, q: int, k: int):
    return tuple(layout.ranges[q]), tuple(layout.ranges[k])


def keys(begin: int, end: int) -> Mask:
    """Return the mask in which all queries see some keys."""
    return Mask.slices([(0, TOKENS)], [(begin, end)])


#: Document lengths: a short one first, and some that share a block with others.
LENGTHS = [5, 63, 1, 64, 200, 128, 239]
ZIGZAG, STRIPED = Layout.zigzag(TOKENS, 2), Layout.striped(TOKENS, 2)
WORK = {
    "full": (Mask.full(), *WHOLE),
    "causal": (CAUSAL, *WHOLE),
    "even": (CAUSAL, (range(512),), (range(512),)),
    "one short of full blocks": (Mask.full(), (range(511),), (range(511),)),
    "documents, one short of full blocks": (Mask.documents([383, 129, 188]), *WHOLE),
    "window": (CAUSAL & Mask.window(150, 0), *WHOLE),
    "both sides": (Mask.window(100, 60), *WHOLE),
    "more keys": (CAUSAL, (range(400, 700),), (range(700),)),
    "more queries": (CAUSAL, (range(700),), (range(100, 400),)),
    "documents": (CAUSAL & Mask.documents([300, 1, 0, 199, 200]), *WHOLE),
    "short documents": (CAUSAL & Mask.documents(LENGTHS), *WHOLE),
    "short full documents": (Mask.documents(LENGTHS), *WHOLE),
    "documents, window": (CAUSAL & Mask.window(40, 0) & Mask.documents(LENGTHS), *WHOLE),
    "documents, both sides": (Mask.window(30, 50) & Mask.documents(LENGTHS), *WHOLE),
    "documents, other keys": (Mask.documents([300, 400], k_lengths=[5, 695]), *WHOLE),
    "documents, zigzag": (CAUSAL & Mask.documents(LENGTHS), *ranges_of(ZIGZAG, 0, 0)),
    "documents, striped": (CAUSAL & Mask.documents(LENGTHS), *ranges_of(STRIPED, 1, 1)),
    "mostly short documents": (CAUSAL & Mask.documents([100] * 4 + [300]), *WHOLE),
    "document without keys": (Mask.documents([300, 400], k_lengths=[0, 700]), *WHOLE),
    "padding": (CAUSAL & Mask.documents([400, 237], pad=True), *WHOLE),
    "padding, whole blocks": (CAUSAL & Mask.documents([397, 243], pad=True), *WHOLE),
    "padding, a short document": (CAUSAL & Mask.documents([[640, 5], [325, 320]], pad=True), *WHOLE),
    "image spans": (CAUSAL | Mask.slices([(100, 250), (400, 633)], [(100, 250), (400, 633)]), *WHOLE),
    "slices": (Mask.slices([(0, 300), (250, 700)], [(0, 400), (128, 700)], ["inv_causal", "bi_causal"]), *WHOLE),
    "two bands on the same keys": (CAUSAL | Mask.slices([(0, 500)], [(200, 700)], "inv_causal"), *WHOLE),
    # neighbouring runs that one band does not describe: it would hide keys of the other run from some rows
    "lower side beyond its run": (Mask.window(100, None) & keys(0, 200) | keys(200, 700), *WHOLE),
    "upper side before its run": (keys(0, 400) | Mask.window(None, 100) & keys(400, 700), *WHOLE),
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
def scalar_gl(monkeypatch):
    """Make the kernels' scalar functions callable with ints; return their patched `gl` namespace."""
    return simulated.patch_scalar_functions(monkeypatch)


def dense(name: str):
    """Return the dense boolean mask of a case, [batch row, query, key]."""
    mask, q, k = WORK[name]
    i, j = (np.concatenate([np.asarray(positions) for positions in ranges]) for ranges in (q, k))
    rows = range(mask.batch_rows or 1)
    return np.stack([np.asarray(mask.visible(i[:, None], j[None, :], batch=row), bool) for row in rows])


def walk(tables, size, other, by_key):
    """Yield each tile's batch row, first row, number of rows, missing rows, and blocks with their visible elements."""
    spans = tables.spans.numpy()
    for tile in tables.tiles.numpy():
        batch, row, rows, first, step, run, num_blocks = map(int, tile)
        missing = size - rows if by_key else 0
        n = np.arange(size)
        positions = first + step * (n - missing)
        state = (run, 0, *common.load_run(spans, run))
        blocks = []
        for n_block in range(num_blocks):
            *state, first_new, block = common.next_block(
                n_block, *state, spans, other, tables.single_run, tables.exact_begin, tables.clipped
            )
            *_, run_end, band_lo, band_hi = state
            columns = np.arange(other)[None, :]
            visible = np.ones((size, other), bool)
            for wg_row in range(0, size, 64):  # each warpgroup of 64 rows decides for itself which sides to mask
                here = positions[wg_row : wg_row + 64, None]
                lowest, highest = first + step * (wg_row - missing), first + step * (wg_row + 63 - missing)
                low = here + band_lo if tables.exact_begin else np.maximum(here + band_lo, first_new)
                sides = {
                    "lower": (
                        columns >= low - block,
                        common.crosses_lower.fn(highest, band_lo, first_new, block, tables.exact_begin),
                    ),
                    "upper": (
                        columns <= here + band_hi - block,
                        common.crosses_upper.fn(lowest, band_hi, block, other),
                    ),
                    "clipped": (here * 0 + columns < run_end - block, common.crosses_end.fn(block, run_end, other)),
                }
                for side, (inside, crosses) in sides.items():
                    if getattr(tables, side) and crosses:
                        visible[wg_row : wg_row + 64] &= inside
                    elif getattr(tables, side):
                        assert inside[: max(0, rows - wg_row) if not by_key else 64].all(), side
            blocks.append((block, visible & (n >= missing)[:, None]))
        yield batch, row - missing, rows, missing, blocks


def check_portable_covers_the_other_rows(portable, covered):
    """Check that each row not yet covered is in exactly one tile of the portable kernel; mark it as covered."""
    for batch, row, rows, *_ in portable.tiles.tolist():
        assert not covered[batch, row : row + rows].any()
        covered[batch, row : row + rows] = True
    assert covered.all()


@pytest.mark.parametrize(("size", "other"), [(128, 128), (192, 128)])
@pytest.mark.parametrize("name", WORK)
def test_forward_tables_cover_every_visible_pair_once(name, size, other):
    want = dense(name)
    served, portable = make_run_tables(worklist(*WORK[name]), False, size, other, 64, len(want), torch.device("cpu"))
    got = np.zeros(want.shape, int)
    covered = np.zeros(want.shape[:2], bool)
    for batch, row, rows, _, blocks in walk(served, size, other, by_key=False):
        covered[batch, row : row + rows] = True
        for block, visible in blocks:
            assert 0 <= block <= want.shape[2] - other  # no reads outside of the tensor
            got[batch, row : row + rows, block : block + other] += visible[:rows]
    assert (got[covered] == want[covered]).all()
    check_portable_covers_the_other_rows(portable, covered)
    if name in ("full", "causal", "even", "window", "more keys", "striped"):
        assert len(served) == -(-want.shape[1] // size)


@pytest.mark.parametrize("other", [64, 128])
@pytest.mark.parametrize("name", WORK)
def test_backward_tables_cover_every_visible_pair_once(name, other):
    want = dense(name).swapaxes(1, 2)
    served, portable = make_run_tables(
        worklist(*WORK[name]), True, 128, other, 64, len(want), torch.device("cpu"), True
    )
    got = np.zeros(want.shape, int)
    covered = np.zeros(want.shape[:2], bool)
    for batch, row, rows, missing, blocks in walk(served, 128, other, by_key=True):
        assert row >= 0  # the kernel reads keys from this row on
        assert bool(missing) <= served.partial_tiles
        covered[batch, row + missing : row + missing + rows] = True
        for block, visible in blocks:
            assert 0 <= block <= want.shape[2] - other
            assert not served.on_grid or block % other == 0
            got[batch, row : row + 128, block : block + other] += visible
    assert (got[covered] == want[covered]).all()
    check_portable_covers_the_other_rows(portable, covered)
    assert served.on_grid == (name == "even" or not len(served))
    assert not served.clipped
    if name in ("full", "causal", "even", "window"):
        assert len(served) == -(-want.shape[1] // 128)


#: Cases with query rows that see nothing, in one block with rows that do.
GAPS = (
    "more queries",
    "striped, other way",
    "document without keys",
    "padding",
    "padding by row",
    "padding, a short document",
)

#: Cases with runs that begin within a block, where no band hides the rows before.
BEGINS_WITHIN = (
    "short full documents",
    "documents, one short of full blocks",
    "documents, both sides",
    "documents, other keys",
    "image spans",
    "slices",
)


@pytest.mark.parametrize("other", [64, 128])
@pytest.mark.parametrize("name", WORK)
def test_backward_tables_on_a_grid_cover_every_visible_pair_once(name, other):
    want = dense(name).swapaxes(1, 2)
    batch_rows, keys, queries = want.shape
    work = worklist(*WORK[name])
    served, portable = make_run_tables(work, True, 128, other, 64, batch_rows, torch.device("cpu"), True, True)
    if name in GAPS:
        off_grid, _ = make_run_tables(work, True, 128, other, 64, batch_rows, torch.device("cpu"), True)
        assert (served.on_grid, served.clipped) == (False, False)
        assert torch.equal(served.tiles, off_grid.tiles)
        assert torch.equal(served.spans, off_grid.spans)
        return
    assert served.on_grid
    assert served.aligned
    got = np.zeros((batch_rows, 128 + keys, queries + other), int)  # with space before the first row and after the last
    covered = np.zeros((batch_rows, keys), bool)
    for batch, row, _, missing, blocks in walk(served, 128, other, by_key=True):
        assert (
            want[batch, max(0, row) : row + 128].any(axis=1).all()
        )  # unseen rows may be NaN, so they must not be read
        covered[batch, row + missing : row + 128] = True
        for block, visible in blocks:
            assert block % other == 0
            assert want[batch, :, block : block + other].any(axis=0).all()
            got[batch, 128 + row : 256 + row, block : block + other] += visible
    assert served.exact_begin == (name not in BEGINS_WITHIN)
    assert not got[:, :128].any()
    assert (got[:, 128:, :queries][covered] == want[covered]).all()
    check_portable_covers_the_other_rows(portable, covered)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_tiles_of_a_ranks_own_zigzag_shard_have_a_single_run(world, by_key):
    layout = Layout.zigzag(2048 * world, world)
    for rank in range(world):
        own = tuple(layout.ranges[rank])
        served, rest = make_run_tables(
            worklist(CAUSAL, own, own), by_key, 128, 128, 64, 1, torch.device("cpu"), by_key, by_key
        )
        assert served.single_run
        assert served.exact_begin
        assert served.splits_masked_loop == by_key
        assert served.masks_first_only == (not by_key)
        assert not len(rest)


@pytest.mark.parametrize("rotate", [0, 5])
@pytest.mark.parametrize("gqa_ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("name", WORK)
def test_query_heads_of_a_kv_head_walk_the_same_blocks(name, grid, gqa_ratio, rotate, scalar_gl):
    """The joint loop over heads and blocks visits each head's blocks exactly once, as separate loops would."""
    served, _ = make_run_tables(worklist(*WORK[name]), True, 128, 64, 64, 1, torch.device("cpu"), True, grid)
    rotate *= served.single_run  # the launch rotates only tiles of a single run
    spans, first_head = served.spans.numpy(), 3 * gqa_ratio
    for cta, tile in enumerate(served.tiles.tolist()):
        *_, run, num_blocks = tile
        vars(scalar_gl)["program_id"] = lambda axis, cta=cta: cta
        alone, state = [], (run, 0, *common.load_run(spans, run))
        for n_block in range(num_blocks):
            *state, first_new, block = common.next_block(
                n_block, *state, spans, 64, served.single_run, served.exact_begin, served.clipped
            )
            alone.append((*state[-2:], first_new, block))
        start = common.load_run(spans, run)
        head, left, ends = common.begin_gqa_loop(first_head, start[1], num_blocks, gqa_ratio, served.single_run, rotate)
        state, visited = (head, ends, run, left, *start), []
        for index in range(num_blocks * gqa_ratio):
            *state, first_new, block = common.next_gqa_block(
                *(index, *state, spans, first_head, run, num_blocks, 64, gqa_ratio),
                *(served.single_run, served.exact_begin, served.clipped, rotate),
            )
            visited.append((state[0], *state[-2:], first_new, block))
        want = [(first_head + g, *block) for g in range(gqa_ratio) for block in alone]
        skipped = cta * rotate % num_blocks
        assert visited == want[skipped:] + want[:skipped]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_gather_dq_converts_tiles_to_rows(dim, accumulate):
    """Fill the tiles in the order of the kernel's stores: each half of a block is 64 x 64, by rows at dim 64."""
    size, scale, (batch, tokens, heads) = hopper_launch.BACKWARD[dim].block_m, 0.5, (2, 300, 3)
    tiles = -(-tokens // size)
    wide = torch.randn(batch, tiles * size, heads, dim)
    halves = wide.view(batch, tiles, size // 64, 64, heads, dim // 64, 64).permute(0, 4, 1, 2, 5, 3, 6)
    ordered = halves.reshape(-1, 4, 2, 8, 8, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)
    q = torch.empty(batch, tokens, heads, dim, dtype=torch.bfloat16)
    dq = torch.ones(q.shape) if accumulate else torch.full(q.shape, torch.nan)
    sums = hopper_launch.DqSums(Launcher(), q, Grads(dq, q, q, add_dq=accumulate), not accumulate, size)
    if accumulate:
        assert sums.rows is dq
        sums.add_in_tiles()
        assert sums.rows is dq, "the portable kernel must add to the given dq"
    assert not sums.target.any()
    sums.target.copy_(ordered.flatten())
    sums.finalize(scale)
    torch.testing.assert_close(dq, wide[:, :tokens] * scale + accumulate)


@pytest.mark.parametrize("shifts", [1, 4])
@pytest.mark.parametrize(("tokens", "block_m"), [(300, 128), (61, 64), (128, 128)])
def test_preprocess_computes_delta_and_fills_the_sums_with_zeros(tokens, block_m, shifts):
    """Blocks of the sums may reach further than the padded rows; nothing beyond either is written."""
    batch, heads, dim = 2, 3, 64
    out, dout = torch.randn(2, batch, tokens, heads, dim).bfloat16()
    lse = torch.randn(batch, heads, tokens)
    lse[0, 1, 5] = -torch.inf
    q = torch.empty(batch, tokens, heads, dim, dtype=torch.bfloat16)
    sums = hopper_launch.DqSums(Launcher(), q, Grads(q, q, q), True, block_m, zeroed=False)
    guarded = torch.full((len(sums.target) + 4096,), torch.nan)
    sums.target = guarded[: len(sums.target)]
    padded = -(-tokens // 4) * 4
    lse_delta = torch.full((2, batch * heads * shifts, padded), torch.nan)
    hopper_launch._launch_preprocess(Launcher(), Rows(out, dout, lse, None), lse_delta, padded, shifts, sums)
    assert not sums.target.any()
    assert guarded[len(sums.target) :].isnan().all()
    want = (out.float() * dout.float()).sum(-1).transpose(1, 2).reshape(batch * heads, tokens)
    base2 = torch.where(lse == -torch.inf, torch.inf, lse / math.log(2)).reshape(batch * heads, tokens)
    lines = lse_delta.view(2, batch * heads, shifts, padded)
    for shift in range(shifts):
        torch.testing.assert_close(lines[0, :, shift, : tokens - shift], base2[:, shift:])
        torch.testing.assert_close(lines[1, :, shift, : tokens - shift], want[:, shift:], atol=1e-4, rtol=1e-4)


def test_runs_are_full_blocks_inside_their_spans():
    mask = CAUSAL & Mask.documents([40, 10, 61])
    for by_key in (False, True):
        work = worklist(mask, (range(111),), (range(111),))
        served, portable = make_run_tables(work, by_key, 32, 16, 8, 1, torch.device("cpu"))
        assert {row for _, row, *_ in portable.tiles.tolist()} == {40, 48}, "the document shorter than a block"
        assert all(rows <= 8 for _, _, rows, *_ in portable.tiles.tolist())
        spans = served.spans.tolist()
        for _, row, _, _, _, first, num_blocks in served.tiles.tolist():
            begin, count, run_end, *_ = spans[first]
            document = (0, 40) if row < 40 else (50, 111)
            assert document[0] <= begin < run_end == document[1]
            assert count == num_blocks
        assert served.lower  # the last block overlaps the one before; by key, the diagonal is a lower bound


def test_first_tile_of_a_forward_has_the_remainder_rows():
    served, _ = make_run_tables(
        worklist(CAUSAL, (range(448),), (range(448),)), False, 192, 64, 64, 1, torch.device("cpu")
    )
    assert sorted((row, rows) for _, row, rows, *_ in served.tiles.tolist()) == [(0, 64), (64, 192), (256, 192)]


def test_bands_over_different_position_steps_go_to_the_portable_kernel():
    def served(mask, step):
        work = worklist(mask, (range(0, 256, 4),), (range(1, 256, step),))
        hopper, portable = make_run_tables(work, False, 32, 16, 32, 1, torch.device("cpu"))
        return bool(len(hopper)), bool(len(portable))

    assert served(CAUSAL, 4) == (True, False)
    assert served(CAUSAL, 2) == (False, True)
    assert served(Mask.full(), 2) == (True, False)


@pytest.mark.parametrize(("tiles", "heads", "section"), [(5, 6, 6), (5, 7, 3), (3, 8, 1), (1, 4, 4)])
def test_every_tile_of_every_head_is_one_work_item(tiles, heads, section, monkeypatch):
    forward = pytest.importorskip("meshflash.kernels.hopper.forward")
    monkeypatch.setattr(forward, "gl", SimpleNamespace(minimum=min))
    num_work = tiles * heads
    items = [forward._locate_tile.fn(index, tiles, heads, section, num_work, False) for index in range(num_work)]
    assert sorted(items) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    assert [head // section for _, head in items] == sorted(head // section for _, head in items)


def test_splits_of_the_tail_wave_are_the_last_work_items(monkeypatch):
    forward = pytest.importorskip("meshflash.kernels.hopper.forward")
    monkeypatch.setattr(forward, "gl", SimpleNamespace(minimum=min, where=lambda c, x, y: x if c else y))
    tiles, heads, num_tail_tiles, num_splits = 5, 3, 2, 4
    num_full, num_split = tiles * heads - num_tail_tiles, num_tail_tiles * num_splits
    items = [forward._locate_tile.fn(index, tiles, heads, 1, num_full, True) for index in range(num_full + num_split)]
    assert items[:num_full] == [(n % tiles, n // tiles) for n in range(num_full)]
    assert items[num_full:] == [(tiles + n, heads - 1) for n in range(num_split)]


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
def test_query_heads_are_spread_over_ctas_where_key_tiles_see_many_queries(dim, tokens, mask, spread):
    config = hopper_launch.BACKWARD[dim]
    work = worklist(mask, (range(tokens),), (range(tokens),))
    device = torch.device("cpu")
    tables, portable = make_run_tables(work, True, 128, config.block_m, 128, 1, device, filled=True, grid=True)
    assert not len(portable)
    num_ctas = 8 * len(tables)
    assert hopper_launch.spreads_heads(tables, config, num_ctas, num_sms=64) == spread


@pytest.mark.parametrize(
    ("mask", "num_ctas", "num_sms", "spread"),
    [
        (Mask.full(), 64, 132, True),  # half of the SMs would be idle
        (Mask.full(), 128, 132, True),
        (Mask.full(), 256, 132, False),
        (CAUSAL, 256, 132, True),  # the longest CTA has twice the blocks of the mean one
        (CAUSAL, 512, 132, False),
    ],
)
def test_query_heads_are_spread_over_ctas_where_few_ctas_would_leave_sms_idle(mask, num_ctas, num_sms, spread):
    config = hopper_launch.BACKWARD[128]
    work = worklist(mask, (range(2048),), (range(2048),))
    tables, _ = make_run_tables(work, True, 128, config.block_m, 128, 1, torch.device("cpu"), filled=True, grid=True)
    assert hopper_launch.spreads_heads(tables, config, num_ctas, num_sms) == spread


MASKS = [CAUSAL, Mask.full(), *(Mask.window(*width) for width in ((0, 0), (100, 0), (200, 30), (30, 200), (128, 128)))]


@pytest.mark.parametrize("num_consumer_wgs", [2, 3])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        *((range(tokens), range(tokens)) for tokens in (193, 320, 515, 1000)),
        *((range(65, 65 + rows), range(700)) for rows in (1, 64, 129, 191, 193)),
        (range(576), range(150, 551)),
    ],
)
def test_warpgroups_skip_only_blocks_that_their_rows_do_not_see(
    queries, keys, num_consumer_wgs, scalar_gl, monkeypatch
):
    forward = pytest.importorskip("meshflash.kernels.hopper.forward")
    monkeypatch.setattr(forward, "gl", scalar_gl)
    rows_each, size, skipped = 64, 128, 0
    for mask in MASKS:
        work = worklist(mask, (queries,), (keys,))
        served, _ = make_run_tables(work, False, rows_each * num_consumer_wgs, size, 64, 1, torch.device("cpu"))
        assert served.single_run
        for tile, run in zip(served.tiles.numpy(), served.spans.numpy(), strict=True):
            _, _, rows, first, step, _, num_blocks = tile
            begin, blocks, run_end, band_lo, band_hi = run
            for wg_id in range(num_consumer_wgs):
                end = min(rows, (wg_id + 1) * rows_each)
                lowest, highest = (np.int32(first + step * row) for row in (wg_id * rows_each, end - 1))
                with np.errstate(over="raise"):  # the kernel computes with 32-bit ints
                    before, own, after = forward._visible_blocks.fn(
                        rows,
                        lowest,
                        highest,
                        begin,
                        num_blocks,
                        band_lo,
                        band_hi,
                        wg_id,
                        rows_each,
                        size,
                        served.lower,
                        served.upper,
                    )
                assert before + own + after == num_blocks
                assert own >= 1
                at = np.arange(wg_id * rows_each, end, dtype=np.int64)[:, None]
                for n_block in (*range(before), *range(before + own, num_blocks)):
                    first_new = begin + (blocks - 1 - n_block) * size
                    columns = np.arange(first_new, min(first_new + size, run_end), dtype=np.int64)
                    assert not ((columns >= at + band_lo) & (columns <= at + band_hi)).any()
                    skipped += 1
                assert rows > wg_id * rows_each or own == 1  # a warpgroup without rows
    assert skipped > 0 or num_consumer_wgs == 2


def needs_mask(columns, at, band_lo, band_hi):
    """Return whether some row at positions `at` does not see some of the columns."""
    return ((columns < at[:, None] + band_lo) | (columns > at[:, None] + band_hi)).any()


@pytest.mark.parametrize("num_consumer_wgs", [2, 3])
@pytest.mark.parametrize(
    ("mask", "queries", "keys", "first_only"),
    [
        (Mask.full(), range(1024), range(1024), True),
        (CAUSAL, range(1024), range(1024), True),
        (CAUSAL, range(640), range(1024), True),
        (CAUSAL, range(512, 1024), range(1024), True),
        (CAUSAL, range(545, 1024), range(1024), True),
        (CAUSAL, range(1, 1025), range(1024), False),
        (CAUSAL, range(700), range(700), False),  # the last block overlaps the one before
        (CAUSAL & Mask.window(300, 0), range(1024), range(1024), False),
        (CAUSAL & Mask.documents([512, 256, 256]), range(1024), range(1024), True),
        (CAUSAL & Mask.documents([448, 576]), range(1024), range(1024), False),
        (CAUSAL & Mask.first(128) | Mask.window(0, 0), range(1024), range(1024), False),
    ],
)
def test_masks_first_only_means_that_later_blocks_need_no_mask(
    mask, queries, keys, first_only, num_consumer_wgs, scalar_gl, monkeypatch
):
    forward = pytest.importorskip("meshflash.kernels.hopper.forward")
    monkeypatch.setattr(forward, "gl", scalar_gl)
    served, _ = make_run_tables(
        worklist(mask, (queries,), (keys,)), False, 64 * num_consumer_wgs, 128, 64, 1, torch.device("cpu")
    )
    assert served.masks_first_only == first_only
    if not first_only:
        return
    for tile, run in zip(served.tiles.tolist(), served.spans.tolist(), strict=True):
        _, _, rows, first, step, _, num_blocks = tile
        begin, blocks, _, band_lo, band_hi = run
        for wg_id in range(-(-rows // 64)):
            at = first + step * np.arange(wg_id * 64, min(rows, (wg_id + 1) * 64))
            limits = at[0], at[-1], begin, num_blocks, band_lo, band_hi
            before, own, _ = forward._visible_blocks.fn(rows, *limits, wg_id, 64, 128, served.lower, served.upper)
            for n_block in range(before + 1, before + own):
                columns = begin + (blocks - 1 - n_block) * 128 + np.arange(128)
                assert not needs_mask(columns, at, band_lo, band_hi)


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
    total_unmasked = 0
    spans = served.spans.numpy()
    for tile, run_fields in zip(served.tiles.tolist(), served.spans.tolist(), strict=True):
        _, _, rows, first, step, run, num_blocks = tile
        begin, _, _, band_lo, band_hi = run_fields
        state = run, 0, *common.load_run(spans, run)
        for n_block in range(num_blocks):  # in the order of the TMA producer warp
            *state, _, block = common.next_block(
                n_block, *state, spans, size, served.single_run, served.exact_begin, served.clipped
            )
            assert block == begin + (num_blocks - 1 - n_block) * size
        num_unmasked = common.num_unmasked_blocks.fn(rows, begin, num_blocks, band_lo, size, 128)
        assert num_unmasked == 0 or rows == 128
        for n_block in range(num_unmasked):
            columns = begin + (num_blocks - 1 - n_block) * size + np.arange(size)
            assert not needs_mask(columns, first + step * np.arange(rows), band_lo, band_hi)
        if rows == 128 and num_unmasked < num_blocks:
            columns = begin + (num_blocks - 1 - num_unmasked) * size + np.arange(size)
            assert needs_mask(columns, first + step * np.arange(rows), band_lo, band_hi)
        total_unmasked += num_unmasked
    assert total_unmasked > 0


@pytest.mark.parametrize("mask", [CAUSAL, Mask.full()])
@pytest.mark.parametrize(("margin", "ctas"), [(0, 16), (3, 13), (16, 1), (40, 1)])
def test_persistent_forward_leaves_sms_free_for_messages(mask, margin, ctas, monkeypatch):
    monkeypatch.setattr(hopper_launch, "descriptor", simulated.SimulatedDescriptor)
    monkeypatch.setattr(hopper_launch, "num_sms", lambda device: 16)
    monkeypatch.setattr(hopper_launch, "_counter", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(split_kv, "split_tail_wave", lambda *_, **__: None)
    grids = []
    monkeypatch.setattr(Launcher, "launch", lambda self, kernel, grid, *_, **__: grids.append(grid))
    work = worklist(mask, (range(2048),), (range(2048),))
    x = torch.zeros(1, 2048, 4, 64, dtype=torch.bfloat16)
    inputs = Inputs(x, x, x, work, Features(0.125), sm_margin=margin)
    config = hopper_launch.FORWARD[64]
    tables, _ = make_run_tables(work, False, config.block_m, config.block_n, config.block_m, 1, torch.device("cpu"))
    hopper_launch.forward(Launcher(), inputs, new_outputs(x, x), None, config, tables)
    assert grids == [(ctas,)]


def test_launches_are_repeated_only_with_the_same_sm_margin(monkeypatch):
    names = []
    monkeypatch.setattr(triton_kernel, "run", lambda launches, name, *_: names.append(name))
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    work = worklist(CAUSAL, (range(8),), (range(8),))
    outputs = new_outputs(x, x)
    for margin in (0, 2, 0):
        Hopper().forward(Inputs(x, x, x, work, Features(0.125), sm_margin=margin), outputs)
    assert names[0] == names[2] != names[1]
