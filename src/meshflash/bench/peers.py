"""What peers' implementations move, as formulas: to print beside what ours moved."""

from __future__ import annotations

from meshflash.bench.cases import Case
from meshflash.schedules.registry import parse


def peer_bytes(schedule: str, case: Case, world: int, direction: str) -> int | None:
    """Bytes that a rank receives in peers' implementations of a schedule, sums travelling in float32.

    Of `n` ranks, with K = V the bytes of a rank's keys and Q those of its queries: the ring family moves 2 (n - 1) K
    forward, and backward again as much with n hops of float32 gradients; all-gather the same forward, and backward
    again as much with a reduce-scatter of n - 1 parts. ringX4 has n turns of each. ringX1 and 2 give queries round
    and reduce float32 results with their LSE; backward they give keys, and ringX2 reduces gradients of queries too.
    Ulysses exchanges (n - 1) / n of 2 Q + 2 K in each pass, with key heads repeated up to n, and a hybrid that of its
    lines and what a ring moves between them. None where peers have no such schedule, or heads do not divide for it.
    `direction` is forward, or forward+backward for both together.
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
