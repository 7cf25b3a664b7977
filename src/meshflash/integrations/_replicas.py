"""What the integrations of model libraries share: ranks that look like replicas which were given the same batch.

Each rank returns the outputs of the whole batch, and the mean of the ranks' gradients is the gradient of one device.
Here are the checks that ranks got the same batch, the mean of gradients, and the comparison with one device. How a
library's models are cut is not done here.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

#: What checksums are multiplied by, modulo 2^64.
FACTOR = 0x100000001B3
#: The largest difference to one device, relative to the largest value, that `verify` accepts.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check_mesh(mesh: Any) -> None:
    """Raise ValueError unless a mesh is a DeviceMesh of one dimension.

    Args:
        mesh: What was given as mesh.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError('context_parallel: mesh must be a DeviceMesh of one dimension, such as mesh["cp"]')


def check_release(
    library: str, version: str, verify: bool | None, *, oldest: tuple[int, int], newest: tuple[int, int]
) -> None:
    """Raise ValueError for a release of a library that is not tested, unless the first call is verified.

    Args:
        library: The name of the library.
        version: Its version.
        verify: Whether the first call is compared with one device. None is where it cannot be.
        oldest: The oldest tested release, by its first two numbers.
        newest: The newest tested release.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if oldest <= numbers <= newest or verify:
        return
    tested = " to ".join(dict.fromkeys(".".join(map(str, release)) for release in (oldest, newest)))
    otherwise = "" if verify is None else ", or pass verify=True, which compares the first call with one device"
    raise ValueError(f"{library} {version} is not tested; install {tested}{otherwise}")


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name, those of `**kwargs` too.

    Args:
        module: The module that is called.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    signature = inspect.signature(module.forward)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def refuse_convolutions(name: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if one of some modules is a convolution.

    Args:
        name: The name of the model's class.
        modules: The modules whose tokens are sharded, with their paths.
    """
    for path, module in modules:
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise ValueError(f"{name}: {path} is a {type(module).__name__}, which mixes tokens outside of attention")


def refuse_dropout(name: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if one of some modules drops values: others than one device would.

    Args:
        name: The name of the model's class.
        modules: The modules that are applied to sharded tokens in training, with their paths.
    """
    for path, module in modules:
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(f"{name}: {path} drops hidden values, and other ones than on one device; set its p to 0")


def digest(batch: Mapping[str, Any], device: torch.device | str) -> Tensor:
    """Return a checksum of the tensors, numbers and texts of a batch, without waiting for the device.

    Args:
        batch: The batch, which may contain lists, tuples and dicts.
        device: Where the checksum is computed.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, x in _leaves("", batch):
        if isinstance(x, Tensor):
            text = f"{name} {tuple(x.shape)} {x.dtype}"
            total = total * FACTOR + _sum_of_bits(x).to(device)
        elif isinstance(x, int | float | str | bool):
            text = f"{name} {x}"
        else:
            continue
        total = total * FACTOR + zlib.crc32(text.encode())
    return total


def _leaves(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is not a container, with its path, in an order that does not depend on that of a dict."""
    if isinstance(x, Mapping):
        for key, value in sorted(x.items(), key=lambda item: str(item[0])):
            yield from _leaves(f"{name}.{key}" if name else str(key), value)
    elif isinstance(x, list | tuple):
        for index, value in enumerate(x):
            yield from _leaves(f"{name}.{index}", value)
    else:
        yield name, x


def _sum_of_bits(x: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, weighted by their place, modulo 2^64."""
    x = x.detach()
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]).long()
    return ((torch.arange(len(bits), device=x.device) * 2 + 1) * FACTOR * bits).sum()


