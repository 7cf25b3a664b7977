"""Damaged or foreign checkpoints are refused with the file named; full disks and kills keep an intact checkpoint."""

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
from train.checkpoints import INDEX, MANIFEST, TENSORS, flip_bit, load_value, raise_disk_full, save_steps


def change_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE: dict[str, tuple[Any, str]] = {
    "a flipped bit": (lambda f: flip_bit(f / TENSORS), f"{TENSORS}: its sha256 is not the one that was written"),
    "a truncated file": (
        lambda f: os.truncate(f / TENSORS, 1000),
        f"{TENSORS}: it has 1000 bytes, and [0-9]+ were written",
    ),
    "a missing file": (lambda f: (f / TENSORS).unlink(), f"{TENSORS}: missing"),
    "a changed index": (lambda f: flip_bit(f / INDEX), f"{INDEX}: its sha256"),
    "a missing index": (lambda f: (f / INDEX).unlink(), f"{INDEX}: missing"),
    "a truncated manifest": (lambda f: os.truncate(f / MANIFEST, 50), f"{MANIFEST}: not JSON"),
    "a missing manifest": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST}: missing"),
    "a foreign manifest": (lambda f: (f / MANIFEST).write_text('{"weights": []}'), f"{MANIFEST}: not of a meshflash"),
    "a list as manifest": (lambda f: (f / MANIFEST).write_text("[1]"), f"{MANIFEST}: not of a meshflash"),
    "a future version": (
        lambda f: change_json(f / MANIFEST, version=2),
        f"{MANIFEST}: version 2, and this .* version 1",
    ),
    "another step": (lambda f: change_json(f / MANIFEST, step=7), f"{MANIFEST}: it is of step 7, and .* says [1-3]"),
    "a path out of the folder": (
        lambda f: change_json(f / MANIFEST, files={INDEX: {}, "../x": {}}),
        f"{MANIFEST}: its list of files is damaged",
    ),
    "an invalid digest": (
        lambda f: change_json(f / MANIFEST, files={INDEX: 5}),
        f"{MANIFEST}: what it says of {INDEX}",
    ),
    "another digest in the manifest": (
        lambda f: (f / MANIFEST).write_bytes(change_digest((f / MANIFEST).read_bytes())),
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


def change_digest(data: bytes) -> bytes:
    """Return a manifest with one digit changed in the digest of the tensor file."""
    at = data.index(b'"sha256"', data.index(TENSORS.encode())) + len('"sha256": "')
    return data[:at] + (b"1" if data[at : at + 1] == b"0" else b"0") + data[at + 1 :]


def test_damaged_checkpoints_are_refused_with_an_intact_alternative(tmp_path):
    save_steps(tmp_path / "good", 1, 2, 3)
    for damage_name, (damage, message) in DAMAGE.items():
        folder = tmp_path / damage_name.replace(" ", "-")
        shutil.copytree(tmp_path / "good", folder)
        damage(folder / "step-00000003")
        checkpoints, (model, optimizer) = Checkpoints(folder), crash.build()
        crash.fill(model, optimizer, -3.0)
        with pytest.raises(CheckpointError, match=f"step-00000003/({message}).*give step=2"):
            checkpoints.load(model, optimizer)
        assert crash.distinct_values(model, optimizer) == {-3.0}, damage_name
        with pytest.raises(CheckpointError, match=message):
            checkpoints.check(3)
        assert load_value(checkpoints, 2) == 20.0
        damage(folder / "step-00000002")
        with pytest.raises(CheckpointError, match="give step=1"):
            checkpoints.load(model, optimizer)
        damage(folder / "step-00000001")
        with pytest.raises(CheckpointError, match="no older checkpoint passes"):
            checkpoints.load(model, optimizer)
    checkpoints = Checkpoints(tmp_path / "good")
    with pytest.raises(CheckpointError, match="step-00000007: missing; the steps there are: 1, 2, 3; step 3 passes"):
        load_value(checkpoints, 7)
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        load_value(Checkpoints(tmp_path / "none"))
    checkpoints.check(3)


def update_digests(folder: Path) -> None:
    """Give a changed checkpoint valid digests, so that only its contents contradict each other."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != MANIFEST
    }
    change_json(folder / MANIFEST, files=files)


def test_files_with_valid_digests_that_contradict_each_other_are_refused(tmp_path):
    save_steps(tmp_path / "good", 1, 2)

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
        update_digests(folder / "step-00000002")
        model, optimizer = crash.build()
        crash.fill(model, optimizer, -3.0)
        with pytest.raises(CheckpointError, match=message):
            Checkpoints(folder).load(model, optimizer)
        assert crash.distinct_values(model, optimizer) == {-3.0}


def test_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path):
    checkpoints = save_steps(tmp_path, 1)
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
        checkpoints.load(crash.build()[0].double())
    model, _ = crash.build()
    optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in model.children()])
    with pytest.raises(CheckpointError, match=r"just the weights of group 0: 0\.bias, 0\.weight"):
        checkpoints.load(model, optimizer)
    with pytest.raises(CheckpointError, match="not the model's"):
        checkpoints.load(model, crash.build()[1])
    with pytest.raises(ValueError, match="meta device"), torch.device("meta"):
        checkpoints.load(nn.Linear(2, 2))
    checkpoints.save(2, model, None, {}, wait=True)
    with pytest.raises(CheckpointError, match="it has no optimizer; load with optimizer None"):
        checkpoints.load(model, optimizer)
    assert checkpoints.load(model) == {}


def test_state_that_cannot_be_saved_is_refused(tmp_path):
    checkpoints, (model, optimizer) = Checkpoints(tmp_path), crash.build()
    for arguments, message in (
        ((-1, model, optimizer, {}), "step=-1: expected 0 or more"),
        ((1, model, crash.build()[1], {}), "group 0 has a weight that is not the model's"),
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


def test_full_disk_keeps_the_previous_checkpoint(small_disk):
    checkpoints = save_steps(small_disk / "run", 1)  # about 150 kB each
    (small_disk / "step-other").write_bytes(bytes(600_000))
    leftover = small_disk / "run" / "step-00000002.partial-abc"
    leftover.mkdir()
    (leftover / "x").write_bytes(bytes(100_000))
    save_steps(small_disk / "run", 2)  # fits only if leftovers are removed first
    with pytest.raises(CheckpointError, match=r"step 3 was not saved.*No space left on device; step 2 is complete"):
        save_steps(small_disk / "run", 3, 4)
    assert [path.name for path in sorted((small_disk / "run").iterdir())] == ["step-00000001", "step-00000002"]
    assert load_value(checkpoints) == 20.0
    (small_disk / "step-other").unlink()
    save_steps(small_disk / "run", 3)
    assert load_value(checkpoints) == 30.0


@pytest.mark.parametrize("name", [INDEX, MANIFEST, TENSORS])
def test_disk_that_fills_up_at_any_file_keeps_the_previous_checkpoint(tmp_path, monkeypatch, name):
    checkpoints = save_steps(tmp_path, 1)
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: (
            raise_disk_full(handle) if os.readlink(f"/proc/self/fd/{handle}").endswith(name) else fsync(handle)
        ),
    )
    with pytest.raises(CheckpointError, match=f"step 2 was not saved.*{name}: No space left"):
        save_steps(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_value(checkpoints) == 10.0


class Jobs:
    """The process that starts the jobs of crash.py; the fixture `jobs` makes it."""

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

    def start(self, folder, steps, world=1, keep=2, kill_operations=None):
        """Start a job and return the ids of its processes."""
        self.number += 1
        self.log = self.folder / f"{self.number}.log"
        self.log.touch()
        request = dict(
            folder=str(folder),
            steps=list(steps),
            world=world,
            keep=keep,
            log=str(self.log),
            kill_operations=kill_operations or {},
        )
        return self._request(json.dumps(request | {"store": str(self.folder / f"{self.number}.store")}))

    def wait_for_exit(self):
        """Return the exit statuses of the last job's processes after they have ended."""
        return self._request("wait")

    def last_step(self, event):
        """Return the last step that the job's log reports for this event, or None."""
        steps = [int(line.split()[1]) for line in self.log.read_text().splitlines() if line.startswith(event)]
        return max(steps, default=None)

    def _request(self, line):
        """Send a line to the process and return its answer."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Yield the process that starts jobs, one for all tests of this module."""
    started = Jobs(tmp_path_factory.mktemp("jobs"))
    yield started
    started.close()


def kill_at_file_operations(jobs, tmp_path, world, victim, every):
    """Kill one rank before each `every`-th of its file operations, while it saves step 2 twice after step 1."""
    save_steps(tmp_path / "good", 1)
    found: set[float] = set()
    for at in range(1, 1000, every):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "good", folder)
        jobs.start(folder, [2, 2], world, keep=1, kill_operations={str(victim): at})
        ends = jobs.wait_for_exit()
        checkpoints = Checkpoints(folder)
        for step in checkpoints.steps():
            checkpoints.check(step)  # a checkpoint under removal is not listed
        value = load_value(checkpoints)
        assert value in (10.0, 20.0, 21.0)
        found.add(value)
        assert save_steps(folder, 5, keep=1).steps() == [5]
        assert [path.name for path in folder.iterdir()] == ["step-00000005"]
        if ends[victim] == 0:
            assert ends == [0] * world
            break
        assert ends[victim] == signal.SIGKILL
        shutil.rmtree(folder)
    assert found == {10.0, 20.0, 21.0}
    return at


