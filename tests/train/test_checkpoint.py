"""Checkpoints: bitwise loads on every mesh, pruning, every dtype, no pickle, and the same error on all ranks."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
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
from meshflash.parallel import accumulate, init_mesh, parallelize, shard_batch
from meshflash.parallel.mesh import DATA_AXES, mesh_rank, reduce_mesh, size
from meshflash.train import checkpoint_files
from meshflash.train.checkpoint import Checkpoints
from train import crash
from train.checkpoints import TENSORS, flip_bit, load_value, raise_disk_full, save_steps

#: Maps a name to the number of ranks, and to the sizes of dp, fsdp, cp and tp.
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


def build_on_mesh(name: str, seed: int) -> Any:
    """Return (mesh, model, optimizer) with two parameter groups."""
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
        group = reduce_mesh(mesh).get_group()
        zero = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, process_group=group, lr=1e-2)
        return mesh, model, zero
    return mesh, model, torch.optim.AdamW(groups, lr=1e-2)


def train(mesh: Any, model: nn.Module, optimizer: Any, first: int, last: int) -> list[str]:
    """Return the losses of some steps as hex, to compare bitwise."""
    found = []
    for step in range(first, last):
        tokens = torch.randint(61, (4, 24), generator=torch.Generator().manual_seed(step))
        rows = torch.arange(4).tensor_split(size(mesh, DATA_AXES))[mesh_rank(mesh, DATA_AXES)]
        optimizer.zero_grad()
        found.append(float(accumulate(model, [shard_batch(tokens[rows], mesh)], mesh).loss).hex())
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return found


def digest(x: torch.Tensor) -> str:
    """Return dtype, shape and SHA-256 of a full tensor."""
    whole = (x.full_tensor() if isinstance(x, DTensor) else x).detach().contiguous()
    data = bytes(whole.reshape(-1).view(torch.uint8).numpy())
    return f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(data).hexdigest()}"


def digests(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Return digests of all full tensors on this rank, and the options of the parameter groups."""
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


def save_on_meshes(rank, world, group, folder, names):
    """Save step 2 on these meshes; return the digests of the state, and the losses of later steps."""
    found = {}
    for name in names:
        mesh, model, optimizer = build_on_mesh(name, seed=0)
        checkpoints = Checkpoints(Path(folder) / name, mesh=mesh)
        train(mesh, model, optimizer, 0, 2)
        want = digests(model, optimizer)
        checkpoints.save(2, model, optimizer, {"step": 2, "mesh": name})
        losses = train(mesh, model, optimizer, 2, 5)  # weights change while they are written
        checkpoints.wait()
        found[name] = want, losses
    return found


def load_on_meshes(rank, world, group, folder, names, sources):
    """Load every source on these meshes; return digests, and losses on the mesh of the source."""
    found = {}
    for name in names:
        for source in sources:
            mesh, model, optimizer = build_on_mesh(name, seed=9)
            if name == source:
                train(mesh, model, optimizer, 7, 8)  # earlier values must not survive the load
            state = Checkpoints(Path(folder) / source, mesh=mesh).load(model, optimizer)
            assert state == {"step": 2, "mesh": source}
            got = digests(model, optimizer)
            losses = train(mesh, model, optimizer, 2, 5) if name == source else None
            found[name, source] = got, losses
    return found


def by_world(meshes):
    """Return the names of the meshes, grouped by their number of ranks."""
    worlds = sorted({world for world, _ in meshes.values()})
    return [(world, [name for name, (ranks, _) in meshes.items() if ranks == world]) for world in worlds]


def check_every_pair_of_meshes(pool, folder, meshes):
    """Save on every mesh and load on every mesh; assert that values and later losses are bitwise equal."""
    want, losses = {}, {}
    for world, names in by_world(meshes):
        ranks = pool.run(world, save_on_meshes, str(folder), names)
        for name in names:
            want[name] = {key: value for rank in ranks for key, value in rank[name][0].items()}
            losses[name] = ranks[0][name][1]
            assert (
                len(want[name]) == 12 * 4 + 2 * 4
            )  # weights, each with three tensors of AdamW, and the options of two groups
    pairs = 0
    for world, names in by_world(meshes):
        for rank in pool.run(world, load_on_meshes, str(folder), names, list(meshes), timeout=300.0):
            for (name, source), (got, after) in rank.items():
                assert got.keys() <= want[source].keys()
                assert got == {key: want[source][key] for key in got}, (name, source)
                assert len(got) == len(want[source]) or name == "zero"
                assert after is None or after == losses[name], name
                pairs += 1
    assert pairs == sum(world * len(meshes) for world, _ in meshes.values())


