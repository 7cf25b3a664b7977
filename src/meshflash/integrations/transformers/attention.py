"""The attention function and the mask function that Transformers calls by name, and what they share.

The mask function returns a `SequenceMask`: a rule in place of a matrix, with the ranks that share the sequence. Models
hand it to every layer as `attention_mask`. So nothing global is read in a layer: activation checkpointing may run it
again in another thread, and several micro-batches may be under way.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshflash.api import attention, flash_attention
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.groups import group_of
from meshflash.integrations.transformers.llama4 import scale_queries
from meshflash.integrations.transformers.masks import Tokens, padding, translate

#: The name under which Transformers finds both functions. It takes names that contain "flash", "sdpa" or "flex" for
#: its own.
NAME = "mesh_attn"

#: Keyword arguments of an attention call that need nothing from us: the mask says it, or it is for other parts.
IGNORED_ARGUMENTS = frozenset(
    (
        "position_ids",
        "use_cache",
        "output_hidden_states",
        "return_dict",
        "num_items_in_batch",
        "sliding_window",
        "is_causal",
        "deterministic",
        "encoder_hidden_states",
        "shift_labels",
        "logits_to_keep",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    )
)

#: The largest difference of ranks' hidden states before they are cut, relative to their norm.
SAME = 1e-2
#: Seeds of dropout are below this.
MAX_SEED = 1 << 62


@dataclass(frozen=True)
class Sequence:
    """A sequence that ranks share.

    Args:
        mesh: The ranks.
        layout: The positions of each rank.
        schedule: The schedule of attention over them.
    """

    mesh: Any
    layout: Layout
    schedule: str


def sequence_of(mesh: Any, layout: Layout | str, schedule: str, tokens: int, documents: Mask | None) -> Sequence:
    """Return the sequence of a batch, or raise ValueError if a rank would hold no token.

    Args:
        mesh: The ranks.
        layout: The layout or its name. "auto" asks `Layout.auto`: zigzag, or balanced for packed documents.
        schedule: The schedule of attention.
        tokens: The number of tokens.
        documents: The packed documents, or None.
    """
    from meshflash.parallel.step import resolve_layout

    mask = Mask.causal() if documents is None else documents & Mask.causal()
    ranks = group_of(mesh)[2]
    found = resolve_layout(layout, mask, tokens, ranks)
    if 0 in found.lengths:
        raise ValueError(f"{tokens} tokens for {ranks} ranks: every rank needs at least one")
    return Sequence(mesh, found, schedule)


@dataclass(frozen=True)
class SequenceMask:
    """What the mask function returns, and every layer gets as `attention_mask`.

    Args:
        rule: The keys that each query may see, by positions in the whole sequence.
        queries: The sequence of the queries; None is one that this device holds whole.
        keys: The sequence of the keys in cross-attention; None is that of the queries.
        seed: The seed of dropout in this forward, equal on all ranks. None is a forward inside of a backward.
    """

    rule: Mask
    queries: Sequence | None
    keys: Sequence | None = None
    seed: int | None = 0


@dataclass(eq=False)
class Stack:
    """A stack of layers whose tokens are sharded. `context_parallel` makes it; masks find it by the model's config.

    Args:
        mesh: The ranks that share the sequence.
        layout: The layout or its name, or "auto".
        schedule: The schedule of attention.
        cuts_inputs: Whether token ids are cut before the model. Else hidden states are cut before the first layer.
        memory: The stack whose output the cross-attention of this one reads.
        sequence: The sequence of the forward under way.
        documents: The documents of the forward under way: packed ones, and where inputs are cut padding too.
        positions: Its position ids of all tokens, where inputs are cut.
        is_called: Whether a forward of the model is under way.
        is_suspended: Whether a forward on one device is under way.
        seed: The seed of dropout in the forward under way.
        handles: The hooks to remove in the end.
        compared: Whether gradients were recorded in the calls whose hidden states were compared.
    """

    mesh: Any
    layout: Layout | str
    schedule: str
    cuts_inputs: bool
    memory: Stack | None = None
    sequence: Sequence | None = None
    documents: Mask | None = None
    positions: Tensor | None = None
    is_called: bool = False
    is_suspended: bool = False
    seed: int | None = 0
    handles: list[Any] = field(default_factory=list)
    compared: set[bool] = field(default_factory=set)

    def share(self, tokens: int, documents: Mask | None) -> Sequence:
        """Return the sequence of this forward, with a layout that all of its masks share.

        Args:
            tokens: The number of tokens.
            documents: The packed documents, by which a balanced layout is built.
        """
        if self.sequence is None or self.sequence.layout.tokens != tokens:
            self.sequence = sequence_of(self.mesh, self.layout, self.schedule, tokens, documents)
        return self.sequence

    @torch.no_grad()
    def check_same(self, name: str, hidden: Tensor) -> None:
        """Raise ValueError on all ranks if they have other hidden states, in the first call of training and of eval.

        Args:
            name: The class of the first layer.
            hidden: Its hidden states, of all tokens.
        """
        mode = torch.is_grad_enabled()
        if mode in self.compared or self.mesh.size() == 1:
            return
        self.compared.add(mode)
        flat = hidden.detach().double().flatten()
        own = torch.stack([(flat * torch.arange(len(flat), device=flat.device).cos()).sum(), flat.square().sum()])
        every = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(every, own, group=self.mesh.get_group())
        sums, squares = torch.stack(every).T
        if not float(sums.max() - sums.min()) <= SAME * float(squares.max()) ** 0.5:
            raise ValueError(
                f"{NAME}: ranks have other inputs of {name}: the model draws random numbers before its layers, so this "
                "is not supported"
            )


#: Stacks by the identity of their config, with a reference that tells whether the config is still that object.
_stacks: dict[int, tuple[weakref.ref[Any], Stack]] = {}


def attach(config: Any, stack: Stack) -> None:
    """Make the mask function use a stack for a config, or raise ValueError if another model has that config.

    Args:
        config: The config object of the stack's model.
        stack: The stack.
    """
    key = id(config)
    if key in _stacks and _stacks[key][0]() is config:
        raise ValueError(
            "context_parallel: another model that is sharded has the same config object; give each model its own, for "
            "example by copy.deepcopy(config)"
        )
    _stacks[key] = weakref.ref(config, lambda _: _stacks.pop(key, None)), stack


def detach(config: Any, stack: Stack) -> None:
    """Undo `attach`, unless the config has another stack by now.

    Args:
        config: The config object.
        stack: The stack.
    """
    if _stacks.get(id(config), (None, None))[1] is stack:
        _stacks.pop(id(config))


def stack_of(config: Any) -> Stack:
    """Return the stack of a config, or raise ValueError.

    Args:
        config: The config object of a model.
    """
    reference, stack = _stacks.get(id(config), (None, None))
    if stack is None or reference is None or reference() is not config:
        raise ValueError(
            f"{NAME}: call context_parallel(model, mesh) on this model first; a copy of a model is another"
        )
    return stack


def register() -> None:
    """Register both functions with Transformers. Nothing of Transformers is changed."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, mesh_attention)
    AttentionMaskInterface.register(NAME, mesh_mask)


