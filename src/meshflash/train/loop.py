"""The training loop: losses and weights match a single device on any mesh, from step 1 or from a checkpoint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshflash.core.mask import Mask
from meshflash.job import init
from meshflash.models.gpt import GPT, GPTConfig
from meshflash.models.patches import shard_images
from meshflash.models.vit import ViT
from meshflash.parallel import (
    accumulate,
    blank_batch,
    clip_grad_norm,
    init_mesh,
    parallelize,
    shard_batch,
    sharded_optimizer,
)
from meshflash.parallel.loss import count_tokens, reduce_sum
from meshflash.parallel.mesh import DATA_AXES, mesh_rank, reduce_mesh, size
from meshflash.parallel.step import pad_micro_batches
from meshflash.runtime.devices import CPU, current, peak_memory
from meshflash.runtime.launchers import agent
from meshflash.runtime.liveness import naming_lost_ranks
from meshflash.train.checkpoint import Checkpoints
from meshflash.train.checkpoint_files import complete
from meshflash.train.config import Config, Optimizer, Run, as_dict, from_dict
from meshflash.train.images import ImageSample
from meshflash.train.order import Order, divide
from meshflash.train.report import EVENTS_FOLDER, METRICS_FILE, ProgressLine, Report, model_flops_utilization
from meshflash.train.sources import Source, has_accuracy, is_synthetic, open_source
from meshflash.train.synthetic import accuracy

CHECKPOINTS = "checkpoints"
#: The file that records the torchrun launch for which files of earlier runs were set aside.
LAUNCH = "launch"


class TrainingError(RuntimeError):
    """A run that cannot continue: a non-finite loss, or replicas that diverged. The message names step and ranks."""


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`: the last step, the losses of this process's steps, the last evaluation and the model."""

    step: int
    losses: list[float]
    valid: dict[str, float]
    model: nn.Module


def train(
    config: Config,
    folder: Path | None = None,
    *,
    resume: bool = True,
    from_step: int | None = None,
    quiet: bool = False,
    progress: ProgressLine | None = None,
) -> TrainResult:
    """Train a model and return the result. Every rank calls it.

    Batches, their order and the losses do not depend on the mesh.

    Args:
        config: The configuration of the run.
        folder: The folder of metrics and checkpoints, on a file system that all ranks share; None writes nothing.
        resume: Whether to resume from the checkpoints in the folder; otherwise they are set aside in a folder beside.
        from_step: The step of the checkpoint to resume from; by default the latest.
        quiet: Whether to show no progress.
        progress: A progress line of rank 0 that is shown already; the run closes it.
    """
    here = init()
    if from_step is not None and (folder is None or not resume):
        raise ValueError("from_step: it names a checkpoint to resume from; give folder=, and resume=True")
    problem = None
    if folder is not None and here.rank == 0:
        try:
            _set_aside_previous_run(folder, resume, from_step)
        except (ValueError, OSError) as error:
            problem = str(error)
    if problem := _broadcast_from_rank0(problem):
        raise ValueError(problem)
    if here.rank == 0 and not quiet and progress is None:
        progress = ProgressLine(config.run.steps)
    try:
        with _deterministic(config.run.deterministic), naming_lost_ranks():
            return _train(config, folder, here.rank == 0, None if quiet else progress)
    finally:
        if progress is not None:
            progress.close()


