"""Ranks that share the features of linear layers: who they are, and the products that they make together.

A product is made once for its sizes, by all ranks together, and called by every layer that has such sizes. The layers
are in `linear.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshflash.comm.transports.process_group import dist
from meshflash.engine.group_context import checks_always, group_context
from meshflash.gemm.api import matmul
from meshflash.gemm.distributed.api import FusedGemm
from meshflash.gemm.distributed.process_group import gather_rows
from meshflash.gemm.plan import PRECISIONS
from meshflash.kernels.contract import HALF

if TYPE_CHECKING:  # a heap needs Triton, a process group does not
    from meshflash.comm.heap.contract import Heap

#: What kernels of a heap compute with.
CARRIED = (torch.float32, *HALF)


class TensorRanks:
    """The ranks of a tensor-parallel axis, with or without a heap. Leaving a `with` block gives the heap's parts back.

    Args:
        over: a mesh of one dimension, or a process group; None is the default group.
        heap: of `open_heap` over the same ranks: products of float32, bfloat16 and float16 then go by it.
        variant: on the heap, see `FusedGemm`.
        precision: of float32 on GPUs: "ieee" or "tf32".
        reduce_dtype: in which sums of one rank travel; float32 or more by default.

    >>> from meshflash.parallel import init_mesh
    >>> TensorRanks(init_mesh()["tp"]).world
    1
    >>> from meshflash import shutdown
    >>> shutdown()
    """

    def __init__(
        self,
        over: Any = None,
        *,
        heap: Heap | None = None,
        variant: str = "auto",
        precision: str = "ieee",
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(over, DeviceMesh) and over.ndim != 1:
            raise ValueError(f'over: a mesh of {over.ndim} dimensions; give the axis of the features, as mesh["tp"]')
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
        self._mesh = over if isinstance(over, DeviceMesh) else None
        self.group: Any = over.get_group() if isinstance(over, DeviceMesh) else over or dist.group.WORLD
        self.rank, self.world = int(dist.get_rank(self.group)), int(dist.get_world_size(self.group))
        if heap is None and variant not in ("auto", "bulk"):
            raise ValueError(f"variant {variant!r} needs a heap; give heap=open_heap(...)")
        if heap is not None and (heap.kind == "local" or (heap.rank, heap.world) != (self.rank, self.world)):
            raise ValueError(
                f"heap: this is rank {heap.rank} of {heap.world} of a {heap.kind} heap, and {self.rank} of "
                f"{self.world} of the group; open it over the same ranks, one process each"
            )
        self.heap, self.variant, self.precision, self.reduce_dtype = heap, variant, precision, reduce_dtype
        self._made: dict[Any, FusedGemm] = {}
        self._agreed: set[Any] = set()

    def __deepcopy__(self, _: Any) -> TensorRanks:
        return self  # copies of a layer are on the same ranks

    def mesh(self, kind: str) -> DeviceMesh:
        """These ranks as a mesh of a kind of device."""
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.group, kind)
        return self._mesh

    def check_same(self, mesh: DeviceMesh) -> None:
        """ValueError unless these are the ranks of a mesh, in its order."""
        here, there = dist.get_process_group_ranks(self.group), mesh.mesh.flatten().tolist()
        if here != there:
            raise ValueError(
                f"ranks: layers lie on the ranks {there}, and these are {here}; make them of the same axis"
            )

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """A product of this rank alone."""
        return matmul(a, b, bias=bias, precision=self.precision)

    def product(
        self, collective: str, a: Tensor, b: Tensor, m: int, n: int, k: int, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """A product of all ranks, see `FusedGemm`, whose sizes those are."""
        found: Tensor = self._fused(collective, a.dtype, m, n, k, sizes)(a, b)
        return found

    def gather_product(
        self, rows: Tensor, b: Tensor, sizes: Sequence[int], columns: int, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The rows of all ranks times b, and those rows, unless they were read where they lie.

        `columns` are those of b on all ranks together. The rows stay until the next product.
        """
        n = b.shape[1]
        if self._carries(rows.dtype) and columns == n * self.world:  # kernels' tiles are the same on all ranks
            gemm = self._fused("ag_gemm", rows.dtype, sum(sizes), n, rows.shape[1], sizes)
            y = gemm(rows, b)
            return y if bias is None else y.add_(bias), None if gemm.plan.variant == "epilogue" else gemm.gathered()
        gathered = self.gather(rows, sizes)
        return self.multiply(gathered, b, bias), gathered

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks, by the process group."""
        self._agree("gather", rows.dtype, sum(sizes), 0, rows.shape[1], tuple(sizes))
        return gather_rows(rows, tuple(sizes), self.group)

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def numbers(self, own: int, device: torch.device) -> tuple[int, ...]:
        """What each rank says. On GPUs the host waits for it."""
        said = torch.zeros(self.world, dtype=torch.int64, device=device)
        said[self.rank] = own
        return tuple(int(n) for n in self.add(said).tolist())

    @property
    def plans(self) -> tuple[str, ...]:
        """How each product that was made is computed, and why so."""
        return tuple(str(gemm.plan) for gemm in self._made.values())

    def free(self) -> None:
        """Give what products took of the heap back. All ranks do so together."""
        for gemm in self._made.values():
            gemm.free()
        self._made.clear()
        if self.heap is not None:
            self.heap.barrier()

    def __enter__(self) -> TensorRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.free()

    def _carries(self, dtype: torch.dtype) -> bool:
        return self.heap is not None and dtype in CARRIED

    def _fused(
        self, collective: str, dtype: torch.dtype, m: int, n: int, k: int, sizes: Sequence[int] | None
    ) -> FusedGemm:
        key = (collective, dtype, m, n, k, None if sizes is None else tuple(sizes))
        heap = self.heap if self._carries(dtype) else None
        if heap is None:
            self._agree(*key)
        if key not in self._made:
            self._made[key] = FusedGemm(
                heap or self.group,
                *(collective, m, n, k, dtype),
                sizes=sizes,
                variant=self.variant if heap else "bulk",
                precision=self.precision,
                reduce_dtype=self.reduce_dtype,
            )
        return self._made[key]

    def _agree(self, *key: Any) -> None:
        """Compare the sizes of a product with those of all ranks, once for new ones; a heap does so itself."""
        if self.world > 1 and (key not in self._agreed or checks_always()):
            names = ("collective", "dtype", "rows", "columns", "features", "sizes")
            group_context(self.group.group_name).agree(
                {name: x if isinstance(x, int) else str(x) for name, x in zip(names, key, strict=True)}
            )
            self._agreed.add(key)
