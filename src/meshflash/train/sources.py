"""Open the training data that a configuration names: a synthetic task, or a folder or file."""

from __future__ import annotations

from pathlib import Path

from meshflash.models.gpt import GPTConfig
from meshflash.train.config import Config
from meshflash.train.images import ImageArrays, ImageFolder, SyntheticImages
from meshflash.train.synthetic import Copy, Needle
from meshflash.train.tokens import Packed, TokenFile

#: Synthetic tasks of token models.
TASKS = {"copy": Copy, "needle": Needle}
#: The name of the synthetic images.
IMAGES = "images"


Source = Packed | Copy | Needle | ImageFolder | ImageArrays | SyntheticImages


def has_accuracy(config: Config, source: Source) -> bool:
    """Return whether accuracy is defined for the samples: synthetic tasks, and images with classes.

    Args:
        config: The configuration of the run.
        source: The source of samples.
    """
    if isinstance(config.model, GPTConfig):
        return isinstance(source, Copy | Needle)
    return config.model.head == "classes"


def is_synthetic(name: str) -> bool:
    """Return whether a source is synthetic, and so has other samples for validation."""
    return name in TASKS or name == IMAGES


def open_source(config: Config, name: str, samples: int, seed: int) -> Source:
    """Return the source of samples for the model.

    Args:
        config: The configuration of the run.
        name: The name of a synthetic task, or a path.
        samples: The number of samples of a synthetic task.
        seed: The seed of a synthetic task.
    """
    data = config.data
    if isinstance(config.model, GPTConfig):
        if name in TASKS:
            return TASKS[name](data.tokens, config.model.vocabulary, seed=seed, samples=samples)
        file = TokenFile(Path(name))
        if file.vocabulary > config.model.vocabulary:
            raise ValueError(
                f"{name}: its {file.vocabulary:,} token ids do not fit the model's vocabulary of "
                f"{config.model.vocabulary:,}; set model.vocabulary={file.vocabulary}"
            )
        return Packed(file, data.tokens)
    if name == IMAGES:
        dense = config.model.head == "pixels"
        return SyntheticImages(data.height, data.width, config.model.outputs, seed, samples, dense=dense)
    path = Path(name)
    if path.is_dir():
        return ImageFolder(path, (data.height, data.width))
    return ImageArrays(path)
