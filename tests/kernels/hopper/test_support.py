"""Whether the Hopper kernels are on: devices, the switch, versions of Triton, and remembered verdicts."""

from __future__ import annotations

import logging

import pytest
import torch

from meshflash import Mask, __version__
from meshflash.core.tiles import worklist
from meshflash.kernels import rates, registry
from meshflash.kernels.contract import Features, KernelRequest
from meshflash.kernels.hopper import support
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.hopper.support import Verdict

triton = pytest.importorskip("triton")
GPU = torch.device("cuda")


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Return a function that pretends a GPU, a version of Triton and a value of MESHFLASH_GLUON."""

    def machine(version="3.9.0", switch=None, capability=(9, 0), name="NVIDIA H200"):
        monkeypatch.setenv("MESHFLASH_RATES", str(tmp_path))
        if switch is None:
            monkeypatch.delenv("MESHFLASH_GLUON", raising=False)
        else:
            monkeypatch.setenv("MESHFLASH_GLUON", switch)
        monkeypatch.setattr(support, "has_descriptors", lambda device: capability >= (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(rates, "identity", lambda device: (name, "sm_{}{}".format(*capability)))
        monkeypatch.setattr(triton, "__version__", version)
        support.forget()

    yield machine
    support.forget()
    registry.forget()


def request(dim=64, dtype=torch.bfloat16, device=GPU, direction="forward", features=Features(0.1)):  # noqa: B008
    work = worklist(Mask.causal(), (range(64),), (range(64),))
    return KernelRequest(direction, device, dtype, dim, dim, work, features)


@pytest.mark.parametrize("version", [f"{tested}.0" for tested in support.TRITON_VERSIONS])
def test_kernels_are_on_with_each_tested_triton(pretend, version):
    pretend(version)
    assert support.kernels_off(GPU) is None
    assert support.has_gluon(GPU)
    assert Hopper().unsupported_reason(request()) is None


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_are_named_without_a_remedy(pretend, capability):
    pretend(capability=capability, name="a GPU")
    off = support.kernels_off(GPU)
    assert off is not None
    assert not off.fixable
    assert off.reason == "a GPU (sm_{}{}) is not a Hopper GPU".format(*capability)


def test_kernel_asked_for_by_name_is_refused_with_reason_and_remedy(pretend):
    assert Hopper().unsupported_reason(request(device=torch.device("cpu"))) == (
        "the device cpu; it runs on Hopper GPUs"
    )
    pretend(switch="0")
    assert Hopper().unsupported_reason(request()) == ("this machine (MESHFLASH_GLUON=0 is set; unset MESHFLASH_GLUON)")
    pretend("4.2.0")
    with pytest.raises(ValueError, match=r"not tested with Triton 4\.2\.0; run `meshflash calibrate`"):
        registry.choose("hopper", request())


def test_untested_triton_is_on_after_a_verdict_that_it_is_right(pretend):
    pretend("4.2.0")
    off = support.kernels_off(GPU)
    assert off is not None
    assert off.untested == "4.2.0"
    support.remember(GPU, Verdict("4.2.0", __version__, right=True))
    assert support.kernels_off(GPU) is None
    pretend("4.3.0")  # a verdict counts for its version alone
    assert not support.has_gluon(GPU)


def test_verdict_of_another_meshflash_does_not_count(pretend):
    pretend("4.2.0")
    support.remember(GPU, Verdict("4.2.0", "0.0.1", right=True))
    assert not support.has_gluon(GPU)


def test_failed_verdict_is_named_with_its_reason(pretend):
    pretend("4.2.0")
    support.remember(GPU, Verdict("4.2.0", __version__, right=False, reason="not done after 900 s"))
    off = support.kernels_off(GPU)
    assert off is not None
    assert str(off) == (
        "failed on this machine with Triton 4.2.0 (not done after 900 s); "
        "install Triton 3.6 to 3.9, or run `meshflash calibrate` again"
    )
    assert off.untested, "a trial may be repeated"


@pytest.mark.parametrize("text", ["", "[]", "null", '{"triton": 3}', '{"right": true, "more": 1}'])
def test_damaged_verdict_counts_as_none(pretend, text):
    pretend("4.2.0")
    support.remember(GPU, Verdict("4.2.0", __version__, right=True)).write_text(text)
    support.forget()
    off = support.kernels_off(GPU)
    assert off is not None
    assert off.untested


@pytest.fixture
def auto(monkeypatch, caplog):
    """Return a function that lets "auto" choose on a pretended GPU; the log starts empty."""
    monkeypatch.setattr(rates, "known", lambda device: None)
    for kernel in registry.kernels():
        monkeypatch.setattr(type(kernel), "missing", lambda self: None)
    for name in registry._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    registry._log_once.cache_clear()
    caplog.set_level(logging.INFO, "meshflash")
    yield lambda **more: registry.choose("auto", request(**more))
    registry._log_once.cache_clear()


def test_auto_says_once_in_the_log_and_in_each_plan_that_kernels_are_off(pretend, auto, caplog):
    pretend("4.2.0")
    expected = "kernel hopper is off: not tested with Triton 4.2.0; run `meshflash calibrate`"
    choices = [auto(dim=dim) for dim in (64, 128)]
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", expected)]
    assert all(choice.reason.endswith(expected) for choice in choices)


def test_auto_logs_what_nobody_can_change_as_information(pretend, auto, caplog):
    pretend(capability=(8, 0), name="a GPU")
    assert "a GPU (sm_80) is not a Hopper GPU" in auto().reason
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize("name", registry._LOCAL_RANKS)
def test_one_rank_of_a_machine_logs(pretend, auto, caplog, monkeypatch, name):
    pretend("4.2.0")
    monkeypatch.setenv(name, "1")
    assert "is off" in auto().reason
    assert not caplog.records


def test_auto_says_nothing_of_kernels_that_do_not_support_the_call(pretend, auto, caplog):
    pretend("4.2.0")
    assert "off" not in auto(dtype=torch.float32).reason
    backward = request(direction="backward", features=Features(0.1, softcap=3.0))
    assert "off" not in registry.choose("auto", backward).reason
    assert not caplog.records


def test_auto_says_nothing_where_kernels_are_on(pretend, auto, caplog):
    pretend()
    assert "off" not in auto().reason
    assert not caplog.records


def test_kernels_that_wait_for_other_ranks_need_a_tested_triton(pretend):
    pretend()
    assert support.has_tested_gluon(GPU)
    pretend("4.2.0")
    support.remember(GPU, Verdict("4.2.0", __version__, right=True))
    assert support.has_gluon(GPU)
    assert not support.has_tested_gluon(GPU)
