"""Attention as one op with its own backward: the autograd boundary of every call.

The op takes tensors, plain values, the name of the process group, and the encoded spec of a mesh call.
A mask travels as a text and tensors of document lengths, so that compiled code does not depend on the
lengths. Arguments are checked by the caller.

Compilers, tracers and modes that watch operations see a `torch.library` op. Where nothing watches, the same
functions are called without it: an op of 18 arguments costs more host time than a small attention takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.engine import local, mesh
from meshflash.engine.group_context import group_context
from meshflash.kernels.contract import Features, Grads, Inputs, new_outputs

#: What both ops take after their own tensors.
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink_logits, Tensor? alibi_slopes, Tensor? seed, Tensor[] documents, "
    "str mask, float scale, float softcap, float dropout, SymInt q_offset, SymInt batch_offset, SymInt head_offset, "
    "str kernel, bool deterministic, str spec, str group, bool will_backward"
)

#: What makes (out, lse) and what the backward needs besides, if anything.
Forward = Callable[[], tuple[Tensor, ...]]
_Documents = tuple[tuple[bytes, str, torch.Size], ...]


class Arguments(NamedTuple):
    """What the op takes. On one device `group` is empty; `spec` is too, unless a layout or schedule was given."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink_logits: Tensor | None
    alibi_slopes: Tensor | None
    seed: Tensor | None
    documents: Sequence[Tensor]
    mask: str
    scale: float
    softcap: float
    dropout: float
    q_offset: int
    batch_offset: int
    head_offset: int
    kernel: str
    deterministic: bool
    spec: str = ""
    group: str = ""
    #: Whether autograd records the call over ranks, so that a backward is to come.
    will_backward: bool = False


#: How `spec` begins where keys were gathered before: this, the rank, and the layout of the queries.
GATHERED = "gathered"


def is_gathered(spec: str) -> bool:
    """Whether all keys are here."""
    return spec.startswith(f"{GATHERED}|")


@lru_cache(maxsize=256)
def shard_of(spec: str) -> tuple[Layout, int] | None:
    """Whose queries these are, of which layout, where all keys are here; else None."""
    if not is_gathered(spec):
        return None
    _, rank, layout = spec.split("|", 2)
    return Layout.parse(layout), int(rank)


class CallContext:
    """The arguments of a call, read."""

    def __init__(self, *arguments: Any) -> None:
        self.given = x = Arguments(*arguments)
        self.features = Features(
            x.scale,
            x.softcap,
            x.dropout,
            0 if x.seed is None else int(x.seed),
            x.batch_offset,
            x.head_offset,
            x.alibi_slopes,
            x.sink_logits,
        )
        self._mask_key = (x.mask, tuple(_frozen(lengths) for lengths in x.documents))

    @property
    def mask(self) -> Mask:
        """The mask."""
        return _mask(*self._mask_key)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse), and the memory of what the backward needs besides."""
        x = self.given
        if x.group:
            return mesh.forward(self._over_mesh(), group_context(x.group), x.q, x.k, x.v)
        if x.spec and not is_gathered(x.spec):
            mesh.resolve(x.spec, x.q.shape[1], x.k.shape[1], 0, x.q_offset, 1)  # for what it refuses
        return *local.forward(self._inputs(), x.kernel, x.deterministic), nothing(x.q)

    def backward(
        self, out: Tensor, lse: Tensor, saved: Tensor, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(dq, dk, dv, dsink_logits)."""
        x = self.given
        if not x.group:
            return local.backward(self._inputs(), out, lse, dout, dlse, x.kernel, x.deterministic)
        made, given = (out, lse, saved), (dout, dlse)
        grads, rows = mesh.backward(self._over_mesh(), group_context(x.group), x.q, x.k, x.v, made, given)
        return grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, local.sink_gradient(x.sink_logits, rows)

    def _inputs(self) -> Inputs:
        x = self.given
        return local.inputs(x.q, x.k, x.v, self.mask, self.features, x.q_offset, shard_of(x.spec))

    def _over_mesh(self) -> mesh.MeshCall:
        x, mask = self.given, self.mask
        return mesh.MeshCall(x.spec, x.q_offset, mask, mask, self.features, x.kernel, x.deterministic, x.will_backward)


def without_autocast(q_BTHD: Tensor) -> AbstractContextManager[Any]:
    """Autocast has had its say in the inputs' dtype; inside, it would round float32 accumulators."""
    device = q_BTHD.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return _NOTHING


_NOTHING = nullcontext()
_has_autocast = cache(torch.amp.is_autocast_available)


def _frozen(lengths: Tensor) -> tuple[bytes, str, torch.Size]:
    array = lengths.cpu().numpy()
    return array.tobytes(), array.dtype.str, lengths.shape


@lru_cache(maxsize=256)
def _mask(text: str, documents: _Documents) -> Mask:
    """The mask of an op's arguments, in the form in which ranks compare it.

    Cached, for what a mask knows of itself is worked out only once.
    """
    arrays = [np.frombuffer(data, dtype).reshape(shape) for data, dtype, shape in documents]
    return Mask.unpack(text, arrays).canonical()


