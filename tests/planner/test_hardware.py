"""Descriptions of machines: those that ship, one's own, and errors that name the key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshflash.planner import hardware

OWN = """
title = "two nodes of mine"

[memory]
gb = 10
gb_per_s = 1000
source = "a guess"

[steps]
us = 2.0
source = "a guess"

[kernels]
source = "a guess"

[[kernels.rates]]
pass = "forward"
mask = "full"
head_dim = 64
tokens = [1024, 4096]
tflops = [100, 200]

[[links]]
name = "bus"
ranks = 2
gb_per_s = 100
latency_us = 1
source = "a guess"

[[links]]
name = "cable"
gb_per_s = 10
efficiency = 0.5
latency_us = 20
source = "a guess"
"""


def own(tmp_path, text=OWN):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", hardware.names())
def test_machines_that_ship_have_rates_links_and_a_source_for_each_number(name):
    machine = hardware.load(name)
    for direction in ("forward", "backward"):
        for causal in (False, True):
            for dim in (64, 128):
                assert 50 < machine.tflops(direction, causal, dim, 8192, False) < 2500
    assert machine.links[-1].ranks is None
    assert all(link.source for link in machine.links)
    assert machine.sources.keys() == {"memory", "steps", "kernels"}
    assert all(machine.sources.values())


def test_rates_of_the_h200_are_those_that_were_measured():
    rows = json.loads((hardware.TABLES / "nvidia-h200.json").read_text())["rates"]
    machine = hardware.load("h200")
    key = ("backward", "causal", 128, 8192, None)
    mine = [
        row["tflops"]
        for row in rows
        if (row["pass"], row["mask"], row["head_dim"], row["tokens"], row.get("variant")) == key
        and row["kernel"] in machine.kernels
    ]
    assert len(mine) == 3
    assert machine.tflops("backward", True, 128, 8192, False) == max(mine)
    assert "fa4" not in machine.kernels, "a package that a default install lacks"


def test_a_machine_of_ones_own_is_read_from_a_file(tmp_path):
    machine = hardware.load(own(tmp_path))
    assert (machine.name, machine.title) == ("mine", "two nodes of mine")
    assert (machine.memory_bytes, machine.memory_bytes_per_second) == (1e10, 1e12)
    assert machine.overhead_seconds == pytest.approx(2e-6)
    assert [machine.link(0, other).name for other in (1, 2, 3)] == ["bus", "cable", "cable"]
    assert machine.links[1].bytes_per_second == pytest.approx(5e9)
    assert machine.tflops("forward", True, 64, 2048, False) == pytest.approx(150.0), "there are no causal ones"
    with pytest.raises(ValueError, match=r"mine: no backward rates at head dim 64; list them under kernels\.rates"):
        machine.tflops("backward", False, 64, 2048, False)
    assert [hardware.load(own(tmp_path), per_node=4).link(0, other).name for other in (3, 4)] == ["bus", "cable"]


def test_kernels_count_only_at_head_dims_that_they_serve():
    rows = json.loads((hardware.TABLES / "nvidia-h200.json").read_text())["rates"]
    machine = hardware.load("h200")
    for dim, measured in ((80, 96), (96, 96), (192, 192), (256, 256)):
        key = ("backward", "causal", measured, 8192, None)
        others = [
            row["tflops"]
            for row in rows
            if (row["pass"], row["mask"], row["head_dim"], row["tokens"], row.get("variant")) == key
            and row["kernel"] in ("cudnn", "triton")
        ]
        assert machine.tflops("backward", True, dim, 8192, False) == max(others)
    with pytest.raises(ValueError, match="h200: no forward rates at head dim 512"):
        machine.tflops("forward", True, 512, 8192, False)


def test_causal_calls_take_full_rates_at_head_dims_without_causal_ones(tmp_path):
    more = """
