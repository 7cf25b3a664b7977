"""Compile a spec for its shapes: choose schedule and layouts, build programs, choose kernels, and agree with all ranks.

The only module of the engine that knows that schedules have names; the rest runs programs.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import meshflash
from meshflash.comm.streams import capturing
from meshflash.core.layout import Layout, busiest_load
from meshflash.core.mask import Mask
from meshflash.engine.cache import cache
from meshflash.engine.executable import Executable, LocalExecutable, MeshExecutable, Plan
from meshflash.engine.group_context import GroupContext, checks_always, group_context
from meshflash.engine.placement import Setting
from meshflash.engine.spec import AttentionSpec, CallTensors
from meshflash.kernels.contract import accumulator_dtype
from meshflash.kernels.registry import on_forget
from meshflash.kernels.triton import configs
from meshflash.schedules import registry as schedules

#: "auto" all-gathers while the keys and values of the whole sequence take at most this many bytes on each rank.
GATHER_BYTES = 64 * 2**20
#: "auto" does not take a ring under which the busiest rank has more than this much of the mean work.
RING_LOAD = 1.25


def compile_spec(spec: AttentionSpec, x: CallTensors) -> Executable:
    """Return the executable of a call: from the cache if an equal call was compiled before, else a new one.

    Over a process group all ranks call it, in the same order. They compare a new call on the host before it runs, and
    every call with MESHFLASH_CHECK=always.

    Args:
        spec: The call without its tensors.
        x: The tensors. Their shapes, dtype and device matter, and which optional ones are given.

    Raises:
        ValueError: A layout does not fit the tensors or the group, or the named kernel does not support the call.
        DisagreementError: The ranks made different calls.
        RuntimeError: A CUDA graph is being captured, and ranks have not agreed on this call before.
    """
    context = group_context(spec.group) if spec.group else None
    # kernels are compiled for the dtypes of all tensors
    dtypes = tuple(None if y is None else y.dtype for y in (x.q, *x[3:]))
    key = spec, x.q.shape, x.k.shape, x.v.shape, dtypes, x.q.device
    found: Executable | None = cache.get(key, context)
    if context is None:
        if found is None:
            found = _compile_local(spec, x)
            cache.put(key, found)
        return found
    context.check_not_poisoned()
    if found is None or checks_always():
        with context.in_use():
            found = _compile_over_ranks(spec, x, context, found)
            cache.put(key, found, context)
    return found


def prepare(mask: Mask, layout: Layout | None = None) -> int:
    """Build the programs and tables of the next batch, before it is there; return the number of calls prepared.

    With packed documents every batch has a mask of its own. The first `attention` with a new mask builds this rank's
    programs and tables of tiles. `prepare` builds them ahead, for every call over ranks that this process has made, as
    if it were made again with this mask. All layers share them. Calls that the mask or the layout does not fit, such as
    cross-attention over other keys, are left out. It sends nothing, so ranks need not call it alike, and it may run in
    the thread that loads the next batch.

    Args:
        mask: The mask of the next batch. A model with several masks prepares each of them.
        layout: The layout of the next batch, where it has one of its own. None means that of the calls so far.

    Raises:
        ValueError: No call fits: the documents of the mask do not add up to its tokens, or the layout is for another
            number of ranks.

    >>> prepare(Mask.causal() & Mask.documents([3, 5]))  # no call over ranks was made yet
    0
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"prepare(mask={mask!r}): expected a Mask, such as Mask.causal() & Mask.documents(lengths)")
    if not (layout is None or isinstance(layout, Layout)):
        raise ValueError(f"prepare(layout={layout!r}): expected a Layout, or None for that of the calls so far")
    mask = mask.canonical()
    made: dict[Any, tuple[MeshExecutable, Plan]] = {}
    misfits = []
    for found in cache.entries():
        if not isinstance(found, MeshExecutable) or not found.may_recur():
            continue
        try:
            plan = found.plan_for(mask, layout)
        except ValueError as error:
            misfits.append(error)
            continue
        # A process may have another rank in another group, and layers may differ in features that read positions.
        heads = found.problem.heads, found.problem.kv_heads
        made[plan, *heads, found.rank, found.setting, found.exact_positions] = found, plan
    if misfits and not made:
        raise misfits[0]
    for found, plan in made.values():
        found.prepare(plan, mask)
    return len(made)


def _compile_local(spec: AttentionSpec, x: CallTensors) -> LocalExecutable:
    plan = None
    if spec.gathered_rank < 0:
        plan = make_plan(spec, x.q.shape[1], x.k.shape[1], 0, 1, 1)  # raises where a layout does not fit one device
    return LocalExecutable(spec, x, plan)


