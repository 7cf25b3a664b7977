"""The autograd boundary of every call: `attend` runs an executable, under autograd where gradients are needed.

Compilers, tracers and modes that watch operations see a `torch.library` op, which takes tensors and an encoded spec.
Where nothing watches, `attend` runs the executable without the op, whose dispatch takes longer than a small attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshflash.engine.cache import cache
from meshflash.engine.compile import compile_spec, saves_buffers
from meshflash.engine.executable import Executable, Gradients, Results
from meshflash.engine.spec import ENCODED_SCHEMA, AttentionSpec, CallTensors, schedule_of
from meshflash.kernels.contract import Grads, new_outputs
from meshflash.kernels.registry import open_logs

#: The tensor types of a plain call; a subclass of Tensor may watch operations.
PLAIN = (Tensor, torch.nn.Parameter)
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sink_logits, Tensor? alibi_slopes, Tensor? seed"


#: (out, lse) of a call; the LSE may be None if the caller does not read it.
Attended = tuple[Tensor, Any]


def attend(spec: AttentionSpec, x: CallTensors, reads_lse: bool = True, key: Any = None) -> Attended:
    """Return (out, lse) of a call, with gradients.

    Args:
        spec: The call without its tensors.
        x: The tensors of the call.
        reads_lse: Whether the caller reads the LSE, so that it may get a gradient.
        key: The key under which the cache keeps the executable for an equal call, or None.
    """
    if watched(x):
        out, lse, _ = attention_op(*x, *spec.encode())
        return out, lse
    executable = compile_spec(spec.canonical(), x)
    with without_autocast(x.q):
        results = execute(executable, x, reads_lse)
    if key is not None:
        cache.put(key, executable)
    return results


def repeat(key: Any, x: CallTensors, reads_lse: bool = True) -> Attended | None:
    """Return (out, lse) of a call that was made before with other tensors, or None where it must be checked again.

    Args:
        key: The key under which `attend` kept the executable.
        x: The tensors of the call: q, k and v, which may be packed.
        reads_lse: Whether the caller reads the LSE, so that it may get a gradient.
    """
    known: Executable | None = None if modes_watch() else cache.get(key)  # modes may make sizes that have no hash
    if known is None or torch.is_autocast_enabled(known.device_type):
        return None
    is_packed = x.q.dim() == 3
    if is_packed:
        x = CallTensors(x.q.unsqueeze(0), x.k.unsqueeze(0), x.v.unsqueeze(0))
    if known.spec.group:
        if not known.is_current():
            return None
        x = contiguous(known.spec, x)
    out, lse = execute(known, x, reads_lse)
    return unpacked(out, lse) if is_packed else (out, lse)


def unpacked(out: Tensor, lse: Tensor | None) -> Attended:
    """Return the results of a packed call without their batch dim, which is 1.

    Args:
        out: The output.
        lse: The LSE, or None.
    """
    return out.squeeze(0), None if lse is None else lse.squeeze(0)


def contiguous(spec: AttentionSpec, x: CallTensors) -> CallTensors:
    """Return q, k and v as messages are sent from them: over ranks they must be contiguous.

    Args:
        spec: The call without its tensors.
        x: The tensors of the call.
    """
    return x._replace(q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous()) if spec.group else x


def execute(executable: Executable, x: CallTensors, reads_lse: bool = True) -> Attended:
    """Run an executable on plain tensors without autocast, under autograd if one of them requires a gradient.

    Args:
        executable: The compiled call.
        x: The tensors of the call.
        reads_lse: Whether the caller reads the LSE, so that it may get a gradient.
    """
    q, k, v, sinks = x[:4]
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    )
    if not needs_grad:
        out, lse, _ = executable.forward(x)
        return out, lse
    if not reads_lse:
        executable = executable.for_autograd(x)
        if executable.has_torch_autograd and not open_logs:  # a log must see the backward
            out, lse, _ = executable.forward(x)
            return out, lse
        return _apply(q, k, v, sinks, x, executable, False), None
    out, lse = _apply(q, k, v, sinks, x, executable, True)
    return out, lse


class _Attention(torch.autograd.Function):
    """Eager fast path: run an executable's passes without dispatcher overhead.

    Inputs with gradients are arguments of their own; `x` holds all tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_logits: Tensor | None,
        x: CallTensors,
        executable: Executable,
        reads_lse: bool,
    ) -> Any:
        made = executable.forward(x)
        ctx.executable = executable
        if executable.unsaved:
            tensors: list[Any] = list(x)
            ctx.shapes = [(n, tensors[n].shape) for n in executable.unsaved]
            for n in executable.unsaved:  # keeps dtype and device, and no memory
                tensors[n] = tensors[n].new_empty(1)
            ctx.save_for_backward(*made, *tensors)
        else:
            ctx.save_for_backward(*made, *x)
        ctx.set_materialize_grads(False)
        return (made.out, made.lse) if reads_lse else made.out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        executable: Executable = ctx.executable
        out, lse, saved, *tensors = ctx.saved_tensors
        if executable.unsaved:
            for n, shape in ctx.shapes:
                tensors[n] = tensors[n].expand(shape)
        x, made = CallTensors._make(tensors), Results(out, lse, saved)
        if _is_plain(dout) and _is_plain(dlse) and not torch.is_grad_enabled() and not modes_watch():
            if torch.is_autocast_enabled(executable.device_type):
                with without_autocast(out):
                    return *executable.backward(x, made, dout, dlse), None, None, None
            return *executable.backward(x, made, dout, dlse), None, None, None
        return *attend_backward(executable.spec, x, made, dout, dlse), None, None, None


