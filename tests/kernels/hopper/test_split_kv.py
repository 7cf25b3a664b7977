"""Split-KV for the tail wave: split tables are checked in PyTorch, the kernels that combine splits are interpreted."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from meshflash import Mask
from meshflash.core.tiles import worklist
from meshflash.kernels.launches import Launcher
from meshflash.kernels.triton.block_tables import make_run_tables

split_kv = pytest.importorskip("meshflash.kernels.hopper.split_kv")

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_split_kv_gpu.py tests it on a GPU"
)
SIZE = 128
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def free_splits(monkeypatch):
    """Set all costs of splitting to zero, so that short sequences are split too."""
    for name in ("SPLIT_COST", "COMBINE_COST", "BACKWARD_COST", "TRAFFIC_COST"):
        monkeypatch.setattr(split_kv, name, 0)


def query_tables(queries, keys, batch, mask=None):
    """Return the forward's tables, by tiles of queries, and their worklist."""
    work = worklist(Mask.full() if mask is None else mask, (range(queries),), (range(keys),))
    return make_run_tables(work, False, SIZE, SIZE, SIZE, batch, CPU)[
        0
    ], work  # tables are weakly cached by the worklist, so callers keep it


def key_tables(queries, keys, batch, mask=None):
    """Return the backward's tables, by tiles of keys, and their worklist."""
    work = worklist(Mask.full() if mask is None else mask, (range(queries),), (range(keys),))
    return make_run_tables(work, True, SIZE, 64, SIZE, batch, CPU, filled=True, grid=True)[0], work


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "heads", "num_sms"),
    [(512, 640, 1, 3, 5), (384, 384, 2, 3, 8), (640, 512, 3, 2, 13), (300, 640, 2, 2, 5)],
)
def test_forward_splits_cover_every_key_block_once(queries, keys, batch, heads, num_sms):
    served, _work = query_tables(queries, keys, batch)
    found = split_kv.split_tail_wave(served, heads, num_sms, SIZE, appended=True)
    assert found is not None
    assert found.num_tiles == len(served) * heads % num_sms
    assert 1 < found.num_splits <= min(keys // SIZE, num_sms // found.num_tiles)
    assert torch.equal(found.tables.tiles[: len(served)], served.tiles)
    assert torch.equal(found.tables.spans[: len(served)], served.spans)
    splits = found.tables.tiles.tolist()[len(served) :]
    wanted = [tile[:3] for tile in served.tiles.tolist()[-found.num_tiles :]]
    assert [tile[:3] for tile in splits] == wanted * found.num_splits
    assert found.tile_rows.tolist() == wanted
    ends = dict.fromkeys(range(found.num_tiles), 0)
    for n, (*_, run, num_blocks) in enumerate(splits):
        begin, run_blocks, run_end, *_ = found.tables.spans[run].tolist()
        assert (run, run_blocks, run_end) == (len(served) + n, num_blocks, begin + num_blocks * SIZE)
        assert begin == ends[n % found.num_tiles]
        ends[n % found.num_tiles] = run_end
    assert set(ends.values()) == {keys}


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "heads", "num_sms"),
    [(640, 512, 1, 3, 5), (384, 384, 2, 3, 8), (500, 640, 3, 2, 13), (640, 300, 2, 2, 5), (641, 129, 2, 2, 3)],
)
def test_backward_splits_cover_every_query_block_once(queries, keys, batch, heads, num_sms):
    served, _work = key_tables(queries, keys, batch)
    found = split_kv.split_tail_wave(served, heads, num_sms, 64, 2)
    assert found is not None
    assert found.num_tiles == len(served) * heads % num_sms
    assert (found.tables.aligned, found.tables.on_grid, found.tables.partial_tiles) == (
        served.aligned,
        served.on_grid,
        served.partial_tiles,
    )
    block_starts: dict[tuple[int, int, int], list[int]] = {}
    for n, (b, row, rows, position, step, run, num_blocks) in enumerate(found.tables.tiles.tolist()):
        begin, run_blocks, run_end, *_ = found.tables.spans[run].tolist()
        assert (run, run_blocks, run_end) == (n, num_blocks, min(queries, begin + num_blocks * 64))
        assert (position, step) == (0, 1)
        assert 0 <= row <= found.num_rows - rows
        block_starts.setdefault((b, found.first_row + row, rows), []).extend(range(begin, run_end, 64))
    assert sorted(block_starts) == sorted(tuple(tile[:3]) for tile in served.tiles.tolist()[-found.num_tiles :])
    assert all(starts == list(range(0, queries, 64)) for starts in block_starts.values())
    x = torch.arange(batch * keys * heads).view(batch, keys, heads, 1)
    for b, row, rows in found.tile_rows.tolist():
        at = row - found.first_row
        assert torch.equal(found.slice_rows(x)[b, at : at + rows, 0], x[b, row : row + rows, -1])


