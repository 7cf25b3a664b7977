"""Tiles of a last round in parts: their tables simulated in PyTorch, and the kernels that join them, interpreted."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from meshflash import Mask
from meshflash.core.tiles import worklist
from meshflash.kernels.triton.block_tables import make_run_tables

last = pytest.importorskip("meshflash.kernels.hopper.split_kv")

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU test_hopper_gpu.py has it")
SIZE = 128
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """Parts cost nothing."""
    for name in ("SPLIT_COST", "COMBINE_COST", "BACKWARD_COST", "TRAFFIC_COST"):
        monkeypatch.setattr(last, name, 0)


def tables(queries, keys, batch, mask=None):
    work = worklist(Mask.full() if mask is None else mask, (range(queries),), (range(keys),))
    return make_run_tables(work, False, SIZE, SIZE, SIZE, batch, CPU)[0], work  # tables live as long as the worklist


def tables_of_keys(queries, keys, batch, mask=None):
    work = worklist(Mask.full() if mask is None else mask, (range(queries),), (range(keys),))
    return make_run_tables(work, True, SIZE, 64, SIZE, batch, CPU, filled=True, grid=True)[0], work


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "heads", "num_sms"),
    [(512, 640, 1, 3, 5), (384, 384, 2, 3, 8), (640, 512, 3, 2, 13), (300, 640, 2, 2, 5)],
)
def test_forward_splits_cover_every_key_block_once(queries, keys, batch, heads, num_sms):
    served, _work = tables(queries, keys, batch)
    found = last.split_tail_wave(served, heads, num_sms, SIZE, appended=True)
    assert found is not None
    assert found.num_tiles == len(served) * heads % num_sms
    assert 1 < found.num_splits <= min(keys // SIZE, num_sms // found.num_tiles)
    assert torch.equal(found.tables.tiles[: len(served)], served.tiles)
    assert torch.equal(found.tables.spans[: len(served)], served.spans)
    parted = found.tables.tiles.tolist()[len(served) :]
    wanted = [tile[:3] for tile in served.tiles.tolist()[-found.num_tiles :]]
    assert [tile[:3] for tile in parted] == wanted * found.num_splits
    assert found.tile_rows.tolist() == wanted
    ends = dict.fromkeys(range(found.num_tiles), 0)
    for n, (*_, run, turns) in enumerate(parted):
        begin, blocks, limit, *_ = found.tables.spans[run].tolist()
        assert (run, blocks, limit) == (len(served) + n, turns, begin + turns * SIZE)
        assert begin == ends[n % found.num_tiles]
        ends[n % found.num_tiles] = limit
    assert set(ends.values()) == {keys}


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "heads", "num_sms"),
    [(640, 512, 1, 3, 5), (384, 384, 2, 3, 8), (500, 640, 3, 2, 13), (640, 300, 2, 2, 5), (641, 129, 2, 2, 3)],
)
def test_backward_splits_cover_every_query_block_once(queries, keys, batch, heads, num_sms):
    served, _work = tables_of_keys(queries, keys, batch)
    found = last.split_tail_wave(served, heads, num_sms, 64, 2)
    assert found is not None
    assert found.num_tiles == len(served) * heads % num_sms
    assert (found.tables.aligned, found.tables.on_grid, found.tables.partial_tiles) == (
        served.aligned,
        served.on_grid,
        served.partial_tiles,
    )
    meets: dict[tuple[int, int, int], list[int]] = {}
    for n, (b, row, rows, position, step, run, turns) in enumerate(found.tables.tiles.tolist()):
        begin, blocks, limit, *_ = found.tables.spans[run].tolist()
        assert (run, blocks, limit) == (n, turns, min(queries, begin + turns * 64))
        assert (position, step) == (0, 1)
        assert 0 <= row <= found.num_rows - rows
        meets.setdefault((b, found.first_row + row, rows), []).extend(range(begin, limit, 64))
    assert sorted(meets) == sorted(tuple(tile[:3]) for tile in served.tiles.tolist()[-found.num_tiles :])
    assert all(begins == list(range(0, queries, 64)) for begins in meets.values())
    x = torch.arange(batch * keys * heads).view(batch, keys, heads, 1)
    for b, row, rows in found.tile_rows.tolist():
        at = row - found.first_row
        assert torch.equal(found.slice_rows(x)[b, at : at + rows, 0], x[b, row : row + rows, -1])


@pytest.mark.parametrize(
    ("left", "num_blocks", "group", "further", "most", "parts"),
    [
        (4, 256, 1, last.BACKWARD_COST, 64, 32),  # all multiprocessors, once
        (4, 64, 1, last.BACKWARD_COST, 64, 22),  # not so many that joining them takes longer
        (8, 32, 1, last.BACKWARD_COST, 64, 11),
        (100, 256, 4, last.BACKWARD_COST, 64, 9),  # seven rounds of a ninth instead of one
        (100, 256, 4, last.BACKWARD_COST, 1, 1),
        (130, 256, 1, last.BACKWARD_COST, 64, 1),  # nothing to gain
        (4, 16, 1, last.BACKWARD_COST, 64, 1),  # short
        (4, 16, 4, last.BACKWARD_COST, 64, 16),  # not for each of four heads
        (4, 16, 1, last.COMBINE_COST, 33, 16),  # nor where they are only joined
        (4, 8, 1, last.COMBINE_COST, 33, 1),
        (4, 32, 1, last.COMBINE_COST, 33, 16),
        (92, 128, 1, last.COMBINE_COST, 1, 1),
    ],
)
def test_number_of_splits_minimizes_the_predicted_time(left, num_blocks, group, further, most, parts, monkeypatch):
    monkeypatch.undo()
    assert last._best_num_splits(left, num_blocks, group, 132, further, most) == parts


@pytest.mark.parametrize("appended", [True, False])
def test_forward_splits_fit_one_wave(appended):
    served, _work = tables(768, 1024, 1)
    found = last.split_tail_wave(served, 2, 7, SIZE, appended=appended)  # five of twelve tiles are left
    assert (found is None) == appended


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "num_sms", "mask"),
    [
        (512, 640, 5, 5, None),  # full rounds
        (512, 640, 1, 5, None),  # less than one
        (512, 640, 3, 7, None),  # more than one head has
        (512, 128, 3, 5, None),  # short
        (512, 700, 3, 5, None),  # a last block that begins earlier
        (640, 640, 1, 4, Mask.causal()),
    ],
)
def test_full_long_short_or_masked_waves_are_not_split(queries, keys, heads, num_sms, mask):
    served, _work = tables(queries, keys, 1, mask)
    assert last.split_tail_wave(served, heads, num_sms, SIZE, appended=True) is None


@interpreted
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_combined_splits_match_attention(batch, carried):
    torch.manual_seed(0)
    queries, keys, heads, num_sms, dim = 300, 640, 2, 5, 16
    served, _work = tables(queries, keys, batch)
    found = last.split_tail_wave(served, heads, num_sms, SIZE, appended=True)
    assert found is not None
    q = torch.randn(batch, queries, heads, dim)
    k, v = torch.randn(2, batch, keys + 50, heads, dim)
    k[:, : 2 * SIZE] = 0
    k[0, 0, -1] = -100 * q[0, -1, -1]
    k[0, keys, -1] = 100 * q[0, -2, -1]  # of those that are carried: far above all others

    def seen(b, row, rows, begin, limit):
        scores = q[b, row : row + rows, -1] @ k[b, begin:limit, -1].T
        return scores.softmax(-1) @ v[b, begin:limit, -1], scores.logsumexp(-1)

    pieces = found.tables.tiles.tolist()[len(served) :]
    part = torch.full((len(pieces), SIZE, dim), torch.nan), torch.full((len(pieces), SIZE), torch.nan)
    for n, (b, row, rows, _, _, run, _) in enumerate(pieces):
        begin, _, limit, *_ = found.tables.spans[run].tolist()
        part[0][n, :rows], part[1][n, :rows] = seen(b, row, rows, begin, limit)
    out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads, queries), torch.nan)
    if carried:  # the last 50 keys, and the results come where they were
        for b in range(batch):
            out[b, :, -1], lse[b, -1] = seen(b, 0, queries, keys, keys + 50)
        lse[0, -1, -1], out[0, -1, -1] = -torch.inf, 0
    before = out.clone(), lse.clone()
    last.combine_splits(found, part, (out, lse), (out, lse) if carried else None)
    for b, row, rows in found.tile_rows.tolist():
        mine = b, slice(row, row + rows)
        want, want_lse = seen(b, row, rows, 0, keys + 50 * carried)
        if carried and b == 0 and row + rows == queries:
            want[-1:], want_lse[-1:] = seen(b, queries - 1, 1, 0, keys)
        torch.testing.assert_close(out[*mine, -1], want)
        torch.testing.assert_close(lse[b, -1, mine[1]], want_lse)
        out[*mine, -1], lse[b, -1, mine[1]] = before[0][*mine, -1], before[1][b, -1, mine[1]]
    torch.testing.assert_close((out, lse), before, rtol=0, atol=0, equal_nan=True)  # rows of other tiles


@interpreted
@pytest.mark.parametrize("carried", [False, True])
def test_combine_of_rows_that_see_nothing_is_zero(carried):
    served, _work = tables(300, 640, 1)
    found = last.split_tail_wave(served, 2, 5, SIZE, appended=True)
    assert found is not None
    pieces = found.num_splits * found.num_tiles
    part = torch.zeros(pieces, SIZE, 16), torch.full((pieces, SIZE), -torch.inf)
    out, lse = torch.full((1, 300, 2, 16), torch.nan), torch.full((1, 2, 300), torch.nan)
    carry = (torch.zeros_like(out), torch.full_like(lse, -torch.inf)) if carried else None
    last.combine_splits(found, part, (out, lse), carry)
    (_, row, count), *_ = found.tile_rows.tolist()
    assert not out[0, row : row + count, 1].any()
    assert (lse[0, 1, row : row + count] == -torch.inf).all()


@interpreted
@pytest.mark.parametrize("batch", [1, 3])
def test_finalize_writes_only_the_rows_of_split_tiles(batch):
    served, _work = tables_of_keys(640, 300, batch)
    found = last.split_tail_wave(served, 2, 4, 64)
    assert found is not None
    into = [torch.full((batch, 300, 2, 16), torch.nan, dtype=torch.float16) for _ in range(2)]
    sums = [torch.randn(batch, found.num_rows, 1, 16) for _ in range(2)]
    last.finalize_splits(found, sums, into, SIZE)
    for x, y in zip(sums, into, strict=True):
        for b, row, rows in found.tile_rows.tolist():
            at = row - found.first_row
            assert torch.equal(y[b, row : row + rows, 1], x[b, at : at + rows, 0].half())
            y[b, row : row + rows, 1] = torch.nan
        assert y.isnan().all(), "rows of other tiles"


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(100, 100), Mask.window(0, 10**6), Mask.window(639, 640)])
def test_masked_key_tiles_are_not_split(mask):
    served, _work = tables_of_keys(640, 640, 1, mask)
    whole, _full = tables_of_keys(640, 640, 1)
    alike = replace(served, mean_blocks=5.0, uniform=True)  # as if all took as long
    assert last.split_tail_wave(whole, 3, 7, 64) is not None
    assert (last.split_tail_wave(alike, 3, 7, 64) is None) == (mask != Mask.window(639, 640))


def test_tiles_of_different_work_are_not_split():
    served, _work = tables_of_keys(640, 640, 1, Mask.documents([256, 384]))
    assert not served.lower
    assert not served.upper
    assert not served.uniform
    assert last.split_tail_wave(served, 3, 7, 64) is None
    alike, _other = tables_of_keys(768, 768, 1, Mask.documents([384, 384]))
    assert last.split_tail_wave(alike, 3, 7, 64) is not None


def test_tables_are_read_back_from_the_device_only_to_split(monkeypatch):
    """The host would wait for all that was started there."""
    read = []

    def reading(x):
        read.append(len(x))
        return x

    monkeypatch.setattr(torch.Tensor, "cpu", reading)
    for mask in (Mask.causal(), Mask.documents([256, 576])):
        served, _work = tables_of_keys(832, 832, 1, mask)
        assert last.split_tail_wave(served, 3, 20, 64) is None
    served, _work = tables_of_keys(832, 832, 1)
    assert last.split_tail_wave(served, 3, 7, 64) is None  # full rounds
    assert not read
    found = last.split_tail_wave(served, 3, 20, 64)
    assert found is not None
    assert read == [len(served)] * 2


def test_splits_are_cached_per_group_size():
    served, _work = tables_of_keys(640, 640, 1)
    once = last.split_tail_wave(served, 3, 7, 64, 1)
    assert last.split_tail_wave(served, 3, 7, 64, 2) is not once
    assert last.split_tail_wave(served, 3, 7, 64, 1) is once


def test_splits_of_unaligned_tables_stay_unaligned():
    mask = Mask.documents([3, 640], k_lengths=[0, 640])  # the first queries see nothing
    served, _work = tables_of_keys(643, 640, 1, mask)
    found = last.split_tail_wave(served, 3, 7, 64)
    assert found is not None
    assert not served.aligned
    assert not found.tables.aligned
    assert served.mean_blocks == 10