def _set_aside_previous_run(folder: Path, resume: bool, from_step: int | None) -> None:
    """Move away the files that this run does not resume from: all, or the checkpoints behind a step.

    This happens once for each launch of torchrun: ranks that it restarts must resume from the new checkpoints.
    """
    request = "fresh" if not resume else None if from_step is None else f"from {from_step}"
    if request is None:
        return
    launch = agent()
    stamp = f"{request} {launch}"
    stamp_file = folder / LAUNCH
    if launch and stamp_file.exists() and stamp_file.read_text() == stamp:
        return  # torchrun has restarted the ranks: resume
    if from_step is not None and not folder.is_dir():
        raise ValueError(f"from_step={from_step}: the folder {folder} does not exist; give one that a run wrote")
    kept = complete(folder / CHECKPOINTS)
    if from_step is not None and from_step not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise ValueError(f"from_step={from_step}: no such checkpoint in {folder}; the steps there are: {there}")
    number = 1
    while (folder / f"before-{number}").exists():
        number += 1
    aside = folder / f"before-{number}"
    if from_step is None:
        going = [folder / name for name in (CHECKPOINTS, METRICS_FILE, EVENTS_FOLDER)]
    else:
        going = [path for step, path in kept.items() if step > from_step]
    for path in going:
        if path.exists():
            into = aside / path.relative_to(folder)
            into.parent.mkdir(parents=True, exist_ok=True)
            path.rename(into)
    if folder.exists():
        stamp_file.write_text(stamp)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic kernels inside this context if `wanted`."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _train(config: Config, folder: Path | None, first: bool, progress: ProgressLine | None) -> TrainResult:
    def show(stage: str) -> None:
        if progress is not None:
            progress.update(0, stage)

    mesh = init_mesh(config.mesh.dp, config.mesh.fsdp, config.mesh.cp, config.mesh.tp, config.mesh.order)
    device = current()
    show("opening data")
    source = open_source(config, config.data.source, config.data.samples, config.data.seed)
    valid = _valid(config)
    order = Order(len(source), config.data.batch, config.data.seed)
    show("building the model")
    model, optimizer = build(config, mesh, device)
    checkpoints = None if folder is None else Checkpoints(folder / CHECKPOINTS, keep=config.run.keep, mesh=mesh)
    start = 0
    latest = None if checkpoints is None else _broadcast_from_rank0(checkpoints.latest())
    if checkpoints is not None and latest is not None:
        show("loading a checkpoint")
        state = checkpoints.load(model, optimizer, latest)
        if from_dict(state["config"]).model != config.model:
            raise ValueError(f"{folder}: its model has other sizes; give another --output, or --fresh")
        start = int(state["step"])
    show("training")
    report = _open_report(folder if first else None, start, progress)
    valid_metrics: dict[str, float] = {}
    losses: list[float] = []
    step = start
    try:
        if start:
            report.say(f"resuming from step {start}")
        begin, since = time.perf_counter(), start
        saved, saved_at = start, begin
        for step in range(start + 1, config.run.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.optimizer, step, config.run.steps)
            batches = _batches(config, source, order.step_samples(step - 1), mesh, device)
            accumulated = accumulate(model, batches, mesh)
            norm = clip_grad_norm(model, config.optimizer.clip)
            _check_finite(step, accumulated.loss, accumulated.local_sum, norm, mesh)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accumulated.loss))
            report.advance(step)
            if config.run.compare and step % config.run.compare == 0:
                check_replicas(step, model, mesh, config)
            if config.run.log and step % config.run.log == 0:
                seconds = (time.perf_counter() - begin) / (step - since)
                begin, since = time.perf_counter(), step
                report.log_metrics(step, **_metrics(config, losses[-1], norm, seconds, step, device))
            if valid is not None and config.run.evaluate and step % config.run.evaluate == 0:
                valid_metrics = evaluate(config, model, valid, mesh, device)
                report.log_metrics(step, **valid_metrics)
            if checkpoints is not None and _is_save_due(config.run, step, saved_at):
                checkpoints.save(step, model, optimizer, {"step": step, "config": as_dict(config)})
                saved, saved_at = step, time.perf_counter()
        if checkpoints is not None:
            if step > saved:
                checkpoints.save(step, model, optimizer, {"step": step, "config": as_dict(config)})
            checkpoints.wait()
    finally:
        report.close()
    return TrainResult(step, losses, valid_metrics, model)


def _open_report(folder: Path | None, start: int, progress: ProgressLine | None) -> Report:
    """Return the report. Only rank 0 writes, so an error of its folder is raised on all ranks."""
    problem = None
    try:
        report = Report(folder, start, progress)
    except OSError as error:
        problem = f"{error}; free some space, or give another --output"
    if problem := _broadcast_from_rank0(problem):
        raise ValueError(problem)
    return report