@pytest.mark.parametrize(
    ("num_tiles", "num_blocks", "group", "fixed_cost", "max_splits", "num_splits"),
    [
        (4, 256, 1, split_kv.BACKWARD_COST, 64, 32),  # all SMs, one wave
        (4, 64, 1, split_kv.BACKWARD_COST, 64, 22),  # fewer than SMs, because combining more would cost more
        (8, 32, 1, split_kv.BACKWARD_COST, 64, 11),
        (100, 256, 4, split_kv.BACKWARD_COST, 64, 9),  # seven waves of a ninth instead of one whole wave
        (100, 256, 4, split_kv.BACKWARD_COST, 1, 1),
        (130, 256, 1, split_kv.BACKWARD_COST, 64, 1),  # the tail wave is already almost full
        (4, 16, 1, split_kv.BACKWARD_COST, 64, 1),  # too few blocks
        (4, 16, 4, split_kv.BACKWARD_COST, 64, 16),  # enough blocks with four heads per CTA
        (4, 16, 1, split_kv.COMBINE_COST, 33, 16),  # enough blocks where combining is cheaper
        (4, 8, 1, split_kv.COMBINE_COST, 33, 1),
        (4, 32, 1, split_kv.COMBINE_COST, 33, 16),
        (92, 128, 1, split_kv.COMBINE_COST, 1, 1),
    ],
)
def test_number_of_splits_minimizes_the_predicted_time(
    num_tiles, num_blocks, group, fixed_cost, max_splits, num_splits, monkeypatch
):
    monkeypatch.undo()
    assert split_kv._best_num_splits(num_tiles, num_blocks, group, 132, fixed_cost, max_splits) == num_splits


@pytest.mark.parametrize("appended", [True, False])
def test_forward_splits_fit_one_wave(appended):
    served, _work = query_tables(768, 1024, 1)
    found = split_kv.split_tail_wave(served, 2, 7, SIZE, appended=appended)  # five of twelve tiles form the tail wave
    assert (found is None) == appended


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "num_sms", "mask"),
    [
        (512, 640, 5, 5, None),  # no tail wave, only full waves
        (512, 640, 1, 5, None),  # less than one wave
        (512, 640, 3, 7, None),  # a tail wave with more tiles than one head has
        (512, 128, 3, 5, None),  # too few blocks of keys
        (512, 700, 3, 5, None),  # the last key block overlaps the one before
        (640, 640, 1, 4, Mask.causal()),
    ],
)
def test_waves_that_cannot_gain_or_have_masks_are_not_split(queries, keys, heads, num_sms, mask):
    served, _work = query_tables(queries, keys, 1, mask)
    assert split_kv.split_tail_wave(served, heads, num_sms, SIZE, appended=True) is None


@interpreted
@pytest.mark.parametrize("has_carry", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_combined_splits_match_attention(batch, has_carry):
    torch.manual_seed(0)
    queries, keys, heads, num_sms, dim = 300, 640, 2, 5, 16
    served, _work = query_tables(queries, keys, batch)
    found = split_kv.split_tail_wave(served, heads, num_sms, SIZE, appended=True)
    assert found is not None
    q = torch.randn(batch, queries, heads, dim)
    k, v = torch.randn(2, batch, keys + 50, heads, dim)
    k[:, : 2 * SIZE] = 0
    k[0, 0, -1] = -100 * q[0, -1, -1]
    k[0, keys, -1] = 100 * q[0, -2, -1]  # a key of the carried part, with a score far above all others

    def attend(b, row, rows, begin, end):
        scores = q[b, row : row + rows, -1] @ k[b, begin:end, -1].T
        return scores.softmax(-1) @ v[b, begin:end, -1], scores.logsumexp(-1)

    splits = found.tables.tiles.tolist()[len(served) :]
    partial = torch.full((len(splits), SIZE, dim), torch.nan), torch.full((len(splits), SIZE), torch.nan)
    for n, (b, row, rows, _, _, run, _) in enumerate(splits):
        begin, _, run_end, *_ = found.tables.spans[run].tolist()
        partial[0][n, :rows], partial[1][n, :rows] = attend(b, row, rows, begin, run_end)
    out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads, queries), torch.nan)
    if has_carry:  # the carry has the last 50 keys; results overwrite it
        for b in range(batch):
            out[b, :, -1], lse[b, -1] = attend(b, 0, queries, keys, keys + 50)
        lse[0, -1, -1], out[0, -1, -1] = -torch.inf, 0
    before = out.clone(), lse.clone()
    split_kv.combine_splits(Launcher(), found, partial, (out, lse), (out, lse) if has_carry else None)
    for b, row, rows in found.tile_rows.tolist():
        index = b, slice(row, row + rows)
        want, want_lse = attend(b, row, rows, 0, keys + 50 * has_carry)
        if has_carry and b == 0 and row + rows == queries:
            want[-1:], want_lse[-1:] = attend(b, queries - 1, 1, 0, keys)
        torch.testing.assert_close(out[*index, -1], want)
        torch.testing.assert_close(lse[b, -1, index[1]], want_lse)
        out[*index, -1], lse[b, -1, index[1]] = before[0][*index, -1], before[1][b, -1, index[1]]
    torch.testing.assert_close((out, lse), before, rtol=0, atol=0, equal_nan=True)  # rows of other tiles are unchanged


@interpreted
@pytest.mark.parametrize("has_carry", [False, True])
def test_combining_rows_that_see_nothing_gives_zero_and_an_empty_lse(has_carry):
    served, _work = query_tables(300, 640, 1)
    found = split_kv.split_tail_wave(served, 2, 5, SIZE, appended=True)
    assert found is not None
    num_items = found.num_splits * found.num_tiles
    partial = torch.zeros(num_items, SIZE, 16), torch.full((num_items, SIZE), -torch.inf)
    out, lse = torch.full((1, 300, 2, 16), torch.nan), torch.full((1, 2, 300), torch.nan)
    carry = (torch.zeros_like(out), torch.full_like(lse, -torch.inf)) if has_carry else None
    split_kv.combine_splits(Launcher(), found, partial, (out, lse), carry)
    (_, row, count), *_ = found.tile_rows.tolist()
    assert not out[0, row : row + count, 1].any()
    assert (lse[0, 1, row : row + count] == -torch.inf).all()


@interpreted
@pytest.mark.parametrize("batch", [1, 3])
def test_finalize_writes_only_the_rows_of_split_tiles(batch):
    served, _work = key_tables(640, 300, batch)
    found = split_kv.split_tail_wave(served, 2, 4, 64)
    assert found is not None
    into = [torch.full((batch, 300, 2, 16), torch.nan, dtype=torch.float16) for _ in range(2)]
    sums = [torch.randn(batch, found.num_rows, 1, 16) for _ in range(2)]
    split_kv.finalize_splits(Launcher(), found, sums, into, SIZE)
    for x, y in zip(sums, into, strict=True):
        for b, row, rows in found.tile_rows.tolist():
            at = row - found.first_row
            assert torch.equal(y[b, row : row + rows, 1], x[b, at : at + rows, 0].half())
            y[b, row : row + rows, 1] = torch.nan
        assert y.isnan().all(), "rows of other tiles were written"


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(100, 100), Mask.window(0, 10**6), Mask.window(639, 640)])
def test_masked_key_tiles_are_not_split(mask):
    served, _work = key_tables(640, 640, 1, mask)
    whole, _full = key_tables(640, 640, 1)
    uniform = replace(served, mean_blocks=5.0, uniform=True)  # as if all tiles had equally many blocks
    assert split_kv.split_tail_wave(whole, 3, 7, 64) is not None
    assert (split_kv.split_tail_wave(uniform, 3, 7, 64) is None) == (mask != Mask.window(639, 640))


def test_tiles_with_unequal_numbers_of_blocks_are_not_split():
    served, _work = key_tables(640, 640, 1, Mask.documents([256, 384]))
    assert not served.lower
    assert not served.upper
    assert not served.uniform
    assert split_kv.split_tail_wave(served, 3, 7, 64) is None
    uniform, _other = key_tables(768, 768, 1, Mask.documents([384, 384]))
    assert split_kv.split_tail_wave(uniform, 3, 7, 64) is not None


def test_tables_are_read_back_from_the_device_only_to_split(monkeypatch):
    """Reading makes the host wait for all work queued on the device."""
    read = []

    def record_read(x):
        read.append(len(x))
        return x

    monkeypatch.setattr(torch.Tensor, "cpu", record_read)
    for mask in (Mask.causal(), Mask.documents([256, 576])):
        served, _work = key_tables(832, 832, 1, mask)
        assert split_kv.split_tail_wave(served, 3, 20, 64) is None
    served, _work = key_tables(832, 832, 1)
    assert split_kv.split_tail_wave(served, 3, 7, 64) is None  # no tail wave
    assert not read
    found = split_kv.split_tail_wave(served, 3, 20, 64)
    assert found is not None
    assert read == [len(served)] * 2


def test_splits_are_cached_per_group_size():
    served, _work = key_tables(640, 640, 1)
    once = split_kv.split_tail_wave(served, 3, 7, 64, 1)
    assert split_kv.split_tail_wave(served, 3, 7, 64, 2) is not once
    assert split_kv.split_tail_wave(served, 3, 7, 64, 1) is once


def test_splits_of_unaligned_tables_stay_unaligned():
    mask = Mask.documents([3, 640], k_lengths=[0, 640])  # the first queries see nothing
    served, _work = key_tables(643, 640, 1, mask)
    found = split_kv.split_tail_wave(served, 3, 7, 64)
    assert found is not None
    assert not served.aligned
    assert not found.tables.aligned
    assert served.mean_blocks == 10
