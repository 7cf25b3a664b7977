"""Read text files of any size in chunks for a tokenizer; a few chunks are in memory at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

#: Characters that are encoded at a time; a longer document is split between lines.
CHUNK_CHARS = 1 << 20
#: The most characters in a line of a .jsonl file, which is read as a whole.
MAX_LINE_CHARS = 1 << 28

#: (text, whether it ends its document, bytes of all files read so far).
Chunk = tuple[str, bool, int]


def input_files(paths: Iterable[Path | str]) -> list[Path]:
    """Return the files of paths, in order; of a folder all files but hidden ones, sorted by name.

    Args:
        paths: Files and folders.
    """
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


def batches(files: Sequence[Path]) -> Iterator[list[Chunk]]:
    """Yield lists of chunks of about CHUNK_CHARS characters in all, which a tokenizer may encode in parallel."""
    batch: list[Chunk] = []
    free_chars = CHUNK_CHARS
    for chunk in _chunks(files):
        batch.append(chunk)
        free_chars -= len(chunk[0]) + 1  # the 1 bounds a batch of empty documents
        if free_chars <= 0:
            yield batch
            batch, free_chars = [], CHUNK_CHARS
    if batch:
        yield batch


def _chunks(files: Sequence[Path]) -> Iterator[Chunk]:
    before = 0
    for path in files:
        try:
            with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as stream:
                texts: Iterable[TextIO] = _lines(path, stream) if path.suffix.lower() == ".jsonl" else [stream]
                for text in texts:
                    for chunk, last in _split(text):
                        yield chunk, last, before + raw.tell()
                before += raw.tell()
        except UnicodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from error


def _lines(path: Path, stream: TextIO) -> Iterator[io.StringIO]:
    """Yield the text of each line of a .jsonl file."""
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
            text.encode()  # raises for a lone surrogate
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f'{path}, line {number}: expected an object with a "text" ({error!r})') from error
        yield io.StringIO(text)


def _split(stream: TextIO) -> Iterator[tuple[str, bool]]:
    """Yield a document in chunks of at most a few CHUNK_CHARS characters, and whether each is the last."""
    buffered = ""
    while more := stream.read(CHUNK_CHARS):
        buffered += more
        if len(buffered) > CHUNK_CHARS:
            at = _line_end(buffered)
            yield buffered[:at], False
            buffered = buffered[at:]
    yield buffered, True


def _line_end(text: str) -> int:
    r"""Return the index behind the last line break without adjacent whitespace, else the length of the text.

    Tokenizers may merge a line break with whitespace beside it, so a split there would change the tokens.

    >>> _line_end("one\ntwo\n\nthree")
    4
    """
    end = len(text) - 1
    while (at := text.rfind("\n", 1, end)) >= 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        end = at
    return len(text)
