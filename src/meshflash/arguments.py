"""Argument checks of the public calls, and the spec that checked arguments make.

Every error names the argument, its value and what to pass instead.
"""

from __future__ import annotations

import math
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from meshflash.comm.transports import choice as transports
from meshflash.core.layout import Layout
from meshflash.core.lengths import UNBOUNDED
from meshflash.core.mask import Mask
from meshflash.engine.compile import over_two_axes, saves_buffers
from meshflash.engine.op import PLAIN
from meshflash.engine.spec import AttentionSpec, CallTensors
from meshflash.kernels import registry
from meshflash.runtime.log import log
from meshflash.runtime.state import state

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Given(NamedTuple):
    """The arguments that `flash_attention` and `attention` share, as the caller gave them, without tensors."""

    mask: Mask | None
    scale: float | None
    softcap: float | None
    dropout: float
    q_offset: int
    batch_offset: int
    head_offset: int
    kernel: str
    deterministic: bool


#: Types of arguments that identify a call; others are refused or read when the call is checked.
_PLAIN_TYPES = frozenset((type(None), int, float, bool, str))
#: The same of arguments of a call over ranks: (group, rank, world size) is a tuple.
_PLAIN_TYPES_OVER_RANKS = _PLAIN_TYPES | {tuple, torch.dtype, Layout}


def call_key(
    q: Tensor, k: Tensor, v: Tensor, given: tuple[Any, ...], defaults: tuple[Any, ...], more: tuple[Any, ...] = ()
) -> Any:
    """Return a key under which a checked call of plain tensors is cached, or None for a call to check every time.

    Args:
        q: The queries.
        k: The keys.
        v: The values.
        given: The other arguments, in the order of `Given`.
        defaults: The objects that these have by default; most calls have no others, and need no longer key.
        more: Further arguments; only plain values and layouts identify a call.
    """
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN or torch.compiler.is_compiling():
        return None
    if forward_ad._current_level >= 0:
        return None
    mask = given[0]
    if mask is not None and not _is_readable(mask):
        return None
    settings: Any = None
    if more or not all(map(is_, given[1:], defaults)):
        types, more_types = tuple(map(type, given[1:])), tuple(map(type, more))
        if not (_PLAIN_TYPES.issuperset(types) and _PLAIN_TYPES_OVER_RANKS.issuperset(more_types)):
            return None
        if given[3]:  # with dropout, each call has a seed of its own
            return None
        settings = given, types, more, more_types  # True equals 1 and hashes alike, but is not a valid offset
    tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    return mask, settings, tensors, torch.are_deterministic_algorithms_enabled()


def _is_readable(mask: Any) -> bool:
    """Return whether a mask can be compared with others: its lengths, if they are tensors, are integers with values."""
    if not isinstance(mask, Mask):
        return False
    lengths = mask.pack()[1] if mask.has_documents else ()
    return not any(isinstance(x, Tensor) and (x.is_meta or x.is_floating_point()) for x in lengths)


