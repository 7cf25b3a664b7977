"""Checkpoints: bit by bit on every mesh, whole after every kill, and refused by name when they are not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
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
from safetensors.torch import load_file
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from meshflash.models.gpt import GPT, tiny
from meshflash.parallel import accumulate, init_mesh, parallelize, spread_batch
from meshflash.parallel.mesh import DATA, place, size, summed
from meshflash.train import checkpoint_files
from meshflash.train.checkpoint import CheckpointError, Checkpoints
from train import crash

TENSORS, INDEX, MANIFEST = "rank-00000.safetensors", checkpoint_files.INDEX, checkpoint_files.MANIFEST

#: Ranks, and axes dp, fsdp, cp, tp.
MESHES = {
    "one": (1, (1, 1, 1, 1)),
    "dp": (2, (2, 1, 1, 1)),
    "zero": (2, (2, 1, 1, 1)),
    "fsdp": (2, (1, 2, 1, 1)),
    "cp": (2, (1, 1, 2, 1)),
    "fsdp-tp": (4, (1, 2, 1, 2)),
}
MORE = {"fsdp3": (3, (1, 3, 1, 1)), "dp3": (3, (3, 1, 1, 1)), "hybrid": (4, (2, 2, 1, 1)), "cp-tp": (4, (1, 1, 2, 2))}
MORE |= {"fsdp4": (4, (1, 4, 1, 1))}


def built(name: str, seed: int) -> Any:
    """(mesh, model, optimizer) with two groups of weights, as all meshes here have them."""
    _, shape = (MESHES | MORE)[name]
    mesh = init_mesh(*shape, device="cpu")
    config = tiny(vocabulary=61, layers=1, dim=32, hidden=48, heads=4, kv_heads=2)
    model = parallelize(GPT(config, seed=seed), mesh)
    weights = list(model.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0.0},
    ]
    if name == "zero":
        group = summed(mesh).get_group()
        zero = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, process_group=group, lr=1e-2)
        return mesh, model, zero
    return mesh, model, torch.optim.AdamW(groups, lr=1e-2)


def train(mesh: Any, model: nn.Module, optimizer: Any, first: int, last: int) -> list[str]:
    """Losses of some steps, as they are bit by bit."""
    found = []
    for step in range(first, last):
        tokens = torch.randint(61, (4, 24), generator=torch.Generator().manual_seed(step))
        rows = torch.arange(4).tensor_split(size(mesh, DATA))[place(mesh, DATA)]
        optimizer.zero_grad()
        found.append(float(accumulate(model, [spread_batch(tokens[rows], mesh)], mesh).loss).hex())
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return found


def digest(x: torch.Tensor) -> str:
    whole = (x.full_tensor() if isinstance(x, DTensor) else x).detach().contiguous()
    data = bytes(whole.reshape(-1).view(torch.uint8).numpy())
    return f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(data).hexdigest()}"


def digests(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Of all whole tensors that this rank knows, and the groups' options."""
    inner = getattr(optimizer, "optim", optimizer)
    found = {}
    for name, weight in model.named_parameters():
        name = name.removeprefix("module.")
        found[name] = digest(weight)
        for key, value in inner.state.get(weight, {}).items():
            found[f"{name} {key}"] = digest(value)
    for n, group in enumerate(optimizer.param_groups):
        found |= {f"group {n} {key}": repr(group[key]) for key in ("lr", "betas", "eps", "weight_decay")}
    return found


def saves(rank, world, group, folder, names):
    found = {}
    for name in names:
        mesh, model, optimizer = built(name, seed=0)
        checkpoints = Checkpoints(Path(folder) / name, mesh=mesh)
        train(mesh, model, optimizer, 0, 2)
        want = digests(model, optimizer)
        checkpoints.save(2, model, optimizer, {"step": 2, "mesh": name})
        losses = train(mesh, model, optimizer, 2, 5)  # weights change while they are written
        checkpoints.wait()
        found[name] = want, losses
    return found


def loads(rank, world, group, folder, names, sources):
    found = {}
    for name in names:
        for source in sources:
            mesh, model, optimizer = built(name, seed=9)
            if name == source:
                train(mesh, model, optimizer, 7, 8)  # what was there before must not shine through
            state = Checkpoints(Path(folder) / source, mesh=mesh).load(model, optimizer)
            assert state == {"step": 2, "mesh": source}
            got = digests(model, optimizer)
            losses = train(mesh, model, optimizer, 2, 5) if name == source else None
            found[name, source] = got, losses
    return found


def by_world(meshes):
    worlds = sorted({world for world, _ in meshes.values()})
    return [(world, [name for name, (ranks, _) in meshes.items() if ranks == world]) for world in worlds]


