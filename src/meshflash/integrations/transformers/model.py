"""`context_parallel`: shard the sequences of a Transformers model over ranks, in place.

The ranks of the context axis look like replicas that were given the same batch. Each returns the loss of the whole
batch, and the mean of their gradients, which DDP and FSDP take anyway, is the gradient of one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.integrations._replicas import AveragesGradients, Replicas, arguments_of, check_mesh, difference
from meshflash.integrations.transformers.attention import NAME, Stack, attach, detach, draw_seed, register
from meshflash.integrations.transformers.batches import (
    KEY,
    BatchShard,
    check_padded_labels,
    packed_documents,
    shard_batch,
    shifted,
)
from meshflash.integrations.transformers.checks import check_call, check_model
from meshflash.integrations.transformers.hooks import hook_layers, hook_rotary_embeddings, is_rotary, join_outputs
from meshflash.integrations.transformers.loss import is_next_token_loss
from meshflash.integrations.transformers.release import check_release
from meshflash.sharding import shard

Cut = Literal["auto", "inputs", "layers"]

#: What lists of layers are called.
LAYER_LISTS = ("layers", "layer", "blocks", "block", "h")
#: Parts of the names of modules that attend to another sequence.
CROSS_ATTENTION = ("encoder_attn", "cross_attn", "crossattention")


def context_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    cut: Cut = "auto",
    layout: Layout | str = "auto",
    schedule: str = "auto",
    outputs: Literal["own", "whole"] = "own",
    average_gradients: bool | None = None,
    stacks: Sequence[str] | None = None,
    verify: bool = False,
) -> ContextParallel:
    """Shard the sequences of a Transformers model over the ranks of a mesh, in place.

    Give every rank the same batch, or its part from `shard_batch`. Each rank returns the loss of the whole batch.

    Args:
        model: The model, a `PreTrainedModel`.
        mesh: The ranks that share a sequence: a DeviceMesh of one dimension, such as `mesh["cp"]`.
        cut: Where the sequence is cut. "inputs" cuts token ids, positions and labels before the model, for
            decoder-only language models. "layers" cuts hidden states before the first layer of a stack and gathers
            them after the last one, so all other parts see the whole sequence: for encoders, images, audio and
            cross-attention. "auto" takes "inputs" for causal language models.
        layout: The layout, or its name. "auto" asks `Layout.auto`: zigzag, or balanced for packed documents.
        schedule: The schedule of attention, as in `meshflash.attention`.
        outputs: Whether logits and other outputs of tokens are this rank's own ("own") or gathered ("whole"). With
            cut="layers" they are whole in any case.
        average_gradients: Whether to average gradients over the ranks after each backward. None requires that DDP or
            FSDP does it, and refuses to train otherwise. False leaves it to the caller.
        stacks: The names of the lists of layers that are sharded with cut="layers". None finds them.
        verify: Whether to compare the outputs of the first call with those of one device, which must hold the whole
            sequence. This finds layers that mix tokens outside of attention.

    Returns:
        A `ContextParallel`, whose `remove` undoes it.
    """
    return ContextParallel(model, mesh, cut, layout, schedule, outputs, average_gradients, stacks, verify)


class ContextParallel(AveragesGradients):
    """A model whose sequences are sharded; `context_parallel` makes it.

    Args:
        model: The model.
        mesh: The ranks.
        cut: Where the sequence is cut.
        layout: The layout or its name.
        schedule: The schedule.
        outputs: "own" or "whole".
        average_gradients: Whether to average gradients here.
        stacks: The names of the lists of layers.
        verify: Whether to verify the first call.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        cut: Cut,
        layout: Layout | str,
        schedule: str,
        outputs: Literal["own", "whole"],
        average_gradients: bool | None,
        stacks: Sequence[str] | None,
        verify: bool,
    ) -> None:
        if not isinstance(model, transformers.PreTrainedModel):
            raise ValueError(
                f"context_parallel: expected a PreTrainedModel, got {type(model).__name__}; pass the model inside of "
                "DDP, PEFT or torch.compile"
            )
        check_mesh(mesh)
        if cut not in ("auto", "inputs", "layers"):
            raise ValueError(f'context_parallel: cut={cut!r}: expected "auto", "inputs" or "layers"')
        if outputs not in ("own", "whole"):
            raise ValueError(f'context_parallel: outputs={outputs!r}: expected "own" or "whole"')
        if getattr(model, "_meshflash", None) is not None:
            raise ValueError("context_parallel: this model is sharded already; call remove() on what the call returned")
        check_release(transformers.__version__, verify)
        register()
        self.model, self.mesh, self.outputs = model, mesh, outputs
        self._verify = verify
        self.cut = cut if cut != "auto" else ("inputs" if _is_causal_lm(model) else "layers")
        self._undo: list[Any] = []
        self._restore_loss: Any = None
        self._batch: BatchShard | None = None
        self._wanted: Any = None
        self._attached: list[tuple[Stack, Any]] = []
        self._is_removed = self._has_loss = False
        self._generator = torch.Generator().manual_seed(self._shared_seed())
        found = self._find_stacks(layout, schedule, stacks)
        lists = [layers for _, layers, _ in found]
        self._stacks: list[tuple[Stack, nn.Module, Any]] = list(found)
        if self.cut == "inputs":
            self._stacks = [(Stack(mesh, layout, schedule, True), model, model.config)]
        self._parts = [part for _, part, _ in self._stacks]
        self._configs = [config for _, _, config in self._stacks]
        check_model(model, self._parts, self._configs, lists)
        for stack, part, config in self._stacks:
            self._attach(stack, config)
            if isinstance(part, nn.ModuleList):
                _tell_stack(part, stack)
                hook_layers(part, stack)
            else:
                hook_rotary_embeddings(part, stack)
        handles = self._stacks[0][0].handles
        self._replicas = Replicas(model, mesh, average_gradients, handles)
        handles.append(model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True))
        handles.append(model.register_forward_hook(self._after))
        handles.append(model.register_forward_hook(self._end, always_call=True))
        object.__setattr__(model, "_meshflash", self)

    @property
    def layout(self) -> Layout:
        """The layout of the last batch."""
        sequence = self._stacks[-1][0].sequence
        if sequence is None:
            raise ValueError("ContextParallel.layout: call the model first; the layout depends on the batch")
        return sequence.layout

    def remove(self) -> None:
        """Undo `context_parallel`: the model attends as before."""
        if self._is_removed:
            return
        self._is_removed = True
        for stack, part, config in self._stacks:
            for handle in stack.handles:
                handle.remove()
            detach(config, stack)
            for module in part.modules():
                for name in ("_meshflash_stack", "_meshflash_is_cross"):
                    module.__dict__.pop(name, None)
        for undo in reversed(self._undo):
            undo()
        self.model.__dict__.pop("_meshflash", None)

    def _shared_seed(self) -> int:
        seeds = [torch.initial_seed() % (1 << 62)]
        if self.mesh.size() > 1:
            dist.broadcast_object_list(seeds, group_src=0, group=self.mesh.get_group())
        return seeds[0]

    def _attach(self, stack: Stack, config: Any) -> None:
        for other, own in self._attached:
            if own is config:  # of an encoder and a decoder, the decoder makes masks
                detach(config, other)
        self._attached.append((stack, config))
        before = config._attn_implementation_internal
        if before != NAME:
            self._undo.append(lambda: setattr(config, "_attn_implementation_internal", before))
        config._attn_implementation_internal = NAME
        attach(config, stack)

    def _find_stacks(
        self, layout: Layout | str, schedule: str, names: Sequence[str] | None
    ) -> list[tuple[Stack, nn.ModuleList, Any]]:
        model = self.model
        if names is None:
            names = stack_names(model)
        found: list[tuple[Stack, nn.ModuleList, Any]] = []
        for name in names:
            layers = model.get_submodule(name)
            if not isinstance(layers, nn.ModuleList) or not len(layers):
                raise ValueError(f"stacks: {name} is a {type(layers).__name__}; expected a ModuleList of layers")
            memory = found[0][0] if found and getattr(model.config, "is_encoder_decoder", False) else None
            found.append((Stack(self.mesh, layout, schedule, False, memory), layers, _config_of(model, name)))
        return found

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._stacks[0][0].is_suspended:
            return None
        given = arguments_of(model, args, {k: v for k, v in kwargs.items() if k != KEY})
        batch, local, error = kwargs.get(KEY), given, ""
        is_cut = batch is not None
        documents = None if batch is None else batch.documents
        first = self._stacks[0][0]
        try:
            self._check_call(given, is_cut)
            if self.cut == "layers":
                documents = self._documents(given)
            elif batch is None:
                local = shard_batch(given, self.mesh, layout=first.layout, schedule=first.schedule)
                batch = local.pop(KEY)
                documents = batch.documents
        except ValueError as problem:
            error = str(problem)
        self._replicas.agree(error, None if is_cut else given)
        # layers that run again have the seed of their mask; a model that runs again would draw another one
        seed = draw_seed(self._generator) if torch._C._current_graph_task_id() == -1 else None
        for stack, _, _ in self._stacks:
            stack.sequence, stack.seed, stack.documents = None, seed, documents
        reference = self._reference(given) if self._verify else None
        for stack, _, _ in self._stacks:
            stack.is_called = True
        if self.cut == "inputs":
            assert batch is not None
            first.sequence, first.positions = batch.sequence, batch.positions
            self._watch_loss()
        self._batch, self._wanted = batch, reference
        if "use_cache" in _parameters(model):
            local["use_cache"] = False
        return (), local

    def _check_call(self, given: Mapping[str, Any], is_cut: bool) -> None:
        check_call(self.model, given, self._parts, self._configs)
        for stack, config in self._attached:
            is_ours = any(s is stack for s, _, _ in self._stacks) and config._attn_implementation_internal == NAME
            if not is_ours:
                raise ValueError(
                    f"context_parallel: the model attends by {config._attn_implementation_internal!r} now; call "
                    "remove() on what context_parallel returned before you choose another attention"
                )
        if is_cut and (self.cut == "layers" or self._verify):
            what = "with verify=True" if self._verify else 'with cut="layers"'
            raise ValueError(f"context_parallel: expected a whole batch {what}, not one from shard_batch")
        labels = given.get("labels") if given.get("shift_labels") is None else given["shift_labels"]
        loss = getattr(self.model, "loss_function", None)
        if self.cut == "inputs" and labels is not None and not is_next_token_loss(loss):
            name = getattr(loss, "__name__", type(loss).__name__)
            raise ValueError(
                f"{type(self.model).__name__}: its loss is {name}, not that of the next token; pass "
                'cut="layers" to context_parallel'
            )
        if self.cut == "layers" and len(self._stacks) == 1 and isinstance(labels, Tensor) and labels.ndim == 2:
            shifts = given.get("shift_labels") is None and is_next_token_loss(loss)
            check_padded_labels(shifted(labels) if shifts else labels, given.get("attention_mask"))
        self._replicas.check_averaging()

    def _watch_loss(self) -> None:
        """Note whether the forward under way calls the model's loss function, which `_end` then restores."""
        model: Any = self.model
        self._has_loss = False
        own = vars(model).get("_loss_function")
        function = model.loss_function

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._has_loss = True
            return function(*args, **kwargs)

        model._loss_function = watched
        self._restore_loss = (
            (lambda: delattr(model, "_loss_function"))
            if own is None
            else partial(setattr, model, "_loss_function", own)
        )

    def _documents(self, given: Mapping[str, Any]) -> Mask | None:
        """Return the packed documents of a batch for a model with one stack of layers."""
        ids = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        return None if len(self._stacks) > 1 or ids is None else packed_documents(given, ids.shape[0])

    def _after(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if self._stacks[0][0].is_suspended:
            return None
        if self.cut == "inputs":
            assert self._batch is not None
            # forwards that others put in place, such as TRL's, take shifted labels themselves
            knows_shifted = _takes_shifted_labels(model.forward)
            if getattr(outputs, "loss", None) is not None and not (self._has_loss or knows_shifted):
                raise ValueError(
                    f"{type(model).__name__} computes its loss itself, without self.loss_function; pass "
                    'cut="layers" to context_parallel'
                )
            outputs = join_outputs(outputs, self._batch, self.outputs == "whole")
        if self._verify:
            self._verify = False
            self._compare(outputs)
        return outputs

    def _end(self, model: nn.Module, args: Any, outputs: Any) -> None:
        """End a forward, also one that raised an error."""
        if self._stacks[0][0].is_suspended:
            return
        for stack, _, _ in self._stacks:
            stack.is_called = False
        if self._restore_loss is not None:
            self._restore_loss()
            self._restore_loss = None

    @torch.no_grad()
    def _reference(self, given: dict[str, Any]) -> Any:
        """Return the outputs of one device for the whole batch."""
        for stack, _, _ in self._stacks:
            stack.is_suspended = True
        try:
            extra = {"use_cache": False} if "use_cache" in _parameters(self.model) else {}
            return self.model(**{**given, **extra})
        finally:
            for stack, _, _ in self._stacks:
                stack.is_suspended = False

    def _compare(self, outputs: Any) -> None:
        """Raise ValueError on all ranks if outputs differ from those of one device."""
        pairs = []
        for name, want in self._wanted.items():
            got = outputs.get(name)
            if isinstance(got, Tensor) and isinstance(want, Tensor) and got.shape != want.shape and self._batch:
                want = shard(want, self._batch.sequence.layout, self.mesh)
            pairs.append((name, got, want))
        self._replicas.agree(difference(pairs))


def stack_names(model: Any) -> list[str]:
    """Return the names of the lists of layers of a model's encoder and decoder, or of its only stack.

    Args:
        model: The model.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        return [_only_list(model, part()) for part in (model.get_encoder, model.get_decoder)]
    # a model of text and images has several lists; only then ask it for its decoder, which is another thing in a BERT
    return [_only_list(model, model if len(_lists(model, model)) == 1 else model.get_decoder())]


def _only_list(model: nn.Module, part: nn.Module) -> str:
    found = _lists(model, part)
    if len(found) != 1:
        raise ValueError(
            f"stacks: name the lists of layers; found {', '.join(found) or 'none'} in {type(part).__name__}"
        )
    return found[0]


def _lists(model: nn.Module, part: nn.Module) -> list[str]:
    """Return the names of the lists of layers in a part of a model, but for lists inside of others."""
    prefix = next(path for path, module in model.named_modules() if module is part)
    found: list[str] = []
    for path, module in part.named_modules(prefix=prefix):
        is_list = isinstance(module, nn.ModuleList) and path.rpartition(".")[2] in LAYER_LISTS and len(module) > 0
        if is_list and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return found


def _config_of(model: nn.Module, name: str) -> Any:
    """Return the config of the innermost module around a list of layers that has one."""
    while name:
        name = name.rpartition(".")[0]
        config = getattr(model.get_submodule(name), "config", None)
        if config is not None:
            return config
    raise ValueError("context_parallel: the model has no config")


def _tell_stack(layers: nn.ModuleList, stack: Stack) -> None:
    """Let attention modules find their stack: some models make no mask."""
    for path, module in layers.named_modules():
        module.__dict__["_meshflash_stack"] = stack
        if path.endswith(CROSS_ATTENTION) or "cross" in type(module).__name__.lower():
            module.__dict__["_meshflash_is_cross"] = True


def _is_causal_lm(model: Any) -> bool:
    """Return whether inputs can be cut: a causal language model with rotary embeddings, without chunks.

    Other positions may be counted from ids or padding; chunks are counted from the first token.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: Any = model.config
    is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    is_text = getattr(config, "vision_config", None) is None and not getattr(config, "is_encoder_decoder", False)
    names = {name for found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _as_tuple(found)}
    is_causal = is_text and not is_chunked and type(model).__name__ in names
    return is_causal and any(map(is_rotary, model.modules())) and is_next_token_loss(model.loss_function)


def _takes_shifted_labels(forward: Any) -> bool:
    """Return whether a forward itself takes shifted labels, without its loss function."""
    code = getattr(forward, "__code__", None)
    return code is not None and "shift_labels" in code.co_varnames


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _parameters(model: nn.Module) -> Mapping[str, Any]:
    import inspect

    return inspect.signature(model.forward).parameters
