"""A tensor of a symmetric heap: ours, those of the peers, and views of the same part on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from meshflash.gemm.heap_contract import Heap


@dataclass(eq=False)
class Allocation:
    """A piece of the heap. `number` counts the calls of allocate and free."""

    number: int
    place: int
    text: str


class SymmetricTensor:
    """A tensor that every rank has at the same place of its heap: ours, and by address those of the peers.

    Indexing and `view` give the same part of it on every rank.
    """

    def __init__(self, heap: Heap, allocation: Allocation, tensors: Sequence[Tensor], whole: bool = False) -> None:
        self.heap, self._allocation, self._tensors, self._whole = heap, allocation, tuple(tensors), whole

    @property
    def local(self) -> Tensor:
        """Ours."""
        self._check_there()
        return self._tensors[self.heap.rank]

    def peer(self, rank: int) -> Tensor:
        """That of a rank, to be read and written from here."""
        self._check_there()
        if not 0 <= rank < self.heap.world:
            raise ValueError(f"peer({rank}): expected a rank from 0 to {self.heap.world - 1}")
        if self._allocation.number >= self.heap._agreed:
            raise RuntimeError(
                f"{self._allocation.text}: call heap.barrier() between allocate and peer; the peer may not have it yet"
            )
        return self._tensors[rank]

    @property
    def bases(self) -> Tensor:
        """Where the heap begins at each rank, as addresses: what kernels translate pointers by."""
        return self.heap.bases

    @property
    def shape(self) -> torch.Size:
        """Its shape on each rank."""
        return self._tensors[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self._tensors[0].dtype

    def __getitem__(self, index: Any) -> SymmetricTensor:
        return self._part([tensor[index] for tensor in self._tensors])

    def view(self, *shape: int) -> SymmetricTensor:
        """The same memory in another shape."""
        return self._part([tensor.view(*shape) for tensor in self._tensors])

    def _part(self, tensors: Sequence[Tensor]) -> SymmetricTensor:
        if any(
            a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
            for a, b in zip(tensors, self._tensors, strict=True)
        ):
            raise ValueError("a list or a tensor as an index copies; take slices, which are views of the heap")
        return SymmetricTensor(self.heap, self._allocation, tensors)

    def free(self) -> None:
        """Give it back: see `Heap.free`."""
        self.heap.free(self)

    def _check_there(self) -> None:
        self.heap._check_open()
        if self._allocation not in self.heap._alive:
            raise RuntimeError(f"{self._allocation.text} was freed; others may have its memory")

    def __repr__(self) -> str:
        return f"SymmetricTensor({self._allocation.text}, rank {self.heap.rank} of {self.heap.world})"