def every_mesh_to_every_other(pool, folder, meshes):
    want, losses = {}, {}
    for world, names in by_world(meshes):
        ranks = pool.run(world, saves, str(folder), names)
        for name in names:
            want[name] = {key: value for rank in ranks for key, value in rank[name][0].items()}
            losses[name] = ranks[0][name][1]
            assert len(want[name]) == 12 * 4 + 2 * 4  # weights with three tensors of AdamW each, options of two groups
    pairs = 0
    for world, names in by_world(meshes):
        for rank in pool.run(world, loads, str(folder), names, list(meshes), timeout=300.0):
            for (name, source), (got, after) in rank.items():
                assert got.keys() <= want[source].keys()
                assert got == {key: want[source][key] for key in got}, (name, source)
                assert len(got) == len(want[source]) or name == "zero"
                assert after is None or after == losses[name], name
                pairs += 1
    assert pairs == sum(world * len(meshes) for world, _ in meshes.values())


def test_every_mesh_loads_what_every_other_saved_and_goes_on_bit_by_bit(pool, tmp_path):
    every_mesh_to_every_other(pool, tmp_path, MESHES)


@pytest.mark.slow
def test_uneven_shards_and_larger_meshes_too(pool, tmp_path):
    every_mesh_to_every_other(pool, tmp_path, {"one": MESHES["one"], "zero": MESHES["zero"], **MORE})


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    """Checkpoints whose numbers are ten times their steps."""
    checkpoints, (model, optimizer) = Checkpoints(folder, keep=keep), crash.made()
    for step in steps:
        crash.fill(model, optimizer, 10.0 * step)
        checkpoints.save(step, model, optimizer, {"number": 10.0 * step}, wait=True)
    return checkpoints


def loaded(checkpoints: Checkpoints, step: int | None = None) -> float:
    """The one number that a checkpoint holds everywhere."""
    model, optimizer = crash.made()
    state = checkpoints.load(model, optimizer, step)
    assert crash.numbers(model, optimizer) == {state["number"]}
    return state["number"]


def test_a_save_does_not_see_later_changes(tmp_path, monkeypatch):
    fsync = os.fsync

    def slow(handle):
        time.sleep(0.1)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    checkpoints, (model, optimizer) = Checkpoints(tmp_path), crash.made()
    state = {"number": 7.0}
    crash.fill(model, optimizer, 7.0)
    checkpoints.save(7, model, optimizer, state)
    assert checkpoints.latest() is None  # it is still being written
    crash.fill(model, optimizer, 8.0)
    state["number"] = 8.0
    checkpoints.save(8, model, optimizer, state)
    assert checkpoints.latest() == 7
    crash.fill(model, optimizer, 9.0)
    checkpoints.wait()
    assert [loaded(checkpoints, 7), loaded(checkpoints, 8)] == [7.0, 8.0]


