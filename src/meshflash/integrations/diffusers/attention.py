"""Streams of tokens that ranks share, and the attention over them in place of torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.integrations.diffusers.blocks import Stream, Tokens
from meshflash.integrations.sdpa import call_with_tokens_first, check_shapes
from meshflash.sharding import shard


@dataclass(frozen=True)
class Streams:
    """The streams of one forward.

    Args:
        mesh: The ranks.
        image: The layout of the image or video tokens.
        text: The layout of the text tokens; None if they are not cut.
        joint: The layout of both, as each rank concatenates them. Positions are image first, so that padding of the
            text is at the end.
    """

    mesh: Any
    image: Layout
    text: Layout | None = None
    joint: Layout | None = None

    @staticmethod
    def of(mesh: Any, image: Layout, text: Layout, order: tuple[Stream, ...]) -> Streams:
        """Return two streams that attend jointly.

        Args:
            mesh: The ranks.
            image: The layout of the image or video tokens.
            text: The layout of the text tokens.
            order: The order in which attention concatenates them.
        """
        start = image.tokens
        words = [tuple(range(x.start + start, x.stop + start, x.step) for x in held) for held in text.ranges]
        both = zip(image.ranges, words, strict=True)
        joint = Layout(tuple((*t, *i) if order[0] == "text" else (*i, *t) for i, t in both))
        return Streams(mesh, image, text, joint)

    def cut(self, name: str, x: Any, tokens: Tokens | tuple[Tokens, ...], order: tuple[Stream, ...]) -> Any:
        """Return this rank's part of an input with a value for each token.

        Args:
            name: The name of the input, for errors.
            x: A tensor, None, or a tuple or list of them.
            tokens: Where the tokens are.
            order: The order in which "joint" inputs have the streams.
        """
        if isinstance(x, list | tuple):
            each = tokens if isinstance(tokens, tuple) else (tokens,) * len(x)
            return type(x)(self.cut(name, y, t, order) for y, t in zip(x, each, strict=True))
        if x is None:
            return None
        if not isinstance(x, Tensor) or isinstance(tokens, tuple):
            raise ValueError(
                f"{name}: expected {'a tuple' if isinstance(tokens, tuple) else 'a tensor'}, got {type(x)}"
            )
        if tokens.ndim not in (None, x.ndim) or x.shape[tokens.dim] == 1:
            return x
        streams = order if tokens.stream == "joint" else (tokens.stream,)
        layouts = [self.image if stream == "image" else self._text for stream in streams]
        lengths = [layout.tokens for layout in layouts]
        if x.shape[tokens.dim] != sum(lengths):
            raise ValueError(
                f"{name}: {x.shape[tokens.dim]} tokens in dimension {tokens.dim}; expected {sum(lengths)}, those of "
                f"{' and '.join(streams)}"
            )
        parts = x.split(lengths, tokens.dim)
        own = [shard(part, layout, self.mesh, dim=tokens.dim) for part, layout in zip(parts, layouts, strict=True)]
        return own[0] if len(own) == 1 else torch.cat(own, tokens.dim)

    @property
    def _text(self) -> Layout:
        assert self.text is not None
        return self.text


def padding(name: str, mask: Any, streams: Streams, stream: Stream, order: tuple[Stream, ...]) -> Mask | None:
    """Return the rule that hides the padding of the text from all queries, or None if there is none.

    Args:
        name: The name of the input, for errors.
        mask: Whether each token counts: a boolean tensor `[batch, tokens]` or `[batch, 1, 1, tokens]`.
        streams: The streams.
        stream: The stream that the mask is about.
        order: The order in which a mask of both has them.

    Raises:
        ValueError: The mask is something else than padding on the right of the text.
    """
    image, text = streams.image.tokens, streams._text.tokens
    expected = text if stream == "text" else image + text
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        what = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"{name}: expected a boolean tensor that is False for padding, got {what}")
    shape = list(mask.shape)
    if mask.ndim == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    if mask.ndim != 2 or mask.shape[1] != expected:
        raise ValueError(
            f"{name}: {shape} is not supported; expected [batch, {expected}] or [batch, 1, 1, {expected}], which is "
            "False for padding on the right of the text. Masks of pairs are not supported"
        )
    counts = mask.cpu()
    if stream == "joint":
        parts = dict(zip(order, counts.split([text, image] if order[0] == "text" else [image, text], 1), strict=True))
        counts = parts["text"]
        if not bool(parts["image"].all()):
            raise ValueError(f"{name}: image tokens are hidden; only padding of the text is supported")
    if bool(counts.all()):
        return None
    seen = counts.sum(1)
    if bool((counts != (torch.arange(text) < seen[:, None])).any()):
        raise ValueError(f"{name}: only padding on the right of the text is supported")
    lengths = [[image + int(n), text - int(n)] for n in seen]
    if all(row == lengths[0] for row in lengths):  # also a mask of one row for all
        return Mask.documents([image + text, 0], k_lengths=lengths[0])
    return Mask.documents([[image + text, 0]] * len(lengths), k_lengths=lengths)


class Intercept(TorchFunctionMode):
    """Call a function in place of torch's `scaled_dot_product_attention`, while a module runs.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.num_calls = function, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.num_calls += 1
            return self.function(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    name: str,
    **arguments: Any,
) -> Tensor:
    """Compute attention over the ranks with the signature of torch's `scaled_dot_product_attention`.

    Args:
        query: This rank's queries, `[batch, heads, tokens, dim]`.
        key: This rank's keys.
        value: This rank's values.
        attn_mask: Refused: the rule is in `arguments`.
        dropout_p: Refused: the seed of other ranks is not known here.
        is_causal: Refused: the streams have no common order.
        scale: The factor that multiplies all scores.
        enable_gqa: Whether there may be fewer key heads.
        name: The name of the attention processor, for errors.
        arguments: Arguments of `meshflash.attention`.
    """
    from meshflash.api import attention

    if attn_mask is not None:
        raise ValueError(f"{name}: passes an attention mask of {list(attn_mask.shape)}, which is not supported")
    if dropout_p or is_causal:
        raise ValueError(f"{name}: dropout_p={dropout_p}, is_causal={is_causal}: dropout and causal are not supported")
    check_shapes(query, key, value, enable_gqa)
    return call_with_tokens_first(partial(attention, scale=scale, **arguments), query, key, value)
