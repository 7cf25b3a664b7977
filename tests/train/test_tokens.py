"""Token files, packed windows, tokenizers, and the command `meshflash data`."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from meshflash.cli import app
from meshflash.parallel.loss import IGNORE_INDEX
from meshflash.train import texts
from meshflash.train.tokenizer import ByteTokenizer, FolderTokenizer
from meshflash.train.tokens import Packed, TokenFile, write_tokens
from train.sources import all_of

TEXTS = ["hello", "", "ein Höhlenbär 🐻\r\nund mehr\n", "\n\n", "日本語" * 5, "x"]


@pytest.fixture
def written(tmp_path: Path) -> TokenFile:
    """Return a token file of TEXTS, one file for each text."""
    return write_tokens(_files(tmp_path, TEXTS), tmp_path / "out")


def _files(folder: Path, contents: list[str]) -> list[Path]:
    """Write one text file for each content."""
    paths = [folder / f"{n}.txt" for n in range(len(contents))]
    for path, text in zip(paths, contents, strict=True):
        path.write_bytes(text.encode())
    return paths


def _is_empty(folder: Path) -> bool:
    """Is the folder missing or empty?"""
    return not folder.exists() or not list(folder.iterdir())


# Token files


def test_texts_are_decoded_from_token_files(written: TokenFile):
    assert [written.tokenizer().decode(written.document(n)) for n in range(len(TEXTS))] == TEXTS
    assert [len(written.document(n)) for n in range(len(TEXTS))] == [len(text.encode()) + 1 for text in TEXTS]
    assert (written.vocabulary, written.meta["dtype"], written.ids.dtype.str) == (257, "uint16", "<u2")
    assert isinstance(written.ids, np.memmap)
    written.verify()
    with pytest.raises(IndexError, match="has 6"):
        written.document(6)


def test_every_line_of_jsonl_is_a_document(tmp_path: Path):
    lines = [json.dumps({"text": text, "id": n}, ensure_ascii=n % 2 == 0) for n, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("")
    file = write_tokens([tmp_path / "empty.jsonl", tmp_path / "a.jsonl"], tmp_path / "out")
    assert [file.tokenizer().decode(file.document(n)) for n in range(len(file.ends))] == TEXTS


def test_empty_token_file_is_written_and_refused_as_data(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")
    file = write_tokens([tmp_path / "empty.jsonl"], tmp_path / "out")
    assert (len(file.ids), len(file.ends)) == (0, 0)
    file.verify()
    with pytest.raises(ValueError, match="no tokens"):
        Packed(file, 4)


def test_folders_are_read_by_name_without_hidden_files(tmp_path: Path):
    for name in ("b/2.md", "b/.hidden", "b/.git/x", "a/1.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    file = write_tokens([tmp_path / "in"], tmp_path / "out")
    assert [file.tokenizer().decode(file.document(n)) for n in range(len(file.ends))] == ["a/1.txt", "b/2.md"]


def test_long_texts_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(texts, "CHUNK_CHARS", 5)
    sizes: list[int] = []
    done: list[int] = []

    class Watched(ByteTokenizer):
        def encode_many(self, parts):
            sizes.append(sum(map(len, parts)))
            return super().encode_many(parts)

    long = "äö\nü\n\nx🐻yz" * 20
    paths = _files(tmp_path, [long, "", long])
    file = write_tokens(paths, tmp_path / "out", Watched(), done.append)
    assert [file.tokenizer().decode(file.document(n)) for n in range(3)] == [long, "", long]
    assert max(sizes) <= 20
    assert done == sorted(done)
    assert done[-1] == sum(path.stat().st_size for path in paths)


@given(st.lists(st.text(max_size=30), max_size=8), st.booleans())
@settings(max_examples=30, deadline=None)
def test_packed_windows_match_a_plain_implementation(tmp_path_factory, contents, ends):
    """Include a tokenizer without an end token, for which empty documents have no tokens."""
    folder = tmp_path_factory.mktemp("packed")

    class Endless(ByteTokenizer):
        end: tuple[int, ...] = ()

    tokenizer = ByteTokenizer() if ends else Endless()
    documents = [[*text.encode(), *tokenizer.end] for text in contents]
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in contents))
    file = write_tokens([folder / "in.jsonl"], folder / "out", tokenizer)
    stream = [
        (number, token, document[n + 1] if n + 1 < len(document) else IGNORE_INDEX)
        for number, document in enumerate(documents)
        for n, token in enumerate(document)
    ]
    for tokens in (1, 2, 3, 8, 31, len(stream)) if stream else ():
        filled = stream + [(-1, 0, IGNORE_INDEX)] * (-len(stream) % tokens)
        windows = [filled[at : at + tokens] for at in range(0, len(filled), tokens)]
        source = Packed(file, tokens)
        assert (len(source), source.tokens, source.vocabulary) == (len(windows), tokens, 257)
        for sample, window in zip(all_of(source), windows, strict=True):
            documents_of_window = [number for number, _, _ in window]
            assert sample.tokens.tolist() == [token for _, token, _ in window]
            assert sample.labels.tolist() == [label for _, _, label in window]
            assert list(sample.documents) == [
                documents_of_window.count(number) for number in dict.fromkeys(documents_of_window)
            ]
            assert sample.tokens.dtype == sample.labels.dtype == torch.int64


def test_characters_split_by_windows_are_decoded_together(written: TokenFile):
    source, tokenizer = Packed(written, 4), ByteTokenizer()
    alone = "".join(tokenizer.decode(sample.tokens) for sample in all_of(source))
    together = tokenizer.decode(torch.cat([sample.tokens for sample in all_of(source)])[: len(written.ids)])
    assert "\ufffd" in alone
    assert together == "".join(TEXTS)


def test_token_file_is_pickled_as_its_path(written: TokenFile):
    source = Packed(written, 4)
    assert len(pickle.dumps(source)) < 1000
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again[1].tokens, source[1].tokens)
    assert isinstance(again.file.ids, np.memmap)


@pytest.mark.parametrize("tokens", [-1, 99])
def test_sample_indices_out_of_range_raise(written: TokenFile, tokens: int):
    with pytest.raises(IndexError, match=f"sample {tokens}"):
        Packed(written, 30)[tokens]


def _edit(**changes):
    """Return a function that changes fields of meta.json."""

    def damage(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | changes))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "meta.json").unlink(), "not a token file"),
        (lambda f: (f / "meta.json").write_text("{"), "not a token file"),
        (lambda f: (f / "meta.json").write_text("[1]"), "not a token file"),
        (_edit(format="other"), "not a token file"),
        (_edit(version=2), "version 2, and this meshflash reads 1"),
        (_edit(dtype="float32"), "damaged"),
        (_edit(tokens="many"), "damaged"),
        (_edit(documents=5), "documents.bin: 48 bytes, and meta.json says 40"),
        (lambda f: (f / "tokens.bin").write_bytes((f / "tokens.bin").read_bytes()[:-1]), "tokens.bin: .* bytes"),
        (lambda f: (f / "tokens.bin").unlink(), "tokens.bin: 0 bytes"),
        (lambda f: (f / "documents.bin").write_bytes(bytes(48)), "does not end where"),
    ],
)
def test_damaged_and_foreign_files_are_refused(written: TokenFile, damage, message):
    damage(written.folder)
    with pytest.raises(ValueError, match=message) as caught:
        TokenFile(written.folder)
    assert str(written.folder) in str(caught.value)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_verify_finds_a_changed_byte(written: TokenFile, name: str):
    data = bytearray((written.folder / name).read_bytes())
    data[0] ^= 1
    (written.folder / name).write_bytes(data)
    file = TokenFile(written.folder)
    with pytest.raises(ValueError, match=f"{name} is not what was written"):
        file.verify()


def test_interrupted_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(texts, "CHUNK_CHARS", 5)
    paths = _files(tmp_path, ["a\nb\n" * 20])

    def stop(done: int) -> None:
        assert len(list((tmp_path / "made").iterdir())) == 1  # the temporary folder
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(paths, tmp_path / "made" / "out", progress=stop)
    assert _is_empty(tmp_path / "made")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "é".encode("latin-1"), "latin.txt: not UTF-8"),
        ("cut.txt", "é".encode()[:1], "cut.txt: not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"other": 1}', "a.jsonl, line 2: expected"),
        ("a.jsonl", b'{"text": 3}', "a.jsonl, line 1: expected"),
        ("a.jsonl", b'["text"]', "a.jsonl, line 1: expected"),
        ("a.jsonl", b"{", "a.jsonl, line 1: expected"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl, line 1: expected"),
    ],
)
def test_unreadable_texts_are_refused(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        write_tokens([tmp_path / name], tmp_path / "made" / "out")
    assert _is_empty(tmp_path / "made")


def test_existing_folders_are_not_overwritten(tmp_path: Path, written: TokenFile):
    before = {path.name: path.read_bytes() for path in written.folder.iterdir()}
    with pytest.raises(ValueError, match="it exists and is not empty"):
        write_tokens(_files(tmp_path, ["other"]), written.folder)
    assert {path.name: path.read_bytes() for path in written.folder.iterdir()} == before
    with pytest.raises(ValueError, match="no such file"):
        write_tokens([tmp_path / "missing"], tmp_path / "new")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no files"):
        write_tokens([tmp_path / "nothing"], tmp_path / "new")
    assert len(write_tokens(_files(tmp_path, ["abc"]), tmp_path / "nothing").ids) == 4  # an empty folder may be used


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_token_dtype_follows_the_vocabulary(tmp_path: Path, vocabulary: int, dtype: str):
    class Last(ByteTokenizer):
        kind = "mine"
        end: tuple[int, ...] = (vocabulary - 1,)

    Last.vocabulary = vocabulary
    file = write_tokens(_files(tmp_path, ["ab"]), tmp_path / "out", Last())
    assert (file.meta["dtype"], file.ids.tolist()) == (dtype, [97, 98, vocabulary - 1])
    with pytest.raises(ValueError, match="custom tokenizer 'mine'"):
        file.tokenizer()
    Last.vocabulary = 97
    with pytest.raises(ValueError, match="its vocabulary is 97"):
        write_tokens(_files(tmp_path, ["ab"]), tmp_path / "more", Last())


# Hugging Face tokenizers


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small byte-level BPE like GPT-2's, with <s> before texts, truncation, padding and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<end>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, "the hen and the hat\n\n  then  that\n" * 9], trainer)
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(5)
    made.enable_padding(length=64, pad_id=2, pad_token="<pad>")
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return folder


def test_folder_tokenizer_encodes_and_decodes(tokenizer_folder: Path, tmp_path: Path):
    tokenizer = FolderTokenizer(tokenizer_folder)
    assert (tokenizer.begin, tokenizer.end) == ((0,), (1,))
    file = write_tokens(_files(tmp_path, [*TEXTS, "<end> is text"]), tmp_path / "out", tokenizer)
    for n, text in enumerate([*TEXTS, "<end> is text"]):
        assert file.document(n).tolist() == [0, *tokenizer.encode(text), 1]
        assert file.tokenizer().decode(file.document(n)) == text
    assert file.document(6).tolist().count(1) == 1
    assert file.vocabulary == tokenizer.vocabulary > int(file.ids.max())
    assert set(file.meta["sha256"]) == {"tokens.bin", "documents.bin", "tokenizer.json", "tokenizer_config.json"}
    assert file.tokenizer().end == (1,)
    file.verify()


@pytest.mark.parametrize("chunk_chars", [1, 20, 23, 40])
def test_text_read_in_chunks_has_the_tokens_of_the_whole_text(
    tokenizer_folder, tmp_path, monkeypatch, chunk_chars: int
):
    tokenizer = FolderTokenizer(tokenizer_folder)
    long = (
        "the hen\nand  the\n\nhat\nthen \n\n\tthat\r\nhen\n\nthe\n" * 9
    )  # two line breaks are one token at the end of a text, but not before a word
    whole = tokenizer.encode(long)
    assert len(tokenizer.encode("\n\n")) == 1
    monkeypatch.setattr(texts, "CHUNK_CHARS", chunk_chars)
    file = write_tokens(_files(tmp_path, [long]), tmp_path / "out", tokenizer)
    if chunk_chars == 1:  # chunks without a line break to split at: different tokens, the same text
        assert file.document(0).tolist() != [0, *whole, 1]
    else:
        assert file.document(0).tolist() == [0, *whole, 1]
    assert tokenizer.decode(file.document(0)) == long


def test_unreadable_tokenizers_are_refused(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"no tokenizer\.json there"):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        FolderTokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        FolderTokenizer(tokenizer_folder)


# The command


def test_data_command_writes_and_shows(tmp_path: Path, tokenizer_folder: Path):
    paths = [str(path) for path in _files(tmp_path, TEXTS)]
    run = CliRunner().invoke
    done = run(app, ["data", *paths, "--output", str(tmp_path / "out")])
    size = sum(len(text.encode()) for text in TEXTS)
    assert done.exit_code == 0, done.output
    assert f"6 documents, {size + 6} tokens from {size} bytes" in done.output
    done = run(app, ["data", "--show", str(tmp_path / "out"), "--verify", "--tokens", "30", "--sample", "1"])
    assert done.exit_code == 0, done.output
    assert f"documents   6\ntokens      {size + 6}\nvocabulary  257\ntokenizer   bytes" in done.output
    assert "every byte is as it was written" in done.output
    assert "sample 1 of 3: 30 tokens" in done.output
    assert "日" in done.output
    last = run(app, ["data", "--show", str(tmp_path / "out"), "--tokens", "40", "--sample", "2"]).output
    assert last.endswith("[30 tokens of padding]\n")
    done = run(app, ["data", *paths, "--output", str(tmp_path / "bpe"), "--tokenizer", str(tokenizer_folder)])
    assert done.exit_code == 0, done.output
    assert "日本語" in run(app, ["data", "--show", str(tmp_path / "bpe")]).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data"], "expected INPUT"),
        (["data", "x"], "expected INPUT"),
        (["data", "x", "--show", "y"], "--show takes no INPUT"),
        (["data", "--show", "missing"], "not a token file"),
        (["data", "missing", "--output", "out"], "no such file"),
        (["data", __file__, "--output", "out", "--tokenizer", "missing"], "no tokenizer.json"),
    ],
)
def test_data_command_names_the_expected_value_of_invalid_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert _is_empty(tmp_path)


def test_data_command_does_not_import_torch():
    script = "import sys\nfrom meshflash.cli import data\nassert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
