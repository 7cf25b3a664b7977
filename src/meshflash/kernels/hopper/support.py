"""Whether the Hopper kernels are on for a device, and if not, why and what to do.

Gluon is young, and a miscompiled kernel hangs the GPU. So the kernels run only with versions of Triton with which all
their tests ran. `meshflash calibrate` tries them with another version in a process of its own. It remembers the verdict
for this machine: `remember` writes it, and `kernels_off` reads it. Processes that run already keep their answer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from meshflash import __version__
from meshflash.core.reading import read_json
from meshflash.kernels import rates
from meshflash.kernels.triton.configs import has_descriptors

#: Versions of Triton with which all tests of these kernels ran on an H200.
TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
#: "0" switches the kernels off; TRY runs them with any version of Triton, as a trial does.
SWITCH, TRY = "MESHFLASH_GLUON", "try"


@dataclass(frozen=True)
class Off:
    """Why the Hopper kernels are off, as a clause, and what to do.

    Args:
        reason: The reason.
        remedy: What to do, or what the kernels are for.
        untested: The version of Triton, where it is the reason: a trial may switch the kernels on.
        fixable: Whether the remedy can switch them on.

    >>> print(Off("MESHFLASH_GLUON=0 is set", "unset MESHFLASH_GLUON"))
    MESHFLASH_GLUON=0 is set; unset MESHFLASH_GLUON
    """

    reason: str
    remedy: str
    untested: str = ""
    fixable: bool = True

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Verdict:
    """How a trial of the kernels ended on this machine, with one version of Triton and of meshflash.

    Args:
        triton: The version of Triton.
        meshflash: The version of meshflash.
        right: Whether all results were right.
        reason: What went wrong.
    """

    triton: str
    meshflash: str
    right: bool
    reason: str = ""


@cache
def has_gluon(device: torch.device) -> bool:
    """Return whether the Hopper kernels are on for a device.

    Args:
        device: Any device.
    """
    return kernels_off(device) is None


def has_tested_gluon(device: torch.device) -> bool:
    """Return whether the Hopper kernels are on, with a Triton that all tests ran with.

    A kernel that waits for other ranks asks this: a trial has one rank, and a fault would hang all of them.

    Args:
        device: Any device.
    """
    if not has_gluon(device):
        return False
    import triton

    return is_tested(triton.__version__)


@cache
def kernels_off(device: torch.device) -> Off | None:
    """Return why the Hopper kernels are off for a device, or None if they are on.

    Args:
        device: Any device.
    """
    if device.type != "cuda" and not has_descriptors(device):
        return Off(f"the device is {device.type}", "it needs a Hopper GPU", fixable=False)
    if not has_descriptors(device) or torch.cuda.get_device_capability(device)[0] != 9:
        name, architecture = rates.identity(device)
        return Off(f"{name} ({architecture}) is not a Hopper GPU", "it needs compute capability 9.0", fixable=False)
    if os.environ.get(SWITCH) == "0":
        return Off(f"{SWITCH}=0 is set", f"unset {SWITCH}")
    if find_spec("triton") is None:
        return Off("triton is not installed", "pip install triton")
    import triton

    if is_tested(triton.__version__) or os.environ.get(SWITCH) == TRY:
        return None
    verdict = read_verdict(device)
    if verdict is None or (verdict.triton, verdict.meshflash) != (triton.__version__, __version__):
        return Off(f"not tested with Triton {triton.__version__}", "run `meshflash calibrate`", triton.__version__)
    if verdict.right:
        return None
    remedy = f"install Triton {TRITON_VERSIONS[0]} to {TRITON_VERSIONS[-1]}, or run `meshflash calibrate` again"
    reason = f"failed on this machine with Triton {verdict.triton} ({verdict.reason})"
    return Off(reason, remedy, triton.__version__)


def is_tested(version: str) -> bool:
    """Return whether the kernels were tested with a version of Triton.

    Args:
        version: The version.

    >>> is_tested("3.9.1"), is_tested("3.90.0")
    (True, False)
    """
    return version.startswith(tuple(f"{tested}." for tested in TRITON_VERSIONS))


def read_verdict(device: torch.device) -> Verdict | None:
    """Return the verdict of the last trial on this machine, or None; a file that cannot be read counts as none.

    Args:
        device: The GPU.
    """
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        return Verdict(**read_json(verdict_file(device)))
    return None


def remember(device: torch.device, verdict: Verdict) -> Path:
    """Write the verdict of a trial, and use it from now on; return the file.

    Args:
        device: The GPU.
        verdict: The verdict.
    """
    file = verdict_file(device)
    rates.write_whole(asdict(verdict), file)
    forget()
    return file


def forget() -> None:
    """Examine devices anew at the next call."""
    has_gluon.cache_clear()
    kernels_off.cache_clear()


def verdict_file(device: torch.device) -> Path:
    """Return the file of the verdict: next to the user's own table of rates.

    Args:
        device: The GPU.
    """
    table = rates.own_file(rates.identity(device)[0])
    return table.with_name(f"{table.stem}-triton.json")
