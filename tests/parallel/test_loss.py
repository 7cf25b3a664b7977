"""Cross-entropy: tiled, with ignored labels, with a sharded vocabulary, and weighted as on a single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshflash import Mask
from meshflash.parallel import IGNORE_INDEX, accumulate, count_tokens, cross_entropy_sum, gradient_scale, next_tokens


def plain(hidden, weight, labels):
    """Return the sum of the losses by PyTorch, with all logits in memory."""
    return functional.cross_entropy((hidden @ weight.T).flatten(0, -2), labels.flatten(), reduction="sum")


def case(rows=13, vocabulary=11, dtype=torch.float64):
    """Return hidden states, the weight of the head, and labels, every fourth of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 6, generator=generator, dtype=torch.float64).mul(3).to(dtype) for n in (rows, vocabulary)
    )
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[::4] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("tokens", [1, 4, 13, 100, None])
def test_tiled_loss_matches_cross_entropy(tokens):
    hidden, weight, labels = case()
    got, want = cross_entropy_sum(hidden, weight, labels, tokens=tokens), plain(hidden, weight, labels)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for a, b in zip(*(torch.autograd.grad(2.5 * x, (hidden, weight)) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_large_logits_do_not_overflow():
    hidden, weight, labels = case()
    hidden = (hidden.detach() * 300).requires_grad_()
    got, want = cross_entropy_sum(hidden, weight, labels, tokens=5), plain(hidden, weight, labels)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", [0, 3])
def test_loss_without_labels_is_zero(rows):
    hidden, weight, _ = case(rows)
    loss = cross_entropy_sum(hidden, weight, torch.full((rows,), IGNORE_INDEX))
    assert float(loss.detach()) == 0.0
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert all(not g.any() for g in grads)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    hidden, weight, labels = case()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    trainable = weight if frozen == "hidden" else hidden
    (got,) = torch.autograd.grad(cross_entropy_sum(hidden, weight, labels, tokens=4), trainable)
    (want,) = torch.autograd.grad(plain(hidden, weight, labels), trainable)
    torch.testing.assert_close(got, want)


def test_half_precision_loss_accumulates_in_float32():
    hidden, weight, labels = case(rows=400, vocabulary=50, dtype=torch.bfloat16)
    exact: Any = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = plain(exact[0], exact[1], labels)
    grads = torch.autograd.grad(want, exact)
    loss = cross_entropy_sum(hidden, weight, labels, tokens=16)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-5)
    float32_grads = torch.autograd.grad(plain(hidden.float(), weight.float(), labels), (hidden, weight))
    for got, float32_grad, exact_grad in zip(
        torch.autograd.grad(loss, (hidden, weight)), float32_grads, grads, strict=True
    ):
        allowed = 2 * (float32_grad.double() - exact_grad).abs().max() + 2 * exact_grad.abs().max() / 256
        assert (got.double() - exact_grad).abs().max() <= allowed


def error_over_ranks(rank, world, group, vocabulary):
    """Return the largest error of loss and gradients with a vocabulary sharded over ranks."""
    hidden, weight, labels = case(vocabulary=vocabulary)
    want = plain(hidden, weight, labels)
    d_hidden, d_weight = torch.autograd.grad(want, (hidden, weight))
    step = -(-vocabulary // world)
    rows = slice(
        step * rank, step * (rank + 1)
    )  # split as torch.chunk does: the last ranks may have fewer rows, or none
    own = weight.detach()[rows].clone().requires_grad_()
    got = cross_entropy_sum(hidden, own, labels, tokens=4, group=torch.distributed.group.WORLD)
    grads = torch.autograd.grad(got, (hidden, own))
    pairs = ((got, want), (grads[0], d_hidden), (grads[1], d_weight[rows]))
    return max(float((a - b).abs().max()) if b.numel() else 0.0 for a, b in pairs)


@pytest.mark.parametrize("vocabulary", [11, 3, 4])
def test_loss_with_a_sharded_vocabulary_matches_a_single_device(pool, vocabulary):
    assert max(pool.run(3, error_over_ranks, vocabulary)) < 1e-11


def test_next_token_labels_stop_at_document_ends():
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert next_tokens(tokens).tolist() == [[2, 3, 4, 5, 6, IGNORE_INDEX]]
    mask = Mask.causal() & Mask.documents([1, 3, 2])
    assert next_tokens(tokens, mask).tolist() == [[IGNORE_INDEX, 3, 4, IGNORE_INDEX, 6, IGNORE_INDEX]]
    rows = Mask.documents([[2, 4], [6]])
    want = [[2, IGNORE_INDEX, 4, 5, 6, IGNORE_INDEX], [2, 3, 4, 5, 6, IGNORE_INDEX]]
    assert next_tokens(tokens.expand(2, -1), rows).tolist() == want


def test_a_batch_without_labels_has_zero_loss_and_gradient():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, labels: Any) -> Any:
            return (labels != IGNORE_INDEX).sum() * self.weight

    model = Model()
    totals = accumulate(model, [dict(labels=torch.full((4,), IGNORE_INDEX))])
    assert float(totals.loss) == 0.0
    assert model.weight.grad is not None
    assert float(model.weight.grad) == 0.0
    assert float(gradient_scale(count_tokens(torch.full((3,), IGNORE_INDEX)))) == 0.0


def test_labels_of_another_shape_are_refused():
    hidden, weight, labels = case()
    with pytest.raises(ValueError, match="labels: expected"):
        cross_entropy_sum(hidden, weight, labels[1:])
