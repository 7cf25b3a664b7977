"""Hopper kernels while several processes share the GPU by time slicing: every tile of every call is computed.

Without MPS the driver preempts kernels at any instruction, and restores their mbarriers afterwards. A forward once kept
the tile that it had taken from the counter in the memory of an idle mbarrier, and lost it in about 1 of 100 calls.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
PROCESSES, CALLS = 8, 200


def main(dim: int) -> None:
    """Print how many calls left rows of their output or LSE unwritten, or gave another result than the first one."""
    from meshflash import Mask, flash_attention

    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    q, k, v = (torch.randn(1, 16384, 8, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first, wrong = None, []
    for _ in range(CALLS):
        out, lse = flash_attention(q, k, v, mask=Mask.causal(), kernel="hopper", return_lse=True)
        first = out if first is None else first
        wrong.append(torch.isnan(out).any() | torch.isnan(lse).any() | (out != first).any())
    print(int(torch.stack(wrong).sum()))


@pytest.mark.parametrize("dim", [64, 128])
def test_no_tile_is_lost_while_processes_share_the_gpu(dim):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    command = [sys.executable, __file__, str(dim)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    assert [process.communicate()[0].strip() for process in started] == ["0"] * PROCESSES


if __name__ == "__main__":
    main(int(sys.argv[1]))
