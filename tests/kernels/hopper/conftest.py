"""Fixtures of the Hopper tests: they count launches and force choices that depend on the size of a call."""

from __future__ import annotations

import pytest

from meshflash.check.oracle import replace
from meshflash.kernels import rates, registry
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.launches import Launches

# before tests import the helper: its failed assertions then show their values, as in the tests themselves
pytest.register_assert_rewrite("kernels.hopper.gpu_oracle")


@pytest.fixture
def every_launch_by_launch_code(monkeypatch):
    """Run the launch code in every call, so that it can be counted; test_launches_gpu.py repeats launches."""
    monkeypatch.setattr(Launches, "repeat", lambda *_: None)


@pytest.fixture
def launch_counts(monkeypatch, every_launch_by_launch_code):
    """Count the launches of each Hopper kernel."""
    counts = {"forward": 0, "backward": 0, "backward_dq": 0}

    def count_calls(name, function):
        def call(*arguments):
            counts[name] += 1
            return function(*arguments)

        return call

    for name in counts:
        monkeypatch.setattr(hopper_launch, name, count_calls(name, getattr(hopper_launch, name)))
    return counts


@pytest.fixture
def fixed_order(monkeypatch):
    """Let "auto" take the first kernel that supports a call: by predicted times a short one may go to any of them."""
    monkeypatch.setattr(rates, "known", lambda _: None)
    registry.forget()
    yield
    registry.forget()


@pytest.fixture(params=["in rows", "in tiles"])
def dq_accumulation(request, monkeypatch):
    """Accumulate dQ in rows or in tiles, regardless of the number of keys."""
    min_keys = 0 if request.param == "in tiles" else 1 << 30
    configs = {dim: replace(config, min_keys_for_tiled_dq=min_keys) for dim, config in hopper_launch.BACKWARD.items()}
    monkeypatch.setattr(hopper_launch, "BACKWARD", configs)


@pytest.fixture(params=[True, False], ids=["spread", "together"])
def spread_q_heads(request, monkeypatch):
    """Give each query head of a GQA group its own CTA, or one CTA to all, whatever the shape; return which."""
    monkeypatch.setattr(hopper_launch, "spreads_heads", lambda *_: request.param)
    return request.param


@pytest.fixture
def num_splits(monkeypatch, every_launch_by_launch_code):
    """Make splits free of cost, and record the number of splits of each tail wave."""
    from meshflash.kernels.hopper import split_kv  # needs Triton

    recorded = []
    for name in ("SPLIT_COST", "COMBINE_COST", "BACKWARD_COST", "TRAFFIC_COST"):
        monkeypatch.setattr(split_kv, name, 0)
    split_tail_wave = split_kv.split_tail_wave

    def record(*arguments, **options):
        tail = split_tail_wave(*arguments, **options)
        recorded.append(tail.num_splits if tail else 1)
        return tail

    monkeypatch.setattr(split_kv, "split_tail_wave", record)
    return recorded
