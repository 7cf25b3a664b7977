"""Slices as masks: what each kind shows, forms of arguments, equality, errors, and many of them at once."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.slices import KINDS
from meshflash.core.terms import MAX_COMPARED, Term
from meshflash.core.tiles import worklist
from meshflash.schedules.registry import verified


def shown(mask: Mask, q_tokens: int, k_tokens: int, batch: int = 0) -> list[str]:
    """Return a row of text for each query: # where it sees a key."""
    seen = mask.visible(np.arange(q_tokens)[:, None], np.arange(k_tokens)[None, :], batch=batch)
    return ["".join(".#"[int(x)] for x in row) for row in seen]


def test_each_kind_cuts_the_corners_that_its_name_says() -> None:
    def of(kind: str) -> list[str]:
        return shown(Mask.slices([(1, 4)], [(0, 5)], kind), 5, 6)

    assert of("full") == ["......", "#####.", "#####.", "#####.", "......"]
    assert of("causal") == ["......", "###...", "####..", "#####.", "......"]
    assert of("inv_causal") == ["......", "#####.", ".####.", "..###.", "......"]
    assert of("bi_causal") == ["......", "###...", ".###..", "..###.", "......"]


def test_more_queries_than_keys_leave_queries_without_keys() -> None:
    assert shown(Mask.slices([(0, 4)], [(0, 2)], "causal"), 4, 2) == ["..", "..", "#.", "##"]
    assert shown(Mask.slices([(0, 4)], [(0, 2)], "bi_causal"), 4, 2) == ["..", "..", "..", ".."]


def test_pairs_of_several_slices_count_once() -> None:
    mask = Mask.slices([(0, 3), (1, 4)], [(0, 2), (1, 4)])
    assert shown(mask, 4, 4) == ["##..", "####", "####", ".###"]
    whole = (range(4),)
    assert worklist(mask, whole, whole).pairs == 13


def test_batch_rows_have_slices_of_their_own() -> None:
    mask = Mask.slices([[(0, 2)], []], [[(0, 1)], []])
    assert mask.batch_rows == 2
    assert [shown(mask, 2, 2, batch) for batch in (0, 1)] == [["#.", "#."], ["..", ".."]]
    with_text = Mask.causal() | mask
    assert [shown(with_text, 2, 2, batch) for batch in (0, 1)] == [["#.", "##"], ["#.", "##"]]
    disjoint = mask & Mask.slices([[(0, 0)], [(0, 2)]], [[(0, 0)], [(0, 2)]])
    assert disjoint.terms == ()


def test_arrays_and_lists_say_the_same() -> None:
    ranges = [(0, 2), (3, 7)]
    want = Mask.slices(ranges, ranges)
    assert Mask.slices(np.array(ranges), [list(pair) for pair in ranges], ["full", "full"]) == want
    assert Mask.slices(np.array([ranges]), np.array([ranges])) == Mask.slices([ranges], [ranges])
    assert hash(Mask.slices(ranges, ranges)) == hash(want)
    assert Mask.slices(ranges, ranges, "causal") != want
    assert Mask.slices([range(2), range(3, 7)], ranges) == want
    assert Mask.slices(iter(ranges), zip([0, 3], [2, 7], strict=True)) == want
    assert Mask.slices(iter([ranges, ranges]), [ranges, ranges]) == Mask.slices([ranges] * 2, [ranges] * 2)
    assert Mask.slices([[range(3, 5)]], [[range(2)]]) == Mask.slices([[(3, 5)]], [[(0, 2)]])


def test_equal_masks_have_one_canonical_form() -> None:
    a = Mask.slices([(0, 2), (3, 7), (4, 4)], [(0, 2), (3, 7), (0, 7)])
    b = Mask.slices([(3, 7), (0, 2), (0, 2)], [(3, 7), (0, 2), (0, 2)])
    assert a != b
    assert (a & Mask.causal()).canonical() == (Mask.causal() & b).canonical()
    assert str(a) == "slices(3 full)"
    assert str(Mask.slices([[(0, 1)], [(0, 1)]], [[(0, 1)], [(0, 1)]], "causal")) == "slices(2 causal in 2 rows)"


