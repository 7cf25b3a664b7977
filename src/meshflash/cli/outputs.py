"""Check output paths before the work begins, so that a typing error does not cost the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from meshflash.core.files import OutputError, check_file, check_folder

P = TypeVar("P", Path, Path | None)


def writable(path: P, *more: Path | None) -> P:
    """Return `path`; raise BadParameter unless it and all of `more` can be written now. None is no file."""
    for each in (path, *more):
        if each is not None:
            _explained(check_file, each)
    return path


def writable_folder(path: Path) -> Path:
    """Return `path`; raise BadParameter unless files can be written to this folder."""
    _explained(check_folder, path)
    return path


def _explained(check: Callable[[Path], None], path: Path) -> None:
    try:
        check(path)
    except OutputError as error:
        raise typer.BadParameter(f"{error}; give a path that can be written") from error