def make_spec(
    given: Given, q: Tensor, k: Tensor, v: Tensor, sink_logits: Any, alibi_slopes: Any, seed: Any
) -> tuple[AttentionSpec, CallTensors, bool]:
    """Check arguments; return the spec of a call on one device, its tensors, and whether these were packed.

    Args:
        given: The arguments without tensors.
        q: The queries.
        k: The keys.
        v: The values.
        sink_logits: The sink logits, or None.
        alibi_slopes: The ALiBi slopes, or None.
        seed: The seed of the dropout, an integer or a tensor, or None.

    Raises:
        ValueError: an argument is wrong.
    """
    mask, scale, softcap, dropout, *_, deterministic = given
    _check_tensors(q, k, v)
    q, k, v = _autocast(q, k, v)
    _check_values(q, k, v, given)
    packed = q.ndim == 3
    if packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    heads, dim = q.shape[2:]
    _check_mask(mask)
    if sink_logits is not None:
        _check_per_head("sink_logits", sink_logits, q, [(heads,)])
        # A finite bound takes all weight just as +inf would, without inf - inf. -inf stays: it means no sink.
        sink_logits = sink_logits.clamp(max=min(LARGEST, torch.finfo(sink_logits.dtype).max))
    if alibi_slopes is not None:
        alibi_slopes = _slopes(alibi_slopes, q)
    seed = None if seed is None else _seed(seed, q)
    if dropout and seed is None:
        seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu")
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic={deterministic!r}: expected True or False")
    mask = Mask.full() if mask is None else mask
    for x in mask.pack()[1]:
        if isinstance(x, Tensor):
            _check_readable("mask", x, q)
            if x.is_floating_point():
                raise ValueError(f"mask: document lengths must be integers; got {x.dtype}")
    refuse_forward_mode("attention", q, k, v, sink_logits)
    spec = AttentionSpec(
        mask,
        # torch's CPU kernel fails for scales below LEAST
        dim**-0.5 if scale is None else float(scale) if abs(scale) >= LEAST else 0.0,
        0.0 if softcap is None else float(softcap),
        float(dropout),
        *given[4:8],
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    return spec, CallTensors(q, k, v, sink_logits, alibi_slopes, seed if dropout else None), packed


#: Argument names of other libraries, and what to write here instead.
_ELSEWHERE = {
    "causal": "mask=Mask.causal()",
    "is_causal": "mask=Mask.causal()",
    "attn_mask": "mask=, a meshflash.Mask",
    "window_size": "mask=Mask.window(left, right)",
    "cu_seqlens": "mask=Mask.from_cu_seqlens(cu_seqlens)",
    "dropout_p": "dropout=",
    "softmax_scale": "scale=",
    "group": "mesh=",
}


def refuse_unknown(function: str, unknown: dict[str, Any]) -> None:
    """Raise TypeError for unknown keyword arguments, with what to write instead where that is known."""
    for name in unknown:
        hint = f"; write {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


#: Bounds of `scale`, `softcap` and sink logits. Kernels multiply scores by log2(e) in float32: beyond these bounds
#: intermediate results become 0 or infinite.
LEAST, LARGEST = 1e-30, 1e30
#: Bound of ALiBi slopes: the product with a distance below 2**30 stays finite in float32.
LARGEST_SLOPE = 1e20


def check_reduce_dtype(reduce_dtype: Any) -> None:
    """Raise ValueError unless gradients can be reduced in this dtype."""
    if reduce_dtype is not None and reduce_dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ValueError(f"reduce_dtype={reduce_dtype!r}: expected one of the torch dtypes {names}, or None")


def _check_values(q: Tensor, k: Tensor, v: Tensor, given: Given) -> None:
    _, scale, softcap, dropout, *offsets, kernel, _ = given
    _check_shapes(q, k, v)
    _check_dtypes(q, k, v)
    if scale is not None and abs(_finite("scale", scale)) > LARGEST:
        raise ValueError(f"scale={scale}: float32 cannot compute with it; expected {-LARGEST:g} to {LARGEST:g}")
    if softcap is not None and _finite("softcap", softcap) <= 0:
        raise ValueError(f"softcap={softcap}: expected a number > 0, or None")
    if softcap is not None and not LEAST <= softcap <= LARGEST:
        raise ValueError(
            f"softcap={softcap}: float32 cannot compute with it; expected {LEAST:g} to {LARGEST:g}, or None for none"
        )
    if not 0.0 <= _finite("dropout", dropout) < 1.0:
        raise ValueError(f"dropout={dropout}: expected a probability, 0 <= dropout < 1")
    for name, value in zip(("q_offset", "batch_offset", "head_offset"), offsets, strict=True):
        _check_offset(name, value)
    if kernel not in registry.names():
        raise ValueError(f"kernel={kernel!r}: expected one of {', '.join(registry.names())}")


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) in PLAIN:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")
        if hasattr(x, "to_local"):
            raise ValueError(f"{name}: it is a DTensor; pass this rank's own tokens, {name}.to_local()")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the shapes fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != q.ndim or x.ndim not in (3, 4):
            raise ValueError(
                f"{name}: expected [batch, tokens, heads, dim], or packed [tokens, heads, dim], "
                f"the same for q, k and v; got {_shape(x)} beside q {_shape(q)}"
            )
    if q.ndim == 4 and not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"batch sizes differ: q {_shape(q)}, k {_shape(k)}, v {_shape(v)}")
    if k.shape[-3:-1] != v.shape[-3:-1]:
        raise ValueError(f"k and v must have the same tokens and heads; got k {_shape(k)}, v {_shape(v)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q and k must have the same dim, their last size; got {q.shape[-1]} in q {_shape(q)} and {k.shape[-1]} "
            f"in k {_shape(k)}"
        )
    for name, x in (("q", q), ("v", v)):
        if not x.shape[-1]:
            raise ValueError(f"{name} must have a dim of 1 or more; got {name} {_shape(x)}")
    if not k.shape[-2] or not q.shape[-2] or q.shape[-2] % k.shape[-2]:
        swapped = k.shape[-2] > 1 and _tokens_may_be_heads(q, k)
        raise ValueError(
            f"{k.shape[-2]} heads in k do not divide {q.shape[-2]} heads in q; "
            "each key head serves the same number of query heads" + (f". {_SWAP_HINT}" if swapped else "")
        )
    if k.shape[-2] > MOST_HEADS and k.shape[-2] > k.shape[-3] and _tokens_may_be_heads(q, k):
        raise _swapped(q, f"{q.shape[-2]} heads and {q.shape[-3]} tokens")
    if not torch.compiler.is_compiling() and _may_be_swapped(q, k):
        _warn_once(
            f"q {_shape(q)} and k {_shape(k)} have {q.shape[-2]} heads and only {q.shape[-3]} tokens. {_SWAP_HINT}; "
            "if the order is right, ignore this warning. It appears once"
        )


