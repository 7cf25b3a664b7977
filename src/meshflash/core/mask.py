"""Masks: which keys a query may see, as an algebra over token positions.

`Mask.visible(i, j)` is the definition; everything else (tiles, layouts, kernels) is derived from it or checked against
it. A mask knows nothing of tensors, devices or how a sequence is sharded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from meshflash.core.block_masks import slices_of_blocks
from meshflash.core.documents import LENGTHS_ARGUMENTS, DocumentLengths
from meshflash.core.lengths import UNBOUNDED, Array, BoolArray, as_cumulative, as_integer, as_lengths, counts, starts
from meshflash.core.slices import SliceTable, slice_table
from meshflash.core.terms import Term, intersect, without_contained


class Mask:
    """Which keys a query may see. Build masks with the static methods, and combine them with `&` and `|`.

    >>> prefix_lm = Mask.causal() | Mask.first(3)
    >>> prefix_lm.visible(0, 2), prefix_lm.visible(0, 3)
    (True, False)
    >>> Mask.causal() & (Mask.window(2, 0) | Mask.first(1))
    causal & (window(2, 0) | first(1))
    """

    @staticmethod
    def full() -> Mask:
        """Every query sees every key.

        >>> Mask.full().visible(0, 100)
        True
        """
        return Band(None, None)

    @staticmethod
    def causal() -> Mask:
        """A query sees keys at its own position and before.

        >>> Mask.causal().visible(3, 3), Mask.causal().visible(3, 4)
        (True, False)
        """
        return Band(None, 0)

    @staticmethod
    def window(left: int | None, right: int | None) -> Mask:
        """The query at i sees keys from i - left to i + right.

        Args:
            left: The number of keys before the query, or None for no limit.
            right: The number of keys after the query, or None for no limit.

        >>> Mask.window(2, 0).visible(5, 3), Mask.window(2, 0).visible(5, 2)
        (True, False)
        """
        for name, value in (("left", left), ("right", right)):
            if value is not None and as_integer(value, f"window({name})") < 0:
                raise ValueError(f"window({name}={value}): expected a number >= 0, or None for no limit on that side")
        return Band(None if left is None else -int(left), None if right is None else int(right))

    @staticmethod
    def first(n: int, *, per_document: bool = False) -> Mask:
        """Every query sees the first n keys.

        Args:
            n: The number of keys, at least 1.
            per_document: Count the keys from the start of the query's own document instead of the sequence.

        >>> (Mask.documents([4, 4]) & Mask.first(1, per_document=True)).visible(6, [0, 4, 5]).tolist()
        [False, True, False]
        """
        if as_integer(n, "first(n)") < 1:
            raise ValueError(f"first(n={n}): expected n >= 1; n = 0 would hide every key")
        return First(int(n), per_document)

    @staticmethod
    def documents(lengths: Any, *, k_lengths: Any = None, pad: bool = False) -> Mask:
        """A query sees the keys of its own document, before it and after it.

        Args:
            lengths: The lengths of the documents in order: one list for all batch rows, or a list for each row. They
                must add up to the sequence, unless `pad` is set.
            k_lengths: The lengths of the documents of the keys, for cross-attention. The n-th document of the queries
                sees the n-th document of the keys.
            pad: Treat the tokens after the last document as padding, which sees nothing and is seen by no query.

        >>> Mask.documents([2, 3]).visible(1, [0, 1, 2]).tolist()
        [True, True, False]
        >>> Mask.documents([[2, 3], [5]]).visible(1, 2, batch=1)
        True
        """
        if not isinstance(pad, bool):
            raise ValueError(f"documents(pad={pad!r}): expected True or False")
        if k_lengths is None:
            return Documents(as_lengths(lengths, LENGTHS_ARGUMENTS[False][0]), None, pad)
        if counts(lengths) != counts(k_lengths):
            raise ValueError(
                f"documents(k_lengths): {counts(k_lengths)} documents for {counts(lengths)} in lengths; "
                "queries and keys need the same number of documents, in each row"
            )
        q_name, k_name = LENGTHS_ARGUMENTS[False]
        return Documents(as_lengths(lengths, q_name), as_lengths(k_lengths, k_name), pad)

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Any, cu_seqlens_k: Any = None) -> Mask:
        """Documents from cumulative lengths `[0, n1, n1 + n2, ...]`, as variable-length kernels take them.

        A tensor is read when the mask is first used, so this call may be inside a compiled function. A tensor on a
        device then costs a copy to the host.

        Args:
            cu_seqlens: The cumulative lengths of the documents, as a list, an array or a tensor.
            cu_seqlens_k: The cumulative lengths of the documents of the keys, for cross-attention.

        >>> Mask.from_cu_seqlens([0, 2, 5]) == Mask.documents([2, 3])
        True
        """
        q_name, k_name = LENGTHS_ARGUMENTS[True]
        k = None if cu_seqlens_k is None else as_cumulative(cu_seqlens_k, k_name)
        return Documents(as_cumulative(cu_seqlens, q_name), k, pad=False, cumulative=True)

    @staticmethod
    def slices(q_ranges: Any, k_ranges: Any, kinds: Any = "full") -> Mask:
        """A query sees a key if both are in a slice: the queries of a range see keys of another range.

        A pair may be in several slices; queries in none of them see nothing. The kind of a slice says what is cut off:

        - "full": nothing.
        - "causal": the last query sees up to the last key, and each query before it one key less.
        - "inv_causal": the first query sees from the first key on, and each query after it one key less.
        - "bi_causal": both.

        Args:
            q_ranges: The ranges of positions of queries, as pairs `[begin, end)`: a list of pairs for all batch rows,
                or such a list for each row.
            k_ranges: The ranges of positions of keys, one for each range of queries.
            kinds: The kind of all slices, or a list with the kind of each one.

        >>> text_with_image = Mask.causal() | Mask.slices([(2, 5)], [(2, 5)])
        >>> text_with_image.visible(3, [1, 4, 5]).tolist()
        [True, True, False]
        """
        return Slices(**vars(slice_table(q_ranges, k_ranges, kinds)))

    @staticmethod
    def from_block_mask(block_mask: Any) -> Mask:
        """Return the mask of FlexAttention's `BlockMask`, as slices, for sequences of its lengths.

        Its `mask_mod` is evaluated on partial blocks as FlexAttention does, for head 0, and for batch row 0 if the
        block mask has one row. Block masks of several heads, and those that take more than 4,096 slices, raise
        ValueError.

        Args:
            block_mask: The block mask, as `create_block_mask` makes it.
        """
        return Slices(**vars(slices_of_blocks(block_mask)))

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: combine masks with & and |, not with and, or, not")

    def __and__(self, other: Mask) -> Mask:
        return _combine(And, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _combine(Or, self, other)

    def visible(self, i: Any, j: Any, batch: int = 0) -> Any:
        """Return whether the query at position i sees the key at position j; arrays broadcast.

        Args:
            i: The position of the query, an integer or an array.
            j: The position of the key, an integer or an array.
            batch: The batch row, for masks with documents or slices for each row.

        >>> Mask.causal().visible([[0], [1]], [0, 1]).tolist()
        [[True, False], [True, True]]
        """
        if not 0 <= batch < (self.batch_rows or batch + 1):
            raise ValueError(f"visible(batch={batch}): expected a row from 0 to {(self.batch_rows or 1) - 1}")
        seen = self._visible(_positions(i, "i"), _positions(j, "j"), batch, self.documents_node)
        return seen if seen.ndim else bool(seen)

    @cached_property
    def documents_nodes(self) -> tuple[Documents, ...]:
        """The distinct `documents(...)` of this mask, in the order of the expression."""
        return tuple(dict.fromkeys(node for node in self._leaves() if isinstance(node, Documents)))

    @property
    def documents_node(self) -> Documents | None:
        """The only `documents(...)` of this mask, or None if there are none or several."""
        return self.documents_nodes[0] if len(self.documents_nodes) == 1 else None

    @cached_property
    def batch_rows(self) -> int | None:
        """The number of batch rows with documents or slices of their own, or None if one mask serves all rows."""
        rows = {leaf.rows for leaf in self._leaves_by_row if leaf.rows is not None}
        if len(rows) > 1:
            names = " and ".join(dict.fromkeys(leaf.argument for leaf in self._leaves_by_row))
            raise ValueError(f"{names}: masks for {sorted(rows)} batch rows cannot be combined")
        return next(iter(rows), None)

    @property
    def _leaves_by_row(self) -> list[Documents | Slices]:
        """The parts with documents or slices of their own for each batch row."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Documents | Slices) and leaf.rows is not None]

    def check(self, q_tokens: int, k_tokens: int, batch: int, q_offset: int = 0) -> None:
        """Raise ValueError unless this mask fits queries and keys of these lengths.

        Args:
            q_tokens: The number of queries.
            k_tokens: The number of keys.
            batch: The number of batch rows.
            q_offset: The position of the first query.

        >>> Mask.documents([2, 3]).check(6, 6, batch=1)
        Traceback (most recent call last):
            ...
        ValueError: documents(lengths): 5 tokens in the documents, 6 in the sequence; ...
        """
        if self.batch_rows is not None and self.batch_rows != batch:
            leaf = self._leaves_by_row[0]
            raise ValueError(
                f"{leaf.argument}: {self.batch_rows} rows of {leaf.kind} for a batch of {batch}; {leaf.remedy}"
            )
        for node in self._leaves():
            if isinstance(node, First) and node.per_document and self.documents_node is None:
                raise ValueError(
                    f"first(n={node.n}, per_document=True): the mask must hold exactly one documents(...), "
                    f"this one holds {len(self.documents_nodes)}"
                )
        for documents in self.documents_nodes:
            documents.check_lengths(q_tokens, k_tokens, q_offset)
        for slices in self._leaves():
            if isinstance(slices, Slices):
                slices.check_range(q_offset + q_tokens, k_tokens)

    def positions_in_document(self, tokens: int) -> Array:
        """Return each token's index in its own document, for RoPE: `[tokens]`, or `[batch rows, tokens]`.

        Args:
            tokens: The length of the sequence.

        >>> Mask.documents([2, 3]).positions_in_document(5).tolist()
        [0, 1, 0, 1, 2]
        """
        places = np.arange(tokens, dtype=np.int64)
        if not self.documents_nodes:
            return places
        node = self.documents_node
        if node is None:
            raise ValueError("positions_in_document: the mask holds more than one documents(...)")
        node.check_side(0, tokens)
        rows = [places - starts(node.q_cuts(b), places) for b in range(node.rows or 1)]
        return rows[0] if node.rows is None else np.stack(rows)

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """This mask as a union of terms, without terms that another one contains."""
        return without_contained(self._terms(self.documents_node))

    def pack(self) -> tuple[str, list[Any]]:
        """Return this mask as a text, and the arrays of document lengths and slices that it refers to by index."""
        arrays: list[Any] = []
        return self._pack(arrays), arrays

    @staticmethod
    def unpack(text: str, arrays: Sequence[Any]) -> Mask:
        """Return the mask that `pack` encoded.

        Args:
            text: The text that `pack` returned.
            arrays: The arrays that `pack` returned, in the same order.

        >>> mask = Mask.causal() & Mask.documents([2, 3])
        >>> Mask.unpack(*mask.pack()) == mask
        True
        """
        return _unpack(json.loads(text), arrays)

    def canonical(self) -> Mask:
        """Return an equal mask in canonical form: parts sorted, documents as lengths. Reads tensors.

        >>> (Mask.from_cu_seqlens([0, 2, 5]) & Mask.causal()).canonical() == Mask.causal() & Mask.documents([2, 0, 3])
        True
        """
        return self

    def _visible(self, i: Array, j: Array, batch: int, documents: Documents | None) -> BoolArray:
        raise NotImplementedError

    def _order(self) -> tuple[Any, ...]:
        """Return the sort key of a part of a canonical mask: its kind, then its contents."""
        raise NotImplementedError

    def _leaves(self) -> Iterator[Mask]:
        yield self

    def document_tokens(self) -> set[int]:
        """Return the total lengths of the queries' documents, over all batch rows. Reads tensors."""
        return {int(n) for node in self.documents_nodes for n in np.atleast_2d(node._q).sum(axis=1)}

    @cached_property
    def has_documents(self) -> bool:
        """Whether this mask has document lengths, which may be a tensor on a device."""
        return any(isinstance(node, Documents) for node in self._leaves())

    @property
    def has_arrays(self) -> bool:
        """Whether this mask has document lengths or slices: they are checked against a sequence."""
        return any(isinstance(node, Documents | Slices) for node in self._leaves())

    def _terms(self, documents: Documents | None) -> list[Term]:
        raise NotImplementedError

    def _pack(self, arrays: list[Any]) -> str:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Band(Mask):
    """`lo <= j - i <= hi`; None means no limit."""

    lo: int | None
    hi: int | None

    def __repr__(self) -> str:
        if self.lo is None:
            return {None: "full", 0: "causal"}.get(self.hi, f"window(None, {self.hi})")
        return f"window({-self.lo}, {self.hi})"

    def _visible(self, i: Array, j: Array, batch: int, documents: Documents | None) -> BoolArray:
        distance = j - i
        seen = np.ones(distance.shape, dtype=np.bool_)
        if self.lo is not None:
            seen &= distance >= self.lo
        if self.hi is not None:
            seen &= distance <= self.hi
        return seen

    def _terms(self, documents: Documents | None) -> list[Term]:
        lo = -UNBOUNDED if self.lo is None else max(self.lo, -UNBOUNDED)
        return [Term(lo, UNBOUNDED if self.hi is None else min(self.hi, UNBOUNDED))]

    def _pack(self, arrays: list[Any]) -> str:
        lo = "null" if self.lo is None else f"{self.lo}"
        hi = "null" if self.hi is None else f"{self.hi}"
        return f'["band", {lo}, {hi}]'

    def _order(self) -> tuple[Any, ...]:
        return 0, self.lo is None, self.lo or 0, self.hi is None, self.hi or 0

    def __le__(self, other: Band) -> bool:
        """Whether every pair of this band is a pair of the other."""
        left = other.lo is None or (self.lo is not None and other.lo <= self.lo)
        return left and (other.hi is None or (self.hi is not None and self.hi <= other.hi))


