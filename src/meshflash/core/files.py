"""Files that commands write: check a path before the work, write a file whole or not at all.

Every error names the path and the reason. The operating system's own errors name no path where a disk is full.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Bytes that a check writes and removes again, so that a full disk is found before the work.
PROBE_BYTES = 1 << 16


class OutputError(OSError):
    """A path that cannot be written. The message names the path and the reason."""


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
    """Raise OutputError unless `path` can be written now. Make its folders; leave no file that was not there."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if path.is_file() or path.is_dir():  # opening a pipe would wait for its reader
                with suppress(FileNotFoundError):  # another rank has removed its probe meanwhile
                    os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(bytes(PROBE_BYTES))
        finally:
            path.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Raise OutputError unless files can be written to the folder `path` now. Make it."""
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
        check_file(path / f".probe-{secrets.token_hex(4)}")


def write_whole(path: Path, text: str) -> None:
    """Write a file and its folders at once or not at all; OutputError where that fails, and the old content stays.

    What is not a regular file, such as a device or a pipe, is written in place.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()  # a link stays a link
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
