"""Fixtures of all kernel tests."""

from __future__ import annotations

import pytest

from meshflash.engine.cache import cache


@pytest.fixture(autouse=True)
def fresh_executables():
    """Start without executables of earlier tests: these repeat launches of other configurations."""
    cache.clear()
