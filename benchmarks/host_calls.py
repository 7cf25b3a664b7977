"""The calls on a single device whose wall time `python -m benchmarks host` shows: ours, and those of peers.

Peers are called as their users call them: SDPA on contiguous tensors in its own layout, backends of SDPA inside one
`sdpa_kernel` around the loop, FlashAttention-4 by its own function. None of them goes through our code.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.host_timing import BACKWARD, BOTH, FORWARD, WARM_UP_CALLS, Call, CallRow, refuse_wrong, time_rows
from meshflash.bench import gemm
from meshflash.bench.candidates import SDPA, Attention, candidate, own_kernel, sdpa
from meshflash.bench.cases import Case, Tensors, on_cpu, pick_dtype
from meshflash.bench.check import Truth, judge, relative_error, truth
from meshflash.bench.measure import Say, both
from meshflash.gemm import matmul
from meshflash.kernels.registry import record_kernels

ATTENTION, SHORT, MATMUL = "attention", "short", "matmul"
SDPA_CUDNN, SDPA_FLASH, FA4 = "sdpa cudnn", "sdpa flash", "fa4"
#: Backends of SDPA that are forced; its default is the peer SDPA.
BACKENDS = {SDPA_CUDNN: SDPBackend.CUDNN_ATTENTION, SDPA_FLASH: SDPBackend.FLASH_ATTENTION}
TORCH_MM = "torch.mm"

#: Of each part the passes, and the peers.
PASSES = {ATTENTION: (FORWARD, BOTH), SHORT: (FORWARD, BACKWARD, BOTH)}
PEERS = {ATTENTION: (SDPA, *BACKENDS), SHORT: (SDPA, *BACKENDS, FA4)}
#: M, N and K. The device takes next to no time for the first; on a CPU that is not so for the others.
GEMMS_ON_GPU = ((128, 128, 128), (4096, 4096, 4096), (4864, 1024, 8256))
GEMMS_ON_CPU = ((16, 16, 16), (128, 128, 128))


def attention_cases(part: str, device: str) -> list[Case]:
    """Return the cases of a part; on a CPU `short` has so few tokens that computing them does not count.

    Args:
        part: ATTENTION or SHORT.
        device: The device that was picked.
    """
    common: dict[str, Any] = dict(dtype=pick_dtype(None, device), device=device)
    if part == ATTENTION:
        return [Case(128, 1, 8, 8, 64, mask, **common) for mask in ("full", "causal")]
    return [Case(16, 2, 8, 2, 32, "causal", **common) if on_cpu(device) else Case(512, 4, 32, 8, 128, **common)]


def own_kernels(device: str) -> tuple[str, ...]:
    """Return our candidates: "auto", and on a GPU the fastest of our own kernels."""
    return ("auto",) if on_cpu(device) else ("auto", own_kernel(device))


def run_attention(part: str, device: str, rounds: int, say: Say) -> Iterator[CallRow]:
    """Yield the rows of a part, case by case; WrongError for a wrong result of ours.

    Args:
        part: ATTENTION or SHORT.
        device: The device that was picked.
        rounds: The number of rounds, in each of which every candidate is timed once.
        say: A function that is called with progress messages.
    """
    for case in attention_cases(part, device):
        tensors = case.tensors()
        want = truth(case, tensors)
        calls: list[Call] = []
        notes: list[CallRow] = []
        for name in (*own_kernels(device), *PEERS[part]):
            say(f"{part}, {case.mask}: checking {name}")
            if name not in PEERS[part]:
                calls += _checked(part, name, case, tensors, want, ours=True)
                continue
            with warnings.catch_warnings(record=True) as warned:  # SDPA warns why it refuses a backend
                warnings.simplefilter("always")
                try:
                    calls += _checked(part, name, case, tensors, want, ours=False)
                except Exception as error:
                    why = _reason(error, [str(each.message) for each in warned])
                    notes += [CallRow(part, name, name, each, case, False, rounds, note=why) for each in PASSES[part]]
        say(f"{part}, {case.mask}: timing {len(calls)} calls")
        yield from time_rows(part, case, calls, notes, rounds)


def _reason(error: Exception, warned: Sequence[str]) -> str:
    """Return why a peer was left out, in one line: the first line of its error and of what it warned of."""
    lines = [str(error) or type(error).__name__, *warned]
    return "; ".join(dict.fromkeys(line.strip().splitlines()[0] for line in lines if line.strip()))


def run_matmul(device: str, rounds: int, say: Say) -> Iterator[CallRow]:
    """Yield the rows of `matmul` beside torch.mm, without gradients; RuntimeError for a wrong result.

    On a CPU our kernel is interpreted, so there only mode="auto" is timed.

    Args:
        device: The device that was picked.
        rounds: The number of rounds, in each of which every candidate is timed once.
        say: A function that is called with progress messages.
    """
    modes = ("auto",) if on_cpu(device) else ("stream_k", "auto")
    for shape in GEMMS_ON_CPU if on_cpu(device) else GEMMS_ON_GPU:
        case = gemm.Case(*shape, dtype=pick_dtype(None, device), device=device)
        head = "{} x {} x {}".format(*shape)
        a, b = case.tensors()
        expected = a.double() @ b.double()
        functions: dict[str, Callable[[], Tensor]] = {mode: partial(matmul, a, b, mode=mode) for mode in modes}
        functions[TORCH_MM] = partial(torch.mm, a, b)
        calls = []
        for name, function in functions.items():
            say(f"{MATMUL} {head}: checking {name}")
            ours = name != TORCH_MM
            error = relative_error(_steady(function), expected)
            gemm.check_error(name, case, error)
            ran = matmul(a, b, mode=name, return_plan=True)[1].mode if ours else name
            calls.append(Call(name, ran, FORWARD, function, error, ours, case.tflop))
        del expected
        say(f"{MATMUL} {head}: timing {len(calls)} calls")
        yield from time_rows(MATMUL, case, calls, (), rounds)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """An attention function, whether its tensors are `[batch, heads, tokens, dim]`, and where it must be called."""

    function: Attention
    heads_first: bool = False
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext

    def of_tokens_first(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call the function on `[batch, tokens, heads, dim]` tensors, for the check."""
        if not self.heads_first:
            return self.function(q, k, v)
        return self.function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _candidate(name: str, case: Case) -> _Candidate:
    if name == SDPA:
        return _Candidate(sdpa(case), heads_first=True)
    if name in BACKENDS:
        return _Candidate(sdpa(case), True, partial(sdpa_kernel, BACKENDS[name]))
    if name == FA4:
        return _Candidate(_flash4(case))
    return _Candidate(candidate(case, name))


