"""Tokenizers: bytes, or a Hugging Face tokenizer in a local folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshflash.core.reading import read_object

#: The file of a Hugging Face tokenizer, and the files beside it that may name its end token.
TOKENIZER = "tokenizer.json"
NAMING = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer(Protocol):
    """The interface of tokenizers.

    Attributes:
        kind: The name of the tokenizer in a token file.
        vocabulary: The number of token ids.
        begin: The ids before each document.
        end: The ids behind each document.
        files: The files that the tokenizer is read from; a token file gets copies.
    """

    kind: str
    vocabulary: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    files: tuple[Path, ...]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without `begin` and `end`."""

    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return the ids of several texts, as arrays."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8; id 256 ends a document.

    >>> ByteTokenizer().encode("aé")
    [97, 195, 169]
    >>> ByteTokenizer().decode([97, 195, 169, 256])
    'aé'
    """

    kind = "bytes"
    vocabulary = 257
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = (256,)
    files: tuple[Path, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return the bytes of several texts, as arrays."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of bytes; an incomplete character becomes U+FFFD, and ids above 255 are dropped."""
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


class FolderTokenizer:
    """The tokenizer.json of a local folder, read by the package `tokenizers`; nothing is downloaded.

    A document gets the special tokens that the tokenizer adds to a text, then the `eos_token` of tokenizer_config.json
    or special_tokens_map.json. Text that looks like a special token stays text.

    Args:
        folder: The folder with tokenizer.json.
    """

    kind = "huggingface"

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        file = self.folder / TOKENIZER
        if not file.is_file():
            raise ValueError(f"{folder}: no {TOKENIZER} there; give the folder of a Hugging Face tokenizer")
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise ValueError(f"{file}: reading it needs another package; pip install tokenizers") from error
        try:
            self._loaded: Any = Loaded.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{file}: not a tokenizer ({error})") from error
        self._loaded.no_truncation()
        self._loaded.no_padding()
        self._loaded.encode_special_tokens = True
        self.files = (file, *(path for path in map(self.folder.joinpath, NAMING) if path.is_file()))
        self.vocabulary = 1 + max(self._loaded.get_vocab().values(), default=-1)
        self.begin, self.end = self._around()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._loaded.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return the ids of several texts, encoded on all cores."""
        found = self._loaded.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in found]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens."""
        return self._loaded.decode([int(i) for i in ids], skip_special_tokens=True)

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids before and behind a document, found by encoding a text of one letter."""
        plain, whole = self.encode("a"), self._loaded.encode("a").ids
        at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), len(whole))
        begin, end = tuple(whole[:at]), tuple(whole[at + len(plain) :])
        last = self._end_token()
        return begin, end if last is None or last in end else (*end, last)

    def _end_token(self) -> int | None:
        for path in self.files[1:]:
            entry = read_object(path, "an object of JSON").get("eos_token")
            token = entry.get("content") if isinstance(entry, dict) else entry
            if token is not None and not isinstance(token, str):
                raise ValueError(f"{path}: eos_token={token!r:.100}; expected a text")
            if token is not None:
                return self._loaded.token_to_id(token)
        return None
