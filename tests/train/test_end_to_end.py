"""`meshflash train`, `generate` and `predict` as processes: the same losses on any number of ranks, after any kill."""

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
#: The number of fsync calls of rank 0 in a save before the checkpoint gets its name, and in all.
BEFORE, FLUSHES = 5, 6
#: The number of ranks, and the options of their mesh.
MESHES = {
    "one": (1, []),
    "cp": (2, ["--cp", "2"]),
    "dp": (2, ["--dp", "2"]),
    "dp-cp": (4, ["--dp", "2", "--cp", "2"]),
}
SMALL = ["model.dim=32", "model.hidden=48", "model.layers=1", "data.batch=4", "data.micro=2", "run.log=1"]
COPY = [*SMALL, "data.tokens=24", "data.valid_samples=6", f"run.save={SAVE}", "optimizer.warmup=5"]


def words(kind: str, changes: list[str], *more: Any) -> list[Any]:
    return ["train", kind, "--preset", "tiny", *more, *(word for text in changes for word in ("--set", text))]


def training(folder: Path, mesh: str, steps: int = STEPS) -> list[Any]:
    changes = [*COPY, f"run.evaluate={steps // 2}"]
    return words("gpt", changes, "--data", "copy", "--steps", steps, "--output", folder, *MESHES[mesh][1])


def start(folder: Path, mesh: str, steps: int = STEPS, stall: int = 0) -> victims.Job:
    return victims.Job(training(folder, mesh, steps), MESHES[mesh][0], folder.with_suffix(".log"), stall)


def command(folder: Path, mesh: str) -> list[str]:
    """Return the command that starts its ranks itself."""
    return [sys.executable, "-m", "meshflash", *map(str, training(folder, mesh)), "--nproc", str(MESHES[mesh][0])]


def told(folder: Path) -> list[tuple[int, float]]:
    """Return all (step, loss) pairs that a run and its resumed runs wrote."""
    lines = (folder / METRICS_FILE).read_text().splitlines() if (folder / METRICS_FILE).exists() else []
    return [(row["step"], row["loss"]) for row in map(json.loads, lines) if "loss" in row]


def reached(folder: Path, lines: int) -> bool:
    return len(told(folder)) >= lines


def latest(folder: Path) -> int:
    return Checkpoints(folder / CHECKPOINTS).latest() or 0


def files(folder: Path, step: int) -> list[Path]:
    return sorted((folder / CHECKPOINTS / f"step-{step:08d}").glob("*.safetensors"))


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of weights and optimizer state of a checkpoint of replicas, from the files of all ranks."""
    found: dict[str, bytes] = {}
    for path in files(folder, step):
        for name, x in load_file(path).items():
            assert found.setdefault(name, x.tobytes()) == x.tobytes()
    assert {name.partition("/")[0] for name in found} == {"model", "optimizer"}
    return found


def is_the_same_run(folder: Path, undisturbed: Path, steps: int = STEPS) -> None:
    """Check that all metrics and the last checkpoint equal those of the undisturbed run bitwise."""
    want = dict(told(undisturbed))
    assert list(want) == list(range(1, steps + 1))
    assert dict(told(folder)).keys() == want.keys()
    assert [(step, loss) for step, loss in told(folder) if loss != want[step]] == []
    valid = [[row["valid_loss"] for row in read_metrics(of) if "valid_loss" in row] for of in (folder, undisturbed)]
    assert valid[0] == valid[1]
    assert tensors(folder, steps) == tensors(undisturbed, steps)


def until(seen: Callable[[], bool], lives: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + victims.LIMIT
    while not seen():
        if not lives() or time.monotonic() > deadline:
            texts = [path.read_text() for path in sorted(log.parent.glob(f"{log.name}*"))]
            raise AssertionError("it ended, or takes too long:\n" + "\n".join(texts))
        time.sleep(0.002)


def begin(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command that starts its ranks itself, with one thread each, as forked ranks have."""
    with log.open("wb") as output:
        return subprocess.Popen(words, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"})


def ran(words: list[str], folder: Path) -> None:
    """Run a command that must succeed; if it does not, kill all its ranks."""
    log = folder / "ran.log"
    process = begin(words, log)
    try:
        code: int | None = process.wait(victims.LIMIT)
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
        said = start(folder, mesh).ends()
        assert f"step {STEPS}, loss {told(folder)[-1][1]:.4f}" in said
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
        assert len(files(undisturbed[mesh], STEPS)) == MESHES[mesh][0]  # all ranks take part in a save


@pytest.mark.slow  # test_a_run_killed_repeatedly_matches_an_uninterrupted_run covers most of it
def test_torchrun_restarts_resume_the_run(undisturbed, tmp_path):
    folder, marker, step = tmp_path / "run", tmp_path / "killed", 8
    torchrun = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    dies = [victims.__file__, "1", str(step), str(marker)]
    ran([sys.executable, "-m", "torch.distributed.run", *torchrun, *dies, *map(str, training(folder, "cp"))], tmp_path)
    assert marker.exists()
    steps = [step for step, _ in told(folder)]
    again = next(n for n in range(1, len(steps)) if steps[n] <= steps[n - 1])
    assert step - 1 <= steps[again - 1] <= step  # until it was killed
    assert steps[again] in (SAVE + 1, 2 * SAVE + 1)  # the save of step 6 began when that of step 3 was done
    assert steps[again:] == list(range(steps[again], STEPS + 1))
    is_the_same_run(folder, undisturbed["cp"])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: Any) -> Path:
    """Return the folder of a `meshflash train --nproc 2` whose launcher and ranks were killed."""
    folder, draw = tmp_path_factory.mktemp("killed") / "run", random.Random()
    log = folder.with_suffix(".log")
    process = begin(command(folder, "cp"), log)
    try:
        begun = draw.randint(SAVE, 2 * SAVE + 1)
        until(partial(reached, folder, begun), lambda: process.poll() is None, log)
        time.sleep(draw.uniform(0.0, 0.05))
    finally:
        ranks = victims.kill_family(process.pid) - 1
        process.wait()
    assert ranks == 2
    assert 0 <= latest(folder) <= STEPS - 6, "it was killed too late"
    return folder


