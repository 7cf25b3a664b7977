"""Rehearsals: play single ranks of a large world in this process, to find surprises before there are any GPUs.

For one schedule, and a few ranks of the world:

1. build both programs at the full size: time, steps, memory, scratch and bytes received;
2. verify them at fewer tokens a rank, as `schedules.registry.verified_sample` does;
3. run both passes on the CPU at fewer tokens and a smaller head dim. Messages are counted and dropped (`Loopback`), so
   values mean nothing; scratch and bytes must be those that the program says.

Nothing here measures speed on a GPU, and no message crosses a network.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass

import torch

from meshflash.comm.transports.loopback import Loopback
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Program, Sizes
from meshflash.core.sampled import MAX_COMPLETE, sample_ranks
from meshflash.engine.executable import MeshExecutable, Plan
from meshflash.engine.local import rows_of
from meshflash.engine.memory import pool
from meshflash.engine.placement import Setting
from meshflash.kernels.contract import Features, Grads, accumulator_dtype, new_outputs
from meshflash.schedules import registry

PASSES: tuple[Direction, ...] = ("forward", "backward")
#: The head dim of the runs on the CPU.
RUN_DIM = 16
#: The dtype of the runs on the CPU; that of real runs changes sizes, not programs.
RUN_DTYPE = torch.float32


@dataclass(frozen=True)
class Scene:
    """The world to rehearse. The command makes it.

    Args:
        world: The number of ranks.
        tokens: The length of the sequence, over all ranks.
        mask: A function of a number of tokens and a scale, which returns the mask for these tokens, with windows and
            documents of their real length times the scale.
        heads: The number of query heads.
        kv_heads: The number of key heads.
        dim: The head dim.
        input_bytes: The bytes of an element of q, k and v.
        batch: The number of sequences.
        tokens_per_rank: The tokens a rank at which programs are verified and run.
        ranks: The number of ranks to look at: the first, the last, the middle one, and random ones.
        num_partners: The most partners of each rank that are verified with it.
        proof_ranks: The number of ranks of the small world of the same layout and mask that is verified completely.
        max_scratch: The most bytes of scratch that a rank may need, or 0 for no limit.
        seed: The seed of random ranks and partners.
    """

    world: int
    tokens: int
    mask: Callable[[int, float], Mask]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    input_bytes: int = 2
    batch: int = 1
    tokens_per_rank: int = 8
    ranks: int = 3
    num_partners: int = 2
    proof_ranks: int = 32
    max_scratch: int = 0
    seed: int = 0

    @property
    def sizes(self) -> Sizes:
        """The sizes of a real call."""
        partial = max(4, self.input_bytes)
        return Sizes(self.batch, self.dim, self.dim, self.input_bytes, partial, partial)

    @property
    def small_tokens(self) -> int:
        """The length of the sequence that is verified and run."""
        return min(self.tokens, self.world * self.tokens_per_rank)


@dataclass
class Outcome:
    """What a rehearsal of one schedule found. `rehearse` fills it; "" in `message` means that it passed."""

    schedule: str
    ranks: tuple[int, ...] = ()
    #: The most steps of both passes on any rank that was looked at; likewise below.
    steps: int = 0
    #: The time to build both programs of a rank, in milliseconds, the slowest rank.
    build_ms: float = 0.0
    program_bytes: int = 0
    scratch_bytes: int = 0
    received_bytes: int = 0
    #: The scratch over that of half as many ranks with as many tokens a rank, or None if that world is not possible.
    scratch_growth: float | None = None
    #: The time of both passes on the CPU at the reduced size, without messages.
    run_ms: float = 0.0
    #: "all ranks", or how many ranks of the world were looked at.
    verified: str = ""
    #: What was proved and what was sampled, in words.
    summary: str = ""
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.message


def rehearse(scene: Scene, schedule: str, listen: Callable[[str], None] = lambda text: None) -> Outcome:
    """Build, verify and run single ranks of one schedule; an error becomes the outcome's message.

    Args:
        scene: The world to rehearse.
        schedule: The name of the schedule, with options in parentheses.
        listen: A function that is told what is being done.
    """
    out = Outcome(schedule, sample_ranks(scene.world, scene.ranks, scene.seed))
    stages: tuple[tuple[str, Callable[[Scene, Outcome, Callable[[str], None]], None]], ...] = (
        ("build", _build),
        ("verify", _verify),
        ("run", _run),
    )
    for name, stage in stages:
        try:
            stage(scene, out, lambda text: listen(f"{schedule}: {text}"))
        except Exception as error:  # a schedule of the user's own may raise anything, and the others must go on
            out.message = f"{name}: {type(error).__name__}: {error}"
            break
    return out


def _problem(scene: Scene, schedule: str, world: int, tokens: int, scale: float = 1.0) -> Problem:
    layout = registry.default_layout(schedule)(tokens, world)
    return Problem(layout.ranges, layout.ranges, scene.mask(tokens, scale), scene.heads, scene.kv_heads, lse=False)


def _build(scene: Scene, out: Outcome, listen: Callable[[str], None]) -> None:
    """Build the programs at the full size, and those of half the world with as many tokens a rank."""
    problem = _problem(scene, out.schedule, scene.world, scene.tokens)
    for rank in out.ranks:
        listen(f"build rank {rank} of {scene.world:,}")
        begin = time.perf_counter()
        programs = [registry.build(out.schedule, problem, rank, direction) for direction in PASSES]
        out.build_ms = max(out.build_ms, 1e3 * (time.perf_counter() - begin))
        out.steps = max(out.steps, sum(len(program.steps) for program in programs))
        out.program_bytes = max(out.program_bytes, object_bytes(programs))
        out.scratch_bytes = max(out.scratch_bytes, _scratch(programs, scene.sizes))
        received = sum(sum(program.received(scene.sizes).values()) for program in programs)
        out.received_bytes = max(out.received_bytes, received)
    if scene.max_scratch and out.scratch_bytes > scene.max_scratch:
        raise MemoryError(
            f"a rank needs {out.scratch_bytes:,} bytes of scratch, more than the limit of {scene.max_scratch:,}; "
            "choose another schedule, or more ranks"
        )
    out.scratch_growth = _growth(scene, out, listen)


def _scratch(programs: Sequence[Program], sizes: Sizes) -> int:
    return max(program.scratch_bytes(sizes) for program in programs)


def _growth(scene: Scene, out: Outcome, listen: Callable[[str], None]) -> float | None:
    """Return the scratch over that of half as many ranks with as many tokens each; None if that world is not possible.

    1.0 means that scratch depends on a rank's own tokens only; 2.0 that it holds the whole sequence.
    """
    inner = int(dict(registry.parse(out.schedule)[1]).get("inner", 0)) or 1
    world = scene.world // 2 // inner * inner
    if world < 2:
        return None
    problem = _problem(scene, out.schedule, world, scene.tokens * world // scene.world)
    scratch = 0
    for rank in sample_ranks(world, scene.ranks, scene.seed):
        listen(f"build rank {rank} of {world:,}")
        programs = [registry.build(out.schedule, problem, rank, direction) for direction in PASSES]
        scratch = max(scratch, _scratch(programs, scene.sizes))
    return out.scratch_bytes / scratch if scratch else None


def _verify(scene: Scene, out: Outcome, listen: Callable[[str], None]) -> None:
    problem = _problem(scene, out.schedule, scene.world, scene.small_tokens, scene.small_tokens / scene.tokens)
    if scene.world <= MAX_COMPLETE:
        listen(f"verify {scene.world} ranks")
        reports = registry.verified(out.schedule, problem)
    else:
        reports = registry.verified_sample(
            out.schedule,
            problem,
            out.ranks,
            num_partners=scene.num_partners,
            proof_ranks=scene.proof_ranks,
            seed=scene.seed,
            listen=listen,
        )
    out.summary = reports["backward"].summary
    out.verified = "all ranks" if scene.world <= MAX_COMPLETE else f"{len(out.ranks)} of {scene.world:,}"


def _run(scene: Scene, out: Outcome, listen: Callable[[str], None]) -> None:
    """Run both passes of each rank alone, and compare scratch and traffic with the program."""
    layout = registry.default_layout(out.schedule)(scene.small_tokens, scene.world)
    mask = scene.mask(scene.small_tokens, scene.small_tokens / scene.tokens)
    for rank in out.ranks:
        listen(f"run rank {rank}")
        out.run_ms = max(out.run_ms, run_alone(out.schedule, layout, mask, rank, scene.heads, scene.kv_heads))


def run_alone(schedule: str, layout: Layout, mask: Mask, rank: int, heads: int, kv_heads: int) -> float:
    """Run both passes of one rank on the CPU without its peers, and return the milliseconds.

    Raises RuntimeError unless scratch and received bytes of each pass are those of its program.

    Args:
        schedule: The name of the schedule, with options in parentheses.
        layout: The layout of queries and keys.
        mask: The mask between them.
        rank: The rank to run.
        heads: The number of query heads.
        kv_heads: The number of key heads.
    """
    device, partial = torch.device("cpu"), accumulator_dtype(RUN_DTYPE)
    setting = Setting(1, RUN_DIM, RUN_DIM, RUN_DTYPE, partial, device, "auto", False)
    plan = Plan(schedule, layout, layout, lse=False)
    executable = MeshExecutable(plan, mask, heads, kv_heads, rank, setting, registry.build)
    executable.check_saved()
    transport, features = Loopback(rank, layout.world), Features(scale=RUN_DIM**-0.5)
    sizes = Sizes(1, RUN_DIM, RUN_DIM, RUN_DTYPE.itemsize, partial.itemsize, partial.itemsize)
    generator = torch.Generator().manual_seed(rank)

    def tensor(num_heads: int) -> torch.Tensor:
        return torch.randn(1, layout.lengths[rank], num_heads, RUN_DIM, generator=generator, dtype=RUN_DTYPE)

    q, k, v, dout = (tensor(num_heads) for num_heads in (heads, kv_heads, kv_heads, heads))
    out, lse = new_outputs(q, v)
    saved = q.new_empty(executable.saved_bytes, dtype=torch.uint8)
    begin = time.perf_counter()
    with _counted(executable, "forward", transport, sizes):
        executable.run("forward", [q, k, v, out, lse, saved], features, transport)
    rows, grads = rows_of(out, lse, dout, None), Grads.like(q, k, v)
    tensors = [q, k, v, out, lse, dout, rows.delta_BHT, grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, saved]
    with _counted(executable, "backward", transport, sizes):
        executable.run("backward", tensors, features, transport)
    return 1e3 * (time.perf_counter() - begin)


@contextmanager
def _counted(executable: MeshExecutable, direction: Direction, transport: Loopback, sizes: Sizes) -> Iterator[None]:
    """Compare the scratch and the traffic of a pass with its program."""
    usage, program = pool(executable.setting.device).usage, executable.program(direction)
    transport.counters.clear()
    usage.peak = usage.live
    before = usage.live
    yield
    held, wanted = usage.peak - before, program.scratch_bytes(sizes)
    if held != wanted:
        raise RuntimeError(
            f"{direction} of rank {program.rank}: the engine held {held:,} bytes of scratch, not {wanted:,}"
        )
    received, wanted = transport.counters.received_bytes, sum(program.received(sizes).values())
    if received != wanted:
        raise RuntimeError(f"{direction} of rank {program.rank}: {received:,} bytes were received, not {wanted:,}")


def object_bytes(value: object) -> int:
    """Return the memory of programs: all objects that they refer to, each counted once.

    Args:
        value: A program, or a list of programs.
    """
    seen: set[int] = set()
    total, queue = 0, [value]
    while queue:
        item = queue.pop()
        if id(item) in seen or item is None or isinstance(item, bool | type):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, tuple | list):
            queue += item
        elif is_dataclass(item):
            queue += [getattr(item, each.name) for each in fields(item)]
            if hasattr(item, "__dict__"):
                total += sys.getsizeof(item.__dict__)
    return total