class Replicas:
    """The ranks of a mesh as replicas of one model.

    Args:
        model: The model.
        mesh: The ranks: a DeviceMesh of one dimension.
        average_gradients: Whether to average gradients over the ranks here. None requires that DDP or FSDP does it.
            False leaves it to the caller.
        handles: The list to which the hooks on parameters are added, for their removal.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, average_gradients: bool | None, handles: list[Any]) -> None:
        self.model, self.mesh, self.average_gradients = model, mesh, average_gradients
        self._handles = handles
        self._averaged: set[int] = set()

    def agree(self, error: str, given: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError on all ranks if one has an error, or another batch than the others.

        Args:
            error: The error of this rank; empty if it has none.
            given: The batch of this rank; None is not compared.
        """
        if self.mesh.size() == 1:
            if error:
                raise ValueError(error)
            return
        device, group, ranks = self.mesh.device_type, self.mesh.get_group(), self.mesh.size()
        own = torch.stack([digest(given or {}, device), torch.tensor(int(bool(error)), device=device)])
        every = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(every, own, group=group)
        digests, failed = torch.stack(every).T.tolist()
        if any(failed):
            said = [""] * ranks
            dist.all_gather_object(said, error, group=group)
            rank = failed.index(1)
            raise ValueError(f"{said[rank]} (rank {rank} of the mesh)")
        if len(set(digests)) > 1:
            other = next(rank for rank, found in enumerate(digests) if found != digests[0])
            raise ValueError(
                f"context_parallel: ranks 0 and {other} of the mesh got different batches; ranks that share a sequence "
                "need the same one, or their parts from shard_batch"
            )

    def check_averaging(self) -> None:
        """Hook the parameters whose gradients are averaged here, and raise ValueError if nobody averages them."""
        if self.average_gradients and self.mesh.size() > 1:
            self._average_gradients()
        is_training = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        if is_training and self.average_gradients is None and self.mesh.size() > 1 and not self._is_averaged():
            raise ValueError(
                "context_parallel: nobody averages gradients over the ranks of the mesh: wrap the model in DDP or "
                "fully_shard over a mesh with these ranks, or pass average_gradients=True, or False to do it yourself"
            )

    def _is_averaged(self) -> bool:
        """Return whether DDP or FSDP2 averages every gradient over groups that contain the ranks of the mesh."""
        ranks = set(self.mesh.mesh.flatten().tolist())
        ddp: Any = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None:
            return ranks <= set(dist.get_process_group_ranks(ddp.process_group))
        averaged = {
            place for mesh, place in _sharded_parameters(self.model) if ranks <= set(mesh.mesh.flatten().tolist())
        }
        return all(
            (id(module), name) in averaged
            for module in self.model.modules()
            for name, p in module.named_parameters(recurse=False)
            if p.requires_grad
        )

    def _average_gradients(self) -> None:
        """Average the gradients of all parameters that are trained now: others may be frozen or thawed any time."""
        for p in self.model.parameters():
            if p.requires_grad and id(p) not in self._averaged:
                self._averaged.add(id(p))
                self._handles.append(p.register_post_accumulate_grad_hook(self._average))

    def _average(self, parameter: Tensor) -> None:
        if not self.average_gradients:
            return
        grad = parameter.grad
        assert grad is not None
        dist.all_reduce(grad, group=self.mesh.get_group())
        grad.div_(self.mesh.size())


class AveragesGradients:
    """A base class of what shards a model: its `_replicas` average gradients, or leave it to others."""

    _replicas: Replicas

    @property
    def average_gradients(self) -> bool | None:
        """Whether gradients are averaged here. It may be set between calls."""
        return self._replicas.average_gradients

    @average_gradients.setter
    def average_gradients(self, value: bool | None) -> None:
        self._replicas.average_gradients = value


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[DeviceMesh, tuple[int, str]]]:
    """Yield the places of the parameters that FSDP2 shards, with the ranks over which it averages gradients.

    A place is a module's id and the parameter's name there: the tensor changes with each gather.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            for sharded in group.fsdp_params:
                place = sharded._module_info
                yield group.mesh_info.mesh, (id(place.module), place.param_name)
                for shared in zip(place.shared_modules, place.shared_param_names, strict=True):
                    yield group.mesh_info.mesh, (id(shared[0]), shared[1])


def difference(pairs: Iterable[tuple[str, Any, Any]]) -> str:
    """Return how outputs differ from those of one device by more than `TOLERANCES`, or an empty text.

    Args:
        pairs: The name, the output and the wanted output; what are not floating-point tensors is left out.
    """
    worst, where = 0.0, ""
    for name, got, want in pairs:
        if not isinstance(want, Tensor) or not isinstance(got, Tensor) or not want.is_floating_point():
            continue
        error = float((got.detach() - want).abs().max() / want.abs().max().clamp(min=1e-30)) if want.numel() else 0.0
        excess = error / TOLERANCES.get(want.dtype, 1e-3)
        if not excess <= worst and not math.isnan(worst):
            worst, where = excess, f"{name} differs from one device by {error:.1e} of its largest value"
    return "" if worst <= 1.0 else f"verify: {where}; a layer may mix tokens outside of attention"