@dataclass(frozen=True, repr=False)
class First(Mask):
    """`j < n`, or j among the first n keys of the query's own document."""

    n: int
    per_document: bool

    def __repr__(self) -> str:
        return f"first({self.n}, per_document=True)" if self.per_document else f"first({self.n})"

    def _visible(self, i: Array, j: Array, batch: int, documents: Documents | None) -> BoolArray:
        if not self.per_document:
            return np.broadcast_to(j < self.n, np.broadcast_shapes(i.shape, j.shape)).copy()
        documents = _the_documents(documents, self)
        place = j - starts(documents.k_cuts(batch), j)
        return documents._visible(i, j, batch, documents) & (place < self.n)

    def _terms(self, documents: Documents | None) -> list[Term]:
        if not self.per_document:
            return [Term(keys=(0, min(self.n, UNBOUNDED)))]
        own = (_the_documents(documents, self),)
        return [Term(documents=own, first_in_document=min(self.n, UNBOUNDED))]

    def _pack(self, arrays: list[Any]) -> str:
        return f'["first", {self.n}, {"true" if self.per_document else "false"}]'

    def _order(self) -> tuple[Any, ...]:
        return 1, self.per_document, self.n


@dataclass(frozen=True, eq=False, repr=False)
class Documents(DocumentLengths, Mask):
    """Query and key are in the same document. `Mask.documents` and `Mask.from_cu_seqlens` make it."""

    argument: ClassVar[str] = LENGTHS_ARGUMENTS[False][0]
    kind: ClassVar[str] = "documents"
    remedy: ClassVar[str] = "give one list for all rows, or a list for each row"

    def canonical(self) -> Mask:
        q_lengths, k_lengths = self.nonempty
        own_keys = None if self.k_lengths is None else k_lengths
        return Documents(q_lengths, own_keys, self.pad, False, self.given_as_cu_seqlens)

    def _order(self) -> tuple[Any, ...]:
        return 2, *self._key

    def _visible(self, i: Array, j: Array, batch: int, documents: Documents | None) -> BoolArray:
        q_cuts, k_cuts = self.q_cuts(batch), self.k_cuts(batch)
        i_document = np.searchsorted(q_cuts, i, "right")
        j_document = np.searchsorted(k_cuts, j, "right")
        seen: BoolArray = (i_document == j_document) & (i < q_cuts[-1]) & (j < k_cuts[-1])
        return seen

    def _terms(self, documents: Documents | None) -> list[Term]:
        return [Term(documents=(self,))]

    def _pack(self, arrays: list[Any]) -> str:
        arrays.append(self.lengths)
        if self.k_lengths is not None:
            arrays.append(self.k_lengths)
        k = "null" if self.k_lengths is None else f"{len(arrays) - 1}"
        q = len(arrays) - (1 if self.k_lengths is None else 2)
        return f'["documents", {q}, {k}, {"true" if self.pad else "false"}, {"true" if self.cumulative else "false"}]'


