"""Text files of any size as pieces for a tokenizer, of which a few are in memory at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

#: Characters that are encoded at a time; a longer document is cut at a line.
CHUNK_CHARS = 1 << 20
#: Characters of a line of a .jsonl file, which is read as a whole.
MAX_LINE_CHARS = 1 << 28

#: A text, whether its document ends with it, and how many bytes of all files are read by then.
Piece = tuple[str, bool, int]


def input_files(paths: Iterable[Path | str]) -> list[Path]:
    """The files of paths, in order; of a folder all but hidden ones, by name."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file())
            files += sorted(p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts))
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path}: no such file")
    if not files:
        raise ValueError("no files to read; give texts, .jsonl files, or folders of them")
    return files


def batches(files: Sequence[Path]) -> Iterator[list[Piece]]:
    """Pieces of all files, in lists of about PIECE characters, which a tokenizer may encode side by side."""
    batch: list[Piece] = []
    room = CHUNK_CHARS
    for piece in _pieces(files):
        batch.append(piece)
        room -= len(piece[0]) + 1
        if room <= 0:
            yield batch
            batch, room = [], CHUNK_CHARS
    if batch:
        yield batch


def _pieces(files: Sequence[Path]) -> Iterator[Piece]:
    before = 0
    for path in files:
        try:
            with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as stream:
                texts: Iterable[TextIO] = _lines(path, stream) if path.suffix.lower() == ".jsonl" else [stream]
                for text in texts:
                    for piece, last in _cut(text):
                        yield piece, last, before + raw.tell()
                before += raw.tell()
        except UnicodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from error


def _lines(path: Path, stream: TextIO) -> Iterator[io.StringIO]:
    """The text of each line of a .jsonl file."""
    number = 0
    while line := stream.readline(MAX_LINE_CHARS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARS:
            raise ValueError(
                f"{path}, line {number}: more than {MAX_LINE_CHARS:,} characters; split the document, or store "
                "it as a text file"
            )
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()  # half of a surrogate pair is no character
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f'{path}, line {number}: expected an object with a "text" ({error!r})') from error
        yield io.StringIO(text)


def _cut(stream: TextIO) -> Iterator[tuple[str, bool]]:
    """A document in pieces of at most a few PIECE characters, and whether each is the last."""
    kept = ""
    while more := stream.read(CHUNK_CHARS):
        kept += more
        if len(kept) > CHUNK_CHARS:
            at = _line_end(kept)
            yield kept[:at], False
            kept = kept[at:]
    yield kept, True


def _line_end(text: str) -> int:
    r"""Behind the last line break that stands alone, as whitespace beside it may be one token with it; else the end.

    >>> _line_end("one\ntwo\n\nthree")
    4
    """
    end = len(text) - 1
    while (at := text.rfind("\n", 1, end)) >= 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        end = at
    return len(text)
