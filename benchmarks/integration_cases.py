"""The models and features of `python -m benchmarks integrations`, and the batches of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.one_device import IGNORED, num_labels, shifts_labels
from benchmarks.tiny_models import OTHER_INPUTS, batch_of, documents_of

#: Models, each with what is particular about it.
MODELS = {
    "llama": "causal",
    "mistral": "sliding window",
    "gemma2": "windows, softcap",
    "gemma3": "windows",
    "gpt-oss": "windows, sinks",
    "deepseek-v3": "other value dim",
    "bert": "bidirectional",
    "t5gemma": "cross-attention",
    "qwen2.5-vl": "images",
    "lfm2": "convolution",
}
PACKED, ODD, UNEVEN, ACCUMULATION = "packed", "odd length", "uneven labels", "accumulation"
FEATURES = ("plain", ODD, "left padding", "right padding", PACKED, UNEVEN, ACCUMULATION)
#: Tokens: a multiple of twice the number of ranks, which torch's context parallelism asks for, and an odd number.
TOKENS, ODD_TOKENS = 36, 37


def applies(model: str, feature: str) -> bool:
    """Return whether a model has a feature: no packed documents in encoder-decoders, no padding between images.

    Args:
        model: The model's name.
        feature: The feature.
    """
    if model in OTHER_INPUTS:
        return feature in ("plain", ODD, UNEVEN, ACCUMULATION)
    return model != "t5gemma" or feature != PACKED


def batches_of(model: Any, name: str, feature: str) -> list[dict[str, Tensor]]:
    """Return the micro-batches of one optimizer step.

    The number of labels is even. ringmaster divides it by the number of ranks and rounds, which is half a label in many
    thousands, but would be an error of 1% here.

    Args:
        model: The model.
        name: Its name.
        feature: The feature.
    """
    tokens = ODD_TOKENS if feature == ODD else TOKENS
    seeds = (5, 6) if feature == ACCUMULATION else (5,)
    case = feature if feature in (PACKED, "left padding", "right padding") else "plain"
    batches = [batch_of(name, case, torch.float32, tokens, seed) for seed in seeds]
    if feature == ACCUMULATION:
        labels = batches[1]["labels"]
        labels[:, labels.shape[1] // 3 :] = IGNORED  # a micro-batch with a third of the labels
    if feature == UNEVEN:
        labels = batches[0]["labels"]
        quarter = labels.shape[1] // 4  # zigzag gives rank 0 the first and the last one, contiguous the first two
        labels[:, quarter : 2 * quarter] = labels[:, 2 * quarter + 2 :] = IGNORED
    for batch in batches:
        _make_even(model, batch["labels"])
    return batches


def parts_of(name: str, feature: str, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return what one device computes one after another: micro-batches, and packed documents each alone.

    Args:
        name: The model's name.
        feature: The feature.
        batches: The micro-batches.
    """
    return [part for batch in batches for part in documents_of(name, feature, batch)]


def _make_even(model: Any, labels: Tensor) -> None:
    if num_labels(model, labels) % 2:
        first = 1 if shifts_labels(model) else 0
        row, token = (labels[:, first:] != IGNORED).nonzero()[-1].tolist()
        labels[row, token + first] = IGNORED
