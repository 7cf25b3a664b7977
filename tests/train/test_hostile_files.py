"""Forged files: none executes code, reads outside of its folder, or exhausts memory."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
import struct
import time
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshflash.bench import record
from meshflash.core.reading import read_toml
from meshflash.gemm import rates as gemm_rates
from meshflash.kernels import rates as kernel_rates
from meshflash.models import huggingface
from meshflash.models.gpt import GPT, tiny
from meshflash.train import images, texts
from meshflash.train.checkpoint import CheckpointError, Checkpoints
from meshflash.train.checkpoint_files import TensorFile
from meshflash.train.tokenizer import FolderTokenizer
from meshflash.train.tokens import TokenFile, write_tokens
from meshflash.viz import recorded
from train import crash
from train.checkpoints import INDEX, MANIFEST, TENSORS, save_steps

SOURCE = Path(__file__).parents[2] / "src"
HUGE = 2**60
#: Nesting too deep for a parser, and a number that takes long to parse.
DEEP, LONG = "[" * 100_000, "9" * 100_000


@pytest.fixture(autouse=True)
def limit_memory_and_time():
    """Limit a test to 4 GiB of further memory and ten seconds."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 2**32, hard))
    begin = time.monotonic()
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - begin < 10


class Payload:
    """An object that creates a folder when it is unpickled; the tests make it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def make_sparse(path: Path, size: int = 2**40) -> Path:
    """Make a sparse file of a terabyte."""
    with path.open("wb") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("this file system has no sparse files of that size")
    return path


def refused(path: Path, read: Any, *arguments: Any, name: str = "") -> str:
    """Read a file; return the error, which must name the file."""
    with pytest.raises(ValueError, match=re.escape(name or path.name)) as caught:
        read(*arguments or (path,))
    return str(caught.value)


# ---- readers of JSON


def tables(path: Path) -> Any:
    """Read both tables of measured rates."""
    return kernel_rates._read(path), gemm_rates._read(path)


def traces(path: Path) -> Any:
    """Read the traces of a folder."""
    return recorded.read(path.parent)


READERS = {
    "record": (record.read, "record.json"),
    "rates": (kernel_rates._read, "rates.json"),
    "gemm rates": (gemm_rates._read, "rates.json"),
    "trace": (traces, "trace-0.json"),
    "config of Hugging Face": (lambda path: huggingface.read_config(path.parent), "config.json"),
}


@pytest.mark.parametrize("kind", READERS)
def test_nested_long_truncated_or_endless_json_is_refused(tmp_path, kind):
    read, name = READERS[kind]
    path = tmp_path / name
    for text in (DEEP, '{"a":' * 100_000, f'{{"rows": {LONG}}}', "{", "", "[1]", "null", "\ud800"):
        path.write_bytes(text.encode(errors="surrogatepass"))
        refused(path, read)
    refused(make_sparse(path), read)


def test_traces_of_other_programs_are_refused(tmp_path):
    path = tmp_path / "trace-0.json"
    for text in ('{"traceEvents": 5}', '{"traceEvents": [5]}', '{"traceEvents": [{"ph": "X"}]}', "{}"):
        path.write_text(text)
        assert "no list of traceEvents in it" in refused(path, traces)


def test_nested_long_endless_or_non_utf8_toml_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    for data in (b"x = " + b"[" * 5000, b"x = " + b"9" * 5000, b"\xff\xfe", b"x = {" + b"a = {" * 5000, b"x"):
        path.write_bytes(data)
        refused(path, read_toml)
    for dots in (300, 30_000, 500_000):
        path.write_bytes(b"a" + b".a" * dots + b" = 1")
        refused(path, read_toml)
    refused(make_sparse(path), read_toml)


# ---- checkpoints


def forge(folder: Path, **files: bytes) -> None:
    """Write files of a checkpoint with valid digests."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, data in {name.replace("__", "."): data for name, data in files.items()}.items():
        if data:
            (folder / name).write_bytes(data)
        found = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(found), "sha256": hashlib.sha256(found).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def load(root: Path) -> None:
    """Load the latest checkpoint of a folder."""
    model, optimizer = crash.build()
    Checkpoints(root).load(model, optimizer)


def checkpoint(root: Path) -> Path:
    """Save a checkpoint and return its folder."""
    save_steps(root, 1)
    return root / "step-00000001"


