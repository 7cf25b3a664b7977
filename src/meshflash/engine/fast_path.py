"""Calls that repeat: what shapes and plain values decide is worked out once; it takes longer than a small call."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from meshflash.core.mask import Mask
from meshflash.core.tiles import Worklist
from meshflash.engine import local
from meshflash.engine.op import Arguments, CallContext, Direct, modes_watch, watched
from meshflash.kernels.contract import Features, Inputs
from meshflash.kernels.registry import Choice, generation, log_kernel


class _Known(NamedTuple):
    """A call that was made before: the op's arguments after q, k and v, and what came of them."""

    rest: tuple[Any, ...]
    work: Worklist
    features: Features
    choice: Choice
    device: str


_known: dict[Any, _Known] = {}
#: Held to change `_known`, never to read it: threads call at the same time.
_lock = threading.Lock()
#: How many are remembered; then the oldest goes.
_MOST = 256


def key_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: Any, softcap: Any, sink_logits: Any, alibi_slopes: Any,
    dropout: Any, seed: Any, *values: Any,
) -> Any:  # fmt: skip
    """What tells a call from others; None for one that is not to be remembered, as it reads more than q, k and v."""
    if sink_logits is not None or alibi_slopes is not None or seed is not None or q.dim() != 4 or modes_watch():
        return None
    if type(dropout) not in _NUMBERS or dropout != 0:
        return None
    if mask is not None and (not isinstance(mask, Mask) or mask.has_documents):
        return None
    kinds = tuple(map(type, values))  # True equals 1, and is no number of tokens
    if not _OPTIONAL.issuperset((type(scale), type(softcap))) or not _PLAIN.issuperset(kinds):
        return None
    shapes = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    strict = torch.are_deterministic_algorithms_enabled()
    return *shapes, mask, scale, softcap, values, kinds, strict, generation()


_NUMBERS = (float, int)
_OPTIONAL = frozenset((type(None), *_NUMBERS))
_PLAIN = frozenset((int, bool, str))


def lookup(key: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call of plain tensors that was made before, or None: then it is to be read from the start."""
    known = _known.get(key)
    if known is None or q.is_meta or forward_ad._current_level >= 0:
        return None
    if torch.is_autocast_enabled(known.device):
        return None
    log_kernel(known.choice, "forward")
    make = partial(known.choice.kernel.forward, Inputs(q, k, v, known.work, known.features))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        made: tuple[Tensor, Tensor] = Direct.apply(q, k, v, None, Arguments(q, k, v, *known.rest), make)
        return made
    return make()


def store(key: Any, call: Arguments) -> None:
    """A call of plain tensors on one device has succeeded; the next one of its kind need not be read."""
    if watched(call[:6]) or not call.q.shape[0] or torch.is_autocast_enabled(call.q.device.type):
        return
    read = CallContext(*call)
    x = local.inputs(call.q, call.k, call.v, read.mask, read.features, call.q_offset)
    chosen = local.choice(x, call.kernel, "forward", call.deterministic)
    with _lock:
        excess = max(0, len(_known) - _MOST + 1)
        for old in [other for other in _known if other[-1] != key[-1]] or list(_known)[:excess]:
            del _known[old]  # of an older generation, or the oldest
        _known[key] = _Known(call[3:], x.work, x.features, chosen, call.q.device.type)
