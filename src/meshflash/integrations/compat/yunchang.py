"""Names of yunchang (long-context-attention, USP): modules that combine Ulysses and a ring.

`set_seq_parallel_pg` sets the Ulysses and ring degrees, `ring_impl_type` the positions that a rank holds.
`EXTRACT_FUNC_DICT` has the functions that extract them from a whole sequence.

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
from meshflash.runtime.state import state

#: By `ring_impl_type`: the schedule of the ring, and the layout over the ranks of the ring.
_RINGS = {
    "basic": ("ring", Layout.contiguous),
    "zigzag": ("zigzag", Layout.zigzag),
    "strip": ("striped", Layout.striped),
}
#: The same rings with other kernels.
_RINGS |= {f"basic_{kernel}": _RINGS["basic"] for kernel in ("pytorch", "flashinfer", "npu", "xpu")}
_RINGS["zigzag_npu"] = _RINGS["zigzag"]


class AttnType(Enum):
    """Kernels of yunchang. Exact ones all select meshflash's own choice; approximate ones are refused."""

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
        """Return the kernel of this name.

        Args:
            s: The value of a member, such as "fa3".

        >>> AttnType.from_string("fa3")
        <AttnType.FA3: 'fa3'>
        """
        if s not in {kernel.value for kernel in cls}:
            raise ValueError(f"attn_type={s!r}: expected one of {', '.join(kernel.value for kernel in cls)}")
        return cls(s)


@dataclass(frozen=True)
class _Degrees:
    """The Ulysses and ring degrees of a sequence. With `low`, neighbours form Ulysses groups, otherwise rings."""

    ulysses: int
    ring: int
    low: bool = True

    @property
    def world(self) -> int:
        """The number of ranks of one sequence."""
        return self.ulysses * self.ring

    def indices(self, rank: int) -> tuple[int, int]:
        """Return a rank's index in its ring, and in its Ulysses group."""
        if self.low:
            ring, ulysses = divmod(rank, self.ulysses)
        else:
            ulysses, ring = divmod(rank, self.ring)
        return ring, ulysses


@lru_cache(maxsize=256)
def _held(kind: str, tokens: int, degrees: _Degrees) -> Layout:
    """Return the layout: the tokens of each ring rank, split into equal consecutive parts over its Ulysses group.

    >>> _held("zigzag", 16, _Degrees(2, 2)).ranges
    ((range(0, 4),), (range(12, 16),), (range(4, 8),), (range(8, 12),))
    >>> _held("strip", 8, _Degrees(2, 2, low=False)).ranges
    ((range(0, 4, 2),), (range(1, 5, 2),), (range(4, 8, 2),), (range(5, 9, 2),))
    """
    ring_layout = _RINGS[kind][1](tokens, degrees.ring)
    each = tokens // degrees.world
    ranges = []
    for rank in range(degrees.world):
        ring, ulysses = degrees.indices(rank)
        ranges.append(_rows(ring_layout.ranges[ring], ulysses * each, (ulysses + 1) * each))
    return Layout(tuple(ranges))


def _rows(ranges: tuple[range, ...], first: int, last: int) -> tuple[range, ...]:
    """Return rows `first` to `last` of the concatenation of these ranges."""
    found, row = [], 0
    for r in ranges:
        found.append(r[max(0, first - row) : max(0, last - row)])
        row += len(r)
    return tuple(r for r in found if len(r))


def _config() -> tuple[_Degrees, Any] | None:
    """Return the degrees that `set_seq_parallel_pg` got, and the group of this rank's sequence (None: the default)."""
    found: tuple[_Degrees, Any] | None = state.find("yunchang")
    return found


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> None:
    """Set the degrees of sequence parallelism. Every rank calls it before it makes a module.

    Args:
        sp_ulysses_degree: The number of ranks that exchange heads for sequence.
        sp_ring_degree: The number of ranks of a ring.
        rank: This rank of the default process group.
        world_size: The size of the default process group. If it exceeds the product of the degrees, each block of that
            many consecutive ranks has a sequence of its own.
        use_ulysses_low: Whether neighbouring ranks form Ulysses groups; otherwise they form rings.

    >>> set_seq_parallel_pg(1, 1, rank=0, world_size=1)
    """
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
    state.put((degrees, group), "yunchang")


def _extract(kind: str, value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int) -> Tensor:
    config = _config()
    current = config[0] if config else _Degrees(ud, rd)
    if rd * ud != world_size or (rd, ud) != (current.ring, current.ulysses):
        raise ValueError(
            f"world_size={world_size}, rd={rd}, ud={ud}: expected rd * ud ranks, and the degrees that "
            f"set_seq_parallel_pg got: rd={current.ring}, ud={current.ulysses}"
        )
    tokens = value.shape[dim]
    if tokens % world_size:
        raise ValueError(
            f"value: {tokens} tokens do not divide by {world_size} ranks; pad it, or call meshflash.attention, which "
            "takes any length"
        )
    rows = torch.from_numpy(positions(_held(kind, tokens, current), rank))
    return value.index_select(dim, rows.to(value.device))


def basic_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int | None = None, ud: int | None = None, dim: int = 1
) -> Tensor:
    """Return a rank's contiguous tokens of a whole sequence, detached.

    Args:
        value: The whole sequence.
        rank: The number of the rank, from 0.
        world_size: The number of ranks of the sequence.
        rd: The ring degree; None means that of `set_seq_parallel_pg`.
        ud: The Ulysses degree; None means that of `set_seq_parallel_pg`.
        dim: The dimension of the tokens.

    >>> set_seq_parallel_pg(1, 1, rank=0, world_size=1)
    >>> basic_extract_local(torch.arange(3).view(1, 3), rank=0, world_size=1).tolist()
    [[0, 1, 2]]
    """
    config = _config()
    current = config[0] if config else _Degrees(world_size, 1)
    return _extract("basic", value, rank, world_size, rd or current.ring, ud or current.ulysses, dim).detach()