def header(data: dict[str, Any] | bytes, length: int | None = None, more: bytes = b"") -> bytes:
    """Return the start of a safetensors file, with a false length of its header if given."""
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + more


def test_checkpoint_file_names_outside_the_folder_are_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    for n, name in enumerate(("../../outside", str(outside), "..", ".", "a/b", "rank\0")):
        folder = checkpoint(tmp_path / f"run{n}")
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"][name] = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
        (folder / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=r"list of files is damaged|plain name"):
            load(folder.parent)


@pytest.mark.parametrize("name", [MANIFEST, INDEX, TENSORS])
def test_checkpoints_with_links_or_pipes_are_refused(tmp_path, name):
    folder = checkpoint(tmp_path / "run")
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    refused(folder / name, load, folder.parent, name=f"{name}: a link out of its folder")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder / name, load, folder.parent, name=f"{name}: a pipe or a device")


def test_pruning_does_not_follow_links(tmp_path):
    """Pruning removes the link, not the folder behind it."""
    outside = checkpoint(tmp_path / "outside")
    root = tmp_path / "run"
    root.mkdir()
    for name in ("step-00000001", "step-00000002.partial-x", "step-00000001.replaced-x"):
        (root / name).symlink_to(outside, target_is_directory=True)
    save_steps(root, 1, 3, 4, keep=1)
    assert {path.name for path in outside.iterdir()} == {MANIFEST, INDEX, TENSORS}
    assert Checkpoints(root).steps() == [4]


