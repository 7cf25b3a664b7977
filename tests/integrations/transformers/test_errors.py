"""What is not supported is an error on every rank, which names it, before data moves between ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from benchmarks.tiny_models import ROWS, TOKENS, batch_of, build
from integrations.wrong_calls import Mixing, message
from meshflash.integrations.transformers import context_parallel, shard_batch, tile_loss
from meshflash.integrations.transformers.model import Cut
from meshflash.integrations.transformers.release import check_release


def _calls(rank, world, group):
    """Return the messages of wrong calls on a rank, by what is wrong, and one of a right call after them."""
    mesh = DeviceMesh.from_group(group, "cpu")
    batch = batch_of("llama", "plain", torch.float32)
    padded = batch_of("llama", "padded", torch.float32)
    model = build("llama", torch.float32)
    sharding = context_parallel(model, mesh, average_gradients=True)
    holes = torch.ones(ROWS, TOKENS, dtype=torch.long)
    holes[0, 5] = 0
    wrong = {
        "other batch": {**batch, "input_ids": batch["input_ids"] + rank},
        "other number": {**batch, "num_items_in_batch": 5 + rank},
        "labels of another length": {**batch, "labels": batch["labels"][:, 1:]},
        "positions of another length": {**batch, "position_ids": torch.arange(9)[None]},
        "a label for padding": {**padded, "labels": batch["labels"]},
        "logits to keep": {**batch, "logits_to_keep": 3},
        "a tuple": {**batch, "return_dict": False},
        "fewer tokens than ranks": {name: x[:, :1] for name, x in batch.items()},
        "padding between tokens": {**batch, "attention_mask": holes},
        "a matrix as mask": {**batch, "attention_mask": torch.ones(ROWS, 1, TOKENS, TOKENS)},
        "cache": {**batch, "use_cache": True},
        "attention weights": {**batch, "output_attentions": True},
        "router loss": {**batch, "output_router_logits": True},
        "error of one rank": {**batch, "use_cache": rank == 1},
        "unknown argument of attention": {**batch, "relative_bias": torch.ones(1)},
        "no tokens": dict(labels=batch["labels"]),
    }
    said = {what: message(lambda given=given: model(**given)) for what, given in wrong.items()}
    model.set_attn_implementation("sdpa")
    said["another attention"] = message(lambda: model(**batch))
    model.config._attn_implementation_internal = "mesh_attn"
    sharding.average_gradients = None
    said["nobody averages"] = message(lambda: model(**batch))
    with torch.no_grad():
        said["no gradients"] = message(lambda: model(**batch))
    return said


SAYS = {
    "other batch": "ranks 0 and 1 of the mesh got different batches",
    "other number": "ranks 0 and 1 of the mesh got different batches",
    "labels of another length": "labels: expected 2 rows of 37 tokens, as the ids; got [2, 36]",
    "positions of another length": "position_ids: expected 2 rows of 37 tokens",
    "a label for padding": "labels: row 1 has a label that token 0, which is padding, would predict; set it to -100",
    "logits to keep": "logits_to_keep counts tokens",
    "a tuple": "return_dict=False: outputs are needed by name",
    "fewer tokens than ranks": "1 tokens for 2 ranks: every rank needs at least one",
    "padding between tokens": "attention_mask: row 0 has padding between tokens",
    "a matrix as mask": "attention_mask: expected [batch, tokens] or None, got [2, 1, 37, 37]",
    "cache": "pass use_cache=False",
    "attention weights": "output_attentions=True: attention weights never exist",
    "router loss": "output_router_logits=True adds a loss over all tokens together",
    "error of one rank": "pass use_cache=False (rank 1 of the mesh)",
    "unknown argument of attention": "LlamaAttention passes relative_bias, which meshflash does not know",
    "no tokens": "expected input_ids or inputs_embeds in the batch",
    "another attention": "the model attends by 'sdpa' now; call remove()",
    "nobody averages": "nobody averages gradients over the ranks of the mesh",
    "no gradients": "no error",
}


def test_wrong_calls_are_errors_on_every_rank(pool):
    for said in pool.run(2, _calls):
        assert said.keys() == SAYS.keys()
        assert not {what: text for what, text in said.items() if SAYS[what] not in text}


def _models(rank, world, group):
    """Return the messages of models that are not supported."""
    import transformers

    mesh = DeviceMesh.from_group(group, "cpu")
    two = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    biased = transformers.T5Config(vocab_size=61, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4)
    bloom = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0)
    twice = build("llama", torch.float32)
    context_parallel(twice, mesh)
    embeddings = build("llama", torch.float32)
    embeddings.model.layers[0].self_attn.rotary_emb = embeddings.model.rotary_emb

    def shard(model, mesh=mesh, **arguments):
        return message(lambda: context_parallel(model, mesh, **arguments))

    def call(model, **arguments):
        cut: Cut = "inputs" if isinstance(model, _OwnLoss) else "auto"
        context_parallel(model, mesh, cut=cut, average_gradients=True)
        return message(lambda: model(**(batch_of("bert", "plain", torch.float32) | arguments)))

    ids = batch_of("bert", "plain", torch.float32)["input_ids"]
    return {
        "convolution": shard(build("lfm2", torch.float32)),
        "own attention": shard(transformers.BloomForCausalLM(bloom)),
        "position bias": call(transformers.T5ForConditionalGeneration(biased).eval(), decoder_input_ids=ids),
        "hidden dropout": call(build("bert", torch.float32, hidden_dropout_prob=0.1)),
        "dropout of an adapter": call(_with_adapter_dropout(build("llama", torch.float32))),
        "dropout of a module": call(_with_dropout(build("llama", torch.float32))),
        "router loss of a config": call(build("gpt-oss", torch.float32, output_router_logits=True)),
        "no model": shard(nn.Linear(2, 2)),
        "a mesh of two axes": shard(build("llama", torch.float32), two),
        "twice": shard(twice),
        "embeddings in layers": shard(embeddings),
        "positions from ids": shard(build("gpt2", torch.float32), cut="inputs"),
        "a loss of its own": call(_OwnLoss(build("llama", torch.float32).config)),
        "a cut batch for layers": _cut_batch(mesh),
        "a label for padding, at layers": _label_for_padding(mesh),
        "random inputs of layers": _random_inputs(mesh),
        "a checkpoint of the whole model": _whole_checkpoint(mesh),
        "chunks at inputs": call_chunks(mesh),
        **dict(zip(("one config, two models", "another model", "a part"), _shared_config(mesh), strict=True)),
        "log-probabilities": _log_probabilities(mesh),
        "a word that is no cut": shard(build("llama", torch.float32), cut="tokens"),
        "outputs": shard(build("llama", torch.float32), outputs="all"),
        "a stack that is none": shard(build("llama", torch.float32), cut="layers", stacks=["model.norm"]),
    }


def _shared_config(mesh):
    """Return what a second model with the same config object says, and the first one's decoder when called alone."""
    model = build("llama", torch.float32)
    other = type(model)(model.config)
    context_parallel(model, mesh, average_gradients=True)
    ids = batch_of("llama", "plain", torch.float32)["input_ids"]
    said = [message(lambda: context_parallel(other, mesh))]
    return said + [message(lambda part=part: part(input_ids=ids, use_cache=False)) for part in (other, model.model)]


