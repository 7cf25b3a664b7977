"""Inference with trained models on any mesh: text from a GPT, labels or dense predictions from a ViT."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshflash.core.files import check_file, check_folder, naming, write_whole
from meshflash.job import init
from meshflash.models.generate import generate
from meshflash.models.gpt import GPTConfig
from meshflash.models.huggingface import load_pretrained, read_config
from meshflash.models.patches import shard_images, unpatchify
from meshflash.parallel import init_mesh
from meshflash.runtime.devices import current
from meshflash.sharding import unshard
from meshflash.train import config as configs
from meshflash.train.checkpoint import Checkpoints
from meshflash.train.images import SUFFIXES, ImageArrays, read_image
from meshflash.train.loop import CHECKPOINTS, build_model
from meshflash.train.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer


def text(
    checkpoint: Path, prompt: str, tokenizer: Path | None, axes: Mapping[str, Any], **options: Any
) -> Iterator[str]:
    """Yield the text that a GPT generates, piece by piece; all ranks yield the same.

    Args:
        checkpoint: A folder of `meshflash train`, or of a Hugging Face Llama.
        prompt: The text to continue.
        tokenizer: A folder with tokenizer.json; None is bytes.
        axes: The sizes of the mesh axes fsdp, cp and tp, and their order.
        options: Options of `meshflash.models.generate.generate`.
    """
    config, mesh, model = _load(checkpoint, axes, "gpt")
    codec: Tokenizer = ByteTokenizer() if tokenizer is None else FolderTokenizer(tokenizer)
    if codec.vocabulary > config.model.vocabulary:
        raise ValueError(
            f"tokenizer: {codec.vocabulary:,} ids do not fit the model's {config.model.vocabulary:,}; give the "
            "tokenizer that the model was trained with"
        )
    ids = [*codec.begin, *codec.encode(prompt)]
    stop = codec.end[0] if codec.end else None
    generated: list[int] = []
    yielded = ""
    for chosen in generate(model, torch.tensor([ids], device=current()), mesh, stop=stop, **options):
        if stop is not None and int(chosen) == stop:
            return
        generated.append(int(chosen))
        decoded = codec.decode(generated)
        if not decoded.endswith("\ufffd"):  # wait for the other tokens of an incomplete character
            yield decoded[len(yielded) :]
            yielded = decoded


@torch.no_grad()
def images(checkpoint: Path, source: Path, output: Path, axes: Mapping[str, Any], preset: str | None = None) -> int:
    """Write the labels of images as JSON lines, or their dense predictions as .npy files; return their number.

    Args:
        checkpoint: A folder of `meshflash train vit`.
        source: A folder of images, or an array file.
        output: The file of JSON lines, or the folder of .npy files.
        axes: The sizes of the mesh axes cp and tp, and their order.
        preset: The preset that the model must have; None accepts any.
    """
    config, mesh, model = _load(checkpoint, axes, "vit")
    if preset is not None and configs.preset("vit", preset).model != config.model:
        raise ValueError(f"{checkpoint}: its model is not of the preset {preset}")
    first = init().rank == 0
    dense = config.model.head == "pixels"
    if first:
        (check_folder if dense else check_file)(output)
    lines: list[str] = []
    number = 0
    for name, image in _images(source, (config.data.height, config.data.width)):
        whole = image[None].to(current())
        batch = shard_images(whole, mesh, patch=config.model.patch, layout=config.mesh.layout)
        out = model(**batch)
        number += 1
        if dense:
            patches = unshard(out, batch["layout"], mesh["cp"])
            if first:
                found = unpatchify(patches, config.model.patch, (whole.shape[2], whole.shape[3]))
                with naming(output / f"{name}.npy"):
                    np.save(output / f"{name}.npy", found[0].float().cpu().numpy())
        else:
            p = out[0].float().softmax(-1)
            lines.append(json.dumps({"image": name, "label": int(p.argmax()), "probability": float(p.max())}))
    if first and not dense:
        write_whole(output, "\n".join(lines) + "\n")
    return number


def _images(source: Path, size: tuple[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, image) of all images nested in a folder, or of an array file."""
    if source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if not files:
            raise ValueError(f"{source}: no images; expected files {', '.join(SUFFIXES)}")
        for path in files:
            name = str(path.relative_to(source).with_suffix("")).replace("/", "-")
            yield name, torch.from_numpy(read_image(path, size))
        return
    arrays = ImageArrays(source, unlabeled=True)
    for n in range(len(arrays)):
        yield f"{n:06d}", arrays[n].image


def _load(checkpoint: Path, axes: Mapping[str, Any], kind: str) -> tuple[Any, Any, Any]:
    """Return (config, mesh, model) of a folder of `meshflash train` or of Hugging Face."""
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint={checkpoint}: there is no such folder; give one that `meshflash train` wrote")
    mesh = init_mesh(1, axes.get("fsdp", 1), axes["cp"], axes["tp"], axes["order"])
    is_huggingface = (checkpoint / "config.json").is_file()
    if is_huggingface:
        if kind != "gpt":
            raise ValueError(f"{checkpoint}: a Hugging Face Llama; expected a folder of `meshflash train vit`")
        config = replace(configs.preset("gpt", "tiny"), model=read_config(checkpoint))
    else:
        checkpoints = Checkpoints(checkpoint / CHECKPOINTS, mesh=mesh)
        config = configs.from_dict(checkpoints.state()["config"])
    if isinstance(config.model, GPTConfig) != (kind == "gpt"):
        raise ValueError(f"{checkpoint}: it holds a {config.kind}, expected a {kind}")
    fields = {name: axes[name] for name in ("cp", "tp", "order")} | {"dp": 1, "fsdp": axes.get("fsdp", 1), "mode": None}
    config = replace(config, mesh=replace(config.mesh, **fields), memory=configs.Memory())
    model = build_model(config, mesh, current())
    if is_huggingface:
        load_pretrained(model, checkpoint)
    else:
        checkpoints.load(model)
    return config, mesh, model.eval()