@dataclass(frozen=True, eq=False, repr=False)
class Slices(SliceTable, Mask):
    """Query and key are in one of some slices. `Mask.slices` and `Mask.from_block_mask` make it."""

    kind: ClassVar[str] = "slices"

    def canonical(self) -> Mask:
        return Slices(self.sorted_table, self.rows, self.lengths)

    def _order(self) -> tuple[Any, ...]:
        return 5, *self._key

    def _visible(self, i: Array, j: Array, batch: int, documents: Documents | None) -> BoolArray:
        return self.sees(i, j, batch)

    def _terms(self, documents: Documents | None) -> list[Term]:
        return list(self.terms_of_slices())

    def _pack(self, arrays: list[Any]) -> str:
        arrays.append(self.table)
        rows = "null" if self.rows is None else f"{self.rows}"  # no json here: a compiler traces this function
        lengths = "null" if self.lengths is None else f"[{self.lengths[0]}, {self.lengths[1]}]"
        return f'["slices", {len(arrays) - 1}, {rows}, {lengths}]'


@dataclass(frozen=True, repr=False)
class _Combination(Mask):
    """Several masks, combined by `ufunc`."""

    parts: tuple[Mask, ...]
    kind: ClassVar[str]
    ufunc: ClassVar[np.ufunc]

    def _visible(self, i: Array, j: Array, batch: int, documents: Documents | None) -> BoolArray:
        seen: BoolArray = self.ufunc.reduce([part._visible(i, j, batch, documents) for part in self.parts])
        return seen

    def canonical(self) -> Mask:
        found = [part.canonical() for part in self.parts]
        parts = [part for one in found for part in (one.parts if isinstance(one, type(self)) else (one,))]
        return _simplified(type(self), sorted(parts, key=lambda part: part._order()), read=True)

    def _order(self) -> tuple[Any, ...]:
        return 3 if isinstance(self, And) else 4, *(part._order() for part in self.parts)

    def _leaves(self) -> Iterator[Mask]:
        for part in self.parts:
            yield from part._leaves()

    def _pack(self, arrays: list[Any]) -> str:
        return f'["{self.kind}", ' + ", ".join([part._pack(arrays) for part in self.parts]) + "]"


