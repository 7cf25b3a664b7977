"""What every test may ask for: `pool`, worker processes for tests of several ranks."""

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

# before tests import them: what they assert is told in full, as in the tests themselves
pytest.register_assert_rewrite("core.definition", "train.checkpoints")

# a shell that starts the tests in the background ignores Ctrl-C for them, and commands under test would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# tensors of tests are small: threads would wait for each other more than they work
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # before anything imports Triton, which reads it once; workers of the pool find it too
    os.environ.setdefault("TRITON_INTERPRET", "1")
speed_up()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that run a function on 1 to 4 ranks; see `tests/pool.py`."""
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
