"""Settings and fixtures of all tests: `pool` runs a function in several worker processes, one for each rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import forkserver
from interpreted import speed_up
from meshflash.check import oracle
from meshflash.runtime import processes
from pool import Pool

# These helpers assert too. Register them before a test imports them, so that pytest shows the compared values.
pytest.register_assert_rewrite("core.definition", "train.checkpoints")

# A shell that starts the tests in the background ignores SIGINT for them. Commands under test would inherit that,
# and the tests that interrupt them would hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch looks up the name of each host that a store connects to. Where no name server answers, that takes 5 s at a time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Tensors of tests are small: more threads would synchronize longer than they compute.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads this once, on import, so set it before any import of Triton. Workers of the pool inherit it.
    os.environ.setdefault("TRITON_INTERPRET", "1")
speed_up()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Yield worker processes that run a function on 1 to 4 ranks; see `tests/pool.py`."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session", autouse=True)
def started_ranks() -> Iterator[None]:
    """Let `run_ranks` start its ranks with torch imported; commands in processes of their own start them anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "multiprocessing", SimpleNamespace(get_context=lambda method: forkserver.context()))
        yield


@pytest.fixture(scope="session", autouse=True)
def remembered_references() -> Iterator[None]:
    """Compute the oracle's results once for all kernels, schedules and world sizes that compare with the same case."""
    compute, known = oracle.references, {}  # type: ignore[var-annotated]

    def references(case: oracle.Case, leaves: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
        key = case, *((name, x.dtype, x.device) for name, x in leaves.items())
        if key not in known or any(not torch.equal(x, known[key][0][name]) for name, x in leaves.items()):
            kept = {name: x.detach().clone() for name, x in leaves.items()}
            known[key] = kept, compute(case, leaves)
        return known[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "references", references)
        yield
