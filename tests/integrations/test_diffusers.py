"""Diffusion transformers of diffusers over ranks against one device: the output and the gradient of every parameter."""

import copy
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from integrations.transformers.compare import Float64, gradients
from integrations.wrong_calls import Mixing, message
from meshflash.core.layout import Layout
from meshflash.integrations.diffusers import context_parallel

BATCH, WORDS, LIMIT = 2, 7, 1e-12
#: The limit in float32.
FLOAT32_LIMIT = 1e-5
DOCS = Path(__file__).parents[2] / "docs" / "diffusers.md"
#: Gradients that are smaller than this part of the largest one are compared with this part of it.
SMALL = 1e-2


def _random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _seen(*counts):
    """Return a mask of text with padding on the right."""
    return torch.arange(WORDS)[None] < torch.tensor(counts)[:, None]


def _flux(diffusers):
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
    )
    places = torch.cartesian_prod(torch.arange(1), torch.arange(3), torch.arange(5)).double()
    inputs = dict(
        hidden_states=_random(BATCH, 15, 4),
        encoder_hidden_states=_random(BATCH, WORDS, 12),
        pooled_projections=_random(BATCH, 6),
        timestep=torch.rand(BATCH, dtype=torch.float64),
        img_ids=places,
        txt_ids=torch.zeros(WORDS, 3, dtype=torch.float64),
    )
    return model, inputs


def _flux_padded(diffusers, *counts):
    model, inputs = _flux(diffusers)
    seen = _seen(*(counts or (7, 4)))
    mask = torch.cat([seen, torch.ones(len(seen), 15, dtype=torch.bool)], 1)
    return model, {**inputs, "joint_attention_kwargs": dict(attention_mask=mask[:, None, None])}


def _flux_padded_alike(diffusers):
    """One mask for all batch rows."""
    return _flux_padded(diffusers, 5)


def _wan(diffusers, **options):
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=20,
        num_layers=2,
        rope_max_seq_len=32,
        **options,
    )
    inputs = dict(
        hidden_states=_random(BATCH, 4, 3, 6, 10),  # 45 tokens
        timestep=torch.randint(0, 1000, (BATCH,)),
        encoder_hidden_states=_random(BATCH, WORDS, 12),
    )
    return model, inputs


def _wan_timesteps(diffusers):
    """Wan 2.2: a timestep for each token."""
    model, inputs = _wan(diffusers)
    return model, {**inputs, "timestep": torch.randint(0, 1000, (BATCH, 45))}


def _wan_image(diffusers):
    """Wan 2.1 from images: cross-attention to text and to tokens of an image."""
    model, inputs = _wan(diffusers, image_dim=6, added_kv_proj_dim=24)
    text = _random(BATCH, 512, 12)  # the number that diffusers takes for granted
    return model, {**inputs, "encoder_hidden_states": text, "encoder_hidden_states_image": _random(BATCH, 5, 6)}


def _sd3(diffusers):
    model = diffusers.SD3Transformer2DModel(
        sample_size=10,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=6,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    inputs = dict(
        hidden_states=_random(BATCH, 4, 6, 10),
        encoder_hidden_states=_random(BATCH, WORDS, 12),
        pooled_projections=_random(BATCH, 6),
        timestep=torch.randint(0, 1000, (BATCH,)),
    )
    return model, inputs


def _hunyuan(diffusers, counts=(WORDS, WORDS)):
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=2,
        patch_size_t=1,
        text_embed_dim=12,
        pooled_projection_dim=6,
        rope_axes_dim=(2, 2, 4),
    )
    inputs = dict(
        hidden_states=_random(BATCH, 4, 3, 6, 10),
        timestep=torch.randint(0, 1000, (BATCH,)),
        encoder_hidden_states=_random(BATCH, WORDS, 12),
        encoder_attention_mask=_seen(*counts).long(),
        pooled_projections=_random(BATCH, 6),
        guidance=torch.full((BATCH,), 1000.0, dtype=torch.float64),
    )
    return model, inputs


