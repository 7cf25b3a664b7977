"""Image datasets: folders of images, arrays in files, and synthetic images that need attention across ranks."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshflash.train.order import random_words
from meshflash.train.tokens import check_sample_index, check_task

#: The file suffixes of images in an ImageFolder.
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
#: The same formats by Pillow's names. Pillow identifies files by content and would run Ghostscript on PostScript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
#: A compressed array may expand to this many bytes; beyond that, to this many times its compressed size.
EXPANDED_BYTES, EXPANSION = 1 << 28, 200

_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
#: What numpy and zipfile raise for files that are truncated, forged, encrypted or compressed by unknown methods.
_BROKEN = (
    *(OSError, ValueError, KeyError, TypeError, OverflowError, EOFError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)


@dataclass(frozen=True)
class ImageSample:
    """An image `[channels, height, width]` in float32, with its class, or with target values for each pixel."""

    image: Tensor
    label: int | None = None
    target: Tensor | None = None


class ImageFolder:
    """A folder with a subfolder of images for each class; values are 0 to 1, in three channels.

    Args:
        folder: The folder. Its subfolders, sorted by name, are the classes; images may be nested deeper.
        size: The (height, width) that images are scaled to, or one number for both; by default each keeps its own.
    """

    channels = 3

    def __init__(self, folder: Path | str, size: int | tuple[int, int] | None = None) -> None:
        _pillow()  # raises here if it is missing, not at the first sample
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        self.names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        self.classes = len(self.names)
        self.size = (size, size) if isinstance(size, int) else size
        self.files = [
            (path, label)
            for label, name in enumerate(self.names)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES and path.is_file()
        ]
        if not self.files:
            raise ValueError(f"{folder}: no images; expected a folder for each class, with files {', '.join(SUFFIXES)}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> ImageSample:
        check_sample_index(number, len(self))
        path, label = self.files[number]
        return ImageSample(torch.from_numpy(read_image(path, self.size)), label)


class ImageArrays:
    """Arrays `images` `[samples, channels, height, width]` with `labels` `[samples]` or `targets` like images.

    Arrays are memory-mapped; only a compressed .npz is read as a whole. uint8 images are scaled to 0 to 1; all other
    values, and targets, stay as they are. Images without a channel axis have one channel.

    Args:
        path: A .npz of `numpy.savez`, or an images.npy with labels.npy or targets.npy beside it.
        unlabeled: Whether labels and targets may be missing, as for prediction.
    """

    def __init__(self, path: Path | str, unlabeled: bool = False) -> None:
        path = Path(path)
        found = _arrays(path)
        given = [name for name in ("labels", "targets") if name in found]
        if "images" not in found or (len(given) != 1 and not unlabeled):
            raise ValueError(f"{path}: expected images, and labels or targets; it has {', '.join(found) or 'nothing'}")
        self.images = _with_channels(path, "images", found["images"])
        self.labels, self.targets = found.get("labels"), found.get("targets")
        self.channels, self.size = self.images.shape[1], self.images.shape[2:]
        if self.labels is not None and (
            self.labels.shape != self.images.shape[:1] or self.labels.dtype.kind not in "iu" or self.labels.min() < 0
        ):
            raise ValueError(f"{path}: labels must be a class, 0 or more, for each of {len(self.images)} images")
        self.classes = None if self.labels is None else int(self.labels.max()) + 1
        if self.targets is not None:
            self.targets = _with_channels(path, "targets", self.targets)
            if (len(self.targets), self.targets.shape[2:]) != (len(self.images), self.size):
                raise ValueError(
                    f"{path}: targets {list(self.targets.shape)} are not of images {list(self.images.shape)}"
                )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> ImageSample:
        check_sample_index(number, len(self))
        image = np.array(self.images[number], dtype=np.float32)
        if self.images.dtype == np.uint8:
            image /= 255.0
        label = None if self.labels is None else int(self.labels[number])
        target = None if self.targets is None else torch.from_numpy(np.array(self.targets[number], dtype=np.float32))
        return ImageSample(torch.from_numpy(image), label, target)


class SyntheticImages:
    """Synthetic images that no rank can classify from its own patches; each depends on the seed and its index only.

    The top left and the bottom right corner each show one of `classes` patterns. The class is the sum of their indices
    modulo `classes`, so neither corner alone tells anything of it, nor does a sum of features of both. With `dense` an
    image consists of random blocks, and the target of a pixel is the value half the height below, wrapping around.

    Args:
        height: The height of all images in pixels.
        width: The width of all images in pixels.
        classes: The number of classes; with `dense` the channels of targets.
        seed: The seed of all samples; the patterns are the same for all seeds.
        samples: The number of samples.
        channels: The channels of images.
        spot: The height and width of patterns and blocks; best no more than a patch.
        dense: Whether targets are pixels instead of classes.
    """

    def __init__(
        self,
        height: int,
        width: int,
        classes: int = 10,
        seed: int = 0,
        samples: int = 65536,
        *,
        channels: int = 3,
        spot: int = 4,
        dense: bool = False,
    ) -> None:
        least = {"height": (height, 2 * spot), "width": (width, spot), "classes": (classes, 1 if dense else 2)}
        check_task("SyntheticImages", **least, samples=(samples, 1), channels=(channels, 1), spot=(spot, 1))
        self.size, self.classes, self.seed, self.samples = (height, width), classes, seed, samples
        self.channels, self.spot, self.dense = channels, spot, dense
        signs = random_words(0, 2**64 - 1, classes * channels * spot**2)
        self._signs = _values(signs, (classes, channels, spot, spot), 1.0)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> ImageSample:
        check_sample_index(number, self.samples)
        (height, width), spot = self.size, self.spot
        if self.dense:
            shape = (self.channels, -(-height // spot), -(-width // spot))
            blocks = _values(random_words(self.seed, number, math.prod(shape)), shape, 1.0)
            image = blocks.repeat(spot, axis=1).repeat(spot, axis=2)[:, :height, :width]
            far = np.roll(image, -(height // 2), axis=1)[np.arange(self.classes) % self.channels]
            return ImageSample(_tensor(image), None, _tensor(far))
        shape = (self.channels, height, width)
        words = random_words(self.seed, number, 2 + math.prod(shape))
        one, other = (int(word) % self.classes for word in words[:2])
        image = _values(words[2:], shape, 0.1)
        image[:, :spot, :spot], image[:, -spot:, -spot:] = self._signs[one], self._signs[other]
        return ImageSample(_tensor(image), (one + other) % self.classes)


def _values(words: npt.NDArray[np.uint64], shape: tuple[int, ...], most: float) -> npt.NDArray[np.float64]:
    """Return random words as values from -most to most."""
    return ((words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0).reshape(shape) * most


def _tensor(x: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ValueError("reading image files needs Pillow; pip install pillow") from error
    return PIL


def read_image(path: Path, size: tuple[int, int] | None) -> npt.NDArray[np.float32]:
    """Return an image file as `[3, height, width]` with values 0 to 1, scaled to a size if one is given.

    Args:
        path: The image file.
        size: The (height, width) to scale to; None keeps the image's own.
    """
    pillow = _pillow()
    unreadable = (OSError, SyntaxError, ValueError, pillow.Image.DecompressionBombError)  # Pillow raises all of them
    try:
        with pillow.Image.open(path, formats=FORMATS) as opened:
            _check_pixels(opened.size, pillow.Image.MAX_IMAGE_PIXELS)
            if opened.mode[0] in "IF":
                raise ValueError(f"of {opened.mode}, more than 8 bits; put such images into an array, see ImageArrays")
            image = pillow.ImageOps.exif_transpose(opened).convert("RGB")
    except unreadable as error:
        raise ValueError(f"{path}: not an image that can be read ({error})") from error
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], pillow.Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255.0)


def _check_pixels(size: tuple[int, int], most: int | None) -> None:
    """Raise ValueError for a decompression bomb, a small file with very many pixels. Pillow only warns of it."""
    if most is not None and math.prod(size) > most:
        raise ValueError(
            f"{size[0]} x {size[1]} pixels; if that is intended, set PIL.Image.MAX_IMAGE_PIXELS, now {most}"
        )


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a .npz, or of an images.npy and the files beside it, by name."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        if path.suffix == ".npy":
            beside = {name: path.with_name(f"{name}.npy") for name in ("labels", "targets")}
            files = {"images": path} | {name: file for name, file in beside.items() if file.is_file()}
            return {name: np.load(file, mmap_mode="r") for name, file in files.items()}
        with zipfile.ZipFile(path) as archive:
            return {entry.filename.removesuffix(".npy"): _member(path, archive, entry) for entry in archive.infolist()}
    except _BROKEN as error:
        raise ValueError(f"{path}: expected a .npz or a .npy of numpy ({error})") from error


def _member(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Return an array of a .npz, memory-mapped if it is not compressed; numpy itself does not map a .npz."""
    with archive.open(entry) as stream:
        shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
        skipped = stream.tell()
    if dtype.hasobject or min(shape, default=1) < 1:
        raise ValueError(f"{entry.filename} holds objects, or nothing")
    if math.prod(shape) * dtype.itemsize != entry.file_size - skipped:  # memory is taken by what the header says
        raise ValueError(f"{entry.filename} is {dtype} {list(shape)} by its header, and has {entry.file_size:,} bytes")
    if entry.compress_type != zipfile.ZIP_STORED:
        return _expanded(archive, entry)
    with path.open("rb") as file:
        file.seek(entry.header_offset + 26)  # the lengths of the file name and the extra field
        name, more = np.frombuffer(file.read(4), "<u2").tolist()
    offset = entry.header_offset + 30 + name + more + skipped
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")


def _expanded(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Return a compressed array, read as a whole; raise ValueError for a zip bomb."""
    if entry.file_size > EXPANDED_BYTES and entry.file_size > EXPANSION * entry.compress_size:
        raise ValueError(
            f"{entry.filename} expands to {entry.file_size:,} bytes, over {EXPANSION} times its size: a zip bomb; "
            "write it with numpy.savez if that is intended"
        )
    with archive.open(entry) as stream:
        read: npt.NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return read


def _with_channels(path: Path, name: str, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if x.ndim not in (3, 4) or x.dtype.kind not in "iufb" or not x.size:
        raise ValueError(
            f"{path}: {name} must be numbers [samples, channels, height, width]; got {x.dtype} {list(x.shape)}"
        )
    return x if x.ndim == 4 else x[:, None]
