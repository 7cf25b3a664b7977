"""Which kernel "auto" takes for a call with gradients or a step: one that torch differentiates, or one of our own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from meshflash import Layout, Mask
from meshflash.engine import binding
from meshflash.engine import executable as executables
from meshflash.engine.executable import FUNCTION_SECONDS, LocalExecutable, MeshExecutable, Plan
from meshflash.engine.placement import Setting
from meshflash.engine.spec import AttentionSpec, CallTensors
from meshflash.kernels import registry
from meshflash.kernels.contract import Features
from meshflash.kernels.rates import Predicted
from meshflash.kernels.registry import Choice
from meshflash.schedules import registry as schedules


@dataclass
class FakeKernel:
    """A kernel of which only the choice is asked."""

    name: str
    differentiated: bool
    torch_autograd_seconds: float = 0.0

    def has_torch_autograd(self, x):
        return self.differentiated


def choice(name, device_us, host_us, differentiated, extra_us=0, layer_us=(0, 0)):
    kernel: Any = FakeKernel(name, differentiated, extra_us * 1e-6)
    return Choice(kernel, "", Predicted(*(us * 1e-6 for us in (device_us, host_us, *layer_us))))


def chosen(monkeypatch, ours, **others):
    """Return what is chosen for calls with gradients, where `ours` is the fastest kernel of each pass."""
    monkeypatch.setattr(executables.local, "choice", lambda *_: ours)
    monkeypatch.setattr(executables.local, "choices", lambda _, name, __: (others[name],) * 2)
    monkeypatch.setattr(executables.registry, "names", lambda: ("auto", *others))
    x = torch.zeros(1, 4, 1, 8)
    not_read: Any = None
    spec = AttentionSpec(Mask.full(), 1.0)
    return LocalExecutable(spec, CallTensors(x, x, x))._choose_for_autograd(not_read)


def test_a_kernel_for_both_passes_is_taken_where_the_fastest_of_each_pass_launch_slowly(monkeypatch):
    fastest_backward = choice("cudnn", 50, 73, False)
    assert chosen(monkeypatch, fastest_backward, hopper=choice("hopper", 51, 41, False)) == ("hopper", False)


def test_a_short_call_takes_the_op_that_torch_differentiates(monkeypatch):
    ours = choice("hopper", 5, 34, False)
    assert chosen(monkeypatch, ours, fa2=choice("fa2", 8, 44, True)) == ("fa2", True)


def test_a_long_layer_takes_the_kernel_that_computes_fastest(monkeypatch):
    for layer_us, want in (((1000, 120), ("auto", False)), ((50, 120), ("fa2", True))):
        ours = choice("hopper", 50, 34, False, layer_us=layer_us)
        assert chosen(monkeypatch, ours, fa2=choice("fa2", 51, 44, True, layer_us=layer_us)) == want


def test_a_function_costs_the_host_what_our_kernel_saves_on_the_device(monkeypatch):
    ours = choice("hopper", 10, 34, False)
    bound_us = 34 + FUNCTION_SECONDS * 1e6 / 2  # of each pass, by the host
    assert chosen(monkeypatch, ours, fa2=choice("fa2", bound_us + 1, 44, True)) == ("auto", False)
    assert chosen(monkeypatch, ours, fa2=choice("fa2", 0.9 * bound_us, 44, True)) == ("fa2", True)


def test_what_torch_records_around_an_op_counts(monkeypatch):
    ours = choice("hopper", 10, 34, False)
    assert chosen(monkeypatch, ours, cudnn=choice("cudnn", 10, 54, True, extra_us=10)) == ("cudnn", True)
    assert chosen(monkeypatch, ours, cudnn=choice("cudnn", 10, 54, True, extra_us=30)) == ("auto", False)


@pytest.mark.parametrize("predicted", [True, False])
def test_one_kernel_for_both_passes_is_taken_without_a_comparison(monkeypatch, predicted):
    ours = choice("fa2", 5, 34, True)
    if not predicted:
        ours = Choice(ours.kernel, "")
    assert chosen(monkeypatch, ours, cudnn=choice("cudnn", 1, 1, True)) == ("fa2", True)


def test_without_rates_nothing_is_compared(monkeypatch):
    kernel: Any = FakeKernel("hopper", False)
    ours = Choice(kernel, "")
    assert chosen(monkeypatch, ours, fa2=choice("fa2", 1, 1, True)) == ("auto", False)


@pytest.mark.parametrize(("kv_heads", "gqa"), [(8, False), (2, True)])
def test_every_step_of_a_schedule_is_compared_alone(kv_heads, gqa, monkeypatch):
    requests = []

    def spy(name, request):
        requests.append(request)
        return registry.choose(name, request)

    monkeypatch.setattr(binding, "choose", spy)
    layout = Layout.contiguous(64, 2)
    setting = Setting(1, 16, 16, torch.float32, torch.float32, torch.device("cpu"), "auto", False)
    made = MeshExecutable(Plan("ulysses", layout, layout), Mask.causal(), 8, kv_heads, 0, setting, schedules.build)
    program = made.program("forward")
    binding.choose_kernels(program, Mask.causal(), setting, Features(1.0))
    assert requests
    assert all(request.is_step and request.gqa == gqa for request in requests)