def attend(call: Arguments) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, with gradients."""
    tensors = call[:6]
    if watched(tensors):
        out, lse, _ = attention_op(*call)
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        out, lse = Direct.apply(call.q, call.k, call.v, call.sink_logits, call, partial(_forward, *call))
    else:
        out, lse, _ = _forward(*call)
    return out, lse


def attend_backward(
    made: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None, call: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink_logits) of a call, the last one empty where there are no sink logits."""
    seen = torch.is_grad_enabled() or watched((*made, dout, dlse, *call[:6])) or _batched(dout) or _batched(dlse)
    return (attention_backward_op if seen else _backward)(*made, dout, dlse, *call)


def watched(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a compiler, a tracer, a mode, a transform or a subclass of Tensor wants to see operations.

    Tensors on the meta device have nothing to compute, and the op knows the shapes of its results.
    """
    others = any(x is not None and (type(x) not in PLAIN or x.is_meta) for x in tensors)
    return others or torch.compiler.is_compiling() or modes_watch()


def modes_watch() -> bool:
    """Whether a mode, a transform or a tracer is on."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _batched(grad: Tensor | None) -> bool:
    """Whether it stands for many, as `is_grads_batched` makes it."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)


#: What a plain call consists of; other kinds of tensors may watch.
PLAIN = (Tensor, torch.nn.Parameter)


def _forward(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    read = CallContext(*call)
    with without_autocast(read.given.q):
        return read.forward()


def _backward(
    out: Tensor, lse: Tensor, saved: Tensor, dout: Tensor | None, dlse: Tensor | None, *call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    read = CallContext(*call)
    with without_autocast(read.given.q):
        dq, dk, dv, dsink = read.backward(out, lse, saved, dout, dlse)
    return dq, dk, dv, out.new_empty(0) if dsink is None else dsink


def nothing(x: Tensor) -> Tensor:
    """The memory of nothing."""
    return x.new_empty(0, dtype=torch.uint8)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], shape_only: Sequence[int] = ()) -> None:
    """Save the tensors of the backward; of those in `shape_only`, given by index, save only the shapes."""
    tensors, documents, plain = [*inputs[:6]], inputs[6], inputs[7:]
    ctx.shapes = {n: tensors[n].shape for n in shape_only}
    for n in shape_only:
        tensors[n] = tensors[n].new_empty(1)
    ctx.save_for_backward(*output, *tensors, *documents)
    ctx.plain = plain
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any = None) -> tuple[Any, ...]:
    out, lse, saved, *rest = ctx.saved_tensors
    made, tensors, documents = (out, lse, saved), rest[:6], rest[6:]
    for n, shape in ctx.shapes.items():
        tensors[n] = tensors[n].expand(shape)
    dq, dk, dv, dsink = attend_backward(made, dout, dlse, (*tensors, documents, *ctx.plain))
    wanted = None if tensors[3] is None else dsink
    return dq, dk, dv, wanted, None, None, [None] * len(documents), *[None] * len(ctx.plain)


class Direct(torch.autograd.Function):
    """Eager fast path: run forward and backward without dispatcher overhead."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, call: Arguments, make: Forward
    ) -> Any:
        # another thread's call over the group in between would answer for its own forward
        with group_context(call.group).in_use() if call.group else _NOTHING:
            out, lse, *saved = make()
            shape_only = mesh.not_saved(group_context(call.group)) if call.group else ()
        made = out, lse, saved[0] if saved else nothing(q)
        _setup(ctx, (q, k, v, sink_logits, *call[4:]), made, shape_only)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return *_gradients(ctx, *grads)[:4], None, None


attention_op = torch.library.custom_op(
    "meshflash::attention", _forward, mutates_args=(), schema=f"({_CALL}) -> (Tensor, Tensor, Tensor)"
)
attention_op.register_autograd(_gradients, setup_context=_setup)


@attention_op.register_fake
def _(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Arguments(*call)
    saved = nothing(x.q)
    if x.group and mesh.saves_buffers(x.spec):
        saved = x.q.new_empty(_some(), dtype=torch.uint8)
    return *new_outputs(x.q, x.v), saved


def _some() -> Any:
    """A number that is known only when the op runs; 0 where nothing will run."""
    try:
        return torch.library.get_ctx().new_dynamic_size()
    except RuntimeError:  # tensors without memory, and no compiler to ask
        return 0


attention_backward_op = torch.library.custom_op(
    "meshflash::attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor out, Tensor lse, Tensor saved, Tensor? dout, Tensor? dlse, {_CALL})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@attention_backward_op.register_fake
def _(
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = Grads.like(q, k, v)
    return (
        grads.dq_BTHD,
        grads.dk_BSKD,
        grads.dv_BSKE,
        out.new_empty(0) if sink_logits is None else torch.empty_like(sink_logits),
    )
