"""Vision Transformer: loss and gradients match a single device on any mesh, at odd image sizes; presets; errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshflash import Layout, unshard
from meshflash.models.patches import grid_of, patchify, shard_images, unpatchify
from meshflash.models.vit import PRESETS, ViT, tiny
from meshflash.parallel import accumulate, blank_batch, count_tokens, init_mesh, parallelize
from meshflash.parallel.mesh import DATA_AXES, mesh_rank, size

#: (batch, height, width, patch size): 5 x 7 patches; 1 x 2 patches, fewer than ranks; patches that are not square.
SIZES: dict[str, tuple[int, int, int, Any]] = {
    "odd": (3, 37, 53, 8),
    "few": (2, 5, 9, 8),
    "oblong": (3, 11, 29, (5, 3)),
}
HEADS = {"classes": dict(head="classes", outputs=7), "pixels": dict(head="pixels", outputs=2)}
MESHES: list[dict[str, Any]] = [
    dict(dp=2),
    dict(cp=2),
    dict(cp=3),
    dict(cp=4),
    dict(dp=2, cp=2),
    dict(fsdp=2, cp=2),
    dict(cp=2, tp=2),
]


def config(head, patch):
    """Return a small configuration with this head and patch size."""
    return tiny(patch=patch, channels=2, dim=24, heads=2, hidden=20, **HEADS[head])


def sample(batch, height, width):
    """Return images, their classes, and target pixels, some of them NaN."""
    draw = torch.Generator().manual_seed(height)
    images = torch.randn(batch, 2, height, width, generator=draw, dtype=torch.float64)
    targets = torch.randn(batch, 2, height, width, generator=draw, dtype=torch.float64)
    targets[torch.rand(targets.shape, generator=draw) < 0.2] = float("nan")
    targets[0, :, :3] = float("nan")
    return dict(images=images, classes=torch.arange(batch) % 7, pixels=targets)


def model_of(sizes, head):
    """Return the same model on every rank, with weights far from initialization, where biases are 0."""
    model = ViT(config(head, SIZES[sizes][3])).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw, dtype=torch.float64), alpha=0.2)
    return model


def single_device(sizes, head):
    """Return the mean loss, the number of labels, and all gradients, by plain torch on whole images."""
    batch, height, width, patch = SIZES[sizes]
    data, model = sample(batch, height, width), model_of(sizes, head)
    out = dense_vit(model, data["images"], patch)
    if head == "classes":
        loss, count = functional.cross_entropy(out, data["classes"]), batch
    else:
        error = unpatchify(out, patch, (height, width)) - data["pixels"]
        known = ~data["pixels"].isnan()
        loss, count = error[known].square().mean(), int(known.sum())
    loss.backward()
    return loss.item(), count, {name: weight.grad for name, weight in model.named_parameters()}


def dense_vit(model, images, patch):
    """Run an independent implementation: a convolution, positions in loops, and PyTorch's attention."""
    own = model.config
    height, width = (patch, patch) if isinstance(patch, int) else patch
    padded = functional.pad(images, (0, -images.shape[3] % width, 0, -images.shape[2] % height))
    kernel = model.patch_embed.weight.unflatten(1, (own.channels, height, width))
    x = functional.conv2d(padded, kernel, model.patch_embed.bias, stride=(height, width))
    for row in range(x.shape[2]):
        for column in range(x.shape[3]):
            quarter = own.dim // 4
            frequencies = [own.theta ** (-n / quarter) for n in range(quarter)]
            waves = [f(at * w) for at in (row, column) for f in (math.sin, math.cos) for w in frequencies]
            x[:, :, row, column] = x[:, :, row, column] + torch.tensor(waves, dtype=x.dtype)
    x = x.flatten(2).transpose(1, 2)
    for block in model.layers:
        attention = block.self_attn
        normed = functional.layer_norm(x, (own.dim,), block.attention_norm.weight, block.attention_norm.bias, 1e-6)
        q, k, v = (
            project(normed).unflatten(-1, (own.heads, -1)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        x = x + attention.o_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        x = x + block.mlp.down_proj(functional.gelu(block.mlp.up_proj(block.mlp_norm(x))))
    x = model.norm(x)
    return model.head(x.mean(1) if own.head == "classes" else x)


@pytest.fixture(scope="module")
def single_device_results():
    """Return the single-device results for every image size and head."""
    return {(sizes, head): single_device(sizes, head) for sizes in SIZES for head in HEADS}


def own_batch(sizes, head, mesh, layout):
    """Return this rank's shard of the sample; data ranks take images in round-robin order."""
    batch, height, width, patch = SIZES[sizes]
    data = {
        name: x[mesh_rank(mesh, DATA_AXES) :: size(mesh, DATA_AXES)] for name, x in sample(batch, height, width).items()
    }
    answers = dict(labels=data["classes"]) if head == "classes" else dict(targets=data["pixels"])
    return shard_images(data["images"], mesh, patch=patch, layout=layout, **answers)


def check(found, model, want, case):
    """Assert that loss, number of labels and all gradients match the single device."""
    loss, count, grads = want
    assert (int(found.tokens), abs(float(found.loss) - loss) < 1e-9) == (count, True), case
    names = set()
    for name, weight in model.named_parameters():
        name = name.removeprefix("module.")
        grad = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        assert (grad - grads[name]).abs().max() < 1e-9, (case, name)
        names.add(name)
    assert names == set(grads), case


def check_meshes(rank, world, group, single_device_results):
    """Assert that loss and gradients match a single device on all meshes of this many ranks."""
    for axes in MESHES:
        if math.prod(axes.values()) != world:
            continue
        mesh = init_mesh(**axes, device="cpu")
        for sizes, head, layout in (
            *(("odd", head, layout) for head in HEADS for layout in ("contiguous", "striped")),
            ("few", "classes", "contiguous"),
            ("few", "pixels", "striped"),
        ):
            model = parallelize(model_of(sizes, head), mesh)
            found = accumulate(model, [own_batch(sizes, head, mesh, layout)], mesh)
            check(found, model, single_device_results[sizes, head], (axes, sizes, head, layout))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_loss_and_gradients_match_a_single_device(pool, single_device_results, world):
    pool.run(world, check_meshes, single_device_results)


def check_layouts_and_options(rank, world, group, single_device_results):
    """Check uncommon layouts, activation checkpointing, whole images, half precision and errors on two ranks."""
    mesh = init_mesh(dp=1, cp=2, device="cpu")
    layout = Layout(((range(3, 14, 2), range(20, 28)), (range(3), range(4, 14, 2), range(14, 20), range(28, 30))))
    for head in HEADS:
        for activation_checkpointing, layout_or_name in ((None, layout), ("full", "zigzag"), ("selective", "balanced")):
            model = parallelize(model_of("oblong", head), mesh, activation_checkpointing=activation_checkpointing)
            local = own_batch("oblong", head, mesh, layout_or_name)
            found = accumulate(model, [local], mesh)
            check(found, model, single_device_results["oblong", head], (head, activation_checkpointing))
        # A second micro-batch without labels changes nothing, and sums over ranks match a single device.
        model.zero_grad()
        check(accumulate(model, [blank_batch(local), local], mesh), model, single_device_results["oblong", head], head)
        total = model(**local).detach()
        torch.distributed.all_reduce(total)
        loss, count, _ = single_device_results["oblong", head]
        assert abs(float(total) / count - loss) < 1e-9
        assert int(count_tokens(local["labels"], mesh)) == count

    # All ranks get whole images and embed their own patches. All have the labels, so the mean is the same.
    data = sample(*SIZES["oblong"][:3])
    classes, pixels = (parallelize(model_of("oblong", head), mesh) for head in HEADS)
    whole = dict(patches=data["images"], labels=data["classes"])
    found = accumulate(classes, [whole], mesh)
    loss, count, grads = single_device_results["oblong", "classes"]
    check(found, classes, (loss, 2 * count, grads), "whole images")
    whole = own_batch("oblong", "pixels", mesh, layout) | dict(patches=data["images"])
    check(accumulate(pixels, [whole], mesh), pixels, single_device_results["oblong", "pixels"], "whole images")
    with pytest.raises(ValueError, match=r"with whole images each rank of cp would count all pixels"):
        pixels(data["images"], labels=torch.zeros_like(data["pixels"]), targets=data["pixels"])

    # Weights are gathered and used in half precision; losses are in float32.
    for head in HEADS:
        half: Any = parallelize(model_of("oblong", head).float(), mesh, mode="full", compute_dtype=torch.bfloat16)
        local = own_batch("oblong", head, mesh, layout)
        assert half(**local).dtype == torch.float32
        found, want = accumulate(half, [local], mesh), single_device_results["oblong", head]
        assert abs(float(found.loss) / want[0] - 1) < 0.02
        got = half.patch_embed.weight.grad.full_tensor()
        assert (got - want[2]["patch_embed.weight"]).norm() < 0.05 * want[2]["patch_embed.weight"].norm()

    # Outputs without labels match too.
    dense_outputs = [dense_vit(model_of("oblong", head), data["images"], (5, 3)) for head in HEADS]
    local = shard_images(data["images"], mesh, patch=(5, 3), layout=layout)
    assert (classes(**local) - dense_outputs[0]).abs().max() < 1e-9
    assert (unshard(pixels(**local), layout, mesh["cp"]) - dense_outputs[1]).abs().max() < 1e-9

    for arguments, message in (
        (dict(local, layout=None), r"give the layout= by which 2 ranks share them"),
        (dict(local, layout=Layout.striped(30, 1)), r"30 patches on 1 ranks; expected 3 x 10 on 2"),
        (dict(local, patches=local["patches"][:, :5]), rf"the layout gives rank {rank} 1[46]; got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            classes(**arguments)
    with pytest.raises(ValueError, match=r"layout='spiral': expected a Layout, or one of"):
        shard_images(data["images"], mesh, patch=8, layout="spiral")


def test_layouts_activation_checkpointing_and_whole_images_match_a_single_device(pool, single_device_results):
    pool.run(2, check_layouts_and_options, single_device_results)


def check_initial_weights(rank, world, group):
    """Assert that a model built on the meta device gets the initial weights of a plain one."""
    want = ViT(config("classes", 8), seed=5).state_dict()
    for axes in (MESHES[-2], MESHES[-1]):
        with torch.device("meta"):
            model = ViT(config("classes", 8))
        assert all(weight.is_meta for weight in model.parameters())
        parallelize(model, init_mesh(**axes, device="cpu"))
        model.to_empty(device="cpu")
        model.init_weights(seed=5)
        for name, weight in model.state_dict().items():
            assert isinstance(weight, DTensor)
            assert torch.equal(weight.full_tensor(), want[name]), name


def test_initial_weights_are_the_same_on_any_mesh(pool):
    pool.run(4, check_initial_weights)


def test_vit_matches_a_plain_implementation_on_a_single_process(single_device_results):
    for (sizes, head), want in single_device_results.items():
        model, data = model_of(sizes, head), sample(*SIZES[sizes][:3])
        labels = data["classes"] if head == "classes" else torch.where(data["pixels"].isnan(), -100, 0)
        targets = None if head == "classes" else data["pixels"]
        check(accumulate(model, [dict(patches=data["images"], labels=labels, targets=targets)]), model, want, sizes)


def test_patchify_matches_a_convolution():
    images = torch.randn(2, 3, 11, 29, dtype=torch.float64)
    kernel = torch.randn(4, 3, 5, 3, dtype=torch.float64)
    want = functional.conv2d(functional.pad(images, (0, 1, 0, 4)), kernel, stride=(5, 3))
    patches = patchify(images, (5, 3))
    assert grid_of(images, (5, 3)) == want.shape[2:] == (3, 10)
    assert torch.allclose(patches @ kernel.flatten(1).T, want.flatten(2).transpose(1, 2), rtol=0, atol=1e-12)
    assert torch.equal(unpatchify(patches, (5, 3), (11, 29)), images)
    assert patchify(images, (5, 3), float("nan")).isnan().sum() == 2 * 3 * (15 * 30 - 11 * 29)


def test_presets_have_the_documented_sizes():
    want = {"tiny": (5e4, 1e5), "base": (86e6, 87e6), "2.6b": (2.57e9, 2.63e9)}
    for name, preset in PRESETS.items():
        with torch.device("meta"):
            num_weights = sum(weight.numel() for weight in ViT(preset()).parameters())
        assert want[name][0] < num_weights < want[name][1], (name, num_weights)


def test_uint8_images_and_half_precision_are_accepted():
    images = torch.randint(256, (2, 3, 20, 31), dtype=torch.uint8)
    model = ViT(tiny())
    with torch.no_grad():
        want = model(images)
        assert torch.equal(model(images.float()), want)
        loss = model.bfloat16()(images, torch.tensor([1, 2]))
    assert loss.dtype == torch.float32  # the sum is float32 for weights of any dtype
    assert abs(float(loss) - float(functional.cross_entropy(want, torch.tensor([1, 2]), reduction="sum"))) < 0.05


NO_MESH: Any = None  # these calls raise before they use a mesh
IMAGES = torch.zeros(2, 3, 20, 31)
PATCHES = dict(patches=torch.zeros(2, 12, 192), grid=(3, 4))
PIXELS = tiny(head="pixels", outputs=1)
VALUES = torch.zeros(2, 12, 64)
ERRORS: dict[str, tuple[Any, str]] = {
    "heads": (lambda: tiny(heads=5), r"dim=64: 5 heads do not divide it"),
    "dim": (lambda: tiny(dim=6, heads=3), r"dim=6: .* take a multiple of 4"),
    "head": (lambda: tiny(head="boxes"), r"head='boxes': expected one of classes, pixels"),
    "patch": (lambda: tiny(patch=(8, 0)), r"patch=\(8, 0\): expected a size"),
    "no image": (lambda: patchify(IMAGES[0], 8), r"images: expected \[batch, channels, height, width\]"),
    "other size": (lambda: unpatchify(VALUES, 8, (20, 40)), r"20 x 40 are 3 x 5 of 8 x 8; got 12"),
    "no patches": (lambda: ViT(tiny())(IMAGES[0, 0]), r"patches: expected \[batch, patches, values\], or images"),
    "no grid": (lambda: ViT(tiny())(PATCHES["patches"]), r"give grid=\(rows, columns\)"),
    "another grid": (lambda: ViT(tiny())(PATCHES["patches"], grid=(3, 5)), r"the layout gives rank 0 15; got 12"),
    "class of a patch": (
        lambda: ViT(tiny())(IMAGES, torch.zeros(2, 12, dtype=torch.int64)),
        r"labels: expected one class for each of 2 images; got \[2, 12\]",
    ),
    "targets of classes": (lambda: ViT(tiny())(IMAGES, targets=VALUES), r"targets: they are of pixels"),
    "no targets": (lambda: ViT(PIXELS)(**PATCHES, labels=VALUES), r"give targets="),
    "labels of patches": (
        lambda: ViT(PIXELS)(**PATCHES, labels=VALUES[..., 0], targets=VALUES),
        r"labels: expected \[2, 12, 64\], the head's output; got \[2, 12\]",
    ),
    "tp": (lambda: ViT(tiny()).tensor_plan(3), r"tp=3: it does not divide the 4 heads"),
    "hidden": (lambda: ViT(tiny(hidden=129)).tensor_plan(2), r"tp=2: it does not divide the 129 hidden units"),
    "both": (
        lambda: shard_images(IMAGES, NO_MESH, patch=8, labels=VALUES, targets=IMAGES),
        r"labels are of classes, targets of pixels; give one",
    ),
    "other pixels": (
        lambda: shard_images(IMAGES, NO_MESH, patch=8, targets=IMAGES[..., :30]),
        r"targets: expected pixels like images of \[2, 3, 20, 31\]; got \[2, 3, 20, 30\]",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_expected_value(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()