def call_chunks(mesh):
    """Return what a model of chunks says whose inputs are cut."""
    model = build("llama4", torch.float32)
    context_parallel(model, mesh, cut="inputs", average_gradients=True)
    return message(lambda: model(**batch_of("llama4", "plain", torch.float32)))


def _with_adapter_dropout(model):
    """Add what LoRA adds to a projection of attention."""
    model.model.layers[0].self_attn.q_proj.lora_dropout = nn.Dropout(0.1)
    return model


class _OwnLoss(LlamaForCausalLM):
    """A model that computes its loss without `loss_function`, and so from the labels of a rank's own tokens."""

    def forward(self, input_ids=None, labels=None, **more):
        out = super().forward(input_ids=input_ids, **more)
        out.loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return out


def _cut_batch(mesh):
    model = build("llama", torch.float32)
    context_parallel(model, mesh, cut="layers", average_gradients=True)
    return message(lambda: model(**shard_batch(batch_of("llama", "plain", torch.float32), mesh, layout="contiguous")))


def _label_for_padding(mesh):
    model = build("llama", torch.float32)
    context_parallel(model, mesh, cut="layers", average_gradients=True)
    padded = batch_of("llama", "padded", torch.float32)
    return message(lambda: model(**{**padded, "labels": padded["input_ids"]}))


