"""Conversion between Hugging Face Llama and GPT: configs, logits, gradients, files, meshes and errors."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from meshflash.models import huggingface
from meshflash.models.gpt import GPT, PRESETS, GPTConfig, tiny
from meshflash.models.gpt_config import RopeScaling
from meshflash.models.huggingface import (
    WEIGHTS,
    load_pretrained,
    read_config,
    read_pretrained,
    save_pretrained,
    write_config,
)
from meshflash.parallel import init_mesh, next_tokens, parallelize

#: No mesh divides these sizes evenly: 61 tokens, 20 dims.
ODD = GPTConfig(61, 2, 20, 4, 2, 36, head_dim=8, tokens=64, scaling=RopeScaling(8.0, original_tokens=16))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = [(False, LLAMA3), (True, LLAMA3), (False, {"rope_theta": 500.0})]


@pytest.fixture(scope="module")
def transformers():
    """Import transformers lazily, since it is slow."""
    found = import_module("transformers")
    found.utils.logging.disable_progress_bar()
    return found


def llama(transformers, tied, rope):
    """Return a tiny Llama with weights large enough that attention is far from uniform."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope),
        initializer_range=0.25,
        rms_norm_eps=1e-3,
    )
    return transformers.LlamaForCausalLM(config)


def tokens():
    """Return more tokens than the 16 of `original_max_position_embeddings`."""
    return torch.randint(61, (2, 41), generator=torch.Generator().manual_seed(5))


def far(got, want):
    """Return the largest difference, relative to the largest value of `want`."""
    return float((got.detach() - want.detach()).abs().max() / want.detach().abs().max())


def contents(folder):
    """Return the bytes of every file of a folder, by name."""
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def equal_weights(got, want):
    """Do both models have the same parameter names and bitwise equal values?"""
    return all(
        name == other and torch.equal(a, b)
        for (name, a), (other, b) in zip(got.named_parameters(), want.named_parameters(), strict=True)
    )


@pytest.mark.parametrize("name", PRESETS)
def test_preset_configs_round_trip_and_match_transformers(name, tmp_path, transformers):
    config = PRESETS[name]()
    write_config(config, tmp_path, dtype=torch.bfloat16, fields={"eos_token_id": 7})
    assert read_config(tmp_path) == config
    theirs = transformers.LlamaConfig.from_pretrained(tmp_path)
    assert (theirs.dtype, theirs.eos_token_id, theirs.bos_token_id) == (torch.bfloat16, 7, None)
    theirs.save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == config
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(theirs)
        ours = {name: weight.shape for name, weight in GPT(config).named_parameters()}
    assert ours == {name.removeprefix("model."): weight.shape for name, weight in model.named_parameters()}


def test_configs_of_older_transformers_are_read(tmp_path):
    """Configs as on the hub: rope_theta and rope_scaling, `type` or `rope_type`, missing fields."""
    sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2)
    defaults = GPTConfig(9, 1, 8, 2, 2, 6, tokens=2048, theta=10_000.0, norm_eps=1e-6)
    scaled = {name: value for name, value in LLAMA3.items() if name not in ("rope_type", "rope_theta")}
    scaling = RopeScaling(8.0, 1.0, 4.0, 16)
    for fields, want in (
        ({}, {}),
        ({"rope_scaling": None, "rope_theta": 5e5, "num_key_value_heads": 1}, {"theta": 5e5, "kv_heads": 1}),
        ({"rope_scaling": {"type": "llama3", **scaled}, "rope_theta": 3.0}, {"theta": 3.0, "scaling": scaling}),
        ({"rope_scaling": {"rope_type": "llama3", **scaled}, "head_dim": 6}, {"scaling": scaling, "head_dim": 6}),
        ({"rope_parameters": LLAMA3, "tie_word_embeddings": True}, {"scaling": scaling, "tied": True}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **fields}))
        assert read_config(tmp_path) == replace(defaults, **want)


