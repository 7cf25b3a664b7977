"""Damaged or foreign checkpoints are refused by file name; full disks and kills leave an intact checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshflash.train.checkpoint import CheckpointError, Checkpoints
from train import crash
from train.checkpoints import INDEX, MANIFEST, TENSORS, flip, full, loaded, saved


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE: dict[str, tuple[Any, str]] = {
    "a flipped bit": (lambda f: flip(f / TENSORS), f"{TENSORS}: its sha256 is not the one that was written"),
    "a cut file": (lambda f: os.truncate(f / TENSORS, 1000), f"{TENSORS}: it has 1000 bytes, and [0-9]+ were written"),
    "a missing file": (lambda f: (f / TENSORS).unlink(), f"{TENSORS}: missing"),
    "a changed index": (lambda f: flip(f / INDEX), f"{INDEX}: its sha256"),
    "a missing index": (lambda f: (f / INDEX).unlink(), f"{INDEX}: missing"),
    "a cut manifest": (lambda f: os.truncate(f / MANIFEST, 50), f"{MANIFEST}: not JSON"),
    "a missing manifest": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST}: missing"),
    "a foreign manifest": (lambda f: (f / MANIFEST).write_text('{"weights": []}'), f"{MANIFEST}: not of a meshflash"),
    "a list as manifest": (lambda f: (f / MANIFEST).write_text("[1]"), f"{MANIFEST}: not of a meshflash"),
    "a future version": (lambda f: changed(f / MANIFEST, version=2), f"{MANIFEST}: version 2, and this .* version 1"),
    "another step": (lambda f: changed(f / MANIFEST, step=7), f"{MANIFEST}: it is of step 7, and .* says [1-3]"),
    "a path that leads out": (
        lambda f: changed(f / MANIFEST, files={INDEX: {}, "../x": {}}),
        f"{MANIFEST}: its list of files is damaged",
    ),
    "digests of nothing": (lambda f: changed(f / MANIFEST, files={INDEX: 5}), f"{MANIFEST}: what it says of {INDEX}"),
    "another digest in the manifest": (
        lambda f: (f / MANIFEST).write_bytes(another_digest((f / MANIFEST).read_bytes())),
        f"{MANIFEST}: its own sha256 does not fit; what it says of {TENSORS} is damaged",
    ),
    "another name in the manifest": (
        lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes().replace(b"rank-00000", b"rank-00008")),
        f"{MANIFEST}: its own sha256 does not fit; what it says of rank-00008.safetensors is damaged",
    ),
    "a folder in place of a file": (
        lambda f: ((f / INDEX).unlink(), (f / INDEX).mkdir()),
        f"{INDEX}: it has|{INDEX}: Is a directory",
    ),
}


def another_digest(data: bytes) -> bytes:
    """Return a manifest with one digit changed in the digest of the tensor file."""
    at = data.index(b'"sha256"', data.index(TENSORS.encode())) + len('"sha256": "')
    return data[:at] + (b"1" if data[at : at + 1] == b"0" else b"0") + data[at + 1 :]


def test_damaged_checkpoints_are_refused_with_an_intact_alternative(tmp_path):
    saved(tmp_path / "good", 1, 2, 3)
    for what, (damage, message) in DAMAGE.items():
        folder = tmp_path / what.replace(" ", "-")
        shutil.copytree(tmp_path / "good", folder)
        damage(folder / "step-00000003")
        checkpoints, (model, optimizer) = Checkpoints(folder), crash.made()
        crash.fill(model, optimizer, -3.0)
        with pytest.raises(CheckpointError, match=f"step-00000003/({message}).*give step=2"):
            checkpoints.load(model, optimizer)
        assert crash.numbers(model, optimizer) == {-3.0}, what
        with pytest.raises(CheckpointError, match=message):
            checkpoints.check(3)
        assert loaded(checkpoints, 2) == 20.0
        damage(folder / "step-00000002")
        with pytest.raises(CheckpointError, match="give step=1"):
            checkpoints.load(model, optimizer)
        damage(folder / "step-00000001")
        with pytest.raises(CheckpointError, match="no older checkpoint passes"):
            checkpoints.load(model, optimizer)
    checkpoints = Checkpoints(tmp_path / "good")
    with pytest.raises(CheckpointError, match="step-00000007: missing; the steps there are: 1, 2, 3; step 3 passes"):
        loaded(checkpoints, 7)
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        loaded(Checkpoints(tmp_path / "none"))
    checkpoints.check(3)


def resigned(folder: Path) -> None:
    """Give a changed checkpoint valid digests: contradictions must be refused too."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != MANIFEST
    }
    changed(folder / MANIFEST, files=files)


