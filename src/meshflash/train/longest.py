"""The longest sequence that a training step has the memory for, by trying."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from meshflash.job import init
from meshflash.launch.devices import CPU, current, peak_memory
from meshflash.parallel import accumulate, clip_grad_norm, init_mesh, spread_batch
from meshflash.train.config import Config
from meshflash.train.loop import build

#: Lengths that are tried are multiples of this, and the search ends when it is so near.
STEP = 8192
#: On CPUs nothing says no in time: so many tokens at most.
MOST_ON_CPU = 1 << 15


def longest(config: Config, say: Callable[[str], None] = lambda _: None, most: int = 1 << 24) -> int:
    """Tokens of one sequence on the mesh of the configuration; 0 where not even the least fits.

    Doubles until a step runs out of memory, then halves the distance. On one device: a rank of several that runs out
    would leave the others waiting.
    """
    if init().world_size > 1:
        raise ValueError("--find-max-tokens: on one device only; give layers and heads of a rank's part by --set")
    device = current()
    most = min(most, MOST_ON_CPU) if device.type == CPU else most
    fits, fails, tokens = 0, 0, STEP
    while True:
        bytes_ = _try(config, tokens, device)
        say(f"{tokens:,} tokens: " + ("out of memory" if bytes_ is None else f"{bytes_ / 2**30:.1f} GiB"))
        if bytes_ is None:
            fails = tokens
        else:
            fits = tokens
        if fits >= most:
            return fits
        tokens = 2 * fits if not fails else (fits + fails) // 2 // STEP * STEP
        if tokens in (fits, 0):
            return fits


def _try(config: Config, tokens: int, device: torch.device) -> int | None:
    """The peak bytes of a step; None where there are too few."""
    mesh = init_mesh(config.mesh.dp, config.mesh.fsdp, config.mesh.cp, config.mesh.tp, config.mesh.order)
    config = replace(config, data=replace(config.data, tokens=tokens))
    failed, peak = 0, 0
    model = learner = None
    try:
        model, learner = build(config, mesh, device)
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        for _ in range(2):  # the second has the optimizer's state beside it
            accumulate(model, [spread_batch(ids, mesh, layout=config.mesh.layout)], mesh)
            clip_grad_norm(model, 1.0)
            learner.step()
            learner.zero_grad()
        peak = peak_memory(device)
    except torch.OutOfMemoryError:
        failed = 1
    del model, learner
    gc.collect()
    if device.type != CPU:
        torch.get_device_module(device).empty_cache()
        torch.get_device_module(device).reset_peak_memory_stats(device)
    return None if failed else peak