def test_checkpoints_with_false_sizes_are_refused(tmp_path):
    folder = checkpoint(tmp_path / "run")
    index, data = json.loads((folder / INDEX).read_text()), (folder / TENSORS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    name = next(name for name in index["tensors"] if name.startswith("model/"))
    entries = json.loads(data[8 : 8 + length])
    for begin in (0, -4 * HUGE):
        false_entries = entries | {
            name: entries[name] | {"shape": [1, HUGE], "data_offsets": [begin, begin + 4 * HUGE]}
        }
        tensors = json.loads(json.dumps(index["tensors"]))
        tensors[name]["chunks"][0]["sizes"] = [1, HUGE]
        more = json.dumps(index | {"tensors": tensors}).encode()
        forge(
            folder, **{"rank-00000__safetensors": header(false_entries, more=data[8 + length :]), "index__json": more}
        )
        with pytest.raises(CheckpointError, match=f"{TENSORS}: {name} is not in it as the index says"):
            load(folder.parent)
        with pytest.raises(CheckpointError, match=f"{TENSORS}: {name} is not in it as the index says"):
            TensorFile(folder / TENSORS).rows(name, torch.float32, torch.Size([1, HUGE]), 0, 1)
    moment = next(name for name in index["tensors"] if name.startswith("optimizer/exp_avg/"))
    for shape in ([HUGE], [2**33], [-1, -HUGE], "x", [1.5]):
        tensors = index["tensors"] | {moment: index["tensors"][moment] | {"shape": shape}}
        forge(folder, index__json=json.dumps(index | {"tensors": tensors}).encode())
        refused(folder / INDEX, load, folder.parent)


@pytest.mark.parametrize(
    "data",
    [
        header(b"{}", length=HUGE),
        header(b"{}", length=2**64 - 1),
        header(DEEP.encode()),
        header(b"[]"),
        b"",
        pickle.dumps({"model": [1.0]}),
    ],
    ids=["huge", "largest", "deep", "list", "empty", "pickle"],
)
def test_tensor_file_with_a_forged_header_is_refused(tmp_path, data):
    folder = checkpoint(tmp_path / "run")
    forge(folder, **{"rank-00000__safetensors": data + bytes(2**18)})
    refused(folder / TENSORS, load, folder.parent)
    (folder / TENSORS).write_bytes(data)
    refused(folder / TENSORS, lambda path: TensorFile(path).rows("x", torch.float32, torch.Size([1]), 0, 1))


def test_endless_tensor_files_are_refused(tmp_path):
    """The header claims to fill the whole sparse file."""
    path = make_sparse(tmp_path / TENSORS)
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", 2**39))
    refused(path, TensorFile)


@pytest.mark.parametrize("name", [MANIFEST, INDEX])
def test_checkpoints_with_nested_or_endless_json_are_refused(tmp_path, name):
    folder = checkpoint(tmp_path / "run")
    (folder / name).write_text(DEEP)
    if name == INDEX:
        forge(folder, index__json=DEEP.encode())
    refused(folder / name, load, folder.parent)
    if name == MANIFEST:
        refused(make_sparse(folder / name), load, folder.parent)


# ---- token files


@pytest.fixture
def tokens(tmp_path):
    """Return the folder of a valid token file."""
    (tmp_path / "a.txt").write_text("some text")
    return write_tokens([tmp_path / "a.txt"], tmp_path / "tokens").folder


def test_token_files_with_links_out_of_the_folder_are_refused(tmp_path, tokens):
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    meta = json.loads((tokens / "meta.json").read_text())
    for name in ("../outside", str(outside), ".."):
        changed = meta | {"sha256": {name: hashlib.sha256(b"secret").hexdigest()}}
        (tokens / "meta.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=re.escape(f"{name!r} is not the plain name of a file")):
            TokenFile(tokens).verify()
    (tokens / "meta.json").write_text(json.dumps(meta))
    for name in ("tokens.bin", "documents.bin"):
        (tokens / name).rename(tmp_path / name)
        (tokens / name).symlink_to(tmp_path / name)
        assert "a link out of its folder" in refused(tokens / name, TokenFile, tokens)
        (tokens / name).unlink()
        (tmp_path / name).rename(tokens / name)
    TokenFile(tokens).verify()


def test_token_files_with_false_sizes_are_refused(tokens):
    meta = json.loads((tokens / "meta.json").read_text())
    for change in ({"tokens": HUGE}, {"documents": HUGE}, {"tokens": -1}, {"tokens": 10**4000}, {"dtype": ["uint8"]}):
        (tokens / "meta.json").write_text(json.dumps(meta | change))
        refused(tokens, TokenFile)
    for text in (DEEP, f'{{"tokens": {LONG}}}'):
        (tokens / "meta.json").write_text(text)
        refused(tokens, TokenFile)
    make_sparse(tokens / "meta.json")
    refused(tokens, TokenFile)


def test_tokenizers_with_forged_settings_are_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "[END]": 1}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    settings = tmp_path / "tokenizer_config.json"
    for text in (DEEP, "[1]", '{"eos_token": 5}', '{"eos_token": {"content": []}}', "{"):
        settings.write_text(text)
        refused(settings, FolderTokenizer, tmp_path)
    settings.write_text('{"eos_token": "[END]", "auto_map": {"AutoTokenizer": ["x--y.Z", null]}}')
    assert FolderTokenizer(tmp_path).end == (1,)
    (tmp_path / "tokenizer.json").write_text('{"model": ' + DEEP)
    refused(tmp_path / "tokenizer.json", FolderTokenizer, tmp_path)


def test_nested_or_too_long_jsonl_lines_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": ' + DEEP + "\n")
    assert "line 2" in refused(path, lambda path: list(texts.batches([path])))
    monkeypatch.setattr(texts, "MAX_LINE_CHARS", 100)
    path.write_text('{"text": "fine"}\n\n{"text": "' + "a" * 200 + '"}\n')
    assert "line 3: more than 100 characters" in refused(path, lambda path: list(texts.batches([path])))


# ---- images and arrays


def npy(shape: str, dtype: str = "<f4", data: bytes = b"\0" * 64) -> bytes:
    """Return a .npy file whose header claims this shape."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


SHAPES = [
    f"({HUGE},)",
    f"({2**32}, {2**32}, 1, 1)",
    f"({2**62}, 4, 1, 1)",
    "(-1, 1, 1, 1)",
    "(1, 1, 4, 5)",
    "(" * 500,
    "__import__('os').mkdir('executed')",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_with_false_shapes_are_refused(tmp_path, monkeypatch, shape):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images.npy").write_bytes(npy(shape))
    refused(tmp_path / "images.npy", images.ImageArrays, tmp_path / "images.npy", True)
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = tmp_path / "x.npz"
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("images.npy", npy(shape))
        refused(path, images.ImageArrays, path, True)
    assert not (tmp_path / "executed").exists()


def test_zip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "EXPANDED_BYTES", 2**22)
    path, size = tmp_path / "x.npz", 2**24
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", npy(f"(1, 1, 1, {size // 4})", data=bytes(size)))
    assert path.stat().st_size < 2**16
    assert "a zip bomb" in refused(path, images.ImageArrays, path, True)


def test_archives_that_are_not_npz_are_refused(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../images.npy", b"no array")
    refused(path, images.ImageArrays, path, True)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # encrypted
    path.write_bytes(data)
    refused(path, images.ImageArrays, path, True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["x.npz"]


def test_arrays_of_objects_are_not_unpickled(tmp_path):
    marker = tmp_path / "executed"
    array = np.array([[[Payload(marker)]]], dtype=object)
    np.save(tmp_path / "images.npy", array, allow_pickle=True)
    refused(tmp_path / "images.npy", images.ImageArrays, tmp_path / "images.npy", True)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", images=array)
        refused(tmp_path / "x.npz", images.ImageArrays, tmp_path / "x.npz", True)
    assert not marker.exists()


def png(width: int, height: int) -> bytes:
    """Return an image of zeros with truncated data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    dimensions = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", dimensions)
        + chunk(b"IDAT", zlib.compress(bytes(2**20)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(2**31 - 1, 2**31 - 1), (30_000, 30_000), (12_000, 12_000)])
def test_decompression_bombs_are_refused(tmp_path, size):
    pytest.importorskip("PIL")
    path = tmp_path / "a.png"
    path.write_bytes(png(*size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "pixels" in refused(path, images.read_image, path, (8, 8))


def test_postscript_images_run_no_program(tmp_path, monkeypatch):
    """Pillow identifies files by their content, and would run Ghostscript."""
    pytest.importorskip("PIL")
    marker, program = tmp_path / "executed", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    refused(path, images.read_image, path, (8, 8))
    assert not marker.exists()


# ---- weights of Hugging Face


@pytest.fixture
def pretrained(tmp_path):
    """Return the folder of a small model with Hugging Face weights."""
    pytest.importorskip("safetensors")
    huggingface.save_pretrained(GPT(tiny()), tmp_path / "model", max_gb=1e-4)
    return tmp_path / "model"


def test_weight_files_outside_the_folder_are_refused(tmp_path, pretrained):
    file = pretrained / huggingface.INDEX
    index = json.loads(file.read_text())
    first, name = next(iter(index["weight_map"].items()))
    (pretrained / name).rename(tmp_path / name)
    for elsewhere in (f"../{name}", str(tmp_path / name), "..", 5, [name]):
        file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {first: elsewhere}}))
        assert "the plain name of a file" in refused(file, huggingface.read_pretrained, pretrained)
    file.write_text('{"weight_map": [1]}')
    assert "the plain name of a file" in refused(file, huggingface.read_pretrained, pretrained)


