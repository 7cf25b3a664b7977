"""The models and blocks of diffusers that are known: what each input of a block is, and how attention joins streams.

A block has a stream of image (or video) tokens, and a stream of text tokens. With joint attention both are cut over the
ranks, each on its own. With cross-attention image tokens are cut, and every rank attends to all text tokens, which
needs no communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

Stream = Literal["image", "text", "joint"]

#: Both streams, in the order in which attention concatenates them.
TEXT_FIRST: tuple[Stream, ...] = ("text", "image")
IMAGE_FIRST: tuple[Stream, ...] = ("image", "text")


@dataclass(frozen=True)
class Tokens:
    """Where the tokens are in an input that has a value for each token, such as a rotary embedding.

    Args:
        stream: The stream of the tokens; "joint" is both, as attention concatenates them.
        dim: The dimension of the tokens. A tensor with one element there holds for all tokens and is not cut.
        ndim: The number of dimensions that a tensor with a value for each token has. Others are not cut. None is any.
    """

    stream: Stream
    dim: int
    ndim: int | None = None


@dataclass(frozen=True)
class KeyMask:
    """The input that says which tokens are padding.

    Args:
        name: The name of the input, or `outer.inner` for an entry of a dict.
        stream: The stream that it is about.
    """

    name: str
    stream: Stream


@dataclass(frozen=True)
class Block:
    """What a class of blocks takes and returns.

    Args:
        processors: The attention processors that are known.
        returns: The streams that its forward returns, in order.
        order: How attention concatenates the streams. Empty means cross-attention to all text.
        tokens: The inputs with a value for each token; a tuple describes the elements of a tuple.
        whole: The inputs that do not depend on the token.
        mask: The input that says which tokens are padding.
        joins_itself: Whether the block concatenates the streams before it calls its attention.
    """

    processors: frozenset[str]
    returns: tuple[Stream, ...]
    order: tuple[Stream, ...] = ()
    tokens: Mapping[str, Tokens | tuple[Tokens, ...]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    mask: KeyMask | None = None
    joins_itself: bool = False

    @property
    def is_joint(self) -> bool:
        """Whether image and text tokens attend jointly."""
        return bool(self.order)


_FLUX: dict[str, Any] = dict(
    processors=frozenset({"FluxAttnProcessor"}),
    returns=("text", "image"),
    order=TEXT_FIRST,
    tokens={"image_rotary_emb": Tokens("joint", 0)},
    whole=frozenset({"temb"}),
    mask=KeyMask("joint_attention_kwargs.attention_mask", "joint"),
)
_HUNYUAN: dict[str, Any] = dict(
    processors=frozenset({"HunyuanVideoAttnProcessor2_0"}),
    returns=("image", "text"),
    order=IMAGE_FIRST,
    # their forwards take further arguments for blocks of another class, and do not use them
    whole=frozenset({"temb", "args"}),
    mask=KeyMask("attention_mask", "joint"),
)

#: Classes of blocks by name.
BLOCKS: dict[str, Block] = {
    "FluxTransformerBlock": Block(**_FLUX),
    "FluxSingleTransformerBlock": Block(**_FLUX, joins_itself=True),
    "WanTransformerBlock": Block(
        processors=frozenset({"WanAttnProcessor"}),
        returns=("image",),
        tokens={"rotary_emb": Tokens("image", 1), "temb": Tokens("image", 1, ndim=4)},
        whole=frozenset({"encoder_hidden_states"}),
    ),
    "JointTransformerBlock": Block(
        processors=frozenset({"JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"}),
        returns=("text", "image"),
        order=IMAGE_FIRST,
        whole=frozenset({"temb"}),
    ),
    "HunyuanVideoTransformerBlock": Block(**_HUNYUAN, tokens={"freqs_cis": Tokens("image", 0)}),
    "HunyuanVideoSingleTransformerBlock": Block(**_HUNYUAN, tokens={"image_rotary_emb": Tokens("image", 0)}),
    "QwenImageTransformerBlock": Block(
        processors=frozenset({"QwenDoubleStreamAttnProcessor2_0"}),
        returns=("text", "image"),
        order=TEXT_FIRST,
        tokens={
            "image_rotary_emb": (Tokens("image", 0), Tokens("text", 0)),
            "modulate_index": Tokens("image", 1),
        },
        whole=frozenset({"temb"}),
        mask=KeyMask("encoder_hidden_states_mask", "text"),
    ),
    "CogVideoXBlock": Block(
        processors=frozenset({"CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"}),
        returns=("image", "text"),
        order=TEXT_FIRST,
        tokens={"image_rotary_emb": Tokens("image", 0)},
        whole=frozenset({"temb"}),
    ),
    "LTXVideoTransformerBlock": Block(
        processors=frozenset({"LTXVideoAttnProcessor"}),
        returns=("image",),
        tokens={"image_rotary_emb": Tokens("image", 1), "temb": Tokens("image", 1)},
        whole=frozenset({"encoder_hidden_states"}),
        mask=KeyMask("encoder_attention_mask", "text"),
    ),
}

#: The lists of blocks of each class of models, in the order in which they run.
MODELS: dict[str, tuple[str, ...]] = {
    "FluxTransformer2DModel": ("transformer_blocks", "single_transformer_blocks"),
    "WanTransformer3DModel": ("blocks",),
    "SD3Transformer2DModel": ("transformer_blocks",),
    "HunyuanVideoTransformer3DModel": ("transformer_blocks", "single_transformer_blocks"),
    "QwenImageTransformer2DModel": ("transformer_blocks",),
    "CogVideoXTransformer3DModel": ("transformer_blocks",),
    "LTXVideoTransformer3DModel": ("transformer_blocks",),
}


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module, Block]]:
    """Return the blocks of a model in the order in which they run, each with its path and description.

    Args:
        model: The model.

    Raises:
        ValueError: The model, or a class of its blocks, is not known.
    """
    name = _known_class(model, MODELS)
    if name is None:
        raise ValueError(
            f"context_parallel: {type(model).__name__} is not supported; expected one of {', '.join(MODELS)}, without "
            "a forward of its own. Pass the model inside of DDP, PEFT or torch.compile"
        )
    found = []
    for path in MODELS[name]:
        for number, block in getattr(model, path).named_children():
            kind = _known_class(block, BLOCKS)
            if kind is None:
                raise ValueError(
                    f"context_parallel: {path}.{number} is a {type(block).__name__}, which is not supported; blocks "
                    f"that are: {', '.join(BLOCKS)}"
                )
            found.append((f"{path}.{number}", block, BLOCKS[kind]))
    if not found:
        raise ValueError(f"context_parallel: {name} has no blocks")
    return found


def attention_modules(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a block whose attention is computed by a processor, with their paths.

    Args:
        block: The block.
    """
    return [(path, module) for path, module in block.named_modules() if hasattr(module, "processor")]


def is_of_diffusers(kind: type) -> bool:
    """Return whether a class is defined by diffusers.

    Args:
        kind: The class.
    """
    return kind.__module__.partition(".")[0] == "diffusers"


def _known_class(module: nn.Module, names: Mapping[str, object]) -> str | None:
    """Return which class of diffusers computes a module's forward: FSDP2 and users make subclasses."""
    kinds: tuple[Any, ...] = type(module).__mro__
    for kind in kinds:
        if kind.__name__ in names and is_of_diffusers(kind):
            return str(kind.__name__) if type(module).forward is kind.forward else None
    return None
