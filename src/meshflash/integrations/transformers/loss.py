"""`tile_loss`: the loss of a causal language model without the logits of all tokens at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshflash.integrations.transformers.hooks import arguments_of
from meshflash.parallel.loss import IGNORE_INDEX, MAX_LOGITS, cross_entropy_sum

#: The largest difference of the first token's logits to the model's, relative to the largest one.
TOLERANCE = 0.05


def is_next_token_loss(function: Any) -> bool:
    """Return whether a loss function of a model is that of the next token, which shifts labels.

    Args:
        function: The loss function.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    return function is ForCausalLMLoss or isinstance(getattr(function, "__self__", None), TiledLoss)


def tile_loss(model: nn.Module, tokens: int | None = None) -> TiledLoss:
    """Compute the loss of a causal language model by tiles of tokens, in place.

    The logits of a tile exist at a time, and the model's outputs have none. A call without labels is as before.

    Args:
        model: The model, a `PreTrainedModel` whose forward takes labels. Sharded by `context_parallel` or not.
        tokens: The number of tokens in a tile; by default the number that makes 134 million logits.

    Returns:
        A `TiledLoss`, whose `remove` undoes it.
    """
    return TiledLoss(model, tokens)


class TiledLoss:
    """A model with a tiled loss; `tile_loss` makes it.

    The head gets the hidden states of each row's first token only. The loss function of the model then computes the
    rest from all hidden states, and compares the logits of these tokens with the model's in its first call.

    Args:
        model: The model.
        tokens: The number of tokens in a tile.
    """

    def __init__(self, model: nn.Module, tokens: int | None) -> None:
        if tokens is not None and tokens < 1:
            raise ValueError(f"tile_loss: tokens={tokens}: expected at least 1")
        get_head = getattr(model, "get_output_embeddings", None)
        head = None if get_head is None else get_head()
        if "_loss_function" in vars(model):
            raise ValueError(f"tile_loss: {type(model).__name__} has another loss function already; remove it first")
        if not is_next_token_loss(getattr(model, "loss_function", None)) or not isinstance(head, nn.Module):
            raise ValueError(f"tile_loss: {type(model).__name__} is not a causal language model with a head of its own")
        if isinstance(head, FSDPModule):
            raise ValueError(
                "tile_loss: fully_shard the head together with the rest of the model, not on its own: ranks may have "
                "other numbers of tiles, and would wait for each other"
            )
        self.model: Any = model
        self._head: Any = head
        self._tokens = tokens
        self._hidden: Tensor | None = None
        self._is_active = self._was_called = self._is_checked = False
        model._loss_function = self._loss  # type: ignore[assignment]
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            head.register_forward_pre_hook(self._keep_hidden),
            model.register_forward_hook(self._after),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Undo `tile_loss`."""
        for handle in self._handles:
            handle.remove()
        del self.model._loss_function

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        given = arguments_of(model, args, kwargs)
        self._is_active = given.get("labels") is not None
        self._was_called, self._hidden = False, None
        if self._is_active and (given.get("logits_to_keep") or given.get("return_dict") is False):
            raise ValueError("tile_loss: logits_to_keep and return_dict=False are not supported with labels")

    def _keep_hidden(self, head: nn.Module, args: Any) -> Any:
        if not self._is_active or self._hidden is not None:
            return None
        self._hidden = args[0]
        return (args[0][:, :1], *args[1:])

    def _after(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if not self._is_active:
            return None
        if not self._was_called:
            raise ValueError(f"tile_loss: {type(model).__name__} does not compute its loss by self.loss_function")
        return type(outputs)(**{name: x for name, x in outputs.items() if name != "logits"})

    def _end(self, model: nn.Module, args: Any, outputs: Any) -> None:
        """End a forward, also one that raised an error."""
        self._is_active, self._hidden = False, None

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the loss as Transformers' `ForCausalLMLoss` does, from the hidden states of all tokens."""
        hidden = self._hidden
        if hidden is None:
            raise ValueError(f"tile_loss: {type(self.model).__name__} computed its loss without its head")
        self._was_called = True
        if not self._is_checked:
            self._check(logits, hidden)
            self._is_checked = True
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(hidden.device)
        if ignore_index != IGNORE_INDEX:
            shift_labels = shift_labels.masked_fill(shift_labels == ignore_index, IGNORE_INDEX)
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != IGNORE_INDEX).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(hidden.device)
        return self._sum(hidden, shift_labels) / num_items_in_batch

    def _sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over labels."""
        head, cap = self._head, self._cap()
        weight: Any = getattr(head, "weight", None)
        is_plain = type(head) is nn.Linear and head.bias is None and not isinstance(weight, DTensor) and cap is None
        if is_plain and not torch.is_autocast_enabled(hidden.device.type):
            return cross_entropy_sum(hidden * self._factor(), weight, labels, tokens=self._tokens)
        hidden, labels = hidden.flatten(0, 1), labels.reshape(-1)
        tokens = self._tokens or max(1, MAX_LOGITS // self.model.config.get_text_config().vocab_size)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for x, label in zip(hidden.split(tokens), labels.split(tokens), strict=True):
            total = total + checkpoint(self._tile, x, label, use_reentrant=False)
        return total

    def _tile(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self._logits(hidden)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum")

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden) * self._factor()
        cap = self._cap()
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _factor(self) -> float:
        """Return what the model multiplies its logits by."""
        config = self.model.config.get_text_config()
        return float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def _cap(self) -> float | None:
        """Return the softcap of the model's logits."""
        cap: float | None = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return cap

    @torch.no_grad()
    def _check(self, logits: Tensor, hidden: Tensor) -> None:
        """Raise ValueError if the model computes logits otherwise."""
        ours = self._logits(hidden[:, :1])
        error = float((ours - logits).abs().max() / logits.abs().max().clamp(min=1e-30)) if logits.numel() else 0.0
        if ours.shape != logits.shape or not error <= TOLERANCE:
            raise ValueError(
                f"tile_loss: {type(self.model).__name__} changes its logits in a way that meshflash does not know "
                f"(they differ by {error:.1e} of the largest)"
            )