def _hunyuan_padded(diffusers):
    return _hunyuan(diffusers, (3, 6))


def _qwen(diffusers, counts=None):
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=8,
        out_channels=2,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(2, 2, 4),
    )
    inputs = dict(
        hidden_states=_random(BATCH, 15, 8),
        encoder_hidden_states=_random(BATCH, WORDS, 12),
        timestep=torch.rand(BATCH, dtype=torch.float64),
        img_shapes=[[(1, 3, 5)]] * BATCH,
    )
    if counts is not None:
        inputs["encoder_hidden_states_mask"] = _seen(*counts)
    return model, inputs


def _qwen_padded(diffusers):
    return _qwen(diffusers, (7, 4))


def _cogvideox(diffusers):
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=6,
        text_embed_dim=12,
        num_layers=2,
        sample_width=10,
        sample_height=6,
        sample_frames=9,
        max_text_seq_length=WORDS,
        use_rotary_positional_embeddings=True,
    )
    angles = _random(45, 8)
    inputs = dict(
        hidden_states=_random(BATCH, 3, 4, 6, 10),
        encoder_hidden_states=_random(BATCH, WORDS, 12),
        timestep=torch.randint(0, 1000, (BATCH,)),
        image_rotary_emb=(angles.cos(), angles.sin()),
    )
    return model, inputs


def _ltx(diffusers, counts=(WORDS, WORDS)):
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=12,
    )
    inputs = dict(
        hidden_states=_random(BATCH, 45, 4),
        encoder_hidden_states=_random(BATCH, WORDS, 12),
        timestep=torch.randint(0, 1000, (BATCH, 45)),
        encoder_attention_mask=_seen(*counts).long(),
        num_frames=3,
        height=3,
        width=5,
    )
    return model, inputs


def _ltx_padded(diffusers):
    return _ltx(diffusers, (3, 6))


CASES = {
    case.__name__[1:]: case
    for case in (
        _flux,
        _flux_padded,
        _flux_padded_alike,
        _wan,
        _wan_timesteps,
        _wan_image,
        _sd3,
        _hunyuan,
        _hunyuan_padded,
        _qwen,
        _qwen_padded,
        _cogvideox,
        _ltx,
        _ltx_padded,
    )
}


def _build(name):
    """Return a model in float64 without zero weights, and its inputs."""
    import diffusers

    torch.manual_seed(0)
    model, inputs = CASES[name](diffusers)
    model.double().train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, inputs


def _run(model, inputs):
    """Return the output and the gradients of a loss that weights each value otherwise."""
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weights).sum().backward()
    return out.detach(), gradients(model)


def _errors(ours, theirs):
    """Return the largest errors of the output and of gradients, relative to the largest values."""
    top = max(float(g.abs().max()) for g in theirs[1])
    return max(
        float((ours[0] - theirs[0]).abs().max() / theirs[0].abs().max()),
        *(
            float((a - b).abs().max()) / max(float(b.abs().max()), SMALL * top)
            for a, b in zip(ours[1], theirs[1], strict=True)
        ),
    )


def _compare(rank, world, group, name, checkpoint=False, **arguments):
    mesh = DeviceMesh.from_group(group, "cpu")
    model, inputs = _build(name)
    ours = copy.deepcopy(model)
    with Float64():
        theirs = _run(model, inputs)
        if checkpoint:
            _checkpoint(ours)
        sharding = context_parallel(ours, mesh, average_gradients=True, **arguments)
        errors = [_errors(_run(ours, inputs), theirs), _errors(_run(ours, inputs), theirs)]
        sharding.remove()
        errors.append(_errors(_run(ours, inputs), theirs))
    return errors


def _check(pool, world, name, **arguments):
    for errors in pool.run(world, _called, name, arguments):
        assert max(errors) < LIMIT, errors


def _called(rank, world, group, name, arguments):
    return _compare(rank, world, group, name, **arguments)


@pytest.mark.integrations
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(pool, name, world):
    _check(pool, world, name, verify=True)


