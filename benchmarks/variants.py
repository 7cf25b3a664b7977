"""A kernel in the variants that schedules call, beside a plain call of as many FLOPs; and over masks beside causal.

A variant is checked before it is timed: the plain call against the oracle, a step of a ring against the plain call. All
variants of a case are interleaved in one process. Calls are those of the kernel's contract; delta is computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import MASKS
from meshflash.bench.candidates import own_kernel
from meshflash.bench.cases import Case, on_cpu, pick_dtype
from meshflash.bench.check import PASSES, WrongError, relative_error, truth, worst
from meshflash.bench.measure import Say
from meshflash.bench.timing import interleaved
from meshflash.core.mask import Mask
from meshflash.engine import local
from meshflash.kernels import registry
from meshflash.kernels.contract import Features, Grads, Kernel, Pass, accumulator_dtype
from meshflash.kernels.merge import merge

PLAIN = "plain"
STEP = "step"
DETERMINISTIC = "deterministic"
GQA = "gqa"

#: Query heads of a KV head in the variant `gqa`.
GQA_RATIO = 4
#: Documents in the mask `documents`.
NUM_DOCUMENTS = 32
#: A step may differ from the plain call by this fraction of the error that a dtype allows: it does not round its sums.
STEP_TOLERANCE = 0.2

#: The variants that are compared with their cases; the first one is the baseline.
Setting = dict[str, Case]


@dataclass(frozen=True)
class Scale:
    """Sizes on a kind of device: first those of variants, where `width` is heads times dim; then those of masks."""

    tokens: int
    batch: int
    dims: tuple[int, ...]
    width: int
    long_tokens: int
    long_heads: int
    window: int


ON_GPU = Scale(16384, 2, (64, 128), 2048, 131072, 8, 4096)
ON_CPU = Scale(512, 2, (16, 32), 128, 2048, 4, 256)


@dataclass(frozen=True)
class Packed(Case):
    """A case of packed causal documents of random lengths, the same each time; its mask is called `documents`."""

    mask: str = "documents"

    @property
    def rule(self) -> Mask:
        """Causal within each document."""
        if self.tokens < NUM_DOCUMENTS:
            raise ValueError(f"{NUM_DOCUMENTS} documents do not fit in {self.tokens} tokens")
        generator = np.random.default_rng(0)
        shares = generator.dirichlet(np.ones(NUM_DOCUMENTS))
        return Mask.causal() & Mask.documents(1 + generator.multinomial(self.tokens - NUM_DOCUMENTS, shares))


@dataclass(frozen=True)
class VariantRow:
    """One variant, one pass. `ratio` is its rate over that of the variant `baseline`.

    Figures are None if memory ran out. `error` is against `oracle`.
    """

    variant: str
    baseline: str
    kernel: str
    ran: str
    direction: str
    case: Case
    ms: float | None
    tflops: float | None
    ratio: float | None
    error: float
    oracle: str


@dataclass(frozen=True, eq=False)
class Variant:
    """A variant that passed its check: by pass the call to time, the kernel that runs, and its error."""

    name: str
    case: Case
    oracle: str
    calls: dict[str, Callable[[], Any]]
    ran: dict[str, str]
    errors: dict[str, float]


def default_kernel(device: str) -> str:
    """Return our kernel on a GPU, the tiled one on a CPU."""
    return "tiled" if on_cpu(device) else own_kernel(device)


def settings(
    device: str,
    tokens: int | None = None,
    long_tokens: int | None = None,
    dims: list[int] | None = None,
    masks: list[str] | None = None,
    dtype: str | None = None,
) -> list[Setting]:
    """Return the variants for each head dim and mask, then the masks at a long length for each head dim."""
    scale = ON_CPU if on_cpu(device) else ON_GPU
    sizes, kind = list(dict.fromkeys(dims or scale.dims)), pick_dtype(dtype, device)
    out: list[Setting] = []
    for dim, mask in product(sizes, dict.fromkeys(masks or MASKS)):
        heads = scale.width // dim
        if not heads or heads % GQA_RATIO:
            raise ValueError(
                f"dim {dim}: heads times dim are {scale.width}, and heads must be a multiple of {GQA_RATIO}"
            )
        case = Case(tokens or scale.tokens, scale.batch, heads, heads, dim, mask, kind, device)
        calls = dict.fromkeys((PLAIN, STEP, DETERMINISTIC), case)
        out.append(calls | ({GQA: replace(case, kv_heads=heads // GQA_RATIO)} if mask == "causal" else {}))
    for dim in sizes:
        shape: dict[str, Any] = dict(tokens=long_tokens or scale.long_tokens, heads=scale.long_heads)
        shape |= dict(kv_heads=scale.long_heads, head_dim=dim, dtype=kind, device=device)
        narrow = [Case(mask=mask, **shape) for mask in ("causal", f"window-{scale.window}")]
        out.append({case.mask: case for case in (*narrow, Packed(**shape))})
    return out


def run(setting: Mapping[str, Case], kernel: str, rounds: int, say: Say = lambda _: None) -> Iterator[VariantRow]:
    """Yield the rows of a setting; WrongError for a wrong variant, ValueError for one that the kernel cannot run."""
    if kernel not in registry.names():
        raise ValueError(f"kernel {kernel!r}: expected one of {', '.join(registry.names())}")
    checked: dict[Case, _Checked] = {}
    variants = []
    for name, case in setting.items():
        say(f"checking {name}")
        if case not in checked:
            checked[case] = _Checked(case, kernel, name)
        variants.append(checked[case].variant(name))
    checked.clear()
    device, baseline = torch.device(variants[0].case.device), variants[0].name
    for direction in PASSES:
        say(f"timing {direction}")
        own = [variant for variant in variants if direction in variant.calls]
        ms = interleaved({variant.name: variant.calls[direction] for variant in own}, device, rounds)
        rates = {each.name: each.case.flops(direction) / ms[each.name] / 1e9 for each in own if each.name in ms}
        for variant in own:
            rate, base = rates.get(variant.name), rates.get(baseline)
            yield VariantRow(
                variant=variant.name,
                baseline=baseline,
                kernel=kernel,
                ran=variant.ran[direction],
                direction=direction,
                case=variant.case,
                ms=ms.get(variant.name),
                tflops=rate,
                ratio=None if rate is None or base is None else rate / base,
                error=variant.errors[direction],
                oracle=variant.oracle,
            )


class _Checked:
    """A kernel on a case whose plain call passed its check, and the variants of the call."""

    def __init__(self, case: Case, kernel: str, name: str) -> None:
        tensors = case.tensors()
        q, k, v, dout = (x.detach() for x in tensors)
        self.case, self.kernel = case, kernel
        self.x = local.inputs(q, k, v, case.rule, Features(scale=case.head_dim**-0.5))
        (forward, forward_ran), (backward, backward_ran) = self._choose("forward"), self._choose("backward")
        self.want = truth(case, tensors)
        self.out, self.lse = forward.forward(self.x)
        self.rows = local.rows_of(self.out, self.lse, dout, None)
        self.grads = _tensors(backward.backward(self.x, self.rows))
        calls: dict[str, Callable[[], Any]] = {
            "forward": partial(forward.forward, self.x),
            "backward": partial(backward.backward, self.x, self.rows),
        }
        ran = {"forward": forward_ran, "backward": backward_ran}
        known_out, *known_grads = self.want.results
        errors = {"forward": _worst([self.out], [known_out]), "backward": _worst(self.grads, known_grads)}
        self.plain = self._checked(Variant(name, case, self.want.oracle, calls, ran, errors), case.worst_error)

    def variant(self, name: str) -> Variant:
        """Return the variant of this name."""
        if name == STEP:
            return self._step()
        return self._deterministic() if name == DETERMINISTIC else replace(self.plain, name=name)

    def _step(self) -> Variant:
        """Return a call as in a step of a ring: results are carried in place, gradients accumulated, both in float32.

        From an empty carry it must equal the plain call. From another carry it must equal the two merged, and the
        gradients that it adds must equal those of the plain call. That carry is the plain call's, with rows reversed.
        """
        forward, forward_ran = self._choose("forward", in_parts=True)
        backward, backward_ran = self._choose("backward", in_parts=True)
        dtype = accumulator_dtype(self.case.torch_dtype)
        alone = torch.zeros_like(self.out, dtype=dtype), torch.full_like(self.lse, -torch.inf)
        forward.forward(self.x, alone, alone)
        carried = self.out.flip(1).to(dtype), self.lse.flip(2)
        both = torch.empty_like(alone[0]), torch.empty_like(alone[1])
        merge(carried, alone, both)
        forward.forward(self.x, carried, carried)
        before = [grad.flip(1).to(dtype) for grad in self.grads]
        dq, dk, dv = (grad.clone() for grad in before)
        grads = Grads(dq, dk, dv, add_dq=True, add_dkv=True)
        backward.backward(self.x, self.rows, grads)
        added = [grad - old for grad, old in zip(_tensors(grads), before, strict=True)]
        errors = {
            "forward": _worst([*alone, *carried], [self.out, self.lse, *both]),
            "backward": _worst(added, self.grads),
        }
        calls: dict[str, Callable[[], Any]] = {
            "forward": partial(forward.forward, self.x, carried, carried),
            "backward": partial(backward.backward, self.x, self.rows, grads),
        }
        ran = {"forward": forward_ran, "backward": backward_ran}
        return self._checked(
            Variant(STEP, self.case, PLAIN, calls, ran, errors), STEP_TOLERANCE * self.case.worst_error
        )

    def _deterministic(self) -> Variant:
        """Return the deterministic backward, which gives the same bits each time."""
        backward, backward_ran = self._choose("backward", deterministic=True)
        call = partial(backward.backward, self.x, self.rows)
        first, second = _tensors(call()), _tensors(call())
        if not all(map(torch.equal, first, second)):
            raise WrongError(f"{DETERMINISTIC}, backward: two calls differ at {self.case}; it is not timed")
        errors = {"backward": _worst(first, self.want.results[1:])}
        ran = {"backward": backward_ran}
        variant = Variant(DETERMINISTIC, self.case, self.want.oracle, {"backward": call}, ran, errors)
        return self._checked(variant, self.case.worst_error)

    def _choose(self, direction: Pass, deterministic: bool = False, in_parts: bool = False) -> tuple[Kernel, str]:
        """Return the kernel of a call, and its name."""
        request = replace(local.kernel_request(self.x, direction, deterministic), partial=in_parts)
        found = registry.choose(self.kernel, request)
        return found.kernel, found.kernel.name

    def _checked(self, variant: Variant, allowed: float) -> Variant:
        """Return the variant; WrongError for an error that is not allowed."""
        for direction, error in variant.errors.items():
            if not error <= allowed:
                raise WrongError(
                    f"{variant.name}, {direction}: relative error {error:.1e} against {variant.oracle} at "
                    f"{variant.case}, where {allowed:.0e} is allowed; it is wrong, so it is not timed"
                )
        return variant


def _tensors(grads: Grads) -> tuple[Tensor, ...]:
    return grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE


def _worst(got: Sequence[Tensor], known: Sequence[Tensor]) -> float:
    """Return the worst relative error; NaN is worse than any."""
    return worst(relative_error(value, reference) for value, reference in zip(got, known, strict=True))
