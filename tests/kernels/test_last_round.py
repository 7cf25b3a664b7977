"""Tiles of a last round, split by keys: their tables played in PyTorch, and the kernel that joins them, interpreted."""

from __future__ import annotations

import os

import pytest
import torch

from meshflash import Mask
from meshflash.core.tiles import worklist
from meshflash.kernels.triton_tables import runs

last = pytest.importorskip("meshflash.kernels.gluon_last")

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU test_gluon_gpu.py has it")
SIZE = 128
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setattr(last, "LEAST_TURNS", 3)
    monkeypatch.setattr(last, "LEAST_PARTS", 2)


def tables(queries, keys, batch, mask=None):
    work = worklist(Mask.full() if mask is None else mask, (range(queries),), (range(keys),))
    return runs(work, False, SIZE, SIZE, SIZE, batch, CPU)[0], work  # tables live as long as the worklist


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "heads", "processors"),
    [(512, 640, 1, 3, 5), (384, 384, 2, 3, 8), (640, 512, 3, 2, 13), (300, 640, 2, 2, 5)],
)
def test_every_block_of_keys_of_every_tile_once(queries, keys, batch, heads, processors):
    served, _work = tables(queries, keys, batch)
    found = last.last_round(served, heads, processors, SIZE)
    assert found is not None
    assert found.tiles == len(served) * heads % processors
    assert found.parts == min(processors // found.tiles, keys // SIZE)
    assert len(found.blocks) <= processors
    meets: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for n, (b, row, rows, _, _, run, turns) in enumerate(found.blocks.tiles.tolist()):
        begin, blocks, limit, *_ = found.blocks.spans[run].tolist()
        assert (run, blocks, limit) == (n, turns, begin + turns * SIZE)
        part, at = divmod(row, found.rows)
        meets.setdefault((b, found.begin + at, rows), []).append((part, begin, limit))
    wanted = [tuple(tile[:3]) for tile in served.tiles.tolist()[-found.tiles :]]
    assert sorted(meets) == sorted(wanted)
    for parts in meets.values():
        assert [part for part, _, _ in parts] == list(range(found.parts))
        assert [begin for _, begin, _ in parts] == [0, *(limit for _, _, limit in parts[:-1])]
        assert parts[-1][2] == keys


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "processors", "mask"),
    [
        (512, 640, 5, 5, None),  # full rounds
        (512, 640, 1, 5, None),  # less than one
        (512, 640, 3, 7, None),  # more than one head has
        (512, 256, 3, 5, None),  # short
        (512, 700, 3, 5, None),  # a last block that begins earlier
        (640, 640, 1, 4, Mask.causal()),
    ],
)
def test_what_is_left_as_it_is(queries, keys, heads, processors, mask):
    served, _work = tables(queries, keys, 1, mask)
    assert last.last_round(served, heads, processors, SIZE) is None


@interpreted
@pytest.mark.parametrize("batch", [1, 2])
def test_parts_joined_are_attention(batch):
    torch.manual_seed(0)
    queries, keys, heads, processors, dim = 300, 640, 2, 5, 16
    served, _work = tables(queries, keys, batch)
    found = last.last_round(served, heads, processors, SIZE)
    assert found is not None
    q = torch.randn(batch, queries, heads, dim)
    k, v = torch.randn(2, batch, keys, heads, dim)
    k[:, : 2 * SIZE] = 0
    k[0, 0, -1] = -100 * q[0, -1, -1]
    more = found.queries(q)
    assert more.shape == (batch, found.parts * found.rows, 1, dim)
    part = torch.full_like(more, torch.nan), torch.full((batch, 1, more.shape[1]), torch.nan)
    for b, row, rows, _, _, run, _ in found.blocks.tiles.tolist():
        begin, _, limit, *_ = found.blocks.spans[run].tolist()
        scores = more[b, row : row + rows, 0] @ k[b, begin:limit, -1].T
        part[0][b, row : row + rows, 0] = scores.softmax(-1) @ v[b, begin:limit, -1]
        part[1][b, 0, row : row + rows] = scores.logsumexp(-1)
    out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads, queries), torch.nan)
    last.join_parts(found, part, out, lse, SIZE)
    scores = q[:, :, -1] @ k[:, :, -1].transpose(1, 2)
    want, want_lse = scores.softmax(-1) @ v[:, :, -1], scores.logsumexp(-1)
    for b, row, rows in found.items.tolist():
        mine = b, slice(row, row + rows)
        torch.testing.assert_close(out[*mine, -1], want[mine])
        torch.testing.assert_close(lse[b, -1, mine[1]], want_lse[mine])
        out[*mine, -1] = lse[b, -1, mine[1]] = torch.nan
    assert out.isnan().all(), "rows of other tiles"
    assert lse.isnan().all()


@interpreted
def test_a_row_that_sees_nothing():
    served, _work = tables(300, 640, 1)
    found = last.last_round(served, 2, 5, SIZE)
    assert found is not None
    rows = found.parts * found.rows
    part = torch.zeros(1, rows, 1, 16), torch.full((1, 1, rows), -torch.inf)
    out, lse = torch.full((1, 300, 2, 16), torch.nan), torch.full((1, 2, 300), torch.nan)
    last.join_parts(found, part, out, lse, SIZE)
    (_, row, count), *_ = found.items.tolist()
    assert not out[0, row : row + count, 1].any()
    assert (lse[0, 1, row : row + count] == -torch.inf).all()
