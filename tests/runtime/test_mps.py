"""MPS runs for the duration of a `with` block, in a private folder."""

import os
import stat

import pytest

from meshflash.runtime import mps

FAKE = """#!/bin/sh
read input
echo "$@ $input $CUDA_MPS_PIPE_DIRECTORY" >> {log}
"""


def test_mps_runs_for_the_duration_of_the_block(tmp_path, monkeypatch):
    log, control = tmp_path / "log", tmp_path / mps.CONTROL
    control.write_text(FAKE.format(log=log))
    control.chmod(control.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    folder = ""

    def inside():
        nonlocal folder
        with mps.mps():
            folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
            assert os.path.isdir(folder)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        inside()
    assert [line.split() for line in log.read_text().splitlines()] == [["-d", folder], ["quit", folder]]
    assert not os.path.exists(folder)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_missing_mps_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="nvidia-cuda-mps-control is not there"), mps.mps():
        pass
