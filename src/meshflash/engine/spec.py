"""The spec of a call, which is the call without its tensors and their sizes, and its encoding for the custom op.

A feature of attention is added here, to `Features` in `kernels/contract.py`, and to the kernels that support it.
Everything between the public calls and the kernels passes the spec on as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.kernels.contract import Features


class CallTensors(NamedTuple):
    """The tensors of a call. `arguments.py` makes it from checked arguments.

    Args:
        q: The queries, `[batch, tokens, heads, dim]`.
        k: The keys, `[batch, key_tokens, kv_heads, dim]`.
        v: The values, `[batch, key_tokens, kv_heads, value_dim]`.
        sink_logits: The sink logits, `[heads]`, or None.
        alibi_slopes: The ALiBi slopes, `[batch, heads]`, or None.
        seed: The seed of the dropout as an int64 tensor, so that compiled code serves every seed, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink_logits: Tensor | None = None
    alibi_slopes: Tensor | None = None
    seed: Tensor | None = None


class Encoded(NamedTuple):
    """A spec as arguments of the op; `AttentionSpec.encode` makes it.

    Args:
        documents: The document lengths and slices of the mask, as tensors, so that compiled code serves all of them.
        text: The fields that are texts, flags and layouts, in one text.
        numbers: The fields that are floating-point numbers.
        offsets: The fields that are offsets.
    """

    documents: list[Tensor]
    text: str
    numbers: list[float]
    offsets: list[int]


#: The types of `Encoded`, in the schema of the op.
ENCODED_SCHEMA = "Tensor[] documents, str spec, float[] numbers, SymInt[] offsets"
#: Stands between the texts of an encoded spec; none of them holds it.
_SEPARATOR = "\n"


class AttentionSpec(NamedTuple):
    """One attention call without its tensors and their sizes. `arguments.py` makes it from checked arguments.

    Args:
        mask: The keys that each query may attend to.
        scale: The factor of q.k.
        softcap: The bound of the scores; 0 means no bound.
        dropout: The probability that a (query, key) pair is dropped.
        q_offset: The position of the sequence's first query.
        batch_offset: The global number of the first batch row, for dropout.
        head_offset: The global number of the first query head, for dropout.
        kernel: The requested kernel, or "auto".
        deterministic: Whether equal inputs must give equal bits.
        group: The name of the process group; empty on a single device.
        schedule: The requested schedule, or "auto".
        layout: The layout of the queries. None means the schedule's default for shards of equal length.
        k_layout: The layout of the keys. None means the schedule's default for shards of equal length.
        gathered_rank: The rank whose queries these are, if this rank holds all keys; -1 otherwise.
        reduce_dtype: The name of the dtype in which gradients are reduced; empty means the accumulator's dtype.
        transport: The requested transport, or "auto".
        needs_lse: Whether the LSE is read. Ulysses and hybrid send it between ranks only then.
        will_backward: Whether autograd records a call over ranks: then all ranks run a backward, or none.
    """

    mask: Mask
    scale: float
    softcap: float = 0.0
    dropout: float = 0.0
    q_offset: int = 0
    batch_offset: int = 0
    head_offset: int = 0
    kernel: str = "auto"
    deterministic: bool = False
    group: str = ""
    schedule: str = "auto"
    layout: Layout | None = None
    k_layout: Layout | None = None
    gathered_rank: int = -1
    reduce_dtype: str = ""
    transport: str = "auto"
    needs_lse: bool = True
    will_backward: bool = False

    def features(self, x: CallTensors) -> Features:
        """Return the parameters that kernels take besides q, k, v and the mask.

        Args:
            x: The tensors of the call. Reading a seed on a GPU waits for it.
        """
        seed = 0 if x.seed is None else int(x.seed)
        return Features(
            *(self.scale, self.softcap, self.dropout, seed, self.batch_offset, self.head_offset),
            *(x.alibi_slopes, x.sink_logits),
        )

    def canonical(self) -> AttentionSpec:
        """Return the same spec with its mask in canonical form, in which ranks compare it.

        Reads the values of document lengths, so torch.compile must not trace it.
        """
        return self._replace(mask=self.mask.canonical())

    def encode(self) -> Encoded:
        """Return the spec as arguments of the op. Reads no values of tensors, so torch.compile can trace it."""
        mask, lengths = self.mask.pack()
        documents = [x if isinstance(x, Tensor) else torch.from_numpy(x) for x in lengths]
        texts = (
            *(mask, self.kernel, _flag(self.deterministic), self.group, self.schedule),
            *(_text(self.layout), _text(self.k_layout), str(self.gathered_rank), self.reduce_dtype, self.transport),
            *(_flag(self.needs_lse), _flag(self.will_backward)),
        )
        numbers, offsets = (
            [self.scale, self.softcap, self.dropout],
            [self.q_offset, self.batch_offset, self.head_offset],
        )
        return Encoded(documents, _SEPARATOR.join(texts), numbers, offsets)

    @staticmethod
    def decode(
        documents: Sequence[Tensor], text: str, numbers: Sequence[float], offsets: Sequence[int]
    ) -> AttentionSpec:
        """Return the spec that `encode` encoded, with its mask in canonical form.

        Args:
            documents: The document lengths and slices of the mask.
            text: The fields that are texts, flags and layouts, in one text.
            numbers: The fields that are floating-point numbers.
            offsets: The fields that are offsets.

        >>> spec = AttentionSpec(Mask.causal() & Mask.documents([2, 3]), 0.5, layout=Layout.zigzag(8, 2))
        >>> AttentionSpec.decode(*spec.encode()) == spec
        True
        """
        return _decode(tuple(_frozen(x) for x in documents), text, tuple(numbers), tuple(offsets))


def schedule_of(text: str) -> str:
    """Return the schedule of an encoded spec, or "" on a single device. torch.compile can trace it.

    Args:
        text: The text of the encoded spec.
    """
    texts = text.split(_SEPARATOR)
    return texts[4] if texts[3] else ""


def _flag(value: bool) -> str:
    return "1" if value else ""


def _text(layout: Layout | None) -> str:
    return "" if layout is None else layout.text()


_Frozen = tuple[bytes, str, torch.Size]


def _frozen(lengths: Tensor) -> _Frozen:
    array = lengths.cpu().numpy()
    return array.tobytes(), array.dtype.str, lengths.shape


@lru_cache(maxsize=256)
def _decode(
    documents: tuple[_Frozen, ...], text: str, numbers: tuple[float, ...], offsets: tuple[int, ...]
) -> AttentionSpec:
    """Return a decoded spec. Equal specs share one mask, which keeps what it computed about itself."""
    arrays = [np.frombuffer(data, dtype).reshape(shape) for data, dtype, shape in documents]
    mask, kernel, fixed, group, schedule, layout, k_layout, rank, reduce_dtype, transport, lse, backward = text.split(
        _SEPARATOR
    )
    layouts = [Layout.parse(each) if each else None for each in (layout, k_layout)]
    fields: Any = (
        *(Mask.unpack(mask, arrays).canonical(), *numbers, *offsets, kernel, bool(fixed), group, schedule),
        *(*layouts, int(rank), reduce_dtype, transport, bool(lse), bool(backward)),
    )
    return AttentionSpec(*fields)
