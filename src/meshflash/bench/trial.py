"""Try the Hopper kernels with a version of Triton that they were not tested with.

A kernel that such a version miscompiles may compute nonsense, hang or end the process. So the trial runs in a process
of its own, `python -m meshflash.bench.trial`, with a limit of time. It compares forward and every gradient of
representative calls with the float64 oracle, and one GEMM with torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from meshflash import __version__
from meshflash.api import flash_attention
from meshflash.check.oracle import check, gradients
from meshflash.check.suite import trial_cases
from meshflash.gemm import matmul
from meshflash.kernels import registry
from meshflash.kernels.hopper.support import SWITCH, TRY, Verdict, kernels_off, remember
from meshflash.runtime.mps import client_reason

#: Seconds for a whole trial: it compiles some 60 kernels, for several seconds each.
TIMEOUT_S = 1200
#: Seconds after SIGTERM until the processes of a trial are killed.
GRACE_S = 30
#: Exit status of a trial that found a wrong result. Any other failure but a signal says nothing about the kernels.
WRONG = 3


class RefusedError(RuntimeError):
    """A trial must not run here, or could not run."""


def is_due(device: torch.device) -> bool:
    """Return whether a trial may switch the kernels on: they are off on a device because of its version of Triton.

    Args:
        device: The GPU.
    """
    off = kernels_off(device)
    return off is not None and bool(off.untested)


def run(device: torch.device, timeout_s: float = TIMEOUT_S, command: Sequence[str] | None = None) -> Verdict:
    """Try the kernels in a process of their own, remember the verdict for this machine, and return it.

    A wrong result, a crash and a hang are verdicts. Anything else that ends the trial, such as a lack of memory, raises
    RefusedError, and so does MPS: a client that is killed there can take the other clients with it.

    Args:
        device: The GPU.
        timeout_s: The most seconds that the trial may take.
        command: The command of the process; by default that of this module.
    """
    reason = client_reason()
    if reason:
        raise RefusedError(
            f"a trial may have to be killed, and under MPS that can end other processes too ({reason}); "
            "run meshflash calibrate without MPS"
        )
    environment = {**os.environ, SWITCH: TRY}
    environment.pop("TRITON_INTERPRET", None)
    command = command or [sys.executable, "-m", "meshflash.bench.trial", str(device)]
    with tempfile.TemporaryFile("w+") as output:  # no pipe: a compiler that hangs would keep it open
        # The child reads its standard input until this process ends, and then ends too. A session of its own makes it
        # possible to kill the compilers that it started.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        lines = [line.strip() for line in output.read().splitlines() if line.strip()]
    where = next((f" at {line}" for line in reversed(lines) if line.startswith("case ")), "")
    errors = [line for line in lines if "Error" in line.partition(":")[0]] or lines[-1:] or ["no output"]
    if status is None:
        fault = f"not done after {timeout_s:g} s{where}"
    elif status == WRONG:
        fault = f"{errors[-1][:300]}{where}"
    elif status < 0:
        fault = f"ended by {signal.Signals(-status).name}{where}"
    elif status:
        raise RefusedError(f"the trial could not run: {errors[-1][:300]} (exit status {status})")
    else:
        fault = ""
    import triton

    verdict = Verdict(triton.__version__, __version__, right=not fault, reason=fault)
    remember(device, verdict)
    return verdict


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, by SIGTERM first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            break
    with suppress(ProcessLookupError):  # what it started may ignore SIGTERM and outlive it
        os.killpg(process.pid, signal.SIGKILL)


def main(device: str) -> None:
    """Check every case; exit with WRONG at the first wrong result.

    Args:
        device: The name of the GPU.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _check_attention(device)
        _check_gemm(device)
    except AssertionError as error:
        print(f"WrongResultError: {str(error).partition(chr(10))[0]}", flush=True)
        sys.exit(WRONG)


def _check_attention(device: str) -> None:
    """Compare every case in bfloat16, and some in float16 or with deterministic gradients."""
    made = list(trial_cases())
    runs = [(case, torch.bfloat16, False) for case in made]
    runs += [(made[0], torch.float16, False), (made[0], torch.bfloat16, True), (made[-1], torch.bfloat16, True)]
    for case, dtype, deterministic in runs:
        print(f"case {case} {dtype}{' deterministic' * deterministic}", flush=True)
        leaves = case.inputs(dtype, device)
        with registry.record_kernels() as ran:
            outputs = flash_attention(
                leaves["q"], leaves["k"], leaves["v"], **case.options(leaves),
                kernel="hopper", return_lse=True, deterministic=deterministic,
            )  # fmt: skip
            found = gradients(outputs, leaves, case)
        if set(ran) != {("hopper", "forward"), ("hopper", "backward")}:
            raise RuntimeError(f"{ran} ran in place of hopper")
        check(found, case, leaves)


def _check_gemm(device: str) -> None:
    print("case GEMM", flush=True)
    a, b = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((1000, 776), (776, 504)))
    out, expected = matmul(a, b, mode="stream_k"), a.double() @ b.double()
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < 1e-2, f"GEMM: relative error {error:.1e}"


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, and with it the other end of standard input."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
