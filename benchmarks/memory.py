"""Peak memory of forward and backward, over the bytes that any implementation must hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.protocol import one_table
from meshflash.bench.candidates import DENSE_TOKENS, candidate, check_names
from meshflash.bench.cases import Case, on_cpu
from meshflash.bench.check import judge, truth
from meshflash.bench.columns import Column, mebibytes, optional
from meshflash.bench.measure import both
from meshflash.bench.tables import KERNEL, title_on_device
from meshflash.bench.timing import watched
from meshflash.kernels import registry
from meshflash.runtime.oom import attempt


@dataclass(frozen=True)
class MemoryRow:
    """One kernel: the bytes of q, k, v, out and their gradients, the peak with all of them, and peak over bytes."""

    kernel: str
    ran: str
    forward_ran: str
    backward_ran: str
    case: Case
    needed_bytes: int
    peak_bytes: int | None
    ratio: float | None


def default_tokens(device: str) -> int:
    """Return enough tokens for a device to show what grows with the length."""
    return 4096 if on_cpu(device) else 262144


def default_heads(device: str) -> int:
    """Return the query heads of a large model on a GPU, fewer on a CPU."""
    return 8 if on_cpu(device) else 32


def run(case: Case, names: tuple[str, ...]) -> Iterator[MemoryRow]:
    """Yield a row for each kernel, also if it runs out of memory.

    Each kernel is checked on at most the first 4,096 tokens; that also loads what a first call loads. The measured call
    is the first of its length, so tables that it makes and keeps are counted.
    """
    check_names(names)
    short = replace(case, tokens=min(case.tokens, DENSE_TOKENS))
    checked = short.tensors()
    want = truth(short, checked)
    for name in names:
        judge(short, name, candidate(short, name), checked, want)
    del want, checked
    q, k, v, dout = case.tensors()

    def attend(name: str) -> tuple[Tensor, ...]:
        out = candidate(case, name)(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    given = sum(x.nbytes for x in (q, k, v, dout))
    for name in names:
        with registry.record_kernels() as ran:
            peak = attempt(lambda name=name: given + watched(lambda: attend(name), q.device).peak_bytes)  # type: ignore[misc]
        yield MemoryRow(
            kernel=name,
            ran=both(ran.names("forward"), ran.names("backward")) or name,
            forward_ran=ran.names("forward") or name,
            backward_ran=ran.names("backward") or name,
            case=case,
            needed_bytes=2 * given,
            peak_bytes=peak,
            ratio=None if peak is None else peak / (2 * given),
        )


COLUMNS = (
    KERNEL,
    Column("needed\n(MiB)", lambda row: mebibytes(row["needed_bytes"])),
    Column("peak\n(MiB)", lambda row: mebibytes(row["peak_bytes"])),
    Column("x needed", optional("ratio", "{:.3f}")),
)
BENCHMARK = one_table("memory", {"needed_bytes", "ratio"}, COLUMNS, title_on_device)
