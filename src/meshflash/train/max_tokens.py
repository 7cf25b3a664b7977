"""The longest sequence that a training step has the memory for, by trying.

A step at a million tokens takes minutes, nearly all of them in attention, whose memory does not depend on how much it
sees. So long sequences are tried with attention to near tokens, after it was seen at shorter ones that attention to
all tokens, in the first layer and in the last, takes no more; where it does, those two attend to all.
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

#: Lengths that are tried are multiples of this.
STEP = 8192
#: The search ends when what fits and what does not are so near: one in this many. A try may take minutes.
NEAR = 16
#: Shares of the device's memory and of the host's that a step may fill, as memory as a line of length says.
FILLED = 0.98, 0.95
#: On CPUs nothing says no in time: so many tokens at most.
MOST_ON_CPU = 1 << 14
#: What the layers see that do not attend to all.
WINDOW = 1024
#: Up to so many tokens the first layer and the last attend to all.
COMPARED = 1 << 17


@dataclass(frozen=True)
class MaxTokens:
    """How many tokens fit, 0 where not even the least do; the bytes that they take on the device and on the host."""

    tokens: int
    device_bytes: int = 0
    host_bytes: int = 0


def find_max_tokens(config: Config, say: Callable[[str], None] = lambda _: None, most: int = 1 << 24) -> MaxTokens:
    """The longest causal sequence on one device, to six in a hundred.

    Lengths grow by four up to `COMPARED`; then memory as a line of length says where to look. On one device: a rank of
    several that runs out would leave the others waiting.
    """
    if not isinstance(config.model, GPTConfig):
        raise ValueError("--find-max-tokens: of a GPT; the patches of an image are data.height and data.width")
    if init().world_size > 1:
        raise ValueError("--find-max-tokens: on one device only; give layers and heads of a rank's part by --set")
    device = current()
    most = min(most, MOST_ON_CPU) if device.type == CPU else most
    rooms = _room(device), _host_room()
    fits: dict[int, MaxTokens] = {}
    trial: _Trial | None = None
    fails, tokens, near = 0, STEP, False
    while tokens:
        begin = time.perf_counter()
        trial = trial or attempt(partial(_Trial, config, device, near))
        found = None if trial is None else attempt(partial(trial.step, tokens))
        seconds = time.perf_counter() - begin
        if found is None:
            fails, trial = tokens, None
            attempt(_no_memory)  # its model is gone before the next one comes
            release()
            say(f"{tokens:>12,} tokens: out of memory, after {seconds:.0f} s")
        else:
            fits[tokens], near = found, trial is not None and trial.all_near
            on_host = f", {found.host_bytes / 2**30:.1f} GiB on the host" if found.host_bytes else ""
            say(f"{tokens:>12,} tokens: {found.device_bytes / 2**30:.1f} GiB{on_host}, {seconds:.0f} s")
        tokens = _next({n: (own.device_bytes, own.host_bytes) for n, own in fits.items()}, fails, most, rooms)
    return fits[max(fits)] if fits else MaxTokens(0)


def _next(fits: Mapping[int, tuple[int, int]], fails: int, most: int, rooms: tuple[int | None, int | None]) -> int:
    """The next length to try, from the bytes of those that fit and the least that failed; 0 when they are near.

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
    top, *below = sorted(fits, reverse=True)
    least = max(STEP, top // NEAR // STEP * STEP)
    if top >= most or (fails and fails - top <= least):
        return 0
    guesses = []
    for n, (room, filled) in enumerate(zip(rooms, FILLED, strict=True)):
        if room is not None and below and fits[top][n] > fits[below[0]][n]:
            by_token = (fits[top][n] - fits[below[0]][n]) / (top - below[0])
            guesses.append(int(top + (filled * room - fits[top][n]) / by_token))
    guess = min(guesses, default=4 * top) // STEP * STEP
    if not fails:
        farthest = most if guesses and top >= COMPARED else min(most, 4 * top)
        return min(farthest, max(guess, top + least))
    if not top < guess < fails:
        guess = max((top + fails) // 2, fails - fails // NEAR * 2) // STEP * STEP
    return max(guess, top + STEP)


def _no_memory() -> None:
    raise torch.OutOfMemoryError


def _room(device: torch.device) -> int | None:
    """Bytes of a device."""
    return None if device.type == CPU else int(torch.get_device_module(device).mem_get_info(device)[1])


def _host_room() -> int | None:
    """Bytes of the host that offloaded activations may take."""
    free = free_bytes()
    return None if free is None else free - HOST_RESERVE_BYTES


class _Trial:
    """A model that takes steps of any length; the optimizer has its state."""

    def __init__(self, config: Config, device: torch.device, all_near: bool) -> None:
        mesh = config.mesh
        self.mesh = init_mesh(mesh.dp, mesh.fsdp, mesh.cp, mesh.tp, mesh.order)
        self.device = device
        self.model, self.learner = build(config, self.mesh, device)
        inner: Any = getattr(self.model, "module", self.model)
        for n, block in enumerate(inner.layers):
            inside = 0 < n < len(inner.layers) - 1
            block.self_attn.attend.register_forward_pre_hook(partial(self._near, inside), with_kwargs=True)
        self.all_near = all_near
        self._step(STEP)

    def step(self, tokens: int) -> MaxTokens:
        """What a step takes."""
        if tokens > COMPARED:
            return self._step(tokens)
        self.all_near = True
        near = self._step(tokens)
        self.all_near = False
        found = self._step(tokens)
        self.all_near = found.device_bytes <= near.device_bytes
        return found

    def _step(self, tokens: int) -> MaxTokens:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=self.device)
        if self.device.type != CPU:
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
        usage = offload_store(self.device).usage
        usage.peak_bytes = usage.live_bytes
        accumulate(self.model, [shard_batch(ids, self.mesh)], self.mesh)
        clip_grad_norm(self.model, 1.0)
        self.learner.step()
        self.learner.zero_grad()
        return MaxTokens(tokens, peak_memory(self.device), usage.peak_bytes)

    def _near(self, inside: bool, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if inside or self.all_near:
            kwargs = kwargs | {"mask": Mask.causal() & Mask.window(WINDOW, 0)}
        return args, kwargs