def test_config_of_a_huge_model_is_refused_before_it_is_built(pretrained):
    file = pretrained / huggingface.CONFIG
    config = json.loads(file.read_text())
    for change in ({"num_hidden_layers": 10**9}, {"vocab_size": 2**33}, {"intermediate_size": 2**40}):
        file.write_text(json.dumps(config | change))
        refused(pretrained, huggingface.read_pretrained)


def test_weights_with_a_forged_header_are_refused(pretrained):
    (file, *_) = pretrained.glob("*.safetensors")
    for data in (header(b"{}", length=HUGE), header(DEEP.encode()), pickle.dumps([1]), b""):
        file.write_bytes(data)
        refused(file, huggingface.read_pretrained, pretrained)
    false_entries = {"model.norm.weight": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}
    file.write_bytes(header(false_entries))
    refused(file, huggingface.read_pretrained, pretrained)


# ---- the source code


#: Functions that would execute a file's content, or write to paths that it names.
FORBIDDEN = re.compile(
    r"\b(import|from) (pickle|cPickle|marshal|shelve|dill|joblib|yaml)\b|(?<![.\w])(eval|exec)\(|\btorch\.load\("
    r"|\b(os\.system|os\.popen|extractall|unpack_archive)\(|\b(allow_pickle|shell)=(?!False\b)"
)


def test_no_source_unpickles_evaluates_or_unpacks_files():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    assert [f"{file.name}: {match[0]}" for file in files for match in FORBIDDEN.finditer(file.read_text())] == []
    assert FORBIDDEN.search("x = eval(text)")
    assert FORBIDDEN.search("np.load(file, allow_pickle=True)")
