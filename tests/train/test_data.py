"""Data of training: the order of samples, token files and their windows, embedded tasks, images, the command."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from meshflash.cli import app
from meshflash.models import vit
from meshflash.parallel.loss import IGNORED
from meshflash.train import texts
from meshflash.train.images import ImageArrays, ImageFolder, SyntheticImages
from meshflash.train.order import Order, draws
from meshflash.train.synthetic import Copy, Needle, accuracy
from meshflash.train.tokenizer import ByteTokenizer, FolderTokenizer
from meshflash.train.tokens import Packed, TokenFile, write_tokens

END = 256
TEXTS = ["hello", "", "ein Höhlenbär 🐻\r\nund mehr\n", "\n\n", "日本語" * 5, "x"]


@pytest.fixture
def written(tmp_path: Path) -> TokenFile:
    """A token file of TEXTS, one text a file."""
    return write_tokens(_files(tmp_path, TEXTS), tmp_path / "out")


def _files(folder: Path, contents: list[str]) -> list[Path]:
    paths = [folder / f"{n}.txt" for n in range(len(contents))]
    for path, text in zip(paths, contents, strict=True):
        path.write_bytes(text.encode())
    return paths


def _all(source: Any) -> list[Any]:
    """All samples of a source."""
    return [source[n] for n in range(len(source))]


def _stays_empty(folder: Path) -> bool:
    """Whether nothing was left where something was to be written."""
    return not folder.exists() or not list(folder.iterdir())


# Order


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(1, 7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_order_has_each_sample_once_an_epoch_on_any_ranks(samples, batch, seed, micro, shuffle):
    order = Order(samples, batch, seed, shuffle)
    steps = -(-3 * samples // batch)
    taken = [order.of(step) for step in range(steps)]
    assert all(len(step) == batch for step in taken)
    flat = list(chain(*taken))
    for epoch in range(3):
        assert sorted(flat[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    for ranks in (1, 2, 3, 4):
        for step in range(min(steps, 3)):
            parts = [order.mine(step, place, ranks, micro) for place in range(ranks)]
            rows = [list(chain(*part)) for part in parts]
            assert list(chain(*rows)) == taken[step]
            assert all(1 <= len(group) <= micro for part in parts for group in part)
            assert all(len(group) == micro for part in parts for group in part[:-1])
            assert sorted(map(len, rows), reverse=True) == list(map(len, rows))
            assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_order_goes_on_at_any_step_and_backwards():
    order = Order(7, 3, seed=5)
    taken = [order.of(step) for step in range(30)]
    assert all(Order(7, 3, seed=5).of(step) == taken[step] for step in (29, 3, 17, 0))
    assert [order.of(step) for step in reversed(range(30))] == taken[::-1]


def test_epochs_and_seeds_have_other_orders():
    epochs = [tuple(Order(50, 50, seed).of(epoch)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(epochs)) == 6
    assert Order(50, 50, shuffle=False).of(3) == list(range(50))


def test_order_is_that_of_earlier_versions():
    assert draws(1, 2, 2).tolist() == [5705853004827290377, 6584680345644299050]
    assert Order(6, 6, seed=7).of(0) == [4, 1, 3, 2, 5, 0]


def test_order_places_are_even_over_many_epochs():
    first = np.array([Order(4, 4, 0).of(epoch)[0] for epoch in range(400)])
    assert (np.bincount(first, minlength=4) > 60).all()  # 100 each, and 4.6 deviations


def test_a_rank_without_samples_has_no_micro_batch():
    assert [Order(9, 2, shuffle=False).mine(0, place, 3, 4) for place in range(3)] == [[[0]], [[1]], []]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Order(0, 1), "samples=0"),
        (lambda: Order(1, 0), "batch=0"),
        (lambda: Order(1, 1, -1), "seed=-1"),
        (lambda: Order(1, 1).of(-1), "step=-1"),
        (lambda: Order(1, 1).mine(0, 2, 2, 1), "place=2"),
        (lambda: Order(1, 1).mine(0, 0, 1, 0), "micro=0"),
    ],
)
def test_order_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Token files


def test_texts_come_back(written: TokenFile):
    assert [written.tokenizer().decode(written.document(n)) for n in range(len(TEXTS))] == TEXTS
    assert [len(written.document(n)) for n in range(len(TEXTS))] == [len(text.encode()) + 1 for text in TEXTS]
    assert (written.vocabulary, written.meta["dtype"], written.ids.dtype.str) == (257, "uint16", "<u2")
    assert isinstance(written.ids, np.memmap)
    written.verify()
    with pytest.raises(IndexError, match="has 6"):
        written.document(6)


def test_jsonl_has_a_document_a_line(tmp_path: Path):
    lines = [json.dumps({"text": text, "id": n}, ensure_ascii=n % 2 == 0) for n, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("")
    file = write_tokens([tmp_path / "empty.jsonl", tmp_path / "a.jsonl"], tmp_path / "out")
    assert [file.tokenizer().decode(file.document(n)) for n in range(len(file.ends))] == TEXTS


def test_a_file_without_documents(tmp_path: Path):
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


def test_long_texts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(texts, "PIECE", 5)
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
def test_windows_are_those_of_a_plain_derivation(tmp_path_factory, contents, ends):
    """Also of a tokenizer without an end token, where empty documents have no tokens at all."""
    folder = tmp_path_factory.mktemp("packed")

    class Endless(ByteTokenizer):
        end: tuple[int, ...] = ()

    tokenizer = ByteTokenizer() if ends else Endless()
    documents = [[*text.encode(), *tokenizer.end] for text in contents]
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in contents))
    file = write_tokens([folder / "in.jsonl"], folder / "out", tokenizer)
    stream = [
        (number, token, document[n + 1] if n + 1 < len(document) else IGNORED)
        for number, document in enumerate(documents)
        for n, token in enumerate(document)
    ]
    for tokens in (1, 2, 3, 8, 31, len(stream)) if stream else ():
        filled = stream + [(-1, 0, IGNORED)] * (-len(stream) % tokens)
        windows = [filled[at : at + tokens] for at in range(0, len(filled), tokens)]
        source = Packed(file, tokens)
        assert (len(source), source.tokens, source.vocabulary) == (len(windows), tokens, 257)
        for sample, window in zip(_all(source), windows, strict=True):
            numbers = [number for number, _, _ in window]
            assert sample.tokens.tolist() == [token for _, token, _ in window]
            assert sample.labels.tolist() == [label for _, _, label in window]
            assert list(sample.documents) == [numbers.count(number) for number in dict.fromkeys(numbers)]
            assert sample.tokens.dtype == sample.labels.dtype == torch.int64


def test_characters_that_windows_cut_come_back_together(written: TokenFile):
    source, tokenizer = Packed(written, 4), ByteTokenizer()
    alone = "".join(tokenizer.decode(sample.tokens) for sample in _all(source))
    together = tokenizer.decode(torch.cat([sample.tokens for sample in _all(source)])[: len(written.ids)])
    assert "\ufffd" in alone
    assert together == "".join(TEXTS)


def test_a_source_is_pickled_by_its_name(written: TokenFile):
    source = Packed(written, 4)
    assert len(pickle.dumps(source)) < 1000
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(again[1].tokens, source[1].tokens)
    assert isinstance(again.file.ids, np.memmap)


@pytest.mark.parametrize("tokens", [-1, 99])
def test_samples_that_are_not_there(written: TokenFile, tokens: int):
    with pytest.raises(IndexError, match=f"sample {tokens}"):
        Packed(written, 30)[tokens]


def _edit(**changes):
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
def test_a_changed_byte_is_found(written: TokenFile, name: str):
    data = bytearray((written.folder / name).read_bytes())
    data[0] ^= 1
    (written.folder / name).write_bytes(data)
    file = TokenFile(written.folder)
    with pytest.raises(ValueError, match=f"{name} is not what was written"):
        file.verify()


def test_a_write_that_ends_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(texts, "PIECE", 5)
    paths = _files(tmp_path, ["a\nb\n" * 20])

    def stop(done: int) -> None:
        assert len(list((tmp_path / "made").iterdir())) == 1  # the draft
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(paths, tmp_path / "made" / "out", progress=stop)
    assert _stays_empty(tmp_path / "made")


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
def test_texts_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        write_tokens([tmp_path / name], tmp_path / "made" / "out")
    assert _stays_empty(tmp_path / "made")


def test_what_is_there_is_not_overwritten(tmp_path: Path, written: TokenFile):
    before = {path.name: path.read_bytes() for path in written.folder.iterdir()}
    with pytest.raises(ValueError, match="there already"):
        write_tokens(_files(tmp_path, ["other"]), written.folder)
    assert {path.name: path.read_bytes() for path in written.folder.iterdir()} == before
    with pytest.raises(ValueError, match="no such file"):
        write_tokens([tmp_path / "missing"], tmp_path / "new")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no files"):
        write_tokens([tmp_path / "nothing"], tmp_path / "new")
    assert len(write_tokens(_files(tmp_path, ["abc"]), tmp_path / "nothing").ids) == 4  # empty folders are filled


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_ids_take_the_bytes_that_they_need(tmp_path: Path, vocabulary: int, dtype: str):
    class Last(ByteTokenizer):
        kind = "mine"
        end: tuple[int, ...] = (vocabulary - 1,)

    Last.vocabulary = vocabulary
    file = write_tokens(_files(tmp_path, ["ab"]), tmp_path / "out", Last())
    assert (file.meta["dtype"], file.ids.tolist()) == (dtype, [97, 98, vocabulary - 1])
    with pytest.raises(ValueError, match="tokenizer of its own, 'mine'"):
        file.tokenizer()
    Last.vocabulary = 97
    with pytest.raises(ValueError, match="its vocabulary is 97"):
        write_tokens(_files(tmp_path, ["ab"]), tmp_path / "more", Last())


# Tokenizers of Hugging Face


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE as GPT-2 has it, that begins texts with <s>, cuts and pads them, and has an end token."""
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


