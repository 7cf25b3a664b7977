"""What tests ask of any source of samples."""

from __future__ import annotations

from typing import Any


def all_of(source: Any) -> list[Any]:
    """All samples of a source."""
    return [source[n] for n in range(len(source))]