def _compile_over_ranks(
    spec: AttentionSpec, x: CallTensors, context: GroupContext, found: Executable | None
) -> MeshExecutable:
    """Compile a call, and compare it with the calls of all other ranks."""
    if capturing(x.q.device):
        raise RuntimeError(
            "a graph is being captured, and ranks have to agree on this call first: make it once before the "
            "capture, without MESHFLASH_CHECK=always"
        )
    try:
        executable = found if isinstance(found, MeshExecutable) else _build(spec, x, context)
    except Exception as error:
        context.broadcast_error(error)
        raise
    context.agree({**_agreed_fields(spec, executable.plan, x), "groups": executable.groups})
    context.ensure_groups(executable.groups)
    executable.transport(context)
    executable.attach(spec, context)
    return executable


def _build(spec: AttentionSpec, x: CallTensors, context: GroupContext) -> MeshExecutable:
    q, k, v = x.q, x.k, x.v
    token_bytes = (k.shape[3] + v.shape[3]) * k.shape[0] * k.shape[2] * k.element_size()
    plan = make_plan(spec, q.shape[1], k.shape[1], token_bytes, k.shape[2], context.world)
    for name, tensor, layout in (("q", q, plan.q), ("k", k, plan.k)):
        if tensor.shape[1] != layout.lengths[context.rank]:
            raise ValueError(
                f"{name} has {tensor.shape[1]} tokens on rank {context.rank} of the group; its layout ({layout.name}, "
                f"{layout.tokens} tokens over {layout.world} ranks) gives it {layout.lengths[context.rank]}"
            )
    spec.mask.check(plan.q.tokens, plan.k.tokens, q.shape[0], plan.q_offset)
    setting = Setting(
        batch=q.shape[0],
        dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=q.dtype,
        reduce_dtype=getattr(torch, plan.reduce_dtype) if plan.reduce_dtype else accumulator_dtype(q.dtype),
        device=q.device,
        kernel=spec.kernel,
        deterministic=spec.deterministic,
    )
    executable = MeshExecutable(plan, spec.mask, q.shape[2], k.shape[2], context.rank, setting, schedules.build)
    executable.check_saved()
    features = spec.features(x)
    executable.kernels("forward", features)
    if spec.kernel != "auto":  # "auto" finds one in every pass
        executable.kernels("backward", features)
    return executable


def make_plan(spec: AttentionSpec, q_tokens: int, k_tokens: int, token_bytes: int, kv_heads: int, world: int) -> Plan:
    """Return the schedule and the layouts of a call.

    Args:
        spec: The call without its tensors.
        q_tokens: The number of this rank's queries.
        k_tokens: The number of this rank's keys.
        token_bytes: The bytes of one token's keys and values. "auto" compares those of all tokens with GATHER_BYTES.
        kv_heads: The number of KV heads.
        world: The number of ranks.
    """
    schedule, reason = spec.schedule, "requested"
    if schedule == "auto":
        schedule, reason = _choose(spec, q_tokens, k_tokens, token_bytes, kv_heads, world)
    schedule = schedules.canonical(schedule)
    q = _layout("layout", spec.layout, schedule, q_tokens, world)
    k = _layout("k_layout", spec.k_layout, schedule, k_tokens, world)
    return Plan(schedule, q, k, spec.q_offset, spec.reduce_dtype, spec.transport, spec.needs_lse, reason)


def _choose(
    spec: AttentionSpec, q_tokens: int, k_tokens: int, token_bytes: int, kv_heads: int, world: int
) -> tuple[str, str]:
    """Return the schedule that "auto" stands for, and the reason. All ranks return the same."""
    gathered = token_bytes * (world * k_tokens if spec.k_layout is None else spec.k_layout.tokens)
    limit = f"{GATHER_BYTES >> 20} MiB"
    if gathered <= GATHER_BYTES:
        return "allgather", f"auto: keys and values of the whole sequence take at most {limit} a rank"
    ring = _ring_of(spec.layout)
    is_square = spec.k_layout in (None, spec.layout) and q_tokens == k_tokens and spec.q_offset == 0
    # Documents: a ring moves only the keys of documents that are cut, an exchange of heads moves every row.
    if is_square and kv_heads % world == 0 and not spec.mask.has_documents:
        load = _ring_load(spec.layout or _default_layout(ring, world * q_tokens, world), spec.mask)
        if load > RING_LOAD:
            return "ulysses", (
                f"auto: under {ring} the busiest rank has {load:.2f} times the mean work; ulysses gives every rank the "
                "same number of heads"
            )
    return ring, f"auto: keys and values of the whole sequence take more than {limit} a rank"


@lru_cache(maxsize=64)
def _ring_load(layout: Layout, mask: Mask) -> float:
    """Return the work of the busiest rank under a ring, where 1 is the mean. Layouts with steps count as balanced."""
    return 1.0 if any(r.step != 1 for held in layout.ranges for r in held) else busiest_load(layout, [mask])


def _ring_of(layout: Layout | None) -> str:
    """Return the ring schedule whose default layout is this one, or plain ring."""
    return "ring" if layout is None or layout.name not in ("zigzag", "striped") else layout.name


