"""Training samples: their order, the synthetic tasks, and images."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from meshflash.models import vit
from meshflash.parallel.loss import IGNORE_INDEX
from meshflash.train.images import ImageArrays, ImageFolder, SyntheticImages
from meshflash.train.order import Order, random_words
from meshflash.train.synthetic import Copy, Needle, accuracy
from train.sources import all_of

# Order


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(1, 7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_order_has_each_sample_once_per_epoch_on_any_number_of_ranks(samples, batch, seed, micro, shuffle):
    order = Order(samples, batch, seed, shuffle)
    steps = -(-3 * samples // batch)
    taken = [order.step_samples(step) for step in range(steps)]
    assert all(len(step) == batch for step in taken)
    flat = list(chain(*taken))
    for epoch in range(3):
        assert sorted(flat[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    for ranks in (1, 2, 3, 4):
        for step in range(min(steps, 3)):
            parts = [order.rank_samples(step, data_rank, ranks, micro) for data_rank in range(ranks)]
            rows = [list(chain(*part)) for part in parts]
            assert list(chain(*rows)) == taken[step]
            assert all(1 <= len(group) <= micro for part in parts for group in part)
            assert all(len(group) == micro for part in parts for group in part[:-1])
            assert sorted(map(len, rows), reverse=True) == list(map(len, rows))
            assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_order_of_a_step_does_not_depend_on_earlier_calls():
    order = Order(7, 3, seed=5)
    taken = [order.step_samples(step) for step in range(30)]
    assert all(Order(7, 3, seed=5).step_samples(step) == taken[step] for step in (29, 3, 17, 0))
    assert [order.step_samples(step) for step in reversed(range(30))] == taken[::-1]


def test_epochs_and_seeds_have_different_orders():
    epochs = [tuple(Order(50, 50, seed).step_samples(epoch)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(epochs)) == 6
    assert Order(50, 50, shuffle=False).step_samples(3) == list(range(50))


def test_order_matches_recorded_values():
    assert random_words(1, 2, 2).tolist() == [5705853004827290377, 6584680345644299050]
    assert Order(6, 6, seed=7).step_samples(0) == [4, 1, 3, 2, 5, 0]


def test_order_is_uniform_over_many_epochs():
    first = np.array([Order(4, 4, 0).step_samples(epoch)[0] for epoch in range(400)])
    assert (np.bincount(first, minlength=4) > 60).all()  # 100 expected, so 60 is 4.6 standard deviations below


def test_rank_without_samples_gets_no_micro_batch():
    assert [Order(9, 2, shuffle=False).rank_samples(0, data_rank, 3, 4) for data_rank in range(3)] == [[[0]], [[1]], []]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Order(0, 1), "samples=0"),
        (lambda: Order(1, 0), "batch=0"),
        (lambda: Order(1, 1, -1), "seed=-1"),
        (lambda: Order(1, 1).step_samples(-1), "step=-1"),
        (lambda: Order(1, 1).rank_samples(0, 2, 2, 1), "data_rank=2"),
        (lambda: Order(1, 1).rank_samples(0, 0, 1, 0), "micro=0"),
    ],
)
def test_order_refuses_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Synthetic tasks


@pytest.mark.parametrize("tokens", [3, 4, 7, 64, 65])
def test_copy_labels_the_second_half(tokens: int):
    task = Copy(tokens, 5, seed=3, samples=8)
    half = (tokens + 1) // 2
    for sample in all_of(task):
        ids, labels = sample.tokens.tolist(), sample.labels.tolist()
        assert len(ids) == len(labels) == tokens
        assert sample.documents == (tokens,)
        assert all(ids[n] == ids[n - half] for n in range(half, tokens))
        want = [ids[n - half + 1] if n >= half and n - half + 1 < half else IGNORE_INDEX for n in range(tokens)]
        assert labels == want
        assert any(label != IGNORE_INDEX for label in labels)
    assert len({tuple(sample.tokens.tolist()) for sample in all_of(Copy(64, 5, samples=20))}) == 20


@pytest.mark.parametrize(("tokens", "vocabulary", "pairs"), [(5, 8, 1), (64, 8, 2), (65, 33, 8), (33, 32, 8)])
def test_needle_label_is_the_value_of_the_key(tokens: int, vocabulary: int, pairs: int):
    keys = vocabulary // 4
    for sample in all_of(Needle(tokens, vocabulary, seed=2, samples=30, pairs=pairs)):
        ids, labels = sample.tokens.tolist(), sample.labels.tolist()
        assert max(ids) < vocabulary
        assert labels[:-1] == [IGNORE_INDEX] * (tokens - 1)
        found = {ids[n]: ids[n + 1] for n in range(tokens // 2) if ids[n] < keys}
        assert len(found) == pairs
        assert all(keys <= value < 2 * keys for value in found.values())
        assert all(token >= 2 * keys for token in ids[tokens // 2 : -1])
        assert labels[-1] == found[ids[-1]]
        assert sample.documents == (tokens,)


def test_answers_are_not_among_the_last_tokens():
    """Samples with the same last tokens have every possible answer; only the first half determines it."""
    by_key: dict[int, list[int]] = {}
    for sample in all_of(Needle(17, 8, samples=1000)):
        assert not any(2 <= token < 4 for token in sample.tokens[8:].tolist())  # no token of the second half is a value
        by_key.setdefault(int(sample.tokens[-1]), []).append(int(sample.labels[-1]))
    assert len(by_key) == 2
    assert all(0.4 < np.mean(np.array(labels) == 2) < 0.6 for labels in by_key.values())
    # In Copy a label is independent of all tokens after its answer.
    recent: dict[tuple[int, ...], list[int]] = {}
    for sample in all_of(Copy(12, 2, samples=2000)):
        recent.setdefault(tuple(sample.tokens[2:7].tolist()), []).append(int(sample.labels[6]))
    assert len(recent) == 32
    assert all(0.25 < np.mean(labels) < 0.75 for labels in recent.values())


@pytest.mark.parametrize("make", [Copy, Needle])
def test_samples_depend_on_seed_and_index_only(make):
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
def test_tasks_refuse_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_accuracy_counts_labels_only():
    labels = torch.tensor([[2, IGNORE_INDEX, 0], [1, 1, IGNORE_INDEX]])
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 0, 1], [1, 1, 1]]), 3).float()
    assert [int(x) for x in accuracy(logits, labels)] == [3, 4]
    assert [int(x) for x in accuracy(logits, torch.full_like(labels, IGNORE_INDEX))] == [0, 0]


# Images


def test_image_folder_returns_scaled_images_and_labels(tmp_path: Path):
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
    assert [sample.label for sample in all_of(source)] == [0, 0, 1]
    want = torch.from_numpy(pixels + len("cat/a.png")).permute(2, 0, 1).float() / 255
    torch.testing.assert_close(source[0].image, want, rtol=0, atol=0)
    assert (source[0].image.dtype, source[0].target) == (torch.float32, None)
    assert ImageFolder(tmp_path, (5, 4))[0].image.shape == (3, 5, 4)
    assert ImageFolder(tmp_path, 6)[2].image.shape == (3, 6, 6)
    (tmp_path / "dog" / "2.png").write_text("broken")
    with pytest.raises(ValueError, match=r"2\.png: not an image"):
        ImageFolder(tmp_path)[3]
    Image.fromarray(pixels[:, :, 0].astype(np.uint16)).save(tmp_path / "dog" / "2.png")
    with pytest.raises(ValueError, match="ImageArrays"):
        ImageFolder(tmp_path)[3]


def test_gray_and_exif_rotated_images_are_converted(tmp_path: Path):
    (tmp_path / "one").mkdir()
    Image.fromarray(np.full((2, 3), 51, np.uint8)).save(tmp_path / "one" / "a.png")
    rotated = Image.Exif()
    rotated[0x0112] = 6  # EXIF orientation: rotated by 90 degrees
    Image.fromarray(np.zeros((2, 3, 3), np.uint8)).save(tmp_path / "one" / "b.jpg", exif=rotated)
    gray, upright = all_of(ImageFolder(tmp_path))
    torch.testing.assert_close(gray.image, torch.full((3, 2, 3), 0.2))
    assert upright.image.shape == (3, 3, 2)


def test_unreadable_image_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="no images"):
        ImageFolder(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        ImageFolder(tmp_path / "missing")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("kind", ["npz", "compressed", "npy"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_image_arrays_are_mapped_and_scaled(tmp_path: Path, kind: str, order):
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
    for n, sample in enumerate(all_of(source)):
        assert torch.equal(sample.image, torch.from_numpy(np.ascontiguousarray(pixels[n])).float() / 255)
        assert (sample.label, sample.target) == (labels[n], None)


def test_image_arrays_return_targets(tmp_path: Path):
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
def test_invalid_image_arrays_are_refused(tmp_path: Path, arrays, message):
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        ImageArrays(tmp_path / "set.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "set.npz").read_bytes()[:50])
    with pytest.raises(ValueError, match=r"cut\.npz: expected a \.npz"):
        ImageArrays(tmp_path / "cut.npz")


def test_single_corner_does_not_determine_the_class():
    classes, spot = 3, 2
    source = SyntheticImages(9, 7, classes, seed=1, samples=600, channels=1, spot=spot)
    other = SyntheticImages(9, 7, classes, seed=2, samples=5, channels=1, spot=spot)
    patterns = {sample.image[:, :spot, :spot].numpy().tobytes() for sample in all_of(source)}
    assert len(patterns) == classes
    assert {
        sample.image[:, :spot, :spot].numpy().tobytes() for sample in all_of(other)
    } <= patterns  # the same patterns for all seeds
    table: dict[tuple[bytes, bytes], set[int | None]] = {}
    corners: list[dict[bytes, list[int | None]]] = [{}, {}]
    for sample in all_of(source):
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
            assert all(0.2 < part < 0.47 for part in counts)  # a third each, within 4 standard deviations
    assert torch.equal(source[3].image, SyntheticImages(9, 7, classes, 1, 4, channels=1, spot=spot)[3].image)


def test_dense_targets_are_the_pixels_half_the_height_below():
    source = SyntheticImages(9, 10, 4, seed=1, samples=3, dense=True, spot=4)
    for sample in all_of(source):
        assert sample.image.shape == (3, 9, 10)
        assert sample.label is None
        assert sample.target is not None
        want = [[[sample.image[c % 3, (y + 4) % 9, x] for x in range(10)] for y in range(9)] for c in range(4)]
        assert sample.target.tolist() == torch.tensor(want).tolist()
    blocks = source[0].image[:, :8, :8].unfold(1, 4, 4).unfold(2, 4, 4).flatten(3)
    assert bool((blocks == blocks[..., :1]).all())


def test_vit_accepts_image_samples():
    for dense in (False, True):
        model = vit.ViT(vit.tiny(outputs=2, head="pixels" if dense else "classes"))
        sample = SyntheticImages(16, 24, 2, samples=1, dense=dense)[0]
        if sample.target is not None:
            target = sample.target[None]
            loss = model(sample.image[None], torch.zeros_like(target), targets=target)
        else:
            loss = model(sample.image[None], torch.tensor([sample.label]))
        assert float(loss.detach()) > 0
