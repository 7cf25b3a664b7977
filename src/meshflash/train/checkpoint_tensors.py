"""The content of a checkpoint: this rank's shards of a model and its optimizer, and the values stored as JSON.

Tensors have the names of a single process, whatever wraps the model. Each shard is stored with its offsets in the full
tensor, so that any other mesh can load it. torch.distributed.checkpoint plans which rank writes and reads which shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshflash.models.layers import local_slices
from meshflash.train.checkpoint_files import DTYPES, INDEX, NAMES, CheckpointError, TensorFile

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Part:
    """A rank's shard of a tensor: its values, its offsets in the full tensor, and the full shape."""

    local: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> Part:
        """Return this rank's shard of a tensor or DTensor, without a copy."""
        local = x.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        return Part(local, tuple(int(rows.start) for rows in local_slices(x)), tuple(x.shape))

    def outline(self) -> list[Any]:
        """Return all but the values, to send to other ranks."""
        return [list(self.offsets), list(self.local.shape), list(self.shape), NAMES[self.local.dtype]]


@dataclass(frozen=True)
class Content:
    """A checkpoint's content on one rank: shards, optimizer values that are not tensors, and parameter groups."""

    parts: dict[str, Part]
    values: dict[str, Any]
    groups: list[dict[str, Any]]


def collect(model: nn.Module, optimizer: Optimizer | None) -> Content:
    """Return the content of this rank; tensors are not copied yet.

    Args:
        model: The model, plain or parallelized.
        optimizer: Its optimizer, or None.
    """
    named = weights(model)
    parts = {f"model/{name}": Part.of(x) for name, x in named.items()}
    values: dict[str, Any] = {}
    names = {id(x): name for name, x in named.items()}
    groups = _groups(optimizer, names) if optimizer is not None else []
    for weight, state in _inner(optimizer).state.items() if optimizer is not None else ():
        for key, value in state.items():
            name = f"optimizer/{key}/{names[id(weight)]}"
            if not isinstance(value, Tensor):
                values[name] = _encode(value, name)
                continue
            if isinstance(weight, DTensor) and value.ndim and value.shape != weight.shape:
                raise ValueError(
                    f"{name}: {list(value.shape)} for a weight {list(weight.shape)} that is sharded; another mesh "
                    "could not load it: take an optimizer whose state is numbers, or tensors of the weight's shape"
                )
            parts[name] = Part.of(value)
    for name, part in parts.items():
        if part.local.dtype not in NAMES:
            raise ValueError(f"{name}: {part.local.dtype} cannot be saved; expected one of {', '.join(DTYPES)}")
    # a rank with no row of a sharded tensor has an empty shard, which is not stored
    return Content({name: p for name, p in parts.items() if p.local.numel() or not prod(p.shape)}, values, groups)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by their names in a single process; a shared one appears once, by its first name."""
    unwrapped: Any = model
    while isinstance(unwrapped, DistributedDataParallel) or hasattr(unwrapped, "_orig_mod"):
        unwrapped = unwrapped.module if isinstance(unwrapped, DistributedDataParallel) else unwrapped._orig_mod
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in unwrapped.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: a {type(value).__name__} in the model's state; a checkpoint takes tensors")
        if value.is_meta:
            raise ValueError(f'{name}: on the meta device; call to_empty(device="cpu"), or that of your device, before')
        found.setdefault(id(value), (name.replace("_orig_mod.", ""), value))
    return dict(found.values())


def plan_write(outlines: Sequence[Mapping[str, Any]]) -> tuple[list[list[str]], dict[str, Any]]:
    """Return (names of the tensors that each rank writes, index of all tensors); the same on every rank.

    One rank writes a shard that several ranks hold, chosen so that all ranks write about as much.

    Args:
        outlines: The outlines of each rank's shards, by tensor name.
    """
    plans = [SavePlan([_item(name, *outline) for name, outline in parts.items()]) for parts in outlines]
    plans, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name = item.index.fqn
            offsets, sizes, shape, dtype = outlines[rank][name]
            known = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "chunks": []})
            known["chunks"].append({"offsets": offsets, "sizes": sizes, "file": file_name(rank)})
    return [[item.index.fqn for item in plan.items] for plan in plans], tensors


def file_name(rank: int) -> str:
    """Return the name of a rank's tensor file."""
    return f"rank-{rank:05d}.safetensors"


