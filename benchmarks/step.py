"""One training step of a GPT on one device: its time and memory, beside the sum of its kernels' own times.

The kernels are timed apart, in the step's shapes and as often as the step runs them. What the step takes beyond their
sum is the cost of putting them together: gathers and casts of weights, launches, allocations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshflash.api import flash_attention
from meshflash.bench.timing import interleaved, synchronize, watched
from meshflash.core.mask import Mask
from meshflash.kernels import registry
from meshflash.models.gpt import GPT, PRESETS, GPTConfig
from meshflash.models.layers import apply_rotary, rotary_cos_sin, rotary_frequencies
from meshflash.parallel import accumulate, clip_grad_norm, cross_entropy_sum, init_mesh, parallelize, shard_batch
from meshflash.runtime.devices import take_device

Call = Callable[[], Any]

#: Tokens of the first step, which compiles kernels and makes the optimizer's state.
FIRST = 8192
#: Seconds of a step that is done once for its memory and its time.
LONG = 10.0


@dataclass(frozen=True)
class Setup:
    """Which model and how long a sequence, how weights lie, and what is computed again."""

    preset: str = "tiny"
    tokens: int = 1024
    layers: int | None = None
    dim: int | None = None
    mode: str | None = "full"
    activation_checkpointing: str | None = None
    offload: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    kernel: str = "auto"
    offload_activations: bool = False
    tiles: int = 1

    @property
    def config(self) -> GPTConfig:
        """The preset's sizes, with those that were asked."""
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r}: expected one of {', '.join(PRESETS)}")
        config = PRESETS[self.preset]()
        if self.dim is not None:
            config = replace(config, dim=self.dim, hidden=4 * self.dim, head_dim=self.dim // config.heads)
        return config if self.layers is None else replace(config, layers=self.layers)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What weights and activations are computed in; the masters are float32."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class Part:
    """A kernel of the step: how often it runs, and milliseconds of one run."""

    name: str
    times: int
    ms: float


@dataclass(frozen=True)
class Step:
    """A step's milliseconds, those of its kernels in sum, the plain model's, what it took, and which attention ran."""

    setup: Setup
    forward_ran: str
    backward_ran: str
    weights: int
    ms: float
    plain_ms: float | None
    kernels_ms: float | None
    ratio: float | None
    tflops: float
    peak_bytes: int
    loss: float
    parts: tuple[Part, ...]


def run(
    setup: Setup,
    rounds: int,
    plain: bool = False,
    parts: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Step:
    """A step of the model as `parallelize` lays it out on this device alone; `plain` times the bare model in turns.

    Without `parts` its kernels are not timed, and a step that takes long is done once.
    """
    device = take_device(setup.device, 0)
    mesh, config, half = init_mesh(device=setup.device), setup.config, setup.compute_dtype != torch.float32
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (1, setup.tokens), generator=generator).to(device)
    say("building the model")

    def trainer(mode: str | None, offload: bool) -> Callable[..., Tensor]:
        with torch.device("meta"):
            model: Any = GPT(config)
        for block in model.layers:
            block.self_attn.attend.options["kernel"] = setup.kernel
        dtype = setup.compute_dtype if half else None
        model = parallelize(
            model,
            mesh,
            mode=mode,
            activation_checkpointing=setup.activation_checkpointing,
            compute_dtype=dtype,
            offload=offload,
            offload_activations=setup.offload_activations,
            tiles=setup.tiles,
        )
        model.to_empty(device="cpu" if offload else device)
        model.init_weights()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = shard_batch(tokens, mesh)

        def step(batch: Mapping[str, Any] = batch) -> Tensor:
            told = accumulate(model, [batch], mesh)
            clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return told.loss

        return step

    step = trainer(setup.mode, setup.offload)
    say("first step")
    step(shard_batch(tokens[:, :FIRST], mesh))
    synchronize(device)
    say("watching memory")
    begin = time.perf_counter()
    with registry.record_kernels() as ran:
        seen = watched(step, device)
    seconds = time.perf_counter() - begin
    peak, loss = seen.peak_bytes + _held(device), float(seen.result)
    del seen
    say("timing steps")
    steps = {"step": step}
    if plain:
        steps["plain"] = trainer(None, False)
        steps["plain"]()
    once = not parts and not plain and seconds > LONG
    ms = {"step": 1e3 * seconds} if once else interleaved(steps, device, rounds)
    found: list[Part] = []
    if parts:
        found = _parts(setup, config, device, rounds, say)
        found.append(Part("clip and AdamW", 1, _update(config, device, rounds)))
    total = sum(part.times * part.ms for part in found) if parts else None
    return Step(
        setup, ran.names("forward"), ran.names("backward"),
        config.num_parameters, ms["step"], ms.get("plain"), total, None if total is None else total / ms["step"],
        config.flops(setup.tokens) / ms["step"] / 1e9, peak, loss, tuple(found),
    )  # fmt: skip


def _meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _held(device: torch.device) -> int:
    """Bytes that are held all the time: weights and the optimizer's state."""
    module: Any = torch.get_device_module(device) if device.type != "cpu" else None
    return int(module.memory_allocated(device)) if module is not None else 0


def _parts(
    setup: Setup, config: GPTConfig, device: torch.device, rounds: int, say: Callable[[str], None]
) -> list[Part]:
    """Every kernel of forward and backward, timed alone."""
    assert config.head_dim is not None
    t, e, d, dtype = setup.tokens, config.dim, config.head_dim, setup.compute_dtype
    q, k, h = config.heads * d, config.kv_heads * d, config.hidden
    forwards = config.layers * (1 if setup.activation_checkpointing is None else 2)
    parts: list[Part] = []

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).mul_(0.1).requires_grad_()

    def timed(name: str, function: Callable[..., Tensor], inputs: list[Tensor], ahead: int, back: int) -> None:
        say(f"timing {name}")
        out = function(*inputs)
        calls: dict[str, Call] = {}
        if ahead:
            calls["forward"] = partial(function, *inputs)
        if back:
            grad = torch.randn_like(out)
            calls["backward"] = lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
        for call in calls.values():
            call()
        found = interleaved(calls, device, rounds)
        times = {"forward": ahead, "backward": back}
        parts.extend(Part(f"{name}, {way}", times[way], ms) for way, ms in found.items())

    # of tokens, from, to: how often forward, and how often backward
    linears: dict[tuple[int, int, int], tuple[int, int]] = {}
    tile, hidden, down = _in_tiles(setup, forwards)
    for shape, ahead, back in (
        *(((t, *shape), forwards, config.layers) for shape in ((e, q), (e, k), (e, k), (q, e))),
        *(((tile, e, h), hidden, config.layers * setup.tiles) for _ in range(2)),
        ((tile, h, e), down, config.layers * setup.tiles),
    ):
        before = linears.get(shape, (0, 0))
        linears[shape] = before[0] + ahead, before[1] + back
    for (tokens, inside, outside), (ahead, back) in linears.items():
        some = "" if tokens == t else f" of {tokens} tokens"
        inputs = [new(1, tokens, inside), new(outside, inside)]
        timed(f"linear {inside} to {outside}{some}", functional.linear, inputs, ahead, back)
    attend = partial(flash_attention, mask=Mask.causal(), kernel=setup.kernel)
    again = forwards if setup.activation_checkpointing == "full" else config.layers
    heads = [new(1, t, n, d) for n in (config.heads, config.kv_heads, config.kv_heads)]
    timed("attention", attend, heads, again, config.layers)
    norm = partial(_norm, eps=config.norm_eps)
    timed("RMSNorm", norm, [new(1, t, e), new(e)], 2 * forwards + 1, 2 * config.layers + 1)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = rotary_cos_sin(torch.arange(t, device=device), rotary_frequencies(d, config.theta, config.scaling), wide)
    turn = partial(_turned, cos=cos, sin=sin)
    timed("rotary, queries", turn, [new(1, t, config.heads, d)], forwards, config.layers)
    timed("rotary, keys", turn, [new(1, t, config.kv_heads, d)], forwards, config.layers)
    timed("SwiGLU", _gated, [new(1, tile, h), new(1, tile, h)], hidden, config.layers * setup.tiles)
    timed("residual", torch.add, [new(1, t, e), new(1, t, e)], forwards + config.layers, 0)
    labels = torch.randint(config.vocabulary, (1, t), device=device)
    loss = partial(cross_entropy_sum, labels=labels)
    timed("loss and its gradients", loss, [new(1, t, e), new(config.vocabulary, e)], 1, 1)
    timed("embedding", lambda w: functional.embedding(labels, w), [new(config.vocabulary, e)], 1, 1)
    return parts


def _in_tiles(setup: Setup, forwards: int) -> tuple[int, int, int]:
    """Tokens of an MLP's tile, and how often all tiles' hidden units, and what follows from them, are computed.

    A block that computes itself again ends when all that was saved is there: before its last product, and in tiles,
    whose backward computes hidden units again by itself, before its MLP.
    """
    layers = setup.config.layers
    if setup.tiles == 1:
        return setup.tokens, forwards, layers
    return -(-setup.tokens // setup.tiles), 2 * layers * setup.tiles, layers * setup.tiles


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary(x, cos, sin).to(x.dtype)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _update(config: GPTConfig, device: torch.device, rounds: int) -> float:
    """Milliseconds of clipping and of AdamW on as many float32 weights."""
    model = nn.ParameterList(torch.zeros(p.shape, device=device) for p in _meta(config).parameters())
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update() -> None:
        clip_grad_norm(model, 1.0)
        optimizer.step()

    update()
    return interleaved({"update": update}, device, rounds)["update"]
