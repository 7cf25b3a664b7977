"""Read and write Hugging Face's Llama checkpoints as `GPT`: config.json and safetensors files.

The model may be sharded over a mesh: each rank reads its own shards, and the files written are the same on any mesh.
Tokenizers, other architectures and quantized weights are not supported.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshflash.core.reading import is_plain, read_object
from meshflash.models.gpt import GPT
from meshflash.models.gpt_config import GPTConfig, RopeScaling
from meshflash.models.layers import local_slices

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ARCHITECTURE = "LlamaForCausalLM"
HEAD = "lm_head.weight"
#: What errors expect of a JSON file.
WRITTEN = "a file that transformers' save_pretrained wrote; copy it again"

#: Fields of config.json for options that GPT lacks, with the only value that GPT supports.
_REQUIRED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
#: Sizes that the shapes of the weights do not reveal; with other values the same weights are a different model.
_HIDDEN_SIZES = ("heads", "kv_heads", "head_dim", "norm_eps")
_DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
#: The same dtypes by their names in safetensors.
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")


def read_config(folder: str | Path) -> GPTConfig:
    """Return the sizes of a folder's config.json; raise ValueError with the field's name if GPT does not support it.

    Args:
        folder: A folder with config.json.
    """
    file = Path(folder) / CONFIG
    return _gpt_config(read_object(file, WRITTEN), file)


def write_config(
    config: GPTConfig,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json in a form that all versions of transformers read.

    Args:
        config: The sizes of the model.
        folder: An existing folder.
        dtype: The dtype of the weights beside it.
        fields: Further fields, such as `bos_token_id`. Token ids are null unless given here.
    """
    scaling = config.scaling
    derived: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_tokens,
        },
        "tie_word_embeddings": config.tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{name: _REQUIRED[name] for name in ("attention_bias", "mlp_bias", "hidden_act", "attention_dropout")},
    }
    if taken := sorted(derived.keys() & (fields or {}).keys()):
        raise ValueError(f"fields: {_some(taken)} follow from the model; leave them out")
    more = {"bos_token_id": None, "eos_token_id": None} | dict(fields or {})
    (Path(folder) / CONFIG).write_text(json.dumps(derived | more, indent=2) + "\n")


