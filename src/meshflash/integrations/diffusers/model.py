"""`context_parallel`: shard the sequences of a diffusion transformer of diffusers over ranks, in place.

The ranks look like replicas that were given the same batch. Each returns the whole output, and the mean of their
gradients, which DDP and FSDP take anyway, is the gradient of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.integrations._replicas import (
    AveragesGradients,
    Replicas,
    arguments_of,
    check_mesh,
    check_release,
    difference,
    refuse_convolutions,
    refuse_dropout,
)
from meshflash.integrations.diffusers.attention import Intercept, Streams, attend, padding
from meshflash.integrations.diffusers.blocks import Block, attention_modules, blocks_of, is_of_diffusers
from meshflash.parallel.step import resolve_layout
from meshflash.sharding import shard, unshard

#: The tested release, by its first two numbers.
TESTED = (0, 42)
#: Arguments of models that change hidden states between blocks, or leave blocks out.
REFUSED = (
    "controlnet_block_samples",
    "controlnet_single_block_samples",
    "block_controlnet_hidden_states",
    "skip_layers",
)
#: The arguments of blocks that hold the streams.
IMAGE, TEXT = "hidden_states", "encoder_hidden_states"
#: The attribute of a hidden state between blocks that holds its streams, and of a module that holds its mode.
STREAMS, MODE = "_meshflash_streams", "_meshflash_mode"


def context_parallel(
    transformer: nn.Module,
    mesh: DeviceMesh,
    *,
    layout: Layout | str = "contiguous",
    schedule: str = "auto",
    average_gradients: bool | None = None,
    verify: bool = False,
) -> ContextParallel:
    """Shard the sequences of a diffusion transformer over the ranks of a mesh, in place.

    Give every rank the same inputs. Each rank returns the whole output.

    Args:
        transformer: The model, such as a `FluxTransformer2DModel` or a `WanTransformer3DModel`.
        mesh: The ranks that share a sequence: a DeviceMesh of one dimension, such as `mesh["cp"]`.
        layout: The layout of image or video tokens, or its name. Text tokens have the layout of that name too, and
            are contiguous beside a `Layout`.
        schedule: The schedule of attention, as in `meshflash.attention`.
        average_gradients: Whether to average gradients over the ranks after each backward. None requires that DDP or
            FSDP does it, and refuses to train otherwise. False leaves it to the caller.
        verify: Whether to compare the outputs of the first call with those of one device, which must hold the whole
            sequence.

    Returns:
        A `ContextParallel`, whose `remove` undoes it.
    """
    return ContextParallel(transformer, mesh, layout, schedule, average_gradients, verify)


class ContextParallel(AveragesGradients):
    """A diffusion transformer whose sequences are sharded; `context_parallel` makes it.

    Args:
        transformer: The model.
        mesh: The ranks.
        layout: The layout or its name.
        schedule: The schedule.
        average_gradients: Whether to average gradients here.
        verify: Whether to verify the first call.
    """

    def __init__(
        self,
        transformer: nn.Module,
        mesh: DeviceMesh,
        layout: Layout | str,
        schedule: str,
        average_gradients: bool | None,
        verify: bool,
    ) -> None:
        blocks = blocks_of(transformer)
        check_mesh(mesh)
        if getattr(transformer, "_meshflash", None) is not None:
            raise ValueError("context_parallel: this model is sharded already; call remove() on what the call returned")
        check_release("diffusers", version("diffusers"), verify, oldest=TESTED, newest=TESTED)
        for path, block, _ in blocks:
            inside = ((f"{path}.{inner}", module) for inner, module in block.named_modules())
            refuse_convolutions(type(transformer).__name__, inside)
        self.model, self.mesh = transformer, mesh
        self._layout, self._schedule, self._verify = layout, schedule, verify
        self._blocks = blocks
        self._is_suspended = False
        self._streams: Streams | None = None
        self._wanted: Any = None
        self._rule: tuple[Any, int, Streams, Mask | None] | None = None
        self._handles: list[Any] = []
        self._replicas = Replicas(transformer, mesh, average_gradients, self._handles)
        hook = self._handles.append
        for number, (_, block, kind) in enumerate(blocks):
            before_block = partial(self._before_block, kind=kind, is_first=number == 0)
            hook(block.register_forward_pre_hook(before_block, with_kwargs=True))
            hook(block.register_forward_hook(partial(self._after_block, kind=kind, is_last=number == len(blocks) - 1)))
            for _, module in attention_modules(block):
                before = partial(self._before_attention, block=block, kind=kind)
                hook(module.register_forward_pre_hook(before, with_kwargs=True))
                hook(module.register_forward_hook(self._after_attention, always_call=True))
        hook(transformer.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True))
        hook(transformer.register_forward_hook(self._after))
        object.__setattr__(transformer, "_meshflash", self)

    def remove(self) -> None:
        """Undo `context_parallel`: the model attends as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for _, block, _ in self._blocks:
            block.__dict__.pop(STREAMS, None)
        self.model.__dict__.pop("_meshflash", None)

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_suspended:
            return
        given, error = arguments_of(model, args, kwargs), ""
        try:
            self._check_call(given)
        except ValueError as problem:
            error = str(problem)
        self._replicas.agree(error, given)
        self._streams = self._rule = None
        self._wanted = self._reference(given) if self._verify else None

    def _check_call(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError if a call, or how the model is set up now, is not supported."""
        model, name = self.model, type(self.model).__name__
        for argument in REFUSED:
            if given.get(argument) is not None:
                raise ValueError(f"{name}: {argument} is not supported while sequences are sharded")
        if getattr(model, "_parallel_config", None) is not None:
            raise ValueError(f"{name}: diffusers' own enable_parallelism is on; use one of both")
        if getattr(model, "is_cache_enabled", False):
            raise ValueError(f"{name}: a cache is enabled, which may skip blocks; call disable_cache()")
        for path, block, kind in self._blocks:
            refuse_dropout(name, ((f"{path}.{p}", m) for p, m in block.named_modules() if m.training))
            for inner, module in attention_modules(block):
                processor = type(module.processor)
                if processor.__name__ not in kind.processors or not is_of_diffusers(processor):
                    raise ValueError(
                        f"{name}: {path}.{inner} has the attention processor {processor.__name__}, which is not "
                        f"supported; expected {' or '.join(sorted(kind.processors))}"
                    )
        self._replicas.check_averaging()

    def _after(self, model: nn.Module, args: Any, outputs: Any) -> None:
        if self._is_suspended or not self._verify:
            return
        self._verify = False
        wanted = _named(self._wanted)
        self._replicas.agree(difference((name, x, wanted.get(name)) for name, x in _named(outputs).items()))

    @torch.no_grad()
    def _reference(self, given: dict[str, Any]) -> Any:
        """Return the outputs of one device for the whole batch."""
        self._is_suspended = True
        try:
            return self.model(**given)
        finally:
            self._is_suspended = False

    @torch.compiler.disable  # what is cut depends on lengths, and messages are not traced
    def _before_block(self, block: nn.Module, args: Any, kwargs: Any, *, kind: Block, is_first: bool) -> Any:
        """Cut the streams before the first block, and the inputs with a value for each token before every one."""
        if self._is_suspended:
            return None
        given, name = arguments_of(block, args, kwargs), type(block).__name__
        if is_first:
            streams = self._cut_streams(given, kind)
        else:  # when checkpointed blocks run again, a later forward may have begun
            found = getattr(given[IMAGE], STREAMS, None) or self._streams
            assert found is not None
            streams = found
        self._streams = streams
        rule = self._take_mask(given, kind, streams)
        order: tuple[Any, ...] = kind.order or ("image",)
        known = {IMAGE, *kind.whole, *((TEXT,) if kind.is_joint else ()), *((kind.mask.name,) if kind.mask else ())}
        for argument, x in list(given.items()):
            if argument in kind.tokens:
                given[argument] = streams.cut(f"{name}: {argument}", x, kind.tokens[argument], order)
            elif argument not in known and x is not None and x != {}:
                raise ValueError(f"{name}: {argument} is not supported: {_described(x)}")
        given.pop("args", None)
        block.__dict__[STREAMS] = streams, rule
        return (), given

    def _cut_streams(self, given: dict[str, Any], kind: Block) -> Streams:
        """Replace the streams of the first block's inputs by this rank's tokens."""
        image, ranks = given[IMAGE].shape[1], self.mesh.size()
        text = given[TEXT].shape[1] if kind.is_joint else None
        for what, tokens in (("image", image), ("text", text)):
            if tokens is not None and tokens < ranks:
                raise ValueError(f"{tokens} {what} tokens for {ranks} ranks: every rank needs at least one")
        layout = resolve_layout(self._layout, Mask.full(), image, ranks)
        if layout.tokens != image or layout.world != ranks:
            raise ValueError(
                f"layout: {layout.tokens} tokens on {layout.world} ranks, but there are {image} image tokens on {ranks}"
            )
        given[IMAGE] = shard(given[IMAGE], layout, self.mesh)
        if text is None:
            return Streams(self.mesh, layout)
        by_name = self._layout if isinstance(self._layout, str) else "contiguous"
        words = resolve_layout(by_name, Mask.full(), text, ranks)
        given[TEXT] = shard(given[TEXT], words, self.mesh)
        return Streams.of(self.mesh, layout, words, kind.order)

    def _take_mask(self, given: dict[str, Any], kind: Block, streams: Streams) -> Mask | None:
        """Return the rule of the padding that a block's inputs describe, and take it out of the inputs."""
        if kind.mask is None:
            return None
        outer, _, inner = kind.mask.name.partition(".")
        source = given.get(outer)
        if source is None:
            return None
        if inner:
            source = dict(source)
            mask, given[outer] = source.pop(inner, None), source
        else:
            mask = source
        if mask is None:
            return None
        if not kind.is_joint:  # text is whole, and so is its mask, as long as it is the same for all queries
            if mask.ndim > 2 and mask.shape[-2] != 1:
                raise ValueError(f"{outer}: {list(mask.shape)} is a mask of pairs, which is not supported")
            return None
        if not inner:
            given[outer] = None
        known = self._rule
        if known is None or known[0] is not mask or known[1] != mask._version or known[2] != streams:
            rule = padding(kind.mask.name, mask, streams, kind.mask.stream, kind.order)
            self._rule = known = (mask, mask._version, streams, rule)
        return known[3]

    @torch.compiler.disable
    def _after_block(self, block: nn.Module, args: Any, out: Any, *, kind: Block, is_last: bool) -> Any:
        """Gather image and text tokens after the last block; after others, note the layouts on the hidden states."""
        if self._is_suspended:
            return None
        streams, _ = block.__dict__.pop(STREAMS)
        parts = list(out) if isinstance(out, tuple) else [out]
        for place, stream in enumerate(kind.returns):
            if not isinstance(parts[place], Tensor):
                continue
            if is_last:
                layout = streams.image if stream == "image" else streams.text
                parts[place] = unshard(parts[place], layout, self.mesh)
            elif stream == "image":
                setattr(parts[place], STREAMS, streams)
        return tuple(parts) if isinstance(out, tuple) else parts[0]

    def _before_attention(self, module: nn.Module, args: Any, kwargs: Any, *, block: nn.Module, kind: Block) -> None:
        """Replace torch's attention while an attention module runs."""
        if self._is_suspended or STREAMS not in block.__dict__:
            return
        streams, rule = block.__dict__[STREAMS]
        has_text = arguments_of(module, args, kwargs).get(TEXT) is not None
        if has_text and not kind.is_joint:
            return  # every rank has all text, so cross-attention is complete
        is_joint = kind.is_joint and (has_text or kind.joins_itself)
        layout = streams.joint if is_joint else streams.image
        name = type(module.processor).__name__
        mesh, schedule, mask = self.mesh, self._schedule, rule if is_joint else None
        mode = Intercept(partial(attend, name=name, mesh=mesh, layout=layout, schedule=schedule, mask=mask))
        module.__dict__[MODE] = mode
        mode.__enter__()

    def _after_attention(self, module: nn.Module, args: Any, out: Any) -> None:
        mode = module.__dict__.pop(MODE, None)
        if mode is None:
            return
        mode.__exit__(None, None, None)
        if out is not None and mode.num_calls != 1:
            raise ValueError(
                f"{type(module.processor).__name__} called torch's scaled_dot_product_attention {mode.num_calls} times "
                "instead of once; reset the attention backend with set_attention_backend('native')"
            )


def _named(outputs: Any) -> dict[str, Any]:
    """Return the outputs of a model by name, or by number."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return {f"output {number}": x for number, x in enumerate(outputs)}


def _described(x: Any) -> str:
    if isinstance(x, Mapping):
        return f"a dict of {', '.join(map(str, x))}"
    return f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