def test_a_run_killed_repeatedly_matches_an_uninterrupted_run(undisturbed, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    before = latest(folder)
    flush = FLUSHES + random.randint(1, BEFORE)  # in the second save from there
    job = start(folder, "cp", stall=flush)
    stalled = Path(f"{job.log}.stalled")
    until(stalled.exists, job.lives, job.log)
    time.sleep(random.uniform(0.0, 0.05))
    job.kill()
    after = before + SAVE
    assert latest(folder) == after
    assert [path.name[:13] for path in (folder / CHECKPOINTS).glob("*.partial-*")] == [f"step-{after + SAVE:08d}"]
    assert f"resuming from step {after}" in start(folder, "cp").ends()
    is_the_same_run(folder, undisturbed["cp"])
    assert list((folder / CHECKPOINTS).glob("*.*")) == []  # leftovers are removed


def goes_on_elsewhere(folder: Path, mesh: str, undisturbed: Path, steps: int = STEPS) -> None:
    """Resume on another mesh; check the first loss to 1e-6 and five more to 1e-4."""
    before, lines = latest(folder), len(told(folder))
    start(folder, mesh, steps).ends()
    found, want = told(folder)[lines:], dict(told(undisturbed))
    assert [step for step, _ in found] == list(range(before + 1, steps + 1))
    for n, (step, loss) in enumerate(found[:6]):
        assert loss == pytest.approx(want[step], rel=1e-4 if n else 1e-6, abs=0.0), (n, step)
    assert len(found) >= 6


@pytest.mark.parametrize("mesh", ["one", "dp"])
def test_a_killed_run_resumes_on_another_mesh(undisturbed, killed, tmp_path, mesh):
    goes_on_elsewhere(shutil.copytree(killed, tmp_path / "run"), mesh, undisturbed["cp"])


@pytest.mark.slow
def test_twenty_kills_at_random_times_match_an_uninterrupted_run(tmp_path):
    draw, steps = random.Random(), 100
    start(tmp_path / "whole", "cp", steps).ends()
    folder, saving, elsewhere = tmp_path / "run", 0, 0
    for n in range(20):
        before = latest(folder)
        if before > steps - 20:
            break
        job = start(folder, "cp", steps)
        begun = len(told(folder)) + draw.randint(1, 2 * SAVE)
        until(partial(reached, folder, begun), job.lives, job.log)
        time.sleep(draw.uniform(0.0, 0.1))
        job.kill()
        assert before <= latest(folder) < steps - 6
        saving += bool(list((folder / CHECKPOINTS).glob("*.partial-*")))
        if n % 4 == 1:
            copy = shutil.copytree(folder, tmp_path / f"copy{n}")
            goes_on_elsewhere(copy, ("dp-cp", "one", "dp")[elsewhere % 3], tmp_path / "whole", steps)
            elsewhere += 1
    start(folder, "cp", steps).ends()
    is_the_same_run(folder, tmp_path / "whole", steps)
    assert n >= 8
    assert elsewhere >= 2
    assert 0 < saving < n + 1  # some in the middle of a save, some between two


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["cp", "dp-cp"])
def test_nproc_starts_the_ranks_of_a_run(undisturbed, killed, tmp_path, mesh):
    whole = tmp_path / "whole"
    ran(command(whole, mesh), tmp_path)
    is_the_same_run(whole, undisturbed[mesh])
    if mesh == "cp":
        rest = shutil.copytree(killed, tmp_path / "rest")
        ran(command(rest, mesh), tmp_path)
        is_the_same_run(rest, undisturbed[mesh])


