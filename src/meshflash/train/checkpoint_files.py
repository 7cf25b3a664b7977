"""Checkpoints as folders: tensors in safetensors files, the rest in JSON, and a manifest with the digest of every file.

One rename gives a folder its final name when all its files are on disk; any other name is an incomplete checkpoint.
Nothing is pickled. This module knows nothing of ranks and models.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshflash.core.reading import inside, is_plain, read_bytes

FORMAT, VERSION = "meshflash checkpoint", 1
MANIFEST, INDEX = "manifest.json", "index.json"

#: dtypes by their names in safetensors.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: The size and digest of a file: {"bytes": ..., "sha256": ...}.
Digest = dict[str, Any]

_FOLDER = re.compile(r"step-(\d{8,})(\.replaced-\w+)?")
#: The most bytes of the header of a safetensors file; the limit of the safetensors library.
HEADER_BYTES = 100_000_000
#: The most bytes of a manifest or an index; an index has about 100 for each shard of a tensor.
_JSON_BYTES = 1 << 30


class CheckpointError(ValueError):
    """A checkpoint was not saved or cannot be loaded; the message names the file, the reason and the remedy."""


def folder_name(step: int) -> str:
    """Return the folder name of a complete checkpoint.

    >>> folder_name(123)
    'step-00000123'
    """
    return f"step-{step:08d}"


def partial_name(step: int, token: str) -> str:
    """Return the folder name of a checkpoint that is being written or removed.

    Args:
        step: The step of the checkpoint.
        token: The random token of the save.
    """
    return f"{folder_name(step)}.partial-{token}"


def complete(root: Path) -> dict[int, Path]:
    """Return the folders of complete checkpoints by step, in order."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        # a ".replaced" folder counts if its successor never got the name, see commit
        if match and (int(match[1]) not in found) and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Digest:
    """Write contiguous host tensors as a safetensors file, with fsync; return its digest.

    Args:
        path: The file to write.
        tensors: The tensors by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = (tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values() if tensor.numel())
    return _write(path, [len(text).to_bytes(8, "little"), text], data)


def write_json(path: Path, value: Any) -> Digest:
    """Write a value as JSON, with fsync; return the digest of the file.

    Args:
        path: The file to write.
        value: The value.
    """
    return _write(path, [json.dumps(value, indent=1).encode()])


def commit(partial: Path, root: Path, step: int, token: str, files: Mapping[str, Digest]) -> None:
    """Complete a checkpoint whose files are all on disk: write the manifest, then rename the folder.

    Args:
        partial: The folder that is being written.
        root: The folder of all checkpoints.
        step: The step of the checkpoint.
        token: The random token of the save.
        files: The digests of all files in the folder.
    """
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "torch": torch.__version__, "files": dict(files)}
    write_json(partial / MANIFEST, manifest | {"sha256": _manifest_digest(manifest)})
    sync_folder(partial)
    target, aside = root / folder_name(step), root / f"{folder_name(step)}.replaced-{token}"
    if target.exists():  # a non-empty folder cannot be replaced by a rename; between the renames `aside` counts
        target.rename(aside)
    partial.rename(target)
    sync_folder(root)
    if aside.exists():
        discard(aside, step, token)


def prune(root: Path, step: int, keep: int, token: str) -> None:
    """Remove all but the newest checkpoints up to this step. Later ones belong to another run and stay.

    Args:
        root: The folder of all checkpoints.
        step: The step that was just saved.
        keep: The number of checkpoints that stay.
        token: The random token of the save.
    """
    for old in [found for found in complete(root) if found < step][::-1][keep - 1 :]:
        for path in [*sorted(root.glob(f"{folder_name(old)}.replaced-*")), root / folder_name(old)]:
            if path.exists():
                discard(path, old, token)


def sweep(root: Path, token: str) -> None:
    """Remove leftovers of interrupted saves, except those of the save with this token.

    Args:
        root: The folder of all checkpoints.
        token: The random token of the current save.
    """
    for path in sorted(root.glob("step-*.*-*")):
        name, _, rest = path.name.partition(".")
        if path.name.endswith(token) or not _FOLDER.fullmatch(name):
            continue
        if rest.startswith("partial-"):
            shutil.rmtree(path, ignore_errors=True)
        elif rest.startswith("replaced-") and (root / name).exists():
            discard(path, int(name.removeprefix("step-")), token)


def discard(path: Path, step: int, token: str) -> None:
    """Remove a checkpoint; a rename first makes sure that a partly removed one never looks complete.

    Args:
        path: The folder of the checkpoint.
        step: The step of the checkpoint.
        token: The random token of the save, which makes the temporary name unique.
    """
    gone = path.with_name(partial_name(step, f"removed-{path.suffix.removeprefix('.')}-{token}"))
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(folder: Path, step: int) -> dict[str, Digest]:
    """Return the files of a checkpoint with their digests; raise CheckpointError for another version or format.

    Args:
        folder: The folder of the checkpoint.
        step: The step that the manifest must name.
    """
    path = _inside(folder, MANIFEST)
    found = _read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not of a meshflash checkpoint; it was written by something else")
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {found.get('version')!r}, and this meshflash reads version {VERSION}; take the meshflash "
            "that wrote it"
        )
    if found.get("step") != step:
        raise CheckpointError(f"{path}: it is of step {found.get('step')!r}, and the folder's name says {step}")
    files = found.get("files")
    if not isinstance(files, dict) or INDEX not in files or not all(map(is_plain, files)):
        raise CheckpointError(f"{path}: its list of files is damaged")
    return files


def check_files(folder: Path, files: Mapping[str, Digest], names: Iterable[str]) -> None:
    """Raise CheckpointError unless the named files have the sizes and digests of the manifest.

    Args:
        folder: The folder of the checkpoint.
        files: The digests of all files, from the manifest.
        names: The files to check.
    """
    for name in names:
        try:
            want = int(files[name]["bytes"]), str(files[name]["sha256"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{folder / MANIFEST}: what it says of {name} is damaged") from None
        try:
            _check_file(_inside(folder, name), *want)
        except CheckpointError:
            _check_manifest(folder, name)  # blame the manifest if it is the damaged one
            raise


def _check_file(path: Path, num_bytes: int, sha256: str) -> None:
    """Raise CheckpointError unless a file has this size and digest."""
    try:
        size = path.stat().st_size
        if size != num_bytes:
            raise CheckpointError(f"{path}: it has {size} bytes, and {num_bytes} were written; it is cut or changed")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise CheckpointError(f"{path}: {_why(error)}") from None
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{path}: its sha256 is not the one that was written; its bytes have changed")


def _check_manifest(folder: Path, name: str) -> None:
    """Raise CheckpointError if the manifest itself has changed, and so proves nothing about the file."""
    path = folder / MANIFEST
    found = _read_json(path)
    own = found.pop("sha256", None)  # checkpoints of earlier versions have none
    if own is not None and own != _manifest_digest(found):
        raise CheckpointError(f"{path}: its own sha256 does not fit; what it says of {name} is damaged")


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's content, independent of its whitespace."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index: where each tensor is, the optimizer's options, and the saved state."""
    found = _read_json(_inside(folder, INDEX))
    if not isinstance(found, dict) or not {"tensors", "state", "groups", "values"} <= found.keys():
        raise CheckpointError(f"{folder / INDEX}: not an index of tensors")
    return found