def _random_inputs(mesh):
    """Return what a model says whose embeddings draw random numbers, as those of masked autoencoders."""
    model = build("llama", torch.float32)
    torch.manual_seed(mesh.get_local_rank())
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out + torch.randn_like(out))
    context_parallel(model, mesh, cut="layers", average_gradients=True)
    return message(lambda: model(**batch_of("llama", "plain", torch.float32)))


def _whole_checkpoint(mesh):
    model = build("llama", torch.float32, attention_dropout=0.2)
    context_parallel(model, mesh, average_gradients=True)
    batch = batch_of("llama", "plain", torch.float32)
    loss = checkpoint(lambda: model(**batch).loss, use_reentrant=False)
    return message(loss.backward)


def _add_log_probabilities(model, args, out):
    out["log_probs"] = out.logits.logsumexp(-1)
    return out


def _log_probabilities(mesh):
    """Return what a model says that returns what a loss can be computed from, as those of TRL do."""
    model = build("llama", torch.float32)
    model.register_forward_hook(_add_log_probabilities)
    context_parallel(model, mesh, average_gradients=True)
    return message(lambda: model(**batch_of("llama", "plain", torch.float32)))


def _with_dropout(model):
    model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.2))
    return model


MODELS_SAY = {
    "convolution": "has layers of type conv, which mix tokens outside of attention",
    "own attention": "BloomBlock 0 does not look up its attention by name",
    "position bias": "T5Attention passes position_bias, which meshflash does not know",
    "hidden dropout": "hidden_dropout_prob=0.1 draws random numbers for hidden values",
    "dropout of an adapter": "model.layers.0.self_attn.q_proj.lora_dropout drops hidden values",
    "positions from ids": "it has no rotary embeddings",
    "a loss of its own": "_OwnLoss computes its loss itself, without self.loss_function",
    "a cut batch for layers": 'expected a whole batch with cut="layers", not one from shard_batch',
    "a label for padding, at layers": "labels: row 1 has a label that token 0",
    "random inputs of layers": "ranks have other inputs of LlamaDecoderLayer",
    "a checkpoint of the whole model": "not supported where a checkpoint runs the whole model again",
    "dropout of a module": "model.layers.1.mlp.act_fn.1 drops hidden values",
    "router loss of a config": "output_router_logits=True adds a loss over all tokens together",
    "no model": "expected a PreTrainedModel",
    "a mesh of two axes": 'mesh must be a DeviceMesh of one dimension, such as mesh["cp"]',
    "twice": "this model is sharded already",
    "embeddings in layers": 'layers compute rotary embeddings themselves; pass cut="layers"',
    "chunks at inputs": 'pass cut="layers"',
    "one config, two models": "another model that is sharded has the same config object",
    "another model": "the model whose sequences are sharded was not called",
    "a part": "the model whose sequences are sharded was not called",
    "log-probabilities": 'log_probs of each token, from which a loss can be computed; pass outputs="whole"',
    "a word that is no cut": 'expected "auto", "inputs" or "layers"',
    "outputs": 'expected "own" or "whole"',
    "a stack that is none": "model.norm is a LlamaRMSNorm; expected a ModuleList of layers",
}


