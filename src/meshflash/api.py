"""The public calls: `attention` over the ranks of a group, and `flash_attention` on one device.

They check arguments and hand over to `engine`. Nothing is computed here.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from meshflash.arguments import GATHERED, Given, call_key, check_axes, make_spec, records, refuse_unknown, spread_spec
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.engine.explain import attend_and_explain
from meshflash.engine.group_context import group_context
from meshflash.engine.op import attend, contiguous, repeat, unpacked
from meshflash.engine.spec import CallTensors
from meshflash.groups import group_of, inner_of


class FlashFeatures(TypedDict, total=False):
    """The keyword arguments of `flash_attention` that torch's `scaled_dot_product_attention` does not have."""

    softcap: float | None
    sink_logits: Tensor | None
    alibi_slopes: Tensor | None
    seed: int | Tensor | None
    q_offset: int
    batch_offset: int
    head_offset: int
    kernel: str
    deterministic: bool


class FlashOptions(FlashFeatures, total=False):
    """All keyword arguments of `flash_attention`, for type checkers."""

    mask: Mask | None
    scale: float | None
    dropout: float


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[FlashOptions]
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[FlashOptions]
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    q_offset: int = 0,
    batch_offset: int = 0,
    head_offset: int = 0,
    kernel: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention on one device, in memory linear in the number of tokens.

    Args:
        q: The queries, `[batch, tokens, heads, dim]`, or packed as `[tokens, heads, dim]`.
        k: The keys, `[batch, key_tokens, kv_heads, dim]`. `kv_heads` must divide `heads` (GQA, MQA).
        v: The values, `[batch, key_tokens, kv_heads, value_dim]`. `value_dim` may differ from `dim`.
        mask: The keys that each query may attend to. None means all keys. Use `Mask.documents(lengths)` for packed
            sequences.
        scale: The factor that multiplies all scores. None means `dim ** -0.5`.
        softcap: The bound of the scores: each score becomes `softcap * tanh(score / softcap)`. None applies no bound.
        sink_logits: One extra learned logit per head, `[heads]`, that joins each softmax and carries no value. -inf
            switches it off. A logit of 1e30 or more takes all weight, and the LSE is then 1e30.
        alibi_slopes: The ALiBi slopes, `[heads]` or `[batch, heads]`: each score is reduced by `slope * |i - j|`.
            Slopes get no gradient and are clamped to +-1e20.
        dropout: The probability of dropping a (query, key) pair. Dropped pairs depend on positions alone, so all
            kernels drop the same pairs.
        seed: The seed of the dropout. None draws one from torch's default generator.
        q_offset: The position of the first query. 0 aligns the first query with the first key;
            `key_tokens - tokens` aligns the last query with the last key, as in decoding.
        batch_offset: The global index of the first batch row. Dropout uses it when the batch is split over devices.
        head_offset: The global index of the first query head. Dropout uses it when heads are split over devices.
        kernel: The kernel to run. "auto" takes the fastest one that supports the call; a name forces that kernel.
        deterministic: Whether equal inputs must give equal bits. On CPUs every kernel is deterministic.
        return_lse: Whether to also return the log-sum-exp of each row's scores, `[batch, heads, tokens]`, or
            `[heads, tokens]` for packed inputs. Its dtype is float32, or float64 for float64 inputs. Gradients flow
            through it.
        unknown: Any other argument raises TypeError. The message gives the meshflash name of arguments that other
            libraries call differently.

    Returns:
        The output, `[batch, tokens, heads, value_dim]`, or `(out, lse)` with `return_lse`.

    A row that sees no key is 0, has an LSE of -inf (or its sink logit) and gradients of 0. Autograd works in reverse
    mode and once: there is no forward mode, no second derivative and no `torch.func` transform.

    >>> import torch
    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> flash_attention(q, k, v, mask=Mask.causal()).shape
    torch.Size([1, 5, 2, 8])
    """
    if unknown:
        refuse_unknown("flash_attention", unknown)
    given = mask, scale, softcap, dropout, q_offset, batch_offset, head_offset, kernel, deterministic
    key = None
    if sink_logits is None and alibi_slopes is None and seed is None:
        key = call_key(q, k, v, given, _DEFAULTS)
        if key is not None and (results := repeat(key, CallTensors(q, k, v), return_lse)) is not None:
            return results if return_lse else results[0]
    spec, x, packed = make_spec(Given(*given), q, k, v, sink_logits, alibi_slopes, seed)
    check_axes(x.q, x.k, mask, q_offset)
    out, lse = attend(spec, x, return_lse, key if _has_dtypes(x, q, k, v) else None)
    if packed:
        out, lse = unpacked(out, lse)
    return (out, lse) if return_lse else out


_DEFAULTS = tuple((flash_attention.__kwdefaults__ or {})[name] for name in Given._fields[1:])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Any = None,
    layout: Layout | None = None,
    k_layout: Layout | Literal["gathered"] | None = None,
    schedule: str = "auto",
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    q_offset: int = 0,
    batch_offset: int = 0,
    head_offset: int = 0,
    kernel: str = "auto",
    reduce_dtype: torch.dtype | None = None,
    transport: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
    return_plan: bool = False,
    verify: bool = False,
    **unknown: Any,
) -> Any:
    """Compute exact attention over a sequence that is sharded across the ranks of a group.

    Every rank calls it with its own tokens of q, k and v, and gets its own tokens of the output and of every
    gradient. `shard` and `unshard` split a sequence and put it together again. On one rank it runs on this device.

    Args:
        q: This rank's queries, `[batch, tokens, heads, dim]`, or packed as `[tokens, heads, dim]`.
        k: This rank's keys, `[batch, key_tokens, kv_heads, dim]`. `kv_heads` must divide `heads` (GQA, MQA).
        v: This rank's values, `[batch, key_tokens, kv_heads, value_dim]`. `value_dim` may differ from `dim`.
        mesh: The ranks that share the sequence: a process group, or a DeviceMesh. None means the default group. A
            group of one rank, or a process that no launcher started as one of several ranks, runs `flash_attention`.
            A launched rank without a process group is refused. The second dimension of a two-dimensional DeviceMesh
            is the inner axis of "hybrid" or "double_ring".
        layout: The positions that each rank holds. None means the default layout of the schedule for shards of equal
            length: zigzag for zigzag, ringx3 and ringx4, striped for striped, contiguous for all others.
        k_layout: The layout of the keys where it differs from that of the queries (cross-attention). None means
            `layout`. "gathered" means that every rank holds all keys and values, in order, as `unshard` returns them:
            layers that attend to the same keys then gather them once and reduce their gradients once.
        schedule: The parallel algorithm: "ring", "zigzag", "striped", "allgather", "ringx1" to "ringx4", "ulysses",
            "hybrid", "double_ring", or a registered name. Options stand in brackets, as in
            "allgather(head_stride=2)" or "hybrid(inner=4, ring=zigzag)". "auto" gathers while the keys and values of
            the whole sequence take at most 64 MiB and uses a ring beyond. Where a ring would give ranks unequal work,
            as a causal mask does on contiguous shards, it uses "ulysses" if the number of ranks divides the KV heads.
            It never changes the layout.
        mask: The keys that each query may attend to, by positions in the whole sequence. All ranks must pass the same
            mask. None means all keys.
        scale: The factor that multiplies all scores. None means `dim ** -0.5`.
        softcap: The bound of the scores: each score becomes `softcap * tanh(score / softcap)`. None applies no bound.
        sink_logits: One extra learned logit per head, `[heads]`, that joins each softmax and carries no value. Its
            gradient covers this rank's tokens: sum it over the ranks, as for any replicated weight.
        alibi_slopes: The ALiBi slopes, `[heads]` or `[batch, heads]`: each score is reduced by `slope * |i - j|`.
            Slopes get no gradient and are clamped to +-1e20.
        dropout: The probability of dropping a (query, key) pair. Dropped pairs depend on positions alone, so they are
            the same for any number of ranks, layout and schedule.
        seed: The seed of the dropout. On more than one rank it is required, and equal on all ranks.
        q_offset: The position of the sequence's first query, whichever rank holds it.
        batch_offset: The global index of the first batch row. Dropout uses it when the batch is split over devices.
        head_offset: The global index of the first query head. Dropout uses it when heads are split over devices.
        kernel: The kernel that runs on each device. "auto" takes the fastest one that supports the call.
        reduce_dtype: The dtype in which gradients of k and v travel and are reduced. None means float32, or float64
            for float64 inputs.
        transport: The way bytes move. "process_group" uses the group's backend for the device, "symmetric" pulls from
            the memory of peers on the same host, "host_staged" goes through host memory and the group's CPU backend.
            "auto" takes the first that works here. "throttled(auto, 50, 10)" emulates links of 50 GB/s and 10 us.
        deterministic: Whether equal inputs on equal ranks must give equal bits.
        return_lse: Whether to also return the log-sum-exp of each row's scores. "ulysses" and "hybrid" must send it
            between ranks, so there either all ranks ask for it or none.
        return_plan: Whether to also return what ran: schedule, layout, transport, kernels, bytes and the program.
        verify: Whether to check 16 of this rank's rows against a plain implementation over all ranks' keys. If any
            rank's inputs hold NaN or infinity, all ranks raise ValueError.
        unknown: Any other argument raises TypeError. The message gives the meshflash name of arguments that other
            libraries call differently.

    Returns:
        This rank's tokens of the output, `[batch, tokens, heads, value_dim]`. With `return_lse` and `return_plan` a
        tuple: the output, then the LSE, then the plan.

    >>> import torch
    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> attention(q, k, v, mask=Mask.causal()).shape
    torch.Size([1, 5, 2, 8])
    """
    if unknown:
        refuse_unknown("attention", unknown)
    place = group, rank, world = group_of(mesh)
    given = mask, scale, softcap, dropout, q_offset, batch_offset, head_offset, kernel, deterministic
    needs_lse = return_lse or verify or sink_logits is not None
    over_ranks = layout, k_layout, schedule, reduce_dtype, transport, inner_of(mesh), needs_lse
    key = None
    if sink_logits is None and alibi_slopes is None and seed is None and not (verify or return_plan):
        key = call_key(q, k, v, given, _DEFAULTS, (place, *over_ranks, records(q, k, v)))
        if key is not None and (results := repeat(key, CallTensors(q, k, v), return_lse)) is not None:
            return results if return_lse else results[0]
    try:
        spec, x, packed = make_spec(Given(*given), q, k, v, sink_logits, alibi_slopes, seed)
        check_axes(x.q, x.k, mask, q_offset, layout, rank, world)
        if dropout and seed is None and world > 1:
            raise ValueError(
                "seed: give the same seed on all ranks, so that they drop the same pairs; None draws its own"
            )
        spec = spread_spec(spec, x, place, *over_ranks)
        if spec.gathered_rank >= 0 and (return_plan or verify):
            raise ValueError(
                f"return_plan, verify: not supported with k_layout={GATHERED!r}, which moves nothing; drop them"
            )
    except ValueError as error:
        if world > 1 and not torch.compiler.is_compiling():
            group_context(group).broadcast_error(error)  # the other ranks raise now instead of waiting for this one
        raise
    x = contiguous(spec, x)
    if verify or return_plan:
        out, lse, explanation = attend_and_explain(spec, x, return_plan, verify)
    else:
        out, lse = attend(spec, x, return_lse, key if _has_dtypes(x, q, k, v) else None)
    if packed:
        out, lse = unpacked(out, lse)
    extras: tuple[Any, ...] = (lse,) if return_lse else ()
    if return_plan:
        extras += (explanation,)
    return (out, *extras) if extras else out


def _has_dtypes(x: CallTensors, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether autocast left the dtypes as they are; a call without autocast must not find what it changed."""
    return (x.q.dtype, x.k.dtype, x.v.dtype) == (q.dtype, k.dtype, v.dtype)
