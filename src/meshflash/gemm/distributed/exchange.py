"""Fused GEMM + collective calls on a heap: buffers, flags, and the stages of a call.

Every call is an epoch, and epochs only grow: a flag that has reached the epoch says that this call's data is there.
Data buffers come in pairs that calls use alternately. Call e writes into the buffers of call e - 2. That is safe
because call e - 1 ends only when all ranks have begun it, and a rank that has begun e - 1 has read everything of e - 2.

A call is a list of stages, the same on all ranks. A stage waits only for data of earlier stages, of this or another
rank. So one process can emulate all ranks by launching them stage by stage, and streams that happen to share a hardware
queue cost time but cannot deadlock. The stages, and what each waits for:

    all_scatter, epilogue            1. GEMM, tiles stored to all ranks  2. wait for all arrivals
    all_scatter, producer_consumer   1. GEMM, tiles stored locally       2. comm SMs: wait for ready tiles, send them
                                     3. wait for all arrivals
    all_scatter, bulk                1. local GEMM, then send its tiles  2. wait for all arrivals
    all_reduce, gemm_rs              1. GEMM, partial tiles sent to the reducing ranks
                                     2. wait for each tile's slots, reduce  3. in two shots: wait for all sums
    ag_gemm, epilogue                1. store own rows in our heap       2. GEMM: wait for rows, read them at their rank
    ag_gemm, producer_consumer       1. comm SMs: store own rows to all  2. GEMM: wait for each row of tiles
    ag_gemm, bulk                    1. store own rows to all            2. wait for all rows, then the local GEMM
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshflash.comm.streams import DeviceStreams, capturing
from meshflash.gemm.distributed import launch
from meshflash.gemm.distributed.launch import CallBuffers
from meshflash.gemm.distributed.plan import BULK, FusedPlan
from meshflash.gemm.launch import Epilogue, run
from meshflash.gemm.plan import GemmProblem, choose
from meshflash.kernels.launches import Launches

if TYPE_CHECKING:  # a heap needs Triton, a process group does not
    from meshflash.comm.heap.contract import Heap

#: Results by rank.
Results = dict[int, Tensor]


@dataclass(frozen=True)
class Stage:
    """One step of a call; with `on_side_stream` it runs on the rank's side stream, beside the other stages."""

    launch: Callable[[], None]
    on_side_stream: bool = False