def zigzag_extract_local(value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1) -> Tensor:
    """Return a rank's tokens of a whole sequence for the zigzag ring.

    Args:
        value: The whole sequence.
        rank: The number of the rank, from 0.
        world_size: The number of ranks of the sequence.
        rd: The ring degree.
        ud: The Ulysses degree.
        dim: The dimension of the tokens.
    """
    return _extract("zigzag", value, rank, world_size, rd, ud, dim)


def stripe_extract_local(value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1) -> Tensor:
    """Return a rank's tokens of a whole sequence for the striped ring.

    Args:
        value: The whole sequence.
        rank: The number of the rank, from 0.
        world_size: The number of ranks of the sequence.
        rd: The ring degree.
        ud: The Ulysses degree.
        dim: The dimension of the tokens.
    """
    return _extract("strip", value, rank, world_size, rd, ud, dim)


_EXTRACT = {"ring": basic_extract_local, "zigzag": zigzag_extract_local, "striped": stripe_extract_local}
#: By `ring_impl_type`: the function `(value, rank, world_size, rd, ud)` that returns a rank's tokens.
EXTRACT_FUNC_DICT = {kind: _EXTRACT[schedule] for kind, (schedule, _) in _RINGS.items()}


def _check_exchange(scatter_idx: int, gather_idx: int, heads: int) -> None:
    """Raise ValueError unless heads, in dimension `heads`, are scattered and tokens gathered."""
    if (scatter_idx, gather_idx) != (heads, 1):
        raise ValueError(
            f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: expected {heads} and 1, the heads and the tokens of "
            f"[batch, tokens, {'3, ' if heads == 3 else ''}heads, dim]; transpose the tensors"
        )


class _Attention(SharesGroup, nn.Module):
    """Base class of the modules: attention over a group by a schedule."""

    _shared = ("group",)

    def __init__(self, group: Any, schedule: str, attn_type: Any) -> None:
        super().__init__()
        name = getattr(attn_type, "value", attn_type)
        if "sage" in AttnType.from_string(name).value:
            raise ValueError(
                f"attn_type={name!r}: it approximates attention, and meshflash is exact; leave attn_type out"
            )
        self.group, self.schedule = group, schedule

    def layout(self, tokens: int) -> Layout | None:
        """Return the layout of the sequence; None means the schedule's default.

        Args:
            tokens: The number of tokens on each rank.
        """
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, *args: Any,
    ) -> Any:  # fmt: skip
        """Return this rank's output; as in yunchang, `return_attn_probs` adds nothing to it."""
        if args:
            raise ValueError(f"{len(args)} surplus positional arguments: they would have no effect; leave them out")
        mask, layouts = mask_of(causal, window_size), [self.layout(x.shape[1]) for x in (query, key)]
        check_lengths(query, key, mask, alibi_slopes)
        return call(query, key, value, mask, self.schedule, layouts[0], dropout_p, softmax_scale, alibi_slopes,
                    deterministic, False, self.group, softcap, layouts[1])  # fmt: skip


class UlyssesAttention(_Attention):
    """Ulysses attention over all ranks of a group; each rank holds a contiguous chunk of the sequence.

    Args:
        sequence_process_group: The process group; None means the default group.
        scatter_idx: The dimension of the heads, 2.
        gather_idx: The dimension of the tokens, 1.
        use_sync: Has no effect.
        attn_type: Has no effect, except that approximate kernels are refused.

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
    """Ulysses within groups of ranks and a ring across them, with the degrees of `set_seq_parallel_pg`.

    Args:
        scatter_idx: The dimension of the heads, 2.
        gather_idx: The dimension of the tokens, 1.
        ring_impl_type: The ring, and so the positions that ranks hold. The kernel in its name has no effect.
        use_pack_qkv: Has no effect.
        use_sync: Has no effect.
        attn_type: Has no effect, except that approximate kernels are refused.
        attn_processor: Refused: it would replace the kernel.

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
        config = _config()
        if config is None:
            raise ValueError("call set_seq_parallel_pg first, on every rank: it sets the Ulysses and ring degrees")
        degrees, group = config
        ring = _RINGS[ring_impl_type][0]
        schedule = f"hybrid(inner={degrees.ulysses}, ring={ring}, transposed={not degrees.low})"
        super().__init__(group, schedule, attn_type)
        self.ring_impl_type, self.degrees = ring_impl_type, degrees

    @torch.compiler.disable  # torch.compile cannot trace the checks of a layout of strided ranges
    def layout(self, tokens: int) -> Layout | None:
        return _held(self.ring_impl_type, tokens * self.degrees.world, self.degrees)


class LongContextAttentionQKVPacked(nn.Module):
    """`LongContextAttention` for q, k and v in one tensor, `[batch, tokens, 3, heads, dim]`.

    Args:
        scatter_idx: The dimension of the heads, 3.
        gather_idx: The dimension of the tokens, 1.
        ring_impl_type: The ring, as in `LongContextAttention`.
        use_sync: Has no effect.
        attn_type: Has no effect, except that approximate kernels are refused.
    """

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
        """Return this rank's output.

        Args:
            qkv: The queries, keys and values of this rank.
            arguments: Further positional arguments of `LongContextAttention`, after the tensors.
            named: Further keyword arguments of `LongContextAttention`.
        """
        return self.attention(*qkv.unbind(-3), *arguments, **named)