@pytest.mark.integrations
@pytest.mark.parametrize("schedule", ["allgather", "ring", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", ["flux_padded", "wan"])
def test_every_layout_and_schedule_equals_one_device(pool, name, layout, schedule):
    _check(pool, 3, name, layout=layout, schedule=schedule)


@pytest.mark.integrations
@pytest.mark.parametrize("name", ["flux", "wan_timesteps", "hunyuan_padded", "ltx_padded"])
def test_checkpointed_blocks_equal_one_device(pool, name):
    _check(pool, 2, name, checkpoint=True)


def _checkpoint(model):
    """Make blocks run again in the backward, in float64 where they did so before: no mode is active in a backward."""
    run = torch.utils.checkpoint.checkpoint
    model.enable_gradient_checkpointing(
        lambda block, *args: run(block, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), Float64()))
    )


def _two_forwards(rank, world, group):
    """Return the errors of gradients where a forward of other lengths comes before the backward of the first."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model, first = _build("flux_padded")
    second = {**first, "hidden_states": first["hidden_states"][:, :11], "img_ids": first["img_ids"][:11]}
    second["encoder_hidden_states"], second["txt_ids"] = first["encoder_hidden_states"][:, :5], first["txt_ids"][:5]
    second["joint_attention_kwargs"] = None
    ours = copy.deepcopy(model)
    _checkpoint(ours)
    context_parallel(ours, mesh, average_gradients=True)
    found = []
    with Float64():
        for each in (model, ours):
            one, two = (each(**inputs, return_dict=False)[0] for inputs in (first, second))
            one.square().sum().backward()
            two.square().sum().backward()
            found.append((one.detach(), gradients(each)))
    return _errors(found[1], found[0])


@pytest.mark.integrations
def test_blocks_run_again_after_a_later_forward(pool):
    assert max(pool.run(2, _two_forwards)) < LIMIT


def _wrapped(rank, world, group, kind):
    """Return the errors of a model inside of DDP or FSDP2, which average gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = DeviceMesh.from_group(group, "cpu")
    model, inputs = _build("wan")
    ours = copy.deepcopy(model)
    with Float64():
        theirs = _run(model, inputs)
        context_parallel(ours, mesh)
        if kind == "fsdp":
            for block in ours.blocks:
                fully_shard(block, mesh=mesh)
            whole = fully_shard(ours, mesh=mesh)
        else:
            whole = DistributedDataParallel(ours, process_group=group)
        out, grads = _run(whole, inputs)
    return _errors((out, [g.full_tensor() if kind == "fsdp" else g for g in grads]), theirs)


@pytest.mark.integrations
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ddp_and_fsdp_average_gradients(pool, kind):
    assert max(pool.run(2, _wrapped, kind)) < LIMIT