@pytest.mark.parametrize(("tied", "rope"), KINDS)
def test_logits_and_gradients_match_transformers_in_both_directions(tied, rope, tmp_path, transformers):
    theirs = llama(transformers, tied, rope)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = read_pretrained(tmp_path / "theirs")
    ids = tokens()
    want = theirs(ids, labels=ids)
    loss = mean_loss(ours, ids)
    assert far(ours(ids), want.logits) < 1e-5
    assert far(loss, want.loss) < 1e-6
    compare_gradients(ours, loss, theirs, want.loss, 1e-4)

    save_pretrained(ours, tmp_path / "ours")
    stored = [safetensors.torch.load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs")]
    assert stored[0].keys() == stored[1].keys()
    back, found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(found.values()), found
    assert torch.equal(back(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize(("tied", "rope"), KINDS)
def test_logits_and_gradients_match_transformers_in_float64(tied, rope, tmp_path, transformers, monkeypatch):
    """transformers computes angles, norms and loss in float32, which limits it to 1e-6; patch it to float64."""
    modeling = import_module("transformers.models.llama.modeling_llama")
    theirs = llama(transformers, tied, rope).double()
    theirs.save_pretrained(tmp_path)
    rounded = theirs.model.rotary_emb.inv_freq
    frequencies = torch.tensor([rotary_frequency(2 * pair / 8, rope) for pair in range(4)], dtype=torch.float64)
    torch.testing.assert_close(rounded, frequencies.to(rounded.dtype))

    def rotary_in_float64(self, x, position_ids):
        angles = position_ids.double()[..., None] * torch.cat((frequencies, frequencies))
        return angles.cos(), angles.sin()

    def norm_in_float64(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

    monkeypatch.setattr(modeling.LlamaRotaryEmbedding, "forward", rotary_in_float64)
    monkeypatch.setattr(modeling.LlamaRMSNorm, "forward", norm_in_float64)
    ours, ids = read_pretrained(tmp_path), tokens()
    assert {weight.dtype for weight in ours.parameters()} == {torch.float64}
    logits, loss = theirs(ids).logits, mean_loss(ours, ids)
    want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert far(ours(ids), logits) < 1e-13
    assert far(loss, want) < 1e-13
    compare_gradients(ours, loss, theirs, want, 1e-12)


def rotary_frequency(exponent, rope):
    """Return a rotary frequency as Llama 3's own code computes it, in plain Python."""
    found = rope["rope_theta"] ** -exponent
    if "factor" not in rope:
        return found
    length = 2 * math.pi / found
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    first = rope["original_max_position_embeddings"]
    if length < first / high:
        return found
    if length > first / low:
        return found / rope["factor"]
    smooth = (first / length - low) / (high - low)
    return (1 - smooth) * found / rope["factor"] + smooth * found


def mean_loss(model, ids):
    """Return the mean loss of the next tokens."""
    return model(ids, labels=next_tokens(ids)) / (ids.numel() - len(ids))


def compare_gradients(ours, loss, theirs, want, tolerance):
    """Run both backwards; assert that the gradients of all weights match."""
    loss.backward()
    want.backward()
    gradients = {name.removeprefix("model."): weight.grad for name, weight in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, weight in ours.named_parameters():
        assert far(weight.grad, gradients[name]) < tolerance, name


def test_weights_in_several_files_are_read_back(tmp_path, transformers):
    model = GPT(tiny(vocabulary=61))
    save_pretrained(model, tmp_path / "many", max_gb=30e-6)
    names = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > 4
    for name in names:
        stored_tensors = safetensors.torch.load_file(tmp_path / "many" / name)
        assert len(stored_tensors) == 1 or sum(x.nbytes for x in stored_tensors.values()) <= 30e3
    assert equal_weights(read_pretrained(tmp_path / "many"), model)
    back, found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "many", output_loading_info=True)
    assert not any(found.values()), found
    back.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 4
    assert equal_weights(read_pretrained(tmp_path / "theirs"), model)


def test_compiled_models_write_the_same_readable_files(tmp_path):
    model: Any = GPT(ODD)
    save_pretrained(model, tmp_path / "plain")
    model.layers[0] = torch.compile(model.layers[0])
    compiled: Any = torch.compile(model)
    save_pretrained(compiled, tmp_path / "compiled")
    assert contents(tmp_path / "compiled") == contents(tmp_path / "plain")
    (tmp_path / "file").touch()
    assert {file.stat().st_mode for file in (tmp_path / "plain").iterdir()} == {(tmp_path / "file").stat().st_mode}
    with torch.no_grad():
        model.lm_head.weight.zero_()
    load_pretrained(compiled, tmp_path / "plain")
    assert [torch.equal(a, b) for a, b in zip(model.parameters(), GPT(ODD).parameters(), strict=True)] == [True] * 21


def test_weights_are_read_and_written_in_each_dtype(tmp_path):
    model = GPT(ODD)
    save_pretrained(model, tmp_path / "half", dtype=torch.bfloat16)
    assert all(x.dtype == torch.bfloat16 for x in safetensors.torch.load_file(tmp_path / "half" / WEIGHTS).values())
    assert equal_weights(read_pretrained(tmp_path / "half"), GPT(ODD).bfloat16())
    assert equal_weights(read_pretrained(tmp_path / "half", dtype=torch.float64), GPT(ODD).bfloat16().double())
    assert equal_weights(model, GPT(ODD))  # the model keeps its dtype


def load_and_save_on_meshes(rank, world, group, folders, meshes):
    """Load and save on meshes; compare shards with torch's `distribute_tensor` of the same weights."""
    for index, (axes, options, tied) in enumerate(meshes):
        mesh, config = init_mesh(**axes, device="cpu"), replace(ODD, tied=tied)
        source = Path(folders, str(tied))
        model = parallelize(GPT(config), mesh, **options)
        want = [local(weight).clone() for weight in model.parameters()]
        ids = torch.arange(2 * 8).reshape(2, 8) % 61
        for weight in model.parameters():
            local(weight).detach().fill_(7.0)
        if "tp" not in axes:
            model(ids)  # with mode="grad_op" the weights stay gathered after a forward
        with pytest.MonkeyPatch.context() as patch:
            read = count_reads(patch)
            load_pretrained(model, source)
        assert read == [part.numel() for part in want]
        check(model, want)
        if "tp" not in axes:
            alone = GPT(config)(ids)
            torch.testing.assert_close(model(ids), alone)
        save_pretrained(model, Path(folders, f"{world}-{index}"), max_gb=5e-6)
        save_pretrained(model, Path(folders, f"{world}-{index}-half"), dtype=torch.bfloat16)
        if "fsdp" in axes or "tp" in axes:
            with torch.device("meta"):
                model = GPT(config)
            model = parallelize(model, mesh, **options)
            with pytest.raises(ValueError, match="to_empty"):
                load_pretrained(model, source)
            model.to_empty(device="cpu")
            load_pretrained(model, source)
            check(model, want)
    return errors_of_failed_saves(rank, model, folders)


class CountedTensor:
    """A lazy tensor that counts the elements read from it; `counted` makes it."""

    def __init__(self, tensor, read):
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype
        self.tensor, self.read = tensor, read

    def __getitem__(self, place):
        found = self.tensor[place]
        self.read.append(found.numel())
        return found


def count_reads(patch):
    """Patch the reader of files; return a list of the number of elements of each read."""
    read: list[int] = []
    stored = huggingface._stored

    def counting(*args):
        return {name: CountedTensor(tensor, read) for name, tensor in stored(*args).items()}

    patch.setattr(huggingface, "_stored", counting)
    return read


def errors_of_failed_saves(rank, model, folders):
    """Return the errors of ranks if rank 0 cannot write: the folder exists, then the disk is full."""
    messages = []
    with pytest.raises((ValueError, RuntimeError)) as error:
        save_pretrained(model, Path(folders, "True"))
    messages.append(str(error.value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full_disk)
        with pytest.raises((OSError, RuntimeError)) as error:
            save_pretrained(model, Path(folders, "full"))
    return [*messages, str(error.value)]


def local(weight):
    """Return this rank's shard of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def check(model, want):
    """Assert that this rank's shards have the expected shapes and values."""
    parts = [local(weight) for weight in model.parameters()]
    assert [part.shape for part in parts] == [part.shape for part in want]
    assert all(torch.equal(part, expected) for part, expected in zip(parts, want, strict=True))


def full_disk(tensors, file, *args):
    """Fail in the middle of writing the first file."""
    Path(file).write_bytes(b"half of it")
    raise OSError(28, "No space left on device")


MESHES: dict[int, list[tuple[dict[str, int], dict[str, str], bool]]] = {
    2: [
        ({"dp": 2}, {}, False),
        ({"fsdp": 2}, {}, True),
        ({"fsdp": 2}, {"mode": "grad_op", "wrap": "model"}, False),
    ],
    4: [
        ({"fsdp": 2, "tp": 2}, {}, False),
        ({"fsdp": 2, "tp": 2}, {}, True),
        ({"dp": 2, "tp": 2}, {}, False),
        ({"dp": 2, "fsdp": 2}, {}, True),
    ],
}


@pytest.mark.parametrize("world", MESHES)
def test_sharded_models_read_their_shards_and_write_the_same_bytes(world, pool, tmp_path):
    for tied in (False, True):
        model = GPT(replace(ODD, tied=tied))
        save_pretrained(model, tmp_path / str(tied))
        save_pretrained(model, tmp_path / f"many{tied}", max_gb=5e-6)
        save_pretrained(model, tmp_path / f"half{tied}", dtype=torch.bfloat16)
    before = {file.name for file in tmp_path.iterdir()}
    messages = pool.run(world, load_and_save_on_meshes, str(tmp_path), MESHES[world])
    made = {f"{world}-{index}{suffix}" for index in range(len(MESHES[world])) for suffix in ("", "-half")}
    assert {file.name for file in tmp_path.iterdir()} == before | made  # a failed save leaves no temporary folders
    for index, (_, _, tied) in enumerate(MESHES[world]):
        assert contents(tmp_path / f"{world}-{index}") == contents(tmp_path / f"many{tied}")
        assert contents(tmp_path / f"{world}-{index}-half") == contents(tmp_path / f"half{tied}")
    assert all("not empty" in taken and "No space left" in full for taken, full in messages)
    assert all("rank 0 could not write" in text for texts in messages[1:] for text in texts)


def test_a_failed_save_leaves_no_files(tmp_path, monkeypatch):
    model = GPT(ODD)
    (tmp_path / "model").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save_pretrained(model, tmp_path / "model")
    with pytest.raises(ValueError, match="hidden_size, vocab_size follow from the model"):
        save_pretrained(model, tmp_path / "model", fields={"vocab_size": 3, "hidden_size": 4})
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert not contents(tmp_path / "model")
    save_pretrained(model, tmp_path / "model")
    before = contents(tmp_path / "model")
    with pytest.raises(ValueError, match="not empty; name another folder"):
        save_pretrained(GPT(ODD, seed=1), tmp_path / "model")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert contents(tmp_path / "model") == before


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": None}, "rope_type='yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_scaling": None},
            "the same in all layers",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None; expected a number"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures=.*SequenceClassification"),
        ({"hidden_size": None}, "hidden_size=None; expected a number"),
        ({"torch_dtype": "int8"}, "dtype='int8'"),
        ({"num_key_value_heads": 4}, r"of another shape: .*k_proj\.weight \(\[16, 20\], in the model \[32, 20\]\)"),
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2\.input_layernorm\.weight, .* and 3 more"),
        ({"num_hidden_layers": 1}, r"unexpected: model\.layers\.1\.input_layernorm\.weight, .* and 3 more"),
        ({"tie_word_embeddings": True}, None),
    ],
)
def test_unsupported_configs_are_refused_with_the_field_named(fields, match, tmp_path):
    save_pretrained(GPT(ODD), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    if match is None:  # tied weights may be stored twice
        assert read_pretrained(tmp_path / "model").lm_head is None
        return
    with pytest.raises(ValueError, match=match):
        read_pretrained(tmp_path / "model")


def test_mismatched_models_are_refused_and_stay_unchanged(tmp_path):
    save_pretrained(GPT(ODD), tmp_path / "untied")
    save_pretrained(GPT(replace(ODD, tied=True)), tmp_path / "tied")
    for folder, config, match in (
        ("untied", replace(ODD, tied=True), r"unexpected: lm_head\.weight"),
        ("tied", ODD, r"missing: lm_head\.weight"),
        ("untied", replace(ODD, vocabulary=60), r"of another shape: model\.embed_tokens\.weight \(\[61, 20\]"),
        ("untied", replace(ODD, heads=8, kv_heads=4, head_dim=4), "heads is 4 there and 8 in the model"),
        ("untied", replace(ODD, norm_eps=1e-6), "norm_eps is 1e-05 there"),
    ):
        model = GPT(config, seed=1)
        with pytest.raises(ValueError, match=match):
            load_pretrained(model, tmp_path / folder)
        assert equal_weights(model, GPT(config, seed=1))
    longer = GPT(replace(ODD, tokens=1 << 20, theta=1e9, scaling=None), seed=1)
    load_pretrained(longer, tmp_path / "untied")
    assert equal_weights(longer, GPT(ODD))
    with pytest.raises(ValueError, match="or one in DDP; got Linear"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path / "untied")


def test_broken_folders_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save_pretrained(GPT(ODD), folder, max_gb=5e-6)
    name = sorted(file.name for file in folder.glob("*.safetensors"))[1]
    whole = (folder / name).read_bytes()
    for length in (len(whole) - 1, 100, 4, 0):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"{name}: not a complete safetensors file"):
            read_pretrained(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: there is none"):
        read_pretrained(folder)
    (folder / name).write_bytes(whole)
    tensors = safetensors.torch.load_file(folder / name)
    first = next(iter(tensors))
    safetensors.torch.save_file(tensors | {first: tensors[first].to(torch.int8)}, folder / name)
    with pytest.raises(ValueError, match=rf"of a dtype that GPT cannot read: {first} \(I8\)"):
        read_pretrained(folder)
    (folder / name).write_bytes(whole)
    assert equal_weights(read_pretrained(folder), GPT(ODD))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[:50])
    with pytest.raises(ValueError, match=r"config\.json: not JSON .*copy it again"):
        read_config(folder)
    with pytest.raises(ValueError, match=r"config\.json: it cannot be read .No such file"):
        read_config(tmp_path)
    write_config(ODD, tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors: there is none"):
        read_pretrained(tmp_path)
    with pytest.raises(ValueError, match="max_gb=0: expected more than 0"):
        save_pretrained(GPT(ODD), tmp_path / "new", max_gb=0)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install safetensors"):
        save_pretrained(GPT(ODD), tmp_path / "new")
