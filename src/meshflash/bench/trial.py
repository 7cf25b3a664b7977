"""Try the Hopper kernels with a version of Triton that they were not tested with.

A kernel that such a version miscompiles may compute nonsense, hang or end the process. So the trial runs in a process
of its own, `python -m meshflash.bench.trial`, with a limit of time. It checks forward and backward of representative
calls against the oracle of the benchmarks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch

from meshflash import __version__
from meshflash.bench.candidates import candidate
from meshflash.bench.cases import Case
from meshflash.bench.check import judge, truth
from meshflash.kernels.hopper.support import SWITCH, TRY, Verdict, kernels_off, remember
from meshflash.runtime.mps import client_reason

#: Seconds for a whole trial: it compiles some 40 kernels, for several seconds each.
TIMEOUT_S = 900
#: Seconds that a process which was asked to end may take before it is killed.
GRACE_S = 30
#: Lengths of the trial: full tiles only, a partial last tile, and a sequence shorter than a tile.
TOKENS = (1024, 1000, 63)
MASKS = ("causal", "full", "window-100", "documents-3")


class RefusedError(RuntimeError):
    """A trial must not run here."""


def is_due(device: torch.device) -> bool:
    """Return whether the kernels are off on a device only because nobody has tried its version of Triton.

    Args:
        device: The GPU.
    """
    off = kernels_off(device)
    return off is not None and bool(off.untested)


def run(device: torch.device, timeout_s: float = TIMEOUT_S, command: Sequence[str] | None = None) -> Verdict:
    """Try the kernels in a process of their own, remember the verdict for this machine, and return it.

    Raises RefusedError under MPS: a client that is killed there can take the other clients with it.

    Args:
        device: The GPU.
        timeout_s: The most seconds that the trial may take.
        command: The command of the process; by default that of this module.
    """
    reason = client_reason()
    if reason:
        raise RefusedError(
            f"a trial of the kernels may have to be killed, and under MPS that can end other processes too ({reason}); "
            "run meshflash calibrate without MPS"
        )
    command = command or [sys.executable, "-m", "meshflash.bench.trial", str(device)]
    process = subprocess.Popen(
        command, env={**os.environ, SWITCH: TRY}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        lines = [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
        fault = f"{lines[-1].strip()[:300]} (exit status {process.returncode})" if process.returncode else ""
    except subprocess.TimeoutExpired:
        fault = f"not done after {timeout_s:g} s"
        process.terminate()
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    import triton

    verdict = Verdict(triton.__version__, __version__, right=not fault, reason=fault)
    remember(device, verdict)
    return verdict


def cases(device: str) -> Iterator[Case]:
    """Yield the calls of a trial: both head dims, masks, GQA, half precisions, full and partial tiles.

    Args:
        device: The name of the GPU.
    """
    for dim in (64, 128):
        for tokens in TOKENS:
            for mask in MASKS:
                yield Case(tokens, 2, 8, 2, dim, mask, "bfloat16", device)
        yield Case(TOKENS[0], 2, 8, 8, dim, "causal", "float16", device)


def main(device: str) -> None:
    """Check every case, and say which; raise an error for the first wrong one.

    Args:
        device: The name of the GPU.
    """
    for case in cases(device):
        print(case, flush=True)
        tensors = case.tensors()
        verdict = judge(case, "hopper", candidate(case, "hopper"), tensors, truth(case, tensors))
        for direction, ran in verdict.ran.items():
            if ran != "hopper":
                raise RuntimeError(f"{direction}: {ran} ran in place of hopper")


if __name__ == "__main__":
    main(sys.argv[1])
