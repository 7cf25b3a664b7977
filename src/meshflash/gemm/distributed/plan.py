"""From a distributed GEMM to a plan: variant, tiles, CTAs, comm SMs, heap buffers, and the reason for the choice."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace

import torch

from meshflash.comm.heap.allocator import ALIGN
from meshflash.gemm import configs, rates
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.problem import DistributedGemm
from meshflash.gemm.distributed.tiles import collective_name
from meshflash.gemm.partition import Partition, data_parallel, stream_k
from meshflash.gemm.plan import GemmProblem
from meshflash.kernels.contract import HALF
from meshflash.kernels.hopper.support import has_tested_gluon

BULK = "bulk"
#: Where communication happens: in the epilogue of each tile, on SMs of its own during the GEMM, or after the whole
#: GEMM.
VARIANTS = ("epilogue", "producer_consumer", BULK)
#: FLOPs of one SM in the time in which another SM moves one byte, on Hopper: 4096 FLOPs a clock in half precision, and
#: 64 bytes a clock.
FLOPS_PER_BYTE = 64
#: In ag_gemm one of this many SMs gathers rows; the gather is short.
SMS_PER_GATHER_SM = 8
#: Comm SMs of the few SMs that the interpreter pretends to have.
INTERPRETED_COMM_SMS = 2
#: Rows of a split tile that one CTA reduces and sends.
PIECE_ROWS = 16
#: Splitting tiles must save more than this, or it does not pay: K iterations per CTA, for the partial sums and the
#: second kernel that reads and sends them; and a share of all iterations. At a 3% share of idle time, for 8192 x 1152
#: on 33 SMs, splitting made nothing faster.
SPLIT_COST_ITERS, SPLIT_MIN_IDLE_SHARE = 16, 0.05
#: Largest world size of the warp-specialized all_scatter kernel: it takes one descriptor for each rank.
MAX_DESCRIPTOR_RANKS = 8
#: Smaller tiles reload their operands more often, so they are chosen only where larger ones waste this factor more.
SMALL_TILE_MARGIN = 1.05

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FusedConfig(Config):
    """A GEMM configuration with the comm SMs of "producer_consumer"; 0 lets the plan choose them from the sizes."""

    num_comm_sms: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_comm_sms < 0:
            raise ValueError(f"num_comm_sms={self.num_comm_sms}: expected 0, to choose it from the sizes, or more")

    @staticmethod
    def of(config: Config, num_comm_sms: int) -> FusedConfig:
        """Return a configuration with this number of comm SMs."""
        return FusedConfig(*[*(getattr(config, field.name) for field in fields(Config)), num_comm_sms])

    def __str__(self) -> str:
        return super().__str__() + (f" {self.num_comm_sms}comm" if self.num_comm_sms else "")


@dataclass(frozen=True)
class FusedPlan:
    """How a distributed GEMM is computed and why; `plan_fused` makes it, and `FusedGemm.plan` holds it.

    Args:
        problem: The sizes, dtypes and shards of the GEMM.
        variant: The kernel variant: "epilogue", "producer_consumer" or "bulk".
        shots: 1 for an all_reduce in which every rank reduces all tiles, 2 for one in which each rank reduces some
            tiles and sends the sums to all ranks, and 0 for other collectives.
        why: A sentence for the user.
        config: The tile configuration; None without a heap.
        num_ctas: The number of CTAs that compute.
        num_comm_sms: The number of SMs that communicate beside them; 0 if the computing CTAs communicate.
        time_shared: Whether ranks on one device run one after another, each on all SMs.
        backend: "heap" for a symmetric heap, or "group" for a process group.
    """

    problem: DistributedGemm
    variant: str
    shots: int
    why: str
    config: Config | None = None
    num_ctas: int = 0
    num_comm_sms: int = 0
    time_shared: bool = False
    backend: str = "heap"

    @property
    def tiling(self) -> Config:
        """The configuration; every plan on a heap has one."""
        assert self.config is not None
        return self.config

    @property
    def sections(self) -> int:
        """Sections of the rows of C: one per rank where ranks own rows, else 1. Tiles do not cross sections."""
        return self.problem.world if self.problem.collective in ("ag_gemm", "gemm_rs") else 1

    @property
    def tiles_m(self) -> int:
        """Rows of tiles of the largest section."""
        return -(-(max(self.problem.sizes) if self.sections > 1 else self.problem.m) // self.tiling.block_m)

    def tiles_n(self, rank: int) -> int:
        """Return the columns of tiles that a rank computes.

        Args:
            rank: The number of the rank, from 0.
        """
        problem = self.problem
        n = problem.sizes[rank] if problem.collective == "all_scatter" else problem.n
        return -(-n // self.tiling.block_n)

    @property
    def chunks_per_row(self) -> int:
        """Tiles of A that make up one row of tiles; ag_gemm gathers A in such tiles and counts their arrivals."""
        return -(-self.problem.k // self.tiling.block_n)

    @property
    def num_slots(self) -> int:
        """Inbox slots for each sending rank: the tiles that one rank reduces at most."""
        tiles = self.tiles_m * self.tiles_n(0)
        return -(-tiles // self.problem.world) if self.shots == 2 else tiles

    @property
    def wants_warp_specialized(self) -> bool:
        """Whether it asks for the warp-specialized all_scatter kernel; ranks that cannot run it use the Triton one."""
        scatters_in_epilogue = (self.problem.collective, self.variant) == ("all_scatter", "epilogue")
        return scatters_in_epilogue and self.tiling.runs_warp_specialized

    @property
    def arrivals_per_tile(self) -> int:
        """Arrivals that one tile of an all_scatter counts as.

        Split tiles are sent in pieces of `PIECE_ROWS` rows, one arrival each, so a full tile counts as that many. All
        ranks count alike, whichever kernel they run.
        """
        return self.tiling.block_m // PIECE_ROWS if self.wants_warp_specialized else 1

    def partition(self, rank: int) -> Partition:
        """Return the partition of a rank's tiles of an all_scatter: Stream-K where that saves enough idle time.

        Time-shared ranks never split tiles: the next rank takes the SMs that one leaves idle.

        Args:
            rank: The number of the rank, from 0.
        """
        iters_per_tile, tiles = -(-self.problem.k // self.tiling.block_k), self.tiles_m * self.tiles_n(rank)
        shape = (self.tiles_m, self.tiles_n(rank), iters_per_tile, self.num_ctas)
        longest = -(-tiles // self.num_ctas) * iters_per_tile
        idle = longest - tiles * iters_per_tile / self.num_ctas
        pays = not self.time_shared and idle > max(SPLIT_COST_ITERS, longest * SPLIT_MIN_IDLE_SHARE)
        split = stream_k(*shape) if pays else data_parallel(*shape)
        return data_parallel(*shape) if split.needs_int64 else split

    def expected_arrivals(self) -> list[int]:
        """Return what one call adds to each arrival counter: one counter per rank, or per rank and row of tiles."""
        problem, world = self.problem, self.problem.world
        if problem.collective == "ag_gemm":
            return [
                self.chunks_per_row * (row * self.tiling.block_m < size)
                for size in problem.sizes
                for row in range(self.tiles_m)
            ]
        if problem.collective == "all_scatter":
            return [self.tiles_m * self.tiles_n(rank) * self.arrivals_per_tile for rank in range(world)]
        tiles = self.tiles_m * self.tiles_n(0)
        return [max(0, -(-(tiles - rank) // world)) for rank in range(world)]

    def buffers(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return the heap buffers of a plan by name, with shape and dtype.

        Data buffers ("matrix", "inbox") are double-buffered: calls use the two halves in turn. Flags are not, since
        epochs keep calls apart:
          begun    the epoch that each rank has begun, and a counter of started CTAs;
          matrix   gathered rows of A, or the output that several ranks write;
          arrived  counters of what each rank has stored into the matrix;
          inbox    partial tiles from every rank, one slot each;
          flags    one flag for each inbox slot;
          ready    one flag for each tile of this rank, for its comm SMs.
        """
        problem, world = self.problem, self.problem.world
        buffers: dict[str, tuple[Shape, torch.dtype]] = {"begun": ((world + 1,), torch.int32)}
        if problem.collective == "all_scatter" or self.shots == 2:
            buffers["matrix"] = (2, problem.m, pad_to_16_bytes(problem.n, problem.out_dtype)), problem.out_dtype
        if problem.collective == "ag_gemm":
            buffers["matrix"] = (2, problem.m, pad_to_16_bytes(problem.k, problem.dtype)), problem.dtype
        if "matrix" in buffers:
            buffers["arrived"] = (len(self.expected_arrivals()),), torch.int64
        if problem.collective in ("all_reduce", "gemm_rs"):
            elements = self.tiling.block_m * self.tiling.block_n
            buffers["inbox"] = (2, world, self.num_slots, elements), problem.reduce_dtype
            buffers["flags"] = (world, self.num_slots), torch.int32
        if problem.collective == "all_scatter":
            buffers["ready"] = (max(self.tiles_m * self.tiles_n(rank) for rank in range(world)),), torch.int32
        return buffers

    @property
    def heap_bytes(self) -> int:
        """Bytes that the buffers take of each rank's heap."""
        if self.backend == "group":
            return 0
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in self.buffers().values())
        return sum(-(-max(size, 1) // ALIGN) * ALIGN for size in sizes)

    def __str__(self) -> str:
        head = collective_name(self.problem.collective, self.shots)
        if self.backend == "group":
            return f"{head}, {self.variant} by the process group: {self.why}"
        more = f" and {self.num_comm_sms} comm SMs" if self.num_comm_sms else ", ranks in turn" * self.time_shared
        if self.wants_warp_specialized and (num_split_tiles := self.partition(0).num_split_tiles):
            more += f", {num_split_tiles} tiles of the first rank split along K"
        return (
            f"{head}, {self.variant}: tiles of {self.config}, {self.num_ctas} CTAs"
            f"{more}, {self.heap_bytes:,} bytes of the heap; {self.why}"
        )


def pad_to_16_bytes(width: int, dtype: torch.dtype) -> int:
    """Return a row stride, in elements, of at least `width` for which rows begin at multiples of 16 bytes.

    >>> pad_to_16_bytes(5, torch.float32), pad_to_16_bytes(16, torch.bfloat16)
    (8, 16)
    """
    unit = 16 // dtype.itemsize
    return -(-width // unit) * unit


def plan_fused(
    problem: DistributedGemm,
    device: torch.device,
    *,
    variant: str = "auto",
    shots: int | None = None,
    config: Config | None = None,
    ranks_per_device: int = 1,
    num_sms: int | None = None,
    backend: str = "heap",
) -> FusedPlan:
    """Return the plan of a distributed GEMM.

    Args:
        problem: The distributed GEMM.
        device: The device of this rank.
        variant: One of `VARIANTS`, or "auto" for the fastest at the nearest measured shape, else "bulk".
        shots: The number of shots of an all_reduce, 1 or 2; None chooses it.
        config: The tiles and warps; None takes measured or default ones.
        ranks_per_device: The number of ranks that share this rank's device.
        num_sms: The SMs that this rank has for itself; None divides the device by `ranks_per_device`.
        backend: "heap", or "group" for a process group, which has the bulk variant only.

    >>> problem = DistributedGemm.of("gemm_rs", 10, 8, 6, 4, torch.float32)
    >>> problem.sizes
    (3, 3, 2, 2)
    >>> plan_fused(problem, torch.device("cpu"), backend="group").variant
    'bulk'

    """
    if variant not in ("auto", *VARIANTS):
        raise ValueError(f"variant {variant!r}: expected one of auto, {', '.join(VARIANTS)}")
    is_all_reduce = problem.collective == "all_reduce"
    if shots not in (None, 1, 2) or (shots is not None and not is_all_reduce):
        raise ValueError(f"shots={shots}: expected 1 or 2, of an all_reduce")
    local = problem.local_problem(device)
    if backend == "group":
        if variant not in ("auto", BULK):
            raise ValueError(f'variant {variant!r} needs a heap; give one of open_heap, or write variant="bulk"')
        why = "requested" if variant == BULK else "a process group has no memory that kernels can store to"
        return FusedPlan(problem, BULK, 0, why, backend=backend)
    unsupported_reason = local.unsupported_reason or problem.unsupported_reason
    if unsupported_reason:
        raise ValueError(f"a heap cannot serve this: {unsupported_reason}; give the process group instead of the heap")
    if variant in ("epilogue", BULK) and isinstance(config, FusedConfig) and config.num_comm_sms:
        raise ValueError(f"{config}: {variant} has no comm SMs; leave num_comm_sms at 0")
    variant, shots, config, why = _choose_measured(problem, local, variant, shots, config, ranks_per_device)
    if is_all_reduce and shots is None:
        shots = 1 if problem.world <= 2 else 2
    num_sms = num_sms or sms_per_rank(device, ranks_per_device)
    # The CTAs of this variant wait for no other rank; only one CTA per rank does, after the GEMM. So ranks that share a
    # device need not run at the same time. In turn, each has all SMs, and more CTAs share what one rank reads in L2.
    scatters_in_epilogue = (problem.collective, variant) == ("all_scatter", "epilogue")
    time_shared = scatters_in_epilogue and ranks_per_device > 1 and num_sms < configs.num_sms(device)
    if config is None:
        config = default_config(problem, local, num_sms, variant)
        concurrent_tiles = config.l2_swizzle * -(-local.n // config.block_n)
        if scatters_in_epilogue and config.runs_warp_specialized and concurrent_tiles <= configs.num_sms(device):
            # one wave covers all columns of that many rows anyway; row by row, A is read only once
            config = replace(config, l2_swizzle=1)
    if config.block_n % 2:
        raise ValueError(f"{config}: expected an even number of columns")
    num_comm_sms = reserved_sms = 0
    if variant == "producer_consumer":
        given = config.num_comm_sms if isinstance(config, FusedConfig) else 0
        num_comm_sms = min(given, max(1, num_sms - 1)) or _choose_num_comm_sms(problem, local, shots or 0, num_sms)
        # a gather waits for no one: with one reserved SM it always finishes, wherever the rest of it runs
        reserved_sms = 1 if problem.collective == "ag_gemm" else num_comm_sms
    # time-shared ranks leave one SM to the waiting CTA of each rank
    free_sms = configs.num_sms(device) - ranks_per_device if time_shared else num_sms - reserved_sms
    num_ctas = max(1, free_sms) * config.ctas_per_sm
    return FusedPlan(problem, variant, shots or 0, why, config, num_ctas, num_comm_sms, time_shared)


def sms_per_rank(device: torch.device, ranks_per_device: int) -> int:
    """Return the SMs of one rank; where MPS gives each rank its own share, the device already reports that share."""
    num_sms = configs.num_sms(device)
    mps_divides = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") or 100) * ranks_per_device <= 100
    return num_sms if mps_divides else max(1, num_sms // ranks_per_device)


def default_config(problem: DistributedGemm, local: GemmProblem, num_sms: int, variant: str) -> Config:
    """Return the configuration that wastes least of a rank's SMs, and the largest tiles if others are hardly better.

    A GEMM takes as long as the SM with most tiles, and tiles are computed in full even where C ends inside them. Large
    tiles come wide (128 x 256) or tall (256 x 128, faster with one more stage); an all_scatter takes them
    warp-specialized. Where the warp-specialized kernel sends, smaller tiles took 1.2 to 1.7 times as long on 132 SMs.
    So they are left out, unless there are fewer large tiles than SMs and too few K iterations to split them.

    >>> large, medium = Config(128, 256, 64, 8, 3), Config(128, 128, 64, 4, 3, ctas_per_sm=2)
    >>> [elements_per_sm(8192, 1152, config, 33) for config in (large, medium)]  # of 8192 * 1152 / 33 = 285,975
    [327680, 294912]
    """
    if local.device.type == "cpu":
        return configs.default(local.m, local.n, local.dtype_name, local.tma_aligned, local.device)
    sections = problem.world if problem.collective in ("ag_gemm", "gemm_rs") else 1
    rows = max(problem.sizes) if sections > 1 else problem.m
    large, *others = configs.table(local.dtype_name, local.tma_aligned, local.device)
    if large.block_m < large.block_n:
        warp_specialized = int(problem.collective == "all_scatter")
        tall = replace(large, block_m=large.block_n, block_n=large.block_m, num_stages=large.num_stages + 1)
        table = (
            replace(large, warp_specialized=warp_specialized),
            replace(tall, warp_specialized=warp_specialized),
            *others,
        )
        if variant == "epilogue" and supports_warp_specialized_send(problem, local.device):
            tiles = (rows // tall.block_m) * (local.n // tall.block_n)
            if tiles and (tiles >= num_sms or local.k > SPLIT_COST_ITERS * tall.block_k):
                table, num_sms = table[:2], 1  # Stream-K evens out the load, so only the padding of tiles counts
    else:
        table = (large, *others)
    elements = {config: elements_per_sm(rows, local.n, config, num_sms, sections) for config in table}
    least = min(elements.values())
    return next(config for config in table if elements[config] <= least * SMALL_TILE_MARGIN)


def supports_warp_specialized_send(problem: DistributedGemm, device: torch.device) -> bool:
    """Return whether the warp-specialized all_scatter kernel serves a problem, if its operands are TMA-aligned."""
    known = problem.collective == "all_scatter" and problem.world <= MAX_DESCRIPTOR_RANKS and has_tested_gluon(device)
    return known and all(dtype in HALF for dtype in (problem.dtype, problem.out_dtype))


def elements_per_sm(m: int, n: int, config: Config, num_sms: int, sections: int = 1) -> int:
    """Return the output elements that the busiest SM computes, of `sections` outputs of m x n."""
    tiles = sections * -(-m // config.block_m) * -(-n // config.block_n)
    return -(-tiles // num_sms) * config.block_m * config.block_n


def _choose_num_comm_sms(problem: DistributedGemm, local: GemmProblem, shots: int, num_sms: int) -> int:
    """Return the comm SMs for which communication and GEMM finish at the same time."""
    if local.device.type == "cpu":
        return INTERPRETED_COMM_SMS
    if problem.collective == "ag_gemm":
        return max(1, num_sms // SMS_PER_GATHER_SM)
    comm_flops = FLOPS_PER_BYTE * problem.moved_bytes(shots)
    share = comm_flops / max(1, comm_flops + 2 * local.m * local.n * local.k)
    return max(1, min(round(num_sms * share), num_sms // 2))


def rate_layout(problem: DistributedGemm, ranks_per_device: int) -> str:
    """Return the `layout` field of a fused GEMM in rate tables: collective/ranks/ranks per device."""
    return f"{problem.collective}/{problem.world}/{ranks_per_device}"


def rate_mode(variant: str, shots: int) -> str:
    """Return the `mode` field of a variant in rate tables.

    >>> rate_mode("bulk", 0), rate_mode("epilogue", 2)
    ('bulk', 'epilogue/2')
    """
    return f"{variant}/{shots}" if shots else variant


def _choose_measured(
    problem: DistributedGemm,
    local: GemmProblem,
    variant: str,
    shots: int | None,
    config: Config | None,
    ranks_per_device: int,
) -> tuple[str, int | None, Config | None, str]:
    """Return variant, shots and configuration by measured rates, and the reason; the bulk variant where there are none.

    Arguments that the caller fixed stay as they are.
    """
    is_fixed = variant != "auto"
    fallback = variant if is_fixed else BULK
    known = rates.known(local.device) if min(problem.m, problem.n, problem.k) else None
    if known is None:
        why = "no rates of fused GEMMs were measured on this device"
        return fallback, shots, config, "requested" if is_fixed else why
    modes = {
        rate_mode(name, count): (name, count)
        for name in ((variant,) if is_fixed else VARIANTS)
        for count in ((0,) if problem.collective != "all_reduce" else (1, 2) if shots is None else (shots,))
    }
    eligible = replace(known.table, rates=tuple(rate for rate in known.table.rates if rate.mode in modes))
    layout = rate_layout(problem, ranks_per_device)
    found = eligible.best(local.dtype_name, layout, problem.m, problem.n, problem.k)
    if found is None:
        why = f"no fused GEMM near this one was measured ({known.source})"
        return fallback, shots, config, "requested" if is_fixed else why
    variant, count = modes[found.mode]
    why = f"the fastest at {found.m}x{found.n}x{found.k} on {problem.world} ranks ({known.source})"
    config = config or (FusedConfig(*found.config) if found.config else None)
    return variant, count or shots, config, "requested" if is_fixed else why