def _compiled(rank, world, group, name):
    """Return the errors of compiled blocks in float32."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model, inputs = _build(name)
    model.float()
    inputs = {k: x.float() if getattr(x, "dtype", None) is torch.float64 else x for k, x in inputs.items()}
    ours = copy.deepcopy(model)
    theirs = _run(model, inputs)
    ours.compile_repeated_blocks(backend="aot_eager")
    context_parallel(ours, mesh, average_gradients=True)
    return _errors(_run(ours, inputs), theirs)


@pytest.mark.integrations
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_compiled_blocks_equal_one_device(pool, name):
    assert max(pool.run(2, _compiled, name, timeout=180.0)) < FLOAT32_LIMIT


def _example(rank, world, group):
    """Run the first example of the docs as one of several ranks, and return the errors of its gradients and loss."""
    code = re.search(r"```python title=.*?\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    variables: dict[str, Any] = {}
    exec(compile(code.group(1), "docs", "exec"), variables)
    grads = gradients(variables["transformer"])
    model = copy.deepcopy(variables["transformer"])
    model.zero_grad()
    out = model(**variables["inputs"]).sample
    loss = (out - variables["target"]).square().mean()
    loss.backward()
    top = max(float(g.abs().max()) for g in grads)
    worst = max(float((a - b).abs().max()) for a, b in zip(grads, gradients(model), strict=True))
    return worst / top, abs(float(loss - variables["loss"]) / float(loss))


@pytest.mark.integrations
def test_the_example_of_the_docs_equals_one_device(pool):
    for errors in pool.run(2, _example):
        assert max(errors) < FLOAT32_LIMIT


def _calls(rank, world, group):
    """Return the messages of calls that are not supported, by what is wrong, and one of a right call after them."""
    import diffusers
    from diffusers.models.attention_dispatch import attention_backend

    mesh = DeviceMesh.from_group(group, "cpu")
    model, inputs = _build("flux")
    sharding = context_parallel(model, mesh, average_gradients=True)
    tokens = WORDS + 15
    mask = torch.ones(BATCH, tokens, dtype=torch.bool)
    holes, left, hidden = mask.clone(), mask.clone(), mask.clone()
    holes[0, 2], left[0, 0], hidden[1, -1] = False, False, False

    def call(**other):
        return message(model, **{**inputs, **other})

    def masked(mask):
        return call(joint_attention_kwargs=dict(attention_mask=mask))

    said = {
        "other batch": call(timestep=inputs["timestep"] + rank),
        "other dict": call(joint_attention_kwargs=dict(attention_mask=mask, number=rank)),
        "error of one rank": call(controlnet_block_samples=[inputs["hidden_states"]] if rank else None),
        "hole": masked(holes),
        "left": masked(left),
        "image hidden": masked(hidden),
        "float mask": masked(mask.double()),
        "pairs": masked(torch.ones(BATCH, 1, tokens, tokens, dtype=torch.bool)),
        "other length": masked(mask[:, 1:]),
        "unknown input": call(joint_attention_kwargs=dict(relative_bias=mask)),
        "few tokens": call(encoder_hidden_states=_random(BATCH, 1, 12), txt_ids=torch.zeros(1, 3)),
        "rotary of another length": call(img_ids=inputs["img_ids"][1:]),
    }
    attention = model.transformer_blocks[1].attn
    processor = attention.processor
    attention.set_processor(diffusers.models.attention_processor.AttnProcessor2_0())
    said["processor"] = call()
    attention.set_processor(processor)
    attention.to_out[1].p = 0.1
    said["dropout"] = call()
    attention.to_out[1].p = 0.0
    with attention_backend("flex"), torch.no_grad():  # on CPUs it has no backward
        said["backend"] = call()
    model._parallel_config = "some"
    said["their parallelism"] = call()
    model._parallel_config = None
    sharding.average_gradients = None
    said["nobody averages"] = call()
    with torch.no_grad():
        said["right"] = call()
    ltx, others = _build("ltx")
    context_parallel(ltx, mesh, average_gradients=False)
    pairs = torch.zeros(BATCH, 45, WORDS, dtype=torch.float64)
    said["pairs of cross-attention"] = message(ltx, **{**others, "encoder_attention_mask": pairs})
    sd3, others = _build("sd3")
    context_parallel(sd3, mesh, average_gradients=False)
    said["skipped"] = message(sd3, **others, skip_layers=[0])
    said["layout of another length"] = _call("wan", mesh, layout=Layout.contiguous(9, world))
    return said


SAYS = {
    "other batch": "ranks 0 and 1 of the mesh got different batches",
    "other dict": "ranks 0 and 1 of the mesh got different batches",
    "error of one rank": "controlnet_block_samples is not supported while sequences are sharded (rank 1 of the mesh)",
    "hole": "joint_attention_kwargs.attention_mask: only padding on the right of the text is supported",
    "left": "only padding on the right of the text is supported",
    "image hidden": "image tokens are hidden; only padding of the text is supported",
    "float mask": "expected a boolean tensor that is False for padding, got a tensor of torch.float64",
    "pairs": "[2, 1, 22, 22] is not supported; expected [batch, 22] or [batch, 1, 1, 22]",
    "other length": "[2, 21] is not supported; expected [batch, 22] or [batch, 1, 1, 22]",
    "unknown input": "joint_attention_kwargs is not supported: a dict of relative_bias",
    "few tokens": "1 text tokens for 2 ranks: every rank needs at least one",
    "rotary of another length": "image_rotary_emb: 21 tokens in dimension 0; expected 22, those of text and image",
    "processor": "transformer_blocks.1.attn has the attention processor AttnProcessor2_0, which is not supported",
    "dropout": "transformer_blocks.1.attn.to_out.1 drops hidden values",
    "backend": "FluxAttnProcessor called torch's scaled_dot_product_attention 0 times instead of once",
    "their parallelism": "diffusers' own enable_parallelism is on",
    "nobody averages": "nobody averages gradients over the ranks of the mesh",
    "right": "no error",
    "pairs of cross-attention": "encoder_attention_mask: [2, 45, 7] is a mask of pairs, which is not supported",
    "skipped": "skip_layers is not supported",
    "layout of another length": "layout: 9 tokens on 2 ranks, but there are 45 image tokens on 2",
}


@pytest.mark.integrations
def test_wrong_calls_are_errors_on_every_rank(pool):
    for said in pool.run(2, _calls):
        assert said.keys() == SAYS.keys()
        assert not {what: text for what, text in said.items() if SAYS[what] not in text}


def _call(name, mesh, **arguments):
    """Return what the first call of a sharded model says."""
    model, inputs = _build(name)
    context_parallel(model, mesh, average_gradients=False, **arguments)
    return message(model, **inputs)


def _models(rank, world, group):
    """Return the messages of models that are not supported."""
    import diffusers

    mesh = DeviceMesh.from_group(group, "cpu")

    def shard(model, **arguments):
        return message(context_parallel, model, mesh, **arguments)

    class OwnForward(diffusers.WanTransformer3DModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    convolution, twice, other = (_build("wan")[0] for _ in range(3))
    convolution.blocks[1].ffn = nn.Sequential(nn.Conv1d(24, 24, 3))
    other.blocks[0] = nn.Identity()
    context_parallel(twice, mesh)
    said = {
        "another model": shard(nn.Linear(2, 2)),
        "own forward": shard(OwnForward(num_attention_heads=2, attention_head_dim=12, num_layers=1)),
        "convolution": shard(convolution),
        "another block": shard(other),
        "twice": shard(twice),
        "a layout by another name": _call("wan", mesh, layout="snake"),
        "no mesh": message(context_parallel, _build("wan")[0], group),
    }
    with mock.patch("meshflash.integrations.diffusers.model.version", return_value="0.43.1"):
        said["release"] = shard(_build("wan")[0])
        said["release, verify=True"] = shard(_build("wan")[0], verify=True)
    for verify in (True, False):
        model, inputs = _build("wan")
        model.blocks[1].ffn = Mixing()
        context_parallel(model, mesh, average_gradients=True, verify=verify)
        said[f"mixing, verify={verify}"] = message(model, **inputs)
    return said


MODELS_SAY = {
    "another model": "Linear is not supported; expected one of FluxTransformer2DModel, WanTransformer3DModel",
    "own forward": "OwnForward is not supported",
    "convolution": "blocks.1.ffn.0 is a Conv1d, which mixes tokens outside of attention",
    "another block": "blocks.0 is a Identity, which is not supported",
    "twice": "this model is sharded already",
    "a layout by another name": "layout='snake': expected a Layout, or one of",
    "release": "diffusers 0.43.1 is not tested; install 0.42, or pass verify=True",
    "release, verify=True": "no error",
    "no mesh": "mesh must be a DeviceMesh of one dimension",
    "mixing, verify=True": "a layer may mix tokens outside of attention",
    "mixing, verify=False": "no error",
}


@pytest.mark.integrations
def test_models_that_are_not_supported_are_refused_by_name(pool):
    for said in pool.run(2, _models):
        assert said.keys() == MODELS_SAY.keys()
        assert not {what: text for what, text in said.items() if MODELS_SAY[what] not in text}
