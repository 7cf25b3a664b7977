"""Schedules over NCCL, between two ranks that share a GPU under CUDA MPS, match a single device."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from cases import CASES
from meshflash.check.oracle import check
from meshflash.check.spread import Item, check_moved, run_item, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="needs CUDA MPS"),
]
NAMES = ("full", "causal", "gqa", "sinks", "dropout", "documents by row", "sink tokens", "lse gradient", "everything")


@pytest.fixture
def mps():
    """Start the MPS daemon and yield the variables that its clients need; stop it afterwards."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in variables.values():
            Path(path).mkdir()
        environment = os.environ | variables
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=60)
        yield variables
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, timeout=60, check=True)


def items(schedule):
    return [Item(CASES[name][0], schedule, 2, device="cuda") for name in NAMES]


@pytest.mark.parametrize("schedule", ["ring", "zigzag", "allgather", "allgather(head_stride=1)"])
def test_schedules_match_reference_over_nccl(mps, tmp_path, schedule):
    ranks = []
    for rank in range(2):
        # NCCL lets ranks with different host ids share a GPU
        own = {"NCCL_HOSTID": f"host{rank}", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, __file__, schedule, str(rank), str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=os.environ | mps | own))
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for n, item in enumerate(items(schedule)):
        check(whole(item, [part[n][0] for part in parts]), item.case, item.case.inputs(item.dtype))
        check_moved(item, [part[n][1] for part in parts])


def main(schedule: str, rank: int, folder: Path) -> None:
    """Run all cases on one rank and save its results to a file."""
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    results = [run_item(rank, torch.distributed.group.WORLD, item) for item in items(schedule)]
    torch.save([({name: x.cpu() for name, x in own.items()}, moved) for own, moved in results], folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
