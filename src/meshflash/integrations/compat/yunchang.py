"""yunchang's names (long-context-attention, USP): modules that exchange heads for sequence and run a ring across.

`set_seq_parallel_pg` says how many ranks exchange and how many are a ring, `ring_impl_type` which positions a rank
holds; `EXTRACT_FUNC_DICT` has the functions that cut them from a whole sequence.

>>> from meshflash.integrations.compat.yunchang import LongContextAttention, set_seq_parallel_pg
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from meshflash.core.layout import Layout, positions
from meshflash.groups import SharesGroup, dist, group_of
from meshflash.integrations.compat.calls import Window, call, check_lengths, mask_of

#: By `ring_impl_type`: the schedule of the ring, and which positions each of its places holds.
_RINGS = {
    "basic": ("ring", Layout.contiguous),
    "zigzag": ("zigzag", Layout.zigzag),
    "strip": ("striped", Layout.striped),
}
#: The same with other kernels.
_RINGS |= {f"basic_{kernel}": _RINGS["basic"] for kernel in ("pytorch", "flashinfer", "npu", "xpu")}
_RINGS["zigzag_npu"] = _RINGS["zigzag"]


class AttnType(Enum):
    """yunchang's kernels. Those that compute attention are all the same here; those that approximate it are refused."""

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH = "torch"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"
    NPU = "npu"
    XPU = "xpu"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"

    @classmethod
    def from_string(cls, s: str) -> AttnType:
        """The kernel of this name.

        >>> AttnType.from_string("fa3")
        <AttnType.FA3: 'fa3'>
        """
        if s not in {kernel.value for kernel in cls}:
            raise ValueError(f"attn_type={s!r}: expected one of {', '.join(kernel.value for kernel in cls)}")
        return cls(s)


@dataclass(frozen=True)
class _Degrees:
    """The ranks of a sequence as a table: `ulysses` of them exchange heads, `ring` are a ring.

    With `low`, neighbours exchange; without, neighbours are a ring.
    """

    ulysses: int
    ring: int
    low: bool = True

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.ulysses * self.ring

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's place in its ring, and among those that it exchanges with."""
        if self.low:
            ring, ulysses = divmod(rank, self.ulysses)
        else:
            ulysses, ring = divmod(rank, self.ring)
        return ring, ulysses


@lru_cache(maxsize=256)
def _held(kind: str, tokens: int, degrees: _Degrees) -> Layout:
    """What each rank holds: what its place in the ring does, cut into as many equal runs as ranks exchange.

    >>> _held("zigzag", 16, _Degrees(2, 2)).ranges
    ((range(0, 4),), (range(12, 16),), (range(4, 8),), (range(8, 12),))
    >>> _held("strip", 8, _Degrees(2, 2, low=False)).ranges
    ((range(0, 4, 2),), (range(1, 5, 2),), (range(4, 8, 2),), (range(5, 9, 2),))
    """
    places = _RINGS[kind][1](tokens, degrees.ring)
    each = tokens // degrees.world
    ranges = []
    for rank in range(degrees.world):
        ring, ulysses = degrees.place(rank)
        ranges.append(_rows(places.ranges[ring], ulysses * each, (ulysses + 1) * each))
    return Layout(tuple(ranges))


def _rows(ranges: tuple[range, ...], first: int, last: int) -> tuple[range, ...]:
    """Some rows of what these ranges hold one after another."""
    found, row = [], 0
    for r in ranges:
        found.append(r[max(0, first - row) : max(0, last - row)])
        row += len(r)
    return tuple(r for r in found if len(r))


#: What `set_seq_parallel_pg` was told, and the group of this rank's sequence; None is the default group.
_told: tuple[_Degrees, Any] | None = None


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> None:
    """Say how the ranks of a sequence work together; every rank calls it, before any module is made.

    Where there are more ranks than one sequence takes, each run of so many has one of its own.

    >>> set_seq_parallel_pg(1, 1, rank=0, world_size=1)
    """
    global _told
    _, here, ranks = group_of(None)
    if (rank, world_size) != (here, ranks):
        raise ValueError(
            f"rank={rank}, world_size={world_size}: this is rank {here} of {ranks}; call "
            "torch.distributed.init_process_group first, and pass get_rank() and get_world_size()"
        )
    if sp_ulysses_degree < 1 or sp_ring_degree < 1 or world_size % (sp_ulysses_degree * sp_ring_degree):
        raise ValueError(
            f"sp_ulysses_degree={sp_ulysses_degree}, sp_ring_degree={sp_ring_degree}: expected degrees whose product "
            f"divides world_size={world_size}"
        )
    degrees = _Degrees(sp_ulysses_degree, sp_ring_degree, use_ulysses_low)
    group = None
    if degrees.world < world_size:
        firsts = range(0, world_size, degrees.world)
        groups = [dist.new_group(list(range(first, first + degrees.world))) for first in firsts]
        group = groups[rank // degrees.world]
    _told = degrees, group


def _extract(kind: str, value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int) -> Tensor:
    told = _told[0] if _told else _Degrees(ud, rd)
    if rd * ud != world_size or (rd, ud) != (told.ring, told.ulysses):
        raise ValueError(
            f"world_size={world_size}, rd={rd}, ud={ud}: expected rd * ud ranks, and the degrees that "
            f"set_seq_parallel_pg was told: rd={told.ring}, ud={told.ulysses}"
        )
    tokens = value.shape[dim]
    if tokens % world_size:
        raise ValueError(
            f"value: {tokens} tokens on {world_size} ranks; pad it, or call meshflash.attention, which takes any length"
        )
    rows = torch.from_numpy(positions(_held(kind, tokens, told), rank))
    return value.index_select(dim, rows.to(value.device))


def basic_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int | None = None, ud: int | None = None, dim: int = 1
) -> Tensor:
    """A rank's run of a whole sequence, without a gradient.

    >>> set_seq_parallel_pg(1, 1, rank=0, world_size=1)
    >>> basic_extract_local(torch.arange(3).view(1, 3), rank=0, world_size=1).tolist()
    [[0, 1, 2]]
    """
    told = _told[0] if _told else _Degrees(world_size, 1)
    return _extract("basic", value, rank, world_size, rd or told.ring, ud or told.ulysses, dim).detach()


