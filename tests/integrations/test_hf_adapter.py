"""ring-flash-attention's functions for Transformers: tiny models over ranks against one device in float64."""

import contextlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from benchmarks.tiny_models import WORDS, build
from integrations.transformers.compare import Float64, gradients
from meshflash.integrations.compat import hf_adapter
from meshflash.integrations.compat.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params

transformers = pytest.importorskip("transformers")

#: Packed documents of 37 tokens, which divide by no number of ranks, and of 42, which do; one is a single token.
LENGTHS = ((11, 1, 25), (5, 20, 9, 8))
LIMIT = 1e-12


@contextlib.contextmanager
def registered(group, heads_k_stride=1):
    """Register the functions, and afterwards what was registered before."""
    interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    before = [dict(interface._global_mapping) for interface in interfaces]
    substitute_hf_flash_attn(group, heads_k_stride)
    try:
        yield
    finally:
        hf_adapter._adapter = None
        for interface, mapping in zip(interfaces, before, strict=True):
            interface._global_mapping.clear()
            interface._global_mapping.update(mapping)


def packed(lengths, seed):
    """Return ids, positions, the labels of the next tokens, and the cumulative lengths of packed documents."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.roll(-1, 1)
    ends = torch.tensor(lengths).cumsum(0)
    labels[0, ends - 1] = -100  # no document predicts the next one
    return ids, positions, labels, torch.tensor([0, *ends.tolist()], dtype=torch.int32)


def one_device(model, batches):
    """Return the loss of each batch, its documents computed one after another, and the gradients of their sum."""
    model.zero_grad()
    losses = []
    for ids, _, labels, cuts in batches:
        count = int((labels != -100).sum())
        total = torch.zeros((), dtype=torch.float64)
        for a, b in pairwise(cuts):
            logits = model(input_ids=ids[:, a:b], use_cache=False).logits
            total = total + nn.functional.cross_entropy(logits[0], labels[0, a:b], reduction="sum") / count
        total.backward()
        losses.append(float(total.detach()))
    return losses, gradients(model)


def run(rank, world, group, name, implementation, stride, checkpointing, own_loss):
    """Return the largest errors of losses and gradients, summed over ranks, relative to their largest values."""
    with Float64(), registered(group, stride):
        model = build(name, torch.float64)
        batches = [packed(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
        wanted, grads = one_device(model, batches)
        if implementation == "ring_attn":
            model.set_attn_implementation("ring_attn")
        else:
            model.config._attn_implementation_internal = implementation  # as if flash-attn were installed
        if checkpointing:
            wide = dict(context_fn=lambda: (contextlib.nullcontext(), Float64()))
            model.gradient_checkpointing_enable(dict(use_reentrant=False, **wide))
        model.zero_grad()
        losses = []
        for ids, positions, labels, cuts in batches:  # the second forward begins before the first backward
            update_ring_flash_attn_params(cuts, group)
            mine = [torch.tensor_split(x, world, dim=1)[rank] for x in (ids, positions, labels)]
            count = int((labels != -100).sum())
            inputs = dict(input_ids=mine[0], position_ids=mine[1])
            if own_loss:
                named = dict(labels=mine[2], shift_labels=mine[2], num_items_in_batch=torch.tensor(count))
                losses.append(model(**inputs, **named).loss)
            else:
                logits = model(**inputs).logits
                losses.append(nn.functional.cross_entropy(logits[0], mine[2][0], reduction="sum") / count)
        sum(losses).backward()
        errors = []
        for loss, want in zip(losses, wanted, strict=True):
            total = loss.detach().clone()
            dist.all_reduce(total, group=group)
            errors.append(abs(float(total) - want) / want)
        top = max(float(g.abs().max()) for g in grads)
        for got, want in zip(gradients(model), grads, strict=True):
            dist.all_reduce(got, group=group)
            errors.append(float((got - want).abs().max()) / top)
        return max(errors)


@pytest.mark.parametrize(
    ("world", "name", "implementation", "stride", "checkpointing", "own_loss"),
    [
        (2, "llama", "ring_attn", 1, False, False),
        (3, "llama", "ring_attn", 2, True, True),
        (2, "llama", "flash_attention_2", 1, True, False),
        (3, "qwen3", "flash_attention_2", 1, False, True),  # with a sliding window
    ],
)
def test_models_equal_one_device_on_packed_documents(
    pool, world, name, implementation, stride, checkpointing, own_loss
):
    assert max(pool.run(world, run, name, implementation, stride, checkpointing, own_loss)) < LIMIT


def says(function):
    """Return what the ValueError of a call says."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


