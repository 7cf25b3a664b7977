"""Helpers for tests of any source of samples."""

from __future__ import annotations

from typing import Any


def all_of(source: Any) -> list[Any]:
    """Return all samples of a source."""
    return [source[n] for n in range(len(source))]