class And(_Combination):
    """The intersection of several masks."""

    kind = "and"
    ufunc = np.logical_and

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts)

    def _terms(self, documents: Documents | None) -> list[Term]:
        return intersect([part._terms(documents) for part in self.parts])


class Or(_Combination):
    """The union of several masks."""

    kind = "or"
    ufunc = np.logical_or

    def __repr__(self) -> str:
        return " | ".join(str(part) for part in self.parts)

    def _terms(self, documents: Documents | None) -> list[Term]:
        return [term for part in self.parts for term in part._terms(documents)]


def _unpack(node: list[Any], arrays: Sequence[Any]) -> Mask:
    kind, *fields = node
    match kind:
        case "band":
            return Band(*fields)
        case "first":
            return First(*fields)
        case "documents":
            q, k, pad, cumulative = fields
            return Documents(arrays[q], None if k is None else arrays[k], pad, cumulative)
        case "slices":
            table, rows, lengths = fields
            return Slices(arrays[table], rows, lengths and tuple(lengths))
        case "and":
            return And(tuple(_unpack(part, arrays) for part in fields))
        case "or":
            return Or(tuple(_unpack(part, arrays) for part in fields))
    raise ValueError(f"not a mask: {node!r}")


def _combine(kind: type[And] | type[Or], left: Mask, right: Mask) -> Mask:
    parts: tuple[Mask, ...] = ()
    for mask in (left, right):
        if not isinstance(mask, Mask):
            raise TypeError(f"a mask combines with a mask, not with {type(mask).__name__}")
        parts += mask.parts if isinstance(mask, kind) else (mask,)
    return _simplified(kind, parts)


