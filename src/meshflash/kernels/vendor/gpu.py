"""Vendor kernels for GPUs behind the contract: cuDNN and FlashAttention 2, 3 and 4.

Each takes half precision and returns partial results in it: they are merged and summed in float32, but were rounded to
half precision once. Packages are used where they can be imported, and never installed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshflash.kernels.contract import HALF, Kernel, KernelRequest, Outputs, Rows
from meshflash.kernels.vendor.rectangles import Rectangles

#: The oldest cuDNN whose wide heads were tested: on Hopper, by comparing both passes with float64.
OLDEST_WIDE_CUDNN = 91900


class HeadDims(NamedTuple):
    """The head dims that a kernel computes correctly: multiples of a number up to the largest one.

    Args:
        largest: The largest head dim.
        multiple: Head dims must be a multiple of this.
        own_value_dim: Whether values may have another head dim than keys, within the same limits.
        pairs: Pairs of a head dim and another value dim that are right without GQA.
    """

    largest: int
    multiple: int
    own_value_dim: bool = False
    pairs: tuple[tuple[int, int], ...] = ()

    def unsupported_pair(self, head_dim: int, value_dim: int, gqa: bool) -> str | None:
        """Return what is not supported about head dims, or None."""
        if head_dim != value_dim and not self.own_value_dim:
            pair = f"a value dim of {value_dim} with a head dim of {head_dim}"
            if (head_dim, value_dim) not in self.pairs:
                return pair
            return f"{pair} and GQA" if gqa else None
        for name, dim in (("head", head_dim), ("value", value_dim)):
            if dim % self.multiple or dim > self.largest:
                return f"a {name} dim of {dim}; it takes multiples of {self.multiple} up to {self.largest}"
        return None


class _OnGpu(Rectangles):
    """Base of the GPU vendor kernels: half precision, some head dims."""

    #: The lowest compute capability (major, minor) of NVIDIA GPUs that the kernel runs on.
    min_capability = (8, 0)
    #: The first compute capability above it that the kernel does not run on; (99, 0) for no limit.
    first_unsupported_capability = (99, 0)
    #: Whether the kernel also runs on AMD GPUs.
    supports_amd = False
    #: Whether the backward has a mode that sums in a fixed order, and so gives the same bits twice.
    supports_deterministic = False

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def head_dims(self, device: torch.device) -> HeadDims:
        """Return the head dims that the kernel serves on a GPU.

        Args:
            device: The GPU.
        """
        return HeadDims(256, 8)

    def release(self) -> None:
        _no_dropout.cache_clear()

    def serving(self, request: KernelRequest) -> Kernel:
        return type(self)(request.deterministic) if request.deterministic != self.deterministic else self

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        if request.device.type != "cuda" or (torch.version.hip and not self.supports_amd):
            return f"the device {request.device.type}; it runs on NVIDIA's GPUs{' and AMD' * self.supports_amd}"
        if (
            not torch.version.hip
            and not self.min_capability <= _capability(request.device) < self.first_unsupported_capability
        ):
            return "this GPU's compute capability, {}.{}".format(*_capability(request.device))
        if request.dtype not in HALF:
            return f"{request.dtype}"
        dims = self.head_dims(request.device)
        if reason := dims.unsupported_pair(request.head_dim, request.value_dim, request.gqa):
            return reason
        if request.features.scale <= 0:
            return "a scale of 0 or below"
        if request.direction == "backward" and request.deterministic and not self.supports_deterministic:
            return "a backward that gives the same bits twice"
        return super().unsupported_reason(request)


class Cudnn(_OnGpu):
    """cuDNN's flash attention, called through torch."""

    name = "cudnn"
    summary = "cuDNN through torch: NVIDIA GPUs, full and causal, few documents, GQA, half precision"
    op_has_derivative = True
    torch_autograd_seconds = 20e-6  # the op takes heads first: torch records four transposes and a copy
    #: The most rectangles of one call. cuDNN plans each new shape for milliseconds, and documents of ever new lengths
    #: would never amortize that.
    max_rectangles = 8

    def head_dims(self, device: torch.device) -> HeadDims:
        wide = _capability(device) == (9, 0) and _cudnn_version() >= OLDEST_WIDE_CUDNN
        return HeadDims(256, 8, own_value_dim=True) if wide else HeadDims(128, 8)

    def missing(self) -> str | None:
        if not hasattr(torch, "_scaled_dot_product_cudnn_attention"):
            return "this torch has no cuDNN attention"
        if not torch.cuda.is_available():
            return "an NVIDIA GPU"
        return None if torch.backends.cudnn.is_available() else "cuDNN, which this torch was built without"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        reason = super().unsupported_reason(request)
        rectangles = request.work.rectangles
        if reason or rectangles is None:
            return reason
        if len(rectangles) > self.max_rectangles:
            return f"masks of more than {self.max_rectangles} rectangles: it plans anew for each shape"
        if any(r.q.stop - r.q.start == r.k.stop - r.k.start == 1 for r in rectangles):
            return "a backward for one query that sees one key"
        return None

    def attend(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, causal: bool, scale: float) -> Outputs:
        q, k, v = q_BTHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKE.transpose(1, 2)
        out, lse, *_ = torch._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def gradients(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, rows: Rows, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads_first = (x.transpose(1, 2) for x in (rows.dout_BTHE, q_BTHD, k_BSKD, v_BSKE, rows.out_BTHE))
        nothing = _no_dropout(q_BTHD.device)
        lengths = (None, None, q_BTHD.shape[1], k_BSKD.shape[1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *heads_first, rows.lse_BHT.contiguous().unsqueeze(-1), *nothing, None, *lengths, 0.0, causal, scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Flash2(_OnGpu):
    """FlashAttention-2 as torch ships it."""

    name = "fa2"
    summary = "FlashAttention-2 through torch: NVIDIA and AMD GPUs, full, causal, documents, GQA, half precision"
    supports_amd = True
    causal_from_top_left = False
    op_has_derivative = True

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "a GPU"
        built = torch.backends.cuda.is_flash_attention_available()
        return None if built else "FlashAttention, which this torch was built without"

    def attend(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, causal: bool, scale: float) -> Outputs:
        lengths = (None, None, q_BTHD.shape[1], k_BSKD.shape[1])
        out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            q_BTHD, k_BSKD, v_BSKE, *lengths, 0.0, causal, False, scale=scale
        )
        return out, lse[..., : q_BTHD.shape[1]]

    def gradients(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, rows: Rows, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = (None, None, q_BTHD.shape[1], k_BSKD.shape[1])
        inputs = (rows.dout_BTHE, q_BTHD, k_BSKD, v_BSKE, rows.out_BTHE, rows.lse_BHT.contiguous())
        nothing = _no_dropout(q_BTHD.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(*inputs, *lengths, 0.0, causal, *nothing, scale=scale)
        return dq, dk, dv


class _Package(_OnGpu):
    """A package of FlashAttention's authors. Versions name arguments differently: a call passes those that exist."""

    module: str
    #: The names of the forward and the backward function in the module.
    function_names = ("_flash_attn_forward", "_flash_attn_backward")
    causal_from_top_left = False
    supports_deterministic = True

    def missing(self) -> str | None:
        if _import_module(self.module) is None:
            return f"the package {self.module}, which cannot be imported"
        return None if torch.cuda.is_available() else "a GPU"

    def attend(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, causal: bool, scale: float) -> Outputs:
        name, _ = self.function_names
        given = dict(q=q_BTHD, k=k_BSKD, v=v_BSKE, softmax_scale=scale, causal=causal)
        out, lse, *_ = _call(self.module, name, **_PLAIN, **given)
        return out, lse

    def gradients(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, rows: Rows, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, name = self.function_names
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BTHD, k_BSKD, v_BSKE))
        lse = rows.lse_BHT.contiguous()
        _call(
            self.module,
            name,
            **_PLAIN,
            **dict(q=q_BTHD, k=k_BSKD, v=v_BSKE, out=rows.out_BTHE, dout=rows.dout_BTHE, lse=lse, softmax_lse=lse),
            **dict(dq=dq, dk=dk, dv=dv, softmax_scale=scale, causal=causal, deterministic=self.deterministic),
        )
        return dq, dk, dv


class Flash2Package(_Package):
    """FlashAttention-2, from its package."""

    name = "fa2-package"
    summary = "the package flash-attn: NVIDIA GPUs from Ampere on, full, causal, documents, GQA, half precision"
    module = "flash_attn.flash_attn_interface"


class Flash3(_Package):
    """FlashAttention-3, from its package."""

    name = "fa3"
    summary = "the package flash-attn-3: Hopper, full, causal, documents, GQA, half precision"
    module = "flash_attn_interface"
    min_capability, first_unsupported_capability = (9, 0), (10, 0)


class Flash4(_Package):
    """FlashAttention-4, from its package."""

    name = "fa4"
    summary = "the package flash-attn-4: Hopper and Blackwell, full, causal, documents, GQA, half precision"
    module = "flash_attn.cute.interface"
    min_capability = (9, 0)
    function_names = ("_flash_attn_fwd", "_flash_attn_bwd")

    def head_dims(self, device: torch.device) -> HeadDims:
        # Tried with 4.0.0b36 on Hopper: gradients of queries are wrong at 8, 16, 40, 48, 72 and 80, and 104 does not
        # compile. Of value dims of their own, 128/64 is less exact than plain PyTorch, 64/256 does not compile, and
        # with GQA its backward refuses all. Other dims than 32, 64, 96 and 128 were not tried on other GPUs.
        return HeadDims(256, 32, pairs=((192, 128),)) if _capability(device) == (9, 0) else HeadDims(128, 32)


#: Arguments with the same value in every call, under all names that versions of the packages give them.
_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "return_softmax": False,
    "return_lse": True,
}


def _call(module: str, name: str, **values: Any) -> Any:
    """Call a package's function with the values that it takes; other required arguments are None."""
    function, parameters = _function_and_parameters(module, name)
    chosen = {key: values[key] for key in parameters if key in values}
    return function(**{key: None for key, needed in parameters.items() if needed and key not in chosen} | chosen)


@cache
def _function_and_parameters(module: str, name: str) -> tuple[Callable[..., Any], dict[str, bool]]:
    """Return a package's function, and for each of its parameters whether it is required."""
    function = getattr(_import_module(module), name)
    parameters = {
        key: parameter.default is inspect.Parameter.empty
        for key, parameter in inspect.signature(getattr(function, "_init_fn", function)).parameters.items()
    }
    return function, parameters


@cache
def _import_module(module: str) -> Any:
    """Return a module, or None if importing it fails for any reason."""
    try:
        return importlib.import_module(module) if find_spec(module.partition(".")[0]) else None
    except Exception:
        return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


@cache
def _cudnn_version() -> int:
    """Return the version of cuDNN, such as 91900 for 9.19.0; 0 if there is none."""
    return torch.backends.cudnn.version() or 0


@cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the seed and offset that the backward takes; without dropout it does not read them."""
    return torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)
