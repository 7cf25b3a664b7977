"""Inference from checkpoints: text and images, on the training mesh or another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshflash.models import gpt
from meshflash.models.gpt import GPT
from meshflash.models.huggingface import save_pretrained
from meshflash.train import config as configs
from meshflash.train import inference, loop

SINGLE_RANK: dict[str, Any] = dict(cp=1, tp=1, order="cp-tp-dp")


def learn(rank, world, group, config, folder):
    """Train into a folder."""
    loop.train(config, Path(folder), quiet=True)


def generate_text(rank, world, group, folder, axes, **options):
    """Return the text generated from a checkpoint on this mesh."""
    return "".join(inference.text(Path(folder), "abcabcab", None, SINGLE_RANK | axes, tokens=6, **options))


def test_generated_text_is_the_same_on_any_mesh(pool, tmp_path):
    sizes = {"vocabulary": 257, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 48}
    config = configs.change(configs.preset("gpt", "tiny"), {"model": sizes, "run": {"steps": 2, "evaluate": 0}})
    pool.run(1, learn, config, str(tmp_path))
    (want,) = pool.run(1, generate_text, str(tmp_path), {})
    for axes in ({"cp": 2}, {"tp": 2}):
        assert pool.run(2, generate_text, str(tmp_path), axes) == [want, want]


def generate_from_hugging_face(rank, world, group, folder):
    """Return the text generated from Hugging Face weights, which are no image model."""
    with pytest.raises(ValueError, match="a Hugging Face Llama"):
        inference.images(Path(folder), Path(folder), Path(folder), SINGLE_RANK)
    return generate_text(rank, world, group, folder, {})


def test_text_is_generated_from_hugging_face_weights(pool, tmp_path):
    model = GPT(gpt.tiny(vocabulary=257), seed=5)
    save_pretrained(model, tmp_path / "llama")
    (text,) = pool.run(1, generate_from_hugging_face, str(tmp_path / "llama"))
    assert isinstance(text, str)


def predict(rank, world, group, folder, source, output, axes, preset=None):
    """Predict images with a checkpoint on this mesh."""
    return inference.images(Path(folder), Path(source), Path(output), SINGLE_RANK | axes, preset)


@pytest.mark.parametrize("head", ["classes", "pixels"])
def test_images_are_predicted_from_a_checkpoint(pool, tmp_path, head):
    changes = {
        "model": {"head": head, "outputs": 3, "dim": 32, "heads": 2, "hidden": 48},
        "data": {"height": 20, "width": 28, "batch": 4},
        "run": {"steps": 2, "evaluate": 0},
    }
    config = configs.change(configs.preset("vit", "tiny"), changes)
    pool.run(1, learn, config, str(tmp_path / "run"))
    images = torch.rand(3, 3, 20, 28, generator=torch.Generator().manual_seed(0)).numpy()
    np.savez(tmp_path / "set.npz", images=images)
    found: list[Any] = []
    for world, axes in ((1, {}), (2, {"cp": 2})):
        output = tmp_path / f"out{world}"
        assert set(pool.run(world, predict, *map(str, (tmp_path / "run", tmp_path / "set.npz", output)), axes)) == {3}
        if head == "classes":
            rows = [json.loads(line) for line in output.read_text().splitlines()]
            assert [row["image"] for row in rows] == ["000000", "000001", "000002"]
            found.append([row["label"] for row in rows])
        else:
            maps = [np.load(path) for path in sorted(output.glob("*.npy"))]
            assert [x.shape for x in maps] == [(3, 20, 28)] * 3
            found.append(np.stack(maps))
    if head == "classes":
        assert found[0] == found[1]
    else:
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


def refused_calls(rank, world, group, folder):
    """Return the errors of a checkpoint of the wrong kind and of a missing folder."""
    messages = []
    for call in (
        lambda: predict(0, 1, None, folder, folder, folder, {}),
        lambda: generate_text(0, 1, None, folder + "/nothing", {}),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_missing_checkpoints_and_images_are_refused(pool, tmp_path):
    config = configs.change(configs.preset("gpt", "tiny"), {"run": {"steps": 1, "evaluate": 0}})
    pool.run(1, learn, config, str(tmp_path))
    ((other, nothing),) = pool.run(1, refused_calls, str(tmp_path))
    assert "it holds a gpt, expected a vit" in other
    assert "there is no such folder" in nothing
