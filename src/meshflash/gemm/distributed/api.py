"""Products of several ranks: C = A B, with A or B in parts, and the messages inside the product.

A `FusedGemm` is made once, by all ranks together, and called often: making it takes memory of the heap, calling it
does not meet anybody on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshflash.comm.handshake import DisagreementError
from meshflash.comm.transports.process_group import dist
from meshflash.gemm import configs
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.exchange import Exchange
from meshflash.gemm.distributed.plan import FusedPlan, cores_of, plan_fused
from meshflash.gemm.distributed.problem import FusedProduct
from meshflash.gemm.distributed.process_group import run_by_group
from meshflash.gemm.plan import MODES
from meshflash.runtime.devices import CPU, name_of

if TYPE_CHECKING:  # a heap needs Triton, a process group does not
    from meshflash.comm.heap.contract import Heap


class FusedGemm:
    """C = A B of all ranks of a heap, or of a process group.

    | collective | each rank has | and gets |
    | --- | --- | --- |
    | "all_scatter" | A `[m, k]`, columns of B `[k, n_r]` | C `[m, n]` |
    | "all_reduce" | columns of A `[m, k_r]`, rows of B `[k_r, n]` | C `[m, n]` |
    | "ag_gemm" | rows of A `[m_r, k]`, B `[k, n]` | C `[m, n]` |
    | "gemm_rs" | columns of A `[m, k_r]`, rows of B `[k_r, n]` | rows of C `[m_r, n]` |

    Args:
        over: a heap of `open_heap`, or a process group (None: the default one), which only has the bulk.
        collective: one of the table.
        m: rows of C.
        n: columns of C.
        k: what is summed over, on all ranks together.
        dtype: of A and B.
        sizes: `n_r` of an all_scatter, `m_r` of the last two; as even as can be by default. `k_r` may be any.
        variant: "epilogue", where a tile's program talks; "producer_consumer", where some programs talk and the others
            compute; "bulk", where messages follow the product; "auto", by what was measured, else the bulk.
        shots: of an all_reduce: 1, every rank adds up all; 2, each adds up some tiles and puts them to all.
        mode: of the product of the bulk: see `matmul`.
        precision: of float32 on GPUs: "ieee" or "tf32".
        out_dtype: of C; that of the operands by default.
        reduce_dtype: in which sums of one rank travel; float32 by default. They are added in float32, in the order of
            ranks: all ranks get the same bits.
        config: tiles and warps, the same on all ranks; by default those of a table.
        timed: note when each tile was computed, sent and received: see `times`.
    """

    def __init__(
        self,
        over: Heap | Any,
        collective: str,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype = torch.float32,
        *,
        sizes: Sequence[int] | None = None,
        variant: str = "auto",
        shots: int | None = None,
        mode: str = "auto",
        precision: str = "ieee",
        out_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        config: Config | None = None,
        timed: bool = False,
    ) -> None:
        self._heap: Heap | None = over if hasattr(over, "played") else None
        world = self._heap.world if self._heap else dist.get_world_size(over)
        if mode not in ("auto", *MODES):
            raise ValueError(f"mode {mode!r}: expected one of auto, {', '.join(MODES)}")
        product = FusedProduct.of(
            *(collective, m, n, k, world, dtype),
            sizes=sizes,
            out_dtype=out_dtype,
            reduce_dtype=reduce_dtype,
            precision=precision,
        )
        self._mode = mode
        self._exchange: Exchange | None = None
        if self._heap is None:
            if config is not None or timed:
                raise ValueError("config and timed are of kernels that talk, and a process group has none; give a heap")
            self._group = over
            self.plan = plan_fused(product, torch.device(CPU), variant=variant, shots=shots, means="group")
            return
        sharing, cores = _company(self._heap)
        self.plan = plan_fused(
            product,
            self._heap.device,
            variant=variant,
            shots=shots,
            config=config,
            sharing=sharing,
            cores=cores,
        )
        _agree(self._heap, self.plan)
        self._exchange = Exchange(self._heap, self.plan, mode, timed)

    def __call__(self, a: Tensor | Sequence[Tensor], b: Tensor | Sequence[Tensor], *, copy: bool = True) -> Any:
        """This rank's part of C; or that of every rank, from a list of operands, where one process plays all.

        Without `copy`, what all_scatter and an all_reduce in two shots give lies in the heap, and stays until the next
        call begins. On GPUs nobody waits here: `heap.check()` says whether a rank was lost, whose numbers are NaN.
        """
        own = 0 if self._heap else dist.get_rank(self._group)
        played = self._heap.played if self._heap else range(own, own + 1)
        plays_all = self._heap is not None and self._heap.kind == "local"
        xs: Any = a if plays_all else [a]
        ys: Any = b if plays_all else [b]
        if any(isinstance(given, Tensor) or len(given) != len(played) for given in (xs, ys)):
            raise ValueError(f"this process plays {len(played)} ranks: expected as many operands a, and b, in lists")
        operands = {rank: (x, y) for rank, x, y in zip(played, xs, ys, strict=True)}
        for rank, (x, y) in operands.items():
            self._check(rank, x, y)
        with torch.no_grad():
            if self._exchange is None:
                return run_by_group(self.plan.product, self._group, self._mode, *operands[played[0]])
            results = self._exchange(operands, copy)
        return [results[rank] for rank in played] if plays_all else results[played[0]]

    def gathered(self, rank: int | None = None) -> Tensor:
        """The rows of A of all ranks that the last ag_gemm multiplied, until the next call begins."""
        if self._exchange is None:
            raise RuntimeError("a process group leaves no gathered rows; gather them with its all_gather")
        return self._exchange.gathered(self._exchange.heap.rank if rank is None else rank)

    @property
    def times(self) -> dict[int, Tensor]:
        """Nanoseconds at which tiles of the last call were computed, sent and received `[tiles, 3]`, by played rank.

        0 where a variant has no such moment of a tile. A rank's clock is its device's.
        """
        found = {} if self._exchange is None else self._exchange.times
        times = {rank: x for rank, x in found.items() if x is not None}
        if not times:
            raise RuntimeError("times are kept where timed=True, on a heap")
        return times

    def free(self) -> None:
        """Give its part of the heap back, for the next `heap.barrier`. All ranks do so together."""
        if self._exchange is not None:
            self._exchange.free()
            self._exchange = None

    def __enter__(self) -> FusedGemm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._heap is not None:
            self.free()
            self._heap.barrier()

    def _check(self, rank: int, a: Tensor, b: Tensor) -> None:
        """A ValueError for operands that are not what was planned."""
        product = self.plan.product
        size = product.sizes[rank] if product.sizes else 0
        wanted = {
            "all_scatter": ((product.m, product.k), (product.k, size)),
            "ag_gemm": ((size, product.k), (product.k, product.n)),
        }.get(product.collective, ((product.m, "k_r"), ("k_r", product.n)))
        for name, x, sizes in (("a", a, wanted[0]), ("b", b, wanted[1])):
            fits = x.dim() == 2 and all(y == "k_r" or y == z for y, z in zip(sizes, x.shape, strict=True))
            device = self._heap is None or x.device == self._heap.device
            if not fits or x.dtype != product.dtype or not device:
                where = f" on {self._heap.device}" if self._heap else ""
                raise ValueError(
                    f"{name} of rank {rank} is {x.dtype} of {tuple(x.shape)} on {x.device}: "
                    f"expected {product.dtype} of ({sizes[0]}, {sizes[1]}){where}"
                )
            if torch.is_grad_enabled() and x.requires_grad:
                raise ValueError(
                    f"{name} of rank {rank} requires a gradient, and none is made here: use torch.no_grad()"
                )
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"a of rank {rank} has {a.shape[1]} columns and b {b.shape[0]} rows: expected as many")


def _company(heap: Heap) -> tuple[int, int]:
    """How many ranks share this rank's device, and multiprocessors that it has for itself.

    Programs of ranks that share a GPU wait for each other, so all of them must run at once, unless a plan has them in
    turn.
    """
    cores = configs.cores(heap.device)
    if heap.device.type == CPU:
        return 1, cores
    if heap._meeting is None:  # what this process has is for all ranks that it plays
        return heap.world, max(1, cores // heap.world)
    names = heap._meeting.all(name_of(heap.device))
    sharing = names.count(names[heap.rank])
    return sharing, cores_of(heap.device, sharing)


def _agree(heap: Heap, plan: FusedPlan) -> None:
    """DisagreementError that names a rank with another plan."""
    if heap._meeting is None:
        return
    mine = {**asdict(plan.product), **asdict(plan)}
    for name in ("product", "why", "programs", "movers", "in_turn"):  # which may differ
        del mine[name]
    words = heap._meeting.all({name: str(value) for name, value in mine.items()})
    for rank, word in enumerate(words):
        for name, value in words[0].items():
            if word[name] != value:
                raise DisagreementError(
                    f"ranks disagree in {name} of a fused product: {heap._named(0)} has {value}, {heap._named(rank)} "
                    f"{word[name]}"
                )
