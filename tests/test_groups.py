"""Which ranks a call is over when nobody passed a mesh."""

import pytest
import torch

from meshflash import Layout, attention, flash_attention, groups, shard, unshard
from meshflash.runtime.launchers import LaunchError

X = torch.randn(1, 6, 2, 8)
LAYOUT = Layout.contiguous(6, 1)


@pytest.fixture
def second_of_two(monkeypatch):
    """The environment of rank 1 of 2 under torchrun, before anybody made a process group."""
    for name, value in dict(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, TORCHELASTIC_RUN_ID="x").items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(groups, "_started_alone", False)


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(
    "call",
    [lambda: attention(X, X, X), lambda: shard(X, LAYOUT), lambda: unshard(X, LAYOUT)],
    ids=["attention", "shard", "unshard"],
)
def test_launched_rank_without_a_process_group_is_refused(call):
    with pytest.raises(LaunchError, match=r"rank 1 of 2.*meshflash\.init\(\)"):
        call()


@pytest.mark.usefixtures("second_of_two")
def test_compiled_call_of_a_launched_rank_without_a_process_group_is_refused():
    with pytest.raises(Exception, match=r"meshflash\.init\(\)"):
        torch.compile(lambda x: attention(x, x, x), backend="eager", fullgraph=True)(X)


@pytest.mark.usefixtures("second_of_two")
def test_flash_attention_runs_on_a_launched_rank_without_a_process_group():
    assert flash_attention(X, X, X).shape == X.shape