#: More key heads than any model has. A third size above this and above the second size is taken for tokens.
MOST_HEADS = 512
#: Up to this many heads, fewer tokens than heads are common (short prompts), and a warning would be a false alarm.
COMMON_HEADS = 32
_SWAP_HINT = (
    "Tokens come before heads here: for tensors [batch, heads, tokens, dim] pass x.transpose(1, 2), or call "
    "meshflash.integrations.sdpa.scaled_dot_product_attention"
)


def _swapped(q: Tensor, what: str) -> ValueError:
    return ValueError(f"q {_shape(q)}: {what}. {_SWAP_HINT}")


def _tokens_may_be_heads(q: Tensor, k: Tensor) -> bool:
    """Return whether the second sizes could be head counts: that of k divides that of q."""
    return k.shape[-3] > 0 and q.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0


def _may_be_swapped(q: Tensor, k: Tensor) -> bool:
    """Return whether tokens and heads may be swapped: equal heads in q and k, and many heads beside few tokens."""
    tokens, heads = q.shape[-3:-1]
    return heads > COMMON_HEADS and heads > tokens > 1 and heads == k.shape[-2] and _tokens_may_be_heads(q, k)


def _warn_once(message: str) -> None:
    if not state.find("warned of swapped axes"):
        state.put(True, "warned of swapped axes")
        log.warning(message)


def check_axes(
    q: Tensor, k: Tensor, mask: Mask | None, q_offset: int, layout: Any = None, rank: int = 0, world: int = 1
) -> None:
    """Raise ValueError if the layout's or the mask's token count is the third size of q `[batch, tokens, heads, dim]`.

    Such a call fails anyway, but with an error that does not mention the order of axes. Lengths are read only if there
    are more heads than tokens.
    """
    if torch.compiler.is_compiling() or q.shape[2] <= q.shape[1]:
        return
    tokens, heads = q.shape[1:3]
    if isinstance(layout, Layout):
        if layout.world == world and layout.lengths[rank] == heads:
            raise _swapped(q, f"q has {tokens} tokens, its layout gives rank {rank} {heads}, the third size of q")
    elif mask is not None:
        for total in mask.document_tokens():
            if total == world * heads and total > max(q_offset + world * tokens, world * k.shape[1]):
                ranks = f" over {world} ranks" if world > 1 else ""
                raise _swapped(q, f"the mask's documents have {total} tokens{ranks}, by the third size of q")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if q.is_meta or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    low = (torch.float16, torch.bfloat16, torch.float32)
    q, k, v = (x.to(dtype) if x.dtype in low else x for x in (q, k, v))
    return q, k, v


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ValueError(f"q, k and v must share one of the dtypes {names}; got q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got q {q.device}, k {k.device}, v {v.device}")


def _check_mask(mask: Any) -> None:
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(
            f"mask: expected a meshflash.Mask, such as Mask.causal(), or None for no mask; got {type(mask).__name__}. "
            "Masks are rules on positions, not matrices: combine Mask primitives with & and |"
        )


def _check_per_head(name: str, x: Any, q: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if not isinstance(x, Tensor) or tuple(x.shape) not in shapes or not x.is_floating_point():
        got = f"{x.dtype} {_shape(x)}" if isinstance(x, Tensor) else type(x).__name__
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: expected a floating-point tensor of shape {wanted}; got {got}")
    if x.device != q.device:
        raise ValueError(f"{name}: expected it on {q.device}, where q is; got {x.device}")


def _slopes(alibi_slopes: Tensor, q: Tensor) -> Tensor:
    batch, _, heads, _ = q.shape
    _check_per_head("alibi_slopes", alibi_slopes, q, [(heads,), (batch, heads)])
    if alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes: gradients of the slopes are not computed; pass alibi_slopes.detach()")
    largest = min(LARGEST_SLOPE, torch.finfo(alibi_slopes.dtype).max)  # inf * 0 would be NaN at distance 0
    return alibi_slopes.clamp(-largest, largest).expand(batch, heads)


def _seed(seed: int | Tensor, q: Tensor) -> Tensor:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed: expected an int, or an int64 tensor of one element; got {seed.dtype} {_shape(seed)}"
            )
        _check_readable("seed", seed, q)
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}: expected an int, or an int64 tensor of one element")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: expected 0 <= seed < 2**63")
    return torch.tensor(seed, dtype=torch.int64, device="cpu")


