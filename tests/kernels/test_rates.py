"""Measured kernel rates: predicted times, the table of a device, the choice of "auto", and unsupported calls."""

import json
import re

import pytest
import torch

from meshflash import Mask, attention
from meshflash.bench import calibrate
from meshflash.check.oracle import replace
from meshflash.core.tiles import worklist
from meshflash.engine import local
from meshflash.kernels import rates, registry
from meshflash.kernels.contract import Features, KernelRequest, Launch
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.hopper.kernel import Hopper
from meshflash.kernels.rate_curves import Rate
from meshflash.kernels.rates import Known, Rates
from meshflash.kernels.triton import configs as triton_configs

CAUSAL = Mask.causal()


def table(**tflops):
    """Return a rate table in which each kernel has the given TFLOP/s, and twice that at 4096 tokens."""
    rows = [
        Rate(kernel, direction, causal, dim, tokens, rate * (1 if tokens == 1024 else 2))
        for kernel, rate in tflops.items()
        for direction in ("forward", "backward")
        for causal in (True, False)
        for dim in (64, 128)
        for tokens in (1024, 4096)
    ]
    host = {kernel: {"forward": 10.0, "backward": 20.0} for kernel in tflops}
    return Rates("Made-up 1", "sm_99", tuple(rows), host)


def make_request(mask=CAUSAL, tokens=1024, **more):
    """Return a forward request on the CPU, with some fields replaced."""
    work = worklist(mask, (range(tokens),), (range(tokens),))
    made = KernelRequest(
        "forward", torch.device("cpu"), torch.bfloat16, 64, 64, work, Features(0.125), batch=2, heads=8
    )
    return replace(made, **more)


def test_predicted_seconds_are_flops_divided_by_the_rate():
    made = table(tiled=100.0)
    launch = Launch(1024.0 * 1024, 1024, causal=False)
    flops = 4 * 1024 * 1024 * 64 * 2 * 8
    assert made.predict("tiled", make_request(), [launch]).device == pytest.approx(flops / 100e12)
    backward = made.predict("tiled", make_request(direction="backward"), [launch]).device
    assert backward == pytest.approx(2.5 * flops / 100e12)
    half = made.predict("tiled", make_request(), [Launch(512.0 * 1024, 1024, causal=True)]).device
    assert half == pytest.approx(flops / 100e12 / 2)
    assert made.predict("other", make_request(), [launch]) is None


def test_rates_are_interpolated_between_lengths_and_clamped_beyond():
    made = table(tiled=100.0)
    assert made._curves.tflops("tiled", "forward", True, 64, 2048) == pytest.approx(150.0)
    assert made._curves.tflops("tiled", "forward", True, 64, 10**6) == 200.0
    assert made._curves.tflops("tiled", "forward", True, 64, 512) == 50.0
    assert made._curves.tflops("tiled", "forward", True, 80, 1024) == 100.0
    assert made._curves.tflops("tiled", "forward", True, 256, 1024) == 100.0


@pytest.mark.parametrize("variant", ["gqa", "documents"])
def test_variants_scale_the_rate_of_both_masks_by_that_of_causal_calls(variant):
    slow = [Rate("tiled", "forward", True, 64, tokens, 60.0, variant) for tokens in (1024, 2048)]
    made = replace(table(tiled=100.0), rates=(*table(tiled=100.0).rates, *slow))
    special = dict(gqa=True) if variant == "gqa" else dict(mask=CAUSAL & Mask.documents([500, 524]))
    for causal in (True, False):
        for keys, factor in ((1024, 0.6), (512, 0.6), (2048, 60 / 150), (10**6, 60 / 150)):
            launch = [Launch(10.0**6, keys, causal)]
            plain, other = (made.predict("tiled", make_request(**more), launch).device for more in ({}, special))
            assert plain / other == pytest.approx(factor)
    backward = [made.predict("tiled", make_request(direction="backward", **more), launch) for more in ({}, special)]
    assert backward[0] == backward[1]  # it was not measured
    assert Rates.from_json(made.to_json()).rates == made.rates


