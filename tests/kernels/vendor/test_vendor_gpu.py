"""Vendor kernels (cuDNN, FlashAttention): unsupported rectangles are split, and each version gets its own arguments."""

import sys
from types import ModuleType

import pytest
import torch

from cases import CASES
from meshflash import Mask
from meshflash.check.oracle import Case, check, gradients, replace
from meshflash.core.tiles import worklist
from meshflash.engine import local
from meshflash.kernels import registry
from meshflash.kernels.contract import Features, KernelRequest, Rows
from meshflash.kernels.reference import Reference
from meshflash.kernels.vendor import gpu as vendor_gpu
from meshflash.kernels.vendor.cpu import Vendor
from meshflash.kernels.vendor.gpu import Cudnn, Flash2, Flash2Package, Flash3, Flash4

CAUSAL = Mask.causal()


class BottomAlignedVendor(Vendor):
    """A kernel whose causal mask is aligned to the last query and key, as FlashAttention's is."""

    name = "vendor"
    causal_from_top_left = False

    def attend(self, q, k, v, causal, scale):
        assert not causal or q.shape[1] == k.shape[1]
        return super().attend(q, k, v, causal, scale)

    def gradients(self, q, k, v, rows, causal, scale):
        assert not causal or q.shape[1] == k.shape[1]
        return super().gradients(q, k, v, rows, causal, scale)


@pytest.mark.parametrize(
    "case",
    [
        CASES["causal"][0],
        Case(CAUSAL, tokens=37, k_tokens=21),
        Case(CAUSAL, tokens=21, k_tokens=37),
        Case(CAUSAL, tokens=37, k_tokens=21, sinks=True),
        CASES["cross documents"][0],
    ],
    ids=lambda case: f"{case.tokens} x {case.k_tokens}",
)
def test_causal_rectangles_are_split_into_squares_for_bottom_aligned_kernels(case, monkeypatch):
    registry.forget()
    monkeypatch.setitem(registry._KERNELS, "vendor", BottomAlignedVendor())
    leaves = case.inputs(torch.float32)
    check(gradients(case.run(leaves, "vendor"), leaves, case), case, leaves)
    registry.forget()


def make_request(**more):
    """Return a causal forward request on a GPU, with some fields replaced."""
    work = worklist(CAUSAL, (range(64),), (range(64),))
    made = KernelRequest("forward", torch.device("cuda"), torch.bfloat16, 64, 64, work, Features(0.125))
    return replace(made, **more)


