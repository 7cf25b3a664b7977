"""The tiled loss equals the loss of whole logits, which then exist nowhere."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tiny_models import ROWS, TOKENS, WORDS, batch_of, build
from integrations.transformers import compare
from meshflash.integrations.transformers import context_parallel, tile_loss

LIMIT = 1e-12


class LargestLogits(TorchDispatchMode):
    """The largest number of logits that one operator returned."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == WORDS and out.shape != (32, WORDS):  # weight
            self.most = max(self.most, out.numel())
        return out


def _errors(model, tiled, batch):
    with compare.Float64():
        want = model(**batch)
        want.loss.backward()
        got = tiled(**batch)
        got.loss.backward()
    ours, theirs = compare.gradients(tiled), compare.gradients(model)
    error = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    assert got.logits is None
    return abs(float(got.loss / want.loss) - 1), error / max(float(g.abs().max()) for g in theirs)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere2", "phi", "gemma3 images"])
@pytest.mark.parametrize("items", [None, 99, torch.tensor(99)])
def test_tiled_loss_equals_the_whole_one(name, items):
    model = build(name, torch.float64)
    batch = batch_of(name, "plain", torch.float64)
    if items is not None:
        batch["num_items_in_batch"] = items
    tiled = copy.deepcopy(model)
    tile_loss(tiled, tokens=5)
    assert max(_errors(model, tiled, batch)) < LIMIT


def test_logits_of_all_tokens_never_exist():
    model = build("llama", torch.float32)
    batch = batch_of("llama", "plain", torch.float32)
    most = []
    for tokens in (None, 5):
        if tokens:
            tiling = tile_loss(model, tokens)
        with LargestLogits() as mode:
            model(**batch).loss.backward()
        most.append(mode.most)
    assert most == [ROWS * TOKENS * WORDS, 5 * WORDS]
    tiling.remove()
    assert model(**batch).logits.shape == (ROWS, TOKENS, WORDS)
    assert "_loss_function" not in vars(model)


def test_calls_without_labels_return_all_logits():
    model = build("llama", torch.float32)
    want = model(input_ids=batch_of("llama", "plain", torch.float32)["input_ids"]).logits
    tile_loss(model)
    assert torch.equal(model(input_ids=batch_of("llama", "plain", torch.float32)["input_ids"]).logits, want)


def _over_ranks(rank, world, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = build("gemma3", torch.float64)
    tiled = copy.deepcopy(model)
    tile_loss(tiled, tokens=4)
    context_parallel(tiled, mesh, average_gradients=True)
    return _errors(model, tiled, batch_of("gemma3", "padded", torch.float64))


def test_tiled_loss_over_ranks(pool):
    for errors in pool.run(3, _over_ranks):
        assert max(errors) < LIMIT


def test_what_cannot_be_tiled_is_refused():
    with pytest.raises(ValueError, match="BertForMaskedLM is not a causal language model"):
        tile_loss(build("bert", torch.float32))
    with pytest.raises(ValueError, match="tokens=0: expected at least 1"):
        tile_loss(build("llama", torch.float32), tokens=0)
    model = build("llama", torch.float32)
    tile_loss(model)
    with pytest.raises(ValueError, match="has another loss function already"):
        tile_loss(model)
    batch = batch_of("llama", "plain", torch.float32)
    with pytest.raises(ValueError, match="logits_to_keep and return_dict=False are not supported"):
        model(**batch, logits_to_keep=3)
    other = build("gemma2", torch.float32)
    tile_loss(other)
    other.config.logit_scale = 3.0
    with pytest.raises(ValueError, match="Gemma2ForCausalLM changes its logits in a way that meshflash does not know"):
        other(**batch)


def test_loss_outside_of_the_loss_function_is_refused(monkeypatch):
    model = build("llama", torch.float32)
    tile_loss(model)
    monkeypatch.setattr(type(model), "loss_function", lambda self, logits, labels, **_: logits.sum())
    with pytest.raises(ValueError, match="LlamaForCausalLM does not compute its loss by"):
        model(**batch_of("llama", "plain", torch.float32))
