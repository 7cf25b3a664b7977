"""Document masks: lengths as lists, arrays and tensors, and errors for lengths that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.definition import DocumentSet, Expression, assert_same, build, locate, split
from meshflash.core.mask import Mask

DOCUMENT_SETS = [
    DocumentSet([4, 3, 5]),
    DocumentSet([12]),
    DocumentSet([0, 4, 0, 0, 8, 0]),
    DocumentSet([4, 3], pad=True),
    DocumentSet([], pad=True),
    DocumentSet([0, 0], pad=True),
    DocumentSet([4, 3, 5], [1, 9, 2]),
    DocumentSet([4, 0, 8], [0, 9, 3]),
    DocumentSet([4, 3], [5, 1], pad=True),
    DocumentSet([[4, 8], [7, 5]], rows=2),
    DocumentSet([[0, 12, 0], [6, 0, 6]], rows=2),
    DocumentSet([[1, 2, 3], [0, 0, 9]], pad=True, rows=2),
    DocumentSet([[4, 8], [7, 5]], [[12, 0], [0, 12]], rows=2),
]


@pytest.mark.parametrize("documents", DOCUMENT_SETS, ids=str)
def test_document_masks_match_their_definition(documents: DocumentSet) -> None:
    mask = documents.mask()
    assert mask.batch_rows == documents.rows
    assert_same(mask, ("documents", 0), 12, 12, [documents])
    mask.check(12, 12, batch=documents.rows or 7)


@pytest.mark.parametrize("documents", DOCUMENT_SETS, ids=str)
@pytest.mark.parametrize("n", [1, 3, 50])
def test_first_keys_of_each_document_match_their_definition(documents: DocumentSet, n: int) -> None:
    own: Expression = ("first_of_own", n)
    for e in (
        ("and", ("documents", 0), own),
        ("or", ("and", ("causal",), ("documents", 0)), own),
        ("and", ("documents", 0), ("or", ("window", 2, 0), own)),
    ):
        assert_same(build(e, [documents]), e, 12, 12, [documents])


def test_rows_may_have_different_numbers_of_documents() -> None:
    ragged = Mask.documents([[2, 3], [5], [1, 1, 3]])
    assert ragged.batch_rows == 3
    assert ragged == Mask.documents([[2, 3, 0], [5, 0, 0], [1, 1, 3]])
    assert_same(ragged, ("documents", 0), 5, 5, [DocumentSet([[2, 3], [5], [1, 1, 3]], rows=3)])


def test_repr_counts_documents_instead_of_listing_them() -> None:
    assert repr(Mask.documents([2, 3])) == "documents(2 lengths)"
    assert repr(Mask.documents([[2, 3], [5]])) == "documents(2 x 2 lengths)"
    assert repr(Mask.documents([2, 3], pad=True)) == "documents(2 lengths, pad=True)"
    own = Mask.documents([2, 3]) & Mask.first(1, per_document=True)
    assert repr(own) == "documents(2 lengths) & first(1, per_document=True)"


def test_empty_documents_do_not_change_equality() -> None:
    assert Mask.documents([0, 2, 0, 3]) == Mask.documents([2, 3, 0])
    assert hash(Mask.documents([0, 2, 0, 3])) == hash(Mask.documents([2, 3, 0]))
    assert Mask.documents([2, 0], k_lengths=[3, 0]) == Mask.documents([2], k_lengths=[3])
    assert Mask.documents([2, 0], k_lengths=[3, 1]) != Mask.documents([2], k_lengths=[3])
    assert Mask.documents([2, 0, 3], k_lengths=[1, 2, 2]) != Mask.documents([2, 3], k_lengths=[1, 2])


def test_separate_key_documents_must_match_the_key_length() -> None:
    shared, apart = Mask.documents([2, 3]), Mask.documents([2, 3], k_lengths=[2, 3])
    assert shared != apart
    shared.check(3, 5, batch=1)
    with pytest.raises(ValueError, match="5 tokens in the documents, 3 in the sequence"):
        apart.check(3, 5, batch=1)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint32])
def test_equality_ignores_the_type_of_the_lengths(dtype: Any) -> None:
    lengths = np.array([2, 3], dtype=dtype)
    assert Mask.documents(lengths) == Mask.documents([2, 3]) == Mask.documents((2, 3))
    assert Mask.documents(n for n in lengths) == Mask.documents([2, 3])
    assert Mask.documents([np.array(n, dtype=dtype) for n in (2, 3)]) == Mask.documents([2, 3])
    assert Mask.documents([lengths, lengths]) == Mask.documents([[2, 3], [2, 3]])


def test_mask_copies_the_lengths_it_is_given() -> None:
    lengths, cuts = np.array([2, 3]), np.array([0, 2, 5])
    a, b = Mask.documents(lengths), Mask.from_cu_seqlens(cuts)
    lengths[:] = cuts[1:] = 9
    assert a == b == Mask.documents([2, 3])


class Tensor:
    """A stand-in for a framework's tensor that counts how often it is read."""

    device = "somewhere"

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.reads: list[int] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def _derived(self, values: Any) -> Tensor:
        out = Tensor(values)
        out.reads = self.reads
        return out

    def __getitem__(self, index: Any) -> Tensor:
        return self._derived(self.values[index])

    def __setitem__(self, index: Any, other: Tensor) -> None:
        self.values[index] = other.values

    def __add__(self, other: Tensor | int) -> Tensor:
        return self._derived(self.values + (other.values if isinstance(other, Tensor) else other))

    def __sub__(self, other: Tensor) -> Tensor:
        return self._derived(self.values - other.values)

    def cpu(self) -> Tensor:
        self.reads.append(1)
        return self

    def numpy(self) -> Any:
        return self.values


