"""Find the longest sequence whose training step fits in memory, by trying.

A step at a million tokens takes minutes, nearly all of them in attention, whose memory does not depend on its mask. So
long sequences are tried with a sliding window in all layers. Shorter sequences are first tried with full causal
attention in the first and the last layer; if that takes more memory, those two layers keep it at all lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshflash.core.mask import Mask
from meshflash.job import init
from meshflash.models.gpt import GPTConfig
from meshflash.parallel import accumulate, clip_grad_norm, init_mesh, shard_batch
from meshflash.parallel.offload import HOST_RESERVE_BYTES, offload_store, release
from meshflash.runtime.devices import CPU, current, peak_memory
from meshflash.runtime.oom import attempt, free_bytes
from meshflash.train.config import Config
from meshflash.train.loop import build

#: Tokens: the lengths that are tried are multiples of this.
STEP = 8192
#: The search ends when the longest length that fits and the shortest that fails differ by 1/16: a try takes minutes.
PRECISION = 16
#: The shares of device memory and host memory that an extrapolated length may fill.
MAX_FILLED = 0.98, 0.95
#: Tokens: the longest sequence tried on a CPU, where running out of memory kills the process.
MAX_CPU_TOKENS = 1 << 14
#: Tokens: the sliding window of the layers without full attention.
WINDOW = 1024
#: Tokens: up to this length full attention in the first and the last layer is compared with the window.
COMPARED = 1 << 17


@dataclass(frozen=True)
class MaxTokens:
    """The result of the search: the tokens that fit (0 if even STEP does not), and the peak bytes of that step."""

    tokens: int
    device_bytes: int = 0
    host_bytes: int = 0


def find_max_tokens(config: Config, say: Callable[[str], None] = lambda _: None, most: int = 1 << 24) -> MaxTokens:
    """Return the longest causal sequence that fits on a single device, to within 6%.

    Lengths grow by a factor of four up to `COMPARED`; then memory is extrapolated linearly. It runs on a single device
    only: one rank of several that runs out of memory would leave the others hanging.

    Args:
        config: The configuration of the run.
        say: Called with a line of text for each try.
        most: The longest sequence to try, in tokens.
    """
    if not isinstance(config.model, GPTConfig):
        raise ValueError("--find-max-tokens: it is for a GPT; data.height and data.width set the patches of an image")
    if init().world_size > 1:
        raise ValueError("--find-max-tokens: it runs on one device; give the layers and heads of one rank by --set")
    device = current()
    most = min(most, MAX_CPU_TOKENS) if device.type == CPU else most
    budgets = _device_bytes(device), _host_bytes()
    fits: dict[int, MaxTokens] = {}
    trial: _Trial | None = None
    fails, tokens, windowed = 0, STEP, False
    while tokens:
        begin = time.perf_counter()
        trial = trial or attempt(partial(_Trial, config, device, windowed))
        found = None if trial is None else attempt(partial(trial.step, tokens))
        seconds = time.perf_counter() - begin
        if found is None:
            fails, trial = tokens, None
            attempt(_no_memory)  # frees the failed model before the next one is built
            release()
            say(f"{tokens:>12,} tokens: out of memory, after {seconds:.0f} s")
        else:
            fits[tokens], windowed = found, trial is not None and trial.all_windowed
            on_host = f", {found.host_bytes / 2**30:.1f} GiB on the host" if found.host_bytes else ""
            say(f"{tokens:>12,} tokens: {found.device_bytes / 2**30:.1f} GiB{on_host}, {seconds:.0f} s")
        tokens = _next({n: (own.device_bytes, own.host_bytes) for n, own in fits.items()}, fails, most, budgets)
    return fits[max(fits)] if fits else MaxTokens(0)


def _next(fits: Mapping[int, tuple[int, int]], fails: int, most: int, budgets: tuple[int | None, int | None]) -> int:
    """Return the next length to try; 0 ends the search.

    `fits` are the (device, host) bytes of the lengths that fit, and `fails` is the shortest length that failed (or 0).

    >>> _next({8192: (100, 0), 32768: (340, 0)}, 0, 1 << 24, (1600, None))
    131072
    >>> _next({32768: (340, 0), 131072: (1300, 0)}, 0, 1 << 24, (16000, None))
    1597440
    >>> _next({131072: (1300, 0), 163840: (1600, 0)}, 196608, 1 << 24, (1600, None))
    180224
    >>> _next({163840: (1600, 0)}, 172032, 1 << 24, (1600, None)), _next({}, 8192, 1 << 24, (1600, None))
    (0, 0)
    """
    if not fits:
        return 0
    longest, *shorter = sorted(fits, reverse=True)
    least = max(STEP, longest // PRECISION // STEP * STEP)
    if longest >= most or (fails and fails - longest <= least):
        return 0
    guesses = []
    for n, (budget, filled) in enumerate(zip(budgets, MAX_FILLED, strict=True)):
        if budget is not None and shorter and fits[longest][n] > fits[shorter[0]][n]:
            bytes_per_token = (fits[longest][n] - fits[shorter[0]][n]) / (longest - shorter[0])
            guesses.append(int(longest + (filled * budget - fits[longest][n]) / bytes_per_token))
    guess = min(guesses, default=4 * longest) // STEP * STEP
    if not fails:
        farthest = most if guesses and longest >= COMPARED else min(most, 4 * longest)
        return min(farthest, max(guess, longest + least))
    if not longest < guess < fails:  # the extrapolation has failed: bisect, but stay near the failure
        guess = max((longest + fails) // 2, fails - fails // PRECISION * 2) // STEP * STEP
    return max(guess, longest + STEP)


def _no_memory() -> None:
    raise torch.OutOfMemoryError


def _device_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device's memory; None for a CPU."""
    return None if device.type == CPU else int(torch.get_device_module(device).mem_get_info(device)[1])


