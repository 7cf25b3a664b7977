"""MPS is started for a block, in a folder of its own, and ended with it."""

import os
import stat

import pytest

from meshflash.runtime import mps

FAKE = """#!/bin/sh
read word
echo "$@ $word $CUDA_MPS_PIPE_DIRECTORY" >> {log}
"""


def test_it_runs_while_the_block_does(tmp_path, monkeypatch):
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


def test_where_it_is_not_there(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="nvidia-cuda-mps-control is not there"), mps.mps():
        pass