CU_SEQLENS_TYPES = pytest.mark.parametrize(
    "make", [list, tuple, np.array, Tensor], ids=["list", "tuple", "array", "tensor"]
)


@CU_SEQLENS_TYPES
def test_cu_seqlens_of_any_type_match_the_definition(make: Callable[[list[int]], Any]) -> None:
    mask = Mask.from_cu_seqlens(make([0, 2, 2, 5]))
    assert_same(mask, ("documents", 0), 5, 5, [DocumentSet([2, 0, 3])])
    mask.check(5, 5, batch=3)
    assert mask.positions_in_document(5).tolist() == [0, 1, 0, 1, 2]
    assert not Mask.from_cu_seqlens(make([0])).visible(0, 0)


@CU_SEQLENS_TYPES
def test_separate_cu_seqlens_for_keys_match_the_definition(make: Callable[[list[int]], Any]) -> None:
    mask = Mask.from_cu_seqlens(make([0, 2, 5]), make([0, 4, 6]))
    assert_same(mask, ("documents", 0), 5, 6, [DocumentSet([2, 3], [4, 2])])
    mask.check(5, 6, batch=1)
    text, arrays = mask.pack()
    assert Mask.unpack(text, arrays) == mask


def test_cu_seqlens_equal_documents_of_their_lengths() -> None:
    for cuts in ([0, 2, 2, 5], np.array([0, 2, 2, 5])):
        assert Mask.from_cu_seqlens(cuts) == Mask.documents([2, 0, 3])
    assert Mask.from_cu_seqlens([0]) == Mask.documents([])
    assert Mask.from_cu_seqlens([0, 2, 5], [0, 4, 6]) == Mask.documents([2, 3], k_lengths=[4, 2])


def test_tensor_and_list_of_cumulative_lengths_are_equal() -> None:
    assert Mask.from_cu_seqlens(Tensor([0, 2, 5])) == Mask.from_cu_seqlens([0, 2, 5])


def test_cumulative_lengths_of_queries_and_keys_may_have_different_types() -> None:
    mask = Mask.from_cu_seqlens(Tensor([0, 2, 5]), [0, 4, 6])
    assert_same(mask, ("documents", 0), 5, 6, [DocumentSet([2, 3], [4, 2])])


def test_tensor_is_read_once_and_on_first_use() -> None:
    cuts = Tensor([0, 2, 5])
    mask = Mask.causal() & Mask.from_cu_seqlens(cuts)
    assert repr(mask).startswith("causal & documents(")
    again = Mask.unpack(*mask.pack())
    assert cuts.reads == []
    assert mask.visible(3, [1, 2]).tolist() == [False, True]
    mask.check(5, 5, batch=1)
    assert mask in {mask}
    assert len(cuts.reads) == 1
    assert again == mask


def test_tensors_of_lengths_equal_lists_of_lengths() -> None:
    shared, rows = Mask.documents(Tensor([2, 3])), Mask.documents(Tensor([[2, 3], [5, 0]]))
    assert (shared.batch_rows, rows.batch_rows) == (None, 2)
    assert shared == Mask.documents([2, 3])
    assert rows == Mask.documents([[2, 3], [5]])
    assert Mask.documents(Tensor([2, 3]), k_lengths=[1, 4]) == Mask.documents([2, 3], k_lengths=[1, 4])


