"""What every test may ask for: `pool`, worker processes for tests of several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that run a function on 1 to 4 ranks; see `tests/pool.py`."""
    workers = Pool()
    yield workers
    workers.close()
