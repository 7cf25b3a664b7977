"""`meshflash train`, `generate` and `predict` as processes: equal losses on any number of ranks and after any kill."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from meshflash.cli import app
from meshflash.train.checkpoint import Checkpoints
from meshflash.train.loop import CHECKPOINTS
from meshflash.train.report import METRICS_FILE, Report, read_metrics
from train import victims

STEPS, SAVE = 20, 3
#: Number of fsync calls of rank 0 in a save: before the checkpoint gets its name, and in total.
FLUSHES_BEFORE_NAMING, FLUSHES = 5, 6
#: Maps a name to the number of ranks, and to the options of their mesh.
MESHES = {
    "one": (1, []),
    "cp": (2, ["--cp", "2"]),
    "dp": (2, ["--dp", "2"]),
    "dp-cp": (4, ["--dp", "2", "--cp", "2"]),
}
SMALL = ["model.dim=32", "model.hidden=48", "model.layers=1", "data.batch=4", "data.micro=2", "run.log=1"]
COPY = [*SMALL, "data.tokens=24", "data.valid_samples=6", f"run.save={SAVE}", "optimizer.warmup=5"]


def train_arguments(kind: str, changes: list[str], *more: Any) -> list[Any]:
    """Return the arguments of `meshflash train` with these changes of the configuration."""
    return ["train", kind, "--preset", "tiny", *more, *(argument for text in changes for argument in ("--set", text))]


def training_arguments(folder: Path, mesh: str, steps: int = STEPS) -> list[Any]:
    """Return the arguments of the training run of these tests."""
    changes = [*COPY, f"run.evaluate={steps // 2}"]
    return train_arguments("gpt", changes, "--data", "copy", "--steps", steps, "--output", folder, *MESHES[mesh][1])


def start(folder: Path, mesh: str, steps: int = STEPS, stall: int = 0) -> victims.Job:
    """Start the training run on forked ranks."""
    return victims.Job(training_arguments(folder, mesh, steps), MESHES[mesh][0], folder.with_suffix(".log"), stall)


def command(folder: Path, mesh: str) -> list[str]:
    """Return the training command that starts its own ranks."""
    return [
        sys.executable,
        "-m",
        "meshflash",
        *map(str, training_arguments(folder, mesh)),
        "--nproc",
        str(MESHES[mesh][0]),
    ]


def step_losses(folder: Path) -> list[tuple[int, float]]:
    """Return all (step, loss) pairs that a run and its resumed runs wrote."""
    lines = (folder / METRICS_FILE).read_text().splitlines() if (folder / METRICS_FILE).exists() else []
    return [(row["step"], row["loss"]) for row in map(json.loads, lines) if "loss" in row]


def reached(folder: Path, lines: int) -> bool:
    """Has the run written this many losses?"""
    return len(step_losses(folder)) >= lines


def latest(folder: Path) -> int:
    """Return the step of the latest checkpoint, 0 without one."""
    return Checkpoints(folder / CHECKPOINTS).latest() or 0


def files(folder: Path, step: int) -> list[Path]:
    """Return the tensor files of a checkpoint."""
    return sorted((folder / CHECKPOINTS / f"step-{step:08d}").glob("*.safetensors"))


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of weights and optimizer state of a checkpoint of replicas, from the files of all ranks."""
    found: dict[str, bytes] = {}
    for path in files(folder, step):
        for name, x in load_file(path).items():
            assert found.setdefault(name, x.tobytes()) == x.tobytes()
    assert {name.partition("/")[0] for name in found} == {"model", "optimizer"}
    return found


def assert_same_run(folder: Path, undisturbed: Path, steps: int = STEPS) -> None:
    """Assert that all metrics and the last checkpoint are bitwise equal to those of the undisturbed run."""
    want = dict(step_losses(undisturbed))
    assert list(want) == list(range(1, steps + 1))
    assert dict(step_losses(folder)).keys() == want.keys()
    assert [(step, loss) for step, loss in step_losses(folder) if loss != want[step]] == []
    valid = [[row["valid_loss"] for row in read_metrics(of) if "valid_loss" in row] for of in (folder, undisturbed)]
    assert valid[0] == valid[1]
    assert tensors(folder, steps) == tensors(undisturbed, steps)


