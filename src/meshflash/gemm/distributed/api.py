"""`FusedGemm`: C = A B over several ranks, with A or B sharded and the communication inside the GEMM.

All ranks make a `FusedGemm` together, once, and call it often. Making it allocates heap buffers; a call does not
synchronize ranks on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshflash.comm.handshake import DisagreementError
from meshflash.comm.transports.process_group import dist
from meshflash.gemm import configs
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.exchange import Exchange
from meshflash.gemm.distributed.plan import FusedPlan, plan_fused, sms_per_rank
from meshflash.gemm.distributed.problem import DistributedGemm
from meshflash.gemm.distributed.process_group import run_with_group
from meshflash.gemm.plan import MODES
from meshflash.runtime.devices import CPU, name_of

if TYPE_CHECKING:  # a heap needs Triton, a process group does not
    from meshflash.comm.heap.contract import Heap


class FusedGemm:
    """C = A B over all ranks of a heap or of a process group, fused with a collective.

    | collective | each rank has | each rank gets |
    | --- | --- | --- |
    | "all_scatter" | A `[m, k]`, columns of B `[k, n_r]` | C `[m, n]` |
    | "all_reduce" | columns of A `[m, k_r]`, rows of B `[k_r, n]` | C `[m, n]` |
    | "ag_gemm" | rows of A `[m_r, k]`, B `[k, n]` | C `[m, n]` |
    | "gemm_rs" | columns of A `[m, k_r]`, rows of B `[k_r, n]` | rows of C `[m_r, n]` |

    "all_scatter" is a GEMM + all-gather of output columns. "ag_gemm" is an all-gather of rows + GEMM, "gemm_rs" a GEMM
    + reduce-scatter.

    Args:
        over: A heap of `open_heap`, or a process group (None: the default one), which supports the bulk variant only.
        collective: A collective of the table.
        m: The rows of C.
        n: The columns of C.
        k: The contracted size, over all ranks together.
        dtype: The dtype of A and B.
        sizes: The shard sizes: `n_r` of an all_scatter, `m_r` of ag_gemm and gemm_rs. They differ by at most one by
            default. `k_r` may have any size and is not given.
        variant: "epilogue" communicates in the epilogue of each tile; "producer_consumer" on SMs of its own during the
            GEMM; "bulk" before or after the whole GEMM. "auto" takes the variant that was measured fastest, else
            "bulk".
        shots: The shots of an all_reduce: with 1 every rank reduces all tiles, with 2 each rank reduces some tiles and
            sends the sums to all ranks.
        mode: The mode of the local GEMM of the bulk variant, as in `matmul`.
        precision: How GPUs multiply float32 operands: "ieee" for full precision, or "tf32".
        out_dtype: The dtype of C; by default that of the operands.
        reduce_dtype: The dtype in which partial sums travel, float32 by default. They are added in float32 in rank
            order, so all ranks get the same bits.
        config: The tiles and warps, the same on all ranks; by default those of a table.
        timed: Whether to record when each tile was computed, sent and received: see `times`.
    """

    def __init__(
        self,
        over: Any,
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
        # not isinstance: importing the heap would need Triton
        self._heap: Heap | None = over if hasattr(over, "local_ranks") else None
        world = self._heap.world if self._heap else dist.get_world_size(over)
        if mode not in ("auto", *MODES):
            raise ValueError(f"mode {mode!r}: expected one of auto, {', '.join(MODES)}")
        problem = DistributedGemm.of(
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
                raise ValueError("config and timed are for kernels that communicate, on a heap; give a heap")
            self._group = over
            self.plan = plan_fused(problem, torch.device(CPU), variant=variant, shots=shots, backend="group")
            return
        ranks_per_device, num_sms = _device_share(self._heap)
        self.plan = plan_fused(
            problem,
            self._heap.device,
            variant=variant,
            shots=shots,
            config=config,
            ranks_per_device=ranks_per_device,
            num_sms=num_sms,
        )
        _check_agreement(self._heap, self.plan)
        self._exchange = Exchange(self._heap, self.plan, mode, timed)

    def __call__(self, a: Tensor | Sequence[Tensor], b: Tensor | Sequence[Tensor], *, copy: bool = True) -> Any:
        """Compute this rank's share of C; on a local heap, where one process emulates all ranks, that of every rank.

        On GPUs the call returns before the kernels finish. If a rank is lost, the elements it should have sent are NaN,
        and `heap.check()` raises.

        Args:
            a: This rank's shard of A; on a local heap a list with one shard per rank.
            b: This rank's shard of B; on a local heap a list with one shard per rank.
            copy: Whether to copy results out of the heap. Without a copy, results of all_scatter and of a two-shot
                all_reduce stay valid only until the next call begins.
        """
        own = 0 if self._heap else dist.get_rank(self._group)
        local_ranks = self._heap.local_ranks if self._heap else range(own, own + 1)
        has_all_ranks = self._heap is not None and self._heap.kind == "local"
        xs: Any = a if has_all_ranks else [a]
        ys: Any = b if has_all_ranks else [b]
        if any(isinstance(given, Tensor) or len(given) != len(local_ranks) for given in (xs, ys)):
            raise ValueError(f"this process has {len(local_ranks)} ranks: expected lists of as many operands a, and b")
        operands = {rank: (x, y) for rank, x, y in zip(local_ranks, xs, ys, strict=True)}
        for rank, (x, y) in operands.items():
            self._check(rank, x, y)
        with torch.no_grad():
            if self._exchange is None:
                return run_with_group(self.plan.problem, self._group, self._mode, *operands[local_ranks[0]])
            results = self._exchange(operands, copy)
        return [results[rank] for rank in local_ranks] if has_all_ranks else results[local_ranks[0]]

    def gathered(self, rank: int | None = None) -> Tensor:
        """Return the rows of A of all ranks that the last ag_gemm gathered; they stay valid until the next call begins.

        Args:
            rank: The rank whose copy to return, on a local heap; by default this rank.
        """
        if self._exchange is None:
            raise RuntimeError("a process group leaves no gathered rows; gather them with its all_gather")
        return self._exchange.gathered(self._exchange.heap.rank if rank is None else rank)

    @property
    def times(self) -> dict[int, Tensor]:
        """Nanoseconds at which tiles of the last call were computed, sent and received `[tiles, 3]`, by local rank.

        An entry is 0 where the variant has no such event for a tile. Each rank uses the clock of its own device.
        """
        found = {} if self._exchange is None else self._exchange.times
        times = {rank: x for rank, x in found.items() if x is not None}
        if not times:
            raise RuntimeError("times are recorded with timed=True, on a heap")
        return times

    def free(self) -> None:
        """Free its heap buffers; the next `heap.barrier` makes them available again. All ranks do so together."""
        if self._exchange is not None:
            self._exchange.free()
            self._exchange = None

    def __enter__(self) -> FusedGemm:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and self._heap is not None:
            self.free()
            self._heap.barrier()

    def _check(self, rank: int, a: Tensor, b: Tensor) -> None:
        """Raise ValueError for operands that do not match the plan."""
        problem = self.plan.problem
        size = problem.sizes[rank] if problem.sizes else 0
        expected = {
            "all_scatter": ((problem.m, problem.k), (problem.k, size)),
            "ag_gemm": ((size, problem.k), (problem.k, problem.n)),
        }.get(problem.collective, ((problem.m, "k_r"), ("k_r", problem.n)))
        for name, x, sizes in (("a", a, expected[0]), ("b", b, expected[1])):
            shape_matches = x.dim() == 2 and all(y == "k_r" or y == z for y, z in zip(sizes, x.shape, strict=True))
            is_here = self._heap is None or x.device == self._heap.device
            if not shape_matches or x.dtype != problem.dtype or not is_here:
                where = f" on {self._heap.device}" if self._heap else ""
                raise ValueError(
                    f"{name} of rank {rank} is {x.dtype} of {tuple(x.shape)} on {x.device}: "
                    f"expected {problem.dtype} of ({sizes[0]}, {sizes[1]}){where}"
                )
            if torch.is_grad_enabled() and x.requires_grad:
                raise ValueError(
                    f"{name} of rank {rank} requires a gradient, and FusedGemm has no backward: use torch.no_grad()"
                )
        if a.shape[1] != b.shape[0]:
            raise ValueError(
                f"a of rank {rank} has {a.shape[1]} columns and b {b.shape[0]} rows: expected the same number"
            )


def _device_share(heap: Heap) -> tuple[int, int]:
    """Return how many ranks share this rank's device, and the SMs that it has for itself.

    CTAs of ranks that share a GPU wait for each other. They must all be resident at once, unless a plan is time-shared.
    """
    num_sms = configs.num_sms(heap.device)
    if heap.device.type == CPU:
        return 1, num_sms
    if heap._barrier is None:  # a local heap: the ranks of this process share its device
        return heap.world, max(1, num_sms // heap.world)
    names = heap._barrier.all_gather(name_of(heap.device))
    ranks_per_device = names.count(names[heap.rank])
    return ranks_per_device, sms_per_rank(heap.device, ranks_per_device)


def _check_agreement(heap: Heap, plan: FusedPlan) -> None:
    """Raise DisagreementError, naming a rank, if ranks have made different plans."""
    if heap._barrier is None:
        return
    mine = {**asdict(plan.problem), **asdict(plan)}
    # these may differ: they depend on how many ranks share a device
    for name in ("problem", "why", "num_ctas", "num_comm_sms", "time_shared"):
        del mine[name]
    payloads = heap._barrier.all_gather({name: str(value) for name, value in mine.items()})
    for rank, payload in enumerate(payloads):
        for name, value in payloads[0].items():
            if payload[name] != value:
                raise DisagreementError(
                    f"ranks disagree in {name} of a fused GEMM: {heap._named(0)} has {value}, {heap._named(rank)} "
                    f"{payload[name]}"
                )
