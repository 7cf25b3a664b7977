"""The registry of kernels, and the choice of one for a call: the fastest that supports it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from meshflash.core.tiles import Worklist
from meshflash.kernels import rates
from meshflash.kernels.contract import HALF, Kernel, KernelRequest, Pass
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.rates import Predicted
from meshflash.kernels.reference import Reference
from meshflash.kernels.tiled import Tiled
from meshflash.kernels.triton.kernel import Triton
from meshflash.kernels.vendor.cpu import Vendor
from meshflash.kernels.vendor.gpu import Cudnn, Flash2, Flash2Package, Flash3, Flash4

#: In order of preference where no rates are known. "auto" never chooses the oracle.
_KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Vendor(),
        Flash4(),
        Flash3(),
        Cudnn(),
        Flash2Package(),
        Flash2(),
        Hopper(),
        Triton(),
        Tiled(),
        Reference(),
    )
}
_BY_NAME_ONLY = {"reference"}


@dataclass(frozen=True)
class Choice:
    """The kernel that serves a call, and why it was taken; `choose` makes it.

    Args:
        kernel: The kernel.
        reason: The reason, for people.
        predicted: The predicted time of the call; None where no rates are known.
    """

    kernel: Kernel
    reason: str
    predicted: Predicted | None = None


class KernelLog(list[tuple[str, Pass]]):
    """The (kernel, pass) pairs that ran, in order, and why each was taken; `record_kernels` makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[tuple[str, Pass], str] = {}

    def note(self, choice: Choice, direction: Pass) -> None:
        """Append a call.

        Args:
            choice: The kernel that ran, and why.
            direction: The pass that ran.
        """
        entry = (choice.kernel.name, direction)
        self.append(entry)
        self.reasons[entry] = choice.reason

    def names(self, direction: Pass) -> str:
        """Return the kernels that ran in a pass, each once, as records name them.

        Args:
            direction: The pass.
        """
        return ", ".join(dict.fromkeys(name for name, ran_in in self if ran_in == direction))


#: Registry of open logs, by their id: two logs that are equal as lists are two logs. Most calls find none, and need
#: not call `log_kernel`.
open_logs: dict[int, KernelLog] = {}
log = logging.getLogger("meshflash")
#: Variables in which launchers tell a process its rank on its machine.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "PALS_LOCAL_RANKID")
#: Choices, attached to the worklist that they are for. They hold no tensor.
_choices: WeakKeyDictionary[Worklist, dict[Any, Choice]] = WeakKeyDictionary()


def kernels() -> tuple[Kernel, ...]:
    """Return every kernel, in order of preference where no rates are known."""
    return tuple(_KERNELS.values())


def find(name: str) -> Kernel:
    """Return the kernel of a name.

    Args:
        name: A name of `names()` but "auto".
    """
    return _KERNELS[name]


def names() -> tuple[str, ...]:
    """Return the names that `kernel=` accepts."""
    return _NAMES


_NAMES = ("auto", *_KERNELS)


def choose(name: str, request: KernelRequest) -> Choice:
    """Return the kernel of this name, or with "auto" the fastest one that supports a call; cached with the worklist.

    Raises ValueError if the named kernel does not support the call.

    Args:
        name: A name of `names()`.
        request: The call, without its tensors.
    """
    kept = _choices.setdefault(request.work, {})
    key = (name, request.key)
    found = kept.get(key)
    if found is None:
        found = kept[key] = _choose(name, request)
    return found


def release() -> None:
    """Free the device memory that kernels keep between calls; the next call allocates it again."""
    for kernel in kernels():
        kernel.release()


def forget() -> None:
    """Drop all cached choices and tables of rates, so that new rates take effect."""
    rates.forget()
    _choices.clear()
    for drop_choices in on_forget:
        drop_choices()


#: Registry of functions that `forget` calls: caches elsewhere that hold choices must be cleared.
on_forget: list[Callable[[], None]] = []


def _choose(name: str, request: KernelRequest) -> Choice:
    if name != "auto":
        kernel = _KERNELS[name]
        reason = refusal(kernel, request)
        if reason:
            others = ", ".join(other.name for other in kernels() if refusal(other, request) is None)
            raise ValueError(f'kernel="{name}" {reason}; supported here: {others}, or "auto"')
        known = rates.known(request.device) if request.dtype in HALF else None
        predicted = known.rates.predict(name, request, kernel.launches(request)) if known else None
        return Choice(kernel.serving(request), "requested", predicted)
    choice = _fastest(request)
    off = _tell_kernels_off(request)
    return replace(choice, reason=f"{choice.reason}; {off}") if off else choice


def _tell_kernels_off(request: KernelRequest) -> str:
    """Return which kernels are off here although they support a call, and why; log each reason once."""
    found = []
    for kernel in kernels():
        off = kernel.off_reason(request)
        if off:
            text = f"kernel {kernel.name} is off: {off[0]}"
            _log_once(text, logging.WARNING if off[1] else logging.INFO)
            found.append(text)
    return "; ".join(found)


@cache
def _log_once(text: str, level: int) -> None:
    """Log a line, on one rank of each machine: machines differ in GPUs and verdicts."""
    local_rank = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
    if local_rank == "0":
        log.log(level, "%s", text)


def _fastest(request: KernelRequest) -> Choice:
    """Return the kernel with the shortest predicted time of those that support a call: that of its layer."""
    supported = [kernel for kernel in kernels() if may_be_chosen(kernel, request) and refusal(kernel, request) is None]
    assert supported, "the tiled kernel can do everything"
    known = rates.known(request.device) if request.dtype in HALF else None
    if known is None or len(supported) == 1:
        others = (
            f"before {', '.join(kernel.name for kernel in supported[1:])}"
            if supported[1:]
            else "the only supported one"
        )
        return Choice(supported[0].serving(request), others + (", by a fixed order" if supported[1:] else ""))
    times = [(known.rates.predict(kernel.name, request, kernel.launches(request)), kernel) for kernel in supported]
    measured = {kernel: t for t, kernel in times if t is not None}
    if not measured:
        return Choice(supported[0].serving(request), f"by a fixed order: no supported kernel is in {known.source}")
    costs = {kernel: t.cost() for kernel, t in measured.items()}
    chosen = rates.cheapest(costs)
    shown = sorted(measured, key=lambda kernel: (kernel is not chosen, costs[kernel]))[:3]
    of_kernels = ", ".join(
        f"{kernel.name} {measured[kernel].device * 1e3:.3g} ({measured[kernel].host * 1e3:.3g})" for kernel in shown
    )
    reason = f"predicted ms (host): {of_kernels}, by {known.source}"
    return Choice(chosen.serving(request), reason, measured[chosen])


def may_be_chosen(kernel: Kernel, request: KernelRequest) -> bool:
    """Return whether "auto" considers a kernel: not the oracle, and nothing that would run in an interpreter.

    Args:
        kernel: The kernel.
        request: The call, without its tensors.
    """
    return kernel.name not in _BY_NAME_ONLY and not (kernel.name == "triton" and request.device.type == "cpu")


def refusal(kernel: Kernel, request: KernelRequest) -> str | None:
    """Return why a kernel cannot serve a call, as the predicate of a sentence, or None.

    Looking for packages and devices takes time, so it is done only if the call itself is supported.

    Args:
        kernel: The kernel.
        request: The call, without its tensors.
    """
    if unsupported := kernel.unsupported_reason(request):
        return f"does not support {unsupported}"
    missing = kernel.missing()
    return f"cannot run here: {missing}" if missing else None


@contextmanager
def record_kernels() -> Iterator[KernelLog]:
    """Collect the (kernel, pass) pairs that run inside of the block.

    >>> import torch, meshflash
    >>> x = torch.zeros(1, 4, 1, 8)
    >>> with record_kernels() as ran:
    ...     _ = meshflash.flash_attention(x, x, x)
    >>> ran
    [('vendor', 'forward')]
    """
    log = KernelLog()
    open_logs[id(log)] = log
    try:
        yield log
    finally:
        del open_logs[id(log)]


def log_kernel(choice: Choice, direction: Pass) -> None:
    """Record a call in every open `KernelLog`.

    Args:
        choice: The kernel that ran, and why.
        direction: The pass that ran.
    """
    if open_logs:
        for log in tuple(open_logs.values()):  # a copy: other threads open and close logs meanwhile
            log.note(choice, direction)
