"""The public calls: exact attention over all ranks, or on one device. They compute nothing themselves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from meshflash.arguments import check_axes, op_arguments, refuse_unknown
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.engine.check import check_rows
from meshflash.engine.explain import explain
from meshflash.engine.fast_path import key_of, lookup, store
from meshflash.engine.group_context import group_context
from meshflash.engine.op import GATHERED, PLAIN, CallContext, attend, is_gathered
from meshflash.groups import group_of, inner_of
from meshflash.kernels import registry
from meshflash.planning import asked_for, resolve


class FlashFeatures(TypedDict, total=False):
    """What `flash_attention` takes by name beyond what torch's own function has."""

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
    """All that `flash_attention` takes by name, for type checkers."""

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
    """Exact attention on one device, in memory linear in the number of tokens.

    Args:
        q: queries, `[batch, tokens, heads, dim]`, or packed `[tokens, heads, dim]`.
        k: keys, `[batch, key_tokens, kv_heads, dim]`; `kv_heads` divides `heads` (GQA, MQA).
        v: values, `[batch, key_tokens, kv_heads, value_dim]`.
        mask: which keys a query sees; None means all. Packed sequences are `Mask.documents(lengths)`.
        scale: what scores are multiplied by; `dim ** -0.5` by default.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sink_logits: `[heads]`, one more logit in each softmax that carries no value; learned. -inf is none; from 1e30
            on it takes all weight, and the LSE is 1e30.
        alibi_slopes: `[heads]` or `[batch, heads]`; scores lose `slope * |i - j|`. Not learned; taken as within 1e20.
        dropout: the probability with which a pair is dropped, by position: the same pairs in any kernel.
        seed: of the dropout; drawn from torch's default generator where None.
        q_offset: the position of the first query. 0 aligns the first query with the first key,
            `key_tokens - tokens` the last with the last, as in decoding.
        batch_offset: the global number of the first batch row, and
        head_offset: that of the first head: dropout goes by them where batch or heads are split over devices.
        kernel: "auto" takes the fastest that can do all that is asked; a name forces one.
        deterministic: the same inputs give the same bits. On CPUs every kernel does.
        return_lse: also return the log-sum-exp of each row's scores, `[batch, heads, tokens]`
            (`[heads, tokens]` packed); float32, or float64 for float64. Gradients flow through it.
        unknown: anything else raises TypeError, with the name that it has here where others call it otherwise.

    Rows that see no key are 0, with an LSE of -inf (or the sink logit) and gradients of 0. Reverse-mode
    autograd only, and once: no forward mode, no second derivatives, no `torch.func` transforms.

    >>> import torch
    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> flash_attention(q, k, v, mask=Mask.causal()).shape
    torch.Size([1, 5, 2, 8])
    """
    if unknown:
        refuse_unknown("flash_attention", unknown)
    key = None
    if type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN and not torch.compiler.is_compiling():
        key = key_of(q, k, v, mask, scale, softcap, sink_logits, alibi_slopes, dropout, seed, q_offset, batch_offset,
                     head_offset, kernel, deterministic)  # fmt: skip
        if key is not None and (made := lookup(key, q, k, v)) is not None:
            return made if return_lse else made[0]
    arguments, packed = op_arguments(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        alibi_slopes=alibi_slopes,
        dropout=dropout,
        seed=seed,
        q_offset=q_offset,
        batch_offset=batch_offset,
        head_offset=head_offset,
        kernel=kernel,
        deterministic=deterministic,
    )
    check_axes(arguments.q, arguments.k, mask, q_offset)
    out, lse = attend(arguments)
    if key is not None:
        store(key, arguments)
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


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
    """Exact attention over a sequence that is spread over the ranks of a group; on one rank, over this device.

    Every rank calls it with its own tokens of q, k and v and gets its own tokens of the result, and of
    every gradient. `shard` and `unshard` spread a sequence and bring it together.

    Args:
        q: this rank's queries, `[batch, tokens, heads, dim]`, or packed `[tokens, heads, dim]`.
        k: this rank's keys, and
        v: its values.
        mesh: a process group, or a DeviceMesh; the default group where None. In a process that no launcher
            started as one of several ranks, or over a group of one rank, this is `flash_attention`; a launched rank
            without a process group is refused. Of a DeviceMesh of two dimensions, the second is the inner
            axis of "hybrid" or "double_ring".
        layout: which positions each rank holds. Where None, the home layout of the schedule for shards of
            equal length: zigzag for zigzag, ringx3 and ringx4, striped for striped, contiguous for others.
        k_layout: that of the keys, where it is another one (cross-attention). "gathered" where k and v are the whole
            sequence's on every rank, in order, as `unshard` makes them: keys that several layers attend to are
            gathered once, and their gradients are summed once.
        schedule: how ranks work together: "ring", "zigzag", "striped", "allgather", "ringx1" to "ringx4", "ulysses",
            "hybrid", "double_ring", or a name that was registered; options in brackets, as in
            "allgather(head_stride=2)" or "hybrid(inner=4, ring=zigzag)". "auto" gathers while the keys and values
            of the whole sequence take at most 64 MiB, and passes them round beyond; it never changes the layout.
        mask: over positions of the whole sequence, the same on all ranks.
        scale: as in `flash_attention`, like
        softcap: this, and
        alibi_slopes: these, and
        dropout: this; the pairs that are dropped do not depend on how the sequence is spread.
        seed: of the dropout; on more than one rank it must be given, the same on all.
        q_offset: the position of the sequence's first query, on whichever rank.
        batch_offset: as in `flash_attention`, like
        head_offset: this.
        kernel: which runs on each device.
        sink_logits: its gradient is the share of this rank's tokens, to be summed over ranks like that of
            any weight.
        reduce_dtype: what gradients of k and v travel and are summed in on their way; float32 by default
            (float64 for float64).
        transport: how bytes move: "process_group" by the group's backend for the device, "symmetric" by pulling from
            the memory of peers on the same host, "host_staged" through the host's memory by the group's backend for
            CPUs; "auto" takes the first that can. "throttled(auto, 50, 10)" moves as if over links of 50 GB/s and
            10 us, to measure by.
        deterministic: the same inputs on the same ranks give the same bits.
        return_lse: also return the log-sum-exp of each row. In "ulysses" and "hybrid" it has to travel for that: all
            ranks ask for it there, or none.
        return_plan: also return what ran: schedule, layout, transport, kernels, bytes, and the program.
        verify: check 16 of this rank's rows against plainly written attention over all ranks' keys. Where inputs of a
            rank hold NaN or infinity, all ranks raise ValueError.
        unknown: anything else raises TypeError, with the name that it has here where others call it otherwise.

    >>> import torch
    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> attention(q, k, v, mask=Mask.causal()).shape
    torch.Size([1, 5, 2, 8])
    """
    if unknown:
        refuse_unknown("attention", unknown)
    group, rank, world = group_of(mesh)
    try:
        arguments, packed = op_arguments(
            q,
            k,
            v,
            mask=mask,
            scale=scale,
            softcap=softcap,
            sink_logits=sink_logits,
            alibi_slopes=alibi_slopes,
            dropout=dropout,
            seed=seed,
            q_offset=q_offset,
            batch_offset=batch_offset,
            head_offset=head_offset,
            kernel=kernel,
            deterministic=deterministic,
        )
        check_axes(arguments.q, arguments.k, mask, q_offset, layout, rank, world)
        if dropout and seed is None and world > 1:
            raise ValueError(
                "seed: give the same seed on all ranks, so that they drop the same pairs; None draws its own"
            )
        shards = layout, k_layout, rank, world
        lse_at_home = return_lse or verify or sink_logits is not None
        asked = asked_for(
            arguments.q, arguments.k, schedule, *shards, reduce_dtype, inner_of(mesh), transport, lse_at_home
        )
        gathered = is_gathered(asked)
        if gathered and (return_plan or verify):
            raise ValueError(f"return_plan, verify: not where k_layout is {GATHERED!r}, for nothing moves")
    except ValueError as error:
        if world > 1 and not torch.compiler.is_compiling():
            group_context(group).broadcast_error(error)  # so that the others need not wait for this rank
        raise
    q, k, v = arguments.q, arguments.k, arguments.v
    if world > 1 and not gathered:
        arguments = arguments._replace(q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), group=group)
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:4])
    arguments = arguments._replace(asked=asked, will_backward=recorded)
    if verify or return_plan:
        here = group_context(group) if world > 1 else None
        with here.in_use() if here else nullcontext():  # a call of another thread would leave its plan in place of ours
            with registry.record_kernels() if return_plan else nullcontext(registry.KernelLog()) as ran:
                out, lse = attend(arguments)
            plan = here.last.plan if here else resolve(asked, q.shape[1], k.shape[1], 0, q_offset, 1)
            if verify:
                if here:
                    # a rank that does not verify would be waited for in vain
                    here.agree({"verify": True}, "It may not verify: pass verify=True on all ranks, or on none. ")
                read = CallContext(*arguments)
                check_rows(plan, here and here.group, rank, read.mask, read.features, q, k, v, out, lse)
            explanation = explain(plan, plan.reason, here, ran)
    else:
        out, lse = attend(arguments)
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    extras: tuple[Any, ...] = (lse,) if return_lse else ()
    if return_plan:
        extras += (explanation,)
    return (out, *extras) if extras else out