def test_factor_of_a_variant_is_that_of_the_next_wider_dim_it_was_measured_at():
    rows = [Rate("tiled", "forward", True, dim, 1024, tflops) for dim, tflops in ((96, 400.0), (128, 600.0))]
    rows.append(Rate("tiled", "forward", True, 128, 1024, 540.0, "gqa"))
    made = replace(table(tiled=1.0), rates=tuple(rows))
    assert made._curves.factor("gqa", "tiled", "forward", 96, 1024) == pytest.approx(0.9)
    assert made._curves.factor("gqa", "tiled", "forward", 256, 1024) == pytest.approx(0.9)
    without = replace(made, rates=(rows[0], rows[2]))  # dim 128 has no plain rate to compare with
    assert without._curves.factor("gqa", "tiled", "forward", 96, 1024) == 1.0


def test_layers_that_take_about_as_long_are_compared_by_device_time():
    costs = {"slow": rates.Cost(146e-6, 47e-6), "fast": rates.Cost(147e-6, 34e-6), "late": rates.Cost(160e-6, 1e-6)}
    assert rates.cheapest(costs) == "fast"
    assert rates.cheapest(costs | {"quick": rates.Cost(100e-6, 90e-6)}) == "quick"


def test_request_says_whether_query_heads_share_a_kv_head():
    q, k = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 8)
    for kv, gqa in ((k, True), (q, False)):
        x = local.inputs(q, kv, kv, Mask.full(), Features(1.0))
        assert local.kernel_request(x, "forward").gqa == gqa


def test_many_small_launches_are_bound_by_host_time():
    made = table(tiled=100.0)
    predicted = made.predict("tiled", make_request(), [Launch(10.0, 4, causal=True)] * 100)
    assert predicted.host == pytest.approx(100 * 10e-6)
    assert predicted.cost().layer == predicted.host + rates.LAYER_HOST


def test_the_hosts_time_counts_only_where_it_is_the_bottleneck_of_a_layer():
    made = table(tiled=100.0)

    def seconds(request, launch_tokens):
        predicted = made.predict("tiled", request, [Launch(launch_tokens**2, launch_tokens, causal=False)])
        return predicted, predicted.cost().layer

    short, in_layer = seconds(make_request(tokens=64), 64)
    assert in_layer == short.host + rates.LAYER_HOST > short.device + short.layer_device
    long, in_layer = seconds(make_request(tokens=8192), 8192)
    gemms = 24 * 2 * 8192 * (8 * 64) ** 2 / 200e12  # at the highest rate of the table
    assert in_layer == pytest.approx(long.device + gemms)
    backward, in_layer = seconds(make_request(tokens=8192, direction="backward"), 8192)
    assert in_layer == pytest.approx(backward.device + 2 * gemms)
    step, alone = seconds(make_request(tokens=8192, is_step=True), 8192)
    assert alone == max(step.device, step.host)


def test_launches_of_a_worklist_count_its_visible_pairs():
    tiled = registry.choose("tiled", make_request()).kernel
    (full,) = tiled.launches(make_request(Mask.full()))
    assert full == Launch(1024.0 * 1024, 1024, causal=False)
    (causal,) = tiled.launches(make_request())
    assert (causal.pairs, causal.causal) == (1024 * 1025 / 2, True)
    assert causal.keys == pytest.approx(1024, abs=2)
    late = worklist(CAUSAL, (range(8000, 8008),), (range(8008),))
    assert tiled.launches(make_request(work=late))[0].pairs == late.pairs
    vendor = registry.choose("vendor", make_request()).kernel
    documents = CAUSAL & Mask.documents([256, 768])
    assert vendor.launches(make_request(documents)) == (
        Launch(256 * 257 / 2, 256, True),
        Launch(768 * 769 / 2, 768, True),
    )
    wide = worklist(CAUSAL, (range(20),), (range(5),))
    assert vendor.launches(make_request(work=wide)) == (Launch(wide.pairs, 5, True),)