def test_a_tokenizer_of_a_folder(tokenizer_folder: Path, tmp_path: Path):
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


@pytest.mark.parametrize("piece", [1, 20, 23, 40])
def test_pieces_of_a_long_text_have_its_tokens(tokenizer_folder, tmp_path, monkeypatch, piece: int):
    tokenizer = FolderTokenizer(tokenizer_folder)
    long = (
        "the hen\nand  the\n\nhat\nthen \n\n\tthat\r\nhen\n\nthe\n" * 9
    )  # two line breaks are one token at the end of a text, not before a word
    whole = tokenizer.encode(long)
    assert len(tokenizer.encode("\n\n")) == 1
    monkeypatch.setattr(texts, "PIECE", piece)
    file = write_tokens(_files(tmp_path, [long]), tmp_path / "out", tokenizer)
    if piece == 1:  # there is no line to cut at: other tokens, the same text
        assert file.document(0).tolist() != [0, *whole, 1]
    else:
        assert file.document(0).tolist() == [0, *whole, 1]
    assert tokenizer.decode(file.document(0)) == long


def test_tokenizers_that_cannot_be_read(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"no tokenizer\.json there"):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        FolderTokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        FolderTokenizer(tokenizer_folder)


# Embedded tasks


@pytest.mark.parametrize("tokens", [3, 4, 7, 64, 65])
def test_copy(tokens: int):
    task = Copy(tokens, 5, seed=3, samples=8)
    half = (tokens + 1) // 2
    for sample in _all(task):
        ids, labels = sample.tokens.tolist(), sample.labels.tolist()
        assert len(ids) == len(labels) == tokens
        assert sample.documents == (tokens,)
        assert all(ids[n] == ids[n - half] for n in range(half, tokens))
        wanted = [ids[n - half + 1] if n >= half and n - half + 1 < half else IGNORED for n in range(tokens)]
        assert labels == wanted
        assert any(label != IGNORED for label in labels)
    assert len({tuple(sample.tokens.tolist()) for sample in _all(Copy(64, 5, samples=20))}) == 20