def wanted(model: nn.Module, optimizer: Optimizer | None, index: Mapping[str, Any], folder: Path) -> dict[str, Part]:
    """Return the shards that this rank needs, with empty host buffers; raise CheckpointError if they do not match.

    Args:
        model: The model to load.
        optimizer: Its optimizer, or None.
        index: The index of the checkpoint.
        folder: The folder of the checkpoint, for errors.
    """
    named, stored = weights(model), index["tensors"]
    found: dict[str, Part] = {f"model/{name}": _empty_part(x) for name, x in named.items()}
    there = {name for name in stored if name.startswith("model/")}
    wrong = [
        f"{what} {_few(names)}"
        for what, names in (("it has no", found.keys() - there), ("the model has no", there - found.keys()))
        if names
    ]
    if optimizer is not None:
        wrong += _compare_groups(_groups(optimizer, {id(x): name for name, x in named.items()}), index["groups"])
        for name, weight, _ in _saved_state(optimizer, named, stored):
            shape = stored[name]["shape"]
            like = weight if list(weight.shape) == shape else torch.empty(shape, device="meta")
            if shape and like is not weight and isinstance(weight, DTensor):
                wrong.append(f"{name} is {shape} in it, and its weight {list(weight.shape)} is sharded")
            found[name] = _empty_part(like, DTYPES[stored[name]["dtype"]])
    for name in found.keys() & stored.keys():
        have, need = stored[name], found[name]
        if have["shape"] != list(need.shape):
            wrong.append(f"{name} is {have['shape']} in it, and {list(need.shape)} in the model")
        elif DTYPES[have["dtype"]] != need.local.dtype:
            wrong.append(f"{name} is {have['dtype']} in it, and {NAMES.get(need.local.dtype)} in the model")
    if wrong:
        raise CheckpointError(f"{folder / INDEX}: of another model or optimizer: {'; '.join(sorted(wrong))}")
    return found


