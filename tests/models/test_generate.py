"""Generation over a mesh matches a plain loop that runs the whole sequence for each token, without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshflash.models.generate import generate
from meshflash.models.gpt import GPT, tiny
from meshflash.models.kv_cache import KVCache, sample_token
from meshflash.parallel import init_mesh, parallelize

SIZES = tiny(vocabulary=37, dim=32, heads=4, kv_heads=2, hidden=48)


LENGTHS = (2, 7)


def prompt(tokens, rows=2):
    """Return random token ids."""
    return torch.randint(37, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def generate_without_cache(model, ids, num_tokens):
    """Return the most likely tokens, each from a forward over the whole sequence."""
    generated = []
    with torch.no_grad():
        for _ in range(num_tokens):
            generated.append(model(ids)[:, -1].argmax(-1))
            ids = torch.cat((ids, generated[-1][:, None]), 1)
    return torch.stack(generated, 1).tolist()


def generate_and_sample(rank, world, group, axes, layout):
    """Return the most likely tokens for each prompt length, and sampled tokens for the seeds 0, 0 and 1."""
    mesh = init_mesh(**axes, device="cpu")
    model: Any = parallelize(GPT(SIZES, seed=3).double(), mesh, schedule="allgather")
    generated = [
        torch.stack(list(generate(model, prompt(n), mesh, tokens=5, layout=layout)), 1).tolist() for n in LENGTHS
    ]
    drawn = [
        torch.stack(list(generate(model, prompt(7), mesh, tokens=6, temperature=1.5, top_k=9, top_p=0.9, seed=s)), 1)
        for s in (0, 0, 1)
    ]
    return generated, [x.tolist() for x in drawn]


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ({}, "zigzag"),
        ({"cp": 2}, "zigzag"),
        ({"cp": 3}, "striped"),  # more ranks than prompt tokens
        ({"fsdp": 2, "tp": 2}, "zigzag"),
        ({"cp": 2, "tp": 2}, "contiguous"),
    ],
)
def test_generation_matches_a_plain_loop_on_each_mesh(pool, axes, layout):
    model = GPT(SIZES, seed=3).double()
    want = [generate_without_cache(model, prompt(n), 5) for n in LENGTHS]
    world = torch.tensor(list(axes.values())).prod().int().item() if axes else 1
    ranks = pool.run(int(world), generate_and_sample, axes, layout)
    for generated, drawn in ranks:
        assert generated == want
        assert drawn == ranks[0][1]
        assert drawn[0] == drawn[1]
        assert drawn[0] != drawn[2]


def generate_until_stop(rank, world, group):
    """Return tokens without a stop token, and with the second of them as the stop token."""
    mesh = init_mesh(device="cpu")
    model = GPT(SIZES, seed=3)
    first = [int(x) for x in generate(model, prompt(4, 1), mesh, tokens=6)]
    stopped = [int(x) for x in generate(model, prompt(4, 1), mesh, tokens=6, stop=first[1])]
    with pytest.raises(ValueError, match="prompt: expected"):
        next(generate(model, prompt(4)[:, :0], mesh))
    cache = KVCache(1)
    model(prompt(4), cache=cache)
    cache.gather(None, None)
    model(prompt(1), cache=cache)
    cache.advance(1)
    with pytest.raises(ValueError, match="cache: it has room for 0 more tokens"):
        model(prompt(1), cache=cache)
    return first, stopped


def test_generation_ends_at_the_stop_token(pool):
    ((first, stopped),) = pool.run(1, generate_until_stop)
    assert len(first) == 6
    assert stopped == first[: first.index(first[1]) + 1]


def test_samples_follow_the_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20000, -1)
    generator = torch.Generator().manual_seed(0)
    for top_k, top_p, kept in ((None, None, 4), (2, None, 2), (None, 0.9, 3), (3, 0.6, 1)):
        drawn = sample_token(logits, 1.0, top_k, top_p, generator)
        p = logits[0].softmax(-1) * (torch.arange(4) < kept)
        want = p / p.sum()
        got = torch.bincount(drawn, minlength=4) / len(drawn)
        assert (got - want).abs().max() < 0.015
        assert not got[kept:].any()