def _simplified(kind: type[_Combination], parts: Sequence[Mask], read: bool = False) -> Mask:
    """Return a combination without redundant parts, in order; a single part is returned by itself.

    Documents stay: a `first(..., per_document=True)` may refer to them, and their lengths must be checked, as slices
    must. `read` says whether to compare them, which reads tensors.
    """
    kept: list[Mask] = []
    for part in parts:
        place = len(kept)
        for n in range(len(kept) - 1, -1, -1):  # one wide band may replace several
            merged = _merged(kind, kept[n], part, read)
            if merged is not None:
                part, place = merged, n
                del kept[n]
        kept.insert(place, part)
    if any(_is_full(part) for part in kept):
        others = [part for part in kept if not _is_full(part) and (kind is And or part.has_arrays)]
        kept = (others if kind is And else [Band(None, None), *others]) or [Band(None, None)]
    return kept[0] if len(kept) == 1 else kind(tuple(kept))


def _merged(kind: type[_Combination], a: Mask, b: Mask, read: bool) -> Mask | None:
    """Return one part that replaces two, or None if both are needed."""
    if a is b:
        return a
    if isinstance(a, Band) and isinstance(b, Band):
        if a <= b or b <= a:
            return a if (a <= b) == (kind is And) else b
        if kind is And:  # one is narrower on the left, the other on the right
            return Band(a.lo, b.hi) if Band(a.lo, None) <= Band(b.lo, None) else Band(b.lo, a.hi)
        return None
    if isinstance(a, First) and isinstance(b, First) and a.per_document == b.per_document:
        return First(min(a.n, b.n) if kind is And else max(a.n, b.n), a.per_document)
    if type(a) is type(b) and (read or not (a.has_arrays or b.has_arrays)) and a == b:
        return a
    return None


def _is_full(mask: Mask) -> bool:
    return isinstance(mask, Band) and mask.lo is None and mask.hi is None


def _the_documents(documents: Documents | None, node: First) -> Documents:
    if documents is None:
        raise ValueError(f"{node}: the mask must hold exactly one documents(...)")
    return documents


def _positions(value: Any, name: str) -> Array:
    array = np.asarray(value)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"visible({name}): expected integer positions, got {value!r}")
    return array.astype(np.int64)