def refused(rank, world, group):
    """Return what calls say that are not supported, by what is wrong."""
    ids, positions, _, cuts = packed(LENGTHS[0], 0)
    other = dist.new_group([0, 1])
    said = {"update first": says(lambda: update_ring_flash_attn_params(cuts, group))}
    with registered(group):
        model = build("llama", torch.float32, attention_dropout=0.1)
        model.config._attn_implementation_internal = "ring_attn"
        mine, own = (torch.tensor_split(x, world, dim=1)[rank] for x in (ids, positions))
        inputs = dict(input_ids=mine, position_ids=own, use_cache=False)
        said["no update"] = says(lambda: model(**inputs))
        said["another group"] = says(lambda: update_ring_flash_attn_params(cuts, other))
        said["no lengths"] = says(lambda: update_ring_flash_attn_params(torch.tensor([3, 5]), group))
        update_ring_flash_attn_params(cuts, group)
        said["dropout"] = says(lambda: model(**inputs))
        model.eval()
        wrong = {
            "two rows": dict(input_ids=mine.expand(2, -1), position_ids=own.expand(2, -1)),
            "the whole sequence": dict(input_ids=ids, position_ids=positions),
            "another length on rank 1": dict(input_ids=mine[:, rank:], position_ids=own[:, rank:]),
            "no positions": dict(position_ids=None),
            "padding": dict(attention_mask=torch.zeros_like(mine)),
            "pairs": dict(attention_mask=torch.zeros(1, 1, mine.shape[1], mine.shape[1])),
            "right": {},
            "a mask of ones": dict(attention_mask=torch.ones_like(mine)),
        }
        for what, given in wrong.items():
            said[what] = says(lambda given=given: model(**{**inputs, **given}))
        cache = model(**{**inputs, "use_cache": True}).past_key_values
        said["a cache"] = says(lambda: model(**{**inputs, "use_cache": True, "past_key_values": cache}))
    return said


SAYS = {
    "update first": "call substitute_hf_flash_attn(process_group, 1) first",
    "no update": "call update_ring_flash_attn_params(cu_seqlens, process_group) before the forward",
    "another group": "expected the group that substitute_hf_flash_attn got",
    "no lengths": "expected cumulative lengths from 0, such as [0, 3, 8]; got [3, 5]",
    "dropout": "attention dropout of LlamaAttention is 0.1: set it to 0",
    "two rows": "expected a batch of one row with packed documents, got 2 rows",
    "the whole sequence": "37 tokens on rank",
    "another length on rank 1": "17 tokens on rank 1, but cu_seqlens gives it 18 of 37",
    "no positions": "rank 1 begins inside a document, at token 19 of the sequence, but its positions count from 0",
    "padding": "attention_mask: padding is not supported",
    "pairs": "got no mask from its model",
    "right": "no error",
    "a mask of ones": "no error",
    "a cache": "keys of a cache are not supported; pass use_cache=False",
}


def test_calls_that_are_not_supported_are_errors_on_every_rank(pool):
    for said in pool.run(2, refused):
        assert said.keys() == SAYS.keys()
        assert not {what: text for what, text in said.items() if SAYS[what] not in text}


def test_heads_k_stride_is_a_number_of_heads():
    strides: list[Any] = [0, True, "1"]
    for stride in strides:
        with pytest.raises(ValueError, match="expected a number of key heads, at least 1"):
            substitute_hf_flash_attn(None, stride)


def test_a_layer_without_a_mask_is_an_error():
    q = torch.zeros(1, 2, 3, 8)
    with registered(None), pytest.raises(ValueError, match="Linear got no mask from its model"):
        hf_adapter._attend(nn.Linear(1, 1), q, q, q, None)


def test_models_can_be_made_with_the_name():
    with registered(None):
        config = build("llama", torch.float32).config
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ring_attn").eval()
        ids, positions, _, cuts = packed(LENGTHS[0], 0)
        update_ring_flash_attn_params(cuts, None)
        got = model(input_ids=ids, position_ids=positions).logits
        model.set_attn_implementation("eager")
        wanted = [model(input_ids=ids[:, a:b]).logits for a, b in pairwise(cuts)]
        assert torch.allclose(got, torch.cat(wanted, 1), atol=1e-5)