class Exchange:
    """A fused GEMM + collective with its heap buffers; `FusedGemm` makes it.

    All ranks make it together and call it in the same order.
    """

    def __init__(self, heap: Heap, plan: FusedPlan, mode: str, timed: bool) -> None:
        self.heap, self.plan, self.mode = heap, plan, mode
        self.epoch = 0
        self._launches = Launches()
        #: Those of the plain GEMM of each shape: ranks of a local heap may have shards of different sizes.
        self._gemm_launches: dict[tuple[torch.Size, torch.Size], Launches] = {}
        device, problem = heap.device, plan.problem
        self._buffers = {
            name: heap.allocate(shape, dtype, name=f"{problem.collective} {name}")
            for name, (shape, dtype) in plan.buffers().items()
        }
        self._streams = None if device.type == "cpu" else DeviceStreams(device)
        self._side_streams = {rank: self._streams.new_stream() if self._streams else None for rank in heap.local_ranks}

        def tensor(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        self._section_starts = tensor(problem.shard_starts if plan.sections > 1 else (0, problem.m))
        self._own_section = {
            rank: tensor((0, problem.sizes[rank] if problem.sizes else 0)) for rank in heap.local_ranks
        }
        self._expected = tensor(plan.expected_arrivals(), torch.int64)
        tiles = plan.sections * plan.tiles_m * max(plan.tiles_n(rank) for rank in range(problem.world))
        #: Nanoseconds at which tiles of the last call were computed, sent and received, by rank; None if not timed.
        self.times = {
            rank: torch.zeros(tiles, 3, dtype=torch.int64, device=device) if timed else None
            for rank in heap.local_ranks
        }
        heap.barrier()  # from here on peers may write into the buffers
        self._peer_columns = {
            rank: [self._describe_peer_columns(rank, half) for half in range(2)] for rank in heap.local_ranks
        }

    def __call__(self, operands: Mapping[int, tuple[Tensor, Tensor]], copy: bool) -> dict[int, Tensor]:
        """Run one call and return the result of each local rank; with `copy`, results do not lie in the heap."""
        if capturing(self.heap.device):
            raise RuntimeError("a fused GEMM cannot be captured in a graph: its epochs grow from call to call")
        self.epoch += 1
        results: Results = {}
        stages: dict[int, list[Stage]] = {}
        for rank in self.heap.local_ranks:
            with self.heap.as_rank(rank):
                stages[rank] = self._stages(self._call_buffers(rank), *operands[rank], results)
                if self._streams:  # the side stream begins after what the caller has queued
                    self._streams.wait_event(
                        self._side_streams[rank], self._streams.record_event(self._streams.current_stream())
                    )
        # stage by stage over all ranks: a stage may wait for an earlier stage of any of them
        for number in range(len(stages[self.heap.local_ranks[0]])):
            for rank in self.heap.local_ranks:
                with self.heap.as_rank(rank):
                    self._launch_stage(rank, stages[rank][number])
        for rank in self.heap.local_ranks:
            with self.heap.as_rank(rank):
                if self._streams:
                    self._streams.wait_event(
                        self._streams.current_stream(), self._streams.record_event(self._side_streams[rank])
                    )
                if copy and self._result_is_in_heap:
                    results[rank] = results[rank].clone(memory_format=torch.contiguous_format)
            self._join_caller_stream(rank, results[rank])
        if self._streams is None:
            self.heap.check()
        return results

    def gathered(self, rank: int) -> Tensor:
        """Return the rows of A of all ranks that the last call gathered; they stay until the next call begins."""
        if self.plan.problem.collective != "ag_gemm" or self.plan.variant == "epilogue" or not self.epoch:
            raise RuntimeError(
                "there are no gathered rows: an ag_gemm has them after a call, unless its variant is epilogue"
            )
        with self.heap.as_rank(rank):
            return self._buffers["matrix"][self.epoch % 2].local[:, : self.plan.problem.k]

    def free(self) -> None:
        """Free the heap buffers. All ranks do so together."""
        for buffer in self._buffers.values():
            buffer.free()

    @property
    def _result_is_in_heap(self) -> bool:
        """Whether results lie in a heap buffer, which the call after the next overwrites."""
        return self.plan.problem.collective == "all_scatter" or self.plan.shots == 2

    def _describe_peer_columns(self, rank: int, half: int) -> tuple[Any, ...]:
        """Return the TMA descriptors of a rank for one half of the double buffer; made once, since that is slow."""
        if "matrix" not in self._buffers:
            return ()
        matrix = self._buffers["matrix"][half]
        return launch.describe_peer_columns(self.plan, rank, [matrix.peer(peer) for peer in range(self.heap.world)])

    def _call_buffers(self, rank: int) -> CallBuffers:
        buffers = self._buffers
        begun = buffers["begun"].local

        def flags(name: str) -> Tensor:
            return buffers[name].local if name in buffers else begun

        def data(name: str) -> Tensor:
            return buffers[name][self.epoch % 2].local if name in buffers else begun

        return CallBuffers(
            rank=rank,
            epoch=self.epoch,
            bases=self.heap.bases,
            status=self.heap.status,
            begun=begun,
            arrived=flags("arrived"),
            flags=flags("flags"),
            ready=flags("ready"),
            inbox=data("inbox"),
            matrix=data("matrix"),
            section_starts=self._section_starts,
            expected=self._expected,
            times=self.times[rank],
            peer_columns=self._peer_columns[rank][self.epoch % 2],
            launches=self._launches,
        )

    def _stages(self, buffers: CallBuffers, a: Tensor, b: Tensor, results: Results) -> list[Stage]:
        """Return the stages of a call on one rank, and enter its result into `results`."""
        make = {"all_scatter": self._all_scatter_stages, "ag_gemm": self._ag_gemm_stages}
        return make.get(self.plan.problem.collective, self._reduce_stages)(buffers, a, b, results)

    def _all_scatter_stages(self, buffers: CallBuffers, a: Tensor, b: Tensor, results: Results) -> list[Stage]:
        """GEMM + all-gather of output columns: every rank stores its columns of C into the matrices of all ranks."""
        plan, problem = self.plan, self.plan.problem
        first, width = problem.shard_starts[buffers.rank], problem.sizes[buffers.rank]
        own_columns = buffers.matrix[:, first : first + width]
        results[buffers.rank] = buffers.matrix[:, : problem.n]

        def scatter(a: Tensor, b: Tensor | None, **more: Any) -> None:
            arguments = dict(to="matrix", flag="source", section_starts=self._section_starts) | more
            launch.send(buffers, plan, a, b, own_columns, **arguments)

        wait_for_columns = Stage(lambda: launch.wait_all(buffers, plan))
        if plan.variant == BULK:
            return [Stage(lambda: scatter(self._local_gemm(a, b), None)), wait_for_columns]
        if not plan.num_comm_sms:
            if launch.can_send_warp_specialized(buffers, a, b):
                gemm = Stage(lambda: launch.send_warp_specialized(buffers, plan, a, b, own_columns))
            else:
                gemm = Stage(lambda: scatter(a, b))
            return [gemm, wait_for_columns]

        def send_ready_tiles() -> None:
            launch.wait_for_start(buffers, plan)
            scatter(own_columns, None, put="others", wait_ready=True)

        gemm = Stage(lambda: scatter(a, b, flag="tile", put="self"))
        return [gemm, Stage(send_ready_tiles, on_side_stream=True), wait_for_columns]

    def _reduce_stages(self, buffers: CallBuffers, a: Tensor, b: Tensor, results: Results) -> list[Stage]:
        """All-reduce and reduce-scatter: partial tiles go to the inbox of the rank, or ranks, that reduce them."""
        plan, problem = self.plan, self.plan.problem
        if self._result_is_in_heap:
            out = buffers.matrix[:, : problem.n]
        else:
            rows = problem.sizes[buffers.rank] if problem.sizes else problem.m
            out = torch.empty(rows, problem.n, dtype=problem.out_dtype, device=self.heap.device)
        results[buffers.rank] = out
        to = "all" if plan.shots == 1 else "owner"

        def send_partial_tiles() -> None:
            x, y = (self._local_gemm(a, b), None) if plan.variant == BULK else (a, b)
            inbox = buffers.inbox.view(-1, 1)
            starts = self._section_starts
            launch.send(buffers, plan, x, y, inbox, to=to, flag="slot", section_starts=starts, sections=plan.sections)

        def reduce() -> None:
            if plan.num_comm_sms:
                launch.wait_for_start(buffers, plan)
            launch.reduce_tiles(buffers, plan, out)

        stages = [Stage(send_partial_tiles), Stage(reduce, on_side_stream=plan.num_comm_sms > 0)]
        if self._result_is_in_heap:  # in two shots, sums of the other ranks are still to come
            stages.append(Stage(lambda: launch.wait_all(buffers, plan)))
        return stages

    def _ag_gemm_stages(self, buffers: CallBuffers, a: Tensor, b: Tensor, results: Results) -> list[Stage]:
        """All-gather of the rows of A, and the GEMM of all of them."""
        plan, problem = self.plan, self.plan.problem
        first, height = problem.shard_starts[buffers.rank], problem.sizes[buffers.rank]
        own_section, own_rows = self._own_section[buffers.rank], buffers.matrix[first : first + height]

        def send_rows(put: str = "all") -> None:
            untimed = replace(buffers, times=None)  # times are of tiles of C, and A may have more tiles
            launch.send(untimed, plan, a, None, own_rows, to="matrix", flag="row", section_starts=own_section, put=put)

        if plan.variant == BULK:

            def multiply() -> None:
                launch.wait_all(buffers, plan, plan.num_ctas)
                results[buffers.rank] = self._local_gemm(buffers.matrix[:, : problem.k], b)

            return [Stage(send_rows), Stage(multiply)]
        read_peer = not plan.num_comm_sms
        out = torch.empty(problem.m, problem.n, dtype=problem.out_dtype, device=self.heap.device)
        results[buffers.rank] = out
        return [
            Stage(lambda: send_rows("self" if read_peer else "all"), on_side_stream=not read_peer),
            Stage(lambda: launch.gemm_gathered(buffers, plan, b, out, read_peer=read_peer, num_ctas=plan.num_ctas)),
        ]

    def _local_gemm(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b of one rank, in the dtype in which the collective carries it."""
        problem = self.plan.problem
        is_partial = problem.collective in ("all_reduce", "gemm_rs")
        epilogue = Epilogue(problem.reduce_dtype if is_partial else problem.out_dtype)
        plan = choose(GemmProblem.of(a, b, problem.precision), self.mode)
        launches = self._gemm_launches.setdefault((a.shape, b.shape), Launches())
        return run(plan, a, b, problem.precision, epilogue, launches)[0]

    def _launch_stage(self, rank: int, stage: Stage) -> None:
        if stage.on_side_stream and self._streams:
            with self._streams.stream_context(self._side_streams[rank]):
                stage.launch()
        else:
            stage.launch()

    def _join_caller_stream(self, rank: int, result: Tensor) -> None:
        """Make the caller's stream wait for the stream of a rank, where one process emulates all ranks."""
        if self._streams and self.heap.kind == "local":
            with self.heap.as_rank(rank):
                done = self._streams.record_event(self._streams.current_stream())
            self._streams.wait_event(self._streams.current_stream(), done)
            self._streams.record_stream(result, self._streams.current_stream())
