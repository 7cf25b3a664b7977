"""Token files: the ids of all documents in one flat memory-mapped file, and windows over them as samples.

A folder holds tokens.bin (ids, little-endian), documents.bin (the end of each document, int64), meta.json (counts,
vocabulary, tokenizer, digests) and the files of a Hugging Face tokenizer. It appears when all of it is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshflash.core.reading import inside, read_json
from meshflash.parallel.loss import IGNORE_INDEX
from meshflash.train.texts import batches, input_files
from meshflash.train.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer

FORMAT, VERSION = "meshflash tokens", 1
TOKENS, DOCUMENTS, META = "tokens.bin", "documents.bin", "meta.json"
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}


@dataclass(frozen=True)
class Sample:
    """A packed sequence: ids and labels `[tokens]`, and the lengths of its documents."""

    tokens: Tensor
    labels: Tensor
    documents: tuple[int, ...]


class TokenFile:
    """A token file, checked against its meta.json; `ids` and `ends` (of documents) are memory-mapped.

    Args:
        folder: The folder that `write_tokens` wrote.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.meta = _read_meta(self.folder)
        self.vocabulary: int = self.meta["vocabulary"]
        self.ids = _mapped(self.folder, TOKENS, DTYPES[self.meta["dtype"]], self.meta["tokens"])
        self.ends = _mapped(self.folder, DOCUMENTS, "<i8", self.meta["documents"])
        if (int(self.ends[-1]) if len(self.ends) else 0) != len(self.ids):
            raise ValueError(f"{self.folder}: {DOCUMENTS} does not end where {TOKENS} does; write it again")

    def __reduce__(self) -> Any:
        return TokenFile, (self.folder,)  # by path: DataLoader workers map the file instead of copying it

    def document(self, number: int) -> npt.NDArray[Any]:
        """Return the ids of a document.

        Args:
            number: The index of the document.
        """
        if not 0 <= number < len(self.ends):
            raise IndexError(f"document {number}: {self.folder} has {len(self.ends)}")
        return self.ids[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the file was written with."""
        kind = self.meta["tokenizer"]
        if kind == ByteTokenizer.kind:
            return ByteTokenizer()
        if kind == FolderTokenizer.kind:
            return FolderTokenizer(self.folder)
        raise ValueError(f"{self.folder}: written with the custom tokenizer {kind!r}; decode the ids with that one")

    def verify(self) -> None:
        """Raise ValueError unless every file has its digest; this reads all of them."""
        for name, digest in self.meta["sha256"].items():
            if _digest(inside(self.folder, name)) != digest:
                raise ValueError(f"{self.folder}: {name} is not what was written (its sha256 differs); write it again")


class Packed:
    """Samples of `tokens` ids each: consecutive windows over all documents.

    Windows split documents, but the label at the end of a window is still the document's next token. The last token of
    a document has no label. Padding of the last window is a document of its own without labels. So every token appears
    exactly once.

    Args:
        file: The token file.
        tokens: The tokens of a sample.
    """

    def __init__(self, file: TokenFile, tokens: int) -> None:
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: expected at least 1")
        if not len(file.ids):
            raise ValueError(f"{file.folder}: there are no tokens in it")
        self.file, self.tokens, self.vocabulary = file, tokens, file.vocabulary

    def __len__(self) -> int:
        return -(-len(self.file.ids) // self.tokens)

    def __getitem__(self, number: int) -> Sample:
        check_sample_index(number, len(self))
        begin = number * self.tokens
        ids = np.zeros(self.tokens + 1, np.int64)
        read = self.file.ids[begin : begin + self.tokens + 1]  # one more, for the last label
        ids[: len(read)] = read
        held = min(self.tokens, len(read))
        end = begin + held
        first = np.searchsorted(self.file.ends, begin, side="right")
        last = np.searchsorted(self.file.ends, end, side="left")
        ends = np.array(self.file.ends[first : last + 1])
        labels = ids[1:].copy()
        labels[ends[ends <= end] - begin - 1] = IGNORE_INDEX
        labels[held:] = IGNORE_INDEX
        lengths = np.diff(np.minimum(ends, end), prepend=begin)
        documents = [*lengths[lengths > 0].tolist(), *([self.tokens - held] if held < self.tokens else [])]
        return Sample(torch.from_numpy(ids[:-1]), torch.from_numpy(labels), tuple(documents))


def check_sample_index(number: int, samples: int) -> None:
    """Raise IndexError for an index out of range, which also ends an iteration over a source.

    Args:
        number: The index of a sample.
        samples: The number of samples.
    """
    if not 0 <= number < samples:
        raise IndexError(f"sample {number}: there are {samples}")


def check_task(task: str, **least: tuple[int, int]) -> None:
    """Raise ValueError unless every argument of a synthetic task is large enough.

    Args:
        task: The name of the task, for the error.
        least: By argument, its value and the least value that it may have.
    """
    for name, (value, low) in least.items():
        if value < low:
            raise ValueError(f"{task}: {name}={value}; expected at least {low}")


def write_tokens(
    paths: Iterable[Path | str],
    folder: Path | str,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenFile:
    """Write a token file from texts; only a chunk of them is in memory at a time.

    A file is a document; in a .jsonl file the field "text" of every line is one. The end token of the tokenizer follows
    each document. The folder appears complete or not at all.

    Args:
        paths: UTF-8 files, and folders. All files of a folder are taken but hidden ones, sorted by name.
        folder: A new or an empty folder.
        tokenizer: The tokenizer; bytes by default, or `FolderTokenizer(folder)` for one of Hugging Face.
        progress: Called with the number of bytes read so far.

    A document of more than a million characters is encoded in chunks, split between lines. Byte tokens do not change,
    nor do those of tokenizers that split at lines, as GPT-2's and Llama 3's; other tokenizers start a new text there.
    """
    files, folder, tokenizer = input_files(paths), Path(folder), tokenizer or ByteTokenizer()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: it exists and is not empty; remove it, or name another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        _write(files, draft, tokenizer, progress or (lambda done: None))
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return TokenFile(folder)


def _write(files: Sequence[Path], folder: Path, tokenizer: Tokenizer, progress: Callable[[int], None]) -> None:
    dtype = next((name for name, code in DTYPES.items() if tokenizer.vocabulary <= np.iinfo(code).max + 1), None)
    if dtype is None:
        raise ValueError(f"vocabulary of {tokenizer.vocabulary}: ids of more than 32 bits are not stored")
    begin, end = (np.array(ids, np.int64) for ids in (tokenizer.begin, tokenizer.end))
    tokens, documents, first = 0, 0, True
    with (folder / TOKENS).open("wb") as ids_file, (folder / DOCUMENTS).open("wb") as ends_file:
        for pieces in batches(files):
            parts, ends = [], []
            for ids, (_, last, _) in zip(tokenizer.encode_many([piece[0] for piece in pieces]), pieces, strict=True):
                whole = [*([begin] if first else []), ids, *([end] if last else [])]
                tokens += sum(map(len, whole))
                parts += whole
                ends += [tokens] * last
                first = last
            written = np.concatenate(parts)
            if len(written) and int(written.max()) >= tokenizer.vocabulary:
                raise ValueError(f"tokenizer: it gave {written.max()}, and its vocabulary is {tokenizer.vocabulary}")
            ids_file.write(written.astype(DTYPES[dtype]).tobytes())
            ends_file.write(np.array(ends, "<i8").tobytes())
            documents += len(ends)
            progress(pieces[-1][2])
        for file in (ids_file, ends_file):
            file.flush()
            os.fsync(file.fileno())
    for path in tokenizer.files:
        shutil.copyfile(path, folder / path.name)
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "tokens": tokens,
        "documents": documents,
        "vocabulary": tokenizer.vocabulary,
        "tokenizer": tokenizer.kind,
        "sha256": {path.name: _digest(path) for path in sorted(folder.iterdir())},
    }
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = read_json(inside(folder, META))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: not a token file, as its {META} cannot be read; see `meshflash data`") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{folder}: not a token file, its {META} is of something else; see `meshflash data`")
    if meta.get("version") != VERSION:
        raise ValueError(
            f"{folder}: a token file of version {meta.get('version')!r}, and this meshflash reads {VERSION}; read it "
            "with the one that wrote it, or write it again"
        )
    counts = all(type(meta.get(name)) is int and meta[name] >= 0 for name in ("tokens", "documents", "vocabulary"))
    if not counts or str(meta.get("dtype")) not in DTYPES or not isinstance(meta.get("sha256"), dict):
        raise ValueError(f"{folder}: its {META} is damaged; write it again")
    return meta


def _mapped(folder: Path, name: str, dtype: str, count: int) -> npt.NDArray[Any]:
    """Return the memory-mapped array of a file, which must have exactly this size."""
    path = folder / name
    size = inside(folder, name).stat().st_size if path.is_file() else 0
    expected = count * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(f"{path}: {size:,} bytes, and {META} says {expected:,}; copy it again, or write it again")
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
