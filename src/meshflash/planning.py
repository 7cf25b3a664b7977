"""Turn a request (schedule, layouts, transport) into the plan that the engine runs.

The request is encoded as the op's spec string, without sizes, so that compiled code serves all lengths. `resolve`
decodes it inside the op, where sizes are plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from meshflash.arguments import check_reduce_dtype
from meshflash.comm.transports import choice as transports
from meshflash.core.layout import Layout
from meshflash.engine import mesh as engine
from meshflash.engine.group_context import clear_prepared
from meshflash.engine.op import GATHERED
from meshflash.schedules import registry as schedules

#: "auto" all-gathers while the keys and values of the whole sequence take at most this many bytes on each rank.
GATHER_BYTES = 64 * 2**20


def encode_spec(
    q: Tensor,
    k: Tensor,
    schedule: str,
    layout: Layout | None,
    k_layout: Layout | str | None,
    rank: int,
    world: int,
    reduce_dtype: torch.dtype | None,
    inner: int = 0,
    transport: str = "auto",
    lse: bool = True,
) -> str:
    """Check the request and encode it as the op's spec string: names and texts without sizes."""
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
        return _asked_for_gathered(q, layout, rank, world)
    if not isinstance(schedule, str):
        raise ValueError(f"schedule={schedule!r}: expected a name, or name(option=value)")
    if inner:
        schedule = over_two_axes(schedule, inner)
    if layout is not None and k_layout is None:
        if k.shape[1] != q.shape[1]:
            raise ValueError(
                f"k has {k.shape[1]} tokens, q has {q.shape[1]}: give the keys a layout of their own with k_layout"
            )
        k_layout = layout
    texts = ["" if given is None else given.text() for given in (layout, k_layout)]
    dtype = "" if reduce_dtype is None else str(reduce_dtype).removeprefix("torch.")
    if not _schedule_saves_buffers(schedule):
        lse = True  # these schedules always produce the LSE, and ranks may differ in whether they return it
    return "|".join((*texts, dtype, transport, "lse" if lse else "", schedule))


def _asked_for_gathered(q: Tensor, layout: Layout | None, rank: int, world: int) -> str:
    """Encode the request for keys that every rank already holds: only the layout of the queries matters."""
    layout = layout or Layout.contiguous(world * q.shape[1], world)
    if layout.world != world:
        raise ValueError(f"layout: it is for {layout.world} ranks, the group has {world}")
    return f"{GATHERED}|{rank}|{layout.text()}"


def over_two_axes(schedule: str, inner: int) -> str:
    """Return a schedule for a mesh of two axes, with `inner` set to the size of the inner axis.

    >>> over_two_axes("hybrid(ring=allgather)", 2)
    'hybrid(inner=2, ring=allgather, transposed=False, rounds=1)'
    """
    supported = ", ".join(one.name for one in schedules.schedules() if "inner" in dict(one.options))
    given = {} if schedule == "auto" else dict(schedules.parse(schedule)[1])
    if "inner" not in given:
        raise ValueError(
            f'schedule={schedule!r} runs over one axis, but mesh has two: pass one of them, as in mesh["cp"], or '
            f"shard the sequence over both with {supported}"
        )
    if given["inner"] not in (0, inner):
        raise ValueError(f"schedule={schedule!r}: inner={given['inner']}, but mesh has {inner} ranks in its inner axis")
    given["inner"] = inner
    return f"{schedules.parse(schedule)[0].name}({', '.join(f'{key}={value}' for key, value in given.items())})"


def _ring_of(layout: Layout | None) -> str:
    """Return the ring schedule whose default layout is this one, or plain ring."""
    return "ring" if layout is None or layout.name not in ("zigzag", "striped") else layout.name


def resolve(spec: str, q_tokens: int, k_tokens: int, each: int, q_offset: int, world: int) -> engine.Plan:
    """Decode a spec string and return the plan for this rank's sizes.

    `each` is the bytes of one token's keys and values; "auto" compares their sum with GATHER_BYTES.
    """
    layout, k_layout, dtype, transport, lse, schedule = spec.split("|", 5)
    given, k_given = (_parsed(text) if text else None for text in (layout, k_layout))
    reason = "requested"
    if schedule == "auto":
        gathered = each * (world * k_tokens if k_given is None else k_given.tokens)
        schedule = "allgather" if gathered <= GATHER_BYTES else _ring_of(given)
        relation = "at most" if gathered <= GATHER_BYTES else "more than"
        reason = f"auto: keys and values of the whole sequence take {relation} {GATHER_BYTES >> 20} MiB a rank"
    schedule, default_layout = schedules.canonical(schedule), schedules.default_layout(schedule)
    q_held = _held("layout", given, default_layout, q_tokens, world)
    k_held = _held("k_layout", k_given, default_layout, k_tokens, world)
    return engine.Plan(schedule, q_held, k_held, q_offset, dtype, transport, bool(lse), reason)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Layout:
    return Layout.parse(text)


def _held(
    name: str, layout: Layout | None, default_layout: Callable[[int, int], Layout], tokens: int, world: int
) -> Layout:
    """Return the given layout after checking it, or the schedule's default layout for shards of equal length."""
    if layout is None:
        return default_layout(world * tokens, world)
    if layout.world != world:
        raise ValueError(f"{name}: it is for {layout.world} ranks, the group has {world}")
    if world == 1 and layout.tokens != tokens:
        raise ValueError(f"{name}: it has {layout.tokens} tokens, the tensor {tokens}")
    if world == 1 and layout != Layout.contiguous(tokens, 1):
        raise ValueError(f"{name}: on one rank positions must be in order; put the tokens in order, without a layout")
    return layout


def saves_buffers(spec: str) -> bool:
    """Return whether the forward of this spec string saves buffers beyond the caller's tensors."""
    return _schedule_saves_buffers(spec.split("|", 5)[5])


def _schedule_saves_buffers(schedule: str) -> bool:
    return schedule != "auto" and schedules.parse(schedule)[0].saves_buffers


engine.connect(schedules.build, resolve, saves_buffers)
schedules.on_change.append(clear_prepared)
schedules.names()  # import all schedules now: torch.compile cannot trace imports in a first call