def test_the_newest_are_kept_and_later_ones_of_another_run_too(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, 9, keep=2)
    assert checkpoints.steps() == [3, 9]
    saved(tmp_path, 4, keep=1)  # of a run that went back: it must not remove itself
    assert (checkpoints.steps(), checkpoints.latest()) == ([4, 9], 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000009"]
    with pytest.raises(ValueError, match="keep=0: expected at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_a_step_that_is_there_is_replaced(tmp_path):
    checkpoints, (model, optimizer) = saved(tmp_path, 1, 2), crash.made()
    crash.fill(model, optimizer, 5.0)
    checkpoints.save(2, model, optimizer, {"number": 5.0}, wait=True)
    assert (checkpoints.steps(), loaded(checkpoints)) == ([1, 2], 5.0)
    assert len(list(tmp_path.iterdir())) == 2


def test_leftovers_are_swept_and_what_was_put_aside_counts(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.replaced-abc")  # killed between two renames
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000003.partial-abc")
    assert (checkpoints.steps(), loaded(checkpoints)) == ([1, 2], 20.0)
    saved(tmp_path, 2)
    (tmp_path / "notes.txt").write_text("not ours")
    saved(tmp_path, 4)
    names = ["notes.txt", "step-00000001", "step-00000002", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


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
    "a folder in place of a file": (
        lambda f: ((f / INDEX).unlink(), (f / INDEX).mkdir()),
        f"{INDEX}: it has|{INDEX}: Is a directory",
    ),
}


def test_damage_is_refused_by_name_and_a_whole_one_offered(tmp_path):
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
    """Give a changed checkpoint digests that fit: what is not damage must be refused too."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != MANIFEST
    }
    changed(folder / MANIFEST, files=files)


def test_what_passes_its_digests_but_does_not_fit_together_is_refused(tmp_path):
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


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
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


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
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


def test_every_dtype_and_shape_comes_back(tmp_path):
    class Odd(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            for name, dtype in checkpoint_files.DTYPES.items():
                data = torch.randint(2, (3, 5), generator=generator).to(dtype)
                self.register_buffer(f"b_{name}", data)
            self.turned = nn.Parameter(torch.rand(4, 6, generator=generator).T)
            self.shared = self.turned
            self.number = nn.Parameter(torch.rand((), generator=generator))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.register_buffer("passing", torch.zeros(2), persistent=False)

    one, other = Odd(1), Odd(2)
    compiled: Any = torch.compile(one)
    checkpoints = Checkpoints(tmp_path)
    options: Any = dict(lr=torch.tensor(0.1), momentum=0.9)
    optimizer = torch.optim.SGD(one.parameters(), **options)
    checkpoints.save(1, compiled, optimizer, {"nested": [1, {"x": None}]}, wait=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.7)
    restored = torch.optim.SGD(other.parameters(), lr=torch.tensor(0.5))
    assert checkpoints.load(other, restored) == {"nested": [1, {"x": None}]}
    assert all(digest(x) == digest(other.state_dict()[name]) for name, x in one.state_dict().items())
    assert (restored.param_groups[0]["lr"], restored.param_groups[0]["momentum"]) == (torch.tensor(0.1), 0.9)
    theirs = load_file(tmp_path / "step-00000001" / TENSORS)  # by the library of the format
    assert set(theirs) == {f"model/{name}" for name in one.state_dict() if name != "shared"}
    assert all(digest(x) == digest(one.state_dict()[name.removeprefix("model/")]) for name, x in theirs.items())


def test_weights_without_state_and_values_that_are_no_tensors(tmp_path):
    model, optimizer = crash.made()
    first = next(model.parameters())
    optimizer.state[first] = {"step": 3, "buffer": None, "exp_avg": torch.ones(96, 64), "pair": (1.5, [True, "x"])}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer, {}, wait=True)
    other, restored = crash.made()
    crash.fill(other, restored, 4.0)
    checkpoints.load(other, restored)
    got = {name: restored.state[p] for name, p in other.named_parameters() if restored.state[p]}
    assert list(got) == ["0.weight"]
    assert torch.equal(got["0.weight"].pop("exp_avg"), torch.ones(96, 64))
    assert got["0.weight"] == {"step": 3, "buffer": None, "pair": (1.5, [True, "x"])}


def refuse(*args, **kwargs):
    raise AssertionError("pickled")


PICKLES = [(pickle, name) for name in ("loads", "load", "dumps", "dump", "Unpickler", "Pickler", "_Unpickler")]
PICKLES += [(torch, "load"), (torch, "save")]


def without_pickle(rank, world, group, folder):
    """Save and load while nothing can be pickled, then rank 1 has errors that all ranks hear of."""
    mesh, model, optimizer = built("fsdp", seed=0)
    train(mesh, model, optimizer, 0, 1)
    checkpoints = Checkpoints(folder, mesh=mesh)
    originals = [getattr(*what) for what in PICKLES]
    try:
        for what in PICKLES:
            setattr(*what, refuse)
        checkpoints.save(1, model, optimizer, {"step": 1}, wait=True)
        assert checkpoints.load(model, optimizer) == {"step": 1}
    finally:
        for what, original in zip(PICKLES, originals, strict=True):
            setattr(*what, original)
    return hears(rank, checkpoints, model, optimizer)


def hears(rank, checkpoints, model, optimizer):
    """What each rank is told when the other one fails."""
    said = []

    def told(call, *args):
        try:
            call(*args)
            said.append("")
        except (ValueError, TypeError) as error:
            said.append(str(error))

    told(checkpoints.save, 2, model, optimizer, {"x": object()} if rank else {})
    told(checkpoints.save, 2 + rank, model, optimizer, {})
    fsync = os.fsync
    try:
        if rank:
            os.fsync = full
        told(checkpoints.save, 2, model, optimizer, {})
        told(checkpoints.save, 3, model, optimizer, {})
        told(checkpoints.wait)
        told(checkpoints.wait)  # said once
    finally:
        os.fsync = fsync
    told(checkpoints.load, nn.Linear(2, 2) if rank else model, None)
    before = digests(model, optimizer)
    told(lambda: checkpoints.save(2, model, optimizer, {}, wait=True))
    train(init_mesh(1, 2, device="cpu"), model, optimizer, 5, 6)
    if rank:
        flip(checkpoints.folder / "step-00000002" / "rank-00001.safetensors")
    changed = digests(model, optimizer)
    checkpoints._ranks.exchange("flipped")
    told(checkpoints.load, model, optimizer)
    assert digests(model, optimizer) == changed != before
    told(checkpoints.load, model, optimizer, 1)
    return said, [path.name for path in checkpoints.folder.iterdir()]


def full(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nothing_is_pickled_and_all_ranks_hear_of_a_failure_on_one(pool, tmp_path):
    first, second = pool.run(2, without_pickle, str(tmp_path))
    for said, names in (first, second):
        words = iter(said)
        assert "Object of type object is not JSON serializable" in next(words)
        assert "ranks are at the steps 2, 3" in next(words)
        assert next(words) == ""
        assert f"step 2 was not saved in {tmp_path}: rank 1: rank-00001.safetensors: No space left" in (
            text := next(words)
        )
        assert "step 1 is complete" in text
        assert next(words) == ""  # the save that raised did not begin
        assert next(words) == ""
        assert "rank 1: " in (text := next(words))
        assert "of another model" in text
        assert next(words) == ""
        assert "rank 1: " in (text := next(words)) or "rank 0: " in text
        assert "step-00000002/rank-00001.safetensors: its sha256" in text
        assert "give step=1" in text
        assert next(words) == ""
        assert sorted(names) == ["step-00000001", "step-00000002"]
    for path in tmp_path.rglob("*.*"):
        assert path.suffix in (".json", ".safetensors")
        assert json.loads(path.read_bytes()) if path.suffix == ".json" else load_file(path)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB, where this machine lets us have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a disk is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_loses_nothing(small_disk):
    checkpoints = saved(small_disk / "run", 1)  # about 150 kB each
    (small_disk / "step-other").write_bytes(bytes(600_000))
    leftover = small_disk / "run" / "step-00000002.partial-abc"
    leftover.mkdir()
    (leftover / "x").write_bytes(bytes(100_000))
    saved(small_disk / "run", 2)  # has room only without what was left over
    with pytest.raises(CheckpointError, match=r"step 3 was not saved.*No space left on device; step 2 is complete"):
        saved(small_disk / "run", 3, 4)
    assert [path.name for path in sorted((small_disk / "run").iterdir())] == ["step-00000001", "step-00000002"]
    assert loaded(checkpoints) == 20.0
    (small_disk / "step-other").unlink()
    saved(small_disk / "run", 3)
    assert loaded(checkpoints) == 30.0


@pytest.mark.parametrize("name", [INDEX, MANIFEST, TENSORS])
def test_a_disk_that_is_full_at_any_file_loses_nothing(tmp_path, monkeypatch, name):
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
    """The process that starts jobs of crash.py."""

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
        """The ids of a new job's processes."""
        self.number += 1
        self.log = self.folder / f"{self.number}.log"
        self.log.touch()
        asked = dict(folder=str(folder), steps=list(steps), world=world, keep=keep, log=str(self.log), at=at or {})
        return self._ask(json.dumps(asked | {"store": str(self.folder / f"{self.number}.store")}))

    def ends(self):
        """The exit statuses of the last job's processes, when they ended."""
        return self._ask("wait")

    def told(self, word):
        """The last step that the job's log tells this of, or None."""
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
    """Kill one rank before each thing that it does with files while steps 2 and 2 again are saved after 1."""
    saved(tmp_path / "good", 1)
    found: set[float] = set()
    for at in range(1, 1000, every):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "good", folder)
        jobs.start(folder, [2, 2], world, keep=1, at={str(victim): at})
        ends = jobs.ends()
        checkpoints = Checkpoints(folder)
        for step in checkpoints.steps():
            checkpoints.check(step)  # what is being removed is no checkpoint any more
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


def test_a_kill_before_each_thing_done_with_files_leaves_a_whole_checkpoint(jobs, tmp_path):
    assert killed_at_every_file(jobs, tmp_path, 1, 0, every=5) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0)])
def test_a_kill_before_everything_done_with_files_leaves_a_whole_checkpoint(jobs, tmp_path, world, victim):
    killed_at_every_file(jobs, tmp_path, world, victim, every=1)


def killed_at_random(jobs, folder, world, times, seed):
    """Kill some or all ranks of jobs that save without pause, each going on from where the one before was killed."""
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


def test_kills_at_random_leave_one_of_the_last_two_steps(jobs, tmp_path):
    killed_at_random(jobs, tmp_path / "one", 1, 4, seed=0)
    killed_at_random(jobs, tmp_path / "two", 2, 3, seed=1)


@pytest.mark.slow
def test_a_hundred_kills_at_random_leave_one_of_the_last_two_steps(jobs, tmp_path):
    killed_at_random(jobs, tmp_path / "one", 1, 100, seed=2)
    killed_at_random(jobs, tmp_path / "two", 2, 60, seed=3)