def test_models_that_are_not_supported_are_refused_by_name(pool):
    for said in pool.run(2, _models):
        assert said.keys() == MODELS_SAY.keys()
        assert not {what: text for what, text in said.items() if MODELS_SAY[what] not in text}


def _averaging(rank, world, group):
    """Return what models say whose gradients DDP and FSDP2 average over other ranks than those of the mesh."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    batch = batch_of("llama", "plain", torch.float32)
    said = []
    for axis in ("dp", "cp"):
        for how in ("ddp", "fsdp"):
            model = build("llama", torch.float32)
            context_parallel(model, mesh["cp"])
            run = model
            if how == "ddp":
                run = nn.parallel.DistributedDataParallel(model, process_group=mesh[axis].get_group())
            else:
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh[axis])
                fully_shard(model, mesh=mesh[axis])
            said.append((axis, message(lambda run=run: run(**batch).loss.backward())))
    return said


def test_gradients_averaged_over_other_ranks_are_an_error(pool):
    for said in pool.run(2, _averaging):
        for axis, text in said:
            assert text.startswith("context_parallel: nobody averages gradients" if axis == "dp" else "no error"), axis


def _after_an_error(rank, world, group):
    """Return whether a model is as it was after an error inside of a forward, and whether averaging can be switched."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = build("llama", torch.float32)
    batch = batch_of("llama", "plain", torch.float32)
    tile_loss(model, tokens=9)
    sharding = context_parallel(model, mesh, average_gradients=True)
    norm = model.model.norm

    def fail(module, args, out):
        raise RuntimeError("on purpose")

    handle = norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(**batch)
    handle.remove()
    whole = model.lm_head(torch.ones(2, 9, 32)).shape[1] == 9
    part = message(lambda: model.model(input_ids=batch["input_ids"], use_cache=False))
    model(**batch).loss.backward()
    averaged = model.lm_head.weight.grad.clone()
    model.zero_grad()
    sharding.average_gradients = False
    model(**batch).loss.backward()
    own = model.lm_head.weight.grad.clone()
    total = own.clone()
    torch.distributed.all_reduce(total)
    sharding.remove()
    context_parallel(model, mesh, average_gradients=True)
    sharding.remove()  # a second time
    model(**batch)
    return whole, part, float((total / world - averaged).abs().max()), float((own - averaged).abs().max())


def test_errors_and_removals_leave_nothing_behind(pool):
    for whole, part, error, difference in pool.run(2, _after_an_error):
        assert whole
        assert "the model whose sequences are sharded was not called" in part
        assert error < 1e-6
        assert difference > 1e-3


def _verified(rank, world, group):
    """Return what `verify` says of a model with a layer that mixes tokens, and without verify."""
    mesh = DeviceMesh.from_group(group, "cpu")
    said = []
    for verify in (True, False):
        model = build("llama", torch.float32)
        model.model.layers[1].mlp = Mixing()
        context_parallel(model, mesh, average_gradients=True, verify=verify)
        said.append(message(lambda model=model: model(**batch_of("llama", "plain", torch.float32))))
    return said


def test_verify_finds_layers_that_mix_tokens(pool):
    for said, unverified in pool.run(2, _verified):
        assert "differs from one device" in said
        assert "a layer may mix tokens outside of attention" in said
        assert unverified == "no error"


def test_releases_outside_the_tested_range_need_verify():
    for version in ("4.57.6", "5.9.0", "5.24.0.dev0"):
        with pytest.raises(ValueError, match=f"Transformers {version} is not tested; install 5.10 to 5.23"):
            check_release(version, verify=False)
        check_release(version, verify=True)
    check_release("5.22.2", verify=False)


def test_shard_batch_names_what_is_missing():
    with pytest.raises(ValueError, match="expected input_ids or inputs_embeds"):
        shard_batch(dict(labels=torch.zeros(1, 4)), None)
