"""Trials of the Hopper kernels with an untested Triton: verdicts of processes that pass, fail or hang; MPS."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshflash import __version__
from meshflash.bench import trial
from meshflash.check.suite import TRIAL_TOKENS, trial_cases
from meshflash.kernels import rates
from meshflash.kernels.hopper import support
from meshflash.runtime import mps

triton = pytest.importorskip("triton")
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Pretend a Hopper GPU with an untested Triton, without MPS."""
    monkeypatch.setenv("MESHFLASH_RATES", str(tmp_path))
    monkeypatch.delenv("MESHFLASH_GLUON", raising=False)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", str(tmp_path / "no-pipes"))
    monkeypatch.setattr(support, "has_descriptors", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(rates, "identity", lambda device: ("NVIDIA H200", "sm_90"))
    monkeypatch.setattr(triton, "__version__", "4.2.0")
    support.forget()
    yield
    support.forget()


def python(code):
    return [sys.executable, "-S", "-c", code]


def test_right_trial_switches_the_kernels_on(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert trial.is_due(GPU)
    code = "import os; assert os.environ['MESHFLASH_GLUON'] == 'try'; assert 'TRITON_INTERPRET' not in os.environ"
    assert trial.run(GPU, command=python(code)) == support.Verdict("4.2.0", __version__, right=True)
    assert support.has_gluon(GPU)
    assert not trial.is_due(GPU)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('case 1'); print('WrongResultError: dq'); raise SystemExit(3)", "WrongResultError: dq at case 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    ],
)  # fmt: skip
def test_wrong_results_and_crashes_keep_the_kernels_off_and_may_be_tried_again(code, reason):
    verdict = trial.run(GPU, command=python(code))
    assert not verdict.right
    assert verdict.reason == reason
    assert support.read_verdict(GPU) == verdict
    assert not support.has_gluon(GPU)
    assert trial.is_due(GPU)


def test_trial_that_could_not_run_is_no_verdict():
    with pytest.raises(trial.RefusedError, match=r"could not run: MemoryError: no memory \(exit status 1\)"):
        trial.run(GPU, command=python("raise MemoryError('no memory')"))
    assert support.read_verdict(GPU) is None


def test_hanging_trial_is_ended_with_what_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "GRACE_S", 0.2)
    begin = time.monotonic()
    code = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('case 7', flush=True);"
        f"child = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid));"
        "time.sleep(60)"
    )  # fmt: skip
    verdict = trial.run(GPU, timeout_s=1, command=python(code))
    assert verdict.reason == "not done after 1 s at case 7"
    assert time.monotonic() - begin < 30
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not state.exists() or ") Z " in state.read_text(), "the child of the trial still runs"


def test_trial_ends_with_the_process_that_started_it(tmp_path):
    waiting = subprocess.Popen(
        [sys.executable, "-c", "from meshflash.bench.trial import _end_with_parent; _end_with_parent()"],
        stdin=subprocess.PIPE,
    )
    assert waiting.poll() is None
    assert waiting.stdin is not None
    waiting.stdin.close()
    assert waiting.wait(60) == 1


def test_trial_is_refused_under_mps(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with pytest.raises(trial.RefusedError, match="CUDA_MPS_PIPE_DIRECTORY=/somewhere is set"):
        trial.run(GPU, command=python(""))
    assert support.read_verdict(GPU) is None
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    (tmp_path / "control").touch()
    monkeypatch.setattr(mps, "DEFAULT_PIPES", str(tmp_path))
    with pytest.raises(trial.RefusedError, match="control daemon"):
        trial.run(GPU, command=python(""))


def test_trial_has_every_kind_of_mask_and_both_head_dims():
    found = list(trial_cases())
    assert {case.dim for case in found} == {64, 128}
    assert any(case.sinks for case in found)
    assert any(case.softcap for case in found)
    kinds = {str(case.mask) for case in found if case.tokens == TRIAL_TOKENS[0]}
    assert len(kinds) == 4


@pytest.mark.gpu
def test_trial_passes_on_a_hopper_gpu(monkeypatch, tmp_path):
    monkeypatch.undo()
    support.forget()
    monkeypatch.setenv("MESHFLASH_RATES", str(tmp_path))
    verdict = trial.run(GPU)
    assert verdict == support.Verdict(triton.__version__, __version__, right=True)