def check_sizes(folder: Path, index: Mapping[str, Any], files: Mapping[str, Digest]) -> None:
    """Raise CheckpointError if the index claims more bytes than its files have: loading allocates what it claims.

    Args:
        folder: The folder of the checkpoint.
        index: Its index.
        files: The digests of all files, from the manifest.
    """
    try:
        claimed = sum(prod(one["shape"]) * DTYPES[one["dtype"]].itemsize for one in index["tensors"].values())
        sizes = [size for one in index["tensors"].values() for size in one["shape"]]
        sound = all(type(size) is int and size >= 0 for size in sizes)
        held = sum(int(digest["bytes"]) for digest in files.values())
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{folder / INDEX}: not an index of tensors") from None
    if not sound or claimed > held:
        raise CheckpointError(f"{folder / INDEX}: its tensors are of {claimed:,} bytes, and its files of {held:,}")


def check_checkpoint(folder: Path, step: int) -> None:
    """Raise CheckpointError unless all files of a checkpoint are intact.

    Args:
        folder: The folder of the checkpoint.
        step: The step of the checkpoint.
    """
    files = read_manifest(folder, step)
    check_files(folder, files, files)
    read_index(folder)


class TensorFile:
    """Reads rows of tensors from a safetensors file.

    It reads instead of mapping: a mapped file that is truncated meanwhile would kill the process with SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = path.open("rb")
            length = int.from_bytes(self.file.read(8), "little")
            self.begin, self.size = 8 + length, path.stat().st_size
            if self.begin > self.size or length > HEADER_BYTES:
                raise ValueError
            self.header = json.loads(self.file.read(length))
        except OSError as error:
            raise CheckpointError(f"{path}: {_why(error)}") from None
        except (ValueError, RecursionError):
            raise CheckpointError(f"{path}: not a file of safetensors") from None

    def rows(self, name: str, dtype: torch.dtype, shape: torch.Size, first: int, last: int) -> Tensor:
        """Return the rows from `first` up to `last` of a tensor that must have this dtype and shape."""
        try:
            entry = self.header[name]
            begin, end = entry["data_offsets"]
            size_matches = end - begin == prod(shape) * dtype.itemsize
            # Check before the buffer is allocated: a damaged index may claim any size.
            size_matches = size_matches and 0 <= begin <= end <= self.size - self.begin
            if not size_matches or DTYPES[entry["dtype"]] != dtype or list(shape) != entry["shape"]:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{self.path}: {name} is not in it as the index says") from None
        row = prod(shape[1:]) * dtype.itemsize
        buffer = bytearray((last - first) * row)
        try:
            self.file.seek(self.begin + begin + first * row)
            number = self.file.readinto(buffer)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {_why(error)}") from None
        if number != len(buffer):
            raise CheckpointError(f"{self.path}: it ends within {name}")
        return torch.frombuffer(buffer, dtype=dtype).reshape([last - first, *shape[1:]] if shape else [])

    def close(self) -> None:
        self.file.close()


def _write(path: Path, *pieces: Iterable[Any]) -> Digest:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("wb") as file:
            for several in pieces:
                for piece in several:
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path.name}: {_why(error)}") from error
    return {"bytes": size, "sha256": digest.hexdigest()}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path, _JSON_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: {_why(error)}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not JSON; it is cut or changed") from None


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint's file; refuse names and links that lead out of the folder."""
    try:
        return inside(folder, name)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: {_why(error)}") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _why(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else (error.strerror or str(error))