def read_parts(folder: Path, stored: Mapping[str, Any], files: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
    """Fill the buffers of shards from the files, however the tensors were sharded when they were saved.

    Args:
        folder: The folder of the checkpoint.
        stored: The tensors of the index.
        files: The files of the manifest; only these have been checked.
        parts: The shards to fill, by tensor name.
    """
    opened: dict[str, TensorFile] = {}
    try:
        for name, part in parts.items():
            if not part.local.numel():
                continue
            chunks, dtype = stored[name]["chunks"], part.local.dtype
            saved = TensorStorageMetadata(
                TensorProperties(dtype), torch.Size(part.shape), [_chunk(c["offsets"], c["sizes"]) for c in chunks]
            )
            filled = 0
            for item in create_read_items_for_chunk_list(name, saved, [_chunk(part.offsets, part.local.shape)]):
                assert item.storage_index.index is not None
                chunk = chunks[item.storage_index.index]
                if chunk["file"] not in files:  # its digest was never checked
                    raise CheckpointError(f"{folder / INDEX}: {chunk['file']} is not in the manifest")
                if chunk["file"] not in opened:
                    opened[chunk["file"]] = TensorFile(folder / chunk["file"])
                first, number = (item.storage_offsets[0], item.lengths[0]) if part.shape else (0, 1)
                rows = opened[chunk["file"]].rows(name, dtype, torch.Size(chunk["sizes"]), first, first + number)
                source, target = rows, part.local
                for dim, length in enumerate(item.lengths):
                    source = source.narrow(dim, item.storage_offsets[dim] if dim else 0, length)
                    target = target.narrow(dim, item.dest_offsets[dim], length)
                target.copy_(source)
                filled += source.numel()
            if filled != part.local.numel():
                raise CheckpointError(f"{folder / INDEX}: it knows {filled} of {part.local.numel()} values of {name}")
    finally:
        for file in opened.values():
            file.close()


@torch.no_grad()
def restore(model: nn.Module, optimizer: Optimizer | None, index: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
    """Copy the shards that were read into the model and the optimizer.

    Args:
        model: The model to load.
        optimizer: Its optimizer, or None.
        index: The index of the checkpoint.
        parts: The shards that `read_parts` filled.
    """
    named = weights(model)
    for name, weight in named.items():
        Part.of(weight).local.copy_(parts[f"model/{name}"].local)
    if optimizer is None:
        return
    inner = _inner(optimizer)
    by_name = {frozenset(group["params"]): group["options"] for group in index["groups"]}
    for both in zip(inner.param_groups, _groups(optimizer, {id(x): n for n, x in named.items()}), strict=True):
        _set_options(both[0], by_name[frozenset(both[1]["params"])])
    if inner is not optimizer:  # ZeroRedundancyOptimizer holds the groups twice
        for own, outer in zip(inner.param_groups, optimizer.param_groups, strict=True):
            outer.update({key: value for key, value in own.items() if key != "params"})
    on_device = {id(p): g.get("capturable") or g.get("fused") for g in inner.param_groups for p in g["params"]}
    for group in inner.param_groups:
        for weight in group["params"]:
            inner.state.pop(weight, None)
    for name, weight, key in _saved_state(optimizer, named, index["tensors"]):
        local = parts[name].local
        if key != "step" or on_device[id(weight)]:  # the same device as torch's load_state_dict chooses
            local = local.to(weight.device)
        value: Tensor = local
        if isinstance(weight, DTensor) and local.ndim:
            value = DTensor.from_local(
                local,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )
        inner.state[weight][key] = value
    for name, weight, key in _saved_state(optimizer, named, index["values"]):
        inner.state[weight][key] = _decode(index["values"][name])


def _saved_state(
    optimizer: Optimizer, named: Mapping[str, Tensor], stored: Mapping[str, Any]
) -> list[tuple[str, Any, str]]:
    """Return (name, weight, key) of the saved state of the weights that this rank's optimizer updates."""
    names = {id(x): name for name, x in named.items()}
    mine = {names.get(id(p)): p for group in _inner(optimizer).param_groups for p in group["params"]}
    found = []
    for name in stored:
        kind, *rest = name.split("/", 2)
        if kind == "optimizer" and rest[1] in mine:
            found.append((name, mine[rest[1]], rest[0]))
    return found


def _inner(optimizer: Optimizer) -> Any:
    """Return the local optimizer of this rank's weights inside a ZeroRedundancyOptimizer."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, with weights by name."""
    found = []
    for n, group in enumerate(optimizer.param_groups):
        if any(id(p) not in names for p in group["params"]):
            raise ValueError(f"optimizer: group {n} has a weight that is not the model's; give the optimizer's model")
        options = {key: _encode(value, f"group {n}, {key}") for key, value in group.items() if key != "params"}
        found.append({"params": [names[id(p)] for p in group["params"]], "options": options})
    return found


def _compare_groups(own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[str]:
    """Return an error for each parameter group whose weights differ from all saved groups."""
    if not saved:
        return ["it has no optimizer; load with optimizer None"]
    known = {frozenset(group["params"]) for group in saved}
    return [
        f"no group of its optimizer has just the weights of group {n}: {_few(group['params'])}"
        for n, group in enumerate(own)
        if frozenset(group["params"]) not in known
    ]


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, encoded in options.items():
        value = _decode(encoded)
        if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
            value = value.to(group[key].device)
        group[key] = value


def _encode(value: Any, name: str) -> Any:
    """Encode an optimizer's value as JSON, so that `_decode` restores its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.ndim == 0 and value.dtype in NAMES:
        return {"tensor": value.item(), "dtype": NAMES[value.dtype]}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_encode(v, name) for v in value]}
    raise ValueError(f"{name}: a {type(value).__name__} cannot be saved; expected numbers, texts and lists of them")


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=DTYPES[value["dtype"]], device="cpu")
    ((kind, values),) = value.items()
    return (tuple if kind == "tuple" else list)(map(_decode, values))


def _empty_part(x: Tensor, dtype: torch.dtype | None = None) -> Part:
    """Return an empty host buffer for this rank's shard of a tensor that is sharded like x."""
    part = Part.of(x)
    return Part(torch.empty(part.local.shape, dtype=dtype or x.dtype, device="cpu"), part.offsets, part.shape)


def _item(name: str, offsets: list[int], sizes: list[int], shape: list[int], dtype: str) -> WriteItem:
    data = TensorWriteData(_chunk(offsets, sizes), TensorProperties(DTYPES[dtype]), torch.Size(shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _few(names: Any, most: int = 8) -> str:
    """Return sorted names, shortened to the first `most`."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