@pytest.mark.parametrize(("fast", "slow"), [("vendor", "tiled"), ("tiled", "vendor")])
def test_auto_takes_the_kernel_with_the_shortest_predicted_time(fast, slow, monkeypatch):
    registry.forget()
    made = replace(table(**{fast: 300.0, slow: 200.0}), host_us={})
    monkeypatch.setattr(rates, "known", lambda device: Known(made, "a made-up table"))
    chosen = registry.choose("auto", make_request())
    assert chosen.kernel.name == fast
    assert chosen.reason.startswith(f"predicted ms (host): {fast} ")
    assert chosen.reason.endswith("by a made-up table")
    x = torch.randn(2, 64, 8, 64, dtype=torch.bfloat16)
    _, plan = attention(x, x, x, mask=CAUSAL, return_plan=True)
    assert plan.kernels == (fast,)
    assert "by a made-up table" in str(plan)
    registry.forget()


def test_auto_without_rates_uses_a_fixed_order():
    registry.forget()
    assert registry.choose("auto", make_request()).reason == "before tiled, by a fixed order"
    alone = registry.choose("auto", make_request(features=Features(0.1, softcap=2.0)))
    assert alone.reason == "the only supported one"


def test_own_table_precedes_shipped_tables_of_the_device_or_architecture(tmp_path, monkeypatch):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    shipped.mkdir()
    monkeypatch.setattr(rates, "SHIPPED", shipped)
    monkeypatch.setenv("MESHFLASH_RATES", str(own))
    (shipped / "a.json").write_text(json.dumps(table(tiled=1.0).to_json()))
    rates.forget()

    def found(name, architecture="sm_99"):
        known = rates._known(name, architecture)
        assert known is not None
        return known

    assert rates._known("Another", "sm_10") is None
    assert "of the same architecture" in found("Another").source
    assert found("Made-up 1").source == "the table of Made-up 1"
    rates.write(replace(table(tiled=7.0), device="Another"), rates.own_file("Another"))
    assert "measured here" in found("Another").source
    assert found("Another").rates.rates[0].tflops == 7.0
    rates.own_file("Another").write_text("{}")
    rates.forget()
    with pytest.raises(ValueError, match=r"another.json: not a table of rates .* run meshflash calibrate"):
        found("Another")
    rates.forget()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(host_us=None),
        dict(rates=[]),
        dict(
            rates=[
                dict(kernel="tiled", mask="full", head_dim=8, tokens=8, tflops=1.0)
                | {"pass": "forward"}
                | {"variant": "other"}
            ]
        ),
        dict(
            rates=[
                dict(kernel="tiled", mask="full", head_dim=8, tokens=8, tflops=1.0)
                | {"pass": "forward"}
                | {"head_dim": "8"}
            ]
        ),
        dict(rates=[dict(kernel="tiled", mask="full", head_dim=8, tokens=8, tflops=0.0) | {"pass": "forward"}]),
        dict(configs={"forward/64": [1, 2]}),
        dict(device=None, rates=3),
    ],
    ids=str,
)
def test_invalid_rate_table_is_refused_and_its_file_is_named(wrong, tmp_path):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(table(tiled=1.0).to_json() | wrong))
    with pytest.raises(ValueError, match=r"some.json: not a table of rates"):
        rates._read(path)


def test_small_rates_keep_four_significant_digits():
    assert Rates.from_json(table(tiled=0.00123456).to_json()).rates[0].tflops == 0.001235