@pytest.mark.parametrize(("tokens", "vocabulary", "pairs"), [(5, 8, 1), (64, 8, 2), (65, 33, 8), (33, 32, 8)])
def test_needle(tokens: int, vocabulary: int, pairs: int):
    keys = vocabulary // 4
    for sample in _all(Needle(tokens, vocabulary, seed=2, samples=30, pairs=pairs)):
        ids, labels = sample.tokens.tolist(), sample.labels.tolist()
        assert max(ids) < vocabulary
        assert labels[:-1] == [IGNORED] * (tokens - 1)
        found = {ids[n]: ids[n + 1] for n in range(tokens // 2) if ids[n] < keys}
        assert len(found) == pairs
        assert all(keys <= value < 2 * keys for value in found.values())
        assert all(token >= 2 * keys for token in ids[tokens // 2 : -1])
        assert labels[-1] == found[ids[-1]]
        assert sample.documents == (tokens,)


def test_answers_are_not_in_the_last_tokens():
    """Many samples whose last tokens are the same have every answer: nothing but the first half tells them apart."""
    by_key: dict[int, list[int]] = {}
    for sample in _all(Needle(17, 8, samples=1000)):
        assert not any(2 <= token < 4 for token in sample.tokens[8:].tolist())  # no value
        by_key.setdefault(int(sample.tokens[-1]), []).append(int(sample.labels[-1]))
    assert len(by_key) == 2
    assert all(0.4 < np.mean(np.array(labels) == 2) < 0.6 for labels in by_key.values())
    # of the copy, a label is independent of all tokens behind its answer's place
    recent: dict[tuple[int, ...], list[int]] = {}
    for sample in _all(Copy(12, 2, samples=2000)):
        recent.setdefault(tuple(sample.tokens[2:7].tolist()), []).append(int(sample.labels[6]))
    assert len(recent) == 32
    assert all(0.25 < np.mean(labels) < 0.75 for labels in recent.values())


@pytest.mark.parametrize("make", [Copy, Needle])
def test_samples_depend_on_seed_and_number_alone(make):
    few, many = make(40, 16, seed=1, samples=3), make(40, 16, seed=1, samples=1000)
    assert all(torch.equal(few[n].tokens, many[n].tokens) for n in (2, 0, 1))
    assert not torch.equal(many[0].tokens, make(40, 16, seed=2, samples=3)[0].tokens)
    assert len(few) == 3
    assert (few.tokens, few.vocabulary) == (40, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Copy(2, 8), "tokens=2; expected at least 3"),
        (lambda: Copy(8, 1), "vocabulary=1"),
        (lambda: Copy(8, 8, samples=0), "samples=0"),
        (lambda: Needle(8, 32, pairs=2), "tokens=8; expected at least 9"),
        (lambda: Needle(80, 8, pairs=3), "has 2 keys"),
    ],
)
def test_tasks_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_accuracy_counts_labels_only():
    labels = torch.tensor([[2, IGNORED, 0], [1, 1, IGNORED]])
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 0, 1], [1, 1, 1]]), 3).float()
    assert [int(x) for x in accuracy(logits, labels)] == [3, 4]
    assert [int(x) for x in accuracy(logits, torch.full_like(labels, IGNORED))] == [0, 0]


