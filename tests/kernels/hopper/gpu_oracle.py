"""Inputs, float64 references and comparisons for the tests of the Hopper kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshflash import Mask
from meshflash.kernels.contract import Grads, Inputs, Rows
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.hopper.support import has_gluon
from meshflash.kernels.tiled import Tiled

#: Marks of every module that runs the Hopper kernels.
needs_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not has_gluon(torch.device("cuda")), reason="needs a Hopper GPU"
    ),
]

CAUSAL = Mask.causal()
DIMS = (64, 128)
#: Document lengths, 700 tokens in all: a short one first, and some that share a block with others.
LENGTHS = [5, 63, 1, 64, 200, 128, 239]


def tensors(batch, q_tokens, k_tokens, heads, kv_heads, dim):
    """Return random (q, k, v, dout)."""
    shapes = ((q_tokens, heads), (k_tokens, kv_heads), (k_tokens, kv_heads), (q_tokens, heads))
    return [torch.randn(batch, *shape, dim, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def float64_reference(x: Inputs, dout: Tensor) -> tuple[Rows, Grads]:
    """Return a backward's row inputs (out, dout, lse, delta) and the gradients, computed in float64."""
    doubles = x._replace(q_BTHD=x.q_BTHD.double(), k_BSKD=x.k_BSKD.double(), v_BSKE=x.v_BSKE.double())
    out, lse = Tiled().forward(doubles)
    delta = (out * dout.double()).sum(-1).transpose(1, 2).contiguous()
    grads = Tiled().backward(doubles, Rows(out, dout.double(), lse, delta))
    return Rows(out.to(dout.dtype), dout, lse.float(), delta.float()), grads


def assert_rows_close(got: Tensor, want: Tensor) -> None:
    """Compare every 64 rows separately, so that a missing or doubled block cannot hide among others."""
    for a, b in zip(got.double().split(64, 1), want.split(64, 1), strict=True):
        assert (a - b).norm() <= 0.02 * b.norm() + 1e-3


def check_adds_to_existing_gradients(x: Inputs, dout: Tensor, kernel: Hopper, like=torch.ones_like) -> None:
    """Check a ring step's backward, which adds its gradients to existing ones."""
    rows, want = float64_reference(x, dout)
    dq, dk, dv = (like(y, dtype=torch.float32) for y in (x.q_BTHD, x.k_BSKD, x.v_BSKE))
    kernel.backward(x, rows, Grads(dq, dk, dv, add_dq=True, add_dkv=True))
    for y, z in zip((dq, dk, dv), (want.dq_BTHD, want.dk_BSKD, want.dv_BSKE), strict=True):
        assert_rows_close(y - 1, z)
