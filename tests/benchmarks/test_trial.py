"""Trials of the Hopper kernels with an untested Triton: verdicts of processes that pass, fail or hang; MPS."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from meshflash import __version__
from meshflash.bench import trial
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


def test_right_trial_switches_the_kernels_on():
    assert trial.is_due(GPU)
    verdict = trial.run(GPU, command=python("import os; assert os.environ['MESHFLASH_GLUON'] == 'try'"))
    assert verdict == support.Verdict("4.2.0", __version__, right=True)
    assert support.has_gluon(GPU)
    assert not trial.is_due(GPU)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('forward: relative error 0.3')", "forward: relative error 0.3 (exit status 1)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it printed nothing (exit status -11)"),
    ],
)  # fmt: skip
def test_failed_trial_keeps_the_kernels_off_with_its_last_line(code, reason):
    verdict = trial.run(GPU, command=python(code))
    assert not verdict.right
    assert verdict.reason == reason
    assert support.read_verdict(GPU) == verdict
    assert not support.has_gluon(GPU)
    assert not trial.is_due(GPU), "a verdict is final for this version"


def test_hanging_trial_is_ended_even_if_it_ignores_sigterm(monkeypatch):
    monkeypatch.setattr(trial, "GRACE_S", 0.2)
    begin = time.monotonic()
    ignoring = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    )
    verdict = trial.run(GPU, timeout_s=1, command=python(ignoring))
    assert verdict.reason == "not done after 1 s"
    assert time.monotonic() - begin < 30


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


def test_trial_runs_both_head_dims_and_every_kind_of_mask():
    shapes = {(case.head_dim, case.mask) for case in trial.cases("cuda")}
    assert shapes == {(dim, mask) for dim in (64, 128) for mask in trial.MASKS}