def test_checkpoints_of_each_mesh_resume_bitwise_on_each_other_mesh(pool, tmp_path):
    check_every_pair_of_meshes(pool, tmp_path, MESHES)


@pytest.mark.slow
def test_checkpoints_of_uneven_shards_and_larger_meshes_resume_bitwise(pool, tmp_path):
    check_every_pair_of_meshes(pool, tmp_path, {"one": MESHES["one"], "zero": MESHES["zero"], **MORE})


def test_save_is_not_affected_by_later_changes(tmp_path, monkeypatch):
    fsync = os.fsync

    def slow(handle):
        time.sleep(0.1)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    checkpoints, (model, optimizer) = Checkpoints(tmp_path), crash.build()
    state = {"value": 7.0}
    crash.fill(model, optimizer, 7.0)
    checkpoints.save(7, model, optimizer, state)
    assert checkpoints.latest() is None  # it is still being written
    crash.fill(model, optimizer, 8.0)
    state["value"] = 8.0
    checkpoints.save(8, model, optimizer, state)
    assert checkpoints.latest() == 7
    crash.fill(model, optimizer, 9.0)
    checkpoints.wait()
    assert [load_value(checkpoints, 7), load_value(checkpoints, 8)] == [7.0, 8.0]


def test_newest_checkpoints_and_later_ones_of_another_run_are_kept(tmp_path):
    checkpoints = save_steps(tmp_path, 1, 2, 3, 9, keep=2)
    assert checkpoints.steps() == [3, 9]
    save_steps(tmp_path, 4, keep=1)  # a run that resumed from an earlier step must not remove its own checkpoint
    assert (checkpoints.steps(), checkpoints.latest()) == ([4, 9], 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000009"]
    with pytest.raises(ValueError, match="keep=0: expected at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_saving_the_same_step_replaces_its_checkpoint(tmp_path):
    checkpoints, (model, optimizer) = save_steps(tmp_path, 1, 2), crash.build()
    crash.fill(model, optimizer, 5.0)
    checkpoints.save(2, model, optimizer, {"value": 5.0}, wait=True)
    assert (checkpoints.steps(), load_value(checkpoints)) == ([1, 2], 5.0)
    assert len(list(tmp_path.iterdir())) == 2


def test_partial_folders_are_removed_and_replaced_ones_still_count(tmp_path):
    checkpoints = save_steps(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.replaced-abc")  # killed between two renames
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000003.partial-abc")
    assert (checkpoints.steps(), load_value(checkpoints)) == ([1, 2], 20.0)
    save_steps(tmp_path, 2)
    (tmp_path / "notes.txt").write_text("of another program")
    save_steps(tmp_path, 4)
    names = ["notes.txt", "step-00000001", "step-00000002", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_every_dtype_and_shape_is_loaded_bitwise(tmp_path):
    class EveryDtype(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            for name, dtype in checkpoint_files.DTYPES.items():
                data = torch.randint(2, (3, 5), generator=generator).to(dtype)
                self.register_buffer(f"b_{name}", data)
            self.transposed = nn.Parameter(torch.rand(4, 6, generator=generator).T)
            self.shared = self.transposed
            self.scalar = nn.Parameter(torch.rand((), generator=generator))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.register_buffer("not_saved", torch.zeros(2), persistent=False)

    saved_model, other = EveryDtype(1), EveryDtype(2)
    compiled: Any = torch.compile(saved_model)
    checkpoints = Checkpoints(tmp_path)
    options: Any = dict(lr=torch.tensor(0.1), momentum=0.9)
    optimizer = torch.optim.SGD(saved_model.parameters(), **options)
    checkpoints.save(1, compiled, optimizer, {"nested": [1, {"x": None}]}, wait=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.7)
    restored = torch.optim.SGD(other.parameters(), lr=torch.tensor(0.5))
    assert checkpoints.load(other, restored) == {"nested": [1, {"x": None}]}
    assert all(digest(x) == digest(other.state_dict()[name]) for name, x in saved_model.state_dict().items())
    assert (restored.param_groups[0]["lr"], restored.param_groups[0]["momentum"]) == (torch.tensor(0.1), 0.9)
    stored = load_file(tmp_path / "step-00000001" / TENSORS)  # read by the safetensors library
    assert set(stored) == {f"model/{name}" for name in saved_model.state_dict() if name != "shared"}
    assert all(digest(x) == digest(saved_model.state_dict()[name.removeprefix("model/")]) for name, x in stored.items())


def test_frozen_weights_and_optimizer_values_without_tensors_are_loaded(tmp_path):
    model, optimizer = crash.build()
    first = next(model.parameters())
    optimizer.state[first] = {"step": 3, "buffer": None, "exp_avg": torch.ones(96, 64), "pair": (1.5, [True, "x"])}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer, {}, wait=True)
    other, restored = crash.build()
    crash.fill(other, restored, 4.0)
    checkpoints.load(other, restored)
    got = {name: restored.state[p] for name, p in other.named_parameters() if restored.state[p]}
    assert list(got) == ["0.weight"]
    assert torch.equal(got["0.weight"].pop("exp_avg"), torch.ones(96, 64))
    assert got["0.weight"] == {"step": 3, "buffer": None, "pair": (1.5, [True, "x"])}


def refuse(*args, **kwargs):
    """Fail the test: nothing may be pickled."""
    raise AssertionError("pickled")


PICKLES = [(pickle, name) for name in ("loads", "load", "dumps", "dump", "Unpickler", "Pickler", "_Unpickler")]
PICKLES += [(torch, "load"), (torch, "save")]


def without_pickle(rank, world, group, folder):
    """Save and load with pickle disabled, then check that errors of rank 1 raise on all ranks."""
    mesh, model, optimizer = build_on_mesh("fsdp", seed=0)
    train(mesh, model, optimizer, 0, 1)
    checkpoints = Checkpoints(folder, mesh=mesh)
    originals = [getattr(*function) for function in PICKLES]
    try:
        for function in PICKLES:
            setattr(*function, refuse)
        checkpoints.save(1, model, optimizer, {"step": 1}, wait=True)
        assert checkpoints.load(model, optimizer) == {"step": 1}
    finally:
        for function, original in zip(PICKLES, originals, strict=True):
            setattr(*function, original)
    return errors_of_failures(rank, checkpoints, model, optimizer)


def errors_of_failures(rank, checkpoints, model, optimizer):
    """Return the errors of this rank in calls that fail on one of the two ranks."""
    messages = []

    def record_error(call, *args):
        try:
            call(*args)
            messages.append("")
        except (ValueError, TypeError) as error:
            messages.append(str(error))

    record_error(checkpoints.save, 2, model, optimizer, {"x": object()} if rank else {})
    record_error(checkpoints.save, 2 + rank, model, optimizer, {})
    fsync = os.fsync
    try:
        if rank:
            os.fsync = raise_disk_full
        record_error(checkpoints.save, 2, model, optimizer, {})
        record_error(checkpoints.save, 3, model, optimizer, {})
        record_error(checkpoints.wait)
        record_error(checkpoints.wait)  # raised only once
    finally:
        os.fsync = fsync
    record_error(checkpoints.load, nn.Linear(2, 2) if rank else model, None)
    before = digests(model, optimizer)
    record_error(lambda: checkpoints.save(2, model, optimizer, {}, wait=True))
    train(init_mesh(1, 2, device="cpu"), model, optimizer, 5, 6)
    if rank:
        flip_bit(checkpoints.folder / "step-00000002" / "rank-00001.safetensors")
    changed = digests(model, optimizer)
    checkpoints._ranks.exchange("flipped")
    record_error(checkpoints.load, model, optimizer)
    assert digests(model, optimizer) == changed != before
    record_error(checkpoints.load, model, optimizer, 1)
    return messages, [path.name for path in checkpoints.folder.iterdir()]


def test_nothing_is_pickled_and_a_failure_on_one_rank_raises_on_all(pool, tmp_path):
    first, second = pool.run(2, without_pickle, str(tmp_path))
    for messages, names in (first, second):
        texts = iter(messages)
        assert "Object of type object is not JSON serializable" in next(texts)
        assert "ranks are at the steps 2, 3" in next(texts)
        assert next(texts) == ""
        assert f"step 2 was not saved in {tmp_path}: rank 1: rank-00001.safetensors: No space left" in (
            text := next(texts)
        )
        assert "step 1 is complete" in text
        assert next(texts) == ""  # the save that raised did not start
        assert next(texts) == ""
        assert "rank 1: " in (text := next(texts))
        assert "of another model" in text
        assert next(texts) == ""
        assert "rank 1: " in (text := next(texts)) or "rank 0: " in text
        assert "step-00000002/rank-00001.safetensors: its sha256" in text
        assert "give step=1" in text
        assert next(texts) == ""
        assert sorted(names) == ["step-00000001", "step-00000002"]
    for path in tmp_path.rglob("*.*"):
        assert path.suffix in (".json", ".safetensors")
        assert json.loads(path.read_bytes()) if path.suffix == ".json" else load_file(path)