# Images


def test_image_folder(tmp_path: Path):
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
    for name in ("dog/1.png", "cat/deep/b.PNG", "cat/a.png", "cat/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text("no image")
        else:
            Image.fromarray(pixels + len(name)).save(path)
    source = ImageFolder(tmp_path)
    assert (source.names, source.classes, len(source)) == (("cat", "dog"), 2, 3)
    assert [sample.label for sample in _all(source)] == [0, 0, 1]
    wanted = torch.from_numpy(pixels + len("cat/a.png")).permute(2, 0, 1).float() / 255
    torch.testing.assert_close(source[0].image, wanted, rtol=0, atol=0)
    assert (source[0].image.dtype, source[0].target) == (torch.float32, None)
    assert ImageFolder(tmp_path, (5, 4))[0].image.shape == (3, 5, 4)
    assert ImageFolder(tmp_path, 6)[2].image.shape == (3, 6, 6)
    (tmp_path / "dog" / "2.png").write_text("broken")
    with pytest.raises(ValueError, match=r"2\.png: not an image"):
        ImageFolder(tmp_path)[3]
    Image.fromarray(pixels[:, :, 0].astype(np.uint16)).save(tmp_path / "dog" / "2.png")
    with pytest.raises(ValueError, match="ImageArrays"):
        ImageFolder(tmp_path)[3]


def test_gray_and_turned_images(tmp_path: Path):
    (tmp_path / "one").mkdir()
    Image.fromarray(np.full((2, 3), 51, np.uint8)).save(tmp_path / "one" / "a.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # a camera that was held upright
    Image.fromarray(np.zeros((2, 3, 3), np.uint8)).save(tmp_path / "one" / "b.jpg", exif=turned)
    gray, upright = _all(ImageFolder(tmp_path))
    torch.testing.assert_close(gray.image, torch.full((3, 2, 3), 0.2))
    assert upright.image.shape == (3, 3, 2)


def test_image_folders_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="no images"):
        ImageFolder(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        ImageFolder(tmp_path / "missing")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match="meshflash\\[images\\]"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("kind", ["npz", "compressed", "npy"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_image_arrays(tmp_path: Path, kind: str, order):
    pixels = np.asarray(np.arange(4 * 3 * 2 * 5, dtype=np.uint8).reshape(4, 3, 2, 5), order=order)
    labels = np.array([3, 0, 1, 1])
    path = tmp_path / ("images.npy" if kind == "npy" else "set.npz")
    if kind == "npy":
        np.save(path, pixels)
        np.save(tmp_path / "labels.npy", labels)
    else:
        (np.savez if kind == "npz" else np.savez_compressed)(path, images=pixels, labels=labels)
    source = ImageArrays(path)
    assert (len(source), source.classes, source.channels, source.size) == (4, 4, 3, (2, 5))
    assert isinstance(source.images, np.memmap) == (kind != "compressed")
    for n, sample in enumerate(_all(source)):
        assert torch.equal(sample.image, torch.from_numpy(np.ascontiguousarray(pixels[n])).float() / 255)
        assert (sample.label, sample.target) == (labels[n], None)


def test_image_arrays_with_targets(tmp_path: Path):
    images, targets = np.random.default_rng(0).random((2, 3, 4, 5)).astype(np.float64), np.ones((3, 4, 5), np.int16)
    np.savez(tmp_path / "set.npz", images=images[0], targets=targets)
    source = ImageArrays(tmp_path / "set.npz")
    sample = source[2]
    assert torch.equal(sample.image, torch.from_numpy(images[0, 2:3]).float())
    assert sample.label is None
    assert sample.target is not None
    assert torch.equal(sample.target, torch.ones(1, 4, 5))
    assert source.classes is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (dict(labels=np.zeros(2, int)), "expected images"),
        (dict(images=np.zeros((2, 1, 3, 3))), "expected images, and labels or targets"),
        (dict(images=np.zeros((2, 3, 3)), labels=np.zeros(2, int), targets=np.zeros((2, 3, 3))), "labels or targets"),
        (dict(images=np.zeros((2, 1, 3, 3)), labels=np.zeros(3, int)), "for each of 2 images"),
        (dict(images=np.zeros((2, 1, 3, 3)), labels=np.zeros(2)), "must be a class"),
        (dict(images=np.zeros((2, 1, 3, 3)), labels=np.array([0, -1])), "0 or more"),
        (dict(images=np.zeros((2, 3)), labels=np.zeros(2, int)), "images must be numbers"),
        (dict(images=np.zeros((2, 1, 3, 3)), targets=np.zeros((2, 1, 3, 4))), "are not of images"),
        (dict(images=np.array([{}, {}]), labels=np.zeros(2, int)), "holds objects"),
    ],
)
def test_image_arrays_refuse(tmp_path: Path, arrays, message):
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        ImageArrays(tmp_path / "set.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "set.npz").read_bytes()[:50])
    with pytest.raises(ValueError, match=r"cut\.npz: expected a \.npz"):
        ImageArrays(tmp_path / "cut.npz")


def test_no_corner_alone_tells_the_class():
    classes, spot = 3, 2
    source = SyntheticImages(9, 7, classes, seed=1, samples=600, channels=1, spot=spot)
    other = SyntheticImages(9, 7, classes, seed=2, samples=5, channels=1, spot=spot)
    signs = {sample.image[:, :spot, :spot].numpy().tobytes() for sample in _all(source)}
    assert len(signs) == classes
    assert {sample.image[:, :spot, :spot].numpy().tobytes() for sample in _all(other)} <= signs  # those of all seeds
    table: dict[tuple[bytes, bytes], set[int | None]] = {}
    corners: list[dict[bytes, list[int | None]]] = [{}, {}]
    for sample in _all(source):
        found = [sample.image[:, at, at].numpy().tobytes() for at in (slice(0, spot), slice(-spot, None))]
        table.setdefault((found[0], found[1]), set()).add(sample.label)
        for seen, corner in zip(corners, found, strict=True):
            seen.setdefault(corner, []).append(sample.label)
        rest = sample.image.clone()
        rest[:, :spot, :spot] = rest[:, -spot:, -spot:] = 0
        assert float(rest.abs().max()) <= 0.1
    assert len(table) == classes**2
    assert all(len(labels) == 1 for labels in table.values())
    for seen in corners:
        for labels in seen.values():
            counts = [labels.count(label) / len(labels) for label in range(classes)]
            assert all(0.2 < part < 0.47 for part in counts)  # a third each, by 4 deviations
    assert torch.equal(source[3].image, SyntheticImages(9, 7, classes, 1, 4, channels=1, spot=spot)[3].image)


def test_dense_images_want_the_pixels_of_half_the_height_below():
    source = SyntheticImages(9, 10, 4, seed=1, samples=3, dense=True, spot=4)
    for sample in _all(source):
        assert sample.image.shape == (3, 9, 10)
        assert sample.label is None
        assert sample.target is not None
        wanted = [[[sample.image[c % 3, (y + 4) % 9, x] for x in range(10)] for y in range(9)] for c in range(4)]
        assert sample.target.tolist() == torch.tensor(wanted).tolist()
    blocks = source[0].image[:, :8, :8].unfold(1, 4, 4).unfold(2, 4, 4).flatten(3)
    assert bool((blocks == blocks[..., :1]).all())


def test_a_vit_takes_the_samples():
    for dense in (False, True):
        model = vit.ViT(vit.tiny(outputs=2, head="pixels" if dense else "classes"))
        sample = SyntheticImages(16, 24, 2, samples=1, dense=dense)[0]
        if sample.target is not None:
            target = sample.target[None]
            loss = model(sample.image[None], torch.zeros_like(target), targets=target)
        else:
            loss = model(sample.image[None], torch.tensor([sample.label]))
        assert float(loss.detach()) > 0


# The command


def test_the_command_writes_and_shows(tmp_path: Path, tokenizer_folder: Path):
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
    assert last.endswith("[30 tokens of filling]\n")
    done = run(app, ["data", *paths, "--output", str(tmp_path / "bpe"), "--tokenizer", str(tokenizer_folder)])
    assert done.exit_code == 0, done.output
    assert "日本語" in run(app, ["data", "--show", str(tmp_path / "bpe")]).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data"], "expected INPUT"),
        (["data", "x"], "expected INPUT"),
        (["data", "x", "--show", "y"], "--show takes no INPUT"),
        (["data", "--show", "missing"], "not a token file"),
        (["data", "missing", "--output", "out"], "no such file"),
        (["data", __file__, "--output", "out", "--tokenizer", "missing"], "no tokenizer.json"),
    ],
)
def test_the_command_tells_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words, message):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert _stays_empty(tmp_path)


def test_help_needs_no_torch():
    script = "import sys\nfrom meshflash.cli import data\nassert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
