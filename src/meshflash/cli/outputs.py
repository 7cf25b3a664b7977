"""Paths that commands write to: an option that cannot be written is refused before the work, not after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from meshflash.core.files import OutputError, check_file, check_folder


def writable(path: Path, *more: Path | None) -> Path:
    """Return `path`; BadParameter unless it and all of `more` that are not None are files that can be written now."""
    for each in (path, *more):
        if each is not None:
            _explained(check_file, each)
    return path


def writable_folder(path: Path) -> Path:
    """Return `path`; BadParameter unless files can be written to the folder now."""
    _explained(check_folder, path)
    return path


def _explained(check: Callable[[Path], None], path: Path) -> None:
    try:
        check(path)
    except OutputError as error:
        raise typer.BadParameter(f"{error}; give a path that can be written") from error
