"""Formulas of the bytes that peers' implementations of schedules move."""

from __future__ import annotations

from meshflash.bench.cases import Case
from meshflash.schedules.registry import parse


def peer_bytes(schedule: str, case: Case, world: int, direction: str) -> int | None:
    """Return the bytes that a rank receives in peers' implementations of a schedule; gradients are sent in float32.

    For n ranks, with K = V the bytes of a rank's keys and Q those of its queries:
    - The ring family moves 2 (n - 1) K forward; backward the same again plus n hops of float32 gradients.
    - All-gather moves the same forward; backward the same again plus a reduce-scatter of n - 1 shards.
    - ringX4 has n steps of each. ringX1 and ringX2 broadcast queries and reduce float32 results with their LSE;
      backward they broadcast keys, and ringX2 also reduces gradients of queries.
    - Ulysses exchanges (n - 1) / n of 2 Q + 2 K in each pass, with KV heads repeated up to n. A hybrid exchanges that
      within its inner groups, and what a ring moves between them.

    Args:
        schedule: The schedule with its options.
        case: The shape and dtype.
        world: The number of ranks.
        direction: "forward", or "forward+backward" for both together.

    Returns:
        The bytes; None if peers have no such schedule, or heads do not divide for it.
    """
    each, sums = case.torch_dtype.itemsize, max(4, case.torch_dtype.itemsize)
    rows = case.batch * -(-case.tokens // world)
    keys, queries = 2 * rows * case.kv_heads * case.head_dim, rows * case.heads * case.head_dim
    name = schedule.partition("(")[0]
    hops = {"allgather": world - 1, "ringx3": world - 1}.get(name)
    if name in ("ring", "zigzag", "striped", "double_ring"):
        hops = world
    if hops is not None:
        forward, backward = (world - 1) * keys * each, (world - 1) * keys * each + hops * keys * sums
    elif name == "ringx4":
        forward, backward = world * keys * each, world * keys * (each + sums)
    elif name in ("ringx1", "ringx2"):
        forward = world * (queries * (each + sums) + rows * case.heads * sums)
        backward = world * keys * (each + sums) + (world * queries * sums if name == "ringx2" else 0)
    elif name in ("ulysses", "hybrid"):
        inner = int(dict(parse(schedule)[1]).get("inner", world)) or world
        if case.heads % inner or (case.kv_heads % inner and inner % case.kv_heads):
            return None
        repeated = max(1, inner // case.kv_heads)
        lines, back = world // inner, sums if repeated > 1 else each
        forward = (inner - 1) * (2 * queries + repeated * keys) * each // inner
        backward = (inner - 1) * (2 * queries * each + repeated * keys * back) // inner
        forward += (lines - 1) * repeated * keys * each
        backward += (lines - 1) * repeated * keys * each + (lines > 1) * lines * repeated * keys * sums
    else:
        return None
    return forward if direction == "forward" else forward + backward
