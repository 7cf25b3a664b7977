"""What a run learns from, by the name that its configuration gives: an embedded task, or a folder or file."""

from __future__ import annotations

from pathlib import Path

from meshflash.models.gpt import GPTConfig
from meshflash.train.config import Config
from meshflash.train.images import ImageArrays, ImageFolder, SyntheticImages
from meshflash.train.synthetic import Copy, Needle
from meshflash.train.tokens import Packed, TokenFile

#: Embedded tasks of token models.
TASKS = {"copy": Copy, "needle": Needle}
#: The embedded set of images.
IMAGES = "images"


Source = Packed | Copy | Needle | ImageFolder | ImageArrays | SyntheticImages


def scored(config: Config, source: Source) -> bool:
    """Whether samples have right answers that can be counted: embedded tasks, and classes of images."""
    if isinstance(config.model, GPTConfig):
        return isinstance(source, Copy | Needle)
    return config.model.head == "classes"


def embedded(name: str) -> bool:
    """Whether a source is made and not read: it then has other samples to evaluate by."""
    return name in TASKS or name == IMAGES


def open_source(config: Config, name: str, samples: int, seed: int) -> Source:
    """A source of the samples that the model takes."""
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
        return SyntheticImages(
            data.height,
            data.width,
            config.model.outputs,
            seed=seed,
            samples=samples,
            **({"dense": True} if dense else {}),
        )
    path = Path(name)
    if path.is_dir():
        return ImageFolder(path, (data.height, data.width))
    return ImageArrays(path)