def read_pretrained(folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> GPT:
    """Return the model of a folder on a single device.

    If one device cannot hold it, build `GPT(read_config(folder))` under `torch.device("meta")`, then call
    `parallelize`, `to_empty(device=...)` and `load_pretrained`.

    Args:
        folder: A folder with config.json and safetensors files.
        dtype: The dtype of the weights; by default that of config.json, or float32 if it names none.
        device: The device of the weights.
    """
    file = Path(folder) / CONFIG
    given = read_object(file, WRITTEN)
    config, dtype = _gpt_config(given, file), _dtype(given, file) if dtype is None else dtype
    with ExitStack() as files:  # check config.json against the files before allocating what it claims
        stored = _stored(Path(folder), files)
        if config.layers > len(stored):
            raise ValueError(f"{file}: num_hidden_layers={config.layers}, and its files hold {len(stored)} tensors")
        with torch.device("meta"):
            model = GPT(config).to(dtype)
        _check(_named(model), _fitting(model, config, stored), Path(folder))
    model.to_empty(device=device)
    load_pretrained(model, folder)
    return model


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Load a model's weights from a folder; each rank reads its own shards.

    All tensors and sizes are checked before any weight changes. `theta`, `scaling` and `tokens` may differ, so that a
    model can be trained further on longer sequences.

    Args:
        model: A GPT: plain, in DDP, of `parallelize`, or compiled; not on the meta device.
        folder: A folder with config.json and safetensors files.
    """
    core, folder = _core(model), Path(folder)
    weights, config = _weights(core), read_config(folder)
    with ExitStack() as files:
        stored = _fitting(core, config, _stored(folder, files))
        _check(weights, stored, folder)
        for size in _HIDDEN_SIZES:
            theirs, ours = getattr(config, size), getattr(core.config, size)
            if theirs != ours:
                raise ValueError(f"{folder}: {size} is {theirs} there and {ours} in the model; use read_config")
        for name, weight in weights.items():
            part = weight.to_local() if isinstance(weight, DTensor) else weight
            if part.numel():
                part.copy_(stored[name][local_slices(weight)])


@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_gb: float = 5.0,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and weights as transformers does. All ranks call it, and rank 0 writes.

    The folder appears complete or not at all. Weights are gathered one at a time; rank 0 holds one file's weights in
    host memory.

    Args:
        model: A GPT, as for `load_pretrained`.
        folder: A new or an empty folder.
        dtype: The dtype of the written weights; by default their own.
        max_gb: The most gigabytes (10^9 bytes) of weights in a file; a larger weight gets a file of its own.
        fields: Further fields of config.json, see `write_config`.
    """
    core, folder = _core(model), Path(folder).resolve()
    weights, write = _weights(core), _safetensors().torch.save_file
    stored_dtype = dtype or next(iter(weights.values())).dtype
    if str(stored_dtype).removeprefix("torch.") not in _DTYPES:
        raise ValueError(f"dtype={stored_dtype}: expected one of {', '.join(_DTYPES)}")
    sizes = {name: weight.numel() * (dtype or weight.dtype).itemsize for name, weight in weights.items()}
    files = _assign_files(sizes, max_gb)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        _on_first(_begin, draft, folder)
        _on_first(write_config, core.config, draft, dtype=stored_dtype, fields=fields)
        for file, names in files.items():
            gathered = {}
            for name in names:
                full = _gather_weight(weights[name], dtype)
                if _is_first():
                    gathered[name] = full.cpu().contiguous()
            _on_first(write, gathered, draft / file, {"format": "pt"})
            _on_first(shutil.copymode, draft / CONFIG, draft / file)  # safetensors writes with mode 0600
        if len(files) > 1:
            total = {"total_size": sum(sizes.values())}
            placed = {name: file for file, names in files.items() for name in names}
            text = json.dumps({"metadata": total, "weight_map": placed}, indent=2, sort_keys=True)
            _on_first((draft / INDEX).write_text, text + "\n")
        _on_first(draft.rename, folder)
    finally:
        if _is_first():
            shutil.rmtree(draft, ignore_errors=True)


def _gpt_config(given: Mapping[str, Any], file: Path) -> GPTConfig:
    """Return the sizes from the fields of a LlamaConfig, with transformers' defaults for all but sizes."""
    if given.get("model_type") != "llama" or ARCHITECTURE not in (given.get("architectures") or [ARCHITECTURE]):
        kind = f"model_type={given.get('model_type')!r}, architectures={given.get('architectures')!r}"
        raise ValueError(f"{file}: {kind}; expected 'llama' and {ARCHITECTURE}")
    theta, scaling = _rope(given, file)
    for name, value in _REQUIRED.items():
        if given.get(name) not in (None, value):
            raise ValueError(f"{file}: {name}={given[name]!r}; GPT has only {name}={value!r}")
    vocabulary, layers, dim, heads, hidden = (
        _field(given, name, file)
        for name in ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    )
    kv_heads = given.get("num_key_value_heads") or heads
    return GPTConfig(
        *(vocabulary, layers, dim, heads, kv_heads, hidden, given.get("head_dim")),
        tokens=_field(given, "max_position_embeddings", file, 2048),
        theta=theta,
        scaling=scaling,
        norm_eps=_field(given, "rms_norm_eps", file, 1e-6),
        tied=bool(given.get("tie_word_embeddings")),
    )


def _rope(given: Mapping[str, Any], file: Path) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling: from `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{file}: rope_type={kind!r} ({rope}); GPT has 'default' and 'llama3', the same in all layers")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"{file}: partial_rotary_factor={rope['partial_rotary_factor']}; GPT rotates all dims of a head"
        )
    theta = float(rope.get("rope_theta") or given.get("rope_theta") or 10_000.0)
    if kind == "default":
        return theta, None
    factor, low, high = (float(_field(rope, name, file)) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    tokens = rope.get("original_max_position_embeddings") or _field(given, "max_position_embeddings", file)
    return theta, RopeScaling(factor, low, high, int(tokens))


def _field(given: Mapping[str, Any], name: str, file: Path, default: Any = None) -> Any:
    found = given.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"{file}: {name}={found!r}; expected a number")
    return found


def _dtype(given: Mapping[str, Any], file: Path) -> torch.dtype:
    name = str(given.get("dtype") or given.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(
            f"{file}: dtype={name!r}; expected one of {', '.join(_DTYPES)}, or pass dtype= to read_pretrained"
        )
    return _DTYPES[name]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("weights of Hugging Face need safetensors: pip install safetensors") from None
    return safetensors


def _core(model: nn.Module) -> GPT:
    """Return the GPT inside DDP or torch.compile, with its weights sharded again."""
    core: Any = model
    while not isinstance(core, GPT):
        core = getattr(core, "_orig_mod", None) or getattr(core, "module", None)
        if core is None:
            raise ValueError(f"model: expected a meshflash.models.gpt.GPT, or one in DDP; got {type(model).__name__}")
    for module in core.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves weights gathered
    return core


def _weights(core: GPT) -> dict[str, nn.Parameter]:
    """Return the model's weights by their names in files; a shared weight appears once."""
    if absent := [name for name, weight in core.named_parameters() if weight.is_meta]:
        raise ValueError(f"model: {_some(absent)} on the meta device; call to_empty(device=...) before")
    return _named(core)


def _named(core: GPT) -> dict[str, nn.Parameter]:
    plain = {name.replace("_orig_mod.", ""): weight for name, weight in core.named_parameters()}
    return {name if name == HEAD else f"model.{name}": weight for name, weight in plain.items()}


def _fitting(core: GPT, config: GPTConfig, stored: dict[str, Any]) -> dict[str, Any]:
    """Drop the head if it is tied to the embedding: some tools write the shared weight twice."""
    return {name: x for name, x in stored.items() if name != HEAD or not (config.tied and core.config.tied)}


def _stored(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Return lazy slices of all tensors of a folder; no values are read yet."""
    opened = _safetensors()
    names: Iterable[str] = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        names = _listed(folder / INDEX)
    found: dict[str, Any] = {}
    for name in names:
        file = folder / name
        if not file.exists():
            raise ValueError(f"{file}: there is none; expected {WEIGHTS}, or {INDEX} and all files that it names")
        try:
            tensors = files.enter_context(opened.safe_open(file, "pt"))
        except (opened.SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a complete safetensors file ({error}); copy it again") from None
        found |= {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118 it is not a mapping
    return {key: value for key, value in found.items() if not key.endswith("rotary_emb.inv_freq")}  # of old versions


def _listed(file: Path) -> list[str]:
    """Return the weight files of an index: plain names, which may be symlinks, as in the hub's cache."""
    named = read_object(file, WRITTEN).get("weight_map", {})
    if not isinstance(named, dict) or not all(map(is_plain, named.values())):
        raise ValueError(f"{file}: weight_map must map each tensor to the plain name of a file in this folder")
    return sorted(set(named.values()))


def _check(weights: Mapping[str, Tensor], stored: Mapping[str, Any], folder: Path) -> None:
    """Raise a ValueError that names all tensors which do not fit the model."""
    problems = {
        "missing": [name for name in weights if name not in stored],
        "unexpected": [name for name in stored if name not in weights],
        "of another shape": [
            f"{name} ({stored[name].get_shape()}, in the model {list(weight.shape)})"
            for name, weight in weights.items()
            if name in stored and stored[name].get_shape() != list(weight.shape)
        ],
        "of a dtype that GPT cannot read": [
            f"{name} ({tensor.get_dtype()})"
            for name, tensor in stored.items()
            if tensor.get_dtype() not in _STORED_DTYPES
        ],
    }
    found = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
    if found:
        raise ValueError(f"{folder}: its tensors do not fit the model: {found}. GPT(read_config(folder)) has its sizes")


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _gather_weight(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the full weight on every rank."""
    local = weight.detach() if dtype is None else weight.detach().to(dtype)
    if not isinstance(local, DTensor):
        return local
    placed: Any = local.to(local.device_mesh.device_type)  # NCCL cannot gather offloaded shards from the host
    return placed.full_tensor()


def _assign_files(sizes: Mapping[str, int], max_gb: float) -> dict[str, list[str]]:
    """Return the tensors of each file, in order.

    >>> _assign_files({"a": 3, "b": 4, "c": 9, "d": 1}, 8e-9)
    {'model-00001-of-00003.safetensors': ['a', 'b'], 'model-00002-of-00003.safetensors': ['c'], ...}
    """
    if not max_gb > 0:
        raise ValueError(f"max_gb={max_gb}: expected more than 0")
    parts: list[list[str]] = []
    free_bytes = 0.0
    for name, size in sizes.items():
        if not parts or size > free_bytes:
            parts.append([])
            free_bytes = max_gb * 1e9
        parts[-1].append(name)
        free_bytes -= size
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _begin(draft: Path, folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder}: it is there and not empty; name another folder, or remove it first")
    draft.mkdir(parents=True)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _on_first(do: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a function on rank 0; if it fails every rank raises, so that none hangs in the next collective."""
    failed: Exception | None = None
    if _is_first():
        try:
            do(*args, **kwargs)
        except Exception as error:
            failed = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        reason = [None if failed is None else f"{type(failed).__name__}: {failed}"]
        dist.broadcast_object_list(reason, src=0)
        if failed is None and reason[0] is not None:
            raise RuntimeError(f"save_pretrained: rank 0 could not write: {reason[0]}")
    if failed is not None:
        raise failed
