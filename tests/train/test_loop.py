"""The training loop: equal losses on any mesh, resumed runs, and errors that name step and rank."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshflash import shutdown
from meshflash.cli import app
from meshflash.core.reading import read_toml
from meshflash.train import config as configs
from meshflash.train import loop
from meshflash.train.report import METRICS_FILE, Report, read_metrics


def small(kind="gpt", **tables: dict[str, Any]):
    """Return a small configuration with these changes."""
    sizes: dict[str, Any] = {"dim": 32, "hidden": 48, "heads": 4, "layers": 1}
    sizes |= {"vocabulary": 16, "kv_heads": 2} if kind == "gpt" else {"outputs": 4}
    base: dict[str, Any] = {
        "model": sizes,
        "data": {"tokens": 24, "batch": 6, "micro": 2, "valid_samples": 13, "height": 20, "width": 28},
        "optimizer": {"lr": 3e-3, "warmup": 3},
        "run": {"steps": 6, "log": 2, "evaluate": 3, "compare": 2},
    }
    for table, fields in tables.items():
        base[table] = base.get(table, {}) | fields
    return configs.change(configs.preset(kind, "tiny"), base)


def train(rank, world, group, config, folder, times=1):
    """Train; return losses, validation results and the last step."""
    torch.manual_seed(rank)  # results must not depend on this seed
    for _ in range(times):
        trained = loop.train(config, folder and Path(folder), quiet=True)
    return trained.losses, trained.valid, trained.step


MESHES: list[dict[str, Any]] = [
    {"dp": 4},  # of six samples, two ranks have one and two have two
    {"cp": 3, "layout": "striped"},
    {"dp": 2, "cp": 2, "schedule": "zigzag"},
    {"fsdp": 2, "tp": 2},
    {"fsdp": 4, "mode": "grad_op"},
    {"dp": 2, "fsdp": 2},
]


def num_ranks(mesh):
    """Return the number of ranks of a mesh."""
    found = 1
    for axis in ("dp", "fsdp", "cp", "tp"):
        found *= mesh.get(axis, 1)
    return found


@pytest.mark.parametrize("kind", ["gpt", "vit"])
def test_losses_do_not_depend_on_the_mesh(pool, kind):
    ((want, valid, step),) = pool.run(1, train, small(kind), None)
    assert step == len(want) == 6
    assert set(valid) == {"valid_loss", "accuracy"}
    for mesh in MESHES if kind == "gpt" else MESHES[1:4]:
        more = {"activation_checkpointing": "selective"} if "cp" in mesh else {}
        layout = {"layout": "contiguous"} if kind == "vit" else {}
        for losses, got, _ in pool.run(num_ranks(mesh), train, small(kind, mesh={**mesh, **layout}, memory=more), None):
            assert losses == pytest.approx(want, rel=2e-5)
            assert got == pytest.approx(valid, rel=1e-3)


def test_resumed_run_matches_an_uninterrupted_one(pool, tmp_path):
    optimizer = {
        "sharded": True,
        "warmup": 9,
    }  # a long warmup, so that the learning rate does not depend on the last step
    whole = small(run={"steps": 9, "save": 3}, optimizer=optimizer, mesh={"dp": 2})
    (want, *_), _ = pool.run(2, train, whole, str(tmp_path / "whole"))
    part = replace(whole, run=replace(whole.run, steps=5))
    (first, *_), _ = pool.run(2, train, part, str(tmp_path / "parts"))
    (rest, _, step), _ = pool.run(2, train, whole, str(tmp_path / "parts"))
    assert step == 9
    assert first + rest == want  # bitwise
    rows = read_metrics(tmp_path / "parts")
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8]
    assert [row["loss"] for row in rows if "loss" in row] == [want[n - 1] for n in (2, 4, 6, 8)]


def train_and_resume(rank, world, group, config, folder):
    """Return the losses of a run, and of one resumed from its checkpoint of step 2."""
    every = loop.train(config, Path(folder), quiet=True).losses
    return every, loop.train(config, Path(folder), from_step=2, quiet=True).losses


def test_resumed_run_of_three_ranks_sums_gradients_in_the_same_order(pool, tmp_path):
    # Three ranks, because a sum over two has the same bits in any order.
    run = {"steps": 9, "save": 2, "log": 0, "evaluate": 0, "compare": 0, "keep": 9}
    for every, again in pool.run(3, train_and_resume, small(run=run, mesh={"cp": 3}), str(tmp_path)):
        assert again == every[2:]


def train_resume_and_restart(rank, world, group, config, folder):
    """Return the losses of a run, of a run from its first checkpoint and of a fresh run, and the checkpoints."""
    folder = Path(folder)
    every = loop.train(config, folder, quiet=True).losses
    again = loop.train(config, folder, from_step=2, quiet=True).losses
    assert (folder / "before-1" / "checkpoints" / "step-00000004").is_dir()
    with pytest.raises(ValueError, match="the steps there are: 2, 4"):
        loop.train(config, folder, from_step=3, quiet=True)
    with pytest.raises(ValueError, match="from_step: it names a checkpoint to resume from"):
        loop.train(config, folder, from_step=2, resume=False, quiet=True)
    short = replace(config, run=replace(config.run, steps=1, save=0, save_minutes=1e-9))
    for number in (2, 3):
        fresh = loop.train(short, folder, resume=False, quiet=True).losses
        if rank == 0:
            assert {path.name for path in (folder / f"before-{number}").iterdir()} == {"checkpoints", "metrics.jsonl"}
    return every, again, fresh, sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_from_step_and_fresh_choose_where_a_run_resumes(pool, tmp_path):
    config = small(run={"steps": 4, "save": 2, "log": 1, "evaluate": 0}, optimizer={"warmup": 9}, mesh={"dp": 2})
    for every, again, fresh, names in pool.run(2, train_resume_and_restart, config, str(tmp_path)):
        assert again == every[2:]
        assert fresh == every[:1]
        assert names == ["step-00000001"]


def check_unwritable_folder(rank, world, group, config, folder):
    """Assert that training into a folder that cannot be created raises."""
    with pytest.raises(ValueError, match=r"file/run: it cannot be written \(Not a directory\); free some space, or"):
        loop.train(config, Path(folder), quiet=True)


def test_folder_that_cannot_be_created_raises_on_all_ranks(pool, tmp_path):
    (tmp_path / "file").touch()
    pool.run(2, check_unwritable_folder, small(run={"steps": 1, "evaluate": 0}), str(tmp_path / "file" / "run"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_metrics_on_a_full_disk_do_not_end_a_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("meshflash"), "propagate", True)
    report = Report(tmp_path, 0)
    report.log_metrics(1, loss=1.0)
    (tmp_path / METRICS_FILE).rename(tmp_path / "kept")
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    report.log_metrics(2, loss=2.0)
    report.log_metrics(3, loss=3.0)
    # A handler that another test left on the logger may record the line twice.
    assert set(caplog.messages) == {
        f"{tmp_path / METRICS_FILE}: No space left on device; the metrics of step 2 are lost"
    }


def test_fresh_sets_files_aside_once_per_launch(tmp_path, monkeypatch):
    def train_fresh(steps):
        config = small(run={"steps": steps, "evaluate": 0}, optimizer={"warmup": 9})
        try:
            return loop.train(config, tmp_path, resume=False, quiet=True).losses
        finally:
            shutdown()

    assert len(train_fresh(2)) == len(train_fresh(2)) == 2
    monkeypatch.setattr(loop, "agent", lambda: "one of torchrun's")
    assert len(train_fresh(2)) == 2
    assert len(train_fresh(3)) == 1  # torchrun has restarted the ranks
    monkeypatch.setattr(loop, "agent", lambda: "another")
    assert len(train_fresh(2)) == 2
    assert len(list(tmp_path.glob("before-*"))) == 3


def train_with_clock(rank, world, group, folder):
    """Return the checkpoints saved by `save_minutes` if only the clock of rank 0 advances."""
    clock = [0.0]
    vars(loop)["time"] = SimpleNamespace(perf_counter=lambda: clock[0])

    def advance_clock(*args):
        clock[0] += 31.0 if rank == 0 else 0.0
        return accumulate(*args)

    accumulate, loop.accumulate = loop.accumulate, advance_clock
    try:
        loop.train(small(run={"steps": 5, "save_minutes": 1.0, "log": 0, "evaluate": 0}), Path(folder), quiet=True)
    finally:
        loop.accumulate, vars(loop)["time"] = accumulate, time
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def test_save_minutes_saves_checkpoints_at_that_interval(pool, tmp_path):
    for names in pool.run(2, train_with_clock, str(tmp_path)):
        assert names == [f"step-0000000{n}" for n in (2, 4, 5)]


def resumable_config(mesh):
    """Return the configuration of a run that resumes on this mesh."""
    return small(mesh=mesh, optimizer={"warmup": 12}, run={"steps": 10, "save": 4, "evaluate": 0})


@pytest.fixture(scope="module")
def ended_run(pool, tmp_path_factory):
    """Return the losses of a run of ten steps, and the folder of a run that ended after four."""
    config, folder = resumable_config({"fsdp": 2, "cp": 2}), tmp_path_factory.mktemp("ended")
    (want, *_), *_ = pool.run(4, train, config, None)
    pool.run(4, train, replace(config, run=replace(config.run, steps=4)), str(folder))
    return want, folder


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"fsdp": 2, "tp": 2}, {}])
def test_run_resumes_on_another_mesh(pool, ended_run, tmp_path, mesh):
    want, folder = ended_run[0], shutil.copytree(ended_run[1], tmp_path / "run")
    for losses, *_ in pool.run(num_ranks(mesh), train, resumable_config(mesh), str(folder)):
        assert len(losses) == 6
        assert losses[0] == pytest.approx(want[4], rel=1e-6)
        assert losses == pytest.approx(want[4:], rel=1e-4)


def train_with_fault(rank, world, group, fault):
    """Train with a fault on rank 1, a NaN loss or changed weights; return the error."""
    config = small(run={"steps": 4, "evaluate": 0})
    check, built = loop._check_finite, loop.build
    if fault == "nan":

        def check_with_nan(step, loss, own, norm, mesh):
            if step == 3:
                own = own * float("nan") if rank == 1 else own
                loss = loss * float("nan")
            check(step, loss, own, norm, mesh)

        loop._check_finite = check_with_nan
    elif fault == "different weights":

        def build_different_weights(*args):
            model, learner = built(*args)
            if rank == 1:
                with torch.no_grad():
                    next(model.parameters()).add_(1e-3)
            return model, learner

        loop.build = build_different_weights
    try:
        loop.train(config, None, quiet=True)
    except loop.TrainingError as error:
        return str(error)
    finally:
        loop._check_finite, loop.build = check, built
    return ""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "step 3: loss nan, .*the loss of rank 1 is nan"),
        ("different weights", "step 2: the weights of rank 1 differ from rank 0"),
    ],
)
def test_fatal_errors_name_step_and_rank(pool, fault, message):
    for text in pool.run(2, train_with_fault, fault):
        assert re.search(message, text)


def check_divergence(rank, world, group):
    """Assert that a run with a huge learning rate ends with an error."""
    with pytest.raises(loop.TrainingError, match=r"step \d: loss .*, gradient norm nan"):
        loop.train(small(optimizer={"lr": 1e30, "clip": 1e30, "warmup": 1}), None, quiet=True)


def test_non_finite_loss_ends_the_run(pool):
    pool.run(1, check_divergence)


def test_configuration_fields_are_changed_by_path_and_type_checked(tmp_path):
    base = configs.preset("gpt", "tiny")
    (tmp_path / "run.toml").write_text('[model]\nlayers = 3\n[model.scaling]\nfactor = 4\n[data]\nsource = "needle"\n')
    found = configs.change(base, read_toml(tmp_path / "run.toml"))
    assert (found.model.layers, found.model.scaling.factor, found.data.source) == (3, 4.0, "needle")
    assert configs.from_dict(json.loads(json.dumps(configs.as_dict(found)))) == found
    for kind, presets in configs.PRESETS.items():
        for name in presets:
            preset = configs.preset(kind, name)
            assert configs.from_dict(json.loads(json.dumps(configs.as_dict(preset)))) == preset
    for texts, message in (
        (["mesh.xp=2"], "mesh.xp: there is no such field; expected one of mesh.dp"),
        (["mesh.cp=two"], "mesh.cp='two': expected int"),
        (["run.dtype=3"], "run.dtype=3: expected str"),
        (["run.dtype=float3"], "run.dtype='float3': expected one of float32"),
        (["run.save=-3"], "run.save=-3: expected 0, which is never, or more"),
        (["run.save_minutes=-1"], "run.save_minutes=-1.0: expected 0"),
        (["mesh"], "expected path=value"),
        (["mesh.cp.x=1"], "mesh.cp: it is a value, not a table"),
    ):
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            configs.change(base, configs.assignments(texts))


def test_train_command_names_the_expected_values_of_invalid_options():
    for command, message in (
        ("train gpt --preset huge", "expected one of tiny, 125m"),
        ("train resnet", "expected one of gpt, vit"),
        ("train gpt --set data.tokens=x", "data.tokens='x': expected int"),
        ("train gpt --config none.toml", "there is no such file"),
    ):
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())
    shown = CliRunner().invoke(app, ["train", "gpt", "--show", "--cp", "4"])
    assert tomllib.loads(shown.output)["mesh"]["cp"] == 4
