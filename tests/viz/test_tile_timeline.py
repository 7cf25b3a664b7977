"""The tile timeline of a fused GEMM: one mark per recorded event."""

import re
from xml.etree import ElementTree

import pytest

from meshflash.viz.svg import TITLED
from meshflash.viz.tile_timeline import COLOURS, picture

TIMES = {0: [[1000, 2000, 5000], [3000, 3500, 0]], 1: [[2000, 2500, 0], [0, 0, 0]]}


def test_each_event_of_a_tile_is_a_mark_on_one_axis():
    drawn = picture(TIMES, "a & b", "a note")
    ElementTree.fromstring(drawn)
    titles = re.findall(r"<title>(.*?)</title>", drawn)
    assert titles == [
        "rank 0, tile 0: computed after 0",
        "rank 0, tile 0: sent after 1 us",
        "rank 0, tile 0: received after 4 us",
        "rank 0, tile 1: computed after 2 us",
        "rank 0, tile 1: sent after 2.5 us",
        "rank 1, tile 0: computed after 1 us",
        "rank 1, tile 0: sent after 1.5 us",
    ]
    assert "a &amp; b" in drawn
    assert "a note" in drawn
    assert ">4 us</text>" in drawn  # the end of the axis


def test_legend_lists_only_recorded_events():
    sent_only = {rank: [[a, b, 0] for a, b, _ in tiles] for rank, tiles in TIMES.items()}
    assert ">received</text>" in picture(TIMES, "")
    assert ">received</text>" not in picture(sent_only, "")


def test_many_tiles_are_one_shape_per_event():
    many = {rank: [[n + 1, n + 2, n + 3] for n in range(TITLED)] for rank in range(2)}
    drawn = picture(many, "many")
    ElementTree.fromstring(drawn)
    assert drawn.count("<path") == 2 * len(COLOURS)
    assert drawn.count("M") == 2 * len(COLOURS) * TITLED


def test_times_without_events_are_refused():
    with pytest.raises(ValueError, match="no tile has an event"):
        picture({0: [[0, 0, 0]]}, "")
