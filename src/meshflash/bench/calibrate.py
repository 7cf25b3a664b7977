"""Measure a device's kernels once, for kernel="auto": rates, host time and, on request, configurations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from meshflash.bench import host, record
from meshflash.bench.candidates import candidate
from meshflash.bench.cases import Case
from meshflash.bench.check import PASSES
from meshflash.bench.measure import measure
from meshflash.bench.timing import interleaved
from meshflash.engine import local
from meshflash.kernels import rates, registry
from meshflash.kernels.contract import Features, Pass
from meshflash.kernels.rate_curves import PLAIN, Rate, Variant
from meshflash.kernels.rates import Rates
from meshflash.kernels.triton import configs as triton_configs

#: Head dims and lengths that are measured by default.
DIMS = (64, 96, 128, 192, 256)
TOKENS = (512, 2048, 8192, 32768)
#: Masks of plain calls, and variants, which are causal.
MASKS = ("causal", "full")
VARIANTS: tuple[Variant, ...] = ("gqa", "documents")
#: Batch times tokens, and heads times dim: enough to fill a GPU.
ALL_TOKENS = 16384
WIDTH = 2048
#: The query heads of a KV head in the variant "gqa".
GQA_RATIO = 4
#: Variants are measured at lengths up to this, and at head dims that are powers of two: other dims take the factor of
#: the next wider one. Kernels differ most at short lengths. There, summing the gradients of keys over query heads and
#: launching a kernel for each document take the largest part of the time.
VARIANT_TOKENS = 8192
#: So few tokens that the host takes longer than the device.
HOST_TOKENS = 512
#: A kernel this many times slower than the fastest so far is not measured at longer lengths.
HOPELESS = 20.0

Say = Callable[[str], None]
#: Configurations of the Triton kernel by name, as a table has them.
Configs = dict[str, list[int]]


def case_of(tokens: int, dim: int, mask: str, device: str, variant: Variant = PLAIN) -> Case:
    """Return the case that is measured at one length, which is that of each document in the variant "documents"."""
    heads = max(1, WIDTH // dim)
    batch = max(1, ALL_TOKENS // tokens)
    if variant == "gqa":
        kv_heads = max(1, heads // GQA_RATIO)
        return Case(tokens, batch, kv_heads * GQA_RATIO, kv_heads, dim, mask, "bfloat16", device)
    if variant == "documents":
        return Case(tokens * batch, 1, heads, heads, dim, f"documents-{batch}", "bfloat16", device)
    return Case(tokens, batch, heads, heads, dim, mask, "bfloat16", device)


def run(
    device: str,
    dims: tuple[int, ...] = DIMS,
    tokens: tuple[int, ...] = TOKENS,
    rounds: int = 5,
    configs: Configs | None = None,
    say: Say = print,
) -> Rates:
    """Return the rates of every kernel that supports a device, each checked before it is timed.

    Args:
        device: The GPU to measure.
        dims: The head dims.
        tokens: The sequence lengths.
        rounds: The number of rounds, in each of which every kernel is timed once.
        configs: Configurations of the Triton kernel by name. None means its defaults.
        say: A function that is called with progress messages.
    """
    with ExitStack() as stack:
        for name, written in (configs or {}).items():
            stack.enter_context(triton_configs.forced(name, triton_configs.Config(*written)))
        found = _rates(device, dims, tokens, rounds, say)
        say("host time")
        case = replace(case_of(HOST_TOKENS, dims[0], "causal", device), batch=1)
        host_us: dict[str, dict[str, float]] = {}
        for row in host.run(case, supported(case), rounds):
            if row.kernel in registry.names() and row.direction in PASSES:
                host_us.setdefault(row.kernel, {})[row.direction] = round(row.microseconds, 1)
    about = rates.identity(torch.device(device))
    return Rates(*about, found, host_us, record.header("")["versions"], configs or {})


def _rates(device: str, dims: tuple[int, ...], tokens: tuple[int, ...], rounds: int, say: Say) -> tuple[Rate, ...]:
    found: list[Rate] = []
    hopeless: set[tuple[str, int, str, Variant]] = set()
    kinds = [*((mask, PLAIN) for mask in MASKS), *(("causal", variant) for variant in VARIANTS)]
    for dim, (mask, variant), length in product(dims, kinds, sorted(tokens)):
        if variant and (length > VARIANT_TOKENS or dim & (dim - 1)):
            continue
        case = case_of(length, dim, mask, device, variant)
        kind = (dim, mask, variant)
        names = tuple(name for name in supported(case) if (name, *kind) not in hopeless)
        say(f"{variant or mask}, dim {dim}, {length:,} tokens")
        measured = measure(case, names, rounds)
        best = min((result.ms["forward"] for result in measured.values() if "forward" in result.ms), default=0.0)
        for name, result in measured.items():
            for direction in PASSES:
                if direction in result.ms:
                    tflops = case.flops(direction) / result.ms[direction] / 1e9
                    found.append(Rate(name, _pass(direction), mask == "causal", dim, length, tflops, variant))
            if result.ms.get("forward", 0.0) > HOPELESS * best and variant != "documents":
                hopeless.add((name, *kind))  # a kernel that launches for each document catches up at longer ones
    return tuple(found)


def tune(device: str, dims: tuple[int, ...] = DIMS, rounds: int = 3, say: Say = print) -> Configs:
    """Return the fastest configuration of each pass of the Triton kernel, by head dim."""
    best: Configs = {}
    for direction, dim in product(triton_configs.PASSES, dims):
        case = replace(case_of(8192, dim, "causal", device), deterministic=direction == "bwd_dq")
        name = triton_configs.name(direction, triton_configs.padded_head_dim(dim))
        times: dict[triton_configs.Config, float] = {}
        for config in triton_configs.candidates(direction, triton_configs.padded_head_dim(dim)):
            say(f"{name}: {config}")
            with triton_configs.forced(name, config):
                try:
                    times[config] = _milliseconds(case, direction, rounds)
                except Exception as error:  # the compiler fails, or shared memory is too small: not a candidate here
                    say(f"{name}: {config} does not run: {error}")
        if times:
            chosen = min(times, key=lambda config: times[config])
            best[name] = triton_configs.written(chosen)
    return best


def _milliseconds(case: Case, direction: str, rounds: int) -> float:
    """Return the milliseconds of a pass of the Triton kernel."""
    tensors = case.tensors()
    function = candidate(case, "triton")
    device = torch.device(case.device)
    out = function(*tensors[:3])
    if direction == "forward":
        return interleaved({"": partial(function, *tensors[:3])}, device, rounds)[""]
    backward = partial(torch.autograd.grad, out, tensors[:3], tensors[3], retain_graph=True)
    backward()
    return interleaved({"": backward}, device, rounds)[""]


def supported(case: Case) -> tuple[str, ...]:
    """Return the kernels that kernel="auto" may choose for both passes of a case."""
    q, k, v, _ = case.tensors()
    x = local.inputs(q, k, v, case.rule, Features(case.head_dim**-0.5))
    requests = [local.kernel_request(x, direction) for direction in ("forward", "backward")]
    return tuple(
        kernel.name
        for kernel in registry.kernels()
        if registry.may_be_chosen(kernel, requests[0])
        and not any(registry.refusal(kernel, request) for request in requests)
    )


def _pass(direction: str) -> Pass:
    return "backward" if direction == "backward" else "forward"