def test_files_with_valid_digests_that_contradict_each_other_are_refused(tmp_path):
    saved(tmp_path / "good", 1, 2)

    def chunk(**changes):
        def change(folder):
            index = json.loads((folder / INDEX).read_text())
            index["tensors"]["model/0.weight"]["chunks"][0] |= changes
            (folder / INDEX).write_text(json.dumps(index))

        return change

    def header(folder):
        data = bytearray((folder / TENSORS).read_bytes())
        data[7] = 127
        (folder / TENSORS).write_bytes(data)

    for n, (change, message) in enumerate(
        (
            (lambda f: (f / INDEX).write_text("{}"), f"{INDEX}: not an index"),
            (chunk(file="../../x"), f"{INDEX}: ../../x is not in the manifest"),
            (chunk(sizes=[95, 64]), f"{TENSORS}: model/0.weight is not in it as the index says"),
            (chunk(offsets=[1, 0]), f"{INDEX}: it knows 6080 of 6144 values of model/0.weight"),
            (header, f"{TENSORS}: not a file of safetensors"),
        )
    ):
        folder = tmp_path / str(n)
        shutil.copytree(tmp_path / "good", folder)
        change(folder / "step-00000002")
        resigned(folder / "step-00000002")
        model, optimizer = crash.made()
        crash.fill(model, optimizer, -3.0)
        with pytest.raises(CheckpointError, match=message):
            Checkpoints(folder).load(model, optimizer)
        assert crash.numbers(model, optimizer) == {-3.0}


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path):
    checkpoints = saved(tmp_path, 1)
    other = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32, bias=False), nn.Linear(2, 2))
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(other, None)
    for text in (
        "it has no model/2.bias, model/2.weight",
        "the model has no model/1.bias",
        "model/1.weight is [64, 96] in it, and [32, 96] in the model",
    ):
        assert text in str(error.value)
    with pytest.raises(CheckpointError, match=r"model/0\.bias is F32 in it, and F64 in the model"):
        checkpoints.load(crash.made()[0].double())
    model, _ = crash.made()
    optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in model.children()])
    with pytest.raises(CheckpointError, match=r"just the weights of group 0: 0\.bias, 0\.weight"):
        checkpoints.load(model, optimizer)
    with pytest.raises(CheckpointError, match="not the model's"):
        checkpoints.load(model, crash.made()[1])
    with pytest.raises(ValueError, match="meta device"), torch.device("meta"):
        checkpoints.load(nn.Linear(2, 2))
    checkpoints.save(2, model, None, {}, wait=True)
    with pytest.raises(CheckpointError, match="it has no optimizer; load with optimizer None"):
        checkpoints.load(model, optimizer)
    assert checkpoints.load(model) == {}


