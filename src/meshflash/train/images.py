"""Images as samples: folders of them, arrays in files, and an embedded set that needs attention over ranks."""

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
from meshflash.train.tokens import check_sample_index

#: What an ImageFolder takes for images.
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
#: The same as Pillow names them. It goes by a file's first bytes, and runs Ghostscript for one that is PostScript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
#: Bytes that a compressed array may take; where it takes more, they may be so many times those of the file.
EXPANDED_BYTES, EXPANSION = 1 << 28, 200

_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
#: What numpy and zipfile raise for files that are cut, forged, encrypted or compressed in ways they do not know.
_BROKEN = (
    *(OSError, ValueError, KeyError, TypeError, OverflowError, EOFError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)


@dataclass(frozen=True)
class ImageSample:
    """An image `[channels, height, width]` in float32, and its class, or a value for each pixel."""

    image: Tensor
    label: int | None = None
    target: Tensor | None = None


class ImageFolder:
    """A folder with a folder of images for each class; values are 0 to 1, in three channels.

    Args:
        folder: its subfolders, by name, are the classes, whose images may lie deeper.
        size: (height, width) that images are scaled to, or one number for both; by default each keeps its own.
    """

    channels = 3

    def __init__(self, folder: Path | str, size: int | tuple[int, int] | None = None) -> None:
        _pillow()  # told here, not at the first sample
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

    They are mapped, not read: of a .npz as `numpy.savez` writes it, or of an images.npy with labels.npy or targets.npy
    beside it. Only a .npz that was compressed is read as a whole. Images of bytes become 0 to 1; all other values, and
    targets, stay as they are. A missing axis of channels is one channel. `unlabeled` images are to be judged, and need
    neither labels nor targets.
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
    """Images that no rank can judge by its own patches; made from the seed and their number alone.

    The top left and the bottom right corner each show one of `classes` signs, and the sum of their numbers, modulo
    `classes`, is the class: neither corner alone says anything of it, nor does any sum of what each says. With `dense`
    an image is of random blocks, and the value wanted of each pixel is the one half the height below, around the edge.

    Args:
        height: of all images.
        width: of all images.
        classes: how many; with `dense` the channels of targets.
        seed: of all samples; signs are the same for all seeds.
        samples: how many there are.
        channels: of images.
        spot: height and width of signs and blocks; best no more than a patch.
        dense: pixels instead of classes.
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
        for name, value, low in (
            ("height", height, 2 * spot),
            ("width", width, spot),
            ("classes", classes, 1 if dense else 2),
            ("samples", samples, 1),
            ("channels", channels, 1),
            ("spot", spot, 1),
        ):
            if value < low:
                raise ValueError(f"SyntheticImages: {name}={value}; expected at least {low}")
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
    """Random words as values from -most to most."""
    return ((words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0).reshape(shape) * most


def _tensor(x: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ValueError("reading image files needs Pillow; pip install 'meshflash[images]'") from error
    return PIL


def read_image(path: Path, size: tuple[int, int] | None) -> npt.NDArray[np.float32]:
    """An image file as `[3, height, width]` of 0 to 1, scaled to a size where one is given."""
    pillow = _pillow()
    try:
        with pillow.Image.open(path, formats=FORMATS) as opened:
            _check_pixels(opened.size, pillow.Image.MAX_IMAGE_PIXELS)
            if opened.mode[0] in "IF":
                raise ValueError(f"of {opened.mode}, more than 8 bits; put such images into an array, see ImageArrays")
            image = pillow.ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, SyntaxError, ValueError, pillow.Image.DecompressionBombError) as error:  # some are SyntaxErrors
        raise ValueError(f"{path}: not an image that can be read ({error})") from error
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], pillow.Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255.0)


def _check_pixels(size: tuple[int, int], most: int | None) -> None:
    """ValueError for what Pillow only warns of: a small file whose pixels fill the memory."""
    if most is not None and math.prod(size) > most:
        raise ValueError(
            f"{size[0]} x {size[1]} pixels; where they are meant, set PIL.Image.MAX_IMAGE_PIXELS, now {most}"
        )


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a .npz, or those beside an images.npy, by name."""
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
    """An array of a .npz, mapped where it is not compressed, which numpy itself does not do."""
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
        file.seek(entry.header_offset + 26)  # the lengths of the name and of what stands behind it
        name, more = np.frombuffer(file.read(4), "<u2").tolist()
    offset = entry.header_offset + 30 + name + more + skipped
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")


def _expanded(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """A compressed array, read as a whole; ValueError where a small file would take much memory."""
    if entry.file_size > EXPANDED_BYTES and entry.file_size > EXPANSION * entry.compress_size:
        raise ValueError(
            f"{entry.filename} expands to {entry.file_size:,} bytes, over {EXPANSION} times its size: a zip bomb; "
            "write it with numpy.savez where it is meant"
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