[[kernels.rates]]
pass = "forward"
mask = "causal"
head_dim = 128
tokens = [1024]
tflops = [500]
"""
    machine = hardware.load(own(tmp_path, OWN + more))
    assert machine.tflops("forward", True, 64, 4096, False) == 200.0
    assert machine.tflops("forward", False, 128, 4096, False) == 500.0


def test_a_table_of_ones_own_lies_beside_the_description(tmp_path):
    rows = [{"kernel": "mine", "pass": way, "mask": "full", "head_dim": 64, "tokens": 1024, "tflops": 7.0}
            for way in ("forward", "backward")]  # fmt: skip
    (tmp_path / "rates.json").write_text(json.dumps({"rates": rows}))
    text = OWN[: OWN.index("[[kernels.rates]]")] + OWN[OWN.index("[[links]]") :]
    path = own(tmp_path, text.replace("[kernels]", '[kernels]\ntable = "rates.json"'))
    assert hardware.load(path).tflops("backward", True, 64, 9999, False) == 7.0
    wrong = rows[0] | {"mask": "caussal"}
    broken: Any
    for broken in ({"rates": 5}, {"rates": [{}]}, {"rates": None}, {}, {"rates": [wrong]}):
        (tmp_path / "rates.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"rates\.json: not a table|expected forward or backward"):
            hardware.load(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gb_per_s = 1000", "gb_per_sec = 1000", r"memory\.gb_per_s: missing; there is gb_per_sec"),
        ("us = 2.0", "us = 2.0\nuss = 1", r"steps\.uss: unknown key; did you mean us\?"),
        ("latency_us = 20", "latency_us = 0", r"links\[1\]\.latency_us=0: expected a number > 0"),
        ("latency_us = 20", 'latency_us = "20"', r"links\[1\]\.latency_us=20: expected a number > 0"),
        ("latency_us = 20", "latency_us = inf", r"latency_us=inf: expected a number > 0"),
        ("gb = 10\n", "gb = 1e999\n", r"memory\.gb=inf"),
        ('title = "two nodes of mine"', "title = 5", "title=5: expected a string"),
        (
            'mask = "full"',
            'mask = "half"',
            r"kernels\.rates\[0\]\.pass='forward', mask='half': expected",
        ),
        ("tflops = [100, 200]", "tflops = [100]", r"kernels\.rates\[0\]\.tokens and tflops: expected two lists"),
        ("tflops = [100, 200]", "tflops = [100, -1]", r"kernels\.rates\[0\]\.rates must be numbers > 0"),
        ("[[links]]", "[[cables]]", "links: missing"),
        ("[memory]", "[memory", "not TOML"),
        ("[kernels]", '[kernels]\ntable = "nvidia-h200"\nuse = {hoper = []}', r"use\.hoper: not in nvidia-h200\.json"),
        ("[kernels]", '[kernels]\ntable = "nvidia-h201"', "nvidia-h201.json: it cannot be read"),
        ("[kernels]", '[kernels]\ntable = "nvidia-h200"', r"kernels\.rates: unknown key"),
        ("ranks = 2", "ranks = 0.5", r"links\[0\]\.ranks=0\.5: expected a whole number > 0"),
        ("ranks = 2", "ranks = true", r"ranks=True: expected a whole number"),
        ("ranks = 2\n", "", "expected `ranks` in all but the last one"),
        ('name = "cable"', 'name = "cable"\nranks = 4', "expected `ranks` in all but the last one"),
        ("efficiency = 0.5", "efficiency = 5", r"links\[1\]\.efficiency=5\.0: expected a number from 0 to 1"),
        ("us = 2.0", "us = 1" + "0" * 400, r"steps\.us=1000"),
        ("tflops = [100, 200]", "tflops = [true, 200]", "rates must be numbers > 0"),
        ("tflops = [100, 200]", "tflops = [1" + "0" * 400 + ", 200]", "rates must be numbers > 0"),
        ("tokens = [1024, 4096]", "tokens = [true, 4096]", "must be whole numbers > 0"),
        ("head_dim = 64", "head_dim = -64", "must be whole numbers > 0"),
    ],
)
def test_mistakes_are_errors_that_name_the_key(tmp_path, old, new, message):
    assert old in OWN
    with pytest.raises(ValueError, match=message):
        hardware.load(own(tmp_path, OWN.replace(old, new)))


def test_unknown_machines_are_errors_with_the_nearest_name(tmp_path):
    with pytest.raises(ValueError, match=r"expected one of h100, h200, or a path .*; did you mean h100\?"):
        hardware.load("h10")
    with pytest.raises(ValueError, match="there is no such file"):
        hardware.load(str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match="per_node=0"):
        hardware.load("h200", per_node=0)
    with pytest.raises(ValueError, match="per_node=4: expected at least 1, and a machine with links between nodes"):
        hardware.load(own(tmp_path, OWN[: OWN.index('name = "bus"')] + OWN[OWN.index('name = "cable"') :]), per_node=4)
    assert hardware.load("h200", per_node=3).title.endswith(", here 3 a node")
