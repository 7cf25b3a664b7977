"""Calls without a mesh: the ranks they use, and the error on a launched rank without a process group."""

import pytest
import torch

from meshflash import Layout, attention, flash_attention, shard, unshard
from meshflash.runtime.launchers import LaunchError
from meshflash.runtime.state import state

X = torch.randn(1, 6, 2, 8)
LAYOUT = Layout.contiguous(6, 1)


@pytest.fixture
def torchrun_rank_1_of_2(monkeypatch):
    """Set the environment of rank 1 of 2 under torchrun, before a process group exists."""
    for name, value in dict(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, TORCHELASTIC_RUN_ID="x").items():
        monkeypatch.setenv(name, str(value))
    state.pop("started alone")


@pytest.mark.usefixtures("torchrun_rank_1_of_2")
@pytest.mark.parametrize(
    "call",
    [lambda: attention(X, X, X), lambda: shard(X, LAYOUT), lambda: unshard(X, LAYOUT)],
    ids=["attention", "shard", "unshard"],
)
def test_launched_rank_without_a_process_group_is_refused(call):
    with pytest.raises(LaunchError, match=r"rank 1 of 2.*meshflash\.init\(\)"):
        call()


@pytest.mark.usefixtures("torchrun_rank_1_of_2")
def test_compiled_call_of_a_launched_rank_without_a_process_group_is_refused():
    with pytest.raises(Exception, match=r"meshflash\.init\(\)"):
        torch.compile(lambda x: attention(x, x, x), backend="eager", fullgraph=True)(X)


@pytest.mark.usefixtures("torchrun_rank_1_of_2")
def test_flash_attention_runs_on_a_launched_rank_without_a_process_group():
    assert flash_attention(X, X, X).shape == X.shape