def wait_until(seen: Callable[[], bool], is_alive: Callable[[], bool], log: Path) -> None:
    """Wait until `seen` is true; fail if the run ends or takes too long."""
    deadline = time.monotonic() + victims.LIMIT_SECONDS
    while not seen():
        if not is_alive() or time.monotonic() > deadline:
            texts = [path.read_text() for path in sorted(log.parent.glob(f"{log.name}*"))]
            raise AssertionError("the run ended, or takes too long:\n" + "\n".join(texts))
        time.sleep(0.002)


def start_command(command_line: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command that starts its own ranks, with one thread each, as forked ranks have."""
    with log.open("wb") as output:
        return subprocess.Popen(command_line, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"})


def run_to_success(command_line: list[str], folder: Path) -> None:
    """Run a command that must succeed; kill all of its ranks if it does not."""
    log = folder / "ran.log"
    process = start_command(command_line, log)
    try:
        code: int | None = process.wait(victims.LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        victims.kill_family(process.pid)
        process.wait()
    assert code == 0, log.read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> dict[str, Path]:
    """Return the folders of uninterrupted runs on 1, 2 and 4 ranks."""
    folders = {mesh: tmp_path_factory.mktemp("undisturbed") / mesh for mesh in ("one", "cp", "dp-cp")}
    for mesh, folder in folders.items():
        output = start(folder, mesh).wait_for_success()
        assert f"step {STEPS}, loss {step_losses(folder)[-1][1]:.4f}" in output
    return folders


def test_metrics_of_all_meshes_have_the_same_losses(undisturbed):
    one = read_metrics(undisturbed["one"])
    assert [row["step"] for row in one if "loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in one if "valid_loss" in row] == [STEPS // 2, STEPS]
    for mesh in ("cp", "dp-cp"):
        rows = read_metrics(undisturbed[mesh])
        for name in ("step", "loss", "valid_loss", "norm", "lr"):
            want = [row[name] for row in one if name in row]
            assert [row[name] for row in rows if name in row] == pytest.approx(want, rel=2e-5), (mesh, name)
        assert len(files(undisturbed[mesh], STEPS)) == MESHES[mesh][0]  # all ranks write a file in a save


@pytest.mark.slow  # test_run_killed_repeatedly_matches_an_uninterrupted_run covers most of it
def test_torchrun_restarts_resume_the_run(undisturbed, tmp_path):
    folder, marker, step = tmp_path / "run", tmp_path / "killed", 8
    torchrun = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    dying_rank = [victims.__file__, "1", str(step), str(marker)]
    run_to_success(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *torchrun,
            *dying_rank,
            *map(str, training_arguments(folder, "cp")),
        ],
        tmp_path,
    )
    assert marker.exists()
    steps = [step for step, _ in step_losses(folder)]
    restart = next(n for n in range(1, len(steps)) if steps[n] <= steps[n - 1])
    assert step - 1 <= steps[restart - 1] <= step  # the last step before the kill
    assert steps[restart] in (
        SAVE + 1,
        2 * SAVE + 1,
    )  # the save of step 6 starts only after the save of step 3 is complete
    assert steps[restart:] == list(range(steps[restart], STEPS + 1))
    assert_same_run(folder, undisturbed["cp"])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: Any) -> Path:
    """Return the folder of a `meshflash train --nproc 2` whose launcher and ranks were killed."""
    folder, draw = tmp_path_factory.mktemp("killed") / "run", random.Random()
    log = folder.with_suffix(".log")
    process = start_command(command(folder, "cp"), log)
    try:
        begun = draw.randint(SAVE, 2 * SAVE + 1)
        wait_until(partial(reached, folder, begun), lambda: process.poll() is None, log)
        time.sleep(draw.uniform(0.0, 0.05))
    finally:
        ranks = victims.kill_family(process.pid) - 1
        process.wait()
    assert ranks == 2
    assert 0 <= latest(folder) <= STEPS - 6, "the run was killed too late"
    return folder


def test_run_killed_repeatedly_matches_an_uninterrupted_run(undisturbed, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    before = latest(folder)
    flush = FLUSHES + random.randint(1, FLUSHES_BEFORE_NAMING)  # a flush of the second save after the resume
    job = start(folder, "cp", stall=flush)
    stalled = Path(f"{job.log}.stalled")
    wait_until(stalled.exists, job.are_alive, job.log)
    time.sleep(random.uniform(0.0, 0.05))
    job.kill()
    after = before + SAVE
    assert latest(folder) == after
    assert [path.name[:13] for path in (folder / CHECKPOINTS).glob("*.partial-*")] == [f"step-{after + SAVE:08d}"]
    assert f"resuming from step {after}" in start(folder, "cp").wait_for_success()
    assert_same_run(folder, undisturbed["cp"])
    assert list((folder / CHECKPOINTS).glob("*.*")) == []  # leftovers are removed


def resume_on_mesh(folder: Path, mesh: str, undisturbed: Path, steps: int = STEPS) -> None:
    """Resume on another mesh; assert that the first loss matches to 1e-6 and five more to 1e-4."""
    before, lines = latest(folder), len(step_losses(folder))
    start(folder, mesh, steps).wait_for_success()
    found, want = step_losses(folder)[lines:], dict(step_losses(undisturbed))
    assert [step for step, _ in found] == list(range(before + 1, steps + 1))
    for n, (step, loss) in enumerate(found[:6]):
        assert loss == pytest.approx(want[step], rel=1e-4 if n else 1e-6, abs=0.0), (n, step)
    assert len(found) >= 6


@pytest.mark.parametrize("mesh", ["one", "dp"])
def test_killed_run_resumes_on_another_mesh(undisturbed, killed, tmp_path, mesh):
    resume_on_mesh(shutil.copytree(killed, tmp_path / "run"), mesh, undisturbed["cp"])


@pytest.mark.slow
def test_twenty_kills_at_random_times_match_an_uninterrupted_run(tmp_path):
    draw, steps = random.Random(), 100
    start(tmp_path / "whole", "cp", steps).wait_for_success()
    folder, saving, elsewhere = tmp_path / "run", 0, 0
    for n in range(20):
        before = latest(folder)
        if before > steps - 20:
            break
        job = start(folder, "cp", steps)
        begun = len(step_losses(folder)) + draw.randint(1, 2 * SAVE)
        wait_until(partial(reached, folder, begun), job.are_alive, job.log)
        time.sleep(draw.uniform(0.0, 0.1))
        job.kill()
        assert before <= latest(folder) < steps - 6
        saving += bool(list((folder / CHECKPOINTS).glob("*.partial-*")))
        if n % 4 == 1:
            copy = shutil.copytree(folder, tmp_path / f"copy{n}")
            resume_on_mesh(copy, ("dp-cp", "one", "dp")[elsewhere % 3], tmp_path / "whole", steps)
            elsewhere += 1
    start(folder, "cp", steps).wait_for_success()
    assert_same_run(folder, tmp_path / "whole", steps)
    assert n >= 8
    assert elsewhere >= 2
    assert 0 < saving < n + 1  # some kills came during a save, some between two saves


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["cp", "dp-cp"])
def test_nproc_starts_the_ranks_of_a_run(undisturbed, killed, tmp_path, mesh):
    whole = tmp_path / "whole"
    run_to_success(command(whole, mesh), tmp_path)
    assert_same_run(whole, undisturbed[mesh])
    if mesh == "cp":
        rest = shutil.copytree(killed, tmp_path / "rest")
        run_to_success(command(rest, mesh), tmp_path)
        assert_same_run(rest, undisturbed[mesh])


def test_generate_reproduces_the_training_text(tmp_path):
    log, run, letters = tmp_path / "log", tmp_path / "run", "abcdefgh"
    (tmp_path / "text.txt").write_text(letters * 200)
    written = CliRunner().invoke(app, ["data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "data")])
    assert written.exit_code == 0, written.output
    changes = [*SMALL, "model.vocabulary=257", "data.tokens=32", "optimizer.warmup=5", "optimizer.lr=0.01"]
    training = train_arguments("gpt", changes, "--data", tmp_path / "data", "--steps", 40, "--output", run)
    victims.Job(training, 1, log).wait_for_success()
    assert step_losses(run)[-1][1] < 0.3 < 3.0 < step_losses(run)[0][1]
    text = victims.Job(["generate", letters, "--checkpoint", run, "--tokens", 16, "--cp", 2], 2, log).wait_for_success()
    assert text == 2 * letters + "\n"


def test_predict_labels_images_as_trained(tmp_path):
    log, run, draw = tmp_path / "log", tmp_path / "run", np.random.default_rng(0)
    labels = np.arange(16) % 2
    images = draw.uniform(0.0, 0.3, (16, 3, 20, 28)).astype(np.float32)
    images[labels == 1, :, :, 14:] += 0.6
    images[labels == 0, :, :, :14] += 0.6  # the same brightness, in the other half
    np.savez(tmp_path / "set.npz", images=images, labels=labels)
    np.savez(tmp_path / "new.npz", images=images[::-1])
    changes = [*SMALL, "model.outputs=2", "optimizer.warmup=5", "run.evaluate=0"]
    training = train_arguments("vit", changes, "--data", tmp_path / "set.npz", "--steps", 40, "--output", run)
    victims.Job(training, 1, log).wait_for_success()
    predict = ["predict", tmp_path / "new.npz", "--checkpoint", run, "--output", tmp_path / "labels.jsonl", "--cp", 2]
    assert "16 images" in victims.Job(predict, 2, log).wait_for_success()
    rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == labels[::-1].tolist()


def test_tensorboard_events_match_the_metrics(undisturbed):
    folder = undisturbed["cp"] / "tensorboard"
    if importlib.util.find_spec("tensorboard") is None:
        assert not folder.exists()
        return
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(folder)
    )
    events.Reload()
    found = {(name, event.step): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)}
    rows = [(row["step"], name, value) for row in read_metrics(undisturbed["cp"]) for name, value in row.items()]
    want = {(name, step): value for step, name, value in rows if name not in ("step", "time") and value is not None}
    assert {name for name, _ in want} >= {"loss", "valid_loss", "accuracy", "norm", "lr", "tokens_per_second"}
    assert found == pytest.approx(want, rel=1e-6)


def write_metrics(folder: Path) -> list[dict[str, Any]]:
    """Write metrics of steps 1 to 3, and after a simulated kill those of 3 and 4; an unknown MFU is None."""
    for first, last in ((1, 3), (3, 4)):
        report = Report(folder, first - 1)
        for step in range(first, last + 1):
            report.log_metrics(step, loss=float(step + first), mfu=None)
        report.close()
        if first == 1:
            with (folder / METRICS_FILE).open("a") as file:
                file.write('{"step": 4, "lo')  # the kill came while this line was written
    return read_metrics(folder)


def test_tensorboard_gets_known_metrics_and_the_resumed_step(tmp_path, monkeypatch):
    seen: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            seen.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert isinstance(value, float)  # the real writer refuses None
            seen.append((name, value, step))

        def close(self) -> None:
            seen.append("closed")

    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, module.__name__, module)
    write_metrics(tmp_path)
    first = [("loss", 2.0, 1), ("loss", 3.0, 2), ("loss", 4.0, 3)]
    assert seen == [
        *(("tensorboard", 1), *first, "closed"),
        *(("tensorboard", 3), ("loss", 6.0, 3), ("loss", 7.0, 4), "closed"),
    ]


def test_metrics_are_written_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # its import fails
    rows = write_metrics(tmp_path)
    assert [(row["step"], row["loss"], row["mfu"]) for row in rows] == [
        *((1, 2.0, None), (2, 3.0, None)),
        *((3, 6.0, None), (4, 7.0, None)),  # the rows after the restart replace step 3
    ]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]