def test_a_slice_without_pairs_is_no_term() -> None:
    hidden = Mask.slices([(0, 9)], [(10, 12)], "bi_causal")
    assert hidden.terms == ()
    assert (Mask.causal() | hidden).terms == (Term(hi=0),)
    layout = Layout.contiguous(16, 2)
    for schedule in ("ring", "allgather", "ulysses"):
        verified(schedule, Problem(layout.ranges, layout.ranges, Mask.causal() | hidden, 2, 2))


def test_overlapping_slices_of_one_kind_take_little_memory() -> None:
    """Frames that see all frames before them: from the keys, as many queries overlap as there are frames."""
    count = 600
    ends = np.arange(1, count + 1) * 2
    mask = Mask.slices(np.stack([ends - 2, ends], axis=1), np.stack([0 * ends, ends], axis=1))
    work = worklist(mask, (range(2 * count),), (range(2 * count),))
    tracemalloc.start()
    assert len(work.by_key.spans) == count
    assert tracemalloc.get_traced_memory()[1] < 2e8
    tracemalloc.stop()


def test_two_bands_on_the_same_keys_show_each_pair_once() -> None:
    mask, whole = Mask.causal() | Mask.slices([(0, 30)], [(12, 37)], "inv_causal"), (range(37),)
    work = worklist(mask, whole, whole)
    shown = mask.visible(np.arange(37)[:, None], np.arange(37)[None, :])
    for table in (work.by_query, work.by_key):
        counts = np.zeros((37, 37), int)
        for n, (_, row, rows, first, _) in enumerate(table.segments.tolist()):
            for other, size, position, _, lo, hi in table.spans[table.indptr[n] : table.indptr[n + 1]].tolist():
                own, theirs = np.arange(rows)[:, None] + first, np.arange(size)[None, :] + position
                distance = theirs - own if table is work.by_query else own - theirs
                counts[row : row + rows, other : other + size] += (lo <= distance) & (distance <= hi)
        assert (counts == (shown if table is work.by_query else shown.T)).all()


def test_intersections_of_too_many_slices_raise_an_error() -> None:
    spans = [(n, n + 1) for n in range(600)]
    one = Mask.slices(spans, spans)
    with pytest.raises(ValueError, match="an intersection of 600 and 600 parts; expected at most 262,144 pairs"):
        _ = (one & Mask.slices(spans, spans, "causal")).terms
    assert len((one & Mask.causal() & Mask.slices([(0, 600)], [(0, 300)])).terms) == 300


def test_full_masks_keep_the_checks_of_slices() -> None:
    with pytest.raises(ValueError, match="a slice ends at 9, the sequence at 5"):
        (Mask.full() | Mask.slices([(0, 9)], [(0, 2)])).check(5, 5, 1)


def test_a_slice_is_a_term_with_two_intervals() -> None:
    (term,) = Mask.slices([(2, 5)], [(1, 9)], "bi_causal").terms
    assert term == Term(-1, 4, queries=(2, 5), keys=(1, 9))
    assert (Mask.slices([(2, 5)], [(1, 9)]) | Mask.full()).terms == (Term(),)
    many = [(n, n + 1) for n in range(MAX_COMPARED + 1)]
    assert len(Mask.slices(many, many).terms) == MAX_COMPARED + 1