def _layout(name: str, layout: Layout | None, schedule: str, tokens: int, world: int) -> Layout:
    """Return the given layout after checking it, or the schedule's default layout for shards of equal length."""
    if layout is None:
        return _default_layout(schedule, world * tokens, world)
    if layout.world != world:
        raise ValueError(f"{name}: it is for {layout.world} ranks, the group has {world}")
    if world == 1 and layout.tokens != tokens:
        raise ValueError(f"{name}: it has {layout.tokens} tokens, the tensor {tokens}")
    if world == 1 and layout != Layout.contiguous(tokens, 1):
        raise ValueError(f"{name}: on one rank positions must be in order; put the tokens in order, without a layout")
    return layout


@lru_cache(maxsize=64)
def _default_layout(schedule: str, tokens: int, world: int) -> Layout:
    """Return a layout, the same object for all masks: one of thousands of ranks takes milliseconds to make."""
    return schedules.default_layout(schedule)(tokens, world)


def over_two_axes(schedule: str, inner: int) -> str:
    """Return a schedule for a mesh of two axes, with `inner` set to the size of the inner axis.

    Args:
        schedule: The requested schedule, with or without options.
        inner: The number of ranks in the inner axis.

    Raises:
        ValueError: The schedule runs over one axis only, or names another size of the inner axis.

    >>> over_two_axes("hybrid(ring=allgather)", 2)
    'hybrid(inner=2, ring=allgather, transposed=False, rounds=1)'
    """
    able = ", ".join(one.name for one in schedules.schedules() if "inner" in dict(one.options))
    given = {} if schedule == "auto" else dict(schedules.parse(schedule)[1])
    if "inner" not in given:
        raise ValueError(
            f'schedule={schedule!r} runs over one axis, but mesh has two: pass one of them, as in mesh["cp"], or '
            f"shard the sequence over both with {able}"
        )
    if given["inner"] not in (0, inner):
        raise ValueError(f"schedule={schedule!r}: inner={given['inner']}, but mesh has {inner} ranks in its inner axis")
    given["inner"] = inner
    return f"{schedules.parse(schedule)[0].name}({', '.join(f'{key}={value}' for key, value in given.items())})"


def saves_buffers(schedule: str) -> bool:
    """Return whether the forward of a schedule saves buffers beyond the caller's tensors.

    Args:
        schedule: The schedule, with or without options; "auto", or "" on a single device, saves none.
    """
    return schedule not in ("", "auto") and schedules.parse(schedule)[0].saves_buffers


def _agreed_fields(spec: AttentionSpec, plan: Plan, x: CallTensors) -> dict[str, Any]:
    """Return the fields that all ranks must agree on, by the names that errors show."""
    plain = spec._asdict()
    for name in ("group", "layout", "k_layout", "mask", "gathered_rank", "will_backward", "needs_lse"):
        del plain[name]
    arrays = [_digest(x if isinstance(x, Tensor) else torch.tensor(x)) for x in spec.mask.pack()[1]]
    return plain | {
        "version": meshflash.__version__,
        "schedule": plan.schedule,
        "layout": _named(plan.q),
        "key layout": _named(plan.k),
        "return_lse": plan.lse,
        "mask": repr(spec.mask),
        "mask's documents and slices": arrays,
        "batch": x.q.shape[0],
        "heads": x.q.shape[2],
        "key heads": x.v.shape[2],
        "dim": x.q.shape[3],
        "value dim": x.v.shape[3],
        "dtype": str(x.q.dtype),
        "device": x.q.device.type,
        "seed": 0 if x.seed is None else int(x.seed),
        "alibi_slopes": _digest(x.alibi_slopes),
        "sink_logits": _digest(x.sink_logits),
        "autograd": _AUTOGRAD[spec.will_backward],
    }


#: How errors describe `will_backward`.
_AUTOGRAD = {True: "records the call", False: "off: no_grad, or no input requires a gradient"}


@lru_cache(maxsize=64)
def _named(layout: Layout) -> str:
    """Return the text of a layout; equal layouts have equal texts, whether they were made by name or by ranges."""
    for make in (Layout.contiguous, Layout.zigzag, Layout.striped):
        named = make(layout.tokens, layout.world)
        if named == layout:
            return named.text()
    return Layout(layout.ranges).text()


def _digest(x: Tensor | None) -> str:
    if x is None:
        return "none"
    elements = x.detach().to("cpu", torch.float64).contiguous().numpy()
    kind = str(x.dtype) if x.is_floating_point() else "integers"
    return f"{kind} {list(x.shape)} {hashlib.sha256(elements.tobytes()).hexdigest()[:16]}"


schedules.on_change.append(cache.clear)
schedules.on_change.append(_default_layout.cache_clear)
configs.on_change.append(partial(cache.drop, None))
on_forget.append(partial(cache.drop, None))  # not those over ranks: all ranks must drop the same
schedules.names()  # import all schedules now: torch.compile cannot trace imports in a first call