def mesh_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    config: Any,
    **_: Any,
) -> SequenceMask:
    """Return the mask of a model's layers, as `AttentionMaskInterface` asks for it.

    Args:
        batch_size: The number of batch rows.
        q_length: The number of queries; those of this rank where inputs are cut.
        kv_length: The number of keys.
        q_offset: The position of the first query behind cached keys.
        kv_offset: The position of the first key.
        mask_function: The function of pairs that defines the mask.
        attention_mask: Whether each key counts, `[batch, keys]`.
        config: The config object of the model, by which the stack is found.
    """
    stack = stack_of(config)
    if not (stack.is_called or stack.is_suspended):
        raise ValueError(
            f"{NAME}: the model whose sequences are sharded was not called: call it, not a part of it, and not another "
            "model with the same config object"
        )
    if isinstance(q_offset, Tensor) or q_offset or kv_offset:
        raise ValueError(f"{NAME}: keys of a cache are not supported; pass use_cache=False")
    if stack.cuts_inputs and not stack.is_suspended:
        rule = translate(mask_function, Tokens(q_length, kv_length, local=True))
        return SequenceMask(
            rule if stack.documents is None else rule & stack.documents, stack.sequence, seed=stack.seed
        )
    rule = translate(mask_function, Tokens(q_length, kv_length))
    is_cross = stack.memory is not None and rule == Mask.full()  # the decoder's own attention is causal
    if stack.documents is not None and not is_cross and not rule.has_documents:
        rule &= stack.documents  # some models pass no positions to their masks, which then miss packed documents
    hidden = padding(attention_mask, q_length)
    if hidden is not None:
        rule &= hidden
    if stack.is_suspended:
        return SequenceMask(rule, None, seed=stack.seed)
    packed = rule if hidden is None and rule.has_documents else None
    queries = stack.share(q_length, None if is_cross else packed)
    keys = None
    if is_cross:
        assert stack.memory is not None
        keys = stack.memory.sequence
        if keys is None or keys.layout.tokens != kv_length:
            raise ValueError(
                f"{NAME}: {kv_length} keys, but the stack that cross-attention reads has other tokens. A model whose "
                "encoder and decoder share a config, and whose encoder makes a mask, is not supported"
            )
    return SequenceMask(rule, queries, keys, stack.seed)