def test_generate_reproduces_the_training_text(tmp_path):
    log, run, letters = tmp_path / "log", tmp_path / "run", "abcdefgh"
    (tmp_path / "text.txt").write_text(letters * 200)
    made = CliRunner().invoke(app, ["data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "data")])
    assert made.exit_code == 0, made.output
    changes = [*SMALL, "model.vocabulary=257", "data.tokens=32", "optimizer.warmup=5", "optimizer.lr=0.01"]
    learn = words("gpt", changes, "--data", tmp_path / "data", "--steps", 40, "--output", run)
    victims.Job(learn, 1, log).ends()
    assert told(run)[-1][1] < 0.3 < 3.0 < told(run)[0][1]
    said = victims.Job(["generate", letters, "--checkpoint", run, "--tokens", 16, "--cp", 2], 2, log).ends()
    assert said == 2 * letters + "\n"


def test_predict_labels_images_as_trained(tmp_path):
    log, run, draw = tmp_path / "log", tmp_path / "run", np.random.default_rng(0)
    labels = np.arange(16) % 2
    images = draw.uniform(0.0, 0.3, (16, 3, 20, 28)).astype(np.float32)
    images[labels == 1, :, :, 14:] += 0.6
    images[labels == 0, :, :, :14] += 0.6  # the same brightness, elsewhere
    np.savez(tmp_path / "set.npz", images=images, labels=labels)
    np.savez(tmp_path / "new.npz", images=images[::-1])
    changes = [*SMALL, "model.outputs=2", "optimizer.warmup=5", "run.evaluate=0"]
    learn = words("vit", changes, "--data", tmp_path / "set.npz", "--steps", 40, "--output", run)
    victims.Job(learn, 1, log).ends()
    asked = ["predict", tmp_path / "new.npz", "--checkpoint", run, "--output", tmp_path / "labels.jsonl", "--cp", 2]
    assert "16 images" in victims.Job(asked, 2, log).ends()
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


def reported(folder: Path) -> list[dict[str, Any]]:
    """Write metrics of steps 1 to 3, and after a simulated kill those of 3 and 4; an unknown MFU is None."""
    for first, last in ((1, 3), (3, 4)):
        report = Report(folder, first - 1)
        for step in range(first, last + 1):
            report.log_metrics(step, loss=float(step + first), mfu=None)
        report.close()
        if first == 1:
            with (folder / METRICS_FILE).open("a") as file:
                file.write('{"step": 4, "lo')  # killed while writing
    return read_metrics(folder)


def test_tensorboard_gets_known_metrics_and_the_resumed_step(tmp_path, monkeypatch):
    seen: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            seen.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert isinstance(value, float)  # the real one refuses None
            seen.append((name, value, step))

        def close(self) -> None:
            seen.append("closed")

    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, module.__name__, module)
    reported(tmp_path)
    first = [("loss", 2.0, 1), ("loss", 3.0, 2), ("loss", 4.0, 3)]
    assert seen == [
        *(("tensorboard", 1), *first, "closed"),
        *(("tensorboard", 3), ("loss", 6.0, 3), ("loss", 7.0, 4), "closed"),
    ]


def test_metrics_are_written_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # so that it cannot be imported
    rows = reported(tmp_path)
    assert [(row["step"], row["loss"], row["mfu"]) for row in rows] == [
        *((1, 2.0, None), (2, 3.0, None)),
        *((3, 6.0, None), (4, 7.0, None)),  # those after the restart, step 3 included
    ]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]
