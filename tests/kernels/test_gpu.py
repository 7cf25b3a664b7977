"""The kernels that run on a GPU, against the oracle there: run with `-m gpu`."""

import pytest
import torch

from cases import CASES
from meshflash import Mask, flash_attention
from meshflash.kernels.registry import spy
from oracle import Case, check, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def ieee_matmul():
    """float32 products in float32, whatever an earlier test asked for."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_auto_on_a_gpu(name, dtype):
    case = CASES[name][0]
    leaves = case.inputs(dtype, "cuda")
    with spy() as ran:
        got = gradients(case.run(leaves), leaves, case)
    chosen = "tiled" if dtype == torch.float64 or max(case.dim, case.value_dim or 0) > 256 else "triton"
    assert [kernel for kernel, _ in ran] == [chosen] * 2
    check(got, case, leaves)


def test_dropout_keeps_the_same_pairs_on_a_gpu_and_on_a_cpu():
    case = Case(Mask.causal(), heads=4, kv_heads=2, dropout=0.4)
    leaves = case.inputs(torch.float32)
    on_gpu = {name: x.detach().cuda() for name, x in leaves.items()}
    assert torch.allclose(case.run(leaves)[0], case.run(on_gpu)[0].cpu(), atol=1e-5)


def test_vendor_names_the_device():
    x = torch.zeros(1, 4, 1, 8, device="cuda")
    with pytest.raises(ValueError, match="lacks the device cuda; it runs on cpu"):
        flash_attention(x, x, x, kernel="vendor")


def test_tensors_on_two_devices_are_refused():
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="must be on one device; got q cpu, k cuda:0"):
        flash_attention(x, x.cuda(), x.cuda())


def test_cu_seqlens_on_the_gpu():
    q, k, v = (torch.randn(11, 2, 8, device="cuda") for _ in range(3))
    cu_seqlens = torch.tensor([0, 4, 11], device="cuda", dtype=torch.int32)
    got = flash_attention(q, k, v, mask=Mask.from_cu_seqlens(cu_seqlens))
    assert torch.equal(got, flash_attention(q, k, v, mask=Mask.documents([4, 7])))


def test_inductor_on_a_gpu():
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 33, 2, 16, device="cuda", requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda *x: flash_attention(*x, mask=Mask.causal()) * 2, fullgraph=True)
    assert torch.allclose(compiled(q, k, v), 2 * flash_attention(q, k, v, mask=Mask.causal()), atol=1e-5)
