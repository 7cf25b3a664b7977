"""The candidates of a comparison: our kernels by name, torch's SDPA and FlexAttention, and standard attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from meshflash.api import flash_attention
from meshflash.bench.cases import Case, on_cpu
from meshflash.kernels import registry
from meshflash.runtime.oom import free_bytes

SDPA = "torch sdpa"
STANDARD = "standard"
FLEX = "flex"

#: SDPA gets no mask matrix of more rows than this; the dense oracle ends here too.
DENSE_TOKENS = 4096
#: Number of score matrices that standard attention holds at once over both passes, besides the mask.
STANDARD_MATRICES = 4

#: Our own GPU kernels, the faster one first.
OWN_KERNELS = ("hopper", "triton")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def own_kernel(device: str) -> str:
    """Return the fastest of our own kernels that runs on a GPU: "hopper" on Hopper, "triton" elsewhere."""
    from meshflash.kernels.hopper.support import has_gluon

    return "hopper" if torch.cuda.is_available() and has_gluon(torch.device(device)) else "triton"


def own_among(names: Sequence[str]) -> str:
    """Return our own kernel among the names of a comparison, else the first of them."""
    return next((name for name in OWN_KERNELS if name in names), names[0])


def check_names(names: tuple[str, ...]) -> None:
    """Raise ValueError for a name that is no candidate."""
    known = (*registry.names(), SDPA, STANDARD, FLEX)
    for name in names:
        if name not in known:
            raise ValueError(f"kernel {name!r}: expected one of {', '.join(known)}")


def candidate(case: Case, name: str) -> Attention:
    """Return the candidate of this name, a function of `[batch, tokens, heads, dim]` tensors."""
    check_names((name,))
    if name == SDPA:
        return _by_heads(sdpa(case))
    if name == STANDARD:
        return _by_heads(standard(case))
    if name == FLEX:
        return _by_heads(flex(case))
    return partial(flash_attention, mask=case.rule, kernel=name, deterministic=case.deterministic)


def sdpa(case: Case) -> Attention:
    """Return torch's scaled_dot_product_attention, on `[batch, heads, tokens, dim]`.

    Masks other than full and causal are a matrix for it, made here once and not timed.
    """
    matrix = None
    if case.mask not in ("full", "causal"):
        if case.tokens > DENSE_TOKENS:
            raise ValueError(f"{SDPA} would need a matrix of {case.tokens} x {case.tokens} for the mask {case.mask}")
        matrix = _visible(case)
    return partial(
        functional.scaled_dot_product_attention,
        attn_mask=matrix,
        is_causal=case.mask == "causal",
        enable_gqa=case.heads != case.kv_heads,
    )


def standard(case: Case) -> Attention:
    """Return softmax(Q K^T) V in plain torch, on `[batch, heads, tokens, dim]`: every score is held in memory.

    It is a baseline that the library never runs. The mask is made here once and not timed. On a CPU it raises
    OutOfMemoryError before it takes all memory.
    """
    matrix = case.batch * case.heads * case.tokens**2 * case.torch_dtype.itemsize
    free = free_bytes() if on_cpu(case.device) else None
    if free is not None and STANDARD_MATRICES * matrix + case.tokens**2 > free:
        raise torch.OutOfMemoryError(f"{STANDARD}: {STANDARD_MATRICES} matrices of {matrix} bytes, {free} are free")
    hidden = None if case.mask == "full" else _visible(case).logical_not_()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.heads != case.kv_heads:
            k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
        scores = (q * case.head_dim**-0.5) @ k.mT
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, dim=-1) @ v

    return attention


def flex(case: Case) -> Attention:
    """Return torch's FlexAttention, compiled for this shape, on `[batch, heads, tokens, dim]`; the mask is untimed."""
    if case.mask not in ("full", "causal"):
        raise ValueError(f"{FLEX} is compared on full and causal masks, not on {case.mask}")
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # dynamo stops compiling after eight shapes
    config.donated_buffer = False  # a timed backward runs over one graph several times
    blocks = None
    if case.mask == "causal":
        shape = (None, None, case.tokens, case.tokens)
        blocks = create_block_mask(lambda b, h, i, j: i >= j, *shape, device=case.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=blocks, enable_gqa=case.heads != case.kv_heads)


def _by_heads(attention: Attention) -> Attention:
    """Turn a function of `[batch, heads, tokens, dim]` into one of `[batch, tokens, heads, dim]`."""
    return lambda q, k, v: attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _visible(case: Case) -> Tensor:
    """Return the mask as a matrix on the device, made some rows at a time."""
    matrix = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device=case.device)
    if case.mask == "causal":
        return matrix.tril_()
    j = torch.arange(case.tokens).numpy()
    for i in torch.arange(case.tokens).split(512):
        matrix[i[0] : i[-1] + 1] = torch.from_numpy(case.rule.visible(i.numpy()[:, None], j)).to(case.device)
    return matrix