def _host_bytes() -> int | None:
    """Return the bytes of host memory that offloaded activations may take; None if unknown."""
    free = free_bytes()
    return None if free is None else free - HOST_RESERVE_BYTES


class _Trial:
    """A model that takes training steps of any length; one step is done, so the optimizer state is allocated."""

    def __init__(self, config: Config, device: torch.device, all_windowed: bool) -> None:
        mesh = config.mesh
        self.mesh = init_mesh(mesh.dp, mesh.fsdp, mesh.cp, mesh.tp, mesh.order)
        self.device = device
        self.model, self.optimizer = build(config, self.mesh, device)
        inner: Any = getattr(self.model, "module", self.model)
        for n, block in enumerate(inner.layers):
            inside = 0 < n < len(inner.layers) - 1
            block.self_attn.attend.register_forward_pre_hook(partial(self._apply_window, inside), with_kwargs=True)
        self.all_windowed = all_windowed
        self._step(STEP)

    def step(self, tokens: int) -> MaxTokens:
        """Return the peak memory of a step of this length; short ones also compare full attention with the window."""
        if tokens > COMPARED:
            return self._step(tokens)
        self.all_windowed = True
        windowed = self._step(tokens)
        self.all_windowed = False
        found = self._step(tokens)
        self.all_windowed = found.device_bytes <= windowed.device_bytes
        return found

    def _step(self, tokens: int) -> MaxTokens:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=self.device)
        if self.device.type != CPU:
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
        usage = offload_store(self.device).usage
        usage.peak_bytes = usage.live_bytes
        accumulate(self.model, [shard_batch(ids, self.mesh)], self.mesh)
        clip_grad_norm(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return MaxTokens(tokens, peak_memory(self.device), usage.peak_bytes)

    def _apply_window(self, inside: bool, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if inside or self.all_windowed:
            kwargs = kwargs | {"mask": Mask.causal() & Mask.window(WINDOW, 0)}
        return args, kwargs