def build(config: Config, mesh: Any, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """Return the parallelized model with its initial weights, and its optimizer.

    Args:
        config: The configuration of the run.
        mesh: A mesh of `init_mesh`.
        device: The device of this rank.
    """
    model = build_model(config, mesh, device)
    return model, _optimizer(model, config.optimizer, mesh)


def build_model(config: Config, mesh: Any, device: torch.device) -> Any:
    """Return the parallelized model with its initial weights.

    Args:
        config: The configuration of the run.
        mesh: A mesh of `init_mesh`.
        device: The device of this rank.
    """
    make: Callable[[Any], Any] = GPT if isinstance(config.model, GPTConfig) else ViT
    is_half = config.run.dtype != "float32"
    memory = config.memory
    options: dict[str, Any] = dict(
        mode=config.mesh.mode,
        compute_dtype=getattr(torch, config.run.dtype) if is_half else None,
        schedule=config.mesh.schedule,
        activation_checkpointing=memory.activation_checkpointing,
        offload=memory.offload_weights,
        offload_activations=memory.offload_activations,
        tiles=memory.tiles,
    )
    sharded = config.mesh.mode is not None or config.mesh.fsdp > 1 or config.mesh.tp > 1 or memory.offload_weights
    model: Any
    if sharded:  # no rank ever holds the whole model
        with torch.device("meta"):
            model = make(config.model)
        model = parallelize(model, mesh, **options)
        model.to_empty(device=CPU if memory.offload_weights else device)
        model.init_weights(config.run.seed)
    else:
        model = make(config.model)
        model.init_weights(config.run.seed)
        model = parallelize(model.to(device), mesh, **options)
    return model


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warmup, then cosine decay.

    Args:
        optimizer: The options of the optimizer.
        step: The step, counted from 1.
        steps: The last step of the run.

    >>> [round(learning_rate(Optimizer(lr=1.0, warmup=2, final=0.0), step, 6), 3) for step in range(1, 7)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step <= optimizer.warmup:
        return optimizer.lr * step / optimizer.warmup
    part = (step - optimizer.warmup) / max(1, steps - optimizer.warmup)
    low = optimizer.lr * optimizer.final
    return low + (optimizer.lr - low) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, part)))


@torch.no_grad()
def evaluate(config: Config, model: nn.Module, source: Source, mesh: Any, device: torch.device) -> dict[str, float]:
    """Return the mean loss over a source, and the accuracy if its samples have classes or answers.

    Args:
        config: The configuration of the run.
        model: The parallelized model.
        source: The validation data.
        mesh: A mesh of `init_mesh`.
        device: The device of this rank.
    """
    model.eval()
    with_accuracy = has_accuracy(config, source)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # losses, right answers, labels
    for begin in range(0, len(source), config.data.batch):
        samples = list(range(begin, min(begin + config.data.batch, len(source))))
        for batch in pad_micro_batches(_batches(config, source, samples, mesh, device), mesh):
            labels = batch["labels"]
            sums[0] += model(**batch).double()
            if with_accuracy:
                logits = model(**{name: x for name, x in batch.items() if name != "labels"})
                sums[1] += accuracy(logits, labels)[0]
            sums[2] += count_tokens(labels)
    model.train()
    sums = reduce_sum(sums, mesh)
    found = {"valid_loss": float(sums[0] / sums[2].clamp(min=1))}
    if with_accuracy:
        found["accuracy"] = float(sums[1] / sums[2].clamp(min=1))
    return found


def check_replicas(step: int, model: nn.Module, mesh: Any, config: Config) -> None:
    """Raise TrainingError if replicas of the same weights differ between ranks.

    Args:
        step: The step, for the error.
        model: The parallelized model.
        mesh: A mesh of `init_mesh`.
        config: The configuration of the run.
    """
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    group = _replicas(mesh, config)
    if group is None:
        return
    digest = sum(float(part.detach().double().sum()) for part in parts)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (dist.get_rank(), digest), group=group.get_group())
    others = [rank for rank, value in everyone if value != everyone[0][1]]
    if others:
        raise TrainingError(
            f"step {step}: the weights of rank {', '.join(map(str, others))} differ from rank {everyone[0][0]}; "
            "all ranks started with the same weights. Resume from a checkpoint"
        )


def _replicas(mesh: Any, config: Config) -> Any:
    """Return the mesh of the ranks that hold the same weights; None if each rank's shards are unique."""
    sharded = config.mesh.mode is not None or config.mesh.fsdp > 1
    if not sharded:
        found = reduce_mesh(mesh)
    elif size(mesh, "dp") > 1 and config.mesh.mode in (None, "hybrid"):
        found = mesh["dp"]
    else:
        return None
    return found if found.size() > 1 else None


