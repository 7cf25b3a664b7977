"""Output files: check a path before the work, and write a file atomically.

Every error names the path and the reason; the operating system's error for a full disk names no path.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Bytes that `check_file` writes and removes, so that a full disk is noticed before the work.
PROBE_BYTES = 1 << 16


class OutputError(OSError):
    """A path cannot be written. The message names the path and the reason."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError of this block into an OutputError that names `path`."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{path}: it cannot be written ({error.strerror or error})") from error


def check_file(path: Path) -> None:
    """Raise OutputError unless `path` can be written now. Create its folders; leave no new file behind."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if path.is_file() or path.is_dir():  # not a pipe: opening one blocks until it has a reader
                with suppress(FileNotFoundError):  # another rank may have removed its probe meanwhile
                    os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(bytes(PROBE_BYTES))
        finally:
            path.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Raise OutputError unless files can be written to the folder `path` now. Create the folder."""
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
        check_file(path / f".probe-{secrets.token_hex(4)}")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, and create its folders. On failure raise OutputError and keep the old content.

    A device or a pipe is written in place.

    Args:
        path: The file to write.
        text: The new content.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()  # replace the target of a symbolic link, not the link
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        draft = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, target)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
