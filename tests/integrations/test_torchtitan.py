"""torchtitan's model over ranks equals one device with its mask as a matrix: loss and every parameter's gradient."""

import copy

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.integrations
ROWS, TOKENS, WORDS = 2, 99, 2048
POSITIONS = torch.cat([torch.arange(37), torch.arange(62)])[None].expand(ROWS, -1)


def _model(inner):
    from torchtitan.models.llama3 import _debugmodel

    config = _debugmodel("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = inner
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=None)
    return model


def _loss(model, inputs, labels, count, **extra):
    logits = model(inputs, **extra).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / count


def _errors(rank, world, group, is_packed, layout):
    from meshflash.integrations.torchtitan import MeshAttention, shard_inputs

    mesh = DeviceMesh.from_group(group, "cpu") if world > 1 else None
    tokens = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, :30] = -100
    count = (labels != -100).sum()
    positions = POSITIONS if is_packed else torch.arange(TOKENS)[None].expand(ROWS, -1)
    document = (positions == 0).cumsum(1)
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    seen = ((document[:, :, None] == document[:, None]) & causal)[:, None]

    def plain(q, k, v, *, attention_masks=None, scale=None, **_):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)

    ours = _model(MeshAttention.Config())
    one = copy.deepcopy(ours)
    for layer in one.layers.values():
        layer.attention.inner_attention.forward = plain
    want = _loss(one, inputs, labels, count, positions=positions)
    want.backward()
    extra = dict(positions=positions) if is_packed else {}
    local, own, extra = shard_inputs(inputs, labels, extra, mesh, layout=layout)
    loss = _loss(ours, local, own, count, **extra)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    errors = [float((total - want.detach()).abs() / want.detach())]
    for p, w in zip(ours.parameters(), one.parameters(), strict=True):
        dist.all_reduce(p.grad)
        errors.append(float((p.grad - w.grad).abs().max() / w.grad.abs().max()))
    return max(errors)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("is_packed", "layout"), [(True, "auto"), (False, "auto"), (True, "contiguous")])
def test_model_equals_one_device(pool, world, is_packed, layout):
    assert max(pool.run(world, _errors, is_packed, layout)) < 1e-5


def test_what_is_not_supported_is_refused():
    from meshflash.integrations.torchtitan import MeshAttention, shard_inputs

    x = torch.zeros(1, 5, 1, 8)
    with pytest.raises(ValueError, match="attention_masks must be those of shard_inputs"):
        MeshAttention()(x, x, x)
    ids = torch.zeros(1, 5, dtype=torch.long)
    _, _, extra = shard_inputs(ids, ids, {}, None)
    assert extra["positions"].tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match="MeshAttention: sinks is not supported"):
        MeshAttention()(x, x, x, attention_masks=extra["attention_masks"], sinks=torch.zeros(1))
    with pytest.raises(ValueError, match="shard_inputs: pixel_values is not supported beside positions"):
        shard_inputs(ids, ids, dict(pixel_values=x), None)