@pytest.fixture
def hopper_gpu(monkeypatch):
    """Make vendor kernels believe in a Hopper GPU."""
    monkeypatch.setattr(vendor_gpu, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(vendor_gpu, "_cudnn_version", lambda: vendor_gpu.OLDEST_WIDE_CUDNN)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.usefixtures("hopper_gpu")
def test_flash_attention_4_refuses_head_dims_with_wrong_gradients():
    assert "multiples of 32" in (Flash4().unsupported_reason(make_request(head_dim=80, value_dim=80)) or "")
    assert Flash4().unsupported_reason(make_request(head_dim=96, value_dim=96)) is None


def test_flash_attention_4_serves_wide_heads_on_hopper_alone(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    wide = make_request(head_dim=192, value_dim=192)
    for capability, served in (((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr(vendor_gpu, "_capability", lambda device, found=capability: found)
        assert (Flash4().unsupported_reason(wide) is None) == served
        assert Flash4().unsupported_reason(make_request()) is None


@pytest.mark.usefixtures("hopper_gpu")
def test_vendor_kernels_name_unsupported_arguments():
    for kernel in (Cudnn(), Flash2(), Flash2Package(), Flash3(), Flash4()):
        assert kernel.unsupported_reason(make_request()) is None, kernel.name
        for wanted, word in (
            (dict(device=torch.device("cpu")), "device cpu"),
            (dict(dtype=torch.float32), "float32"),
            (dict(head_dim=68, value_dim=68), "head dim of 68"),
            (dict(head_dim=512, value_dim=512), "head dim of 512"),
            (dict(features=Features(0.1, softcap=2.0)), "softcap"),
            (dict(lse_gradient=True), "LSE"),
            (dict(work=worklist(Mask.window(4, 0), (range(9),), (range(9),))), "windows"),
        ):
            assert word in (kernel.unsupported_reason(make_request(**wanted)) or ""), (kernel.name, word)


@pytest.mark.usefixtures("hopper_gpu")
def test_only_cudnn_takes_any_value_dim_of_its_own():
    request = make_request(head_dim=192, value_dim=128)
    assert Cudnn().unsupported_reason(request) is None
    assert "value dim of 260" in (Cudnn().unsupported_reason(make_request(head_dim=192, value_dim=260)) or "")
    for kernel in (Flash2(), Flash2Package(), Flash3()):
        assert "value dim of 128" in (kernel.unsupported_reason(request) or ""), kernel.name


@pytest.mark.usefixtures("hopper_gpu")
def test_flash_attention_4_takes_the_dims_of_latent_attention_without_gqa():
    request = make_request(head_dim=192, value_dim=128)
    assert Flash4().unsupported_reason(request) is None
    assert (
        Flash4().unsupported_reason(replace(request, gqa=True)) == "a value dim of 128 with a head dim of 192 and GQA"
    )
    other = make_request(head_dim=128, value_dim=64)
    assert Flash4().unsupported_reason(other) == "a value dim of 64 with a head dim of 128"


def test_cudnn_serves_wide_heads_on_hopper_alone(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    wide = make_request(head_dim=256, value_dim=256)
    cases = (((8, 0), 91900, False), ((9, 0), 91900, True), ((9, 0), 91000, False), ((10, 0), 91900, False))
    for capability, version, served in cases:
        monkeypatch.setattr(vendor_gpu, "_capability", lambda device, found=capability: found)
        monkeypatch.setattr(vendor_gpu, "_cudnn_version", lambda found=version: found)
        assert (Cudnn().unsupported_reason(wide) is None) == served
        assert Cudnn().unsupported_reason(make_request()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "fa2", "fa2-package", "fa3", "fa4"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_head_dim_that_a_vendor_kernel_claims_is_right(kernel, causal):
    found = registry.find(kernel)
    assert isinstance(found, vendor_gpu._OnGpu)
    if reason := registry.refusal(found, make_request()):
        pytest.skip(reason)
    dims = found.head_dims(torch.device("cuda"))
    runs = [(dim, dim, 2) for dim in range(dims.multiple, dims.largest + 1, dims.multiple)]
    if dims.own_value_dim:
        runs += [(192, 128, 2), (128, 192, 2), (64, 256, 2), (256, 8, 2)]
    runs += [(dim, value_dim, 4) for dim, value_dim in dims.pairs]
    wrong = {}
    for dim, value_dim, kv_heads in runs:
        mask = CAUSAL if causal else Mask.full()
        case = Case(mask, tokens=130, heads=4, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
        leaves = case.inputs(torch.bfloat16, "cuda")
        try:
            check(gradients(case.run(leaves, kernel), leaves, case), case, leaves)
        except AssertionError as error:
            wrong[dim, value_dim] = str(error)
    assert not wrong


@pytest.mark.usefixtures("hopper_gpu")
def test_only_flash_attention_3_supports_a_deterministic_backward():
    backward = make_request(direction="backward", deterministic=True)
    assert "same bits" in (Cudnn().unsupported_reason(backward) or "")
    assert "same bits" in (Flash2().unsupported_reason(backward) or "")
    served = Flash3().serving(backward)
    assert Flash3().unsupported_reason(backward) is None
    assert isinstance(served, Flash3)
    assert served.deterministic


def test_unsupported_compute_capabilities_are_named(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(vendor_gpu, "_capability", lambda device: (10, 0))
    assert "capability, 10.0" in (Flash3().unsupported_reason(make_request()) or "")
    monkeypatch.setattr(vendor_gpu, "_capability", lambda device: (7, 5))
    assert "capability, 7.5" in (Cudnn().unsupported_reason(make_request()) or "")


@pytest.mark.usefixtures("hopper_gpu")
def test_cudnn_refuses_many_rectangles_and_single_element_ones():
    many = worklist(CAUSAL & Mask.documents([4] * 16), (range(64),), (range(64),))
    assert "more than 8 rectangles" in (Cudnn().unsupported_reason(make_request(work=many)) or "")
    assert Flash2().unsupported_reason(make_request(work=many)) is None
    single = worklist(CAUSAL & Mask.documents([1, 63]), (range(64),), (range(64),))
    assert "one query that sees one key" in (Cudnn().unsupported_reason(make_request(work=single)) or "")


def reference_inputs(q, k, v, causal, scale):
    return local.inputs(q, k, v, CAUSAL if causal else Mask.full(), Features(scale))


def forward_by_window(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                      alibi_slopes, return_softmax):  # fmt: skip
    """The forward of flash_attn 2, whose window is two arguments."""
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
    return *Reference().forward(reference_inputs(q, k, v, causal, softmax_scale)), None, None


def backward_by_window(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
                       window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):  # fmt: skip
    """The backward of flash_attn 2 and 3."""
    assert deterministic
    delta = (dout * out).sum(-1).transpose(1, 2)
    grads = Reference().backward(reference_inputs(q, k, v, causal, softmax_scale), Rows(out, dout, softmax_lse, delta))
    for target, value in ((dq, grads.dq_BTHD), (dk, grads.dk_BSKD), (dv, grads.dv_BSKE)):
        target.copy_(value)


def forward_by_pair(q, k, v, k_new, cu_seqlens_q, softmax_scale, causal, window_size=(-1, -1), num_splits=1):
    """The forward of flash_attn 3, whose window is a pair."""
    assert k_new is cu_seqlens_q is None
    assert num_splits == 1
    return *Reference().forward(reference_inputs(q, k, v, causal, softmax_scale)), None


def forward_of_version_4(q, k, v, softmax_scale=None, causal=False, softcap=None, return_lse=False):
    """The forward of flash_attn 4."""
    assert return_lse
    return Reference().forward(reference_inputs(q, k, v, causal, softmax_scale))


def backward_of_version_4(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, deterministic=False,
                     dq=None, dk=None, dv=None):  # fmt: skip
    """The backward of flash_attn 4."""
    backward_by_window(dout, q, k, v, out, lse, dq, dk, dv, 0.0, softmax_scale, causal, -1, -1, 0.0, None,
                       deterministic)  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "functions"),
    [
        (Flash2Package(True), (forward_by_window, backward_by_window)),
        (Flash3(True), (forward_by_pair, backward_by_window)),
        (Flash4(True), (forward_of_version_4, backward_of_version_4)),
    ],
    ids=["fa2", "fa3", "fa4"],
)
def test_each_flash_attention_version_gets_its_own_arguments(kernel, functions, monkeypatch):
    module = ModuleType(kernel.module)
    for name, function in zip(kernel.function_names, functions, strict=True):
        setattr(module, name, function)
    monkeypatch.setattr(vendor_gpu, "_import_module", lambda name: module)
    vendor_gpu._function_and_parameters.cache_clear()
    q, k, v, dout = (torch.randn(1, 9, 2, 16) for _ in range(4))
    x = reference_inputs(q, k, v, True, 0.25)
    want = Reference().forward(x)
    out, lse = kernel.attend(q, k, v, True, 0.25)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    rows = Rows(out, dout, lse, (dout * out).sum(-1).transpose(1, 2))
    grads = Reference().backward(x, rows)
    got = kernel.gradients(q, k, v, rows, True, 0.25)
    assert all(torch.equal(a, b) for a, b in zip(got, (grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE), strict=True))
    vendor_gpu._function_and_parameters.cache_clear()


@pytest.mark.usefixtures("hopper_gpu")
def test_vendor_kernel_whose_package_cannot_be_imported_is_refused():
    assert "cannot be imported" in (registry.refusal(Flash3(), make_request()) or "")


def test_packages_are_not_imported_for_unsupported_calls(monkeypatch):
    monkeypatch.setattr(vendor_gpu, "_import_module", lambda module: pytest.fail(f"{module} was looked for"))
    assert "device cpu" in (registry.refusal(Flash4(), make_request(device=torch.device("cpu"))) or "")


@pytest.mark.usefixtures("hopper_gpu")
def test_stub_of_a_package_counts_as_not_importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    vendor_gpu._import_module.cache_clear()
    assert "cannot be imported" in (registry.refusal(Flash4(), make_request()) or "")
    vendor_gpu._import_module.cache_clear()