def _check_finite(step: int, loss: Tensor, local_sum: Tensor, norm: Tensor, mesh: Any) -> None:
    """Raise TrainingError with the ranks at fault if the loss or the gradient norm is not finite."""
    if bool(torch.isfinite(loss)) and bool(torch.isfinite(norm)):
        return
    everyone: list[Any] = [float(local_sum)]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, float(local_sum))
    wrong = [rank for rank, value in enumerate(everyone) if not math.isfinite(value)]
    where = "the losses of all ranks are finite"
    if wrong:
        where = f"the loss of rank {', '.join(map(str, wrong))} is {everyone[wrong[0]]}"
    raise TrainingError(
        f"step {step}: loss {float(loss):.4g}, gradient norm {float(norm):.4g}; {where}. Resume from a "
        "checkpoint with a lower learning rate, or inspect the samples of this step"
    )


def _batches(
    config: Config, source: Source, samples: list[int], mesh: Any, device: torch.device
) -> list[dict[str, Any]]:
    """Return this rank's micro-batches of a step's samples; a rank without samples gets a blank one."""
    numbers = divide(samples, mesh_rank(mesh, DATA_AXES), size(mesh, DATA_AXES), config.data.micro)
    if not numbers:
        return [dict(blank_batch(_batch(config, [source[samples[0]]], mesh, device)))]
    return [_batch(config, [source[n] for n in rows], mesh, device) for rows in numbers]


def _batch(config: Config, samples: list[Any], mesh: Any, device: torch.device) -> dict[str, Any]:
    if isinstance(samples[0], ImageSample):
        images = torch.stack([sample.image for sample in samples]).to(device)
        more: dict[str, Any] = {}
        if samples[0].target is not None:
            more["targets"] = torch.stack([sample.target for sample in samples]).to(device)
        else:
            more["labels"] = torch.tensor([sample.label for sample in samples], device=device)
        return shard_images(images, mesh, patch=config.model.patch, layout=config.mesh.layout, **more)  # type: ignore[union-attr]
    tokens, labels = (torch.stack([getattr(s, name) for s in samples]).to(device) for name in ("tokens", "labels"))
    mask = Mask.causal()
    if any(len(sample.documents) > 1 for sample in samples):
        mask = mask & Mask.documents([list(sample.documents) for sample in samples])
    return shard_batch(tokens, mesh, labels=labels, mask=mask, layout=config.mesh.layout)


def _is_save_due(run: Run, step: int, since: float) -> bool:
    """Return whether to save a checkpoint, by the number of steps or by the clock of rank 0."""
    if run.save and step % run.save == 0:
        return True
    return bool(run.save_minutes) and bool(
        _broadcast_from_rank0(time.perf_counter() - since >= 60.0 * run.save_minutes)
    )


def _broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's value: ranks may see changes of a shared file system at different times."""
    found = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found, 0)
    return found[0]


def _valid(config: Config) -> Source | None:
    """Return the validation data: `data.valid`, or other samples of a synthetic task; None if there is none."""
    name = config.data.valid or (config.data.source if is_synthetic(config.data.source) else None)
    if name is None or not config.run.evaluate:
        return None
    return open_source(config, name, config.data.valid_samples, config.data.seed + 1)


def _optimizer(model: nn.Module, options: Optimizer, mesh: Any) -> torch.optim.Optimizer:
    """Return AdamW; vectors, such as the weights of norms, have no weight decay."""
    learning = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learning if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in learning if p.ndim < 2], "weight_decay": 0.0},
    ]
    more: dict[str, Any] = dict(lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, fused=True)
    if options.sharded:
        return sharded_optimizer(model, torch.optim.AdamW, mesh, groups=groups, **more)
    return torch.optim.AdamW(groups, **more)


def _metrics(
    config: Config, loss: float, norm: Tensor, seconds: float, step: int, device: torch.device
) -> dict[str, Any]:
    tokens = config.data.batch * config.data.tokens
    found: dict[str, Any] = {
        "loss": loss,
        "norm": float(norm),
        "lr": learning_rate(config.optimizer, step, config.run.steps),
        "seconds": seconds,
        "memory": peak_memory(device) / 2**30,
    }
    if isinstance(config.model, GPTConfig):
        found["tokens_per_second"] = tokens / seconds
        flops = config.model.flops(config.data.tokens) * config.data.batch
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        name = torch.get_device_module(device).get_device_name(device) if device.type != CPU else CPU
        found["mfu"] = model_flops_utilization(flops / seconds / ranks / 1e12, name)
    return found
