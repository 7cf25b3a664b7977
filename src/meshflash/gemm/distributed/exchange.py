"""Fused products on a heap: their buffers and flags, and the stages of a call.

A call is an epoch, and epochs grow. Data lies in two buffers that calls use in turns: a rank writes into that of the
call before the last, and the end of the last call has seen that all ranks had begun it, so had done with the one
before. In each stage a rank waits only for what stages before it bring, its own or other ranks': so one process may
play all ranks, stage by stage, and streams that queue behind each other only cost time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshflash.comm.streams import DeviceStreams, capturing
from meshflash.gemm.distributed import launch
from meshflash.gemm.distributed.launch import Ends
from meshflash.gemm.distributed.plan import BULK, FusedPlan
from meshflash.gemm.launch import Epilogue, run
from meshflash.gemm.plan import Product, choose

if TYPE_CHECKING:  # what carries it needs Triton; a process group does not
    from meshflash.comm.heap.contract import Heap

#: What each rank gets.
Results = dict[int, Tensor]


@dataclass(frozen=True)
class Stage:
    """A part of a call. What is `beside` goes to a stream of its own, with the call's other stages beside it."""

    do: Callable[[], None]
    beside: bool = False


class Exchange:
    """A fused product of a heap's ranks; all ranks make it together, and call it in the same order."""

    def __init__(self, heap: Heap, plan: FusedPlan, mode: str, timed: bool) -> None:
        self.heap, self.plan, self.mode = heap, plan, mode
        self.epoch = 0
        device, product = heap.device, plan.product
        self._rooms = {
            name: heap.allocate(shape, dtype, name=f"{product.collective} {name}")
            for name, (shape, dtype) in plan.rooms().items()
        }
        self._streams = None if device.type == "cpu" else DeviceStreams(device)
        self._beside = {rank: self._streams.new() if self._streams else None for rank in heap.played}

        def table(numbers: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(list(numbers), dtype=dtype, device=device)

        self._firsts = table(product.firsts if plan.sections > 1 else (0, product.m))
        self._own = {rank: table((0, product.sizes[rank] if product.sizes else 0)) for rank in heap.played}
        self._wanted = table(plan.wanted(), torch.int64)
        tiles = plan.sections * plan.rows * max(plan.columns(rank) for rank in range(product.world))
        #: Nanoseconds at which tiles were computed, sent and received in the last call, by rank, where that was asked.
        self.times = {
            rank: torch.zeros(tiles, 3, dtype=torch.int64, device=device) if timed else None for rank in heap.played
        }
        heap.barrier()
        self._columns = {rank: [self._described(rank, turn) for turn in range(2)] for rank in heap.played}

    def __call__(self, operands: Mapping[int, tuple[Tensor, Tensor]], copy: bool) -> dict[int, Tensor]:
        """What each played rank gets."""
        if capturing(self.heap.device):
            raise RuntimeError("a fused product cannot be captured in a graph: its epochs grow from call to call")
        self.epoch += 1
        results: Results = {}
        stages: dict[int, list[Stage]] = {}
        for rank in self.heap.played:
            with self.heap.play(rank):
                stages[rank] = self._stages(self._ends(rank), *operands[rank], results)
                if self._streams:
                    self._streams.after(self._beside[rank], self._streams.mark(self._streams.current()))
        for number in range(len(stages[self.heap.played[0]])):
            for rank in self.heap.played:
                with self.heap.play(rank):
                    self._start(rank, stages[rank][number])
        for rank in self.heap.played:
            with self.heap.play(rank):
                if self._streams:
                    self._streams.after(self._streams.current(), self._streams.mark(self._beside[rank]))
                if copy and self._is_lent:
                    results[rank] = results[rank].clone(memory_format=torch.contiguous_format)
            self._hand_over(rank, results[rank])
        if self._streams is None:
            self.heap.check()
        return results

    def gathered(self, rank: int) -> Tensor:
        """The rows of all ranks that the last call multiplied; they stay until the next call begins."""
        if self.plan.product.collective != "ag_gemm" or self.plan.variant == "epilogue" or not self.epoch:
            raise RuntimeError("there are no gathered rows: an ag_gemm has them after a call, unless it reads in place")
        with self.heap.play(rank):
            return self._rooms["matrix"][self.epoch % 2].local[:, : self.plan.product.k]

    def free(self) -> None:
        """Give its part of the heap back. All ranks do so together."""
        for room in self._rooms.values():
            room.free()

    @property
    def _is_lent(self) -> bool:
        """Whether results lie in the heap, where the call after the next overwrites them."""
        return self.plan.product.collective == "all_scatter" or self.plan.shots == 2

    def _described(self, rank: int, turn: int) -> tuple[Any, ...]:
        """Where a rank stores tiles by descriptors, which take long to make."""
        if "matrix" not in self._rooms:
            return ()
        matrix = self._rooms["matrix"][turn]
        return launch.columns_of(self.plan, rank, [matrix.peer(peer) for peer in range(self.heap.world)])

    def _ends(self, rank: int) -> Ends:
        rooms = self._rooms
        begun = rooms["begun"].local

        def room(name: str) -> Tensor:
            return rooms[name].local if name in rooms else begun

        def turn(name: str) -> Tensor:
            return rooms[name][self.epoch % 2].local if name in rooms else begun

        return Ends(
            rank=rank,
            epoch=self.epoch,
            bases=self.heap.bases,
            status=self.heap.status,
            begun=begun,
            arrived=room("arrived"),
            flags=room("flags"),
            ready=room("ready"),
            inbox=turn("inbox"),
            matrix=turn("matrix"),
            firsts=self._firsts,
            wanted=self._wanted,
            times=self.times[rank],
            columns=self._columns[rank][self.epoch % 2],
        )

    def _stages(self, ends: Ends, a: Tensor, b: Tensor, results: Results) -> list[Stage]:
        """What a call takes on a rank, and where its result will be."""
        make = {"all_scatter": self._all_scatter, "ag_gemm": self._ag_gemm}
        return make.get(self.plan.product.collective, self._reduced)(ends, a, b, results)

    def _all_scatter(self, ends: Ends, a: Tensor, b: Tensor, results: Results) -> list[Stage]:
        plan, product = self.plan, self.plan.product
        first, width = product.firsts[ends.rank], product.sizes[ends.rank]
        mine = ends.matrix[:, first : first + width]
        results[ends.rank] = ends.matrix[:, : product.n]

        def scatter(a: Tensor, b: Tensor | None, **more: Any) -> None:
            launch.send(ends, plan, a, b, mine, **dict(to="matrix", flag="source", firsts=self._firsts) | more)

        end = Stage(lambda: launch.finish(ends, plan))
        if plan.variant == BULK:
            return [Stage(lambda: scatter(self._product(a, b), None)), end]
        if not plan.movers:
            by_roles = launch.has_roles(ends, a, b)
            return [Stage(lambda: launch.send_by_roles(ends, plan, a, b, mine) if by_roles else scatter(a, b)), end]

        def move() -> None:
            launch.all_begun(ends, plan)
            scatter(mine, None, put="others", held=True)

        return [Stage(lambda: scatter(a, b, flag="tile", put="self")), Stage(move, beside=True), end]

    def _reduced(self, ends: Ends, a: Tensor, b: Tensor, results: Results) -> list[Stage]:
        """All-reduce and reduce-scatter: tiles go to who adds them up, who stores them, or puts them to all."""
        plan, product = self.plan, self.plan.product
        if self._is_lent:
            out = ends.matrix[:, : product.n]
        else:
            rows = product.sizes[ends.rank] if product.sizes else product.m
            out = torch.empty(rows, product.n, dtype=product.out_dtype, device=self.heap.device)
        results[ends.rank] = out
        to = "all" if plan.shots == 1 else "owner"

        def begin() -> None:
            x, y = (self._product(a, b), None) if plan.variant == BULK else (a, b)
            into = ends.inbox.view(-1, 1)
            launch.send(ends, plan, x, y, into, to=to, flag="slot", firsts=self._firsts, sections=plan.sections)

        def add() -> None:
            if plan.movers:
                launch.all_begun(ends, plan)
            launch.receive(ends, plan, out)

        stages = [Stage(begin), Stage(add, beside=plan.movers > 0)]
        return [*stages, Stage(lambda: launch.finish(ends, plan))] if self._is_lent else stages

    def _ag_gemm(self, ends: Ends, a: Tensor, b: Tensor, results: Results) -> list[Stage]:
        plan, product = self.plan, self.plan.product
        first, height = product.firsts[ends.rank], product.sizes[ends.rank]
        own, mine = self._own[ends.rank], ends.matrix[first : first + height]

        def spread(put: str = "all") -> None:
            untimed = replace(ends, times=None)  # tiles of A are others than those of C, and may be more
            launch.send(untimed, plan, a, None, mine, to="matrix", flag="row", firsts=own, put=put)

        if plan.variant == BULK:

            def multiply() -> None:
                launch.finish(ends, plan, plan.programs)
                results[ends.rank] = self._product(ends.matrix[:, : product.k], b)

            return [Stage(spread), Stage(multiply)]
        fetch = not plan.movers
        out = torch.empty(product.m, product.n, dtype=product.out_dtype, device=self.heap.device)
        results[ends.rank] = out
        return [
            Stage(lambda: spread("self" if fetch else "all"), beside=not fetch),
            Stage(lambda: launch.gathered(ends, plan, b, out, fetch=fetch, programs=plan.programs)),
        ]

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of one rank by itself, in the dtype that travels."""
        product = self.plan.product
        sums = product.collective in ("all_reduce", "gemm_rs")
        then = Epilogue(product.reduce_dtype if sums else product.out_dtype)
        made, _ = run(choose(Product.of(a, b, product.precision), self.mode), a, b, product.precision, then)
        return made

    def _start(self, rank: int, stage: Stage) -> None:
        if stage.beside and self._streams:
            with self._streams.on(self._beside[rank]):
                stage.do()
        else:
            stage.do()

    def _hand_over(self, rank: int, result: Tensor) -> None:
        """Where one process plays all ranks, let the caller's stream come after theirs."""
        if self._streams and self.heap.kind == "local":
            with self.heap.play(rank):
                done = self._streams.mark(self._streams.current())
            self._streams.after(self._streams.current(), done)
            self._streams.use(result, self._streams.current())
