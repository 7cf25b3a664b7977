"""What peers' implementations move, as formulas: to print beside what ours moved."""

from __future__ import annotations

from meshflash.bench.cases import Case


def peer_bytes(schedule: str, case: Case, world: int, direction: str) -> int | None:
    """Bytes that a rank receives in peers' implementations of a schedule, sums travelling in float32.

    Of `n` ranks, with K = V the bytes of a rank's keys: the ring family moves 2 (n - 1) K forward, and
    backward again as much with n hops of float32 gradients; all-gather the same forward, and backward
    again as much with a reduce-scatter of n - 1 parts. None where peers have no such schedule.
    """
    each = case.torch_dtype.itemsize
    keys = 2 * case.batch * -(-case.tokens // world) * case.kv_heads * case.head_dim
    forward = (world - 1) * keys * each
    name = schedule.partition("(")[0]
    hops = {"ring": world, "zigzag": world, "striped": world, "allgather": world - 1}.get(name)
    if hops is None:
        return None
    if direction == "forward":
        return forward
    return 2 * forward + hops * keys * max(4, each)
