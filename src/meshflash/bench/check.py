"""Check before time: the results of an oracle, and the check of a candidate against them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from meshflash.api import flash_attention
from meshflash.bench.candidates import DENSE_TOKENS, SDPA, Attention, candidate
from meshflash.bench.cases import Case, Tensors, on_cpu
from meshflash.kernels import registry
from meshflash.kernels.contract import Pass
from meshflash.runtime.oom import attempt

PASSES: tuple[Pass, ...] = ("forward", "backward")

#: Rows of an output whose error is computed by itself.
BLOCK = 128
#: Bytes of the score matrices in the oracle: it computes as many heads at a time.
MATRIX_BYTES = 2**30


class WrongError(RuntimeError):
    """A candidate's results differ from those of the oracle."""


@dataclass(frozen=True, eq=False)
class Truth:
    """The output and gradients of an oracle, and its name.

    The output has every row. Gradients have every row too, or with `blocks` only those rows, concatenated.
    """

    oracle: str
    results: tuple[Tensor, ...]
    blocks: tuple[slice, ...] = ()

    def forward_error(self, out: Tensor) -> float:
        """Return the worst relative error of a block of an output."""
        return block_error(out, self.results[0])

    def backward_error(self, grads: Sequence[Tensor]) -> float:
        """Return the worst relative error of a block of a gradient; NaN if a row, sampled or not, is not finite."""
        pairs = list(zip(grads, self.results[1:], strict=True))
        if not self.blocks:
            return worst(block_error(grad, known) for grad, known in pairs)
        if not all(grad.isfinite().all() for grad in grads):
            return math.nan
        sizes = [block.stop - block.start for block in self.blocks]
        return worst(
            relative_error(grad[:, block], part)
            for grad, known in pairs
            for block, part in zip(self.blocks, known.split(sizes, dim=1), strict=True)
        )


@dataclass(frozen=True)
class Verdict:
    """The relative error and the kernel that ran, of each pass that did not run out of memory."""

    errors: dict[str, float]
    ran: dict[str, str]


def oracle_of(case: Case, exact: bool = False) -> str:
    """Return the name of a case's oracle; `exact` demands float64 however long it takes.

    Up to 4,096 tokens it is the dense reference in float64, beyond that the tiled kernel in float64. On a GPU that
    kernel would take minutes, so full and causal masks use torch's SDPA in float32. Its error is at most a hundredth
    of `WORST_ERROR`.
    """
    if case.tokens <= DENSE_TOKENS:
        return "reference in float64"
    if exact or on_cpu(case.device) or case.mask not in ("full", "causal") or case.dtype == "float64":
        return "tiled in float64"
    return f"{SDPA} in float32"


def truth(case: Case, tensors: Tensors, exact: bool = False) -> Truth:
    """Return the results of the oracle, computed some heads at a time so that they fit in memory.

    Packed documents are computed one by one, as sequences of their own.
    """
    if case.mask.startswith("documents"):
        (documents,) = case.rule.documents_nodes
        found = []
        for begin, end in pairwise(documents.q_cuts(0)):
            q, k, v, dout = (x[:, begin:end] for x in tensors)
            sizes = (int(end - begin), case.batch, case.heads, case.kv_heads, case.head_dim)
            found.append(truth(Case(*sizes, "causal", case.dtype, case.device), (q, k, v, dout), exact))
        longest = max(found, key=lambda own: own.results[0].shape[1])
        return Truth(
            longest.oracle,
            tuple(torch.cat(parts, dim=1) for parts in zip(*(own.results for own in found), strict=True)),
        )
    oracle = oracle_of(case, exact)
    name, _, dtype = oracle.partition(" in ")
    rows = []
    for row in range(case.batch):
        parts = []
        for q, k, v, dout in _slices(case, row, tensors, getattr(torch, dtype), all_heads=name == "tiled"):
            out = _torch(case, q, k, v) if name == SDPA else flash_attention(q, k, v, mask=case.rule, kernel=name)
            parts.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
        rows.append([torch.cat(heads, dim=2) for heads in zip(*parts, strict=True)])
    return Truth(oracle, tuple(torch.cat(result) for result in zip(*rows, strict=True)))


def judge(case: Case, name: str, function: Attention, tensors: Tensors, want: Truth) -> Verdict:
    """Run a candidate forward and backward; WrongError, a RuntimeError, for a wrong result."""
    inputs, dout = tensors[:3], tensors[3]
    errors: dict[str, float] = {}
    with registry.record_kernels() as seen:
        out = attempt(lambda: function(*inputs))
        if out is not None:
            errors["forward"] = want.forward_error(out)
            grads = attempt(lambda: torch.autograd.grad(out, inputs, dout))
            if grads is not None:
                errors["backward"] = want.backward_error(grads)
    for direction, error in errors.items():
        if not error <= case.worst_error:
            raise WrongError(
                f"{name}, {direction}: relative error {error:.1e} against {want.oracle} at {case}, where "
                f"{case.dtype} allows {case.worst_error:.0e}; it is wrong, so it is not timed"
            )
    return Verdict(errors, {direction: seen.names(direction) or name for direction in PASSES})


def worst(errors: Iterable[float]) -> float:
    """Return the largest error, or NaN if there is one, which `max` would lose.

    >>> worst([0.5, math.nan, 1.0]), worst([0.5, 1.0])
    (nan, 1.0)
    """
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference over that of the reference."""
    with torch.no_grad():
        return float((value.double() - reference.double()).norm() / reference.double().norm())


def block_error(value_BTHD: Tensor, reference_BTHD: Tensor, rows: int = BLOCK) -> float:
    """Return the worst relative error of a block of `rows` rows of one head: the norm over all rows hides one bad tile.

    >>> x = torch.ones(1, 300, 4, 8)
    >>> y = x.clone()
    >>> y[:, 128:256, 2] = 0
    >>> block_error(y, x), round(relative_error(y, x), 2)
    (1.0, 0.33)
    """

    def squares(x_BTHD: Tensor) -> Tensor:
        x_BTH = x_BTHD.double().square().sum(-1)
        x_BTH = torch.nn.functional.pad(x_BTH, (0, 0, 0, -x_BTH.shape[1] % rows))
        return x_BTH.unflatten(1, (-1, rows)).sum(2)

    with torch.no_grad():
        wrong, known = squares(value_BTHD - reference_BTHD), squares(reference_BTHD)
        ratio = torch.where(wrong > 0, wrong / known, wrong)  # 0 / 0 is 0 where no row sees a key, and NaN stays
        return float(ratio.max().sqrt())


def _torch(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run SDPA with a KV head for every query head: in float32 on GPUs, shared KV heads would make it dense."""
    heads = q.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    return candidate(replace(case, batch=1, heads=heads, kv_heads=heads), SDPA)(q, k, v)


def _slices(
    case: Case, row: int, tensors: Tensors, dtype: torch.dtype, all_heads: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield q, k, v and dout of one batch row: some KV heads with their query heads at a time."""
    group = case.heads // case.kv_heads
    fit = MATRIX_BYTES // (case.tokens**2 * group * dtype.itemsize)
    count = case.kv_heads if all_heads else min(case.kv_heads, max(1, fit))
    for first in range(0, case.kv_heads, count):
        q, k, v, dout = (
            x.detach()[row : row + 1, :, first * each : (first + count) * each].to(dtype).contiguous()
            for x, each in zip(tensors, (group, 1, 1, group), strict=True)
        )
        yield q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout
