"""The kernels there are, and the choice of one: the fastest that can do all that is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from meshflash.core.tiles import Worklist
from meshflash.kernels import rates
from meshflash.kernels.contract import HALF, Kernel, KernelRequest, Pass
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.reference import Reference
from meshflash.kernels.tiled import Tiled
from meshflash.kernels.triton.kernel import Triton
from meshflash.kernels.vendor.cpu import Vendor
from meshflash.kernels.vendor.gpu import Cudnn, Flash2, Flash2Package, Flash3, Flash4

#: In the order in which they are taken where no rates are known. The oracle is never chosen by itself.
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
    """The kernel that serves a call, and why it was taken."""

    kernel: Kernel
    reason: str


class KernelLog(list[tuple[str, Pass]]):
    """The (kernel, pass) that ran, in order, and why each was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[tuple[str, Pass], str] = {}

    def note(self, choice: Choice, direction: Pass) -> None:
        """Add a call."""
        entry = (choice.kernel.name, direction)
        self.append(entry)
        self.reasons[entry] = choice.reason

    def names(self, direction: Pass) -> str:
        """Return the kernels that ran in a pass, each once, as records name them."""
        return ", ".join(dict.fromkeys(name for name, ran_in in self if ran_in == direction))


_spies: list[KernelLog] = []
_chosen: WeakKeyDictionary[Worklist, dict[Any, Choice]] = WeakKeyDictionary()


def kernels() -> tuple[Kernel, ...]:
    """Every kernel, in the order in which they are taken where no rates are known."""
    return tuple(_KERNELS.values())


def names() -> tuple[str, ...]:
    """What `kernel=` takes."""
    return _NAMES


_NAMES = ("auto", *_KERNELS)


def choose(name: str, ask: KernelRequest) -> Choice:
    """The kernel of this name, or with "auto" the fastest that can do all that is asked; remembered."""
    kept = _chosen.setdefault(ask.work, {})
    key = (name, ask.key)
    found = kept.get(key)
    if found is None:
        found = kept[key] = _choose(name, ask)
    return found


def forget() -> None:
    """Choose anew: other rates are known."""
    global _generation
    rates.forget()
    _chosen.clear()
    _generation += 1


def generation() -> int:
    """How often all choices were forgotten: what was kept from before is not to be used."""
    return _generation


_generation = 0


def _choose(name: str, ask: KernelRequest) -> Choice:
    if name != "auto":
        kernel = _KERNELS[name]
        reason = refusal(kernel, ask)
        if reason:
            others = ", ".join(other.name for other in kernels() if refusal(other, ask) is None)
            raise ValueError(f'kernel="{name}" {reason}; supported here: {others}, or "auto"')
        return Choice(kernel.serving(ask), "asked for")
    able = [kernel for kernel in kernels() if may_be_chosen(kernel, ask) and refusal(kernel, ask) is None]
    assert able, "the tiled kernel can do everything"
    known = rates.known(ask.device) if ask.dtype in HALF else None
    if known is None or len(able) == 1:
        others = f"before {', '.join(kernel.name for kernel in able[1:])}" if able[1:] else "the only supported one"
        return Choice(able[0].serving(ask), others + (", by a fixed order" if able[1:] else ""))
    predicted = [(known.rates.seconds(kernel.name, ask, kernel.launches(ask)), kernel) for kernel in able]
    measured = sorted(((t, kernel) for t, kernel in predicted if t is not None), key=lambda pair: pair[0])
    if not measured:
        return Choice(able[0].serving(ask), f"by a fixed order: no supported kernel is in {known.source}")
    times = ", ".join(f"{kernel.name} {t * 1e3:.3g} ms" for t, kernel in measured[:3])
    return Choice(measured[0][1].serving(ask), f"predicted: {times}, by {known.source}")


def may_be_chosen(kernel: Kernel, ask: KernelRequest) -> bool:
    """Whether "auto" considers it: not the oracle, and nothing interpreted."""
    return kernel.name not in _BY_NAME_ONLY and not (kernel.name == "triton" and ask.device.type == "cpu")


def refusal(kernel: Kernel, ask: KernelRequest) -> str | None:
    """Return why a kernel cannot serve a call, as the predicate of a sentence, or None.

    What the kernel needs of this machine is only looked for where the call itself is supported.
    """
    if unsupported := kernel.unsupported_reason(ask):
        return f"does not support {unsupported}"
    missing = kernel.missing()
    return f"cannot run here: {missing}" if missing else None


@contextmanager
def record_kernels() -> Iterator[KernelLog]:
    """Collect the (kernel, pass) that run inside the block.

    >>> import torch, meshflash
    >>> x = torch.zeros(1, 4, 1, 8)
    >>> with record_kernels() as ran:
    ...     _ = meshflash.flash_attention(x, x, x)
    >>> ran
    [('vendor', 'forward')]
    """
    ran = KernelLog()
    _spies.append(ran)
    try:
        yield ran
    finally:
        _spies[:] = [other for other in _spies if other is not ran]


def log_kernel(choice: Choice, direction: Pass) -> None:
    """Let every spy know which kernel runs."""
    for ran in _spies:
        ran.note(choice, direction)