def _flash4(case: Case) -> Attention:
    """Return the function of the package flash-attn-4; an exception where it cannot be imported."""
    function = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    causal = case.mask == "causal"

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out  # some versions also return the LSE

    return attention


def _checked(part: str, name: str, case: Case, tensors: Tensors, want: Truth, ours: bool) -> list[Call]:
    """Return a candidate's call on each pass; WrongError if any result differs from float64.

    The check runs on the very calls that are timed, once they are steady: the first call of a shape takes another path
    through our code than those that follow.
    """
    found = _candidate(name, case)
    with found.setting():
        ran = judge(case, name, found.of_tokens_first, tensors, want).ran
        plain = [_in_layout(x.detach(), found.heads_first) for x in tensors]
        leaves = [x.clone().requires_grad_() for x in plain[:3]]
        functions = _functions(found.function, plain, leaves)
        calls = []
        for direction in PASSES[part]:
            error = _error(direction, _steady(functions[direction]), found.heads_first, want)
            refuse_wrong(f"{name}, {direction} in a loop", error, case, want.oracle)
            kernels = both(ran["forward"], ran["backward"]) if direction == BOTH else ran[direction]
            if ours and direction == FORWARD:  # a call without gradients may run another kernel
                with record_kernels() as log:
                    functions[direction]()
                kernels = log.names("forward")
            tflop = _tflop(case, direction) if part == SHORT else None
            calls.append(Call(name, kernels, direction, functions[direction], error, ours, tflop, found.setting))
    return calls


def _functions(attention: Attention, plain: Sequence[Tensor], leaves: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """Return the call of each pass, as users write it: without gradients, with them, and over a retained graph."""
    q, k, v = leaves
    dout = plain[3]

    def forward_and_backward() -> list[Tensor | None]:
        q.grad = k.grad = v.grad = None
        out = attention(q, k, v)
        out.backward(dout)
        return [q.grad, k.grad, v.grad]

    graph = attention(q, k, v)
    return {
        FORWARD: partial(attention, *plain[:3]),
        BACKWARD: partial(torch.autograd.grad, graph, (q, k, v), dout, retain_graph=True),
        BOTH: forward_and_backward,
    }


def _error(direction: str, result: Any, heads_first: bool, want: Truth) -> float:
    """Return the relative error of a call's result: the output of a forward, else the gradients."""
    if direction == FORWARD:
        return want.forward_error(_in_layout(result, heads_first))
    return want.backward_error([_in_layout(grad, heads_first) for grad in result])


def _in_layout(x: Tensor, heads_first: bool) -> Tensor:
    """Swap tokens and heads, and copy, for functions of `[batch, heads, tokens, dim]`."""
    return x.transpose(1, 2).contiguous() if heads_first else x


def _tflop(case: Case, direction: str) -> float:
    """Return the floating-point operations of a pass, in units of 1e12."""
    passes: Iterable[str] = (FORWARD, BACKWARD) if direction == BOTH else (direction,)
    return sum(map(case.flops, passes)) * 1e-12


def _steady(function: Callable[[], Any]) -> Any:
    """Call a function until it takes the path of a loop, and return its last result."""
    for _ in range(WARM_UP_CALLS):
        function()
    return function()
