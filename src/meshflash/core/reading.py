"""Read untrusted files: memory is bounded, and every error names the file.

JSON and TOML execute nothing, but a sparse file of a terabyte or a million nested brackets would end the process.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

#: The default limit on the size of a JSON file, in bytes.
MOST_BYTES = 1 << 28
#: The most bytes of a TOML file, and dots in a line of it: tomllib takes a minute over a key of 32,000 dots.
TOML_BYTES, TOML_DOTS = 1 << 18, 256


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file; raise ValueError if there are more than `most`, without reading them all."""
    with path.open("rb") as file:
        data = bytearray()  # in blocks: asking for `most` bytes at once would allocate them
        while os.fstat(file.fileno()).st_size <= most and len(data) <= most:  # a pipe has no size, so count as well
            block = file.read(1 << 20)
            if not block:
                return bytes(data)
            data += block
    raise ValueError(f"{path}: more than {most:,} bytes, which no such file has")


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return the value of a JSON file; raise ValueError if it is not JSON, too large or nested too deeply.

    >>> read_json(Path("/dev/null"))
    Traceback (most recent call last):
    ValueError: /dev/null: not JSON (Expecting value: line 1 column 1 (char 0)); it is cut or damaged
    """
    data = read_bytes(path, most)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{path}: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); it is cut or damaged") from None


def read_object(path: Path, expected: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object of a JSON file; raise ValueError if it holds another type.

    Args:
        path: The file.
        expected: What the file should hold, for the error message.
        most: The limit on its size, in bytes.
    """
    try:
        found = read_json(path, most)
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read ({error.strerror or error}); expected {expected}") from error
    except ValueError as error:
        raise ValueError(f"{error}; expected {expected}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: JSON of a {type(found).__name__}; expected {expected}")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file; raise ValueError if it is missing, too large or not TOML.

    Args:
        path: The file.
    """
    try:
        data = read_bytes(path, TOML_BYTES)
        if max((line.count(b".") for line in data.splitlines()), default=0) > TOML_DOTS:
            raise ValueError(f"more than {TOML_DOTS} dots in a line")
        return tomllib.loads(data.decode())
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except RecursionError:
        raise ValueError(f"{path}: not TOML: it is nested too deeply") from None
    except ValueError as error:  # tomllib's own errors, numbers with too many digits, invalid UTF-8
        raise ValueError(f"{path}: not TOML: {error}") from None


def is_plain(name: Any) -> bool:
    """Whether a name is a plain file name: no path, and neither "." nor "..".

    >>> [is_plain(name) for name in ("a.bin", "..", "../a.bin", "/a.bin", "", 5)]
    [True, False, False, False, False, False]
    """
    return isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def inside(folder: Path, name: Any) -> Path:
    """Return the path of a regular file in a folder; raise ValueError for a path, a link out of it, or a device.

    Raise OSError if the file is missing. The folder itself may be a link.

    >>> inside(Path("data"), "../secrets")
    Traceback (most recent call last):
    ValueError: data: '../secrets' is not the plain name of a file in it
    """
    if not is_plain(name):
        raise ValueError(f"{folder}: {name!r} is not the plain name of a file in it")
    path = folder / str(name)
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise ValueError(f"{path}: a link out of its folder; put the file itself there")
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe would block until it has a writer
        raise ValueError(f"{path}: a pipe or a device, not a file")
    return path
