"""The ranks of a tensor-parallel axis, and the distributed GEMMs that they compute together.

A distributed GEMM is built once for each problem size, by all ranks together, and shared by all layers of that size.
The layers are in `linear.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
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

#: The dtypes of the kernels that communicate over a symmetric heap; other dtypes use the process group.
HEAP_DTYPES = (torch.float32, *HALF)


class TensorRanks:
    """The ranks of a tensor-parallel axis, with or without a symmetric heap.

    As a context manager it frees its heap memory on exit.

    Args:
        over: The ranks of the axis: a 1D mesh or a process group. None is the default group.
        heap: A heap of `open_heap` over the same ranks. GEMMs in float32, bfloat16 and float16 then communicate over
            it; others use the process group.
        variant: The kernel variant on the heap, as in `FusedGemm`.
        precision: The precision of float32 GEMMs on GPUs: "ieee" or "tf32".
        reduce_dtype: The dtype in which partial sums are communicated; float32 or wider by default.

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
        self._gemms: dict[Any, FusedGemm] = {}
        self._agreed: set[Any] = set()

    def __deepcopy__(self, _: Any) -> TensorRanks:
        return self  # copies of a layer are on the same ranks

    def mesh(self, kind: str) -> DeviceMesh:
        """Return these ranks as a 1D mesh.

        Args:
            kind: The device type of the mesh. It counts only if these ranks were not given as a mesh.
        """
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.group, kind)
        return self._mesh

    def check_same(self, mesh: DeviceMesh) -> None:
        """Raise ValueError unless these are the ranks of a mesh, in its order.

        Args:
            mesh: The mesh to compare with.
        """
        here, there = dist.get_process_group_ranks(self.group), mesh.mesh.flatten().tolist()
        if here != there:
            raise ValueError(
                f"ranks: the layers are on the ranks {there}, and these are {here}; make them of the same axis"
            )

    def gemm(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a @ b + bias, computed on this rank alone.

        Args:
            a: The left operand, `[m, k]`.
            b: The right operand, `[k, n]`.
            bias: Added to each output row; None adds nothing.
        """
        return matmul(a, b, bias=bias, precision=self.precision)

    def distributed_gemm(
        self, collective: str, a: Tensor, b: Tensor, m: int, n: int, k: int, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's share of a GEMM that is fused with a collective.

        Args:
            collective: The collective, by its name in `FusedGemm`.
            a: This rank's shard of A.
            b: This rank's shard of B.
            m: The rows of C.
            n: The columns of C.
            k: The contracted size, over all ranks together.
            sizes: The size of each rank's shard along the sharded dim; None shards it evenly.
        """
        return self._fused(collective, a.dtype, m, n, k, sizes)(a, b)

    def all_gather_gemm(
        self, rows: Tensor, b: Tensor, sizes: Sequence[int], columns: int, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gathered rows of all ranks times b, and the gathered rows if they were materialized, else None.

        The gathered rows are valid until the next GEMM.

        Args:
            rows: The rows of this rank.
            b: The weight shard of this rank.
            sizes: The number of rows of each rank.
            columns: The columns of b on all ranks together.
            bias: Added to each output row.
        """
        n = b.shape[1]
        if self._uses_heap(rows.dtype) and columns == n * self.world:  # the kernel needs equal tiles on all ranks
            gemm = self._fused("ag_gemm", rows.dtype, sum(sizes), n, rows.shape[1], sizes)
            y = gemm(rows, b)
            return y if bias is None else y.add_(bias), None if gemm.plan.variant == "epilogue" else gemm.gathered()
        gathered = self.gather(rows, sizes)
        return self.gemm(gathered, b, bias), gathered

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, gathered over the process group.

        Args:
            rows: The rows of this rank.
            sizes: The number of rows of each rank.
        """
        self._agree("gather", rows.dtype, sum(sizes), 0, rows.shape[1], tuple(sizes))
        return gather_rows(rows, tuple(sizes), self.group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place, and return it.

        Args:
            x: The tensor, of the same shape on all ranks.
        """
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather_ints(self, own: int, device: torch.device) -> tuple[int, ...]:
        """Gather one integer of each rank. On GPUs the host waits for the device.

        Args:
            own: The integer of this rank.
            device: The device of the collective.
        """
        gathered = torch.zeros(self.world, dtype=torch.int64, device=device)
        gathered[self.rank] = own
        return tuple(int(n) for n in self.all_reduce(gathered).tolist())

    @property
    def plans(self) -> tuple[str, ...]:
        """A description of each distributed GEMM built so far: its variant and why it was chosen."""
        return tuple(str(gemm.plan) for gemm in self._gemms.values())

    def free(self) -> None:
        """Free the heap memory of all distributed GEMMs. All ranks must call it together."""
        for gemm in self._gemms.values():
            gemm.free()
        self._gemms.clear()
        if self.heap is not None:
            self.heap.barrier()

    def __enter__(self) -> TensorRanks:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.free()

    def _uses_heap(self, dtype: torch.dtype) -> bool:
        return self.heap is not None and dtype in HEAP_DTYPES

    def _fused(
        self, collective: str, dtype: torch.dtype, m: int, n: int, k: int, sizes: Sequence[int] | None
    ) -> FusedGemm:
        key = (collective, dtype, m, n, k, None if sizes is None else tuple(sizes))
        heap = self.heap if self._uses_heap(dtype) else None
        if heap is None:
            self._agree(*key)
        if key not in self._gemms:
            self._gemms[key] = FusedGemm(
                heap or self.group,
                *(collective, m, n, k, dtype),
                sizes=sizes,
                variant=self.variant if heap else "bulk",
                precision=self.precision,
                reduce_dtype=self.reduce_dtype,
            )
        return self._gemms[key]

    def _agree(self, *key: Any) -> None:
        """Raise on all ranks unless they call a GEMM of the same sizes.

        The check runs once for each new key. A heap needs none: its allocations are compared by `barrier`.
        """
        if self.world > 1 and (key not in self._agreed or checks_always()):
            names = ("collective", "dtype", "rows", "columns", "features", "sizes")
            group_context(self.group.group_name).agree(
                {name: x if isinstance(x, int) else str(x) for name, x in zip(names, key, strict=True)}
            )
            self._agreed.add(key)