def test_no_own_table_is_read_without_a_home_directory(monkeypatch):
    def raise_no_home():
        raise RuntimeError("no home")

    for name in ("MESHFLASH_RATES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rates.Path, "home", raise_no_home)
    assert rates._there(lambda: rates.own_file("A GPU")) is None
    monkeypatch.setenv("MESHFLASH_RATES", "tables")
    assert rates.own_file("A GPU").as_posix() == "tables/a-gpu.json"


def test_shipped_rate_tables_are_valid():
    for path in rates.SHIPPED.glob("*.json"):
        made = rates._read(path)
        assert made.rates, path
        assert {rate.kernel for rate in made.rates} <= {*registry.names()}
        for name, values in made.configs.items():
            direction, _, most = name.partition("/")
            assert direction in triton_configs.PASSES
            assert triton_configs.padded_head_dim(int(most)) == int(most)
            triton_configs.Config(*values)


def test_calibrating_measures_every_supported_kernel(monkeypatch):
    monkeypatch.setattr(rates, "identity", lambda device: ("A CPU", "none"))
    monkeypatch.setattr(calibrate, "ALL_TOKENS", 32)
    monkeypatch.setattr(calibrate, "WIDTH", 32)
    monkeypatch.setattr(calibrate, "HOST_TOKENS", 8)
    found = calibrate.run("cpu", (16,), (16, 32), rounds=1, say=lambda text: None)
    assert {rate.kernel for rate in found.rates} == {"vendor", "tiled"}
    assert {(rate.direction, rate.causal, rate.variant, rate.tokens) for rate in found.rates} == {
        (direction, causal, variant, tokens)
        for direction in ("forward", "backward")
        for causal, variant in ((True, ""), (False, ""), (True, "gqa"), (True, "documents"))
        for tokens in (16, 32)
    }
    assert set(found.host_us) == {"vendor", "tiled"}
    read_back = Rates.from_json(found.to_json())
    assert read_back.to_json() == found.to_json()


def test_forced_configuration_applies_only_inside_its_context():
    device = torch.device("cuda")
    name = triton_configs.name("forward", 64)
    with triton_configs.forced(name, triton_configs.Config(16, 16, 1, 1)):
        assert triton_configs.config("forward", 48, torch.bfloat16, device).block_m == 16
    assert name not in triton_configs._forced
    assert all(list(triton_configs.candidates(direction, 128)) for direction in triton_configs.PASSES)


def test_hopper_kernel_names_unsupported_arguments(monkeypatch):
    monkeypatch.setattr(hopper_launch, "kernels_off", lambda device: None)
    work = worklist(Mask.causal(), (range(64),), (range(64),))

    def reason(dim, direction="forward", dtype=torch.bfloat16, value_dim=None, scale=0.1, **features):
        request = Features(scale, **features)
        device = torch.device("cuda")
        return Hopper().unsupported_reason(
            KernelRequest(direction, device, dtype, dim, value_dim or dim, work, request)
        )

    assert reason(64) is reason(128, "backward") is reason(64, softcap=3.0) is None
    assert reason(128, "backward", softcap=3.0) is None
    assert [reason(dim) for dim in (96, 256)] == [f"a head dim of {dim}; it takes 64 and 128" for dim in (96, 256)]
    assert reason(64, dtype=torch.float32) == "torch.float32; it takes float16 and bfloat16"
    assert reason(64, value_dim=32) == "a value dim of 32 with a head dim of 64"
    assert reason(64, scale=0.0) == "a scale of 0 or below"
    assert reason(64, dropout=0.1, seed=1) == "dropout"
    assert reason(64, alibi_slopes_BH=torch.zeros(1, 1)) == "ALiBi"
    for dim, cap in ((64, 3.0), (128, 0.01)):
        assert reason(dim, "backward", softcap=cap) == f"a softcap of {cap} in the backward at head dim {dim}"
    assert reason(96, "backward", softcap=3.0) == reason(96)


def test_hopper_and_triton_have_separate_rates(monkeypatch):
    monkeypatch.setattr(hopper_launch, "kernels_off", lambda device: None)
    monkeypatch.setattr(Hopper, "missing", lambda self: None)
    registry.forget()
    rows = [Rate("hopper", "forward", True, 64, 512, 400.0), Rate("triton", "forward", True, 64, 512, 200.0)]
    made = Rates("a", "b", tuple(rows), {})
    monkeypatch.setattr(rates, "known", lambda device: Known(made, "a made-up table"))
    work = worklist(Mask.causal(), (range(64),), (range(64),))
    request = KernelRequest("forward", torch.device("cuda"), torch.bfloat16, 64, 64, work, Features(scale=0.1))
    chosen = registry.choose("auto", request)
    assert chosen.kernel.name == "hopper"
    assert re.match(r"predicted ms \(host\): hopper \S+ \(\S+\), triton \S+ \(\S+\), by a made-up table", chosen.reason)
    wide = replace(request, head_dim=96, value_dim=96)
    assert registry.choose("auto", wide).kernel.name == "triton"
    with pytest.raises(ValueError, match='kernel="hopper" does not support a head dim of 96; it takes 64 and 128; sup'):
        registry.choose("hopper", wide)
    registry.forget()