def zigzag_extract_local(value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1) -> Tensor:
    """A rank's share of a piece from the front and one from the back."""
    return _extract("zigzag", value, rank, world_size, rd, ud, dim)


def stripe_extract_local(value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1) -> Tensor:
    """A rank's share of every rd-th token."""
    return _extract("strip", value, rank, world_size, rd, ud, dim)


_CUTS = {"ring": basic_extract_local, "zigzag": zigzag_extract_local, "striped": stripe_extract_local}
#: By `ring_impl_type`: the function `(value, rank, world_size, rd, ud)` that cuts what a rank holds.
EXTRACT_FUNC_DICT = {kind: _CUTS[schedule] for kind, (schedule, _) in _RINGS.items()}


def _check_exchange(scatter_idx: int, gather_idx: int, heads: int) -> None:
    """ValueError unless heads, in this dimension, are scattered and tokens gathered."""
    if (scatter_idx, gather_idx) != (heads, 1):
        raise ValueError(
            f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: expected {heads} and 1, the heads and the tokens of "
            f"[batch, tokens, {'3, ' if heads == 3 else ''}heads, dim]; transpose the tensors"
        )


class _Attention(SharesGroup, nn.Module):
    """What the modules share: attention over a group, by a schedule, of what each rank holds."""

    _shared = ("group",)

    def __init__(self, group: Any, schedule: str, attn_type: Any) -> None:
        super().__init__()
        name = getattr(attn_type, "value", attn_type)
        if "sage" in AttnType.from_string(name).value:
            raise ValueError(
                f"attn_type={name!r}: it approximates attention, and meshflash computes it; leave attn_type out"
            )
        self.group, self.schedule = group, schedule

    def layout(self, tokens: int) -> Layout | None:
        """Which positions ranks hold that have so many tokens each; None where the schedule is at home."""
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, *args: Any,
    ) -> Any:  # fmt: skip
        """This rank's output; as in yunchang, it alone comes back for `return_attn_probs` too."""
        if args:
            raise ValueError(f"{len(args)} arguments too many: they would have no effect; leave them out")
        mask, layouts = mask_of(causal, window_size), [self.layout(x.shape[1]) for x in (query, key)]
        check_lengths(query, key, mask, alibi_slopes)
        return call(query, key, value, mask, self.schedule, layouts[0], dropout_p, softmax_scale, alibi_slopes,
                    deterministic, False, self.group, softcap, layouts[1])  # fmt: skip


class UlyssesAttention(_Attention):
    """Heads for sequence between all ranks of a group, each of which holds a run of the sequence.

    `use_sync`, and the kernel that `attn_type` names, change no result and nothing here.

    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> UlyssesAttention()(q, k, v, causal=True).shape
    torch.Size([1, 5, 2, 8])
    """

    def __init__(
        self,
        sequence_process_group: Any = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: Any = AttnType.FA,
    ) -> None:
        _check_exchange(scatter_idx, gather_idx, 2)
        super().__init__(sequence_process_group, "ulysses", attn_type)


class LongContextAttention(_Attention):
    """Heads for sequence between some ranks and a ring across them, as `set_seq_parallel_pg` was told.

    `use_pack_qkv`, `use_sync`, and the kernel that `attn_type` or `ring_impl_type` names, change no result and nothing
    here. An `attn_processor` would, and is refused.

    >>> set_seq_parallel_pg(1, 1, rank=0, world_size=1)
    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> LongContextAttention(ring_impl_type="zigzag")(q, k, v, causal=True).shape
    torch.Size([1, 5, 2, 8])
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: Any = AttnType.FA,
        attn_processor: Any = None,
    ) -> None:
        _check_exchange(scatter_idx, gather_idx, 2)
        if ring_impl_type not in _RINGS:
            raise ValueError(f"ring_impl_type={ring_impl_type!r}: expected one of {', '.join(_RINGS)}")
        if attn_processor is not None:
            raise ValueError("attn_processor: it would replace the kernel, and meshflash has its own; leave it out")
        if _told is None:
            raise ValueError("call set_seq_parallel_pg first, on every rank: it says which ranks exchange heads")
        degrees, group = _told
        ring = _RINGS[ring_impl_type][0]
        schedule = f"hybrid(inner={degrees.ulysses}, ring={ring}, turned={not degrees.low})"
        super().__init__(group, schedule, attn_type)
        self.ring_impl_type, self.degrees = ring_impl_type, degrees

    @torch.compiler.disable  # compiled code cannot follow how a layout with steps is checked
    def layout(self, tokens: int) -> Layout | None:
        return _held(self.ring_impl_type, tokens * self.degrees.world, self.degrees)


class LongContextAttentionQKVPacked(nn.Module):
    """The same for queries, keys and values in one tensor, `[batch, tokens, 3, heads, dim]`."""

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: Any = AttnType.FA,
    ) -> None:
        super().__init__()
        _check_exchange(scatter_idx, gather_idx, 3)
        self.attention = LongContextAttention(ring_impl_type=ring_impl_type, attn_type=attn_type)

    def forward(self, qkv: Tensor, *arguments: Any, **named: Any) -> Any:
        """This rank's output; the other arguments are those of LongContextAttention."""
        return self.attention(*qkv.unbind(-3), *arguments, **named)
