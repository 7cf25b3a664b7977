"""Training over ranks equals one device: DDP, FSDP2, tensor parallelism, checkpointing, compilation, dropout."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.tiny_models import ROWS, TOKENS, WORDS, batch_of, build
from integrations.transformers import compare
from meshflash.integrations.transformers import context_parallel, shard_batch

LIMIT = 1e-12


def _ids(seed, tokens=TOKENS):
    return torch.randint(3, WORDS, (ROWS, tokens), generator=torch.Generator().manual_seed(seed))


def _error(model, want):
    """Return the largest error of a model's gradients, relative to the largest gradient."""
    top = max(float(g.abs().max()) for g in want)
    got = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) / top


def _wanted(model, steps):
    """Return the sum of the losses of some batches on one device, and its gradients."""
    model.zero_grad()
    loss = sum(model(**batch).loss for batch in steps)
    loss.backward()
    return float(loss), compare.gradients(model)


def _train(rank, world, group, how, name, checkpointing):
    """Compare two micro-batches, both under way at once, with one device; return the errors."""
    pad = torch.ones(ROWS, TOKENS, dtype=torch.long)
    pad[0, 30:] = 0
    steps = [
        dict(input_ids=_ids(0), attention_mask=pad, labels=_ids(0).masked_fill(pad == 0, -100)),
        dict(input_ids=_ids(7, 23), labels=_ids(7, 23)),
    ]
    with compare.Float64():
        model = build(name, torch.float64)
        loss, want = _wanted(model, steps)
        ours = copy.deepcopy(model)
        if checkpointing:
            compare.checkpoint(ours)
        mesh = init_device_mesh("cpu", (2, world // 2) if how == "dp x cp" else (1, world), mesh_dim_names=("dp", "cp"))
        context_parallel(ours, mesh["cp"], average_gradients=True if how == "hook" else None)
        run = ours
        if how in ("fsdp", "dp x cp"):
            flat = mesh["dp", "cp"]._flatten("dp_cp")
            for layer in ours.model.layers:
                fully_shard(layer, mesh=flat)
            fully_shard(ours, mesh=flat)
        elif how == "ddp":
            run = nn.parallel.DistributedDataParallel(ours)
        total = sum(run(**batch).loss for batch in steps)
        total.backward()
        return abs(float(total) - loss) / abs(loss), _error(ours, want)


@pytest.mark.parametrize(
    ("how", "world", "name", "checkpointing"),
    [
        ("hook", 2, "llama", True),
        ("ddp", 2, "gemma3", False),
        ("fsdp", 2, "gpt-oss", True),
        ("dp x cp", 4, "llama", True),
    ],
)
def test_training_equals_one_device(pool, how, world, name, checkpointing):
    for errors in pool.run(world, _train, how, name, checkpointing):
        assert max(errors) < LIMIT


def _tensor_parallel(rank, world, group, folder):
    """Compare Transformers' own sharding of weights, under which sequences are cut too, with one device."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
    batch = batch_of("llama", "padded", torch.float32)
    with compare.Float64():
        loss, want = _wanted(one, [batch])
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            distributed_config=DistributedConfig(fsdp_size=2, tp_size=world // 2),
        ).train()
        context_parallel(model, model._device_mesh["fsdp"])
        got = model(**batch).loss
        got.backward()
        return abs(float(got) - loss) / abs(loss), _error(model, want)


@pytest.mark.integrations
def test_tensor_parallel_beside_cut_sequences(pool, tmp_path):
    pytest.importorskip("accelerate")  # Transformers shards a model with it
    build("llama", torch.float32).save_pretrained(tmp_path)
    for errors in pool.run(4, _tensor_parallel, str(tmp_path)):
        assert max(errors) < 1e-6  # rotations of its weights' kind are in float32


def _compiled(rank, world, group):
    """Return errors for packings of several lengths with compiled layers, and how many graphs there were."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = build("gemma3", torch.float32)
    ours = copy.deepcopy(model)
    context_parallel(ours, mesh, layout="zigzag", average_gradients=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    errors = []
    for seed, lengths in enumerate(([20, 17], [9, 28], [12, 12, 13], [37])):
        positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(ROWS, -1)
        batch = dict(input_ids=_ids(seed), labels=_ids(seed), position_ids=positions, use_cache=False)
        ours.zero_grad()
        _, want = _wanted(model, [batch])
        ours(**batch).loss.backward()
        errors.append(_error(ours, want))
    return errors, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.integrations  # compiles for half a minute
def test_layers_compile_whole(pool):
    for errors, _ in pool.run(2, _compiled, timeout=200):
        assert max(errors) < 2e-5


def _dropout(rank, world, group, layout):
    """Return a forward with dropout twice, and its gradients, of a model in training with all random numbers equal."""
    mesh = DeviceMesh.from_group(group, "cpu")
    results = []
    with compare.Float64():
        for checkpointing in (False, True):
            torch.manual_seed(3)
            model = build("llama", torch.float64, attention_dropout=0.4)
            if checkpointing:
                compare.checkpoint(model)
            context_parallel(model, mesh, layout=layout, outputs="whole", average_gradients=True)
            batch = batch_of("llama", "plain", torch.float64)
            outs = [model(**batch) for _ in range(2)]
            sum(out.loss for out in outs).backward()
            results.append(([out.logits.detach() for out in outs], compare.gradients(model)))
    return results


def test_dropout_of_attention_is_the_same_on_any_number_of_ranks(pool):
    runs = [*pool.run(1, _dropout, "contiguous"), *pool.run(3, _dropout, "zigzag")]
    first, grads = runs[0][0]
    assert float((first[0] - first[1]).abs().max()) > 0.1  # each forward draws anew
    for run in runs:
        for logits, gradients in run:
            for a, b in zip(logits, first, strict=True):
                assert float((a - b).abs().max()) < LIMIT
            assert all(float((a - b).abs().max()) < LIMIT for a, b in zip(gradients, grads, strict=True))


def _cut_before(rank, world, group):
    """Return errors of batches that were cut beforehand, and the logits of all tokens by `outputs`."""
    mesh = DeviceMesh.from_group(group, "cpu")
    with compare.Float64():
        model = build("llama", torch.float64)
        batch = batch_of("llama", "padded", torch.float64)
        loss, want = _wanted(model, [batch])
        ours = copy.deepcopy(model)
        context_parallel(ours, mesh, average_gradients=True)
        local = shard_batch(batch, mesh)
        out = ours(**local)
        out.loss.backward()
        return abs(float(out.loss) - loss) / loss, _error(ours, want), local["input_ids"].shape[1], out.logits.shape[1]


def test_batches_may_be_cut_before_the_call(pool):
    results = pool.run(3, _cut_before)
    assert max(max(r[:2]) for r in results) < LIMIT
    assert sum(r[2] for r in results) == TOKENS
    assert all(r[2] == r[3] for r in results)


def _accumulated(rank, world, group):
    """Return the error of gradients over micro-batches that share `num_items_in_batch`, as Trainer passes it."""
    mesh = DeviceMesh.from_group(group, "cpu")
    with compare.Float64():
        model = build("qwen3", torch.float64)
        parts = [batch_of("qwen3", case, torch.float64) for case in ("plain", "padded")]
        items = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        parts = [{**part, "num_items_in_batch": torch.tensor(items)} for part in parts]
        loss, want = _wanted(model, parts)
        ours = copy.deepcopy(model)
        context_parallel(ours, mesh, average_gradients=True)
        total = 0.0
        for part in parts:
            out = ours(**part)
            out.loss.backward()
            total += float(out.loss)
        return abs(total - loss) / loss, _error(ours, want)


def test_micro_batches_share_their_number_of_labels(pool):
    for errors in pool.run(3, _accumulated):
        assert max(errors) < LIMIT


def _removed(rank, world, group):
    """Return whether a model attends as before once it is no longer sharded."""
    mesh = DeviceMesh.from_group(group, "cpu")
    same = []
    for name in ("llama", "whisper"):
        model = build(name, torch.float32)
        batch = batch_of(name, "plain", torch.float32)
        before, keys = model(**batch).logits, {path: set(vars(m)) for path, m in model.named_modules()}
        sharding = context_parallel(model, mesh, average_gradients=True)
        model(**batch).loss.backward()
        sharding.remove()
        after = {path: set(vars(m)) for path, m in model.named_modules()}
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        same.append(torch.equal(before, model(**batch).logits) and keys == after and hooks == 0)
        context_parallel(model, mesh, average_gradients=True)  # and again
    return same


def test_remove_restores_the_model(pool):
    assert pool.run(2, _removed) == [[True, True]] * 2


def _labels_on_padding(rank, world, group, cut):
    """Return errors of a batch whose labels go on into padding on the right, which sees the tokens before it."""
    mesh = DeviceMesh.from_group(group, "cpu")
    with compare.Float64():
        model = build("llama", torch.float64)
        mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
        mask[0, 30:] = 0
        batch = dict(input_ids=_ids(0), attention_mask=mask, labels=_ids(0))
        loss, want = _wanted(model, [batch])
        ours = copy.deepcopy(model)
        context_parallel(ours, mesh, cut=cut, outputs="whole", average_gradients=True)
        out = ours(**batch, output_hidden_states=True)
        out.loss.backward()
        return abs(float(out.loss) - loss) / loss, _error(ours, want), {x.shape[1] for x in out.hidden_states}


@pytest.mark.parametrize("cut", ["inputs", "layers"])
def test_labels_on_padding_count_as_on_one_device(pool, cut):
    for *errors, lengths in pool.run(2, _labels_on_padding, cut):
        assert max(errors) < LIMIT
        assert lengths == {TOKENS} if cut == "inputs" else TOKENS in lengths
