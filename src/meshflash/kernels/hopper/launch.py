"""The kernels in Gluon behind what the Triton kernel asks of them: which calls they serve, and how they are started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.contract import HALF, Features, Grads, Inputs, KernelRequest, Outputs
from meshflash.kernels.triton.block_tables import LEVEL, Blocks
from meshflash.kernels.triton.configs import has_descriptors
from meshflash.kernels.triton.launch import LEAST_SCALE, fits, strides_of

#: Versions of Triton that the kernels were compiled by: Gluon is young, and a fault of it hangs the GPU.
#: MESHFLASH_GLUON=0 goes without them.
VERSIONS = ("3.6", "3.7")
#: Bytes of keys and values that programs work on at a time, of all batch rows: they stay in the cache.
CACHED = 32 << 20
LOG2E = 1.4426950408889634
#: Queries that a tile of keys meets on average where each head of a group has programs of its own in the backward: they
#: add to the same dK and dV, and begin and end as often as there are heads.
SPREAD_FROM = 6144
#: The smallest cap of a backward: what is left of a gradient is known from its weight, the less so the flatter it is.
LEAST_CAP = 0.05


@dataclass(frozen=True)
class Forward:
    """How a forward is started: groups of warps, stages, registers, rows of a group, keys of a block.

    `by_turns` groups start their products one after another.
    """

    groups: int
    stages: int
    compute_registers: int
    copy_registers: int
    by_turns: bool = False
    rows: int = 64
    block_n: int = 128

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.rows * self.groups


@dataclass(frozen=True)
class Backward:
    """How a backward is started: queries and keys of a block, stages, and whether scores are started a block ahead.

    `rotate` is how many blocks further each program begins than the one before. `tiled_from` is how many keys a query
    sees on average where sums that are given are better added to once, from tiles, than block by block, in rows: 16
    bytes of traffic for each of their numbers, against what pieces of rows cost with each block. `capped` says whether
    scores may have a cap, which takes registers: at dim 64 the ordinary kernel is twice as fast then. `add_blocks` says
    whether dK and dV are added to sums by copies, where a tile has all of its keys, or number by number.
    """

    block_m: int
    ahead: bool
    rotate: int
    tiled_from: int
    capped: bool
    add_blocks: bool
    stages: int = 2
    block_n: int = 128
    compute_registers: int = 240
    copy_registers: int = 24


@dataclass(frozen=True)
class Queries:
    """How a pass for dQ alone is started."""

    stages: int
    rows: int = 64
    block_n: int = 128
    compute_registers: int = 240
    copy_registers: int = 24

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return 2 * self.rows


FORWARD = {64: Forward(3, 3, 160, 32, by_turns=True), 128: Forward(2, 2, 240, 24)}
BACKWARD = {
    64: Backward(128, ahead=True, rotate=5, tiled_from=4096, capped=False, add_blocks=False),
    128: Backward(64, ahead=False, rotate=0, tiled_from=8000, capped=True, add_blocks=True),
}
QUERIES = {64: Queries(3), 128: Queries(2)}


def forward_config(x: Inputs, *tensors: Tensor) -> Forward | None:
    """How a forward is served, or None."""
    return FORWARD.get(x.q_BTHD.shape[-1]) if _serves(x, *tensors) else None


def backward_config(x: Inputs, deterministic: bool, grads: Grads, *tensors: Tensor) -> Backward | None:
    """How a backward is served, or None. A deterministic one has a second pass, as `QUERIES` says."""
    dim = x.q_BTHD.shape[-1]
    if not _serves(x, *tensors) or not _takes_cap(x.features, dim):
        return None
    if grads.add_dq and not deterministic and not fits(grads.dq_BTHD):
        return None
    return BACKWARD[dim]


def unsupported_reason(request: KernelRequest) -> str | None:
    """Return what about a call the Gluon kernels do not support, or None.

    The alignment of tensors is not known here: where TMA cannot address one, the portable kernel serves the call.
    """
    features, dim = request.features, request.head_dim
    reason = _unsupported(features, request.dtype, dim, request.value_dim, request.device)
    if reason is None and request.direction == "backward" and not _takes_cap(features, dim):
        return f"a softcap of {features.softcap} in the backward at head dim {dim}"
    return reason


def _takes_cap(features: Features, dim: int) -> bool:
    return not features.softcap or (BACKWARD[dim].capped and features.softcap >= LEAST_CAP)


def _serves(x: Inputs, *tensors: Tensor) -> bool:
    q = x.q_BTHD
    if _unsupported(x.features, q.dtype, q.shape[-1], x.v_BSKE.shape[-1], q.device):
        return False
    return all(y.dtype == q.dtype and fits(y) for y in tensors)


def _unsupported(features: Features, dtype: torch.dtype, dim: int, value_dim: int, device: torch.device) -> str | None:
    if device.type == "cpu":
        return "the device cpu; it runs on Hopper GPUs"
    if dtype not in HALF:
        return f"{dtype}; it takes float16 and bfloat16"
    if dim not in FORWARD:
        return f"a head dim of {dim}; it takes {' and '.join(map(str, FORWARD))}"
    if value_dim != dim:
        return f"a value dim of {value_dim} with a head dim of {dim}"
    if not has_gluon(device):
        return _why_no_gluon(device)
    if features.scale < LEAST_SCALE:
        return "a scale of 0 or below"
    if features.dropout:
        return "dropout"
    return None if features.alibi_slopes_BH is None else "ALiBi"


@cache
def has_gluon(device: torch.device) -> bool:
    """Return whether the Gluon kernels run on a device: Hopper, with a Triton that they were run with."""
    return _why_no_gluon(device) is None


def _why_no_gluon(device: torch.device) -> str | None:
    if os.environ.get("MESHFLASH_GLUON") == "0":
        return "calls while MESHFLASH_GLUON=0 is set"
    if not has_descriptors(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return "this GPU; it runs on Hopper, NVIDIA's compute capability 9.0"
    if find_spec("triton") is None:
        return "Python without triton"
    import triton

    if triton.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
        return None
    return f"Triton {triton.__version__}; it was run with {' and '.join(VERSIONS)}"


def forward(x: Inputs, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, carry: Outputs | None, config: Forward,
            tables: Blocks) -> None:  # fmt: skip
    """(out, lse) of the blocks."""
    from meshflash.kernels.hopper.forward import forward as kernel

    (out, lse), features = outputs, x.features
    carried, carried_lse = outputs if carry is None else carry
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    dynamic = tables.lower or tables.upper or not tables.single
    each = 4 * k.shape[0] * k.shape[1] * k.shape[3]
    section = min(heads, group * max(1, CACHED // max(1, each))) if dynamic else 1
    work = uncut = len(tables) * heads
    _, scale, inner = _scales(features)
    sinks = features.sink_logits_H
    processors = _processors(q.device)
    walked, last, part = tables, None, (out, lse)
    if sinks is None:
        from meshflash.kernels.hopper.split_kv import join_parts, last_round

        last = last_round(tables, heads, processors, config.block_n, appended=True)
    if last:
        walked, pieces = last.blocks, last.parts * last.tiles
        uncut -= last.tiles
        work = uncut + pieces
        part = lse.new_empty(pieces, config.block_m, q.shape[3]), lse.new_empty(pieces, config.block_m)
    q_blocks = _blocks_of(q, config.rows)
    by_blocks = tables.level and config.rows == LEVEL and fits(out)
    carry_blocks = by_blocks and carry is not None and carried.dtype == out.dtype == torch.float32 and fits(carried)
    out_blocks = _blocks_of(out, config.rows) if by_blocks else q_blocks
    carried_blocks = _blocks_of(carried, config.rows) if carry_blocks else out_blocks
    with torch.cuda.device_of(q):
        kernel[(min(work, processors),)](
            *(q_blocks, _blocks_of(k, config.block_n), _blocks_of(v, config.block_n)),
            *(out_blocks, carried_blocks, out, lse, *part, carried, carried_lse),
            lse if sinks is None else sinks.contiguous(),
            *(_counter(q.device) if dynamic else walked.tiles, walked.tiles, walked.spans, len(tables), heads, section),
            *(uncut, work, scale, inner),
            *(*out.stride()[:3], *lse.stride(), *carried.stride()[:3], *carried_lse.stride()),
            GROUP=group,
            ROWS=config.rows,
            BLOCK_N=config.block_n,
            D=q.shape[3],
            STAGES=config.stages,
            GROUPS=config.groups,
            SINGLE=tables.single,
            WHOLE=tables.whole,
            DYNAMIC=dynamic,
            LOWER=tables.lower,
            UPPER=tables.upper,
            ONCE=tables.once,
            SOFTCAP=features.softcap > 0,
            HAS_CARRY=carry is not None,
            HAS_SINKS=sinks is not None,
            BY_BLOCKS=by_blocks,
            CARRY_BLOCKS=carry_blocks,
            BY_TURNS=config.by_turns,
            PARTS=last is not None,
            COMPUTE_REGISTERS=config.compute_registers,
            COPY_REGISTERS=config.copy_registers,
            num_warps=4,
        )
        if last:
            join_parts(last, part, outputs, carry)


class Sums:
    """Sums of dQ in float32, while programs add to them: in tiles as registers have them, or in rows.

    `room` is what the ordinary kernel adds to as well, where it has blocks of its own: never tiles. `added` is what
    programs in Gluon add to, which is `room` unless `tile` is called.
    """

    def __init__(self, q: Tensor, grads: Grads, tiled: bool, block_m: int) -> None:
        self.q, self.grads, self.tiled, self.block_m = q, grads, tiled, block_m
        self.tiles = -(-q.shape[1] // block_m)
        if tiled:
            self.room = self._tiles_of_zeros()
        else:
            self.room = grads.dq_BTHD if grads.add_dq else _zeros(q)
        self.added = self.room

    def tile(self) -> None:
        """Have programs in Gluon add to tiles beside the sums that were given, which `finish` adds to those."""
        assert self.grads.add_dq, "only sums that are given have tiles beside them"
        self.tiled, self.added = True, self._tiles_of_zeros()

    def _tiles_of_zeros(self) -> Tensor:
        batch, _, heads, dim = self.q.shape
        numbers = batch * heads * self.tiles * self.block_m * dim
        return torch.zeros(numbers, dtype=torch.float32, device=self.q.device)

    def described(self, head: int) -> Any:
        """As the kernel adds to them, from a head on."""
        from triton.experimental.gluon.language import NVMMASharedLayout

        if not self.tiled:
            return _blocks_of(self.added[:, :, head:], 64, 64)
        mine = self.added[head * self.tiles * self.block_m * self.q.shape[3] :]
        return descriptor(mine.view(-1, 256), [16, 256], NVMMASharedLayout(0, 32, rank=2))

    def finish(self, scale: float) -> None:
        """Write the gradients, where they are not what was added to."""
        dq = self.grads.dq_BTHD
        if not self.tiled:
            if self.room is not dq:
                dq.copy_(self.room)
            return
        from meshflash.kernels.hopper.backward_preprocess import gather_dq

        batch, tokens, heads, dim = self.q.shape
        with torch.cuda.device_of(dq):
            gather_dq[(self.tiles * batch * heads,)](
                *(self.added, dq, tokens, self.tiles, heads, scale, *dq.stride()[:3]),
                BLOCK_M=self.block_m,
                D=dim,
                ADD=self.grads.add_dq,
            )


def backward(x: Inputs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, grads: Grads,
             sums: Sums | None, config: Backward, tables: Blocks) -> None:  # fmt: skip
    """(dK, dV) of the blocks, and their part of dQ where there are sums for it."""
    from meshflash.kernels.hopper.backward_preprocess import LINE, lines

    batch, tokens, heads, _ = q.shape
    if sums and grads.add_dq and tables.even and _seen_by_a_query(x) >= config.tiled_from:
        sums.tile()
    room = -(-tokens // 4) * 4  # descriptors have lines at multiples of 16 bytes
    shifts = 1 if tables.aligned else 4
    numbers = lse.new_empty(2, batch * heads * shifts, room)
    dk, dv, add = grads.dk_BSKD, grads.dv_BSKE, grads.add_dkv
    group, share = heads // k.shape[2], 1
    if sums and spreads(tables, config):
        group, share = 1, group
    work = len(tables) * heads // group
    last = None
    if sums:  # parts add up dK and dV in any order
        from meshflash.kernels.hopper.split_kv import last_round, settle_parts

        last = last_round(tables, heads // group, _processors(q.device), config.block_m, group)
        work -= last.tiles if last else 0
    with torch.cuda.device_of(q):
        lines[(batch * heads, -(-room // LINE))](
            *(lse, delta, *numbers, tokens, room, heads, *lse.stride(), *delta.stride()), LINE=LINE, SHIFTS=shifts
        )
        if share > 1 and not add:
            dk, dv, add = _zeros(dk), _zeros(dv), True
        _by_keys(x, q, k, v, dout, numbers, dk, dv, add, sums, config, tables, work, heads, group, share)
        if last:
            mine = (q[:, :, -group:], last.rows_of(k), last.rows_of(v), dout[:, :, -group:], numbers)
            dk_part, dv_part = (last.rows_of(y) if add else _zeros(last.rows_of(y)) for y in (dk, dv))
            more = (last.blocks, len(last.blocks), heads, group, share)
            _by_keys(x, *mine, dk_part, dv_part, True, sums, config, *more)
            if not add:
                settle_parts(last, (dk_part, dv_part), (dk, dv), config.block_n)
        if dk is not grads.dk_BSKD:  # with zeros where others write later: keys that are left to the ordinary kernel
            grads.dk_BSKD.copy_(dk)
            grads.dv_BSKE.copy_(dv)


def spreads(tables: Blocks, config: Backward) -> bool:
    """Whether each head of a group has programs of its own, which share tiles of keys."""
    return tables.meets * config.block_m >= SPREAD_FROM


def _zeros(like: Tensor) -> Tensor:
    """Where sums of gradients begin."""
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device)


def _by_keys(x: Inputs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, numbers: Tensor, dk: Tensor, dv: Tensor,
             add: bool, sums: Sums | None, config: Backward, tables: Blocks, work: int, heads: int, group: int,
             share: int) -> None:  # fmt: skip
    """The first so many tiles, one `group` of heads after another, of which so many `share` keys.

    q and dout may be the last of more `heads`, of all of which are the lines of lse and delta, and sums.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout

    from meshflash.kernels.hopper.backward import backward as kernel

    head = heads - q.shape[2]
    shifts = 1 if tables.aligned else 4
    flat = NVMMASharedLayout(0, 32, rank=2)
    described = [descriptor(y[head * shifts :], [1, config.block_m], flat) for y in numbers]
    add_blocks = add and sums is not None and config.add_blocks and not tables.edge and fits(dk) and fits(dv)
    added = [_blocks_of(y, 64, 64) for y in (dk, dv)] if add_blocks else described
    kernel[(len(tables), q.shape[2] // group)](
        *(_blocks_of(q, config.block_m), _blocks_of(k, config.block_n // 2), _blocks_of(v, config.block_n // 2)),
        *(_blocks_of(dout, config.block_m), *described),
        *(sums.described(head) if sums else described[0], *added, dk, dv, tables.tiles, tables.spans),
        *(work, heads, sums.tiles if sums else 0),
        *(*_scales(x.features), *dk.stride()[:3], *dv.stride()[:3]),
        GROUP=group,
        SHARE=share,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        D=q.shape[3],
        STAGES=config.stages,
        SINGLE=tables.single,
        WHOLE=tables.whole,
        CLIPPED=tables.clipped,
        PEELED=tables.peels and not config.rotate,
        LOWER=tables.lower,
        UPPER=tables.upper,
        SOFTCAP=x.features.softcap > 0,
        EDGE=tables.edge,
        ADD=add,
        ADD_BLOCKS=add_blocks,
        QUERIES=sums is not None,
        TILED=sums is not None and sums.tiled,
        SHIFTED=shifts > 1,
        ROTATE=config.rotate if sums and tables.single else 0,
        AHEAD=config.ahead,
        COMPUTE_REGISTERS=config.compute_registers,
        COPY_REGISTERS=config.copy_registers,
        num_warps=4,
    )


def _seen_by_a_query(x: Inputs) -> float:
    """How many keys, on average."""
    return x.work.pairs / (x.work.mask.batch_rows or 1) / x.q_BTHD.shape[1]


def queries(x: Inputs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, grads: Grads,
            config: Queries, tables: Blocks) -> None:  # fmt: skip
    """DQ of the blocks."""
    from meshflash.kernels.hopper.backward_dq import queries as kernel

    dq = grads.dq_BTHD
    with torch.cuda.device_of(q):
        kernel[(len(tables), q.shape[2])](
            *(_blocks_of(q, config.rows), _blocks_of(k, config.block_n), _blocks_of(v, config.block_n)),
            *(_blocks_of(dout, config.rows), lse, delta, dq, tables.tiles, tables.spans),
            *(*_scales(x.features), *lse.stride(), *delta.stride(), *dq.stride()[:3]),
            GROUP=q.shape[2] // k.shape[2],
            ROWS=config.rows,
            BLOCK_N=config.block_n,
            D=q.shape[3],
            STAGES=config.stages,
            SINGLE=tables.single,
            WHOLE=tables.whole,
            LOWER=tables.lower,
            UPPER=tables.upper,
            SOFTCAP=x.features.softcap > 0,
            ADD=grads.add_dq,
            COMPUTE_REGISTERS=config.compute_registers,
            COPY_REGISTERS=config.copy_registers,
            num_warps=4,
        )


def _scales(features: Features) -> tuple[float, float, float]:
    """Of scores, of them in base 2, or of the cap, and inside of the cap."""
    scale, softcap = features.scale, features.softcap
    return (scale, softcap * LOG2E, scale / softcap) if softcap else (scale, scale * LOG2E, 0.0)


def _blocks_of(x_BTHD: Tensor, rows: int, columns: int | None = None) -> Any:
    """A tensor as a descriptor of blocks of rows of one head."""
    x_BHTD = x_BTHD.permute(0, 2, 1, 3)
    return descriptor(x_BHTD, [1, 1, rows, columns or x_BTHD.shape[3]])


def descriptor(x: Tensor, block: list[int], layout: Any = None) -> Any:
    """A tensor as a descriptor of blocks, in a layout of shared memory, or the one that products take."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    layout = layout or gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """Return a zeroed tile counter: one per stream, because launches of one stream do not overlap.

    The kernel leaves 0 behind. The host clears it all the same: after a launch that lost a tile, all later ones would
    skip most of theirs. It has 4 KiB of its own. A captured graph gets its own counter: it may run beside others.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _counters:
        _counters[key] = torch.empty(1024, dtype=torch.int32, device=device)
    return _counters[key].zero_()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