def _check_offset(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: expected an integer")
    if value < 0 or value >= UNBOUNDED:
        raise ValueError(f"{name}={value}: expected a number >= 0 and below {UNBOUNDED}")


def _check_readable(name: str, x: Tensor, q: Tensor) -> None:
    if x.device.type == "meta" and q.device.type != "meta":
        raise ValueError(f"{name}: its tensor is on the meta device and has no values; q is on {q.device}")


def refuse_forward_mode(name: str, *tensors: Tensor | None) -> None:
    """Raise ValueError for inputs with forward-mode tangents, which a custom op would drop silently."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ValueError(f"{name} has no forward-mode derivative; use reverse mode")


def _finite(name: str, value: Any) -> float:
    try:
        if not isinstance(value, Tensor | str | bool) and math.isfinite(value):
            return float(value)
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"{name}={value!r}: expected a finite number")


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


#: The `k_layout` of keys that every rank holds already.
GATHERED = "gathered"


def spread_spec(
    spec: AttentionSpec,
    x: CallTensors,
    place: tuple[str, int, int],
    layout: Any,
    k_layout: Any,
    schedule: str,
    reduce_dtype: torch.dtype | None,
    transport: str,
    inner: int,
    needs_lse: bool,
) -> AttentionSpec:
    """Check the arguments of a call over ranks, and return the spec of a single device with these added.

    Args:
        spec: The spec of a call on one device.
        x: The tensors of the call.
        place: The name of the group, this rank, and the number of ranks.
        layout: The layout of the queries, or None.
        k_layout: The layout of the keys, GATHERED, or None.
        schedule: The schedule.
        reduce_dtype: The dtype in which gradients are reduced, or None.
        transport: The transport.
        inner: The size of the inner axis of a mesh of two axes, or 0.
        needs_lse: Whether the LSE is read.
    """
    group, rank, world = place
    for name, given in (("layout", layout), ("k_layout", k_layout)):
        if given is not None and not isinstance(given, Layout) and (name, given) != ("k_layout", GATHERED):
            other = f", or {GATHERED!r}" if name == "k_layout" else ""
            raise ValueError(
                f"{name}: expected a meshflash.Layout, such as Layout.zigzag(tokens, world){other}; got {given!r}"
            )
    check_reduce_dtype(reduce_dtype)
    transports.check(transport)
    if isinstance(k_layout, str):
        for name, value in (("schedule", schedule), ("transport", transport), ("reduce_dtype", reduce_dtype)):
            if value not in ("auto", None):
                raise ValueError(f"{name}={value!r}: where k_layout is {GATHERED!r} nothing moves; leave {name} out")
        layout = layout or Layout.contiguous(world * x.q.shape[1], world)
        if layout.world != world:
            raise ValueError(f"layout: it is for {layout.world} ranks, the group has {world}")
        return spec._replace(layout=layout, gathered_rank=rank)
    if not isinstance(schedule, str):
        raise ValueError(f"schedule={schedule!r}: expected a name, or name(option=value)")
    if inner:
        schedule = over_two_axes(schedule, inner)
    if layout is not None and k_layout is None:
        if x.k.shape[1] != x.q.shape[1]:
            raise ValueError(
                f"k has {x.k.shape[1]} tokens, q has {x.q.shape[1]}: give the keys a layout of their own with k_layout"
            )
        k_layout = layout
    if not saves_buffers(schedule):
        needs_lse = True  # these schedules always produce the LSE, and ranks may differ in whether they return it
    return spec._replace(
        group=group if world > 1 else "",
        schedule=schedule,
        layout=layout,
        k_layout=k_layout,
        reduce_dtype="" if reduce_dtype is None else str(reduce_dtype).removeprefix("torch."),
        transport=transport,
        needs_lse=needs_lse,
        will_backward=world > 1 and records(*x[:4]),
    )


def records(*tensors: Tensor | None) -> bool:
    """Return whether autograd records a call on these tensors.

    Args:
        tensors: The tensors that may require a gradient.
    """
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