def test_positions_in_document_count_from_each_document_start() -> None:
    assert Mask.causal().positions_in_document(4).tolist() == [0, 1, 2, 3]
    mask = Mask.causal() & (Mask.documents([2, 0, 3]) | Mask.first(1, per_document=True))
    assert mask.positions_in_document(5).tolist() == [0, 1, 0, 1, 2]
    rows = Mask.documents([[2, 3], [5]])
    assert rows.positions_in_document(5).tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    padded = Mask.documents([2, 1], pad=True)
    assert padded.positions_in_document(5)[:3].tolist() == [0, 1, 0]
    twice = Mask.documents([2, 3]) & Mask.documents([2, 3])
    assert twice.positions_in_document(5).tolist() == [0, 1, 0, 1, 2]
    assert Mask.documents([]).positions_in_document(0).tolist() == []


@given(st.data(), st.integers(0, 20), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_positions_in_document_follow_the_definition(data: st.DataObject, tokens: int, count: int) -> None:
    lengths = data.draw(st.composite(split)(tokens, count))
    found = Mask.documents(lengths).positions_in_document(tokens)
    assert found.tolist() == [(locate(lengths, p) or (0, -1))[1] for p in range(tokens)]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([2, -3], r"documents\(lengths\): lengths must be >= 0, got -3"),
        ([2.0, 3.0], r"documents\(lengths\): expected a list of integers"),
        (5, r"documents\(lengths\): expected a list of integers"),
        ([[[5]]], r"documents\(lengths\): expected a list of integers"),
    ],
)
def test_invalid_tensor_of_lengths_is_refused_on_first_use(lengths: Any, message: str) -> None:
    mask = Mask.documents(Tensor(lengths))
    with pytest.raises(ValueError, match=message):
        mask.check(5, 5, batch=1)


def test_decreasing_tensor_of_cumulative_lengths_is_refused_on_first_use() -> None:
    mask = Mask.from_cu_seqlens(Tensor([0, 5, 3]))
    with pytest.raises(ValueError, match="lengths must be >= 0, got -2"):
        mask.check(3, 3, batch=1)


@pytest.mark.parametrize("tokens", [3, 5])
def test_cu_seqlens_tensor_must_start_at_0(tokens: int) -> None:
    mask = Mask.from_cu_seqlens(Tensor([2, 5]))
    with pytest.raises(ValueError, match=r"from_cu_seqlens\(cu_seqlens\): expected \[0, n1"):
        mask.check(tokens, tokens, batch=1)


def test_cu_seqlens_tensor_must_have_one_dimension() -> None:
    with pytest.raises(ValueError, match=r"from_cu_seqlens"):
        Mask.from_cu_seqlens(Tensor([[0, 2], [0, 5]]))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_unsigned_cumulative_lengths_may_not_decrease(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens\): lengths must be >= 0"):
        Mask.from_cu_seqlens(np.array([0, 200, 100], dtype=dtype))


@pytest.mark.parametrize(
    "lengths",
    [5, None, np.int64(5), np.array(5), [[1, 2], 3]],
    ids=["number", "None", "numpy number", "array of no dimension", "mixed"],
)
def test_invalid_lengths_are_refused(lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"documents\(lengths\): expected a list"):
        Mask.documents(lengths)


def test_lengths_beyond_any_sequence_do_not_wrap_around() -> None:
    with pytest.raises(ValueError, match=r"documents\(lengths\)"):
        Mask.documents([2**62] * 4 + [8]).check(8, 8, batch=1)


@pytest.mark.parametrize("k_lengths", [[5], [[2, 3]], [1, 2, 2]])
def test_keys_need_as_many_documents_as_queries(k_lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"queries and keys need the same number of documents"):
        Mask.documents([2, 3], k_lengths=k_lengths).check(5, 5, batch=1)


def length_error(name: str, documents: int, tokens: int) -> str:
    return rf"documents\({name}\): {documents} tokens in the documents, {tokens} in the sequence"


def test_documents_must_add_up_to_the_sequence() -> None:
    mask = Mask.causal() & Mask.documents([2, 3])
    mask.check(5, 5, batch=1)
    with pytest.raises(ValueError, match=length_error("lengths", 5, 6) + "; pad=True if the rest is padding"):
        mask.check(6, 6, batch=1)
    with pytest.raises(ValueError, match=length_error("lengths", 5, 4) + "$"):
        mask.check(4, 4, batch=1)
    with pytest.raises(ValueError, match=length_error("lengths", 4, 5)):
        Mask.documents([[5, 0], [2, 2]]).check(5, 5, batch=2)


