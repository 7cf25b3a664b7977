"""What a model must not have for its tokens to be sharded. Each is refused with what to do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from meshflash.integrations._replicas import refuse_convolutions, refuse_dropout
from meshflash.integrations.transformers.hooks import is_rotary
from meshflash.integrations.transformers.llama4 import ATTENTION as LLAMA4

#: Kinds of layers that attend, in a config's `layer_types`. Others mix tokens by convolutions or recurrences.
ATTENTION_LAYERS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
#: Parts of the names of dropout probabilities that are of attention weights.
ATTENTION_DROPOUT = ("attention", "attn", "attentions")
#: Parts of the names of other dropouts in modules that attend.
HIDDEN_DROPOUT = ("resid", "out", "proj", "hidden", "lora")
#: A part of the names of options of a head for several choices, which models of sequences of tokens do not use.
UNUSED = "summary_"
#: Parts of the names of options that change hidden values at random.
RANDOM = ("drop", "jitter")
#: By this name a module looks up the attention function that its config names.
LOOKUP = "ALL_ATTENTION_FUNCTIONS"


def check_model(model: nn.Module, parts: list[nn.Module], configs: list[Any], lists: list[nn.ModuleList]) -> None:
    """Raise ValueError if layers mix tokens outside of attention, or do not look up attention by name.

    Args:
        model: The model.
        parts: The modules whose tokens are sharded.
        configs: The configs of these modules.
        lists: The lists of layers in them.
    """
    name = type(model).__name__
    for config in configs:
        kinds = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
        if kinds:
            raise ValueError(f"{name} has layers of type {', '.join(kinds)}, which mix tokens outside of attention")
    for layers in lists:
        for path, layer in layers.named_children():
            if not any(LOOKUP in _names_in_forward(module) for module in layer.modules()):
                raise ValueError(
                    f"{name}: {type(layer).__name__} {path} does not look up its attention by name, so it cannot be "
                    "replaced"
                )
        if parts == [model] and any(is_rotary(module) for module in layers.modules()):
            raise ValueError(f'{name}: layers compute rotary embeddings themselves; pass cut="layers"')
    if parts == [model] and not any(is_rotary(module) for module in model.modules()):
        raise ValueError(
            f'{name}: it has no rotary embeddings, and may take positions from ids or padding; pass cut="layers"'
        )
    for part in parts:
        for module in part.modules():
            names = _names_in_forward(module)
            if LOOKUP in names and "arange" in names and type(module).__name__ != LLAMA4:
                raise ValueError(
                    f"{name}: {type(module).__name__} counts the tokens it gets (torch.arange), which are a part of "
                    "the sequence, so this model is not supported"
                )
    for part in parts:
        refuse_convolutions(name, part.named_modules())


def check_call(model: nn.Module, given: Mapping[str, Any], parts: list[nn.Module], configs: list[Any]) -> None:
    """Raise ValueError if a call asks for what sharded sequences do not have.

    Args:
        model: The model.
        given: The keyword arguments of the call.
        parts: The modules whose tokens are sharded.
        configs: The configs of these modules.
    """
    name = type(model).__name__
    if given.get("past_key_values") is not None or given.get("use_cache"):
        raise ValueError("use_cache: a cache is not supported while sequences are sharded; pass use_cache=False")
    if given.get("return_dict") is False:
        raise ValueError("return_dict=False: outputs are needed by name; leave it out")
    if parts == [model] and isinstance(given.get("logits_to_keep"), Tensor | int) and given["logits_to_keep"] != 0:
        raise ValueError(
            "logits_to_keep counts tokens of the whole sequence, of which a rank holds a part; leave it out"
        )
    if given.get("output_attentions"):
        raise ValueError("output_attentions=True: attention weights never exist; leave it out")
    if given.get("output_router_logits", any(getattr(config, "output_router_logits", False) for config in configs)):
        raise ValueError(
            f"{name}: output_router_logits=True adds a loss over all tokens together, which is not supported; set it "
            "to False"
        )
    _check_dropout(model, parts, configs)


def _check_dropout(model: nn.Module, parts: list[nn.Module], configs: list[Any]) -> None:
    """Raise ValueError if a model in training draws numbers for hidden values: others than one device would."""
    if not model.training:
        return
    for config in configs:
        for key, value in vars(config).items():
            if not any(word in key for word in RANDOM) or any(word in key for word in (*ATTENTION_DROPOUT, UNUSED)):
                continue
            if isinstance(value, int | float) and value > 0:
                raise ValueError(
                    f"{type(model).__name__}: {key}={value} draws random numbers for hidden values, and other ones "
                    "than on one device; set it to 0. Dropout of attention weights is supported"
                )
    for part in parts:
        modules = dict(part.named_modules())
        refuse_dropout(type(model).__name__, ((p, m) for p, m in modules.items() if not _is_of_weights(p, modules)))


def _is_of_weights(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a module drops attention weights: it is a part of a module that looks up its attention by name."""
    parent, _, name = path.rpartition(".")
    is_attention = parent in modules and LOOKUP in _names_in_forward(modules[parent])
    return is_attention and not any(word in name for word in HIDDEN_DROPOUT)


def _names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the global names and attributes that a module's forward uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code.co_names if code is not None else ()
