"""Models of Transformers over ranks against one device: logits, loss and the gradient of every parameter."""

import pytest
import torch

from benchmarks.tiny_models import MODELS, cases_of, cuts_of
from integrations.transformers import compare

MATRIX = [(name, case, cut) for name in MODELS for case in cases_of(name) for cut in cuts_of(name)]
#: One of each way of attending, cutting and packing.
SMALL = [
    ("llama", "plain", "inputs", 2),
    ("llama", "packed", "inputs", 3),
    ("gemma2", "padded", "inputs", 2),
    ("gemma3 images", "plain", "layers", 2),
    ("gpt-oss", "packed", "layers", 2),
    ("llama4", "padded", "layers", 3),
    ("phi3 longrope", "plain", "inputs", 3),
    ("deepseek-v3", "plain", "inputs", 2),
    ("bert", "packed", "layers", 2),
    ("gpt2", "padded", "layers", 2),
    ("roberta classifier", "padded", "layers", 2),
    ("whisper", "plain", "layers", 2),
    ("t5gemma", "padded", "layers", 4),
    ("qwen2.5-vl", "plain", "layers", 2),
]


def _check(pool, world, name, case, dtype, **arguments):
    for excess in pool.run(world, compare.run, name, case, dtype, arguments):
        assert max(excess.values()) <= 1, excess


@pytest.mark.parametrize(("name", "case", "cut", "world"), SMALL)
def test_equals_one_device(pool, name, case, cut, world):
    _check(pool, world, name, case, torch.float64, cut=cut, verify=True)


@pytest.mark.integrations
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("name", "case", "cut"), MATRIX)
def test_every_model_equals_one_device(pool, name, case, cut, world, dtype):
    _check(pool, world, name, case, dtype, cut=cut)


@pytest.mark.integrations
@pytest.mark.parametrize(
    ("layout", "schedule"), [("contiguous", "allgather"), ("striped", "ring"), ("zigzag", "ringx3")]
)
@pytest.mark.parametrize(("name", "cut"), [("llama", "inputs"), ("gemma3", "layers"), ("bert", "layers")])
def test_every_schedule_equals_one_device(pool, name, cut, layout, schedule):
    _check(pool, 3, name, "padded", torch.float64, cut=cut, layout=layout, schedule=schedule)