def test_kill_before_sampled_file_operations_leaves_an_intact_checkpoint(jobs, tmp_path):
    assert kill_at_file_operations(jobs, tmp_path, 1, 0, every=5) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0)])
def test_kill_before_any_file_operation_leaves_an_intact_checkpoint(jobs, tmp_path, world, victim):
    kill_at_file_operations(jobs, tmp_path, world, victim, every=1)


def kill_at_random_times(jobs, folder, world, times, seed):
    """Kill some or all ranks of jobs that save without pause; each job resumes the previous one."""
    draw, before, seen = random.Random(seed), 0, []
    for n in range(times):
        pids = jobs.start(folder, [before], world)
        limit, begun = time.monotonic() + 60, before + (3 if n % 4 == 0 else draw.randint(1, 3))
        while (jobs.last_step("begin") or 0) < begun and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.04))
        for pid in draw.sample(pids, draw.randint(1, world)):
            os.kill(pid, signal.SIGKILL)
        ends = jobs.wait_for_exit()  # the other ranks end by themselves
        assert signal.SIGKILL in ends
        assert 0 not in ends
        checkpoints = Checkpoints(folder)
        step = checkpoints.latest() or 0
        assert (jobs.last_step("done") or before) <= step <= jobs.last_step("begin")
        assert jobs.last_step("begin") - step <= 2  # one save is being written, the next one waits
        if step:
            assert load_value(checkpoints) == 10.0 * step
        seen.append(step - before)
        before = step
    assert all(seen[::4]), seen  # in every fourth job three saves had begun, so one was complete
    save_steps(folder, before + 1, keep=1)
    assert [path.name for path in folder.iterdir()] == [f"step-{before + 1:08d}"]


def test_kills_at_random_times_leave_one_of_the_last_two_checkpoints(jobs, tmp_path):
    kill_at_random_times(jobs, tmp_path / "one", 1, 4, seed=0)
    kill_at_random_times(jobs, tmp_path / "two", 2, 3, seed=1)


@pytest.mark.slow
def test_many_kills_at_random_times_leave_one_of_the_last_two_checkpoints(jobs, tmp_path):
    kill_at_random_times(jobs, tmp_path / "one", 1, 100, seed=2)
    kill_at_random_times(jobs, tmp_path / "two", 2, 60, seed=3)
