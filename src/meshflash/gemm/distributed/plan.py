"""From a product of several ranks to a plan: which variant, in which tiles, by how many programs, and why."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace

import torch

from meshflash.comm.heap.allocator import ALIGN
from meshflash.gemm import configs, rates
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.problem import FusedProduct
from meshflash.gemm.distributed.tiles import in_words
from meshflash.gemm.partition import Partition, data_parallel, stream_k
from meshflash.gemm.plan import Product
from meshflash.kernels.contract import HALF
from meshflash.kernels.hopper.launch import has_gluon

BULK = "bulk"
#: Where the messages are: in the programs of the tiles, in programs beside them, or after all of the product.
VARIANTS = ("epilogue", "producer_consumer", BULK)
#: Operations that a multiprocessor does while another moves a byte: 4096 in half precision and 64 bytes a clock, on a
#: Hopper GPU.
OPERATIONS_A_BYTE = 64
#: One of so many multiprocessors gathers rows, which is soon done.
GATHERERS = 8
#: Of the programs that the interpreter plays.
INTERPRETED_MOVERS = 2
#: Rows of a tile in parts that are added up and sent by themselves.
PIECE = 16
#: What tiles in parts cost a program, in slices: sums that go to memory, and a second kernel that reads and sends them.
#: And as a part of all slices: where 3% were idle, at 8192 x 1152 on 33 multiprocessors, parts made nothing faster.
PARTS_COST, PARTS_SHARE = 16, 0.05
#: Ranks that the kernel in Gluon of an all_scatter has descriptors for.
RANKS = 8
#: Smaller blocks read their operands more often: they are taken where larger ones waste so much more.
WORTH = 1.05

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FusedConfig(Config):
    """That of a product, and how many multiprocessors move where some do; 0 is what the sizes suggest."""

    movers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.movers < 0:
            raise ValueError(f"movers={self.movers}: expected 0, which is what the sizes suggest, or more")

    @staticmethod
    def of(config: Config, movers: int) -> FusedConfig:
        """A configuration, with so many that move."""
        return FusedConfig(*[*(getattr(config, field.name) for field in fields(Config)), movers])

    def __str__(self) -> str:
        return super().__str__() + (f" {self.movers}m" if self.movers else "")


@dataclass(frozen=True)
class FusedPlan:
    """How a product of several ranks is computed, and why so.

    `shots` is of an all_reduce: 1 where every rank adds up all tiles, 2 where each adds up some and puts them to all;
    else 0. `programs` compute and `movers` move beside them, 0 where the same ones do. `in_turn` says that ranks share
    a device and each has all of it, one after another. `means` is what carries messages, "heap" or "group".
    """

    product: FusedProduct
    variant: str
    shots: int
    why: str
    config: Config | None = None
    programs: int = 0
    movers: int = 0
    in_turn: bool = False
    means: str = "heap"

    @property
    def blocks(self) -> Config:
        """The configuration, which plans on a heap have."""
        assert self.config is not None
        return self.config

    @property
    def sections(self) -> int:
        """Parts that the rows of C are in, each with tiles of its own."""
        return self.product.world if self.product.collective in ("ag_gemm", "gemm_rs") else 1

    @property
    def rows(self) -> int:
        """Rows of tiles, of the largest section."""
        return -(-(max(self.product.sizes) if self.sections > 1 else self.product.m) // self.blocks.block_m)

    def columns(self, rank: int) -> int:
        """Columns of tiles that a rank computes."""
        product = self.product
        n = product.sizes[rank] if product.collective == "all_scatter" else product.n
        return -(-n // self.blocks.block_n)

    @property
    def chunks(self) -> int:
        """Parts in which a row of tiles of A is gathered."""
        return -(-self.product.k // self.blocks.block_n)

    @property
    def places(self) -> int:
        """Tiles that a rank adds up at most."""
        tiles = self.rows * self.columns(0)
        return -(-tiles // self.product.world) if self.shots == 2 else tiles

    @property
    def by_roles(self) -> bool:
        """Whether it asks for the kernel in Gluon of an all_scatter; a rank that cannot have it does without."""
        return (self.product.collective, self.variant) == ("all_scatter", "epilogue") and self.blocks.by_roles

    @property
    def pieces(self) -> int:
        """As how many arrivals a tile of an all_scatter counts: those that are in parts are sent in so many pieces."""
        return self.blocks.block_m // PIECE if self.by_roles else 1

    def partition(self, rank: int) -> Partition:
        """A rank's tiles of an all_scatter: by Stream-K where that leaves so much less idle that parts pay.

        What one rank leaves idle the next one takes, where they are there in turn.
        """
        steps, tiles = -(-self.product.k // self.blocks.block_k), self.rows * self.columns(rank)
        shape = (self.rows, self.columns(rank), steps, self.programs)
        longest = -(-tiles // self.programs) * steps
        idle = longest - tiles * steps / self.programs
        pays = not self.in_turn and idle > max(PARTS_COST, longest * PARTS_SHARE)
        split = stream_k(*shape) if pays else data_parallel(*shape)
        return data_parallel(*shape) if split.long else split

    def wanted(self) -> list[int]:
        """How often each flag of arrivals is raised in a call: one for each rank, or for each row of tiles of it."""
        product, world = self.product, self.product.world
        if product.collective == "ag_gemm":
            return [
                self.chunks * (row * self.blocks.block_m < size) for size in product.sizes for row in range(self.rows)
            ]
        if product.collective == "all_scatter":
            return [self.rows * self.columns(rank) * self.pieces for rank in range(world)]
        tiles = self.rows * self.columns(0)
        return [max(0, -(-(tiles - rank) // world)) for rank in range(world)]

    def rooms(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """What it takes of a heap: names, shapes and dtypes. Where data lies there are two of each, used in turns."""
        product, world = self.product, self.product.world
        rooms: dict[str, tuple[Shape, torch.dtype]] = {"begun": ((world + 1,), torch.int32)}
        if product.collective == "all_scatter" or self.shots == 2:
            rooms["matrix"] = (2, product.m, lined(product.n, product.out_dtype)), product.out_dtype
        if product.collective == "ag_gemm":
            rooms["matrix"] = (2, product.m, lined(product.k, product.dtype)), product.dtype
        if "matrix" in rooms:
            rooms["arrived"] = (len(self.wanted()),), torch.int64
        if product.collective in ("all_reduce", "gemm_rs"):
            size = self.blocks.block_m * self.blocks.block_n
            rooms["inbox"] = (2, world, self.places, size), product.reduce_dtype
            rooms["flags"] = (world, self.places), torch.int32
        if product.collective == "all_scatter":
            rooms["ready"] = (max(self.rows * self.columns(rank) for rank in range(world)),), torch.int32
        return rooms

    @property
    def heap_bytes(self) -> int:
        """What it takes of each rank's heap."""
        if self.means == "group":
            return 0
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in self.rooms().values())
        return sum(-(-max(size, 1) // ALIGN) * ALIGN for size in sizes)

    def __str__(self) -> str:
        head = in_words(self.product.collective, self.shots)
        if self.means == "group":
            return f"{head}, {self.variant} by the process group: {self.why}"
        more = f" and {self.movers} that move" if self.movers else " in turn" if self.in_turn else ""
        if self.by_roles and (cut := self.partition(0).shared):
            more += f", {cut} tiles of the first rank in parts"
        return (
            f"{head}, {self.variant}: tiles of {self.config}, {self.programs} programs"
            f"{more}, {self.heap_bytes:,} bytes of the heap; {self.why}"
        )


def lined(width: int, dtype: torch.dtype) -> int:
    """Numbers from row to row, so that rows begin at multiples of 16 bytes.

    >>> lined(5, torch.float32), lined(16, torch.bfloat16)
    (8, 16)
    """
    unit = 16 // dtype.itemsize
    return -(-width // unit) * unit


def plan_fused(
    product: FusedProduct,
    device: torch.device,
    *,
    variant: str = "auto",
    shots: int | None = None,
    config: Config | None = None,
    sharing: int = 1,
    cores: int | None = None,
    means: str = "heap",
) -> FusedPlan:
    """The plan of a product on ranks of which so many share each device, where each has so many multiprocessors.

    "auto" takes what was fastest at the nearest shape that was measured so, and the bulk where none was.

    >>> product = FusedProduct.of("gemm_rs", 10, 8, 6, 4, torch.float32)
    >>> product.sizes
    (3, 3, 2, 2)
    >>> plan_fused(product, torch.device("cpu"), means="group").variant
    'bulk'

    """
    if variant not in ("auto", *VARIANTS):
        raise ValueError(f"variant {variant!r}: expected one of auto, {', '.join(VARIANTS)}")
    reduces = product.collective == "all_reduce"
    if shots not in (None, 1, 2) or (shots is not None and not reduces):
        raise ValueError(f"shots={shots}: expected 1 or 2, of an all_reduce")
    part = product.part(device)
    if means == "group":
        if variant not in ("auto", BULK):
            raise ValueError(f'variant {variant!r} needs a heap; give one of open_heap, or write variant="bulk"')
        why = "asked for" if variant == BULK else "a process group has no memory that kernels could put into"
        return FusedPlan(product, BULK, 0, why, means=means)
    unsupported_reason = part.unsupported_reason or product.unsupported_reason
    if unsupported_reason:
        raise ValueError(f"a heap cannot carry this: {unsupported_reason}; give the process group instead of the heap")
    if variant in ("epilogue", BULK) and isinstance(config, FusedConfig) and config.movers:
        raise ValueError(f"{config}: {variant} has no programs that move; leave movers at 0")
    variant, shots, config, why = _measured(product, part, variant, shots, config, sharing)
    if reduces and shots is None:
        shots = 1 if product.world <= 2 else 2
    cores = cores or cores_of(device, sharing)
    # an all_scatter that puts its tiles waits for nobody until one program of each rank does: none of its others need
    # run beside those of ranks that share the device, and what a rank reads is in the cache for more of them at once
    puts = (product.collective, variant) == ("all_scatter", "epilogue")
    in_turn = puts and sharing > 1 and cores < configs.cores(device)
    if config is None:
        config = fused_default(product, part, cores, variant)
        if puts and config.by_roles and config.group * -(-part.n // config.block_n) <= configs.cores(device):
            config = replace(config, group=1)  # as many rows at a time anyway, and what is read of A is read once
    if config.block_n % 2:
        raise ValueError(f"{config}: expected an even number of columns")
    movers = given = 0
    if variant == "producer_consumer":
        asked = config.movers if isinstance(config, FusedConfig) else 0
        movers = min(asked, max(1, cores - 1)) or _movers(product, part, shots or 0, cores)
        # who gathers waits for nobody: one multiprocessor is enough for it to come to an end, wherever it begins
        given = 1 if product.collective == "ag_gemm" else movers
    programs = max(1, configs.cores(device) - sharing if in_turn else cores - given) * config.per_core
    return FusedPlan(product, variant, shots or 0, why, config, programs, movers, in_turn)


def cores_of(device: torch.device, sharing: int) -> int:
    """Multiprocessors of a rank where so many share a device: MPS may give each its own, and counts those."""
    cores = configs.cores(device)
    apart = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") or 100) * sharing <= 100
    return cores if apart else max(1, cores // sharing)


def fused_default(product: FusedProduct, part: Product, cores: int, variant: str) -> Config:
    """The configuration that wastes least of a rank's multiprocessors; the largest where others are hardly better.

    All of them take as long as the one with most tiles, whose numbers are computed even where C has ended. Large blocks
    may lie or stand; those that stand are faster with a stage more, and an all_scatter where warps have roles. Where
    these send, smaller ones took 1.2 to 1.7 times as long on 132 multiprocessors: they are left out, unless there are
    fewer large ones than multiprocessors, and too few slices for parts of them.

    >>> large, medium = Config(128, 256, 64, 8, 3), Config(128, 128, 64, 4, 3, per_core=2)
    >>> [computed(8192, 1152, config, 33) for config in (large, medium)]  # of 8192 * 1152 / 33 = 285,975
    [327680, 294912]
    """
    if part.device.type == "cpu":
        return configs.default(part.m, part.n, part.numbers, part.lined, part.device)
    sections = product.world if product.collective in ("ag_gemm", "gemm_rs") else 1
    rows = max(product.sizes) if sections > 1 else product.m
    large, *others = configs.table(part.numbers, part.lined, part.device)
    if large.block_m < large.block_n:
        roles = int(product.collective == "all_scatter")
        standing = replace(large, block_m=large.block_n, block_n=large.block_m, stages=large.stages + 1)
        table = (replace(large, roles=roles), replace(standing, roles=roles), *others)
        if variant == "epilogue" and sends_by_roles(product, part.device):
            tiles = (rows // standing.block_m) * (part.n // standing.block_n)
            if tiles and (tiles >= cores or part.k > PARTS_COST * standing.block_k):
                table, cores = table[:2], 1
    else:
        table = (large, *others)
    numbers = {config: computed(rows, part.n, config, cores, sections) for config in table}
    least = min(numbers.values())
    return next(config for config in table if numbers[config] <= least * WORTH)


def sends_by_roles(product: FusedProduct, device: torch.device) -> bool:
    """Whether the kernel in Gluon sends what an all_scatter puts, of operands and columns that are in lines."""
    known = product.collective == "all_scatter" and product.world <= RANKS and has_gluon(device)
    return known and all(dtype in HALF for dtype in (product.dtype, product.out_dtype))


def computed(m: int, n: int, config: Config, cores: int, sections: int = 1) -> int:
    """Numbers that a multiprocessor computes of so many sections of m x n, at most."""
    tiles = sections * -(-m // config.block_m) * -(-n // config.block_n)
    return -(-tiles // cores) * config.block_m * config.block_n


def _movers(product: FusedProduct, part: Product, shots: int, cores: int) -> int:
    """Multiprocessors that move or add up, so that they are done with it when the others are with the product."""
    if part.device.type == "cpu":
        return INTERPRETED_MOVERS
    if product.collective == "ag_gemm":
        return max(1, cores // GATHERERS)
    moving = OPERATIONS_A_BYTE * product.moved_bytes(shots)
    share = moving / max(1, moving + 2 * part.m * part.n * part.k)
    return max(1, min(round(cores * share), cores // 2))


def key_of(product: FusedProduct, sharing: int) -> str:
    """How tables of rates call it, where those of one device have the layout of operands."""
    return f"{product.collective}/{product.world}/{sharing}"


def mode_of(variant: str, shots: int) -> str:
    """How tables of rates call a variant.

    >>> mode_of("bulk", 0), mode_of("epilogue", 2)
    ('bulk', 'epilogue/2')
    """
    return f"{variant}/{shots}" if shots else variant


def _measured(
    product: FusedProduct, part: Product, variant: str, shots: int | None, config: Config | None, sharing: int
) -> tuple[str, int | None, Config | None, str]:
    """Variant, shots and configuration by what was measured, and why; the bulk where nothing was.

    Those that were asked for stay as they are.
    """
    asked = variant != "auto"
    fallback = variant if asked else BULK
    known = rates.known(part.device) if min(product.m, product.n, product.k) else None
    if known is None:
        why = "no rates of fused products were measured on this device"
        return fallback, shots, config, "asked for" if asked else why
    modes = {
        mode_of(name, count): (name, count)
        for name in ((variant,) if asked else VARIANTS)
        for count in ((0,) if product.collective != "all_reduce" else (1, 2) if shots is None else (shots,))
    }
    like = replace(known.table, rates=tuple(rate for rate in known.table.rates if rate.mode in modes))
    found = like.best(part.numbers, key_of(product, sharing), product.m, product.n, product.k)
    if found is None:
        why = f"no fused product near this one is among the rates ({known.source})"
        return fallback, shots, config, "asked for" if asked else why
    variant, count = modes[found.mode]
    why = f"the fastest at {found.m}x{found.n}x{found.k} on {product.world} ranks ({known.source})"
    config = config or (FusedConfig(*found.config) if found.config else None)
    return variant, count or shots, config, "asked for" if asked else why