#: `apply` as torch's C++ has it. The method in Python above it serves `torch.func` transforms, which see the op instead
#: of this Function; that method took 11 of the 91 us of a Function that computes nothing.
_apply: Any = super(torch.autograd.Function, _Attention).apply


def attend_backward(
    spec: AttentionSpec,
    x: CallTensors,
    made: tuple[Tensor, Tensor, Tensor | None],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> Gradients:
    """Return the gradients of q, k, v and the sink logits of a call.

    Args:
        spec: The call without its tensors.
        x: The tensors of the call.
        made: The results of the forward: out, lse and the saved buffers, or None for these.
        dout: The gradient of the output, or None.
        dlse: The gradient of the LSE, or None.
    """
    out, lse, saved = made
    if torch.is_grad_enabled() or watched((out, dout, dlse, *x)) or _batched(dout) or _batched(dlse):
        saved = _nothing(out) if saved is None else saved
        dq, dk, dv, dsinks = attention_backward_op(out, lse, saved, dout, dlse, *x, *spec.encode())
        return dq, dk, dv, None if x.sink_logits is None else dsinks
    with without_autocast(out):
        return compile_spec(spec.canonical(), x).backward(x, Results(out, lse, saved), dout, dlse)


def watched(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a compiler, a tracer, a mode, a transform or a subclass of Tensor wants to see operations.

    Tensors on the meta device have nothing to compute, and the op knows the shapes of its results.

    Args:
        tensors: The tensors of a call.
    """
    others = any(x is not None and (type(x) not in PLAIN or x.is_meta) for x in tensors)
    return others or torch.compiler.is_compiling() or modes_watch()


def modes_watch() -> bool:
    """Return whether a dispatch mode, a `torch.func` transform or a tracer is active."""
    return _num_modes() > 0 or _functorch_stack() is not None or _tracing_state() is not None


#: Calls of torch that its public functions wrap, looked up once: three attributes of modules cost a microsecond.
_num_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_functorch_stack, _is_batched = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.is_legacy_batchedtensor


def _is_plain(grad: Tensor | None) -> bool:
    """Return whether a gradient is None or one plain tensor."""
    return grad is None or (type(grad) is Tensor and not _batched(grad))


def _batched(grad: Tensor | None) -> bool:
    """Return whether a gradient is a batch of gradients, as `torch.autograd.grad(is_grads_batched=True)` passes it."""
    return grad is not None and _is_batched(grad)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context that switches autocast off, which would round float32 accumulators.

    Args:
        x: A tensor of the call; its device decides which autocast is switched off.
    """
    device = x.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return _NO_CONTEXT


_NO_CONTEXT = nullcontext()
_has_autocast = lru_cache(torch.amp.is_autocast_available)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, spec = CallTensors(*arguments[:6]), AttentionSpec.decode(*arguments[6:])
    with without_autocast(x.q):
        out, lse, saved = compile_spec(spec, x).forward(x)
    return out, lse, _nothing(out) if saved is None else saved


def _backward(
    out: Tensor, lse: Tensor, saved: Tensor, dout: Tensor | None, dlse: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, spec = CallTensors(*arguments[:6]), AttentionSpec.decode(*arguments[6:])
    with without_autocast(out):
        gradients: Gradients = compile_spec(spec, x).backward(x, Results(out, lse, saved), dout, dlse)
    dq, dk, dv, dsinks = gradients
    return dq, dk, dv, out.new_empty(0) if dsinks is None else dsinks


def _nothing(x: Tensor) -> Tensor:
    """Return an empty tensor in place of saved buffers, because an op cannot return None."""
    return x.new_empty(0, dtype=torch.uint8)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, documents, plain = inputs[:6], inputs[6], inputs[7:]
    ctx.save_for_backward(*output, *tensors, *documents)
    ctx.plain = plain
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any = None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing computes them again for each read
    made, tensors, documents = saved[:3], saved[3:9], list(saved[9:])
    dq, dk, dv, dsinks = attention_backward_op(*made, dout, dlse, *tensors, documents, *ctx.plain)
    wanted = None if tensors[3] is None else dsinks
    return dq, dk, dv, wanted, None, None, [None] * len(documents), *[None] * len(ctx.plain)


attention_op = torch.library.custom_op(
    "meshflash::attention",
    _forward,
    mutates_args=(),
    schema=f"({_TENSORS}, {ENCODED_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
attention_op.register_autograd(_gradients, setup_context=_setup)


@attention_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = CallTensors(*arguments[:6])
    saved = _nothing(x.q)
    if saves_buffers(schedule_of(arguments[7])):
        saved = x.q.new_empty(_unknown_size(), dtype=torch.uint8)
    return *new_outputs(x.q, x.v), saved


def _unknown_size() -> Any:
    """Return a symbolic size that is known only when the op runs, or 0 for tensors on the meta device."""
    try:
        return torch.library.get_ctx().new_dynamic_size()
    except RuntimeError:  # tensors without memory, and no compiler to ask
        return 0


attention_backward_op = torch.library.custom_op(
    "meshflash::attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor out, Tensor lse, Tensor saved, Tensor? dout, Tensor? dlse, {_TENSORS}, {ENCODED_SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@attention_backward_op.register_fake
def _(out: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = CallTensors(*others[4:10])
    grads = Grads.like(x.q, x.k, x.v)
    dsinks = out.new_empty(0) if x.sink_logits is None else torch.empty_like(x.sink_logits)
    return grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, dsinks