def test_hundreds_of_slices_make_tables_that_show_their_pairs() -> None:
    tokens, cuts = 1200, np.arange(0, 1201, 4)
    spans = np.stack([cuts[:-1], cuts[1:] - 1], axis=1)
    mask, whole = Mask.causal() | Mask.slices(spans, spans), (range(tokens),)
    assert len(mask.terms) > MAX_COMPARED
    work = worklist(mask, whole, whole)
    assert work.pairs == tokens * (tokens + 1) // 2 + len(spans) * 3
    assert work.pairs == int(mask.visible(np.arange(tokens)[:, None], np.arange(tokens)[None, :]).sum())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "slices(q_ranges): expected at least one range"),
        (([(0, 2)], [(0, 2), (2, 3)]), "slices(k_ranges): 2 entries, q_ranges has 1; one for each slice"),
        (([[(0, 2)], []], [[(0, 2)], [(1, 2)]]), "slices(k_ranges): 1 entries in batch row 1, q_ranges has 0"),
        (([[(0, 2)]], [[(0, 2)], []]), "slices(k_ranges): 2 batch rows, q_ranges has 1"),
        (([(0, 2)], [(0, 2)], ["full", "full"]), "slices(kinds): 2 entries, q_ranges has 1"),
        (([[(0, 2)]], [[(0, 2)]], [["full"], []]), "slices(kinds): 2 batch rows, q_ranges has 1"),
        (([(0, 2)], [(0, 2)], "diagonal"), f"slices(kinds): 'diagonal'; expected one of {', '.join(KINDS)}"),
        (([(0, 2)], [(0, 2)], [1]), "slices(kinds): 1; expected one of"),
        (([range(0, 9, 2)], [(0, 2)]), "slices(q_ranges): expected pairs [begin, end]"),
        (({(0, 2), (3, 7)}, [(0, 2), (3, 7)]), "slices(q_ranges): expected pairs [begin, end]"),
        (([(0, 2), (3, 7)], {(0, 2), (3, 7)}), "slices(k_ranges): expected pairs [begin, end]"),
        (([(0, 2), (3, 7)], [(0, 2), (3, 7)], {"full", "causal"}), "slices(kinds): {"),
        (([(0, 2)], [(0, 2)], None), "slices(kinds): None; expected one of"),
        (([[(0, 2)]], [[(0, 2)]], [3]), "slices(kinds): [3]; expected one of"),
        ((np.array([[0, 2]], "m8[s]"), [(0, 2)]), "slices(q_ranges): expected pairs [begin, end]"),
        (([(2, 0)], [(0, 2)]), "slices(q_ranges): expected 0 <= begin <= end <= 1073741824, got [2, 0]"),
        (([(0, 2)], [(-1, 2)]), "slices(k_ranges): expected 0 <= begin <= end <= 1073741824, got [-1, 2]"),
        (([(0, 2**31)], [(0, 2)]), "slices(q_ranges): expected 0 <= begin <= end <= 1073741824"),
        (([(0, 2, 3)], [(0, 2)]), "slices(q_ranges): expected pairs [begin, end]"),
        (([(0.5, 2)], [(0, 2)]), "slices(q_ranges): expected pairs [begin, end]"),
        ((5, [(0, 2)]), "slices(q_ranges): expected pairs [begin, end]"),
        ((None, [(0, 2)]), "slices(q_ranges): expected pairs [begin, end]"),
        (([(0, 2), (1,)], [(0, 2), (0, 1)]), "slices(q_ranges): expected pairs [begin, end]"),
    ],
)
def test_wrong_arguments_raise_errors_that_name_them(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Mask.slices(*arguments)


def test_slices_beyond_the_sequence_raise_an_error() -> None:
    mask = Mask.slices([(0, 5)], [(2, 9)])
    mask.check(5, 9, 1)
    mask.check(3, 9, 1, q_offset=2)
    with pytest.raises(ValueError, match=re.escape("slices(q_ranges): a slice ends at 5, the sequence at 4")):
        (Mask.causal() | mask).check(4, 9, 1)
    with pytest.raises(ValueError, match=re.escape("slices(k_ranges): a slice ends at 9, the sequence at 8")):
        mask.check(5, 8, 1)


def test_batch_rows_that_do_not_fit_raise_an_error() -> None:
    two, three = ([[(0, 2)]] * rows for rows in (2, 3))
    with pytest.raises(ValueError, match=re.escape("slices(q_ranges): 2 rows of slices for a batch of 3")):
        Mask.slices(two, two).check(2, 2, 3)
    both = Mask.slices(two, two) & Mask.documents([[2]] * 3)
    with pytest.raises(ValueError, match=r"slices\(q_ranges\) and documents\(lengths\): masks for \[2, 3\] batch rows"):
        _ = both.batch_rows
    with pytest.raises(ValueError, match=r"slices\(q_ranges\): masks for \[2, 3\] batch rows"):
        _ = (Mask.slices(two, two) | Mask.slices(three, three)).batch_rows