def mesh_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute attention as `AttentionInterface` asks for it.

    Args:
        module: The attention module.
        query: This rank's queries, `[batch, heads, tokens, dim]`.
        key: This rank's keys.
        value: This rank's values.
        attention_mask: What `mesh_mask` returned.
        scaling: The factor that multiplies all scores.
        dropout: The probability of dropping a pair.
        softcap: The bound of the scores.
        s_aux: The sink logits, `[heads]`.
        arguments: What else the model passes; what is not known is refused.

    Returns:
        The output, `[batch, tokens, heads, dim]`, and None in place of attention weights.
    """
    if arguments.get("output_attentions"):
        raise ValueError(f"{NAME}: output_attentions=True is not supported: no weights exist; leave it out")
    unknown = sorted(n for n, x in arguments.items() if x is not None and x is not False and n not in IGNORED_ARGUMENTS)
    if unknown:
        raise ValueError(
            f"{NAME}: {type(module).__name__} passes {', '.join(unknown)}, which meshflash does not know; ignoring it "
            "could be wrong, so this model is not supported"
        )
    mask = attention_mask
    if mask is None:
        mask = _mask_of(module, query.shape[2] != key.shape[2])
    if not isinstance(mask, SequenceMask):
        raise ValueError(
            f"{NAME}: attention_mask is a {type(mask).__name__}; pass [batch, tokens] or none to the model, so that "
            "Transformers asks for the mask"
        )
    features: dict[str, Any] = dict(mask=mask.rule, scale=scaling, softcap=softcap, sink_logits=s_aux)
    if dropout:
        layer = getattr(module, "layer_idx", None)
        if layer is None or attention_mask is None:  # two layers, or a layer that runs again, would draw other numbers
            raise ValueError(
                f"{NAME}: attention dropout of {type(module).__name__} is not supported, because it has no layer_idx "
                "or its model makes no mask; set it to 0"
            )
        if mask.seed is None:
            raise ValueError(
                f"{NAME}: attention dropout is not supported where a checkpoint runs the whole model again, with other "
                "numbers; checkpoint its layers, by model.gradient_checkpointing_enable()"
            )
        features.update(dropout=dropout, seed=(mask.seed + 0x9E3779B97F4A7C15 * (layer + 1)) % MAX_SEED)
    own = mask.queries
    if own is not None:
        query = scale_queries(module, query, own.layout, group_of(own.mesh)[1])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if own is None:
        return flash_attention(q, k, v, **features), None
    k_layout = None if mask.keys is None else mask.keys.layout
    out = attention(q, k, v, mesh=own.mesh, layout=own.layout, k_layout=k_layout, schedule=own.schedule, **features)
    return out, None


def _mask_of(module: nn.Module, has_other_keys: bool) -> SequenceMask:
    """Return the mask of a module whose model makes none, as Whisper's encoder."""
    stack: Stack | None = getattr(module, "_meshflash_stack", None)
    rule = Mask.causal() if getattr(module, "is_causal", False) else Mask.full()
    if stack is None or stack.is_suspended:
        return SequenceMask(rule, None, seed=0 if stack is None else stack.seed)
    is_cross = has_other_keys or getattr(module, "_meshflash_is_cross", False)
    keys = None
    if is_cross:
        rule = Mask.full()
        keys = None if stack.memory is None else stack.memory.sequence
        if keys is None:
            raise ValueError(f"{NAME}: {type(module).__name__} attends to a sequence that is not sharded")
    return SequenceMask(rule, stack.sequence, keys, stack.seed)


def shard_tree(x: Any, sequence: Sequence, dim: int) -> Any:
    """Return tensors with this rank's tokens; tensors without the sequence's tokens in `dim` stay as they are.

    Args:
        x: A tensor, or tuples and lists of them.
        sequence: The sequence.
        dim: The dimension of the tokens.
    """
    from meshflash.sharding import shard

    if isinstance(x, Tensor):
        has_tokens = x.ndim >= (-dim if dim < 0 else dim + 1) and x.shape[dim] == sequence.layout.tokens
        return shard(x, sequence.layout, sequence.mesh, dim=dim) if has_tokens else x
    if isinstance(x, list | tuple):
        return type(x)(shard_tree(y, sequence, dim) for y in x)
    return x


def draw_seed(generator: torch.Generator) -> int:
    """Return the next seed of dropout.

    Args:
        generator: A generator with the same state on all ranks.
    """
    return int(torch.randint(MAX_SEED, (), generator=generator))