def test_state_that_cannot_be_saved_is_refused(tmp_path):
    checkpoints, (model, optimizer) = Checkpoints(tmp_path), crash.made()
    for arguments, message in (
        ((-1, model, optimizer, {}), "step=-1: expected 0 or more"),
        ((1, model, crash.made()[1], {}), "group 0 has a weight that is not the model's"),
        ((1, nn.Linear(2, 2, dtype=torch.complex64), None, {}), "model/weight: torch.complex64 cannot be saved"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoints.save(*arguments)
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, model, optimizer, {"x": torch.zeros(2)})
    optimizer.param_groups[0]["more"] = object()
    with pytest.raises(ValueError, match="group 0, more: a object cannot be saved"):
        checkpoints.save(1, model, optimizer, {})
    checkpoints.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk of 1 MB; skip the test if this machine does not allow it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a disk is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_keeps_the_previous_checkpoint(small_disk):
    checkpoints = saved(small_disk / "run", 1)  # about 150 kB each
    (small_disk / "step-other").write_bytes(bytes(600_000))
    leftover = small_disk / "run" / "step-00000002.partial-abc"
    leftover.mkdir()
    (leftover / "x").write_bytes(bytes(100_000))
    saved(small_disk / "run", 2)  # fits only if leftovers are removed first
    with pytest.raises(CheckpointError, match=r"step 3 was not saved.*No space left on device; step 2 is complete"):
        saved(small_disk / "run", 3, 4)
    assert [path.name for path in sorted((small_disk / "run").iterdir())] == ["step-00000001", "step-00000002"]
    assert loaded(checkpoints) == 20.0
    (small_disk / "step-other").unlink()
    saved(small_disk / "run", 3)
    assert loaded(checkpoints) == 30.0


@pytest.mark.parametrize("name", [INDEX, MANIFEST, TENSORS])
def test_a_disk_that_is_full_at_any_file_keeps_the_previous_checkpoint(tmp_path, monkeypatch, name):
    checkpoints = saved(tmp_path, 1)
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: full(handle) if os.readlink(f"/proc/self/fd/{handle}").endswith(name) else fsync(handle),
    )
    with pytest.raises(CheckpointError, match=f"step 2 was not saved.*{name}: No space left"):
        saved(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert loaded(checkpoints) == 10.0


class Jobs:
    """The process that starts the jobs of crash.py."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
        self.process: Any = subprocess.Popen(
            [sys.executable, crash.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])},
        )

    def start(self, folder, steps, world=1, keep=2, at=None):
        """Start a job and return the ids of its processes."""
        self.number += 1
        self.log = self.folder / f"{self.number}.log"
        self.log.touch()
        asked = dict(folder=str(folder), steps=list(steps), world=world, keep=keep, log=str(self.log), at=at or {})
        return self._ask(json.dumps(asked | {"store": str(self.folder / f"{self.number}.store")}))

    def ends(self):
        """Return the exit statuses of the last job's processes after they have ended."""
        return self._ask("wait")

    def told(self, word):
        """Return the last step that the job's log reports for this event, or None."""
        steps = [int(line.split()[1]) for line in self.log.read_text().splitlines() if line.startswith(word)]
        return max(steps, default=None)

    def _ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    started = Jobs(tmp_path_factory.mktemp("jobs"))
    yield started
    started.close()


def killed_at_every_file(jobs, tmp_path, world, victim, every):
    """Kill one rank before each of its file operations while step 2 is saved twice after step 1."""
    saved(tmp_path / "good", 1)
    found: set[float] = set()
    for at in range(1, 1000, every):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "good", folder)
        jobs.start(folder, [2, 2], world, keep=1, at={str(victim): at})
        ends = jobs.ends()
        checkpoints = Checkpoints(folder)
        for step in checkpoints.steps():
            checkpoints.check(step)  # a checkpoint under removal is not listed
        number = loaded(checkpoints)
        assert number in (10.0, 20.0, 21.0)
        found.add(number)
        assert saved(folder, 5, keep=1).steps() == [5]
        assert [path.name for path in folder.iterdir()] == ["step-00000005"]
        if ends[victim] == 0:
            assert ends == [0] * world
            break
        assert ends[victim] == signal.SIGKILL
        shutil.rmtree(folder)
    assert found == {10.0, 20.0, 21.0}
    return at


def test_a_kill_before_sampled_file_operations_leaves_an_intact_checkpoint(jobs, tmp_path):
    assert killed_at_every_file(jobs, tmp_path, 1, 0, every=5) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0)])
def test_a_kill_before_any_file_operation_leaves_an_intact_checkpoint(jobs, tmp_path, world, victim):
    killed_at_every_file(jobs, tmp_path, world, victim, every=1)


def killed_at_random(jobs, folder, world, times, seed):
    """Kill some or all ranks of jobs that save without pause; each job resumes from the one killed before."""
    draw, before, seen = random.Random(seed), 0, []
    for n in range(times):
        pids = jobs.start(folder, [before], world)
        limit, begun = time.monotonic() + 60, before + (3 if n % 4 == 0 else draw.randint(1, 3))
        while (jobs.told("begin") or 0) < begun and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.04))
        for pid in draw.sample(pids, draw.randint(1, world)):
            os.kill(pid, signal.SIGKILL)
        ends = jobs.ends()  # the others end by themselves
        assert signal.SIGKILL in ends
        assert 0 not in ends
        checkpoints = Checkpoints(folder)
        step = checkpoints.latest() or 0
        assert (jobs.told("done") or before) <= step <= jobs.told("begin")
        assert jobs.told("begin") - step <= 2  # one is being written, the next one waits
        if step:
            assert loaded(checkpoints) == 10.0 * step
        seen.append(step - before)
        before = step
    assert all(seen[::4]), seen  # where three had begun, one was done
    saved(folder, before + 1, keep=1)
    assert [path.name for path in folder.iterdir()] == [f"step-{before + 1:08d}"]


def test_kills_at_random_times_leave_one_of_the_last_two_checkpoints(jobs, tmp_path):
    killed_at_random(jobs, tmp_path / "one", 1, 4, seed=0)
    killed_at_random(jobs, tmp_path / "two", 2, 3, seed=1)


@pytest.mark.slow
def test_a_hundred_kills_at_random_times_leave_one_of_the_last_two_checkpoints(jobs, tmp_path):
    killed_at_random(jobs, tmp_path / "one", 1, 100, seed=2)
    killed_at_random(jobs, tmp_path / "two", 2, 60, seed=3)