def test_query_offset_counts_towards_the_document_lengths() -> None:
    mask = Mask.documents([2, 3])
    mask.check(2, 5, batch=1, q_offset=3)
    mask.check(3, 5, batch=1)
    with pytest.raises(ValueError, match=length_error("lengths", 5, 6)):
        mask.check(2, 5, batch=1, q_offset=4)


def test_padding_may_follow_the_documents_but_not_be_negative() -> None:
    mask = Mask.documents([[2, 3], [1]], pad=True)
    mask.check(5, 5, batch=2)
    mask.check(9, 9, batch=2)
    with pytest.raises(ValueError, match=length_error("lengths", 5, 4) + "$"):
        mask.check(4, 4, batch=2)


def test_key_documents_must_add_up_to_the_key_length() -> None:
    mask = Mask.documents([2, 3], k_lengths=[4, 3])
    mask.check(5, 7, batch=1)
    with pytest.raises(ValueError, match=length_error("k_lengths", 7, 8)):
        mask.check(5, 8, batch=1)
    with pytest.raises(ValueError, match=length_error("lengths", 5, 6)):
        mask.check(6, 7, batch=1)
    with pytest.raises(ValueError, match=length_error("k_lengths", 7, 6)):
        Mask.documents([2, 3], k_lengths=[4, 3], pad=True).check(9, 6, batch=1)


def test_rows_of_documents_must_match_the_batch() -> None:
    mask = Mask.documents([[2, 3], [5]]) & Mask.causal()
    mask.check(5, 5, batch=2)
    with pytest.raises(ValueError, match="2 rows of documents for a batch of 3; give one list for all rows"):
        mask.check(5, 5, batch=3)


def test_shared_and_per_row_documents_combine() -> None:
    mask = Mask.documents([2, 3]) & Mask.documents([[1, 4], [4, 1]])
    assert mask.batch_rows == 2
    assert mask.documents_node is None
    sets = [DocumentSet([2, 3]), DocumentSet([[1, 4], [4, 1]], rows=2)]
    assert_same(mask, ("and", ("documents", 0), ("documents", 1)), 5, 5, sets)


def test_documents_of_different_batches_do_not_combine() -> None:
    mask = Mask.documents([[5], [5]]) & Mask.documents([[5], [5], [5]])
    with pytest.raises(ValueError, match=r"masks for \[2, 3\] batch rows cannot be combined"):
        mask.check(5, 5, batch=2)


def test_first_per_document_needs_one_set_of_documents() -> None:
    own = Mask.first(2, per_document=True)
    for mask, count in (
        (own, 0),
        (Mask.causal() | own, 0),
        (own & Mask.documents([2, 3]) & Mask.documents([1, 4]), 2),
        (own & Mask.documents([2, 3]) & Mask.documents([2, 3], pad=True), 2),
    ):
        with pytest.raises(ValueError, match=rf"exactly one documents\(...\), this one holds {count}"):
            mask.check(5, 5, batch=1)
        with pytest.raises(ValueError, match=r"first\(2, per_document=True\): the mask must hold"):
            mask.visible(0, 0)
        with pytest.raises(ValueError, match=r"the mask must hold exactly one documents"):
            _ = mask.terms
    twice = own & Mask.documents([2, 3]) & Mask.documents([2, 3])
    twice.check(5, 5, batch=1)


def test_positions_in_document_refuses_two_sets_of_documents() -> None:
    with pytest.raises(ValueError, match="the mask holds more than one documents"):
        (Mask.documents([2, 3]) & Mask.documents([1, 4])).positions_in_document(5)


@pytest.mark.parametrize("batch", [-1, 2])
def test_visible_refuses_batch_rows_out_of_range(batch: int) -> None:
    with pytest.raises(ValueError, match=rf"visible\(batch={batch}\): expected a row from 0 to 1"):
        Mask.documents([[2, 3], [5]]).visible(0, 0, batch=batch)


def test_positions_in_document_refuses_lengths_that_do_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"documents\(lengths\): 5 tokens in the documents, 10 in the sequence"):
        Mask.documents([2, 3]).positions_in_document(10)
    assert Mask.documents([2, 3], pad=True).positions_in_document(6).tolist() == [0, 1, 0, 1, 2, 0]


def test_ragged_rows_need_as_many_documents_for_the_keys() -> None:
    with pytest.raises(ValueError, match=r"documents\(k_lengths\): \[2, 2\] documents for \[2, 1\] in lengths"):
        Mask.documents([[2, 3], [5]], k_lengths=[[2, 3], [4, 1]])
