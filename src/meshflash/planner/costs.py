"""How long the steps and messages of a program take on a machine."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from math import isqrt

from meshflash.core.problem import Problem
from meshflash.core.program import Attend, AttendGrad, Post, Program, Sizes, slices
from meshflash.core.tiles import worklist
from meshflash.kernels.rate_curves import BACKWARD
from meshflash.planner.hardware import Link, Machine


class MachineCosts:
    """Costs of a problem on a machine: measured or published rates of kernels, and links by level.

    - Attention takes its FLOPs over the rate of the fastest kernel, at the sequence length whose causal (or full) call
      has as many keys for each query. Where it adds to partial results, it also reads and writes these.
    - Other steps take the bytes that they touch over the bandwidth of memory.
    - Each step also takes the overhead of a launch.
    - The messages of a post take latency + bytes / bandwidth on each interconnect level; the slowest level counts.
    """

    def __init__(self, machine: Machine, problem: Problem, sizes: Sizes) -> None:
        """Set the machine and the call.

        Args:
            machine: The machine.
            problem: The problem that the programs solve.
            sizes: The sizes that turn rows into bytes.
        """
        self.sizes = sizes
        self._machine, self._problem = machine, problem
        self._attention = lru_cache(maxsize=None)(self._attention_seconds)
        self._tflops = lru_cache(maxsize=None)(machine.tflops)

    def step_seconds(self, program: Program, index: int) -> float:
        """Return the seconds of a step that is no Wait; a Post takes what packing its messages touches."""
        step = program.steps[index]
        if isinstance(step, Post):
            packed = sum(program.slice_bytes(part, self.sizes) for part in program.staged(step, self.sizes))
            return 2 * packed / self._machine.memory_bytes_per_second
        if isinstance(step, Attend | AttendGrad):
            heads = step.heads[1] - step.heads[0]
            seconds = self._attention(step.q_positions, step.k_positions, heads, program.direction)
            if isinstance(step, Attend):
                sums = [step.out] if step.carry else []
            else:
                sums = [step.dq] * step.add_dq + [step.dkv] * step.add_dkv
            added = 2 * sum(program.slice_bytes(part, self.sizes) for part in sums)
            return seconds + added / self._machine.memory_bytes_per_second + self._machine.overhead_seconds
        touched = sum(
            program.slice_bytes(part, self.sizes) * (2 if how == "update" else 1) for part, how in slices(step)
        )
        return touched / self._machine.memory_bytes_per_second + self._machine.overhead_seconds

    def post_seconds(self, program: Program, post: Post) -> float:
        """Return the seconds of the slowest interconnect level that a post uses."""
        moved: dict[Link, list[int]] = defaultdict(lambda: [0, 0])
        for side, parts in enumerate((post.recvs, post.sends)):
            for part in parts:
                if part.peer != program.rank:
                    link = self._machine.link(program.rank, part.peer)
                    moved[link][side] += program.slice_bytes(part.slice, self.sizes)
        return max((link.latency + max(both) / link.bytes_per_second for link, both in moved.items()), default=0.0)

    def ideal_seconds(self, tokens: int, directions: tuple[str, ...]) -> float:
        """Return the seconds of one call for the whole problem on a single device, divided by the number of ranks.

        Args:
            tokens: The number of tokens.
            directions: The passes.
        """
        whole = ((range(tokens),), (range(tokens),))
        attention = sum(self._attention(*whole, self._problem.heads, each) for each in directions)
        return (attention + len(directions) * self._machine.overhead_seconds) / self._problem.world

    def _attention_seconds(self, q: tuple[range, ...], k: tuple[range, ...], heads: int, direction: str) -> float:
        mask, sizes = self._problem.mask, self.sizes
        pairs = worklist(mask, q, k).pairs
        rows, keys = sum(map(len, q)), sum(map(len, k))
        if not pairs:
            return 0.0
        batch = sizes.batch if mask.batch_rows is None else 1
        masked = pairs < rows * keys * (mask.batch_rows or 1)
        # a causal square of n tokens has n / 2 keys for each query
        per_query = pairs / (mask.batch_rows or 1) / rows
        tokens = min(round(per_query * (2 if masked else 1)), isqrt(rows * keys))
        is_backward = direction == "backward"
        rate = self._tflops(
            "backward" if is_backward else "forward",
            masked,
            max(sizes.dim, sizes.value_dim),
            max(1, tokens),
            self._problem.heads > self._problem.kv_heads,
        )
        flops = 2.0 * (sizes.dim + sizes.value_dim) * pairs * batch * heads * (BACKWARD if is_backward else 1.0)
        return flops / (rate * 1e12)


class FreeLinks:
    """Costs whose messages take no time: what a simulation then loses is the balance of ranks."""

    def __init__(self, costs: MachineCosts) -> None:
        """Set the costs of steps.

        Args:
            costs: The costs with messages.
        """
        self.sizes = costs.sizes
        self.step_seconds = costs.step_seconds

    def post_seconds(self, program: Program, post: Post) -> float:
        """Return 0."""
        return 0.0
