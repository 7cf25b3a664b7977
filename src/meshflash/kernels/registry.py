"""The kernels there are, and the choice of one: the fastest that can do all that is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshflash.kernels.contract import Ask, Kernel, Pass
from meshflash.kernels.reference import Reference
from meshflash.kernels.tiled import Tiled
from meshflash.kernels.triton_kernel import Triton
from meshflash.kernels.vendor import Vendor

#: Fastest first, as `meshflash bench kernels` found them. The oracle is never chosen by itself.
_KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (Vendor(), Triton(), Tiled(), Reference())}
_BY_NAME_ONLY = {"reference"}

_spies: list[list[tuple[str, Pass]]] = []


def kernels() -> tuple[Kernel, ...]:
    """Every kernel, fastest first."""
    return tuple(_KERNELS.values())


def names() -> tuple[str, ...]:
    """What `kernel=` takes."""
    return ("auto", *_KERNELS)


def choose(name: str, ask: Ask) -> Kernel:
    """The kernel of this name, or with "auto" the fastest that can do all that is asked."""
    if name != "auto":
        kernel = _KERNELS[name]
        reason = refusal(kernel, ask)
        if reason:
            able = [other.name for other in kernels() if refusal(other, ask) is None]
            raise ValueError(f'kernel="{name}" lacks {reason}; able here: {", ".join(able)}, or "auto"')
        return kernel.serving(ask)
    for kernel in kernels():
        interpreted = kernel.name == "triton" and ask.device == "cpu"
        if kernel.name not in _BY_NAME_ONLY and not interpreted and refusal(kernel, ask) is None:
            return kernel.serving(ask)
    raise AssertionError("the tiled kernel can do everything")


def refusal(kernel: Kernel, ask: Ask) -> str | None:
    """Why this kernel cannot serve this call, or None."""
    return kernel.missing() or kernel.lacks(ask)


@contextmanager
def spy() -> Iterator[list[tuple[str, Pass]]]:
    """Collect the (kernel, pass) that run inside the block.

    >>> import torch, meshflash
    >>> x = torch.zeros(1, 4, 1, 8)
    >>> with spy() as ran:
    ...     _ = meshflash.flash_attention(x, x, x)
    >>> ran
    [('vendor', 'forward')]
    """
    ran: list[tuple[str, Pass]] = []
    _spies.append(ran)
    try:
        yield ran
    finally:
        _spies[:] = [other for other in _spies if other is not ran]


def tell_spies(kernel: Kernel, direction: Pass) -> None:
    """Let every spy know which kernel runs."""
    for ran in _spies:
        ran.append((kernel.name, direction))
